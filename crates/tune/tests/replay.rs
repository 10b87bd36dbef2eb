//! Recorded spaces: every format is read, bad files are refused in one line, and searches keep their promises on them.

use std::collections::HashSet;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use flate2::{Compression, write::GzEncoder};
use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tilewright_tune::{
    ErrorClass, Measure, Measured, Outcome, Parameter, RecordedSpace, Replay, ReplayPlan, SEARCHES, Space, Timing,
    Trial, search,
};

const CONVOLUTION: &[u8] = include_bytes!("data/recorded/convolution_milo-A100_T4.json.gz");
const CONVOLUTION_T1: &[u8] = include_bytes!("data/recorded/convolution_milo.json");
const PNPOLY: &[u8] = include_bytes!("data/recorded/pnpoly-RTX_2080_Ti.json.gz");
const RECORDS: &[u8] = include_bytes!("data/records-v1.jsonl");

/// A folder of recorded spaces, in folders of their own or not, that searches have to keep their promises on as well.
const MORE_SPACES: &str = "TILEWRIGHT_RECORDED_SPACES";

fn real_spaces() -> [RecordedSpace; 2] {
    [CONVOLUTION, PNPOLY].map(|file| RecordedSpace::read("real", file, None).unwrap())
}

/// The real spaces, and those that whoever runs the tests adds.
fn all_spaces() -> Vec<RecordedSpace> {
    let mut spaces = Vec::from(real_spaces());
    let mut folders: Vec<PathBuf> = std::env::var_os(MORE_SPACES).map(PathBuf::from).into_iter().collect();
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "gz") {
                let space = RecordedSpace::read("more", &std::fs::read(&path).unwrap(), None);
                spaces.push(space.unwrap_or_else(|e| panic!("{}: {e}", path.display())));
            }
        }
    }
    spaces
}

