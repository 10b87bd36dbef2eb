//! Store: records and winners in an SQLite file that several processes may share.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, BufRead, Write};
use std::time::{Duration, Instant};

use rusqlite::{Connection, MAIN_DB, OptionalExtension, Row, Transaction, TransactionBehavior, named_params, params};
use serde_json::Value as Json;
use tilewright_ir::op::Workload;
use tilewright_search::{Conditions, FlatOutcome, Limit, Outcome, Seconds};

use super::store_error::{BUSY_TIMEOUT, StoreError};
use super::winner::Winner;
use super::{PassedOver, Record, RecordLine, RejectReason, RunTime, TaskKey, Validator, read_lines};
use crate::Error;

/// Application id that marks a database as ours: "TLWR".
const APPLICATION_ID: i32 = 0x544c_5752;
/// Version of the schema below.
const SCHEMA_VERSION: i32 = 1;

/// Schema of the store. Texts that are the same for all trials of a run are stored once, in `tasks`. Failures
/// have no median and are therefore not in the index that finds the best trial.
const SCHEMA: &str = "
CREATE TABLE tasks (
    id INTEGER PRIMARY KEY,
    workload TEXT NOT NULL,
    target TEXT NOT NULL,
    threads INTEGER NOT NULL,
    template TEXT NOT NULL,
    UNIQUE (workload, target, threads, template)
) STRICT;
CREATE TABLE trials (
    id INTEGER PRIMARY KEY,
    task INTEGER NOT NULL REFERENCES tasks (id),
    config TEXT NOT NULL,
    class TEXT NOT NULL,
    message TEXT,
    median_ns REAL,
    min_ns REAL,
    spread REAL,
    n_samples INTEGER,
    stopped_early INTEGER,
    build_s REAL NOT NULL,
    run_s REAL NOT NULL,
    verify_s REAL NOT NULL,
    steps TEXT NOT NULL,
    search TEXT NOT NULL,
    seed INTEGER NOT NULL,
    trial INTEGER NOT NULL,
    version TEXT NOT NULL,
    toolchain TEXT NOT NULL,
    unix_time INTEGER NOT NULL,
    UNIQUE (task, config)
) STRICT;
CREATE INDEX trials_by_median ON trials (task, median_ns) WHERE median_ns IS NOT NULL;
CREATE TABLE winners (
    task INTEGER PRIMARY KEY REFERENCES tasks (id),
    config TEXT NOT NULL,
    median_ns REAL NOT NULL,
    margin REAL,
    runner_up TEXT,
    gflops REAL NOT NULL,
    verified INTEGER NOT NULL,
    version TEXT NOT NULL,
    toolchain TEXT NOT NULL,
    unix_time INTEGER NOT NULL
) STRICT;
";

/// Columns, each with its table, that the first form of the schema did not have. They are nullable, so
/// versions that do not know them read and write such a database as before, and the schema version is
/// unchanged.
const LATER_COLUMNS: &[(&str, &str, &str)] = &[
    ("trials", "run_start_unix_ms", "INTEGER"),
    ("trials", "run_elapsed_s", "REAL"),
    ("trials", "limit_name", "TEXT"),
    ("trials", "limit_number", "REAL"),
    ("trials", "imported", "INTEGER"),
    ("trials", "device", "TEXT"),
    ("trials", "frequency_mhz", "REAL"),
    ("trials", "temperature_c", "REAL"),
    // Costs by the objectives beyond the first, as a list in JSON.
    ("trials", "other_costs", "TEXT"),
    ("winners", "imported", "INTEGER"),
    // The last trial of the space when its race ended.
    ("winners", "last_trial", "INTEGER"),
    ("winners", "spread", "REAL"),
];

/// Inserts a trial. An existing trial is kept, unless it failed because of a limit: it is replaced by a
/// success, or by a later failure with another cause or at a higher limit.
const INSERT_TRIAL: &str = "
INSERT INTO trials (task, config, class, message, median_ns, min_ns, spread, n_samples, stopped_early,
    build_s, run_s, verify_s, steps, search, seed, trial, version, toolchain, unix_time,
    run_start_unix_ms, run_elapsed_s, limit_name, limit_number, imported, device, frequency_mhz, temperature_c,
    other_costs)
VALUES (:task, :config, :class, :message, :median_ns, :min_ns, :spread, :n_samples, :stopped_early,
    :build_s, :run_s, :verify_s, :steps, :search, :seed, :trial, :version, :toolchain, :unix_time,
    :run_start_unix_ms, :run_elapsed_s, :limit_name, :limit_number, :imported, :device, :frequency_mhz,
    :temperature_c, :other_costs)
