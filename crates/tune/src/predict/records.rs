//! Prediction models trained on Tilewright's own records: workloads are problems, their best configurations
//! answers.
//!
//! A configuration is encoded in tokens that mean the same for every size: numbers, texts and permutations
//! unchanged, and the inner factors of a factorization, which are tile sizes; the outermost factor follows
//! from the size. A parameter that only other workloads of the template have is encoded as absent.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value as Json, json};
use tilewright_ir::op::{Epilogue, Workload};
use tilewright_learn::sequence::{Completions, Example, Field, FieldKind, KernelParameter, LikelyAnswer, Vocabulary};
use tilewright_search::{Config, Space};

use super::count;
use crate::record::Record;
use crate::transfer::EarlierTask;

/// Maximum number of configurations of a workload that the model learns from.
const MOST_ANSWERS: usize = 8;
/// Token of a parameter that a workload does not have.
const ABSENT: &str = "-";
/// Largest time of a configuration that serves as an example, relative to the best of its workload.
const NEAR_BEST: f64 = 1.05;

/// Reason why records cannot serve as training data, or a model cannot be queried; the error is in the
/// records or the model.
#[derive(Debug, thiserror::Error)]
pub enum RecordsError {
    /// Too few workloads for training and validation.
    #[error("records of {} of template {template}, of {least} at least", count(*n_workloads, "workload"))]
    TooFew {
        /// The template.
        template: String,
        /// Number of workloads.
        n_workloads: usize,
        /// Required number.
        least: usize,
    },
    /// Metadata that do not describe a template's model.
    #[error("the model is of no template")]
    NoTemplate,
    /// Parameter of the space that the model was not trained on.
    #[error("the model knows the parameters {known}, and the space has {found}")]
    OtherParameters {
        /// Parameters of the model.
        known: String,
        /// Parameters of the space.
        found: String,
    },
    /// Space without a legal configuration made of values that the model was trained on.
    #[error("no legal configuration consists of values that the model has seen")]
    NothingKnown,
}

/// Minimum number of workloads: with fewer there is nothing to validate with.
const LEAST_WORKLOADS: usize = 2;

/// Training data for a template's model, from records.
#[derive(Debug, Clone)]
pub struct Lessons {
    /// Vocabulary of tokens.
    pub vocabulary: Vocabulary,
    /// Examples of each workload.
    pub examples: Vec<Vec<Example>>,
}

impl Lessons {
    /// Collects the training data from the measured trials of a template's workloads.
    ///
    /// # Errors
    /// [`RecordsError::TooFew`].
    pub fn of(template: &str, tasks: &[EarlierTask]) -> Result<Lessons, RecordsError> {
        // For each workload on its machine, its description and its configurations as tokens by parameter,
        // best first.
        let mut taught: Vec<(WorkloadProperties, Vec<BTreeMap<String, String>>)> = Vec::new();
        let mut values: BTreeMap<String, BTreeSet<TextOrNumber>> = BTreeMap::new();
        for task in tasks.iter().filter(|task| task.template == template) {
            let mut records: Vec<&Record> = task.records.iter().filter(|r| r.outcome.timing().is_some()).collect();
            records.sort_by(|a, b| a.outcome.cost().total_cmp(&b.outcome.cost()));
            let Some(best) = records.first().map(|record| record.outcome.cost()) else { continue };
            let mut answers = Vec::new();
            for record in records {
                let Some(tokens) = tokens_of_config(&record.config) else { continue };
                for (name, token) in &tokens {
                    let seen = values.entry(name.clone()).or_insert_with(|| [TextOrNumber(ABSENT.to_owned())].into());
                    seen.insert(TextOrNumber(token.clone()));
                }
                if record.outcome.cost() <= NEAR_BEST * best && answers.len() < MOST_ANSWERS {
                    answers.push(tokens);
                }
            }
            if let Some(first) = task.records.first().filter(|_| !answers.is_empty()) {
                taught.push((describe(&task.workload, task.threads, &first.target), answers));
            }
        }
        if taught.len() < LEAST_WORKLOADS {
            let (template, n_workloads) = (template.to_owned(), taught.len());
            return Err(RecordsError::TooFew { template, n_workloads, least: LEAST_WORKLOADS });
        }
        let parameters = values
            .into_iter()
            .map(|(name, seen)| KernelParameter { name, values: seen.into_iter().map(|token| token.0).collect() });
        let fields = fields_of(taught.iter().map(|(description, _)| description));
        let vocabulary = Vocabulary { fields, parameters: parameters.collect() };
        let example = |problem: &[i64], tokens: &BTreeMap<String, String>| {
            let index = |parameter: &KernelParameter| {
                let token = tokens.get(&parameter.name).map_or(ABSENT, String::as_str);
                parameter.values.iter().position(|v| v == token).expect("invariant: seen above") as u32
            };
            Example { problem: problem.to_vec(), answer: vocabulary.parameters.iter().map(index).collect() }
        };
        let examples = taught.iter().map(|(description, answers)| {
            let problem = problem_of(&vocabulary, description);
            answers.iter().map(|tokens| example(&problem, tokens)).collect()
        });
        Ok(Lessons { examples: examples.collect(), vocabulary })
    }
}

