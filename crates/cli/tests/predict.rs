//! `predict`: a model from a table or from records, its answers, and refusals.

mod common;

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use common::{check_refused, command, owned, run, run_json, send, stderr, text};
use serde_json::Value as Json;

fn in_root(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.join(path).to_str().expect("a plain name").to_owned()
}

fn kernel(name: &str) -> String {
    in_root(&format!("kernels/miopen/{name}.toml"))
}

fn data(name: &str) -> String {
    in_root(&format!("tests/corpus/miopen/{name}.csv"))
}

/// Problem of ConvAsmBwdWrW3x3 that is not in the table.
const PROBLEM: &str = "n_inputs=48,in_height=20,in_width=20,n_outputs=96,out_height=20,out_width=20,batch_sz=12,\
                       kernel_stride_h=1,kernel_stride_w=1,group_counts=1,arch=gfx906";

fn train(folder: &Path) -> PathBuf {
    let model = folder.join("wrw.safetensors");
    let (data, spec) = (data("ConvAsmBwdWrW3x3.fp32"), kernel("ConvAsmBwdWrW3x3"));
    let trained = run_json(&["predict", "train", &data, "--spec", &spec, "-o", text(&model), "--seed", "1"]);
    assert_eq!((&trained["kernel"], &trained["rows"]), (&"ConvAsmBwdWrW3x3".into(), &202.into()));
    let accuracy = trained["validation"][0]["average_accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.4, "a chance of 1 in 8 or less for each of most parameters, and {accuracy}");
    model
}

#[test]
fn a_trained_model_answers_with_valid_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let model = train(folder.path());
    let answer = run_json(&["predict", "query", text(&model), "--problem", PROBLEM, "-k", "5"]);
    assert_eq!(answer["kernel"], "ConvAsmBwdWrW3x3");
    let candidates = answer["candidates"].as_array().unwrap();
    assert_eq!(candidates.len(), 5);
    let probabilities: Vec<f64> = candidates.iter().map(|c| c["probability"].as_f64().unwrap()).collect();
    assert!(probabilities.is_sorted_by(|a, b| a >= b) && probabilities[0] <= 1.0, "{probabilities:?}");
    for candidate in candidates {
        let parameters = candidate["parameters"].as_object().unwrap();
        let names: Vec<&str> = parameters.keys().map(String::as_str).collect();
        let order = ["limit_wave_cnt", "reverse_inout", "chunk_size", "k_per_wave", "pipe_lines_depth", "n_per_group"];
        assert_eq!((names, &candidate["valid"]), (order.to_vec(), &true.into()));
        assert!(parameters["n_per_group"].as_i64().unwrap() <= 8 && parameters.values().all(|value| value.is_i64()));
    }
    let shown = run(&["predict", "query", text(&model), "--problem", PROBLEM]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("pipe_lines_depth"), "{}", stderr(&shown));

    // Earlier versions replaced the ending by that of the description.
    let [now, earlier] = ["safetensors.json", "json"].map(|ending| model.with_extension(ending));
    std::fs::rename(&now, &earlier).unwrap();
    assert_eq!(run_json(&["predict", "query", text(&model), "--problem", PROBLEM, "-k", "5"]), answer);
    std::fs::rename(&earlier, &now).unwrap();

    // Fields that do not fit the model are refused in one line.
    let without = |field: &str| {
        let kept = PROBLEM.split(',').filter(|pair| !pair.starts_with(field));
        kept.collect::<Vec<_>>().join(",")
    };
    let with = |field: &str| format!("{},{field}", without(field.split('=').next().unwrap()));
    let weights = std::fs::read(&model).unwrap();
    let cut = folder.path().join("cut.safetensors");
    std::fs::write(&cut, &weights[..weights.len() / 2]).unwrap();
    std::fs::copy(model.with_extension("safetensors.json"), cut.with_extension("safetensors.json")).unwrap();
    let missing = folder.path().join("missing.safetensors");
    let cases: Vec<(&Path, String, &str)> = vec![
        (&model, with("colour=1"), "no field colour"),
        (&model, without("n_inputs"), "field n_inputs is missing"),
        (&model, with("n_inputs=many"), "field n_inputs cannot be \"many\""),
        (&model, with("arch=gfx1100"), "field arch cannot be \"gfx1100\"; it is gfx900, gfx906"),
        (&model, with("data_type=FP16"), "learnt only from data_type=FP32"),
        (&model, format!("{PROBLEM},n_inputs=1"), "gives n_inputs twice"),
        (&model, "n_inputs".into(), "--problem takes fields with values"),
        (&model, String::new(), "field n_inputs is missing"),
        (&model, with("n_outputs=97").replace("n_inputs=48", "n_inputs=47"), "leaves no valid configuration"),
        (&cut, PROBLEM.into(), "predict train"),
        (&missing, PROBLEM.into(), "missing."),
    ];
    for (model, problem, expected) in cases {
        check_refused(&["predict", "query", text(model), "--problem", &problem], expected);
    }
    let database = folder.path().join("a.db");
    let tune = ["tune", "matmul:m=8,n=8,k=8", "--predict", text(&model), "--db", text(&database)];
    check_refused(&tune, "a model of ConvAsmBwdWrW3x3, and template");
}

