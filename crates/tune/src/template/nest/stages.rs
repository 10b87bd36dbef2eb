//! Stages of a program as templates need them: their loops and loads, and the groups that are fused.

use tilewright_ir::expr::{BinaryOp, Cond, Expr, ReduceOp, Subscript, TreePart, UnaryOp};
use tilewright_ir::{BufferId, DType, Index, LoopId, Program, Role, Stmt};

/// Stage: serial loops around one assignment.
pub struct LoopStage {
    /// Buffer that the stage writes.
    pub buffer: BufferId,
    /// Name of the buffer.
    pub name: String,
    /// Loops, outermost first.
    pub loops: Vec<StageLoop>,
    /// Whether the stage is a reduction.
    pub reduces: bool,
    /// Whether the stage sums floating-point numbers.
    pub is_sum: bool,
    /// Reads of the stage.
    pub reads: Vec<StageLoad>,
    /// Subscripts of the written element.
    pub subscripts: Vec<Index>,
    /// Conditions on loop variables within its value.
    pub conditions: Vec<[Index; 2]>,
    /// Cycles of the operations on a vector of values.
    pub cycles: f64,
}

/// Loop of a stage.
pub struct StageLoop {
    /// Name in the program.
    pub name: String,
    /// Loop variable.
    pub var: LoopId,
    /// Number of iterations.
    pub extent: i64,
    /// Whether the loop is a reduction loop.
    pub reduced: bool,
    /// Stride of the written element in elements; `None` if it varies.
    pub stride: Option<i64>,
}

/// Load of a stage.
pub struct StageLoad {
    /// Buffer that is read.
    pub buffer: BufferId,
    /// Subscripts of the element.
    pub subscripts: Vec<Index>,
    /// Stride of each loop in elements; `None` if it varies.
    pub strides: Vec<Option<i64>>,
}

impl LoopStage {
    /// Loops over results, by index.
    pub fn axes(&self) -> impl Iterator<Item = usize> {
        (0..self.loops.len()).filter(|at| !self.loops[*at].reduced)
    }

    /// Reduction loops, by index.
    pub fn reduction(&self) -> impl Iterator<Item = usize> {
        (0..self.loops.len()).filter(|at| self.loops[*at].reduced)
    }

    /// Loop along which most of the reads and the write are contiguous, weighted by elements or by accesses.
    fn contiguous(&self, by_elements: bool) -> Option<usize> {
        let written: Vec<Option<i64>> = self.loops.iter().map(|l| l.stride).collect();
        let n_of = |strides: &[Option<i64>]| -> i64 {
            let moved = self.loops.iter().zip(strides).filter(|(_, stride)| **stride != Some(0));
            if by_elements { moved.map(|(l, _)| l.extent).product() } else { 1 }
        };
        let n_along = |at: usize| -> i64 {
            let all = self.reads.iter().map(|r| &r.strides).chain([&written]);
            all.filter(|strides| strides[at] == Some(1)).map(|strides| n_of(strides)).sum()
        };
        (0..self.loops.len()).filter(|at| n_along(*at) > 0).max_by_key(|at| n_along(*at))
    }

    /// Product of all extents.
    pub fn iterations(&self) -> f64 {
        self.loops.iter().map(|l| l.extent as f64).product()
    }