/// Predicts configurations of a space for a workload, by decreasing likelihood.
///
/// # Errors
/// [`RecordsError`] if the model does not fit the space.
pub fn predict(
    model: &tilewright_learn::sequence::SequenceModel,
    workload: &Workload,
    threads: u32,
    target: &str,
    space: &Space,
    width: usize,
) -> Result<Vec<(Config, f64)>, RecordsError> {
    let mut completions = SpaceCompletions::new(space, model.vocabulary())?;
    let problem = problem_of(model.vocabulary(), &describe(workload, threads, target));
    let answers = model.answers(&problem, width, Some(&mut completions));
    let config = |answer: LikelyAnswer| Some((completions.config(&answer.values)?, answer.log_probability));
    Ok(answers.into_iter().filter_map(config).collect())
}

/// Metadata of a template for a model's file; [`read_template`] reads them back.
pub fn describe_template(template: &str) -> Json {
    json!({"template": template})
}

/// Template of a model, from its file's metadata.
///
/// # Errors
/// [`RecordsError::NoTemplate`].
pub fn read_template(about: &Json) -> Result<&str, RecordsError> {
    about["template"].as_str().ok_or(RecordsError::NoTemplate)
}

/// Property of a workload on a machine.
#[derive(Debug, Clone, PartialEq)]
enum Property {
    Number(i64),
    Text(String),
}

/// Properties of a workload on a machine, by name.
type WorkloadProperties = BTreeMap<String, Property>;

fn describe(workload: &Workload, threads: u32, target: &str) -> WorkloadProperties {
    let sizes = workload.operator().sizes.iter();
    let sizes = sizes.map(|size| (size.name.to_owned(), Property::Number(workload.size(size.name))));
    let joined = |operations: &[Epilogue]| operations.iter().map(ToString::to_string).collect::<Vec<_>>().join("+");
    let constants = match workload.constants() {
        [] => "none".to_owned(),
        names => names.join("+"),
    };
    let texts = [
        ("operator", workload.operator().name.to_owned()),
        ("dtype", workload.dtype_name().to_owned()),
        ("const", constants),
        ("layout", format!("{:?}", workload.layout()).to_lowercase()),
        ("prologue", joined(workload.prologue())),
        ("epilogue", joined(workload.epilogue())),
        ("exact", workload.is_exact().to_string()),
        ("target", target.to_owned()),
    ];
    let texts = texts.into_iter().map(|(name, text)| (name.to_owned(), Property::Text(text)));
    sizes.chain(texts).chain([("threads".to_owned(), Property::Number(threads.into()))]).collect()
}