ON CONFLICT (task, config) DO UPDATE SET (class, message, median_ns, min_ns, spread, n_samples, stopped_early,
    build_s, run_s, verify_s, steps, search, seed, trial, version, toolchain, unix_time,
    run_start_unix_ms, run_elapsed_s, limit_name, limit_number, imported, device, frequency_mhz, temperature_c,
    other_costs)
= (excluded.class, excluded.message, excluded.median_ns, excluded.min_ns, excluded.spread, excluded.n_samples,
    excluded.stopped_early, excluded.build_s, excluded.run_s, excluded.verify_s, excluded.steps, excluded.search,
    excluded.seed, excluded.trial, excluded.version, excluded.toolchain, excluded.unix_time,
    excluded.run_start_unix_ms, excluded.run_elapsed_s, excluded.limit_name, excluded.limit_number,
    excluded.imported, excluded.device, excluded.frequency_mhz, excluded.temperature_c,
    excluded.other_costs)
WHERE trials.limit_name IS NOT NULL AND (excluded.median_ns IS NOT NULL OR excluded.unix_time >= trials.unix_time
    AND (excluded.limit_name IS NOT trials.limit_name OR excluded.limit_number > trials.limit_number))";

/// Deletes an implausible trial of the configuration, to make room for a new one.
const DELETE_DOUBTED: &str = "
DELETE FROM trials WHERE task = ?1 AND config = ?2 AND class = ?3 AND NOT coalesce(median_ns BETWEEN ?4 AND 1e300, 0)";

const HAS_COLUMN: &str = "SELECT count(*) FROM pragma_table_info(?1) WHERE name = ?2";

const TRIALS: &str = "SELECT * FROM tasks JOIN trials ON trials.task = tasks.id";

const TASKS: &str = "
SELECT id, template FROM tasks WHERE workload IN (?1, ?5) AND target = ?2 AND threads = ?3 AND (?4 IS NULL OR template = ?4)";

const STATE: &str = "
SELECT format('%d %d %d %d %.17g', (SELECT max(id) FROM tasks), (SELECT max(id) FROM trials), count(*),
    max(unix_time), total(median_ns)) FROM winners";

const WINNERS: &str = "SELECT * FROM tasks JOIN winners ON winners.task = tasks.id";

/// Selects the trials of a space that are faster than `?2`, fastest first.
const FASTEST_TRIALS: &str = "
SELECT *, trials.id AS trial_id FROM trials JOIN tasks ON trials.task = tasks.id
WHERE task = ?1 AND median_ns < ?2 ORDER BY median_ns";

/// Selects the last trial of a space.
const LAST_TRIAL: &str = "SELECT coalesce(max(id), 0) FROM trials WHERE task = ?1";

/// Selects the last trial before a winner's race, for a winner recorded by an earlier version: by its own
/// clock.
const LAST_BEFORE: &str = "SELECT coalesce(max(id), 0) FROM trials WHERE task = ?1 AND unix_time <= ?2";

/// Factor by which a trial that was not raced must be faster than a winner to take precedence.
const BEYOND_NOISE: f64 = 0.95;

const SET_WINNER: &str = "
INSERT OR REPLACE INTO winners
    (task, config, median_ns, margin, runner_up, gflops, verified, version, toolchain, unix_time, imported, spread,
    last_trial)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, (SELECT coalesce(max(id), 0) FROM trials WHERE task = ?1))";

/// Best known result of a workload on a target with some number of threads.
#[derive(Debug, Clone, PartialEq)]
pub enum BestRecord {
    /// Winner of a completed run.
    Confirmed(Winner),
    /// Fastest trial, if no run was completed.
    Trial(Record),
}

impl BestRecord {
    /// Median in nanoseconds per run; infinite for a record without a time.
    pub fn median_ns(&self) -> f64 {
        match self {
            BestRecord::Confirmed(winner) => winner.median_ns,
            BestRecord::Trial(record) => record.outcome.cost(),
        }
    }

    fn is_imported(&self) -> bool {
        match self {
            BestRecord::Confirmed(winner) => winner.is_imported,
            BestRecord::Trial(record) => record.is_imported,
        }
    }
}

/// Function from a template to the plausibility checks of its records.
pub type Validators<'a> = &'a dyn Fn(&str) -> Validator;

/// Counts of an import.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Imported {
    /// Number of records read.
    pub read: u64,
    /// Number of records that were new.
    pub new: u64,
    /// Number of records refused.
    pub n_refused: u64,
    /// First refused lines: line number, from 1, and reason.
    pub refused: Vec<(u64, String)>,
}

impl Imported {
    /// Maximum number of refused lines that are kept with their reasons.
    const MOST_REASONS: usize = 5;
}

