//! Choice of a kernel's configuration: the best recorded one, or a guess by the template's analytical model.

use std::cell::{OnceCell, RefCell};
use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use tilewright_codegen::{ArgumentAlign, Compiler};
use tilewright_device::device::WorkerCommand;
use tilewright_device::{Caches, host};
use tilewright_ir::op::Workload;
use tilewright_ir::{Program, Target, lower, lower_gpu, verify};
use tilewright_runtime::{AnyModel, Code, GpuModel, Model};
use tilewright_search::Config;
use tilewright_tune::{PassedOver, Store, Task, TemplateSetting, Winner};

use crate::best::{Best, gflops, known_best, target_name};
use crate::cache::Cache;
use crate::clock::since_1970;
use crate::database::Database;
use crate::device_spec::target_here;
use crate::error::Error;
use crate::run::recorder::toolchain;
use crate::subject::workload::{require_one_size, task_key, threads_in_records};
use crate::version::BUILD;

/// Origin of a kernel's configuration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source {
    /// Recorded configuration, with its median in nanoseconds.
    Recorded(f64),
    /// Guess of the analytical model, as nothing is recorded.
    Guessed,
    /// Guess of the analytical model, as the recorded configuration is from an earlier version of the space.
    Outdated,
}

/// Chosen configuration of a kernel.
pub struct Choice {
    /// Task of the configuration.
    pub task: Task,
    /// Configuration.
    pub config: Config,
    /// Origin of the configuration.
    pub source: Source,
}

impl Choice {
    /// Configuration that the template's analytical model ranks first; of the operator's default template if
    /// none is named.
    ///
    /// # Errors
    /// If the operator has no such template, or it has no configuration for this workload.
    pub fn guess(
        workload: &Workload,
        target: &Target,
        threads: usize,
        template: Option<&str>,
    ) -> Result<Choice, Error> {
        let task = Task::new(setting(workload, target, threads), template).map_err(Error::input)?;
        let config = task.first_guess(0).unwrap_or_else(|| task.space.config_at(0));
        Ok(Choice { task, config, source: Source::Guessed })
    }

    /// Predicted cost of a run by the analytical model, in cycles of a core.
    pub fn estimate(&self) -> Option<f64> {
        let Task { setting, template, space } = &self.task;
        template.estimate.map(|estimate| estimate(setting, space, &self.config))
    }

    /// Whether the configuration was measured, rather than guessed.
    pub fn is_recorded(&self) -> bool {
        matches!(self.source, Source::Recorded(_))
    }

    /// Whether another choice is the same configuration of the same template.
    pub fn same_configuration(&self, other: &Choice) -> bool {
        let is_same_template = self.task.template.name == other.task.template.name;
        is_same_template && self.config_json() == other.config_json()
    }

    fn config_json(&self) -> Json {
        self.task.space.config_to_json(&self.config)
    }

    /// Records this choice, with its median within a whole run, as the best for its workload in this cache
    /// state, in place of `other`, which was faster in isolation. A faster record of another template still
    /// comes first.
    ///
    /// # Errors
    /// If the database cannot be written.
    pub fn put_back(&self, median_ns: f64, other: &Choice, database: &Database, caches: Caches) -> Result<(), Error> {
        let workload = self.task.setting.workload.representative();
        let key = task_key(&self.task, caches);
        let winner = Winner {
            workload: workload.to_string(),
            target: key.target,
            template: key.template,
            threads: key.threads,
            config: self.config_json(),
            median_ns,
            runner_up: Some(other.config_json()),
            gflops: gflops(&workload, median_ns),
            verified: true,
            version: BUILD.to_owned(),
            toolchain: toolchain(),
            unix_time: since_1970().as_secs(),
            ..Winner::default()
        };
        let mut opened = database.open_to_write()?;
        opened.store.set_winner(&winner).map_err(|error| database.refuse(error))
    }

    /// Scheduled program of the configuration.
    ///
    /// # Errors
    /// If a step is illegal, which is a bug of the template.
    pub fn program(&self) -> Result<Program, Error> {
        let workload = &self.task.setting.workload;
        let error = |(at, why)| Error::failed(format!("{workload}: step {} cannot be done: {why}", at + 1));
        self.task.program(&self.config).map_err(error)
    }

