//! Bulk copies of boxes of arrays, which one thread issues and the GPU's TMA unit performs.
//!
//! A single thread of a block fills buffers of the scopes `bulk` and `fed`, with a loop nest around a store
//! that copies a box of global memory to contiguous shared memory:
//!
//! ```text
//! for r in 128 {
//!   for e in 32 { A.s[ko % 3, 0, r, e] = A[128*bi + r, 32*ko + e] where both are in A, else 0 }
//! }
//! ```
//!
//! NVIDIA GPUs from sm_90 on copy such a box in one instruction (`cp.async.bulk.tensor`), which takes a
//! description of the array that the host prepares, the tensor map ([`TensorMap`]).

use super::warpgroup::{Matrices, ROW_BYTES, SWIZZLED_BYTES};
use super::{GpuKernel, GpuProgram};
use crate::dtype::DType;
use crate::expr::{Cond, Expr};
use crate::index::{Index, Ranges};
use crate::program::{BufferId, Loop, LoopKind, Program, Role, Scope, Stmt};

/// Size in bytes of an mbarrier, which counts the bytes arrived in a pipeline stage.
pub const BARRIER_BYTES: u64 = 8;

/// `CU_TENSOR_MAP_DATA_TYPE_TFLOAT32`: f32 in global memory, rounded to TF32 by the copy.
pub const TFLOAT32: u32 = 11;

/// Maximum number of dimensions of an array.
const MOST_DIMENSIONS: usize = 5;
/// Maximum extent of a box along a dimension.
const MOST_ALONG: i64 = 256;
/// Required divisor of the size in bytes of an array's rows and of a box's rows.
const LEAST_BYTES: i64 = 16;

/// Tensor map of a TMA copy: the array and the box that one instruction copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Array in global memory.
    pub array: BufferId,
    /// Extents of the box in elements, outermost dimension first.
    pub extents: Vec<i64>,
    /// Whether the box's rows of 128 bytes are swizzled in shared memory.
    pub swizzled: bool,
    /// Whether the copy rounds f32 to TF32.
    pub rounded: bool,
}

/// Arguments of CUDA's `cuTensorMapEncodeTiled` for a [`TensorMap`], innermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMapFields {
    /// `CUtensorMapDataType`: TFLOAT32 for f32 that the copy rounds, else the unsigned integer type of the
    /// element's width. Elements outside the array read as zeros.
    pub kind: u32,
    /// Elements of the array along each dimension.
    pub extents: Vec<u64>,
    /// Strides in bytes of all dimensions but the innermost.
    pub strides: Vec<u64>,
    /// Extents of the box in elements.
    pub boxes: Vec<u32>,
}

impl TensorMap {
    /// Encodes the map as arguments of the driver.
    pub fn described(&self, program: &Program) -> TensorMapFields {
        let array = program.buffer(self.array);
        let kind = match array.dtype.bytes() {
            4 if self.rounded => TFLOAT32,
            1 => 0,
            2 => 1,
            4 => 2,
            _ => 4,
        };
        let reversed = |all: &[i64]| all.iter().rev().map(|n| *n as u64).collect::<Vec<_>>();
        let strides = reversed(&array.strides())[1..].iter().map(|n| n * array.dtype.bytes()).collect();
        let boxes = self.extents.iter().rev().map(|n| *n as u32).collect();
        TensorMapFields { kind, extents: reversed(&array.shape), strides, boxes }
    }
}

/// Bulk copy of one box.
#[derive(Clone, Debug, PartialEq)]
pub struct BoxCopy {
    /// Destination in shared memory.
    pub to: BufferId,
    /// Subscripts of the box's first element in shared memory.
    pub first: Vec<Index>,
    /// Subscripts of the box's first element in global memory.
    pub place: Vec<Index>,
    /// Array and box that are copied.
    pub map: TensorMap,
}

/// First half of a box; the second half follows it in shared memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Half {
    /// Copy of the first half.
    pub first: BoxCopy,
    /// Dimension of the array along which the second half follows.
    pub dimension: usize,
    /// Extent of a half along that dimension.
    pub extent: i64,
}

