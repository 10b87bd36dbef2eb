//! ONNX models as arguments of commands.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Args;
use tilewright::{Database, Records};
use tilewright_device::mapped::tell_of_shrinking;
use tilewright_graph::{
    Bindings, Dim as DimOfModel, DynamicPart, Graph, Model, Problem, Reason, Specialised, Tensor, Value, derived_dims,
    problems_text, specialise,
};
use tilewright_ir::Target;
use tilewright_model::npy::read_tensors;
use tilewright_model::{
    CompileError, CompileOptions, Compiled, DecoderDims, Fused, Given, MOST_NETS, OpenError, all_inputs, compile_known,
    feed, n_combinations, open_beside, open_decoder, open_items, open_or_repeat, open_sized, read_model,
};
use tilewright_runtime::OpenDimension;

use super::store::tell_notes;
use super::{KernelRounding, MachineArgs, count, tune_command};
use crate::error::{bad_input, one_line};
use crate::output::{message, shell_quoted};

/// Maximum number of elements of a given input that becomes a constant because shapes depend on it.
const MOST_SET: usize = 1000;
/// Maximum size of an open dimension.
const MOST_SIZE: i64 = 1 << 20;
/// Number of conditions by which rows are chosen up to which products process all rows, though a run could
/// take those that count alone: experts are more.
const FEW_CONDITIONS: usize = 2;
/// Seed of inputs that are not given.
const SEED: u64 = 1;

/// A model with its bindings.
#[derive(Args, Debug, Clone)]
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
    /// Size of a named dimension, such as N=1, or a range from which each run chooses a size, such as
    /// tokens=1..512 or N=32..512/32, also beside a range of the batch; beside the range of a past, the
    /// numbers of tokens taken at once, such as tokens=1,16,128; names that share a size are separated by
    /// commas, such as s7,s12=1..8; can be given again
    #[arg(long, value_name = "NAME=SIZE")]
    dim: Vec<String>,
    /// Shape of an input, such as x=1,3,224,224; can be given again
    #[arg(long, value_name = "INPUT=SIZES")]
    shape: Vec<String>,
    /// Value of an input that becomes a constant, such as sr=16000; a single number fills all elements; can
    /// be given again
    #[arg(long, value_name = "INPUT=NUMBERS")]
    set: Vec<String>,
    /// Name of the open dimension, whose size each run sets.
    #[arg(skip)]
    open: Option<String>,
    /// Name of a second open dimension, beside a past.
    #[arg(skip)]
    second: Option<String>,
    /// Sizes of the open dimensions that runs have; empty for any sizes.
    #[arg(skip)]
    only: Vec<Vec<(String, i64)>>,
    /// Whether only the part is wanted that is ahead of shapes that depend on the data.
    #[arg(skip)]
    ahead: bool,
}

/// Open dimensions of a model.
pub struct OpenDims {
    /// Dimension that most of the model depends on; the past of a language model, if it has one.
    pub dim: OpenDimension,
    /// Length of inputs beside a past, such as that of an encoder's states.
    pub second: Option<OpenDimension>,
    /// Batch of items that have the other dimensions.
    pub items: Option<OpenDimension>,
}

impl OpenDims {
    /// All but the first one.
    pub fn others(&self) -> impl Iterator<Item = &OpenDimension> {
        self.items.iter().chain(&self.second)
    }
}

impl BindingArgs {
    /// Whether nothing is bound.
    pub fn is_empty(&self) -> bool {
        self.dim.is_empty() && self.shape.is_empty() && self.set.is_empty()
    }

