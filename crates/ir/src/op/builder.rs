//! Building an operator's untransformed program: one nest a stage.

use super::Workload;
use crate::expr::{Cond, Expr, ReduceOp};
use crate::index::Index;
use crate::program::{Buffer, BufferId, DType, LoopKind, Program, Role, Scope, Stmt};
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
    /// [`Role::Output`], or [`Role::Temporary`] for a stage in between.
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
        let program = Program {
            name: workload.to_string(),
            buffers: Vec::new(),
            loops: Vec::new(),
            prepare: Vec::new(),
            body: Vec::new(),
        };
        ProgramBuilder { program, dtype: workload.dtype, constant: workload.constant }
    }

    /// Adds an input, constant where the workload says so.
    pub fn input(&mut self, name: &str, shape: &[i64]) -> BufferId {
        let constant = self.constant.is_some_and(|c| c.eq_ignore_ascii_case(name));
        let role = if constant { Role::ConstInput } else { Role::Input };
        let (name, shape) = (name.to_owned(), shape.to_vec());
        self.program.add_buffer(Buffer { name, dtype: self.dtype, shape, scope: Scope::Global, role })
    }

    /// Adds a stage, whose value is given for its axes followed by the reduction's.
    pub fn stage(&mut self, spec: StageSpec, value: impl FnOnce(&[Index]) -> Expr) -> BufferId {
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
        if spec.role == Role::Temporary {
            self.program.body.push(Stmt::Alloc(buffer));
        }
        self.program.body.extend(nest(loops.into_iter(), vec![stmt]));
        buffer
    }

    /// The program.
    pub fn finish(self) -> Program {
        self.program
    }
}
