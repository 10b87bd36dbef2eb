//! Libraries that `compile` writes, in programs of others: the same bits as in this process, in every form.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use bytes::Bytes;
use common::{check_refused, done, run_json, stderr, text, tool};
use tilewright_codegen::{ArgumentAlign, Compiler};
use tilewright_device::host;
use tilewright_ir::lower;
use tilewright_ir::op::Workload;
use tilewright_runtime::{Code, Context, Model, Threads};
use tilewright_tune::{Setting, Task};

/// What the examples run.
const LAYER: &str = "dense:m=32,n=48,k=64,const=w,epilogue=bias+gelu";

/// What C programs are compiled with.
const STRICT: [&str; 6] = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", "-g"];

/// A folder with the inputs of a layer, what it makes of them in this process, and libraries.
struct Folder(tempfile::TempDir);

fn floats(n: usize, seed: usize) -> Vec<u8> {
    (0..n).flat_map(|i| (((i * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).to_le_bytes()).collect()
}

impl Folder {
    fn new(threads: usize) -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        let (w, x, bias) = (floats(48 * 64, 1), floats(32 * 64, 2), floats(48, 3));
        for (name, data) in [("w.bin", &w), ("x.bin", &x), ("bias.bin", &bias)] {
            fs::write(folder.path(name), data).unwrap();
        }
        let target = host::target();
        let workload = Workload::parse(LAYER).unwrap();
        let task = Task::new(Setting { workload, target: target.clone(), n_threads: threads }, None).unwrap();
        let lowered = lower::lower(&task.program(&task.first_guess(0).unwrap()).unwrap());
        let code = Code::compile(&mut Compiler::for_arguments(target, ArgumentAlign::Elements), lowered).unwrap();
        let plan = code.plan(&|name| (name == "W").then(|| Bytes::from(w.clone())));
        let model = Arc::new(Model::new(plan, vec![code]).unwrap());
        let mut y = vec![0; 32 * 48 * 4];
        let mut context = Context::new(&model, &Threads::new(threads).unwrap()).unwrap();
        context.run(&[&x, &bias], &mut [&mut y]).unwrap();
        fs::write(folder.path("expected.bin"), y).unwrap();
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Compiles the layer, under a name, into a folder of that name.
    fn compile(&self, name: &str, more: &[&str]) {
        let (w, db) = (format!("w={}", text(&self.path("w.bin"))), self.path("none.db"));
        let output = self.path(name);
        let arguments = ["compile", LAYER, "--name", name, "--constant", &w, "-o", text(&output), "--db", text(&db)];
        let json = run_json(&[&arguments[..], more].concat());
        assert_eq!((&json["recorded"], &json["name"]), (&false.into(), &name.into()));
        for file in json["files"].as_array().unwrap() {
            assert!(Path::new(file.as_str().unwrap()).is_file(), "{file}");
        }
    }

    /// Builds a C program of a source and libraries.
    fn build(&self, source: &str, names: &[&str], flags: &[&str]) -> PathBuf {
        let program = self.path("program");
        let mut cc = Command::new("cc");
        cc.args(STRICT).arg(source).arg("-o").arg(&program);
        for name in names {
            let folder = self.path(name);
            cc.arg("-I").arg(&folder).args([".c", "_kernels.a"].map(|end| folder.join(format!("{name}{end}"))));
        }
        done(cc.args(flags).args(["-lm", "-lpthread"]));
        program
    }

    /// Runs an example, which must make the same bits as this process.
    fn check(&self, command: &mut Command) {
        let _ = fs::remove_file(self.path("y.bin"));
        done(command.args(["x.bin", "bias.bin", "y.bin"].map(|name| self.path(name))));
        assert!(fs::read(self.path("y.bin")).unwrap() == fs::read(self.path("expected.bin")).unwrap(), "{command:?}");
    }
}

fn example(name: &str) -> String {
    format!("{}/../../examples/library/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn c_programs_get_the_same_bits() {
    let Some(_) = tool("cc") else { return };
    for threads in [1, 2] {
        let folder = Folder::new(threads);
        folder.compile("layer", &["--threads", &threads.to_string()]);
        for flags in [&["-pie", "-fPIE"][..], &["-no-pie"], &["-static"]] {
            folder.check(&mut Command::new(folder.build(&example("main.c"), &["layer"], flags)));
        }
    }
}

/// What a program does that looks closely: addresses, options, arenas, threads, forks, allocations, two
/// libraries at the same time. `CHECK_SECONDS=60` makes a long run of the last.
#[test]
fn contexts_keep_to_what_they_are_given() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new(2);
    ["layer", "other"].iter().for_each(|name| folder.compile(name, &["--threads", "2"]));
    let source = format!("{}/tests/libraries/check.c", env!("CARGO_MANIFEST_DIR"));
    let program = folder.build(&source, &["layer", "other"], &[]);
    let files = ["x.bin", "bias.bin", "expected.bin"].map(|name| folder.path(name));
    done(Command::new(&program).args(&files));
    // The same again, with races looked for in all but the kernels.
    let sanitized = ["-fsanitize=thread", "-DNO_FORK"];
    let probe = folder.path("probe.c");
    fs::write(&probe, "int main(void) { return 0; }\n").unwrap();
    let built = Command::new("cc").arg(&probe).arg(sanitized[0]).arg("-o").arg(folder.path("probe")).output();
    let works = built.is_ok_and(|output| output.status.success())
        && Command::new(folder.path("probe")).output().is_ok_and(|output| output.status.success());
    if works {
        let program = folder.build(&source, &["layer", "other"], &sanitized);
        done(Command::new(&program).args(&files));
    } else {
        println!("skipped: no ThreadSanitizer");
    }
}

#[test]
fn shared_libraries_show_their_functions_alone_and_need_an_old_glibc() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new(1);
    folder.compile("layer", &["--as", "so"]);
    let (library, program) = (folder.path("layer"), folder.path("program"));
    let mut cc = Command::new("cc");
    cc.args(STRICT).arg(example("main.c")).arg("-o").arg(&program).arg("-I").arg(&library).arg("-L").arg(&library);
    done(cc.arg("-llayer").arg(format!("-Wl,-rpath,{}", library.display())));
    folder.check(&mut Command::new(&program));
    let Some(_) = tool("objdump") else { return };
    let symbols = done(Command::new("objdump").arg("-T").arg(library.join("liblayer.so")));
    let mut n_shown = 0;
    for line in symbols.lines().skip(4).filter(|line| !line.is_empty()) {
        let name = line.split_whitespace().next_back().unwrap();
        if !line.contains("*UND*") {
            assert!(name.starts_with("layer_") && !name.contains("_k0"), "{line}");
            n_shown += 1;
        }
        if let Some((_, version)) = line.split_once("(GLIBC_") {
            let numbers: Vec<u32> = version.split(')').next().unwrap().split('.').map(|n| n.parse().unwrap()).collect();
            assert!(numbers <= vec![2, 17], "{line}");
        }
    }
    assert_eq!(n_shown, 11, "{symbols}");
    let needed = done(Command::new("objdump").arg("-p").arg(library.join("liblayer.so")));
    for line in needed.lines().filter(|line| line.contains("NEEDED")) {
        assert!(["libc.so.6", "libm.so.6", "libpthread.so.0"].iter().any(|name| line.ends_with(name)), "{line}");
    }
}

#[test]
fn rust_programs_get_the_same_bits() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new(1);
    folder.compile("layer", &["--as", "rust"]);
    let package = folder.path("package");
    fs::create_dir_all(package.join("src")).unwrap();
    fs::copy(example("main.rs"), package.join("src/main.rs")).unwrap();
    let manifest = "[package]\nname = \"main\"\nversion = \"0.1.0\"\nedition = \"2021\"\n\n[dependencies]\n\
                    layer = { path = \"../layer\" }\n\n[workspace]\n";
    fs::write(package.join("Cargo.toml"), manifest).unwrap();
    let cargo = |words: &[&str]| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(words).arg("--offline").current_dir(&package).env("CARGO_TARGET_DIR", folder.path("target"));
        cargo.env("RUSTFLAGS", "-D warnings").env_remove("CARGO_ENCODED_RUSTFLAGS");
        cargo
    };
    done(&mut cargo(&["build"]));
    folder.check(&mut Command::new(folder.path("target/debug/main")));
}