    /// Refuses bindings of a workload that is not a model.
    ///
    /// # Errors
    /// Bad input if anything is bound.
    pub fn refuse(&self, workload: &str) -> anyhow::Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        Err(bad_input(format!("{workload} has no inputs to bind (--dim, --shape and --set are for models)")))
    }

    /// Parses the bindings.
    ///
    /// # Errors
    /// Bad input if a text is not a binding.
    pub fn bindings(&self) -> anyhow::Result<Bindings> {
        let (open, second) = (self.open.clone(), self.second.clone());
        let mut bindings = Bindings { open, second, most_conditions: FEW_CONDITIONS, ..Bindings::default() };
        let bound = self.dim.iter().filter(|text| !is_range(text) && !is_list(text));
        bound.into_iter().try_for_each(|text| bindings.bind_dim(&by_first_name(text))).map_err(bad_input)?;
        self.shape.iter().try_for_each(|text| bindings.bind_shape(text)).map_err(bad_input)?;
        self.set.iter().try_for_each(|text| bindings.bind_value(text)).map_err(bad_input)?;
        Ok(bindings)
    }

    /// Open dimensions, as given: their sizes are set by each run.
    ///
    /// # Errors
    /// Bad input if a range is malformed.
    fn ranges(&self) -> anyhow::Result<Vec<OpenDimension>> {
        self.dim.iter().filter(|text| is_range(text)).map(|text| range_of(text)).collect()
    }

    /// Open dimensions, if any.
    ///
    /// # Errors
    /// As [`BindingArgs::ranges`], and bad input if there are too many.
    pub fn open_dims(&self, graph: &Graph) -> anyhow::Result<Option<OpenDims>> {
        let ranges = self.ranges()?;
        let is_batch = |batch: &OpenDimension| {
            let mut others = ranges.iter().filter(|other| *other != batch);
            ranges.len() > 1 && others.all(|other| is_batch_of(graph, batch, other))
        };
        let items = ranges.iter().find(|dim| is_batch(dim));
        let rest: Vec<&OpenDimension> = ranges.iter().filter(|dim| Some(*dim) != items).collect();
        let (dim, second, items) = match (&rest[..], past_of(graph, &rest)) {
            ([], _) => return Ok(None),
            ([dim], _) => (*dim, None, items),
            ([first, second], Some(past)) if past == *first => (*first, Some(*second), items),
            ([first, second], Some(_)) => (*second, Some(*first), items),
            ([first, second], None) if items.is_none() => (*second, None, Some(*first)),
            _ => {
                let texts: Vec<&str> = self.dim.iter().filter(|text| is_range(text)).map(String::as_str).collect();
                let (text, known) = texts.split_last().expect("there are ranges");
                let known = known.join(" and ");
                return Err(bad_input(format!("--dim {text}: {known} are open already (give a number)")));
            }
        };
        Ok(Some(OpenDims { dim: dim.clone(), second: second.cloned(), items: items.cloned() }))
    }

    /// Renames dimensions that a binding joins to the name of the first one.
    ///
    /// # Errors
    /// Bad input if no input has a dimension of such a name.
    fn join_names(&self, graph: &mut Graph) -> anyhow::Result<()> {
        for text in &self.dim {
            let all: Vec<&str> = names(text).collect();
            let [first, others @ ..] = &all[..] else { continue };
            for other in others {
                if !graph.rename_dim(other, first) {
                    return Err(bad_input(one_line(&format!("--dim {text}: no input has a dimension `{other}`"))));
                }
            }
        }
        Ok(())
    }

    /// Renames unbound dimensions to a bound one, if the model accepts only its size for them: exporters give
    /// several names to dimensions that are always equal. Returns the pairs.
    ///
    /// # Errors
    /// Bad input if a binding is malformed.
    fn join_equal(&self, graph: &mut Graph) -> anyhow::Result<Vec<(String, String)>> {
        let mut found = Vec::new();
        let bound: Vec<(String, usize)> = self.dim.iter().filter_map(|text| probe_of(text)).collect();
        let open = self.ranges()?.first().map(|dim| dim.name.clone());
        let derived = derived_dims(graph);
        loop {
            let named = graph.inputs.iter().filter(|&&id| !self.has_shape(&graph.value(id).name));
            let dims = named.filter_map(|&id| graph.value(id).declared.as_ref()?.dims.as_ref()).flatten();
            let name = |dim: &DimOfModel| if let DimOfModel::Named(name) = dim { Some(name.clone()) } else { None };
            let free = |name: &String| !bound.iter().chain(&derived).any(|(known, _)| known == name);
            let free: BTreeSet<String> = dims.filter_map(name).filter(free).collect();
            let is_model = |name: &str, size: usize| {
                let dims = bound.iter().cloned().chain([(name.to_owned(), size)]).collect();
                let bindings =
                    Bindings { dims, open: open.clone(), most_conditions: usize::MAX, ..Bindings::default() };
                let problems = specialise(graph, &bindings).problems;
                problems.iter().all(|problem| problem.is_unsupported() || matches!(problem.reason, Reason::Unbound(_)))
            };
            let is_equal = |name: &String, size: usize| is_model(name, size) && !is_model(name, size + 1);
            let pairs = free.iter().flat_map(|name| bound.iter().map(move |(known, size)| (name, known, *size)));
            let mut equal = pairs.filter(|(name, _, size)| is_equal(name, *size));
            let Some((name, known)) = equal.next().map(|(name, known, _)| (name.clone(), known.clone())) else {
                return Ok(found);
            };
            graph.rename_dim(&name, &known);
            found.push((name, known));
        }
    }

    /// Hint that an unbound name may be another name of a bound dimension.
    fn joined_hint(&self, problem: &Problem) -> Option<String> {
        let Reason::Unbound(unbound) = &problem.reason else { return None };
        let ((missing, _), text) = (unbound.dims().first().copied()?, self.dim.first()?);
        let (names, _) = text.rsplit_once('=')?;
        Some(format!("; if it is one size with {names}, name both: --dim {names},{missing}=…"))
    }

    /// Whether an input's shape is bound as a whole.
    fn has_shape(&self, input: &str) -> bool {
        self.shape.iter().any(|text| text.rsplit_once('=').is_some_and(|(name, _)| name == input))
    }

    /// Dimension of tokens, with the numbers of tokens that a run can take at once, if there are several.
    ///
    /// # Errors
    /// Bad input if there are several such dimensions, or the list is malformed.
    pub fn pieces(&self) -> anyhow::Result<Option<(String, Vec<i64>)>> {
        let mut lists = self.dim.iter().filter(|text| is_list(text));
        let (Some(text), other) = (lists.next(), lists.next()) else { return Ok(None) };
        let refuse = |why: &str| Err(bad_input(format!("--dim {text}: {why}")));
        if other.is_some() {
            return refuse("another dimension has several sizes already (give a number)");
        }
        let ranges = self.ranges()?;
        if ranges.is_empty() {
            return refuse("several sizes go with the range of a past (give --dim PAST=0..MOST, or a number)");
        }
        let (_, list) = text.rsplit_once('=').expect("a list is behind a name");
        let name = names(text).next().expect("a list is behind a name");
        let numbers: Result<Vec<i64>, _> = list.split(',').map(|n| n.trim().parse::<i64>()).collect();
        match numbers {
            Ok(numbers) if numbers.iter().all(|n| (1..=MOST_SIZE).contains(n)) => Ok(Some((name.to_owned(), numbers))),
            _ => refuse("no list of sizes (give whole numbers, such as 1,16,128)"),
        }
    }

    /// Open dimension of runs of this many tokens, if there are pieces, limited to the room in states.
    ///
    /// # Errors
    /// As [`BindingArgs::pieces`], and bad input if states have no room for the tokens.
    pub fn dim_behind(&self, dim: OpenDimension, tokens: Option<(&str, i64)>) -> anyhow::Result<OpenDimension> {
        let (Some((name, n)), Some((_, numbers))) = (tokens, self.pieces()?) else { return Ok(dim) };
        let room = dim.most + numbers.first().copied().unwrap_or(1);
        if n > room - dim.least {
            let why = format!("{name}={n} is more than states have room for, {room} (give a larger {})", dim.name);
            return Err(bad_input(one_line(&why)));
        }
        let most = dim.least + (room - n - dim.least) / dim.step * dim.step;
        Ok(OpenDimension { most, ..dim })
    }

    /// Bindings of a piece of this many tokens; all bindings for a model without pieces.
    pub fn with_tokens(&self, tokens: Option<(&str, i64)>) -> BindingArgs {
        let Some((name, n)) = tokens else { return self.clone() };
        let bound = |text: &String| if is_list(text) { format!("{name}={n}") } else { text.clone() };
        BindingArgs { dim: self.dim.iter().map(bound).collect(), ..self.clone() }
    }

    /// Bindings at a size of an open dimension, which stays marked as the open one.
    pub fn at(&self, dim: &OpenDimension, size: i64) -> BindingArgs {
        let is_it = |text: &String| !is_list(text) && names(text).next() == Some(&dim.name);
        let bound = |text: &String| if is_it(text) { format!("{}={size}", dim.name) } else { text.clone() };
        let open = Some(dim.name.clone());
        BindingArgs { dim: self.dim.iter().map(bound).collect(), open, ..self.clone() }
    }
}

