//! Exported objects in other programs: they link in every way, do not conflict with each other, and refuse
//! unsupported machines.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{check_refused, done, run, run_json, stderr, text, tool};
use serde_json::Value as Json;

/// Options that C programs are compiled with.
const STRICT: [&str; 6] = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O1"];

/// Loops of `C[m, n] = A[m, k] · B[k, n]`.
const PRODUCT: &str = "
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int k = 0; k < K; k++) sum += (double)A[i * K + k] * B[k * N + j];
            worst = fmax(worst, fabs(RESULT(sum) - C[i * N + j]));
        }";

/// Loops of a convolution with padding 1 and 3 × 3 taps, batch 1.
const CONVOLUTION: &str = "
    for (int k = 0; k < 16; k++)
        for (int y = 0; y < 9; y++)
            for (int x = 0; x < 10; x++) {
                double sum = 0;
                for (int c = 0; c < 8; c++)
                    for (int r = 0; r < 9; r++) {
                        int v = y + r / 3 - 1, u = x + r % 3 - 1;
                        if (v >= 0 && v < 9 && u >= 0 && u < 10) sum += X[(c * 9 + v) * 10 + u] * W[(k * 8 + c) * 9 + r];
                    }
                worst = fmax(worst, fabs(fmax(sum, 0) - Y[(k * 9 + y) * 10 + x]));
            }";

/// Folder with the objects and headers of kernels and with C sources.
struct Folder(tempfile::TempDir);

/// Kernel in the folder: `NAME.o`, `NAME.h`, and `NAME.c` with `int check_NAME(void)`.
struct Kernel {
    name: String,
    interface: Json,
}

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Exports a kernel with a check against plain loops; `arguments` are those of `show`.
    fn kernel(&self, name: &str, arguments: &[&str], loops: &str) -> Kernel {
        let emit = |what: &str, ending: &str| {
            let file = self.path(&format!("{name}.{ending}"));
            run_json(&[&["show"], arguments, &["--emit", what, "-o", text(&file)]].concat())["interface"].clone()
        };
        let interface = emit("object", "o");
        assert_eq!(interface, emit("header", "h"));
        fs::write(self.path(&format!("{name}.c")), check_source(name, &interface, loops)).unwrap();
        Kernel { name: name.to_owned(), interface }
    }

    /// Exports a product of a size, with more attributes and arguments of `show`; `result` is a C expression
    /// of the sum.
    fn product(&self, name: &str, [m, n, k]: [i64; 3], more: &str, arguments: &[&str], result: &str) -> Kernel {
        let workload = format!("matmul:m={m},n={n},k={k}{more}");
        let sizes = format!("enum {{ M = {m}, N = {n}, K = {k} }};\n#define RESULT(x) ({result})\n");
        self.kernel(name, &[&[workload.as_str()], arguments].concat(), &format!("{sizes}{PRODUCT}"))
    }

    /// Runs a C compiler in the folder.
    fn cc(&self, arguments: &[&str]) {
        done(Command::new("cc").current_dir(self.0.path()).args(arguments));
    }

    /// Builds a program that checks kernels, from sources and objects or libraries with more options; runs
    /// it.
    fn check(&self, kernels: &[&Kernel], arguments: &[&str]) {
        self.link(kernels, arguments);
        done(Command::new(self.path("program")).current_dir(self.0.path()));
    }

    fn link(&self, kernels: &[&Kernel], arguments: &[&str]) {
        let names: Vec<&str> = kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        let declared: String = names.iter().map(|name| format!("int check_{name}(void);\n")).collect();
        let checks: Vec<String> = names.iter().map(|name| format!("check_{name}()")).collect();
        let main = format!("{declared}int main(void) {{ return {}; }}\n", checks.join(" + "));
        fs::write(self.path("main.c"), main).unwrap();
        self.cc(&[&STRICT[..], &["main.c", "-o", "program"], arguments, &["-lm", "-pthread"]].concat());
    }
}

impl Kernel {
    fn prefix(&self) -> &str {
        self.interface["prefix"].as_str().expect("a prefix is text")
    }

    /// Source and object of the kernel.
    fn files(&self) -> [String; 2] {
        ["c", "o"].map(|ending| format!("{}.{ending}", self.name))
    }
}

