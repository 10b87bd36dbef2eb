//! Operators that select elements by value.

use std::cmp::Ordering;
use std::ops::Range;

use super::util::{around, axis, pick, product, size, strides};
use super::{Inputs, Operation, Operator, row};
use crate::error::invalid;
use crate::{DType, OpError, Tensor, TensorType};

/// Coordinates of nonzero elements, `[rank, count]`: a column for each.
#[derive(Debug, Clone, Copy)]
pub struct NonZero;

/// The k largest or smallest elements along a dimension, sorted, and their indices.
#[derive(Debug, Clone, Copy)]
pub struct TopK {
    /// Number of elements; `None` reads it from input 1.
    pub k: Option<usize>,
    /// Dimension to search; negative counts from the end.
    pub axis: i64,
    /// Whether the largest elements are sought.
    pub is_largest: bool,
}

/// Distinct values; further outputs are the index of each one's first occurrence, the index into the distinct
/// values for each element, and the counts.
#[derive(Debug, Clone, Copy)]
pub struct Unique {
    /// Dimension whose slices are compared; `None` compares elements of the flattened input.
    pub axis: Option<i64>,
    /// Whether values are sorted, rather than in order of first occurrence.
    pub is_sorted: bool,
}

/// Non-maximum suppression: indices `[selected, 3]` (batch, class, box) of boxes that do not overlap a
/// selected box of higher score. Inputs: boxes, scores, and optionally the maximum per class, the IoU
/// threshold and the score threshold.
#[derive(Debug, Clone, Copy)]
pub struct NonMaxSuppression {
    /// Whether boxes are given as centre and size, rather than two corners.
    pub is_by_centre: bool,
}

pub(super) const ROWS: &[Operator] = &[
    row("NonZero", &[9, 13], 1..=1, |_| Ok(NonZero.into())),
    row("TopK", &[1, 10, 11, 24], 1..=2, |node| {
        let k = if node.version < 10 { node.int("k")?.map(size).transpose()? } else { None };
        let is_largest = node.version < 11 || node.flag("largest", true)?;
        // The results are always sorted, which is allowed even if it is not requested.
        let _ = if node.version < 11 { None } else { node.int("sorted")? };
        Ok(TopK { k, axis: node.int_or("axis", -1)?, is_largest }.into())
    }),
    row("Unique", &[11, 28], 1..=1, |node| {
        Ok(Unique { axis: node.int("axis")?, is_sorted: node.flag("sorted", true)? }.into())
    }),
    row("NonMaxSuppression", &[10, 11], 2..=5, |node| {
        Ok(NonMaxSuppression { is_by_centre: node.flag("center_point_box", false)? }.into())
    }),
];

/// Types of outputs whose shapes depend on their values.
fn types_of(tensors: Vec<Tensor>) -> Vec<TensorType> {
    tensors.into_iter().map(|tensor| tensor.ty().clone()).collect()
}

/// Checks that all inputs are known, so that the outputs are known as well.
fn check_known(inputs: Inputs<'_>) -> Result<(), OpError> {
    let is_known = inputs.0.iter().flatten().all(|fact| fact.value.is_some());
    if is_known { Ok(()) } else { Err(OpError::ShapeOfData) }
}

impl Operation for NonZero {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        check_known(inputs)?;
        self.evaluate(inputs).map(types_of)
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        let own = strides(x.shape());
        let found: Vec<usize> = if x.dtype().is_float() {
            x.floats().iter().enumerate().filter(|(_, x)| **x != 0.0).map(|(at, _)| at).collect()
        } else {
            let elements = x.bytes().chunks_exact(x.dtype().size()).enumerate();
            elements.filter(|(_, element)| element.iter().any(|byte| *byte != 0)).map(|(at, _)| at).collect()
        };
        let mut numbers = Vec::with_capacity(found.len() * own.len());
        for (d, &stride) in own.iter().enumerate() {
            numbers.extend(found.iter().map(|at| (at / stride % x.shape()[d]) as i128));
        }
        Ok(vec![Tensor::from_integers(DType::I64, [own.len(), found.len()], &numbers)])
    }
}

