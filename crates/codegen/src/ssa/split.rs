//! Splitting of vectors wider than a machine's registers into halves.

use smallvec::{SmallVec, smallvec};

use super::{Def, Function, Id, Instruction, LaneKind, SsaOp, Type, Value, VectorConstant};
use crate::map::Map;

/// Halves of a value.
type Halves = [Id; 2];

impl Function {
    /// Splits vectors of up to twice `native` bytes. A function with an operation that cannot be split is
    /// left unchanged. Pointers must have been lowered to integers.
    pub fn split_long(&mut self, native: usize) {
        let is_long = |id: &Id| self.values[id.at()].ty.bytes() > native;
        if !self.blocks.iter().flatten().any(|inst| touches(inst, &is_long)) {
            return;
        }
        let mut variables = vec![false; self.values.len()];
        for inst in self.blocks.iter().flatten().filter(|inst| matches!(inst.op, SsaOp::Variable(_))) {
            inst.result.into_iter().for_each(|id| variables[id.at()] = true);
        }
        let fits = |inst: &Instruction| !touches(inst, &is_long) || self.has_halves(inst, native, &variables);
        if !self.blocks.iter().flatten().all(fits) {
            return;
        }
        let mut split = VectorSplitter { native, halves: Map::default(), parts: Map::default(), out: Vec::new() };
        for id in (0..self.values.len()).map(Id::new) {
            split.prepare(self, id);
        }
        for block in 0..self.blocks.len() {
            split.parts.clear();
            for inst in std::mem::take(&mut self.blocks[block]) {
                if !is_of_addresses(&inst) && touches(&inst, &|id| split.halves.contains_key(id)) {
                    split.instruction(self, &inst);
                } else {
                    split.out.push(inst);
                }
            }
            self.blocks[block] = std::mem::take(&mut split.out);
        }
    }

    /// Whether an instruction on long vectors can be split into instructions on their halves.
    fn has_halves(&self, inst: &Instruction, native: usize, variables: &[bool]) -> bool {
        let fits = |id: &Id| {
            let ty = self.values[id.at()].ty;
            ty.bytes() <= 2 * native && (ty.lanes == 1 || ty.lanes.is_multiple_of(2))
        };
        let is_own = match &inst.op {
            SsaOp::Load { .. } => !variables[inst.operands[0].at()],
            SsaOp::Store => !variables[inst.operands[1].at()],
            SsaOp::Add | SsaOp::Sub | SsaOp::Mul | SsaOp::AddWrapping | SsaOp::SubWrapping | SsaOp::MulWrapping => true,
            SsaOp::ShiftLeft | SsaOp::ShiftSigned | SsaOp::ShiftUnsigned | SsaOp::And | SsaOp::Or | SsaOp::Xor => true,
            SsaOp::SignedMin | SsaOp::SignedMax | SsaOp::Compare(_) | SsaOp::FLess | SsaOp::Select => true,
            SsaOp::FAdd
            | SsaOp::FSub
            | SsaOp::FMul
            | SsaOp::FDiv
            | SsaOp::FNeg
            | SsaOp::FAbs
            | SsaOp::Sqrt
            | SsaOp::Round(_) => true,
            SsaOp::CopySign | SsaOp::FMin | SsaOp::FMax | SsaOp::Scale | SsaOp::Fma => true,
            SsaOp::Truncate | SsaOp::ExtendSigned | SsaOp::ExtendUnsigned | SsaOp::ToReal | SsaOp::Convert => true,
            SsaOp::ToInteger | SsaOp::ToIntegerInRange | SsaOp::ToIntegerOrLeast { .. } => true,
            SsaOp::TruncateSaturated | SsaOp::Splat => true,
            SsaOp::MaskedLoad | SsaOp::MaskedStore | SsaOp::Phi(_) | SsaOp::Insert(_) | SsaOp::Extract(_) => true,
            _ => false,
        };
        is_own && inst.result.iter().chain(&inst.operands).all(fits)
    }
}

/// Whether an instruction computes or uses lane addresses, which are never in a register.
fn is_of_addresses(inst: &Instruction) -> bool {
    matches!(inst.op, SsaOp::Element(_) | SsaOp::Gather | SsaOp::Scatter)
}

fn touches(inst: &Instruction, is_long: &dyn Fn(&Id) -> bool) -> bool {
    !is_of_addresses(inst) && inst.result.iter().chain(&inst.operands).any(is_long)
}

struct VectorSplitter {
    native: usize,
    /// Halves of each long value.
    halves: Map<Id, Halves>,
    /// Halves of other vectors, extracted in this block.
    parts: Map<(Id, usize), Id>,
    out: Vec<Instruction>,
}

impl VectorSplitter {
    /// Creates the halves of a long value.
    fn prepare(&mut self, f: &mut Function, id: Id) {
        let Value { ty, def } = f.values[id.at()].clone();
        if ty.bytes() <= self.native || ty.lanes == 1 {
            return;
        }
        self.halves.insert(id, [0, 1].map(|half| value(f, half_of(ty), half_of_def(&def, ty.lanes, half))));
    }

