//! Sizes that runs bring, and which of them a part has code for.
//!
//! Code for the sizes of the first run is for these alone. Where a run brings sizes that differ from known
//! ones in a single named dimension, the code that is made is for every size of it up to some largest one,
//! and runs say theirs. What cannot be made so is made for each size.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tilewright_runtime::OpenDimension;

/// Number of sizes, or ranges of sizes, for which a part stays compiled.
const MOST_CODES: usize = 8;
/// Sizes that a range ends at are multiples of this, so that vectors are whole.
const WHOLE_VECTORS: usize = 16;
/// Number of ranges of a dimension without code after which no other one is tried.
const MOST_REFUSALS: usize = 3;

/// Shape of an input.
pub type InputShape = Vec<usize>;

/// Shapes of a part's inputs that code is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Shapes of the inputs; those at the largest size of the open dimension.
    pub shapes: Vec<InputShape>,
    /// Dimension of which each run says a size.
    pub open: Option<OpenDimension>,
}

impl std::fmt::Display for Sizes {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let shapes: Vec<String> = self.shapes.iter().map(|shape| format!("{shape:?}")).collect();
        write!(f, "{}", shapes.join(", "))?;
        if let Some(OpenDimension { name, least, most, .. }) = &self.open {
            write!(f, " and {name}={least}..{most}")?;
        }
        Ok(())
    }
}

/// Names that a model gives to dimensions of a part's inputs.
#[derive(Debug)]
pub struct DimensionNames(pub Vec<Vec<Option<String>>>);

impl DimensionNames {
    /// Size of a dimension in shapes; `None` where there is none, or several.
    fn size_of(&self, shapes: &[InputShape], dim: &str) -> Option<usize> {
        let mut sizes = self.places(dim).map(|(input, axis)| shapes.get(input)?.get(axis).copied());
        let first = sizes.next()??;
        sizes.all(|size| size == Some(first)).then_some(first)
    }

    /// Inputs and axes that have the name.
    fn places(&self, dim: &str) -> impl Iterator<Item = (usize, usize)> {
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

    /// The named dimension in which alone shapes differ, with the larger of its two sizes.
    fn difference(&self, known: &[InputShape], shapes: &[InputShape]) -> Option<(&str, usize)> {
        let pairs = known.iter().zip(shapes).enumerate();
        let mut axes = pairs.flat_map(|(input, (a, b))| (0..a.len().max(b.len())).map(move |axis| (input, axis)));
        let differs = |&(input, axis): &(usize, usize)| known[input].get(axis) != shapes[input].get(axis);
        let (input, axis) = axes.find(differs)?;
        let dim = self.0.get(input)?.get(axis)?.as_deref()?;
        let sizes = [self.size_of(known, dim)?, self.size_of(shapes, dim)?];
        let is_all = sizes.iter().all(|&size| size > 0) && self.with(known, dim, sizes[1]) == shapes;
        is_all.then_some((dim, sizes[0].max(sizes[1])))
    }

    /// The size that runs of code for these sizes say, which is that of no dimension where none is open;
    /// `None` where shapes are none of its.
    fn fit(&self, sizes: &Sizes, shapes: &[InputShape]) -> Option<Option<i64>> {
        let Some(dim) = &sizes.open else { return (sizes.shapes == shapes).then_some(None) };
        let size = self.size_of(shapes, &dim.name)?;
        let is_known = dim.has(size as i64) && self.with(shapes, &dim.name, dim.most as usize) == sizes.shapes;
        is_known.then_some(Some(size as i64))
    }
}

/// Code that one run makes, and that others for the same sizes wait for.
pub type Pending<T> = Arc<OnceLock<Result<T, String>>>;

/// Code of a part for the sizes that were met last.
pub struct Codes<T> {
    names: DimensionNames,
    state: Mutex<CodesState<T>>,
}

struct CodesState<T> {
    /// Code that was in use last is at the end.
    codes: Vec<(Sizes, Pending<T>)>,
    /// Largest sizes of the ranges of a dimension for which no code could be made.
    refused: HashMap<String, Vec<usize>>,
}

/// Code for a run.
pub struct CodeForRun<T> {
    /// Code, once it is made.
    pub pending: Pending<T>,
    /// Sizes that it is for.
    pub sizes: Sizes,
    /// Size of the open dimension in the run.
    pub size: Option<i64>,
}

impl<T> Codes<T> {
    /// No code yet, for inputs with these names of dimensions.
    pub fn new(names: DimensionNames) -> Codes<T> {
        Codes { names, state: Mutex::new(CodesState { codes: Vec::new(), refused: HashMap::new() }) }
    }