#[test]
fn a_packed_table_is_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let table = std::fs::read(data("ConvAsmBwdWrW3x3.fp16")).unwrap();
    let packed = folder.path().join("table.csv.gz");
    let write = |bytes: &[u8]| std::fs::write(&packed, bytes).unwrap();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, &table).unwrap();
    let bytes = encoder.finish().unwrap();
    write(&bytes);
    let models = ["plain", "packed"].map(|name| folder.path().join(name).with_extension("safetensors"));
    let spec = kernel("ConvAsmBwdWrW3x3");
    let plain = data("ConvAsmBwdWrW3x3.fp16");
    for (table, model) in [&plain[..], text(&packed)].into_iter().zip(&models) {
        run_json(&["predict", "train", table, "--spec", &spec, "-o", text(model)]);
    }
    let [plain, from_packed] = models.map(|model| std::fs::read(model).unwrap());
    assert!(plain == from_packed, "the weights are the same");
    // Truncated or damaged anywhere, it is refused in one line.
    let again = folder.path().join("again.safetensors");
    for n in [2, 3, 12, bytes.len() / 2, bytes.len() - 1] {
        write(&bytes[..n]);
        check_refused(&["predict", "train", text(&packed), "--spec", &spec, "-o", text(&again)], "table.csv.gz");
    }
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 0x55;
    write(&damaged);
    check_refused(&["predict", "train", text(&packed), "--spec", &spec, "-o", text(&again)], "table.csv.gz");
}

#[test]
fn a_killed_training_goes_on_to_the_same_weights() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, killed] = ["whole", "killed"].map(|name| folder.path().join(name).with_extension("safetensors"));
    let (data, spec) = (data("ConvAsmBwdWrW3x3.fp32"), kernel("ConvAsmBwdWrW3x3"));
    let train = ["predict", "train", &data, "--spec", &spec, "--model", "enc-dec", "--epochs", "4", "-o"];
    run_json(&[&train[..], &[text(&whole)]].concat());

    let mut child = command(&[&train[..], &[text(&killed)]].concat()).spawn().unwrap();
    let checkpoint = folder.path().join("killed.safetensors.checkpoint");
    while !checkpoint.exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it could be killed");
        sleep(Duration::from_millis(2));
    }
    send("-KILL", &child);
    child.wait().unwrap();
    assert!(checkpoint.exists() && !killed.exists(), "it was killed under way");
    run_json(&[&train[..], &[text(&killed), "--resume"]].concat());
    assert!(std::fs::read(&whole).unwrap() == std::fs::read(&killed).unwrap(), "the weights are the same");
    assert!(!checkpoint.exists());
}