/// Makes a field for each property that varies, or for all if none does.
fn fields_of<'a>(descriptions: impl Iterator<Item = &'a WorkloadProperties>) -> Vec<Field> {
    let mut seen: BTreeMap<&str, Vec<Option<&Property>>> = BTreeMap::new();
    let descriptions: Vec<&WorkloadProperties> = descriptions.collect();
    for name in descriptions.iter().flat_map(|description| description.keys()) {
        seen.entry(name).or_insert_with(|| descriptions.iter().map(|d| d.get(name)).collect());
    }
    let field = |(name, properties): (&&str, &Vec<Option<&Property>>)| {
        let texts = properties.iter().filter_map(|property| match property {
            Some(Property::Text(text)) => Some(text.clone()),
            _ => None,
        });
        let values: Vec<String> = texts.collect::<BTreeSet<_>>().into_iter().collect();
        let kind = if values.is_empty() { FieldKind::Integer } else { FieldKind::Categorical { values } };
        Field { name: (*name).to_owned(), kind }
    };
    let varies = |(_, properties): &(&&str, &Vec<Option<&Property>>)| properties.iter().any(|p| *p != properties[0]);
    let varying: Vec<Field> = seen.iter().filter(varies).map(field).collect();
    if varying.is_empty() { seen.iter().map(field).collect() } else { varying }
}

/// Inputs of a model for a workload. A size that the operator does not have is 0.
fn problem_of(vocabulary: &Vocabulary, description: &WorkloadProperties) -> Vec<i64> {
    let number = |field: &Field| match (&field.kind, description.get(&field.name)) {
        (FieldKind::Integer, Some(Property::Number(number))) => *number,
        (FieldKind::Integer, _) => 0,
        (FieldKind::Categorical { values }, Some(Property::Text(text))) => {
            values.iter().position(|value| value == text).map_or(-1, |at| at as i64)
        }
        (FieldKind::Categorical { .. }, _) => -1,
    };
    vocabulary.fields.iter().map(number).collect()
}

/// Token, ordered with texts before numbers and numbers by value.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TextOrNumber(String);

impl Ord for TextOrNumber {
    fn cmp(&self, other: &TextOrNumber) -> std::cmp::Ordering {
        let number = |token: &TextOrNumber| token.0.parse::<i64>().ok();
        number(self).cmp(&number(other)).then_with(|| self.0.cmp(&other.0))
    }
}