    /// Kernel as a model of one step, with its constant inputs bound to these bytes.
    ///
    /// # Errors
    /// If code cannot be generated, or there is too little memory for the constants.
    pub fn model(&self, constants: &[(String, Bytes)]) -> Result<AnyModel, Error> {
        fn failed<E: std::error::Error + Send + Sync + 'static>(error: E) -> Error {
            Error::failed(&error).because(error)
        }
        require_one_size(&self.task.setting.workload, "a library")?;
        let (program, target) = (self.program()?, &self.task.setting.target);
        verify::verify(&program).map_err(failed)?;
        let constant = |name: &str| constants.iter().find(|(known, _)| known == name).map(|(_, data)| data.clone());
        if target.gpu.is_some() {
            let kernels = lower_gpu(&program).map_err(failed)?;
            return Ok(AnyModel::Gpu(Arc::new(GpuModel::of_program(kernels, target, &constant))));
        }
        let mut compiler = Compiler::for_arguments(target_here(target), ArgumentAlign::Elements);
        let code = Code::compile(&mut compiler, lower::lower(&program)).map_err(failed)?;
        let plan = code.plan(&constant);
        Ok(AnyModel::Cpu(Arc::new(Model::new(plan, vec![code]).map_err(failed)?)))
    }
}

fn setting(workload: &Workload, target: &Target, threads: usize) -> TemplateSetting {
    TemplateSetting { workload: workload.clone(), target: target.clone(), n_threads: threads }
}

impl Best {
    /// Configuration of this result in the template's current space.
    ///
    /// # Errors
    /// If the space has changed since it was recorded.
    pub fn choice(&self, workload: &Workload, target: &Target, threads: usize) -> Result<Choice, Error> {
        let task = Task::declared(setting(workload, target, threads), Some(&self.template)).map_err(Error::input)?;
        let config = task.space.config_from_json(&self.config).map_err(|error| {
            Error::input(format!("{error} (the space has changed since it was recorded: tune {workload} again)"))
        })?;
        Ok(Choice { task, config, source: Source::Recorded(self.median_ns) })
    }
}

/// Cache key: a text that determines a scheduled program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Determined {
    /// Text of the key.
    pub text: String,
    /// Whether the program is of a guess.
    pub is_guess: bool,
}

impl Determined {
    /// Cache key of a guess's program.
    pub fn guessed(workload: &Workload, target: &Target, threads: usize) -> Determined {
        Determined { text: format!("{workload} {target} {threads}"), is_guess: true }
    }

    fn recorded(workload: &Workload, target: &Target, threads: usize, best: &Best) -> Determined {
        let text = format!("{workload} {target} {threads} {} {}", best.template, best.config);
        Determined { text, is_guess: false }
    }
}

/// Best records of a database, cached in memory for compiling many kernels; by default there are none. For
/// workloads without records, a shared store is queried.
#[derive(Default)]
pub struct Records {
    /// Database of the records; `None` by default.
    database: Option<Database>,
    /// Store of the records; `None` if the file does not exist.
    store: Option<Store>,
    /// Command that starts workers, which verify shared entries before their first use.
    worker: Option<WorkerCommand>,
    asked: RefCell<HashMap<Question, (Option<Best>, PassedOver)>>,
    /// Names of workloads that the database may have records of; the inner value is `None` if there are too
    /// many.
    listed: OnceCell<Option<HashSet<String>>>,
    /// Whether answers were given that take priority over records.
    has_answers: bool,
    /// Whether a shared entry may be used, by workload and target.
    admitted: RefCell<HashMap<(String, String), bool>>,
}

/// Best configuration of a kernel, as records or a shared store returned it. It is saved with a compiled
/// model, so that another machine's records do not change the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Workload, as in records.
    pub workload: String,
    /// Target and state of the caches, as in records.
    pub target: String,
    /// Number of threads.
    pub threads: usize,
    /// Template of the configuration.
    pub template: String,
    /// Configuration as JSON.
    pub config: Json,
    /// Median time of a run in nanoseconds.
    pub median_ns: f64,
}

/// Maximum number of workload names that are listed, so that a workload without records costs no query.
const MOST_LISTED: usize = 10_000;

/// Key of a lookup: a workload's text, a target's name, threads and a template.
type Question = (String, String, usize, Option<String>);

impl Database {
    /// Opens the records; empty if the file does not exist.
    ///
    /// # Errors
    /// As [`Database::open_to_read`].
    pub fn records(&self) -> Result<Records, Error> {
        Ok(Records { store: self.open_to_read()?, database: Some(self.clone()), ..Records::default() })
    }
}

/// Cache states whose records may serve a run in this state: this state first, then the others.
fn caches_in_turn(caches: Caches) -> impl Iterator<Item = Caches> {
    let others = [Caches::ColdConstants, Caches::Warm].into_iter().filter(move |other| *other != caches);
    std::iter::once(caches).chain(others)
}

