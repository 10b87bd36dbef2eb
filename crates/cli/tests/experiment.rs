//! Experiments: the files that they write, and that a second run repeats nothing.

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use common::{check_refused, run, run_json, stderr, text};

/// Modification times of the runs' databases.
fn databases(folder: &Path) -> BTreeMap<PathBuf, SystemTime> {
    let entries = std::fs::read_dir(folder.join("runs")).unwrap().map(|entry| entry.unwrap().path());
    let databases = entries.filter(|path| path.extension().is_some_and(|e| e == "db"));
    databases.map(|path| (path.clone(), path.metadata().unwrap().modified().unwrap())).collect()
}

#[test]
fn an_experiment_leaves_data_and_plots_and_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("e");
    let arguments = ["experiment", "nose-errors", "--budget", "0.003", "--repeats", "2", "-o", text(&folder)];
    let first = run_json(&arguments);
    assert_eq!((&first["complete"], first["runs"].as_array().unwrap().len()), (&true.into(), 2));
    assert!(first["runs"][0]["command"].as_str().unwrap().starts_with("tilewright tune resnet18.C12 --search random"));
    // 0.3 % of 0.5 % of 844,800 configurations.
    assert_eq!(first["runs"][1]["trials"], 13);
    let best = first["runs"][0]["best_gflops"].as_f64().unwrap();
    assert!(best > 0.0 && first["summary"][0]["best_gflops"]["most"].as_f64().unwrap() >= best);

    let data = std::fs::read_to_string(folder.join("data.json")).unwrap();
    assert_eq!(serde_json::from_str::<serde_json::Value>(&data).unwrap(), first);
    let trials = std::fs::read_to_string(folder.join("trials.csv")).unwrap();
    assert_eq!(trials.lines().count(), 1 + 2 * 13);
    assert!(trials.lines().all(|line| line.split(',').count() == 11), "{trials}");
    let page = std::fs::read_to_string(folder.join("README.md")).unwrap();
    // The page describes the actual runs, not the experiment at its full size.
    assert!(page.contains("2 runs of 13 trials or 60 s each") && page.contains("All are complete"), "{page}");
    for picture in ["outcomes.svg", "histogram.svg"] {
        assert!(page.contains(picture));
        let svg = std::fs::read_to_string(folder.join(picture)).unwrap();
        assert!(svg.starts_with("<svg ") && svg.contains("<rect "), "{svg}");
    }

    // One of the runs was interrupted: only that one is repeated.
    let before = databases(&folder);
    std::fs::remove_file(folder.join("runs/C12_random_1.json")).unwrap();
    let again = run_json(&arguments);
    let after = databases(&folder);
    let repeated: Vec<_> = before.iter().filter(|(path, time)| after[*path] != **time).map(|(path, _)| path).collect();
    assert_eq!(repeated, [&folder.join("runs/C12_random_1.db")]);
    // The result of a run stays; its share of the best depends on the others, one of which was repeated.
    let [again, first] = [again, first].map(|mut data| {
        let mut run = data["runs"][0].take();
        assert!(run.as_object_mut().unwrap().remove("trials_to_95").is_some());
        run
    });
    assert_eq!(again, first);

    let other = run(&["experiment", "nose-errors", "--budget", "0.002", "-o", text(&folder)]);
    assert_eq!((other.status.code(), stderr(&other).lines().count()), (Some(2), 1), "{}", stderr(&other));
    assert!(stderr(&other).contains("give another folder"));
}

#[test]
fn an_experiment_runs_on_a_device() {
    if let Err(why) = tilewright_device::opencl::device(0) {
        return eprintln!("skipped: {why}");
    }
    let folder = tempfile::tempdir().unwrap();
    let device = ["--device", "opencl", "-o", text(folder.path())];
    let size = ["--budget", "0.0005", "--seed", "12"];
    let data = run_json(&[&["experiment", "nose-errors"], &size[..], &device[..]].concat());
    let command = data["runs"][0]["command"].as_str().unwrap();
    assert!(command.contains(" --device opencl ") && command.ends_with(" --to-the-end --beyond-limits"), "{command}");
    // Configurations beyond the device's limits fail, and are counted.
    assert!(data["runs"][0]["outcomes"]["instantiation_error"]["n"].as_u64() > Some(0), "{}", data["runs"][0]);
    assert!(!data["differs"].as_str().unwrap().contains("CPU"), "{}", data["differs"]);
    let page = std::fs::read_to_string(folder.path().join("README.md")).unwrap();
    assert!(page.contains("| instantiation_error |"), "{page}");
    check_refused(&["experiment", "nose-errors", "--device", "nosuch"], "unknown device `nosuch`");
    check_refused(&["experiment", "opevo-walk", "--device", "opencl"], "--device is not for opevo-walk");
}

