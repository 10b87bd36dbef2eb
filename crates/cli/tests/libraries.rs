//! Libraries that `compile` writes, in other programs: the same bits as in this process, in every form, and
//! nearly the same numbers on GPUs.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use bytes::Bytes;
use common::{check_refused, done, run_json, stderr, text, tool};
use tilewright::library::{Form, Weights, library, write_library};
use tilewright::{Choice, Source};
use tilewright_codegen::{ArgumentAlign, Compiler};
use tilewright_device::{host, opencl};
use tilewright_ir::op::Workload;
use tilewright_ir::{Target, lower};
use tilewright_runtime::{Code, Context, Model, SharedPool};
use tilewright_tune::{Task, TemplateSetting};

/// Workload of the examples.
const LAYER: &str = "dense:m=32,n=48,k=64,const=w,epilogue=bias+gelu";

/// Options that C programs are compiled with.
const STRICT: [&str; 6] = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", "-g"];

/// Folder with the inputs of a layer, its result in this process, and libraries.
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
        let task = Task::new(TemplateSetting { workload, target: target.clone(), n_threads: threads }, None).unwrap();
        let lowered = lower::lower(&task.program(&task.first_guess(0).unwrap()).unwrap());
        let code = Code::compile(&mut Compiler::for_arguments(target, ArgumentAlign::Elements), lowered).unwrap();
        let plan = code.plan(&|name| (name == "W").then(|| Bytes::from(w.clone())));
        let model = Arc::new(Model::new(plan, vec![code]).unwrap());
        let mut y = vec![0; 32 * 48 * 4];
        let mut context = Context::new(&model, &SharedPool::new(threads).unwrap()).unwrap();
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

    /// Builds a C program from a source and libraries.
    fn build(&self, source: &str, names: &[&str], flags: &[&str]) -> PathBuf {
        let program = self.path("program");
        let mut cc = Command::new("cc");
        cc.args(STRICT).arg(source).arg("-o").arg(&program);
        for name in names {
            let folder = self.path(name);
            cc.arg("-I").arg(&folder).args([".c", "_kernels.a"].map(|end| folder.join(format!("{name}{end}"))));
        }
        done(cc.args(flags).args(["-lm", "-lpthread", "-ldl"]));
        program
    }

    /// Runs an example on files, and reads its result.
    fn answer(&self, command: &mut Command, inputs: &[&str]) -> Vec<f32> {
        let _ = fs::remove_file(self.path("y.bin"));
        done(command.args(inputs.iter().chain(&["y.bin"]).map(|name| self.path(name))));
        numbers(&fs::read(self.path("y.bin")).unwrap())
    }

    /// Runs an example on a GPU, whose result must be close to that of this process.
    fn check_nearly(&self, command: &mut Command) {
        let expected = numbers(&fs::read(self.path("expected.bin")).unwrap());
        check_near(&self.answer(command, &["x.bin", "bias.bin"]), &expected, 1e-5, "the layer");
    }

    /// Runs an example, whose result must have the same bits as that of this process.
    fn check(&self, command: &mut Command) {
        let _ = fs::remove_file(self.path("y.bin"));
        done(command.args(["x.bin", "bias.bin", "y.bin"].map(|name| self.path(name))));
        assert!(fs::read(self.path("y.bin")).unwrap() == fs::read(self.path("expected.bin")).unwrap(), "{command:?}");
    }
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
}

fn check_near(got: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let near = (got - expected).abs() <= tolerance * (1.0 + expected.abs());
        assert!(near, "{what}: element {at} is {got}, and should be {expected}");
    }
}