/// Batches of more than one item that are bound to a number.
fn fixed_batches(bindings: &Bindings, graph: &Graph) -> Vec<OpenDimension> {
    let inputs = || graph.inputs.iter().filter_map(|&id| graph.value(id).declared.as_ref()?.dims.as_deref()?.first());
    let is_first = |name: &str| inputs().any(|own| matches!(own, DimOfModel::Named(own) if own == name));
    let dims = bindings.dims.iter().filter(|(name, size)| *size > 1 && is_first(name));
    dims.map(|(name, n)| OpenDimension { name: name.clone(), least: *n as i64, most: *n as i64, step: 1 }).collect()
}

/// Whether one dimension is a batch, the first of inputs, of items of which the other one is a dimension.
fn is_batch_of(graph: &Graph, batch: &OpenDimension, other: &OpenDimension) -> bool {
    let inputs = || graph.inputs.iter().filter_map(|&id| graph.value(id).declared.as_ref()?.dims.as_deref());
    let is = |own: &DimOfModel, dim: &OpenDimension| matches!(own, DimOfModel::Named(name) if *name == dim.name);
    let is_first = |dims: &[DimOfModel]| dims.iter().skip(1).all(|own| !is(own, batch));
    inputs().all(|dims| is_first(dims) && dims.first().is_none_or(|own| !is(own, other)))
}

/// Whether a dimension is the length of a cache, the third dimension of inputs.
fn is_past(graph: &Graph, dim: &OpenDimension) -> bool {
    let inputs = graph.inputs.iter().filter_map(|&id| graph.value(id).declared.as_ref()?.dims.as_deref());
    inputs.into_iter().any(|dims| matches!(dims, [_, _, DimOfModel::Named(name), _] if *name == dim.name))
}