/// Makes C code that calls a kernel on memory aligned exactly as required, on one thread and on several,
/// compares the outputs with loops, and passes unaligned memory. It returns the number of errors.
fn check_source(name: &str, interface: &Json, loops: &str) -> String {
    let prefix = interface["prefix"].as_str().unwrap();
    let arguments = interface["arguments"].as_array().unwrap();
    let pointers: String = arguments
        .iter()
        .map(|b| {
            let (buffer, ty) = (b["name"].as_str().unwrap(), if b["dtype"] == "f64" { "double" } else { "float" });
            let fill = format!(
                "for (size_t i = 0; i < sizes[PREFIX_{buffer}] / sizeof({ty}); i++) {buffer}[i] = ({ty})((int)(i * 37 % 19) - 9) / 8;"
            );
            format!("    {ty} *{buffer} = buffers[PREFIX_{buffer}];\n    {fill}\n")
        })
        .collect();
    let source = r#"#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "NAME.h"
#define FAULT(condition) do { if (condition) { fprintf(stderr, "NAME: %s\n", #condition); faults++; } } while (0)

struct job { void (*body)(void *, int64_t, int64_t); void *env; int64_t n, thread; };
static void *work(void *given) {
    struct job *job = given;
    for (int64_t i = job->thread; i < job->n; i += PREFIX_THREADS) job->body(job->env, i, job->thread);
    return NULL;
}
static void parallel_for(void *context, void (*body)(void *, int64_t, int64_t), void *env, int64_t n) {
    pthread_t threads[PREFIX_THREADS];
    struct job jobs[PREFIX_THREADS];
    ++*(int *)context;
    for (int t = 0; t < PREFIX_THREADS; t++) {
        struct job job = { body, env, n, t };
        jobs[t] = job;
        if (pthread_create(&threads[t], NULL, work, &jobs[t])) abort();
    }
    for (int t = 0; t < PREFIX_THREADS; t++) pthread_join(threads[t], NULL);
}
static void *memory(size_t n) {
    void *at = NULL;
    if (posix_memalign(&at, 2 * PREFIX_ALIGN, n + PREFIX_ALIGN)) abort();
    return (char *)memset(at, 0xff, n + PREFIX_ALIGN) + PREFIX_ALIGN;
}
int check_NAME(void);
int check_NAME(void) {
    static const size_t sizes[] = PREFIX_BUFFER_BYTES;
    int faults = 0, n_loops = 0;
    double worst = 0;
    tilewright_runtime runtime = { &n_loops, parallel_for };
    void *buffers[PREFIX_BUFFERS], *scratch = memory(PREFIX_SCRATCH_BYTES);
    for (int i = 0; i < PREFIX_BUFFERS; i++) buffers[i] = memory(sizes[i]);
    if (!PREFIX_supported()) return PREFIX_run(buffers, scratch, NULL) == TILEWRIGHT_CPU_UNSUPPORTED ? 77 : 1;
POINTERS
    FAULT(PREFIX_prepare(buffers, scratch, NULL) != TILEWRIGHT_OK);
    FAULT(PREFIX_run(buffers, scratch, NULL) != TILEWRIGHT_OK);
    FAULT(PREFIX_run(buffers, scratch, &runtime) != TILEWRIGHT_OK);
    FAULT(PREFIX_finish(buffers, scratch, &runtime) != TILEWRIGHT_OK);
    FAULT(PREFIX_THREADS > 1 && !n_loops);
LOOPS
    FAULT(!(worst < 1e-4));
    void *first = buffers[0];
    for (int offset = 4; offset < PREFIX_ALIGN; offset *= 2) {
        buffers[0] = (char *)first + offset;
        FAULT((PREFIX_prepare(buffers, scratch, NULL) | PREFIX_run(buffers, scratch, NULL)) != TILEWRIGHT_BAD_POINTER);
    }
    buffers[0] = NULL;
    FAULT((PREFIX_prepare(buffers, scratch, NULL) | PREFIX_run(buffers, scratch, NULL)) != TILEWRIGHT_BAD_POINTER);
    buffers[0] = first;
    if (PREFIX_SCRATCH_BYTES > 0)
        FAULT(PREFIX_run(buffers, (char *)scratch + 16, NULL) != TILEWRIGHT_BAD_POINTER);
    return faults;
}
"#;
    let source = source.replace("POINTERS", &pointers).replace("LOOPS", loops);
    source.replace("PREFIX", prefix).replace("NAME", name)
}

/// Symbols of a kind in an object or library, sorted; `options` are those of `nm`.
fn names(file: &Path, options: &[&str]) -> Vec<String> {
    let listed = done(Command::new("nm").arg("-P").args(options).arg(file));
    let mut names: Vec<String> = listed.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect();
    names.sort();
    names
}

