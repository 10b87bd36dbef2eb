//! Choice of image layouts between kernels: plain, or blocks of channels innermost (NCHWc).

use std::collections::{HashMap, HashSet};
use std::fmt::{self, Write};

use tilewright_graph::Tensor;
use tilewright_ir::expr::{Expr, ReduceOp};
use tilewright_ir::op::{Layout, ProgramBuilder, SizeRange, StageSpec, Structure, Window, Workload, WorkloadError};
use tilewright_ir::{DType, Role};
use tilewright_runtime::RunSize;

use crate::fuse::{Fused, Kernel, Step, in_memory, nest};
use crate::net::{Kind, Net, Node, ValueId};
use crate::open::loops::{OpenLoop, OpenSizes};

/// Costs of workloads, in any common unit.
#[derive(Clone, Copy)]
pub struct Costs<'a> {
    /// Expected cost of a workload; `None` if it has no kernel.
    pub expected: &'a dyn Fn(&Workload) -> Option<f64>,
    /// Measured cost of a workload; `None` if it was not measured.
    pub measured: &'a dyn Fn(&Workload) -> Option<f64>,
}

/// Factor on the measured cost of a conversion, which was measured with its input in cache: a conversion that
/// gains too little is left out.
const CONVERTED: f64 = 1.5;

/// Maximum number of states that the search keeps at one step; far more than networks have, except for
/// generated ones.
const MOST_STATES: usize = 1 << 10;

impl Fused {
    /// Chooses the image layouts that minimise the total cost of all kernels, with blocks of `block` channels
    /// or plain: neighbouring kernels use the same layout, or a kernel, whose cost counts, converts the image
    /// between them.
    ///
    /// Inputs and outputs keep their layouts, and so do images that operators without code read or write. The
    /// cost of a kernel that reads one layout and writes another is the measured one; if it was not measured,
    /// that of the slower of its two variants that keep the layout, since an estimate of its own would take
    /// time. The search is dynamic programming over the steps: a state holds the layouts of the images that
    /// later steps still read, and only the cheapest choice for each state is kept.
    ///
    /// With `prefers_measured`, only layouts for which all kernels were measured are considered, if there are
    /// such.
    ///
    /// # Errors
    /// If a kernel in another layout is larger than any memory.
    pub fn laid_out(self, block: i64, costs: Costs, prefers_measured: bool) -> Result<Fused, WorkloadError> {
        let cheapest = self.cheapest_layouts(block, costs, prefers_measured)?;
        self.with_layouts(block, &cheapest)
    }

    /// Finds the layouts that [`Fused::laid_out`] chooses.
    ///
    /// # Errors
    /// As [`Fused::laid_out`].
    pub(crate) fn cheapest_layouts(
        &self,
        block: i64,
        costs: Costs,
        prefers_measured: bool,
    ) -> Result<ImageLayouts, WorkloadError> {
        let images = Images::new(self, block);
        let mut prices = Prices::new(&self.net, &images, costs, prefers_measured);
        let mut cheapest = if prefers_measured { prices.cheapest(&self.steps)? } else { None };
        if cheapest.is_none() {
            prices = Prices::new(&self.net, &images, costs, false);
            cheapest = prices.cheapest(&self.steps)?;
        }
        let in_blocks = cheapest.unwrap_or_default();
        if !in_blocks.iter().any(|is_in_blocks| *is_in_blocks) {
            return Ok(ImageLayouts::default());
        }
        let mut ways = Vec::with_capacity(self.steps.len());
        for (at, step) in self.steps.iter().enumerate() {
            let way = match step {
                Step::Kernel(kernel) => prices.way(at, kernel, &in_blocks)?.map(|(_, way)| way),
                _ => None,
            };
            ways.push(way);
        }
        Ok(ImageLayouts { in_blocks, ways })
    }

