//! `check`: operators, parameters and inputs of an ONNX model, and the operators that are not supported.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::{Value as Json, json};
use tilewright_graph::{
    Bindings, Graph, Model, ModelSummary, Refused, Specialised, TensorType, ValueId, count_operators, refused,
    summarise,
};
use tilewright_model::{Applied, LayoutPurpose, Outline, Trace, WithoutCode, count_halves, laid_out};

use super::model::{ModelArgs, problem_line};
use super::{DatabaseArgs, KernelRounding, MachineArgs, count};
use crate::error::one_line;
use crate::output::{digits, grouped, table, write_result};

/// Arguments of `check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    machine: MachineArgs,
    #[command(flatten)]
    records: DatabaseArgs,
    /// Show which rewriting rules changed the model, rule by rule
    #[arg(long)]
    trace: bool,
}

/// Number of a model's distinct kernels that are tuned.
struct TunedKernels {
    n_tuned: usize,
    n_all: usize,
    database: String,
}

/// Shows a model. The exit code is 1 if something in it is not supported.
///
/// # Errors
/// Bad input if the file is not a model, or a dimension is not bound.
pub fn run(args: &CheckArgs, as_json: bool) -> anyhow::Result<()> {
    let model = args.model.read()?;
    let special = args.model.largest(&model.graph)?.specialise(&model, Bindings::default().fold_bytes)?;
    let checked = CheckedModel::new(args, &model, &special)?;
    write_result(as_json, &checked.json(), &checked.text())?;
    if checked.problems.is_empty() {
        return Ok(());
    }
    let n = count(checked.problems.len() as u64, "thing");
    let kinds: Vec<String> = checked.kinds.iter().map(Refused::to_string).collect();
    let listed = if kinds.is_empty() { "see above".to_owned() } else { one_line(&kinds.join(", ")) };
    Err(anyhow::anyhow!("{n} of {} not supported: {listed}", args.model.name()))
}

/// Facts about a model.
struct CheckedModel<'a> {
    args: &'a CheckArgs,
    model: &'a Model,
    special: &'a Specialised,
    summary: ModelSummary,
    operators: BTreeMap<String, usize>,
    problems: Vec<String>,
    kinds: Vec<Refused>,
    optional: Vec<(String, TensorType)>,
    /// Texts that the indices in outputs refer to.
    labels: Vec<(&'a str, &'a [String])>,
    /// Number of 16-bit results that are kept in f32.
    n_halves: usize,
    outline: Option<Outline>,
    tuned: Option<TunedKernels>,
}

