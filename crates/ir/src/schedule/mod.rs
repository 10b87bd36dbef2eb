//! Schedule steps, which rewrite a program without changing its result.
//!
//! A list of [`Step`]s is the API as well as the trace and the record of a schedule and the syntax of tests:
//! [`apply`] applies a step or says why it is illegal, and a step prints and parses as one line.

mod accumulate;
mod annotate;
mod col2im;
mod compute_at;
mod dependence;
mod fuse;
mod inline;
pub(crate) mod layout;
mod pad;
mod peel;
mod pipeline;
mod prefetch;
mod region;
mod reindex;
mod reorder;
mod rfactor;
mod split;
mod stage;
mod stream;
mod text;
mod tree;
pub(crate) mod winograd;

pub use prefetch::{LINE_BYTES, MOST_PREFETCHED_LINES};
pub use text::{FORMS, StepParseError, parse_steps, steps_text};
pub use tree::nest;

use crate::dtype::DType;
use crate::program::{LoopKind, Program, TensorProduct};

/// Treatment of the remainder if a split's factor does not divide the extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tail {
    /// Rejects a factor that does not divide the extent.
    Exact,
    /// Shortens the last execution of the inner loop: its extent is `min(factor, rest)`.
    Shrink,
    /// Keeps the inner loop full, with a condition around its body.
    Guard,
}

/// Dimension of a layout, in terms of the dimensions of the original.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayoutAxis {
    /// Dimension `d`, whole.
    Whole(usize),
    /// Quotient of dimension `d` by a tile size; must stand before its `Inner`.
    Outer(usize, i64),
    /// Remainder of dimension `d` by a tile size.
    Inner(usize, i64),
}

