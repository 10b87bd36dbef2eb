//! Objects linked into C programs, on this machine and for AArch64 under an emulator.
#![cfg(feature = "llvm")]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::gemm::{ALayout, Gemm};
use common::*;
use tilewright_codegen::{Emit, Interface, export};
use tilewright_ir::expr::{BinaryOp, Cond, Expr, UnaryOp};
use tilewright_ir::lower::lower;
use tilewright_ir::op::Workload;
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::{DType, Index, LoopKind, Program, Scope, Stmt, Target};

/// C program that reads the arguments, calls the kernel and writes the arguments.
fn c_main(p: &Program) -> String {
    let n_arguments = p.arguments().count();
    format!(
        r#"#include <stdio.h>
#include <stdlib.h>
#include "kernel.h"
/* From the last to the first, all on one thread. */
static void backwards(void *context, void (*body)(void *, int64_t, int64_t), void *env, int64_t n) {{
    for (*(int64_t *)context += n; n > 0; n--) body(env, n - 1, 0);
}}
/* Aligned to what is asked for and no more. */
static char *memory(size_t n) {{ return (char *)aligned_alloc(128, (n + 255) / 128 * 128) + k_ALIGN; }}
int main(int argc, char **argv) {{
    static const size_t sizes[] = k_BUFFER_BYTES;
    int64_t n_iterations = 0;
    tilewright_runtime runtime = {{ &n_iterations, backwards }};
    void *buffers[k_BUFFERS];
    FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
    if (argc != 3 || !in || !out) return 2;
    for (int i = 0; i < k_BUFFERS; i++) {{
        buffers[i] = memory(sizes[i]);
        if (i < {n_arguments} && fread(buffers[i], 1, sizes[i], in) != sizes[i]) return 3;
    }}
    void *scratch = memory(k_SCRATCH_BYTES);
    if (k_supported() != 1) return 4;
    if (k_prepare(buffers, scratch, NULL)) return 5;
    if (k_run(buffers, scratch, &runtime) || k_run(buffers, scratch, NULL)) return 6;
    if (k_finish(buffers, scratch, &runtime)) return 7;
    buffers[{n_arguments} - 1] = (char *)buffers[{n_arguments} - 1] + 4;
    int codes = k_prepare(buffers, scratch, NULL) | k_run(buffers, scratch, NULL) | k_finish(buffers, scratch, NULL);
    if (codes != TILEWRIGHT_BAD_POINTER) return 8;
    buffers[{n_arguments} - 1] = (char *)buffers[{n_arguments} - 1] - 4;
    for (int i = 0; i < {n_arguments}; i++)
        if (fwrite(buffers[i], 1, sizes[i], out) != sizes[i]) return 9;
    return fclose(out) ? 10 : 0;
}}
"#
    )
}

fn to_bytes(p: &Program, values: &[Vec<f64>]) -> Vec<u8> {
    let mut out = Vec::new();
    for ((_, b), values) in p.arguments().zip(values) {
        let start = out.len();
        out.resize(start + b.size_bytes().unwrap() as usize, 0);
        b.dtype.write(values, &mut out[start..]);
    }
    out
}

fn from_bytes(p: &Program, bytes: &[u8]) -> Vec<Vec<f64>> {
    let mut rest = bytes;
    p.arguments()
        .map(|(_, b)| {
            let (here, after) = rest.split_at(b.size_bytes().unwrap() as usize);
            rest = after;
            b.dtype.read(here)
        })
        .collect()
}

