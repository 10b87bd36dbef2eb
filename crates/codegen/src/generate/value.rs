//! Values of expressions and conditions, as scalars and, inside a vectorized loop, as vectors.
//!
//! A value that is the same in all lanes stays a scalar until it is combined with a vector.

use std::collections::BTreeSet;

use tilewright_ir::expr::{BinaryOp, Cond, Expr, ReduceOp, UnaryOp};
use tilewright_ir::target::Arch;
use tilewright_ir::{BufferId, DType, Index, LoopId, Scope};

use super::memory::LoadKey;
pub(super) use super::operand::LaneOperand;
use super::{Generator, Storage, WrittenLanes, plan, range};
use crate::map::Map;
use crate::ssa::{Compare, Id, LaneKind, Linkage, RoundingDirection, SsaOp, Type};

/// Minimum number of lanes of an integer vector that is narrowed with saturation.
const LEAST_SATURATED: usize = 4;

/// Largest quotient that is correctly rounded by a product with a reciprocal; all larger ones are integers.
const MOST_CORRECTED: f64 = 1_073_741_824.0;

/// Whether a type is an integer type narrower than its arithmetic.
fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::I8 | DType::U8 | DType::I16 | DType::U16)
}

/// Operand of a cast to an integer type, with its arithmetic, if the integer type is known to hold its
/// values.
fn float_within(x: &Expr, to: DType) -> Option<(DType, &Expr)> {
    let Expr::Cast(from @ (DType::F32 | DType::F64), x) = x else { return None };
    (is_narrow(to) && range::fits(x, to)).then(|| (*from, x.without_cast(*from)))
}

/// Operand of a cast to an integer type that is clipped between 0 and a bound that the type holds, with its
/// arithmetic and the bound. The operand may be NaN, which the cast converts to 0.
fn clip_within(x: &Expr, to: DType) -> Option<(DType, &Expr, f64)> {
    let Expr::Cast(from @ (DType::F32 | DType::F64), x) = x else { return None };
    let bound = |x: &Expr| match x {
        Expr::Const(v) if v.fract() == 0.0 && to.wrap(*v as i128) as f64 == *v => Some(*v),
        _ => None,
    };
    let Expr::Binary(outer, inside, second) = x.without_cast(*from) else { return None };
    let Expr::Binary(inner, x, first) = inside.without_cast(*from) else { return None };
    let (first, second) = (bound(first)?, bound(second)?);
    let (low, high) = match (inner, outer) {
        (BinaryOp::Max, BinaryOp::Min) => (first, second),
        (BinaryOp::Min, BinaryOp::Max) => (second, first),
        _ => return None,
    };
    (is_narrow(to) && low == 0.0 && high > 0.0).then(|| (*from, x.without_cast(*from), high))
}

/// Clipped operand like that of [`clip_within`], for casts in which a condition converts NaN to 0.
pub(super) fn chosen_within(x: &Expr, to: DType) -> Option<(DType, &Expr, f64)> {
    let Expr::Cast(from @ (DType::F32 | DType::F64), x) = x else { return None };
    let Expr::Select(cond, inside, otherwise) = x.without_cast(*from) else { return None };
    let Expr::Binary(BinaryOp::Min, least, high) = inside.without_cast(*from) else { return None };
    let (Cond::Less(low, x), Expr::Const(high)) = (&**cond, &**high) else { return None };
    let is_held = is_narrow(to) && *high > 0.0 && to.wrap(*high as i128) as f64 == *high;
    let is_clip = x == least && [low, otherwise].into_iter().all(|end| **end == Expr::Const(0.0));
    (is_held && is_clip).then(|| (*from, least.without_cast(*from), *high))
}

/// Matches the sum of rounded numbers and an integer that is the same in all lanes and between two ends.
pub(super) fn rounded_and_shifted(x: &Expr, ends: [f64; 2], lane: Option<LoopId>) -> Option<(&Expr, &Expr)> {
    let Expr::Binary(BinaryOp::Add, x, shift) = x else { return None };
    let Expr::Unary(UnaryOp::Round, x) = x.without_cast(DType::F32) else { return None };
    let shift = shift.without_cast(DType::F32);
    let is_within = range::range(shift).is_some_and(|[low, high]| ends[0] <= low && high <= ends[1]);
    let is_integer = match shift {
        Expr::Cast(to, _) => !to.is_float(),
        Expr::Const(v) => v.fract() == 0.0,
        _ => false,
    };
    (is_within && is_integer && lane.is_none_or(|lane| !shift.uses(lane))).then(|| (x.without_cast(DType::F32), shift))
}

