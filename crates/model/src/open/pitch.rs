//! Pitch of values whose last dimension is open: the distance in memory between their rows.
//!
//! Values are laid out as at the largest size, which is often a power of two. Rows that far apart fall into
//! few sets of the caches, so that a kernel that works on several rows at once, as on the scores of
//! attention, evicts its own lines. Such rows are a cache line longer here; runs use as much of them as
//! before.

use std::collections::HashMap;

use tilewright_ir::op::{Contraction, Epilogue, Factor, Operand, Structure};

use super::OpenNet;
use crate::fuse::{Fused, Kernel, Step};
use crate::net::{Kind, Node, ValueId};

/// Size of a cache line in bytes.
const LINE: i64 = 64;

/// Pitch in bytes whose multiples are avoided: rows begin in at most four of the 64 sets of an L1 cache.
const CROWDED: i64 = 1024;

/// Minimum number of rows that compete for sets: about as many as a set has lines.
const LEAST_ROWS: i64 = 8;

impl Fused {
    /// Lengthens the rows of values in the run's own memory that would share few sets of the caches.
    pub(super) fn lengthen_rows(&mut self, open: &mut OpenNet) {
        let mut aliases: HashMap<ValueId, Vec<ValueId>> = HashMap::new();
        for (step, _) in self.each() {
            let Step::Kernel(kernel) = step else { continue };
            let root = self.root_of(kernel.output);
            aliases.insert(root, self.parts_of(root));
        }
        let mut longer: HashMap<ValueId, i64> = HashMap::new();
        for ids in aliases.values() {
            if let Some(n) = self.longer_row(ids, open) {
                longer.extend(ids.iter().map(|id| (*id, n)));
            }
        }
        self.keep_expressible(&mut longer, &aliases, open);
        for (id, n) in &longer {
            *self.net.values[id.0].shape.last_mut().expect("it has rows") = *n;
        }
        open.longer = longer;
    }

    /// A value and all that are parts of it.
    fn parts_of(&self, root: ValueId) -> Vec<ValueId> {
        let mut ids = vec![root];
        for (step, _) in self.each() {
            if let Step::Part { of, part, .. } = step
                && ids.contains(of)
            {
                ids.push(*part);
            }
        }
        ids
    }

    /// Length that the rows of a value should have, given with all views of it; `None` if the present one is
    /// good, or if something else than kernels knows it.
    fn longer_row(&self, ids: &[ValueId], open: &OpenNet) -> Option<i64> {
        let net = &self.net;
        let (&n_row, _) = net.shape(ids[0]).split_last()?;
        let size = (*open.axes[ids[0].0].last()?)?;
        let n_elements = net.value(ids[0]).n_elements();
        let is_alike = |id: &ValueId| {
            let own = open.axes[id.0].last().copied().flatten();
            net.shape(*id).last() == Some(&n_row) && own == Some(size) && net.value(*id).n_elements() == n_elements
        };
        let width = net.element_type(ids[0])?.bytes() as i64;
        let is_crowded = n_row * width % CROWDED == 0 && n_elements / n_row >= LEAST_ROWS;
        let is_inside = |id: &ValueId| self.has_own_memory(*id) && self.is_of_kernels(*id);
        (is_crowded && ids.iter().all(|id| is_alike(id) && is_inside(id))).then_some(n_row + LINE / width)
    }

    /// Whether a value is computed and read by kernels alone, none of which depends on its exact extents.
    fn is_of_kernels(&self, id: ValueId) -> bool {
        let fits = |step: &Step| match step {
            Step::Sequence(sequence) => {
                let mut moving = sequence.moving.iter().flat_map(|moving| [moving.value, moving.of]);
                let fits = |step: &Step| is_apart_from(step, id, &sequence.nodes);
                !moving.any(|own| own == id) && sequence.steps.iter().all(fits)
            }
            step => is_apart_from(step, id, &self.net.nodes),
        };
        self.steps.iter().all(fits) && self.net.states.iter().all(|state| state.value != id)
    }

    /// Removes rows that products could not read or write, with those of the same products, until all can.
    fn keep_expressible(
        &self,
        longer: &mut HashMap<ValueId, i64>,
        aliases: &HashMap<ValueId, Vec<ValueId>>,
        open: &OpenNet,
    ) {
        let mut is_done = false;
        while !is_done {
            is_done = true;
            for (step, _) in self.each() {
                let Step::Kernel(kernel) = step else { continue };
                let Structure::Contraction(product) = kernel.workload.structure() else { continue };
                if self.is_expressible(kernel, &product, longer, open) {
                    continue;
                }
                for id in kernel.inputs.iter().chain([&kernel.output]) {
                    for alias in aliases.get(&self.root_of(*id)).into_iter().flatten() {
                        is_done &= longer.remove(alias).is_none();
                    }
                }
            }
        }
    }

    /// Whether a value may have more memory than its own.
    fn may_grow(&self, id: ValueId) -> bool {
        let root = self.root_of(id);
        self.has_own_memory(id) && self.net.states.iter().all(|state| state.value != root)
    }