/// Temporary folder, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// C program that calls the kernel of the family `matmul:m=2..26/4,n=40,k=25` at valid and invalid sizes,
/// with few rows first and last.
const FAMILY_MAIN: &str = r#"#include <stdio.h>
#include <stdlib.h>
#include <math.h>
#include "kernel.h"
static char *memory(size_t n) { return (char *)aligned_alloc(128, (n + 127) / 128 * 128); }
int main(void) {
    static const size_t bytes[] = k_BUFFER_BYTES;
    static const int64_t good[] = { 2, 26, 14, 6, 2 }, bad[] = { 0, 1, 3, 4, 30, -2, INT64_MIN, INT64_MAX };
    float *a = (float *)memory(bytes[k_A]), *b = (float *)memory(bytes[k_B]), *c = (float *)memory(bytes[k_C]);
    void *buffers[k_BUFFERS] = { a, b, c }, *scratch = memory(k_SCRATCH_BYTES + 1);
    int64_t sizes[k_SIZES];
    for (int i = 0; i < 26 * 25; i++) a[i] = (float)(i % 17) - 8;
    for (int i = 0; i < 25 * 40; i++) b[i] = (float)(i % 13) - 6;
    for (int i = 0; i < 26 * 40; i++) c[i] = 777;
    for (int i = 0; i < 8; i++) {
        sizes[k_SIZE_m] = bad[i];
        if (k_run(buffers, scratch, NULL, sizes) != TILEWRIGHT_BAD_SIZE) return 1;
    }
    if (k_run(buffers, scratch, NULL, NULL) != TILEWRIGHT_BAD_POINTER) return 2;
    for (int i = 0; i < 26 * 40; i++) if (c[i] != 777) return 3;
    if (k_prepare(buffers, scratch, NULL) || k_finish(buffers, scratch, NULL)) return 4;
    for (int s = 0; s < 5; s++) {
        sizes[k_SIZE_m] = good[s];
        for (int i = 0; i < 26 * 40; i++) c[i] = 777;
        if (k_run(buffers, scratch, NULL, sizes)) return 5;
        for (int i = 0; i < 26 * 40; i++) {
            double sum = 0;
            for (int k = 0; k < 25; k++) sum += (double)a[i / 40 * 25 + k] * b[k * 40 + i % 40];
            if (c[i] != (i / 40 < good[s] ? (float)sum : 777)) return 6;
        }
    }
    return 0;
}
"#;

fn check_family_object(target: &Target, compiler: &str, emulator: Option<&str>, folder: &Folder) {
    let steps = "split i 3 -> io im shrink\nsplit j 4 -> jr jl shrink\nreorder io jr k im jl\n\
        accumulate C at jr -> C.r\nvectorize jl\nunroll im\nparallel io";
    let family = Workload::parse("matmul:m=2..26/4,n=40,k=25").unwrap().program();
    let p = lower(&apply_all(&family, &parse_steps(steps).unwrap()).unwrap());
    let [source, header, object, program] =
        ["main.c", "kernel.h", "kernel.o", "family"].map(|name| folder.0.join(name));
    let interface = Interface::new(&p, target, 1, Some("k")).unwrap();
    std::fs::write(&source, FAMILY_MAIN).unwrap();
    std::fs::write(&header, interface.header(std::slice::from_ref(&p.name))).unwrap();
    std::fs::write(&object, export(&p, target, "k", Emit::Object).unwrap()).unwrap();
    let mut link = Command::new(compiler);
    link.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program).args([&source, &object]).arg("-lm");
    link.args(emulator.map(|_| "-static"));
    let linked = link.output().unwrap();
    assert!(linked.status.success(), "{}", String::from_utf8_lossy(&linked.stderr));
    let mut run = Command::new(emulator.map_or(program.as_os_str(), |emulator| emulator.as_ref()));
    run.args(emulator.map(|_| &program));
    let status = run.status().unwrap();
    assert!(status.success(), "{target}: {status}");
}

fn check_object(p: &Program, target: &Target, compiler: &str, emulator: Option<&str>, folder: &Folder) {
    let arguments = arguments(p);
    let mut expected = arguments.clone();
    tilewright_ir::interp::run(p, &mut expected).unwrap_or_else(|e| panic!("{}: {e}", p.name));
    let [source, header, object, program, input, output] =
        ["main.c", "kernel.h", "kernel.o", "program", "in", "out"].map(|name| folder.0.join(name));
    std::fs::write(&source, c_main(p)).unwrap();
    let interface = Interface::new(p, target, 1, Some("k")).unwrap();
    std::fs::write(&header, interface.header(std::slice::from_ref(&p.name))).unwrap();
    std::fs::write(&object, export(p, target, &interface.prefix, Emit::Object).unwrap()).unwrap();
    std::fs::write(&input, to_bytes(p, &arguments)).unwrap();
    let mut link = Command::new(compiler);
    link.args(["-O1", "-o"]).arg(&program).args([&source, &object]).arg("-lm");
    if emulator.is_some() {
        link.arg("-static");
    }
    let linked = link.output().unwrap();
    assert!(linked.status.success(), "{}: {}", p.name, String::from_utf8_lossy(&linked.stderr));
    let mut run = match emulator {
        Some(emulator) => {
            let mut c = Command::new(emulator);
            c.arg(&program);
            c
        }
        None => Command::new(&program),
    };
    let status = run.args([&input, &output]).status().unwrap();
    assert!(status.success(), "{} on {target}: {status}", p.name);
    compare(p, target, &from_bytes(p, &std::fs::read(&output).unwrap()), &expected);
}

