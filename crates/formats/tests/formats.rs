//! Tests of every format: files are detected by their contents, read or refused in one line, and written
//! files are read back.

use std::collections::BTreeMap;
use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tilewright_formats::{
    FORMATS, Format, Recorded, Results, SpaceDescription, TunerTask, carried_over, check_writable, named, read,
    records, table, write,
};
use tilewright_search::{ErrorClass, Parameter, Space};

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus/foreign")
}

fn file(name: &str) -> Vec<u8> {
    std::fs::read(corpus().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Every file of other tuners.
fn files() -> Vec<(String, Vec<u8>)> {
    let names = std::fs::read_dir(corpus()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name != "README.md").collect();
    names.sort();
    names.into_iter().map(|name| (name.clone(), file(&name))).collect()
}

fn read_file(name: &str) -> Recorded {
    read(name.split('.').next().unwrap(), &file(name), None, None).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Outcomes of a file, by task and configuration.
fn outcomes(all: &[Results]) -> BTreeMap<(String, String), (Option<ErrorClass>, f64)> {
    let of_task = |results: &Results| {
        let row = |row| {
            let row: &tilewright_formats::ConfigResult = row;
            // A parameter that a row lacks is null if other rows have it.
            let mut config = results.config(row);
            config.as_object_mut().unwrap().retain(|_, value| !value.is_null());
            (
                (results.task.text(), config.to_string()),
                row.outcome.as_ref().map_or((None, f64::NAN), |outcome| (outcome.class(), outcome.cost())),
            )
        };
        results.rows.iter().map(row).collect::<Vec<_>>()
    };
    all.iter().flat_map(of_task).collect()
}

fn written(format: &Format, results: &[Results]) -> Vec<u8> {
    let mut out = Vec::new();
    write(format, results, &mut out).unwrap();
    out
}

/// Files other than those of Kernel Tuner and T4: format, number of tasks, of configurations and of valid
/// ones.
const READ: &[(&str, &str, usize, usize, usize)] = &[
    ("ansor.json", "ansor", 1, 1, 1),
    ("autotvm.log", "autotvm", 1, 2, 1),
    ("autotvm-repeated.log", "autotvm", 1, 1, 1),
    ("clblast_xgemm_32.json", "clblast", 1, 1, 1),
    ("database_tuning_record.json", "metaschedule", 1, 1, 1),
    ("kernel_tuner_cache.json", "kernel-tuner", 1, 2, 1),
    ("kt-1.4.json", "kernel-tuner", 1, 24, 18),
    ("ktt-output.json", "ktt", 1, 24, 24),
    ("t4.json", "t4", 1, 1, 1),
    ("triton.autotune.json", "triton", 1, 1, 1),
];

#[test]
fn files_are_known_by_what_stands_in_them() {
    for &(name, format, n_tasks, n_rows, n_valid) in READ {
        let recorded = read_file(name);
        let rows = || recorded.results.iter().flat_map(|results| &results.rows);
        let found = (recorded.format.name, recorded.results.len(), rows().count());
        assert_eq!(found, (format, n_tasks, n_rows), "{name}: {:?}", recorded.notes);
        assert_eq!(rows().filter(|row| row.outcome.as_ref().unwrap().timing().is_some()).count(), n_valid, "{name}");
        assert_eq!(recorded.notes, [""; 0], "{name}");
        recorded.results[0].space("space").unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn times_and_parameters_are_what_the_files_say() {
    let best = |name: &str| {
        let results = &read_file(name).results[0];
        let row = results.best().unwrap();
        (results.task.to_string(), results.config(row), row.outcome.as_ref().unwrap().cost())
    };
    let (task, config, ns) = best("autotvm.log");
    assert_eq!(
        task,
        r#"dense_pack.x86,args=[["TENSOR",[64,768],"float32"],["TENSOR",[3072,768],"float32"],null,"float32"] on llvm -mcpu=znver4"#
    );
    assert_eq!((config["tile_y"].clone(), config["auto_unroll"].clone()), (json!([-1, 2, 8]), json!(16)));
    assert!((ns - 1.255e6).abs() < 1.0, "{ns}");
    let (task, config, ns) = best("ansor.json");
    assert_eq!(task, "matmul_key,args=[64,3072,768] on llvm -keys=cpu -mcpu=znver4");
    assert_eq!((config["SP0"].clone(), config["PR0"].clone()), (json!([2, 4, 8]), json!("auto_unroll_max_step$16")));
    assert!((ns - 1.255e6).abs() < 1.0, "{ns}");
    let (task, config, ns) = best("clblast_xgemm_32.json");
    assert_eq!((task.as_str(), ns), ("Xgemm on Example", 125_000.0));
    assert_eq!(config, json!({"GEMMK": 0, "KWG": 32, "MWG": 64, "NWG": 64}));
    let (task, config, ns) = best("triton.autotune.json");
    assert_eq!((task.as_str(), ns), (r#"triton,key=[512,512,512,"torch.float16"]"#, 50_000.0));
    assert_eq!((config["BLOCK_SIZE_M"].clone(), config["num_stages"].clone()), (json!(128), json!(3)));
    let (task, _, ns) = best("ktt-output.json");
    assert!(task == "sum" && (ns - 110_000.0).abs() < 1e-6, "{task} {ns}");
    let (_, _, ns) = best("database_tuning_record.json");
    assert_eq!(ns, 1_250_000.0);
    let recorded = read_file("kernel_tuner_cache.json");
    let row = &recorded.results[0].rows[0];
    assert_eq!(recorded.results[0].task.to_string(), "scale,problem_size=4096 on cpu");
    assert_eq!((row.unix_time, row.seconds.build), (1_795_615_200, 0.4409));
}

#[test]
fn errors_of_autotvm_are_our_classes() {
    let line = |error: usize| {
        json!({
            "input": ["llvm", "t", [["TENSOR", [8, 8], "float32"]], {}],
            "config": {"index": error, "code_hash": null, "entity": [["tile", "sp", [-1, error]]]},
            "result": [[if error == 0 { 0.5 } else { 1e9 }], error, 1.0, 1.7e9], "version": 0.2,
        })
        .to_string()
    };
    let text = (0..9).map(line).collect::<Vec<_>>().join("\n");
    let recorded = read("log", text.as_bytes(), None, None).unwrap();
    let classes: Vec<Option<ErrorClass>> =
        recorded.results[0].rows.iter().map(|row| row.outcome.as_ref().unwrap().class()).collect();
    assert_eq!(classes[0], None);
    assert_eq!(classes[1..], ErrorClass::ALL.map(Some));
    assert_eq!(recorded.results[0].notes, [""; 0]);
}

#[test]
fn many_tasks_are_told_apart_and_lines_that_are_none_are_left_out() {
    let line = |task: u64, index: u64| {
        json!({
            "input": ["llvm", "dense", [["TENSOR", [task, 8], "float32"]], {}],
            "config": {"index": index, "code_hash": null, "entity": [["tile", "sp", [-1, 1 << (index % 10)]]]},
            "result": [[0.001 * (1 + index) as f64], 0, 1.0, 1.7e9], "version": 0.2,
        })
        .to_string()
    };
    let mut lines: Vec<String> = (0..10_000).map(|at| line(at % 10, at)).collect();
    lines.insert(3, "# a comment".into());
    lines.insert(5, String::new());
    lines.insert(7, "{\"input\": [\"llvm\", \"cut".into());
    lines.insert(8, "not JSON".into());
    lines.insert(9, "{\"input\": 3}".into());
    let recorded = read("log", lines.join("\n").as_bytes(), None, None).unwrap();
    assert_eq!(recorded.results.len(), 10);
    assert_eq!(recorded.results.iter().map(|results| results.n_rows).sum::<u64>(), 10_000);
    let note = &recorded.notes[0];
    assert!(note.starts_with("rows left out: 3 of ") && note.contains("the first line 8: column "), "{note}");
    assert!(recorded.task(None).unwrap_err().to_string().starts_with("results of 10 tasks: dense,args="));
    assert_eq!(recorded.task(Some("2")).unwrap().task, recorded.results[1].task);
    assert_eq!(recorded.task(Some("[7,8]")).unwrap().task.field("args").unwrap()[0][1], json!([7, 8]));
    let missing = recorded.task(Some("conv")).unwrap_err().to_string();
    assert!(missing.starts_with("no task \"conv\"; there are dense,args="), "{missing}");
}

#[test]
fn what_is_written_is_read_back() {
    let mut n_written = 0;
    for (name, bytes) in files() {
        let Ok(recorded) = read("space", &bytes, None, None) else { continue };
        for format in FORMATS.iter().filter(|format| format.is_written()) {
            if check_writable(format, &recorded.results).is_err() {
                continue;
            }
            if WINNERS.contains(&format.name) {
                let again = read("space", &written(format, &recorded.results), None, Some(format)).unwrap();
                assert_eq!(winners(&again), winners(&recorded), "{name} as {}", format.name);
                n_written += 1;
                continue;
            }
            let text = written(format, &recorded.results);
            let again = read("space", &text, None, None).unwrap_or_else(|e| panic!("{name} as {}: {e}", format.name));
            assert_eq!(again.format.name, format.name, "{name}");
            let of = |recorded: &Recorded| outcomes(&recorded.results);
            let (before, after) = (of(&recorded), of(&again));
            let n_valid =
                |all: &BTreeMap<_, (Option<ErrorClass>, f64)>| all.values().filter(|at| at.0.is_none()).count();
            assert_eq!((after.len(), n_valid(&after)), (before.len(), n_valid(&before)), "{name} as {}", format.name);
            for ((_, config), (class, ns)) in &before {
                let found = after.iter().find(|((_, other), _)| other == config);
                let (found_class, found_ns) = found.unwrap_or_else(|| panic!("{name} as {}: {config}", format.name)).1;
                // Formats distinguish fewer classes.
                assert_eq!(class.is_some(), found_class.is_some(), "{name} as {}: {config}", format.name);
                let is_near = *ns == *found_ns || (ns - found_ns).abs() <= 1e-12 * ns;
                assert!(is_near, "{name} as {}: {config}: {ns} {found_ns}", format.name);
            }
            // Writing and reading again changes nothing.
            let twice = read("space", &written(format, &again.results), None, None).unwrap();
            assert_eq!(of(&twice), after, "{name} as {}", format.name);
            n_written += 1;
        }
    }
    assert!(n_written > 100, "{n_written}");
}

#[test]
fn our_records_travel_through_logs_of_autotvm() {
    let ours = read("records", include_bytes!("../../tune/tests/data/records-v1.jsonl"), None, None).unwrap();
    let log = written(named("autotvm").unwrap(), &ours.results);
    let again = read("log", &log, None, None).unwrap();
    assert_eq!(outcomes(&again.results), outcomes(&ours.results));
    let lines = |recorded: &Recorded| {
        let all = recorded.results.iter().flat_map(|results| records("records", results));
        all.map(|line| (line.record.workload, line.record.target, line.record.template, line.record.threads))
            .collect::<Vec<_>>()
    };
    assert_eq!(lines(&again), lines(&ours));
    for line in String::from_utf8(log).unwrap().lines() {
        let line: Json = serde_json::from_str(line).unwrap();
        assert_eq!((&line["input"][0], &line["version"]), (&"llvm".into(), &0.2.into()));
        for entity in line["config"]["entity"].as_array().unwrap() {
            assert!(entity[1] == "sp" || entity[1] == "ot", "{entity}");
        }
    }
}

#[test]
fn what_is_not_written_is_refused() {
    let cache = read_file("kernel_tuner_cache.json").results;
    let refused = |format: &str, results: &[Results]| {
        write(named(format).unwrap(), results, &mut Vec::new()).unwrap_err().to_string()
    };
    assert!(refused("ktt", &cache).starts_with("ktt is not written; there are kernel-tuner, t4, autotvm, "));
    let two = [cache.clone(), read_file("t4.json").results].concat();
    assert_eq!(
        refused("t4", &two),
        "t4 has one task in a file, and these are 2: scale,problem_size=4096 on cpu; t4 (choose one with --task)"
    );
    assert_eq!(refused("t4", &[]), "there are no results to write");
}

/// Formats of configurations that won, without their times.
const WINNERS: &[&str] = &["vllm", "helion"];

/// Best configurations of a file, in the order of their texts.
fn winners(recorded: &Recorded) -> Vec<String> {
    let best = |results: &Results| Some(results.config(results.best()?).to_string());
    let mut found: Vec<String> = recorded.results.iter().filter_map(best).collect();
    found.sort();
    found
}

#[test]
fn tables_of_winners_have_no_times() {
    let name = "E=8,N=7168,device_name=Example_GPU,dtype=fp8_w8a8,block_shape=[128,128]";
    let vllm = read(name, &file(&format!("{name}.json")), None, None).unwrap();
    assert_eq!((vllm.format.name, vllm.results.len(), vllm.notes.len()), ("vllm", 4, 0));
    let first = &vllm.results[0];
    let task = r#"fused_moe,E=8,N=7168,dtype="fp8_w8a8",block_shape=[128,128],M=1 on Example_GPU"#;
    assert_eq!(first.task.to_string(), task);
    assert_eq!(first.best_config().unwrap().unwrap()["BLOCK_SIZE_K"], json!(128));

    // The winners are training data, and they begin a search; nothing else is known.
    assert_eq!(table(&vllm.results, &[]).unwrap().n_rows, 4);
    let parameters = |name: &str, values: &[i64]| Parameter::ordinal(name, values.iter().copied());
    let space = Space::new(
        "moe",
        vec![
            parameters("BLOCK_SIZE_M", &[16, 32, 64]),
            parameters("BLOCK_SIZE_N", &[32, 64, 128]),
            parameters("BLOCK_SIZE_K", &[64, 128]),
            parameters("GROUP_SIZE_M", &[1, 16]),
            parameters("num_warps", &[4, 8]),
            parameters("num_stages", &[3, 4]),
        ],
        Vec::new(),
    );
    // The first task is the current one; of the last one, the nearest configuration is taken.
    assert_eq!(carried_over(&space.unwrap(), &vllm.others(&first.task).unwrap()).len(), 3);
    assert!(first.space("moe").unwrap_err().to_string().starts_with("these are winners without times ("));
    assert_eq!(records("vllm", first).count(), 0);
    let refused = |format: &str, results: &[Results]| {
        write(named(format).unwrap(), results, &mut Vec::new()).unwrap_err().to_string()
    };
    let no_times = "t4 has times, and these are winners without any; there are vllm, helion";
    assert_eq!(refused("t4", &vllm.results), no_times);

    // If several tasks have the same number of rows, no winner is chosen among them.
    let two = [vllm.results.clone(), vllm.results.clone()].concat();
    let why = "vllm has one configuration for each number of rows M, and there ";
    assert!(refused("vllm", &two).starts_with(&format!("{why}are two of fused_moe,E=8,")));
    let of_helion = read_file("helion.json").results;
    assert_eq!(refused("vllm", &of_helion), format!("{why}is no number of rows in helion (choose one with --task)"));
    assert!(refused("helion", &vllm.results).starts_with("helion has one task in a file, and these are 4: "));
}

/// Checks that files of `helion.Config.load` are read, and that the task of a cache entry is known.
#[test]
fn configurations_of_helion_are_read_from_both_of_its_files() {
    let saved = read_file("helion.json");
    let results = &saved.results[0];
    let document: Json = serde_json::from_slice(&file("helion.json")).unwrap();
    assert_eq!((saved.format.name, results.config(results.best().unwrap())), ("helion", document.clone()));
    let text = written(named("helion").unwrap(), &saved.results);
    assert_eq!(serde_json::from_slice::<Json>(&text).unwrap(), document);
    let cached = read_file("helion.best_config");
    let results = &cached.results[0];
    let task = r#"helion,specialization_key="((torch.float16, 'cuda', (512, 512)),)" on Example GPU"#;
    assert_eq!((cached.format.name, results.task.to_string().as_str()), ("helion", task));
    assert_eq!(results.config(results.best().unwrap())["block_sizes"], json!([64, 64]));
    for cut in [r#"{"block_sizes": [64,"#, r#"{"block_sizes": [64]"#] {
        let why = read("cut", cut.as_bytes(), None, None).unwrap_err().to_string();
        assert!(why.ends_with("the file ends within something"), "half a configuration is none: {why}");
    }
}

/// Checks that the number of rows of our own products is their `m`, and that the fastest measured
/// configuration is the winner.
#[test]
fn winners_of_measured_results_are_written() {
    let line = |m: u64, tile: u64, ns: f64| {
        json!({
            "workload": format!("matmul:m={m},n=64,k=64"), "target": "x86_64/a/512", "template": "matmul",
            "threads": 1, "config": {"mr": tile},
            "outcome": {"class": "no_error", "median_ns": ns, "min_ns": ns, "spread": 0.1, "n_samples": 3,
                        "stopped_early": false},
            "seconds": {"build": 0.1, "run": 0.2, "verify": 0.3}, "steps": "", "search": "random", "seed": 7,
            "trial": 0, "version": "0.2.0", "toolchain": "none", "unix_time": 1_800_000_000,
        })
        .to_string()
    };
    let lines = [line(128, 4, 9.0), line(16, 2, 5.0), line(16, 8, 3.0)].join("\n");
    let ours = read("records", lines.as_bytes(), None, None).unwrap();
    let text = written(named("vllm").unwrap(), &ours.results);
    assert_eq!(String::from_utf8(text).unwrap(), "{\n    \"16\": {\"mr\":8},\n    \"128\": {\"mr\":4}\n}\n");
}

/// Checks that parameters of a command for elements of Helion's lists become lists for `helion.Config.load`.
#[test]
fn places_of_lists_are_lists_of_helion() {
    let config = json!({
        "sizes[0]": 64, "stages": 3, "orders[0][1]": 0, "orders[0][0]": 1, "sizes[1]": 32, "gap[1]": 5, "x]": 1
    });
    let line = json!({
        "workload": "command:app-00000000", "target": "x86_64/a/512", "template": "command", "threads": 1,
        "config": config,
        "outcome": {"class": "no_error", "median_ns": 3.0, "min_ns": 3.0, "spread": 0.1, "n_samples": 3,
                    "stopped_early": false},
        "seconds": {"build": 0.1, "run": 0.2, "verify": 0.3}, "steps": "", "search": "random", "seed": 7,
        "trial": 0, "version": "0.2.0", "toolchain": "none", "unix_time": 1_800_000_000,
    });
    let ours = read("records", line.to_string().as_bytes(), None, None).unwrap();
    let text = written(named("helion").unwrap(), &ours.results);
    let expected = json!({"sizes": [64, 32], "stages": 3, "orders": [[1, 0]], "gap[1]": 5, "x]": 1});
    assert_eq!(serde_json::from_slice::<Json>(&text).unwrap(), expected);
}

/// Checks that `triton.Config(**config)` receives the arguments of the kernel separately from its own.
#[test]
fn triton_gets_arguments_of_its_configurations() {
    let text = written(named("triton").unwrap(), &read_file("triton.autotune.json").results);
    let document: Json = serde_json::from_slice(&text).unwrap();
    assert_eq!(document["key"], json!([512, 512, 512, "torch.float16"]));
    let config = json!({
        "kwargs": {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 64}, "num_warps": 4, "num_ctas": 1, "num_stages": 3,
    });
    assert_eq!(document["configs_timings"], json!([[config, [0.05, 0.05, 0.05]]]));
    let failed = written(named("triton").unwrap(), &read_file("kt-1.4.json").results);
    assert!(String::from_utf8(failed).unwrap().contains("[Infinity, Infinity, Infinity]"));
}

#[test]
fn t4_has_what_its_schema_asks_for() {
    for name in ["kernel_tuner_cache.json", "kt-1.4.json", "t4-plain.json", "kt-kinds.json"] {
        let text = written(named("t4").unwrap(), &read_file(name).results);
        let document: Json = serde_json::from_slice(&text).unwrap();
        assert_eq!(document["schema_version"], "1.0.0");
        let rows = document["results"].as_array().unwrap();
        assert!(!rows.is_empty());
        let invalidity = ["timeout", "compile", "runtime", "correctness", "constraints", "correct"];
        for row in rows {
            assert!(row["configuration"].is_object() && row["correctness"].is_number() && row["objectives"].is_array());
            assert!(invalidity.contains(&row["invalidity"].as_str().unwrap()), "{row}");
            let times = &row["times"];
            assert!(times["runtimes"].is_array(), "{row}");
            for name in ["compilation_time", "framework", "search_algorithm", "validation"] {
                assert!(times[name].is_number(), "{name}: {row}");
            }
            for measurement in row["measurements"].as_array().unwrap() {
                assert!(measurement["value"].is_number() && measurement["unit"].is_string(), "{row}");
            }
        }
    }
}

#[test]
fn texts_of_tasks_are_read_back() {
    let task = TunerTask {
        kernel: "a, \"b\" = [c]".into(),
        device: "GPU".into(),
        problem: vec![("n".into(), "[1,\"x,]\"]".into()), ("with = sign".into(), "\"a\\\"b\"".into())],
    };
    assert_eq!(TunerTask::parse(&task.text(), "GPU"), Some(task));
    for text in ["a,b", "a,=3", "a,\"b=3", "a,b=[", "a]"] {
        assert_eq!(TunerTask::parse(text, ""), None, "{text}");
    }
}

#[test]
fn tables_have_a_row_for_each_task() {
    let of = |m: u64, tile: u64, device: &str| {
        let file = json!({
            "clblast_device_type": "GPU", "clblast_device_name": device, "precision": "32", "arg_m": m, "arg_n": 64,
            "results": [
                {"kernel": "Xgemm", "time": 0.5, "parameters": {"KWG": 16, "MWG": tile}},
                {"kernel": "Xgemm", "time": 1.5, "parameters": {"KWG": 32, "MWG": tile}},
                {"kernel": "Other", "time": 1.5, "parameters": {"A": 1}},
            ],
        });
        read("x", file.to_string().as_bytes(), None, None).unwrap().results
    };
    let results = [of(64, 16, "one"), of(128, 32, "one"), of(256, 64, "two")].concat();
    let error = table(&results, &[]).unwrap_err().to_string();
    assert!(error.contains("has parameters A, and Xgemm"), "{error}");
    let only = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    let found = table(&results, &only("kernel", "Xgemm")).unwrap();
    assert_eq!(found.n_rows, 3);
    assert_eq!(
        found.specification,
        "name = \"Xgemm\"\nfields = [\n  { name = \"device\", values = [\"one\", \"two\"] },\n  { name = \"arg_m\" },\n]\n\
         parameters = [\n  { name = \"KWG\", values = [16, 32] },\n  { name = \"MWG\", values = [16, 32, 64] },\n]\n"
    );
    assert_eq!(found.rows.lines().nth(1), Some("\"Xgemm\",\"one\",\"64\",\"64\",\"32\",\"16\",\"16\""));
    let error = table(&results, &only("arg_m", "7")).unwrap_err().to_string();
    assert!(error.starts_with("no task has arg_m=7; there are arg_m=128, arg_m=256, arg_m=64"), "{error}");
}

#[test]
fn descriptions_have_expressions_and_conditions() {
    let description = SpaceDescription::read(&file("t1.json")).unwrap();
    // 16, 32, … 128 times 1, 2, 4, of which 20 products are at most 256.
    assert_eq!(description.space("scale").unwrap().size(), 20);
    let row = |x: u64, tile: u64| {
        json!({"configuration": {"block_size_x": x, "tile": tile}, "invalidity": "correct",
               "measurements": [{"name": "time", "value": x, "unit": "ms"}]})
    };
    let results = json!({"results": [row(16, 1), row(128, 4), row(80, 4)]}).to_string();
    let recorded = read("t4", results.as_bytes(), Some(&file("t1.json")), None).unwrap();
    assert_eq!(
        recorded.results[0].notes,
        [
            r#"configurations that the condition block_size_x*tile <= 256 does not allow: 2 of 3, the first {"block_size_x":128,"tile":4}"#
        ]
    );
    assert_eq!(recorded.results[0].space("t4").unwrap().space().n_values(0), 8);
    let odd = String::from_utf8(file("t1.json")).unwrap().replace("<= 256", "&& 1");
    let error = SpaceDescription::read(odd.as_bytes()).unwrap().space("odd").map(drop).unwrap_err().to_string();
    assert!(error.starts_with("condition 1, block_size_x*tile && 1: position 19: "), "{error}");
}

/// Checks that the page that lists the formats has the rows of the table, and no others.
#[test]
fn the_page_lists_the_formats() {
    let page = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats.md");
    let page = std::fs::read_to_string(page).unwrap();
    let row = |format: &Format| {
        let written = if format.is_written() { "yes" } else { "no" };
        format!("| `{}` | {} | {} | {written} |", format.name, format.what, format.read_for)
    };
    let rows: Vec<String> = FORMATS.iter().map(row).collect();
    let table = page.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    let listed: Vec<&str> = table.take_while(|line| line.starts_with('|')).collect();
    assert_eq!(listed, rows);
}

/// Reads any file, with a detected or any given format; errors are one line.
fn read_anything(file: &[u8]) {
    for format in std::iter::once(None).chain(FORMATS.iter().map(Some)) {
        let line = |text: String| assert!(!text.is_empty() && !text.chars().any(char::is_control), "{text:?}");
        match read("any", file, None, format) {
            Err(error) => line(error.to_string()),
            Ok(recorded) => {
                recorded.notes.iter().for_each(|note| line(note.clone()));
                for results in &recorded.results {
                    results.notes.iter().for_each(|note| line(note.clone()));
                    match results.space("any") {
                        Ok(space) => assert!(space.n_valid() > 0 && space.len() == results.rows.len()),
                        Err(error) => line(error.to_string()),
                    }
                    for record in records("any", results) {
                        assert!(!record.to_text().contains('\n'), "{}", record.to_text());
                        assert_eq!(tilewright_tune::record::RecordLine::parse(record.to_text().as_bytes()), Ok(record));
                    }
                }
                let _ = table(&recorded.results, &[]);
                for format in FORMATS {
                    let mut out = Vec::new();
                    if write(format, &recorded.results, &mut out).is_ok() {
                        assert!(read("any", &out, None, Some(format)).is_ok(), "{}", format.name);
                    }
                }
            }
        }
    }
}

/// Number of mutated files to read; `TILEWRIGHT_CASES=1000000` for a long run.
fn n_cases() -> u32 {
    std::env::var("TILEWRIGHT_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(300)
}

/// Replacements for pieces of a file.
fn junk() -> impl Strategy<Value = Vec<u8>> {
    let words: &[&str] =
        &["null", "NaN", "[]", "{}", "-1", "1e999", "\"", "}", "]", ",", ":", "\n", "0", "1e9", "true"];
    prop_oneof![
        prop::sample::select(words).prop_map(|word| word.as_bytes().to_vec()),
        prop::collection::vec(any::<u8>(), 0..8),
        "-?[0-9]{1,20}(\\.[0-9]{1,5})?".prop_map(String::into_bytes),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(n_cases()))]

    #[test]
    fn mutated_files_are_read_or_refused(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0usize..12, junk()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let files = small_files();
        let mut file = which.get(&files).clone();
        for (at, length, junk) in changes {
            let at = at.index(file.len() + 1);
            let end = (at + length).min(file.len());
            file.splice(at..end, junk);
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len() + 1));
        }
        read_anything(&file);
    }
}

/// Small files of every format.
fn small_files() -> Vec<Vec<u8>> {
    static FILES: std::sync::OnceLock<Vec<Vec<u8>>> = std::sync::OnceLock::new();
    let small = || {
        let files = files().into_iter().map(|(_, bytes)| bytes).filter(|bytes| bytes.len() < 1500);
        let written = FORMATS.iter().filter_map(written_small);
        files.chain(written).collect()
    };
    FILES.get_or_init(small).clone()
}

/// Writes a small file of a format, if it can represent a cache of Kernel Tuner.
fn written_small(format: &Format) -> Option<Vec<u8>> {
    let results = read_file("kernel_tuner_cache.json").results;
    check_writable(format, &results).is_ok().then(|| written(format, &results))
}
