//! Language models that process one token per run, or several (chunked prefill), of one sequence or of
//! several: a net for each chunk size and number of sequences.
//!
//! A prompt is processed in chunks, largest first, each with a net and steps of its own. Nets share states,
//! and weights that kernels read in the same layout: products that differ only in their number of rows are
//! one family.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;

use tilewright_ir::gcd;
use tilewright_ir::op::{Contraction, Epilogue, EpilogueFunction, SizeRange, Structure, Workload};
use tilewright_runtime::{OpenDimension, RunSize};

use crate::fuse::{Fused, Items, Kernel, Open, Step};
use crate::net::{State, ValueId};
use crate::open::{MOST_NETS, OpenError};

/// Maximum number of places at which rows of an input or output begin: each is copied by itself.
const MOST_OUTER: i64 = 1024;

/// Dimensions of a language model with a past.
#[derive(Debug, Clone, Copy)]
pub struct DecoderDims<'a> {
    /// Length of the past, of which a run of the fewest rows can have all sizes.
    pub past: &'a OpenDimension,
    /// Length of inputs, such as an encoder's states, if it is open.
    pub second: Option<&'a OpenDimension>,
    /// Number of items (sequences of one length), if it is open.
    pub items: Option<&'a OpenDimension>,
    /// Name of the rows (new tokens) and their numbers, ascending, if there are several.
    pub rows: Option<(&'a str, &'a [i64])>,
}

/// Sizes of the dimensions of [`DecoderDims`] at which a model is lowered; `None` for what is not open.
#[derive(Debug, Clone, Copy)]
pub struct PieceSizes {
    /// Length of the past.
    pub past: i64,
    /// Length of inputs.
    pub second: Option<i64>,
    /// Number of items.
    pub items: Option<i64>,
    /// Number of rows.
    pub rows: Option<i64>,
}

/// Combines the nets for several numbers of rows (new tokens), each after a past of dynamic length: `dim` is
/// the length for the fewest rows, `name` names the rows, `numbers` are ascending, and `lower` makes the net
/// for a number of rows and a length.
///
/// # Errors
/// As [`open_decoder`].
pub fn open_pieces<E: From<OpenError>>(
    dim: &OpenDimension,
    name: &str,
    numbers: &[i64],
    mut lower: impl FnMut(i64, i64) -> Result<Fused, E>,
) -> Result<Fused, E> {
    let dims = DecoderDims { past: dim, second: None, items: None, rows: Some((name, numbers)) };
    open_decoder(dims, |sizes| lower(sizes.rows.unwrap_or(1), sizes.past))
}

/// Combines the nets for each number of items and each number of rows, as far as these are open; `lower`
/// makes the net for given sizes. States have room for the most items; fewer are the first ones.
///
/// # Errors
/// As [`open`](crate::open()), or if the nets are incompatible.
pub fn open_decoder<E: From<OpenError>>(
    DecoderDims { past: dim, second, items, rows }: DecoderDims,
    mut lower: impl FnMut(PieceSizes) -> Result<Fused, E>,
) -> Result<Fused, E> {
    let mut open = |dim: &OpenDimension, items: Option<i64>, rows: Option<i64>| {
        super::open_both(dim, second, |past, size| {
            lower(PieceSizes { past, second: second.map(|_| size), items, rows })
        })
    };
    if items.is_none() && rows.is_none() {
        return open(dim, None, None);
    }
    let name = rows.map(|(name, _)| name).or(items.map(|items| items.name.as_str())).unwrap_or_default();
    let refuse =
        |node: &str, why: String| E::from(OpenError::Node { node: node.to_owned(), why, name: name.to_owned() });
    let rows = rows.map(|(name, numbers)| rows_of(name, numbers).map_err(|why| refuse(name, why))).transpose()?;
    let numbers: Vec<Option<i64>> = match &rows {
        Some((_, numbers)) => numbers.iter().rev().map(|n| Some(*n)).collect(),
        None => vec![None],
    };
    let of_items: Vec<Option<i64>> = match items {
        Some(items) => (items.least..=items.most).rev().step_by(items.step as usize).map(Some).collect(),
        None => vec![None],
    };
    let n_nets = (numbers.len() * of_items.len()) as i64;
    if n_nets > MOST_NETS {
        return Err(refuse(
            name,
            format!("has {n_nets} combinations of sizes with nets of their own, more than {MOST_NETS}"),
        ));
    }
    let mut pieces = Vec::with_capacity(n_nets as usize);
    for n_items in of_items {
        for &n in &numbers {
            let later = rows.as_ref().zip(n).map_or(0, |((rows, _), n)| n - rows.least);
            let own = OpenDimension { most: dim.most - later, ..dim.clone() };
            let made = open(&own, n_items, n)?;
            if made.net.states.is_empty() {
                return Err(refuse(&dim.name, "is no past to which runs add".to_owned()));
            }
            pieces.push(Fused { n_items: n_items.unwrap_or(1), ..made });
        }
    }
    let mut whole = pieces.remove(0);
    whole.pieces = pieces;
    whole.rows = rows.map(|(rows, _)| rows);
    let mut axes = Vec::new();
    let mut in_items = Vec::new();
    for (at, id) in whole.ports().into_iter().enumerate() {
        let why = "is no row of as many numbers for each token".to_owned();
        let (has_items, axis) = whole.port(at).ok_or_else(|| refuse(&whole.net.value(id).name, why))?;
        axes.push(axis);
        in_items.push(has_items);
    }
    if let Some(state) = whole.net.states.iter().find(|state| !whole.has_state_in_items(state)) {
        return Err(refuse(&state.past, "has not its items as its first dimension".to_owned()));
    }
    whole.pieces.iter_mut().for_each(|piece| piece.axes_of_rows.clone_from(&axes));
    whole.axes_of_rows = axes;
    whole.items = items.map(|items| Items { dim: items.clone(), ports: in_items, groups: None });
    Ok(whole)
}