/// Dimension that is the length of a cache, where another one is a length of other inputs beside it: the one
/// that begins at 0, or the only one that is a dimension of caches alone.
fn past_of<'d>(graph: &Graph, dims: &[&'d OpenDimension]) -> Option<&'d OpenDimension> {
    let inputs = || graph.inputs.iter().filter_map(|&id| graph.value(id).declared.as_ref()?.dims.as_deref());
    let has = |dims: &[DimOfModel], dim: &OpenDimension| {
        dims.iter().any(|own| matches!(own, DimOfModel::Named(name) if *name == dim.name))
    };
    let only = |fits: &dyn Fn(&OpenDimension) -> bool| {
        let mut found = dims.iter().copied().filter(|dim| is_past(graph, dim) && fits(dim));
        found.next().filter(|_| found.next().is_none())
    };
    let is_of_caches = |dim: &OpenDimension| inputs().all(|dims| dims.len() == 4 || !has(dims, dim));
    // Height and width are dimensions of the same input.
    let are_apart = inputs().all(|own| dims.iter().filter(|dim| has(own, dim)).count() <= 1);
    are_apart.then_some(())?;
    only(&|dim| dim.least == 0).or_else(|| only(&is_of_caches))
}

/// Names of the dimensions that a binding joins.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.rsplit_once('=').map_or("", |(names, _)| names).split(',').map(str::trim)
}

/// Binding with only the first of its names.
fn by_first_name(text: &str) -> String {
    match (names(text).next(), text.rsplit_once('=')) {
        (Some(name), Some((_, sizes))) => format!("{name}={sizes}"),
        _ => text.to_owned(),
    }
}

/// Bound name, and a size at which another dimension cannot be equal by chance: more than 1, which broadcasts
/// to any size.
fn probe_of(text: &str) -> Option<(String, usize)> {
    const PROBE: usize = 3;
    let (_, sizes) = text.rsplit_once('=')?;
    let size = match range_of(text) {
        Ok(dim) => dim.spread(3).get(1).copied().unwrap_or(dim.most) as usize,
        Err(_) => sizes.split(',').next_back()?.trim().parse().ok()?,
    };
    Some((names(text).next()?.to_owned(), if size > 1 { size } else { PROBE }))
}

/// Parses a dimension with a range.
fn range_of(text: &str) -> anyhow::Result<OpenDimension> {
    let (_, range) = text.rsplit_once('=').expect("a size is behind a name");
    let name = names(text).next().expect("a size is behind a name");
    let (least, rest) = range.split_once("..").unwrap_or((range, ""));
    let (most, step) = rest.split_once('/').unwrap_or((rest, "1"));
    let numbers = [least, most, step].map(|n| n.trim().parse::<i64>().ok().filter(|n| *n >= 0));
    let dim = |least: i64, most: i64, step: i64| OpenDimension { name: name.to_owned(), least, most, step };
    let dim = match numbers {
        [Some(least), Some(most), Some(step)] => Some(dim(least, most, step)),
        _ => None,
    };
    let fits = |dim: &OpenDimension| dim.step > 0 && dim.least < dim.most && dim.has(dim.most) && dim.most <= MOST_SIZE;
    let why = || bad_input(format!("--dim {text}: `{range}` is no range (give LEAST..MOST or LEAST..MOST/STEP)"));
    dim.filter(fits).ok_or_else(why)
}

/// Whether a binding is a range of sizes.
fn is_range(text: &str) -> bool {
    text.rsplit_once('=').is_some_and(|(name, sizes)| !name.is_empty() && sizes.contains(".."))
}

/// Whether a binding is a list of sizes.
fn is_list(text: &str) -> bool {
    text.rsplit_once('=').is_some_and(|(name, sizes)| !name.is_empty() && sizes.contains(','))
}

impl ModelArgs {
    /// Makes the arguments of a model that another argument names.
    pub fn new(path: &str, bindings: &BindingArgs) -> ModelArgs {
        ModelArgs { path: PathBuf::from(path), bindings: bindings.clone() }
    }

    /// Whether an argument names a model rather than a workload.
    pub fn is_model(argument: &str) -> bool {
        argument.to_ascii_lowercase().ends_with(".onnx")
    }

    /// Name of the file.
    pub fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Reads the model and the files with its weights.
    ///
    /// # Errors
    /// Bad input if it cannot be read or is not a model.
    pub fn read(&self) -> anyhow::Result<Model> {
        tell_of_shrinking();
        let mut model = read_model(&self.path)?;
        self.bindings.join_names(&mut model.graph)?;
        for (name, known) in self.bindings.join_equal(&mut model.graph)? {
            message(&one_line(&format!("{name} is {known}: the model has no code where they differ")));
        }
        Ok(model)
    }

    /// Feeds tensors to the model: those that replace defaults become constants of the model, the others are
    /// returned; shapes that are not determined otherwise are bound, and so are values that shapes depend on.
    ///
    /// # Errors
    /// Bad input if a tensor does not fit the model or the bindings.
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

    /// Binds the values of given tensors that shapes depend on.
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

