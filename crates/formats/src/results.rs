//! Results of a tuner for a kernel: parameters, and outcomes of configurations.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value as Json};
use tilewright_search::space::ListedProduct;
use tilewright_search::{Config, Domain, Outcome, Parameter, RecordedSpace, Seconds, Space, Trial};

use crate::format::records::WORKLOAD;
use crate::read::FormatError;

/// Task of a tuner: a kernel for a problem on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct TunerTask {
    /// Name of the kernel, as its tuner calls it; the template for our own records.
    pub kernel: String,
    /// Name of the device, as its tuner calls it; empty if unknown.
    pub device: String,
    /// Problem of the kernel: names of fields, and values as JSON.
    pub problem: Vec<(String, String)>,
}

impl TunerTask {
    /// Value of a field of the problem; `None` if there is no such field.
    pub fn field(&self, name: &str) -> Option<Json> {
        let (_, text) = self.problem.iter().find(|(known, _)| known == name)?;
        serde_json::from_str(text).ok()
    }

    /// Number of rows of the problem: its field `M`, or the size `m` of our own workloads.
    pub(crate) fn n_rows(&self) -> Option<u64> {
        let of_workload = || {
            let workload = self.field(WORKLOAD)?;
            let (_, sizes) = workload.as_str()?.split_once(':')?;
            sizes.split(',').find_map(|size| size.strip_prefix("m=")?.parse().ok())
        };
        self.field("M").and_then(|rows| rows.as_u64()).or_else(of_workload)
    }

    /// Adds a field to the problem.
    pub(crate) fn with(mut self, name: &str, value: &Json) -> TunerTask {
        self.problem.push((name.to_owned(), value.to_string()));
        self
    }

    /// Kernel and problem in one line, which [`TunerTask::parse`] reads.
    pub fn text(&self) -> String {
        let mut text = quoted(&self.kernel);
        for (name, value) in &self.problem {
            text += &format!(",{}={value}", quoted(name));
        }
        text
    }

    /// Parses a task's text; `None` if it is malformed.
    pub fn parse(text: &str, device: &str) -> Option<TunerTask> {
        let mut parts = Vec::new();
        let (mut part, mut depth, mut in_quotes, mut is_escaped) = (String::new(), 0usize, false, false);
        for c in text.chars() {
            match c {
                '"' if !is_escaped => in_quotes = !in_quotes,
                '[' | '{' if !in_quotes => depth += 1,
                ']' | '}' if !in_quotes => depth = depth.checked_sub(1)?,
                ',' if !in_quotes && depth == 0 => {
                    parts.push(std::mem::take(&mut part));
                    continue;
                }
                _ => {}
            }
            is_escaped = c == '\\' && !is_escaped;
            part.push(c);
        }
        parts.push(part);
        let mut parts = parts.into_iter();
        let kernel = unquoted(&parts.next()?)?;
        let field = |part: String| {
            // A quoted name may contain any character.
            let end = if part.starts_with('"') { end_of_quoted(&part)? } else { part.find('=')? };
            part[end..].strip_prefix('=')?;
            let value: Json = serde_json::from_str(&part[end + 1..]).ok()?;
            Some((unquoted(&part[..end])?, value.to_string()))
        };
        Some(TunerTask { kernel, device: device.to_owned(), problem: parts.map(field).collect::<Option<_>>()? })
    }
}

impl fmt::Display for TunerTask {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(&self.text())?;
        if self.device.is_empty() { Ok(()) } else { write!(out, " on {}", self.device) }
    }
}

/// Formats a name, in quotes if it would be ambiguous otherwise.
fn quoted(name: &str) -> String {
    let is_plain = |c: char| !c.is_control() && !matches!(c, ',' | '=' | '"' | '[' | ']' | '{' | '}' | '\\');
    if !name.is_empty() && name.chars().all(is_plain) { name.to_owned() } else { Json::from(name).to_string() }
}

/// Finds the end of a quoted text, after its closing quote.
fn end_of_quoted(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '"' if !is_escaped => return Some(at + 1),
            '\\' => is_escaped = !is_escaped,
            _ => is_escaped = false,
        }
    }
    None
}

