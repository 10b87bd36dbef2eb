//! Items of a run that steps process together.
//!
//! In a net of one item with open rows, steps that compute each row separately, such as a product with
//! weights, can process the rows of several items at once: weights are then read once for a group of items.
//! Steps that relate the rows of an item, such as attention, run for one item after the other.

use std::collections::{HashMap, HashSet};

use tilewright_ir::op::Structure;
use tilewright_runtime::RunSize;

use super::{OpenNet, WHOLE_VECTORS, is_in_rows};
use crate::branches::conditions;
use crate::fuse::{Fused, Kernel, Step};
use crate::net::ValueId;
use crate::value_memory::Places;

/// Maximum number of items of a group. Values that one part of a run passes to a later one for each item have
/// room for this many.
const MOST: i64 = 16;

/// Alignment in bytes of items that each have memory for the largest size.
const LINE: usize = 64;

/// Groups of items: the steps that process all items of a group, and the values with a place for each item.
#[derive(Debug, Clone)]
pub(crate) struct Groups {
    /// Maximum number of items of a group.
    pub(crate) most: i64,
    /// Whether each step of the net, and then each copy to an output, processes all items of a group.
    pub(crate) steps: Vec<bool>,
    /// Values that own memory with a place for each item, and the bytes of an item at a size.
    pub(crate) values: HashMap<ValueId, RunSize>,
}

impl Groups {
    /// Bytes of the memory of a value, if it has a place for each item; `most` is the largest size.
    pub(crate) fn n_bytes(&self, root: ValueId, most: i64) -> Option<usize> {
        let pitch = self.values.get(&root)?;
        // Products with open columns read whole vectors of rows, the last of which extend past the last item.
        let n = if pitch.factor > 0 { pitch.at(most + WHOLE_VECTORS - 1) } else { pitch.term * self.most };
        Some(n as usize)
    }

    /// First and last of the steps around `step` that run for one item before the next item; the step alone
    /// if it processes all items.
    pub(crate) fn turn_of(&self, step: usize) -> [usize; 2] {
        if self.steps[step] {
            return [step; 2];
        }
        let n_before = self.steps[..step].iter().rev().take_while(|together| !**together).count();
        let n_behind = self.steps[step + 1..].iter().take_while(|together| !**together).count();
        [step - n_before, step + n_behind]
    }
}

fn is_plain(size: &RunSize) -> bool {
    size.factor > 0 && (size.term, size.divisor, size.multiple) == (0, 1, 1)
}

impl Fused {
    /// Finds the steps that process several items of a net for any number of items; `None` if there are no
    /// such steps, or a number of steps depends on the run.
    pub(crate) fn groups(&self, places: &Places) -> Option<Groups> {
        let is_alone = |open: &&OpenNet| open.second.is_none() && open.dim.step == 1 && open.dim.least >= 1;
        let open = self.open.as_ref().filter(is_alone)?;
        let items = self.items.as_ref().filter(|items| items.dim != open.dim)?;
        let is_known =
            |step: &Step| matches!(step, Step::Kernel(_) | Step::Sequence(_) | Step::Part { .. } | Step::Join { .. });
        let is_straight = self.steps.iter().all(is_known) && conditions(self, places).iter().all(Vec::is_empty);
        if !is_straight || !self.net.states.is_empty() || !self.pieces.is_empty() {
            return None;
        }
        let copied: HashSet<usize> = places.copies.iter().map(|copy| copy.before).collect();
        let unpacked = self.without_items(&items.ports, places);
        let packed =
            |id: ValueId| self.bytes_of_item(id, places).filter(|_| !unpacked.contains(&places.locate(id).root));
        let is_of_rows = |kernel: &Kernel| {
            let is_constant = |id: &ValueId| {
                let is_open = open.axes[id.0].iter().any(Option::is_some);
                !is_open && self.net.value(places.locate(*id).root).constant.is_some()
            };
            self.is_by_rows(kernel)
                && packed(kernel.output).is_some()
                && kernel.inputs.iter().all(|id| is_constant(id) || packed(*id).is_some())
        };
        let mut steps: Vec<bool> = Vec::with_capacity(self.steps.len());
        for (at, step) in self.steps.iter().enumerate() {
            steps.push(match step {
                Step::Kernel(kernel) => !copied.contains(&at) && is_of_rows(kernel),
                Step::Sequence(_) => false,
                // A view does no work.
                _ => !copied.contains(&at) && steps.last().copied().unwrap_or(false),
            });
        }
        let is_product = |(step, together): (&Step, &bool)| match step {
            Step::Kernel(kernel) => *together && matches!(kernel.workload.structure(), Structure::Contraction(_)),
            _ => false,
        };
        if !self.steps.iter().zip(&steps).any(is_product) {
            return None;
        }
        steps.push(false);
        let mut groups = Groups { most: MOST, steps, values: HashMap::new() };
        let mut turns: HashMap<ValueId, HashSet<[usize; 2]>> = HashMap::new();
        let mut touch = |id: ValueId, turn: [usize; 2]| {
            turns.entry(places.locate(id).root).or_default().insert(turn);
        };
        // Values that exist before the first step are made for each item.
        let before = if groups.steps[0] { [usize::MAX; 2] } else { groups.turn_of(0) };
        self.numbers().map(|(id, _)| id).chain(self.net.inputs.iter().copied()).for_each(|id| touch(id, before));
        for copy in &places.copies {
            touch(copy.from, groups.turn_of(copy.before));
            if copy.before < self.steps.len() {
                touch(copy.to, groups.turn_of(copy.before));
            }
        }
        for (at, step) in self.steps.iter().enumerate() {
            if let Step::Sequence(sequence) = step {
                sequence.outer_values().for_each(|id| touch(id, groups.turn_of(at)));
            }
            let Step::Kernel(kernel) = step else { continue };
            for id in kernel.inputs.iter().chain([&kernel.output]) {
                touch(*id, groups.turn_of(at));
                if groups.steps[at]
                    && let Some(pitch) = packed(*id)
                {
                    groups.values.insert(places.locate(*id).root, pitch);
                }
            }
        }
        for (root, turns) in turns {
            let value = self.net.value(root);
            if turns.len() > 1 && value.constant.is_none() && !groups.values.contains_key(&root) {
                let n_bytes = (value.n_bytes() as usize).next_multiple_of(LINE);
                let pitch = RunSize::constant(n_bytes as i64);
                groups.values.insert(root, pitch);
            }
        }
        Some(groups)
    }