    /// Refuses tensors and values that replace a model's defaults, which peers use.
    ///
    /// # Errors
    /// Bad input if there are any.
    pub fn refuse_defaults(&self, graph: &Graph, given: &[(String, Tensor)]) -> anyhow::Result<()> {
        let bindings = self.bindings.bindings()?;
        let names = given.iter().map(|(name, _)| name).chain(bindings.values.iter().map(|(name, _)| name));
        let default = |name: &&String| graph.defaults.iter().any(|&id| graph.value(id).name == **name);
        match names.clone().find(default) {
            Some(name) => Err(bad_input(format!("input {name}: peers run with the model's default (leave it out)"))),
            None => Ok(()),
        }
    }

    /// Tensor for each input: a given one, a bound one, or a random one.
    ///
    /// # Errors
    /// Bad input if a tensor does not fit the model, or a size is not bound.
    pub fn inputs(&self, model: &Model, given: &[(String, Tensor)]) -> anyhow::Result<Vec<(Value, Tensor)>> {
        Ok(all_inputs(&model.graph, &self.bindings.bindings()?, given, SEED)?)
    }

    /// Binds the model's free dimensions, and folds constants of at most `fold_bytes` bytes.
    ///
    /// # Errors
    /// Bad input if a dimension is not bound, or the model is invalid.
    pub fn specialise(&self, model: &Model, fold_bytes: usize) -> anyhow::Result<Specialised> {
        self.specialise_by(model, &Bindings { fold_bytes, ..self.bindings.bindings()? })
    }

    fn specialise_by(&self, model: &Model, bindings: &Bindings) -> anyhow::Result<Specialised> {
        let special = specialise(&model.graph, bindings);
        if let Some(problem) = special.problems.iter().find(|problem| !problem.is_unsupported()) {
            // Unsupported operators are reported nevertheless.
            let unsupported = special.problems.iter().filter(|problem| problem.is_unsupported());
            let unsupported: Vec<Problem> = unsupported.cloned().collect();
            if !unsupported.is_empty() {
                message(&one_line(&format!("not supported: {}", problems_text(&unsupported))));
            }
            let hint = self.bindings.joined_hint(problem).map_or(String::new(), |hint| one_line(&hint));
            return Err(bad_input(format!("{}: {problem}{hint}", self.name())));
        }
        Ok(special)
    }

    /// Specialises the model, and refuses unsupported operators.
    ///
    /// # Errors
    /// Bad input if an operator is not supported.
    pub fn supported(&self, model: &Model) -> anyhow::Result<Specialised> {
        let mut bindings = Bindings { fold_bytes: usize::MAX, ..self.bindings.bindings()? };
        if !self.bindings.ahead {
            bindings.most_conditions = usize::MAX;
        }
        self.check_supported(self.specialise_by(model, &bindings)?)
    }

    /// Refuses unsupported operators.
    fn check_supported(&self, special: Specialised) -> anyhow::Result<Specialised> {
        let mut text = one_line(&problems_text(&special.problems));
        if let Some(part) = special.dynamic.as_ref().filter(|_| !self.bindings.ahead) {
            let read: Vec<&str> = part.inputs().collect();
            let how = "`run` and `bench` take it at fixed sizes, `compile --ahead` the part ahead of it";
            text += &one_line(&format!("; what depends on it reads {}; {how}", read.join(", ")));
        }
        if self.bindings.ahead {
            let whole = || bad_input(format!("{}: --ahead: no shape depends on the data (leave it out)", self.name()));
            return match special.dynamic {
                Some(part) => Ok(Specialised { graph: part.ahead, problems: Vec::new(), dynamic: None }),
                None if special.problems.is_empty() => Err(whole()),
                None => Err(bad_input(format!("{}: {text}", self.name()))),
            };
        }
        match special.problems.len() {
            0 => Ok(special),
            1 => Err(bad_input(format!("{}: {text}", self.name()))),
            _ => Err(bad_input(format!("{}: not supported: {text} (`check` names the nodes)", self.name()))),
        }
    }

    /// Fuses a model of supported operators for a target and this rounding of kernels.
    ///
    /// # Errors
    /// Bad input if something is not supported in a run.
    pub fn fused(
        &self,
        graph: &Graph,
        rounding: KernelRounding,
        (target, threads): (&Target, usize),
    ) -> anyhow::Result<Fused> {
        if rounding.bf16 && !target.prefers_dot2() {
            let why = "this CPU has no products of bf16 that are faster than those of f32";
            message(&format!("--bf16 changes nothing: {why}"));
        }
        let lowered = tilewright_model::lower(graph, rounding.exact, target, threads);
        let mut fused = lowered.map_err(|error| bad_input(format!("{}: {error}", self.name())))?;
        if rounding.bf16 {
            fused.round_factors(target);
        }
        Ok(fused)
    }

    /// Open dimensions, if any.
    ///
    /// # Errors
    /// As [`BindingArgs::open_dims`].
    pub fn open_dims(&self, graph: &Graph) -> anyhow::Result<Option<OpenDims>> {
        self.bindings.open_dims(graph)
    }