fn unquoted(text: &str) -> Option<String> {
    if text.is_empty() {
        return None;
    }
    if text.starts_with('"') { serde_json::from_str(text).ok() } else { Some(text.to_owned()) }
}

/// Parameter with its values.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterValues {
    /// Name of the parameter.
    pub name: String,
    /// Values, in the order in which they are listed or occur.
    pub values: Vec<Json>,
}

/// Result of a configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigResult {
    /// Index of each parameter's value.
    pub places: Box<[u32]>,
    /// Outcome; the median of the successful measurements if there are several. `None` for a winner without a
    /// recorded time.
    pub outcome: Option<Outcome>,
    /// Seconds of building, running and verifying, as far as known.
    pub seconds: Seconds,
    /// Unix time of the measurement in seconds; 0 if unknown.
    pub unix_time: u64,
}

impl ConfigResult {
    /// Returns the outcome, which exists in formats with times.
    pub(crate) fn expect_outcome(&self) -> &Outcome {
        self.outcome.as_ref().expect("invariant: winners without times were refused")
    }
}

/// Results of a tuner for a task.
#[derive(Debug, Clone, PartialEq)]
pub struct Results {
    /// Task that was tuned.
    pub task: TunerTask,
    /// Parameters.
    pub parameters: Vec<ParameterValues>,
    /// Rows, one per configuration, in order of first occurrence.
    pub rows: Vec<ConfigResult>,
    /// Number of rows in the file, repeated and unreadable ones included.
    pub n_rows: u64,
    /// Notes on irregularities of the results, one per line.
    pub notes: Vec<String>,
}

impl Results {
    /// Configuration of a row: a JSON object from parameter to value.
    pub fn config(&self, row: &ConfigResult) -> Json {
        let values = self.parameters.iter().zip(&row.places);
        let values = values.map(|(parameter, &at)| (parameter.name.clone(), parameter.values[at as usize].clone()));
        Json::Object(values.collect::<Map<_, _>>())
    }

    /// Best row: the one marked as the winner, else the fastest; `None` if every one failed.
    pub fn best(&self) -> Option<&ConfigResult> {
        let winner = self.rows.iter().find(|row| row.outcome.is_none());
        let time_ns = |row: &ConfigResult| row.outcome.as_ref().map_or(f64::INFINITY, Outcome::cost);
        let fastest = || self.rows.iter().min_by(|a, b| time_ns(a).total_cmp(&time_ns(b)));
        winner.or_else(|| fastest().filter(|row| time_ns(row).is_finite()))
    }

    /// Whether rows have a time or a failure, rather than only the fact that they won.
    pub fn has_outcomes(&self) -> bool {
        self.rows.iter().all(|row| row.outcome.is_some())
    }

    /// Makes the recorded space of these results.
    ///
    /// Only recorded configurations are legal. Integers become ordinals in ascending order, and other numbers
    /// ordinals of their ranks; lists of numbers with the same product become factorizations, other lists of
    /// integers of the same length one parameter for each element, orderings of the same names permutations,
    /// and everything else categories.
    ///
    /// # Errors
    /// If no configuration succeeded, there are only winners without times, or the parameters do not form a
    /// space.
    pub fn space(&self, name: &str) -> Result<RecordedSpace, FormatError> {
        let reasons = || {
            if self.notes.is_empty() { String::new() } else { format!(" ({})", self.notes.join("; ")) }
        };
        if self.rows.is_empty() {
            return Err(FormatError::NoRows { n_rows: self.n_rows, reasons: reasons() });
        }
        if self.best().is_none() {
            return Err(FormatError::NothingValid { n_rows: self.rows.len(), reasons: reasons() });
        }
        let outcomes: Option<Vec<Outcome>> = self.rows.iter().map(|row| row.outcome.clone()).collect();
        let outcomes = outcomes.ok_or(FormatError::NoTimes)?;
        let (space, configs) = self.listed(name)?;
        let trials = configs.into_iter().zip(outcomes).map(|(config, outcome)| Trial { config, outcome });
        Ok(RecordedSpace::new(Arc::new(space), trials).with_notes(self.notes.clone()))
    }