    /// Bytes of the memory of a value that has a place for each item of a group.
    pub(crate) fn bytes_of_group(&self, root: ValueId) -> Option<usize> {
        let groups = self.items.as_ref()?.groups.as_ref()?;
        groups.n_bytes(root, self.open.as_ref()?.dim.most)
    }

    /// Whether a kernel computes each row from only the same row of its open inputs.
    fn is_by_rows(&self, kernel: &Kernel) -> bool {
        let (Some(own), Some(open)) = (&kernel.open, &self.open) else { return false };
        match (&own.each, &own.sizes[..]) {
            (Some((size, ..)), []) => is_plain(size),
            (None, [size]) => {
                let is_product = matches!(kernel.workload.structure(), Structure::Contraction(_));
                let sizes = open.sizes.get(&kernel.output);
                is_product && is_plain(size) && sizes.is_some_and(|sizes| matches!(sizes[..], [("m", _)]))
            }
            _ => false,
        }
    }

    /// Values whose memory does not hold items contiguously: shared values, numbers that depend on a size,
    /// and values not written by a kernel over the rows of a run.
    fn without_items(&self, in_items: &[bool], places: &Places) -> HashSet<ValueId> {
        let shared = self.net.inputs.iter().zip(in_items).filter(|(_, in_items)| !**in_items).map(|(id, _)| *id);
        let numbers = self.numbers().map(|(id, _)| id);
        let within = places.copies.iter().filter(|copy| copy.before < self.steps.len()).map(|copy| copy.to);
        let beyond = self.steps.iter().filter_map(|step| match step {
            Step::Kernel(kernel) => kernel.sizes().iter().any(|size| size.multiple > 1).then_some(kernel.output),
            _ => None,
        });
        shared.chain(numbers).chain(within).chain(beyond).map(|id| places.locate(id).root).collect()
    }

    /// Bytes of an item in the memory of a value, if its rows are contiguous.
    fn bytes_of_item(&self, id: ValueId, places: &Places) -> Option<RunSize> {
        let (net, open) = (&self.net, self.open.as_ref()?);
        let own = places.locate(id);
        let value = net.value(own.root);
        let (axis, size) = open.axes[id.0].iter().enumerate().find_map(|(axis, size)| Some((axis, (*size)?)))?;
        let is_all = own.offset == 0 && net.value(id).n_bytes() == value.n_bytes() && value.constant.is_none();
        let row = value.n_bytes() as i64 / net.shape(id)[axis].max(1);
        let fits = is_all && is_plain(&size) && is_in_rows(net.shape(id), &open.axes[id.0]);
        fits.then_some(RunSize { factor: row * size.factor, ..size })
    }
}
