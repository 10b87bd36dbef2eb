//! Places of a library's constants: in its file, or in memory that its first context fills.

use tilewright_ir::Part;
use tilewright_runtime::{Constant, Model, Slice, Work};

/// Constants begin at multiples of so many bytes.
const ALIGN: usize = 64;

/// Size from which on a kernel's kept buffers count as large, in per cent of their constants: packing rounds
/// up, Winograd's transformations multiply.
const LARGE_PERCENT: usize = 125;

/// When a library makes what its kernels keep of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Buffers that would be larger than the weights are made with the first context; the rest ahead.
    Small,
    /// All ahead.
    Ready,
}

impl Weights {
    /// Each with its name and what it is.
    pub const ALL: [(Weights, &str, &str); 2] = [
        (
            Weights::Small,
            "small",
            "The file is about as large as the weights; what is larger is made with the first context",
        ),
        (Weights::Ready, "ready", "All is in the file as kernels want it, so that the first context is there at once"),
    ];
}

/// Place of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// Offset in the file's constants.
    File(usize),
    /// Offset in the memory that the first context fills.
    Made(usize),
}

/// The constants of a library.
pub struct Constants {
    /// Place of each constant of the plan; `None` where nothing needs it.
    homes: Vec<Option<Home>>,
    /// Constants in the file, until they are in its object.
    pub bytes: Vec<u8>,
    /// How many bytes these are.
    pub n_bytes: usize,
    /// The size of those that the first context makes.
    pub made_bytes: usize,
    /// The steps of the plan whose kernels make them.
    pub makers: Vec<usize>,
}

impl Constants {
    /// Lays the constants of a model out.
    pub fn new(model: &Model, weights: Weights) -> Constants {
        let constants = &model.plan().constants;
        let (mut is_made, mut is_read) = (vec![false; constants.len()], vec![false; constants.len()]);
        let mut makers = Vec::new();
        for step in model.preparations().into_iter().filter(|_| weights == Weights::Small) {
            let (read, kept) = of_preparation(model, step);
            let size = |of: &[usize]| of.iter().map(|&at| constants[at].n_bytes()).sum::<usize>();
            if 100 * size(&kept) > LARGE_PERCENT * size(&read) {
                kept.into_iter().for_each(|at| is_made[at] = true);
                read.into_iter().for_each(|at| is_read[at] = true);
                makers.push(step);
            }
        }
        let (mut homes, mut bytes, mut made_bytes) = (Vec::new(), Vec::new(), 0);
        for (at, constant) in constants.iter().enumerate() {
            let offset = model.constant_offset(at);
            homes.push(match constant {
                _ if offset.is_none() && !is_read[at] => None,
                _ if is_made[at] => {
                    made_bytes += constant.n_bytes().next_multiple_of(ALIGN);
                    Some(Home::Made(made_bytes - constant.n_bytes().next_multiple_of(ALIGN)))
                }
                constant => {
                    let start = bytes.len();
                    match (constant, offset) {
                        (Constant::Data(data), _) => bytes.extend_from_slice(data),
                        (Constant::Prepared(n_bytes), Some(offset)) => {
                            bytes.extend_from_slice(&model.constants()[offset..offset + n_bytes]);
                        }
                        (Constant::Forgotten(_), _) => panic!("a model that forgot its data is for runs alone"),
                        (Constant::Prepared(_), None) => unreachable!("what is prepared has a place"),
                    }
                    bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
                    Some(Home::File(start))
                }
            });
        }
        Constants { homes, n_bytes: bytes.len(), bytes, made_bytes, makers }
    }

    /// Place of a slice of a constant; `None` where the slice is of another tensor, or nothing needs the
    /// constant.
    pub fn home(&self, model: &Model, slice: &Slice) -> Option<Home> {
        let home = self.homes[model.constant_of(slice)?]?;
        Some(match home {
            Home::File(offset) => Home::File(offset + slice.offset),
            Home::Made(offset) => Home::Made(offset + slice.offset),
        })
    }
}

/// The constants that a step's kernel prepares what it keeps of, and those that this is.
fn of_preparation(model: &Model, step: usize) -> (Vec<usize>, Vec<usize>) {
    let Work::Kernel { kernel, arguments, kept, .. } = &model.plan().steps[step].work else {
        unreachable!("what prepares is a kernel")
    };
    let used = arguments.iter().zip(0..).filter(|(_, at)| model.is_used(*kernel, *at, &[Part::Prepare]));
    let read = used.filter_map(|(slice, _)| model.constant_of(slice)).collect();
    (read, kept.iter().filter_map(|slice| model.constant_of(slice)).collect())
}
