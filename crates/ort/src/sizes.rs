//! Sizes of runs, and the code that a part has for them.
//!
//! The code for the sizes of the first run supports only these. If the sizes of a run differ from known ones
//! only in a single named dimension, the new code supports every size of it up to some maximum, and each run
//! passes its size. A dimension after a batch, such as the tokens of several texts, is open together with the
//! batch, whose items run one after the other. If that is not possible, code is made for each size.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tilewright_runtime::OpenDimension;

/// Number of sizes, or ranges of sizes, for which code is kept, unless dropped sizes recur.
const FEWEST_KEPT: usize = 8;
/// Maximum number of sizes for which code is kept if dropped sizes recur, and of dropped sizes that are
/// remembered.
const MOST_KEPT: usize = 64;
/// Multiple to which the end of a range is rounded up, so that vectors are whole.
const WHOLE_VECTORS: usize = 16;
/// Number of failed ranges of a dimension after which no further one is tried.
const MOST_REFUSALS: usize = 3;
/// Minimum end of a range after a batch: items are processed together as long as they have no more rows in
/// total than the largest item.
const LEAST_ROWS: usize = 128;
/// Minimum end of a range of batch sizes; a large end costs nothing.
const LEAST_ITEMS: usize = 256;

/// Shape of an input.
pub type InputShape = Vec<usize>;

/// Shapes of a part's inputs that code supports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Shapes of the inputs; those at the largest sizes of the open dimensions.
    pub shapes: Vec<InputShape>,
    /// Open dimensions, whose sizes each run passes: none, one, or one after a batch and the batch.
    pub open: Vec<OpenDimension>,
}

impl std::fmt::Display for Sizes {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let shapes: Vec<String> = self.shapes.iter().map(|shape| format!("{shape:?}")).collect();
        write!(f, "{}", shapes.join(", "))?;
        self.open
            .iter()
            .try_for_each(|OpenDimension { name, least, most, .. }| write!(f, " and {name}={least}..{most}"))
    }
}

/// Names that a model gives to dimensions of a part's inputs.
#[derive(Debug)]
pub struct DimensionNames(pub Vec<Vec<Option<String>>>);

impl DimensionNames {
    /// Size of a dimension in shapes; `None` if the dimension does not occur, or with several sizes.
    pub fn size_of(&self, shapes: &[InputShape], dim: &str) -> Option<usize> {
        let mut sizes = self.places(dim).map(|(input, axis)| shapes.get(input)?.get(axis).copied());
        let first = sizes.next()??;
        sizes.all(|size| size == Some(first)).then_some(first)
    }

    /// Inputs and axes that have the name.
    pub fn places(&self, dim: &str) -> impl Iterator<Item = (usize, usize)> {
        let all = self.0.iter().enumerate();
        let all = all.flat_map(|(input, axes)| axes.iter().enumerate().map(move |(axis, name)| (input, axis, name)));
        all.filter(move |(_, _, name)| name.as_deref() == Some(dim)).map(|(input, axis, _)| (input, axis))
    }

    /// Shapes with another size of a dimension.
    pub fn with(&self, shapes: &[InputShape], dim: &str, size: usize) -> Vec<InputShape> {
        let mut shapes = shapes.to_vec();
        self.places(dim).for_each(|(input, axis)| shapes[input][axis] = size);
        shapes
    }

    /// Shapes with other sizes of dimensions.
    fn with_all(&self, shapes: &[InputShape], dims: &[(&str, usize)]) -> Vec<InputShape> {
        dims.iter().fold(shapes.to_vec(), |shapes, (dim, size)| self.with(&shapes, dim, *size))
    }

    /// Named dimensions in which shapes differ, each with the larger of its two sizes; `None` if they differ
    /// in anything else.
    fn differences(&self, known: &[InputShape], shapes: &[InputShape]) -> Option<Vec<(&str, usize)>> {
        let (mut dims, mut same) = (Vec::new(), known.to_vec());
        while let Some((input, axis)) = first_difference(&same, shapes) {
            let dim = self.0.get(input)?.get(axis)?.as_deref()?;
            let sizes = [self.size_of(known, dim)?, self.size_of(shapes, dim)?];
            let is_new = dims.iter().all(|(other, _)| *other != dim) && sizes.iter().all(|&size| size > 0);
            is_new.then(|| dims.push((dim, sizes[0].max(sizes[1]))))?;
            same = self.with(&same, dim, sizes[1]);
        }
        Some(dims)
    }

