//! Transposed convolutions of integers as convolutions: results between two steps of the stride, its phases,
//! are channels of convolutions before they become places.

use tilewright_graph::op::{AutoPad, Conv, ConvShape, ConvTranspose, DequantizeLinear, WindowAttributes, axis};
use tilewright_graph::{DType, Graph, Node, Op, Tensor, TensorType, ValueId};
use tilewright_ir::{DType as ElementType, Target};

use super::super::price::{convolution_pays, integer_cycles};

/// Phases of a transposed convolution along a dimension: the result at `stride · q + phase − shift` sums the
/// products of elements `q + first` to `q + last` with taps of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Phases {
    stride: usize,
    /// Results of the phases ahead of the image, which are cut off.
    shift: usize,
    /// Values of `q`.
    n_places: usize,
    /// Number of elements.
    n: usize,
    kernel: usize,
    /// Results of the kernel ahead of the image, its padding.
    begin: usize,
}

/// Adjacent phases that one convolution computes, and the elements that they read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    phases: [usize; 2],
    first: i64,
    last: i64,
}

impl Run {
    fn n_phases(&self) -> usize {
        self.phases[1] - self.phases[0]
    }

    fn n_taps(&self) -> usize {
        (self.last - self.first + 1) as usize
    }
}

impl Phases {
    /// Phases of a kernel over `n` elements, of whose results `out` remain behind the first `begin`, with the
    /// shift that takes the fewest products; `None` if the convolution would leave out elements.
    fn of(kernel: usize, stride: usize, begin: i64, [n, out]: [usize; 2]) -> Option<Phases> {
        let begin = usize::try_from(begin).ok()?;
        let shifted =
            |shift: usize| Phases { stride, shift, n_places: (out + shift).div_ceil(stride), n, kernel, begin };
        let is_inside = |of: &Phases| of.whole().first <= 0 && of.behind(&of.whole()) >= 0;
        let all = (0..stride).map(shifted).filter(is_inside);
        all.min_by_key(|of| (of.whole().n_taps() * of.n_places, of.shift))
    }

    /// Elements that a phase reads, from the first to the last one.
    fn reach(&self, phase: usize) -> [i64; 2] {
        let at = (phase + self.begin) as i64 - self.shift as i64;
        let stride = self.stride as i64;
        [-(self.kernel as i64 - 1 - at).div_euclid(stride), at.div_euclid(stride)]
    }

    /// All phases as a run, of which some miss taps.
    fn whole(&self) -> Run {
        Run { phases: [0, self.stride], first: self.reach(0)[0], last: self.reach(self.stride - 1)[1] }
    }

    /// Runs of phases that read the same elements, so that few miss taps.
    fn runs(&self) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for phase in 0..self.stride {
            let [first, last] = self.reach(phase);
            match runs.last_mut() {
                Some(run) if [run.first, run.last] == [first, last] || first > last => run.phases[1] = phase + 1,
                _ if first > last => return vec![self.whole()],
                _ => runs.push(Run { phases: [phase, phase + 1], first, last }),
            }
        }
        runs
    }

    /// Padding of the convolution of a run at the end.
    fn behind(&self, run: &Run) -> i64 {
        self.n_places as i64 + run.last - self.n as i64
    }

    /// Tap of the kernel that a tap of a phase is; `None` if it is missing.
    fn tap(&self, phase: usize, element: i64) -> Option<usize> {
        let at = (phase + self.begin) as i64 - self.shift as i64 - self.stride as i64 * element;
        usize::try_from(at).ok().filter(|at| *at < self.kernel)
    }

    /// Range of the results that remain.
    fn cut(&self, out: usize) -> [usize; 2] {
        [self.shift, self.shift + out]
    }
}

/// Moves that make the result of a transposed convolution from that of a convolution.
#[derive(Debug, Clone)]
pub struct ToPlaces {
    /// Shape with the channels divided into groups, phases of rows and columns, and channels.
    pub divided: Vec<usize>,
    /// Order of these dimensions in the result.
    pub order: Vec<i64>,
    /// Shape with phases and places joined.
    pub joined: [usize; 4],
    /// Rows and columns that remain.
    pub cut: [[usize; 2]; 2],
    /// Shape of the result, which may have no rows.
    pub shape: Vec<usize>,
}