/// Schedule step: a rewrite of a program that preserves its result. Loops and buffers are referenced by name;
/// a step that creates a loop names it for later steps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Splits a loop into two, the inner one with a given number of iterations.
    ///
    /// ```text
    /// for i in 10 {                for io in 3 {
    ///   C[i] = A[i]                  for ii in min(4, 10 - 4*io) {
    /// }                        →       C[4*io + ii] = A[4*io + ii]
    ///                                }
    ///                              }
    /// ```
    ///
    /// In TVM this is `split`, whose tails are guarded.
    Split {
        /// The loop to split.
        target: String,
        /// Iterations of the inner loop.
        factor: i64,
        /// Treatment of the remainder.
        tail: Tail,
        /// Name of the new outer loop.
        outer: String,
        /// Name of the new inner loop.
        inner: String,
    },
    /// Fuses two directly nested loops into one.
    ///
    /// ```text
    /// for i in 3 {                 for ij in 12 {
    ///   for j in 4 {           →     C[ij // 4, ij % 4] = A[ij // 4, ij % 4]
    ///     C[i, j] = A[i, j]        }
    ///   }
    /// }
    /// ```
    ///
    /// In TVM this is `fuse`.
    Fuse {
        /// The outer loop.
        outer: String,
        /// The inner loop, of constant extent.
        inner: String,
        /// Name of the new loop.
        fused: String,
    },
    /// Reorders loops of one perfect nest, outermost first; loops not named keep their places.
    ///
    /// ```text
    /// for i in 8 {                                            for k in 6 {
    ///   for k in 6 {                                      →     for i in 8 {
    ///     C[i] += A[i, k] first k == 0                            C[i] += A[i, k] first k == 0
    ///   }                                                       }
    /// }                                                       }
    /// ```
    ///
    /// In TVM this is `reorder`.
    Reorder {
        /// The loops, outermost first.
        loops: Vec<String>,
    },
    /// Peels iterations off one end of a loop into a separate loop.
    ///
    /// ```text
    ///                                              for i.left in 1 {
    /// for i in 10 {                                  P[i.left] = select(0 < i.left, X[i.left - 1], 0.0)
    ///   P[i] = select(0 < i, X[i - 1], 0.0)   →    }
    /// }                                            for i in 9 {
    ///                                                P[i + 1] = select(0 < i + 1, X[i], 0.0)
    ///                                              }
    /// ```
    ///
    /// Lowering then drops the condition that always holds. The closest TVM primitive is `loop_partition`.
    ///
    /// Inner loops are copied; those of the peeled part have the suffix as well, so that later steps can
    /// distinguish them.
    Peel {
        /// The loop.
        target: String,
        /// Iterations to peel off.
        iterations: i64,
        /// Whether the last iterations are peeled, rather than the first.
        last: bool,
        /// Suffix of the peeled loops' names, after a dot.
        suffix: String,
    },
    /// Vectorizes a loop: executes its iterations as lanes of vectors. Only unrolled loops may be inside.
    ///
    /// ```text
    /// for j in 8 { C[j] = A[j] }   →   vectorized j in 8 { C[j] = A[j] }
    /// ```
    ///
    /// In TVM this is `vectorize`.
    Vectorize {
        /// The loop.
        target: String,
    },
    /// Unrolls a loop: repeats its body in the code.
    ///
    /// ```text
    /// for i in 2 { C[i] = A[i] }   →   unrolled i in 2 { C[i] = A[i] }
    /// ```
    ///
    /// Lowering expands it to `C[0] = A[0]` and `C[1] = A[1]`. In TVM this is `unroll`.
    Unroll {
        /// The loop.
        target: String,
    },
    /// Distributes the iterations over threads.
    ///
    /// ```text
    /// for i in 64 { C[i] = A[i] }   →   parallel i in 64 { C[i] = A[i] }
    /// ```
    ///
    /// In TVM this is `parallel`.
    Parallel {
        /// The loop.
        target: String,
    },
    /// Maps a loop to a GPU block or thread axis, or to consumer teams that alternate its iterations
    /// ([`LoopKind::Turns`]).
    ///
    /// ```text
    /// for i in 64 { C[i] = A[i] }   →   block.x i in 64 { C[i] = A[i] }
    /// ```
    ///
    /// In TVM this is `bind`, to `blockIdx.x` and the like.
    Bind {
        /// The loop.
        target: String,
        /// [`LoopKind::Block`], [`LoopKind::Thread`] or [`LoopKind::Turns`].
        axis: LoopKind,
    },
    /// Computes a loop's products with tensor instructions. On tensor cores, the threads of a warp compute
    /// eight reduction steps together, or 16 in f16 or bf16; each thread holds already accumulated sums of
    /// two rows and two columns, see [`TileProduct`](crate::gpu::TileProduct). A warpgroup computes a tile of
    /// more columns, see [`GroupProduct`](crate::gpu::GroupProduct).
    ///
    /// ```text
    /// for k in 8 {                                   tf32x3 k in 8 {
    ///   for i in 2 {                                   for i in 2 {
    ///     for j in 2 {                                   for j in 2 {
    ///       C.r[i, j] += A[i, k] * B[k, j]         →       C.r[i, j] += A[i, k] * B[k, j]
    ///     }                                              }
    ///   }                                              }
    /// }                                              }
    /// ```
    ///
    /// In TVM this is `tensorize` with the intrinsics of `mma.sync`; TVM has no intrinsics for `wgmma`.
    Tensorize {
        /// The loop over the steps.
        target: String,
        /// Kind of tensor instruction.
        how: TensorProduct,
    },
    /// Copies the part of a buffer that one iteration of `at` reads into a temporary of a given layout.
    ///
    /// ```text
    ///                                                      for k in 6 {
    /// for k in 6 {                                           alloc A.p
    ///   for i in 8 {                                         for A.p.0 in 8 { A.p[A.p.0, 0] = A[A.p.0, k] }
    ///     C[i] += A[i, k] * B[k] first k == 0          →     for i in 8 {
    ///   }                                                      C[i] += A.p[i, 0] * B[k] first k == 0
    /// }                                                      }
    ///                                                      }
    /// ```
    ///
    /// In TVM this is `cache_read` with `compute_at` and `transform_layout` of the copy.
    ///
    /// The copy's loops are named `name.0`, `name.1`, … in the order of the layout. Without `at`, the part of
    /// the buffer that the program reads is copied once; a constant input is then copied in advance, in
    /// `prepare`.
    Stage {
        /// The buffer read.
        buffer: String,
        /// Loop in which each iteration copies the part that it reads; `None` copies the whole buffer once.
        at: Option<String>,
        /// Name of the copy.
        name: String,
        /// Dimensions of the copy.
        layout: Vec<LayoutAxis>,
        /// Element type of the copy; `None` keeps the buffer's type. Allowed are f32 for f16 and bf16, wider
        /// integers for 8-bit integers, and the type to which every read casts.
        dtype: Option<DType>,
        /// Whether the copy is shared by the threads of a GPU block rather than private.
        shared: bool,
    },
    /// Keeps the part of a reduction's result that one iteration of `at` updates in registers.
    ///
    /// ```text
    ///                                                      for i in 8 {
    /// for i in 8 {                                           alloc C.r
    ///   for k in 6 {                                         C.r[0] = 0.0
    ///     C[i] += A[i, k] first k == 0                 →     for k in 6 { C.r[0] += A[i, k] first never }
    ///   }                                                    C[i] = C.r[0]
    /// }                                                    }
    /// ```
    ///
    /// In TVM this is `cache_write` to `local`, with `reverse_compute_at` and `decompose_reduction`.
    Accumulate {
        /// The buffer reduced into.
        buffer: String,
        /// Loop in each iteration of which the tile is kept in registers.
        at: String,
        /// Name of the register tile.
        name: String,
    },
    /// Computes, inside each iteration of `at`, the part of an earlier stage that this iteration reads.
    ///
    /// ```text
    /// alloc T                                              for i in 8 {
    /// for a in 8 { for b in 4 { T[a, b] = … } }              alloc T
    /// for i in 8 {                                     →     for b in 4 { T[0, b] = … }
    ///   for j in 4 { Y[i, j] = T[i, j] }                     for j in 4 { Y[i, j] = T[0, j] }
    /// }                                                    }
    /// ```
    ///
    /// In TVM this is `compute_at`; this step also shrinks the buffer to the part that one iteration reads.
    ComputeAt {
        /// The earlier stage's buffer.
        buffer: String,
        /// The loop.
        at: String,
    },
    /// Computes each element of an earlier, reduction-free stage where it is read.
    ///
    /// If the stage writes at subscripts other than its loop variables, such as those of fused loops, each
    /// read must identify the iteration by subscripts of the same form.
    ///
    /// ```text
    /// alloc T
    /// for a in 8 { T[a] = X[a] + 1.0 }                 →   for i in 8 { Y[i] = (X[i] + 1.0) * 2.0 }
    /// for i in 8 { Y[i] = T[i] * 2.0 }
    /// ```
    ///
    /// In TVM this is `compute_inline`.
    Inline {
        /// The earlier stage's buffer.
        buffer: String,
    },
    /// Changes the layout of a temporary or kept buffer in all reads and writes.
    ///
    /// ```text
    /// T[i, j]   →   T[i, j // 4, j % 4]     with the layout 0, 1 // 4, 1 % 4
    /// ```
    ///
    /// In TVM this is `transform_layout`.
    ///
    /// Elements that pad the last tile of a dimension are never accessed. A tiled buffer can be accumulated
    /// and staged like any other after loops are split along the tiles; its stage can be moved by
    /// [`Step::ComputeAt`] and [`Step::Inline`] only before the layout is changed.
    Layout {
        /// The buffer.
        buffer: String,
        /// New dimensions.
        layout: Vec<LayoutAxis>,
    },
    /// Makes a stage read a buffer through a temporary that has the stage's loops as its axes:
    /// `Y[i] += X[2*i + r]` → `T[i, r] = X[2*i + r]; Y[i] += T[i, r]`.
    ///
    /// The axes are the loops that occur in the subscripts, outermost first; the loops that compute the
    /// temporary are named `name.0`, `name.1`, … For a convolution with fused loops, the temporary is the
    /// im2col matrix.
    ///
    /// If the buffer is the stage's own, the stage writes the temporary, and the new loops copy it:
    /// `Y[2*i] += X[i, k]` → `T[i] += X[i, k]; Y[2*i] = T[i]`.
    ///
    /// In TVM this is `reindex`.
    Reindex {
        /// The buffer of the stage, a nest of serial loops around one assignment.
        stage: String,
        /// The buffer read or written.
        buffer: String,
        /// Name of the temporary.
        name: String,
    },
    /// Pads a loop of a stage to a multiple. Temporaries that the stage reads along the loop are padded with
    /// zeros; one that it writes along the loop gets additional elements, which are never read.
    ///
    /// ```text
    /// alloc T                                              alloc T
    /// for a in 10 { T[a] = X[a] }                      →   for a in 12 { T[a] = select(a < 10, X[a], 0.0) }
    /// for k in 10 {                                        for k in 12 {
    ///   S[0] += T[k] * T[k] first k == 0                     S[0] += T[k] * T[k] first k == 0
    /// }                                                    }
    /// ```
    ///
    /// A reduction loop must sum products of factors that all depend on the loop. Buffers that the stage
    /// reads along the loop must be temporaries, each filled by a separate stage, as created by
    /// [`Step::Reindex`]; if such a stage is inlined into a copy, the copy inserts the zeros.
    ///
    /// In TVM this is `pad_einsum`.
    Pad {
        /// The buffer of the stage.
        stage: String,
        /// The loop.
        target: String,
        /// Divisor of the padded extent.
        multiple: i64,
    },
    /// Computes a partial sum for each iteration of a reduction loop, then sums these: `Y[i] += X[i, ko, ki]`
    /// → `P[i, ki] += X[i, ko, ki]; Y[i] += P[i, ki]`, with `ki` for `target`.
    ///
    /// The partial sums have the stage's loops, with the prefix of their name, such as `P.i`; reduction loops
    /// other than `target` then belong to the partial sums only. Every partial sum must have an element in
    /// the first iteration of the other reduction loops, so that only their last iteration may be shorter.
    /// The order of rounding changes.
    ///
    /// In TVM this is `rfactor`.
    Rfactor {
        /// The buffer of the stage, a nest of serial loops around one reduction.
        stage: String,
        /// Loop of the reduction.
        target: String,
        /// Name of the partial sums.
        name: String,
    },
    /// Computes a 3 × 3 convolution of stride and dilation 1 by Winograd's minimal filtering, which
    /// rounds differently.
    ///
    /// With `m` for `tile` and t = m + 2, the stage `acc` becomes, for tiles `th`, `tw` of m × m results:
    /// - `acc.g[a, s, k, c]`, `acc.u[a, b, k, c]`: the transformed weights G g Gᵀ, computed in `prepare` if
    ///   the weights are constant;
    /// - `acc.d[a, j, n, c, th, tw]`, `acc.v[a, b, n, c, th, tw]`: the transformed data Bᵀ d B,
    ///   columns first;
    /// - `acc.m[a, b, n, k, th, tw]`: their products, summed over `c`;
    /// - `acc.r[i, b, n, k, th, tw]`: the products' columns transformed by Aᵀ;
    /// - `acc[n, k, p, q]`: their rows transformed, without a reduction, so that the stage can be inlined.
    ///
    /// Loops are named after the stage and the axis, such as `acc.v.th`; those of `acc` keep their names.
    ///
    /// ```text
    /// for n, k, p, q, c, r, s { acc[n, k, p, q] += X[n, c, p + r, q + s] * W[k, c, r, s] }
    ///   →   acc.g[…] = G·W, acc.u[…] = acc.g·Gᵀ, acc.d[…] = Bᵀ·X, acc.v[…] = acc.d·B
    ///       for a, b, n, k, th, tw, c {
    ///         acc.m[a, b, n, k, th, tw] += acc.u[a, b, k, c] * acc.v[a, b, n, c, th, tw]
    ///       }
    ///       acc.r[…] = Aᵀ·acc.m, acc[…] = acc.r·A
    /// ```
    ///
    /// TVM has no such step, but a separate operator, `conv2d_winograd`.
    Winograd {
        /// The buffer of the stage.
        buffer: String,
        /// Number of rows and columns of results in a tile: 2 or 4.
        tile: i64,
    },
    /// Computes a transposed convolution without inserted zeros, as a matrix product followed by sums of its
    /// columns.
    ///
    /// The stage `acc[n, k, p, q]` reads its input through a stage that inserts zeros, which is removed. For
    /// channels in blocks `t` of `block`, strides `th`, `tw` of results and positions `fh`, `fw` in them, it
    /// becomes:
    /// - `acc.w[c, t, y]`: the rearranged weights, computed in `prepare` if the weights are constant, where
    ///   `y` counts a block's channels and taps, with either the taps or the channels adjacent;
    /// - `acc.m[n, t, y, h, w]`: their products with the input, summed over `c`;
    /// - `acc.t[n, k, th, fh, tw, fw]`: the sum over the taps that contribute to a result, numbered `r` and
    ///   `s`; if there is at most one, there are no such loops and the stage can be inlined;
    /// - `acc[n, k, p, q]`: the results that are not cropped, without a reduction, so that the stage can be
    ///   inlined.
    ///
    /// Loops are named after the stage and the axis, such as `acc.m.h`; those of `acc` keep their names. Sums
    /// are equal, except for the order of rounding, as long as no factor of an inserted zero is infinite or
    /// NaN.
    ///
    /// ```text
    /// for n, k, p, q, c, r, s { acc[n, k, p, q] += pad[n, c, p + r, q + s] * W[c, k, 2 - r, 2 - s] }
    ///   →   for n, t, y, h, w, c { acc.m[n, t, y, h, w] += acc.w[c, t, y] * X[n, c, h, w] }
    ///       for n, k, th, fh, tw, fw, r, s { acc.t[n, k, th, fh, tw, fw] += select(…, acc.m[…], 0.0) }
    ///       for n, k, p, q { acc[n, k, p, q] = acc.t[…] }
    /// ```
    ///
    /// TVM has no such step.
    Col2im {
        /// The buffer of the stage.
        buffer: String,
        /// Number of channels with adjacent columns; must divide the number of channels.
        block: i64,
        /// Whether taps, rather than channels, are innermost in a block.
        taps_last: bool,
    },
    /// Prefetches the part of a buffer that the iteration of `at` that is `ahead` iterations later accesses.
    ///
    /// ```text
    /// for i in 64 {                       for i in 64 {
    ///   C[i] = A[16*i]              →       prefetch A[16*i + 64] read
    /// }                                     C[i] = A[16*i]
    ///                                     }
    /// ```
    ///
    /// The example prefetches 4 iterations ahead and omits the unrolled loops over cache lines. A part that
    /// is too large to be fetched at once can be spread over the iterations of loops inside `at`. In TVM,
    /// this was `prefetch` of its first schedules.
    Prefetch {
        /// The buffer.
        buffer: String,
        /// The loop.
        at: String,
        /// Number of iterations ahead; 0 prefetches for the current iteration, before its other work.
        ahead: i64,
        /// Loops inside `at`, the outermost first, whose iterations each prefetch a part; without any, all is
        /// prefetched at the start of an iteration of `at`.
        inside: Vec<String>,
    },
    /// Loads the data of the copies of an iteration of `at` into registers, one iteration earlier (software
    /// pipelining), so that the loads overlap with the rest of the earlier iteration.
    ///
    /// ```text
    ///                                         alloc A.n
    ///                                         for i in 16 { A.n[i] = A[i] }
    /// for k in 8 {                            for k in 8 {
    ///   alloc A.s                               alloc A.s
    ///   for i in 16 {                     →     for i in 16 { A.s[i] = A.n[i] }
    ///     A.s[i] = A[16*k + i]                  if k + 1 < 8 { for i in 16 { A.n[i] = A[16*k + i + 16] } }
    ///   }                                       …
    ///   …                                     }
    /// }
    /// ```
    ///
    /// The register buffer has the loops of the copy as axes, so that each GPU thread has its own registers;
    /// loops that are neither threads nor lanes must be unrolled for registers to hold them. With `twice`,
    /// iterations alternate between two copies of the buffer, so that the threads of a block synchronize only
    /// once per iteration. In TVM, this is `software_pipeline`, and `double_buffer` of its first schedules.
    Pipeline {
        /// Destination buffer of the copy.
        buffer: String,
        /// Loop of the copies.
        at: String,
        /// Name of the register buffer.
        name: String,
        /// Whether the buffer is doubled.
        twice: bool,
    },
    /// Issues the copies of an iteration of `at` some iterations earlier, as asynchronous copies to shared
    /// memory that bypass registers and overlap with the iterations in between (multistage pipelining).
    ///
    /// ```text
    ///                                         alloc A.s
    ///                                         for i in 16 { A.s[0, i] = A[i] }
    ///                                         wait 2
    /// for k in 8 {                            for i in 16 { A.s[1, i] = A[i + 16] }
    ///   alloc A.s                             for k in 8 {
    ///   for i in 16 {                     →     wait 1
    ///     A.s[i] = A[16*k + i]                  if k + 2 < 8 {
    ///   }                                         for i in 16 { A.s[(k + 2) % 3, i] = A[16*k + i + 32] }
    ///   …                                       }
    /// }                                         …
    ///                                         }
    /// ```
    ///
    /// Each buffer has `stages` copies, which iterations use in rotation, so that the threads of a block
    /// synchronize once per iteration. With `held`, copies are issued one iteration later, so that
    /// asynchronous reads of a stage may continue in the next iteration. On a GPU without asynchronous
    /// copies, they are synchronous. With `last`, an iteration issues copies after all its other work is
    /// issued. A copy without a loop over threads is performed by one thread, in boxes if the GPU supports
    /// them ([`Scope::Bulk`](crate::Scope::Bulk)); with `by_producer`, by a thread of a dedicated warp
    /// ([`Scope::Produced`](crate::Scope::Produced)), and with `multicast`, also on behalf of a neighbouring
    /// block that copies the same data ([`Scope::Multicast`](crate::Scope::Multicast)).
    Stream {
        /// Destination buffers in shared memory.
        buffers: Vec<String>,
        /// Loop of the copies.
        at: String,
        /// Number of pipeline stages, at least two.
        stages: i64,
        /// Whether one stage is held back for the previous iteration, whose reads may still be in progress;
        /// needs at least three stages.
        held: bool,
        /// Whether copies are issued at the end of an iteration, rather than at its beginning.
        last: bool,
        /// Whether a producer warp issues the copies.
        by_producer: bool,
        /// Whether the producer warp multicasts to a neighbouring block; requires `by_producer`.
        multicast: bool,
    },
}