    /// Batch dimension of a dimension: the one that precedes it wherever it occurs, if it is unique and
    /// occurs only as the first dimension of inputs.
    fn batch_of(&self, dim: &str) -> Option<&str> {
        let mut ahead = self.places(dim).map(|(input, axis)| match axis {
            1 => self.0[input][0].as_deref(),
            _ => None,
        });
        let batch = ahead.next()??;
        let is_it = ahead.all(|other| other == Some(batch)) && self.places(batch).all(|(_, axis)| axis == 0);
        is_it.then_some(batch)
    }

    /// Sizes of the open dimensions for a run of these shapes; `None` if the code does not support the
    /// shapes.
    fn fit(&self, sizes: &Sizes, shapes: &[InputShape]) -> Option<Vec<i64>> {
        let size = |dim: &OpenDimension| Some(self.size_of(shapes, &dim.name)? as i64).filter(|&size| dim.has(size));
        let of_run = sizes.open.iter().map(size).collect::<Option<Vec<i64>>>()?;
        (self.with_all(shapes, &most_of(&sizes.open)) == sizes.shapes).then_some(of_run)
    }
}

/// Dimensions with their largest sizes.
fn most_of(open: &[OpenDimension]) -> Vec<(&str, usize)> {
    open.iter().map(|dim| (dim.name.as_str(), dim.most as usize)).collect()
}

/// First input and axis at which shapes differ.
fn first_difference(known: &[InputShape], shapes: &[InputShape]) -> Option<(usize, usize)> {
    let pairs = known.iter().zip(shapes).enumerate();
    let mut axes = pairs.flat_map(|(input, (a, b))| (0..a.len().max(b.len())).map(move |axis| (input, axis)));
    axes.find(|&(input, axis)| known[input].get(axis) != shapes[input].get(axis))
}

/// Code that one run makes, while others with the same sizes wait.
pub type Pending<T> = Arc<OnceLock<Result<T, String>>>;

/// Code of a part for the most recent sizes.
pub struct Codes<T> {
    names: DimensionNames,
    state: Mutex<CodesState<T>>,
}

struct CodesState<T> {
    /// Code by sizes, the most recently used last.
    codes: Vec<(Sizes, Pending<T>)>,
    /// Sizes whose code was dropped, the most recent last.
    dropped: Vec<Sizes>,
    /// Number of sizes for which code is kept.
    n_kept: usize,
    /// Largest sizes of the ranges of dimensions for which no code could be made.
    refused: HashMap<Vec<String>, Vec<usize>>,
}

/// Code for a run.
pub struct CodeForRun<T> {
    /// Code, once made.
    pub pending: Pending<T>,
    /// Sizes that the code supports.
    pub sizes: Sizes,
    /// Sizes of the open dimensions in the run.
    pub of_run: Vec<i64>,
}

impl<T> Codes<T> {
    /// Makes an empty collection, for inputs with these names of dimensions.
    pub fn new(names: DimensionNames) -> Codes<T> {
        let (codes, dropped, refused) = (Vec::new(), Vec::new(), HashMap::new());
        Codes { names, state: Mutex::new(CodesState { codes, dropped, n_kept: FEWEST_KEPT, refused }) }
    }

