//! Operators of integers with a known factor, in the place of those of numbers.

use std::borrow::Cow;

use tilewright_graph::op::{AutoPad, Cast, Conv, ConvInteger, ConvShape, Gather, MatMulInteger, Reshape, Window};
use tilewright_graph::{DType, Op, Place, Tensor, ValueId};
use tilewright_ir::{DType as ElementType, Target};

use super::super::price::convolution_pays;
use super::super::split::split;
use super::{Binary, Bytes, Job, spread};

/// Bytes that a dot product sums.
const DOT: usize = 4;

/// Largest difference of a byte and its zero point.
const LARGEST: i64 = 255;

/// Bound below which f32 holds each integer.
const EXACT: i64 = 1 << 24;

/// Operator of integers that takes the place of one of numbers, with its known factor.
pub struct Integers {
    /// Product or convolution of integers, or a convolution of numbers whose sums are exact.
    op: Op,
    weights: ValueId,
    /// Inputs of the first factor that the known one multiplies, one for each of its rows or channels; none
    /// where it multiplies each once.
    reads: Option<Vec<usize>>,
    /// Sizes, of a convolution of integers.
    found: Option<ConvShape>,
    /// Whether a convolution over one dimension is one over rows and columns, with a single row.
    pub is_line: bool,
    /// Channels of the result that each of the first factor's enters, where no other one enters these.
    pub n_results: Option<usize>,
    /// Shape of what there is one of for each column or channel of the result.
    pub along: Vec<usize>,
}

impl Integers {
    /// Whether kernels convolve integers of a type in less time than numbers.
    pub fn pays(&self, dtype: DType, target: &Target) -> bool {
        self.found.as_ref().is_some_and(|found| convolution_pays(found, dtype, target))
    }
}

/// Dimensions with one of size 1 between the channels and what is behind them.
fn with_row(shape: &[usize]) -> Vec<usize> {
    [&shape[..2], &[1], &shape[2..]].concat()
}

/// A convolution over one dimension, of these sizes, as one over rows and columns.
fn over_a_row(found: &ConvShape) -> Conv {
    let geometry = &found.geometry;
    let window = Window {
        kernel: Some(vec![1, geometry.kernel[0]]),
        strides: Some(vec![1, geometry.strides[0]]),
        dilations: Some(vec![1, geometry.dilations[0]]),
        pads: Some(vec![0, geometry.begins[0], 0, geometry.ends[0]]),
        auto_pad: AutoPad::Given,
        ceil: false,
    };
    Conv { window, groups: found.groups }
}

