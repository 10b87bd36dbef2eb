//! Memory of values: their own, or a part of another value's (aliasing).

use crate::fuse::{Fused, Step};
use crate::net::ValueId;

/// Location of a value within another value's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValuePart {
    /// Value that owns the memory.
    pub root: ValueId,
    /// Offset in bytes.
    pub offset: usize,
}

/// Copy that a run must make, as a value cannot be computed in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// Index of the step before which it is made.
    pub before: usize,
    /// Value to copy.
    pub from: ValueId,
    /// Value that owns the destination's memory.
    pub to: ValueId,
    /// Offset of the destination in that memory, in bytes.
    pub offset: usize,
}

/// Memory assignment of all values.
#[derive(Debug, Clone)]
pub struct Places {
    /// Value that each value is a part of.
    parents: Vec<Option<ValuePart>>,
    /// Copies that must be made.
    pub copies: Vec<Copy>,
    /// Index of the output whose memory each value uses, if any.
    pub outputs: Vec<Option<usize>>,
}

impl Places {
    /// Assigns memory to values, with as few copies as possible.
    pub fn new(fused: &Fused) -> Places {
        let n = fused.net.values.len();
        let mut places = Places { parents: vec![None; n], copies: Vec::new(), outputs: vec![None; n] };
        let mut is_computed = vec![false; n];
        for (step, _) in fused.each() {
            match step {
                Step::Kernel(kernel) => is_computed[kernel.output.0] = true,
                // Loop-carried values do not share memory with other values.
                Step::Append { .. } | Step::Set { .. } | Step::While(_) | Step::Again(_) => {}
                Step::Sequence(_) => unreachable!("no sequence is within another"),
                Step::Host(node) => node.outputs.iter().for_each(|id| is_computed[id.0] = true),
                Step::Join { whole, .. } => is_computed[whole.0] = true,
                Step::Part { of, part, offset } => {
                    let size = fused.net.value(*part).dtype.size();
                    places.parents[part.0] = Some(ValuePart { root: *of, offset: *offset as usize * size });
                }
            }
        }
        for step in &fused.steps {
            if let Step::While(round) = step {
                round.carried.iter().for_each(|id| is_computed[id.0] = false);
            }
        }
        for moving in fused.sequences().flat_map(|sequence| &sequence.moving) {
            is_computed[moving.of.0] |= is_computed[moving.value.0];
        }
        // A value that is an output as a whole is computed in the caller's memory.
        for (at, &id) in fused.net.outputs.iter().enumerate() {
            let ValuePart { root, offset } = places.locate(id);
            let is_all = offset == 0 && fused.net.value(root).n_bytes() == fused.net.value(id).n_bytes();
            let is_packed = !fused.is_packed_apart(id);
            if is_all && is_packed && is_computed[root.0] && places.outputs[root.0].is_none() {
                places.outputs[root.0] = Some(at);
            } else {
                places.copies.push(Copy { before: fused.steps.len(), from: id, to: id, offset: at });
            }
        }
        let n_at_end = places.copies.len();
        // Steps are visited backwards, as the parts of a concatenation may be concatenations themselves.
        for (at, step) in fused.steps.iter().enumerate().rev() {
            let Step::Join { parts, whole } = step else { continue };
            let n_bytes = |id: ValueId| fused.net.value(id).n_bytes() as usize;
            let mut offset = 0;
            let mut rest = &parts[..];
            while let Some(&first) = rest.first() {
                let own = places.locate(first);
                // Parts that are consecutive in another value too, as after a split.
                let mut end = own.offset;
                let follows = |part: &&ValueId| {
                    let is_next = places.locate(**part) == ValuePart { root: own.root, offset: end };
                    end += if is_next { n_bytes(**part) } else { 0 };
                    is_next
                };
                let (run, behind) = rest.split_at(rest.iter().take_while(follows).count());
                rest = behind;
                let is_all = own.offset == 0 && n_bytes(own.root) == end;
                let is_free = is_computed[own.root.0] && places.outputs[own.root.0].is_none();
                // A value must not become a part of itself.
                if is_all && is_free && own.root != *whole && places.locate(*whole).root != own.root {
                    places.parents[own.root.0] = Some(ValuePart { root: *whole, offset });
                    offset += end;
                    continue;
                }
                for &part in run {
                    places.copies.push(Copy { before: at, from: part, to: *whole, offset });
                    offset += n_bytes(part);
                }
            }
        }
        places.copies.rotate_left(n_at_end);
        places.copies.reverse();
        places.copies.sort_by_key(|copy| copy.before);
        places
    }

    /// Location of a value's memory.
    pub fn locate(&self, id: ValueId) -> ValuePart {
        let mut at = ValuePart { root: id, offset: 0 };
        while let Some(parent) = self.parents[at.root.0] {
            at = ValuePart { root: parent.root, offset: at.offset + parent.offset };
        }
        at
    }
}