    /// Returns the best configuration with the parameters of [`Results::space`], to be [carried
    /// over](carried_over); `None` if there is none.
    ///
    /// # Errors
    /// If the parameters do not form a space.
    pub fn best_config(&self) -> Result<Option<Json>, FormatError> {
        let Some(best) = self.best() else { return Ok(None) };
        let (task, parameters, rows) = (self.task.clone(), self.parameters.clone(), vec![best.clone()]);
        let only = Results { task, parameters, rows, n_rows: 1, notes: Vec::new() };
        let (space, configs) = only.listed("best")?;
        Ok(configs.first().map(|config| space.config_to_json(config)))
    }

    /// Makes the space of the rows' configurations, and the configuration of each row.
    fn listed(&self, name: &str) -> Result<(Space, Vec<Config>), FormatError> {
        // Values that are listed but never occur stay in the parameter.
        let mut axes = Vec::new();
        for (column, ParameterValues { name, values }) in self.parameters.iter().enumerate() {
            match lists_of_one_length(values) {
                Some(n_places) if factorization(values).is_none() => {
                    for place in 0..n_places {
                        let of_place: Vec<i64> = values.iter().filter_map(|list| list[place].as_i64()).collect();
                        // An element that always stands for the rest of a loop carries no information.
                        if of_place.iter().all(|value| *value == -1) {
                            continue;
                        }
                        let (mut known, mut distinct) = (HashMap::new(), Vec::new());
                        let place_of = |value: &i64| {
                            *known.entry(*value).or_insert_with(|| {
                                distinct.push(Json::from(*value));
                                distinct.len() - 1
                            })
                        };
                        let places: Vec<usize> = of_place.iter().map(place_of).collect();
                        let feasible = Feasible::new(&distinct);
                        axes.push(MergedParameter {
                            column,
                            name: format!("{name}[{place}]"),
                            places: Some(places),
                            feasible,
                        });
                    }
                }
                _ => axes.push(MergedParameter {
                    column,
                    name: name.clone(),
                    places: None,
                    feasible: Feasible::new(values),
                }),
            }
        }
        let parameters = axes.iter().map(|axis| Parameter::new(&axis.name, axis.feasible.domain.clone()));
        let product = ListedProduct::new(name, parameters.collect())?;
        let ranks: Vec<Vec<u64>> =
            axes.iter().enumerate().map(|(at, axis)| axis.feasible.ranks(&product, at)).collect();
        let config = |row: &ConfigResult| {
            let rank = |(axis, ranks): (&MergedParameter, &Vec<u64>)| {
                let place = row.places[axis.column] as usize;
                ranks[axis.places.as_ref().map_or(place, |places| places[place])]
            };
            let config: Box<[u64]> = axes.iter().zip(&ranks).map(rank).collect();
            Config::new(config)
        };
        let configs: Vec<Config> = self.rows.iter().map(config).collect();
        Ok((product.only(&configs)?, configs))
    }
}

/// Best configurations of other results with the same parameters, mapped to the nearest legal ones of a
/// space, without repetition.
pub fn carried_over(into: &Space, others: &[Json]) -> Vec<Config> {
    let mut found: Vec<Config> = Vec::new();
    for other in others {
        let config = into.nearest_to_json(other);
        found.extend(config.filter(|config| !found.contains(config)));
    }
    found
}

/// Parameter of a space, made from one or more parameters of a file.
struct MergedParameter {
    /// Index of the parameter in the file.
    column: usize,
    name: String,
    /// Index in the parameter's values for each of the file's values; `None` if they are the same.
    places: Option<Vec<usize>>,
    feasible: Feasible,
}

/// Common length of lists of integers, if all have the same.
fn lists_of_one_length(values: &[Json]) -> Option<usize> {
    let length = |value: &Json| {
        let items = value.as_array()?;
        items.iter().all(Json::is_i64).then_some(items.len())
    };
    let first = values.first().and_then(length).filter(|n| (1..=64).contains(n))?;
    values.iter().all(|value| length(value) == Some(first)).then_some(first)
}