    /// Whether sizes of a product say the longer rows of its operands and result.
    fn is_expressible(
        &self,
        kernel: &Kernel,
        product: &Contraction,
        longer: &HashMap<ValueId, i64>,
        open: &OpenNet,
    ) -> bool {
        let workload = &kernel.workload;
        let operands = operands(kernel, product);
        let mut most: HashMap<&str, i64> = HashMap::new();
        for id in kernel.inputs.iter().chain([&kernel.output]) {
            let Some(&n) = longer.get(id) else { continue };
            let Some((_, dims)) = operands.iter().find(|(own, _)| own == id) else { return false };
            let &(name, extent) = dims.last().expect("an operand has dimensions");
            let size = open.sizes[&kernel.output].iter().find(|(own, _)| *own == name);
            let Some((_, size)) = size.filter(|_| self.net.shape(*id).last() == Some(&extent)) else { return false };
            let range = open.range(*size);
            if (n - range.least) % range.step != 0 {
                return false;
            }
            most.insert(name, n);
        }
        if most.is_empty() {
            return true;
        }
        let is_alone = open.sizes[&kernel.output].iter().all(|(name, _)| Contraction::OPEN.contains(name));
        // An extent matters to all dimensions that are longer than 1 and before it. The outermost one is
        // memory that the value gets.
        let has_pitch = |(id, dims): &(ValueId, Vec<(&str, i64)>)| {
            let known = |(at, (name, _)): (usize, &(&str, i64))| {
                let is_own = at + 1 == dims.len() && longer.get(id) == most.get(name);
                let is_outermost = || dims[..at].iter().all(|(_, n)| *n == 1) && self.may_grow(*id);
                is_own || !most.contains_key(name) || is_outermost()
            };
            dims.iter().enumerate().all(known)
        };
        let is_paired = Epilogue::operands(workload.epilogue()).iter().any(|(.., kind)| *kind == Operand::Pair);
        is_alone && workload.prologue().is_empty() && !is_paired && operands.iter().all(has_pitch)
    }
}

/// Whether a step does not use a value, or is a kernel that does not depend on its exact extents. Members of
/// kernels are among `nodes`.
fn is_apart_from(step: &Step, id: ValueId, nodes: &[Node]) -> bool {
    let is_of_nests = |kernel: &Kernel| {
        let mut kinds = kernel.members.iter().map(|at| &nodes[*at].kind);
        let is_plain = (kernel.block, kernel.in_blocks) == (1, 1) && !kernel.members.is_empty();
        is_plain && kinds.all(|kind| matches!(kind, Kind::Map(_) | Kind::Reduce(..) | Kind::View | Kind::Transpose(_)))
    };
    match step {
        Step::Kernel(kernel) if kernel.output == id || kernel.inputs.contains(&id) => {
            match kernel.workload.structure() {
                Structure::Contraction(_) => true,
                Structure::Nest(_) => is_of_nests(kernel),
                Structure::Window(_) | Structure::Packed(_) => false,
            }
        }
        Step::Kernel(_) | Step::While(_) | Step::Again(_) => true,
        Step::Sequence(_) => false,
        Step::Host(node) => !node.inputs.contains(&Some(id)) && !node.outputs.contains(&id),
        Step::Append { from, to, .. } | Step::Set { from, to } => *from != id && *to != id,
        Step::Join { parts, whole } => !parts.contains(&id) && *whole != id,
        Step::Part { of, part, offset } => *offset == 0 || *of != id && *part != id,
    }
}

/// Operands of a product that have its sizes as dimensions, and its result, with the name and extent of each
/// dimension in memory.
fn operands(kernel: &Kernel, product: &Contraction) -> Vec<(ValueId, Vec<(&'static str, i64)>)> {
    let workload = &kernel.workload;
    let extent = |name: &'static str| (name, workload.size(name));
    let dims = |rows: &'static str, columns: &'static str, n_beside: i64, is_beside: bool| {
        let batch = product.batch.map(|_| ("b", n_beside));
        let mut dims = vec![extent(rows), extent(columns)];
        batch.into_iter().for_each(|batch| dims.insert(usize::from(is_beside), batch));
        dims
    };
    let n = product.batch.unwrap_or(1);
    let of_factor = |factor: Factor, other: &'static str, is_turned: bool| {
        let heads = factor.heads;
        let [rows, columns] = if is_turned { ["k", other] } else { [other, "k"] };
        dims(rows, columns, heads.before + n + heads.after, heads.beside)
    };
    let of_result = dims("m", "n", n, product.output_beside);
    let mut all = vec![
        (kernel.inputs[0], of_factor(product.a, "m", product.a.k_first)),
        (kernel.inputs[1], of_factor(product.b, "n", product.b.k_first)),
        (kernel.output, of_result.clone()),
    ];
    let others = Epilogue::operands(workload.epilogue());
    let ids = &kernel.inputs[kernel.inputs.len() - others.len()..];
    all.extend(others.iter().zip(ids).filter_map(|((.., kind), id)| match kind {
        Operand::Element => Some((*id, of_result.clone())),
        Operand::Channel => Some((*id, vec![extent("n")])),
        Operand::One | Operand::Pair => None,
    }));
    all
}

impl OpenNet {
    /// Largest value of a product's open size for the layout of its operands and result, where their rows
    /// are longer: more than a run asks for.
    pub(super) fn room(&self, kernel: &Kernel, product: &Contraction, name: &str) -> Option<i64> {
        let is_along = |(_, dims): &(ValueId, Vec<(&str, i64)>)| dims.last().is_some_and(|(own, _)| *own == name);
        operands(kernel, product).iter().filter(|own| is_along(own)).find_map(|(id, _)| self.longer.get(id).copied())
    }
}