    /// Dimension of tokens, if any, with the numbers that a run can take at once.
    ///
    /// # Errors
    /// As [`BindingArgs::pieces`].
    pub fn pieces(&self) -> anyhow::Result<Option<(String, Vec<i64>)>> {
        self.bindings.pieces()
    }

    /// Open dimension of runs of this many tokens; see [`BindingArgs::dim_behind`].
    ///
    /// # Errors
    /// As [`BindingArgs::dim_behind`].
    pub fn dim_behind(&self, dim: OpenDimension, tokens: Option<(&str, i64)>) -> anyhow::Result<OpenDimension> {
        self.bindings.dim_behind(dim, tokens)
    }

    /// Bindings of open dimensions, as given.
    pub fn open_texts(&self) -> Vec<&str> {
        let all = self.bindings.dim.iter().map(String::as_str);
        all.filter(|text| is_range(text) || is_list(text)).collect()
    }

    /// Model at the largest open sizes: the most tokens at once, after the longest past.
    ///
    /// # Errors
    /// As [`BindingArgs::pieces`], [`BindingArgs::open_dims`] and [`BindingArgs::dim_behind`].
    pub fn largest(&self, graph: &Graph) -> anyhow::Result<ModelArgs> {
        let pieces = self.pieces()?;
        let tokens = pieces.as_ref().and_then(|(name, numbers)| Some((name.as_str(), *numbers.last()?)));
        let whole = self.with_tokens(tokens);
        let Some(open) = self.open_dims(graph)? else { return Ok(whole) };
        let dim = self.dim_behind(open.dim.clone(), tokens)?;
        Ok(open.others().fold(whole, |whole, other| whole.at(other, other.most)).at(&dim, dim.most))
    }

    /// Part of the model ahead of nodes whose shapes depend on the data.
    pub fn ahead(self) -> ModelArgs {
        ModelArgs { bindings: BindingArgs { ahead: true, ..self.bindings }, ..self }
    }

    /// Model with this many tokens per run.
    pub fn with_tokens(&self, tokens: Option<(&str, i64)>) -> ModelArgs {
        ModelArgs { path: self.path.clone(), bindings: self.bindings.with_tokens(tokens) }
    }

    /// Model for runs of only these sizes of its open dimensions.
    pub fn only_at(&self, sizes: &[Vec<(OpenDimension, i64)>]) -> ModelArgs {
        let named = |own: &Vec<(OpenDimension, i64)>| own.iter().map(|(dim, size)| (dim.name.clone(), *size)).collect();
        let bindings = BindingArgs { only: sizes.iter().map(named).collect(), ..self.bindings.clone() };
        ModelArgs { path: self.path.clone(), bindings }
    }

    /// Model at a size of an open dimension.
    pub fn at(&self, dim: &OpenDimension, size: i64) -> ModelArgs {
        ModelArgs { path: self.path.clone(), bindings: self.bindings.at(dim, size) }
    }

    /// Fuses a model as [`ModelArgs::lowered`] does, as far as its shapes do not depend on the data; the part
    /// whose shapes do is returned separately.
    ///
    /// # Errors
    /// As [`ModelArgs::lowered`].
    pub fn divided(
        &self,
        model: &Model,
        rounding: KernelRounding,
        place: (&Target, usize),
    ) -> anyhow::Result<(Fused, Option<DynamicPart>)> {
        if self.open_dims(&model.graph)?.is_some() {
            return Ok((self.lowered(model, rounding, place)?, None));
        }
        let mut special = self.specialise(model, usize::MAX)?;
        if let Some(part) = special.dynamic.take() {
            return Ok((self.fused(&part.ahead, rounding, place)?, Some(part)));
        }
        Ok((self.fused(&self.check_supported(special)?.graph, rounding, place)?, None))
    }