/// Experiment with short runs: those of the smallest problem and two arms, two or three trials each.
const SHORT: [&str; 6] = ["experiment", "gemm-sizes", "--problem", "512³", "--budget", "0.006"];

/// Compresses the data of an experiment, as stored beside a page.
fn pack(folder: &Path) {
    let plain = folder.join("data.json");
    let file = std::fs::File::create(folder.join("data.json.gz")).unwrap();
    let mut packed = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    packed.write_all(&std::fs::read(&plain).unwrap()).unwrap();
    packed.finish().unwrap();
    std::fs::remove_file(plain).unwrap();
}

#[test]
fn an_experiment_goes_on_without_the_records_of_earlier_runs() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = |repeats: &'static str| {
        let more = ["--arm", "gbfs", "--arm", "na2c", "-o", text(folder.path()), "--repeats", repeats];
        [&SHORT[..], &more].concat()
    };
    let with = |repeats| run_json(&arguments(repeats));
    let first = with("1");
    let runs_of = |data: &serde_json::Value| data["runs"].as_array().unwrap().clone();
    let n_arms = runs_of(&first).len();
    let curve = std::fs::read_to_string(folder.path().join("by-share.svg")).unwrap();
    std::fs::remove_dir_all(folder.path().join("runs")).unwrap();
    std::fs::remove_file(folder.path().join("plan.json")).unwrap();
    pack(folder.path());

    assert_eq!((runs_of(&with("1")), databases(folder.path()).len()), (runs_of(&first), 0));
    assert_eq!(std::fs::read_to_string(folder.path().join("by-share.svg")).unwrap(), curve);
    let second = with("2");
    assert_eq!((&second["complete"], databases(folder.path()).len()), (&true.into(), n_arms));
    // The share of the best of a run depends on the others.
    let without_95 = |mut run: serde_json::Value| {
        run.as_object_mut().unwrap().remove("trials_to_95");
        run
    };
    let both = [second, first].map(|data| runs_of(&data).into_iter().take(n_arms).map(without_95).collect::<Vec<_>>());
    assert_eq!(both[0], both[1]);
    let page = std::fs::read_to_string(folder.path().join("README.md")).unwrap();
    assert!(page.contains("`data.json.gz` holds") && !folder.path().join("data.json").exists(), "{page}");

    // Results without records are not overwritten, neither by more repetitions nor by another plan.
    std::fs::remove_dir_all(folder.path().join("runs")).unwrap();
    std::fs::remove_file(folder.path().join("plan.json")).unwrap();
    let data = std::fs::read(folder.path().join("data.json.gz")).unwrap();
    for (budget, repeats, reason) in [("0.006", "1", "would be lost"), ("0.004", "2", "give another folder")] {
        let mut arguments = arguments(repeats);
        arguments[SHORT.len() - 1] = budget;
        let other = run(&arguments);
        assert_eq!((other.status.code(), stderr(&other).lines().count()), (Some(2), 1), "{}", stderr(&other));
        assert!(stderr(&other).contains(reason), "{}", stderr(&other));
        assert_eq!(std::fs::read(folder.path().join("data.json.gz")).unwrap(), data);
    }
}