/// Convolutions in place of a transposed one, whose results are concatenated along their channels.
pub struct OfPhases {
    /// Convolution of each run of phases.
    pub runs: Vec<OfRun>,
    /// Shape of their image, which has rows.
    pub image: [usize; 4],
    /// Moves that make the result of those of the convolutions.
    pub to_places: ToPlaces,
}

/// Convolution of a run of phases along rows and columns.
pub struct OfRun {
    /// The convolution.
    pub conv: Conv,
    /// Filters, and their scale and zero point, which a `DequantizeLinear` reads.
    pub weights: Vec<Tensor>,
    /// Bias, if any: numbers, or integers and their scale.
    pub bias: Vec<Tensor>,
}

/// Constants that a `DequantizeLinear` without blocks reads, and the dimension of its scales: integers,
/// scale, and zero point, if any.
fn dequantized(graph: &Graph, id: ValueId) -> Option<(Vec<Tensor>, usize)> {
    let node = graph.node(graph.value(id).producer?.0);
    let Op::DequantizeLinear(DequantizeLinear(scaling)) = &node.op else { return None };
    let known = |id: &Option<ValueId>| graph.value((*id)?).constant.clone();
    let all = node.inputs.iter().map(known).collect::<Option<Vec<_>>>()?;
    let along = axis(scaling.axis, all[0].shape().len()).unwrap_or(0);
    (scaling.block == 0).then_some((all, along))
}

/// Elements of a list at these places.
fn gathered(list: &Tensor, places: &[usize]) -> Tensor {
    let width = list.dtype().size();
    let bytes: Vec<u8> = places.iter().flat_map(|at| &list.bytes()[at * width..][..width]).copied().collect();
    let ty = TensorType::new(list.dtype(), [places.len()]);
    Tensor::new(ty, bytes.into()).expect("invariant: an element for each place")
}

/// Scales or zero points of these places: a single one stays a scalar.
fn scaling_of(list: &Tensor, places: &[usize]) -> Tensor {
    if list.n_elements() == 1 { list.reshaped(Vec::new()) } else { gathered(list, places) }
}

/// Finds convolutions for a transposed one of one or two dimensions, without dilations, whose image is
/// dequantized and whose other operands are constants: one of all phases, or one for each run of phases with
/// the same reach, whichever is estimated to be faster; `None` if f32 is.
pub fn of_phases(graph: &Graph, node: &Node, op: &ConvTranspose, target: &Target) -> Option<OfPhases> {
    let (x, w) = (node.inputs[0]?, node.inputs[1]?);
    is_dequantized_image(graph, x).then_some(())?;
    let (weights, along) = dequantized(graph, w)?;
    let found = op.shape(&graph.ty(x).shape, weights[0].shape()).ok()?;
    let phases = phases_of(&found)?;
    let per_group = weights[0].shape()[1];
    let fits = |list: &Tensor| list.n_elements() == 1 || along == 1 && list.n_elements() == per_group;
    let is_of_bytes = matches!(weights[0].dtype(), DType::U8 | DType::I8);
    (weights[1..].iter().all(fits) && is_of_bytes && weights[0].n_elements() > 0).then_some(())?;
    let bias = match node.inputs.get(2).copied().flatten() {
        None => Vec::new(),
        Some(bias) => bias_of(graph, bias, found.m)?,
    };
    let [height, width] = with_row(&found.geometry.out);
    let image = [found.n, found.c, height, width];
    let made = |runs: &[[Run; 2]]| -> Option<(Vec<OfRun>, Vec<ConvShape>)> {
        let made = |runs: &[Run; 2]| of_run(&weights, &bias, &phases, runs, found.groups);
        let made: Vec<OfRun> = runs.iter().map(made).collect();
        let shapes =
            made.iter().map(|run| run.conv.shape(&image, run.weights[0].shape()).ok()).collect::<Option<_>>()?;
        Some((made, shapes))
    };
    let [rows, columns] = phases.map(|of| of.runs());
    // Channels of runs that are concatenated are in the order of phases of rows, then of columns.
    let are_in_order = columns.len() == 1 || rows.iter().all(|run| run.n_phases() == 1);
    let (mut runs, shapes) = made(&[phases.map(|of| of.whole())])?;
    let factors = [ElementType::U8, ElementType::I8];
    convolution_pays(&shapes[0], factors, target).then_some(())?;
    if rows.len() * columns.len() > 1 && are_in_order && (found.n, found.groups) == (1, 1) {
        let each: Vec<[Run; 2]> = rows.iter().flat_map(|row| columns.iter().map(|column| [*row, *column])).collect();
        let (apart, of_apart) = made(&each)?;
        let cycles =
            |all: &[ConvShape]| all.iter().map(|found| integer_cycles(found, factors, target)).sum::<Option<f64>>();
        if cycles(&of_apart).zip(cycles(&shapes)).is_some_and(|(apart, whole)| apart < whole) {
            runs = apart;
        }
    }
    let to_places = ToPlaces::of(&found, &phases);
    Some(OfPhases { runs, image, to_places })
}

