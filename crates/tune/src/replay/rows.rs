//! Rows of a recorded space: a configuration with its outcome in each, oddities, and the space that they
//! make.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde_json::{Number, Value as Json};

use super::json::{Fault, Reader};
use super::outcome::{Reading, brief};
use super::{RecordedSpace, ReplayError};
use crate::space::{Config, Domain, Parameter, Product};
use crate::trial::{Outcome, Timing, Trial};

/// The most parameters of a configuration.
const MOST_PARAMETERS: usize = 1000;
/// The most parts of a parameter's value.
const MOST_PARTS: usize = 256;
/// The longest value of a parameter as text, in bytes.
const MOST_TEXT: usize = 4096;
/// The most values that a description lists, all parameters together.
const MOST_LISTED: usize = 1 << 20;
/// What rows may cost: each its parameters and what is kept beside them. Some gigabytes of memory.
const MOST_COST: usize = 1 << 26;
const COST_OF_ROW: usize = 16;

/// What is odd about a file, by kind: how many there are and the first one.
#[derive(Default)]
struct Oddities(Vec<(&'static str, u64, String)>);

impl Oddities {
    fn add(&mut self, what: &'static str, first: impl FnOnce() -> String) {
        match self.0.iter_mut().find(|(known, ..)| *known == what) {
            Some((_, n, _)) => *n += 1,
            None => self.0.push((what, 1, first())),
        }
    }

    fn lines(&self, n_rows: u64) -> impl Iterator<Item = String> {
        self.0.iter().map(move |(what, n, first)| format!("{what}: {n} of {n_rows}, the first {first}"))
    }
}

/// A parameter, and its values as text.
#[derive(Default)]
pub(super) struct Column {
    pub(super) name: String,
    values: Vec<String>,
    places: HashMap<String, u32>,
    /// Whether no other values may occur.
    is_listed: bool,
}

impl Column {
    /// A parameter whose values are those that occur.
    pub(super) fn open(name: &str) -> Column {
        Column { name: name.into(), ..Column::default() }
    }

    /// A parameter with these values.
    pub(super) fn listed(name: &str, values: Vec<Json>, lists: &mut Lists) -> Result<Column, Fault> {
        let mut column = Column::open(name);
        values.into_iter().try_for_each(|value| column.list(Some(value), lists))?;
        column.is_listed = true;
        Ok(column)
    }

    /// A parameter with the values of the array at hand.
    pub(super) fn read(name: &str, reader: &mut Reader, lists: &mut Lists) -> Result<Column, Fault> {
        let mut column = Column { is_listed: true, ..Column::open(name) };
        reader.array(|reader| {
            let value = reader.value(MOST_PARTS)?;
            column.list(value, lists)
        })?;
        Ok(column)
    }

    fn list(&mut self, value: Option<Json>, lists: &mut Lists) -> Result<(), Fault> {
        let value = text_of(value).map_err(|problem| Fault::Problem(format!("parameter {}: {problem}", self.name)))?;
        if self.places.contains_key(&value) {
            lists.twice.get_or_insert_with(|| {
                format!("parameter {} lists {} twice; it counts once", brief(&self.name), brief(&value))
            });
            return Ok(());
        }
        lists.n_values += 1;
        if lists.n_values > MOST_LISTED {
            return Err(Fault::Problem(format!("more than {MOST_LISTED} values of parameters")));
        }
        self.add(value);
        Ok(())
    }

    fn add(&mut self, value: String) -> u32 {
        let place = self.values.len() as u32;
        self.places.insert(value.clone(), place);
        self.values.push(value);
        place
    }

    /// The place of a value; a new one where any may occur.
    fn place(&mut self, value: Option<Json>) -> Result<u32, String> {
        let value = text_of(value).map_err(|problem| format!("parameter {}: {problem}", self.name))?;
        match self.places.get(&value) {
            Some(&place) => Ok(place),
            None if self.is_listed => {
                let mut allowed = self.values.iter().take(32).cloned().collect::<Vec<_>>().join(", ");
                allowed += if self.values.len() > 32 { ", …" } else { "" };
                Err(format!("parameter {} cannot be {value}; allowed: {allowed}", self.name))
            }
            None => Ok(self.add(value)),
        }
    }
}

/// What is odd about lists of values, and how many there are so far.
#[derive(Default)]
pub(super) struct Lists {
    n_values: usize,
    pub(super) twice: Option<String>,
}

/// A value as text, in which numbers that are the same are written alike.
fn text_of(value: Option<Json>) -> Result<String, String> {
    let text = value.map(|value| alike(value).to_string()).filter(|text| text.len() <= MOST_TEXT);
    text.ok_or_else(|| format!("a value of more than {MOST_PARTS} parts or {MOST_TEXT} bytes"))
}

/// A value with whole numbers as such: Python takes 8.0 for 8.
fn alike(value: Json) -> Json {
    /// Whole numbers up to here are floating-point numbers too.
    const LARGEST: f64 = 9_007_199_254_740_992.0;
    match value {
        Json::Number(number) => {
            match number.as_f64().filter(|x| number.is_f64() && x.fract() == 0.0 && x.abs() <= LARGEST) {
                Some(whole) => Json::Number(Number::from(whole as i64)),
                None => Json::Number(number),
            }
        }
        Json::Array(items) => items.into_iter().map(alike).collect(),
        Json::Object(members) => members.into_iter().map(|(name, value)| (name, alike(value))).collect(),
        other => other,
    }
}

/// A configuration as a file has it: each parameter's value; `None` where that is too long.
pub(super) type Values = Vec<(String, Option<Json>)>;

/// Reads the value of a parameter.
pub(super) fn read_value(reader: &mut Reader) -> Result<Option<Json>, Fault> {
    reader.value(MOST_PARTS)
}

/// The rows read so far.
pub(super) struct Rows {
    columns: Vec<Column>,
    /// Whether the parameters are known; otherwise the first row has them.
    is_known: bool,
    /// By configuration, as places of values: its outcomes.
    outcomes: HashMap<Box<[u32]>, Vec<Outcome>>,
    n_rows: u64,
    n_kept: usize,
    /// The place of the row at hand.
    at: Option<String>,
    oddities: Oddities,
    /// What else is odd, in a line each.
    pub(super) notes: Vec<String>,
}

const LEFT_OUT: &str = "rows left out";
const MEASURED_AGAIN: &str =
    "rows of configurations that are recorded already (the median of those that succeeded counts)";

impl Rows {
    /// No rows yet; of these parameters, where they are known.
    pub(super) fn new(columns: Option<Vec<Column>>, notes: Vec<String>) -> Rows {
        let is_known = columns.is_some();
        let (columns, oddities) = (columns.unwrap_or_default(), Oddities::default());
        let outcomes = HashMap::new();
        Rows { columns, is_known, outcomes, n_rows: 0, n_kept: 0, at: None, oddities, notes }
    }

    /// Whether there is a parameter of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.columns.iter().any(|column| column.name == name)
    }

    /// Begins with the row at this place.
    pub(super) fn begin(&mut self, place: String) {
        self.at = Some(place);
    }

    /// Notes something about the row at hand.
    pub(super) fn remark(&mut self, what: &'static str, found: &str) {
        let place = self.at.as_deref().unwrap_or_default();
        self.oddities.add(what, || format!("{place}: {}", brief(found)));
    }

    /// Counts the row at hand as one of which nothing can be known.
    pub(super) fn leave_out(&mut self, problem: &str) {
        self.n_rows += 1;
        let place = self.at.take().unwrap_or_default();
        self.oddities.add(LEFT_OUT, || format!("{place}: {}", brief(problem)));
    }

    /// Says that the file ends before it should.
    pub(super) fn is_cut_off(&mut self) {
        let left_out =
            self.at.take().map_or(String::new(), |place| format!(", and {place}, where it ends, is left out"));
        let n_rows = self.n_rows;
        self.notes.push(format!("the file is not closed, as a stopped run leaves it: {n_rows} whole rows{left_out}"));
    }

    /// Adds the row at hand, or leaves it out where its configuration is none.
    ///
    /// # Errors
    /// Where there are more rows or parameters than are read.
    pub(super) fn add(&mut self, config: Values, reading: Reading) -> Result<(), ReplayError> {
        if !self.is_known && !config.is_empty() {
            self.is_known = true;
            self.columns = config.iter().map(|(name, _)| Column::open(name)).collect();
        }
        if self.columns.is_empty() {
            self.leave_out("there are no parameters");
            return Ok(());
        }
        if self.columns.len() > MOST_PARAMETERS {
            let problem = format!("{} parameters, of {MOST_PARAMETERS} at most", self.columns.len());
            return Err(ReplayError::Entry { place: self.at.take().unwrap_or_default(), problem });
        }
        let config = match self.places(config) {
            Ok(config) => config,
            Err(problem) => {
                self.leave_out(&problem);
                return Ok(());
            }
        };
        let place = self.at.take().unwrap_or_default();
        (self.n_rows, self.n_kept) = (self.n_rows + 1, self.n_kept + 1);
        let most = MOST_COST / (self.columns.len() + COST_OF_ROW);
        if self.n_kept > most {
            return Err(ReplayError::TooMany { limit: most });
        }
        if let Some((what, found)) = reading.oddity {
            self.oddities.add(what, || format!("{place}: {}", brief(&found)));
        }
        match self.outcomes.entry(config) {
            Entry::Vacant(entry) => drop(entry.insert(vec![reading.outcome])),
            Entry::Occupied(mut entry) => {
                self.oddities.add(MEASURED_AGAIN, || place);
                entry.get_mut().push(reading.outcome);
            }
        }
        Ok(())
    }

    fn places(&mut self, config: Values) -> Result<Box<[u32]>, String> {
        let mut places: Vec<Option<u32>> = vec![None; self.columns.len()];
        for (at, (name, value)) in config.into_iter().enumerate() {
            // Nearly always they are in order.
            let is_it = |column: &&mut Column| column.name == name;
            let at = match self.columns.get_mut(at).filter(is_it) {
                Some(_) => at,
                None => self.columns.iter().position(|column| column.name == name).ok_or_else(|| {
                    let known: Vec<&str> = self.columns.iter().map(|column| column.name.as_str()).collect();
                    format!("unknown parameter {name}; the space has {}", known.join(", "))
                })?,
            };
            places[at] = Some(self.columns[at].place(value)?);
        }
        let place = |(column, place): (&Column, Option<u32>)| {
            place.ok_or_else(|| format!("parameter {} is missing", column.name))
        };
        self.columns.iter().zip(places).map(place).collect()
    }

    /// The space of these rows.
    ///
    /// # Errors
    /// Where there is nothing to find, or the parameters make no space.
    pub(super) fn recorded_space(mut self, name: &str) -> Result<RecordedSpace, ReplayError> {
        self.notes.extend(self.oddities.lines(self.n_rows));
        let reasons = |notes: &[String]| {
            if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) }
        };
        let is_sound = |outcomes: &Vec<Outcome>| outcomes.iter().any(|outcome| outcome.timing().is_some());
        if self.outcomes.is_empty() {
            return Err(ReplayError::NoRows { n_rows: self.n_rows, reasons: reasons(&self.notes) });
        }
        if !self.outcomes.values().any(is_sound) {
            return Err(ReplayError::NothingValid { n_rows: self.outcomes.len(), reasons: reasons(&self.notes) });
        }
        // A value that is listed but never occurs stays one of the parameter's.
        let columns = self.columns.into_iter().map(|column| (column.name, Feasible::new(&column.values)));
        let (names, feasible): (Vec<String>, Vec<Feasible>) = columns.unzip();
        let parameters = names.into_iter().zip(&feasible);
        let parameters = parameters.map(|(name, feasible)| Parameter::new(&name, feasible.domain.clone()));
        let product = Product::new(name, parameters.collect())?;
        let ranks: Vec<Vec<u64>> =
            feasible.into_iter().enumerate().map(|(at, feasible)| feasible.ranks(&product, at)).collect();
        let trial = |(places, outcomes): (Box<[u32]>, Vec<Outcome>)| {
            let config: Box<[u64]> = places.iter().zip(&ranks).map(|(&place, ranks)| ranks[place as usize]).collect();
            Trial { config: Config::new(config), outcome: of_repeated(outcomes) }
        };
        let trials: Vec<Trial> = self.outcomes.into_iter().map(trial).collect();
        let space = product.only(trials.iter().map(|trial| &trial.config))?;
        Ok(RecordedSpace { notes: self.notes.into(), ..RecordedSpace::new(Arc::new(space), trials) })
    }
}