/// Order of two numbers. NaN is the largest, and zeros are equal, whatever their signs.
fn order_of(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

impl Operation for TopK {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let mut ty = inputs.ty(0)?.clone();
        let at = axis(self.axis, ty.shape.len())?;
        let k = match self.k {
            Some(k) => k,
            None => {
                let k = inputs.tensor(1)?.i64s();
                size(*k.first().ok_or_else(|| invalid!("its number is empty"))?)?
            }
        };
        if k > ty.shape[at] {
            return Err(invalid!("there are no {k} of {}", ty.shape[at]));
        }
        ty.shape[at] = k;
        let places = TensorType::new(DType::I64, ty.shape.clone());
        Ok(vec![ty, places])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let types = self.infer(inputs)?;
        let x = inputs.tensor(0)?;
        let at = axis(self.axis, x.shape().len())?;
        let (outer, n, inner) = around(x.shape(), at);
        let k = types[0].shape[at];
        // Distinct integers may be equal as f64.
        let (floats, integers) = match x.dtype().is_float() {
            true => (x.floats(), Vec::new()),
            false => (Vec::new(), x.integers()),
        };
        let compare = |a: usize, b: usize| match integers.is_empty() {
            true => order_of(floats[a], floats[b]),
            false => integers[a].cmp(&integers[b]),
        };
        let mut places = vec![0; outer * k * inner];
        for o in 0..outer {
            for i in 0..inner {
                let place = |j: usize| (o * n + j) * inner + i;
                let mut order: Vec<usize> = (0..n).collect();
                // Equal elements stay in order, the first one first.
                order.sort_by(|&a, &b| {
                    let by = compare(place(a), place(b));
                    if self.is_largest { by.reverse() } else { by }
                });
                order.iter().take(k).enumerate().for_each(|(j, &from)| places[(o * k + j) * inner + i] = from);
            }
        }
        let from = |at: usize| (at / (k * inner).max(1) * n + places[at]) * inner + at % inner;
        let values = pick(x, types[0].shape.clone(), (0..places.len()).map(|at| Some(from(at))));
        let places: Vec<i128> = places.iter().map(|&at| at as i128).collect();
        Ok(vec![values, Tensor::from_integers(DType::I64, types[1].shape.clone(), &places)])
    }
}

impl Operation for Unique {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        check_known(inputs)?;
        self.evaluate(inputs).map(types_of)
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        let at = self.axis.map(|at| axis(at, x.shape().len())).transpose()?;
        let shape = if at.is_some() { x.shape().to_vec() } else { vec![x.n_elements()] };
        let (outer, n, inner) = around(&shape, at.unwrap_or(0));
        let (floats, integers) = match x.dtype().is_float() {
            true => (x.floats(), Vec::new()),
            false => (Vec::new(), x.integers()),
        };
        let compare_at = |i: usize, j: usize| match integers.is_empty() {
            true => order_of(floats[i], floats[j]),
            false => integers[i].cmp(&integers[j]),
        };
        let slice = |k: usize| (0..outer * inner).map(move |j| (j / inner * n + k) * inner + j % inner);
        let compare = |a: usize, b: usize| slice(a).zip(slice(b)).map(|(i, j)| compare_at(i, j)).find(|o| o.is_ne());
        // Equal slices become adjacent, the first one first.
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|&a, &b| compare(a, b).unwrap_or(Ordering::Equal));
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for k in order {
            match groups.last_mut() {
                Some(group) if compare(group[0], k).is_none() => group.push(k),
                _ => groups.push(vec![k]),
            }
        }
        if !self.is_sorted {
            groups.sort_by_key(|group| group[0]);
        }
        let mut out = shape.clone();
        out[at.unwrap_or(0)] = groups.len();
        let places = (0..product(&out)).map(|to| {
            let (k, i) = (to / inner % groups.len(), to % inner);
            Some((to / inner / groups.len() * n + groups[k][0]) * inner + i)
        });
        let values = pick(&x.reshaped(shape), out.clone(), places);
        let mut inverse = vec![0; n];
        groups.iter().enumerate().for_each(|(k, group)| group.iter().for_each(|&at| inverse[at] = k as i64));
        let firsts: Vec<i64> = groups.iter().map(|group| group[0] as i64).collect();
        let counts: Vec<i64> = groups.iter().map(|group| group.len() as i64).collect();
        Ok(vec![values, Tensor::vector(&firsts), Tensor::vector(&inverse), Tensor::vector(&counts)])
    }
}