    /// Names of the inputs' dimensions.
    pub fn names(&self) -> &DimensionNames {
        &self.names
    }

    fn state(&self) -> MutexGuard<'_, CodesState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds code for shapes, or a place for it, with the sizes that were in use least lately where these
    /// give way.
    pub fn find(&self, shapes: &[InputShape]) -> (CodeForRun<T>, Option<Sizes>) {
        let mut state = self.state();
        let fit = |sizes: &Sizes| self.names.fit(sizes, shapes);
        // What is for these shapes alone is the faster one.
        let exact = state.codes.iter().position(|(sizes, _)| sizes.open.is_none() && sizes.shapes == shapes);
        if let Some(at) = exact.or_else(|| state.codes.iter().rposition(|(sizes, _)| fit(sizes).is_some())) {
            let (sizes, pending) = state.codes.remove(at);
            state.codes.push((sizes.clone(), Arc::clone(&pending)));
            return (CodeForRun { pending, size: fit(&sizes).flatten(), sizes }, None);
        }
        let sizes = self.wanted(&state, shapes);
        let size = fit(&sizes).flatten();
        let dropped = (state.codes.len() >= MOST_CODES).then(|| state.codes.remove(0).0);
        let pending = Pending::default();
        state.codes.push((sizes.clone(), Arc::clone(&pending)));
        (CodeForRun { pending, sizes, size }, dropped)
    }

    /// Sizes that code for shapes is to be for.
    fn wanted(&self, state: &CodesState<T>, shapes: &[InputShape]) -> Sizes {
        let differing = state.codes.iter().rev().find_map(|(known, _)| {
            let (dim, larger) = self.names.difference(&known.shapes, shapes)?;
            let is_its = known.open.as_ref().is_none_or(|open| open.name == dim);
            is_its.then_some((dim, larger))
        });
        let range = differing.and_then(|(dim, largest)| {
            let refused = state.refused.get(dim).map_or(&[][..], Vec::as_slice);
            if refused.len() >= MOST_REFUSALS {
                return None;
            }
            let powers = largest.next_power_of_two().max(WHOLE_VECTORS);
            let ends = [powers, largest.next_multiple_of(WHOLE_VECTORS)];
            let most = ends.into_iter().find(|most| !refused.contains(most))?;
            Some(OpenDimension { name: dim.to_owned(), least: 1, most: most as i64, step: 1 })
        });
        let shapes = match &range {
            Some(dim) => self.names.with(shapes, &dim.name, dim.most as usize),
            None => shapes.to_vec(),
        };
        Sizes { shapes, open: range }
    }

    /// Forgets code that could not be made; whether it was for a range, so that code for the shapes of the
    /// run alone may be made yet.
    pub fn refuse(&self, found: &CodeForRun<T>) -> bool {
        let mut state = self.state();
        let n_before = state.codes.len();
        state.codes.retain(|(_, pending)| !Arc::ptr_eq(pending, &found.pending));
        let Some(dim) = &found.sizes.open else { return false };
        // Of the runs that waited for it the first one says so.
        if state.codes.len() < n_before {
            state.refused.entry(dim.name.clone()).or_default().push(dim.most as usize);
        }
        true
    }