    /// Whether the layouts fit these images; those of another model, or of an older version, may not.
    pub(crate) fn can_have(&self, block: i64, layouts: &ImageLayouts) -> bool {
        let ImageLayouts { in_blocks, ways } = layouts;
        if in_blocks.is_empty() {
            return ways.is_empty();
        }
        let images = Images::new(self, block);
        let is_of_kernel = |kernel: &Kernel, way: KernelLayouts| {
            let output = images.is_in_blocks(kernel.output, in_blocks);
            match (images.freedom(&self.net, kernel), kernel.workload.structure()) {
                (None, _) => !output && way == KernelLayouts { input: false, output: false },
                (Some(free), Structure::Nest(_)) => {
                    let is_fixed = images.classes[kernel.output.0].is_some();
                    (free.input || !way.input) && way.output == way.input && (!is_fixed || way.output == output)
                }
                (Some(free), _) => (free.input || !way.input) && way.output == output,
            }
        };
        let fits = |(step, way): (&Step, &Option<KernelLayouts>)| match (step, way) {
            (Step::Kernel(kernel), Some(way)) => is_of_kernel(kernel, *way),
            (_, way) => way.is_none(),
        };
        in_blocks.len() == images.n_classes && ways.len() == self.steps.len() && self.steps.iter().zip(ways).all(fits)
    }

    /// Text on which, besides the costs of workloads, the choice of layouts depends: the kernels, the values
    /// that they read and write, and their shapes.
    pub(crate) fn text_of_images(&self) -> String {
        let mut text = String::new();
        for step in &self.steps {
            let Step::Kernel(kernel) = step else {
                text += "-\n";
                continue;
            };
            let _ = write!(text, "{} of", kernel.workload);
            for id in kernel.inputs.iter().chain([&kernel.output]) {
                let value = self.net.value(*id);
                let is_known = value.constant.is_some();
                let _ = write!(text, " {}:{}:{:?}:{is_known}", id.0, value.dtype.name(), value.shape);
            }
            text += "\n";
        }
        let _ = write!(text, "{:?} {:?}", self.net.inputs, self.net.outputs);
        text
    }

    /// Gives the images these layouts, and inserts the conversions between them.
    ///
    /// # Errors
    /// As [`Fused::laid_out`].
    pub(crate) fn with_layouts(self, block: i64, layouts: &ImageLayouts) -> Result<Fused, WorkloadError> {
        let ImageLayouts { in_blocks, ways } = layouts;
        if in_blocks.is_empty() {
            return Ok(self);
        }
        let images = Images::new(&self, block);
        let mut out = self;
        let steps = std::mem::take(&mut out.steps);
        // Converted images, by the original value and whether the conversion is to blocks.
        let mut converted: HashMap<(ValueId, bool), ValueId> = HashMap::new();
        let mut constants: HashMap<ValueId, ValueId> = HashMap::new();
        for (step, way) in steps.into_iter().zip(ways) {
            let (Step::Kernel(kernel), Some(way)) = (&step, *way) else {
                out.steps.push(step);
                continue;
            };
            let mut changed = images.kernel(&out.net, kernel, way)?;
            for slot in images.constants(&out.net, kernel, way) {
                let id = kernel.inputs[slot];
                changed.inputs[slot] = *constants.entry(id).or_insert_with(|| out.constant_in_blocks(id, block));
            }
            for (slot, wanted) in images.reads(&out.net, kernel, way) {
                let id = kernel.inputs[slot];
                if wanted == images.is_in_blocks(id, in_blocks) {
                    continue;
                }
                let known = converted.get(&(id, wanted)).copied();
                changed.inputs[slot] = match known {
                    Some(known) => known,
                    None => {
                        let made = conversion(&mut out.net, id, block, wanted)?;
                        let to = made.output;
                        out.steps.push(Step::Kernel(made));
                        converted.insert((id, wanted), to);
                        to
                    }
                };
            }
            out.steps.push(Step::Kernel(changed));
        }
        Ok(out)
    }

