//! Reading recorded spaces: which format a file has, and the way from its rows to a space.

use std::collections::HashSet;
use std::io::Read;
use std::sync::Arc;

use flate2::read::MultiGzDecoder;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value as Json};

use super::{RecordedSpace, kernel_tuner, records, t1, t4};
use crate::space::{ConfigError, Domain, Parameter, Space, SpaceError};
use crate::trial::{ErrorClass, Outcome, Timing, Trial};

/// The most bytes of an unpacked file; far above any recorded space.
const SIZE_LIMIT: u64 = 1 << 30;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Why a file is not a recorded space. The file's fault.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The description that belongs to the results is none.
    #[error("the description: {0}")]
    Description(#[source] Box<ReplayError>),
    /// The compressed data is damaged.
    #[error("cannot be unpacked: {0}")]
    Packed(#[source] std::io::Error),
    /// It is too large.
    #[error("longer than {limit} bytes when unpacked")]
    TooLong {
        /// The most bytes that are read.
        limit: u64,
    },
    /// It is not JSON, or lacks what its format has.
    #[error("line {line}, column {column}: {problem}")]
    Json {
        /// The line, counted from 1.
        line: usize,
        /// The column, counted from 1.
        column: usize,
        /// What is wrong, in one line.
        problem: String,
    },
    /// It is JSON of another kind.
    #[error("{found}; there are T4 results, Kernel Tuner caches and exported records")]
    Format {
        /// What it is, as far as that can be told.
        found: &'static str,
    },
    /// One of its entries is wrong.
    #[error("{place}: {problem}")]
    Entry {
        /// Where it is.
        place: String,
        /// What is wrong, in one line.
        problem: String,
    },
    /// An entry's configuration does not fit the parameters.
    #[error("{place}: {source}")]
    Config {
        /// Where it is.
        place: String,
        /// Why.
        source: ConfigError,
    },
    /// The parameters make no space.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// There is nothing to find.
    #[error("none of its {n_rows} configurations was measured successfully")]
    NothingValid {
        /// How many there are.
        n_rows: usize,
    },
}

/// One recorded configuration.
pub(super) struct Row {
    /// Where it is in the file.
    pub(super) place: String,
    pub(super) config: Map<String, Json>,
    pub(super) outcome: Outcome,
}

/// The values of a parameter that a description lists.
pub(super) struct Listed {
    pub(super) name: String,
    pub(super) values: Vec<Json>,
}

/// What a file holds.
pub(super) struct Contents {
    /// The parameters, where the file lists them.
    pub(super) parameters: Option<Vec<Listed>>,
    pub(super) rows: Vec<Row>,
}

impl RecordedSpace {
    /// The recorded space in a file: T4 results, a Kernel Tuner cache or exported records, as it is or packed by gzip.
    /// `description` is a T1 file, which says the parameters and values of T4 results; without one they are those
    /// that occur.
    ///
    /// Only recorded configurations are legal. A parameter of integers is ordinal in ascending order; lists of numbers
    /// with one product are factorizations, orders of the same names permutations, and all else categories.
    ///
    /// # Errors
    /// [`ReplayError`], in one line, with the place.
    pub fn read(name: &str, file: &[u8], description: Option<&[u8]>) -> Result<RecordedSpace, ReplayError> {
        let contents = contents(&unpacked(file)?)?;
        let of_description = |error| ReplayError::Description(Box::new(error));
        let described = description.map(|file| t1::read(&unpacked(file)?)).transpose().map_err(of_description)?;
        recorded_space(name, described.or(contents.parameters), contents.rows)
    }
}

fn unpacked(file: &[u8]) -> Result<Vec<u8>, ReplayError> {
    let mut bytes = Vec::new();
    if file.starts_with(&GZIP_MAGIC) {
        MultiGzDecoder::new(file).take(SIZE_LIMIT + 1).read_to_end(&mut bytes).map_err(ReplayError::Packed)?;
    } else {
        bytes.extend_from_slice(&file[..file.len().min(SIZE_LIMIT as usize + 1)]);
    }
    if bytes.len() as u64 > SIZE_LIMIT { Err(ReplayError::TooLong { limit: SIZE_LIMIT }) } else { Ok(bytes) }
}

/// The keys that tell the formats apart.
#[derive(Deserialize)]
struct Probe {
    results: Option<IgnoredAny>,
    cache: Option<IgnoredAny>,
    workload: Option<IgnoredAny>,
    #[serde(rename = "ConfigurationSpace")]
    configuration_space: Option<IgnoredAny>,
}

fn contents(bytes: &[u8]) -> Result<Contents, ReplayError> {
    let mut documents = serde_json::Deserializer::from_slice(bytes).into_iter::<Probe>();
    let probe = documents.next().ok_or(ReplayError::Format { found: "an empty file" })?.map_err(json_error)?;
    match probe {
        Probe { results: Some(_), .. } => t4::read(bytes),
        Probe { cache: Some(_), .. } => kernel_tuner::read(bytes),
        Probe { workload: Some(_), .. } => records::read(bytes),
        Probe { configuration_space: Some(_), .. } => {
            Err(ReplayError::Format { found: "a T1 description, which has no results" })
        }
        _ => Err(ReplayError::Format { found: "JSON of an unknown kind" }),
    }
}

/// The document as a format has it.
pub(super) fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, ReplayError> {
    serde_json::from_slice(bytes).map_err(json_error)
}

fn json_error(error: serde_json::Error) -> ReplayError {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let problem = text.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&text);
    let problem = problem.split_whitespace().collect::<Vec<_>>().join(" ");
    ReplayError::Json { line, column, problem }
}