impl BoxCopy {
    /// Recognizes a loop nest that copies a box; `None` for any other nest. `matrices` are the buffers in
    /// shared memory whose rows of 128 bytes are swizzled.
    pub fn of(program: &Program, nest: &Loop, matrices: &Matrices, ranges: &Ranges) -> Option<BoxCopy> {
        let (mut loops, mut l) = (Vec::new(), nest);
        let (to, index, value) = loop {
            if l.kind != LoopKind::Serial {
                return None;
            }
            loops.push((l.var, l.extent.as_const().filter(|n| (1..=MOST_ALONG).contains(n))?));
            match l.body.as_slice() {
                [Stmt::For(inner)] => l = inner,
                [Stmt::Store { buffer, index, value }] => break (*buffer, index, value),
                _ => return None,
            }
        };
        let b = program.buffer(to);
        let value = if let Expr::Cast(dtype, value) = value
            && *dtype == b.dtype
        {
            value
        } else {
            value
        };
        let (array, at, conditions) = element(value)?;
        let a = program.buffer(array);
        let is_device = a.role != Role::Temporary || a.scope == Scope::Global;
        if !b.scope.is_tma() || a.dtype != b.dtype || !is_device || a.shape.len() > MOST_DIMENSIONS {
            return None;
        }
        let bytes = a.dtype.bytes() as i64;
        let strides = a.strides();
        if strides.iter().rev().skip(1).any(|stride| stride * bytes % LEAST_BYTES != 0) {
            return None;
        }
        let mut ranges = ranges.clone();
        loops.iter().for_each(|(var, n)| ranges.push(*var, Index::from(*n)));

        // Each loop is a digit of the position in shared memory and one subscript of the array.
        let position = index.iter().zip(b.strides()).fold(Index::from(0), |sum, (i, s)| sum.add(&i.scale(s)));
        let position = ranges.simplify(&position);
        let mut extents = vec![1; a.shape.len()];
        let (mut weight, mut next) = (1, a.shape.len());
        for (var, n) in loops.iter().rev() {
            let along = (0..next).rev().find(|d| at[*d].uses(*var))?;
            let is_digit = |index: &Index, weight: i64| {
                index.coefficient(*var) == weight && !index.sub(&Index::from(*var).scale(weight)).uses(*var)
            };
            let others = at.iter().enumerate().filter(|(d, _)| *d != along);
            if !is_digit(&position, weight) || !is_digit(&at[along], 1) || others.clone().any(|(_, i)| i.uses(*var)) {
                return None;
            }
            (extents[along], next) = (*n, along);
            weight *= n;
        }
        let row = extents.last().map_or(0, |n| n * bytes);
        let swizzled = matrices.all.contains(&to);
        if row % LEAST_BYTES != 0 || swizzled && row != ROW_BYTES {
            return None;
        }
        // The condition may only test the array's bounds, as TMA fills only elements outside the array with
        // zeros.
        let is_bound = |cond: &&Cond| {
            let Cond::Lt(i, n) = cond else { return false };
            let left = i.sub(n);
            at.iter().zip(&a.shape).any(|(at, extent)| at.offset(-extent) == left)
        };
        if !conditions.iter().all(is_bound) {
            return None;
        }
        let first = |index: &[Index]| {
            let zero = |i: &Index| loops.iter().fold(i.clone(), |i, (var, _)| i.substitute(*var, &0.into()));
            index.iter().map(|i| ranges.simplify(&zero(i))).collect::<Vec<_>>()
        };
        // Tensor cores truncate f32 read from shared memory, so the copy rounds. For operands in two parts,
        // truncation yields the first part.
        let rounded = swizzled && a.dtype == DType::F32 && !matrices.in_parts.contains(&to);
        let map = TensorMap { array, extents, swizzled, rounded };
        Some(BoxCopy { to, first: first(index), place: first(at), map })
    }

