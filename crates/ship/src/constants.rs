//! Placement of a library's constants: in its file, or in memory that its first context fills.

use crate::narrow::{NarrowForm, Narrowed, narrowed};
use tilewright_ir::{DType, Part};
use tilewright_runtime::{Constant, Model, Place, Plan, TensorSlice, Work};

/// Alignment of constants, in bytes.
const ALIGN: usize = 64;

/// Size from which on a kernel's kept buffers count as large, in per cent of their constants: packing rounds
/// up, and Winograd transforms enlarge.
const LARGE_PERCENT: usize = 125;

/// Time at which a library makes the buffers that its kernels keep of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// First context for buffers larger than the weights, build of the library for the rest.
    Small,
    /// Build of the library for all buffers.
    Ready,
}

impl Weights {
    /// Choices with their names and descriptions.
    pub const ALL: [(Weights, &str, &str); 2] = [
        (
            Weights::Small,
            "small",
            "About as large as the weights, stored in 16 or 8 bits as in the model; the first context packs them",
        ),
        (Weights::Ready, "ready", "Packed for the kernels, so that the first context is ready at once"),
    ];
}

/// Location of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConstantHome {
    /// Offset in the constants of the file.
    File(usize),
    /// Offset in the memory that the first context fills.
    Made(usize),
}

/// Constants of a library.
pub struct Constants {
    /// Location of each constant of the plan; `None` if it is not needed.
    homes: Vec<Option<ConstantHome>>,
    /// Constants in the file; empty once they are in its object.
    pub bytes: Vec<u8>,
    /// Size of the constants in the file, in bytes.
    pub n_bytes: usize,
    /// Size of the constants that the first context makes, in bytes.
    pub made_bytes: usize,
    /// Number of bytes at the beginning of these that runs read; the rest is only needed to make them.
    pub kept_bytes: usize,
    /// Constants of the file that the first context widens to f32, to make other constants of them.
    pub widened: Vec<Widened>,
    /// Indices of the plan's steps whose kernels make constants.
    pub makers: Vec<usize>,
}

/// f32 constant that the file stores in fewer bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widened {
    /// Start within the file's constants, in bytes.
    pub from: usize,
    /// Start within the memory that the first context fills, in bytes.
    pub to: usize,
    /// Number of elements.
    pub n: usize,
    /// Form of its elements in the file.
    pub form: NarrowForm,
}

impl Constants {
    /// Places the constants of a model.
    pub fn new(model: &Model, weights: Weights) -> Constants {
        let constants = &model.plan().constants;
        let is_small = weights == Weights::Small;
        let (mut is_made, mut is_read) = (vec![false; constants.len()], vec![false; constants.len()]);
        let mut makers = Vec::new();
        let shapes = if is_small { single_shapes(model.plan()) } else { vec![None; constants.len()] };
        let narrow = |(at, shape): (usize, Option<&[usize]>)| narrowed(data_of(model, at)?, shape?);
        let mut narrow: Vec<Option<Narrowed>> = shapes.into_iter().enumerate().map(narrow).collect();
        for step in model.preparations().into_iter().filter(|_| is_small) {
            let (read, kept) = of_preparation(model, step);
            let in_file = |at: &usize| narrow[*at].as_ref().map_or(constants[*at].n_bytes(), |own| own.bytes.len());
            let size = |of: &[usize]| of.iter().map(in_file).sum::<usize>();
            if 100 * size(&kept) > LARGE_PERCENT * size(&read) {
                kept.into_iter().for_each(|at| is_made[at] = true);
                read.into_iter().for_each(|at| is_read[at] = true);
                makers.push(step);
            }
        }
        let is_of_runs = |at: &usize| model.constant_offset(*at).is_some();
        let all = || 0..constants.len();
        let mut made = Constants {
            homes: vec![None; constants.len()],
            bytes: Vec::new(),
            n_bytes: 0,
            made_bytes: 0,
            kept_bytes: 0,
            widened: Vec::new(),
            makers,
        };
        for at in all().filter(is_of_runs) {
            made.place(model, at, is_made[at], narrow[at].take());
        }
        made.kept_bytes = made.made_bytes;
        for at in all().filter(|at| !is_of_runs(at) && is_read[*at]) {
            made.place(model, at, false, narrow[at].take());
        }
        made.n_bytes = made.bytes.len();
        made
    }