/// The outcome of a time in units of so many nanoseconds; `None` where it is not a positive number.
pub(super) fn timed(time: f64, unit_ns: f64) -> Option<Outcome> {
    let ns = time * unit_ns;
    (ns > 0.0 && ns.is_finite()).then(|| Outcome::Measured(Timing::of_samples(&[ns], false)))
}

/// A failure as other tuners record it.
pub(super) fn failed(class: ErrorClass, found: &str) -> Outcome {
    Outcome::Failed { class, message: format!("recorded as {found}") }
}

fn recorded_space(name: &str, listed: Option<Vec<Listed>>, rows: Vec<Row>) -> Result<RecordedSpace, ReplayError> {
    let listed = listed.unwrap_or_else(|| occurring(&rows));
    let parameters = listed.iter().map(|p| Parameter::new(&p.name, domain(&p.values)));
    let product = Space::new(name, parameters.collect(), Vec::new())?;
    let mut trials = Vec::with_capacity(rows.len());
    for Row { place, mut config, outcome } in rows {
        for (parameter, listed) in listed.iter().enumerate() {
            if let Domain::Categorical(_) = product.domain(parameter)
                && let Some(value) = config.get_mut(&listed.name)
            {
                *value = category(value).into();
            }
        }
        let config =
            product.config_from_json(&config.into()).map_err(|source| ReplayError::Config { place, source })?;
        trials.push(Trial { config, outcome });
    }
    let space = product.only(trials.iter().map(|trial| &trial.config))?;
    let recorded = RecordedSpace::new(Arc::new(space), trials);
    match recorded.n_valid() {
        0 => Err(ReplayError::NothingValid { n_rows: recorded.len() }),
        _ => Ok(recorded),
    }
}

/// The parameters of the first row with the values that occur in any.
fn occurring(rows: &[Row]) -> Vec<Listed> {
    let names = rows.first().into_iter().flat_map(|row| row.config.keys());
    let of_name = |name: &String| {
        let mut seen = HashSet::new();
        let values = rows.iter().filter_map(|row| row.config.get(name));
        Listed { name: name.clone(), values: values.filter(|v| seen.insert(v.to_string())).cloned().collect() }
    };
    names.map(of_name).collect()
}

/// The feasible set that these values suggest.
fn domain(values: &[Json]) -> Domain {
    if let Some(mut numbers) = values.iter().map(Json::as_i64).collect::<Option<Vec<i64>>>() {
        numbers.sort();
        return Domain::Ordinal(numbers);
    }
    factorization(values).or_else(|| permutation(values)).unwrap_or_else(|| {
        let mut categories: Vec<String> = values.iter().map(category).collect();
        categories.sort();
        Domain::Categorical(categories)
    })
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
