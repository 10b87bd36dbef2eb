//! Operators on shapes: reshaping, reading shapes, and tensors made from a shape.

use super::util::{axes, axis, broadcast, expand, product, size};
use super::{Import, Inputs, Op, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Reshape to the shape in input 1, or of an attribute. -1 infers a dimension.
#[derive(Debug, Clone)]
pub struct Reshape {
    /// Shape of the attribute (before opset 5).
    pub shape: Option<Vec<i64>>,
    /// Whether a 0 in the shape is a size of zero, rather than a copy of the input's dimension.
    pub allow_zero: bool,
}

/// Reshape to two dimensions: the product of the dimensions before `axis`, and of those from it on.
#[derive(Debug, Clone, Copy)]
pub struct Flatten {
    /// First dimension of the second part; negative counts from the end.
    pub axis: i64,
}

/// Removal of dimensions of size 1.
#[derive(Debug, Clone)]
pub struct Squeeze {
    /// Dimensions of the attribute (before opset 13). `None`: they are input 1, or all of size 1 if that is
    /// omitted.
    pub axes: Option<Vec<i64>>,
}

/// Insertion of dimensions of size 1.
#[derive(Debug, Clone)]
pub struct Unsqueeze {
    /// Dimensions of the attribute (before opset 13), as indices in the output. `None`: they are input 1.
    pub axes: Option<Vec<i64>>,
}

/// Dimensions of a tensor as a vector of integers; optionally only those from `start` to `end`.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// First dimension; negative counts from the end.
    pub start: i64,
    /// End of the range of dimensions, exclusive.
    pub end: Option<i64>,
}

/// Number of elements of a tensor, as a scalar.
#[derive(Debug, Clone, Copy)]
pub struct Size;

/// Tensor of the shape in input 0, filled with one value.
#[derive(Debug, Clone)]
pub struct ConstantOfShape {
    /// Value of the elements, a tensor of one element.
    pub value: Tensor,
}

/// Arithmetic sequence: start, limit (exclusive) and step are inputs 0 to 2.
#[derive(Debug, Clone, Copy)]
pub struct Range;

/// Broadcast of input 0 to the shape in input 1; both may broadcast.
#[derive(Debug, Clone, Copy)]
pub struct Expand;

/// Matrix of the input's shape with ones on a diagonal, zeros elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct EyeLike {
    /// Element type; `None` for the input's.
    pub dtype: Option<DType>,
    /// Offset of the diagonal above the main one; negative below.
    pub k: i64,
}

/// Reads the axes of an attribute, in versions in which they are not an input.
fn old_axes(node: &Import) -> Result<Option<Vec<i64>>, OpError> {
    if node.version < 13 { node.ints("axes") } else { Ok(None) }
}

pub(super) const ROWS: &[Operator] = &[
    row("Reshape", &[1, 5, 13, 14, 19, 21, 23, 24, 25], 1..=2, |node| {
        let shape = if node.version < 5 { Some(node.ints("shape")?.unwrap_or_default()) } else { None };
        let _ = if node.version < 5 { node.ints("consumed_inputs")? } else { None };
        let allow_zero = node.version >= 14 && node.flag("allowzero", false)?;
        Ok(Reshape { shape, allow_zero }.into())
    }),
    row("Flatten", &[1, 9, 11, 13, 21, 23, 24, 25], 1..=1, |node| Ok(Flatten { axis: node.int_or("axis", 1)? }.into())),
    row("Squeeze", &[1, 11, 13, 21, 23, 24, 25], 1..=2, |node| Ok(Squeeze { axes: old_axes(node)? }.into())),
    row("Unsqueeze", &[1, 11, 13, 21, 23, 24, 25], 1..=2, |node| Ok(Unsqueeze { axes: old_axes(node)? }.into())),
    row("Shape", &[1, 13, 15, 19, 21, 23, 24, 25], 1..=1, |node| {
        Ok(if node.version < 15 {
            Shape { start: 0, end: None }.into()
        } else {
            Shape { start: node.int_or("start", 0)?, end: node.int("end")? }.into()
        })
    }),
    row("Size", &[1, 13, 19, 21, 23, 24, 25], 1..=1, |_| Ok(Size.into())),
    row("ConstantOfShape", &[9, 20, 21, 23, 24, 25], 1..=1, |node| {
        let value = node.tensor("value")?.unwrap_or_else(|| Tensor::from_floats(DType::F32, [1], &[0.0]));
        if value.n_elements() != 1 {
            return Err(invalid!("its value has {} elements, and should have one", value.n_elements()));
        }
        Ok(ConstantOfShape { value }.into())
    }),
    // Supported constants are not imported as nodes, so a node's attribute is unsupported.
    row("Constant", &[1, 9, 11, 12, 13, 19, 21, 23, 24, 25], 0..=0, |node| match node.attributes.constant() {
        Ok(value) => Err(unsupported!("a constant {value:?} that nobody names")),
        Err(error) => Err(error),
    }),
    row("Range", &[11, 27], 3..=3, |node| {
        let _ = node.int("stash_type")?;
        Ok(Range.into())
    }),
    row("Expand", &[8, 13], 2..=2, |_| Ok(Expand.into())),
    row("EyeLike", &[9, 22], 1..=1, |node| {
        let dtype = node.int("dtype")?.map(DType::from_onnx).transpose();
        let dtype = dtype.map_err(|name| unsupported!("elements of type {name} are not supported"))?;
        Ok(EyeLike { dtype, k: node.int_or("k", 0)? }.into())
    }),
];