    /// Fuses a model as [`ModelArgs::fused`] does, with dimensions open if they are bound to ranges. If no
    /// net serves all sizes, and there are few, each has its own net.
    ///
    /// # Errors
    /// Bad input if something is not supported in a run, or a dimension cannot be open.
    pub fn lowered(&self, model: &Model, rounding: KernelRounding, place: (&Target, usize)) -> anyhow::Result<Fused> {
        let Some(open) = self.open_dims(&model.graph)? else {
            return self.fused(&self.supported(model)?.graph, rounding, place);
        };
        let opened = self.opened(model, &open, rounding, place);
        if self.pieces()?.is_some() || open.second.is_some() && opened.is_ok() {
            return opened;
        }
        let dims: Vec<OpenDimension> = open.others().chain([&open.dim]).cloned().collect();
        let n = n_combinations(&dims);
        let refused = match opened {
            Ok(made) if !(made.has_open_rows() || made.has_open_loops()) || n > MOST_NETS => return Ok(made),
            // Rows of any number have fewer algorithms than a number of them, and loops take longer than
            // steps.
            Ok(made) => return Ok(self.sized(model, &dims, None, rounding, place).unwrap_or(made)),
            Err(refused) => refused,
        };
        if let [dim] = &dims[..] {
            // Items of a batch of so many are apart where a batch of any number has them so.
            let mut batches = fixed_batches(&self.bindings.bindings()?, &model.graph).into_iter();
            let made = batches.find_map(|items| {
                let open = OpenDims { dim: dim.clone(), second: None, items: Some(items) };
                self.opened(model, &open, rounding, place).ok()
            });
            if let Some(made) = made {
                return Ok(made);
            }
        }
        if n <= MOST_NETS {
            return self.sized(model, &dims, None, rounding, place).map_err(|_| refused);
        }
        let few = |opened: &usize| n / n_combinations(&dims[*opened..=*opened]) <= MOST_NETS;
        let mut refused = refused;
        for opened in (0..dims.len()).filter(few) {
            match self.sized(model, &dims, Some(opened), rounding, place) {
                Ok(made) => return Ok(made),
                // Nets of other sizes have no states in common.
                Err(error) if dims.len() > 1 && !dims.iter().any(|dim| is_past(&model.graph, dim)) => refused = error,
                Err(_) => {}
            }
        }
        // Only a past has no elements at first, and nets of several sizes have no states in common.
        if dims.iter().any(|dim| dim.least == 0) {
            return Err(refused);
        }
        let hint = "where there are as few, each gets code of its own";
        Err(bad_input(format!("{refused}; {n} sizes are more than {MOST_NETS}: {hint}")))
    }

    /// Fuses a model with a net for each combination of sizes; with `opened`, for each combination of the
    /// other dimensions' sizes, with this dimension open.
    fn sized(
        &self,
        model: &Model,
        dims: &[OpenDimension],
        opened: Option<usize>,
        rounding: KernelRounding,
        place: (&Target, usize),
    ) -> anyhow::Result<Fused> {
        let lower = |sizes: &[i64]| {
            let file = dims.iter().zip(sizes).fold(self.clone(), |file, (dim, size)| file.at(dim, *size));
            let open = opened.map(|opened| dims[opened].name.clone());
            let file = ModelArgs { bindings: BindingArgs { open, ..file.bindings }, ..file };
            file.fused(&file.supported(model)?.graph, rounding, place)
        };
        let only = &self.bindings.only;
        let is_of = |own: &[(String, i64)], sizes: &[i64]| {
            let mut all = dims.iter().zip(sizes);
            all.all(|(dim, size)| own.iter().any(|(name, wanted)| (name, wanted) == (&dim.name, size)))
        };
        let wanted = |sizes: &[i64]| only.is_empty() || only.iter().any(|own| is_of(own, sizes));
        let made = match opened {
            None => open_sized::<anyhow::Error>(dims, wanted, lower)?,
            Some(opened) => open_beside::<anyhow::Error>(dims, opened, wanted, lower)?,
        };
        let names = dims.iter().enumerate().filter(|(at, _)| Some(*at) != opened).map(|(_, dim)| dim.name.as_str());
        let (n, names) = (1 + made.pieces.len(), names.collect::<Vec<_>>());
        if n > 1 {
            message(&one_line(&format!("each of {n} sizes of {} gets code of its own", names.join(" and "))));
        }
        Ok(made)
    }

    /// Fuses a model with a net for all sizes of its open dimensions.
    fn opened(
        &self,
        model: &Model,
        open: &OpenDims,
        rounding: KernelRounding,
        place: (&Target, usize),
    ) -> anyhow::Result<Fused> {
        let (dim, items) = (&open.dim, open.items.as_ref());
        let lower = |file: ModelArgs| file.fused(&file.supported(model)?.graph, rounding, place);
        // A failure at only some sizes is an error of the range.
        let sized = |size: i64| {
            lower(self.at(dim, size)).map_err(|error| {
                if size == dim.most || lower(self.at(dim, dim.most)).is_err() {
                    return error;
                }
                let hint = format!("give a range of sizes that the model takes, such as {}=32..512/32", dim.name);
                bad_input(format!("{error}, at {}={size} ({hint})", dim.name))
            })
        };
        let rows = self.pieces()?;
        let is_decoder = rows.is_some() || open.second.is_some() || items.is_some() && is_past(&model.graph, dim);
        let made = match items {
            Some(items) if !is_batch_of(&model.graph, items, dim) => Err(bad_input(one_line(&format!(
                "{} and {} cannot both be open for any size: one would have to be a batch, the first dimension of \
                 inputs, and the other one behind it, or a past (give one a number)",
                items.name, dim.name,
            )))),
            // Each item of a cache has its own past.
            _ if is_decoder => {
                let rows = rows.as_ref().map(|(name, numbers)| (name.as_str(), &numbers[..]));
                let dims = DecoderDims { past: dim, second: open.second.as_ref(), items, rows };
                open_decoder::<anyhow::Error>(dims, |sizes| {
                    let tokens = rows.zip(sizes.rows).map(|((name, _), n)| (name, n));
                    let others = open.items.iter().zip(sizes.items).chain(open.second.iter().zip(sizes.second));
                    let file = others.fold(self.with_tokens(tokens), |file, (other, size)| file.at(other, size));
                    let mut file = file.at(dim, sizes.past);
                    file.bindings.second = open.second.as_ref().map(|second| second.name.clone());
                    lower(file)
                })
            }
            None => open_or_repeat::<anyhow::Error>(dim, sized),
            Some(items) => open_items::<anyhow::Error>(items, dim, |[n, size], varying| {
                let file = self.at(items, n).at(dim, size);
                lower(ModelArgs { bindings: BindingArgs { open: Some(varying.name.clone()), ..file.bindings }, ..file })
            }),
        };
        made.map_err(|error| match error.downcast::<OpenError>() {
            Ok(error) => bad_input(format!("{}: {}", self.name(), one_line(&error.to_string()))),
            Err(other) => other,
        })
    }