/// Dimension of rows with these numbers of them, which are to be ascending multiples of the first.
fn rows_of<'n>(name: &str, numbers: &'n [i64]) -> Result<(OpenDimension, &'n [i64]), String> {
    match numbers {
        [least, .., most] if numbers.is_sorted_by(|a, b| a < b) && numbers.iter().all(|n| n % least == 0) => {
            let (least, most) = (*least, *most);
            Ok((OpenDimension { name: name.to_owned(), least, most, step: least }, numbers))
        }
        _ => Err(format!("has the sizes {numbers:?}, which are to be a number and multiples of it, rising")),
    }
}

impl Fused {
    /// Nets of all pieces, largest first; only this net if there are no others.
    pub(crate) fn forms(&self) -> impl DoubleEndedIterator<Item = &Fused> {
        std::iter::once(self).chain(&self.pieces)
    }

    /// Steps of all pieces, as [`Fused::each`] returns them.
    pub fn all(&self) -> impl Iterator<Item = (&Step, usize)> {
        self.forms().flat_map(Fused::each)
    }

    /// Number of rows that a piece adds to its states.
    pub(crate) fn n_rows(&self) -> i64 {
        self.appends()
    }

    fn ports(&self) -> Vec<ValueId> {
        self.net.inputs.iter().chain(&self.net.outputs).copied().collect()
    }

    /// Whether the first dimension of an input, or of an output (numbered after the inputs), counts the items
    /// of a run, and the dimension that counts its rows, if any; `None` if the tensor is not stored row by
    /// row in all pieces.
    fn port(&self, port: usize) -> Option<(bool, Option<usize>)> {
        let id = *self.ports().get(port)?;
        let whole = self.net.shape(id);
        let (mut own, mut is_second) = (Vec::new(), false);
        for form in self.forms() {
            let id = *form.ports().get(port)?;
            let is_open = |of: &dyn Fn(&RunSize) -> bool| {
                form.open.as_ref().is_some_and(|open| open.axes[id.0].iter().flatten().any(of))
            };
            is_second |= is_open(&|size| size.dim == 1);
            if is_open(&|size| size.dim == 0) || form.net.shape(id).len() != whole.len() {
                return None;
            }
            own.push((form, form.net.shape(id)));
        }
        let differs = |axis: usize| own.iter().any(|(_, shape)| shape[axis] != whole[axis]);
        let counts = |axis: usize, of: &dyn Fn(&Fused) -> i64| {
            own.iter().all(|(form, shape)| shape[axis] * of(self) == whole[axis] * of(form))
        };
        let has_items = !whole.is_empty() && differs(0) && whole[0] == self.n_items && counts(0, &|form| form.n_items);
        let mut others = (usize::from(has_items)..whole.len()).filter(|axis| differs(*axis));
        let axis = others.next();
        let is_apart = |axis: usize| whole[..axis].iter().product::<i64>() <= MOST_OUTER;
        let fits = axis.is_none_or(|axis| counts(axis, &Fused::n_rows) && is_apart(axis) && !is_second);
        (fits && others.next().is_none()).then_some((has_items, axis))
    }

    /// Whether a state has its items as its first dimension, if their number is open, so that those of fewer
    /// items are the first ones.
    fn has_state_in_items(&self, state: &State) -> bool {
        let at = self.net.states.iter().position(|own| own.value == state.value);
        let whole = self.net.shape(state.value);
        self.forms().all(|form| {
            let own = at.and_then(|at| form.net.states.get(at)).map(|own| form.net.shape(own.value));
            own.is_some_and(|own| match form.n_items == self.n_items {
                true => own == whole,
                false => own[1..] == whole[1..] && own[0] * self.n_items == whole[0] * form.n_items && state.axis > 0,
            })
        })
    }