#[test]
fn an_evaluation_has_the_papers_figures_and_is_not_done_twice() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("scores");
    let (data, spec) = (data("ConvAsmBwdWrW3x3.fp32"), kernel("ConvAsmBwdWrW3x3"));
    let arguments =
        ["predict", "evaluate", &data, "--spec", &spec, "--seeds", "2", "--beam", "1,10", "-o", text(&output)];
    let arguments = [&arguments[..], &["--where", "arch=gfx906", "--baselines"]].concat();
    let first = run_json(&arguments);
    assert_eq!((&first["kernel"], first["models"].as_array().unwrap().len()), (&"ConvAsmBwdWrW3x3".into(), 1));
    let beams = first["models"][0]["beams"].as_array().unwrap();
    assert_eq!(beams.len(), 4);
    for beam in beams {
        let mean = |name: &str| beam[name]["mean"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&mean("perfect")) && mean("perfect") <= mean("average_accuracy"), "{beam}");
        assert!(mean("perfect_equivalent") >= mean("perfect"), "{beam}");
        assert!(beam["constrained"] == false || mean("valid") == 1.0, "{beam}");
        assert!(beam["average_accuracy"]["std"].is_f64(), "{beam}");
        let time = |name: &str| beam["query_ms"][name].as_f64().unwrap();
        assert!(0.0 < time("median") && time("median") <= time("longest"), "{beam}");
    }
    let runs = first["models"][0]["repetitions"].as_array().unwrap();
    assert!(runs.len() == 2 && runs.iter().all(|run| run["load_ms"].as_f64().unwrap() > 0.0), "{runs:?}");
    let best =
        |k: i64| beams.iter().find(|b| b["k"] == k && b["constrained"] == true).unwrap()["perfect"]["mean"].as_f64();
    assert!(best(10) >= best(1));
    let baselines = first["baselines"].as_array().unwrap();
    assert_eq!(baselines.len(), 5);
    let theirs = baselines[0]["paper"]["average_accuracy"].as_f64().unwrap();
    assert!((theirs - 0.6063).abs() < 1e-9, "{theirs}");

    let again = second_run(&arguments);
    assert_eq!(again.0, first["models"], "scores are kept");
    assert_eq!(again.1.matches("scored before").count(), 2, "{}", again.1);
    let shown = run(&["predict", "evaluate", &data, "--spec", &spec, "--seeds", "1", "--beam", "1"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("table III") && shown.contains("the paper has 698"), "{shown}");
}

/// Scores of the models in a second run, and its messages.
fn second_run(arguments: &[&str]) -> (Json, String) {
    let output = common::command(arguments).arg("--json").output().unwrap();
    (common::json_of(arguments, &output)["models"].clone(), stderr(&output))
}

#[test]
fn a_model_of_records_begins_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let (db, model) = (folder.path().join("records.db"), folder.path().join("model.safetensors"));
    for workload in ["matmul:m=32,n=64,k=32", "matmul:m=64,n=32,k=32", "matmul:m=64,n=64,k=32"] {
        run_json(&["tune", workload, "--db", text(&db), "--trials", "12", "--search", "random", "--no-race"]);
    }
    let learn = ["predict", "train", "--db", text(&db), "--template", "matmul", "-o", text(&model)];
    let trained = run_json(&learn);
    assert_eq!((&trained["template"], &trained["workloads"]), (&"matmul".into(), &3.into()));

    let workload = "matmul:m=96,n=64,k=32";
    let answer = run_json(&["predict", "query", text(&model), "--problem", workload, "-k", "16"]);
    let candidates = answer["candidates"].as_array().unwrap();
    assert!(!candidates.is_empty() && candidates.len() <= 16);
    for candidate in &candidates[..candidates.len().min(3)] {
        let config = candidate["parameters"].to_string();
        let shown = run(&["show", workload, "--config", &config, "--emit", "steps"]);
        assert!(shown.status.success(), "{}", stderr(&shown));
    }
    let fresh = folder.path().join("fresh.db");
    let arguments = ["tune", workload, "--db", text(&fresh), "--trials", "3", "--no-race", "--predict", text(&model)];
    let tuned = run(&arguments);
    assert!(tuned.status.success() && stderr(&tuned).contains("predicted by"), "{}", stderr(&tuned));
    let is_likeliest = |config: &String| serde_json::from_str::<Json>(config).unwrap() == candidates[0]["parameters"];
    assert!(common::recorded(&fresh).iter().any(is_likeliest), "the likeliest configuration is measured");

    check_refused(&["predict", "query", text(&model), "--problem", "n_inputs=3"], "--problem takes a workload");
    check_refused(
        &["predict", "query", text(&model), "--problem", "conv2d:c=8,h=8,w=8,k=8,r=3,s=3"],
        "no template `matmul`",
    );
    check_refused(
        &["tune", workload, "--template", "gemm-4-2-4", "--predict", text(&model), "--db", text(&fresh)],
        "gemm-4-2-4 is tuned",
    );
    check_refused(
        &["predict", "train", "--db", text(&db), "--template", "conv", "-o", text(&model)],
        "records of 0 workloads",
    );
    check_refused(
        &["predict", "train", "--db", text(&db), "--template", "nosuch", "-o", text(&model)],
        "no template `nosuch`",
    );
}

