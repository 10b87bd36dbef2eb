//! Import of elementwise functions, casts and selections, as maps or C functions.

use tilewright_graph::op::{Binary, Clip, Trilu, Unary, Variadic};
use tilewright_graph::{DType, Float8, Op, Tensor};
use tilewright_ir::Expr;
use tilewright_ir::expr::BinaryOp;
use tilewright_runtime::host::{BINARY, COPY, UNARY};

use super::job::{NodeImport, REALS};
use crate::net::{Kind, ValueId};
use crate::no_code::{Lowered, NoCode, Otherwise, need};
use crate::scalar::{self, add, choose_if, clip, input, less, max, min, number, sub};

const CASTS: &str = "f16, bf16, f32, f64, booleans and integers";

impl NodeImport<'_> {
    /// Lowers to an elementwise map of all inputs to the node's output.
    pub(crate) fn map(&mut self, value: impl FnOnce(&[Expr]) -> Option<Expr>) -> Lowered {
        let inputs = self.all_inputs()?;
        let to = self.output()?;
        inputs.iter().chain([&to]).try_for_each(|id| self.need_code(*id))?;
        let elements: Vec<Expr> = inputs
            .iter()
            .enumerate()
            .map(|(at, &id)| match self.net.literal(id) {
                // A constant of a higher rank would raise the output's rank.
                Some(x) if self.net.shape(id).len() <= self.net.shape(to).len() => x,
                _ => input(at),
            })
            .collect();
        let value = value(&elements).ok_or(NoCode::Operator)?;
        self.push(Kind::Map(value), &inputs, to);
        Ok(())
    }

    /// Lowers the test for infinite elements.
    pub(super) fn infinite(&mut self) -> Lowered {
        let Op::Unary(Unary::IsInf { positive, negative }) = self.node.op else { return Err(NoCode::Operator) };
        let x = self.input(0)?;
        let most = match self.net.value(x).dtype {
            DType::F32 => f64::from(f32::MAX),
            DType::F64 => f64::MAX,
            _ => return Err(self.no_code_for(x, REALS)),
        };
        self.map(|x| {
            let high = scalar::where_less(number(most), x[0].clone(), number(1.0), number(0.0));
            let low = scalar::where_less(x[0].clone(), number(-most), number(1.0), number(0.0));
            Some(match (positive, negative) {
                (true, true) => scalar::max(high, low),
                (true, false) => high,
                (false, true) => low,
                (false, false) => number(0.0),
            })
        })
    }

    /// Lowers a clip to bounds that are constants or inputs.
    pub(super) fn clipped(&mut self, op: &Clip) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_code(x)?;
        let mut inputs = vec![x];
        let mut bound = |at: usize, given: Option<f64>, none: f64| match (given, self.try_input(at)) {
            (Some(x), _) => number(x),
            (None, None) => number(none),
            (None, Some(id)) => match self.net.literal(id) {
                // NaN is not a bound.
                Some(Expr::Const(x)) if x.is_nan() => number(none),
                Some(x) => x,
                None => {
                    inputs.push(id);
                    input(inputs.len() - 1)
                }
            },
        };
        let (low, high) = (bound(1, op.min, f64::NEG_INFINITY), bound(2, op.max, f64::INFINITY));
        for id in &mut inputs[1..] {
            *id = self.viewed("bound", *id, &[]);
        }
        self.push(Kind::Map(min(max(input(0), low), high)), &inputs, to);
        Ok(())
    }

    /// Lowers the selection of a triangle of each matrix.
    pub(super) fn trilu(&mut self, op: &Trilu) -> Lowered {
        let (x, to, shape) = (self.input(0)?, self.output()?, self.shape(0)?);
        self.need_code(x)?;
        let &[.., rows, columns] = &shape[..] else { return Err(self.no_code_of_rank(x, "matrices")) };
        let mut inputs = vec![x, self.counted(2, 0, rows, 1), self.counted(1, 0, columns, 1)];
        let k = match self.try_input(1) {
            Some(k) if self.net.value(k).n_elements() == 1 => match self.net.scalar(k) {
                Some(k) => number(k),
                None => {
                    inputs.push(self.viewed("k", k, &[]));
                    input(3)
                }
            },
            _ => number(0.0),
        };
        let above = Expr::binary(BinaryOp::Sub, input(2), input(1));
        let is_out = if op.upper { less(above, k) } else { less(k, above) };
        self.push(Kind::Map(choose_if(is_out, number(0.0), input(0))), &inputs, to);
        Ok(())
    }

    /// Lowers a dropout, which does nothing in inference: the mask keeps all elements.
    pub(super) fn dropout(&mut self) -> Lowered {
        let x = self.input(0)?;
        if let Some(to) = self.try_output(0) {
            self.push(Kind::View, &[x], to);
        }
        if let Some(mask) = self.try_output(1) {
            let value = self.net.value(mask);
            let n = value.n_elements() as usize;
            let all = Tensor::from_integers(value.dtype, value.ty().shape, &vec![1; n]);
            self.net.values[mask.0].constant = Some(all);
        }
        Ok(())
    }

    /// Lowers a unary function that kernels do not support to a C function.
    fn unary_in_c(&mut self, f: Unary) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        if f == Unary::BitwiseNot {
            let ones = self.whole_constant("ones", self.net.value(x).dtype, &[], &[-1]);
            return self.binary_of(2, x, ones, to);
        }
        let functions = [Unary::Acos, Unary::Acosh, Unary::Asin, Unary::Asinh, Unary::Atan, Unary::Atanh];
        let function = functions.iter().position(|known| *known == f).ok_or(NoCode::Operator)? as i64;
        self.need_real(x)?;
        let n = self.net.value(x).n_elements();
        self.call(UNARY, vec![self.type_number(x)?, n, function], 0, &[x], &[to]);
        Ok(())
    }

    /// Lowers a unary function of integers, in f64 unless it is exact in integers.
    fn unary_of_whole(&mut self, f: Unary) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        let (least, most) = self.net.value(x).dtype.integer_range();
        if let Unary::Shrink { bias, lambd } = f
            && bias.fract() == 0.0
            && lambd >= 0.0
        {
            // An integer exceeds a bound if it exceeds the bound rounded to an integer towards the inside.
            let low = number((-lambd).ceil().max(least as f64));
            let high = number(lambd.floor().min(most as f64));
            let above = choose_if(less(high, input(0)), sub(input(0), number(bias)), number(0.0));
            let value = choose_if(less(input(0), low), add(input(0), number(bias)), above);
            self.push(Kind::Map(value), &[x], to);
            return Ok(());
        }
        self.in_doubles(|job| {
            let (x, to) = (job.input(0)?, job.output()?);
            job.push(Kind::Map(scalar::unary(f, input(0)).ok_or(NoCode::Operator)?), &[x], to);
            Ok(())
        })
    }

    /// Lowers a node whose first input and output are integers in f64; results outside the integers' range
    /// saturate.
    pub(super) fn in_doubles(&mut self, lower: impl FnOnce(&mut Self) -> Lowered) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        let (shape, out) = (self.net.shape(x).to_vec(), self.net.shape(to).to_vec());
        let (wide, found) = (self.double("wide", x, &shape), self.value("found", DType::F64, &out));
        (self.inputs[0], self.outputs[0]) = (Some(wide), Some(found));
        lower(self)?;
        let dtype = self.net.value(to).dtype;
        let (least, most) = dtype.integer_range();
        let bounded = self.step("bounded", Kind::Map(clip(input(0), least as f64, most as f64)), &[found], &out);
        let value = if dtype == DType::Bool { scalar::is_not_zero(input(0)) } else { input(0) };
        self.push(Kind::Map(value), &[bounded], to);
        Ok(())
    }

    /// Lowers a binary function that kernels do not support to a C function.
    fn binary_in_c(&mut self, f: Binary) -> Lowered {
        let (a, b, to) = (self.input(0)?, self.input(1)?, self.output()?);
        let function = match f {
            Binary::BitwiseAnd => 0,
            Binary::BitwiseOr => 1,
            Binary::BitwiseXor => 2,
            Binary::BitShift { to_left: true } => 3,
            Binary::BitShift { to_left: false } => 4,
            Binary::Mod { of_dividend: true } => 5,
            Binary::Mod { of_dividend: false } => 6,
            Binary::Pow if self.is_whole(a) && self.is_whole(b) => return self.whole_power(a, b, to),
            _ => return Err(NoCode::Operator),
        };
        self.binary_of(function, a, b, to)
    }

    /// Raises integers to integer powers. Narrower results are the low bits of the power in i64.
    fn whole_power(&mut self, a: ValueId, b: ValueId, to: ValueId) -> Lowered {
        let shape = self.net.shape(to).to_vec();
        let [a, b] = [a, b].map(|id| self.whole_map("wide", input(0), &[id], &shape));
        let power = self.value("power", DType::I64, &shape);
        self.binary_of(7, a, b, power)?;
        self.push(Kind::Map(input(0)), &[power], to);
        Ok(())
    }

    fn binary_of(&mut self, function: i64, a: ValueId, b: ValueId, to: ValueId) -> Lowered {
        let dtype = self.net.value(a).dtype;
        self.need_code(a)?;
        need(dtype != DType::Bool, || self.no_code_for(a, "numbers"))?;
        self.need_same_type(a, b)?;
        let shape = self.net.shape(to).to_vec();
        let (a, b) = (self.repeated("left", a, &shape), self.repeated("right", b, &shape));
        let n = shape.iter().product();
        self.call(BINARY, vec![self.type_number(a)?, n, function], 0, &[a, b], &[to]);
        Ok(())
    }

    /// Reinterprets the bits as elements of another type.
    pub(super) fn bits_as(&mut self) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        let n_bytes = self.net.value(x).n_bytes();
        need(n_bytes == self.net.value(to).n_bytes(), || NoCode::Form("a type of another size"))?;
        self.call(COPY, vec![n_bytes as i64], 0, &[x], &[to]);
        Ok(())
    }

    /// Lowers a function of one operand; for integers in f64, unless it has an exact form.
    pub(super) fn unary(&mut self, f: Unary) -> Lowered {
        if !scalar::is_whole(f) && self.is_whole(self.input(0)?) {
            return self.unary_in_c(f).otherwise(|| self.unary_of_whole(f));
        }
        self.map(|x| scalar::unary(f, x[0].clone())).otherwise(|| self.unary_in_c(f))
    }

    /// Lowers a function of two operands that broadcast.
    pub(super) fn binary(&mut self, f: Binary) -> Lowered {
        if self.scaled_integer_product().is_some() {
            return Ok(());
        }
        let [is_whole, exponent_is_whole] = [self.is_whole(self.input(0)?), self.is_whole(self.input(1)?)];
        let is_exact = self.decides();
        self.map(|x| match f {
            Binary::Pow if is_whole && !exponent_is_whole => Some(scalar::power_of_whole(x[0].clone(), x[1].clone())),
            // A product with the inverse may round below a quotient that is an integer.
            Binary::Div if is_exact => Some(Expr::binary(BinaryOp::Div, x[0].clone(), x[1].clone())),
            f if is_whole => scalar::binary_of_whole(f, x[0].clone(), x[1].clone()),
            f => scalar::binary(f, x[0].clone(), x[1].clone()),
        })
        .otherwise(|| self.binary_in_c(f))
    }

    /// Lowers a function of any number of operands that broadcast.
    pub(super) fn variadic(&mut self, f: Variadic) -> Lowered {
        let is_exact = self.decides();
        if f == Variadic::Mean {
            self.need_real(self.output()?)?;
        }
        self.map(|x| {
            let all = x.iter().cloned();
            Some(match f {
                Variadic::Max => all.reduce(scalar::max)?,
                Variadic::Min => all.reduce(scalar::min)?,
                Variadic::Sum => all.reduce(add)?,
                Variadic::Mean => scalar::part(all.reduce(add)?, x.len() as f64, is_exact),
            })
        })
    }

    /// Lowers a conversion to another type.
    pub(super) fn cast(&mut self) -> Lowered {
        // Only the type of the second operand is used.
        self.inputs.truncate(1);
        let (x, to) = (self.input(0)?, self.output()?);
        if let Some(format) = Float8::of(self.output_type()) {
            let single = self.single(x)?;
            let rounded = self.rounded_to(format, single);
            self.push(Kind::Map(input(0)), &[rounded], to);
            return Ok(());
        }
        match self.net.value(to).dtype {
            dtype if self.net.value(x).dtype == dtype => self.view(),
            // An integer that does not fit these few bits must be truncated to its low bits, which stores of
            // bytes do not do.
            DType::I2 | DType::I4 | DType::U2 | DType::U4 => Err(self.no_code_for(to, "integers of 8 to 64 bits")),
            DType::Bool => self.map(|x| Some(scalar::is_not_zero(x[0].clone()))),
            _ => {
                for id in [x, to] {
                    need(self.net.element_type(id).is_some(), || self.no_code_for(id, CASTS))?;
                }
                self.push(Kind::Map(input(0)), &[x], to);
                Ok(())
            }
        }
    }

    /// Lowers a broadcast to a larger shape.
    pub(super) fn expanded(&mut self) -> Lowered {
        self.inputs.truncate(1);
        self.map(|x| Some(x[0].clone()))
    }
}
