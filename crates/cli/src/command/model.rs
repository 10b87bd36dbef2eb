//! ONNX models as commands take them.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use clap::Args;
use tilewright::{Session, Workload};
use tilewright_graph::{Bindings, Model, Problem, Specialised, Tensor, onnx, specialise};
use tilewright_model::{Compiled, Fused, Source, choose, compile};

use super::{DatabaseArgs, MachineArgs, count, read_file, worker_command};
use crate::error::{bad_input, one_line};
use crate::output::{message, shell_quoted};

/// A model, and what is bound of it.
#[derive(Args, Debug)]
pub struct ModelArgs {
    /// Model as an ONNX file
    #[arg(value_name = "MODEL.onnx")]
    path: PathBuf,
    #[command(flatten)]
    bindings: BindingArgs,
}

/// What is bound of a model.
#[derive(Args, Debug, Clone, Default)]
pub struct BindingArgs {
    /// Size of a named dimension, such as N=1; can be given again
    #[arg(long, value_name = "NAME=SIZE")]
    dim: Vec<String>,
    /// Shape of an input, such as x=1,3,224,224; can be given again
    #[arg(long, value_name = "INPUT=SIZES")]
    shape: Vec<String>,
    /// Value of an input that becomes a constant, such as sr=16000; can be given again
    #[arg(long, value_name = "INPUT=NUMBERS")]
    set: Vec<String>,
}

impl BindingArgs {
    /// Whether nothing is bound.
    pub fn is_empty(&self) -> bool {
        self.dim.is_empty() && self.shape.is_empty() && self.set.is_empty()
    }

    /// The same with the shape of a tensor that is given for an input.
    pub fn with_input(mut self, name: &str, tensor: &Tensor) -> BindingArgs {
        // There is nothing to bind of a scalar.
        if !tensor.shape().is_empty() {
            let sizes: Vec<String> = tensor.shape().iter().map(usize::to_string).collect();
            self.shape.push(format!("{name}={}", sizes.join(",")));
        }
        self
    }

    /// Refuses bindings of what is no model.
    ///
    /// # Errors
    /// Bad input where anything is bound.
    pub fn refuse(&self, workload: &str) -> anyhow::Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        Err(bad_input(format!("{workload} has no inputs to bind (--dim, --shape and --set are for models)")))
    }

    /// The bindings.
    ///
    /// # Errors
    /// Bad input where a text is none.
    pub fn bindings(&self) -> anyhow::Result<Bindings> {
        let mut bindings = Bindings::default();
        self.dim.iter().try_for_each(|text| bindings.bind_dim(text)).map_err(bad_input)?;
        self.shape.iter().try_for_each(|text| bindings.bind_shape(text)).map_err(bad_input)?;
        self.set.iter().try_for_each(|text| bindings.bind_value(text)).map_err(bad_input)?;
        Ok(bindings)
    }
}

impl ModelArgs {
    /// A model that another argument names.
    pub fn new(path: &str, bindings: &BindingArgs) -> ModelArgs {
        ModelArgs { path: PathBuf::from(path), bindings: bindings.clone() }
    }

    /// Whether an argument names a model rather than a workload.
    pub fn is_model(argument: &str) -> bool {
        argument.to_ascii_lowercase().ends_with(".onnx")
    }

    /// The name of the file.
    pub fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Reads the model and the files with its weights.
    ///
    /// # Errors
    /// Bad input where it cannot be read or is none.
    pub fn read(&self) -> anyhow::Result<Model> {
        let file = Bytes::from(read_file(&self.path, "an ONNX model")?);
        onnx::read(&file, &mut external_files(&self.path))
            .map_err(|error| bad_input(format!("{}: {error}", self.name())))
    }

    /// The model with its free dimensions bound; what takes no more than so many bytes is folded.
    ///
    /// # Errors
    /// Bad input where a dimension is not bound, or the model breaks a rule.
    pub fn specialise(&self, model: &Model, fold_bytes: usize) -> anyhow::Result<Specialised> {
        let special = specialise(&model.graph, &Bindings { fold_bytes, ..self.bindings.bindings()? });
        if let Some(problem) = special.problems.iter().find(|problem| !problem.is_unsupported()) {
            // What is not supported is worth knowing all the same.
            let unsupported = special.problems.iter().filter(|problem| problem.is_unsupported());
            unsupported.for_each(|problem| message(&problem_line(problem)));
            return Err(bad_input(format!("{}: {problem}", self.name())));
        }
        Ok(special)
    }