impl NonMaxSuppression {
    /// Top, left, bottom and right edges of a box.
    fn corners(&self, b: &[f64]) -> [f64; 4] {
        match self.is_by_centre {
            true => [b[1] - b[3] / 2.0, b[0] - b[2] / 2.0, b[1] + b[3] / 2.0, b[0] + b[2] / 2.0],
            false => [b[0].min(b[2]), b[1].min(b[3]), b[0].max(b[2]), b[1].max(b[3])],
        }
    }
}

/// Intersection over union of two boxes.
fn overlap(a: [f64; 4], b: [f64; 4]) -> f64 {
    let area = |b: [f64; 4]| (b[2] - b[0]).max(0.0) * (b[3] - b[1]).max(0.0);
    let both = area([a[0].max(b[0]), a[1].max(b[1]), a[2].min(b[2]), a[3].min(b[3])]);
    let all = area(a) + area(b) - both;
    if all > 0.0 { both / all } else { 0.0 }
}

/// Boxes of an image, with an index by their left edges. Detectors shift the boxes of each class to a
/// separate region, so that few boxes can overlap a given one.
struct Boxes {
    corners: Vec<[f64; 4]>,
    /// Box at each position, in the order of left edges.
    by_left: Vec<usize>,
    /// Left edge at each position.
    lefts: Vec<f64>,
    /// Rightmost edge of the boxes up to each position.
    rights: Vec<f64>,
}

impl Boxes {
    fn new(corners: Vec<[f64; 4]>) -> Boxes {
        let mut by_left: Vec<usize> = (0..corners.len()).collect();
        by_left.sort_by(|&a, &b| corners[a][1].total_cmp(&corners[b][1]));
        let rightmost = |right: &mut f64, &at: &usize| {
            *right = right.max(corners[at][3]);
            Some(*right)
        };
        let rights = by_left.iter().scan(f64::NEG_INFINITY, rightmost).collect();
        let lefts = by_left.iter().map(|&at| corners[at][1]).collect();
        Boxes { corners, by_left, lefts, rights }
    }

    /// Positions of all boxes that may intersect a given one.
    fn near(&self, at: usize) -> Range<usize> {
        let [_, left, _, right] = self.corners[at];
        let first = self.rights.partition_point(|&other| other <= left);
        let end = self.lefts.partition_point(|&other| other < right);
        first..end.max(first)
    }

    /// Selects boxes greedily in this order, at most `most`, such that no two overlap by more than
    /// `most_overlap`.
    fn select(&self, order: &[usize], most: usize, most_overlap: f64) -> Vec<usize> {
        let overlaps = |a: usize, b: usize| overlap(self.corners[a], self.corners[b]) > most_overlap;
        let is_sparse = most_overlap >= 0.0 && self.corners.as_flattened().iter().all(|x| !x.is_nan());
        let mut kept: Vec<usize> = Vec::new();
        let mut is_kept = vec![false; self.corners.len()];
        for &at in order {
            if kept.len() == most {
                break;
            }
            let near = if is_sparse { self.near(at) } else { 0..self.corners.len() };
            let is_suppressed = if near.len() < kept.len() {
                self.by_left[near].iter().any(|&other| is_kept[other] && overlaps(at, other))
            } else {
                kept.iter().any(|&other| overlaps(at, other))
            };
            if !is_suppressed {
                is_kept[at] = true;
                kept.push(at);
            }
        }
        kept
    }
}

