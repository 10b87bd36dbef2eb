//! Register allocation: exact live ranges, coalescing of copies, then a linear scan that evicts the least
//! used values.
//!
//! A live range is a list of segments between positions in the code, with holes, so that a variable's
//! register is free while the variable is dead. Based on Wimmer and Mössenböck, "Optimized Interval Splitting
//! in a Linear Scan Register Allocator" (VEE 2005), but without splitting: the values that inner loops use
//! least are spilled as a whole.

use super::encode::{RAX, RDX};
use super::inst::{Class, Constraints, Lost, MachineFunction, MachineOp, NONE, Reg};

/// Positions within an instruction: reads, then clobbers, then writes.
const CLOBBER: u32 = 1;
const WRITE: u32 = 2;
const STEP: u32 = 4;

/// Live segment, from a position up to another one.
type LiveSegment = (u32, u32);

/// Location assigned to a virtual register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    Register(u8),
    /// Spill slot, identified by the virtual register with which it is shared.
    Memory(Reg),
    /// No location, as the register is never used.
    Nowhere,
}

/// Allocatable registers of a machine.
pub struct Registers {
    pub n_vectors: u8,
}

/// Allocatable integer registers, caller-saved first.
const INTEGERS: [u8; 14] = [0, 1, 2, 6, 7, 8, 9, 10, 11, 3, 12, 13, 14, 15];
/// Number of caller-saved registers.
const N_CALLER_SAVED: usize = 9;
/// Scratch registers for spilled values.
pub const INTEGER_SCRATCH: [u8; 2] = [10, 11];
pub const MASK_SCRATCH: [u8; 2] = [6, 7];

impl Registers {
    pub fn vector_scratch(&self) -> [u8; 2] {
        [self.n_vectors - 2, self.n_vectors - 1]
    }

    fn of(&self, class: Class, with_scratch: bool) -> Vec<u8> {
        match class {
            Class::Integer => {
                INTEGERS.iter().copied().filter(|r| !with_scratch || !INTEGER_SCRATCH.contains(r)).collect()
            }
            Class::Vector => (0..self.n_vectors - if with_scratch { 2 } else { 0 }).collect(),
            Class::Mask => (1..if with_scratch { MASK_SCRATCH[0] } else { 8 }).collect(),
        }
    }

    fn slot(class: Class, r: u8) -> usize {
        usize::from(r)
            + match class {
                Class::Integer => 0,
                Class::Vector => 16,
                Class::Mask => 48,
            }
    }
}

/// Live range of a set of virtual registers that share one location.
#[derive(Clone, Default)]
struct LiveRanges {
    segments: Vec<LiveSegment>,
    /// Sum over uses and definitions, with larger weights in loops.
    weight: f64,
}

impl LiveRanges {
    fn start(&self) -> u32 {
        self.segments[0].0
    }

    fn cost(&self) -> f64 {
        let len: u32 = self.segments.iter().map(|(from, to)| to - from).sum();
        self.weight / f64::from(len.max(1))
    }
}

/// Whether two sorted lists of segments overlap.
fn overlap(a: &[LiveSegment], b: &[LiveSegment]) -> bool {
    let apart = |a: &[LiveSegment], b: &[LiveSegment]| a.last().is_none_or(|a| b.first().is_none_or(|b| a.1 <= b.0));
    if apart(a, b) || apart(b, a) {
        return false;
    }
    let (mut i, mut j) = (0, 0);
    while i < a.len() && j < b.len() {
        if a[i].1 <= b[j].0 {
            i += 1;
        } else if b[j].1 <= a[i].0 {
            j += 1;
        } else {
            return true;
        }
    }
    false
}

/// Merges two sorted lists, joining adjacent segments.
fn merge(a: &[LiveSegment], b: &[LiveSegment]) -> Vec<LiveSegment> {
    let mut out: Vec<LiveSegment> = Vec::with_capacity(a.len() + b.len());
    let (mut i, mut j) = (0, 0);
    while i < a.len() || j < b.len() {
        let next = if j == b.len() || i < a.len() && a[i].0 < b[j].0 {
            i += 1;
            a[i - 1]
        } else {
            j += 1;
            b[j - 1]
        };
        match out.last_mut() {
            Some(last) if last.1 == next.0 => last.1 = next.1,
            _ => out.push(next),
        }
    }
    out
}

