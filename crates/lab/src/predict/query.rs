//! Queries of a model for one problem.

use std::path::Path;

use serde_json::{Map, Value as Json};
use tilewright::format::table;
use tilewright::{Caches, Error};
use tilewright_learn::sequence::SequenceModel;
use tilewright_tune::predict::{InputFields, LookAhead};
use tilewright_tune::{Task, TemplateSetting};

use super::{NOT_EXACT, ask_template, watch_look_ahead};
use crate::Caller;

/// Answers of a model.
pub struct Answers {
    /// Kernel or template that the model was trained for.
    pub kernel: String,
    /// Whether look-ahead was exact, so that no likelier answer was lost.
    pub is_exact: bool,
    /// Valid answers, by decreasing likelihood.
    pub candidates: Vec<RankedAnswer>,
}

impl Answers {
    /// Formats the answers as a table.
    pub fn text(&self) -> String {
        let names = self.candidates.first().map(|candidate| candidate.parameters.keys().cloned());
        let head = ["probability".to_owned()].into_iter().chain(names.into_iter().flatten());
        let mut rows = vec![head.collect::<Vec<_>>()];
        for RankedAnswer { parameters, probability } in &self.candidates {
            let values = parameters.values().map(|value| value.as_str().map_or(value.to_string(), str::to_owned));
            rows.push([format!("{probability:.4}")].into_iter().chain(values).collect());
        }
        format!("{}\n{}", self.kernel, table(&rows))
    }
}

/// Answer with its probability.
pub struct RankedAnswer {
    /// Values by parameter.
    pub parameters: Map<String, Json>,
    /// Probability that the model assigns.
    pub probability: f64,
}

/// Queries a kernel's model for a problem, given its fields.
///
/// # Errors
/// Bad input if the fields are not the kernel's or no configuration is valid for them; failure if no valid
/// answer is found.
pub fn ask_kernel(
    path: &Path,
    model: &SequenceModel,
    about: &Json,
    given: &[(String, String)],
    width: usize,
    caller: Caller,
) -> Result<Answers, Error> {
    let of_file = |error| Error::input(format!("{}: {error}", path.display()));
    let (kernel, inputs) = InputFields::read(about, model.vocabulary()).map_err(of_file)?;
    let problem = inputs.ask(&kernel, given).map_err(Error::input)?;
    let mut look_ahead = LookAhead::new(&kernel, &problem).watched(watch_look_ahead(caller));
    if look_ahead.is_satisfiable() == Some(false) {
        let constraint = kernel.unsatisfiable(&problem).unwrap_or("?");
        let reason = format!("constraint {constraint} leaves no valid configuration of {}", kernel.name);
        return Err(Error::input(format!("{reason} for this problem")));
    }
    let answers = model.answers(&inputs.problem(&problem), width, Some(&mut look_ahead));
    let is_exact = look_ahead.is_exact();
    if !is_exact {
        caller.say(NOT_EXACT.to_owned());
    }
    if answers.is_empty() {
        let what = format!("no valid configuration of {} was found for this problem; there may be one", kernel.name);
        return Err(Error::failed(what));
    }
    let candidates = answers.iter().map(|answer| {
        debug_assert!(kernel.is_valid(&problem, &answer.values), "invariant: whole answers are valid");
        let parameters = kernel.parameters.iter().zip(&answer.values);
        let value = |text: &str| text.parse::<i64>().map_or_else(|_| text.into(), Json::from);
        let parameters = parameters.map(|(p, &at)| (p.name.clone(), value(&p.values[at as usize])));
        RankedAnswer { parameters: parameters.collect(), probability: answer.log_probability.exp() }
    });
    let candidates = candidates.collect();
    Ok(Answers { kernel: kernel.name, is_exact, candidates })
}

/// Queries a template's model for a workload.
///
/// # Errors
/// Bad input if the template does not serve the workload, or the model is for other parameters.
pub fn ask_workload(
    model: &SequenceModel,
    template: &str,
    setting: TemplateSetting,
    width: usize,
) -> Result<Answers, Error> {
    let task = Task::new(setting, Some(template)).map_err(Error::input)?;
    let candidates = ask_template(model, &task, Caches::Warm, width)?.into_iter().map(|(config, log_probability)| {
        let Json::Object(parameters) = task.space.config_to_json(&config) else {
            unreachable!("invariant: a configuration is an object")
        };
        RankedAnswer { parameters, probability: log_probability.exp() }
    });
    Ok(Answers { kernel: template.to_owned(), is_exact: true, candidates: candidates.collect() })
}