    /// Adds a constant image in blocks of channels.
    fn constant_in_blocks(&mut self, id: ValueId, block: i64) -> ValueId {
        let value = self.net.value(id);
        let (name, dtype, shape) = (value.name.clone(), value.dtype, value.shape.clone());
        let constant = value.constant.as_ref().expect("invariant: the image is a constant");
        let [blocks, block, area] = [shape[0] * shape[1] / block, block, shape[2] * shape[3]].map(|n| n as usize);
        let width = constant.bytes().len() / constant.n_elements();
        let mut bytes = Vec::with_capacity(constant.bytes().len());
        for at in 0..blocks * area * block {
            let (of_block, place, channel) = (at / (area * block), at / block % area, at % block);
            let from = (of_block * block + channel) * area + place;
            bytes.extend_from_slice(&constant.bytes()[from * width..][..width]);
        }
        let made = Tensor::new(constant.ty().clone(), bytes.into());
        let new = self.net.add_value(&format!("{name}.c{block}"), dtype, &shape);
        self.net.values[new.0].constant = made;
        if let Some(open) = &mut self.open {
            open.axes.resize(new.0, Vec::new());
            open.axes.push(open.axes[id.0].clone());
        }
        new
    }

    /// Number of kernels that only convert a layout.
    pub fn n_conversions(&self) -> usize {
        let is_nest = |kernel: &Kernel| matches!(kernel.workload.structure(), Structure::Nest(_));
        let is_one = |step: &&Step| matches!(step, Step::Kernel(k) if k.members.is_empty() && is_nest(k));
        self.steps.iter().filter(is_one).count()
    }
}

/// Layouts chosen for the images of a model; empty if all are plain.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ImageLayouts {
    /// Whether each class of images is in blocks.
    in_blocks: Vec<bool>,
    /// Layouts of the input and output of each step that is a kernel.
    ways: Vec<Option<KernelLayouts>>,
}

impl fmt::Display for ImageLayouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digit = |is_set: bool| if is_set { '1' } else { '0' };
        self.in_blocks.iter().try_for_each(|is_in_blocks| f.write_char(digit(*is_in_blocks)))?;
        self.ways.iter().try_for_each(|way| match way {
            None => f.write_str(" -"),
            Some(way) => write!(f, " {}{}", digit(way.input), digit(way.output)),
        })
    }
}

impl ImageLayouts {
    /// Parses the text of layouts; `None` if it is malformed.
    pub(crate) fn parse(text: &str) -> Option<ImageLayouts> {
        let is_set = |digit: char| match digit {
            '0' => Some(false),
            '1' => Some(true),
            _ => None,
        };
        let mut parts = text.split(' ');
        let in_blocks = parts.next()?.chars().map(is_set).collect::<Option<_>>()?;
        let way = |part: &str| {
            if part == "-" {
                return Some(None);
            }
            let sides: Vec<bool> = part.chars().map(is_set).collect::<Option<_>>()?;
            let [input, output] = sides[..] else { return None };
            Some(Some(KernelLayouts { input, output }))
        };
        Some(ImageLayouts { in_blocks, ways: parts.map(way).collect::<Option<_>>()? })
    }
}

/// Layouts of a kernel's input and output: blocked or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct KernelLayouts {
    input: bool,
    output: bool,
}

/// Images of a net, in classes that share a layout.
struct Images {
    block: i64,
    /// Class of each value whose layout is open.
    classes: Vec<Option<usize>>,
    n_classes: usize,
    /// Results of kernels in loops, whose layout is fixed.
    in_loops: HashSet<ValueId>,
}

/// Whether images of a type may be stored in blocks.
fn is_of_images(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::U8 | DType::I8)
}

/// Whether the groups of a convolution are whole blocks of channels; a depthwise one needs as many outputs as
/// inputs.
pub(crate) fn takes_blocks(window: &Window, block: i64) -> bool {
    let of_group = [window.c / window.groups, window.k / window.groups];
    match window.depthwise {
        true => window.c == window.k,
        false => window.groups == 1 || !window.interleaved && of_group.iter().all(|n| n % block == 0),
    }
}

/// Whether a value is an image whose channels fill blocks and whose layout matters.
fn is_image(net: &Net, id: ValueId, block: i64) -> bool {
    match *net.shape(id) {
        [_, c, h, w] => c % block == 0 && h * w > 1 && net.element_type(id).is_some_and(is_of_images),
        _ => false,
    }
}