    fn state(&self) -> MutexGuard<'_, CodesState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds code for shapes, or adds a pending entry for it; also returns the least recently used sizes if
    /// they are dropped.
    pub fn find(&self, shapes: &[InputShape]) -> (CodeForRun<T>, Option<Sizes>) {
        let mut state = self.state();
        let fit = |sizes: &Sizes| self.names.fit(sizes, shapes);
        // Code for exactly these shapes is faster.
        let exact = state.codes.iter().position(|(sizes, _)| sizes.open.is_empty() && sizes.shapes == shapes);
        if let Some(at) = exact.or_else(|| state.codes.iter().rposition(|(sizes, _)| fit(sizes).is_some())) {
            let (sizes, pending) = state.codes.remove(at);
            state.codes.push((sizes.clone(), Arc::clone(&pending)));
            return (CodeForRun { pending, of_run: fit(&sizes).unwrap_or_default(), sizes }, None);
        }
        let sizes = self.wanted(&state, shapes);
        let of_run = fit(&sizes).unwrap_or_default();
        // If a caller cycled through more sizes than are kept, all of them would be compiled again and again.
        if let Some(at) = state.dropped.iter().position(|dropped| *dropped == sizes) {
            state.dropped.remove(at);
            state.n_kept = (state.n_kept + 1).min(MOST_KEPT);
        }
        let dropped = (state.codes.len() >= state.n_kept).then(|| state.codes.remove(0).0);
        state.dropped.extend(dropped.clone());
        if state.dropped.len() > MOST_KEPT {
            state.dropped.remove(0);
        }
        let pending = Pending::default();
        state.codes.push((sizes.clone(), Arc::clone(&pending)));
        (CodeForRun { pending, sizes, of_run }, dropped)
    }

    /// Chooses the sizes that new code for shapes should support.
    fn wanted(&self, state: &CodesState<T>, shapes: &[InputShape]) -> Sizes {
        let range = state.codes.iter().rev().find_map(|(known, _)| self.range(known, shapes));
        let open = range.and_then(|dims| {
            let refused = state.refused.get(&names_of(dims.iter().map(|(name, _)| *name)));
            let refused = refused.map_or(&[][..], Vec::as_slice);
            if refused.len() >= MOST_REFUSALS {
                return None;
            }
            let power = |size: usize| size.next_power_of_two().max(WHOLE_VECTORS);
            let &(_, largest) = dims.first()?;
            let least = if dims.len() > 1 { LEAST_ROWS } else { 1 };
            let ends = [power(largest).max(least), power(largest), largest.next_multiple_of(WHOLE_VECTORS)];
            let most = ends.into_iter().find(|most| !refused.contains(most))?;
            let ends = std::iter::once(most).chain(dims[1..].iter().map(|&(_, size)| power(size).max(LEAST_ITEMS)));
            let dim = |((name, _), most): (&(&str, usize), usize)| OpenDimension {
                name: (*name).to_owned(),
                least: 1,
                most: most as i64,
                step: 1,
            };
            Some(dims.iter().zip(ends).map(dim).collect::<Vec<_>>())
        });
        let open = open.unwrap_or_default();
        Sizes { shapes: self.names.with_all(shapes, &most_of(&open)), open }
    }

    /// Dimensions to open so that code supports both these shapes and known ones, with the largest sizes
    /// seen; the batch comes last.
    fn range<'a>(&'a self, known: &'a Sizes, shapes: &[InputShape]) -> Option<Vec<(&'a str, usize)>> {
        let mut dims = self.names.differences(&known.shapes, shapes)?;
        for (name, most) in most_of(&known.open) {
            if dims.iter().all(|(dim, _)| *dim != name) {
                dims.push((name, most));
            }
        }
        if let &[(dim, _)] = &dims[..]
            && let Some(batch) = self.names.batch_of(dim)
            && let Some(n) = self.names.size_of(shapes, batch).filter(|&n| n > 1)
        {
            dims.push((batch, n));
        }
        if let &[(first, _), (second, _)] = &dims[..]
            && self.names.batch_of(first) != Some(second)
        {
            dims.reverse();
            (self.names.batch_of(second) == Some(first)).then_some(())?;
        }
        (1..=2).contains(&dims.len()).then_some(dims)
    }

    /// Drops code that could not be made; returns whether it was for a range, so that code for exactly the
    /// run's shapes can be tried.
    pub fn refuse(&self, found: &CodeForRun<T>) -> bool {
        let mut state = self.state();
        let n_before = state.codes.len();
        state.codes.retain(|(_, pending)| !Arc::ptr_eq(pending, &found.pending));
        let Some(dim) = found.sizes.open.first() else { return false };
        // Counted only by the first of the runs that waited for the code.
        if state.codes.len() < n_before {
            let names = names_of(found.sizes.open.iter().map(|dim| dim.name.as_str()));
            state.refused.entry(names).or_default().push(dim.most as usize);
        }
        true
    }

    /// Drops ranges that are within a range for which there is code now.
    pub fn supersede(&self, found: &CodeForRun<T>) {
        let open = &found.sizes.open;
        let is_within = |sizes: &Sizes| {
            let is_its = |dim: &OpenDimension| open.iter().any(|own| own.name == dim.name && own.most >= dim.most);
            let is_other = *sizes != found.sizes && !sizes.open.is_empty();
            let is_part = is_other && sizes.open.iter().all(is_its);
            is_part && self.names.with_all(&sizes.shapes, &most_of(open)) == found.sizes.shapes
        };
        self.state().codes.retain(|(sizes, _)| !is_within(sizes));
    }
}