/// A search for tests: those with cost models learn and anneal only as long as it takes to see that they do, and networks
/// are small.
fn quick(name: &'static str) -> &'static str {
    match name {
        "gbt" => "gbt:steps=20,batch=32",
        "tree_gru" => "tree_gru:width=8,steps=2,chains=8,updates=1,batch=64",
        "na2c" => "na2c:width=16",
        "rnn_controller" => "rnn_controller:width=16",
        _ => name,
    }
}

fn plan(search: &str, n_repeats: usize) -> ReplayPlan {
    let budgets = vec![25, 50, 100, 200, 400];
    ReplayPlan { search: search.into(), budgets, n_repeats, seed: 1, batch: 1, n_threads: 2 }
}

fn fractions(replay: &Replay) -> Vec<&[f64]> {
    replay.budgets.iter().map(|at| at.fractions.as_slice()).collect()
}

fn mean(replay: &Replay) -> f64 {
    replay.budgets.iter().map(|at| at.mean()).sum::<f64>() / replay.budgets.len() as f64
}

#[test]
fn t4_results_are_read_with_and_without_their_description() {
    for description in [None, Some(CONVOLUTION_T1)] {
        let recorded = RecordedSpace::read("convolution", CONVOLUTION, description).unwrap();
        assert_eq!((recorded.len(), recorded.n_valid()), (4362, 4201));
        assert_eq!(recorded.space().size(), 4362);
        assert_eq!(recorded.optimum_ns(), Some(553_600.0));
        let first = recorded.space().describe()["parameters"][1].clone();
        assert_eq!(first, json!({"name": "block_size_y", "kind": "ordinal", "values": [1, 2, 4, 8, 16]}));
    }
}

#[test]
fn kernel_tuner_caches_are_read() {
    let [_, recorded] = real_spaces();
    assert_eq!((recorded.len(), recorded.n_valid(), recorded.space().size()), (4092, 3734, 4092));
    assert!((recorded.optimum_ns().unwrap() - 15_913.6).abs() < 0.1);
}

#[test]
fn exported_records_are_read() {
    let recorded = RecordedSpace::read("records", RECORDS, None).unwrap();
    assert_eq!((recorded.len(), recorded.n_valid(), recorded.space().size()), (2, 1, 2));
    let kinds = &recorded.space().describe()["parameters"];
    assert_eq!(kinds[0], json!({"name": "m", "kind": "factorization", "n": 512, "parts": 4}));
}

fn t4(rows: Json) -> Json {
    json!({"metadata": {"timeunit": "microseconds"}, "results": rows})
}

fn row(configuration: Json, value: Json) -> Json {
    json!({"configuration": configuration, "invalidity": "correct", "objectives": ["time"],
           "measurements": [{"name": "time", "value": value, "unit": ""}]})
}

#[test]
fn values_become_parameters_of_their_kind() {
    let config = |t: i64, u: bool, s: &str, f: [u64; 2], o: [&str; 2]| json!({"t": t, "u": u, "s": s, "f": f, "o": o});
    let rows = json!([
        row(config(8, true, "b", [4, 2], ["i", "j"]), 3.0.into()),
        row(config(-1, false, "a", [8, 1], ["j", "i"]), 2.0.into()),
    ]);
    let recorded = RecordedSpace::read("kinds", t4(rows).to_string().as_bytes(), None).unwrap();
    assert_eq!(recorded.optimum_ns(), Some(2000.0));
    assert_eq!(
        recorded.space().describe()["parameters"],
        json!([
            {"name": "t", "kind": "ordinal", "values": [-1, 8]},
            {"name": "u", "kind": "categorical", "values": ["false", "true"]},
            {"name": "s", "kind": "categorical", "values": ["a", "b"]},
            {"name": "f", "kind": "factorization", "n": 8, "parts": 2},
            {"name": "o", "kind": "permutation", "values": ["i", "j"]},
        ])
    );
}

#[test]
fn what_is_written_is_read_back() {
    let parameters = vec![
        Parameter::ordinal("t", [1, 2, 4]),
        Parameter::factorization("f", 12, 3),
        Parameter::permutation("o", &["i", "j", "k"]),
        Parameter::boolean("u"),
    ];
    let space = Arc::new(Space::new("written", parameters, vec![]).unwrap());
    let outcome = |at: u128| match at % 12 {
        at if at < 8 => Outcome::Failed { class: ErrorClass::ALL[at as usize], message: "why".into() },
        _ => Outcome::Measured(Timing::of_samples(&[1e3 / (at as f64 + 0.1), 2e6], false)),
    };
    let trials: Vec<Trial> =
        (0..space.size()).map(|at| Trial { config: space.config_at(at), outcome: outcome(at) }).collect();
    let recorded = RecordedSpace::new(space.clone(), trials.clone());
    for is_packed in [false, true] {
        let mut file = Vec::new();
        recorded.write_t4(&mut file, is_packed, &[("workload", "matmul".into())]).unwrap();
        assert_eq!(file.starts_with(&[0x1f, 0x8b]), is_packed);
        let mut read = RecordedSpace::read("written", &file, None).unwrap();
        assert_eq!((read.len(), read.n_valid()), (recorded.len(), recorded.n_valid()));
        for trial in &trials {
            let config = read.space().config_from_json(&space.config_to_json(&trial.config)).unwrap();
            let mut found = None;
            let mut done = |_, measured: Measured| {
                found = Some(measured.outcome);
                ControlFlow::Continue(())
            };
            read.measure(&[config], None, &|| false, &mut Vec::new, &mut done).unwrap();
            let found = found.unwrap();
            // T4 tells fewer classes apart.
            let class = trial.outcome.class().map(|class| match class {
                ErrorClass::CompileErrorHost => ErrorClass::CompileErrorDevice,
                ErrorClass::BuildTimeout => ErrorClass::RunTimeout,
                ErrorClass::Unknown => ErrorClass::RuntimeError,
                other => other,
            });
            assert_eq!((found.class(), found.cost()), (class, trial.outcome.cost()));
        }
    }
}

fn refused(file: &[u8], expected: &str) {
    let error = RecordedSpace::read("bad", file, None).map(|_| ()).unwrap_err().to_string();
    assert_eq!(error, expected);
}

#[test]
fn bad_files_are_refused_with_the_place() {
    let refused_rows = |rows: Json, expected: &str| refused(t4(rows).to_string().as_bytes(), expected);
    let formats = "there are T4 results, Kernel Tuner caches and exported records";
    refused(b"", &format!("an empty file; {formats}"));
    refused(b"{}", &format!("JSON of an unknown kind; {formats}"));
    refused(CONVOLUTION_T1, &format!("a T1 description, which has no results; {formats}"));
    refused(b"{\"results\": [", "line 1, column 13: EOF while parsing a list");
    refused(b"{\n\"results\": 3}", "line 2, column 12: invalid type: integer `3`, expected a sequence");
    let cut_short = RecordedSpace::read("bad", &CONVOLUTION[..20_000], None).map(|_| ()).unwrap_err();
    assert!(cut_short.to_string().starts_with("cannot be unpacked: "), "{cut_short}");
    refused_rows(json!([]), "no configuration satisfies listed (one of none)");
    refused_rows(json!([row(json!({"a": 1}), "x".into())]), "results[0]: the time \"x\" is not a positive number");
    for time in [0.0, -1.0, 1e308] {
        let rows = json!([row(json!({"a": 1}), 1.into()), row(json!({"a": 2}), time.into())]);
        refused_rows(rows, &format!("results[1]: the time {} is not a positive number", Json::from(time)));
    }
    let rows = json!([row(json!({"a": 1}), 1.into()), row(json!({"b": 1}), 1.into())]);
    refused_rows(rows, "results[1]: unknown parameter b; the space has a");
    refused_rows(
        json!([{"configuration": {"a": 1}, "invalidity": "runtime"}]),
        "none of its 1 configurations was measured successfully",
    );
    refused_rows(json!([{"configuration": {"a": 1}, "invalidity": "odd"}]), "results[0]: unknown invalidity \"odd\"");
    let cache = |time: Json, values: Json| {
        json!({"tune_params_keys": ["a"], "tune_params": {"a": values}, "cache": {"1": {"a": 1, "time": time}}})
            .to_string()
    };
    refused(cache("Odd".into(), json!([1])).as_bytes(), "cache[\"1\"]: unknown failure \"Odd\"");
    refused(cache(Json::Null, json!([1])).as_bytes(), "cache[\"1\"]: the time null is not a positive number");
    refused(cache(1.into(), json!([2, 3])).as_bytes(), "cache[\"1\"]: parameter a cannot be 1; allowed: 2, 3");
    refused(cache(1.into(), json!([1, 1])).as_bytes(), "parameter a lists 1 twice");
    refused(cache(1.into(), Json::Null).as_bytes(), "tune_params.a: no list of values");
    let mixed = String::from_utf8_lossy(RECORDS).replacen("n=512,k=512", "n=512,k=256", 1);
    let error = RecordedSpace::read("bad", mixed.as_bytes(), None).map(|_| ()).unwrap_err().to_string();
    assert!(error.starts_with("record 2: it is of matmul:m=512,n=512,k=512, "), "{error}");
}

#[test]
fn bad_descriptions_and_measurements_are_refused_with_the_place() {
    let described = |values: Json, expected: &str| {
        let parameter = json!({"Name": "a", "Type": "int", "Values": values});
        let description = json!({"ConfigurationSpace": {"TuningParameters": [parameter]}}).to_string();
        let file = t4(json!([row(json!({"a": 1}), 1.into())])).to_string();
        let error = RecordedSpace::read("bad", file.as_bytes(), Some(description.as_bytes())).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), expected);
    };
    described("range(3)".into(), "the description: parameter a: \"range(3)\" is not a literal list of values");
    described("[2, 3]".into(), "results[0]: parameter a cannot be 1; allowed: 2, 3");
    described(json!([1, 1]), "parameter a lists 1 twice");
    let measured = |key: &str, value: Json, expected: &str| {
        let mut bad = row(json!({"a": 1}), 1.into());
        bad[key] = value;
        refused(t4(json!([bad])).to_string().as_bytes(), expected);
    };
    measured(
        "objectives",
        json!(["energy"]),
        "results[0]: the objective is \"energy\", but only \"time\" can be replayed",
    );
    measured("measurements", json!([]), "results[0]: no measurement of \"time\"");
    let hours = json!([{"name": "time", "value": 1, "unit": "hours"}]);
    measured("measurements", hours, "results[0]: unknown unit of time \"hours\"");
}

