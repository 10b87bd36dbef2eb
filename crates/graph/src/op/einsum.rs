//! `Einsum`: sums of products in index notation.

use super::util::{product, strides};
use super::{ANY, Inputs, Operation, Operator, row};
use crate::error::invalid;
use crate::{OpError, Tensor, TensorType};

/// `Einsum`: a sum of products in index notation, such as `ij,jk->ik`.
#[derive(Debug, Clone)]
pub struct Einsum {
    /// Equation: the index letters of each input and of the output.
    pub equation: String,
}

pub(super) const ROWS: &[Operator] = &[row("Einsum", &[12, 28], 1..=ANY, |node| {
    let equation = node.text("equation")?.ok_or_else(|| invalid!("it has no equation"))?;
    Ok(Einsum { equation: equation.split_whitespace().collect() }.into())
})];

/// Maximum number of products that are computed.
const MOST: usize = 1 << 36;

/// Equation resolved for inputs of given shapes: each index letter, and each dimension of an ellipsis, has a
/// number.
#[derive(Debug, Clone)]
pub struct Indices {
    /// Size of each index; those of the output come first, in its order.
    pub sizes: Vec<usize>,
    /// Rank of the output.
    pub n_out: usize,
    /// Index of each dimension of each input.
    pub inputs: Vec<Vec<usize>>,
}

/// Index of a dimension: a letter, or a position in the ellipsis from its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EinsumIndex {
    Letter(char),
    Dots(usize),
}

fn indices_of(term: &str, n_dots: usize) -> Vec<EinsumIndex> {
    let dots: Vec<EinsumIndex> = (0..n_dots).rev().map(EinsumIndex::Dots).collect();
    match term.split_once("...") {
        None => term.chars().map(EinsumIndex::Letter).collect(),
        Some((before, behind)) => {
            let letters = |text: &str| text.chars().map(EinsumIndex::Letter).collect::<Vec<_>>();
            [letters(before), dots, letters(behind)].concat()
        }
    }
}

impl Einsum {
    /// Resolves the equation for the inputs' shapes.
    ///
    /// # Errors
    /// If the equation does not fit the shapes.
    pub fn indices(&self, inputs: Inputs<'_>) -> Result<Indices, OpError> {
        let refuse = || invalid!("the equation `{}` does not fit the inputs", self.equation);
        let (left, right) = match self.equation.split_once("->") {
            Some((left, right)) => (left, Some(right)),
            None => (&*self.equation, None),
        };
        let terms: Vec<&str> = left.split(',').collect();
        if terms.len() != inputs.n_inputs() {
            return Err(refuse());
        }
        let mut sizes: Vec<(EinsumIndex, usize)> = Vec::new();
        let mut of_inputs = Vec::new();
        let mut most_dots = 0;
        for (at, term) in terms.iter().enumerate() {
            let shape = inputs.shape(at)?;
            let n_letters = term.chars().filter(|c| c.is_alphabetic()).count();
            let n_dots = if term.contains("...") { shape.len().checked_sub(n_letters).ok_or_else(refuse)? } else { 0 };
            most_dots = most_dots.max(n_dots);
            let indices = indices_of(term, n_dots);
            if indices.len() != shape.len() {
                return Err(refuse());
            }
            for (&index, &n) in indices.iter().zip(shape) {
                match sizes.iter_mut().find(|(i, _)| *i == index) {
                    None => sizes.push((index, n)),
                    Some((_, known)) if *known == 1 => *known = n,
                    Some((_, known)) if n != 1 && n != *known => return Err(refuse()),
                    Some(_) => {}
                }
            }
            of_inputs.push(indices);
        }
        let out = match right {
            Some(right) => indices_of(right, most_dots),
            None => {
                // Dimensions of the ellipsis, and letters that occur once.
                let all: Vec<EinsumIndex> = of_inputs.concat();
                let mut letters: Vec<EinsumIndex> =
                    all.iter().copied().filter(|i| matches!(i, EinsumIndex::Letter(_))).collect();
                letters.retain(|i| all.iter().filter(|j| *j == i).count() == 1);
                letters.sort_by_key(|i| if let EinsumIndex::Letter(c) = i { *c } else { '\0' });
                [(0..most_dots).rev().map(EinsumIndex::Dots).collect(), letters].concat()
            }
        };
        let mut order = out.clone();
        order.extend(sizes.iter().map(|(i, _)| *i).filter(|i| !out.contains(i)));
        let size = |i: &EinsumIndex| sizes.iter().find(|(j, _)| j == i).map(|(_, n)| *n).ok_or_else(refuse);
        let place = |i: &EinsumIndex| order.iter().position(|j| j == i).ok_or_else(refuse);
        Ok(Indices {
            sizes: order.iter().map(size).collect::<Result<_, _>>()?,
            n_out: out.len(),
            inputs: of_inputs
                .iter()
                .map(|indices| indices.iter().map(place).collect())
                .collect::<Result<_, OpError>>()?,
        })
    }
}