impl Records {
    /// Finds the best record of a workload, or of its [representative](Workload::representative), of this
    /// template if one is given; also counts skipped records. `target` is a name in records
    /// ([`target_name`]); without records of it, those of its machine class serve. Results are cached:
    /// records written after the first such call do not count.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn best(
        &self,
        workload: &Workload,
        target: &str,
        threads: usize,
        template: Option<&str>,
    ) -> Result<(Option<Best>, PassedOver), Error> {
        let question = (workload.to_string(), target.to_owned(), threads, template.map(str::to_owned));
        if let Some(known) = self.asked.borrow().get(&question) {
            return Ok(known.clone());
        }
        let (mut best, mut passed_over) = self.local(workload, target, threads, template)?;
        if best.is_none()
            && let Some(shared) = self.database.as_ref().and_then(Database::shared)
        {
            let n_threads = threads_in_records(threads);
            let representative = Some(workload.representative()).filter(|representative| representative != workload);
            for workload in std::iter::once(workload).chain(&representative) {
                let (found, rejected) = shared.best(workload, target, n_threads, template);
                best = best.or(found);
                passed_over += rejected;
            }
        }
        self.asked.borrow_mut().insert(question, (best.clone(), passed_over));
        Ok((best, passed_over))
    }

    /// Finds the best record of a workload in the database, as by [`Records::best`].
    fn local(
        &self,
        workload: &Workload,
        target: &str,
        threads: usize,
        template: Option<&str>,
    ) -> Result<(Option<Best>, PassedOver), Error> {
        let (Some(store), Some(database)) = (&self.store, &self.database) else {
            return Ok((None, PassedOver::default()));
        };
        let n_threads = threads_in_records(threads);
        let refuse = |error| database.refuse(error);
        if self.listed.get().is_none() {
            let _ = self.listed.set(store.workloads(MOST_LISTED).map_err(refuse)?);
        }
        let listed = self.listed.get().and_then(Option::as_ref);
        if listed.is_some_and(HashSet::is_empty) {
            return Ok((None, PassedOver::default()));
        }
        let text = workload.to_string();
        let may_be_there = listed.is_none_or(|listed| listed.contains(&text));
        let faster = |a: Option<Best>, b: Option<Best>| {
            a.into_iter().chain(b).min_by(|a, b| a.median_ns.total_cmp(&b.median_ns))
        };
        let (mut best, mut passed_over) = match may_be_there {
            true => known_best(store, workload, target, n_threads, template).map_err(refuse)?,
            false => Default::default(),
        };
        let representative = workload.representative();
        if representative != *workload {
            let (other, rejected) = self.local(&representative, target, threads, template)?;
            best = faster(best, other);
            passed_over += rejected;
        }
        if best.is_none() && may_be_there {
            for class in store.classes_of(&text, target, n_threads).map_err(refuse)? {
                best = faster(best, known_best(store, workload, &class, n_threads, template).map_err(refuse)?.0);
            }
        }
        Ok((best, passed_over))
    }

    /// Has entries of shared stores built and verified by workers before their first use, and then recorded.
    #[must_use]
    pub fn checked_by(self, worker: WorkerCommand) -> Records {
        Records { worker: Some(worker), ..self }
    }

    /// Gives `answers` priority over records. Answers for other targets, or of configurations that a template
    /// no longer has, are ignored.
    #[must_use]
    pub fn knowing(mut self, answers: &[Answer]) -> Records {
        self.has_answers |= !answers.is_empty();
        for Answer { workload, target, threads, template, config, median_ns } in answers {
            let question = (workload.clone(), target.clone(), *threads, None);
            let best = Best::unnamed(template.clone(), config.clone(), *median_ns);
            self.asked.borrow_mut().insert(question, (Some(best), PassedOver::default()));
        }
        self
    }

    /// Fingerprint of the records, which changes when they do; `None` if it cannot be known without a query:
    /// with a shared store, or with given answers.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn state(&self) -> Result<Option<String>, Error> {
        let is_shared = self.database.as_ref().is_some_and(|database| database.shared().is_some());
        match (&self.store, &self.database) {
            _ if is_shared || self.has_answers => Ok(None),
            (Some(store), Some(database)) => store.state().map(Some).map_err(|error| database.refuse(error)),
            _ => Ok(Some(String::new())),
        }
    }

    /// Answers returned so far, ordered by workload.
    pub fn answers(&self) -> Vec<Answer> {
        let asked = self.asked.borrow();
        let answer = |((workload, target, threads, template), (best, _)): (&Question, &(Option<Best>, PassedOver))| {
            let best = best.as_ref().filter(|_| template.is_none())?;
            Some(Answer {
                workload: workload.clone(),
                target: target.clone(),
                threads: *threads,
                template: best.template.clone(),
                config: best.config.clone(),
                median_ns: best.median_ns,
            })
        };
        let mut answers: Vec<Answer> = asked.iter().filter_map(answer).collect();
        answers.sort_by(|a, b| (&a.workload, &a.target).cmp(&(&b.workload, &b.target)));
        answers
    }

    /// Warnings about a shared store, or entries of it, that could not be used; each is returned once.
    pub fn notes(&self) -> Vec<String> {
        self.database.as_ref().and_then(Database::shared).map_or(Vec::new(), |shared| shared.take_notes())
    }

    /// Whether a configuration may be used: it comes from the database, this release has verified it, or a
    /// worker verifies it now, which is recorded.
    fn admits(&self, best: &Best, choice: &Choice, caches: Caches) -> bool {
        let shared = self.database.as_ref().and_then(|database| Some((database, database.shared()?)));
        let (Some(_), Some((database, shared))) = (&best.store, shared) else { return true };
        let (workload, target) = (&choice.task.setting.workload, &choice.task.setting.target);
        let key = (workload.to_string(), target_name(target, caches));
        if let Some(known) = self.admitted.borrow().get(&key) {
            return *known;
        }
        let admitted = match self.worker.as_ref().filter(|_| target.name() == host::target().name()) {
            Some(worker) => shared.try_out(choice, caches, worker, database),
            None if best.is_of_this_release => Ok(()),
            None => Err("another release checked it (a command that runs it here does so anew)".to_owned()),
        };
        if let Err(why) = &admitted {
            shared.refuse(workload, why);
        }
        self.admitted.borrow_mut().insert(key, admitted.is_ok());
        admitted.is_ok()
    }

    /// Chooses a workload's configuration for a cache state: the best record, else the best record in another
    /// cache state, else [`Choice::guess`]; also counts skipped records.
    ///
    /// # Errors
    /// If records cannot be read, or no template has a configuration for the workload.
    pub fn choose(
        &self,
        workload: &Workload,
        target: &Target,
        threads: usize,
        caches: Caches,
        template: Option<&str>,
    ) -> Result<(Choice, PassedOver), Error> {
        let (known, passed_over) = self.known(workload, target, threads, caches, template)?;
        let guess = |source| Ok(Choice { source, ..Choice::guess(workload, target, threads, template)? });
        Ok((known.or_else(guess)?, passed_over))
    }

    /// Scheduled program of the best recorded configuration, as by [`Records::known`], with its cache key;
    /// `None` if only a guess is possible.
    ///
    /// # Errors
    /// If records cannot be read.
    pub fn program(
        &self,
        workload: &Workload,
        target: &Target,
        threads: usize,
        caches: Caches,
        cache: &Cache,
    ) -> Result<Option<(Program, Determined)>, Error> {
        for caches in caches_in_turn(caches) {
            let Some(best) = self.best(workload, &target_name(target, caches), threads, None)?.0 else { continue };
            let choice = || best.choice(workload, target, threads);
            if best.store.is_some() && !choice().is_ok_and(|choice| self.admits(&best, &choice, caches)) {
                continue;
            }
            let made = || choice()?.program();
            let determined_by: [&dyn Display; 5] = [workload, target, &threads, &best.template, &best.config];
            // A configuration of a space that has changed since is skipped.
            if let Ok(program) = cache.program(&determined_by, made) {
                return Ok(Some((program, Determined::recorded(workload, target, threads, &best))));
            }
        }
        Ok(None)
    }

    /// Cache key of the program that [`Records::program`] or a guess yields, found without making the
    /// program. `None` for entries of a shared store, whose use is checked each time.
    ///
    /// # Errors
    /// If records cannot be read.
    pub fn determined(
        &self,
        workload: &Workload,
        target: &Target,
        threads: usize,
        caches: Caches,
    ) -> Result<Option<Determined>, Error> {
        for caches in caches_in_turn(caches) {
            if let Some(best) = self.best(workload, &target_name(target, caches), threads, None)?.0 {
                return Ok(best.store.is_none().then(|| Determined::recorded(workload, target, threads, &best)));
            }
        }
        Ok(Some(Determined::guessed(workload, target, threads)))
    }

    /// Finds a recorded configuration without guessing; else returns the reason for a guess. Also counts
    /// skipped records.
    ///
    /// # Errors
    /// If records cannot be read.
    pub fn known(
        &self,
        workload: &Workload,
        target: &Target,
        threads: usize,
        caches: Caches,
        template: Option<&str>,
    ) -> Result<(Result<Choice, Source>, PassedOver), Error> {
        let (mut source, mut passed_over) = (Source::Guessed, PassedOver::default());
        for caches in caches_in_turn(caches) {
            let (best, rejected) = self.best(workload, &target_name(target, caches), threads, template)?;
            passed_over += rejected;
            let Some(best) = best else { continue };
            match best.choice(workload, target, threads) {
                Ok(choice) if self.admits(&best, &choice, caches) => return Ok((Ok(choice), passed_over)),
                Ok(_) => {}
                Err(_) => source = Source::Outdated,
            }
        }
        Ok((Err(source), passed_over))
    }
}
