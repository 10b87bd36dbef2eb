//! NVIDIA's tools for the analysis of GPU code.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Path of an NVIDIA tool: in the folder to which `.ci/cuda-tools` fetches them, else on the path.
pub fn tool(name: &str) -> Option<PathBuf> {
    let fetched = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target folder").join("cuda-tools");
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = [fetched].into_iter().chain(std::env::split_paths(&folders)).map(|folder| folder.join(name));
    let found = found.into_iter().find(|path| path.is_file());
    if found.is_none() {
        println!("skipped what needs {name}, which is not here: .ci/cuda-tools fetches it");
    }
    found
}

/// Resources of an assembled kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Assembled {
    pub registers: u64,
    pub shared_bytes: u64,
    pub spilled_bytes: u64,
    pub local_bytes: u64,
}

/// Assembles a module for a GPU to the file `out`, and returns the resources of its kernels.
///
/// # Errors
/// The assembler's errors or warnings.
pub fn assemble(ptxas: &Path, ptx: &[u8], gpu: &str, out: &Path) -> Result<BTreeMap<String, Assembled>, String> {
    let text = out.with_extension("ptx");
    std::fs::write(&text, ptx).unwrap();
    let mut command = Command::new(ptxas);
    command.args(["-v", "-O3", "--gpu-name", gpu]).arg(&text).arg("-o").arg(out).stdin(Stdio::null());
    let done = command.output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    if !done.status.success() || said.contains("warning") {
        return Err(said);
    }
    let mut kernels: BTreeMap<String, Assembled> = BTreeMap::new();
    let mut current = String::new();
    for line in said.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            current = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.insert(current.clone(), Assembled::default());
        }
        let Some(kernel) = kernels.get_mut(&current) else { continue };
        let before =
            |words: &str| line.split_once(words).and_then(|(rest, _)| rest.split_whitespace().last()?.parse().ok());
        kernel.registers = before(" registers").unwrap_or(kernel.registers);
        kernel.shared_bytes = before(" bytes smem").unwrap_or(kernel.shared_bytes);
        kernel.spilled_bytes = before(" bytes spill stores").unwrap_or(kernel.spilled_bytes);
        kernel.local_bytes = before(" bytes stack frame").unwrap_or(kernel.local_bytes);
    }
    Ok(kernels)
}

/// Opcodes of the last loop of a kernel's machine code, in order.
pub fn innermost_loop(nvdisasm: &Path, cubin: &Path) -> Vec<String> {
    let text = disassembled(nvdisasm, cubin);
    // Instructions after the final exit are padding.
    let end = text.lines().take_while(|line| !line.contains(" EXIT ;")).map(|line| line.len() + 1).sum::<usize>();
    loops(&text[..end.min(text.len())]).pop().expect("there is a loop")
}

/// Disassembles the machine code of a module.
pub fn disassembled(nvdisasm: &Path, cubin: &Path) -> String {
    let done = Command::new(nvdisasm).arg("-c").arg(cubin).stdin(Stdio::null()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Opcodes of each loop of machine code, in order of the loops' ends.
pub fn loops(text: &str) -> Vec<Vec<String>> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let opcode = |line: &&str| {
        let mut words = line.strip_prefix("/*")?.split_once("*/")?.1.split_whitespace();
        words.find(|word| !word.starts_with('@')).map(str::to_owned)
    };
    let back = lines.iter().enumerate().filter_map(|(end, line)| {
        let label = line.split_once("BRA `(")?.1.split(')').next()?;
        let start = lines[..end].iter().position(|line| *line == format!("{label}:"))?;
        Some(lines[start..=end].iter().filter_map(opcode).collect())
    });
    back.collect()
}