    fn of(program: &Program, stmt: &Stmt) -> Option<LoopStage> {
        let (mut loops, mut leaf) = (Vec::new(), stmt);
        let mut ranges = program.ranges();
        while let Stmt::For(l) = leaf {
            // The last part of a sum may be shorter than the others.
            loops.push((l.var, ranges.upper(&l.extent)?));
            ranges.push(l.var, l.extent.clone());
            leaf = l.body.first()?;
        }
        let (buffer, subscripts) = leaf.own_write()?;
        let (op, value) = match leaf {
            Stmt::Store { value, .. } => (None, value),
            Stmt::Update { op, value, .. } => (Some(*op), value),
            _ => return None,
        };
        let strides = |b: BufferId, index: &[Index]| -> Vec<Option<i64>> {
            let flat = index.iter().zip(program.buffer(b).strides());
            let flat = flat.fold(Index::from(0), |sum, (i, stride)| sum.add(&i.scale(stride)));
            let of = |(v, _): &(LoopId, i64)| {
                let stride = flat.coefficient(*v);
                (!flat.sub(&Index::from(*v).scale(stride)).uses(*v)).then_some(stride)
            };
            loops.iter().map(of).collect()
        };
        let mut reads = Vec::new();
        TreePart::Expr(value).for_each_load(&mut |b, index| {
            reads.push(StageLoad { buffer: b, subscripts: index.to_vec(), strides: strides(b, index) });
        });
        TreePart::Expr(value).walk(&mut |node| {
            let TreePart::Expr(gather @ Expr::Gather(b, subscripts)) = node else { return };
            // An index that a value determines may be anywhere in each iteration.
            let index: Vec<Index> = subscripts.iter().map(Subscript::known).collect();
            let mut of_each = strides(*b, &index);
            for (stride, (var, _)) in of_each.iter_mut().zip(&loops) {
                let of_values = |node: TreePart| matches!(node, TreePart::Expr(e) if e.uses(*var));
                *stride = stride.filter(|_| !TreePart::Expr(gather).children().any(of_values));
            }
            reads.push(StageLoad { buffer: *b, subscripts: index, strides: of_each });
        });
        let (mut cycles, mut conditions) = (0.0, Vec::new());
        TreePart::Expr(value).walk(&mut |node| {
            if let TreePart::Cond(Cond::Lt(a, b)) = node {
                conditions.push([a.clone(), b.clone()]);
            }
            cycles += cycles_of(node);
        });
        let written = strides(buffer, subscripts);
        let axis = |(at, (var, extent)): (usize, &(LoopId, i64))| StageLoop {
            name: program.loop_name(*var).to_owned(),
            var: *var,
            extent: *extent,
            reduced: !subscripts.iter().any(|i| i.uses(*var)),
            stride: written[at],
        };
        Some(LoopStage {
            buffer,
            name: program.buffer(buffer).name.clone(),
            loops: loops.iter().enumerate().map(axis).collect(),
            reduces: op.is_some(),
            is_sum: op == Some(ReduceOp::Sum) && program.buffer(buffer).dtype.is_float(),
            reads,
            subscripts: subscripts.to_vec(),
            conditions,
            cycles,
        })
    }
}

/// Cycles of a node on a vector, roughly.
fn cycles_of(node: TreePart) -> f64 {
    match node {
        TreePart::Expr(Expr::Unary(op, _)) => match op {
            UnaryOp::Neg | UnaryOp::Abs => 0.5,
            UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round => 4.0,
            UnaryOp::Sin | UnaryOp::Cos => 150.0,
            UnaryOp::Sqrt => 12.0,
            UnaryOp::Exp | UnaryOp::Expm1 => 10.0,
            UnaryOp::Log | UnaryOp::Log1p => 14.0,
            UnaryOp::Tanh => 22.0,
            UnaryOp::Erf => 12.0,
        },
        TreePart::Expr(Expr::Binary(BinaryOp::Div, ..)) => 9.0,
        TreePart::Expr(Expr::Binary(BinaryOp::Pow, _, n)) => {
            if matches!(**n, Expr::Const(_)) {
                1.5
            } else {
                300.0
            }
        }
        TreePart::Expr(Expr::Binary(..)) => 0.6,
        TreePart::Expr(Expr::FromIndex(_) | Expr::Select(..)) | TreePart::Cond(Cond::Less(..)) => 1.0,
        TreePart::Expr(Expr::Gather(..)) => 4.0,
        TreePart::Expr(Expr::Const(_) | Expr::Load(..) | Expr::Cast(..)) | TreePart::Cond(_) => 0.0,
    }
}

/// Stages of an untransformed program.
pub fn stages(program: &Program) -> Vec<LoopStage> {
    program.body.iter().filter_map(|stmt| LoopStage::of(program, stmt)).collect()
}

/// Widest element type of the program, which determines the number of vector lanes.
pub fn lane_type(program: &Program) -> DType {
    let widest = program.buffers.iter().map(|b| b.dtype).max_by_key(|dtype| dtype.bytes());
    widest.expect("a program has buffers")
}

/// Finds a temporary worth inlining: its computation is cheap, or it is read once.
pub fn to_inline(program: &Program, stages: &[LoopStage]) -> Option<String> {
    const CHEAP: f64 = 1.3;
    let found = stages.iter().find(|stage| {
        let readers = || stages.iter().flat_map(|s| s.reads.iter().map(move |r| (s, r)));
        let reads: Vec<&LoopStage> = readers().filter(|(_, r)| r.buffer == stage.buffer).map(|(s, _)| s).collect();
        let n_writers = stages.iter().filter(|s| s.buffer == stage.buffer).count();
        let n_read: f64 = reads.iter().map(|s| s.iterations()).sum();
        let is_single = n_read <= stage.iterations();
        program.buffer(stage.buffer).role == Role::Temporary
            && !stage.reduces
            && n_writers == 1
            && (is_single || stage.cycles <= CHEAP && stage.reads.len() <= 2)
            && stage.reads.iter().all(|r| r.buffer != stage.buffer)
    });
    found.map(|stage| stage.name.clone())
}

