//! Machine code of kernels for AMD GPUs, and the linker for it.

use std::path::{Path, PathBuf};
use std::process::Command;

use tilewright_codegen::{Emit, compile_gpu, emit_gpu};
use tilewright_ir::{GpuProgram, Target};

/// Linker of the toolchain, if it has one.
fn linker() -> Option<PathBuf> {
    let rustc = Command::new("rustc").args(["--print", "sysroot"]).output().ok()?;
    let sysroot = PathBuf::from(String::from_utf8(rustc.stdout).ok()?.trim());
    let targets = std::fs::read_dir(sysroot.join("lib/rustlib")).ok()?;
    targets.flatten().map(|target| target.path().join("bin/rust-lld")).find(|path| path.is_file())
}

/// Resources of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Made {
    pub n_registers: u64,
    pub n_spilled: u64,
    pub private_bytes: u64,
    pub shared_bytes: u64,
}

/// Compiles kernels for a GPU in a folder, links them if there is a linker, and returns the resources of
/// each.
///
/// # Errors
/// If compilation or linking fails.
pub fn link(program: &GpuProgram, gpu: &str, folder: &Path) -> Result<Vec<Made>, String> {
    let target = Target::named(gpu).unwrap();
    let text = emit_gpu(program, &target, Emit::Asm).map_err(|why| why.to_string())?.0;
    let text = String::from_utf8(text).unwrap();
    let numbers = |key: &'static str| {
        let of_line = move |line: &str| line.trim().strip_prefix(key).and_then(|n| n.trim().parse::<u64>().ok());
        text.lines().filter_map(of_line).collect::<Vec<_>>()
    };
    let [registers, spilled, private, shared] =
        [".vgpr_count:", ".vgpr_spill_count:", ".private_segment_fixed_size:", ".group_segment_fixed_size:"]
            .map(numbers);
    let made = |at: usize| Made {
        n_registers: registers[at],
        n_spilled: spilled[at],
        private_bytes: private[at],
        shared_bytes: shared[at],
    };
    let Some(linker) = linker() else {
        println!("skipped: linking, as this toolchain has no rust-lld");
        return Ok((0..registers.len()).map(made).collect());
    };
    let (object, linked) = (folder.join(format!("{gpu}.o")), folder.join(format!("{gpu}.so")));
    std::fs::write(&object, compile_gpu(program, &target).map_err(|why| why.to_string())?.code).unwrap();
    let mut link = Command::new(linker);
    link.args(["-flavor", "gnu", "-shared"]).arg(&object).arg("-o").arg(&linked);
    let done = link.output().unwrap();
    match done.status.success() {
        true => Ok((0..registers.len()).map(made).collect()),
        false => Err(format!("{gpu}: {}", String::from_utf8_lossy(&done.stderr))),
    }
}
