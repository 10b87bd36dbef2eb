//! Builder of an operator's untransformed program, one loop nest per stage.

use super::{Contraction, Epilogue, Operand, Packed, SizeRange, Workload};
use crate::dtype::DType;
use crate::expr::{Cond, Expr, ReduceOp};
use crate::index::Index;
use crate::program::{Buffer, BufferId, LoopKind, Part, Program, Role, Scope, Stmt};
use crate::schedule::nest;

/// Named axes with their extents.
pub type NamedAxes<'a> = &'a [(&'a str, i64)];

/// Specification of a stage: its result, axes and reduction.
pub struct StageSpec<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Axes of the tensor, outermost first; loops are named after them.
    pub axes: NamedAxes<'a>,
    /// Reduction operation with its axes, if any.
    pub reduce: Option<(ReduceOp, NamedAxes<'a>)>,
    /// Role of the result: [`Role::Output`], [`Role::Temporary`] for an intermediate stage, or
    /// [`Role::Kept`].
    pub role: Role,
}

/// Program under construction.
pub struct ProgramBuilder {
    program: Program,
    dtype: DType,
    constants: Vec<String>,
}

impl ProgramBuilder {
    /// Begins a program of tensors of one element type. Inputs named in `constants`, ignoring case, are
    /// constant across runs.
    pub fn new(name: impl Into<String>, dtype: DType, constants: Vec<String>) -> ProgramBuilder {
        let program = Program { name: name.into(), ..Program::default() };
        ProgramBuilder { program, dtype, constants }
    }

    /// Sets the element type of tensors added afterwards.
    pub fn set_dtype(&mut self, dtype: DType) {
        self.dtype = dtype;
    }

    /// Adds an open (dynamic) size, and returns its value.
    pub fn open_size(&mut self, name: &str, range: SizeRange) -> Index {
        self.program.open_size(name, range)
    }

    /// Adds an input.
    pub fn input(&mut self, name: &str, shape: &[i64]) -> BufferId {
        let is_constant = self.constants.iter().any(|c| c.eq_ignore_ascii_case(name));
        let role = if is_constant { Role::ConstInput } else { Role::Input };
        let (name, shape) = (name.to_owned(), shape.to_vec());
        self.program.add_buffer(Buffer { name, dtype: self.dtype, shape, scope: Scope::Global, role })
    }

    /// Adds a stage to the body; `value` builds its expression from the loop variables of the axes, followed
    /// by those of the reduction.
    pub fn stage(&mut self, spec: StageSpec, value: impl FnOnce(&[Index]) -> Expr) -> BufferId {
        self.stage_in(Part::Body, spec, value)
    }

    /// Adds a stage to a part; see [`ProgramBuilder::stage`].
    pub fn stage_in(&mut self, part: Part, spec: StageSpec, value: impl FnOnce(&[Index]) -> Expr) -> BufferId {
        let shape = spec.axes.iter().map(|a| a.1).collect();
        let n_axes = spec.axes.len();
        self.stage_at(part, spec, shape, |v| (v[..n_axes].to_vec(), value(v)))
    }

    /// Adds a stage to a part, for a tensor whose shape differs from the axes: the callback maps the loop
    /// variables of the axes and the reduction to the subscripts of an element and its value.
    fn stage_at(
        &mut self,
        part: Part,
        spec: StageSpec,
        shape: Vec<i64>,
        element: impl FnOnce(&[Index]) -> (Vec<Index>, Expr),
    ) -> BufferId {
        let (name, dtype) = (spec.name.to_owned(), self.dtype);
        let buffer = self.program.add_buffer(Buffer { name, dtype, shape, scope: Scope::Global, role: spec.role });
        let (op, reduced) = spec.reduce.map_or((None, &[][..]), |(op, axes)| (Some(op), axes));
        let mut loops = Vec::new();
        for (name, extent) in spec.axes.iter().chain(reduced) {
            // Stages may share axis names; the stage's name disambiguates those of later stages.
            let taken = self.program.find_loop(name).is_some();
            let name = if taken { format!("{}.{name}", spec.name) } else { (*name).to_owned() };
            loops.push((self.program.add_loop(name), Index::from(*extent), LoopKind::Serial));
        }
        let vars: Vec<Index> = loops.iter().map(|l| l.0.into()).collect();
        let (index, value) = element(&vars);
        let stmt = match op {
            None => Stmt::Store { buffer, index, value },
            Some(op) => {
                let first =
                    vars[spec.axes.len()..].iter().fold(Cond::True, |c, v| c.and(Cond::Eq(v.clone(), 0.into())));
                Stmt::Update { buffer, index, op, value, first }
            }
        };
        let block = self.program.part_mut(part);
        if spec.role == Role::Temporary {
            block.push(Stmt::Alloc(buffer));
        }
        block.extend(nest(loops.into_iter(), vec![stmt]));
        buffer
    }

    /// Adds a stage that copies a buffer, in any part.
    pub fn copy(&mut self, part: Part, from: BufferId, name: &str, loops: &[&str], role: Role) -> BufferId {
        let shape = self.program.buffer(from).shape.clone();
        let axes: Vec<(&str, i64)> = loops.iter().copied().zip(shape).collect();
        let spec = StageSpec { name, axes: &axes, reduce: None, role };
        self.stage_in(part, spec, |at| Expr::Load(from, at.to_vec()))
    }

    /// Finishes the program.
    pub fn finish(self) -> Program {
        self.program
    }
}

/// Elementwise operations with their additional inputs.
pub(super) struct ElementOps<'a> {
    operations: &'a [Epilogue],
    /// Buffers of additional operands, by operation.
    of: Vec<Option<BufferId>>,
}

impl ElementOps<'_> {
    /// Adds the inputs of the workload's epilogue, with `n_channels` elements or the output's shape.
    pub(super) fn new<'a>(p: &mut ProgramBuilder, w: &'a Workload, n_channels: i64, shape: &[i64]) -> ElementOps<'a> {
        let mut of = vec![None; w.epilogue().len()];
        for (at, name, kind) in Epilogue::operands(w.epilogue()) {
            p.set_dtype(w.epilogue()[at].operand_dtype(w.dtype));
            let one = [1];
            let shape = match kind {
                Operand::Channel => &[n_channels][..],
                Operand::One => &one,
                Operand::Element | Operand::Pair => shape,
            };
            of[at] = Some(p.input(&name, shape));
        }
        p.set_dtype(w.dtype);
        ElementOps { operations: w.epilogue(), of }
    }

    /// Adds the inputs of the workload's prologue, with `n_channels` elements.
    pub(super) fn of_prologue<'a>(p: &mut ProgramBuilder, w: &'a Workload, n_channels: i64) -> ElementOps<'a> {
        let mut of = vec![None; w.prologue().len()];
        for (at, name, _) in Epilogue::prologue_operands(w.prologue()) {
            of[at] = Some(p.input(&name, &[n_channels]));
        }
        ElementOps { operations: w.prologue(), of }
    }

    /// Converts inputs of the output's shape to the layout that the template chooses.
    pub(super) fn keep(&mut self, p: &mut ProgramBuilder) {
        for (at, name, kind) in Epilogue::operands(self.operations) {
            if let (Operand::Element, Some(input)) = (kind, &mut self.of[at]) {
                p.set_dtype(p.program.buffer(*input).dtype);
                *input = p.copy(Part::Prepare, *input, &kept(&name), &["rn", "rk", "rp", "rq"], Role::Kept);
            }
        }
    }

    /// Applies the operations to `value`, the element at subscripts `at`, of which the one at `channel` is
    /// the channel.
    pub(super) fn apply(&self, value: Expr, at: &[Index], channel: usize) -> Expr {
        self.apply_to_pair(value, None, at, channel)
    }

    /// Adds the output stage of a matrix product, which applies the operations to each sum or each pair of
    /// sums.
    pub(super) fn finish(&self, p: &mut ProgramBuilder, sum: BufferId, name: &str) {
        let [rows, n] = p.program.buffer(sum).shape[..] else {
            unreachable!("a product of matrices has rows and columns")
        };
        let [i, j] = Packed::FINISH;
        let role = Role::Output;
        let Some(columns) = Epilogue::pairs_of(self.operations) else {
            let spec = StageSpec { name, axes: &[(i, rows), (j, n)], reduce: None, role };
            p.stage(spec, |at| self.apply(Expr::Load(sum, at.to_vec()), at, 1));
            return;
        };
        let axes = [(i, rows), (j, n / (2 * columns)), (Contraction::OF_PAIR, columns)];
        let spec = StageSpec { name, axes: &axes, reduce: None, role };
        p.stage_at(Part::Body, spec, vec![rows, n / 2], |v| {
            let at = vec![v[0].clone(), v[1].scale(columns).add(&v[2])];
            let first = v[1].scale(2 * columns).add(&v[2]);
            let [x, y] = [first.clone(), first.offset(columns)].map(|j| Expr::Load(sum, vec![v[0].clone(), j]));
            let value = self.apply_to_pair(x, Some(y), &at, 1);
            (at, value)
        });
    }

    fn apply_to_pair(&self, value: Expr, other: Option<Expr>, at: &[Index], channel: usize) -> Expr {
        self.operations.iter().zip(&self.of).fold(value, |x, (e, operand)| {
            if e.operand() == Some(Operand::Pair) {
                return e.apply(x, other.clone());
            }
            let one = [Index::from(0)];
            let at = match e.operand() {
                Some(Operand::Channel) => &at[channel..=channel],
                Some(Operand::One) => &one,
                Some(Operand::Element | Operand::Pair) | None => at,
            };
            e.apply(x, operand.map(|operand| Expr::Load(operand, at.to_vec())))
        })
    }
}

/// Name of an input in the layout that the template chooses.
pub(super) fn kept(name: &str) -> String {
    format!("{name}.in")
}