/// Assigns a location to every virtual register of a function.
pub fn allocate(f: &MachineFunction, registers: &Registers) -> Result<Vec<Location>, String> {
    let live = liveness(f)?;
    let mut leaders: Vec<Reg> = (0..f.virtuals.len()).map(Reg::new).collect();
    let mut ranges = ranges(f, &live);
    coalesce(f, &mut leaders, &mut ranges);
    let fixed = clobbers(f);
    let mut places = vec![Location::Nowhere; f.virtuals.len()];
    for class in [Class::Integer, Class::Vector, Class::Mask] {
        let mut order: Vec<Reg> = (0..f.virtuals.len())
            .map(Reg::new)
            .filter(|v| {
                let r = &ranges[v.at()];
                f.virtuals[v.at()].class == class && leaders[v.at()] == *v && !r.segments.is_empty()
            })
            .collect();
        order.sort_by_key(|v| ranges[v.at()].start());
        for with_scratch in [false, true] {
            let names = registers.of(class, with_scratch);
            let all_fit = scan(class, &names, &order, &ranges, &fixed, &mut places);
            if all_fit {
                break;
            }
        }
    }
    for v in 0..places.len() {
        let leader = find(&mut leaders, Reg::new(v)).at();
        places[v] = places[leader];
    }
    Ok(places)
}

fn find(leaders: &mut [Reg], v: Reg) -> Reg {
    let mut at = v;
    while leaders[at.at()] != at {
        leaders[at.at()] = leaders[leaders[at.at()].at()];
        at = leaders[at.at()];
    }
    at
}

/// Assigns registers in order of first positions; returns whether all have one.
fn scan(
    class: Class,
    names: &[u8],
    order: &[Reg],
    ranges: &[LiveRanges],
    fixed: &[Vec<LiveSegment>; 64],
    places: &mut [Location],
) -> bool {
    let mut assigned: Vec<Vec<Reg>> = vec![Vec::new(); names.len()];
    let mut in_memory = Vec::new();
    for &v in order {
        let range = &ranges[v.at()];
        let is_free = |at: usize, assigned: &[Vec<Reg>]| {
            !overlap(&fixed[Registers::slot(class, names[at])], &range.segments)
                && assigned[at].iter().rev().all(|other| !overlap(&ranges[other.at()].segments, &range.segments))
        };
        if let Some(at) = (0..names.len()).find(|at| is_free(*at, &assigned)) {
            assigned[at].push(v);
            places[v.at()] = Location::Register(names[at]);
            continue;
        }
        // Register whose current owners have the least total weight.
        let mut best: Option<(f64, usize)> = None;
        for at in 0..names.len() {
            if overlap(&fixed[Registers::slot(class, names[at])], &range.segments) {
                continue;
            }
            let owners = assigned[at].iter().filter(|o| overlap(&ranges[o.at()].segments, &range.segments));
            let cost = owners.map(|o| ranges[o.at()].cost()).fold(0.0, f64::max);
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, at));
            }
        }
        match best {
            Some((cost, at)) if cost < range.cost() => {
                let (out, stay): (Vec<Reg>, Vec<Reg>) =
                    assigned[at].iter().partition(|o| overlap(&ranges[o.at()].segments, &range.segments));
                assigned[at] = stay;
                assigned[at].push(v);
                places[v.at()] = Location::Register(names[at]);
                in_memory.extend(out);
            }
            _ => in_memory.push(v),
        }
    }
    // Evicted ranges may fit in other registers.
    in_memory.sort_by(|a, b| ranges[b.at()].cost().total_cmp(&ranges[a.at()].cost()));
    let mut all_fit = true;
    for v in in_memory {
        let segments = &ranges[v.at()].segments;
        let free = (0..names.len()).find(|at| {
            !overlap(&fixed[Registers::slot(class, names[*at])], segments)
                && assigned[*at].iter().all(|other| !overlap(&ranges[other.at()].segments, segments))
        });
        match free {
            Some(at) => {
                assigned[at].push(v);
                places[v.at()] = Location::Register(names[at]);
            }
            None => {
                places[v.at()] = Location::Memory(v);
                all_fit = false;
            }
        }
    }
    all_fit
}

/// Segments in which physical registers are clobbered, by class and number.
fn clobbers(f: &MachineFunction) -> [Vec<LiveSegment>; 64] {
    let mut fixed: [Vec<LiveSegment>; 64] = std::array::from_fn(|_| Vec::new());
    let mut at = STEP;
    for inst in f.blocks.iter().flat_map(|b| &b.insts) {
        match inst.constraints().lost {
            Lost::Call => {
                let lost = (at + CLOBBER, at + WRITE);
                INTEGERS[..N_CALLER_SAVED].iter().for_each(|r| fixed[usize::from(*r)].push(lost));
                fixed[16..].iter_mut().for_each(|list| list.push(lost));
            }
            Lost::Division => [RAX, RDX].into_iter().for_each(|r| fixed[usize::from(r)].push((at, at + WRITE))),
            Lost::Nothing => {}
        }
        at += STEP;
    }
    fixed
}