/// Counts of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Exported {
    /// Number of records written.
    pub written: u64,
    /// Number of rows skipped because this version cannot read them.
    pub left_out: u64,
}

/// Records and winners in an SQLite database.
///
/// Several processes may use one file: writes are short transactions that are serialized, and a trial that
/// another process has already recorded is skipped. Inserted records survive a kill of the process.
#[derive(Debug)]
pub struct Store {
    pub(super) connection: Connection,
}

impl Store {
    /// Opens the store of this connection; creates the schema if the database is empty.
    ///
    /// # Errors
    /// [`StoreError::NotADatabase`], [`StoreError::Foreign`] and [`StoreError::NewerSchema`] if the file
    /// belongs to another program or version; it is left unchanged. [`StoreError::ReadOnly`] if it is empty
    /// and cannot be written; reading an existing store needs no write access.
    pub fn new(mut connection: Connection) -> Result<Store, StoreError> {
        connection.busy_timeout(BUSY_TIMEOUT)?;
        let exists = check_owner(&connection.transaction()?)?;
        if connection.is_readonly(MAIN_DB)? {
            return if exists { Ok(Store { connection }) } else { Err(StoreError::ReadOnly) };
        }
        if !exists {
            write_ahead(&connection)?;
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            // Another process may have done it first.
            if !check_owner(&transaction)? {
                transaction.execute_batch(SCHEMA)?;
                transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
                transaction.pragma_update(None, "user_version", SCHEMA_VERSION)?;
            }
            transaction.commit()?;
        }
        add_later_columns(&mut connection)?;
        // A write-ahead log needs no flush for each transaction to survive a kill of the process.
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        Ok(Store { connection })
    }

    /// Inserts a batch of records in one transaction, and returns the number of new ones; the others are
    /// skipped. A recorded trial shorter than `least_ns`, which is implausible, is replaced by a new one of
    /// its configuration.
    ///
    /// # Errors
    /// [`StoreError`]; nothing of the batch is stored in that case.
    pub fn insert(&mut self, records: &[Record], least_ns: f64) -> Result<u64, StoreError> {
        let transaction = self.write()?;
        let mut new = 0;
        for record in records {
            new += insert_trial(&transaction, record, least_ns)?;
        }
        transaction.commit()?;
        Ok(new)
    }

    /// Tasks with trials that this version can read, in the order in which they were first recorded.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn tasks(&self) -> Result<Vec<TaskKey>, StoreError> {
        let query = "SELECT * FROM tasks WHERE EXISTS (SELECT 1 FROM trials WHERE task = tasks.id) ORDER BY id";
        let mut statement = self.connection.prepare_cached(query)?;
        let key = |row: &Row| -> Result<TaskKey, StoreError> {
            let [workload, target, template] = ["workload", "target", "template"].map(|column| row.get(column));
            Ok(TaskKey { workload: workload?, target: target?, template: template?, threads: row.get("threads")? })
        };
        let mut rows = statement.query([])?;
        let mut keys: Vec<TaskKey> = Vec::new();
        while let Some(row) = rows.next()? {
            let Some(key) = understood(key(row))? else { continue };
            let key = TaskKey { workload: now_called(key.workload), ..key };
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        Ok(keys)
    }

