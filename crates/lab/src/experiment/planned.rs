//! Tuning runs that an experiment plans.

use std::path::Path;
use std::time::Duration;

use tilewright::format::shell_quoted;
use tilewright::{Error, Transfer};

use super::folder::RUNS;
use super::hardware::Hardware;
use super::table::{Arm, SpaceProblem};

/// Planned tuning run.
pub struct Planned {
    pub(super) arm: Arm,
    pub(super) problem: SpaceProblem,
    pub(super) seed: u64,
    /// Maximum number of trials; `None` if only time limits it.
    pub(super) n_trials: Option<u64>,
    /// Maximum duration of the search, in seconds.
    pub(super) seconds: f64,
    /// Machine that kernels run on.
    pub(super) hardware: Hardware,
    /// Whether the space includes configurations beyond a GPU's limits.
    pub(super) beyond_limits: bool,
    /// Whether it begins with the guesses of the template.
    pub(super) has_guesses: bool,
    /// Whether its best candidates race at the end.
    pub(super) is_raced: bool,
    /// Whether slow candidates are timed completely, rather than pruned.
    pub(super) to_the_end: bool,
    /// Name of the file with its result.
    pub(super) stem: String,
    /// Name of its database, which is not shared except by sources.
    pub(super) database: String,
    /// Whether it is only a source of transfer learning.
    pub(super) is_source: bool,
    /// Name of the database that it learns from.
    pub(super) teacher: Option<String>,
}

impl Planned {
    /// Unique stem of its file names.
    pub fn stem(&self) -> &str {
        &self.stem
    }

    /// Arguments of `tune` equivalent to [`Planned::request`], without the database. Paths of sources are
    /// relative to the experiment's folder, which may be moved.
    pub fn words(&self) -> Vec<String> {
        let mut words = vec![self.problem.workload.to_owned()];
        let mut option =
            |name: &str, value: Option<String>| words.extend(value.into_iter().flat_map(|v| [name.to_owned(), v]));
        option("--search", Some(self.arm.search.to_owned()));
        option("--template", self.problem.template.map(str::to_owned));
        option("--seed", Some(self.seed.to_string()));
        option("--trials", self.n_trials.map(|n| n.to_string()));
        option("--time", Some(self.seconds.to_string()));
        words.extend(self.hardware.option());
        let flags = [
            ("--no-guesses", !self.has_guesses),
            ("--no-race", !self.is_raced),
            ("--to-the-end", self.to_the_end),
            ("--beyond-limits", self.beyond_limits),
        ];
        words.extend(flags.into_iter().filter(|(_, is_given)| *is_given).map(|(name, _)| name.to_owned()));
        if let Some(teacher) = self.teacher() {
            words.extend(["--transfer".to_owned(), teacher]);
        }
        words
    }

    /// Request of the run; sources are in `folder`.
    ///
    /// # Errors
    /// Bad input if the workload does not exist.
    pub fn request(&self, folder: &Path) -> Result<tilewright::Request, Error> {
        let transfer = self.teacher().map(|teacher| {
            let mut transfer = Transfer::parse(&teacher).map_err(Error::input)?;
            transfer.path = folder.join(&transfer.path);
            Ok::<_, Error>(transfer)
        });
        let request = tilewright::Request::parse(self.problem.workload)?
            .threads(self.hardware.threads)
            .target(self.hardware.target.clone())
            .search(self.arm.search)
            .trials(self.n_trials)
            .time(Duration::from_secs_f64(self.seconds))
            .seed(self.seed)
            .guesses(self.has_guesses)
            .race(self.is_raced)
            .to_the_end(self.to_the_end)
            .beyond_limits(self.beyond_limits)
            .transfer(transfer.transpose()?);
        Ok(match self.problem.template {
            Some(template) => request.template(template),
            None => request,
        })
    }

    /// Database that it learns from, within the experiment's folder.
    fn teacher(&self) -> Option<String> {
        self.teacher.as_ref().map(|database| format!("{RUNS}/{database}"))
    }

    /// Command by which a user repeats the run.
    pub(super) fn command(&self) -> String {
        let words: Vec<String> = self.words().iter().map(|word| shell_quoted(word)).collect();
        format!("tilewright tune {}", words.join(" "))
    }
}