/// Visits the registers that an instruction uses, including a call's arguments.
fn each_use(f: &MachineFunction, inst: &super::inst::Inst, mut visit: impl FnMut(Reg)) {
    inst.each_use(&mut visit);
    if let MachineOp::Call(number) = inst.op {
        let call = &f.calls[number];
        call.arguments.iter().copied().for_each(&mut visit);
        call.reals.iter().copied().for_each(&mut visit);
        if let super::inst::Callee::Pointer(r) = call.callee {
            visit(r);
        }
    }
}

/// Bit sets of the virtual registers live at the end of each block.
fn liveness(f: &MachineFunction) -> Result<Vec<Vec<u64>>, String> {
    let words = f.virtuals.len().div_ceil(64);
    let n = f.blocks.len();
    let mut reads = vec![vec![0u64; words]; n];
    let mut writes = vec![vec![0u64; words]; n];
    for (b, block) in f.blocks.iter().enumerate() {
        for inst in &block.insts {
            each_use(f, inst, |r| {
                let (word, bit) = (r.at() / 64, 1 << (r.at() % 64));
                if writes[b][word] & bit == 0 {
                    reads[b][word] |= bit;
                }
            });
            if inst.def != NONE {
                writes[b][inst.def.at() / 64] |= 1 << (inst.def.at() % 64);
            }
        }
    }
    let mut live_in = reads;
    let mut live_out = vec![vec![0u64; words]; n];
    let mut changed = true;
    while changed {
        changed = false;
        for b in (0..n).rev() {
            for &s in &f.blocks[b].successors {
                for w in 0..words {
                    live_out[b][w] |= live_in[s][w];
                }
            }
            for w in 0..words {
                let new = live_in[b][w] | live_out[b][w] & !writes[b][w];
                changed |= new != live_in[b][w];
                live_in[b][w] = new;
            }
        }
    }
    let mut unset = live_in[0].clone();
    for r in &f.parameters {
        unset[r.at() / 64] &= !(1 << (r.at() % 64));
    }
    if unset.iter().any(|w| *w != 0) {
        return Err("a value that is not set on every path".into());
    }
    for block in &f.blocks {
        for (r, to) in &block.edge_copies {
            let elsewhere = block.successors.iter().filter(|s| *s != to);
            if elsewhere.into_iter().any(|s| live_in[*s][r.at() / 64] >> (r.at() % 64) & 1 == 1) {
                return Err("a critical edge".into());
            }
        }
    }
    Ok(live_out)
}

/// Live range of each virtual register. Parameters are written before the first instruction.
fn ranges(f: &MachineFunction, live_out: &[Vec<u64>]) -> Vec<LiveRanges> {
    let mut ranges = vec![LiveRanges::default(); f.virtuals.len()];
    // Backward, so that segments are in reverse order.
    let n: u32 = f.blocks.iter().map(|b| b.insts.len() as u32).sum();
    let mut end = (n + 1) * STEP;
    // End of the open segment.
    let mut open = vec![0u32; f.virtuals.len()];
    for (b, block) in f.blocks.iter().enumerate().rev() {
        let start = end - block.insts.len() as u32 * STEP;
        let scale = 10f64.powi(block.depth.min(8) as i32);
        let mut live: Vec<Reg> = Vec::new();
        for (w, word) in live_out[b].iter().enumerate() {
            let mut word = *word;
            while word != 0 {
                let r = Reg::new(w * 64 + word.trailing_zeros() as usize);
                open[r.at()] = end;
                live.push(r);
                word &= word - 1;
            }
        }
        for (i, inst) in block.insts.iter().enumerate().rev() {
            let at = start + i as u32 * STEP;
            let Constraints { tied, reads_late, writes_early, .. } = inst.constraints();
            if inst.def != NONE {
                let d = inst.def.at();
                let from = if writes_early { at } else { at + WRITE };
                let to = if open[d] == 0 { at + STEP } else { open[d] };
                ranges[d].segments.push((from, to));
                ranges[d].weight += scale;
                open[d] = 0;
            }
            let (tied, late) = if reads_late { (tied, at + WRITE + 1) } else { (None, at + CLOBBER) };
            each_use(f, inst, |r| {
                let v = r.at();
                ranges[v].weight += scale;
                let end = if Some(r) == tied { at + CLOBBER } else { late };
                if open[v] == 0 {
                    open[v] = end;
                    live.push(r);
                } else if open[v] < end {
                    open[v] = end;
                }
            });
        }
        for r in live {
            if open[r.at()] != 0 {
                ranges[r.at()].segments.push((start, open[r.at()]));
                open[r.at()] = 0;
            }
        }
        end = start;
    }
    for parameter in &f.parameters {
        let range = &mut ranges[parameter.at()];
        match range.segments.last_mut() {
            Some(first) if first.0 == STEP => first.0 = 0,
            _ => range.segments.push((0, 1)),
        }
    }
    for range in &mut ranges {
        range.segments.reverse();
        range.segments = merge(&range.segments, &[]);
    }
    ranges
}

