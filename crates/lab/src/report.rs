//! Report on a database of records, or on a model: facts, and a self-contained HTML page.

mod facts;
mod layout;
mod model;
mod model_page;
mod page;

pub use facts::{BestConfig, Facts, NearBest, OutcomeFacts, Point, ReportSubject, SearchFacts, TemplateFacts, facts};
pub use model::{
    GraphEdge, GraphNode, ModelFacts, ModelSubject, SearchTime, StepFacts, TaskFacts, TurnFacts, model_facts,
};
pub use model_page::model_page;
pub use page::page;

#[cfg(test)]
mod tests {
    use super::*;
    use rand::seq::IndexedRandom;
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;
    use rusqlite::Connection;
    use serde_json::{Value as Json, json};
    use tilewright_tune::{Store, Validator};

    const NUMBERS: [f64; 12] = [0.0, 5e-324, 1e-300, 1e-9, 1.0, 3e5, 1e18, 1e154, 1e300, f64::MAX, -1.0, -1e308];
    const COUNTS: [u64; 7] = [0, 1, 600, 1_800_000_000, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX];

    /// Line of records with numbers that are possible in JSON, however implausible.
    fn line(rng: &mut Xoshiro256PlusPlus, config: u64) -> String {
        let mut number = || *NUMBERS.choose(rng).expect("there are some");
        let outcome = match number() < 1e-200 {
            true => json!({"class": "wrong_answer", "message": "m"}),
            false => json!({"class": "no_error", "median_ns": number(), "min_ns": number(), "spread": number(),
                "n_samples": 3, "stopped_early": false}),
        };
        let seconds = json!({"build": number(), "run": number(), "verify": number()});
        let (elapsed_s, median_ns, margin, gflops) = (number(), number(), number(), number());
        let mut count = || *COUNTS.choose(rng).expect("there are some");
        let (unix_time, start_unix_ms, trial, raced) = (count(), count(), count(), count());
        let search = ["random", "gbt"][rng.random_range(0..2)];
        let mut line = json!({
            "workload": "matmul:m=8,n=8,k=8", "target": "x86-64", "template": "matmul", "threads": 1,
            "config": {"mr": config}, "outcome": outcome, "seconds": seconds, "steps": "",
            "search": search, "seed": rng.random_range(0..3u64), "trial": trial,
            "version": "0.1.0", "toolchain": "LLVM 22", "unix_time": unix_time,
        });
        if rng.random_bool(0.7) {
            line["run"] = json!({"start_unix_ms": start_unix_ms, "elapsed_s": elapsed_s});
        }
        if rng.random_bool(0.1) {
            line["winner"] = json!({"median_ns": median_ns, "margin": margin, "runner_up": null, "gflops": gflops,
                "verified": true, "version": "0.1.0", "toolchain": "LLVM 22", "unix_time": raced});
        }
        line.to_string()
    }

    #[test]
    fn no_number_that_can_be_imported_is_too_much() {
        let mut n_imported = 0;
        for seed in 0..200 {
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
            let mut store = Store::new(Connection::open_in_memory().unwrap()).unwrap();
            for config in 0..rng.random_range(1..12) {
                // Implausible records are refused.
                n_imported += store
                    .import(line(&mut rng, config).as_bytes(), &mut |line| Ok((line, 0.0)))
                    .map_or(0, |imported| imported.new);
            }
            let subjects = facts(&store, &[]).unwrap().subjects;
            let page = page("r.db", &subjects);
            assert!(page.len() < 200_000, "seed {seed}: {} bytes", page.len());
            serde_json::to_value(&subjects).map(|json: Json| json.to_string()).unwrap();
            store.best("matmul:m=8,n=8,k=8", "x86-64", 1, None, &|_| Validator::default()).unwrap();
            store.export(&mut std::io::sink()).unwrap();
        }
        assert!(n_imported > 100, "only {n_imported} records were imported");
    }
}