#[test]
fn an_experiment_keeps_to_arms_and_problems_that_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let with = |arm: &'static str| [&SHORT[..], &["--repeats", "1", "-o", text(folder.path()), "--arm", arm]].concat();
    let data = run_json(&with("na2c"));
    let arms: Vec<_> = data["runs"].as_array().unwrap().iter().map(|run| run["arm"].as_str().unwrap()).collect();
    assert_eq!((arms, data["complete"].as_bool()), (vec!["na2c"], Some(true)));
    assert!(data["command"].as_str().unwrap().ends_with("--arm na2c"), "{}", data["command"]);
    for unknown in [with("nosuch"), [with("na2c"), vec!["--problem", "C13"]].concat()] {
        let output = run(&unknown);
        assert_eq!((output.status.code(), stderr(&output).lines().count()), (Some(2), 1), "{}", stderr(&output));
        assert!(stderr(&output).contains("; there are "), "{}", stderr(&output));
    }
}

#[test]
fn what_holds_on_two_machines_is_shown_beside_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let [here, elsewhere] = ["here", "elsewhere"].map(|name| folder.path().join(name));
    let more = ["-o", text(&here), "--repeats", "2", "--arm", "gbfs", "--arm", "na2c"];
    let arguments = [&SHORT[..], &more].concat();
    let mut data = run_json(&arguments);
    let beside = [&arguments[..], &["--beside", text(&elsewhere)]].concat();
    let fails_with = |reason: &str| {
        let output = run(&beside);
        assert_eq!((output.status.code(), stderr(&output).lines().count()), (Some(2), 1), "{}", stderr(&output));
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    };
    fails_with("cannot read");
    std::fs::create_dir(&elsewhere).unwrap();
    let leave = |text: String| std::fs::write(elsewhere.join("data.json"), text).unwrap();
    leave("{\"experiment\": \"gemm-sizes\"}".into());
    fails_with("is not one");
    leave(data.to_string());
    fails_with("is in two of the folders");

    // On the other machine there is one run of each arm, one of them half as fast as the other.
    data["cpu"] = "another".into();
    let runs = data["runs"].as_array_mut().unwrap();
    runs.truncate(2);
    for (run, ns) in runs.iter_mut().zip([10.0, 20.0]) {
        run["started"] = "1999-12-31 23:59 UTC".into();
        assert!(run["found"][0].is_object(), "{run}");
        run["found"][0]["ns"] = ns.into();
    }
    leave(data.to_string());
    pack(&elsewhere);
    let both = run_json(&beside);
    let n_runs: Vec<_> = both["machines"].as_array().unwrap().iter().map(|machine| &machine["cpu"]).collect();
    assert_eq!((n_runs.len(), n_runs[1]), (2, &"another".into()));
    for (of_arm, share_elsewhere) in both["on_all_machines"].as_array().unwrap().iter().zip([1.0, 0.5]) {
        let of_problem = &of_arm["problems"]["512³"];
        assert_eq!(of_problem["runs"], 3);
        let quartiles =
            ["least", "median", "most"].map(|name| of_problem["share_of_best_known"][name].as_f64().unwrap());
        assert!(quartiles.contains(&share_elsewhere) && quartiles.iter().all(|share| *share <= 1.0), "{quartiles:?}");
    }
    let page = std::fs::read_to_string(here.join("README.md")).unwrap();
    assert!(page.contains("## On all machines") && page.contains("- another, "), "{page}");

    data["budget"] = 1.into();
    leave(data.to_string());
    fails_with("at budget 1 ");
}

#[test]
fn a_folder_of_something_else_stays_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["README.md", "trials.csv", "data.json"].map(|name| folder.path().join(name)) {
        std::fs::write(&file, "somebody's").unwrap();
        let arguments = ["experiment", "nose-errors", "--budget", "0.003", "-o", text(folder.path())];
        check_refused(&arguments, "is no experiment's and would be written over");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "somebody's");
        std::fs::remove_file(file).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