/// Group of stages that are fused: the last one completely, the others for each row of it.
pub struct StageGroup {
    /// Index of the last stage.
    pub root: usize,
    /// Indices of the other stages, in the order in which they are computed.
    pub attached: Vec<usize>,
    /// Number of outermost loops of the last stage that make up a row; its other loops are inside.
    pub rows: usize,
    /// Loop of the last stage that corresponds to each loop, by stage and loop; `None` for a stage's own
    /// loops.
    pub follows: Vec<Vec<Option<usize>>>,
}

impl StageGroup {
    /// Whether a loop of a stage is one over rows.
    pub fn is_row(&self, stage: usize, at: usize) -> bool {
        self.follows[stage][at].is_some_and(|root| root < self.rows)
    }
}

/// Ratio of iterations from which on the smaller of two stages is negligible.
const LITTLE: f64 = 8.0;

/// Groups stages of a program for fusion, in order; each stage separately if `apart`. `by_elements` decides
/// by the number of elements read, rather than of reads, whether a stage is computed per row.
pub fn groups(program: &Program, stages: &[LoopStage], apart: bool, by_elements: bool) -> Vec<StageGroup> {
    let n = stages.len();
    let mut root_of: Vec<usize> = (0..n).collect();
    let mut follows: Vec<Vec<Option<usize>>> = stages.iter().map(|s| (0..s.loops.len()).map(Some).collect()).collect();
    let mut rows: Vec<usize> = stages.iter().map(|s| s.loops.len()).collect();
    for s in (0..n).rev() {
        let stage = &stages[s];
        let n_writers = stages.iter().filter(|other| other.buffer == stage.buffer).count();
        if apart || program.buffer(stage.buffer).role != Role::Temporary || n_writers != 1 {
            continue;
        }
        let readers: Vec<usize> =
            (s + 1..n).filter(|t| stages[*t].reads.iter().any(|r| r.buffer == stage.buffer)).collect();
        let Some(root) = readers.first().map(|t| root_of[*t]) else { continue };
        if readers.iter().any(|t| root_of[*t] != root) {
            continue;
        }
        let Some(mapped) = followed(stages, s, &readers, &follows) else { continue };
        let root_axes = &stages[root].loops;
        let is_followed = |at: &usize| !root_axes[*at].reduced && mapped.contains(&Some(*at));
        let mut leading = (0..root_axes.len()).take_while(is_followed).count();
        // The loop along which the stage is contiguous stays inside a row, unless the stage is negligible.
        let is_much = stage.iterations() * LITTLE > stages[root].iterations();
        if let Some(kept) = stage.contiguous(by_elements).and_then(|at| mapped[at]).filter(|_| is_much) {
            leading = leading.min(kept);
        }
        if leading == 0 {
            continue;
        }
        root_of[s] = root;
        follows[s] = mapped;
        rows[root] = rows[root].min(leading);
    }
    let of_root = |root: usize| StageGroup {
        root,
        attached: (0..n).filter(|s| *s != root && root_of[*s] == root).collect(),
        rows: if (0..n).any(|s| s != root && root_of[s] == root) { rows[root] } else { 0 },
        follows: follows.clone(),
    };
    (0..n).filter(|s| root_of[*s] == *s).map(of_root).collect()
}

/// Loop of its readers' last stage that each loop of a stage follows wherever it is read; `None` if the
/// stage's subscripts cannot be followed.
fn followed(
    stages: &[LoopStage],
    s: usize,
    readers: &[usize],
    follows: &[Vec<Option<usize>>],
) -> Option<Vec<Option<usize>>> {
    let stage = &stages[s];
    let mut mapped: Vec<Option<usize>> = vec![None; stage.loops.len()];
    for (d, subscript) in stage.subscripts.iter().enumerate() {
        let own = stage.loops.iter().position(|l| *subscript == Index::from(l.var))?;
        let mut of_reads = readers.iter().flat_map(|t| {
            let reads = stages[*t].reads.iter().filter(|r| r.buffer == stage.buffer);
            reads.map(move |r| {
                let at = stages[*t].loops.iter().position(|l| r.subscripts[d] == Index::from(l.var))?;
                follows[*t][at].filter(|_| stages[*t].loops[at].extent == stage.loops[own].extent)
            })
        });
        let first = of_reads.next().flatten();
        mapped[own] = first.filter(|_| of_reads.all(|other| other == first));
    }
    Some(mapped)
}
