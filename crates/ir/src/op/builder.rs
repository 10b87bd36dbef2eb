//! Building an operator's untransformed program: one nest a stage.

use super::{Epilogue, Workload};
use crate::expr::{Cond, Expr, ReduceOp};
use crate::index::Index;
use crate::program::{Buffer, BufferId, DType, LoopKind, Part, Program, Role, Scope, Stmt};
use crate::schedule::nest;

/// Named axes with their extents.
pub type Axes<'a> = &'a [(&'a str, i64)];

/// One stage: a tensor, its axes, and what it reduces over.
pub struct StageSpec<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Its axes, outermost first; loops are named after them.
    pub axes: Axes<'a>,
    /// For a reduction, how and over which axes.
    pub reduce: Option<(ReduceOp, Axes<'a>)>,
    /// [`Role::Output`], [`Role::Temporary`] for a stage in between, or [`Role::Kept`].
    pub role: Role,
}

/// Collects inputs and stages.
pub struct ProgramBuilder {
    program: Program,
    dtype: DType,
    constant: Option<&'static str>,
}

impl ProgramBuilder {
    /// A program without stages, named after the workload.
    pub fn new(workload: &Workload) -> ProgramBuilder {
        let program = Program { name: workload.to_string(), ..Program::default() };
        ProgramBuilder { program, dtype: workload.dtype, constant: workload.constant }
    }

    /// Adds an input, constant where the workload says so.
    pub fn input(&mut self, name: &str, shape: &[i64]) -> BufferId {
        let constant = self.constant.is_some_and(|c| c.eq_ignore_ascii_case(name));
        let role = if constant { Role::ConstInput } else { Role::Input };
        let (name, shape) = (name.to_owned(), shape.to_vec());
        self.program.add_buffer(Buffer { name, dtype: self.dtype, shape, scope: Scope::Global, role })
    }

    /// Adds a stage of the body, whose value is given for its axes followed by the reduction's.
    pub fn stage(&mut self, spec: StageSpec, value: impl FnOnce(&[Index]) -> Expr) -> BufferId {
        self.stage_in(Part::Body, spec, value)
    }

    /// Adds a stage to a part.
    pub fn stage_in(&mut self, part: Part, spec: StageSpec, value: impl FnOnce(&[Index]) -> Expr) -> BufferId {
        let buffer = self.program.add_buffer(Buffer {
            name: spec.name.to_owned(),
            dtype: self.dtype,
            shape: spec.axes.iter().map(|a| a.1).collect(),
            scope: Scope::Global,
            role: spec.role,
        });
        let (op, reduced) = spec.reduce.map_or((None, &[][..]), |(op, axes)| (Some(op), axes));
        let mut loops = Vec::new();
        for (name, extent) in spec.axes.iter().chain(reduced) {
            // Stages may share axis names; later ones are told apart by the stage's name.
            let taken = self.program.find_loop(name).is_some();
            let name = if taken { format!("{}.{name}", spec.name) } else { (*name).to_owned() };
            loops.push((self.program.add_loop(name), Index::from(*extent), LoopKind::Serial));
        }
        let vars: Vec<Index> = loops.iter().map(|l| l.0.into()).collect();
        let index = vars[..spec.axes.len()].to_vec();
        let value = value(&vars);
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

    /// Adds a stage that copies a buffer, in the same or another part than the one that fills it.
    pub fn copy(&mut self, part: Part, from: BufferId, name: &str, loops: &[&str], role: Role) -> BufferId {
        let shape = self.program.buffer(from).shape.clone();
        let axes: Vec<(&str, i64)> = loops.iter().copied().zip(shape).collect();
        let spec = StageSpec { name, axes: &axes, reduce: None, role };
        self.stage_in(part, spec, |at| Expr::Load(from, at.to_vec()))
    }

    /// The program.
    pub fn finish(self) -> Program {
        self.program
    }
}

/// The extra inputs of an epilogue.
#[derive(Clone, Copy, Default)]
pub(super) struct Operands {
    bias: Option<BufferId>,
    pub(super) residual: Option<BufferId>,
}

impl Operands {
    /// Adds the inputs that the workload's epilogue needs: `bias` of so many channels, `R` of the output's shape.
    pub(super) fn new(p: &mut ProgramBuilder, w: &Workload, n_channels: i64, shape: &[i64]) -> Operands {
        let needs = |e| w.epilogue().contains(&e);
        Operands {
            bias: needs(Epilogue::Bias).then(|| p.input("bias", &[n_channels])),
            residual: needs(Epilogue::Add).then(|| p.input("R", shape)),
        }
    }

    /// What the epilogue makes of a value, at an element of the output whose subscript `channel` numbers the channels.
    pub(super) fn apply(&self, w: &Workload, value: Expr, at: &[Index], channel: usize) -> Expr {
        let load = |b: Option<BufferId>, index: &[Index]| {
            Expr::Load(b.expect("an input that the epilogue needs was added"), index.to_vec())
        };
        w.epilogue().iter().fold(value, |x, e| {
            e.apply(x, || match e {
                Epilogue::Bias => load(self.bias, &at[channel..=channel]),
                _ => load(self.residual, at),
            })
        })
    }
}
