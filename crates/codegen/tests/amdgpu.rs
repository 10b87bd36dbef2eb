//! Code for AMD's GPUs: objects that the toolchain's linker takes, with what their kernels need.
#![cfg(feature = "llvm")]

mod common;
mod gpu;

use std::path::{Path, PathBuf};
use std::process::Command;

use gpu::Product;
use tilewright_codegen::{Emit, compile_gpu, emit_gpu};
use tilewright_ir::Target;

/// The linker that comes with the toolchain, where it does.
fn linker() -> Option<PathBuf> {
    let rustc = Command::new("rustc").args(["--print", "sysroot"]).output().ok()?;
    let sysroot = PathBuf::from(String::from_utf8(rustc.stdout).ok()?.trim());
    let targets = std::fs::read_dir(sysroot.join("lib/rustlib")).ok()?;
    targets.flatten().map(|target| target.path().join("bin/rust-lld")).find(|path| path.is_file())
}

#[test]
fn kernels_fit_their_registers() {
    let linker = linker();
    if linker.is_none() {
        println!("skipped: linking, as this toolchain has no rust-lld");
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("amdgpu");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["gfx900", "gfx906", "gfx90a", "gfx942"] {
        for thread in [[4, 4], [8, 4], [8, 8]] {
            let block = [16 * thread[0], 16 * thread[1], 16];
            let program = Product { m: 256, n: 256, k: 64, block, thread, vector: 4 }.program();
            let target = Target::named(name).unwrap();
            let text = String::from_utf8(emit_gpu(&program, &target, Emit::Asm).unwrap().0).unwrap();
            let number = |key: &str| {
                let line = text.lines().rev().find_map(|line| line.trim().strip_prefix(key));
                line.and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or_else(|| panic!("no {key}\n{text}"))
            };
            let kernel = &program.body[0];
            assert_eq!(number(".group_segment_fixed_size:"), kernel.shared_bytes(&program), "{name}");
            assert_eq!((number(".vgpr_spill_count:"), number(".private_segment_fixed_size:")), (0, 0), "{name}");
            assert!(number(".vgpr_count:") <= 256, "{name}");
            let Some(linker) = &linker else { continue };
            let (object, linked) = (folder.join(format!("{name}.o")), folder.join(format!("{name}.so")));
            std::fs::write(&object, compile_gpu(&program, &target).unwrap().code).unwrap();
            let mut link = Command::new(linker);
            link.args(["-flavor", "gnu", "-shared"]).arg(&object).arg("-o").arg(&linked);
            let done = link.output().unwrap();
            assert!(done.status.success(), "{name}: {}", String::from_utf8_lossy(&done.stderr));
        }
    }
}
