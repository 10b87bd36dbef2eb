//! Whole models: networks with seeded weights, and `bench` on them.

mod common;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use serde_json::json;

use common::{check_refused, command, json_of, run_json, stderr, text};

#[test]
fn a_network_is_written_listed_and_measured() {
    let networks = run_json(&["network"]);
    let names: Vec<&str> = networks.as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["resnet18", "mobilenet", "lstm", "dqn", "dcgan"]);

    let folder = tempfile::tempdir().unwrap();
    let (path, again, new) =
        (folder.path().join("dqn.onnx"), folder.path().join("again.onnx"), folder.path().join("new.onnx"));
    let written = run_json(&["network", "dqn", "-o", text(&path)]);
    assert_eq!(written["bytes"], path.metadata().unwrap().len());
    run_json(&["network", "dqn", "-o", text(&again), "--seed", "0"]);
    assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(&again).unwrap());
    run_json(&["network", "reweight", text(&path), "-o", text(&new), "--seed", "5"]);
    assert_ne!(std::fs::read(&path).unwrap(), std::fs::read(&new).unwrap());
    for path in [&path, &new] {
        assert_eq!(run_json(&["check", text(path)])["supported"], true);
    }

    let mut arguments = vec!["bench", text(&path), "--rounds", "2", "--against", "onnxruntime,openvino"];
    let peers = std::env::var("TILEWRIGHT_PEER_PATH");
    if let Ok(folder) = &peers {
        arguments.extend(["--peer-path", folder]);
    }
    let output = command(&arguments).arg("--json").output().expect("the command starts");
    let rows = json_of(&arguments, &output)["rows"].clone();
    let rows = rows.as_array().unwrap();
    for row in rows {
        assert!(["tilewright", "onnxruntime", "openvino"].contains(&row["impl"].as_str().unwrap()), "{row}");
        assert!(row["ms_median"].as_f64().unwrap() > 0.0 && row["rounds"] == 2, "{row}");
        assert!(row["cosine"].as_f64().unwrap() > 0.999_999 && row["max_error"].as_f64().unwrap() < 1e-4, "{row}");
    }
    assert!(rows.iter().any(|row| row["impl"] == "tilewright" && row["ratio_to_ours"] == 1.0), "{rows:?}");
    if rows.len() < 3 {
        eprintln!("skipped: a runtime of models is not installed; the test looks in TILEWRIGHT_PEER_PATH");
        assert!(stderr(&output).contains("pip download --no-deps"), "{}", stderr(&output));
    }
}

/// Names and bytes of the files in a folder.
fn files(folder: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap());
    files.map(|file| (file.file_name(), std::fs::read(file.path()).unwrap())).collect()
}

#[test]
fn kernels_are_compiled_once_and_a_cache_never_harms() {
    check_cache("cpu", &["object-", "program-", "number-"]);
    match tilewright_device::opencl::device(0) {
        Ok(_) => check_cache("opencl", &["binary-", "program-"]),
        Err(why) => eprintln!("skipped: {why}"),
    }
}

/// Checks that code for a device is cached in entries of these kinds, the first of which is machine code, and
/// reused, and that no damage to them changes a result.
fn check_cache(device: &str, kinds: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let (path, cache) = (folder.path().join("dqn.onnx"), folder.path().join("cache"));
    run_json(&["network", "dqn", "-o", text(&path)]);
    // Outputs, bit by bit.
    let run = |options: &[&str]| {
        let outputs = tempfile::tempdir().unwrap();
        let mut arguments = vec!["run", text(&path), "--device", device, "--runs", "1", "-o", text(outputs.path())];
        arguments.extend(options);
        let output = command(&arguments).output().unwrap();
        assert!(output.status.success() && stderr(&output).lines().count() == 1, "{}", stderr(&output));
        files(outputs.path())
    };
    let expected = run(&["--no-cache"]);
    assert!(!cache.exists());
    let with = ["--cache", text(&cache)];
    // Two processes at once find nothing there, and do not disturb each other.
    let both = std::thread::scope(|scope| [0; 2].map(|_| scope.spawn(|| run(&with))).map(|run| run.join().unwrap()));
    assert_eq!(both, [expected.clone(), expected.clone()]);
    let made = files(&cache);
    for kind in kinds {
        assert!(made.keys().any(|name| text(name.as_ref()).starts_with(kind)), "{device}: {kind}");
    }
    let objects = made.keys().filter(|name| text(name.as_ref()).starts_with(kinds[0]));
    let when = |name: &OsString| cache.join(name).metadata().unwrap().modified().unwrap();
    let times: Vec<_> = objects.clone().map(when).collect();
    assert_eq!((run(&with), files(&cache)), (expected.clone(), made.clone()));
    assert_eq!(objects.map(when).collect::<Vec<_>>(), times, "they were compiled again");
    // Damaged entries are recreated, whatever the damage.
    for (at, (name, bytes)) in made.iter().enumerate() {
        let mut bytes = bytes.clone();
        match at % 3 {
            0 => bytes.truncate(bytes.len() / 2),
            1 => bytes.clear(),
            _ => bytes.iter_mut().for_each(|byte| *byte ^= 0x5a),
        }
        std::fs::write(cache.join(name), bytes).unwrap();
    }
    assert_eq!((run(&with), files(&cache)), (expected.clone(), made));
    check_refused(&["run", text(&path), "--cache", text(&path)], "give a folder that can be written, or --no-cache");
    check_refused(&["run", text(&path), "--cache", ""], "--cache");
}