/// Parts of the experiments without separate tests: the smallest ones in which everything is written.
const PARTS: [&[&str]; 14] = [
    &["gemm-fraction", "--arm", "gbfs", "--budget", "0.002"],
    &["gemm-sizes", "--problem", "512³", "--arm", "gbfs", "--budget", "0.004"],
    &["gemm-time", "--arm", "gbfs", "--budget", "0.003"],
    &["autotvm-models", "--problem", "C12", "--arm", "gbt", "--arm", "random", "--budget", "0.004"],
    &["autotvm-objective", "--problem", "C12", "--budget", "0.004"],
    &["autotvm-diversity", "--problem", "C12", "--budget", "0.004"],
    &["autotvm-uncertainty", "--problem", "C12", "--budget", "0.004"],
    &["autotvm-transfer", "--problem", "C9", "--budget", "0.004"],
    &["autotvm-invariance", "--problem", "C7", "--arm", "loop", "--arm", "loop, transfer", "--budget", "0.004"],
    &["opevo-operators", "--problem", "C1", "--arm", "opevo", "--arm", "random", "--budget", "0.005"],
    &["nose-layers", "--problem", "C10", "--budget", "0.01"],
    &["nose-iterations", "--problem", "C10", "--arm", "nose", "--arm", "genetic", "--budget", "0.001"],
    &["searches", "--problem", "C12", "--arm", "random", "--budget", "0.01"],
    &["trials-to-95", "--problem", "C12", "--arm", "random", "--budget", "0.002"],
];

#[test]
fn every_experiment_runs_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    for part in PARTS {
        let output = folder.path().join(part[0]);
        let arguments = [&["experiment"], part, &["--repeats", "1", "-o", text(&output)]].concat();
        let data = run_json(&arguments);
        let runs = data["runs"].as_array().unwrap();
        assert!(data["complete"] == true && !runs.is_empty(), "{part:?}: {data}");
        // On a busy machine the time of a run may end before its first trial does.
        assert!(runs.iter().any(|run| run["trials"].as_u64() > Some(0)), "{part:?}: {runs:?}");
        let page = std::fs::read_to_string(output.join("README.md")).unwrap();
        let pictures: Vec<&str> = page.split(['(', ')']).filter(|name| name.ends_with(".svg")).collect();
        assert!(!pictures.is_empty(), "{part:?}: {page}");
        for picture in pictures {
            let svg = std::fs::read_to_string(output.join(picture)).unwrap();
            let is_whole = svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>") && !svg.contains("NaN");
            assert!(is_whole, "{part:?}, {picture}: {svg}");
        }
        let rows = std::fs::read_to_string(output.join("trials.csv")).unwrap().lines().count() as u64;
        let n_trials: u64 = runs.iter().filter_map(|run| run["trials"].as_u64()).sum();
        assert!(rows > n_trials, "{part:?}: {rows} rows of {n_trials} trials");
        // Complete runs are not repeated.
        let before = databases(&output);
        assert_eq!((run_json(&arguments)["runs"].clone(), databases(&output)), (data["runs"].clone(), before));
    }

    // The others have separate tests here.
    let own = ["nose-errors", "autotvm-operators", "autotvm-end-to-end", "sequence-models", "gemm-map", "opevo-walk"];
    let list = run_json(&["experiment"]);
    for experiment in list["experiments"].as_array().unwrap() {
        let name = experiment["name"].as_str().unwrap();
        assert!(own.contains(&name) || PARTS.iter().any(|part| part[0] == name), "no test runs {name}");
    }
}

#[test]
fn experiments_are_listed() {
    let list = run_json(&["experiment"]);
    let experiments = list["experiments"].as_array().unwrap();
    assert!(experiments.len() >= 11);
    let sizes = experiments.iter().find(|e| e["name"] == "gemm-sizes").unwrap();
    // 0.1 % of 484,000, 899,756 and 1,589,952 configurations, five searches, ten runs of at most 5 minutes.
    assert_eq!(sizes["cost"], "150 runs, 148,700 trials, at most 13 h");
    let unknown = run(&["experiment", "nosuch"]);
    assert_eq!((unknown.status.code(), stderr(&unknown).lines().count()), (Some(2), 1));
    assert!(stderr(&unknown).contains("gemm-fraction"));
}