    /// Number of items of a piece whose rows an input or output has behind them; 1 if its rows are
    /// contiguous, or it has none.
    pub(crate) fn n_outer_of_rows(&self, id: ValueId) -> usize {
        let axis = self.ports().iter().zip(&self.axes_of_rows).find(|(own, _)| **own == id).and_then(|(_, axis)| *axis);
        axis.map_or(1, |axis| self.net.shape(id)[..axis].iter().product::<i64>() as usize)
    }

    /// Makes products that differ only in their number of rows one family, so that all pieces read the same
    /// weights in the same layout.
    pub(crate) fn share_weights(&mut self) {
        if self.pieces.is_empty() {
            return;
        }
        let mut rows: BTreeMap<String, BTreeSet<i64>> = BTreeMap::new();
        for form in self.forms() {
            for (step, _) in form.each() {
                if let Step::Kernel(kernel) = step
                    && let Some((_, text)) = form.of_one_row(kernel)
                {
                    rows.entry(text).or_default().insert(kernel.workload.size("m"));
                }
            }
        }
        let share = |form: &Fused, kernel: &mut Kernel| {
            let Some((workload, text)) = form.of_one_row(kernel) else { return };
            let m = workload.size("m");
            let (least, most) = (rows[&text].first().copied().unwrap_or(m), rows[&text].last().copied().unwrap_or(m));
            if least == most {
                return;
            }
            let step = rows[&text].iter().fold(0, |step, m| gcd(step, m - least));
            if let Ok(family) = workload.with_ranges(&[("m", SizeRange { least, most, step })]) {
                let sizes = vec![RunSize::constant(m)];
                let rooms = rooms(&family);
                kernel.workload = family;
                kernel.open = Some(Box::new(Open { sizes, each: None, apart: None, rooms }));
            }
        };
        let mut pieces = take(&mut self.pieces);
        for form in std::iter::once(&mut *self).chain(&mut pieces) {
            let mut steps = take(&mut form.steps);
            // Constants are looked up before the steps change.
            form.steps = steps.clone();
            for step in &mut steps {
                if let Step::Kernel(kernel) = step
                    && form.is_apart(kernel)
                {
                    share(form, kernel);
                }
            }
            form.steps = steps;
        }
        self.pieces = pieces;
    }
}

impl Fused {
    /// Workload of a product with weights that is not in a family yet, and its text with one row.
    fn of_one_row(&self, kernel: &Kernel) -> Option<(Workload, String)> {
        // The rows of a batch are not contiguous.
        let Structure::Contraction(Contraction { batch: None, .. }) = kernel.workload.structure() else { return None };
        let is_fixed = kernel.open.as_ref().is_none_or(|open| open.sizes.is_empty() && open.each.is_none());
        if !is_fixed || kernel.workload.constants().is_empty() {
            return None;
        }
        let n_known = kernel.inputs.iter().filter(|id| self.net.value(**id).constant.is_some()).count();
        let is_row = kernel.workload.size("m") == 1 && n_known == kernel.workload.constants().len();
        let workload = is_row.then(|| by_elements(&kernel.workload)).flatten();
        let workload = workload.unwrap_or_else(|| kernel.workload.clone());
        let text = workload.with_size("m", 1)?.to_string();
        Some((workload, text))
    }

    /// Whether the non-constant operands and the result of a product are in separate memory, none of it a
    /// state's.
    fn is_apart(&self, kernel: &Kernel) -> bool {
        let ids = || kernel.inputs.iter().chain([&kernel.output]);
        let own: Vec<ValueId> = ids().copied().filter(|id| self.net.value(*id).constant.is_none()).collect();
        let roots: BTreeSet<usize> = own.iter().map(|id| self.root_of(*id).0).collect();
        let is_state = |root: &usize| self.net.states.iter().any(|state| state.value.0 == *root);
        roots.len() == own.len() && !roots.iter().any(is_state)
    }
}

/// Numbers of elements of the arguments of a family.
pub(super) fn rooms(family: &Workload) -> Vec<i64> {
    family.program().arguments().map(|(_, buffer)| buffer.shape.iter().product()).collect()
}

/// Makes a product of one row read per-column terms and factors as per-element ones, as products of several
/// rows do; `None` if these are constants.
fn by_elements(workload: &Workload) -> Option<Workload> {
    if workload.constants().iter().any(|name| name.starts_with("bias") || name.starts_with("scale")) {
        return None;
    }
    let of_elements = |operation: &Epilogue| match operation.function() {
        EpilogueFunction::Bias => Epilogue::new(EpilogueFunction::Add, operation.numbers()),
        EpilogueFunction::Scale => Epilogue::new(EpilogueFunction::Mul, operation.numbers()),
        _ => Some(*operation),
    };
    let epilogue = workload.epilogue().iter().map(of_elements).collect::<Option<Vec<_>>>()?;
    let constants = workload.constants().to_vec();
    workload.clone().with_epilogue(epilogue).ok()?.with_constants(constants).ok()
}