#[test]
fn what_does_not_fit_a_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (path, array) = (folder.path().join("lstm.onnx"), folder.path().join("x.npy"));
    let path = text(&path);
    run_json(&["network", "lstm", "-o", path]);
    // Three f64 numbers.
    let header = format!("{:117}\n", "{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }");
    std::fs::write(&array, [b"\x93NUMPY\x01\0v\0", header.as_bytes(), &[0; 24]].concat()).unwrap();
    let array = text(&array);
    check_refused(&["bench", path], "--dim steps=");
    check_refused(&["bench", path, "matmul-64"], "measured alone");
    check_refused(&["bench", path, "--dim", "steps=2", "--against", "gemm"], "no peer for models is called `gemm`");
    check_refused(&["bench", path, "--input", array], "--input needs a name");
    check_refused(&["bench", path, "--input", &format!("tokens={array}")], "f64[3], and the model takes i64[steps]");
    check_refused(&["bench", path, "--input", &format!("tokens={path}")], ".npy file");
    // An archive of nothing, with which the inputs would be random.
    let empty = folder.path().join("empty.npz");
    std::fs::write(&empty, [b"PK\x05\x06".as_slice(), &[0; 18]].concat()).unwrap();
    check_refused(&["bench", path, "--input", text(&empty)], "empty.npz: it has no arrays");
    check_refused(&["bench", path, "--dim", "steps=2", "--input", &format!("words={array}")], "no input `words`");
    check_refused(&["bench", "none.onnx"], "cannot read none.onnx");
    check_refused(&["compile", path, "--template", "conv", "-o", "x"], "--template conv: each kernel of a model");
    check_refused(&["bench", "matmul-64", "--dim", "n=1"], "are for a model");
    check_refused(&["network", "vgg", "-o", "x.onnx"], "no network is called `vgg`");
    check_refused(&["network", "dqn"], "give -o FILE.onnx");
    check_refused(&["network", "dqn", path, "-o", "x.onnx"], "takes no model");
    check_refused(&["network", "reweight", "-o", "x.onnx"], "which model");
    check_refused(&["network", "reweight", array, "-o", "x.onnx"], "x.npy: ");
}

#[test]
fn a_tuned_model_says_what_its_whole_run_takes_and_what_was_better_stays() {
    let folder = tempfile::tempdir().unwrap();
    let (path, db) = (folder.path().join("dqn.onnx"), folder.path().join("records.db"));
    run_json(&["network", "dqn", "-o", text(&path)]);
    // First configuration of each kernel's space, with the smallest tiles: far slower than a first guess.
    let arguments = ["tune", text(&path), "--no-guesses", "--search", "grid", "--trials", "1", "--no-race"];
    let arguments = [&arguments[..], &["--db", text(&db)]].concat();
    let run = run_json(&arguments)["run"].clone();
    let ms = |name: &str| run[name].as_f64().unwrap();
    assert!(ms("ms_tuned") > ms("ms_before"), "{run}");
    assert!(ms("ms") < ms("ms_tuned"), "{run}");
    let put_back = run["put_back"].as_array().unwrap();
    assert!(!put_back.is_empty(), "{run}");
    // Now these are the best: the next run begins with them, and finds nothing else.
    let again = run_json(&arguments)["run"].clone();
    assert_eq!((&again["n_changed"], &again["put_back"]), (&json!(0), &json!([])), "{again}");
    let output = command(&arguments).output().expect("the command starts");
    let lines = String::from_utf8(output.stdout).unwrap();
    let last = lines.lines().last().unwrap();
    assert!(last.starts_with("whole run ") && last.ends_with(": the same kernels"), "{last}");
    assert_eq!(run_json(&["run", text(&path), "--db", text(&db)])["untuned_kernels"], 0);
}