/// Whether steps read all elements of a value, as a list, only to find the least or largest one, which does
/// not depend on their order in memory.
fn is_unordered(fused: &Fused, of: ValueId, list: ValueId) -> bool {
    let net = &fused.net;
    let is_whole = matches!(net.shape(list), [n] if *n == net.value(of).n_elements());
    let is_extreme = |at: &usize| {
        let node = &net.nodes[*at];
        !node.inputs.contains(&Some(list)) || matches!(node.kind, Kind::Reduce(ReduceOp::Min | ReduceOp::Max, _))
    };
    let fits = |step: &Step| match step {
        Step::Kernel(kernel) => {
            !kernel.inputs.contains(&list) || !kernel.members.is_empty() && kernel.members.iter().all(is_extreme)
        }
        Step::Part { of, .. } => *of != list,
        Step::Join { parts, .. } => !parts.contains(&list),
        Step::Set { from, .. } | Step::Append { from, .. } => *from != list,
        Step::Host(node) => !node.inputs.contains(&Some(list)),
        Step::Sequence(_) | Step::While(_) | Step::Again(_) => false,
    };
    is_whole && fused.open.is_none() && !net.outputs.contains(&list) && fused.steps.iter().all(fits)
}

impl Images {
    fn new(fused: &Fused, block: i64) -> Images {
        let net = &fused.net;
        let mut group: Vec<usize> = (0..net.values.len()).collect();
        fn root(group: &[usize], mut at: usize) -> usize {
            while group[at] != at {
                at = group[at];
            }
            at
        }
        let mut is_open = vec![false; net.values.len()];
        let mut closed: Vec<ValueId> = net.inputs.iter().chain(&net.outputs).copied().collect();
        let (mut depth, mut in_loops) = (0, HashSet::new());
        for step in &fused.steps {
            match step {
                Step::While(_) => depth += 1,
                Step::Again(_) => depth -= 1,
                // A loop may run no iterations, so its iterations must not convert images that other steps
                // read.
                Step::Kernel(kernel) if depth > 0 => {
                    in_loops.insert(kernel.output);
                    closed.extend(kernel.inputs.iter().chain([&kernel.output]));
                }
                Step::Set { from, to } => closed.extend([*from, *to]),
                Step::Part { of, part, .. } if depth > 0 => closed.extend([*of, *part]),
                Step::Kernel(kernel) => is_open[kernel.output.0] = is_image(net, kernel.output, block),
                Step::Sequence(steps) => {
                    closed.extend(steps.outer_values());
                }
                Step::Host(node) => closed.extend(node.inputs.iter().flatten().chain(&node.outputs)),
                Step::Part { of, part, .. } if is_image(net, *of, block) && is_unordered(fused, *of, *part) => {}
                Step::Part { of, part, offset } => {
                    // A part of an image's channels is an image of its own.
                    let [whole, own] = [of, part].map(|id| net.shape(*id));
                    let is_alike = is_image(net, *of, block)
                        && is_image(net, *part, block)
                        && (whole[0], own[0]) == (1, 1)
                        && whole[2..] == own[2..]
                        && offset % (block * whole[2] * whole[3]) == 0;
                    if is_alike {
                        is_open[part.0] = true;
                        let (a, b) = (root(&group, of.0), root(&group, part.0));
                        group[a] = b;
                    } else {
                        closed.extend([*of, *part]);
                    }
                }
                Step::Append { from, to, .. } => closed.extend([*from, *to]),
                Step::Join { parts, whole } => {
                    let shape = net.shape(*whole);
                    let is_part = |id: &ValueId| {
                        let own = net.shape(*id);
                        is_image(net, *id, block) && own[0] == 1 && own[2..] == shape[2..]
                    };
                    if is_image(net, *whole, block) && parts.iter().all(is_part) {
                        is_open[whole.0] = true;
                        for part in parts {
                            let (a, b) = (root(&group, part.0), root(&group, whole.0));
                            group[a] = b;
                        }
                    } else {
                        closed.extend(parts.iter().chain([whole]));
                    }
                }
            }
        }
        closed.iter().for_each(|id| is_open[id.0] = false);
        // The layout of a class is open only if that of each member is.
        let mut class_is_open = vec![true; net.values.len()];
        (0..net.values.len()).filter(|at| !is_open[*at]).for_each(|at| class_is_open[root(&group, at)] = false);
        let mut numbers: HashMap<usize, usize> = HashMap::new();
        let classes = (0..net.values.len()).map(|at| {
            let root = root(&group, at);
            class_is_open[root].then(|| {
                let next = numbers.len();
                *numbers.entry(root).or_insert(next)
            })
        });
        let classes = classes.collect();
        let mut images = Images { block, classes, n_classes: numbers.len(), in_loops };
        // The result of a kernel that cannot write blocks is plain.
        let kernels = fused.steps.iter().filter_map(|step| match step {
            Step::Kernel(kernel) => Some(kernel),
            _ => None,
        });
        let is_bound = |kernel: &&Kernel| images.freedom(net, kernel).is_none();
        let bound: Vec<usize> = kernels.filter(is_bound).filter_map(|kernel| images.classes[kernel.output.0]).collect();
        images.classes.iter_mut().for_each(|class| *class = class.filter(|class| !bound.contains(class)));
        images
    }