/// Whether there is an OpenCL device; prints what is skipped if there is none.
fn has_opencl() -> bool {
    let found = opencl::device(0);
    if let Err(why) = &found {
        println!("skipped: {why}");
    }
    found.is_ok()
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

/// Contexts use only what they are given: a program checks addresses, options, arenas, threads, forks,
/// allocations, and two libraries at the same time. `CHECK_SECONDS=60` makes a long run of the last check.
#[test]
fn contexts_keep_to_what_they_are_given() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new(2);
    ["layer", "other"].iter().for_each(|name| folder.compile(name, &["--threads", "2"]));
    let source = format!("{}/tests/libraries/check.c", env!("CARGO_MANIFEST_DIR"));
    let program = folder.build(&source, &["layer", "other"], &[]);
    let files = ["x.bin", "bias.bin", "expected.bin"].map(|name| folder.path(name));
    done(Command::new(&program).args(&files));
    // Again with detection of races in everything except the kernels.
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
    folder.compile("on_gpu", &["--as", "so", "--target", "opencl"]);
    let mut cc = Command::new("cc");
    cc.args(STRICT).arg(example("main.c")).arg("-o").arg(&program).arg("-I").arg(&library).arg("-L").arg(&library);
    done(cc.arg("-llayer").arg(format!("-Wl,-rpath,{}", library.display())));
    folder.check(&mut Command::new(&program));
    let Some(_) = tool("objdump") else { return };
    for (name, n_functions, threads_or_loader) in [("layer", 12, "libpthread.so.0"), ("on_gpu", 13, "libdl.so.2")] {
        let library = folder.path(name).join(format!("lib{name}.so"));
        let symbols = done(Command::new("objdump").arg("-T").arg(&library));
        let mut n_shown = 0;
        for line in symbols.lines().skip(4).filter(|line| !line.is_empty()) {
            let function = line.split_whitespace().next_back().unwrap();
            if !line.contains("*UND*") {
                let is_own = function.starts_with(&format!("{name}_")) && !function.contains("_k0");
                assert!(is_own || function == format!("__tvm_ffi_{name}"), "{line}");
                n_shown += 1;
            }
            if let Some((_, version)) = line.split_once("(GLIBC_") {
                let numbers = version.split(')').next().unwrap().split('.');
                assert!(numbers.map(|n| n.parse().unwrap()).collect::<Vec<u32>>() <= vec![2, 17], "{line}");
            }
        }
        assert_eq!(n_shown, n_functions, "{symbols}");
        let needed = done(Command::new("objdump").arg("-p").arg(&library));
        for line in needed.lines().filter(|line| line.contains("NEEDED")) {
            // The last one has thread-local variables.
            let known = ["libc.so.6", "libm.so.6", threads_or_loader, "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"];
            assert!(known.iter().any(|library| line.ends_with(library)), "{line}");
        }
    }
}

/// A host of TVM-FFI gets the same bits, and errors that name the argument.
#[test]
fn hosts_of_tvm_ffi_call_libraries() {
    let Some(_) = tool("cc") else { return };
    let source = format!("{}/tests/libraries/ffi.c", env!("CARGO_MANIFEST_DIR"));
    for threads in [1, 2] {
        let folder = Folder::new(threads);
        folder.compile("layer", &["--threads", &threads.to_string(), "--as", "so"]);
        let program = folder.build(&source, &[], &["-rdynamic"]);
        let files = ["layer/liblayer.so", "x.bin", "bias.bin", "expected.bin"].map(|name| folder.path(name));
        done(Command::new(program).args(files));
    }
}

