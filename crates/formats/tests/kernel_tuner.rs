//! Tests with Kernel Tuner itself: it continues from files written here, and its files are read here.
//!
//! `TILEWRIGHT_KERNEL_TUNER=/path/to/python` names the Python of an environment with `kernel_tuner` and a C
//! compiler on the path. Without it these tests report that they are skipped.

use std::path::Path;
use std::process::Command;

use tilewright_formats::{Recorded, named, read, write};

/// Python with Kernel Tuner.
fn python() -> Option<String> {
    let python = std::env::var("TILEWRIGHT_KERNEL_TUNER").ok();
    if python.is_none() {
        eprintln!("skipped: TILEWRIGHT_KERNEL_TUNER names no Python with kernel_tuner");
    }
    python
}

/// Python program in which Kernel Tuner tunes a C kernel of made-up times, one of whose configurations fails,
/// with a cache.
const TUNE: &str = r#"
import sys, os, json
import kernel_tuner, numpy as np
source = r"""
extern "C" float scale(float *out) { out[0] = 1; return 0.5f * block_size_x / tile; }
"""
params = {"block_size_x": [16, 32, 64], "tile": [1, 2], "ratio": [0.5, 1.0]}
stop_after = int(sys.argv[2])
n = 0
if stop_after:
    from kernel_tuner import util
    import kernel_tuner.runners.sequential as sequential
    store = sequential.store_cache
    def store_and_stop(*args):
        global n
        store(*args)
        n += 1
        if n == stop_after:
            os._exit(9)
    sequential.store_cache = store_and_stop
results, env = kernel_tuner.tune_kernel("scale", source, 4096, [np.zeros(1, np.float32)], params, lang="C",
    cache=sys.argv[1], compiler_options=["-O1"], restrictions=["tile * block_size_x <= 64"])
print("N", len(results))
"#;

fn tune(python: &str, folder: &Path, cache: &Path, stop_after: usize) -> (bool, String) {
    let run = Command::new(python)
        .args(["-c", TUNE, cache.to_str().unwrap(), &stop_after.to_string()])
        .current_dir(folder)
        .output()
        .unwrap_or_else(|e| panic!("{python}: {e}"));
    let text = String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
    (run.status.success(), text)
}

fn read_cache(path: &Path) -> Recorded {
    read("cache", &std::fs::read(path).unwrap(), None, None).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn caches_of_kernel_tuner_are_read_and_gone_on_with() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let [killed, ours, whole] = ["killed.json", "ours.json", "whole.json"].map(|name| folder.path().join(name));
    let (is_finished, text) = tune(&python, folder.path(), &killed, 4);
    assert!(!is_finished, "{text}");
    let recorded = read_cache(&killed);
    assert_eq!((recorded.format.name, recorded.results[0].rows.len()), ("kernel-tuner", 4), "{text}");
    assert!(recorded.results[0].notes[0].contains("not closed"), "{:?}", recorded.results[0].notes);
    let mut bytes = Vec::new();
    write(named("kernel-tuner").unwrap(), &recorded.results, &mut bytes).unwrap();
    std::fs::write(&ours, &bytes).unwrap();
    let (is_finished, text) = tune(&python, folder.path(), &ours, 0);
    assert!(is_finished && text.contains("N 10"), "{text}");
    // The results written here are still there, and only missing ones were measured.
    let after = std::fs::read_to_string(&ours).unwrap();
    let begin = String::from_utf8(bytes).unwrap();
    assert!(after.starts_with(begin.strip_suffix("}\n}").unwrap()), "{after}");
    let recorded = read_cache(&ours);
    assert_eq!((recorded.results[0].rows.len(), recorded.results[0].n_rows), (10, 10), "{after}");
    assert_eq!(recorded.results[0].notes, [""; 0]);
    let (is_finished, text) = tune(&python, folder.path(), &whole, 0);
    assert!(is_finished, "{text}");
    assert_eq!(read_cache(&whole).results[0].space("whole").unwrap().n_valid(), 10);
}

#[test]
fn t4_is_valid_by_the_schema_of_kernel_tuner() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus/foreign");
    for name in ["kt-1.4.json", "kernel_tuner_cache.json", "t4-plain.json", "ktt-output.json"] {
        let recorded = read("x", &std::fs::read(corpus.join(name)).unwrap(), None, None).unwrap();
        let file = folder.path().join(name);
        let mut bytes = Vec::new();
        write(named("t4").unwrap(), &recorded.results, &mut bytes).unwrap();
        std::fs::write(&file, bytes).unwrap();
        let check = "import sys, json, jsonschema; from kernel_tuner.file_utils import output_file_schema; \
                     jsonschema.validate(json.load(open(sys.argv[1])), output_file_schema('results')[1])";
        let run = Command::new(&python).args(["-c", check, file.to_str().unwrap()]).output().unwrap();
        assert!(run.status.success(), "{name}: {}", String::from_utf8_lossy(&run.stderr));
    }
}