/// What counts of several measurements of one configuration: the median of those that succeeded.
fn of_repeated(mut outcomes: Vec<Outcome>) -> Outcome {
    if outcomes.len() > 1 {
        let medians: Vec<f64> = outcomes.iter().filter_map(|outcome| Some(outcome.timing()?.median_ns)).collect();
        if !medians.is_empty() {
            return Outcome::Measured(Timing::of_samples(&medians, false));
        }
    }
    outcomes.swap_remove(0)
}

/// The feasible set that values suggest.
struct Feasible {
    domain: Domain,
    ranks: Ranks,
}

/// By place of a value: its rank.
enum Ranks {
    /// Of values that are ordered here.
    Known(Vec<u64>),
    /// Of values that the feasible set numbers.
    Of(Vec<Json>),
}

impl Feasible {
    fn new(values: &[String]) -> Feasible {
        let values: Vec<Json> =
            values.iter().map(|text| serde_json::from_str(text).expect("invariant: printed from JSON")).collect();
        if let Some(numbers) = values.iter().map(Json::as_i64).collect::<Option<Vec<i64>>>() {
            return Feasible::ordered(numbers, Domain::Ordinal);
        }
        if let Some(numbers) = values.iter().map(real).collect::<Option<Vec<_>>>() {
            // An ordinal holds whole numbers: those with fractions are known by their places in ascending
            // order.
            return Feasible::ordered(numbers, |sorted| Domain::Ordinal((0..sorted.len() as i64).collect()));
        }
        match factorization(&values).or_else(|| permutation(&values)) {
            Some(domain) => Feasible { domain, ranks: Ranks::Of(values) },
            None => {
                let names: Vec<String> = values.iter().map(category).collect();
                let is_clear = names.iter().collect::<HashSet<_>>().len() == names.len();
                // The text "1" beside the number 1: then texts keep their quotes.
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

    fn ranks(self, product: &Product, parameter: usize) -> Vec<u64> {
        match self.ranks {
            Ranks::Known(ranks) => ranks,
            Ranks::Of(values) => {
                let rank = |value: &Json| product.rank_of_json(parameter, value);
                values.iter().map(|value| rank(value).expect("invariant: a value of its own feasible set")).collect()
            }
        }
    }
}

/// A number that can be ordered; equal ones, as far as floating-point numbers tell, by their text.
fn real(value: &Json) -> Option<(i64, String)> {
    let number = value.as_number()?.as_f64()?;
    // The order of floating-point numbers is that of their bits, the other way round below zero.
    let bits = number.to_bits() as i64;
    Some((if bits < 0 { bits ^ i64::MAX } else { bits }, value.to_string()))
}

fn factorization(values: &[Json]) -> Option<Domain> {
    let shape = |value: &Json| {
        let factors: Vec<u64> = value.as_array()?.iter().map(Json::as_u64).collect::<Option<_>>()?;
        Some((factors.iter().try_fold(1u64, |n, &factor| n.checked_mul(factor))?, factors.len()))
    };
    let (n, parts) = shape(values.first()?)?;
    // A product of large primes would take for ever to factorize.
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

/// A value as the name of a category.
fn category(value: &Json) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}