    /// Whether a value has its channels in blocks.
    fn is_in_blocks(&self, id: ValueId, in_blocks: &[bool]) -> bool {
        self.classes.get(id.0).copied().flatten().is_some_and(|class| in_blocks[class])
    }

    /// Sides of a kernel that may be blocked; `None` if its layouts are fixed.
    fn freedom(&self, net: &Net, kernel: &Kernel) -> Option<KernelLayouts> {
        let is_image = |id: ValueId| is_image(net, id, self.block);
        if self.in_loops.contains(&kernel.output) {
            return None;
        }
        let output = self.classes[kernel.output.0].is_some();
        match kernel.workload.structure() {
            Structure::Window(window) => {
                let is_of_type = kernel.workload.dtype == DType::F32 || kernel.workload.has_integer_factors();
                let free = takes_blocks(&window, self.block) && !window.transposed && is_of_type;
                let input = is_image(kernel.inputs[0]) && net.value(kernel.inputs[0]).constant.is_none();
                (free && (input || output)).then_some(KernelLayouts { input, output })
            }
            Structure::Nest(_) => {
                let has_images = kernel.inputs.iter().chain([&kernel.output]).any(|id| is_image(*id));
                // An image with one element per channel has the same memory layout either way.
                let output = output || in_one_element(net, kernel.output);
                (has_images && output && keeps_channels(net, kernel)).then_some(KernelLayouts { input: true, output })
            }
            Structure::Contraction(_) | Structure::Packed(_) => None,
        }
    }

    /// Inputs of a kernel that depend on a layout, and whether they are blocked.
    fn reads(&self, net: &Net, kernel: &Kernel, way: KernelLayouts) -> Vec<(usize, bool)> {
        let is_image = |id: ValueId| is_image(net, id, self.block) && net.value(id).constant.is_none();
        let images = (0..kernel.inputs.len()).filter(|slot| is_image(kernel.inputs[*slot]));
        match kernel.workload.structure() {
            Structure::Window(_) => {
                images.filter(|slot| *slot != 1).map(|at| (at, if at == 0 { way.input } else { way.output })).collect()
            }
            Structure::Nest(_) => images.map(|at| (at, way.input)).collect(),
            Structure::Contraction(_) | Structure::Packed(_) => images.map(|at| (at, false)).collect(),
        }
    }

    /// Constant images that a convolution reads in the layout of its output, if that is in blocks: slots of
    /// its inputs. Nests read constants in the plain layout.
    fn constants(&self, net: &Net, kernel: &Kernel, way: KernelLayouts) -> Vec<usize> {
        let is_constant = |id: ValueId| is_image(net, id, self.block) && net.value(id).constant.is_some();
        let is_window = matches!(kernel.workload.structure(), Structure::Window(_));
        (2..kernel.inputs.len()).filter(|at| is_window && way.output && is_constant(kernel.inputs[*at])).collect()
    }

    /// Makes the variant of a kernel with these layouts.
    fn kernel(&self, net: &Net, kernel: &Kernel, way: KernelLayouts) -> Result<Kernel, WorkloadError> {
        let blocks = |is_in_blocks: bool| if is_in_blocks { self.block } else { 1 };
        match kernel.workload.structure() {
            Structure::Window(_) => {
                let sides = [blocks(way.input), blocks(way.output)];
                let workload = kernel.workload.clone().with_layout(Layout::of_channels(sides))?;
                Ok(Kernel { workload, block: sides[1], ..kernel.clone() })
            }
            Structure::Nest(_) if way.input => {
                let in_blocks = self.block;
                let made = nest(net, &kernel.members, &|id| block_of(net, id, in_blocks))?;
                Ok(Kernel { in_blocks, ..made })
            }
            Structure::Nest(_) | Structure::Contraction(_) | Structure::Packed(_) => Ok(kernel.clone()),
        }
    }
}