/// Makes both sides of a copy share a register if they are never live at the same time.
fn coalesce(f: &MachineFunction, leaders: &mut [Reg], ranges: &mut [LiveRanges]) {
    let mut copies: Vec<(usize, Reg, Reg)> = Vec::new();
    for block in &f.blocks {
        for inst in &block.insts {
            if let Some(from) = inst.constraints().tied
                && inst.def != NONE
                && f.virtuals[from.at()].class == f.virtuals[inst.def.at()].class
                && f.virtuals[from.at()].pool.is_none()
            {
                copies.push((block.depth, inst.def, from));
            }
        }
    }
    copies.sort_by_key(|(depth, ..)| std::cmp::Reverse(*depth));
    for (_, a, b) in copies {
        let (a, b) = (find(leaders, a), find(leaders, b));
        if a == b || overlap(&ranges[a.at()].segments, &ranges[b.at()].segments) {
            continue;
        }
        let other = std::mem::take(&mut ranges[b.at()]);
        let range = &mut ranges[a.at()];
        range.segments = merge(&range.segments, &other.segments);
        range.weight += other.weight;
        leaders[b.at()] = a;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::super::encode::ConditionCode;
    use super::super::inst::{Base, BasicBlock, Call, Callee, Inst, MemoryAddress, Virtual};
    use super::super::opcodes::{PERMUTE_TWO_SINGLE, XOR};
    use super::*;

    /// Contents of each location: the virtual registers whose values it currently holds.
    type Held = BTreeMap<(u8, u64), BTreeSet<Reg>>;

    /// Executes a function symbolically, with virtual registers as values; the error says where a location
    /// does not hold the expected value.
    ///
    /// Source: the checker of regalloc2 (Fallin, 2021), which also follows moves; here, each virtual register
    /// has a single location.
    fn check(f: &MachineFunction, places: &[Location], registers: &Registers) -> Result<(), String> {
        let at = |v: Reg| {
            let place = match places[v.at()] {
                Location::Register(r) => u64::from(r),
                Location::Memory(slot) => 1 << 32 | slot.at() as u64,
                Location::Nowhere => return None,
            };
            Some((f.virtuals[v.at()].class as u8, place))
        };
        for class in [Class::Integer, Class::Vector, Class::Mask] {
            let all = || f.virtuals.iter().zip(places).filter(|(v, _)| v.class == class).map(|(_, place)| *place);
            let allowed = registers.of(class, all().any(|place| matches!(place, Location::Memory(_))));
            if let Some(Location::Register(r)) =
                all().find(|p| matches!(p, Location::Register(r) if !allowed.contains(r)))
            {
                return Err(format!("register {r} of {class:?} is not to be had"));
            }
        }
        let mut entry = Held::new();
        for p in &f.parameters {
            if let Some(place) = at(*p)
                && entry.insert(place, BTreeSet::from([*p])).is_some()
            {
                return Err(format!("two parameters in the place of {p:?}"));
            }
        }
        let mut held: Vec<Option<Held>> = vec![None; f.blocks.len()];
        held[0] = Some(entry);
        let mut work = vec![0];
        while let Some(b) = work.pop() {
            let mut now = held[b].clone().expect("its state is known");
            for inst in &f.blocks[b].insts {
                step(f, inst, &mut now, &at).map_err(|why| format!("block {b}, {:?}: {why}", inst.op))?;
            }
            for &next in &f.blocks[b].successors {
                let met = match &held[next] {
                    None => now.clone(),
                    Some(before) => {
                        let both = |(place, set): (&(u8, u64), &BTreeSet<Reg>)| {
                            Some((*place, set & now.get(place)?)).filter(|(_, set)| !set.is_empty())
                        };
                        before.iter().filter_map(both).collect()
                    }
                };
                if held[next].as_ref() != Some(&met) {
                    held[next] = Some(met);
                    work.push(next);
                }
            }
        }
        Ok(())
    }

    fn step(
        f: &MachineFunction,
        inst: &Inst,
        held: &mut Held,
        at: &dyn Fn(Reg) -> Option<(u8, u64)>,
    ) -> Result<(), String> {
        let Constraints { tied, reads_late, writes_early, lost } = inst.constraints();
        let d = (inst.def != NONE).then(|| at(inst.def)).flatten();
        let mut wrong = None;
        each_use(f, inst, |r| {
            let place = at(r);
            if !place.is_some_and(|place| held.get(&place).is_some_and(|set| set.contains(&r))) {
                wrong = Some(format!("{r:?} is not in its place"));
            }
            let is_register = |place: &(u8, u64)| place.1 < 1 << 32;
            if d.is_some_and(|d| is_register(&d)) && d == place && (writes_early || reads_late && tied != Some(r)) {
                wrong = Some(format!("{r:?} is read after it is overwritten"));
            }
            let division = [RAX, RDX].map(|r| Some((Class::Integer as u8, r.into())));
            if lost == Lost::Division && division.contains(&place) {
                wrong = Some(format!("{r:?} is lost before it is read"));
            }
        });
        if let Some(why) = wrong {
            return Err(why);
        }
        held.retain(|(class, place), _| match lost {
            Lost::Nothing => true,
            Lost::Division => *class != Class::Integer as u8 || ![RAX, RDX].map(u64::from).contains(place),
            Lost::Call if *class == Class::Integer as u8 => {
                !INTEGERS[..N_CALLER_SAVED].iter().any(|r| u64::from(*r) == *place)
            }
            Lost::Call => *place >= 1 << 32,
        });
        if inst.def == NONE {
            return Ok(());
        }
        let is_copy = inst.op == MachineOp::Move && inst.operand.is_none() && d == at(inst.uses[0]);
        held.values_mut().for_each(|set| {
            set.remove(&inst.def);
        });
        if let Some(d) = d {
            let set = held.entry(d).or_default();
            if !is_copy {
                set.clear();
            }
            set.insert(inst.def);
        }
        Ok(())
    }

    const CLASSES: [Class; 3] = [Class::Integer, Class::Vector, Class::Mask];

    /// Creates an instruction of one of many kinds, on registers of suitable classes.
    fn inst(kind: usize, [d, a, b, c]: [usize; 4], n: [usize; 3]) -> (Inst, Option<Call>) {
        let of = |class: usize, at: usize| Reg::new(n[..class].iter().sum::<usize>() + at % n[class]);
        let [int, vec, mask] = [0, 1, 2].map(|class| move |at: usize| of(class, at));
        let memory = MemoryAddress { base: Base::Register(int(b)), index: Some((int(c), 2)), disp: 0 };
        let inst = match kind {
            0 => Inst::new(MachineOp::Move, int(d), &[int(a)], 8),
            1 => Inst::new(MachineOp::Move, vec(d), &[vec(a)], 64),
            2 => Inst::new(MachineOp::Move, mask(d), &[mask(a)], 8),
            3 => Inst::new(MachineOp::IntegerBinary(0), int(d), &[int(a), int(b)], 8),
            4 => Inst::new(MachineOp::Multiply, int(d), &[int(a), int(b)], 8),
            5 => Inst::new(MachineOp::Choose(ConditionCode::Less), int(d), &[int(a), int(b)], 8),
            6 => Inst::new(MachineOp::Select(ConditionCode::Less), vec(d), &[vec(a), vec(b)], 64),
            7 => Inst::new(MachineOp::Address, int(d), &[], 8).with(memory, false),
            8 => Inst::new(MachineOp::Binary(XOR), vec(d), &[vec(a), vec(b)], 64),
            9 => {
                let op = MachineOp::Fma { wide: false, negate_product: false, negate_addend: false, addend: false };
                Inst::new(op, vec(d), &[vec(a), vec(b), vec(c)], 64)
            }
            10 => Inst::new(MachineOp::Tied(PERMUTE_TWO_SINGLE), vec(d), &[vec(a), vec(b), vec(c)], 64),
            11 => Inst::new(MachineOp::LoadMasked(4), vec(d), &[mask(a), vec(a)], 64).with(memory, false),
            12 => Inst::new(MachineOp::Blend(4), vec(d), &[mask(a), vec(b), vec(c)], 64),
            13 => Inst::new(MachineOp::Divide { signed: true, remainder: false }, int(d), &[int(a), int(b)], 8),
            14 => Inst::new(MachineOp::Store, NONE, &[vec(a)], 64).with(memory, false),
            15 => {
                Inst::new(MachineOp::Gather { wide: false }, vec(d), &[mask(a), vec(b), vec(c)], 64).with(memory, false)
            }
            16 => Inst::new(MachineOp::ToReal { wide: true, long: true }, vec(d), &[int(a)], 16),
            _ => {
                let call = Call {
                    callee: Callee::Pointer(int(d)),
                    arguments: vec![int(a), int(b), int(c)],
                    reals: Vec::new(),
                };
                return (Inst::new(MachineOp::Call(0), NONE, &[], 16), Some(call));
            }
        };
        (inst, None)
    }

    /// Function whose registers are all set at the start: the number of registers of each class, and for each
    /// block its depth, a successor other than the next block, and kinds and operands of instructions.
    type Choices = ([usize; 3], Vec<(usize, Option<usize>, Vec<(usize, [usize; 4])>)>);

    fn choices() -> impl Strategy<Value = Choices> {
        let insts = prop::collection::vec((0usize..18, prop::array::uniform4(0usize..1000)), 0..12);
        let blocks = prop::collection::vec((0usize..3, prop::option::of(1usize..100), insts), 1..6);
        ([1usize..24, 1usize..48, 1usize..12], blocks)
    }

    fn function((n, blocks): &Choices) -> MachineFunction {
        let mut f = MachineFunction::default();
        for (class, n) in CLASSES.into_iter().zip(n) {
            f.virtuals.extend((0..*n).map(|_| Virtual { class, bytes: 64, pool: None }));
        }
        // The first two integers are parameters.
        f.parameters = (0..n[0].min(2)).map(Reg::new).collect();
        let set = (f.parameters.len()..f.virtuals.len()).map(|v| Inst::new(MachineOp::Undefined, Reg::new(v), &[], 64));
        f.blocks.push(BasicBlock { insts: set.collect(), successors: vec![1], ..BasicBlock::default() });
        let last = blocks.len();
        for (at, (depth, other, insts)) in blocks.iter().enumerate() {
            let mut block = BasicBlock { depth: *depth, ..BasicBlock::default() };
            for (kind, operands) in insts {
                let (mut inst, call) = inst(*kind, *operands, *n);
                if let Some(call) = call {
                    inst.op = MachineOp::Call(f.calls.len());
                    f.calls.push(call);
                }
                // Instruction selection never uses as operands the results that must differ from them.
                let Constraints { reads_late, writes_early, .. } = inst.constraints();
                if !(reads_late || writes_early) || !inst.uses.contains(&inst.def) {
                    block.insts.push(inst);
                }
            }
            if at + 1 < last {
                block.successors.push(at + 2);
                block.successors.extend(other.map(|to| 1 + to % last));
            }
            f.blocks.push(block);
        }
        f
    }

    proptest! {
        #[test]
        fn every_value_is_where_it_is_looked_for(choices in choices(), n_vectors in prop::sample::select(vec![16u8, 32])) {
            let (f, registers) = (function(&choices), Registers { n_vectors });
            let places = allocate(&f, &registers).expect("every register is set");
            prop_assert_eq!(check(&f, &places, &registers), Ok(()));
        }

        /// Checks that the checker detects an error: two values that are both live in one register.
        #[test]
        fn a_shared_register_is_seen(choices in choices()) {
            let mut f = function(&choices);
            let both = [0, 1].map(|at| Reg::new(f.virtuals.len() + at));
            f.virtuals.extend([Virtual { class: Class::Integer, bytes: 8, pool: None }; 2]);
            f.blocks[0].insts.extend(both.map(|v| Inst::new(MachineOp::Integer(1), v, &[], 8)));
            let last = f.blocks.last_mut().expect("blocks");
            last.insts.insert(0, Inst::new(MachineOp::Compare, NONE, &both, 8));
            let registers = Registers { n_vectors: 32 };
            let mut places = allocate(&f, &registers).expect("every register is set");
            prop_assert_eq!(check(&f, &places, &registers), Ok(()));
            places[both[1].at()] = places[both[0].at()];
            prop_assert!(check(&f, &places, &registers).is_err());
        }
    }
}
