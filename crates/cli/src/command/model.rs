//! ONNX models as commands take them.

use std::path::{Path, PathBuf};

use clap::Args;
use tilewright::{Database, Records};
use tilewright_device::mapped::tell_of_shrinking;
use tilewright_graph::{Bindings, Graph, Model, Problem, Specialised, Tensor, Value, problems_text, specialise};
use tilewright_ir::Target;
use tilewright_model::npy::read_tensors;
use tilewright_model::{Compiled, Fused, Given, Making, all_inputs, compile_known, feed, read_model};

use super::store::tell_notes;
use super::{MachineArgs, count, tune_command};
use crate::error::{bad_input, one_line};
use crate::output::{message, shell_quoted};

/// Elements of a given input that becomes a constant because shapes depend on it, at most.
const MOST_SET: usize = 1000;
/// Seed of inputs that are not given.
const SEED: u64 = 1;

/// A model with its bindings.
#[derive(Args, Debug)]
pub struct ModelArgs {
    /// Model as an ONNX file
    #[arg(value_name = "MODEL.onnx")]
    path: PathBuf,
    #[command(flatten)]
    bindings: BindingArgs,
}

/// Bindings of a model's free dimensions and inputs.
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

    /// Refuses bindings of a workload that is not a model.
    ///
    /// # Errors
    /// Bad input where anything is bound.
    pub fn refuse(&self, workload: &str) -> anyhow::Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        Err(bad_input(format!("{workload} has no inputs to bind (--dim, --shape and --set are for models)")))
    }

    /// Parses the bindings.
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
        tell_of_shrinking();
        Ok(read_model(&self.path)?)
    }

    /// Feeds tensors to the model: those in the place of defaults become constants of the model, the others
    /// are returned; shapes that nothing else determines are bound, and values that shapes depend on.
    ///
    /// # Errors
    /// Bad input where a tensor does not fit the model or what is bound.
    pub fn fed(
        &self,
        model: &mut Model,
        tensors: Vec<(String, Tensor)>,
    ) -> anyhow::Result<(ModelArgs, Vec<(String, Tensor)>)> {
        let Given { inputs, shapes } = feed(&mut model.graph, &self.bindings.bindings()?, tensors)?;
        let mut bindings = self.bindings.clone();
        for (name, shape) in shapes {
            let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
            bindings.shape.push(format!("{name}={}", sizes.join(",")));
        }
        let file = ModelArgs { path: self.path.clone(), bindings }.with_needed(model, &inputs)?;
        Ok((file, inputs))
    }

    /// Binds the values of those given tensors that shapes depend on.
    fn with_needed(mut self, model: &Model, given: &[(String, Tensor)]) -> anyhow::Result<ModelArgs> {
        let mut rest: Vec<&(String, Tensor)> = given.iter().filter(|(_, x)| x.n_elements() <= MOST_SET).collect();
        while !rest.is_empty() {
            let special = specialise(&model.graph, &self.bindings.bindings()?);
            let wanted = special.problems.iter().flat_map(|problem| problem.needed_inputs());
            let wanted: Vec<&String> = wanted.collect();
            let n_before = rest.len();
            rest.retain(|(name, tensor)| {
                let is_wanted = wanted.contains(&name);
                self.bindings.set.extend(is_wanted.then(|| format!("{name}={}", numbers_text(tensor))));
                !is_wanted
            });
            if rest.len() == n_before {
                break;
            }
        }
        Ok(self)
    }

    /// Refuses tensors and values in the place of a model's defaults, which peers use.
    ///
    /// # Errors
    /// Bad input where there is one.
    pub fn refuse_defaults(&self, graph: &Graph, given: &[(String, Tensor)]) -> anyhow::Result<()> {
        let bindings = self.bindings.bindings()?;
        let names = given.iter().map(|(name, _)| name).chain(bindings.values.iter().map(|(name, _)| name));
        let default = |name: &&String| graph.defaults.iter().any(|&id| graph.value(id).name == **name);
        match names.clone().find(default) {
            Some(name) => Err(bad_input(format!("input {name}: peers run with the model's default (leave it out)"))),
            None => Ok(()),
        }
    }

    /// A tensor for each input: a given one, a bound one, or a random one.
    ///
    /// # Errors
    /// Bad input where something does not fit the model, or a size is not bound.
    pub fn inputs(&self, model: &Model, given: &[(String, Tensor)]) -> anyhow::Result<Vec<(Value, Tensor)>> {
        Ok(all_inputs(&model.graph, &self.bindings.bindings()?, given, SEED)?)
    }

    /// Binds the model's free dimensions, and folds constants of at most `fold_bytes` bytes.
    ///
    /// # Errors
    /// Bad input where a dimension is not bound, or the model breaks a rule.
    pub fn specialise(&self, model: &Model, fold_bytes: usize) -> anyhow::Result<Specialised> {
        let special = specialise(&model.graph, &Bindings { fold_bytes, ..self.bindings.bindings()? });
        if let Some(problem) = special.problems.iter().find(|problem| !problem.is_unsupported()) {
            // What is not supported is worth knowing all the same.
            let unsupported = special.problems.iter().filter(|problem| problem.is_unsupported());
            let unsupported: Vec<Problem> = unsupported.cloned().collect();
            if !unsupported.is_empty() {
                message(&one_line(&format!("not supported: {}", problems_text(&unsupported))));
            }
            return Err(bad_input(format!("{}: {problem}", self.name())));
        }
        Ok(special)
    }

    /// Specialises the model, and refuses unsupported operators.
    ///
    /// # Errors
    /// Bad input where something is not.
    pub fn supported(&self, model: &Model) -> anyhow::Result<Specialised> {
        let special = self.specialise(model, usize::MAX)?;
        let text = one_line(&problems_text(&special.problems));
        match special.problems.len() {
            0 => Ok(special),
            1 => Err(bad_input(format!("{}: {text}", self.name()))),
            _ => Err(bad_input(format!("{}: not supported: {text} (`check` names the nodes)", self.name()))),
        }
    }

    /// Fuses a model of supported operators for a target; with `exact`, for kernels that round no more than
    /// its operators as written.
    ///
    /// # Errors
    /// Bad input where something is not supported in a run.
    pub fn fused(&self, special: &Specialised, exact: bool, target: &Target) -> anyhow::Result<Fused> {
        let lowered = tilewright_model::lower(&special.graph, exact, target);
        lowered.map_err(|error| bad_input(format!("{}: {error}", self.name())))
    }

    /// Compiles a fused model with the best recorded kernels for a target, and reports how many are a guess.
    ///
    /// # Errors
    /// If a kernel has no code.
    pub fn compiled(
        &self,
        fused: Fused,
        exact: bool,
        machine: &MachineArgs,
        target: &Target,
        (database, records): (&Database, &Records),
        making: Making,
    ) -> anyhow::Result<Compiled> {
        let compiled = compile_known(fused, target, machine.threads, records, making);
        tell_notes(records);
        let compiled = compiled?;
        if compiled.n_guessed > 0 {
            let kernels = count(compiled.n_guessed as u64, "kernel");
            let hint = format!("run `{}`", tune_command(&self.name(), &self.options(exact), machine, database));
            message(&format!("{kernels} not tuned yet: a model of the machine chose them ({hint})"));
        }
        Ok(compiled)
    }

    /// Bindings as options of another command.
    fn options(&self, exact: bool) -> String {
        let BindingArgs { dim, shape, set } = &self.bindings;
        let mut options = String::new();
        for (option, texts) in [("--dim", dim), ("--shape", shape), ("--set", set)] {
            texts.iter().for_each(|text| options += &format!(" {option} {}", shell_quoted(text)));
        }
        if exact { options + " --exact" } else { options }
    }
}