impl Job<'_> {
    /// Elements of a known factor, each less the zero point of its output: `place` is that of an element in
    /// the known tensor, and `output` its output, of `n`.
    fn centred(&self, bytes: &Bytes, n: usize, [place, output]: [&dyn Fn(usize) -> usize; 2]) -> Option<Vec<i64>> {
        let tensor = self.constant_of(bytes.id)?;
        let (numbers, zeros) = (tensor.i64s(), spread(&bytes.zeros(), n)?);
        Some((0..numbers.len()).map(|at| numbers[place(at)] - zeros[output(at)]).collect())
    }

    /// A known matrix as the second factor `[k, n]` of a product.
    pub fn matrix(&mut self, bytes: &Bytes, turned: bool) -> Option<Integers> {
        let &[rows, columns] = self.constant_of(bytes.id)?.shape() else { return None };
        let (k, n) = if turned { (columns, rows) } else { (rows, columns) };
        (bytes.is_single() || bytes.axis == usize::from(!turned)).then_some(())?;
        let place = |at: usize| if turned { at % n * k + at / n } else { at };
        let numbers = self.centred(bytes, n, [&place, &|at| at % n])?;
        let split = split(&numbers, [1, 1, k, n], DOT);
        let reads = (!split.is_plain()).then(|| split.columns.clone());
        let weights = self.known(bytes, vec![split.columns.len(), n], &split.numbers);
        Some(Integers {
            op: MatMulInteger.into(),
            weights,
            reads,
            found: None,
            is_line: false,
            n_results: None,
            along: vec![n],
        })
    }

    /// Known filters of a convolution of an image of this shape.
    pub fn filters(&mut self, bytes: &Bytes, conv: &Conv, image: &[usize]) -> Option<Integers> {
        let mut shape = self.constant_of(bytes.id)?.shape().to_vec();
        let is_single = bytes.is_single() || bytes.axis == 0;
        (shape.len() > 2 && !shape.contains(&0) && is_single).then_some(())?;
        let (mut conv, mut image, is_line) = (Cow::Borrowed(conv), image.to_vec(), shape.len() == 3);
        if is_line {
            conv = Cow::Owned(over_a_row(&conv.shape(&image, &shape).ok()?));
            (shape, image) = (with_row(&shape), with_row(&image));
        }
        let (n, n_channels, area) = (shape[0], shape[1], shape[2..].iter().product::<usize>());
        let numbers = self.centred(bytes, n, [&|at| at, &|at| at / (n_channels * area)])?;
        let (groups, rank) = (conv.groups, shape.len() - 2);
        (n.is_multiple_of(groups) && image.get(1) == Some(&(groups * n_channels))).then_some(())?;
        let n_results = (n_channels == 1).then(|| n / groups);
        let along = [&[n][..], &vec![1; rank]].concat();
        let lanes = self.target.lanes(ElementType::F32) as usize;
        let split = split(&numbers, [groups, n / groups, n_channels, area], lanes);
        let reads = (!split.is_plain()).then(|| split.columns.clone());
        // Kernels of depthwise convolutions read each channel once.
        if rank > 2 || reads.is_some() && n_channels == 1 && groups > 1 {
            let sum = |filter: &[i64]| filter.iter().map(|x| x.abs()).sum::<i64>();
            let is_exact = numbers.chunks(n_channels * area).all(|filter| sum(filter) * LARGEST < EXACT);
            let numbers: Vec<f64> = numbers.iter().map(|&x| x as f64).collect();
            let name = format!("{}.numbers", self.new.value(bytes.id).name);
            let weights = self.add_constant(name, Tensor::from_floats(DType::F32, shape, &numbers));
            let op = conv.into_owned().into();
            return is_exact.then_some(Integers { op, weights, reads: None, found: None, is_line, n_results, along });
        }
        image[1] = split.columns.len();
        shape[1] = split.columns.len() / groups;
        let found = conv.shape(&image, &shape).ok()?;
        let weights = self.known(bytes, shape, &split.numbers);
        let op = ConvInteger(conv.into_owned()).into();
        Some(Integers { op, weights, reads, found: Some(found), is_line, n_results, along })
    }

    /// A known factor of i8s: the one there is, if it has these elements.
    fn known(&mut self, bytes: &Bytes, shape: Vec<usize>, numbers: &[i128]) -> ValueId {
        let tensor = Tensor::from_integers(DType::I8, shape, numbers);
        if self.constant_of(bytes.id).is_some_and(|own| own.ty() == tensor.ty() && own.bytes() == tensor.bytes()) {
            return bytes.id;
        }
        let name = format!("{}.centred", self.new.value(bytes.id).name);
        self.add_constant(name, tensor)
    }

    /// Computes the sums of an operator of integers, of the first factor and its zero point; those of a
    /// convolution over one dimension have a row, which [`Self::as_line`] takes away.
    pub fn sums(
        &mut self,
        name: &str,
        place: &Place,
        [mut x, zero]: [Option<ValueId>; 2],
        integers: &Integers,
    ) -> Option<ValueId> {
        if integers.is_line {
            let shape = with_row(&self.shape(x?));
            x = Some(self.reshaped(format!("{name}.row"), place, x?, &shape)?);
        }
        if let Some(reads) = &integers.reads {
            let axis = if integers.found.is_some() { 1 } else { self.shape(x?).len() - 1 };
            let places: Vec<i64> = reads.iter().map(|&at| at as i64).collect();
            let places = self.add_constant(format!("{name}.places"), Tensor::vector(&places));
            let gather = Gather { axis: axis as i64 };
            x = Some(self.step(format!("{name}.inputs"), gather, place, vec![x, Some(places)])?);
        }
        let named = if integers.is_line { format!("{name}.sums") } else { name.to_owned() };
        if !matches!(integers.op, Op::Conv(_)) {
            return self.step(named, integers.op.clone(), place, vec![x, Some(integers.weights), zero]);
        }
        let to_number = Cast { to: Some(DType::F32) };
        x = Some(self.step(format!("{name}.number"), to_number, place, vec![x])?);
        if let Some(zero) = zero {
            let zero = self.step(format!("{name}.zero"), to_number, place, vec![Some(zero)])?;
            x = Some(self.step(format!("{name}.centred"), Binary::Sub, place, vec![x, Some(zero)])?);
        }
        let sums =
            self.step(format!("{name}.convolved"), integers.op.clone(), place, vec![x, Some(integers.weights)])?;
        self.step(named, Cast { to: Some(DType::I32) }, place, vec![Some(sums)])
    }

    /// The result of an operator of integers in the shape that its node gives it.
    pub fn as_line(&mut self, name: String, place: &Place, x: ValueId, integers: &Integers) -> Option<ValueId> {
        if !integers.is_line {
            return Some(x);
        }
        let mut shape = self.shape(x);
        shape.remove(2);
        self.reshaped(name, place, x, &shape)
    }

    fn reshaped(&mut self, name: String, place: &Place, x: ValueId, shape: &[usize]) -> Option<ValueId> {
        let sizes: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        let sizes = self.add_constant(format!("{name}.shape"), Tensor::vector(&sizes));
        self.step(name, Reshape { shape: None, allow_zero: false }, place, vec![Some(x), Some(sizes)])
    }
}