const TOY: &str = "name = \"toy\"\nfields = [{ name = \"m\" }, { name = \"n\" }]\n\
                   parameters = [{ name = \"tile\", values = [8, 16] }, { name = \"unroll\", values = [1, 2] }]\n";

/// Table of the toy kernel, with this separator and line end, and this value for one row's tile.
fn toy_table(separator: &str, end: &str, spoilt: &str) -> String {
    let row = |at: usize| {
        let tile = if at == 30 { spoilt } else { ["8", "16"][at % 2] };
        [&(16 * at).to_string(), &(at % 7).to_string(), tile, "1"].join(separator)
    };
    let rows = std::iter::once(["m", "n", "tile", "unroll"].join(separator)).chain((0..40).map(row));
    rows.map(|row| row + end).collect()
}

#[test]
fn tables_and_constraints_of_others_are_read_or_refused_with_the_way_to_write_them() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let model = at("m");
    let train = |constraint: &str, table: &str| {
        std::fs::write(at("toy.toml"), format!("{TOY}constraints = [{{ name = \"fits\", is = \"{constraint}\" }}]"))
            .unwrap();
        std::fs::write(at("toy.csv"), table).unwrap();
        ["predict", "train", &at("toy.csv"), "--spec", &at("toy.toml"), "-o", &model].map(str::to_owned)
    };
    let trained = |arguments: &[String]| {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = command(&arguments).arg("--json").output().unwrap();
        (common::json_of(&arguments, &output), stderr(&output))
    };
    let good = "tile * unroll <= 64";
    let plain = toy_table(",", "\n", "8");
    for table in [&plain, &format!("\u{feff}{}", toy_table(",", "\r\n", "8")), &plain.replace(",8,1", ",\"8\",\"1\"")] {
        let (json, told) = trained(&train(good, table));
        assert_eq!((&json["rows"], &json["violating"]), (&40.into(), &0.into()));
        assert!(!told.contains("violate"), "{told}");
    }
    let (json, told) = trained(&train("tile < 16 or m > 16", &plain));
    assert_eq!(json["violating"], 1);
    assert!(told.contains("1 of 40 rows violates constraints of toy: they are used for training"), "{told}");
    assert!(told.contains("toy: 36 rows to learn from, 4 to validate with"), "{told}");
    let (_, told) = trained(&train("(tile if unroll > 1 else 8) <= 32", &plain));
    assert!(!told.contains("violate"), "{told}");

    check_refused(&train(good, &toy_table("\t", "\n", "8")), "the head is one column, as if tabs separated values");
    check_refused(&train(good, &toy_table(";", "\n", "8")), "as if semicolons separated values");
    check_refused(&train(good, &toy_table(",", "\n", "N/A")), "line 32: parameter tile cannot be \"N/A\"");
    check_refused(
        &train(good, &plain.replace("\n16,", "\n16.0,")),
        "line 3: field m cannot be \"16.0\"; it is a whole number (write 16)",
    );
    check_refused(&train("tile >> unroll >= 4", &plain), "position 6: `>>` is not known here; write `//`");
    check_refused(&train("1 <= unroll && unroll <= 4", &plain), "position 13: `&&` is not known here; write `and`");
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let write = |name: &str, content: &str| {
        std::fs::write(at(name), content).unwrap();
        at(name)
    };
    let (spec, table) = (kernel("ConvAsm1x1U"), data("ConvAsm1x1U.fp32"));
    let rows = std::fs::read_to_string(&table).unwrap();
    let lines: Vec<&str> = rows.lines().collect();
    let ragged = write("ragged.csv", &format!("{}\n{}\n{},1\n", lines[0], lines[1], lines[2]));
    let text_in = write("text.csv", &rows.replacen(",NCHW,FP32,", ",NCHW,FP64,", 1));
    let empty = write("empty.csv", "");
    let head = write("head.csv", lines[0]);
    let short = write("short.csv", &lines[..2].join("\n"));
    let column = write("column.csv", &rows.replacen("k_mult", "k_mul", 1));
    let bad_spec = write("bad.toml", "name = 3");
    let never = std::fs::read_to_string(&spec).unwrap().replace("vgprs < 256", "vgprs < 0");
    let never = write("never.toml", &never);
    let unknown = std::fs::read_to_string(&spec).unwrap().replace("vgprs < 256", "vgpr < 256");
    let unknown = write("unknown.toml", &unknown);
    let (model, nowhere, here) = (at("m"), at("no/such/m"), folder.path().to_str().unwrap().to_owned());
    let train = |table: &str, spec: &str, rest: &[&str]| {
        let mut all = vec!["predict", "train", table, "--spec", spec];
        all.extend(rest);
        if !rest.contains(&"-o") {
            all.extend(["-o", &model]);
        }
        owned(&all)
    };
    let cases: Vec<(Vec<String>, &str)> = vec![
        (owned(&["predict"]), "a subcommand is missing (see `tilewright predict --help`)"),
        (owned(&["predict", "train", "-o", &model]), "DATA.csv --spec KERNEL.toml, or --db FILE --template NAME"),
        (owned(&["predict", "train", &table, "-o", &model]), "give the specification of its kernel with --spec"),
        (owned(&["predict", "evaluate"]), "DATA"),
        (train(&table, &spec, &["--model", "oracle"]), "unknown model `oracle`; there are chain"),
        (train(&table, &spec, &["--model", "all"]), "one model is trained at a time"),
        (train(&table, &spec, &["--encoding", "morse"]), "unknown encoding `morse`"),
        (train(&table, &spec, &["--where", "arch"]), "COLUMN=VALUE"),
        (train(&table, &spec, &["--where", "arch=z80"]), "no row has arch=z80; its values are gfx900, gfx906"),
        (train(&table, &spec, &["--where", "colour=red"]), "there is no column colour"),
        (train(&table, &spec, &["--split", "colour"]), "cannot split by `colour`; there are random, conv_id, layer_id"),
        (train(&table, &spec, &["--resume"]), "to go on with"),
        (train(&table, &spec, &["--epochs", "0"]), "--epochs"),
        (train(&table, &spec, &["--epochs", "3"]), "--epochs means nothing to chain"),
        (train(&table, &spec, &["-o", &nowhere]), "there is no folder"),
        (train(&table, &spec, &["-o", &here]), "it is a folder"),
        (train(&nowhere, &spec, &[]), "cannot read"),
        (train(&here, &spec, &[]), "it is a folder"),
        (train(&empty, &spec, &[]), "there are no rows"),
        (train(&head, &spec, &[]), "there are no rows"),
        (train(&short, &spec, &[]), "1 row of"),
        (train(&ragged, &spec, &[]), "ragged.csv: line 3: 34 values in 33 columns"),
        (train(&text_in, &spec, &[]), "line 2: field data_type cannot be \"FP64\""),
        (train(&column, &spec, &[]), "there is no column k_mult"),
        (train(&table, &kernel("ConvAsmBwdWrW1x1"), &[]), "there is no column c_per_gpr"),
        (train(&table, &table, &[]), "line 1: "),
        (train(&table, &nowhere, &[]), "give a kernel specification"),
        (train(&table, &bad_spec, &[]), "bad.toml: line 1: "),
        (train(&table, &never, &[]), "constraint vector-registers holds for none of the 204 rows"),
        (train(&table, &unknown, &[]), "constraint vector-registers, position 1: unknown name vgpr"),
        (owned(&["predict", "train", "--db", &nowhere, "--template", "conv", "-o", &model]), "there is no database"),
        (owned(&["predict", "train", "--db", &nowhere, "-o", &model]), "--template NAME"),
        (
            owned(&["predict", "train", "--db", &nowhere, "--template", "conv", "-o", &model, "--where", "a=b"]),
            "for tables",
        ),
        (owned(&["predict", "evaluate", &table, "--spec", &spec, "--beam", "0"]), "--beam"),
        (owned(&["predict", "evaluate", &table, "--spec", &spec, "--models", "chain,x"]), "unknown model `x`"),
        (owned(&["predict", "query", &table, "--problem", "n=1"]), "predict train"),
    ];
    for (arguments, expected) in cases {
        check_refused(&arguments, expected);
    }
}