/// Block of adjacent channels of a value that a nest in blocks reads or writes.
pub(crate) fn block_of(net: &Net, id: ValueId, block: i64) -> i64 {
    let is_image = is_image(net, id, block) && net.value(id).constant.is_none();
    let is_alike = in_one_element(net, id) && net.shape(id)[1] % block == 0;
    if is_image || is_alike { block } else { 1 }
}

/// Whether a value has one element per channel.
fn in_one_element(net: &Net, id: ValueId) -> bool {
    matches!(net.shape(id), [_, _, 1, 1])
}

/// Whether a nest processes each channel separately and identically, or moves adjacent channels, so that it
/// can process blocks of channels. It may also compute numbers that all channels need, such as a zero point.
fn keeps_channels(net: &Net, kernel: &Kernel) -> bool {
    kernel.members.iter().map(|&at| &net.nodes[at]).all(|node| {
        let is_of_images = node.outputs.iter().all(|id| net.shape(*id).len() == 4);
        is_of_numbers(net, node) || is_of_images && is_by_channel(net, node)
    })
}

fn is_by_channel(net: &Net, node: &Node) -> bool {
    match &node.kind {
        Kind::Map(_) | Kind::Pixels { .. } => true,
        // A gather of single elements from a list.
        Kind::Gather { axis: 0, .. } => net.shape(node.input(0)).len() == 1,
        Kind::Reduce(_, dims) => dims.iter().all(|d| *d >= 2),
        Kind::Window(_, windows) => (windows.kernel[1], windows.strides[1], windows.before[1]) == (1, 1, 0),
        _ => false,
    }
}

/// Whether a node computes one number from single numbers.
fn is_of_numbers(net: &Net, node: &Node) -> bool {
    let is_number = |id: &ValueId| net.value(*id).n_elements() == 1;
    let all = || node.inputs.iter().flatten().chain(&node.outputs);
    matches!(node.kind, Kind::Map(_) | Kind::View) && all().all(is_number)
}

/// Makes a kernel that converts an image to or from blocks of channels, and its result.
fn conversion(net: &mut Net, from: ValueId, block: i64, to_blocks: bool) -> Result<Kernel, WorkloadError> {
    let value = net.value(from).clone();
    let (layout, origin) = match to_blocks {
        true => (format!("c{block}"), format!("{} to blocks of {block} channels", value.name)),
        false => ("nchw".to_owned(), format!("{} to plain channels", value.name)),
    };
    let output = net.add_value(&format!("{}.{layout}", value.name), value.dtype, &value.shape);
    let dtype = net.element_type(from).expect("images are of types that have code");
    let workload = conversion_of(dtype, &value.shape, block, to_blocks, None)?;
    let in_blocks = block;
    let block = if to_blocks { block } else { 1 };
    Ok(Kernel { workload, inputs: vec![from], output, origin, members: Vec::new(), block, in_blocks, open: None })
}

/// Makes the workload of a conversion; open rows are as many as the run says.
pub(crate) fn conversion_of(
    dtype: DType,
    shape: &[i64],
    block: i64,
    to_blocks: bool,
    rows: Option<(RunSize, SizeRange)>,
) -> Result<Workload, WorkloadError> {
    let blocked = in_memory(shape, block);
    let [n, blocks, h, w, c] = blocked[..] else { unreachable!("an image has four dimensions") };
    let plain = [n, blocks, c, h, w];
    let (from, to) = if to_blocks { (&plain[..], &blocked[..]) } else { (&blocked[..], &plain[..]) };
    let mut program = ProgramBuilder::new("nest", DType::F32, Vec::new());
    program.set_dtype(dtype);
    let x = program.input("X", from);
    let names = ["i0", "i1", "i2", "i3", "i4"];
    let axes: Vec<(&str, i64)> = names.into_iter().zip(to.iter().copied()).collect();
    // The channels of a block precede rows and columns in the plain image, and follow them in the blocked
    // one.
    let order = if to_blocks { [0, 1, 4, 2, 3] } else { [0, 1, 3, 4, 2] };
    program.stage(StageSpec { name: "Y", axes: &axes, reduce: None, role: Role::Output }, |at| {
        Expr::Load(x, order.iter().map(|&d| at[d].clone()).collect())
    });
    let ends = rows.map(|(size, range)| {
        let name = if to_blocks { names[2] } else { names[3] };
        OpenLoop { name: name.to_owned(), size, range, multiple: 1 }
    });
    let (program, _) = OpenSizes::default().with_loops(program.finish(), ends.into_iter().collect());
    Workload::nest(program)
}