impl Op {
    /// Whether the result is known from the input's shape alone (`Shape`, `Size`).
    pub fn reads_type_only(&self) -> bool {
        matches!(self, Op::Shape(_) | Op::Size(_) | Op::EyeLike(_))
    }
}

/// Returns an input's elements in the inferred shape.
fn reshaped(operation: &dyn Operation, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
    let ty = operation.infer(inputs)?.remove(0);
    Ok(vec![inputs.tensor(0)?.reshaped(ty.shape)])
}

impl Operation for Reshape {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let wanted = match &self.shape {
            Some(shape) => shape.clone(),
            None => inputs.tensor(1)?.i64s(),
        };
        let refuse = || invalid!("{ty} does not take the shape {wanted:?}");
        let mut shape = Vec::with_capacity(wanted.len());
        let mut open = None;
        for (at, &dim) in wanted.iter().enumerate() {
            shape.push(match dim {
                -1 if open.replace(at).is_none() => 1,
                0 if !self.allow_zero => *ty.shape.get(at).ok_or_else(refuse)?,
                dim => usize::try_from(dim).map_err(|_| refuse())?,
            });
        }
        let mut out = TensorType::new(ty.dtype, shape);
        let n = ty.n_elements();
        if let Some(at) = open {
            let rest = out.checked_len().ok_or_else(refuse)?;
            out.shape[at] = n.checked_div(rest).unwrap_or(0);
        }
        if out.checked_len() == Some(n) { Ok(vec![out]) } else { Err(refuse()) }
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        reshaped(self, inputs)
    }
}

