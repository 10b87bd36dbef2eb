//! Tables for tuning on a fleet: unfinished runs, whose results may wait on a server, and candidates during
//! whose measurement machines vanished.

use rusqlite::{OptionalExtension, params};

use super::{Store, StoreError, TaskKey};

/// Schema of tables that versions without fleets do not know and ignore.
const TABLES: &str = "
CREATE TABLE IF NOT EXISTS fleet_runs (
    run TEXT PRIMARY KEY,
    workload TEXT NOT NULL,
    target TEXT NOT NULL,
    threads INTEGER NOT NULL,
    template TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS fleet_strikes (
    workload TEXT NOT NULL,
    target TEXT NOT NULL,
    threads INTEGER NOT NULL,
    template TEXT NOT NULL,
    config TEXT NOT NULL,
    n INTEGER NOT NULL,
    PRIMARY KEY (workload, target, threads, template, config)
) STRICT;
";

const STRIKE: &str = "
INSERT INTO fleet_strikes (workload, target, threads, template, config, n) VALUES (?1, ?2, ?3, ?4, ?5, 1)
ON CONFLICT DO UPDATE SET n = n + 1 RETURNING n";

/// Query for the machine classes of a target under which a workload has records.
const CLASSES: &str = "
SELECT DISTINCT target FROM tasks
WHERE workload = ?1 AND threads = ?3 AND substr(target, 1, length(?2) + 1) = ?2 || '@' ORDER BY id";

impl Store {
    /// Names of machine classes that include this target, if the workload has records of them.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn classes_of(&self, workload: &str, target: &str, threads: u32) -> Result<Vec<String>, StoreError> {
        let mut statement = self.connection.prepare(CLASSES)?;
        let targets = statement.query_map(params![workload, target, threads], |row| row.get(0))?;
        Ok(targets.collect::<Result<_, _>>()?)
    }

    /// Unfinished runs of a task.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn fleet_runs(&mut self, key: &TaskKey) -> Result<Vec<String>, StoreError> {
        self.connection.execute_batch(TABLES)?;
        let TaskKey { workload, target, template, threads } = key;
        let query = "SELECT run FROM fleet_runs WHERE workload = ?1 AND target = ?2 AND threads = ?3 AND template = ?4";
        let mut statement = self.connection.prepare(query)?;
        let runs = statement.query_map(params![workload, target, threads, template], |row| row.get(0))?;
        Ok(runs.collect::<Result<_, _>>()?)
    }

    /// Records the start of a run.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn begin_fleet_run(&mut self, key: &TaskKey, run: &str) -> Result<(), StoreError> {
        self.connection.execute_batch(TABLES)?;
        let TaskKey { workload, target, template, threads } = key;
        let insert = "INSERT INTO fleet_runs (run, workload, target, threads, template) VALUES (?1, ?2, ?3, ?4, ?5)";
        self.connection.execute(insert, params![run, workload, target, threads, template])?;
        Ok(())
    }

    /// Records the end of a run, all of whose results have arrived.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn end_fleet_run(&mut self, run: &str) -> Result<(), StoreError> {
        self.connection.execute("DELETE FROM fleet_runs WHERE run = ?1", [run])?;
        Ok(())
    }

    /// Counts a machine's disappearance during the measurement of this configuration; returns the number of
    /// times.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn strike(&mut self, key: &TaskKey, config: &str) -> Result<u64, StoreError> {
        self.connection.execute_batch(TABLES)?;
        let TaskKey { workload, target, template, threads } = key;
        let values = params![workload, target, threads, template, config];
        let n: Option<i64> = self.connection.query_row(STRIKE, values, |row| row.get(0)).optional()?;
        Ok(n.unwrap_or(1).unsigned_abs())
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::*;

    #[test]
    fn runs_and_strikes_are_kept_by_task() {
        let mut store = Store::new(Connection::open_in_memory().unwrap()).unwrap();
        let key = |template: &str| TaskKey {
            workload: "matmul:m=1,n=1,k=1".into(),
            target: "x86_64/znver4/512@lab".into(),
            template: template.into(),
            threads: 1,
        };
        assert_eq!(store.fleet_runs(&key("a")).unwrap(), Vec::<String>::new());
        for (template, run) in [("a", "1"), ("a", "2"), ("b", "3")] {
            store.begin_fleet_run(&key(template), run).unwrap();
        }
        store.end_fleet_run("1").unwrap();
        assert_eq!(store.fleet_runs(&key("a")).unwrap(), ["2"]);
        let n = [("a", "x"), ("a", "x"), ("a", "y"), ("b", "x")].map(|(t, c)| store.strike(&key(t), c).unwrap());
        assert_eq!(n, [1, 2, 1, 1]);
    }
}
