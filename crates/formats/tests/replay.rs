//! Tests of recorded spaces: every format is read, bad files are refused in one line, and searches keep their
//! contract on them.

use std::collections::HashSet;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use flate2::{Compression, write::GzEncoder};
use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tilewright_formats::{FORMATS, FormatError, write_space};
use tilewright_search::{
    Budget, Config, ErrorClass, Event, HeadStart, OtherCosts, Outcome, Parameter, RecordedSpace, Replay, ReplayPlan,
    SEARCHES, Space, Timing, Trial, Tuning, build,
};

/// The space of the only task of a file.
fn read(name: &str, file: &[u8], description: Option<&[u8]>) -> Result<RecordedSpace, FormatError> {
    let recorded = tilewright_formats::read(name, file, description, None)?;
    let space = recorded.task(None)?.space(name)?;
    let notes = [recorded.notes, space.notes().to_vec()].concat();
    Ok(space.with_notes(notes))
}

const CONVOLUTION: &[u8] = include_bytes!("data/recorded/convolution_milo-A100_T4.json.gz");
const CONVOLUTION_T1: &[u8] = include_bytes!("data/recorded/convolution_milo.json");
const PNPOLY: &[u8] = include_bytes!("data/recorded/pnpoly-RTX_2080_Ti.json.gz");
const RECORDS: &[u8] = include_bytes!("../../tune/tests/data/records-v1.jsonl");

/// Environment variable that names a folder of further recorded spaces, possibly in subfolders, on which
/// searches have to keep their contract as well.
const MORE_SPACES: &str = "TILEWRIGHT_RECORDED_SPACES";

fn real_spaces() -> [RecordedSpace; 2] {
    [CONVOLUTION, PNPOLY].map(|file| read("real", file, None).unwrap())
}

/// Real spaces, and those of the folder in [`MORE_SPACES`].
fn all_spaces() -> Vec<RecordedSpace> {
    let mut spaces = Vec::from(real_spaces());
    let mut folders: Vec<PathBuf> = std::env::var_os(MORE_SPACES).map(PathBuf::from).into_iter().collect();
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "gz") {
                let space = read("more", &std::fs::read(&path).unwrap(), None);
                spaces.push(space.unwrap_or_else(|e| panic!("{}: {e}", path.display())));
            }
        }
    }
    spaces
}