impl<'a> CheckedModel<'a> {
    fn new(args: &'a CheckArgs, model: &'a Model, special: &'a Specialised) -> anyhow::Result<CheckedModel<'a>> {
        let mut operators = BTreeMap::new();
        count_operators(&model.graph, &mut operators);
        let is_supported = special.problems.is_empty();
        let (outline, tuned) = if is_supported { outline(args, model)? } else { (None, None) };
        let outputs = special.graph.outputs.iter().map(|&id| special.graph.value(id));
        Ok(CheckedModel {
            args,
            model,
            special,
            summary: summarise(&special.graph),
            operators,
            problems: special.problems.iter().map(problem_line).collect(),
            kinds: refused(&special.problems),
            optional: defaults(&model.graph),
            labels: outputs.filter_map(|value| Some((value.name.as_str(), &value.texts.as_ref()?[..]))).collect(),
            n_halves: if is_supported { count_halves(&special.graph) } else { 0 },
            outline,
            tuned,
        })
    }

    fn gflop(&self) -> f64 {
        self.summary.flops() as f64 / 1e9
    }

    /// Passes that rewrote the model, if requested.
    fn trace(&self) -> Option<&Trace> {
        self.outline.as_ref().filter(|_| self.args.trace).map(|outline| &outline.trace)
    }

    /// Number of nodes that remain to be run.
    fn n_nodes(&self) -> usize {
        self.special.graph.nodes().len()
    }

    fn json(&self) -> Json {
        let CheckedModel { args, model, summary, operators, problems, kinds, optional, labels, .. } = self;
        let tensors = |list: &[(String, TensorType)]| -> Json {
            list.iter().map(|(name, ty)| json!({"name": name, "dtype": ty.dtype.name(), "shape": ty.shape})).collect()
        };
        let tasks = summary.tasks.iter().map(
            |task| json!({"kind": task.kind, "sizes": task.text, "gflop": task.flops as f64 / 1e9, "count": task.count}),
        );
        json!({
            "model": args.model.name(),
            "producer": model.producer,
            "opsets": model.opsets.iter().map(|(domain, n)| (domain.clone(), Json::from(*n))).collect::<serde_json::Map<_, _>>(),
            "supported": problems.is_empty(),
            "unsupported": problems,
            "unsupported_operators": kinds.iter().map(|kind| json!({
                "operator": kind.operator, "count": kind.nodes.len(), "reason": kind.reason, "nodes": kind.nodes,
            })).collect::<Vec<_>>(),
            "inputs": tensors(&summary.inputs),
            "optional_inputs": tensors(optional),
            "outputs": tensors(&summary.outputs),
            "labels": labels.iter().map(|(name, texts)| ((*name).to_owned(), json!(texts))).collect::<serde_json::Map<_, _>>(),
            "operators": operators,
            "nodes": self.n_nodes(),
            "half_nodes": self.n_halves,
            "gflop": self.gflop(),
            "parameter_bytes": summary.parameter_bytes,
            "tasks": tasks.collect::<Vec<_>>(),
            "run": self.outline.as_ref().map(outline_json),
            "trace": self.trace().map(|trace| trace.0.iter().map(applied_json).collect::<Vec<_>>()),
            "tuned_kernels": self.tuned.as_ref().map(|tuned| tuned.n_tuned),
        })
    }

    fn text(&self) -> String {
        let CheckedModel { args, model, summary, operators, kinds, optional, labels, .. } = self;
        let mut text = format!("{}\n\n", args.model.name());
        let opset = model.opsets.iter().find(|(domain, _)| domain.is_empty()).map_or(0, |(_, version)| *version);
        let n_operators: usize = operators.values().sum();
        let producer = if model.producer.is_empty() { "unknown" } else { &model.producer };
        text += &format!("opset       {opset}, written by {}\n", one_line(producer));
        text += &format!("nodes       {}, {} left to run\n", grouped(n_operators), grouped(self.n_nodes()));
        let open = args.model.open_texts();
        if !open.is_empty() {
            text += &format!("open        {}; shown at the largest\n", one_line(&open.join(" ")));
        }
        if self.n_halves > 0 {
            let results = count(self.n_halves as u64, "result");
            text += &format!("halves      {results} of 16 bits computed and kept in f32 (--exact rounds each)\n");
        }
        text += &format!("parameters  {} bytes\n", grouped(summary.parameter_bytes));
        text += &format!("work        {} GFLOP in convolutions and products\n", digits(self.gflop()));
        let optional_title = "optional inputs, which have defaults";
        let lists = [("inputs", &summary.inputs), (optional_title, optional), ("outputs", &summary.outputs)];
        for (title, list) in lists.into_iter().filter(|(title, list)| *title != optional_title || !list.is_empty()) {
            text += &format!("\n{title}\n");
            list.iter().for_each(|(name, ty)| text += &format!("  {}  {ty}\n", one_line(name)));
        }
        for (name, texts) in labels {
            text += &format!("\nlabels of {}, by place\n", one_line(name));
            texts.iter().enumerate().for_each(|(at, label)| text += &format!("  {at}  {}\n", one_line(label)));
        }
        let mut by_count: Vec<(&String, &usize)> = operators.iter().collect();
        by_count.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
        let rows = by_count.iter().map(|(name, n)| vec![format!("  {}", one_line(name)), grouped(n)]);
        text += &format!("\noperators\n{}", table(&rows.collect::<Vec<_>>()));
        if !summary.tasks.is_empty() {
            text += &format!("\n{}\n", count(summary.tasks.len() as u64, "task"));
            let rows = summary.tasks.iter().map(|task| {
                let name = format!("  {} {}", task.kind, task.text);
                vec![name, format!("{}×", task.count), format!("{} GFLOP", digits(task.flops as f64 / 1e9))]
            });
            text += &table(&rows.collect::<Vec<_>>());
        }
        text += &self.outline.as_ref().map_or(String::new(), Outline::text);
        text += &self.trace().map_or(String::new(), |trace| format!("\nrewriting, rule by rule\n{}", trace.text()));
        if let Some(TunedKernels { n_tuned, n_all, database }) = &self.tuned {
            text += &format!(
                "\n{n_tuned} of {} tuned for {}, by {database}\n",
                count(*n_all as u64, "kernel"),
                args.machine.place()
            );
        }
        if !self.problems.is_empty() {
            text += "\nnot supported\n";
            let others = self.special.problems.iter().filter(|problem| problem.place.is_none());
            others.for_each(|problem| text += &format!("  {}\n", problem_line(problem)));
            kinds.iter().for_each(|kind| text += &format!("  {}\n", one_line(&kind_line(kind))));
            if let Some(part) = &self.special.dynamic {
                let n = count(part.n_nodes() as u64, "node");
                text += &format!("  `run` takes the model all the same, and evaluates the {n} from there on\n");
            }
        }
        text
    }
}

/// Initializers that are also inputs, with their types: defaults that may be replaced.
fn defaults(graph: &Graph) -> Vec<(String, TensorType)> {
    let typed = |&id: &ValueId| {
        let value = graph.value(id);
        Some((value.name.clone(), value.ty.clone()?))
    };
    graph.defaults.iter().filter_map(typed).collect()
}

/// Formats an unsupported operator, with its first nodes.
fn kind_line(kind: &Refused) -> String {
    const SHOWN: usize = 5;
    let shown = kind.nodes[..kind.nodes.len().min(SHOWN)].join(", ");
    let more = kind.nodes.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{kind}: {} (nodes {shown}{more})", kind.reason)
}

/// Outline of a run of a supported model; with a database, of the run with its records, and the share of
/// kernels that are tuned there.
fn outline(args: &CheckArgs, model: &Model) -> anyhow::Result<(Option<Outline>, Option<TunedKernels>)> {
    let target = args.machine.place().target()?;
    let mut fused = args.model.lowered(model, KernelRounding::default(), (&target, args.machine.threads))?;
    if args.records.db.is_none() {
        return Ok((Some(Outline::of(&fused)), None));
    }
    let database = args.records.database()?;
    let (records, threads) = (database.records()?, args.machine.threads);
    args.machine.place().check_threads()?;
    fused = laid_out(fused, &target, threads, LayoutPurpose::Run(&records))?;
    let (caches, tasks) = (fused.caches(&target), fused.tasks());
    let mut n_tuned = 0;
    for (workload, _) in &tasks {
        n_tuned += usize::from(records.known(workload, &target, threads, caches.of(workload), None)?.0.is_ok());
    }
    let tuned = TunedKernels { n_tuned, n_all: tasks.len(), database: database.name() };
    Ok((Some(Outline::of(&fused)), Some(tuned)))
}

fn applied_json(Applied { rule, within, n_changes, nodes: [before, after] }: &Applied) -> Json {
    json!({"rule": rule, "within": within, "changes": n_changes, "nodes_before": before, "nodes_after": after})
}

fn without_code(WithoutCode { node, operator, reason }: &WithoutCode) -> Json {
    json!({"node": node, "operator": operator, "reason": reason.to_string()})
}

fn outline_json(of: &Outline) -> Json {
    let kernels = of.kernels.iter().map(|(workload, n)| json!({"workload": workload.to_string(), "count": n}));
    json!({
        "kernels": of.n_kernels,
        "tasks": kernels.collect::<Vec<_>>(),
        "functions_in_c": of.calls.iter().map(|(node, operator)| format!("{node} ({operator})")).collect::<Vec<_>>(),
        "host_operators": of.without_code.iter().map(|n| format!("{} ({})", n.node, n.operator)).collect::<Vec<_>>(),
        "without_code": of.without_code.iter().map(without_code).collect::<Vec<_>>(),
        "copies": of.n_copies,
        "arena_bytes": of.memory.total,
        "arena_bound_bytes": of.memory.bound,
    })
}