#[test]
fn python_programs_get_the_same_bits() {
    let (Some(_), Some(python)) = (tool("cc"), tool("python3")) else { return };
    let folder = Folder::new(1);
    folder.compile("layer", &["--as", "python"]);
    let wheel = folder.path(&format!("layer/layer-0.1.0-py3-none-manylinux2014_{}.whl", std::env::consts::ARCH));
    // As installers do, with each hash looked at.
    let unpack = "
import base64, csv, hashlib, sys, zipfile
wheel, folder = sys.argv[1:]
with zipfile.ZipFile(wheel) as file:
    assert file.testzip() is None
    file.extractall(folder)
    record = [name for name in file.namelist() if name.endswith('RECORD')][0]
    rows = list(csv.reader(file.read(record).decode().splitlines()))
    assert sorted(row[0] for row in rows) == sorted(file.namelist())
    for name, digest, size in rows:
        if name != record:
            data = file.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()
            assert (digest, int(size)) == ('sha256=' + expected, len(data)), name
";
    let unpacked = folder.path("unpacked");
    done(Command::new(python).args(["-c", unpack]).args([&wheel, &unpacked]));
    folder.check(Command::new(python).arg(example("main.py")).env("PYTHONPATH", &unpacked));
    // What does not fit is an exception.
    let refused = "
import array, layer
context = layer.Context(1)
x, bias = array.array('f', [0.0] * 2048), array.array('f', [0.0] * 48)
for inputs in [(x,), (x, x), (array.array('i', [0] * 2048), bias)]:
    try:
        context.run(*inputs)
    except layer.Error:
        continue
    raise SystemExit(1)
";
    done(Command::new(python).args(["-c", refused]).env("PYTHONPATH", &unpacked));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_cpu_that_lacks_something_is_told() {
    let (Some(_), Some(emulator)) = (tool("cc"), tool("qemu-x86_64")) else { return };
    if host::target().vector_bits < 256 {
        println!("skipped: no AVX2 here");
        return;
    }
    let folder = Folder::new(1);
    folder.compile("layer", &["--target", "x86-64-v3"]);
    let program = folder.build(&example("main.c"), &["layer"], &["-static"]);
    let run = |cpu: &str| {
        let files = ["x.bin", "bias.bin", "y.bin"].map(|name| folder.path(name));
        Command::new(emulator).args(["-cpu", cpu]).arg(&program).args(files).output().unwrap()
    };
    let refused = run("Nehalem");
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(stderr(&refused), "the CPU or the operating system lacks a feature that the kernels use\n");
    assert!(run("Haswell").status.success());
}

#[test]
fn what_cannot_be_compiled_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (out, db, short) = (folder.path().join("out"), folder.path().join("none.db"), folder.path().join("short"));
    fs::write(&short, [0; 8]).unwrap();
    let check = |workload: &str, more: &[&str], expected: &str| {
        let arguments = ["compile", workload, "-o", text(&out), "--db", text(&db)];
        let output = common::run(&[&arguments[..], more].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        let last = said.lines().last().unwrap();
        assert!(last.starts_with("error: ") && last.contains(expected), "{said}");
        assert!(!out.exists());
    };
    let product = "matmul:m=4,n=4,k=4";
    check(&format!("{product},const=b"), &[], "give --constant B=FILE");
    check(product, &["--constant", "b=x"], "the workload has no constants");
    check(product, &["--constant", "b"], "give NAME=FILE");
    let short = format!("b={}", text(&short));
    check(&format!("{product},const=b"), &["--constant", &short], "it has 8 bytes (give a .npy file");
    check(product, &["--name", "9x"], "--name `9x` is no C identifier");
    check(product, &["--target", "sm_80"], "sm_80 is a GPU");
    check_refused(&["compile", product], "--output");
}
