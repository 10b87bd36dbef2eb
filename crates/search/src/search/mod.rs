//! Search strategies, which choose the next configurations to measure.
//!
//! A search proposes candidates and observes their outcomes (ask and tell). [`SEARCHES`] lists all searches
//! with their options; [`build`] makes one from text such as `genetic:population=50`.

mod annealing;
mod auto;
mod experience;
mod gbfs;
mod gbt;
mod genetic;
mod grid;
mod lfbo;
mod na2c;
mod nose;
mod opevo;
mod options;
mod population;
mod random;
mod rnn_controller;
mod seen;
mod simulated_annealing;
#[cfg(test)]
mod tests;
mod tree_gru;
mod view;
mod walk;

use std::sync::Arc;

pub use experience::Experience;
pub(crate) use gbt::chosen;
use options::Options;

use crate::features::LoopContexts;
use crate::space::{Config, Space};
use crate::trial::Trial;

/// Search over one space for the configuration of the smallest [`Outcome::cost`](crate::Outcome::cost). Its
/// proposals depend only on its seed, its options and the trials that it observed.
pub trait Search: Send {
    /// Proposes at most `n` legal configurations that were neither proposed nor observed before. Fewer do not
    /// mean the end; an empty list, for `n` above 0, means that the space is exhausted.
    fn propose(&mut self, n: usize) -> Vec<Config>;

    /// Whether proposals are about as good if the last ones are not observed yet, so that the next batch can
    /// be prepared while one is measured.
    fn looks_ahead(&self) -> bool {
        false
    }

    /// Whether the search handles several objectives itself. Other searches observe the geometric mean of all
    /// costs.
    fn weighs_objectives(&self) -> bool {
        false
    }

    /// Observes trials, including ones that it did not propose: trials of an earlier run count as its own.
    /// Configurations that are not of this space are ignored.
    fn observe(&mut self, trials: &[Trial]);
}

/// Search problem: a space, with further knowledge about it.
#[derive(Clone)]
pub struct Problem {
    /// The space.
    pub space: Arc<Space>,
    /// Loop contexts of configurations; `None` if configurations are not programs, as in a replay.
    pub contexts: Option<Contexts>,
    /// Measurements of other workloads for searches with transfer learning; see [`SearchRow::transfers`].
    pub experience: Option<Arc<Experience>>,
}

/// Function from a configuration to its loop contexts; `None` for a configuration that yields no program.
pub type Contexts = Arc<dyn Fn(&Config) -> Option<LoopContexts> + Send + Sync>;

impl From<&Arc<Space>> for Problem {
    /// Makes a problem of a space alone, without further knowledge.
    fn from(space: &Arc<Space>) -> Problem {
        Problem { space: space.clone(), contexts: None, experience: None }
    }
}

/// Row of the table of searches.
pub struct SearchRow {
    /// Name used to select the search, as in the literature.
    pub name: &'static str,
    /// Description, in one line.
    pub text: &'static str,
    /// Paper that describes the search; empty for textbook searches.
    pub paper: &'static str,
    /// Whether the search has a model that learns from [`Problem::experience`] (transfer learning).
    pub transfers: bool,
    /// Options of the search.
    pub options: &'static [SearchOption],
    make: Make,
}

/// Function that makes a search for a problem from a seed and the options of its row.
type Make = fn(&Problem, u64, &Options) -> Result<Box<dyn Search>, SearchError>;

/// Option of a search.
pub struct SearchOption {
    /// Name that [`build`] accepts.
    pub name: &'static str,
    /// Default value.
    pub default: &'static str,
    /// Meaning and possible values.
    pub text: &'static str,
}

/// Table of all searches.
pub const SEARCHES: &[SearchRow] = &[
    auto::ROW,
    random::ROW,
    grid::ROW,
    simulated_annealing::ROW,
    genetic::ROW,
    gbfs::ROW,
    gbt::ROW,
    opevo::ROW,
    nose::ROW,
    na2c::ROW,
    rnn_controller::ROW,
    tree_gru::ROW,
    lfbo::ROW,
];

/// Error in the name or options of a search; the mistake is the user's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SearchError {
    /// Unknown search.
    #[error("unknown search {name}; there are {}", known.join(", "))]
    UnknownSearch {
        /// Name that was given.
        name: String,
        /// Names of all searches.
        known: Vec<&'static str>,
    },
    /// Option that the search does not have.
    #[error("search {search} has no option {option}; {}", if known.is_empty() { "it has none".into() } else { format!("it has {}", known.join(", ")) })]
    UnknownOption {
        /// The search.
        search: &'static str,
        /// Name that was given.
        option: String,
        /// Options of the search.
        known: Vec<&'static str>,
    },
    /// Option that is not written `name=value`, or given twice.
    #[error("search {search}: {found} is not one option=value")]
    Malformed {
        /// The search.
        search: &'static str,
        /// Text that was given.
        found: String,
    },
    /// Invalid value of an option.
    #[error("search {search}: {option} cannot be {value}; it is {expected}")]
    BadValue {
        /// The search.
        search: &'static str,
        /// The option.
        option: &'static str,
        /// Value that was given.
        value: String,
        /// Description of the possible values.
        expected: String,
    },
}

/// Makes the search that `text` names, as `name` or `name:option=value,option=value`.
///
/// # Errors
/// [`SearchError`] if the name, an option or a value does not exist.
pub fn build(text: &str, problem: impl Into<Problem>, seed: u64) -> Result<Box<dyn Search>, SearchError> {
    let (row, options) = row(text)?;
    (row.make)(&problem.into(), seed, &Options::parse(row, options)?)
}

/// Finds the row of the search that `text` names, and its options.
fn row(text: &str) -> Result<(&'static SearchRow, &str), SearchError> {
    let (name, options) = text.split_once(':').unwrap_or((text, ""));
    let row = SEARCHES.iter().find(|row| row.name == name).ok_or_else(|| SearchError::UnknownSearch {
        name: name.into(),
        known: SEARCHES.iter().map(|row| row.name).collect(),
    })?;
    Ok((row, options))
}

/// Maximum number of programs of other workloads that the search named by `text` learns from; `None` if the
/// search does not learn from [`Problem::experience`].
///
/// # Errors
/// [`SearchError`] if there is no such search or option.
pub fn most_experience(text: &str) -> Result<Option<usize>, SearchError> {
    let (row, options) = row(text)?;
    let options = Options::parse(row, options)?;
    row.transfers.then(|| options.number(gbt::EXPERIENCE.name, gbt::EXPERIENCES)).transpose()
}

/// Option given in `text` that has no effect if configurations are not programs, if there is one.
///
/// # Errors
/// [`SearchError`] if there is no such search or option.
pub fn blind_option(text: &str) -> Result<Option<&'static str>, SearchError> {
    let (row, options) = row(text)?;
    let options = Options::parse(row, options)?;
    let name = gbt::FEATURES.name;
    Ok(Some(name).filter(|name| options.is_given(name) && gbt::OF_PROGRAMS.contains(&options.text(name))))
}
