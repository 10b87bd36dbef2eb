//! Language models that process one token per run, or several (chunked prefill): a net for each chunk size.
//!
//! A prompt is processed in chunks, largest first, each with a net and steps of its own. Nets share states,
//! and weights that kernels read in the same layout: products that differ only in their number of rows are
//! one family.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;

use tilewright_ir::gcd;
use tilewright_ir::op::{Contraction, Epilogue, EpilogueFunction, SizeRange, Structure, Workload};
use tilewright_runtime::{OpenDimension, RunSize};

use crate::fuse::{Fused, Kernel, Open, Step};
use crate::net::ValueId;
use crate::open::OpenError;

/// Combines the nets for several numbers of rows (new tokens), each after a past of dynamic length: `dim` is
/// the length for the fewest rows, `name` names the rows, `numbers` are ascending, and `lower` makes the net
/// for a number of rows and a length.
///
/// # Errors
/// As [`open`](crate::open()), or if the nets for the numbers of rows are incompatible.
pub fn open_pieces<E: From<OpenError>>(
    dim: &OpenDimension,
    name: &str,
    numbers: &[i64],
    mut lower: impl FnMut(i64, i64) -> Result<Fused, E>,
) -> Result<Fused, E> {
    let refuse =
        |node: &str, why: String| E::from(OpenError::Node { node: node.to_owned(), why, name: name.to_owned() });
    let (&least, &most) = match numbers {
        [least, .., most] if numbers.is_sorted_by(|a, b| a < b) && numbers.iter().all(|n| n % least == 0) => {
            (least, most)
        }
        _ => {
            let why = format!("has the sizes {numbers:?}, which are to be a number and multiples of it, rising");
            return Err(refuse(name, why));
        }
    };
    let mut pieces = Vec::with_capacity(numbers.len());
    for &n in numbers.iter().rev() {
        let own = OpenDimension { most: dim.most + least - n, ..dim.clone() };
        let made = super::open(&own, |size| lower(n, size))?;
        if made.net.states.is_empty() {
            return Err(refuse(&dim.name, "is no past to which runs add".to_owned()));
        }
        pieces.push(made);
    }
    let mut whole = pieces.remove(0);
    whole.pieces = pieces;
    whole.rows = Some(OpenDimension { name: name.to_owned(), least, most, step: least });
    let ports = whole.ports();
    let mut axes = Vec::with_capacity(ports.len());
    for (at, id) in ports.into_iter().enumerate() {
        let why = "is no row of as many numbers for each token".to_owned();
        axes.push(whole.axis_of_rows(at).ok_or_else(|| refuse(&whole.net.value(id).name, why))?);
    }
    whole.axes_of_rows = axes;
    Ok(whole)
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

    /// Dimension of an input, or of an output (numbered after the inputs), that counts the rows of a run:
    /// `Some(None)` if there is none, `None` if the tensor is not stored row by row in all pieces.
    fn axis_of_rows(&self, port: usize) -> Option<Option<usize>> {
        let mut found: BTreeSet<Option<usize>> = BTreeSet::new();
        let id = *self.ports().get(port)?;
        let (whole, n_whole) = (self.net.shape(id), self.n_rows());
        for form in self.forms() {
            let own = *form.ports().get(port)?;
            let (shape, n) = (form.net.shape(own), form.n_rows());
            let is_open = form.open.as_ref().is_some_and(|open| open.axes[own.0].iter().any(Option::is_some));
            if is_open || shape.len() != whole.len() {
                return None;
            }
            let differ: Vec<usize> = (0..shape.len()).filter(|&axis| shape[axis] != whole[axis]).collect();
            match differ[..] {
                [] if n == n_whole => {}
                [] => drop(found.insert(None)),
                [axis] if shape[axis] * n_whole == whole[axis] * n && shape[..axis].iter().all(|n| *n == 1) => {
                    found.insert(Some(axis));
                }
                _ => return None,
            }
        }
        (found.len() == 1).then(|| found.pop_first().expect("there is one"))
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
            if least == most || most % m != 0 {
                return;
            }
            let step = rows[&text].iter().fold(0, |step, m| gcd(step, m - least));
            if let Ok(family) = workload.with_ranges(&[("m", SizeRange { least, most, step })]) {
                let sizes = vec![RunSize { factor: 0, term: m, multiple: 1, divisor: 1 }];
                let rooms = rooms(&workload, &family);
                kernel.workload = family;
                kernel.open = Some(Box::new(Open { sizes, each: None, rooms }));
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

/// Factors by which the arguments of a family are larger than those of a member. Numbers for each column of a
/// product, such as those of a dynamically quantized one, are as many in both.
fn rooms(member: &Workload, family: &Workload) -> Vec<i64> {
    let sizes = |workload: &Workload| -> Vec<i64> {
        workload.program().arguments().map(|(_, buffer)| buffer.shape.iter().product()).collect()
    };
    sizes(member).iter().zip(sizes(family)).map(|(own, all)| all / own.max(&1)).collect()
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
