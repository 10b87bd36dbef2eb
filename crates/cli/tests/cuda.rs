//! GPUs of NVIDIA: an emulator of PTX stands in for their driver.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{command, emulated_cuda, json_of, recorded, stderr, text};

const WORKLOAD: &str = "matmul:m=33,n=40,k=29,exact=1";

/// The command on the emulated card, which is lost as long as the file `lost` is there.
fn on_card(arguments: &[&str], libraries: &Path, lost: &Path) -> Command {
    let mut command = command(arguments);
    command.args(["--device", "cuda"]).env("LD_LIBRARY_PATH", libraries).env("EMULATED_CUDA_LOST", lost);
    command
}

/// A model is measured beside ONNX Runtime's CUDA provider and PyTorch where they are, and lines say where
/// they are not.
#[test]
fn a_model_is_measured_beside_other_runtimes() {
    let Some(libraries) = emulated_cuda() else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("dqn.onnx");
    common::run_json(&["network", "dqn", "-o", text(&model)]);
    let peers = std::env::var("TILEWRIGHT_PEER_PATH").unwrap_or_else(|_| text(folder.path()).to_owned());
    let (db, none) = (folder.path().join("r.db"), folder.path().join("none"));
    let arguments = ["bench", text(&model), "--rounds", "1", "--db", text(&db), "--peer-path", &peers, "--json"];
    let output = on_card(&arguments, libraries.path(), &none).output().unwrap();
    let measured = json_of(&arguments, &output);
    let rows = measured["rows"].as_array().unwrap();
    let row_of = |name: &str| rows.iter().find(|row| row["impl"] == name);
    let ours = row_of("tilewright").unwrap_or_else(|| panic!("{measured}"));
    assert!(ours["ms_median"].as_f64() > Some(0.0) && ours["max_error"].as_f64() < Some(1e-4), "{ours}");
    let said = stderr(&output);
    for name in ["onnxruntime-cuda", "pytorch"] {
        let lines = said.lines().filter(|line| line.starts_with(&format!("{name}: "))).count();
        assert_eq!(lines + usize::from(row_of(name).is_some()), 1, "{name}: {measured}\n{said}");
    }
    assert!(!rows.iter().any(|row| ["onnxruntime", "openvino"].contains(&row["impl"].as_str().unwrap())), "{measured}");
}

/// A device that is lost while candidates are measured: nothing is recorded against these, and a later run
/// goes on.
#[test]
fn a_lost_device_ends_the_run_in_a_line() {
    let Some(libraries) = emulated_cuda() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (db, lost) = (folder.path().join("r.db"), folder.path().join("lost"));
    let tune = |trials: &str| {
        let arguments = ["tune", WORKLOAD, "--no-race", "--db", text(&db), "--trials", trials, "--json"];
        on_card(&arguments, libraries.path(), &lost)
    };
    let running = tune("5000").spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(400);
    while recorded(&db).len() < 2 {
        assert!(Instant::now() < deadline, "no trials");
        std::thread::sleep(Duration::from_millis(50));
    }
    fs::write(&lost, "").unwrap();
    let output = running.wait_with_output().unwrap();
    let said = stderr(&output);
    let errors: Vec<&str> = said.lines().filter(|line| line.contains("error") || line.contains("CUDA_ERROR")).collect();
    assert!(output.status.code() == Some(1) && errors.len() == 1, "{}: {said}", output.status);
    assert!(errors[0].contains("CUDA_ERROR_NO_DEVICE") || errors[0].contains("CUDA_ERROR_ECC"), "{said}");
    let n_before = recorded(&db).len();

    fs::remove_file(&lost).unwrap();
    let tuned = json_of(&["tune"], &tune(&(n_before + 2).to_string()).output().unwrap());
    assert_eq!((&tuned["new_trials"], recorded(&db).len()), (&2.into(), n_before + 2), "{tuned}");
    assert!(tuned["errors"].as_object().unwrap().is_empty(), "{tuned}");
}

/// A device that is back when its process is started anew: the candidates that it had are measured again.
#[test]
fn a_device_that_comes_back_costs_no_trial() {
    let Some(libraries) = emulated_cuda() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (db, lost) = (folder.path().join("r.db"), folder.path().join("lost"));
    let tune = ["tune", WORKLOAD, "--no-race", "--db", text(&db), "--trials", "12", "--json"];
    let running = on_card(&tune, libraries.path(), &lost).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(400);
    while recorded(&db).is_empty() {
        assert!(Instant::now() < deadline, "no trials");
        std::thread::sleep(Duration::from_millis(20));
    }
    fs::write(&lost, "once").unwrap();
    let tuned = json_of(&tune, &running.wait_with_output().unwrap());
    assert!(!lost.exists(), "the device was lost, and a worker was started anew");
    assert_eq!((recorded(&db).len(), &tuned["trials"]), (12, &12.into()), "{tuned}");
    assert!(tuned["errors"].as_object().unwrap().is_empty(), "{tuned}");
}