impl Operation for NonMaxSuppression {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        check_known(inputs)?;
        self.evaluate(inputs).map(types_of)
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let (&[n, n_boxes, 4], &[m, n_classes, k]) = (inputs.shape(0)?, inputs.shape(1)?) else {
            return Err(invalid!("boxes of {:?} and scores of {:?} do not fit", inputs.shape(0)?, inputs.shape(1)?));
        };
        if n != m || n_boxes != k {
            return Err(invalid!("boxes of {:?} and scores of {:?} do not fit", inputs.shape(0)?, inputs.shape(1)?));
        }
        let number = |at: usize| Ok(inputs.optional_tensor(at)?.and_then(|x| x.floats().first().copied()));
        let most = number(2)?.unwrap_or(0.0).max(0.0) as usize;
        let (most_overlap, least_score) = (number(3)?.unwrap_or(0.0), number(4)?);
        let (boxes, scores) = (inputs.tensor(0)?.floats(), inputs.tensor(1)?.floats());
        let mut found = Vec::new();
        for batch in 0..n {
            let corners = (0..n_boxes).map(|at| self.corners(&boxes[(batch * n_boxes + at) * 4..])).collect();
            let of_image = Boxes::new(corners);
            for class in 0..n_classes {
                let score = |at: usize| scores[(batch * n_classes + class) * n_boxes + at];
                let mut order: Vec<usize> =
                    (0..n_boxes).filter(|&at| least_score.is_none_or(|least| score(at) > least)).collect();
                order.sort_by(|&a, &b| order_of(score(b), score(a)));
                for at in of_image.select(&order, most, most_overlap) {
                    found.extend([batch as i128, class as i128, at as i128]);
                }
            }
        }
        Ok(vec![Tensor::from_integers(DType::I64, [found.len() / 3, 3], &found)])
    }
}

#[cfg(test)]
mod tests {
    use super::{Boxes, overlap};
    use crate::random::SplitMix64;

    /// Selects boxes by the definition: each is compared with all selected ones.
    fn defined(corners: &[[f64; 4]], order: &[usize], most: usize, most_overlap: f64) -> Vec<usize> {
        let mut kept: Vec<usize> = Vec::new();
        for &at in order {
            let fits = kept.iter().all(|&other| overlap(corners[at], corners[other]) <= most_overlap);
            if fits && kept.len() < most {
                kept.push(at);
            }
        }
        kept
    }

    #[test]
    fn boxes_near_by_are_compared() {
        let mut random = SplitMix64::new(1);
        for (spread, size, n) in [(0.0, 9.0, 200), (40.0, 9.0, 400), (1e4, 3.0, 300)] {
            let mut corners: Vec<[f64; 4]> = Vec::new();
            for at in 0..n {
                // Classes are in separate regions; corners may coincide.
                let class = f64::from(at % 20) * spread;
                let [top, left] = [0; 2].map(|_| (class + random.between(0.0, 9.0)).round());
                let [height, width] = [0; 2].map(|_| random.between(0.0, size).round());
                corners.push([top, left, top + height, left + width]);
            }
            for extra in [[f64::NAN; 4], [0.0, f64::NEG_INFINITY, 5.0, f64::INFINITY]] {
                let order: Vec<usize> = (0..corners.len()).collect();
                for (most, most_overlap) in [(n as usize, 0.0), (n as usize, 0.5), (7, 0.3), (n as usize, -1.0)] {
                    let found = Boxes::new(corners.clone()).select(&order, most, most_overlap);
                    assert_eq!(found, defined(&corners, &order, most, most_overlap), "{spread} {most_overlap}");
                }
                corners.insert(3, extra);
            }
        }
    }
}