/// Reason why a step does not apply to a program.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Illegal {
    /// Unknown loop.
    #[error("no loop `{0}` in the program (loops: {1})")]
    NoLoop(String, String),
    /// Loop with several copies in the program, if the step needs a single one.
    #[error("loop `{0}` stands in {1} places; apply this step before the loop is cloned")]
    Cloned(String, usize),
    /// Unknown buffer.
    #[error("no buffer `{0}` in the program (buffers: {1})")]
    NoBuffer(String, String),
    /// Invalid name for a new loop or buffer.
    #[error("`{0}` is not a name: a letter or `_`, then letters, digits, `_` and `.`")]
    NotAName(String),
    /// Name that is already taken.
    #[error("the name `{0}` is taken")]
    NameTaken(String),
    /// Factor that does not divide the extent.
    #[error("loop `{target}` of extent {extent} cannot be split exactly by {factor}")]
    NotDivisible {
        /// The loop.
        target: String,
        /// Extent of the loop.
        extent: String,
        /// Requested factor.
        factor: i64,
    },
    /// Number out of range, such as a factor, a tile size or a distance.
    #[error("the {what} of `{target}` must be in {least}..={most}, not {value}")]
    OutOfRange {
        /// Name of the loop or buffer.
        target: String,
        /// Name of the number.
        what: &'static str,
        /// Smallest accepted value.
        least: i64,
        /// Largest accepted value.
        most: i64,
        /// Value given.
        value: i64,
    },
    /// Loop of a kind other than serial.
    #[error("loop `{target}` is {kind} already, and this step needs a serial loop")]
    NotSerial {
        /// The loop.
        target: String,
        /// Kind of the loop.
        kind: &'static str,
    },
    /// Loops that are not perfectly nested.
    #[error("loop `{inner}` is not perfectly nested in `{outer}`")]
    NotNested {
        /// Name of the expected outer loop.
        outer: String,
        /// Name of the expected inner loop.
        inner: String,
    },
    /// Loop whose extent depends on a loop that would become an inner loop.
    #[error("the extent {extent} of loop `{target}` depends on loop `{on}`")]
    ExtentDepends {
        /// Name of the dependent loop.
        target: String,
        /// Extent of the loop.
        extent: String,
        /// Name of the loop on which it depends.
        on: String,
    },
    /// Loop whose iterations are not independent.
    #[error("iterations of loop `{target}` are not independent: {why}")]
    Dependent {
        /// The loop.
        target: String,
        /// Accesses that depend on each other.
        why: String,
    },
    /// Loop whose body does not have the form that the step requires.
    #[error("loop `{target}`: {why}")]
    Body {
        /// The loop.
        target: String,
        /// Reason why the body does not fit.
        why: String,
    },
    /// Buffer whose kind or use does not meet the step's requirements.
    #[error("buffer `{buffer}`: {why}")]
    Buffer {
        /// The buffer.
        buffer: String,
        /// Reason why the buffer does not fit.
        why: String,
    },
    /// Extent without a constant bound, or with one beyond the limit.
    #[error("loop `{target}` of extent {extent}: at most {most} iterations are possible here")]
    TooLong {
        /// The loop.
        target: String,
        /// Extent of the loop.
        extent: String,
        /// The limit.
        most: i64,
    },
}