    /// Names of workloads with records, for all targets; `None` if there are more than `most`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn workloads(&self, most: usize) -> Result<Option<HashSet<String>>, StoreError> {
        let mut statement = self.connection.prepare("SELECT DISTINCT workload FROM tasks LIMIT ?1")?;
        let names = statement.query_map([most as i64 + 1], |row| row.get(0))?;
        let mut names: HashSet<String> = names.collect::<Result<_, _>>()?;
        if names.len() > most {
            return Ok(None);
        }
        let now: Vec<String> =
            names.iter().filter_map(|name| name.strip_suffix(SAYS_NOTHING)).map(Into::into).collect();
        names.extend(now);
        Ok(Some(names))
    }

    /// Fingerprint that changes with every new task, trial and winner.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn state(&self) -> Result<String, StoreError> {
        Ok(self.connection.query_row(STATE, [], |row| row.get(0))?)
    }

    /// Plausible trials of a workload, of one template or of all, in the order in which they were recorded;
    /// also counts skipped ones.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn trials_of(
        &self,
        workload: &str,
        target: &str,
        threads: u32,
        template: Option<&str>,
        validators: Validators,
    ) -> Result<(Vec<Record>, PassedOver), StoreError> {
        let query = format!(
            "{TRIALS} WHERE workload IN (?1, ?5) AND target = ?2 AND threads = ?3 AND (?4 IS NULL OR template = ?4) \
            ORDER BY trials.id"
        );
        let earlier = earlier_called(workload);
        let mut statement = self.connection.prepare_cached(&query)?;
        let mut rows = statement.query(params![workload, target, threads, template, earlier])?;
        let (mut records, mut passed_over) = (Vec::new(), PassedOver::default());
        let mut known: HashMap<String, Validator> = HashMap::new();
        // A configuration may have been measured under both names of the workload.
        let mut seen = HashSet::new();
        while let Some(row) = rows.next()? {
            let Some(record) = understood(record(row))? else {
                passed_over.count(RejectReason::Unreadable);
                continue;
            };
            if !known.contains_key(&record.template) {
                known.insert(record.template.clone(), validators(&record.template));
            }
            match known[&record.template].reject_reason_of(&record) {
                Some(reason) => passed_over.count(reason),
                None if earlier == workload || seen.insert((record.template.clone(), record.config.to_string())) => {
                    records.push(record);
                }
                None => {}
            }
        }
        Ok((records, passed_over))
    }

    /// Best plausible record, of one template or of all, with counts of the implausible ones that were
    /// skipped for it. This is the winner of a completed run; or the fastest trial, if no run was completed
    /// or a later trial is faster beyond the noise of single trials. Imported records count only if no race
    /// was run here.
    ///
    /// "Later" is by the order of recording, not by the clocks of other machines.
    ///
    /// # Errors
    /// [`StoreError`].
    ///
    /// # Cost
    /// A few index look-ups, regardless of the number of records, one more for each skipped record, and the
    /// cost of the validators.
    pub fn best(
        &self,
        workload: &str,
        target: &str,
        threads: u32,
        template: Option<&str>,
        validators: Validators,
    ) -> Result<(Option<BestRecord>, PassedOver), StoreError> {
        let mut tasks = self.connection.prepare_cached(TASKS)?;
        let earlier = earlier_called(workload);
        let tasks = tasks.query_map(params![workload, target, threads, template, earlier], |row| {
            Ok((row.get("id")?, row.get::<_, String>("template")?))
        })?;
        let mut passed_over = PassedOver::default();
        let mut found: Vec<BestRecord> = Vec::new();
        for task in tasks {
            let (task, template) = task?;
            found.extend(self.best_of_task(task, &validators(&template), &mut passed_over)?);
        }
        let is_raced_here = |best: &BestRecord| matches!(best, BestRecord::Confirmed(winner) if !winner.is_imported);
        if found.iter().any(is_raced_here) {
            found.retain(|best| !best.is_imported());
        }
        let best = found.into_iter().min_by(|a, b| a.median_ns().total_cmp(&b.median_ns()));
        Ok((best, passed_over))
    }

    fn best_of_task(
        &self,
        task: i64,
        validator: &Validator,
        passed_over: &mut PassedOver,
    ) -> Result<Option<BestRecord>, StoreError> {
        let known = self.winner_of(task, validator, passed_over)?;
        let limit_ns = known.as_ref().map_or(f64::MAX, |(winner, _)| BEYOND_NOISE * winner.median_ns);
        // A race has no bearing on trials outside it: those recorded later and, if it was run elsewhere,
        // those measured here.
        let competes = |is_imported: bool, id: i64| match &known {
            None => true,
            Some((winner, last)) => match (winner.is_imported, is_imported) {
                (false, true) => false,
                (true, false) => true,
                _ => id > *last,
            },
        };
        let mut trials = self.connection.prepare_cached(FASTEST_TRIALS)?;
        let mut rows = trials.query(params![task, limit_ns])?;
        while let Some(row) = rows.next()? {
            if !competes(flag(row, "imported")?, row.get("trial_id")?) {
                continue;
            }
            let Some(record) = understood(record(row))? else {
                passed_over.count(RejectReason::Unreadable);
                continue;
            };
            match validator.reject_reason_of(&record) {
                Some(reason) => passed_over.count(reason),
                None => return Ok(Some(BestRecord::Trial(record))),
            }
        }
        Ok(known.map(|(winner, _)| BestRecord::Confirmed(winner)))
    }

    /// Winner of a space, if it is plausible, and the last trial before its race.
    fn winner_of(
        &self,
        task: i64,
        validator: &Validator,
        passed_over: &mut PassedOver,
    ) -> Result<Option<(Winner, i64)>, StoreError> {
        let mut winners = self.connection.prepare_cached(&format!("{WINNERS} WHERE tasks.id = ?1"))?;
        let mut rows = winners.query([task])?;
        let Some(row) = rows.next()? else { return Ok(None) };
        let Some(winner) = understood(winner(row))? else {
            passed_over.count(RejectReason::Unreadable);
            return Ok(None);
        };
        if let Some(reason) = validator.reject_reason(&winner.config, Some(winner.median_ns)) {
            passed_over.count(reason);
            return Ok(None);
        }
        let last = match row.as_ref().column_index("last_trial") {
            Ok(column) => row.get::<_, Option<i64>>(column)?,
            Err(_) => None,
        };
        let last = match last {
            Some(last) => last,
            None => self.connection.query_row(LAST_BEFORE, params![task, winner.unix_time as i64], |row| row.get(0))?,
        };
        Ok(Some((winner, last)))
    }

    /// Whether this is the winner of a race run here, with nothing recorded for its space since.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn is_settled(&self, winner: &Winner) -> Result<bool, StoreError> {
        let Winner { workload, target, template, threads, .. } = winner;
        let mut tasks = self.connection.prepare_cached(TASKS)?;
        let earlier = earlier_called(workload);
        for task in tasks.query_map(params![workload, target, threads, template, earlier], |row| row.get("id"))? {
            let task: i64 = task?;
            let last: i64 = self.connection.query_row(LAST_TRIAL, [task], |row| row.get(0))?;
            let known = self.winner_of(task, &Validator::default(), &mut PassedOver::default())?;
            if known.is_some_and(|(winner, raced)| !winner.is_imported && raced >= last) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Deletes all trials of a task and its winner; returns the number of trials.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn forget(&mut self, key: &TaskKey) -> Result<u64, StoreError> {
        let TaskKey { workload, target, template, threads } = key;
        let transaction = self.write()?;
        let earlier = earlier_called(workload);
        let mut n_trials = 0;
        for table in ["winners", "trials"] {
            let statement = format!("DELETE FROM {table} WHERE task IN (SELECT id FROM ({TASKS}))");
            n_trials = transaction.execute(&statement, params![workload, target, threads, template, earlier])?;
        }
        transaction.commit()?;
        Ok(n_trials as u64)
    }

    /// Records the winner of a race run here, replacing an earlier one of the same space.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn set_winner(&mut self, winner: &Winner) -> Result<(), StoreError> {
        let transaction = self.write()?;
        let Winner { workload, target, template, threads, .. } = winner;
        let task = task_id(&transaction, workload, target, template, *threads)?;
        replace_winner(&transaction, task, winner)?;
        Ok(transaction.commit()?)
    }

    /// Exports every trial as a JSON line, in the order in which they were recorded; winners with the result
    /// of their races.
    ///
    /// # Errors
    /// [`StoreError`]; [`StoreError::Write`] with the error of `output`.
    pub fn export(&self, output: &mut dyn Write) -> Result<Exported, StoreError> {
        let exported = self.each_line(&mut |line| writeln!(output, "{}", line.to_text()))?;
        output.flush().map_err(StoreError::Write)?;
        Ok(exported)
    }

    /// Calls `each` for every trial with its race's result, in the order in which they were recorded.
    ///
    /// # Errors
    /// [`StoreError`]; [`StoreError::Write`] with the error of `each`.
    pub fn each_line(&self, each: &mut dyn FnMut(RecordLine) -> io::Result<()>) -> Result<Exported, StoreError> {
        let mut winners: HashMap<(i64, String), Winner> = HashMap::new();
        let mut statement = self.connection.prepare(WINNERS)?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            if let Some(winner) = understood(winner(row))? {
                winners.insert((row.get("task")?, row.get("config")?), winner);
            }
        }
        let mut statement = self.connection.prepare(&format!("{TRIALS} ORDER BY trials.id"))?;
        let mut rows = statement.query([])?;
        let mut exported = Exported::default();
        while let Some(row) = rows.next()? {
            let Some(record) = understood(record(row))? else {
                exported.left_out += 1;
                continue;
            };
            let line = RecordLine { record, winner: winners.remove(&(row.get("task")?, row.get("config")?)) };
            each(line).map_err(StoreError::Write)?;
            exported.written += 1;
        }
        Ok(exported)
    }

    /// Imports trials and winners from JSON lines. `check` returns the record to import with its shortest
    /// plausible time, or the reason to refuse it. An existing trial is kept unless it is shorter than that.
    /// An existing winner is kept if its race was run here; otherwise the last one counts.
    ///
    /// # Errors
    /// [`Error::Record`] with the first line that is not a record, or [`Error::Store`]; nothing is added in
    /// either case.
    pub fn import(
        &mut self,
        input: impl BufRead,
        check: &mut dyn FnMut(RecordLine) -> Result<(RecordLine, f64), String>,
    ) -> Result<Imported, Error> {
        let transaction = self.write()?;
        let mut imported = Imported::default();
        let mut winners: BTreeMap<i64, Winner> = BTreeMap::new();
        for (number, line) in read_lines(input) {
            let line = line?;
            imported.read += 1;
            let (RecordLine { mut record, winner }, least_ns) = match check(line) {
                Ok(line) => line,
                Err(reason) => {
                    imported.n_refused += 1;
                    if imported.refused.len() < Imported::MOST_REASONS {
                        imported.refused.push((number, reason));
                    }
                    continue;
                }
            };
            record.is_imported = true;
            imported.new += insert_trial(&transaction, &record, least_ns)?;
            if let Some(winner) = winner {
                let Record { workload, target, template, threads, .. } = &record;
                let task = task_id(&transaction, workload, target, template, *threads)?;
                winners.insert(task, Winner { is_imported: true, ..winner });
            }
        }
        // After all trials: a race that was run elsewhere came after the trials imported with it.
        for (task, winner) in winners {
            let query = "SELECT imported IS NULL FROM winners WHERE task = ?1";
            let is_raced_here: Option<bool> =
                transaction.query_row(query, [task], |row| row.get(0)).optional().map_err(StoreError::from)?;
            if is_raced_here != Some(true) {
                replace_winner(&transaction, task, &winner)?;
            }
        }
        transaction.commit().map_err(StoreError::from)?;
        Ok(imported)
    }

    fn write(&mut self) -> Result<Transaction<'_>, StoreError> {
        Ok(self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?)
    }
}

