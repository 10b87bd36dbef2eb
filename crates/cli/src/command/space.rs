//! `space`: parameters, constraints and exact size of a template's space.

use std::path::Path;

use clap::Args;
use serde_json::{Map, Value as Json, json};
use tilewright_formats::{SpaceDescription, name_of};
use tilewright_search::{Domain, Space};

use super::formats::refuse;
use super::{WorkloadArgs, count, make_task};
use crate::output::write_result;

/// Arguments of `space`.
#[derive(Args, Debug)]
pub struct SpaceArgs {
    #[command(flatten)]
    of: WorkloadArgs,
    /// Template whose space is shown [default: the operator's first one]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
}

/// Shows a space.
///
/// # Errors
/// Bad input if the workload, template or target does not exist.
pub fn run(args: &SpaceArgs, as_json: bool) -> anyhow::Result<()> {
    let path = Path::new(&args.of.workload);
    if path.extension().is_some_and(|ending| ending == "json") && path.is_file() {
        let file = super::read_file(path, "a T1 description")?;
        let name = name_of(path);
        let described = SpaceDescription::read(&file).and_then(|description| description.space(&name));
        let space = described.map_err(|error| refuse(path, &error))?;
        let mut json = Map::new();
        json.insert("description".into(), path.to_string_lossy().into());
        return show(&space, json, &name, as_json);
    }
    let workload = args.of.workload()?;
    let target = args.of.machine.place().target()?;
    args.of.machine.place().check_threads()?;
    let task = make_task(workload.clone(), target, args.of.machine.threads, args.template.as_deref())?;
    let space = &task.space;

    let mut json = Map::new();
    json.insert("workload".into(), workload.to_string().into());
    json.insert("template".into(), task.template.name.into());
    json.insert("target".into(), task.setting.target.name().into());
    json.insert("threads".into(), task.setting.n_threads.into());
    show(space, json, &format!("{workload}, template {} ({})", task.template.name, task.template.text), as_json)
}

/// Shows a space under this title.
fn show(space: &Space, mut json: Map<String, Json>, title: &str, as_json: bool) -> anyhow::Result<()> {
    if let Json::Object(description) = space.describe() {
        json.extend(description);
    }
    let advised = space.advised();
    if let Some(advised) = &advised {
        let advice = space.advice().iter().map(|c| json!({"name": c.name, "text": c.text}));
        json.insert("advice".into(), advice.collect());
        json.insert("advised".into(), u64::try_from(advised.size()).map_or(Json::Null, Json::from));
    }
    let mut text = format!("{title}\n{}", count(space.size(), "configuration"));
    if let Some(all) = space.n_combinations().filter(|all| *all > space.size()) {
        let share = 100.0 * space.size() as f64 / all as f64;
        text += &format!(", {share:.1} % of {}, which constraints leave", count(all, "combination"));
    }
    text += "\n\nparameters\n";
    let width = space.names().map(|name| name.chars().count()).max().unwrap_or(0);
    for (at, name) in space.names().enumerate() {
        let domain = match space.domain(at) {
            Domain::Factorization { n, parts } => format!("{n} as a product of {}", count(*parts as u64, "factor")),
            Domain::Ordinal(values) => values.iter().map(i64::to_string).collect::<Vec<_>>().join(" "),
            Domain::Categorical(values) => values.join(" | "),
            Domain::Permutation(names) => format!("an order of {}", names.join(" ")),
        };
        text += &format!("  {name:width$}  {domain}\n");
    }
    if !space.constraints().is_empty() {
        text += "\nconstraints\n";
    }
    for constraint in space.constraints() {
        text += &format!("  {}: {}\n", constraint.name, constraint.text);
    }
    if let Some(advised) = &advised {
        text +=
            &format!("\nadvice, which {} follow: searches propose no others\n", count(advised.size(), "configuration"));
    }
    for constraint in space.advice() {
        text += &format!("  {}: {}\n", constraint.name, constraint.text);
    }
    write_result(as_json, &Json::Object(json), &text)
}