    /// Forgets ranges that are within one for which there is code now.
    pub fn supersede(&self, found: &CodeForRun<T>) {
        let Some(dim) = &found.sizes.open else { return };
        let is_within = |sizes: &Sizes| {
            let is_its = sizes.open.as_ref().is_some_and(|other| other.name == dim.name && other.most < dim.most);
            is_its && self.names.with(&sizes.shapes, &dim.name, dim.most as usize) == found.sizes.shapes
        };
        self.state().codes.retain(|(sizes, _)| !is_within(sizes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Code for the inputs of a model; ranges have some if they end where `ranges` says.
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
        /// Runs shapes, which makes code where there is none, and compares what code ran, and its open size.
        #[track_caller]
        fn check(&self, shapes: &[&[usize]], expected: (&str, Option<i64>)) {
            let shapes: Vec<InputShape> = shapes.iter().map(|shape| shape.to_vec()).collect();
            loop {
                let (found, _) = self.codes.find(&shapes);
                let has_code = found.sizes.open.as_ref().is_none_or(|dim| (self.ranges)(dim.most));
                let make = || if has_code { Ok(found.sizes.to_string()) } else { Err("no range".to_owned()) };
                if let Ok(code) = found.pending.get_or_init(make) {
                    self.codes.supersede(&found);
                    assert_eq!((code.as_str(), found.size), expected);
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
        met.check(&[&[1, 7, 64], &[1, 7]], ("[1, 7, 64], [1, 7]", None));
        met.check(&[&[1, 9, 64], &[1, 9]], ("[1, 16, 64], [1, 16] and tokens=1..16", Some(9)));
        met.check(&[&[1, 3, 64], &[1, 3]], ("[1, 16, 64], [1, 16] and tokens=1..16", Some(3)));
        // The first one keeps its own.
        met.check(&[&[1, 7, 64], &[1, 7]], ("[1, 7, 64], [1, 7]", None));
        // A longer range takes the place of the shorter.
        met.check(&[&[1, 33, 64], &[1, 33]], ("[1, 64, 64], [1, 64] and tokens=1..64", Some(33)));
        assert_eq!(met.n_codes(), 2);
        // Two dimensions that differ are sizes of their own, and begin ranges of their own.
        met.check(&[&[2, 8, 64], &[2, 8]], ("[2, 8, 64], [2, 8]", None));
        met.check(&[&[2, 9, 64], &[2, 9]], ("[2, 16, 64], [2, 16] and tokens=1..16", Some(9)));
        assert_eq!(met.n_codes(), 4);
    }

    #[test]
    fn what_no_name_says_is_made_for_each_size() {
        let met = met(&[&["batch", ""], &["", "tokens"]], |_| true);
        met.check(&[&[1, 7], &[1, 7]], ("[1, 7], [1, 7]", None));
        met.check(&[&[1, 8], &[1, 7]], ("[1, 8], [1, 7]", None));
        met.check(&[&[1, 8], &[1, 9]], ("[1, 8], [1, 16] and tokens=1..16", Some(9)));
        // Inputs that disagree about a name, and sizes of zero.
        met.check(&[&[0, 8], &[1, 9]], ("[0, 8], [1, 9]", None));
    }

    #[test]
    fn ranges_without_code_are_tried_a_few_times() {
        // As where positions end at 40.
        let positions = met(&[&["tokens"]], |most| most <= 40);
        positions.check(&[&[30]], ("[30]", None));
        positions.check(&[&[31]], ("[32] and tokens=1..32", Some(31)));
        positions.check(&[&[39]], ("[39]", None));
        positions.check(&[&[38]], ("[38]", None));
        assert_eq!(positions.codes.state().refused["tokens"], [64, 48]);
        let none = met(&[&["tokens"]], |_| false);
        none.check(&[&[30]], ("[30]", None));
        for size in (100..400).step_by(20) {
            none.check(&[&[size]], (&format!("[{size}]"), None));
        }
        assert_eq!(none.codes.state().refused["tokens"].len(), MOST_REFUSALS);
        assert_eq!(none.n_codes(), MOST_CODES);
    }
}