#[test]
fn an_object_links_in_every_way() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new();
    let kernel = folder.product("k", [65, 33, 129], "", &["--guess"], "x");
    let [source, object] = kernel.files();
    for options in [&[][..], &["-pie", "-fPIE"], &["-no-pie", "-fno-pie"], &["-static"], &["-static-pie", "-fPIE"]] {
        folder.check(&[&kernel], &[&[source.as_str(), &object], options].concat());
    }
    folder.cc(&[
        "-shared",
        "-fPIC",
        "-Wl,-z,text",
        "-Wl,-z,defs",
        "-o",
        "libk.so",
        &source,
        &object,
        "-lm",
        "-pthread",
    ]);
    folder.check(&[&kernel], &["./libk.so", "-Wl,-rpath,$ORIGIN"]);
    // Library of this object alone.
    folder.cc(&["-shared", "-Wl,-z,text", "-Wl,-z,defs", "-o", "libonly.so", &object, "-lm"]);
    folder.check(&[&kernel], &[&source, "./libonly.so", "-Wl,-rpath,$ORIGIN"]);

    let mut symbols: Vec<&str> =
        kernel.interface["symbols"].as_array().unwrap().iter().filter_map(Json::as_str).collect();
    symbols.sort_unstable();
    let mut own = vec![format!("__tvm_ffi_{}_run", kernel.prefix())];
    own.extend(["finish", "prepare", "run", "supported"].map(|function| format!("{}_{function}", kernel.prefix())));
    assert_eq!(symbols, own);
    let Some(_) = tool("nm") else { return };
    assert_eq!(names(&folder.path("k.o"), &["-g", "--defined-only"]), own);
    assert_eq!(names(&folder.path("libonly.so"), &["-D", "--defined-only"]), own);
    let outside = names(&folder.path("k.o"), &["-u"]);
    let allowed = ["memcpy", "memmove", "memset", "expf", "logf", "tanhf", "erff", "TVMFFIErrorSetRaisedFromCStr"];
    assert!(outside.iter().all(|name| allowed.contains(&name.as_str())), "{outside:?}");
}

#[test]
fn kernels_live_in_one_program() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new();
    let all = [
        folder.product("wide", [65, 33, 129], "", &["--guess"], "x"),
        folder.product("tall", [129, 17, 40], "", &["--guess"], "x"),
        // Same workload with another schedule.
        folder.product("plain", [65, 33, 129], "", &[], "x"),
    ];
    let files: Vec<String> = all.iter().flat_map(Kernel::files).collect();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    folder.check(&all.each_ref(), &files);

    // With the same name, in separate libraries and archives: they would conflict only in one program.
    let [one, other] = [("one", &["--guess"][..]), ("other", &[][..])].map(|(name, more)| {
        folder.product(name, [20, 24, 28 + name.len() as i64], "", &[&["--prefix", "k"], more].concat(), "x")
    });
    for kernel in [&one, &other] {
        let ([source, object], library) = (kernel.files(), format!("lib{}.so", kernel.name));
        folder.cc(&["-shared", "-fPIC", "-o", &library, &source, &object, "-lm", "-pthread"]);
    }
    folder.check(&[&one, &other], &["./libone.so", "./libother.so", "-Wl,-rpath,$ORIGIN"]);

    let Some(_) = tool("ar") else { return };
    let [first, second] = [&all[0], &all[2]];
    for kernel in [first, second] {
        let ([source, object], compiled) = (kernel.files(), format!("{}-check.o", kernel.name));
        folder.cc(&["-c", "-o", &compiled, &source]);
        let archive = format!("{}.a", kernel.name);
        done(Command::new("ar").current_dir(folder.0.path()).args(["rcs", &archive, &compiled, &object]));
    }
    folder.check(&[first, second], &["wide.a", "plain.a"]);
    folder.check(&[second, first], &["wide.a", "plain.a"]);
}