fn names_of<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Code for the inputs of a model; a range has code if `ranges` accepts its end.
    struct Met {
        codes: Codes<String>,
        ranges: fn(i64) -> bool,
    }

    fn met(names: &[&[&str]], ranges: fn(i64) -> bool) -> Met {
        let name = |name: &&str| (!name.is_empty()).then(|| (*name).to_owned());
        let names = DimensionNames(names.iter().map(|axes| axes.iter().map(name).collect()).collect());
        Met { codes: Codes::new(names), ranges }
    }

    impl Met {
        /// Simulates a run of shapes, which makes code if there is none, and compares the code used and its
        /// open sizes with the expected ones.
        #[track_caller]
        fn check(&self, shapes: &[&[usize]], expected: (&str, &[i64])) {
            let shapes: Vec<InputShape> = shapes.iter().map(|shape| shape.to_vec()).collect();
            loop {
                let (found, _) = self.codes.find(&shapes);
                let has_code = found.sizes.open.first().is_none_or(|dim| (self.ranges)(dim.most));
                let make = || if has_code { Ok(found.sizes.to_string()) } else { Err("no range".to_owned()) };
                if let Ok(code) = found.pending.get_or_init(make) {
                    self.codes.supersede(&found);
                    assert_eq!((code.as_str(), &found.of_run[..]), expected);
                    return;
                }
                assert!(self.codes.refuse(&found), "{}", found.sizes);
            }
        }

        fn n_codes(&self) -> usize {
            self.codes.state().codes.len()
        }
    }

    #[test]
    fn a_second_size_makes_a_range() {
        let met = met(&[&["batch", "tokens", ""], &["batch", "tokens"]], |_| true);
        met.check(&[&[1, 7, 64], &[1, 7]], ("[1, 7, 64], [1, 7]", &[]));
        met.check(&[&[1, 9, 64], &[1, 9]], ("[1, 16, 64], [1, 16] and tokens=1..16", &[9]));
        met.check(&[&[1, 3, 64], &[1, 3]], ("[1, 16, 64], [1, 16] and tokens=1..16", &[3]));
        // The first sizes keep their own code.
        met.check(&[&[1, 7, 64], &[1, 7]], ("[1, 7, 64], [1, 7]", &[]));
        // A longer range replaces the shorter one.
        met.check(&[&[1, 33, 64], &[1, 33]], ("[1, 64, 64], [1, 64] and tokens=1..64", &[33]));
        assert_eq!(met.n_codes(), 2);
        // A batch of several items is open as well.
        met.check(&[&[2, 8, 64], &[2, 8]], ("[256, 128, 64], [256, 128] and tokens=1..128 and batch=1..256", &[8, 2]));
        met.check(&[&[5, 9, 64], &[5, 9]], ("[256, 128, 64], [256, 128] and tokens=1..128 and batch=1..256", &[9, 5]));
        met.check(&[&[1, 9, 64], &[1, 9]], ("[256, 128, 64], [256, 128] and tokens=1..128 and batch=1..256", &[9, 1]));
        assert_eq!(met.n_codes(), 2);
    }

    #[test]
    fn tokens_of_several_texts_are_open_with_the_batch() {
        let names: &[&[&str]] = &[&["batch", "tokens"], &["batch"], &["tokens"]];
        let texts = met(&names[..2], |_| true);
        texts.check(&[&[8, 100], &[8]], ("[8, 100], [8]", &[]));
        texts.check(&[&[8, 103], &[8]], ("[256, 128], [256] and tokens=1..128 and batch=1..256", &[103, 8]));
        texts.check(&[&[4, 60], &[4]], ("[256, 128], [256] and tokens=1..128 and batch=1..256", &[60, 4]));
        texts.check(&[&[20, 60], &[20]], ("[256, 128], [256] and tokens=1..128 and batch=1..256", &[60, 20]));
        assert_eq!(texts.n_codes(), 2);
        // Images have no dimension that follows only the batch; tokens as the first dimension have no batch.
        let images = met(&[&["batch", "", "height", "width"]], |_| true);
        images.check(&[&[2, 3, 64, 64]], ("[2, 3, 64, 64]", &[]));
        images.check(&[&[3, 3, 64, 96]], ("[3, 3, 64, 96]", &[]));
        let both = met(names, |_| true);
        both.check(&[&[2, 7], &[2], &[7]], ("[2, 7], [2], [7]", &[]));
        both.check(&[&[3, 9], &[3], &[9]], ("[3, 9], [3], [9]", &[]));
        // If no range has code, single sizes have.
        let none = met(&names[..1], |_| false);
        for size in 30..50 {
            none.check(&[&[2, size]], (&format!("[2, {size}]"), &[]));
        }
        assert_eq!(none.codes.state().refused[&names_of(["tokens", "batch"].into_iter())].len(), MOST_REFUSALS);
    }

    #[test]
    fn what_no_name_says_is_made_for_each_size() {
        let met = met(&[&["batch", ""], &["", "tokens"]], |_| true);
        met.check(&[&[1, 7], &[1, 7]], ("[1, 7], [1, 7]", &[]));
        met.check(&[&[1, 8], &[1, 7]], ("[1, 8], [1, 7]", &[]));
        met.check(&[&[1, 8], &[1, 9]], ("[1, 8], [1, 16] and tokens=1..16", &[9]));
        // Inputs that disagree about a name, and sizes of zero.
        met.check(&[&[0, 8], &[1, 9]], ("[0, 8], [1, 9]", &[]));
    }

    #[test]
    fn ranges_without_code_are_tried_a_few_times() {
        // As in a model with at most 40 positions.
        let positions = met(&[&["tokens"]], |most| most <= 40);
        positions.check(&[&[30]], ("[30]", &[]));
        positions.check(&[&[31]], ("[32] and tokens=1..32", &[31]));
        positions.check(&[&[39]], ("[39]", &[]));
        positions.check(&[&[38]], ("[38]", &[]));
        assert_eq!(positions.codes.state().refused[&["tokens".to_owned()][..]], [64, 48]);
        let none = met(&[&["tokens"]], |_| false);
        none.check(&[&[30]], ("[30]", &[]));
        for size in (100..400).step_by(20) {
            none.check(&[&[size]], (&format!("[{size}]"), &[]));
        }
        assert_eq!(none.codes.state().refused[&["tokens".to_owned()][..]].len(), MOST_REFUSALS);
        assert_eq!(none.n_codes(), FEWEST_KEPT);
    }

    #[test]
    fn sizes_that_come_back_are_kept() {
        let met = met(&[&[""]], |_| true);
        let round = || (1..13).for_each(|size| met.check(&[&[size]], (&format!("[{size}]"), &[])));
        round();
        assert_eq!(met.n_codes(), FEWEST_KEPT);
        (0..3).for_each(|_| round());
        assert_eq!(met.n_codes(), 12);
        // New sizes do not raise the number of sizes kept.
        (20..100).for_each(|size| met.check(&[&[size]], (&format!("[{size}]"), &[])));
        assert_eq!(met.n_codes(), 12);
    }
}
