//! `check`: what an ONNX model takes, and what of it is not supported.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use clap::Args;
use serde_json::{Value as Json, json};
use tilewright_graph::{Bindings, Model, Problem, TensorType, count_operators, onnx, specialise, summarise};

use super::{count, read_file};
use crate::error::{bad_input, one_line};
use crate::output::{digits, grouped, message, table, write_result};

/// Arguments of `check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Model as an ONNX file
    #[arg(value_name = "MODEL.onnx")]
    model: PathBuf,
    #[command(flatten)]
    bindings: BindingArgs,
}

/// What is bound of a model.
#[derive(Args, Debug)]
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
    /// The bindings.
    ///
    /// # Errors
    /// Bad input where a text is none.
    fn bindings(&self) -> anyhow::Result<Bindings> {
        let mut bindings = Bindings::default();
        self.dim.iter().try_for_each(|text| bindings.bind_dim(text)).map_err(bad_input)?;
        self.shape.iter().try_for_each(|text| bindings.bind_shape(text)).map_err(bad_input)?;
        self.set.iter().try_for_each(|text| bindings.bind_value(text)).map_err(bad_input)?;
        Ok(bindings)
    }
}

/// Reads a model and the files with its weights.
///
/// # Errors
/// Bad input where it cannot be read or is none.
fn read_model(path: &Path) -> anyhow::Result<Model> {
    let file = Bytes::from(read_file(path, "an ONNX model")?);
    let folder = path.parent().unwrap_or(Path::new("")).to_owned();
    let mut external = |name: &str| {
        let path = folder.join(name);
        let read = std::fs::read(&path).map(Bytes::from);
        read.map_err(|error| format!("its weights {} cannot be read: {error} (put them there)", path.display()))
    };
    onnx::read(&file, &mut external).map_err(|error| bad_input(format!("{}: {error}", path.display())))
}

/// Shows a model. The exit code is 1 where something of it is not supported.
///
/// # Errors
/// Bad input where the file is no model, or a dimension is not bound.
pub fn run(args: &CheckArgs, as_json: bool) -> anyhow::Result<()> {
    let bindings = args.bindings.bindings()?;
    let model = read_model(&args.model)?;
    let special = specialise(&model.graph, &bindings);
    if let Some(problem) = special.problems.iter().find(|problem| !problem.is_unsupported()) {
        // What is not supported is worth knowing all the same.
        special.problems.iter().filter(|problem| problem.is_unsupported()).for_each(|problem| message(&line(problem)));
        return Err(bad_input(format!("{}: {problem}", args.model.display())));
    }
    let summary = summarise(&special.graph);
    let mut operators = BTreeMap::new();
    count_operators(&model.graph, &mut operators);
    let problems: Vec<String> = special.problems.iter().map(line).collect();
    let (gflop, n_nodes) = (summary.flops() as f64 / 1e9, special.graph.nodes().len());

    let tensors = |list: &[(String, TensorType)]| -> Json {
        list.iter().map(|(name, ty)| json!({"name": name, "dtype": ty.dtype.name(), "shape": ty.shape})).collect()
    };
    let tasks = summary.tasks.iter().map(
        |task| json!({"kind": task.kind, "sizes": task.text, "gflop": task.flops as f64 / 1e9, "count": task.count}),
    );
    let json = json!({
        "model": args.model.display().to_string(),
        "producer": model.producer,
        "opsets": model.opsets.iter().map(|(domain, n)| (domain.clone(), Json::from(*n))).collect::<serde_json::Map<_, _>>(),
        "supported": problems.is_empty(),
        "unsupported": problems,
        "inputs": tensors(&summary.inputs),
        "outputs": tensors(&summary.outputs),
        "operators": operators,
        "nodes": n_nodes,
        "gflop": gflop,
        "parameter_bytes": summary.parameter_bytes,
        "tasks": tasks.collect::<Vec<_>>(),
    });

    let mut text = format!("{}\n\n", args.model.display());
    let opset = model.opsets.iter().find(|(domain, _)| domain.is_empty()).map_or(0, |(_, version)| *version);
    let n_operators: usize = operators.values().sum();
    let producer = if model.producer.is_empty() { "unknown" } else { &model.producer };
    text += &format!("opset       {opset}, written by {}\n", one_line(producer));
    text += &format!("nodes       {}, {} left to run\n", grouped(n_operators), grouped(n_nodes));
    text += &format!("parameters  {} bytes\n", grouped(summary.parameter_bytes));
    text += &format!("work        {} GFLOP in convolutions and products\n", digits(gflop));
    for (title, list) in [("inputs", &summary.inputs), ("outputs", &summary.outputs)] {
        text += &format!("\n{title}\n");
        list.iter().for_each(|(name, ty)| text += &format!("  {}  {ty}\n", one_line(name)));
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
    if !problems.is_empty() {
        text += "\nnot supported\n";
        problems.iter().for_each(|problem| text += &format!("  {problem}\n"));
    }
    write_result(as_json, &json, &text)?;
    if problems.is_empty() {
        return Ok(());
    }
    let n = count(problems.len() as u64, "thing");
    Err(anyhow::anyhow!("{n} of {} not supported (see above)", args.model.display()))
}

fn line(problem: &Problem) -> String {
    one_line(&problem.to_string())
}
