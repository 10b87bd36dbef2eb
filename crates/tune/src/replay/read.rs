//! Reading recorded spaces: which format a file has, and the way from its rows to a space.

use serde_json::Value as Json;

use super::json::{Fault, Reader};
use super::rows::Rows;
use super::{RecordedSpace, kernel_tuner, records, t1, t4};
use crate::space::SpaceError;

/// The objective that is replayed.
pub(super) const OBJECTIVE: &str = "time";
/// Where the current Kernel Tuner writes a failure, in its caches and as a measurement of T4.
pub(super) const ERROR: &str = "__error__";
/// The most times of single runs of one configuration.
pub(super) const MOST_TIMES: usize = 1 << 16;

/// Why a file is not a recorded space. The file's fault.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The description that belongs to the results is none.
    #[error("the description: {0} (without a description, parameters have the values that occur)")]
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
    /// It has more rows than are read.
    #[error("more than {limit} rows, of so many parameters")]
    TooMany {
        /// The most rows that are read.
        limit: usize,
    },
    /// The parameters make no space.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// There are no rows, or nothing can be known of any.
    #[error("{}{reasons}", match n_rows { 0 => "there are no rows".into(), n => format!("none of its {n} rows can be read") })]
    NoRows {
        /// How many there are.
        n_rows: u64,
        /// Why, as far as that can be told.
        reasons: String,
    },
    /// There is nothing to find.
    #[error("none of its {n_rows} configurations was measured successfully{reasons}")]
    NothingValid {
        /// How many there are.
        n_rows: usize,
        /// Why, as far as that is odd.
        reasons: String,
    },
}

impl RecordedSpace {
    /// The recorded space in a file: T4 results, a Kernel Tuner cache or exported records, as it is or packed
    /// by gzip. `description` is a T1 file, which says the parameters and values of T4 results; without one
    /// they are those that occur.
    ///
    /// Only recorded configurations are legal. Integers are ordinals in ascending order, and so are other
    /// numbers, by their places in that order; lists of numbers with one product are factorizations, orders
    /// of the same names permutations, and all else categories.
    ///
    /// Files of others are read as far as they can be. A row without a configuration of these parameters is
    /// left out. A time that is no positive number, or stands for a failure, is a failure. Of a configuration
    /// in several rows the median of those that succeeded counts. A file that ends too early is read up to
    /// there. [`RecordedSpace::notes`] tell of all that.
    ///
    /// # Errors
    /// [`ReplayError`], in one line, with the place, where nothing can be known.
    pub fn read(name: &str, file: &[u8], description: Option<&[u8]>) -> Result<RecordedSpace, ReplayError> {
        let of_description = |error| ReplayError::Description(Box::new(error));
        let described = description.map(t1::read).transpose().map_err(of_description)?;
        let (described, twice) = described.map_or((None, None), |(columns, twice)| (Some(columns), twice));
        let Head { format, kernel_tuner, t4 } = Head::read(file)?;
        let mut rows = match format {
            Format::KernelTuner => {
                let mut rows = kernel_tuner.rows(described)?;
                read_member(file, "cache", &mut rows, kernel_tuner::read_rows)?;
                rows
            }
            Format::T4 => {
                let mut rows = t4.rows(described);
                read_member(file, "results", &mut rows, |reader, rows| t4::read_rows(&t4, reader, rows))?;
                rows
            }
            Format::Records => records::read(file, described)?,
            Format::Other(found) => return Err(ReplayError::Format { found }),
        };
        rows.notes.extend(twice);
        rows.recorded_space(name)
    }
}

/// What a file is.
#[derive(Clone, Copy)]
enum Format {
    T4,
    KernelTuner,
    Records,
    /// None that is replayed.
    Other(&'static str),
}

/// The members that tell formats apart, the surest ones first.
const FORMATS: &[(&str, Format)] = &[
    ("clblast_device_type", Format::Other("results of a tuner of CLBlast")),
    ("cache", Format::KernelTuner),
    ("results", Format::T4),
    ("workload", Format::Records),
    ("ConfigurationSpace", Format::Other("a T1 description, which has no results")),
    ("Results", Format::Other("results of KTT")),
    ("input", Format::Other("a log of AutoTVM")),
    ("i", Format::Other("a log of Ansor")),
    ("configs_timings", Format::Other("a cache of Triton's autotuner")),
    // Of a run that was stopped before its first row.
    ("tune_params_keys", Format::KernelTuner),
];

/// What a file is, and what stands in it beside the rows: it may come behind them.
struct Head {
    format: Format,
    kernel_tuner: kernel_tuner::Head,
    t4: t4::Head,
}

impl Head {
    fn read(file: &[u8]) -> Result<Head, ReplayError> {
        let (mut kernel_tuner, mut t4) = (kernel_tuner::Head::default(), t4::Head::default());
        let mut found: Option<usize> = None;
        let mut reader = Reader::new(file)?;
        match reader.peek() {
            Err(fault) => return Err(reader.error(fault)),
            Ok(None) => return Err(ReplayError::Format { found: "an empty file" }),
            Ok(Some(b'[')) => return Err(ReplayError::Format { found: "a list" }),
            Ok(Some(_)) => {}
        }
        let read = reader.object(|reader, name| {
            let known = FORMATS.iter().position(|(member, _)| *member == name);
            found = [found, known].into_iter().flatten().min();
            match name.as_str() {
                "metadata" => t4.read(&name, reader),
                _ => kernel_tuner.read(&name, reader),
            }
        });
        let unknown = match read {
            Ok(()) => "JSON of an unknown kind",
            Err(Fault::End) => "a file that ends before it says what it is",
            Err(fault) => return Err(reader.error(fault)),
        };
        let format = found.map_or(Format::Other(unknown), |at| FORMATS[at].1);
        Ok(Head { format, kernel_tuner, t4 })
    }
}

/// Reads the rows in a member of the document. Where the file is not closed, those before its end.
fn read_member(
    file: &[u8],
    member: &str,
    rows: &mut Rows,
    read: impl Fn(&mut Reader, &mut Rows) -> Result<(), Fault>,
) -> Result<(), ReplayError> {
    let mut reader = Reader::new(file)?;
    let whole = reader.object(|reader, name| if name == member { read(reader, rows) } else { reader.skip() });
    match whole.and_then(|()| reader.peek()) {
        Ok(None) => {}
        Ok(Some(_)) => rows.notes.push(format!("what stands behind the end is left out, from {}", reader.place())),
        Err(Fault::End) => rows.is_cut_off(),
        Err(fault) => return Err(reader.error(fault)),
    }
    Ok(())
}

/// The names that a value lists, or the one that it is.
pub(super) fn names(value: Option<Json>) -> Vec<String> {
    match value {
        Some(Json::Array(items)) => items.into_iter().flat_map(|item| names(Some(item))).collect(),
        Some(Json::String(name)) => vec![name],
        _ => Vec::new(),
    }
}

/// Objectives as text, where time is not the only one.
pub(super) fn other_objective(objectives: &[String]) -> Option<String> {
    let quoted = || objectives.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(" and ");
    objectives.iter().any(|name| name != OBJECTIVE).then(quoted)
}