    /// Returns a half of an operand; a scalar is its own half.
    fn half(&mut self, f: &mut Function, id: Id, half: usize) -> Id {
        let Value { ty, def } = f.values[id.at()].clone();
        if let Some(halves) = self.halves.get(&id) {
            return halves[half];
        }
        if ty.lanes == 1 {
            return id;
        }
        if let Some(part) = self.parts.get(&(id, half)) {
            return *part;
        }
        let to = half_of(ty);
        let part = match def {
            Def::Instruction | Def::Argument(_) => {
                let first = half * to.lanes;
                let part = value(f, to, Def::Instruction);
                let lanes = (first..first + to.lanes).map(|lane| lane as i32).collect();
                self.give(SsaOp::Shuffle(lanes), smallvec![id, id], part, 0);
                part
            }
            def => value(f, to, half_of_def(&def, ty.lanes, half)),
        };
        self.parts.insert((id, half), part);
        part
    }

    fn give(&mut self, op: SsaOp, operands: SmallVec<[Id; 4]>, result: Id, align: u32) {
        self.out.push(Instruction { op, operands, result: Some(result), align });
    }

    fn instruction(&mut self, f: &mut Function, inst: &Instruction) {
        let lanes = |f: &Function, id: Id| f.values[id.at()].ty.lanes;
        match inst.op {
            SsaOp::Extract(lane) => {
                let (from, n) = (inst.operands[0], lanes(f, inst.operands[0]) / 2);
                let part = self.half(f, from, lane / n);
                return self.give(SsaOp::Extract(lane % n), smallvec![part], inst.result.expect("a lane"), 0);
            }
            SsaOp::Insert(lane) => {
                let (into, n) = (inst.operands[0], lanes(f, inst.operands[0]) / 2);
                let result = self.halves[&inst.result.expect("a vector")];
                for (half, result) in result.into_iter().enumerate() {
                    let part = self.half(f, into, half);
                    let (op, operands) = match half == lane / n {
                        true => (SsaOp::Insert(lane % n), smallvec![part, inst.operands[1]]),
                        false => (SsaOp::Opaque, smallvec![part]),
                    };
                    self.give(op, operands, result, 0);
                }
                return;
            }
            _ => {}
        }
        let results = inst.result.map(|id| match self.halves.get(&id) {
            Some(halves) => *halves,
            None => [0, 1].map(|_| value(f, half_of(f.values[id.at()].ty), Def::Instruction)),
        });
        // Index of the address among the operands, and the type of the vector there.
        let memory = match inst.op {
            SsaOp::Load { .. } | SsaOp::MaskedLoad => Some((0, inst.result.expect("what is loaded"))),
            SsaOp::Store | SsaOp::MaskedStore => Some((1, inst.operands[0])),
            _ => None,
        };
        for half in 0..2 {
            let mut operands = SmallVec::new();
            for (at, id) in inst.operands.iter().enumerate() {
                operands.push(match memory {
                    Some((place, vector)) if place == at => self.address(f, *id, half, f.values[vector.at()].ty),
                    _ => self.half(f, *id, half),
                });
            }
            let result = results.map(|halves| halves[half]);
            self.out.push(Instruction { operands, result, ..inst.clone() });
        }
        if let (Some(id), Some([low, high])) = (inst.result, results)
            && !self.halves.contains_key(&id)
        {
            let all = (0..lanes(f, id) as i32).collect();
            self.give(SsaOp::Shuffle(all), smallvec![low, high], id, 0);
        }
    }

    /// Address of a half of a vector in memory.
    fn address(&mut self, f: &mut Function, first: Id, half: usize, ty: Type) -> Id {
        if half == 0 {
            return first;
        }
        let bytes = VectorConstant { bits: smallvec![ty.bytes() as u64 / 2], undefined: 0 };
        let offset = value(f, Type::I64, Def::Constant(bytes));
        let address = value(f, f.values[first.at()].ty, Def::Instruction);
        self.give(SsaOp::Element(Type { kind: LaneKind::I8, lanes: 1 }), smallvec![first, offset], address, 0);
        address
    }
}

fn half_of(ty: Type) -> Type {
    Type { lanes: ty.lanes / 2, ..ty }
}

fn half_of_def(def: &Def, lanes: usize, half: usize) -> Def {
    match def {
        Def::Constant(c) => {
            let n = lanes / 2;
            let bits = c.bits[half * n..][..n].iter().copied().collect();
            Def::Constant(VectorConstant { bits, undefined: c.undefined >> (half * n) & ((1 << n) - 1) })
        }
        def => def.clone(),
    }
}

fn value(f: &mut Function, ty: Type, def: Def) -> Id {
    f.values.push(Value { ty, def });
    Id::new(f.values.len() - 1)
}