#[test]
fn repeats_are_the_same_on_any_number_of_threads() {
    for recorded in all_spaces() {
        for row in SEARCHES {
            let mut plan = ReplayPlan { budgets: vec![50, 100], ..plan(quick(row.name), 3) };
            let on_two = recorded.replay(&plan).unwrap();
            plan.n_threads = 1;
            assert_eq!(fractions(&recorded.replay(&plan).unwrap()), fractions(&on_two), "{}", row.name);
        }
    }
}

#[test]
fn the_whole_space_holds_the_optimum() {
    for recorded in real_spaces() {
        for row in SEARCHES {
            let plan = ReplayPlan { budgets: vec![1, 1 << 40], n_repeats: 1, batch: 64, ..plan(quick(row.name), 1) };
            let replay = recorded.replay(&plan).unwrap();
            assert_eq!(replay.budgets[1].fractions, [1.0], "{}", row.name);
            assert!(replay.budgets[0].mean() < 1.0);
        }
    }
}

#[test]
fn random_search_comes_as_far_as_its_expectation() {
    // Exact expectations of the optimum over the best of so many draws without replacement.
    for (recorded, expected) in
        real_spaces().iter().zip([[0.627, 0.673, 0.724, 0.780, 0.837], [0.926, 0.947, 0.961, 0.971, 0.979]])
    {
        let replay = recorded.replay(&plan("random", 400)).unwrap();
        for (at, expected) in replay.budgets.iter().zip(expected) {
            assert!(
                (at.mean() - expected).abs() < 5.0 * at.std() / 20.0,
                "{}: {} not {expected}",
                at.budget,
                at.mean()
            );
        }
    }
}

