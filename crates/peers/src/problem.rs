//! Problem of a peer: a workload's sizes, in the form that libraries take.

use tilewright_ir::DType;
use tilewright_ir::op::{Epilogue, Layout, Structure, Window, Workload};

use super::Unavailable;

/// Workload that libraries support.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PeerProblem {
    /// Multiplication or convolution.
    pub(super) kernel: LibraryProblem,
    /// Operations on each element of the result, in order.
    pub(super) epilogue: Vec<Epilogue>,
    /// Element type of all tensors except the operands of products of integers.
    pub(super) dtype: DType,
    /// Element types of both operands.
    pub(super) factors: [DType; 2],
    /// Tensors that may have any layout, transformed outside the timing.
    pub(super) free: Layouts,
    /// Whether algorithms are excluded that round more than the operator as written.
    pub(super) is_exact: bool,
}

/// Part of a problem that libraries have functions for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LibraryProblem {
    /// Matrix multiplication or a batch of them.
    Matmul(Matmul),
    /// Convolution of images.
    Conv(ConvProblem),
}

/// C`[b, m, n]` = A`[b, m, k]` · B`[b, k, n]`, all dense and row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matmul {
    /// Number of independent multiplications, each with its own A and B; 1 for a plain matmul.
    pub(super) b: usize,
    /// Rows of A and C.
    pub(super) m: usize,
    /// Columns of B and C.
    pub(super) n: usize,
    /// Columns of A, rows of B.
    pub(super) k: usize,
    /// Whether A is stored transposed, `[b, k, m]`.
    pub(super) ta: bool,
    /// Whether B is stored transposed, `[b, n, k]`.
    pub(super) tb: bool,
}

impl Matmul {
    /// Row and column stride, in elements, of A as an `[m, k]` matrix.
    pub(super) fn a_strides(&self) -> (usize, usize) {
        if self.ta { (1, self.m) } else { (self.k, 1) }
    }

    /// Row and column stride, in elements, of B as a `[k, n]` matrix.
    pub(super) fn b_strides(&self) -> (usize, usize) {
        if self.tb { (1, self.k) } else { (self.n, 1) }
    }
}

/// Y`[n, k, p, q]` = X`[n, c, h, w]` ∗ W`[k, c/groups, r, s]`; pairs are vertical and horizontal.
///
/// A transposed convolution has W`[c, k/groups, r, s]`; each element of X adds to the outputs under its
/// filter. A depthwise convolution has as many groups as channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConvProblem {
    /// Number of images.
    pub(super) n: usize,
    /// Channels of X.
    pub(super) c: usize,
    /// Rows and columns of X.
    pub(super) image: [usize; 2],
    /// Channels of Y.
    pub(super) k: usize,
    /// Rows and columns of a filter.
    pub(super) filter: [usize; 2],
    /// Distance of filter positions; in Y for a transposed convolution, otherwise in X.
    pub(super) stride: [usize; 2],
    /// Padding above and to the left of X, or the part cropped off Y there.
    pub(super) pad_begin: [usize; 2],
    /// Padding below and to the right; negative if a transposed convolution extends Y.
    pub(super) pad_end: [i64; 2],
    /// Distance of a filter's elements.
    pub(super) dilation: [usize; 2],
    /// Number of parts of the channels that do not mix.
    pub(super) groups: usize,
    /// Whether it scatters instead of gathering.
    pub(super) transposed: bool,
}

impl ConvProblem {
    /// Rows and columns of Y.
    pub(super) fn output(&self) -> [usize; 2] {
        std::array::from_fn(|axis| {
            let reach = (self.dilation[axis] * (self.filter[axis] - 1) + 1) as i64;
            let (image, stride) = (self.image[axis] as i64, self.stride[axis] as i64);
            let pads = self.pad_begin[axis] as i64 + self.pad_end[axis];
            let extent =
                if self.transposed { (image - 1) * stride + reach - pads } else { (image + pads - reach) / stride + 1 };
            usize::try_from(extent).expect("an output has at least one element")
        })
    }

    /// Whether X itself, `[c, h·w]`, is the matrix that W is multiplied with.
    pub(super) fn is_pointwise(&self) -> bool {
        self.filter == [1, 1] && self.stride == [1, 1] && self.pad_begin == [0, 0] && self.pad_end == [0, 0]
    }

    /// Row or column of X under `tap` of the filter at `output`, if there is one.
    pub(super) fn input_at(&self, axis: usize, output: usize, tap: usize) -> Option<usize> {
        let (begin, step) = (self.pad_begin[axis], self.stride[axis]);
        let at = if self.transposed {
            let scattered = (output + begin).checked_sub(tap * self.dilation[axis])?;
            if scattered % step != 0 {
                return None;
            }
            scattered / step
        } else {
            (output * step + tap * self.dilation[axis]).checked_sub(begin)?
        };
        (at < self.image[axis]).then_some(at)
    }
}