#[test]
fn every_kind_of_workload_works_from_c() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new();
    let two = if std::thread::available_parallelism().is_ok_and(|n| n.get() > 1) {
        &["--guess", "--threads", "2"][..]
    } else {
        println!("with a named target: this machine has one CPU");
        &["--guess", "--threads", "2", "--target", "x86-64"]
    };
    let convolution = "conv2d:c=8,h=9,w=10,k=16,r=3,s=3,pad=1,epilogue=relu";
    let blocked = format!("{convolution},layout=blocked,const=w");
    let gelu = "0.5 * (x) * (1 + erf((x) / sqrt(2)))";
    let kernels = [
        folder.product("gelu", [37, 40, 21], ",epilogue=gelu", &["--guess"], gelu),
        folder.product("constant", [37, 41, 50], ",const=b", &["--guess"], "x"),
        folder.product("double_two", [64, 48, 30], ",dtype=f64,const=b", two, "x"),
        folder.kernel("nchw", &[convolution, "--guess"], CONVOLUTION),
        folder.kernel("blocked", &[&blocked, "--guess"], CONVOLUTION),
        folder.kernel("untuned", &[&blocked], CONVOLUTION),
    ];
    let files: Vec<String> = kernels.iter().flat_map(Kernel::files).collect();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    folder.check(&kernels.each_ref(), &files);
    let facts =
        |name: &str, key: &str| kernels.iter().find(|k| k.name == name).expect("it is there").interface[key].clone();
    for (name, expected) in [("gelu", [false, false]), ("constant", [true, false]), ("blocked", [true, true])] {
        assert_eq!(["has_prepare", "has_finish"].map(|key| facts(name, key) == true), expected, "{name}");
    }
    assert!(facts("constant", "kept_bytes").as_u64() >= Some(41 * 50 * 4));
    assert_eq!((facts("gelu", "kept_bytes"), facts("gelu", "alignment")), (0.into(), 64.into()));
    assert_eq!(facts("double_two", "threads"), 2);
    let arguments = facts("blocked", "arguments");
    let described =
        arguments.as_array().unwrap().iter().map(|b| (b["name"].clone(), b["role"].clone(), b["bytes"].clone()));
    let expected = [("X", "input", 8 * 90), ("W", "const", 16 * 8 * 9), ("Y", "output", 16 * 90)];
    let expected = expected.map(|(name, role, n_elements)| (name.into(), role.into(), (4 * n_elements).into()));
    assert_eq!(described.collect::<Vec<_>>(), expected);
}