/// Options of a search for tests: cost models with little training and annealing, and small networks.
fn quick(name: &'static str) -> &'static str {
    match name {
        "gbt" => "gbt:steps=20,batch=32",
        "tree_gru" => "tree_gru:width=8,steps=2,chains=8,updates=1,batch=64",
        "na2c" => "na2c:width=16",
        "rnn_controller" => "rnn_controller:width=16",
        "lfbo" => "lfbo:trees=20",
        _ => name,
    }
}

fn plan(search: &str, n_repeats: usize) -> ReplayPlan {
    let budgets = vec![25, 50, 100, 200, 400];
    ReplayPlan { search: search.into(), budgets, n_repeats, seed: 1, batch: 1, n_threads: 2, guesses: Vec::new() }
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
        let recorded = read("convolution", CONVOLUTION, description).unwrap();
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
    let recorded = read("records", RECORDS, None).unwrap();
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
    let recorded = read("kinds", t4(rows).to_string().as_bytes(), None).unwrap();
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
        write_space(&recorded, &mut file, is_packed, &[("workload", "matmul".into())]).unwrap();
        assert_eq!(file.starts_with(&[0x1f, 0x8b]), is_packed);
        let found = read("written", &file, None).unwrap();
        assert_eq!((found.len(), found.n_valid()), (recorded.len(), recorded.n_valid()));
        for trial in &trials {
            let config = found.space().config_from_json(&space.config_to_json(&trial.config)).unwrap();
            let found = found.outcome(&config);
            // T4 distinguishes fewer classes.
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
    let error = read("bad", file, None).map(|_| ()).unwrap_err().to_string();
    assert_eq!(error, expected);
}

/// Files of other tuners, with the numbers of configurations and of valid ones, and the notes.
const FOREIGN: &[(&str, usize, usize, &[&str])] = &[
    ("kt-closed", 24, 24, &[]),
    ("kt-open-comma", 15, 15, &["the file is not closed, as a stopped run leaves it: 15 whole rows"]),
    ("kt-open-no-comma", 15, 15, &["the file is not closed, as a stopped run leaves it: 15 whole rows"]),
    (
        "kt-open-half-line",
        15,
        15,
        &[
            r#"the file is not closed, as a stopped run leaves it: 15 whole rows, and cache["32,2,2"], where it ends, is left out"#,
        ],
    ),
    ("kt-1.4", 24, 18, &[]),
    ("kt-1.4-two-objectives", 24, 24, &[r#"the objective is "time" and "energy"; times are replayed"#]),
    ("kt-no-objective", 24, 24, &[]),
    ("kt-objective-gflops", 24, 24, &[r#"the objective is "GFLOP/s"; times are replayed"#]),
    (
        "kt-nan",
        24,
        22,
        &[r#"rows counted as failed, for their time is no positive number: 2 of 24, the first cache["8,2,1"]: NaN"#],
    ),
    ("kt-nan-only-in-times", 24, 24, &[]),
    (
        "kt-failed-as-zero",
        24,
        21,
        &[r#"rows counted as failed, for their time is no positive number: 3 of 24, the first cache["8,1,1"]: 0.0"#],
    ),
    (
        "kt-failed-as-minus-one",
        24,
        21,
        &[r#"rows counted as failed, for their time is no positive number: 3 of 24, the first cache["8,1,1"]: -1"#],
    ),
    (
        "kt-failed-as-null",
        24,
        21,
        &[r#"rows counted as failed, for their time is no positive number: 3 of 24, the first cache["8,1,1"]: null"#],
    ),
    (
        "kt-failed-as-max",
        24,
        21,
        &[
            r#"rows counted as failed, for a time beyond a day or the largest number of its type stands for a failure: 3 of 24, the first cache["8,1,1"]: 2147483647"#,
        ],
    ),
    (
        "kt-failed-as-1e20",
        24,
        21,
        &[
            r#"rows counted as failed, for a time beyond a day or the largest number of its type stands for a failure: 3 of 24, the first cache["8,1,1"]: 1e+20"#,
        ],
    ),
    ("kt-kinds", 48, 48, &[]),
    ("kt-int-and-float", 24, 24, &[]),
    ("kt-value-twice", 24, 24, &["parameter tx lists 64 twice; it counts once"]),
    (
        "kt-row-outside",
        18,
        18,
        &[r#"rows left out: 6 of 24, the first cache["64,1,1"]: parameter tx cannot be 64; allowed: 8, 16, 32"#],
    ),
    ("t4-plain", 24, 24, &[]),
    (
        "t4-runtimes-only",
        24,
        24,
        &["rows with several times, of which the median counts: 24 of 24, the first results[0]: 3 of 3 are sound"],
    ),
    (
        "t4-value-list",
        24,
        24,
        &["rows with several times, of which the median counts: 24 of 24, the first results[0]: 3 of 3 are sound"],
    ),
    ("t4-value-text", 24, 24, &[]),
    (
        "t4-thrice",
        24,
        24,
        &[
            "rows of configurations that are recorded already (the median of those that succeeded counts): 48 of 72, the first results[1]",
        ],
    ),
    (
        "t4-wrong-answer",
        24,
        23,
        &["rows counted as failed, for their correctness is 0: 1 of 24, the first results[23]: correctness 0"],
    ),
    ("t4-kt-failures", 24, 18, &[]),
];

/// The names of the formats that can be replayed, as messages list them.
fn formats_with_results() -> String {
    let names = FORMATS.iter().filter(|format| format.has_results()).map(|format| format.name);
    format!("there are {}", names.collect::<Vec<_>>().join(", "))
}

fn foreign(name: &str) -> Vec<u8> {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus/foreign").join(format!("{name}.json"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn files_of_other_tuners_are_read_and_what_is_odd_is_told() {
    for (name, n_rows, n_valid, notes) in FOREIGN {
        let recorded = read(name, &foreign(name), None).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!((recorded.len(), recorded.n_valid()), (*n_rows, *n_valid), "{name}");
        assert_eq!(recorded.notes(), *notes, "{name}");
        // All of them hold the same space or a part of it; no value that stands for a failure is the best.
        assert!(recorded.optimum_ns().unwrap() >= 0.9e6, "{name}: {:?}", recorded.optimum_ns());
    }
    let all_failed = "none of its 24 configurations was measured successfully";
    refused(&foreign("kt-all-failed"), all_failed);
    let formats = formats_with_results();
    let no_json = "no JSON (tables and specifications of kernels are for `predict`)";
    refused(b"a,b\n1,2\n", &format!("{no_json}; {formats}"));
    refused(
        b"[0, []]",
        "there are no rows (rows left out: 1 of 1, the first line 1: column 8: no record of a trace, run times, a target and arguments)",
    );
}

#[test]
fn descriptions_are_evaluated() {
    let results = foreign("t4-plain");
    let plain = read("t4", &results, None).unwrap();
    for name in ["t1-literal", "t1-range"] {
        let described = read("t4", &results, Some(&foreign(name))).unwrap();
        assert_eq!(described.space().describe(), plain.space().describe(), "{name}");
        assert_eq!(described.optimum_ns(), plain.optimum_ns());
    }
}

#[test]
fn numbers_with_fractions_keep_their_order() {
    let value = |text: &str| serde_json::from_str::<Json>(text).unwrap();
    let rows = ["1.5", "-0.5", "1e-7", "8.0", "8", "-2"].iter().enumerate();
    let rows: Vec<Json> = rows.map(|(at, text)| row(json!({"a": value(text)}), (1.0 + at as f64).into())).collect();
    let recorded = read("floats", t4(rows.into()).to_string().as_bytes(), None).unwrap();
    assert_eq!(
        recorded.space().describe()["parameters"],
        json!([{"name": "a", "kind": "ordinal", "values": [0, 1, 2, 3, 4]}])
    );
    // 8.0 and 8 are one value, of 4 and 5 microseconds.
    let costs = (0..5).map(|at| recorded.outcome(&recorded.space().config_at(at)).cost());
    let found: Vec<f64> = costs.collect();
    assert_eq!(found, [6000.0, 2000.0, 3000.0, 1000.0, 4500.0]);
    // A text and the number that it spells.
    let rows = json!([row(json!({"a": "1"}), 1.into()), row(json!({"a": 1}), 2.into())]);
    assert_eq!(read("texts", t4(rows).to_string().as_bytes(), None).unwrap().len(), 2);
}

#[test]
fn repeated_configurations_count_by_the_median_of_what_succeeded() {
    let failed = json!({"configuration": {"a": 1}, "invalidity": "runtime"});
    let of = |rows: &[Json]| read("repeated", t4(rows.into()).to_string().as_bytes(), None);
    let [one, three, nine] = [1, 3, 9].map(|time| row(json!({"a": 1}), time.into()));
    let optimum = |rows: &[Json]| of(rows).unwrap().optimum_ns();
    assert_eq!(optimum(&[nine.clone(), one.clone(), failed.clone(), three.clone()]), Some(3000.0));
    assert_eq!(optimum(&[failed.clone(), one.clone(), three.clone()]), Some(2000.0));
    assert!(of(&[failed.clone(), failed]).is_err());
}

#[test]
fn what_is_in_the_way_of_reading_is_passed_over() {
    let closed = String::from_utf8(foreign("kt-closed")).unwrap();
    let whole = read("whole", closed.as_bytes(), None).unwrap();
    let check = |what: &str, bytes: Vec<u8>, notes: usize| {
        let recorded = read("whole", &bytes, None).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!((recorded.len(), recorded.optimum_ns()), (whole.len(), whole.optimum_ns()), "{what}");
        assert_eq!(recorded.notes().len(), notes, "{what}: {:?}", recorded.notes());
    };
    check("a byte-order mark", [b"\xef\xbb\xbf", closed.as_bytes()].concat(), 0);
    check("line ends of another system", closed.replace("}, \"", "},\r\n\"").into_bytes(), 0);
    check("closed by hand behind a comma", closed.replace("}}}", "},}}").into_bytes(), 0);
    check("zeros of a crash", [closed.as_bytes(), &[0; 4096]].concat(), 0);
    check("closed twice", [closed.as_bytes(), b"\n}\n}"].concat(), 1);
    check("names that are no UTF-8", closed.replace("made-up", "m\u{e4}").bytes().filter(|b| *b != 0xc3).collect(), 0);
    check("an objective that is null", closed.replace("\"time\", \"cache\"", "null, \"cache\"").into_bytes(), 0);
    check("a parameter without a list", closed.replace("\"unroll\": [1, 2]}", "\"unroll\": 2}").into_bytes(), 1);
    check("a number beyond all", closed.replacen("210.0", "1e999", 1).into_bytes(), 0);
    // The same row again, as in the file of a run that was continued.
    let again =
        closed.replacen("\"8,1,2\"", "\"8,1,1\": {\"tx\": 8, \"ty\": 1, \"unroll\": 1, \"time\": NaN}, \"8,1,2\"", 1);
    check("a key twice", again.into_bytes(), 2);
    let wide: Vec<u8> = closed.encode_utf16().flat_map(u16::to_le_bytes).collect();
    for wide in [wide.clone(), [&[0xff, 0xfe], &wide[..]].concat()] {
        refused(&wide, "line 1, column 1: the text is UTF-16 (write it as UTF-8)");
    }
}

#[test]
fn files_that_end_anywhere_are_read_up_to_there() {
    let mut file = foreign("kt-closed");
    file.truncate(2000);
    let (results, descriptions) = (foreign("t4-plain"), [foreign("t1-range"), foreign("t1-literal")]);
    let mut most = 0;
    for end in 0..file.len() {
        if let Ok(recorded) = read("cut", &file[..end], None) {
            assert!(recorded.len() >= most && recorded.notes()[0].contains("not closed"), "{end}");
            most = recorded.len();
        }
    }
    assert!(most > 3);
    // An end within a number, whose further digits are unknown.
    let within = file.windows(11).position(|part| part == b"\"time\": 1.8").unwrap() + 11;
    let at_row = |end: usize| read("cut", &file[..end], None).unwrap().len();
    assert_eq!(at_row(within), at_row(within - 3));
    for end in (0..results.len()).step_by(7) {
        read_anything(&results[..end]);
    }
    for description in descriptions {
        (0..description.len()).for_each(|end| read_anything(&description[..end]));
    }
}

#[test]
fn bad_files_are_refused_with_the_place() {
    let refused_rows = |rows: Json, expected: &str| refused(t4(rows).to_string().as_bytes(), expected);
    let formats = formats_with_results();
    refused(b"", &format!("an empty file; {formats}"));
    refused(b" \n", &format!("an empty file; {formats}"));
    refused(b"{}", &format!("JSON of an unknown kind; {formats}"));
    refused(b"{\"schema_version\": \"1", &format!("a file that ends before it says what it is; {formats}"));
    refused(CONVOLUTION_T1, "a T1 description, which has no results (give results, and this file with --description)");
    refused(b"{\"results\": [", "there are no rows (the file is not closed, as a stopped run leaves it: 0 whole rows)");
    refused(b"{\n\"results\": 3}", "line 2, column 12: expected `[`, found '3'");
    refused(b"{\"results\": [}", "line 1, column 14: expected a value, found '}'");
    refused(b"{\"results\" []}", "line 1, column 12: expected `:`, found '['");
    refused(b"{\"results\": [{\"a\": odd}]}", "line 1, column 23: expected a value, found \"odd\"");
    let deep = [&b"{\"results\": "[..], &b"[".repeat(100_000)].concat();
    refused(&deep, "line 1, column 140: nested more than 128 deep");
    let cut_short = read("bad", &CONVOLUTION[..20_000], None).map(|_| ()).unwrap_err();
    assert!(cut_short.to_string().starts_with("cannot be unpacked: "), "{cut_short}");
    refused_rows(json!([]), "there are no rows");
    let none = "none of its 1 configurations was measured successfully";
    let not_positive = "rows counted as failed, for their time is no positive number: 1 of 1, the first results[0]";
    for time in [json!(0.0), json!(-1.0), json!(null), json!("NaN")] {
        let found = time.as_str().map_or(time.to_string(), str::to_owned);
        refused_rows(json!([row(json!({"a": 1}), time)]), &format!("{none} ({not_positive}: {found})"));
    }
    let unknown = |found: &str| {
        format!("{none} (rows counted as failed, in a way that is not known here: 1 of 1, the first {found})")
    };
    refused_rows(json!([row(json!({"a": 1}), "x".into())]), &unknown("results[0]: \"x\""));
    refused_rows(json!([{"configuration": {"a": 1}, "invalidity": "odd"}]), &unknown("results[0]: \"odd\""));
    refused_rows(json!([{"configuration": {"a": 1}, "invalidity": "runtime"}]), none);
    refused_rows(
        json!([{"kernel": "x"}, 3, {"configuration": {}}]),
        "none of its 3 rows can be read (rows left out: 3 of 3, the first results[0]: no object `configuration`)",
    );
    let other = json!([row(json!({"a": 1}), 1.into()), row(json!({"b": 1}), 1.into())]).to_string();
    let recorded = read("other", format!("{{\"results\": {other}}}").as_bytes(), None).unwrap();
    assert_eq!(recorded.notes(), ["rows left out: 1 of 2, the first results[1]: unknown parameter b; the space has a"]);
    let cache = |time: Json, values: Json| {
        json!({"tune_params_keys": ["a"], "tune_params": {"a": values}, "cache": {"1": {"a": 1, "time": time}}})
            .to_string()
    };
    refused(cache("Odd".into(), json!([1])).as_bytes(), &unknown("cache[\"1\"]: \"Odd\""));
    refused(
        cache(1.into(), json!([2, 3])).as_bytes(),
        "none of its 1 rows can be read (rows left out: 1 of 1, the first cache[\"1\"]: parameter a cannot be 1; allowed: 2, 3)",
    );
    refused(
        b"{\"cache\": {\"1\": {\"a\": 1, \"time\": 1}}}",
        "tune_params: missing; without it parameters cannot be told from measurements",
    );
    let mixed = String::from_utf8_lossy(RECORDS).replacen("n=512,k=512", "n=512,k=256", 1);
    let error = read("bad", mixed.as_bytes(), None).map(|_| ()).unwrap_err().to_string();
    assert!(error.starts_with("results of 2 tasks: ") && error.contains("(choose one with --task"), "{error}");
    let cut = read("records", &RECORDS[..RECORDS.len() - 20], None).unwrap();
    assert!(
        cut.len() == 1 && cut.notes()[0].starts_with("rows left out: 1 of 2, the first line 2: "),
        "{:?}",
        cut.notes()
    );
}

#[test]
fn bad_descriptions_and_measurements_are_refused_with_the_place() {
    let described = |values: Json, expected: &str| {
        let parameter = json!({"Name": "a", "Type": "int", "Values": values});
        let description = json!({"ConfigurationSpace": {"TuningParameters": [parameter]}}).to_string();
        let file = t4(json!([row(json!({"a": 1}), 1.into())])).to_string();
        let found = read("bad", file.as_bytes(), Some(description.as_bytes()));
        assert_eq!(found.map_or_else(|error| error.to_string(), |found| found.notes().join("; ")), expected);
    };
    let without = "(without a description, parameters have the values that occur)";
    described("range(3)".into(), "");
    described(json!([1, 1.0]), "parameter a lists 1 twice; it counts once");
    described(
        "[1]\nx".into(),
        &format!(
            "the description: parameter a: its values, position 5: expected an operator or the end, found `x` {without}"
        ),
    );
    described(
        3.into(),
        &format!(
            "the description: parameter a: its values are no list, nor a text that writes one as Python does {without}"
        ),
    );
    described(
        "[2, 3]".into(),
        "none of its 1 rows can be read (rows left out: 1 of 1, the first results[0]: parameter a cannot be 1; allowed: 2, 3)",
    );
    let no_t1 = read("bad", &foreign("t4-plain"), Some(b"{}")).map(|_| ()).unwrap_err().to_string();
    assert_eq!(
        no_t1,
        format!("the description: ConfigurationSpace.TuningParameters: no parameters, so this is no T1 file {without}")
    );
    let measured = |key, value, n_valid, what: &str, found: &str| {
        let mut odd = row(json!({"a": 1}), 1.into());
        odd[key] = value;
        let file = t4(json!([odd, row(json!({"a": 2}), 1.into())])).to_string();
        let recorded = read("odd", file.as_bytes(), None).unwrap_or_else(|e| panic!("{what}: {e}"));
        let note = format!("{what}: 1 of 2, the first results[0]: {found}");
        assert_eq!((recorded.notes(), recorded.n_valid()), (&[note][..], n_valid));
    };
    measured("objectives", json!(["energy"]), 2, "rows of another objective, whose times are replayed", "\"energy\"");
    measured("measurements", json!([]), 1, "rows counted as failed, for they have no time", "none");
    measured("correctness", json!(0), 1, "rows counted as failed, for their correctness is 0", "correctness 0");
    measured(
        "correctness",
        json!(0.5),
        2,
        "rows whose correctness is neither 0 nor 1 (they count as right)",
        "correctness 0.5",
    );
    let unit = "rows counted as failed, because their unit of time is not s, ms, us or ns";
    measured("measurements", json!([{"name": "time", "value": 1, "unit": "hours"}]), 1, unit, "\"hours\"");
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
    let [recorded, _] = real_spaces();
    for row in SEARCHES {
        let plan = ReplayPlan { budgets: vec![1, 1 << 40], n_repeats: 1, batch: 64, ..plan(quick(row.name), 1) };
        let replay = recorded.replay(&plan).unwrap();
        assert_eq!(replay.budgets[1].fractions, [1.0], "{}", row.name);
        assert!(replay.budgets[0].mean() < 1.0);
    }
}

#[test]
fn random_search_comes_as_far_as_its_expectation() {
    // Exact expectations of the optimum's ratio to the best of this many draws without replacement.
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
    let random = over_spaces("random", 20);
    for row in SEARCHES {
        let n_repeats = match row.name {
            // Grid search has no reason to: the order of a space says nothing about speed.
            "random" | "grid" => continue,
            // These two take longer to learn than a test may take.
            "rnn_controller" | "tree_gru" => continue,
            "na2c" => 10,
            _ => 20,
        };
        assert!(over_spaces(row.name, n_repeats) > random, "{} is not better than random", row.name);
    }
}

#[test]
fn proposals_on_real_spaces_are_legal_and_new() {
    for recorded in all_spaces() {
        for row in SEARCHES {
            let mut search = tilewright_search::build(quick(row.name), recorded.space(), 3).unwrap();
            let mut seen = HashSet::new();
            for _ in 0..40 {
                // Nothing is observed, which is the worst case for a search.
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
    let parameters =
        json!([parameter("a", "[1] + [i*2 for i in range(1, 3) if i < 2]".into()), parameter("b", json!(["x", "y"]))]);
    let description = json!({"ConfigurationSpace": {"TuningParameters": parameters}});
    let texts = [t4(rows), cache, description].map(|document| document.to_string().into_bytes());
    let [results, cache, description] = texts;
    [results, cache, RECORDS.to_vec(), description]
}

/// Reads any file; errors are one line.
fn read_anything(file: &[u8]) {
    let [results, ..] = small_files();
    for (file, description) in [(file, None), (file, Some(file)), (&results[..], Some(file))] {
        match read("any", file, description) {
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
        prop_assert!(read("garbage", &file, None).is_err());
    }
}

/// Area between a front of two costs and a corner, both on logarithmic scales.
fn hypervolume(costs: &[[f64; 2]], corner: [f64; 2]) -> f64 {
    let mut logs: Vec<[f64; 2]> = costs.iter().map(|costs| costs.map(f64::ln)).collect();
    logs.sort_by(|a, b| a.partial_cmp(b).unwrap());
    let (mut area, mut height) = (0.0, corner[1].ln());
    for [x, y] in logs {
        if x < corner[0].ln() && y < height {
            area += (corner[0].ln() - x) * (height - y);
            height = y;
        }
    }
    area
}

/// Recorded space with a second objective: the outputs of a block, for which it needs shared memory.
fn of_two_columns() -> RecordedSpace {
    let [space, _] = real_spaces();
    let sizes = ["block_size_x", "block_size_y", "tile_size_x", "tile_size_y"];
    let two = |(config, outcome): (&Config, &Outcome)| {
        let json = space.space().config_to_json(config);
        let outputs: f64 = sizes.iter().map(|name| json[*name].as_f64().unwrap()).product();
        let outcome = match outcome {
            Outcome::Measured(timing) => {
                Outcome::Measured(Timing { others: OtherCosts::new(&[outputs]).unwrap(), ..*timing })
            }
            failed => failed.clone(),
        };
        Trial { config: config.clone(), outcome }
    };
    RecordedSpace::new(space.space().clone(), space.outcomes().into_iter().map(two).collect::<Vec<_>>())
}

/// Mean share of the whole front's hypervolume that a search has after some trials, over seeds.
fn share_of_front(space: &RecordedSpace, search: &str, n_trials: u64, seeds: std::ops::Range<u64>) -> f64 {
    let costs = |outcome: &Outcome| {
        let costs: Vec<f64> = outcome.timing()?.costs().collect();
        Some([costs[0], costs[1]])
    };
    let all: Vec<[f64; 2]> = space.outcomes().into_iter().filter_map(|(_, outcome)| costs(outcome)).collect();
    let corner = [0, 1].map(|at| all.iter().map(|costs| costs[at]).fold(0.0, f64::max));
    let whole = hypervolume(&all, corner);
    let n_seeds = seeds.clone().count() as f64;
    let share = |seed| {
        let mut search = build(search, space.space(), seed).unwrap();
        let budget = Budget { trials: Some(n_trials), ..Budget::default() };
        let mut found = Vec::new();
        let mut observer = |event: Event| {
            if let Event::Trial(report) = event {
                found.extend(costs(&report.trial.outcome));
            }
            Ok(())
        };
        let (subject, stop) = (space.space().as_ref().into(), AtomicBool::new(false));
        let start = HeadStart::default();
        Tuning::new(search.as_mut(), subject, start).run(&mut space.clone(), budget, &stop, &mut observer).unwrap();
        hypervolume(&found, corner) / whole
    };
    seeds.map(share).sum::<f64>() / n_seeds
}

#[test]
fn auto_finds_more_of_a_front_than_random() {
    let space = of_two_columns();
    for seeds in [0..6, 3000..3006] {
        let of = |search| share_of_front(&space, search, 60, seeds.clone());
        let [auto, random, genetic] = ["auto", "random", "genetic:population=10"].map(of);
        println!("hypervolume after 60 trials: auto {auto:.4}, random {random:.4}, genetic {genetic:.4}");
        assert!(auto > random + 0.02, "auto {auto:.4}, random {random:.4}");
        assert!(genetic > 0.5, "{genetic:.4}");
    }
}

#[test]
fn our_recorded_convolution_is_what_its_page_says() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/cpu-convolution");
    let space = |name: &str| read(name, &std::fs::read(folder.join(name)).unwrap(), None).unwrap();
    let page = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let [whole, sample] = ["resnet18-c1.json.gz", "resnet18-c12-sample.json.gz"].map(space);
    for (space, n, optimum) in [(&whole, 7570, "0.8888 ms"), (&sample, 2987, "2.0266 ms")] {
        assert_eq!((space.len(), space.n_valid(), space.notes().len()), (n, n, 0));
        assert_eq!(format!("{:.4} ms", space.optimum_ns().unwrap() / 1e6), optimum);
        assert!(page.contains(optimum), "{optimum}");
    }
    let after_50 = |search: &str| {
        let plan = ReplayPlan { budgets: vec![50], ..plan(search, 6) };
        whole.replay(&plan).unwrap().budgets[0].mean()
    };
    // Each factor of a split is learnt separately, and a sample hardly contains two configurations that
    // differ in one parameter.
    let replay = sample.replay(&ReplayPlan { budgets: vec![100], ..plan("auto", 8) }).unwrap();
    assert!(mean(&replay) > 0.945, "{:.4}", mean(&replay));
    let (auto, random) = (after_50("auto"), after_50("random"));
    assert!(auto > random && random > 0.9, "auto {auto:.4}, random {random:.4}");
}