impl Operation for Flatten {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let rank = ty.shape.len();
        let at = if self.axis == rank as i64 { rank } else { axis(self.axis, rank)? };
        Ok(vec![TensorType::new(ty.dtype, [product(&ty.shape[..at]), product(&ty.shape[at..])])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        reshaped(self, inputs)
    }
}

impl Operation for Squeeze {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let given = self.axes.clone().map_or_else(|| inputs.optional_i64s(1), |axes| Ok(Some(axes)))?;
        let given = given.map(|list| axes(&list, ty.shape.len())).transpose()?;
        let mut shape = Vec::with_capacity(ty.shape.len());
        for (d, &dim) in ty.shape.iter().enumerate() {
            let is_chosen = given.as_ref().map_or(dim == 1, |axes| axes.contains(&d));
            if is_chosen && dim != 1 {
                return Err(invalid!("dimension {d} of {ty} is not 1, and cannot be left out"));
            }
            shape.extend((!is_chosen).then_some(dim));
        }
        Ok(vec![TensorType::new(ty.dtype, shape)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        reshaped(self, inputs)
    }
}

impl Operation for Unsqueeze {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let given = match &self.axes {
            Some(axes) => axes.clone(),
            None => inputs.tensor(1)?.i64s(),
        };
        let rank = ty.shape.len() + given.len();
        let places = axes(&given, rank)?;
        let mut rest = ty.shape.iter();
        let dim = |d: usize| if places.contains(&d) { 1 } else { *rest.next().expect("as many as the rank") };
        Ok(vec![TensorType::new(ty.dtype, (0..rank).map(dim).collect::<Vec<_>>())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        reshaped(self, inputs)
    }
}

impl Shape {
    fn part<'a>(&self, shape: &'a [usize]) -> &'a [usize] {
        let rank = shape.len() as i64;
        let place = |at: i64| (if at < 0 { at + rank } else { at }).clamp(0, rank) as usize;
        let (start, end) = (place(self.start), place(self.end.unwrap_or(rank)));
        &shape[start..end.max(start)]
    }
}

impl Operation for Shape {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![TensorType::new(DType::I64, [self.part(inputs.shape(0)?).len()])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let dims: Vec<i64> = self.part(inputs.shape(0)?).iter().map(|&d| d as i64).collect();
        Ok(vec![Tensor::vector(&dims)])
    }
}

impl Operation for Size {
    fn infer(&self, _: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![TensorType::new(DType::I64, [])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        Ok(vec![Tensor::from_integers(DType::I64, [], &[inputs.ty(0)?.n_elements() as i128])])
    }
}

impl Operation for ConstantOfShape {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let shape: Vec<usize> = inputs.tensor(0)?.i64s().into_iter().map(size).collect::<Result<_, _>>()?;
        Ok(vec![TensorType::new(self.value.dtype(), shape)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        Ok(vec![expand(&self.value.reshaped([]), &ty.shape)])
    }
}

impl Range {
    fn len(inputs: Inputs<'_>) -> Result<usize, OpError> {
        let x = [inputs.tensor(0)?, inputs.tensor(1)?, inputs.tensor(2)?];
        if x.iter().any(|x| x.n_elements() != 1) {
            return Err(invalid!("its start, limit and step should be single numbers"));
        }
        if x[0].dtype().is_float() {
            let [start, limit, step] = x.map(|x| x.floats()[0]);
            let n = ((limit - start) / step).ceil().max(0.0);
            return if n.is_finite() { Ok(n as usize) } else { Err(invalid!("its step is {step}")) };
        }
        let [start, limit, step] = x.map(|x| x.integers()[0]);
        if step == 0 {
            return Err(invalid!("its step is 0"));
        }
        let n = (limit - start + step - step.signum()) / step;
        usize::try_from(n.max(0)).map_err(|_| invalid!("it has too many numbers"))
    }
}

impl Operation for Range {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![TensorType::new(inputs.ty(0)?.dtype, [Range::len(inputs)?])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let n = Range::len(inputs)?;
        let (start, step) = (inputs.tensor(0)?, inputs.tensor(2)?);
        Ok(vec![if start.dtype().is_float() {
            let (start_at, step) = (start.floats()[0], step.floats()[0]);
            let numbers: Vec<f64> = (0..n).map(|i| start_at + i as f64 * step).collect();
            Tensor::from_floats(start.dtype(), [n], &numbers)
        } else {
            let (start_at, step) = (start.integers()[0], step.integers()[0]);
            let numbers: Vec<i128> = (0..n).map(|i| start_at + i as i128 * step).collect();
            Tensor::from_integers(start.dtype(), [n], &numbers)
        }])
    }
}

impl Operation for Expand {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let wanted: Vec<usize> = inputs.tensor(1)?.i64s().into_iter().map(size).collect::<Result<_, _>>()?;
        Ok(vec![TensorType::new(ty.dtype, broadcast(&[&ty.shape, &wanted])?)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        Ok(vec![expand(inputs.tensor(0)?, &ty.shape)])
    }
}

impl Operation for EyeLike {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        if ty.shape.len() != 2 {
            return Err(invalid!("{ty} is no matrix"));
        }
        Ok(vec![TensorType::new(self.dtype.unwrap_or(ty.dtype), ty.shape.clone())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (rows, columns) = (ty.shape[0], ty.shape[1]);
        let one = |at: usize| (at / columns) as i64 + self.k == (at % columns) as i64;
        let numbers: Vec<i128> = (0..rows * columns).map(|at| one(at).into()).collect();
        Ok(vec![Tensor::from_integers(ty.dtype, ty.shape, &numbers)])
    }
}