#[test]
fn searches_beat_random_on_average_over_real_spaces() {
    let spaces = real_spaces();
    let over_spaces = |name, n_repeats| -> f64 {
        spaces.iter().map(|space| mean(&space.replay(&plan(quick(name), n_repeats)).unwrap())).sum()
    };
    let random = over_spaces("random", 30);
    for row in SEARCHES {
        let n_repeats = match row.name {
            // Grid search has no reason to: the order of a space says nothing about speed.
            "random" | "grid" => continue,
            // These two learn for longer than a test may take.
            "rnn_controller" | "tree_gru" => continue,
            "na2c" => 10,
            _ => 30,
        };
        assert!(over_spaces(row.name, n_repeats) > random, "{} is not better than random", row.name);
    }
}

#[test]
fn proposals_on_real_spaces_are_legal_and_new() {
    for recorded in all_spaces() {
        for row in SEARCHES {
            let mut search = search::build(quick(row.name), recorded.space(), 3).unwrap();
            let mut seen = HashSet::new();
            for _ in 0..40 {
                // Nothing is observed: the worst a search can meet.
                let proposals = search.propose(9);
                assert!(proposals.len() <= 9, "{}", row.name);
                for config in proposals {
                    assert!(recorded.space().contains(&config), "{}", row.name);
                    assert!(seen.insert(config), "{}", row.name);
                }
            }
        }
    }
}

fn small_files() -> [Vec<u8>; 4] {
    let rows = json!([row(json!({"a": 1, "b": "x"}), 1.5.into()), row(json!({"a": 2, "b": "y"}), 2.5.into())]);
    let cache = json!({"tune_params_keys": ["a"], "tune_params": {"a": [1, 2]},
        "cache": {"1": {"a": 1, "time": 2.5}, "2": {"a": 2, "time": "RuntimeFailedConfig"}}});
    let parameter = |name: &str, values: Json| json!({"Name": name, "Type": "int", "Values": values});
    let parameters = json!([parameter("a", "[1, 2]".into()), parameter("b", json!(["x", "y"]))]);
    let description = json!({"ConfigurationSpace": {"TuningParameters": parameters}});
    let texts = [t4(rows), cache, description].map(|document| document.to_string().into_bytes());
    let [results, cache, description] = texts;
    [results, cache, RECORDS.to_vec(), description]
}

/// Reads whatever it is; where it is refused, in one line.
fn read_anything(file: &[u8]) {
    let [results, ..] = small_files();
    for (file, description) in [(file, None), (file, Some(file)), (&results[..], Some(file))] {
        match RecordedSpace::read("any", file, description) {
            Ok(recorded) => assert!(recorded.n_valid() > 0 && recorded.space().size() == recorded.len() as u128),
            Err(error) => assert!(!error.to_string().is_empty() && !error.to_string().contains('\n'), "{error}"),
        }
    }
}

proptest! {
    #[test]
    fn damaged_files_are_refused_or_read(
        which in 0usize..4, cut: prop::sample::Index, at: prop::sample::Index, junk in "[\\PC\\n]{0,8}|-?[0-9]{1,30}(\\.[0-9]{1,5})?(e-?[0-9]{1,4})?", pack: bool,
    ) {
        let mut file = small_files()[which].clone();
        let at = at.index(file.len());
        file.splice(at..(at + 1).min(file.len()), junk.bytes());
        read_anything(&file);
        if pack {
            let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
            packed.write_all(&file).unwrap();
            file = packed.finish().unwrap();
        }
        file.truncate(cut.index(file.len() + 1));
        read_anything(&file);
    }

    #[test]
    fn garbage_is_refused(garbage in prop::collection::vec(any::<u8>(), 0..64), gzip: bool) {
        let mut file = if gzip { vec![0x1f, 0x8b] } else { Vec::new() };
        file.extend(garbage);
        prop_assert!(RecordedSpace::read("garbage", &file, None).is_err());
    }
}