/// Whether the database is a store; false if it is empty. Runs in a transaction, so that the checks are
/// consistent even while another process creates the store.
fn check_owner(transaction: &Transaction) -> Result<bool, StoreError> {
    let pragma = |name| transaction.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    let application_id = pragma("application_id")?;
    if application_id == APPLICATION_ID {
        let found = pragma("user_version")?;
        return if found > SCHEMA_VERSION {
            Err(StoreError::NewerSchema { found, known: SCHEMA_VERSION })
        } else {
            Ok(true)
        };
    }
    let n_tables: i64 = transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if n_tables > 0 || application_id != 0 { Err(StoreError::Foreign { application_id }) } else { Ok(false) }
}

/// Turns the write-ahead log on. SQLite does not wait for other processes that do so at the same time, so we
/// retry.
fn write_ahead(connection: &Connection) -> Result<(), StoreError> {
    let start = Instant::now();
    loop {
        match connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(())).map_err(StoreError::from) {
            Err(StoreError::Busy { .. }) if start.elapsed() < BUSY_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}

/// Adds the columns that a database of an earlier version lacks.
fn add_later_columns(connection: &mut Connection) -> Result<(), StoreError> {
    let lacks = |connection: &Connection, table: &str, name: &str| -> Result<bool, StoreError> {
        Ok(connection.query_row(HAS_COLUMN, [table, name], |row| row.get::<_, i64>(0))? == 0)
    };
    let mut lacking = LATER_COLUMNS.iter().map(|(table, name, _)| lacks(connection, table, name));
    if !lacking.try_fold(false, |any, lacks| lacks.map(|lacks| any || lacks))? {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for (table, name, kind) in LATER_COLUMNS {
        // Another process may have done it first.
        if lacks(&transaction, table, name)? {
            transaction.execute_batch(&format!("ALTER TABLE {table} ADD COLUMN {name} {kind}"))?;
        }
    }
    Ok(transaction.commit()?)
}

fn task_id(
    transaction: &Transaction,
    workload: &str,
    target: &str,
    template: &str,
    threads: u32,
) -> Result<i64, StoreError> {
    let key = params![workload, target, template, threads];
    let id = transaction
        .prepare_cached("SELECT id FROM tasks WHERE workload = ?1 AND target = ?2 AND template = ?3 AND threads = ?4")?
        .query_row(key, |row| row.get(0))
        .optional()?;
    match id {
        Some(id) => Ok(id),
        None => {
            transaction
                .execute("INSERT INTO tasks (workload, target, template, threads) VALUES (?1, ?2, ?3, ?4)", key)?;
            Ok(transaction.last_insert_rowid())
        }
    }
}

fn replace_winner(transaction: &Transaction, task: i64, winner: &Winner) -> Result<(), StoreError> {
    transaction.execute(
        SET_WINNER,
        params![
            task,
            canonical(&winner.config),
            winner.median_ns,
            winner.margin,
            winner.runner_up.as_ref().map(canonical),
            winner.gflops,
            winner.verified,
            winner.version,
            winner.toolchain,
            winner.unix_time as i64,
            winner.is_imported.then_some(true),
            winner.spread,
        ],
    )?;
    Ok(())
}

/// Adds a trial; returns the number of new rows, 0 or 1.
fn insert_trial(transaction: &Transaction, record: &Record, least_ns: f64) -> Result<u64, StoreError> {
    let Record { workload, target, template, threads, .. } = record;
    let task = task_id(transaction, workload, target, template, *threads)?;
    let outcome = FlatOutcome::from(record.outcome.clone());
    let limit = record.limit.map(Limit::parts);
    let other_costs = (!outcome.other_costs.is_empty()).then(|| Json::from(outcome.other_costs).to_string());
    if least_ns > 0.0 {
        let rejected = params![task, canonical(&record.config), Outcome::NO_ERROR, least_ns];
        transaction.prepare_cached(DELETE_DOUBTED)?.execute(rejected)?;
    }
    let n_rows = transaction.prepare_cached(INSERT_TRIAL)?.execute(named_params! {
        ":task": task,
        ":config": canonical(&record.config),
        ":class": outcome.class,
        ":message": outcome.message,
        ":median_ns": outcome.median_ns,
        ":min_ns": outcome.min_ns,
        ":spread": outcome.spread,
        ":n_samples": outcome.n_samples,
        ":stopped_early": outcome.stopped_early,
        ":build_s": record.seconds.build,
        ":run_s": record.seconds.run,
        ":verify_s": record.seconds.verify,
        ":steps": record.steps,
        ":search": record.search,
        // SQLite's integers are signed; the bits of the seed are kept.
        ":seed": record.seed as i64,
        ":trial": record.trial as i64,
        ":version": record.version,
        ":toolchain": record.toolchain,
        ":unix_time": record.unix_time as i64,
        ":run_start_unix_ms": record.run.map(|run| run.start_unix_ms as i64),
        ":run_elapsed_s": record.run.map(|run| run.elapsed_s),
        ":limit_name": limit.map(|(name, _)| name),
        ":limit_number": limit.map(|(_, number)| number),
        ":imported": record.is_imported.then_some(true),
        ":device": record.conditions.device,
        ":frequency_mhz": record.conditions.frequency_mhz,
        ":temperature_c": record.conditions.temperature_c,
        ":other_costs": other_costs,
    })?;
    Ok(n_rows as u64)
}

/// Text of a configuration that does not depend on the order of its parameters, used as its unique key.
fn canonical(config: &Json) -> String {
    let mut sorted = config.clone();
    sorted.sort_all_objects();
    sorted.to_string()
}

fn parse(text: &str) -> Result<Json, StoreError> {
    serde_json::from_str(text).map_err(|error| StoreError::Damaged(format!("configuration {text:?}: {error}")))
}

/// Costs by the objectives beyond the first; a database that is only read may lack the column.
fn other_costs(row: &Row) -> Result<Vec<f64>, StoreError> {
    if row.as_ref().column_index("other_costs").is_err() {
        return Ok(Vec::new());
    }
    let Some(text) = row.get::<_, Option<String>>("other_costs")? else { return Ok(Vec::new()) };
    serde_json::from_str(&text).map_err(|error| StoreError::Damaged(format!("other costs {text:?}: {error}")))
}

fn record(row: &Row) -> Result<Record, StoreError> {
    let outcome = FlatOutcome {
        class: row.get("class")?,
        message: row.get("message")?,
        median_ns: row.get("median_ns")?,
        min_ns: row.get("min_ns")?,
        spread: row.get("spread")?,
        n_samples: row.get("n_samples")?,
        stopped_early: row.get("stopped_early")?,
        other_costs: other_costs(row)?,
    };
    let record = Record {
        workload: row.get("workload")?,
        target: row.get("target")?,
        template: row.get("template")?,
        threads: row.get("threads")?,
        config: parse(&row.get::<_, String>("config")?)?,
        outcome: outcome.try_into().map_err(StoreError::Damaged)?,
        seconds: Seconds { build: row.get("build_s")?, run: row.get("run_s")?, verify: row.get("verify_s")? },
        steps: row.get("steps")?,
        search: row.get("search")?,
        seed: row.get::<_, i64>("seed")? as u64,
        trial: row.get::<_, i64>("trial")? as u64,
        version: row.get("version")?,
        toolchain: row.get("toolchain")?,
        unix_time: row.get::<_, i64>("unix_time")? as u64,
        run: run_time(row)?,
        limit: limit(row)?,
        conditions: conditions(row)?,
        is_imported: flag(row, "imported")?,
    };
    record.check().map_err(StoreError::Damaged)?;
    Ok(record)
}

/// Row, or `None` if this version does not understand it: another program or a later version may have written
/// it.
fn understood<T>(row: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match row {
        Ok(row) => Ok(Some(row)),
        Err(StoreError::Damaged(_)) => Ok(None),
        Err(StoreError::Sqlite(
            rusqlite::Error::InvalidColumnType(..)
            | rusqlite::Error::IntegralValueOutOfRange(..)
            | rusqlite::Error::FromSqlConversionFailure(..)
            | rusqlite::Error::Utf8Error(..),
        )) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a column is set; it may be null, or missing in a database of an earlier version.
fn flag(row: &Row, column: &str) -> Result<bool, StoreError> {
    match row.as_ref().column_index(column) {
        Ok(column) => Ok(row.get::<_, Option<bool>>(column)?.unwrap_or(false)),
        Err(_) => Ok(false),
    }
}

/// Number in a column that a database of an earlier version may lack.
fn later_number(row: &Row, column: &str) -> Result<Option<f64>, StoreError> {
    match row.as_ref().column_index(column) {
        Ok(column) => Ok(row.get(column)?),
        Err(_) => Ok(None),
    }
}

/// Time of the trial within its run. A read-only database of an earlier version lacks the columns.
fn run_time(row: &Row) -> Result<Option<RunTime>, StoreError> {
    if row.as_ref().column_index("run_elapsed_s").is_err() {
        return Ok(None);
    }
    let start: Option<i64> = row.get("run_start_unix_ms")?;
    let elapsed_s: Option<f64> = row.get("run_elapsed_s")?;
    Ok(start.zip(elapsed_s).map(|(start, elapsed_s)| RunTime { start_unix_ms: start as u64, elapsed_s }))
}

/// Limit that made the trial fail. A read-only database of an earlier version lacks the columns.
fn limit(row: &Row) -> Result<Option<Limit>, StoreError> {
    if row.as_ref().column_index("limit_number").is_err() {
        return Ok(None);
    }
    let name: Option<String> = row.get("limit_name")?;
    let number: Option<f64> = row.get("limit_number")?;
    Ok(name.zip(number).and_then(|(name, number)| Limit::from_parts(&name, number)))
}

/// Conditions of the trial's measurement; a read-only database of an earlier version lacks the columns.
fn conditions(row: &Row) -> Result<Conditions, StoreError> {
    if row.as_ref().column_index("temperature_c").is_err() {
        return Ok(Conditions::default());
    }
    Ok(Conditions {
        device: row.get("device")?,
        frequency_mhz: row.get("frequency_mhz")?,
        temperature_c: row.get("temperature_c")?,
    })
}

fn winner(row: &Row) -> Result<Winner, StoreError> {
    let winner = Winner {
        workload: row.get("workload")?,
        target: row.get("target")?,
        template: row.get("template")?,
        threads: row.get("threads")?,
        config: parse(&row.get::<_, String>("config")?)?,
        median_ns: row.get("median_ns")?,
        margin: row.get("margin")?,
        runner_up: row.get::<_, Option<String>>("runner_up")?.as_deref().map(parse).transpose()?,
        gflops: row.get("gflops")?,
        spread: later_number(row, "spread")?,
        verified: row.get("verified")?,
        version: row.get("version")?,
        toolchain: row.get("toolchain")?,
        unix_time: row.get::<_, i64>("unix_time")? as u64,
        is_imported: flag(row, "imported")?,
    };
    winner.check().map_err(StoreError::Damaged)?;
    Ok(winner)
}

/// Attribute that earlier versions wrote at the end of workloads without any effect on them.
const SAYS_NOTHING: &str = ",exact=1";

/// Name under which earlier versions may have recorded a workload; the same name if it did not change.
fn earlier_called(workload: &str) -> String {
    let earlier = format!("{workload}{SAYS_NOTHING}");
    if now_called(earlier.clone()) == workload { earlier } else { workload.to_owned() }
}

/// Current name of a workload that an earlier version may have recorded.
fn now_called(workload: String) -> String {
    match workload.ends_with(SAYS_NOTHING).then(|| Workload::parse(&workload)) {
        Some(Ok(parsed)) => parsed.to_string(),
        _ => workload,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_is_found_by_index() {
        let store = Store::new(Connection::open_in_memory().unwrap()).unwrap();
        let plan = |query: &str, n: usize| -> Vec<String> {
            let mut statement = store.connection.prepare(&format!("EXPLAIN QUERY PLAN {query}")).unwrap();
            let nothing = rusqlite::params_from_iter(vec![rusqlite::types::Null; n]);
            statement.query_map(nothing, |row| row.get("detail")).unwrap().map(Result::unwrap).collect()
        };
        let trial = plan(FASTEST_TRIALS, 2);
        assert!(trial.iter().any(|step| step.contains("INDEX trials_by_median")), "{trial:#?}");
        assert!(!trial.iter().any(|step| step.starts_with("SCAN") || step.contains("TEMP B-TREE")), "{trial:#?}");
        let tasks = plan(TASKS, 5);
        assert!(tasks.iter().any(|step| step.contains("(workload=? AND target=? AND threads=?)")), "{tasks:#?}");
    }
}