/// The TVM-FFI package calls a kernel and a model, if `.ci/tvm-ffi` has downloaded it.
#[test]
fn the_package_of_tvm_ffi_calls_a_kernel_and_a_model() {
    let (Some(_), Some(python)) = (tool("cc"), tool("python3")) else { return };
    let packages = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("tvm-ffi");
    if !packages.is_dir() {
        println!("skipped: the package of TVM-FFI is not in {} (.ci/tvm-ffi fetches it)", packages.display());
        return;
    }
    let folder = Folder::new(1);
    folder.compile("layer", &["--as", "so"]);
    let library = folder.path("layer/liblayer.so");
    folder.check(Command::new(python).arg(example("ffi.py")).arg(&library).env("PYTHONPATH", &packages));
    let (model, inputs, outputs, db) =
        (folder.path("dqn.onnx"), folder.path("frames.npy"), folder.path("out"), folder.path("none.db"));
    let prepare = "
import sys, numpy
numpy.save(sys.argv[1], numpy.random.default_rng(0).random((1, 4, 84, 84), 'float32'))
";
    let run = |script: &str| {
        let mut command = Command::new(python);
        command.args(["-c", script]).env("PYTHONPATH", &packages);
        command
    };
    done(run(prepare).arg(&inputs));
    let ours = |arguments: &[&str]| assert!(common::run(arguments).status.success(), "{arguments:?}");
    ours(&["network", "dqn", "-o", text(&model)]);
    let named = ["--db", text(&db)];
    ours(&[&["run", text(&model), "--input", text(&inputs), "-o", text(&outputs)], &named[..]].concat());
    let written = folder.path("dqn");
    ours(&[&["compile", text(&model), "--as", "so", "-o", text(&written)], &named[..]].concat());
    let calls = "
import sys, numpy, tvm_ffi
layer, dqn = map(tvm_ffi.load_module, sys.argv[1:3])
frames, expected = map(numpy.load, sys.argv[3:5])
values = numpy.empty_like(expected)
assert dqn.dqn(frames, values) is None
assert (values == expected).all(), (values, expected)
x, bias, y = (numpy.zeros(shape, 'f4') for shape in [(32, 64), 48, (32, 48)])
wide, on_odd = numpy.zeros((32, 128), 'f4'), numpy.zeros(32 * 64 * 4 + 1, 'u1')[1:].view('f4').reshape(32, 64)
for arguments, kind, words in [
    ((x, bias), TypeError, 'takes 3 tensors'),
    ((x, 1, y), TypeError, '`bias`, takes a tensor'),
    ((x.astype('f8'), bias, y), TypeError, '`X`, takes f32, not f64'),
    ((x[:31], bias, y), ValueError, '`X`, takes the shape [32, 64], not [31, 64]'),
    ((wide[:, ::2], bias, y), ValueError, '`X`, takes contiguous elements, not strides [128, 2]'),
    ((on_odd, bias, y), ValueError, '`X`, takes an address'),
    ((x, y.reshape(-1)[:48], y), ValueError, '`Y`, overlaps argument 1, `bias`'),
]:
    try:
        layer.layer(*arguments)
    except kind as error:
        assert words in str(error), error
    else:
        raise SystemExit(f'not refused: {words}')
";
    let values = folder.path("out/values.npy");
    done(run(calls).args([&library, &written.join("libdqn.so"), &inputs, &values]));
}

/// A closed library stays loaded for its contexts: linked as by `compile`, and with its source in another
/// library.
#[test]
fn a_library_that_is_closed_stays_for_its_contexts() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new(2);
    folder.compile("layer", &["--threads", "2", "--as", "so"]);
    let source = format!("{}/tests/libraries/close.c", env!("CARGO_MANIFEST_DIR"));
    let program = folder.build(&source, &[], &["-I", text(&folder.path("layer")), "-ldl"]);
    let check = |library: &Path| {
        let files = ["x.bin", "bias.bin", "expected.bin"].map(|name| folder.path(name));
        done(Command::new(&program).arg(library).args(files));
    };
    check(&folder.path("layer/liblayer.so"));
    folder.compile("layer", &["--threads", "2"]);
    let library = folder.path("libother.so");
    let sources = ["layer/layer.c", "layer/layer_kernels.a"].map(|name| folder.path(name));
    done(Command::new("cc").args(["-shared", "-fPIC", "-o", text(&library)]).args(sources).args(["-lm", "-lpthread"]));
    check(&library);
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
    // A context may move to another thread, but not be shared.
    let shared = "fn is<T: Send>() {}\nfn main() { is::<layer::Context>() }\n";
    fs::write(package.join("src/main.rs"), shared).unwrap();
    done(&mut cargo(&["check"]));
    fs::write(package.join("src/main.rs"), shared.replace("Send", "Sync")).unwrap();
    let refused = cargo(&["check"]).output().unwrap();
    assert!(!refused.status.success() && stderr(&refused).contains("cannot be shared between threads"), "{refused:?}");
    fs::copy(example("main.rs"), package.join("src/main.rs")).unwrap();
    // Same program for a GPU.
    fs::remove_dir_all(folder.path("layer")).unwrap();
    folder.compile("layer", &["--as", "rust", "--target", "opencl"]);
    done(&mut cargo(&["build"]));
    if has_opencl() {
        folder.check_nearly(&mut Command::new(folder.path("target/debug/main")));
    }
}