    /// First half of the box, for multicast; `None` if it cannot be halved at the required alignment.
    pub fn half(&self, program: &Program) -> Option<Half> {
        let dimension = self.map.extents.iter().position(|n| *n > 1)?;
        let mut first = self.clone();
        let extent = &mut first.map.extents[dimension];
        if *extent % 2 != 0 {
            return None;
        }
        *extent /= 2;
        let extent = *extent;
        let bytes = first.bytes(program);
        let whole = if self.map.swizzled { SWIZZLED_BYTES } else { ROW_BYTES };
        (bytes % whole == 0).then_some(Half { first, dimension, extent })
    }

    /// Size in bytes of the box in shared memory.
    pub fn bytes(&self, program: &Program) -> i64 {
        self.map.extents.iter().product::<i64>() * program.buffer(self.to).dtype.bytes() as i64
    }
}

/// Matches a value that is an element if conditions hold and zero otherwise.
fn element(value: &Expr) -> Option<(BufferId, &[Index], Vec<&Cond>)> {
    match value {
        Expr::Load(array, at) => Some((*array, at, Vec::new())),
        Expr::Select(cond, value, zero) if matches!(**zero, Expr::Const(x) if x.to_bits() == 0) => {
            let (array, at, mut conditions) = element(value)?;
            parts(cond, &mut conditions);
            Some((array, at, conditions))
        }
        _ => None,
    }
}

/// Collects the conditions of a conjunction.
fn parts<'c>(cond: &'c Cond, out: &mut Vec<&'c Cond>) {
    match cond {
        Cond::True => {}
        Cond::And(a, b) => {
            parts(a, out);
            parts(b, out);
        }
        Cond::Lt(..) | Cond::Eq(..) | Cond::Less(..) | Cond::Not(_) => out.push(cond),
    }
}

/// Whether at most one loop of a kernel waits for copies and no enclosing loop does, so that its iterations
/// identify the pipeline stages.
pub(super) fn waits_in_one_loop(kernel: &GpuKernel) -> bool {
    let mut n_loops = 0;
    let mut count = |s: &Stmt| n_loops += usize::from(matches!(s, Stmt::For(_)) && waits(s));
    kernel.body.iter().for_each(|stmt| stmt.walk(&mut count));
    n_loops <= 1
}

fn waits(stmt: &Stmt) -> bool {
    let mut waits = false;
    stmt.walk(&mut |s| waits |= matches!(s, Stmt::Wait(_)));
    waits
}

/// Tensor maps of all bulk copies of a kernel, with halved boxes for buffers that are `shared` by a cluster;
/// empty if a copy is not a box.
pub(super) fn all_maps(gpu: &GpuProgram, kernel: &GpuKernel, shared: &[BufferId]) -> Vec<TensorMap> {
    let rings: Vec<BufferId> = kernel.shared.iter().copied().filter(|b| is_ring(&gpu.program, *b)).collect();
    let stages = kernel.n_places(gpu) as i64;
    if rings.is_empty() || rings.iter().any(|b| gpu.program.buffer(*b).shape[0] != stages) {
        return Vec::new();
    }
    let mut ranges = kernel.ranges();
    let matrices = Matrices::of(&gpu.program, kernel);
    let mut found = Vec::new();
    if gather(&gpu.program, &kernel.body, (&matrices, shared), &mut ranges, &mut found) { found } else { Vec::new() }
}

fn is_ring(program: &Program, buffer: BufferId) -> bool {
    program.buffer(buffer).scope.is_tma()
}

/// Gathers the maps of a block; returns whether all of its stores to such rings are box copies.
fn gather(
    program: &Program,
    block: &[Stmt],
    (matrices, shared): (&Matrices, &[BufferId]),
    ranges: &mut Ranges,
    out: &mut Vec<TensorMap>,
) -> bool {
    block.iter().all(|stmt| {
        if let Stmt::For(l) = stmt
            && let Some(copy) = BoxCopy::of(program, l, matrices, ranges)
        {
            let half = shared.contains(&copy.to).then(|| copy.half(program)).flatten();
            let map = half.map_or(copy.map, |half| half.first.map);
            if !out.contains(&map) {
                out.push(map);
            }
            return true;
        }
        let mut are = stmt.own_write().is_none_or(|(buffer, _)| !is_ring(program, buffer));
        stmt.each_block(ranges, |block, ranges| are = are && gather(program, block, (matrices, shared), ranges, out));
        are
    })
}