#[test]
fn whole_networks_are_tuned_and_measured_once() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = |time: &'static str| {
        ["experiment", "autotvm-end-to-end", "--problem", "dqn", "--time", time, "-o", text(folder.path())]
    };
    let first = run_json(&arguments("2"));
    let network = &first["networks"][0];
    assert_eq!((&first["complete"], &network["network"]), (&false.into(), &"dqn".into()));
    assert!(network["trials"].as_u64().unwrap() >= network["workloads"].as_u64().unwrap(), "{network}");
    let rows = network["implementations"].as_array().unwrap();
    for name in ["tilewright", "untuned"] {
        let row = rows.iter().find(|row| row["name"] == name).unwrap();
        assert!(row["ms_median"].as_f64().unwrap() > 0.0 && row["rounds"].as_u64().unwrap() > 0, "{row}");
        assert!(row["max_error"].as_f64().unwrap() < 1e-3, "{row}");
    }
    let speedup = first["speedups"].as_array().unwrap().iter().find(|row| row["over"] == "untuned").unwrap();
    assert!(speedup["geomean"].as_f64().unwrap() > 0.0);
    let page = std::fs::read_to_string(folder.path().join("README.md")).unwrap();
    assert!(page.contains("1 of 5 networks complete") && page.contains("| dqn |"), "{page}");
    for picture in ["speed.svg", "by-time.svg"] {
        assert!(page.contains(picture) && folder.path().join(picture).is_file());
    }

    // Results stay, with the records or without.
    assert_eq!(run_json(&arguments("2")), first);
    std::fs::remove_dir_all(folder.path().join("runs")).unwrap();
    assert_eq!(run_json(&arguments("2")), first);
    check_refused(&arguments("3"), "give another folder");
    check_refused(&[&arguments("2")[..], &["--repeats", "2"]].concat(), "leave it out");
    check_refused(&[&arguments("2")[..], &["--problem", "vgg"]].concat(), "there are resnet18");
}

/// Numbers of the figures and tables in a text, such as "figures 2 to 4, table II", without letters of their
/// parts.
fn items(text: &str) -> Vec<(&'static str, u32)> {
    let number = |word: &str| -> u32 {
        let digits = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let roman = |word: &str| ["I", "II", "III", "IV", "V"].iter().position(|r| *r == word).map(|at| at as u32 + 1);
        digits.parse().ok().or(roman(word)).unwrap_or_else(|| panic!("{word} is no number of a figure in {text}"))
    };
    let (mut kind, mut found) = ("", Vec::new());
    for part in text.split(", ") {
        let mut words: Vec<&str> = part.split(' ').collect();
        for (name, plural) in [("figure", "figures"), ("table", "tables")] {
            if [name, plural].contains(&words[0]) {
                kind = name;
                words.remove(0);
            }
        }
        assert!(!kind.is_empty(), "{text}");
        match words[..] {
            [first, "to", last] => found.extend((number(first)..=number(last)).map(|n| (kind, n))),
            [first, "and", last] => found.extend([first, last].map(|word| (kind, number(word)))),
            [one] => found.push((kind, number(one))),
            _ => panic!("{text}"),
        }
    }
    found
}

/// Row of docs/papers.md: a paper's figures or tables, and the cells.
struct PaperRow {
    paper: String,
    items: Vec<(&'static str, u32)>,
    cells: Vec<String>,
}

/// Reads the rows of docs/papers.md.
fn paper_rows(page: &str) -> Vec<PaperRow> {
    let mut paper = "";
    let mut rows = Vec::new();
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            paper = title;
        }
        if line.starts_with("| figure ") || line.starts_with("| table ") {
            let cells: Vec<String> = line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
            assert_eq!(cells.len(), 4, "{line}");
            rows.push(PaperRow { paper: paper.to_owned(), items: items(&cells[0]), cells });
        }
    }
    rows
}

