//! Templates: what turns an operator, a target and a configuration into schedule steps, and declares the space.

mod conv;
mod gemm_4_2_4;
mod matmul_blocked;

use crate::space::{Config, Space, SpaceError};
use std::sync::Arc;
use tilewright_ir::op::Workload;
use tilewright_ir::schedule::{Illegal, apply_all};
use tilewright_ir::{Program, Step, Target};

/// Everything about a template.
pub struct Template {
    /// Its name on the command line and in records.
    pub name: &'static str,
    /// One line on what it varies.
    pub text: &'static str,
    /// The operators it serves.
    pub operators: &'static [&'static str],
    /// The space for a task.
    pub space: fn(&Setting) -> Result<Space, SpaceError>,
    /// The schedule of a configuration of that space.
    pub steps: fn(&Setting, &Space, &Config) -> Vec<Step>,
}

/// All templates; the first one of an operator is its default.
pub const TEMPLATES: &[Template] = &[
    matmul_blocked::MATMUL_BLOCKED,
    gemm_4_2_4::GEMM_4_2_4,
    conv::CONV_DIRECT,
    conv::CONV_WINOGRAD,
    conv::CONV_IM2COL,
    conv::CONV_4_4_4_2_2_2,
];

/// What a template depends on.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The operator and its sizes.
    pub workload: Workload,
    /// The machine.
    pub target: Target,
    /// Threads the kernel may use.
    pub n_threads: usize,
}

/// A template for a setting, with its space: what is tuned.
#[derive(Clone)]
pub struct Task {
    /// The workload, the machine and the threads.
    pub setting: Setting,
    /// The template.
    pub template: &'static Template,
    /// Its space.
    pub space: Arc<Space>,
}

/// Why there is no task. The fault is the caller's, but for `Space`, which is the template's.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// No template of that name serves the operator.
    #[error("no template `{name}` for {operator}; there are {known}")]
    NoTemplate {
        /// The name given.
        name: String,
        /// The operator.
        operator: &'static str,
        /// The operator's templates.
        known: String,
    },
    /// The template's space cannot be built.
    #[error(transparent)]
    Space(#[from] SpaceError),
}

impl Task {
    /// The task for a template by name, or for the operator's default.
    ///
    /// # Errors
    /// [`TaskError`] where there is no such template for the operator, or its space cannot be built.
    pub fn new(setting: Setting, template: Option<&str>) -> Result<Task, TaskError> {
        let operator = setting.workload.operator().name;
        let mut of_operator = TEMPLATES.iter().filter(|t| t.operators.contains(&operator));
        let found = match template {
            None => of_operator.next(),
            Some(name) => of_operator.find(|t| t.name == name),
        };
        let template = found.ok_or_else(|| TaskError::NoTemplate {
            name: template.unwrap_or("default").chars().take(60).collect(),
            operator,
            known: TEMPLATES.iter().filter(|t| t.operators.contains(&operator)).map(|t| t.name).collect::<Vec<_>>().join(", "),
        })?;
        let space = Arc::new((template.space)(&setting)?);
        Ok(Task { setting, template, space })
    }

    /// The schedule of a configuration.
    pub fn steps(&self, config: &Config) -> Vec<Step> {
        (self.template.steps)(&self.setting, &self.space, config)
    }

    /// The program of a configuration, scheduled but not lowered.
    ///
    /// # Errors
    /// The position of the step that is illegal, and why: the template's fault.
    pub fn program(&self, config: &Config) -> Result<Program, (usize, Illegal)> {
        apply_all(&self.setting.workload.program(), &self.steps(config))
    }
}

/// Short constructors for steps, for templates to read like schedules.
mod step {
    use tilewright_ir::Step;
    use tilewright_ir::schedule::{LayoutAxis, Tail};

    pub fn split(target: &str, factor: i64, outer: &str, inner: &str) -> Step {
        let (target, outer, inner) = (target.into(), outer.into(), inner.into());
        Step::Split { target, factor, tail: Tail::Shrink, outer, inner }
    }

    pub fn reorder(loops: &[&str]) -> Step {
        Step::Reorder { loops: loops.iter().map(|l| (*l).to_owned()).collect() }
    }

    pub fn vectorize(target: &str) -> Step {
        Step::Vectorize { target: target.into() }
    }

    pub fn unroll(target: &str) -> Step {
        Step::Unroll { target: target.into() }
    }

    pub fn parallel(target: &str) -> Step {
        Step::Parallel { target: target.into() }
    }

    pub fn stage(buffer: &str, at: Option<&str>, name: &str, layout: &[LayoutAxis]) -> Step {
        let (buffer, at, name) = (buffer.into(), at.map(Into::into), name.into());
        Step::Stage { buffer, at, name, layout: layout.to_vec(), shared: false }
    }

    pub fn accumulate(buffer: &str, at: &str, name: &str) -> Step {
        Step::Accumulate { buffer: buffer.into(), at: at.into(), name: name.into() }
    }

    pub fn compute_at(buffer: &str, at: &str) -> Step {
        Step::ComputeAt { buffer: buffer.into(), at: at.into() }
    }

    pub fn inline(buffer: &str) -> Step {
        Step::Inline { buffer: buffer.into() }
    }

    pub fn reindex(stage: &str, buffer: &str, name: &str) -> Step {
        Step::Reindex { stage: stage.into(), buffer: buffer.into(), name: name.into() }
    }

    pub fn fuse(outer: &str, inner: &str, fused: &str) -> Step {
        Step::Fuse { outer: outer.into(), inner: inner.into(), fused: fused.into() }
    }

    pub fn layout(buffer: &str, layout: &[LayoutAxis]) -> Step {
        Step::Layout { buffer: buffer.into(), layout: layout.to_vec() }
    }

    pub fn winograd(buffer: &str, tile: i64) -> Step {
        Step::Winograd { buffer: buffer.into(), tile }
    }

    pub fn prefetch(buffer: &str, at: &str, ahead: i64) -> Step {
        Step::Prefetch { buffer: buffer.into(), at: at.into(), ahead }
    }
}