/// Programs with constructs that differ between machines.
fn programs(lanes: i64) -> Vec<Program> {
    let blocked = "conv2d:c=3,h=6,w=5,k=4,r=3,s=3,pad=1,layout=blocked,epilogue=bias+relu";
    let mut all = vec![Workload::parse(blocked).unwrap().program()];
    for dtype in [DType::F32, DType::F64] {
        for a in [ALayout::Panels, ALayout::Rows] {
            let lanes = if dtype == DType::F64 { lanes / 2 } else { lanes };
            let g = Gemm {
                dtype,
                a,
                lanes,
                mr: 8,
                nv: 2,
                ku: 2,
                m: 32,
                mc: 16,
                n: 8 * lanes,
                nc: 4 * lanes,
                k: 16 * lanes,
                kc: 8 * lanes,
                parallel: true,
                prefetch: 4,
                ..Gemm::default()
            };
            all.push(g.program());
            all.push(Gemm { prepacked: true, parallel: false, ..g }.program());
        }
    }
    for n in 1..=19 {
        let mut p = program(&format!("mixed {n}"));
        let x = input(&mut p, "X", DType::F32, &[n]);
        let y = output(&mut p, "Y", DType::F32, &[n, 3]);
        let z = output(&mut p, "Z", DType::F64, &[n]);
        let w = temporary(&mut p, "W", DType::F32, &[n], Scope::Local);
        let [i, l, t] = ["i", "l", "t"].map(|name| p.add_loop(name));
        let lx = load(x, &[ix(l)]);
        let inside = Cond::Lt(ix(l), ix(n - 2));
        let shifted =
            Expr::Select(Box::new(inside), Box::new(load(x, &[ix(l).offset(2)])), Box::new(Expr::Const(-1.0)));
        p.body = vec![
            for_kind(
                LoopKind::Parallel,
                i,
                1,
                vec![
                    Stmt::Alloc(w),
                    vector(l, n, vec![store(w, &[ix(l)], un(UnaryOp::Exp, lx.clone()))]),
                    vector(
                        l,
                        n,
                        vec![
                            store(y, &[ix(l), ix(0)], shifted),
                            store(y, &[ix(l), ix(1)], bin(BinaryOp::Max, lx.clone(), Expr::Const(0.0))),
                            store(y, &[ix(l), ix(2)], un(UnaryOp::Erf, load(w, &[ix(l)]))),
                        ],
                    ),
                ],
            ),
            for_(
                t,
                Index::from(n),
                vec![store(z, &[ix(t)], Expr::FromIndex(times(3, t).offset(-7).floor_div(5).add(&ix(t).modulo(3))))],
            ),
        ];
        all.push(p);
    }
    all
}

#[test]
fn objects_link_into_c_programs() {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("skipped: no C compiler `cc`");
        return;
    }
    let folder = Folder::new("host");
    for p in programs(16).iter().step_by(5) {
        check_object(p, &host(), "cc", None, &folder);
    }
    check_family_object(&host(), "cc", None, &folder);
}

#[test]
fn aarch64_objects_run_under_qemu() {
    let [compiler, emulator] = ["aarch64-linux-gnu-gcc", "qemu-aarch64"];
    for tool in [compiler, emulator] {
        if Command::new(tool).arg("--version").output().is_err() {
            println!("skipped: no `{tool}` (Debian: gcc-aarch64-linux-gnu, qemu-user)");
            return;
        }
    }
    let folder = Folder::new("aarch64");
    for name in ["aarch64", "cortex-a53"] {
        for p in &programs(4) {
            check_object(p, &Target::named(name).unwrap(), compiler, Some(emulator), &folder);
        }
        check_family_object(&Target::named(name).unwrap(), compiler, Some(emulator), &folder);
    }
}