#[test]
fn every_figure_of_the_papers_has_a_row_and_every_row_its_experiment() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let page = std::fs::read_to_string(docs.join("papers.md")).unwrap();
    let rows = paper_rows(&page);
    let list = run_json(&["experiment"]);
    let of_papers: Vec<&serde_json::Value> =
        list["experiments"].as_array().unwrap().iter().filter(|e| e["paper"] != "Tilewright").collect();
    let name_of =
        |row: &PaperRow| row.cells[2].strip_prefix("`experiment ").map(|rest| rest.trim_matches('`').to_owned());

    for experiment in &of_papers {
        let name = experiment["name"].as_str().unwrap();
        for item in items(experiment["figure"].as_str().unwrap()) {
            let is_it = |row: &&PaperRow| row.paper == experiment["paper"] && row.items.contains(&item);
            let of_item: Vec<Option<String>> = rows.iter().filter(is_it).map(name_of).collect();
            assert!(of_item.contains(&Some(name.to_owned())), "no row of {item:?} names {name}: {of_item:?}");
        }
        let result = format!("results/{name}/README.md");
        assert!(!docs.join(&result).exists() || page.contains(&result), "{result} is not linked");
    }
    // Lists below a table give the results of its rows, over several lines.
    let joined = page.replace("\n  ", " ");
    for row in &rows {
        let PaperRow { paper, cells, .. } = row;
        let [item, _, command, state] = &cells[..] else { panic!("four cells") };
        if state == "by hand" {
            let shown = run(&command.trim_matches('`').split(' ').collect::<Vec<_>>());
            assert!(shown.status.success() && !shown.stdout.is_empty(), "{command}: {}", stderr(&shown));
        }
        let of_paper = joined.split("\n## ").find(|part| part.starts_with(&paper[..])).unwrap();
        let start = format!("- {item}: ");
        let note = of_paper.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or_default();
        let is_kept = match &state[..] {
            "repeated" => note.contains("](results/") || note.starts_with("As above"),
            "not built" => note.contains("Differs: "),
            state => ["repeatable", "by hand", "no measurement"].contains(&state),
        };
        assert!(is_kept, "{paper}, {item}: {state}, {note}");
        if let Some(name) = name_of(row) {
            let experiment = of_papers.iter().find(|experiment| experiment["name"] == name[..]);
            let experiment = experiment.unwrap_or_else(|| panic!("there is no experiment {name}"));
            let claimed = items(experiment["figure"].as_str().unwrap());
            assert!(row.items.iter().all(|item| claimed.contains(item)), "{name} claims {claimed:?}, not {item}");
        }
    }
    // For each paper, without a gap.
    let last =
        [("G-BFS and N-A2C", 8, 1), ("AutoTVM", 11, 1), ("OpEvo", 4, 3), ("Sequence models", 11, 4), ("NoSE", 8, 2)];
    for (paper, n_figures, n_tables) in last {
        let all: Vec<(&str, u32)> =
            rows.iter().filter(|row| row.paper == paper).flat_map(|row| row.items.iter().copied()).collect();
        let expected = (1..=n_figures).map(|n| ("figure", n)).chain((1..=n_tables).map(|n| ("table", n)));
        expected.for_each(|item| assert!(all.contains(&item), "{paper} has no row of {item:?}"));
    }

    // Deviations are those that the command lists.
    let (_, deviations) = joined.split_once("## What the experiments differ in").expect("a list of deviations");
    let found: Vec<&str> = deviations.lines().filter(|line| line.starts_with("- ")).collect();
    let of = |e: &&serde_json::Value, name: &str| e[name].as_str().unwrap().to_owned();
    let expected: Vec<String> =
        of_papers.iter().map(|e| format!("- **{}**: {}.", of(e, "name"), of(e, "differs"))).collect();
    assert_eq!(found, expected);
}