#[test]
fn python_programs_get_the_same_bits() {
    let (Some(_), Some(python)) = (tool("cc"), tool("python3")) else { return };
    let folder = Folder::new(1);
    folder.compile("layer", &["--as", "python"]);
    // As installers do, with a check of each hash.
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
    let unpack = |unpacked: &Path| {
        let wheel = format!("layer/layer-0.1.0-py3-none-manylinux2014_{}.whl", std::env::consts::ARCH);
        done(Command::new(python).args(["-c", unpack]).args([folder.path(&wheel).as_path(), unpacked]));
    };
    unpack(&unpacked);
    folder.check(Command::new(python).arg(example("main.py")).env("PYTHONPATH", &unpacked));
    // Arguments that do not fit raise an exception.
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
    // Threads that share a context take turns, and arrays are copied if necessary.
    let shared = "
import array, os, sys, threading
import layer
context = layer.Context()
read = lambda path: array.array('f', open(path, 'rb').read())
x, bias, expected = read(sys.argv[1]), read(sys.argv[2]), open(sys.argv[3], 'rb').read()
numpy = layer.numpy
shaped = lambda a, *shape: a if numpy is None else numpy.array(a, 'f4').reshape(shape)
inputs = [shaped(x, 32, 64), shaped(bias, 48)]
wrong = []
def work():
    for _ in range(200):
        [y] = context.run(*inputs)
        if y.tobytes() != expected:
            wrong.append(y)
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
# A child of fork has no thread that would give a lock back.
for _ in range(10):
    if os.fork() == 0:
        os._exit(context.run(*inputs)[0].tobytes() != expected)
    if os.wait()[1]:
        wrong.append('a child')
[thread.join() for thread in threads]
assert not wrong, len(wrong)
unaligned = memoryview(bytearray(1 + len(x) * 4))[1:]
unaligned[:] = memoryview(x).cast('B')
assert context.run(shaped(unaligned.cast('f'), 32, 64), inputs[1])[0].tobytes() == expected
if numpy is not None:
    memory = numpy.zeros(8200, 'u1')
    for view in [
        memory[1:8193].view('f4').reshape(32, 64), numpy.zeros((64, 32), 'f4').T, numpy.zeros((32, 128), 'f4')[:, ::2],
        numpy.zeros((32, 64), '>f4'),
    ]:
        view[...] = inputs[0]
        assert context.run(view, inputs[1])[0].tobytes() == expected, view.flags
";
    let files = ["x.bin", "bias.bin", "expected.bin"].map(|name| folder.path(name));
    // With NumPy if it is installed, and without it.
    for flags in [&["-c"][..], &["-S", "-c"]] {
        done(Command::new(python).args(flags).arg(shared).args(&files).env("PYTHONPATH", &unpacked));
    }
    // Same for a GPU.
    let on_gpu = folder.path("on_gpu");
    folder.compile("layer", &["--as", "python", "--target", "opencl"]);
    unpack(&on_gpu);
    let run = |python: &str| {
        let mut command = Command::new(python);
        command.env("PYTHONPATH", &on_gpu);
        command
    };
    if has_opencl() {
        folder.check_nearly(run(python).arg(example("main.py")));
    }
    let refused = "
import layer
try:
    layer.Context(device=1000)
except layer.Error as error:
    assert 'OpenCL' in str(error), error
else:
    raise SystemExit(1)
";
    done(run(python).args(["-c", refused]));
}

#[test]
fn programs_run_layers_on_an_opencl_device() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new(1);
    folder.compile("layer", &["--target", "opencl"]);
    let program = folder.build(&example("main.c"), &["layer"], &[]);
    let mut without = Command::new(&program);
    without.env("OCL_ICD_VENDORS", "/nonexistent").env_remove("OCL_ICD_FILENAMES").env_remove("LD_LIBRARY_PATH");
    let output = without.args(["x.bin", "bias.bin", "y.bin"].map(|name| folder.path(name))).output().unwrap();
    let said = stderr(&output);
    assert_eq!((output.status.code(), said.contains("OpenCL"), said.lines().count()), (Some(1), true, 1), "{said}");
    if !has_opencl() {
        return;
    }
    folder.check_nearly(&mut Command::new(&program));
    let source = format!("{}/tests/libraries/gpu.c", env!("CARGO_MANIFEST_DIR"));
    let program = folder.build(&source, &["layer"], &["-l:libOpenCL.so.1"]);
    done(Command::new(&program).args(["x.bin", "bias.bin", "expected.bin"].map(|name| folder.path(name))));
}

