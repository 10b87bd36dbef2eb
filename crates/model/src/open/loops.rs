//! Loops whose extent is the open dimension.

use std::collections::HashMap;

use tilewright_ir::expr::{Cond, ReduceOp};
use tilewright_ir::op::SizeRange;
use tilewright_ir::{DType, Expr, Index, LoopId, Program, Stmt};
use tilewright_runtime::RunSize;

/// Loop whose extent each run determines.
pub(crate) struct OpenLoop {
    pub(crate) name: String,
    pub(crate) size: RunSize,
    pub(crate) range: SizeRange,
    /// Multiple to which the number of iterations is rounded up: those beyond the size do not change the
    /// result.
    pub(crate) multiple: i64,
}

/// Maximum and minimum multiple of iterations of an open reduction along contiguous elements: whole vectors,
/// whose lanes accumulate parts of the result. Softmax of MiniLM on an Emerald Rapids (2026-12-01, 8cc8085a),
/// time for 32 at once over that for 64, at sizes of 23, 96 and 512: 0.63, 0.83, 1.04.
const MOST_AT_ONCE: i64 = 32;

const LEAST_AT_ONCE: i64 = 16;

/// Multiple of iterations for an open reduction: the largest of which the largest size is a multiple, or
/// [`LEAST_AT_ONCE`], whose last vector then extends past the largest size.
pub(crate) fn at_once(range: SizeRange) -> i64 {
    let halved = std::iter::successors(Some(MOST_AT_ONCE), |n| (*n > LEAST_AT_ONCE).then_some(n / 2));
    halved.into_iter().find(|n| range.most % n == 0).unwrap_or(LEAST_AT_ONCE)
}

/// Open (dynamic) sizes of a program under construction, in its order, with their values.
#[derive(Default)]
pub(crate) struct OpenSizes(Vec<(RunSize, Index)>);

impl OpenSizes {
    /// Value of a size; if the program does not have it, `add` adds it under the given name.
    pub(crate) fn value(&mut self, size: RunSize, add: impl FnOnce(&str) -> Index) -> Index {
        if let Some((_, value)) = self.0.iter().find(|(known, _)| *known == size) {
            return value.clone();
        }
        let value = add(&format!("s{}", self.0.len()));
        self.0.push((size, value.clone()));
        value
    }

    /// Makes the extents of loops open; returns the program and its sizes.
    pub(crate) fn with_loops(mut self, mut program: Program, ends: Vec<OpenLoop>) -> (Program, Vec<RunSize>) {
        let mut found = Ends::new();
        for OpenLoop { name, size, range, multiple } in ends {
            let Some(var) = program.find_loop(&name) else { continue };
            let mut extent = |size: RunSize, range: SizeRange| self.value(size, |name| program.open_size(name, range));
            let end = extent(size, range);
            if multiple == 1 {
                found.insert(var, (end, None));
                continue;
            }
            let [least, most] = [range.least, range.most].map(|n| (n + multiple - 1) / multiple * multiple);
            let whole = extent(RunSize { multiple, ..size }, SizeRange { least, most, step: multiple });
            found.insert(var, (whole, Some(end)));
        }
        let dtypes: Vec<DType> = program.buffers.iter().map(|buffer| buffer.dtype).collect();
        run_to(&mut program.body, &found, &Cond::True, &dtypes);
        (program, self.0.into_iter().map(|(size, _)| size).collect())
    }
}

/// Open extents of loops, each with the end of its reduction, if any.
type Ends = HashMap<LoopId, (Index, Option<Index>)>;

/// Identity element of a reduction of elements of a type. Signed integers of fewer than 32 bits hold none of
/// those of their arithmetic, whose low bits are another number.
pub(crate) fn identity_in(op: ReduceOp, dtype: DType) -> Expr {
    let is_narrow = matches!(dtype, DType::I8 | DType::I16);
    Expr::Const(if is_narrow { dtype.round(op.identity()) } else { op.identity() })
}

fn run_to(block: &mut [Stmt], ends: &Ends, inside: &Cond, dtypes: &[DType]) {
    for stmt in block {
        let mut inside = inside.clone();
        if let Stmt::For(l) = stmt
            && let Some((extent, end)) = ends.get(&l.var)
        {
            l.extent = extent.clone();
            inside = end.iter().fold(inside, |inside, end| inside.and(Cond::Lt(l.var.into(), end.clone())));
        }
        if let (Stmt::Update { buffer, op, value, .. }, true) = (&mut *stmt, inside != Cond::True) {
            let own = std::mem::replace(value, Expr::Const(0.0));
            let identity = identity_in(*op, dtypes[buffer.0 as usize]);
            *value = Expr::Select(Box::new(inside.clone()), Box::new(own), Box::new(identity));
        }
        stmt.blocks_mut().for_each(|inner| run_to(inner, ends, &inside, dtypes));
    }
}