/// Domain inferred from values.
struct Feasible {
    domain: Domain,
    ranks: Ranks,
}

/// Ranks by the index of a value.
enum Ranks {
    /// Ranks of values that are numbered here.
    Known(Vec<u64>),
    /// Values whose ranks the domain determines.
    Of(Vec<Json>),
}

impl Feasible {
    fn new(values: &[Json]) -> Feasible {
        if let Some(numbers) = values.iter().map(Json::as_i64).collect::<Option<Vec<i64>>>() {
            return Feasible::ordered(numbers, Domain::Ordinal);
        }
        if let Some(numbers) = values.iter().map(real).collect::<Option<Vec<_>>>() {
            // An ordinal holds integers: floating-point numbers are represented by their ranks in ascending
            // order.
            return Feasible::ordered(numbers, |sorted| Domain::Ordinal((0..sorted.len() as i64).collect()));
        }
        match factorization(values).or_else(|| permutation(values)) {
            Some(domain) => Feasible { domain, ranks: Ranks::Of(values.to_vec()) },
            None => {
                let names: Vec<String> = values.iter().map(category).collect();
                let is_clear = names.iter().collect::<HashSet<_>>().len() == names.len();
                // If the text "1" and the number 1 both occur, texts keep their quotes.
                let names = if is_clear { names } else { values.iter().map(Json::to_string).collect() };
                Feasible::ordered(names, Domain::Categorical)
            }
        }
    }

    fn ordered<T: Ord + Clone>(values: Vec<T>, domain: impl FnOnce(Vec<T>) -> Domain) -> Feasible {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by_key(|&place| &values[place]);
        let mut ranks = vec![0; values.len()];
        order.iter().enumerate().for_each(|(rank, &place)| ranks[place] = rank as u64);
        let sorted = order.into_iter().map(|place| values[place].clone()).collect();
        Feasible { domain: domain(sorted), ranks: Ranks::Known(ranks) }
    }

    fn ranks(&self, product: &ListedProduct, parameter: usize) -> Vec<u64> {
        match &self.ranks {
            Ranks::Known(ranks) => ranks.clone(),
            Ranks::Of(values) => {
                let rank = |value: &Json| product.rank_of_json(parameter, value);
                values.iter().map(|value| rank(value).expect("invariant: a value of its own feasible set")).collect()
            }
        }
    }
}

/// Sort key of a number; numbers that are equal in floating point are ordered by their text.
fn real(value: &Json) -> Option<(i64, String)> {
    let number = value.as_number()?.as_f64()?;
    // The order of floating-point numbers is that of their bits, reversed below zero.
    let bits = number.to_bits() as i64;
    Some((if bits < 0 { bits ^ i64::MAX } else { bits }, value.to_string()))
}

fn factorization(values: &[Json]) -> Option<Domain> {
    let shape = |value: &Json| {
        let factors: Vec<u64> = value.as_array()?.iter().map(Json::as_u64).collect::<Option<_>>()?;
        Some((factors.iter().try_fold(1u64, |n, &factor| n.checked_mul(factor))?, factors.len()))
    };
    let (n, parts) = shape(values.first()?)?;
    // A product of large primes would take forever to factorize.
    let is_small = (1..=1 << 40).contains(&n) && (1..=64).contains(&parts);
    (is_small && values.iter().all(|value| shape(value) == Some((n, parts))))
        .then_some(Domain::Factorization { n, parts })
}

fn permutation(values: &[Json]) -> Option<Domain> {
    let sorted = |value: &Json| {
        let names = value.as_array()?.iter().map(|name| Some(name.as_str()?.to_string()));
        let mut names: Vec<String> = names.collect::<Option<_>>()?;
        names.sort();
        Some(names)
    };
    let names = sorted(values.first()?)?;
    let distinct = names.windows(2).all(|pair| pair[0] != pair[1]);
    (distinct && !names.is_empty() && values.iter().all(|value| sorted(value).as_ref() == Some(&names)))
        .then_some(Domain::Permutation(names))
}

/// Formats a value as the name of a category.
fn category(value: &Json) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}