/// Applies one step.
///
/// # Errors
/// [`Illegal`] if the step would change the meaning of the program or cannot be applied.
pub fn apply(program: &Program, step: &Step) -> Result<Program, Illegal> {
    let mut out = program.clone();
    carry_out(&mut out, step)?;
    Ok(out)
}

/// Applies steps in order.
///
/// # Errors
/// The index of the step that is illegal, and why.
pub fn apply_all(program: &Program, steps: &[Step]) -> Result<Program, (usize, Illegal)> {
    let mut out = program.clone();
    for (at, step) in steps.iter().enumerate() {
        carry_out(&mut out, step).map_err(|e| (at, e))?;
    }
    Ok(out)
}

/// Applies a step in place; after an error, the program is unspecified.
fn carry_out(program: &mut Program, step: &Step) -> Result<(), Illegal> {
    match step {
        Step::Split { target, factor, tail, outer, inner } => {
            split::split(program, target, *factor, *tail, outer, inner)
        }
        Step::Fuse { outer, inner, fused } => fuse::fuse(program, outer, inner, fused),
        Step::Reorder { loops } => reorder::reorder(program, loops),
        Step::Peel { target, iterations, last, suffix } => peel::peel(program, target, *iterations, *last, suffix),
        Step::Vectorize { target } => annotate::vectorize(program, target),
        Step::Unroll { target } => annotate::unroll(program, target),
        Step::Parallel { target } => annotate::parallel(program, target),
        Step::Bind { target, axis } => annotate::bind(program, target, *axis),
        Step::Tensorize { target, how } => annotate::tensorize(program, target, *how),
        Step::Stage { buffer, at, name, layout, dtype, shared } => {
            let form = stage::PackedCopy { layout, dtype: *dtype, shared: *shared };
            stage::stage(program, buffer, at.as_deref(), name, form)
        }
        Step::Accumulate { buffer, at, name } => accumulate::accumulate(program, buffer, at, name),
        Step::ComputeAt { buffer, at } => compute_at::compute_at(program, buffer, at),
        Step::Inline { buffer } => inline::inline(program, buffer),
        Step::Layout { buffer, layout } => layout::layout(program, buffer, layout),
        Step::Reindex { stage, buffer, name } => reindex::reindex(program, stage, buffer, name),
        Step::Pad { stage, target, multiple } => pad::pad(program, stage, target, *multiple),
        Step::Rfactor { stage, target, name } => rfactor::rfactor(program, stage, target, name),
        Step::Winograd { buffer, tile } => winograd::winograd(program, buffer, *tile),
        Step::Col2im { buffer, block, taps_last } => col2im::col2im(program, buffer, *block, *taps_last),
        Step::Prefetch { buffer, at, ahead, inside } => prefetch::prefetch(program, buffer, at, *ahead, inside),
        Step::Pipeline { buffer, at, name, twice } => pipeline::pipeline(program, buffer, at, name, *twice),
        Step::Stream { buffers, at, stages, held, last, by_producer: fed, multicast } => {
            stream::stream(program, buffers, at, *stages, [*held, *last, *fed, *multicast])
        }
    }
}