/// Makes the convolution of a run of phases.
fn of_run(weights: &[Tensor], bias: &[Tensor], phases: &[Phases; 2], runs: &[Run; 2], groups: usize) -> OfRun {
    let per_group = weights[0].shape()[1];
    // Channel of the result for each of the convolution: by group, phase of rows and columns, and channel.
    let size = runs[0].n_phases() * runs[1].n_phases() * per_group;
    let channels: Vec<usize> = (0..groups * size).map(|at| at / size * per_group + at % per_group).collect();
    let in_group: Vec<usize> = channels.iter().map(|channel| channel % per_group).collect();
    let mut of_weights = vec![filters(weights, phases, runs, groups)];
    of_weights.extend(weights[1..].iter().map(|list| scaling_of(list, &in_group)));
    let mut of_bias: Vec<Tensor> = bias.first().map(|numbers| gathered(numbers, &channels)).into_iter().collect();
    of_bias.extend(bias.get(1).map(|scale| scaling_of(scale, &channels)));
    let pads = [[-runs[0].first, -runs[1].first], [phases[0].behind(&runs[0]), phases[1].behind(&runs[1])]];
    let window = WindowAttributes {
        kernel: Some(runs.map(|run| run.n_taps()).to_vec()),
        strides: None,
        dilations: None,
        pads: Some(pads.concat()),
        auto_pad: AutoPad::Given,
        ceil: false,
    };
    OfRun { conv: Conv { window, groups: Some(groups) }, weights: of_weights, bias: of_bias }
}

/// Whether a value is computed by a dequantization, by a single scale, of 8-bit integers that runs give.
pub fn is_dequantized_image(graph: &Graph, id: ValueId) -> bool {
    let Some((producer, _)) = graph.value(id).producer else { return false };
    let Node { op, inputs, .. } = graph.node(producer);
    let known = |id: &Option<ValueId>| id.and_then(|id| graph.value(id).constant.as_ref());
    let is_byte = |id: ValueId| matches!(graph.ty(id).dtype, DType::U8 | DType::I8);
    matches!(op, Op::DequantizeLinear(of) if of.0.block == 0)
        && inputs[0].is_some_and(is_byte)
        && known(&inputs[0]).is_none()
        && inputs[1..].iter().flatten().all(|id| known(&Some(*id)).is_some_and(|list| list.n_elements() == 1))
}

/// Phases along rows and columns; a single dimension is one of columns.
fn phases_of(found: &ConvShape) -> Option<[Phases; 2]> {
    let of = &found.geometry;
    let rank = of.kernel.len();
    let is_plain = matches!(rank, 1 | 2) && of.dilations.iter().zip(&of.kernel).all(|(d, k)| *d == 1 || *k == 1);
    (is_plain && found.n > 0 && !found.image.contains(&0) && !of.out.contains(&0)).then_some(())?;
    let phases = |d: usize| Phases::of(of.kernel[d], of.strides[d], of.begins[d], [of.out[d], found.image[d]]);
    match rank {
        1 => Some([Phases::of(1, 1, 0, [1, 1])?, phases(0)?]),
        _ => Some([phases(0)?, phases(1)?]),
    }
}

