//! Integer operators with a constant operand, in place of floating-point ones.

use tilewright_graph::op::{Cast, Conv, ConvInteger, ConvShape, Gather, MatMulInteger};
use tilewright_graph::{DType, Op, Place, Tensor, ValueId};
use tilewright_ir::DType as ElementType;

use super::super::has_7_bits;
use super::super::price::convolution_pays;
use super::super::split::split;
use super::forms::ConvolutionForm;
use super::{Binary, QuantizedValue, Quantizer, spread};

/// Number of bytes that a dot product instruction sums.
const DOT: usize = 4;

/// Largest difference of a byte and its zero point.
const LARGEST: i64 = 255;

/// Bound below which f32 holds each integer.
const EXACT: i64 = 1 << 24;

/// Integer operator in place of a floating-point one, with its constant operand.
pub struct Integers {
    /// Product or convolution of integers, or a convolution of numbers whose sums are exact.
    op: Op,
    weights: ValueId,
    /// Input of operand A for each row or channel of the constant operand; `None` if each is read once, in
    /// order.
    reads: Option<Vec<usize>>,
    /// Sizes of an integer convolution.
    found: Option<ConvShape>,
    /// Form of a convolution before it became two-dimensional.
    pub form: ConvolutionForm,
    /// Output channels per input channel of a depthwise convolution; `None` for other ones.
    pub n_results: Option<usize>,
    /// Shape of per-channel operands, such as scales, of the result.
    pub along: Vec<usize>,
}

impl Quantizer<'_> {
    /// Whether integer kernels for an operand A of this type are estimated to be faster than floating-point
    /// ones.
    pub fn pays(&self, integers: &Integers, image: DType) -> bool {
        let image = if image == DType::U8 { ElementType::U8 } else { ElementType::I8 };
        let is_short = self.constant_of(integers.weights).is_some_and(has_7_bits);
        let weights = match is_short && image == ElementType::U8 && self.target.adds_pairs_of_bytes() {
            true => ElementType::I7,
            false => ElementType::I8,
        };
        integers.found.as_ref().is_some_and(|found| convolution_pays(found, [image, weights], self.target))
    }

    /// Elements of a constant operand of at most 8 bits, each minus the zero point of its output: `place`
    /// maps to the index of an element in the constant, and `output` to its output, of `n`.
    fn centred(
        &self,
        bytes: &QuantizedValue,
        n: usize,
        [place, output]: [&dyn Fn(usize) -> usize; 2],
    ) -> Option<Vec<i64>> {
        let tensor = self.constant_of(bytes.id)?;
        let fits = matches!(tensor.dtype(), DType::U8 | DType::I8 | DType::U4 | DType::I4 | DType::U2 | DType::I2);
        fits.then_some(())?;
        let (numbers, zeros) = (tensor.i64s(), spread(&bytes.zeros(), n)?);
        Some((0..numbers.len()).map(|at| numbers[place(at)] - zeros[output(at)]).collect())
    }

    /// Constant matrix as operand B `[k, n]` of a product.
    pub fn matrix(&mut self, bytes: &QuantizedValue, turned: bool) -> Option<Integers> {
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
            form: ConvolutionForm::Rows,
            n_results: None,
            along: vec![n],
        })
    }

    /// Constant filters of a convolution of an image of this shape.
    pub fn filters(&mut self, bytes: &QuantizedValue, conv: &Conv, image: &[usize]) -> Option<Integers> {
        let shape = self.constant_of(bytes.id)?.shape().to_vec();
        (!shape.contains(&0) && (bytes.is_single() || bytes.axis == 0)).then_some(())?;
        let found = conv.shape(image, &shape).ok()?;
        let form = ConvolutionForm::of(&found)?;
        let (conv, mut image) = form.over_rows(conv, &found);
        let (mut shape, places) = form.filters(&shape);
        let (n, n_channels, area, groups) = (shape[0], shape[1], shape[2] * shape[3], found.groups);
        let numbers = self.centred(bytes, n, [&|at| places[at], &|at| at / (n_channels * area)])?;
        let n_results = (n_channels == 1).then(|| n / groups);
        let along = vec![n, 1, 1];
        let lanes = self.target.lanes(ElementType::F32) as usize;
        let split = split(&numbers, [groups, n / groups, n_channels, area], lanes);
        let reads = (!split.is_plain()).then(|| split.columns.clone());
        // Depthwise kernels can read each channel only once.
        if reads.is_some() && n_channels == 1 && groups > 1 {
            let sum = |filter: &[i64]| filter.iter().map(|x| x.abs()).sum::<i64>();
            let is_exact = numbers.chunks(area).all(|filter| sum(filter) * LARGEST < EXACT);
            let numbers: Vec<f64> = numbers.iter().map(|&x| x as f64).collect();
            let name = format!("{}.numbers", self.new.value(bytes.id).name);
            let weights = self.add_constant(name, Tensor::from_floats(DType::F32, shape, &numbers));
            let op = conv.into();
            return is_exact.then_some(Integers { op, weights, reads: None, found: None, form, n_results, along });
        }
        image[1] = split.columns.len();
        shape[1] = split.columns.len() / groups;
        let found = conv.shape(&image, &shape).ok()?;
        let weights = self.known(bytes, shape, &split.numbers);
        Some(Integers { op: ConvInteger(conv).into(), weights, reads, found: Some(found), form, n_results, along })
    }

    /// Returns a constant i8 operand: the existing one, if it has these elements.
    fn known(&mut self, bytes: &QuantizedValue, shape: Vec<usize>, numbers: &[i128]) -> ValueId {
        let tensor = Tensor::from_integers(DType::I8, shape, numbers);
        if self.constant_of(bytes.id).is_some_and(|own| own.ty() == tensor.ty() && own.bytes() == tensor.bytes()) {
            return bytes.id;
        }
        let name = format!("{}.centred", self.new.value(bytes.id).name);
        self.add_constant(name, tensor)
    }

    /// Adds the integer operator for operand A and its zero point, and returns its accumulators; those of a
    /// convolution are two-dimensional.
    pub fn sums(
        &mut self,
        name: &str,
        place: &Place,
        [mut x, zero]: [Option<ValueId>; 2],
        integers: &Integers,
    ) -> Option<ValueId> {
        x = Some(self.read_as(&integers.form, name, place, x?, zero)?);
        if let Some(reads) = &integers.reads {
            let axis = if integers.found.is_some() { 1 } else { self.shape(x?).len() - 1 };
            let places: Vec<i64> = reads.iter().map(|&at| at as i64).collect();
            let places = self.add_constant(format!("{name}.places"), Tensor::vector(&places));
            let gather = Gather { axis: axis as i64 };
            x = Some(self.step(format!("{name}.inputs"), gather, place, vec![x, Some(places)])?);
        }
        let named = if !integers.form.is_rows() { format!("{name}.sums") } else { name.to_owned() };
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
}
