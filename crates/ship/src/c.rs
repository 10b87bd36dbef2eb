//! Source and header for C.

mod tables;

use std::fmt::Write;

use serde_json::Value as Json;
use tilewright_codegen::dlpack;
use tilewright_ir::Part;
use tilewright_runtime::PlanTensor;

use crate::{Library, named, of_kind};
pub use tables::tables;

/// Functions of a library, without the library's prefix; the last one is only in libraries for GPUs.
pub const FUNCTIONS: [&str; 12] = [
    "abi",
    "build",
    "message",
    "inputs",
    "outputs",
    "input",
    "output",
    "arena_bytes",
    "create",
    "run",
    "destroy",
    "enqueue",
];

/// Further functions of a library whose model has an open (dynamic) dimension.
pub const FUNCTIONS_OF_DIMS: [&str; 4] = ["dims", "dim", "set_dim", "shape"];

/// Further functions of a library whose model has states.
pub const FUNCTIONS_OF_STATES: [&str; 5] = ["states", "state", "bind_state", "past", "rewind"];

/// Name of the function by which TVM-FFI calls a library.
pub fn ffi_function(name: &str) -> String {
    format!("__tvm_ffi_{name}")
}

/// Prefix of the names of a kernel's functions.
pub fn kernel_prefix(name: &str, kernel: usize) -> String {
    format!("{name}_k{kernel}")
}

/// Symbol of the constants.
pub fn constants_name(name: &str) -> String {
    format!("{name}_constants")
}

fn function(name: &str, kernel: usize, part: Part) -> String {
    format!("{}_{}", kernel_prefix(name, kernel), part.name())
}

/// Comment on the origin of a file.
fn comment(origin: &[String], more: &[String]) -> String {
    let mut out = String::new();
    for (at, line) in origin.iter().chain(more).enumerate() {
        let line = line.replace("*/", "* /");
        writeln!(out, "{} {line}", if at == 0 { "/*" } else { " *" }).expect("writing to a string does not fail");
    }
    if out.is_empty() { out } else { out + " */" }
}

/// Formats the C header.
pub fn header(library: &Library) -> String {
    let n = &library.name;
    let libraries = if library.is_for_gpu { "-ldl" } else { "-lm -lpthread" };
    let how = [format!("To be linked: {n}.c {n}_kernels.a {libraries}, or -l{n} where there is lib{n}.so.")];
    let text = of_kind(include_str!("../templates/net.h"), library.kind())
        .replace("@ORIGIN@", &comment(&library.origin, &how))
        .replace("@THREADS@", &library.n_threads.to_string());
    named(&text, &library.name)
}

/// Formats the C source of a library, from a template and the tables that it includes.
pub fn source(name: &str, origin: &[String], template: &str, tables: &str, has_ffi: bool) -> String {
    let text = template
        .replace("net.h", &format!("{name}.h"))
        .replace("@ORIGIN@", &comment(origin, &[]))
        .replace("@COMMON@", include_str!("../templates/common.c").trim_end())
        .replace("@TABLES@", tables.trim_end());
    let ffi = if has_ffi { include_str!("../templates/ffi.c").replace("@NAME@", name) } else { String::new() };
    named(&(text + &ffi), name)
}

/// Formats a text as a C string literal.
pub fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => out.extend(['\\', char::from(byte)]),
            b' '..=b'~' if byte != b'?' => out.push(char::from(byte)),
            // Three digits, so that a following digit is not part of the escape.
            _ => write!(out, "\\{byte:03o}").expect("writing to a string does not fail"),
        }
    }
    out + "\""
}

/// Description of a library, its inputs and its outputs, named as in the templates: tables and functions that
/// read them. `is_open` says whether runs set the size of a dimension of an input or, at later indices, of an
/// output.
pub fn interface(
    build: &Json,
    [inputs, outputs]: [&[PlanTensor]; 2],
    is_open: &dyn Fn(usize, usize) -> bool,
) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let build = serde_json::to_string(build).expect("what was made as JSON can be written");
    writeln!(out, "static const char net_build_text[] =\n    {};\n", quoted(&build))?;
    for (what, capitals, tensors) in [("input", "INPUT", inputs), ("output", "OUTPUT", outputs)] {
        writeln!(out, "#define NET_{capitals}S {}u", tensors.len())?;
        for (at, tensor) in tensors.iter().enumerate() {
            let port = if what == "input" { at } else { inputs.len() + at };
            let of = |(axis, n): (usize, &usize)| if is_open(port, axis) { "-1".to_owned() } else { n.to_string() };
            let shape: Vec<String> = tensor.shape.iter().enumerate().map(of).collect();
            let n = shape.len().max(1);
            let shape = if shape.is_empty() { "0".to_owned() } else { shape.join(", ") };
            writeln!(out, "static const int64_t net_{what}_{at}_shape[{n}] = {{{shape}}};")?;
        }
        writeln!(out, "static const net_tensor net_{what}_table[NET_{capitals}S + 1] = {{")?;
        for (at, tensor) in tensors.iter().enumerate() {
            let (code, bits) = dlpack(tensor.dtype);
            let (name, rank, n_bytes) = (quoted(&tensor.name), tensor.shape.len(), tensor.n_bytes());
            writeln!(out, "    {{{name}, {code}, {bits}, 0, {rank}, net_{what}_{at}_shape, {n_bytes}}},")?;
        }
        writeln!(out, "    {{NULL, 0, 0, 0, 0, NULL, 0}}\n}};\n")?;
    }
    Ok(out + include_str!("../templates/interface.c"))
}

/// Formats the declarations of the library's data of `n_bytes` bytes.
pub fn data(n_bytes: usize) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    writeln!(out, "#define NET_CONSTANT_BYTES ((size_t){n_bytes}u)")?;
    if n_bytes == 0 {
        writeln!(out, "#define net_constants_at ((const unsigned char *)NULL)\n")?;
    } else {
        writeln!(out, "extern NET_HIDDEN const unsigned char net_constants[];")?;
        writeln!(out, "/* Read from memory, as a whole address: they may be beyond the reach of a shorter one. */")?;
        writeln!(out, "static const unsigned char *const volatile net_constants_at = net_constants;\n")?;
    }
    Ok(out)
}

/// Formats an integer as a C literal.
fn literal(x: i64) -> String {
    // The smallest one cannot be written as a literal.
    if x == i64::MIN { "INT64_MIN".to_owned() } else { format!("INT64_C({x})") }
}