/// Rows and columns of sizes that may have no rows.
fn with_row(sizes: &[usize]) -> [usize; 2] {
    if let [columns] = sizes { [1, *columns] } else { [sizes[0], sizes[1]] }
}

/// Bias of `m` channels: numbers, or integers in 32 bits and their scale.
fn bias_of(graph: &Graph, id: ValueId, m: usize) -> Option<Vec<Tensor>> {
    let mut all = match &graph.value(id).constant {
        Some(numbers) => vec![numbers.clone()],
        None => dequantized(graph, id)?.0,
    };
    let is_zero = all.iter().skip(2).all(|zero| zero.i64s().iter().all(|x| *x == 0));
    let fits = |list: &Tensor| list.n_elements() == 1 || list.n_elements() == m;
    (is_zero && all[0].n_elements() == m && all.iter().all(fits)).then_some(())?;
    all.truncate(2);
    Some(all)
}

/// Filters of the convolution of a run, `[groups · phases · outputs, inputs, …]`, of weights
/// `[groups · inputs, outputs, …]`; a missing tap is the weights' zero point.
fn filters(weights: &[Tensor], phases: &[Phases; 2], [rows, columns]: &[Run; 2], groups: usize) -> Tensor {
    let (numbers, shape) = (weights[0].integers(), weights[0].shape());
    let (inputs, outputs, [height, width]) = (shape[0] / groups, shape[1], with_row(&shape[2..]));
    let zeros = weights.get(2).map_or(vec![0], Tensor::integers);
    let [of_rows, of_columns] = [rows, columns].map(Run::n_taps);
    let n_taps = of_rows * of_columns;
    let n = groups * rows.n_phases() * columns.n_phases() * outputs * inputs * n_taps;
    let tap = |of: &Phases, run: &Run, phase: usize, tap: usize| of.tap(run.phases[0] + phase, run.first + tap as i64);
    let number = |at: usize| {
        let (column, row, at) = (at % of_columns, at % n_taps / of_columns, at / n_taps);
        let (input, output, at) = (at % inputs, at / inputs % outputs, at / inputs / outputs);
        let (of_column, at) = (tap(&phases[1], columns, at % columns.n_phases(), column), at / columns.n_phases());
        let (of_row, group) = (tap(&phases[0], rows, at % rows.n_phases(), row), at / rows.n_phases());
        match (of_row, of_column) {
            (Some(row), Some(column)) => {
                numbers[(((group * inputs + input) * outputs + output) * height + row) * width + column]
            }
            _ => zeros[if zeros.len() == 1 { 0 } else { output }],
        }
    };
    let shape = [n / inputs / n_taps, inputs, of_rows, of_columns];
    Tensor::from_integers(weights[0].dtype(), shape, &(0..n).map(number).collect::<Vec<i128>>())
}

impl ToPlaces {
    fn of(found: &ConvShape, [rows, columns]: &[Phases; 2]) -> ToPlaces {
        let (n, groups, outputs) = (found.n, found.groups, found.m / found.groups);
        let [height, width] = with_row(&found.image);
        let of_image = [outputs, rows.n_places, columns.n_places];
        let mut divided = vec![n, groups, rows.stride, columns.stride];
        divided.extend(of_image);
        let mut order = vec![0, 1, 4, 5, 2, 6, 3];
        if groups == 1 {
            divided.remove(1);
            order = vec![0, 3, 4, 1, 5, 2];
        }
        ToPlaces {
            divided,
            order,
            joined: [n, found.m, rows.n_places * rows.stride, columns.n_places * columns.stride],
            cut: [rows.cut(height), columns.cut(width)],
            shape: [&[n, found.m], &found.image[..]].concat(),
        }
    }

    /// Whether the convolutions have no other channels than the result.
    pub fn is_of_one_phase(&self) -> bool {
        self.divided[1..self.divided.len() - 2].iter().product::<usize>() == self.joined[1]
    }
}