/// Weights that a device transforms, a network, and an emulated NVIDIA GPU, compared with a CPU.
#[test]
fn programs_on_gpus_answer_as_on_cpus() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new(1);
    let (convolution, network) = ("conv2d:c=8,h=12,w=12,k=8,r=3,s=3,pad=1,const=w", folder.path("dqn.onnx"));
    assert!(common::run(&["network", "dqn", "-o", text(&network)]).status.success());
    for (name, n) in [("weights.bin", 8 * 8 * 9), ("image.bin", 8 * 144), ("frames.bin", 4 * 84 * 84)] {
        fs::write(folder.path(name), floats(n, n)).unwrap();
    }
    let weights = format!("w={}", text(&folder.path("weights.bin")));
    // Output of a program with the library.
    let run = |inputs: &[&str], libraries: Option<&Path>| {
        let mut program = Command::new(folder.build(&example("main.c"), &["layer"], &[]));
        libraries.map(|path| program.env("LD_LIBRARY_PATH", path));
        folder.answer(&mut program, inputs)
    };
    // Output of a library with these options, and the number of bytes that it makes of its weights.
    let answer = |what: &[&str], more: &[&str], inputs: &[&str], libraries: Option<&Path>| {
        let (library, db) = (folder.path("layer"), folder.path("none.db"));
        let arguments = ["--name", "layer", "-o", text(&library), "--db", text(&db)];
        let json = run_json(&[&["compile"], what, &arguments, more].concat());
        (run(inputs, libraries), json["library"]["made_bytes"].as_u64().unwrap())
    };
    let layer = [convolution, "--constant", &weights];
    let (expected, _) = answer(&layer, &[], &["image.bin"], None);
    if has_opencl() {
        let (got, made) = answer(&layer, &["--device", "opencl", "--template", "gpu-winograd"], &["image.bin"], None);
        check_near(&got, &expected, 1e-4, "Winograd's algorithm");
        assert!(made > 8 * 8 * 9 * 4, "{made}");
        let (expected, _) = answer(&[text(&network)], &[], &["frames.bin"], None);
        let (got, _) = answer(&[text(&network)], &["--device", "opencl"], &["frames.bin"], None);
        check_near(&got, &expected, 1e-4, "a network");
    }
    let Some(libraries) = common::emulated_cuda() else { return };
    let (got, made) =
        answer(&layer, &["--target", "sm_80", "--template", "gpu-winograd"], &["image.bin"], Some(libraries.path()));
    check_near(&got, &expected, 1e-4, "Winograd's algorithm in PTX");
    assert!(made > 8 * 8 * 9 * 4, "{made}");
    // Tensor cores used by four warps together round operands to 11 bits; an additional warp copies boxes of
    // arrays.
    let product = "dense:m=64,n=64,k=64,tf32=1";
    let files = ["a.bin", "b.bin"];
    files.iter().zip([3, 5]).for_each(|(name, seed)| fs::write(folder.path(name), floats(64 * 64, seed)).unwrap());
    let (expected, _) = answer(&[product], &[], &files, None);
    let target = Target::named("sm_90a").unwrap();
    let setting = TemplateSetting { workload: Workload::parse(product).unwrap(), target: target.clone(), n_threads: 1 };
    let task = Task::new(setting, Some("gpu-matmul-wgmma")).unwrap();
    let mut config = task.space.config_to_json(&task.first_guess(0).unwrap());
    (config["copies"], config["ahead"], config["producer"]) = ("bulk".into(), 2.into(), 1.into());
    (config["vector_a"], config["vector_b"], config["in_flight"]) = (1.into(), 1.into(), 0.into());
    let config = task.space.config_from_json(&config).unwrap();
    let model = Choice { task, config, source: Source::Guessed }.model(&[]).unwrap();
    let made = library("layer", &model, &target, 1, Weights::Small, &[]).unwrap();
    write_library(&made, Form::C, &folder.path("layer")).unwrap();
    assert!(!fs::read_to_string(folder.path("layer/layer.c")).unwrap().contains("layer_maps[] = {\n    {0, 0, 0"));
    check_near(&run(&files, Some(libraries.path())), &expected, 2e-2, "a product of wgmma");
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
    check(product, &["--name", "9x"], "--name `9x` is not a C identifier");
    check(product, &["--target", "gfx90a"], "libraries are for CPUs, for OpenCL and for NVIDIA's GPUs");
    check(product, &["--target", "opencl", "--threads", "2"], "--threads is for CPUs (leave it out");
    check(product, &["--target", "opencl", "--weights", "ready"], "--weights ready is for CPUs");
    check_refused(&["compile", product], "--output");
}