    /// Size of the open dimension in given tensors of a model's inputs, if any.
    ///
    /// # Errors
    /// Bad input if they have different sizes, or a size outside the range.
    pub fn size_of(
        &self,
        dim: &OpenDimension,
        graph: &Graph,
        given: &[(String, Tensor)],
    ) -> anyhow::Result<Option<i64>> {
        let mut found: Option<i64> = None;
        for (name, tensor) in given {
            let value = graph.inputs.iter().map(|&id| graph.value(id)).find(|value| value.name == *name);
            let dims = value.and_then(|value| value.declared.as_ref()?.dims.as_ref());
            for (own, size) in dims.into_iter().flatten().zip(tensor.shape()) {
                let size = *size as i64;
                if !matches!(own, DimOfModel::Named(own) if *own == dim.name) || found == Some(size) {
                    continue;
                }
                if found.is_some() || !dim.has(size) {
                    let OpenDimension { name: of, least, most, step } = dim;
                    let why = format!("input {name} has {of}={size}, and runs have one of {least}..{most}/{step}");
                    return Err(bad_input(one_line(&why)));
                }
                found = Some(size);
            }
        }
        Ok(found)
    }

    /// Compiles a fused model with the best recorded kernels for a target, and reports how many are guesses.
    ///
    /// # Errors
    /// If code cannot be generated for a kernel.
    pub fn compiled(
        &self,
        fused: Fused,
        rounding: KernelRounding,
        machine: &MachineArgs,
        target: &Target,
        known: KnownKernels,
        making: CompileOptions,
    ) -> anyhow::Result<Compiled> {
        let compiled = compile_known(fused, target, machine.threads, known.records, making);
        tell_notes(known.records);
        let compiled = compiled.map_err(|error| match error {
            CompileError::Open(_) | CompileError::OpenOnGpu { .. } => {
                bad_input(format!("{}: {}", self.name(), one_line(&error.to_string())))
            }
            error => error.into(),
        })?;
        if compiled.n_guessed > 0 {
            let kernels = count(compiled.n_guessed as u64, "kernel");
            let hint =
                format!("run `{}`", tune_command(&self.name(), &self.options(rounding), machine, known.database));
            message(&format!("{kernels} not tuned yet: a model of the machine chose them ({hint})"));
        }
        Ok(compiled)
    }

    /// Bindings as options of another command.
    fn options(&self, rounding: KernelRounding) -> String {
        let BindingArgs { dim, shape, set, .. } = &self.bindings;
        let mut options = String::new();
        for (option, texts) in [("--dim", dim), ("--shape", shape), ("--set", set)] {
            texts.iter().for_each(|text| options += &format!(" {option} {}", shell_quoted(text)));
        }
        options + rounding.options()
    }
}

/// Formats the elements of a tensor, separated by commas.
fn numbers_text(tensor: &Tensor) -> String {
    let texts: Vec<String> = match tensor.dtype().is_float() {
        true => tensor.floats().iter().map(f64::to_string).collect(),
        false => tensor.integers().iter().map(i128::to_string).collect(),
    };
    texts.join(",")
}

/// Formats a problem on one line.
pub fn problem_line(problem: &Problem) -> String {
    one_line(&problem.to_string())
}

/// Recorded kernels, with their database.
#[derive(Clone, Copy)]
pub struct KnownKernels<'a> {
    /// The database.
    pub database: &'a Database,
    /// Records of the database.
    pub records: &'a Records,
}

/// Inputs of a model that files hold.
#[derive(Args, Debug)]
pub struct InputArgs {
    /// Input as NAME=FILE.npy, FILE.npy for a single input, or FILE.npz for several; can be given again.
    /// Other inputs are random, or ones if they are integers
    #[arg(long, value_name = "[NAME=]FILE")]
    input: Vec<String>,
}

impl InputArgs {
    /// Whether no input is given.
    pub fn is_empty(&self) -> bool {
        self.input.is_empty()
    }

    /// Reads the tensors, with the names of inputs of a graph.
    ///
    /// # Errors
    /// Bad input if a file has no tensor, or a name is missing.
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