impl Operation for Einsum {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let indices = self.indices(inputs)?;
        let n = indices.sizes.iter().try_fold(1_usize, |n, &d| n.checked_mul(d));
        if n.is_none_or(|n| n > MOST) {
            return Err(OpError::TooLarge(format!("{:?} in all its indices", indices.sizes)));
        }
        Ok(vec![TensorType::new(inputs.fact(0)?.dtype(), &indices.sizes[..indices.n_out])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let Indices { sizes, n_out, inputs: of_inputs } = self.indices(inputs)?;
        // Stride of each index, for each input.
        let mut steps = Vec::new();
        for (at, indices) in of_inputs.iter().enumerate() {
            let x = inputs.tensor(at)?;
            let mut step = vec![0; sizes.len()];
            for ((&index, stride), &n) in indices.iter().zip(strides(x.shape())).zip(x.shape()) {
                step[index] += if n == 1 { 0 } else { stride };
            }
            steps.push(step);
        }
        let n_inner = product(&sizes[n_out..]);
        let tensors: Vec<&Tensor> = (0..of_inputs.len()).map(|at| inputs.tensor(at)).collect::<Result<_, _>>()?;
        let (sizes, steps, n) = (&sizes[..], &steps[..], ty.n_elements());
        if ty.dtype.is_float() {
            let numbers: Vec<Vec<f64>> = tensors.iter().map(|x| x.floats()).collect();
            let out = sums(sizes, steps, n_inner, vec![0.0; n], |sum, places| {
                *sum += numbers.iter().zip(places).map(|(x, &place)| x[place]).product::<f64>();
            });
            return Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &out)]);
        }
        // Integers wrap around.
        let numbers: Vec<Vec<i64>> = tensors.iter().map(|x| x.i64s()).collect();
        let out = sums(sizes, steps, n_inner, vec![0_i64; n], |sum, places| {
            let product = numbers.iter().zip(places).fold(1_i64, |all, (x, &place)| all.wrapping_mul(x[place]));
            *sum = sum.wrapping_add(product);
        });
        let out: Vec<i128> = out.into_iter().map(i128::from).collect();
        Ok(vec![Tensor::from_integers(ty.dtype, ty.shape, &out)])
    }
}

/// Adds to each element of an output, whose indices come first, all of its products: `add` gets the positions
/// of their factors.
fn sums<T>(
    sizes: &[usize],
    steps: &[Vec<usize>],
    n_inner: usize,
    mut out: Vec<T>,
    mut add: impl FnMut(&mut T, &[usize]),
) -> Vec<T> {
    let mut index = vec![0; sizes.len()];
    let mut places = vec![0; steps.len()];
    for sum in &mut out {
        for _ in 0..n_inner {
            add(sum, &places);
            for d in (0..sizes.len()).rev() {
                index[d] += 1;
                places.iter_mut().zip(steps).for_each(|(place, step)| *place += step[d]);
                if index[d] < sizes[d] {
                    break;
                }
                places.iter_mut().zip(steps).for_each(|(place, step)| *place -= step[d] * sizes[d]);
                index[d] = 0;
            }
        }
    }
    out
}