#[test]
fn sequence_models_learn_the_tables_of_the_repository() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (folder, data) = (tempfile::tempdir().unwrap(), root.join("kernels/miopen"));
    let arguments = [
        "experiment",
        "sequence-models",
        "--problem",
        "ConvAsmBwdWrW3x3.fp16",
        "--arm",
        "hybrid-2",
        "--arm",
        "chain",
        "--arm",
        "classifiers",
        "--budget",
        "0.01",
        "--repeats",
        "1",
        "--data",
        text(&data),
        "-o",
        text(folder.path()),
    ];
    let first = run_json(&arguments);
    let found = &first["sets"][0]["found"];
    assert_eq!((&first["complete"], &found["rows"]), (&false.into(), &425.into()));
    let models = found["models"].as_array().unwrap();
    let hybrid = models.iter().find(|model| model["model"] == "hybrid-2").unwrap();
    let curve = hybrid["repetitions"][0]["curve"].as_array().unwrap();
    assert_eq!(curve.len(), 2, "1 % of 200 epochs");
    for epoch in curve {
        let [train, validation] = ["train", "validation"].map(|part| epoch[part]["accuracy"].as_f64().unwrap());
        assert!((0.1..1.0).contains(&train) && (0.1..1.0).contains(&validation), "{epoch}");
    }
    let losses = ["train", "validation"].map(|part| [0, 1].map(|at| curve[at][part]["loss"].as_f64().unwrap()));
    assert!(losses[0][1] < losses[0][0], "{losses:?}");
    let page = std::fs::read_to_string(folder.path().join("README.md")).unwrap();
    for part in ["(table II)", "(table III)", "(table IV)", "ConvAsmBwdWrW3x3.svg", "(22.22)", "425 (447)"] {
        assert!(page.contains(part), "{part} in {page}");
    }
    let picture = std::fs::read_to_string(folder.path().join("ConvAsmBwdWrW3x3.svg")).unwrap();
    assert!(picture.contains("loss of hybrid-2") && picture.contains("accuracy of hybrid-2"));

    // Trained models stay; requests that do not fit are refused.
    assert_eq!(run_json(&arguments)["sets"], first["sets"]);
    check_refused(&["experiment", "sequence-models", "--time", "5"], "--time is not for sequence-models");
    let elsewhere = ["experiment", "sequence-models", "--data", text(folder.path()), "-o", text(folder.path())];
    check_refused(&elsewhere, "--data");
    check_refused(&["experiment", "sequence-models", "--problem", "nosuch"], "ConvAsm1x1U.fp32");
}

#[test]
fn pictures_are_computed_alike_from_a_seed() {
    for (name, part) in [("gemm-map", "gbfs:start=random"), ("opevo-walk", "16·1·1")] {
        let folder = tempfile::tempdir().unwrap();
        let arguments = ["experiment", name, "-o", text(folder.path())];
        let first = run_json(&arguments);
        assert_eq!((run_json(&arguments), &first["complete"]), (first.clone(), &true.into()));
        let page = std::fs::read_to_string(folder.path().join("README.md")).unwrap();
        let picture = format!("{name}.svg");
        assert!(page.contains(part) && page.contains(&picture) && folder.path().join(picture).is_file(), "{page}");
        check_refused(&[&arguments[..], &["--arm", "gbfs"]].concat(), "leave it out");
    }
}

#[test]
fn a_rival_learns_from_the_problem_before() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = [
        "experiment",
        "nose-iterations",
        "--problem",
        "C9",
        "--problem",
        "C10",
        "--arm",
        "gbt",
        "--arm",
        "genetic",
        "--budget",
        "0.001",
        "-o",
        text(folder.path()),
    ];
    let data = run_json(&arguments);
    assert_eq!(data["complete"], true);
    let command = |problem: &str, arm: &str| {
        let runs = data["runs"].as_array().unwrap();
        runs.iter().find(|run| run["problem"] == problem && run["arm"] == arm).unwrap()["command"].to_string()
    };
    assert!(command("C10", "gbt").contains("--transfer runs/C9_gbt_0.db"), "{}", command("C10", "gbt"));
    for (problem, arm) in [("C9", "gbt"), ("C9", "genetic"), ("C10", "genetic")] {
        assert!(!command(problem, arm).contains("--transfer"), "{}", command(problem, arm));
    }
    assert!(folder.path().join("outcomes.svg").is_file() && folder.path().join("time.svg").is_file());
}

#[test]
fn operators_are_tuned_and_measured_once() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["experiment", "autotvm-operators", "--problem", "C12", "--time", "2", "-o", text(folder.path())];
    let first = run_json(&arguments);
    let operator = &first["operators"][0];
    assert_eq!((&first["complete"], &operator["problem"]), (&false.into(), &"C12".into()));
    let rows = operator["implementations"].as_array().unwrap();
    let ours = rows.iter().find(|row| row["name"] == "tilewright").unwrap();
    assert!(ours["gflops"].as_f64().unwrap() > 0.0 && operator["trials"].as_u64().unwrap() > 0, "{operator}");
    let page = std::fs::read_to_string(folder.path().join("README.md")).unwrap();
    assert!(page.contains("1 of 13 operators complete") && page.contains("| C12 |"), "{page}");
    assert_eq!(run_json(&arguments), first);
    check_refused(&[&arguments[..], &["--repeats", "2"]].concat(), "leave it out");
}