impl PartialOrd for TextOrNumber {
    fn partial_cmp(&self, other: &TextOrNumber) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Tokens of one parameter's value with their names: one, or one for each inner factor.
fn tokens_of_value(name: &str, value: &Json) -> Option<Vec<(String, String)>> {
    let one = |text: String| Some(vec![(name.to_owned(), text)]);
    match value {
        Json::Number(number) => one(number.to_string()),
        Json::String(text) => one(text.clone()),
        Json::Array(parts) if parts.iter().all(Json::is_u64) => {
            let inner = parts.iter().enumerate().skip(1);
            Some(inner.map(|(at, factor)| (format!("{name}[{at}]"), factor.to_string())).collect())
        }
        Json::Array(parts) => one(parts.iter().map(Json::as_str).collect::<Option<Vec<_>>>()?.join(",")),
        _ => None,
    }
}

fn tokens_of_config(config: &Json) -> Option<BTreeMap<String, String>> {
    let of_values = config.as_object()?.iter().map(|(name, value)| tokens_of_value(name, value));
    Some(of_values.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
}

/// Constraint of a model's decoding to the legal configurations of a space.
pub struct SpaceCompletions<'a> {
    space: &'a Space,
    /// Position of the first token, by parameter of the space.
    first: Vec<usize>,
    /// Values of the tokens, by parameter of the space and rank; `None` if the model does not know them.
    tokens: Vec<Vec<Option<Vec<u32>>>>,
    /// Parameter of the space for each position, if the space has it.
    places: Vec<Option<usize>>,
    /// Values allowed at each position for which the space has no parameter.
    absent: Vec<Vec<bool>>,
}

impl SpaceCompletions<'_> {
    /// Configurations of a space that consist of tokens in a vocabulary.
    ///
    /// # Errors
    /// If the vocabulary lacks a parameter of the space, or there is no such configuration.
    pub fn new<'a>(space: &'a Space, vocabulary: &Vocabulary) -> Result<SpaceCompletions<'a>, RecordsError> {
        let other = || {
            let known = vocabulary.parameters.iter().map(|p| p.name.as_str()).collect::<Vec<_>>().join(", ");
            RecordsError::OtherParameters { known, found: space.names().collect::<Vec<_>>().join(", ") }
        };
        let mut places: Vec<Option<usize>> = vec![None; vocabulary.parameters.len()];
        let (mut first, mut tokens) = (Vec::new(), Vec::new());
        for (axis, name) in space.names().enumerate() {
            let of_rank = |rank: u64| tokens_of_value(name, &space.value_at(axis, rank).to_json()).unwrap_or_default();
            let mut named: Vec<String> = of_rank(0).into_iter().map(|(name, _)| name).collect();
            // In a model of records without an optional parameter, its absence means its first value.
            let is_unsaid = space.is_optional(axis) && !vocabulary.parameters.iter().any(|p| named.contains(&p.name));
            if is_unsaid {
                named.clear();
            }
            let is_first = |p: &KernelParameter| Some(&p.name) == named.first();
            let start = match named.is_empty() {
                true => 0,
                false => vocabulary.parameters.iter().position(is_first).ok_or_else(other)?,
            };
            let own = vocabulary.parameters.get(start..start + named.len()).ok_or_else(other)?;
            if own.iter().map(|p| &p.name).ne(&named) {
                return Err(other());
            }
            places[start..start + named.len()].fill(Some(axis));
            let index = |(parameter, (_, token)): (&KernelParameter, (String, String))| {
                parameter.values.iter().position(|value| *value == token).map(|at| at as u32)
            };
            let known = |rank: u64| match is_unsaid && rank > 0 {
                true => None,
                false => own.iter().zip(of_rank(rank)).map(index).collect::<Option<Vec<u32>>>(),
            };
            tokens.push((0..space.n_values(axis)).map(known).collect());
            first.push(start);
        }
        let absent = vocabulary.parameters.iter().map(|p| p.values.iter().map(|value| value == ABSENT).collect());
        let mut completions = SpaceCompletions { space, first, tokens, places, absent: absent.collect() };
        match completions.allowed(&[]).contains(&true) {
            true => Ok(completions),
            false => Err(RecordsError::NothingKnown),
        }
    }

    /// Whether tokens are known and do not contradict the prefix, by parameter of the space and rank.
    fn possible(&self, prefix: &[u32]) -> Vec<Option<Vec<bool>>> {
        let agrees = |axis: usize, tokens: &Option<Vec<u32>>| {
            tokens.as_ref().is_some_and(|tokens| {
                let chosen = prefix.get(self.first[axis]..).unwrap_or_default();
                tokens.iter().zip(chosen).all(|(token, chosen)| token == chosen)
            })
        };
        let of_axis = |(axis, tokens): (usize, &Vec<Option<Vec<u32>>>)| {
            let possible: Vec<bool> = tokens.iter().map(|tokens| agrees(axis, tokens)).collect();
            possible.contains(&false).then_some(possible)
        };
        self.tokens.iter().enumerate().map(of_axis).collect()
    }

    /// Configuration that a decoded answer stands for; `None` if it is not legal.
    pub fn config(&self, answer: &[u32]) -> Option<Config> {
        let rank = |axis: usize| {
            let of_axis = |tokens: &Option<Vec<u32>>| {
                let tokens = tokens.as_ref()?;
                (answer.get(self.first[axis]..self.first[axis] + tokens.len())? == tokens).then_some(())
            };
            self.tokens[axis].iter().position(|tokens| of_axis(tokens).is_some()).map(|rank| rank as u64)
        };
        let config = Config::new((0..self.tokens.len()).map(rank).collect::<Option<Vec<_>>>()?);
        self.space.contains(&config).then_some(config)
    }
}

impl Completions for SpaceCompletions<'_> {
    /// # Panics
    /// If the prefix is a complete answer or longer.
    fn allowed(&mut self, prefix: &[u32]) -> Vec<bool> {
        let absent = &self.absent[prefix.len()];
        let Some(axis) = self.places[prefix.len()] else { return absent.clone() };
        let possible = self.possible(prefix);
        let mut allowed = vec![false; absent.len()];
        let at = prefix.len() - self.first[axis];
        let ranks = self.space.ranks_possible(axis, &possible);
        for tokens in self.tokens[axis].iter().zip(ranks).filter_map(|(tokens, is)| tokens.as_ref().filter(|_| is)) {
            allowed[tokens[at] as usize] = true;
        }
        allowed
    }
}