impl Generator<'_> {
    /// Type of the arithmetic of an element type.
    pub(super) fn arithmetic_type(&self, dtype: DType) -> Type {
        match dtype.arithmetic() {
            DType::F32 => Type::F32,
            DType::F64 => Type::F64,
            DType::I32 => Type::I32,
            DType::I64 | DType::U64 => Type::I64,
            other => unreachable!("nothing is computed in {}", other.name()),
        }
    }

    /// Type of values evaluated in `dtype`; 16-bit floats, in which nothing is computed, have their storage
    /// type.
    pub(super) fn value_type(&self, dtype: DType) -> Type {
        match dtype {
            DType::F16 => Type::F16,
            DType::Bf16 if self.target.gpu.is_none() => Type::I16,
            DType::Bf16 => Type::BF16,
            dtype => self.arithmetic_type(dtype),
        }
    }

    /// Constant of a type.
    fn number(&self, dtype: DType, v: f64) -> Id {
        let ty = self.value_type(dtype);
        if self.is_upper_half(dtype) {
            return self.m.integer(ty, i64::from((v as f32).to_bits() >> 16));
        }
        if dtype.is_float() { self.m.real(ty, v) } else { self.m.integer(ty, dtype.arithmetic().literal(v) as i64) }
    }

    /// Broadcasts a value to a vector of `n` lanes; no change if `n` is 0.
    pub(super) fn widen(&mut self, x: LaneOperand, n: usize) -> Id {
        if x.lanes == n || n == 0 {
            return x.value;
        }
        if let Some(v) = self.f.seen.splats.get(&(x.value, n)) {
            return *v;
        }
        let v = self.m.splat(x.value, n);
        self.f.seen.splats.insert((x.value, n), v);
        v
    }

    fn pair(&mut self, a: LaneOperand, b: LaneOperand) -> (Id, Id, usize) {
        let n = a.lanes.max(b.lanes);
        (self.widen(a, n), self.widen(b, n), n)
    }

    /// Evaluates an expression in the arithmetic of `dtype`, or moves 16-bit floats unchanged.
    pub(super) fn eval(&mut self, e: &Expr, dtype: DType) -> LaneOperand {
        match e {
            Expr::Const(v) => LaneOperand::scalar(self.number(dtype, *v)),
            Expr::Load(buffer, index) => {
                let loaded = self.load(*buffer, index);
                self.element(*buffer, loaded, dtype)
            }
            Expr::Gather(buffer, subscripts) => {
                if let Some(found) = self.looked_up(*buffer, subscripts, dtype) {
                    return found;
                }
                let gathered = self.gather(*buffer, subscripts);
                self.element(*buffer, gathered, dtype)
            }
            Expr::FromIndex(index) => {
                let x = self.index_operand(index);
                self.convert(x, DType::I64, dtype)
            }
            Expr::Unary(op, x) => {
                let x = match op.rounded_difference(x, dtype) {
                    Some((product, z)) if dtype.is_float() => {
                        let [product, z] = [product, z].map(|x| self.eval(x, dtype));
                        self.combine(BinaryOp::Sub, product, z)
                    }
                    _ if *op == UnaryOp::Round => self.rounded_next(x, dtype),
                    _ => self.eval(x, dtype),
                };
                self.unary(*op, x, dtype)
            }
            Expr::Binary(op, a, b) => self.binary(*op, a, b, dtype),
            Expr::Select(cond, a, b) => self.select(cond, a, b, dtype),
            Expr::Cast(to, x) => self.cast(*to, x, dtype),
        }
    }

    /// Evaluates a number that is rounded to an integer next. A quotient whose divisor is the same in all
    /// lanes is a product with the reciprocal, corrected by the remainder: the correctly rounded quotient,
    /// unless it is above [`MOST_CORRECTED`] or the remainder is subnormal.
    pub(super) fn rounded_next(&mut self, x: &Expr, dtype: DType) -> LaneOperand {
        let Expr::Binary(BinaryOp::Div, dividend, divisor) = x.without_cast(dtype) else {
            return self.eval(x, dtype);
        };
        let [dividend, divisor] = [dividend, divisor].map(|x| x.without_cast(dtype));
        let is_alike = self.f.lanes.is_some_and(|lanes| lanes.piece.width > 1 && !divisor.uses(lanes.var));
        if !is_alike || !self.has_rounding() || dtype != DType::F32 {
            return self.eval(x, dtype);
        }
        let Some([divisor, reciprocal]) = self.with_reciprocal(divisor) else { return self.eval(x, dtype) };
        let dividend = self.eval(dividend, dtype);
        let n = dividend.lanes;
        if n == 0 {
            return self.combine(BinaryOp::Div, dividend, LaneOperand::scalar(divisor));
        }
        let [divisor, reciprocal] = [divisor, reciprocal].map(|x| self.widen(LaneOperand::scalar(x), n));
        let m = &self.m;
        let [low, high] = [-MOST_CORRECTED, MOST_CORRECTED].map(|end| m.splat(m.real(Type::F32, end), n));
        let near = m.binary(SsaOp::FMul, dividend.value, reciprocal);
        let near = m.select(m.fless(low, near), near, low);
        let near = m.select(m.fless(near, high), near, high);
        let remainder = m.fma(m.unary(SsaOp::FNeg, near), divisor, dividend.value);
        LaneOperand { value: m.fma(remainder, reciprocal, near), lanes: n }
    }

    /// Evaluates a divisor in f32 that is the same in all lanes, and its reciprocal, before all loops if it
    /// is an input's element; `None` for a constant without a normal reciprocal.
    fn with_reciprocal(&mut self, divisor: &Expr) -> Option<[Id; 2]> {
        let of = |g: &Self, divisor: Id| {
            let [one, most] = [1.0, f64::from(f32::MAX)].map(|x| g.m.real(Type::F32, x));
            let exact = g.m.binary(SsaOp::FDiv, one, divisor);
            [divisor, g.m.select(g.m.fless(most, exact), most, exact)]
        };
        match divisor {
            Expr::Const(x) => {
                let reciprocal = 1.0 / *x as f32;
                let is_normal = (*x as f32).is_normal() && reciprocal.is_normal();
                is_normal.then(|| [*x, reciprocal.into()].map(|x| self.m.real(Type::F32, x)))
            }
            Expr::Load(buffer, index) if self.is_constant(*buffer) && self.element_type(*buffer) == Type::F32 => {
                let at = self.flat(*buffer, index).as_const();
                let (Some(at), Some(Storage::Pointer(first))) = (at, self.f.storage.get(buffer)) else {
                    let divisor = self.load(*buffer, index);
                    return Some(of(self, divisor.value));
                };
                if let Some(known) = self.f.levels[0].reciprocals.get(&(*buffer, at)) {
                    return Some(*known);
                }
                let first = *first;
                let both = self.hoisted(0, |g| {
                    let pointer = g.m.element(Type::F32, first, g.m.int(at));
                    of(g, g.plain_load(*buffer, Type::F32, pointer, 4))
                });
                self.f.levels[0].reciprocals.insert((*buffer, at), both);
                Some(both)
            }
            _ => {
                let divisor = self.eval(divisor, DType::F32);
                Some(of(self, divisor.value))
            }
        }
    }

    /// Rounds a value to a type, in the arithmetic of `dtype`. Values that the type is known to hold are not
    /// clamped again, and floats read as floats are not converted.
    fn cast(&mut self, to: DType, x: &Expr, dtype: DType) -> LaneOperand {
        if let Some((from, x, high)) = clip_within(x, to)
            && dtype != from
            && self.target.arch == Arch::X86_64
        {
            let x = self.eval(x, from);
            let x = self.clipped(x, [0.0, high].map(|end| self.number(from, end)), to);
            return self.convert(x, to.arithmetic(), dtype);
        }
        let Some((from, number)) = float_within(x, to) else {
            let x = self.eval(x, to.arithmetic());
            let x = self.rounded_to(x, to);
            return self.convert(x, to.arithmetic(), dtype);
        };
        let x = self.eval(number, from);
        let is_whole = range::is_whole(number);
        if dtype == from && (is_whole || self.has_rounding()) {
            let whole = if is_whole { x.value } else { self.m.unary(SsaOp::Round(RoundingDirection::Zero), x.value) };
            // Integers have no negative zero.
            let zero = self.m.splat(self.number(dtype, 0.0), x.lanes.max(1));
            return LaneOperand { value: self.m.binary(SsaOp::FAdd, whole, zero), lanes: x.lanes };
        }
        let ty = self.arithmetic_type(to).vector(x.lanes.max(1));
        let x = LaneOperand { value: self.m.real_to_int_in_range(x.value, ty), lanes: x.lanes };
        self.convert(x, to.arithmetic(), dtype)
    }

    /// Clips a number between two bounds, with the lower one for NaN, and converts it to an integer type that
    /// holds both.
    fn clipped(&self, x: LaneOperand, ends: [Id; 2], to: DType) -> LaneOperand {
        let (m, n) = (&self.m, x.lanes.max(1));
        let [low, high] = ends.map(|end| m.splat(end, n));
        let within = m.select(m.fless(low, x.value), x.value, low);
        let within = m.select(m.fless(within, high), within, high);
        LaneOperand { value: m.real_to_int_in_range(within, self.arithmetic_type(to).vector(n)), ..x }
    }

    /// Whether the target rounds to integers in one instruction.
    pub(super) fn has_rounding(&self) -> bool {
        self.target.gpu.is_none() && self.target.has_fma
    }

    /// Converts an element of a buffer to the arithmetic of `dtype`.
    pub(super) fn element(&mut self, buffer: BufferId, x: LaneOperand, dtype: DType) -> LaneOperand {
        let of = self.program.buffer(buffer).dtype;
        if dtype.is_half() {
            assert_eq!(of, dtype, "halves are moved within their type");
            return x;
        }
        let ty = self.arithmetic_type(of).vector(x.lanes.max(1));
        let value = match of {
            DType::I8 | DType::I7 | DType::I16 => self.m.extend(x.value, ty, true),
            DType::U8 | DType::U16 | DType::U32 | DType::Bool => self.m.extend(x.value, ty, false),
            DType::F16 | DType::Bf16 => self.widened_half(x.value, of),
            _ => x.value,
        };
        self.convert(LaneOperand { value, lanes: x.lanes }, of.arithmetic(), dtype)
    }

    /// Converts a value in the arithmetic of a buffer's type to an element.
    fn as_element(&mut self, buffer: BufferId, x: LaneOperand) -> LaneOperand {
        let dtype = self.program.buffer(buffer).dtype;
        let x = if matches!(dtype, DType::Bool | DType::I7) { self.rounded_to(x, dtype) } else { x };
        let element = self.element_type(buffer);
        if self.m.type_of(x.value).kind == element.kind {
            return x;
        }
        let ty = element.vector(x.lanes.max(1));
        let value = match dtype {
            DType::Bf16 if self.serves_pairs(buffer, x.value) => self.m.nearest_bf16(x.value),
            DType::F16 | DType::Bf16 => self.half_of(x.value, dtype),
            _ => self.m.truncate(x.value, ty),
        };
        LaneOperand { value, lanes: x.lanes }
    }

    /// Rounds a value in a type's arithmetic to the type; integers keep their low bits.
    fn rounded_to(&mut self, x: LaneOperand, dtype: DType) -> LaneOperand {
        let n = x.lanes.max(1);
        let number = |g: &Self, v: i64| g.m.splat(g.m.integer(g.arithmetic_type(dtype), v), n);
        let low_bits = |g: &Self, element: Type| {
            let low = g.m.truncate(x.value, element.vector(n));
            g.m.extend(low, g.arithmetic_type(dtype).vector(n), !dtype.is_unsigned())
        };
        let value = match dtype {
            DType::I8 | DType::U8 => low_bits(self, Type::I8),
            DType::I7 => {
                let [low, high] = [-64, 64].map(|bound| number(self, bound));
                self.clamped(low_bits(self, Type::I8), low, high)
            }
            DType::I16 | DType::U16 => low_bits(self, Type::I16),
            DType::U32 => low_bits(self, Type::I32),
            DType::Bool => {
                let holds = self.m.compare(Compare::NotEqual, x.value, number(self, 0));
                self.m.select(holds, number(self, 1), number(self, 0))
            }
            DType::F16 | DType::Bf16 => self.widened_half(self.half_of(x.value, dtype), dtype),
            DType::F32 | DType::F64 | DType::I32 | DType::I64 | DType::U64 => x.value,
        };
        LaneOperand { value, lanes: x.lanes }
    }

    /// Clamps an integer between bounds.
    pub(super) fn clamped(&self, x: Id, low: Id, high: Id) -> Id {
        self.m.binary(SsaOp::SignedMax, self.m.binary(SsaOp::SignedMin, x, high), low)
    }

    /// Converts a value to another arithmetic.
    pub(super) fn convert(&mut self, x: LaneOperand, from: DType, to: DType) -> LaneOperand {
        let (from, to) = (from.arithmetic(), to.arithmetic());
        if from == to {
            return x;
        }
        let n = x.lanes.max(1);
        let ty = self.arithmetic_type(to).vector(n);
        let value = match (from.is_float(), to.is_float()) {
            (true, true) => self.m.real_to_real(x.value, ty),
            (true, false) if to == DType::U64 => self.unsigned_of_real(x.value, n),
            (true, false) if self.target.arch == Arch::X86_64 && x.lanes > 1 => self.saturated(x.value, ty),
            (true, false) => self.m.real_to_int(x.value, ty),
            (false, true) if from == DType::U64 => self.real_of_unsigned(x.value, ty),
            (false, true) => self.m.int_to_real(x.value, ty),
            (false, false) if from == DType::I32 => self.m.extend(x.value, ty, true),
            (false, false) if to == DType::I32 => self.m.truncate(x.value, ty),
            (false, false) => x.value,
        };
        LaneOperand { value, lanes: x.lanes }
    }

    /// Converts floating-point numbers to signed integers with the semantics of [`SsaOp::ToInteger`], in a
    /// few vector instructions, for machines whose conversion is undefined out of range.
    fn saturated(&self, x: Id, ty: Type) -> Id {
        let m = &self.m;
        let kind = m.type_of(x).element();
        let real = |v: f64| m.splat(m.real(kind, v), ty.lanes);
        let integer = |v: i64| m.splat(m.integer(ty.element(), v), ty.lanes);
        let (beyond, most) = match ty.kind {
            LaneKind::I32 => (2f64.powi(31), i64::from(i32::MAX)),
            _ => (2f64.powi(63), i64::MAX),
        };
        let below = if kind == Type::F32 { f64::from((beyond as f32).next_down()) } else { beyond.next_down() };
        let least = real(-beyond);
        let from_least = m.select(m.fless(least, x), x, least);
        let converted = m.real_to_int_in_range(from_least, ty);
        let otherwise = m.select(m.fless(real(below), x), integer(most), integer(0));
        m.select(m.fless(x, real(beyond)), converted, otherwise)
    }

    /// Converts an unsigned 64-bit integer to floating point, rounding once: an integer with the highest bit
    /// set becomes twice its converted half, whose last bit is sticky.
    fn real_of_unsigned(&self, x: Id, ty: Type) -> Id {
        let m = &self.m;
        let [zero, one] = [0, 1].map(|v| m.splat(m.int(v), ty.lanes));
        let half = m.binary(SsaOp::Or, m.binary(SsaOp::ShiftUnsigned, x, one), m.binary(SsaOp::And, x, one));
        let half = m.int_to_real(half, ty);
        let is_large = m.compare(Compare::Less, x, zero);
        m.select(is_large, m.binary(SsaOp::FAdd, half, half), m.int_to_real(x, ty))
    }

    /// Converts a floating-point number to an unsigned 64-bit integer, with the semantics of
    /// [`SsaOp::ToInteger`].
    fn unsigned_of_real(&self, x: Id, n: usize) -> Id {
        let m = &self.m;
        let ty = Type::I64.vector(n);
        let kind = m.type_of(x).element();
        let real = |v: f64| m.splat(m.real(kind, v), n);
        // Largest number below half of the range's end.
        let below = if kind == Type::F32 { 2f64.powi(63) - 2f64.powi(39) } else { 2f64.powi(63) - 1024.0 };
        let low = m.binary(SsaOp::SignedMax, m.real_to_int(x, ty), m.splat(m.int(0), n));
        let high = m.real_to_int(m.binary(SsaOp::FSub, x, real(2f64.powi(63))), ty);
        let high = m.binary(SsaOp::Xor, high, m.splat(m.int(i64::MIN), n));
        m.select(m.fless(real(below), x), high, low)
    }

    /// Evaluates a function of two numbers. A product and its sum with a number are one operation unless a
    /// cast rounds the product in between, or a factor is an integer: dequantized numbers are rounded, as in
    /// ONNX Runtime.
    fn binary(&mut self, op: BinaryOp, a: &Expr, b: &Expr, dtype: DType) -> LaneOperand {
        if !dtype.is_float() {
            return self.integer_binary(op, a.without_cast(dtype), b.without_cast(dtype), dtype);
        }
        match (op, a, b) {
            (BinaryOp::Add, Expr::Binary(BinaryOp::Mul, x, y), z)
            | (BinaryOp::Add, z, Expr::Binary(BinaryOp::Mul, x, y))
                if !self.has_integer([x, y]) =>
            {
                let z = self.eval(z, dtype);
                self.multiply_add(x, y, z, false, dtype)
            }
            (BinaryOp::Sub, Expr::Binary(BinaryOp::Mul, x, y), z) if !self.has_integer([x, y]) => {
                let z = self.eval(z, dtype);
                let z = LaneOperand { value: self.m.unary(SsaOp::FNeg, z.value), lanes: z.lanes };
                self.multiply_add(x, y, z, false, dtype)
            }
            (BinaryOp::Sub, z, Expr::Binary(BinaryOp::Mul, x, y)) if !self.has_integer([x, y]) => {
                let z = self.eval(z, dtype);
                self.multiply_add(x, y, z, true, dtype)
            }
            _ => self.separate(op, a.without_cast(dtype), b.without_cast(dtype), dtype),
        }
    }

    /// Whether one of two factors is an element of an integer buffer or a cast to an integer, or one of these
    /// as a number.
    fn has_integer(&self, factors: [&Expr; 2]) -> bool {
        factors.into_iter().any(|factor| self.is_integer(factor))
    }

    fn is_integer(&self, factor: &Expr) -> bool {
        match factor {
            Expr::Cast(to, x) => !to.is_float() || self.is_integer(x),
            Expr::Load(buffer, _) => !self.program.buffer(*buffer).dtype.is_float(),
            _ => false,
        }
    }

    /// Evaluates a function of two numbers that is one operation.
    fn separate(&mut self, op: BinaryOp, a: &Expr, b: &Expr, dtype: DType) -> LaneOperand {
        match (op, a, b) {
            (BinaryOp::Pow, x, Expr::Const(n)) if [1.0, 2.0, 3.0, 4.0].contains(n) => {
                let x = self.eval(x, dtype);
                if *n == 1.0 {
                    return x;
                }
                let square = self.combine(BinaryOp::Mul, x, x);
                let further = if *n == 3.0 { x } else { square };
                if *n == 2.0 { square } else { self.combine(BinaryOp::Mul, square, further) }
            }
            (BinaryOp::Nibble, ..) => {
                let bits = self.integer_binary(op, a, b, DType::I32);
                self.convert(bits, DType::I32, dtype)
            }
            (BinaryOp::Pow, ..) => {
                let (a, b) = (self.eval(a, dtype), self.eval(b, dtype));
                let (a, b, lanes) = self.pair(a, b);
                let suffix = if dtype == DType::F32 { "f" } else { "" };
                let value = self.library_call(&format!("pow{suffix}"), &[a, b], lanes, dtype);
                LaneOperand { value, lanes }
            }
            _ => {
                let (a, b) = (self.eval(a, dtype), self.eval(b, dtype));
                self.combine(op, a, b)
            }
        }
    }

    /// Evaluates a function of two integers. Powers are computed in floating point.
    fn integer_binary(&mut self, op: BinaryOp, a: &Expr, b: &Expr, dtype: DType) -> LaneOperand {
        let (a, b) = (self.eval(a, dtype), self.eval(b, dtype));
        match op {
            BinaryOp::Div => self.quotient(a, b, dtype),
            BinaryOp::Pow => {
                let [a, b] = [a, b].map(|x| self.convert(x, dtype, DType::F64));
                let (a, b, lanes) = self.pair(a, b);
                let value = LaneOperand { value: self.library_call("pow", &[a, b], lanes, DType::F64), lanes };
                self.convert(value, DType::F64, dtype)
            }
            BinaryOp::Nibble => self.nibble(a, b),
            BinaryOp::Min | BinaryOp::Max => self.extreme(op, a, b, dtype),
            BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul => self.combine(op, a, b),
        }
    }

    /// Extracts four bits of integers.
    fn nibble(&mut self, x: LaneOperand, at: LaneOperand) -> LaneOperand {
        let (x, at, lanes) = self.pair(x, at);
        let ty = self.m.type_of(x).element();
        let number = |n: i64| self.m.splat(self.m.integer(ty, n), lanes.max(1));
        let distance = self.m.binary(SsaOp::ShiftLeft, at, number(2));
        let value = self.m.binary(SsaOp::And, self.m.binary(SsaOp::ShiftUnsigned, x, distance), number(15));
        LaneOperand { value, lanes }
    }

    /// Quotient of integers without hardware faults: zero for division by zero, the negated dividend for −1.
    fn quotient(&mut self, a: LaneOperand, b: LaneOperand, dtype: DType) -> LaneOperand {
        let ty = self.m.type_of(b.value);
        let number = |g: &Self, v: i64| g.m.splat(g.m.integer(ty.element(), v), ty.lanes);
        let is = |g: &Self, v: i64| g.m.compare(Compare::Equal, b.value, number(g, v));
        let (is_zero, is_negative) = (is(self, 0), is(self, -1));
        let is_never = |g: &Self, cond: Id| g.m.as_const_bool(cond) == Some(false);
        let one = number(self, 1);
        let mut divisor = self.m.select(is_zero, one, b.value);
        if !dtype.is_unsigned() {
            divisor = self.m.select(is_negative, one, divisor);
        }
        let (x, y, lanes) = self.pair(a, LaneOperand { value: divisor, lanes: b.lanes });
        let op = if dtype.is_unsigned() { SsaOp::UnsignedDiv } else { SsaOp::SignedDiv };
        let mut value = self.m.binary(op, x, y);
        let zero = self.m.splat(self.m.integer(ty.element(), 0), lanes.max(1));
        let spread = |g: &mut Self, cond: Id| g.widen(LaneOperand { value: cond, lanes: b.lanes }, lanes);
        if !dtype.is_unsigned() && !is_never(self, is_negative) {
            let (cond, negative) = (spread(self, is_negative), self.m.binary(SsaOp::SubWrapping, zero, x));
            value = self.m.select(cond, negative, value);
        }
        if !is_never(self, is_zero) {
            let cond = spread(self, is_zero);
            value = self.m.select(cond, zero, value);
        }
        LaneOperand { value, lanes }
    }

    /// Minimum or maximum of integers. Unsigned integers are compared with their highest bits flipped.
    fn extreme(&mut self, op: BinaryOp, a: LaneOperand, b: LaneOperand, dtype: DType) -> LaneOperand {
        if dtype.arithmetic() != DType::U64 {
            return self.combine(op, a, b);
        }
        let [a, b] = [a, b].map(|x| self.turned(x));
        let value = self.combine(op, a, b);
        self.turned(value)
    }

    /// Flips the highest bit of a 64-bit integer.
    fn turned(&self, x: LaneOperand) -> LaneOperand {
        let bit = self.m.splat(self.m.int(i64::MIN), x.lanes.max(1));
        LaneOperand { value: self.m.binary(SsaOp::Xor, x.value, bit), lanes: x.lanes }
    }

    /// `x · y + z`, or `z − x · y`, rounded once if the machine has fused multiply-adds.
    fn multiply_add(&mut self, x: &Expr, y: &Expr, z: LaneOperand, negate: bool, dtype: DType) -> LaneOperand {
        let (x, y) = (self.eval(x, dtype), self.eval(y, dtype));
        if !self.target.has_fma {
            let product = self.combine(BinaryOp::Mul, x, y);
            let op = if negate { BinaryOp::Sub } else { BinaryOp::Add };
            return self.combine(op, z, product);
        }
        let n = x.lanes.max(y.lanes).max(z.lanes);
        let x = if negate { LaneOperand { value: self.m.unary(SsaOp::FNeg, x.value), lanes: x.lanes } } else { x };
        let (x, y) = if x.lanes == 0 { (y, x) } else { (x, y) };
        let [x, y, z] = [x, y, z].map(|v| self.widen(v, n));
        LaneOperand { value: self.m.fma(x, y, z), lanes: n }
    }

    fn combine(&mut self, op: BinaryOp, a: LaneOperand, b: LaneOperand) -> LaneOperand {
        let (a, b, lanes) = self.pair(a, b);
        if !matches!(self.m.type_of(a).kind, LaneKind::F32 | LaneKind::F64) {
            let op = match op {
                BinaryOp::Add => SsaOp::AddWrapping,
                BinaryOp::Sub => SsaOp::SubWrapping,
                BinaryOp::Mul => SsaOp::MulWrapping,
                BinaryOp::Min => SsaOp::SignedMin,
                BinaryOp::Max => SsaOp::SignedMax,
                BinaryOp::Div | BinaryOp::Pow | BinaryOp::Nibble => unreachable!("they are computed as numbers"),
            };
            return LaneOperand { value: self.m.binary(op, a, b), lanes };
        }
        let value = match op {
            BinaryOp::Add => self.m.binary(SsaOp::FAdd, a, b),
            BinaryOp::Sub => self.m.binary(SsaOp::FSub, a, b),
            BinaryOp::Mul => self.m.binary(SsaOp::FMul, a, b),
            BinaryOp::Div => self.m.binary(SsaOp::FDiv, a, b),
            BinaryOp::Min => self.m.binary(SsaOp::FMin, a, b),
            BinaryOp::Max => self.m.binary(SsaOp::FMax, a, b),
            BinaryOp::Pow | BinaryOp::Nibble => unreachable!("powers and bits are computed by themselves"),
        };
        LaneOperand { value, lanes }
    }

    fn unary(&mut self, op: UnaryOp, x: LaneOperand, dtype: DType) -> LaneOperand {
        if !dtype.is_float() {
            let zero = LaneOperand::scalar(self.number(dtype, 0.0));
            return match op {
                UnaryOp::Neg => self.combine(BinaryOp::Sub, zero, x),
                UnaryOp::Abs if dtype.arithmetic() == DType::U64 => x,
                UnaryOp::Abs => {
                    let negative = self.combine(BinaryOp::Sub, zero, x);
                    self.combine(BinaryOp::Max, x, negative)
                }
                UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round => x,
                _ => {
                    let x = self.convert(x, dtype, DType::F64);
                    let value = self.unary(op, x, DType::F64);
                    self.convert(value, DType::F64, dtype)
                }
            };
        }
        if let Some(value) = self.rounded(op, x.value, x.lanes, dtype) {
            return LaneOperand { value, lanes: x.lanes };
        }
        // GPUs have no C library.
        if self.target.gpu.is_some() && matches!(op, UnaryOp::Sin | UnaryOp::Cos) {
            let wide = self.convert(x, dtype, DType::F64);
            let value = LaneOperand { value: self.circular(op, wide.value, x.lanes.max(1)), lanes: x.lanes };
            return self.convert(value, DType::F64, dtype);
        }
        if (x.lanes > 0 || self.target.gpu.is_some())
            && let Some(value) = self.vector_math(op, x.value, x.lanes.max(1), dtype)
        {
            return LaneOperand { value, lanes: x.lanes };
        }
        let suffix = if dtype == DType::F32 { "f" } else { "" };
        let mut library_call = |name: &str| self.library_call(&format!("{name}{suffix}"), &[x.value], x.lanes, dtype);
        let value = match op {
            UnaryOp::Neg => self.m.unary(SsaOp::FNeg, x.value),
            UnaryOp::Abs => self.m.unary(SsaOp::FAbs, x.value),
            UnaryOp::Sqrt => self.m.unary(SsaOp::Sqrt, x.value),
            UnaryOp::Exp => library_call("exp"),
            UnaryOp::Expm1 => library_call("expm1"),
            UnaryOp::Log => library_call("log"),
            UnaryOp::Log1p => library_call("log1p"),
            UnaryOp::Tanh => library_call("tanh"),
            UnaryOp::Erf => library_call("erf"),
            UnaryOp::Sin => library_call("sin"),
            UnaryOp::Cos => library_call("cos"),
            UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round => unreachable!("rounding has code of its own"),
        };
        LaneOperand { value, lanes: x.lanes }
    }

    /// Calls a function of the C library, for each lane of a vector.
    fn library_call(&mut self, name: &str, x: &[Id], lanes: usize, dtype: DType) -> Id {
        let element = self.arithmetic_type(dtype);
        let f = self.m.declare(name, Linkage::Library, Some(element), &vec![element; x.len()]);
        if lanes == 0 {
            return self.m.call(f, x).expect("it gives a number");
        }
        (0..lanes).fold(self.m.undefined(element.vector(lanes)), |out, lane| {
            let x: Vec<Id> = x.iter().map(|x| self.m.extract(*x, lane)).collect();
            let value = self.m.call(f, &x).expect("it gives a number");
            self.m.insert(out, value, lane)
        })
    }

    /// Selects the first value if the condition holds, else the second. Loads of the value not selected may
    /// be out of bounds.
    fn select(&mut self, cond: &Cond, a: &Expr, b: &Expr, dtype: DType) -> LaneOperand {
        let lane = self.f.lanes.map(|l| l.var);
        let varying = !plan::is_uniform(cond, lane);
        let c = self.cond(cond);
        match self.m.as_const_bool(c) {
            Some(true) => return self.eval(a, dtype),
            Some(false) => return self.eval(b, dtype),
            None => {}
        }
        let [a_safe, b_safe] = [a, b].map(|e| plan::is_safe(self.program, &self.f.ranges, &self.f.known, e));
        if varying {
            let lanes = self.f.lanes.expect("a condition varies over lanes");
            let not_c = self.m.not(c);
            let [a, b] = [(a, a_safe, c), (b, b_safe, not_c)].map(|(e, safe, mask)| {
                if safe {
                    return self.eval(e, dtype);
                }
                let mask = self.both(lanes.mask, mask);
                self.f.lanes = Some(WrittenLanes { mask: Some(mask), guarded: true, ..lanes });
                let value = self.scoped(&BTreeSet::new(), |g| g.eval(e, dtype));
                self.f.lanes = Some(lanes);
                value
            });
            let n = lanes.piece.width;
            let [a, b] = [a, b].map(|v| self.widen(v, n));
            return LaneOperand { value: self.m.select(c, a, b), lanes: n };
        }
        if a_safe && b_safe {
            let (a, b) = (self.eval(a, dtype), self.eval(b, dtype));
            let (a, b, lanes) = self.pair(a, b);
            return LaneOperand { value: self.m.select(c, a, b), lanes };
        }
        let [yes, no, join] = [0; 3].map(|_| self.m.block(self.f.id));
        self.m.cond_br(c, yes, no);
        // Both sides need the same type.
        let n = if [a, b].iter().any(|e| lane.is_some_and(|lane| e.uses(lane))) {
            self.f.lanes.map_or(0, |l| l.piece.width)
        } else {
            0
        };
        let sides = [(yes, a), (no, b)].map(|(block, e)| {
            self.go_to_end(block);
            let value = self.scoped(&BTreeSet::new(), |g| {
                let v = g.eval(e, dtype);
                g.widen(v, n)
            });
            self.m.br(join);
            (value, self.m.current_block())
        });
        self.go_to_end(join);
        let phi = self.m.phi(join, self.value_type(dtype).vector(n.max(1)));
        for (value, from) in sides {
            self.m.add_incoming(phi, value, from);
        }
        LaneOperand { value: phi, lanes: n }
    }

    /// Evaluates a condition to `i1`, or to a vector of `i1` if it varies over the lanes.
    pub(super) fn cond(&mut self, cond: &Cond) -> Id {
        let lane = self.f.lanes.map(|l| l.var);
        let n = if plan::is_uniform(cond, lane) { 0 } else { self.f.lanes.map_or(0, |l| l.piece.width) };
        self.cond_lanes(cond, n)
    }

    fn cond_lanes(&mut self, cond: &Cond, n: usize) -> Id {
        let mut compare = |equal: bool, a: &Index, b: &Index| {
            // With all variables on one side, constant cases fold.
            let difference = self.resolved(&a.sub(b));
            if let Some(d) = difference.as_const() {
                let holds = self.m.bool(if equal { d == 0 } else { d < 0 });
                return self.m.splat(holds, n.max(1));
            }
            if !equal {
                if self.f.ranges.upper(&difference).is_some_and(|u| u < 0) {
                    return self.m.splat(self.m.bool(true), n.max(1));
                }
                if self.f.ranges.lower(&difference).is_some_and(|l| l >= 0) {
                    return self.m.splat(self.m.bool(false), n.max(1));
                }
            }
            if !equal && let Some(lanes) = self.f.lanes.filter(|l| difference.uses(l.var)) {
                // With a constant stride, the condition holds for the lanes below, or not below, some index.
                let stride = difference.coefficient(lanes.var);
                let rest = difference.sub(&Index::from(lanes.var).scale(stride)).offset(stride * lanes.piece.first);
                if stride != 0 && !rest.uses(lanes.var) {
                    // s·lane + rest < 0
                    return if stride > 0 {
                        let limit = self.resolved(&rest.scale(-1).offset(stride - 1).floor_div(stride));
                        self.lanes_below(&limit, lanes.piece.width)
                    } else {
                        let limit = self.resolved(&rest.floor_div(-stride).offset(1));
                        let others = self.lanes_below(&limit, lanes.piece.width);
                        self.m.not(others)
                    };
                }
            }
            let left = self.index_operand(&difference.offset(-difference.constant()));
            let zero = self.m.int(-difference.constant());
            if left.lanes == 0 {
                let c = self.compare(equal, left.value, zero);
                return self.m.splat(c, n.max(1));
            }
            self.compare(equal, left.value, self.m.splat(zero, left.lanes))
        };
        match cond {
            Cond::True => self.m.splat(self.m.bool(true), n.max(1)),
            Cond::Lt(a, b) => compare(false, a, b),
            Cond::Eq(a, b) => compare(true, a, b),
            Cond::Less(a, b) => {
                let program = self.program;
                let dtype = Expr::arithmetic_of([a, b], &|b| program.buffer(b).dtype).unwrap_or(DType::F64);
                let (mut a, mut b) = (self.eval(a, dtype), self.eval(b, dtype));
                if dtype.arithmetic() == DType::U64 {
                    (a, b) = (self.turned(a), self.turned(b));
                }
                let (a, b) = (self.widen(a, n), self.widen(b, n));
                if dtype.is_float() { self.m.fless(a, b) } else { self.compare(false, a, b) }
            }
            Cond::And(a, b) => {
                let a = self.cond_lanes(a, n);
                if self.m.as_const_bool(a) == Some(false) {
                    return a;
                }
                let b = self.cond_lanes(b, n);
                self.m.binary(SsaOp::And, a, b)
            }
            Cond::Not(a) => {
                let a = self.cond_lanes(a, n);
                self.m.not(a)
            }
        }
    }

    /// Substitutes known variables in an index, and simplifies it by the ranges of the loops.
    pub(super) fn resolved(&self, index: &Index) -> Index {
        self.f.ranges.simplify(&plan::resolve(index, &self.f.known))
    }

    /// Evaluates an index to `i64` or a vector of `i64`.
    pub(super) fn index_operand(&mut self, index: &Index) -> LaneOperand {
        let index = self.resolved(index);
        let Some(lanes) = self.f.lanes.filter(|l| index.uses(l.var)) else {
            return LaneOperand::scalar(self.int(&index));
        };
        let piece = lanes.piece;
        let shifted = index.substitute(lanes.var, &Index::from(lanes.var).offset(piece.first));
        let stride = shifted.coefficient(lanes.var);
        let rest = shifted.sub(&Index::from(lanes.var).scale(stride));
        let value = if rest.uses(lanes.var) {
            let mut v = self.m.undefined(Type::I64.vector(piece.width));
            for lane in 0..piece.width.min(piece.n) {
                let at = self.resolved(&shifted.substitute(lanes.var, &Index::from(lane as i64)));
                let x = self.int(&at);
                v = self.m.insert(v, x, lane);
            }
            v
        } else {
            let base = self.int(&rest);
            let base = self.m.splat(base, piece.width);
            self.m.add(base, self.lane_multiples(piece.width, stride))
        };
        LaneOperand { value, lanes: piece.width }
    }

    /// `0, stride, 2·stride, …`
    pub(super) fn lane_multiples(&self, width: usize, stride: i64) -> Id {
        self.m.integers(Type::I64, (0..width).map(|lane| lane as i64 * stride))
    }

    // Statements on values.

    pub(super) fn store(&mut self, buffer: BufferId, index: &[Index], value: &Expr) {
        if self.copy(buffer, index, value) {
            return;
        }
        let value = self.stored(buffer, value);
        self.write(buffer, index, value);
    }

    /// Evaluates a value as an element of a buffer to store.
    pub(super) fn stored(&mut self, buffer: BufferId, value: &Expr) -> LaneOperand {
        let dtype = self.program.buffer(buffer).dtype;
        if let (DType::U8, Expr::Gather(table, subscripts)) = (dtype, value)
            && let Some(bytes) = self.looked_up(*table, subscripts, dtype)
        {
            return bytes;
        }
        // A number that the type holds is converted directly.
        if let Expr::Cast(DType::F32 | DType::F64, x) = value
            && is_narrow(dtype)
            && range::fits(x, dtype)
        {
            return self.stored(buffer, &Expr::cast(dtype, value.clone()));
        }
        if let Some(saturated) = self.stored_saturated(dtype, value) {
            return saturated;
        }
        let moves = dtype.is_half() && self.is_move(value, dtype);
        let value = self.eval(value, if moves { dtype } else { dtype.arithmetic() });
        self.as_element(buffer, value)
    }

    /// Stores f32 numbers clipped between the ends of an unsigned type without clipping at the upper end: the
    /// conversion of a number beyond the 32-bit range gives an unsigned integer too large for the element,
    /// which the narrowing instruction saturates. If an integer of the type is added to rounded numbers, the
    /// conversion to integers rounds, and the addition follows in integers.
    fn stored_saturated(&mut self, dtype: DType, value: &Expr) -> Option<LaneOperand> {
        let Expr::Cast(to, inside) = value else { return None };
        let width = self.f.lanes.map_or(0, |l| l.piece.width);
        let is_served = (LEAST_SATURATED..=self.target.vector_bits as usize / 32).contains(&width);
        let (from, x, high) = clip_within(inside, *to).or_else(|| chosen_within(inside, *to))?;
        let ends = [0.0, if dtype == DType::U8 { 255.0 } else { 65535.0 }];
        let is_whole_type = *to == dtype && dtype.is_unsigned() && high == ends[1];
        if !is_served || !is_whole_type || from != DType::F32 || !plan::has_masks(self.target) {
            return None;
        }
        let shifted = rounded_and_shifted(x, ends, self.f.lanes.map(|l| l.var));
        let (x, shift, is_rounded) = match (shifted, x) {
            (Some((x, shift)), _) => (x, Some(self.eval(shift, DType::I32)), true),
            (None, Expr::Unary(UnaryOp::Round, x)) => (x.without_cast(DType::F32), None, true),
            (None, _) => (x, None, false),
        };
        let x = if is_rounded { self.rounded_next(x, from) } else { self.eval(x, from) };
        let x = self.widen(x, width);
        let low = match shift {
            Some(shift) => self.m.unary(SsaOp::FNeg, self.m.int_to_real(shift.value, Type::F32)),
            None => self.number(from, 0.0),
        };
        let low = self.widen(LaneOperand::scalar(low), width);
        let at_least = self.m.select(self.m.fless(low, x), x, low);
        let mut whole = self.m.real_to_int_or_least(at_least, is_rounded);
        if let Some(shift) = shift {
            let shift = self.widen(shift, width);
            whole = self.m.binary(SsaOp::AddWrapping, whole, shift);
        }
        let element = if dtype == DType::U8 { Type::I8 } else { Type::I16 };
        Some(LaneOperand { value: self.m.truncate_saturated(whole, element.vector(width)), lanes: width })
    }

    /// Whether a value is an element of a type, or zero, without any computation.
    pub(super) fn is_move(&self, e: &Expr, dtype: DType) -> bool {
        match e {
            Expr::Const(x) => x.to_bits() == 0,
            Expr::Load(buffer, _) | Expr::Gather(buffer, _) => self.program.buffer(*buffer).dtype == dtype,
            Expr::Select(_, a, b) => self.is_move(a, dtype) && self.is_move(b, dtype),
            Expr::Unary(..) | Expr::Binary(..) | Expr::FromIndex(_) | Expr::Cast(..) => false,
        }
    }

    pub(super) fn update(&mut self, buffer: BufferId, index: &[Index], op: ReduceOp, value: &Expr, first: &Cond) {
        self.reduction_step(buffer, index);
        if let Some(steps) = self.f.dot.clone() {
            return self.dot_product(buffer, index, value, &steps);
        }
        let dtype = self.program.buffer(buffer).dtype.arithmetic();
        let starts = self.cond(first);
        let known = self.m.as_const_bool(starts);
        if known == Some(true) {
            let value = self.eval(value, dtype);
            let value = self.as_element(buffer, value);
            return self.write(buffer, index, value);
        }
        let old = self.load(buffer, index);
        let mut old = self.element(buffer, old, dtype);
        if known.is_none() {
            let n = self.f.lanes.filter(|l| first.uses(l.var)).map_or(0, |l| l.piece.width).max(old.lanes);
            let identity = LaneOperand::scalar(self.number(dtype, op.identity()));
            let identity = self.widen(identity, n);
            let kept = self.widen(old, n);
            old = LaneOperand { value: self.m.select(starts, identity, kept), lanes: n };
        }
        let new = match (op, value) {
            (ReduceOp::Sum, Expr::Binary(BinaryOp::Mul, x, y)) if dtype.is_float() => {
                self.multiply_add(x, y, old, false, dtype)
            }
            (ReduceOp::Max | ReduceOp::Min, _) => {
                // Dependent steps wait for each other only through the second operand.
                let value = self.eval(value, dtype);
                self.extreme(op.combine(), value, old, dtype)
            }
            (ReduceOp::Sum | ReduceOp::Product, _) => {
                let value = self.eval(value, dtype);
                self.combine(op.combine(), old, value)
            }
        };
        let new = self.as_element(buffer, new);
        self.write(buffer, index, new);
    }

    /// Begins a new reduction step if the accumulator was already updated in the current one.
    ///
    /// Values that steps share, such as the pixels of adjacent taps of a convolution, are loaded again if
    /// accumulators and loaded values together do not fit the registers: a load is free next to two
    /// multiply-adds, but a spill is not.
    fn reduction_step(&mut self, buffer: BufferId, index: &[Index]) {
        // A GPU assembler decides itself which values to reload.
        if !self.in_registers(buffer) || self.target.gpu.is_some() {
            return;
        }
        let flat = self.flat(buffer, index);
        let flat = self.f.lanes.map_or(flat.clone(), |l| flat.substitute(l.var, &Index::from(l.piece.first)));
        let at = (buffer, flat.as_const().expect("positions in register chunks are constant"));
        if self.f.seen.updated.insert(at) {
            return;
        }
        let program = self.program;
        let in_memory = |b: &BufferId| program.buffer(*b).scope != Scope::Register;
        let n_vectors = |loads: &Map<LoadKey, Id>| loads.keys().filter(|(_, lanes)| *lanes > 0).count();
        let n_loaded: usize = self.f.seen.loads.iter().filter(|(b, _)| in_memory(b)).map(|(_, l)| n_vectors(l)).sum();
        let n_live = n_loaded + self.f.seen.splats.len() + self.f.seen.updated.len();
        self.f.seen.updated = BTreeSet::from([at]);
        if n_live > self.target.n_vector_registers as usize {
            self.f.seen.loads.retain(|b, _| !in_memory(b));
            self.f.seen.splats.clear();
            self.f.seen.fresh = Some(Map::default());
        }
    }

    pub(super) fn prefetch(&mut self, buffer: BufferId, index: &[Index], for_write: bool) {
        if self.in_registers(buffer) || self.target.gpu.is_some() {
            return;
        }
        let flat = self.flat(buffer, index);
        // In a vectorized loop, the line of the first lane.
        let flat = match self.f.lanes {
            Some(l) => flat.substitute(l.var, &Index::from(l.piece.first)),
            None => flat,
        };
        let pointer = self.pointer(buffer, &flat);
        self.m.prefetch(pointer, for_write);
    }
}