/// Tensors that may have any layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layouts {
    /// B of a multiplication, W of a convolution.
    pub weights: bool,
    /// Inputs and outputs other than weights.
    pub activations: bool,
}

impl Layouts {
    /// Tensors that a workload allows its kernels to hold in their own layouts.
    pub fn of(workload: &Workload) -> Layouts {
        let weights = match workload.structure() {
            Structure::Contraction(contraction) => contraction.b.name,
            Structure::Window(_) => Window::WEIGHTS,
            Structure::Packed(_) | Structure::Nest(_) => return Layouts::default(),
        };
        Layouts { weights: workload.is_constant(weights), activations: workload.layout() == Layout::Blocked }
    }

    /// Whether a tensor is free in `other` and not here.
    pub fn lacks(self, other: Layouts) -> bool {
        (other.weights && !self.weights) || (other.activations && !self.activations)
    }
}

impl PeerProblem {
    /// Converts a workload to a problem of libraries.
    pub(super) fn of(workload: &Workload) -> PeerProblem {
        let as_usize = |n: i64| usize::try_from(n).expect("no size is negative");
        let kernel = match workload.structure() {
            Structure::Packed(_) | Structure::Nest(_) => panic!("no library is asked for a program of its own"),
            Structure::Contraction(c) => {
                let [b, m, n, k] = [c.batch.unwrap_or(1), c.m, c.n, c.k].map(as_usize);
                LibraryProblem::Matmul(Matmul { b, m, n, k, ta: c.a.k_first, tb: !c.b.k_first })
            }
            Structure::Window(w) => {
                let [n, c, k, groups] = [w.n, w.c, w.k, w.groups].map(as_usize);
                LibraryProblem::Conv(ConvProblem {
                    n,
                    c,
                    image: w.axes.map(|axis| as_usize(axis.input)),
                    k,
                    filter: w.axes.map(|axis| as_usize(axis.filter)),
                    stride: w.axes.map(|axis| as_usize(axis.stride)),
                    pad_begin: w.axes.map(|axis| as_usize(axis.before)),
                    pad_end: w.axes.map(|axis| axis.after),
                    dilation: w.axes.map(|axis| as_usize(axis.dilation)),
                    groups,
                    transposed: w.transposed,
                })
            }
        };
        PeerProblem {
            kernel,
            epilogue: workload.epilogue().to_vec(),
            dtype: workload.dtype,
            factors: workload.factors(),
            free: Layouts::of(workload),
            is_exact: workload.is_exact(),
        }
    }

    /// The multiplication, for libraries that can do nothing else.
    pub(super) fn multiplication_only(&self) -> Result<Matmul, Unavailable> {
        match self.kernel {
            LibraryProblem::Matmul(matmul) if self.epilogue.is_empty() => Ok(matmul),
            LibraryProblem::Matmul(_) => Err(Unavailable::Unsupported { reason: "it has no epilogues".to_owned() }),
            LibraryProblem::Conv(_) => panic!("a library for multiplications is asked for nothing else"),
        }
    }
}

#[cfg(test)]
mod tests {
    use tilewright_ir::Role;

    use super::*;

    #[test]
    fn a_workload_is_found_in_all_its_sizes() {
        for text in [
            "dense:m=2,n=3,k=5",
            "batch_matmul:b=7,m=2,n=3,k=5,ta=1",
            "resnet18.C1",
            "conv2d:c=6,h=9,w=9,k=4,r=3,s=3,dilation_h=2,pad_top=1,groups=2",
            "depthwise_conv2d:c=3,h=5,w=6,r=2,s=3,multiplier=2",
            "conv2d_transpose:c=2,h=4,w=5,k=3,r=3,s=3,stride=2,pad=1,out_pad_w=1",
        ] {
            let workload = Workload::parse(text).expect("the test names a workload");
            let problem = PeerProblem::of(&workload);
            let (inputs, output): (Vec<usize>, usize) = match problem.kernel {
                LibraryProblem::Matmul(Matmul { b, m, n, k, .. }) => (vec![b * m * k, b * k * n], b * m * n),
                LibraryProblem::Conv(conv) => {
                    let ([h, w], [r, s], [p, q]) = (conv.image, conv.filter, conv.output());
                    (vec![conv.n * conv.c * h * w, conv.k * (conv.c / conv.groups) * r * s], conv.n * conv.k * p * q)
                }
            };
            let program = workload.program();
            let lens = |is_output| {
                let of_role = program.arguments().filter(move |(_, b)| (b.role == Role::Output) == is_output);
                of_role.map(|(_, b)| b.n_elements().expect("it is small") as usize).collect::<Vec<_>>()
            };
            assert_eq!((lens(false), lens(true)), (inputs, vec![output]), "{text}");
        }
    }
}