    /// The same, where everything is supported.
    ///
    /// # Errors
    /// Bad input where something is not.
    fn supported(&self, model: &Model) -> anyhow::Result<Specialised> {
        let special = self.specialise(model, usize::MAX)?;
        match special.problems.first() {
            None => Ok(special),
            Some(problem) => {
                special.problems.iter().skip(1).for_each(|problem| message(&problem_line(problem)));
                Err(bad_input(format!("{}: {}", self.name(), problem_line(problem))))
            }
        }
    }
}

impl ModelArgs {
    /// What a run of the model does; with kernels that round no more than its operators as written, where
    /// that is asked for.
    ///
    /// # Errors
    /// As [`ModelArgs::read`] and [`ModelArgs::fused_of`].
    pub fn fused(&self, exact: bool) -> anyhow::Result<Fused> {
        self.fused_of(&self.read()?, exact)
    }

    /// The same for a model that has been read.
    ///
    /// # Errors
    /// Bad input where something is not supported.
    pub fn fused_of(&self, model: &Model, exact: bool) -> anyhow::Result<Fused> {
        let special = self.supported(model)?;
        let lowered = tilewright_model::lower(&special.graph);
        let mut fused = lowered.map_err(|error| bad_input(format!("{}: {error}", self.name())))?;
        fused.workloads_mut().for_each(|workload| workload.exact |= exact);
        Ok(fused)
    }
}

impl ModelArgs {
    /// The model with the best kernels that are recorded, and how many are a guess; that is told.
    ///
    /// # Errors
    /// As [`ModelArgs::fused`], and where a kernel has no code.
    pub fn compiled(
        &self,
        exact: bool,
        machine: &MachineArgs,
        records: &DatabaseArgs,
    ) -> anyhow::Result<(Compiled, u64)> {
        let target = machine.runnable_target()?;
        let fused = self.fused(exact)?;
        let session = Session::new(records.database()?, worker_command()?);
        let caches = fused.caches(&target);
        let n_guessed = Cell::new(0);
        let schedule = |workload: &Workload| {
            let choice = choose(&session, workload, &target, machine.threads, caches);
            let choice = choice.map_err(|e| e.to_string())?;
            n_guessed.set(n_guessed.get() + u64::from(choice.source == Source::Guessed));
            choice.program().map_err(|e| e.to_string())
        };
        let compiled = compile(fused, &target, &schedule)?;
        if n_guessed.get() > 0 {
            let kernels = count(n_guessed.get(), "kernel");
            let hint = format!("run `{}`", self.tune_command(exact, machine, records));
            message(&format!("{kernels} not tuned yet: a model of the machine chose them ({hint})"));
        }
        Ok((compiled, n_guessed.get()))
    }

    /// The command that tunes the model's kernels for the same machine, into the same database.
    fn tune_command(&self, exact: bool, machine: &MachineArgs, records: &DatabaseArgs) -> String {
        let mut command = format!("tilewright tune {}", shell_quoted(&self.name()));
        let BindingArgs { dim, shape, set } = &self.bindings;
        for (option, texts) in [("--dim", dim), ("--shape", shape), ("--set", set)] {
            texts.iter().for_each(|text| command += &format!(" {option} {}", shell_quoted(text)));
        }
        if exact {
            command += " --exact";
        }
        if machine.threads != 1 {
            command += &format!(" --threads {}", machine.threads);
        }
        if machine.target != "host" {
            command += &format!(" --target {}", machine.target);
        }
        if let Some(db) = &records.db {
            command += &format!(" --db {}", shell_quoted(&db.display().to_string()));
        }
        command
    }
}

/// Reads files with weights, which lie beside a model.
pub fn external_files(model: &Path) -> impl FnMut(&str) -> Result<Bytes, String> {
    let folder = model.parent().unwrap_or(Path::new("")).to_owned();
    move |name| {
        let path = folder.join(name);
        let read = std::fs::read(&path).map(Bytes::from);
        read.map_err(|error| format!("its weights {} cannot be read: {error} (put them there)", path.display()))
    }
}

/// A problem on one line.
pub fn problem_line(problem: &Problem) -> String {
    one_line(&problem.to_string())
}