/// The elements of a tensor, separated by commas.
fn numbers_text(tensor: &Tensor) -> String {
    let texts: Vec<String> = match tensor.dtype().is_float() {
        true => tensor.floats().iter().map(f64::to_string).collect(),
        false => tensor.integers().iter().map(i128::to_string).collect(),
    };
    texts.join(",")
}

/// A problem on one line.
pub fn problem_line(problem: &Problem) -> String {
    one_line(&problem.to_string())
}

/// Inputs of a model that files hold.
#[derive(Args, Debug)]
pub struct InputArgs {
    /// Input as NAME=FILE.npy, FILE.npy where there is one input, or FILE.npz with several; can be given
    /// again. What is not given is random, or ones where it is integers
    #[arg(long, value_name = "[NAME=]FILE")]
    input: Vec<String>,
}

impl InputArgs {
    /// Whether none is given.
    pub fn is_empty(&self) -> bool {
        self.input.is_empty()
    }

    /// The tensors, with the names of inputs of a graph.
    ///
    /// # Errors
    /// Bad input where a file has none, or a name is missing.
    pub fn given(&self, graph: &Graph) -> anyhow::Result<Vec<(String, Tensor)>> {
        let names: Vec<&str> = graph.inputs.iter().map(|&id| graph.value(id).name.as_str()).collect();
        let mut given = Vec::new();
        for text in &self.input {
            let whole = Path::new(text);
            let (name, path) = match text.rsplit_once('=') {
                Some((name, path)) if !whole.exists() => (Some(name), Path::new(path)),
                _ => (None, whole),
            };
            for (of_file, tensor) in read_tensors(path)? {
                let name = match (of_file.as_deref().or(name), &names[..]) {
                    (Some(name), _) => name,
                    (None, [name]) => name,
                    (None, _) => {
                        let names = graph.input_names().join(", ");
                        return Err(bad_input(format!("--input needs a name (give NAME=FILE; there are {names})")));
                    }
                };
                given.push((name.to_owned(), tensor));
            }
        }
        Ok(given)
    }
}