#[test]
fn headers_suit_strict_compilers_and_cpp() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new();
    let a = folder.product("a", [20, 24, 28], "", &["--guess"], "x");
    let b = folder.product("b", [20, 24, 28], ",const=b", &["--guess", "--prefix", "b"], "x");
    let uses = format!("{}_run(0, 0, 0) + {}_run(0, 0, 0)", a.prefix(), b.prefix());
    let source = format!(
        "#include \"a.h\"\n#include \"b.h\"\n#include \"a.h\"\nint f(void);\nint f(void) {{ return {uses}; }}\n"
    );
    for (compiler, file, standards) in
        [("cc", "use.c", &["c99", "c11", "c2x"][..]), ("g++", "use.cpp", &["c++11", "c++17"])]
    {
        let Some(compiler) = tool(compiler) else { continue };
        fs::write(folder.path(file), &source).unwrap();
        for standard in standards {
            let standard = format!("-std={standard}");
            let strict = ["-pedantic", "-Wall", "-Wextra", "-Werror", "-c", "-o", "use.o", &standard, file];
            done(Command::new(compiler).current_dir(folder.0.path()).args(strict));
            let Some(_) = tool("nm") else { continue };
            // By their own names, also in C++.
            let called = names(&folder.path("use.o"), &["-u"]);
            assert!(
                called.contains(&"b_run".to_owned()) && called.contains(&format!("{}_run", a.prefix())),
                "{called:?}"
            );
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_cpu_that_lacks_something_is_an_error() {
    let (Some(_), Some(emulator)) = (tool("cc"), tool("qemu-x86_64")) else { return };
    let folder = Folder::new();
    for (target, cpu, expected) in [
        ("x86-64", "Nehalem", 0),
        ("x86-64-v3", "Nehalem", 77),
        ("x86-64-v3", "Haswell", 0),
        // AVX2 not enabled by the operating system.
        ("x86-64-v3", "Haswell,-xsave", 77),
        ("x86-64-v3", "Haswell,-fma", 77),
        ("x86-64-v4", "Nehalem", 77),
        ("x86-64-v4", "Haswell", 77),
    ] {
        let kernel = folder.product("k", [20, 33, 28], ",const=b", &["--guess", "--target", target], "x");
        let [source, object] = kernel.files();
        folder.link(&[&kernel], &[&source, &object, "-static"]);
        let ended = Command::new(emulator).args(["-cpu", cpu]).arg(folder.path("program")).output().unwrap();
        assert_eq!(ended.status.code(), Some(expected), "{target} on {cpu}: {}", stderr(&ended));
    }
}

#[test]
fn prefixes_are_checked_and_told() {
    let workload = "matmul:m=20,n=24,k=28";
    for bad in ["9k", "a-b", "", "a b", "é", "k\n"] {
        check_refused(&["show", workload, "--emit", "header", "--prefix", bad], "is not a C identifier");
    }
    check_refused(&["show", workload, "--prefix", "k"], "--prefix names the functions of code");
    let of = |arguments: &[&str]| run_json(&[&["show", workload], arguments].concat())["interface"]["prefix"].clone();
    let own = of(&["--guess"]);
    assert!(own.as_str().unwrap().starts_with("matmul_m20_n24_k28_"), "{own}");
    assert_eq!(own, of(&["--guess", "--emit", "asm"]));
    let others = [of(&[]), of(&["--guess", "--target", "x86-64"]), of(&["--guess", "--target", "aarch64"])];
    assert!(!others.contains(&own), "{own} {others:?}");
    assert_eq!(of(&["--prefix", "k"]), "k");
    let asm = run(&["show", workload, "--emit", "asm", "--prefix", "k"]);
    let asm = String::from_utf8(asm.stdout).unwrap();
    let globals: Vec<&str> = asm.lines().filter_map(|line| line.trim().strip_prefix(".globl\t")).collect();
    let is_own = |line: &&str| line.starts_with("k_") || *line == "__tvm_ffi_k_run";
    assert!(globals.iter().all(is_own) && globals.len() == 5, "{globals:?}");
}

/// C code of a tensor for each of the kernel's buffers, and of functions that call it and expect refusals.
fn ffi_source(interface: &Json) -> String {
    let all = ["arguments", "kept"].map(|key| interface[key].as_array().unwrap().clone()).concat();
    let mut shapes = String::new();
    let mut rows: Vec<String> = Vec::new();
    for (at, buffer) in all.iter().enumerate() {
        let shape: Vec<String> = buffer["shape"].as_array().unwrap().iter().map(Json::to_string).collect();
        shapes += &format!("static int64_t shape_{at}[] = {{{}}};\n", shape.join(", "));
        rows.push(format!("{{NULL, {{1, 0}}, {}, {{2, 32, 1}}, shape_{at}, NULL, 0}}", shape.len()));
    }
    // The scratch memory is an argument, if there is any.
    let scratch = interface["scratch_bytes"].as_i64().unwrap();
    if scratch > 0 {
        shapes += &format!("static int64_t shape_scratch[] = {{{scratch}}};\n");
        rows.push("{NULL, {1, 0}, 1, {1, 8, 1}, shape_scratch, NULL, 0}".to_owned());
    }
    format!("{shapes}enum {{ N = {} }};\nstatic DLTensor tensors[N] = {{{}}};\n", rows.len(), rows.join(", "))
}

/// A TVM-FFI host calls the parts of a kernel, on its own memory, and gets errors that name the argument.
#[test]
fn hosts_of_tvm_ffi_call_objects() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new();
    let kernel = folder.product("k", [20, 24, 28], ",const=b", &["--guess", "--prefix", "k"], "x");
    let header = format!("{}/tests/libraries/tvm_ffi.h", env!("CARGO_MANIFEST_DIR"));
    fs::copy(header, folder.path("tvm_ffi.h")).unwrap();
    let source = r#"#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include "k.h"
#include "tvm_ffi.h"
TENSORS
int __tvm_ffi_k_prepare(void *self, const TVMFFIAny *values, int32_t n, TVMFFIAny *result);
int __tvm_ffi_k_run(void *self, const TVMFFIAny *values, int32_t n, TVMFFIAny *result);
static TVMFFIAny values[N];
static void refused(const char *of, const char *words) {
    TVMFFIAny result;
    kind[0] = message[0] = 0;
    CHECK(__tvm_ffi_k_run(NULL, values, N, &result) == -1);
    CHECK(!strcmp(kind, of) && !strncmp(message, "k: argument ", 12) && strstr(message, words));
}
int main(void) {
    static const size_t sizes[] = k_BUFFER_BYTES;
    TVMFFIAny result = {3, 1, {9}};
    for (int i = 0; i < N; i++) {
        size_t bytes = i < k_BUFFERS ? sizes[i] : k_SCRATCH_BYTES;
        CHECK(!posix_memalign(&tensors[i].data, k_ALIGN, bytes + k_ALIGN));
        memset(tensors[i].data, 0, bytes);
        values[i].type_index = 7;
        values[i].v.v_ptr = &tensors[i];
    }
    float *a = tensors[k_A].data, *b = tensors[k_B].data, *c = tensors[k_C].data;
    for (int i = 0; i < 20 * 28; i++) a[i] = (float)(i % 7 - 3);
    for (int i = 0; i < 28 * 24; i++) b[i] = (float)(i % 5 - 2);
    /* What a part neither reads nor writes may be None. */
    values[k_A].type_index = 0;
    CHECK(__tvm_ffi_k_prepare(NULL, values, N, &result) == 0);
    CHECK(result.type_index == 0 && result.v.v_int64 == 0);
    values[k_A].type_index = 7;
    values[k_B].type_index = 0;
    TensorObject object = {1, 70, 0, NULL, tensors[k_C]};
    values[k_C].type_index = 70;
    values[k_C].v.v_ptr = &object;
    CHECK(__tvm_ffi_k_run(NULL, values, N, &result) == 0);
    for (int i = 0; i < 20; i++)
        for (int j = 0; j < 24; j++) {
            float sum = 0;
            for (int k = 0; k < 28; k++) sum += a[i * 28 + k] * b[k * 24 + j];
            CHECK(c[i * 24 + j] == sum);
        }
    DLTensor *x = &tensors[k_A], before = *x;
    int64_t walked[] = {28, 1}, others[] = {1, 20}, shape[] = {20, 29};
    CHECK(__tvm_ffi_k_run(NULL, values, N - 1, &result) == -1);
    CHECK(!strcmp(kind, "TypeError") && strstr(message, "k_run takes") && strstr(message, "(A, B, C"));
    values[k_A].type_index = 3;
    refused("TypeError", "`A`, takes a tensor");
    values[k_A].type_index = 7;
    values[k_A].v.v_ptr = NULL;
    refused("TypeError", "`A`, takes a tensor");
    values[k_A].v.v_ptr = x;
    x->dtype.bits = 64;
    refused("TypeError", "`A`, takes f32");
    *x = before;
    x->dtype.lanes = 2;
    refused("TypeError", "`A`, takes f32");
    *x = before;
    x->shape = shape;
    refused("ValueError", "`A`, takes the shape [20, 28]");
    *x = before;
    x->ndim = 1;
    refused("ValueError", "`A`, takes the shape [20, 28]");
    *x = before;
    x->device.device_type = 2;
    refused("ValueError", "`A`, takes the host's memory");
    *x = before;
    x->strides = others;
    refused("ValueError", "`A`, takes contiguous elements");
    *x = before;
    x->byte_offset = 4;
    refused("ValueError", "`A`, takes memory at a multiple of 64 bytes");
    *x = before;
    x->data = NULL;
    refused("ValueError", "`A`, takes memory");
    *x = before;
    x->strides = walked;
    x->data = (char *)before.data - 64;
    x->byte_offset = 64;
    CHECK(__tvm_ffi_k_run(NULL, values, N, &result) == 0);
    return 0;
}
"#;
    let source = source.replace("TENSORS", &ffi_source(&kernel.interface));
    fs::write(folder.path("main.c"), source).unwrap();
    folder.cc(&[&STRICT[..], &["main.c", "k.o", "-o", "program", "-lm"]].concat());
    done(Command::new(folder.path("program")).current_dir(folder.0.path()));
}

/// Runs the commands and the C program of the page as written.
#[test]
fn the_example_in_the_documents_works() {
    let Some(_) = tool("cc") else { return };
    let folder = Folder::new();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/objects.md");
    let page = fs::read_to_string(page).unwrap();
    let mut blocks = page.split("```c\n").skip(1).filter_map(|rest| rest.split("```").next());
    fs::write(folder.path("example.c"), blocks.find(|code| code.contains("int main(")).expect("a program")).unwrap();
    let is_command = |line: &&str| line.contains("mm.") && ["tilewright ", "cc "].iter().any(|c| line.starts_with(c));
    let commands: Vec<&str> = page.lines().filter(is_command).collect();
    assert_eq!(commands.len(), 3, "{commands:?}");
    let ours = Path::new(common::TILEWRIGHT).parent().unwrap().display();
    let search = format!("{ours}:{}", std::env::var("PATH").unwrap_or_default());
    let script = commands.join(" && ");
    let ran = done(Command::new("sh").args(["-c", &script]).env("PATH", search).current_dir(folder.0.path()));
    assert_eq!(ran, "error 0, first element 64\n");
}