/// Costs of kernels and conversions.
struct Prices<'a> {
    net: &'a Net,
    images: &'a Images,
    costs: Costs<'a>,
    /// Whether kernels that were not measured are excluded.
    only_measured: bool,
    /// Costs by the workload's text.
    known: HashMap<String, Option<f64>>,
    /// Costs of kernels by their steps.
    of_kernels: HashMap<(usize, KernelLayouts), Option<f64>>,
    of_conversions: HashMap<(ValueId, bool), f64>,
}

impl<'a> Prices<'a> {
    fn new(net: &'a Net, images: &'a Images, costs: Costs<'a>, only_measured: bool) -> Prices<'a> {
        let (known, of_kernels, of_conversions) = Default::default();
        Prices { net, images, costs, only_measured, known, of_kernels, of_conversions }
    }

    fn of(&mut self, workload: &Workload) -> Option<f64> {
        let Costs { expected, measured } = self.costs;
        let cost = if self.only_measured { measured } else { expected };
        *self.known.entry(workload.to_string()).or_insert_with(|| cost(workload))
    }

    /// Cost of a kernel with these layouts.
    fn kernel(&mut self, at: usize, kernel: &Kernel, way: KernelLayouts) -> Result<Option<f64>, WorkloadError> {
        if let Some(known) = self.of_kernels.get(&(at, way)) {
            return Ok(*known);
        }
        let workload = self.images.kernel(self.net, kernel, way)?.workload;
        let is_open = |id: ValueId| self.images.classes[id.0].is_some();
        let is_between = way.input != way.output && is_open(kernel.inputs[0]) && is_open(kernel.output);
        let cost = match (self.costs.measured)(&workload) {
            _ if !is_between => self.of(&workload),
            None if !self.only_measured => {
                let mut alike = |both: bool| self.kernel(at, kernel, KernelLayouts { input: both, output: both });
                alike(false)?.zip(alike(true)?).map(|(plain, in_blocks)| plain.max(in_blocks))
            }
            measured => measured,
        };
        self.of_kernels.insert((at, way), cost);
        Ok(cost)
    }

    /// Cost of converting an image to another layout.
    fn conversion(&mut self, id: ValueId, to_blocks: bool) -> Result<f64, WorkloadError> {
        if let Some(known) = self.of_conversions.get(&(id, to_blocks)) {
            return Ok(*known);
        }
        let dtype = self.net.element_type(id).expect("images are of types that have code");
        let workload = conversion_of(dtype, self.net.shape(id), self.images.block, to_blocks, None)?;
        let cost = CONVERTED * self.of(&workload).unwrap_or(f64::INFINITY);
        self.of_conversions.insert((id, to_blocks), cost);
        Ok(cost)
    }

    /// Finds the cheapest variant of a kernel for these layouts of the images, and its cost including the
    /// conversions before it; `None` if the kernel cannot write the layout.
    fn way(
        &mut self,
        at: usize,
        kernel: &Kernel,
        in_blocks: &[bool],
    ) -> Result<Option<(f64, KernelLayouts)>, WorkloadError> {
        let images = self.images;
        let freedom = images.freedom(self.net, kernel);
        let output = images.is_in_blocks(kernel.output, in_blocks);
        let is_nest = matches!(kernel.workload.structure(), Structure::Nest(_));
        if freedom.is_none() && output {
            return Ok(None);
        }
        let mut best: Option<(f64, KernelLayouts)> = None;
        for input in [false, true] {
            let way = match freedom {
                Some(free) if is_nest => KernelLayouts { input: input && free.input, output: input },
                Some(free) => KernelLayouts { input: input && free.input, output },
                None => KernelLayouts { input: false, output: false },
            };
            // A nest that writes an image reads images in the same layout.
            let is_fixed = is_nest && images.classes[kernel.output.0].is_some();
            if is_fixed && way.output != output || input && !way.input {
                continue;
            }
            let mut cost = match freedom {
                Some(_) => match self.kernel(at, kernel, way)? {
                    Some(cost) => cost,
                    None => continue,
                },
                None => 0.0,
            };
            for (slot, wanted) in images.reads(self.net, kernel, way) {
                if wanted != images.is_in_blocks(kernel.inputs[slot], in_blocks) {
                    cost += self.conversion(kernel.inputs[slot], wanted)?;
                }
            }
            if best.is_none_or(|(known, _)| cost < known) {
                best = Some((cost, way));
            }
        }
        Ok(best)
    }

    /// Finds, for each class of images, whether blocks minimise the total cost; `None` if some kernel is
    /// unavailable in every layout.
    fn cheapest(&mut self, steps: &[Step]) -> Result<Option<Vec<bool>>, WorkloadError> {
        let images = self.images;
        // The last step that reads or writes an image of each class.
        let mut last = vec![0; images.n_classes];
        let of_kernel = |kernel: &Kernel| -> Vec<usize> {
            let ids = kernel.inputs.iter().chain([&kernel.output]);
            let mut classes: Vec<usize> = ids.filter_map(|id| images.classes[id.0]).collect();
            classes.sort_unstable();
            classes.dedup();
            classes
        };
        for (at, step) in steps.iter().enumerate() {
            if let Step::Kernel(kernel) = step {
                of_kernel(kernel).into_iter().for_each(|class| last[class] = at);
            }
        }
        let mut is_met = vec![false; images.n_classes];
        let mut states = vec![(vec![false; images.n_classes], 0.0)];
        for (at, step) in steps.iter().enumerate() {
            let Step::Kernel(kernel) = step else { continue };
            for class in of_kernel(kernel) {
                if !std::mem::replace(&mut is_met[class], true) {
                    let with = |(in_blocks, cost): &(Vec<bool>, f64)| {
                        let mut in_blocks = in_blocks.clone();
                        in_blocks[class] = true;
                        (in_blocks, *cost)
                    };
                    let more: Vec<_> = states.iter().map(with).collect();
                    states.extend(more);
                }
            }
            for (in_blocks, cost) in &mut states {
                *cost += self.way(at, kernel, in_blocks)?.map_or(f64::INFINITY, |(cost, _)| cost);
            }
            // The cheapest choice among those that are equal for all later steps.
            let mut cheapest: HashMap<Vec<bool>, (Vec<bool>, f64)> = HashMap::new();
            for (in_blocks, cost) in states {
                let seen = (0..images.n_classes).map(|class| in_blocks[class] && last[class] > at).collect();
                let known = cheapest.entry(seen).or_insert_with(|| (in_blocks.clone(), f64::INFINITY));
                if cost < known.1 {
                    *known = (in_blocks, cost);
                }
            }
            states = cheapest.into_values().collect();
            states.sort_by(|a, b| a.1.total_cmp(&b.1).then_with(|| a.0.cmp(&b.0)));
            states.truncate(MOST_STATES);
        }
        Ok(states.into_iter().next().filter(|(_, cost)| cost.is_finite()).map(|(in_blocks, _)| in_blocks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_read_as_they_are_written_and_nothing_else_is() {
        let way = |input, output| Some(KernelLayouts { input, output });
        let chosen = ImageLayouts { in_blocks: vec![true, false], ways: vec![way(false, true), None, way(true, true)] };
        assert_eq!(chosen.to_string(), "10 01 - 11");
        for layouts in [chosen, ImageLayouts::default()] {
            assert_eq!(ImageLayouts::parse(&layouts.to_string()), Some(layouts));
        }
        for text in ["12", "10 ", "10 0", "10 011", "10 --", "1\n0", "x"] {
            assert_eq!(ImageLayouts::parse(text), None, "{text:?}");
        }
    }
}
