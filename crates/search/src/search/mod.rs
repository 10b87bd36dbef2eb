//! Searches: who decides what to measure next.
//!
//! A search is asked for candidates and told what became of them. [`SEARCHES`] lists every one with its
//! options; [`build`] makes one from text such as `genetic:population=50`.

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

/// A search over one space for the configuration of the smallest [`Outcome::cost`](crate::Outcome::cost). Its
/// proposals follow from its seed, its options and the trials it was told alone.
pub trait Search: Send {
    /// Proposes at most `n` legal configurations, none of which was proposed or observed before. Fewer are no
    /// sign of the end; none at all, for `n` above 0, means that the whole space has been proposed or
    /// observed.
    fn propose(&mut self, n: usize) -> Vec<Config>;

    /// Whether proposals are about as good when the last ones are not observed yet: the next batch can then
    /// be prepared while one is measured.
    fn looks_ahead(&self) -> bool {
        false
    }

    /// Whether it weighs the costs of several objectives against each other. Others are told their geometric
    /// mean as the only one.
    fn weighs_objectives(&self) -> bool {
        false
    }

    /// Takes note of trials, whoever proposed them: those of an earlier run count as if they were this
    /// search's own. Configurations that are not of this space are ignored.
    fn observe(&mut self, trials: &[Trial]);
}

/// Problem that is searched: a space, with what a search may know about it.
#[derive(Clone)]
pub struct Problem {
    /// The space.
    pub space: Arc<Space>,
    /// Contexts of the loops of configurations; `None` where configurations are no programs, as in a replay.
    pub contexts: Option<Contexts>,
    /// Experience with other workloads, for searches that can use it; see [`SearchRow::transfers`].
    pub experience: Option<Arc<Experience>>,
}

/// Function from a configuration to the contexts of its loops; `None` for one that makes no program.
pub type Contexts = Arc<dyn Fn(&Config) -> Option<LoopContexts> + Send + Sync>;

impl From<&Arc<Space>> for Problem {
    /// A space of which nothing else is known.
    fn from(space: &Arc<Space>) -> Problem {
        Problem { space: space.clone(), contexts: None, experience: None }
    }
}

/// A search as a row of [`SEARCHES`].
pub struct SearchRow {
    /// The name by which it is asked for, as in the literature.
    pub name: &'static str,
    /// Description, in one line.
    pub text: &'static str,
    /// Paper that describes it; empty for textbook searches.
    pub paper: &'static str,
    /// Whether it has a model that learns from [`Problem::experience`].
    pub transfers: bool,
    /// Options that can be set.
    pub options: &'static [SearchOption],
    make: Make,
}

/// Makes a search of a problem from a seed and the options of its row.
type Make = fn(&Problem, u64, &Options) -> Result<Box<dyn Search>, SearchError>;

/// An option of a search.
pub struct SearchOption {
    /// The name that [`build`] reads.
    pub name: &'static str,
    /// Default value.
    pub default: &'static str,
    /// Meaning and possible values.
    pub text: &'static str,
}

/// Every search there is.
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

/// Error of a request for a search that does not exist. The fault is the user's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SearchError {
    /// No search has this name.
    #[error("unknown search {name}; there are {}", known.join(", "))]
    UnknownSearch {
        /// The name found.
        name: String,
        /// The names there are.
        known: Vec<&'static str>,
    },
    /// The search has no option of this name.
    #[error("search {search} has no option {option}; {}", if known.is_empty() { "it has none".into() } else { format!("it has {}", known.join(", ")) })]
    UnknownOption {
        /// The search.
        search: &'static str,
        /// The option found.
        option: String,
        /// The options it has.
        known: Vec<&'static str>,
    },
    /// An option that is not written `name=value`, or is given twice.
    #[error("search {search}: {found} is not one option=value")]
    Malformed {
        /// The search.
        search: &'static str,
        /// The text found.
        found: String,
    },
    /// A value that the option cannot have.
    #[error("search {search}: {option} cannot be {value}; it is {expected}")]
    BadValue {
        /// The search.
        search: &'static str,
        /// The option.
        option: &'static str,
        /// The value found.
        value: String,
        /// Description of the possible values.
        expected: String,
    },
}

/// The search that `text` asks for, as `name` or `name:option=value,option=value`.
///
/// # Errors
/// [`SearchError`] if the name, an option or a value does not exist.
pub fn build(text: &str, problem: impl Into<Problem>, seed: u64) -> Result<Box<dyn Search>, SearchError> {
    let (row, options) = row(text)?;
    (row.make)(&problem.into(), seed, &Options::parse(row, options)?)
}

/// The row of the search that `text` asks for, and its options.
fn row(text: &str) -> Result<(&'static SearchRow, &str), SearchError> {
    let (name, options) = text.split_once(':').unwrap_or((text, ""));
    let row = SEARCHES.iter().find(|row| row.name == name).ok_or_else(|| SearchError::UnknownSearch {
        name: name.into(),
        known: SEARCHES.iter().map(|row| row.name).collect(),
    })?;
    Ok((row, options))
}

/// The most programs of other workloads that the search which `text` asks for learns from, where it has a
/// model that learns from [`Problem::experience`].
///
/// # Errors
/// [`SearchError`] if there is no such search or option.
pub fn most_experience(text: &str) -> Result<Option<usize>, SearchError> {
    let (row, options) = row(text)?;
    let options = Options::parse(row, options)?;
    row.transfers.then(|| options.number(gbt::EXPERIENCE.name, gbt::EXPERIENCES)).transpose()
}

/// The option of the search that `text` asks for which has no effect where configurations are no programs, if
/// it is given.
///
/// # Errors
/// [`SearchError`] if there is no such search or option.
pub fn blind_option(text: &str) -> Result<Option<&'static str>, SearchError> {
    let (row, options) = row(text)?;
    let options = Options::parse(row, options)?;
    let name = gbt::FEATURES.name;
    Ok(Some(name).filter(|name| options.is_given(name) && gbt::OF_PROGRAMS.contains(&options.text(name))))
}