    /// Assigns a constant its location: among those that are made, or in the file, in fewer bits if it is
    /// narrowed.
    fn place(&mut self, model: &Model, at: usize, is_made: bool, narrow: Option<Narrowed>) {
        if is_made {
            self.homes[at] = Some(ConstantHome::Made(self.reserve(model.plan().constants[at].n_bytes())));
            return;
        }
        let data = data_of(model, at).expect("what is prepared has a place");
        let from = self.bytes.len();
        match narrow {
            Some(Narrowed { form, bytes }) => {
                let to = self.reserve(data.len());
                self.widened.push(Widened { from, to, n: data.len() / 4, form });
                self.bytes.extend_from_slice(&bytes);
                self.homes[at] = Some(ConstantHome::Made(to));
            }
            None => {
                self.bytes.extend_from_slice(data);
                self.homes[at] = Some(ConstantHome::File(from));
            }
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
    }

    /// Reserves `n_bytes` bytes of the memory that the first context fills, and returns their offset.
    fn reserve(&mut self, n_bytes: usize) -> usize {
        let start = self.made_bytes;
        self.made_bytes += n_bytes.next_multiple_of(ALIGN);
        start
    }

    /// Location of a slice of a constant; `None` if the slice is of another tensor, or the constant is not
    /// needed.
    pub fn home(&self, model: &Model, slice: &TensorSlice) -> Option<ConstantHome> {
        let home = self.homes[model.constant_of(slice)?]?;
        Some(match home {
            ConstantHome::File(offset) => ConstantHome::File(offset + slice.offset),
            ConstantHome::Made(offset) => ConstantHome::Made(offset + slice.offset),
        })
    }
}

/// Bytes of a constant; `None` if neither a run nor a library has computed it.
fn data_of(model: &Model, at: usize) -> Option<&[u8]> {
    match (&model.plan().constants[at], model.constant_offset(at)) {
        (Constant::Data(data), _) => Some(data),
        (Constant::Prepared(n_bytes), Some(offset)) => Some(&model.constants()[offset..offset + n_bytes]),
        (Constant::Prepared(_), None) => None,
        (Constant::Forgotten(_), _) => panic!("a model that forgot its data is for runs alone"),
    }
}

/// Shape of each constant whose tensors are all f32; `None` for other constants.
fn single_shapes(plan: &Plan) -> Vec<Option<&[usize]>> {
    let mut shapes = vec![None; plan.constants.len()];
    let of_constants = || {
        plan.tensors.iter().filter_map(|tensor| match tensor.place {
            Place::Constant(at) => Some((tensor, at)),
            _ => None,
        })
    };
    of_constants().for_each(|(tensor, at)| shapes[at] = Some(&tensor.shape[..]));
    of_constants().filter(|(tensor, _)| tensor.dtype != DType::F32).for_each(|(_, at)| shapes[at] = None);
    shapes
}

/// Constants that a step's `prepare` part reads, and those that it makes.
fn of_preparation(model: &Model, step: usize) -> (Vec<usize>, Vec<usize>) {
    let Work::Kernel { kernel, arguments, kept, .. } = &model.plan().steps[step].work else {
        unreachable!("what prepares is a kernel")
    };
    let used = arguments.iter().zip(0..).filter(|(_, at)| model.is_used(*kernel, *at, &[Part::Prepare]));
    let read = used.filter_map(|(slice, _)| model.constant_of(slice)).collect();
    (read, kept.iter().filter_map(|slice| model.constant_of(slice)).collect())
}
