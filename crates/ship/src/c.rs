//! The source and header for C.

use std::fmt::Write;

use serde_json::Value as Json;
use tilewright_codegen::dlpack;
use tilewright_ir::Part;
use tilewright_runtime::host::HOST_HEADER;
use tilewright_runtime::{Address, Base, Dim, Host, HostOperator, Model, Size, Slice, Tensor, Work};

use crate::constants::{Constants, Home, Widened};
use crate::{Library, named, of_kind};

/// The functions of a library, behind its name; the last one is of libraries for GPUs alone.
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

/// The further functions of a library of a model with an open dimension.
pub const FUNCTIONS_OF_DIMS: [&str; 4] = ["dims", "dim", "set_dim", "shape"];

/// The further functions of a library of a model with states.
pub const FUNCTIONS_OF_STATES: [&str; 5] = ["states", "state", "bind_state", "past", "rewind"];

/// The function by which TVM-FFI calls a library.
pub fn ffi_function(name: &str) -> String {
    format!("__tvm_ffi_{name}")
}

/// Prefix of the names of a kernel's functions.
pub fn kernel_prefix(name: &str, kernel: usize) -> String {
    format!("{name}_k{kernel}")
}

/// The name of the constants.
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

/// The header.
pub fn header(library: &Library) -> String {
    let n = &library.name;
    let libraries = if library.is_for_gpu { "-ldl" } else { "-lm -lpthread" };
    let how = [format!("To be linked: {n}.c {n}_kernels.a {libraries}, or -l{n} where there is lib{n}.so.")];
    let text = of_kind(include_str!("../templates/net.h"), library.kind())
        .replace("@ORIGIN@", &comment(&library.origin, &how))
        .replace("@THREADS@", &library.n_threads.to_string());
    named(&text, &library.name)
}

/// Source of a library, made of a template and the tables that it reads.
pub fn source(name: &str, origin: &[String], template: &str, tables: &str, has_ffi: bool) -> String {
    let text = template
        .replace("net.h", &format!("{name}.h"))
        .replace("@ORIGIN@", &comment(origin, &[]))
        .replace("@COMMON@", include_str!("../templates/common.c").trim_end())
        .replace("@TABLES@", tables.trim_end());
    let ffi = if has_ffi { include_str!("../templates/ffi.c").replace("@NAME@", name) } else { String::new() };
    named(&(text + &ffi), name)
}

/// A text as C has it.
pub fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => out.extend(['\\', char::from(byte)]),
            b' '..=b'~' if byte != b'?' => out.push(char::from(byte)),
            // Three digits, so that no digit behind is taken for another one.
            _ => write!(out, "\\{byte:03o}").expect("writing to a string does not fail"),
        }
    }
    out + "\""
}

/// Description of a library, its inputs and its outputs, named as in the templates: tables and functions that
/// read them.
pub fn interface(build: &Json, inputs: &[Tensor], outputs: &[Tensor]) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let build = serde_json::to_string(build).expect("what was made as JSON can be written");
    writeln!(out, "static const char net_build_text[] =\n    {};\n", quoted(&build))?;
    for (what, capitals, tensors) in [("input", "INPUT", inputs), ("output", "OUTPUT", outputs)] {
        writeln!(out, "#define NET_{capitals}S {}u", tensors.len())?;
        for (at, tensor) in tensors.iter().enumerate() {
            let mut shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
            if let Some((axis, _)) = tensor.open {
                shape[axis] = "-1".to_owned();
            }
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

/// Declarations of the library's data, of `n_bytes` bytes.
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

/// An integer as C has it.
fn literal(x: i64) -> String {
    // The smallest one is no literal.
    if x == i64::MIN { "INT64_MIN".to_owned() } else { format!("INT64_C({x})") }
}

/// The text of the host operators that a library calls, and the parameters of the calls.
fn host_operators(operators: &[HostOperator], parameters: &str) -> String {
    if operators.is_empty() {
        return String::new();
    }
    let sources = operators.iter().map(|operator| operator.source);
    let parts = ["#include <math.h>\n\n#define NET_HOST static", HOST_HEADER].into_iter().chain(sources);
    let parts: Vec<&str> = parts.chain([parameters]).map(str::trim_end).collect();
    parts.join("\n\n") + "\n\n"
}

/// Tables of the states.
fn states(model: &Model) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let (mut table, mut places, mut n_bytes) = (String::new(), String::new(), 0);
    for (at, tensor) in model.plan().states().enumerate() {
        let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
        writeln!(out, "static const int64_t net_state_{at}_shape[] = {{{}}};", shape.join(", "))?;
        let (code, bits) = dlpack(tensor.dtype);
        let (name, rank) = (quoted(&tensor.name), tensor.shape.len());
        writeln!(table, "    {{{name}, {code}, {bits}, 0, {rank}, net_state_{at}_shape, {}}},", tensor.n_bytes())?;
        writeln!(places, "    {n_bytes},")?;
        n_bytes += tensor.n_bytes().next_multiple_of(128);
    }
    let n = model.plan().states().count();
    writeln!(out, "#define NET_STATES {n}u")?;
    writeln!(out, "static const net_tensor net_state_table[NET_STATES + 1] = {{")?;
    writeln!(out, "{table}    {{NULL, 0, 0, 0, 0, NULL, 0}}\n}};")?;
    writeln!(out, "/* Where each state begins, in bytes, and where the last one ends. */")?;
    writeln!(out, "static const size_t net_state_places[NET_STATES + 1] = {{\n{places}    {n_bytes}\n}};")?;
    writeln!(out, "/* What a run adds to the length of states. */")?;
    writeln!(out, "#define NET_APPENDS {}\n", literal(model.plan().appends))?;
    Ok(out)
}

/// Tables that the template of libraries for CPUs reads.
pub fn tables(name: &str, model: &Model, constants: &Constants, n_threads: usize) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let mut kernels: Vec<usize> = Vec::new();
    let (mut addresses, mut steps, mut passed) = (String::new(), String::new(), Vec::new());
    let (mut operators, mut parameters): (Vec<HostOperator>, String) = Default::default();
    let (mut n_addresses, mut n_steps, mut all_rows) = (0, 0, String::new());
    let is_open = model.plan().dim.is_some();
    let mut open_sizes: Vec<Size> = Vec::new();
    // What a step has of sizes, in libraries that have them.
    let of_size = |at: usize| if is_open { format!("{at}, ") } else { String::new() };
    let mut add = |slices: &mut dyn Iterator<Item = (&Slice, bool)>, step: &str| -> std::fmt::Result {
        writeln!(addresses, "    /* {} */", step.replace("*/", "* /"))?;
        for (slice, is_used) in slices {
            let home = || match constants.home(model, slice)? {
                Home::File(offset) => Some(("NET_IN_CONSTANTS", 0, offset)),
                Home::Made(offset) => Some(("NET_IN_MADE", 0, offset)),
            };
            let place = || match model.address(slice)? {
                Address { base: Base::Arena, offset } => Some(("NET_IN_ARENA", 0, offset)),
                Address { base: Base::State(at), offset } => Some(("NET_IN_STATE", at, offset)),
                Address { base: Base::Input(at), offset } => Some(("NET_IN_INPUT", at, offset)),
                Address { base: Base::Output(at), offset } => Some(("NET_IN_OUTPUT", at, offset)),
                Address { base: Base::Constants, .. } => None,
            };
            let found = if is_used { home().or_else(place) } else { None };
            let (base, index, offset) = found.unwrap_or(("NET_UNUSED", 0, 0));
            if base == "NET_IN_INPUT" || base == "NET_IN_OUTPUT" {
                passed.push(n_addresses.to_string());
            }
            writeln!(addresses, "    {{{base}, {index}, {offset}}},")?;
            n_addresses += 1;
        }
        Ok(())
    };
    let mut first = 0;
    // Each part of a kernel is a step.
    let mut starts = Vec::with_capacity(model.plan().steps.len());
    for step in &model.plan().steps {
        let before = starts.last().map_or(0, |(at, n)| at + n);
        starts.push((before, if let Work::Kernel { parts, .. } = &step.work { parts.len() } else { 1 }));
    }
    for step in &model.plan().steps {
        let guard = step.guard.map_or(0, |at| at + 1);
        match &step.work {
            Work::Kernel { kernel, arguments, kept, parts, all_threads, sizes } => {
                kernels.push(*kernel);
                let size = of_size(open_sizes.len());
                open_sizes.extend(sizes);
                let slices = arguments.iter().chain(kept);
                let used = |(slice, at)| (slice, model.is_used(*kernel, at, parts));
                add(&mut slices.zip(0..).map(used), &step.name)?;
                for part in parts {
                    let function = function(name, *kernel, *part);
                    writeln!(
                        steps,
                        "    {{{function}, NULL, NULL, {first}, {}, 0, {size}{guard}}},",
                        u8::from(*all_threads)
                    )?;
                    n_steps += 1;
                }
                first += arguments.len() + kept.len();
            }
            Work::Copy { from, to, rows } => {
                add(&mut [(from, true), (to, true)].into_iter(), &step.name)?;
                open_sizes.extend(rows.map(|(rows, _)| rows));
                let size = of_size(rows.map_or(0, |_| open_sizes.len()));
                let n_bytes = rows.map_or(from.n_bytes, |(_, row)| row);
                writeln!(steps, "    {{NULL, NULL, NULL, {first}, 0, {n_bytes}, {size}{guard}}},")?;
                n_steps += 1;
                first += 2;
            }
            Work::Move { from, to, rows } => {
                add(&mut [(from, true), (to, true)].into_iter(), &step.name)?;
                let (size, name) = (open_sizes.len(), format!("net_rows_{n_steps}"));
                open_sizes.extend([rows.offsets[0], rows.offsets[1], rows.n_bytes]);
                let [from, to] = rows.pitches;
                writeln!(all_rows, "static const int64_t {name}[] = {{{}, {from}, {to}}};", rows.n)?;
                writeln!(steps, "    {{NULL, NULL, {name}, {first}, 0, 0, {size}, {guard}}},")?;
                n_steps += 1;
                first += 2;
            }
            Work::Host { inputs, outputs, run: Host::Call(call) } => {
                add(&mut inputs.iter().chain(outputs).map(|slice| (slice, true)), &step.name)?;
                let (operator, name) = (call.operator, format!("net_parameters_{n_steps}"));
                let numbers: Vec<String> = call.parameters.iter().map(|&x| literal(x)).collect();
                writeln!(parameters, "static const int64_t {name}[] = {{{}}};", numbers.join(", "))?;
                let size = of_size(0);
                writeln!(steps, "    {{NULL, net_host_{}, {name}, {first}, 0, 0, {size}{guard}}},", operator.name)?;
                if !operators.iter().any(|known| known.name == operator.name) {
                    operators.push(operator);
                }
                n_steps += 1;
                first += inputs.len() + outputs.len();
            }
            Work::While { truth, end } => {
                add(&mut std::iter::once((truth, true)), &step.name)?;
                let (end, size) = (starts[*end].0, of_size(0));
                writeln!(steps, "    {{NULL, NULL, NULL, {first}, NET_LOOP_BEGIN, {end}, {size}{guard}}},")?;
                n_steps += 1;
                first += 1;
            }
            Work::Again { to } => {
                let (to, size) = (starts[*to].0, of_size(0));
                writeln!(steps, "    {{NULL, NULL, NULL, {first}, NET_LOOP_END, {to}, {size}{guard}}},")?;
                n_steps += 1;
            }
            Work::Host { run: Host::Function(_), .. } => unreachable!("such a plan is refused"),
        }
    }
    let mut makers = String::new();
    for &maker in &constants.makers {
        let step = &model.plan().steps[maker];
        let Work::Kernel { kernel, arguments, kept, .. } = &step.work else { continue };
        let used = |(slice, at)| (slice, model.is_used(*kernel, at, &[Part::Prepare]));
        add(&mut arguments.iter().chain(kept).zip(0..).map(used), &step.name)?;
        let size = of_size(0);
        writeln!(makers, "    {{{}, NULL, NULL, {first}, 1, 0, {size}0}},", function(name, *kernel, Part::Prepare))?;
        first += arguments.len() + kept.len();
    }
    let mut guards = String::new();
    for guard in &model.plan().guards {
        add(&mut std::iter::once((&guard.truth, true)), "guard")?;
        let outer = guard.outer.map_or(0, |at| at + 1);
        writeln!(guards, "    {{{first}, {}, {outer}}},", u8::from(guard.holds))?;
        first += 1;
    }
    kernels.sort_unstable();
    kernels.dedup();

    writeln!(out, "/* Bytes of the tensors in between, and of what kernels use for themselves. */")?;
    writeln!(out, "#define NET_TENSOR_BYTES {}u", model.plan().arena_bytes())?;
    writeln!(out, "#define NET_SCRATCH_BYTES {}u\n", model.scratch_bytes(n_threads))?;
    out += &data(constants.n_bytes)?;
    for kernel in &kernels {
        writeln!(out, "int {}_supported(void);", kernel_prefix(name, *kernel))?;
        for (part, _) in Part::ALL {
            let function = function(name, *kernel, part);
            let sizes = if is_open { ", const int64_t *sizes" } else { "" };
            writeln!(out, "int {function}(void *const *buffers, void *scratch, const net_runtime *runtime{sizes});")?;
        }
    }
    // All kernels are for the same CPU.
    let supported = kernels.first().map_or("1".to_owned(), |k| format!("{}_supported()", kernel_prefix(name, *k)));
    writeln!(out, "static int net_supported(void) {{ return {supported}; }}\n")?;
    out += &host_operators(&operators, &parameters);
    out += &all_rows;
    writeln!(out, "#define NET_ADDRESSES {n_addresses}u")?;
    writeln!(out, "static const net_address net_addresses[NET_ADDRESSES + 1] = {{")?;
    writeln!(out, "{addresses}    {{NET_UNUSED, 0, 0}}\n}};\n")?;
    writeln!(out, "/* The addresses that are different in each run. */\n#define NET_PASSED {}u", passed.len())?;
    passed.push("0".to_owned());
    writeln!(out, "static const uint32_t net_passed[NET_PASSED + 1] = {{{}}};\n", passed.join(", "))?;
    writeln!(out, "/* Conditions of steps, numbered from 1 on. */")?;
    writeln!(out, "static const net_guard net_guards[] = {{\n{guards}    {{0, 0, 0}}\n}};\n")?;
    if let Some(Dim { name, least, most, step }) = &model.plan().dim {
        let numbers = [least, most, step].map(|n| literal(*n)).join(", ");
        writeln!(out, "static const net_dimension net_the_dimension = {{{}, {numbers}}};", quoted(name))?;
        writeln!(out, "#define NET_SIZES {}u", open_sizes.len())?;
        let [inputs, outputs] = crate::tensors(model.plan());
        let of = |tensors: Vec<Tensor>| tensors.into_iter().map(|tensor| tensor.open.map(|(_, size)| size)).collect();
        let tables: [(&str, Vec<Option<Size>>); 3] = [
            ("net_sizes", open_sizes.into_iter().map(Some).collect()),
            ("net_input_sizes", of(inputs)),
            ("net_output_sizes", of(outputs)),
        ];
        for (table, sizes) in tables {
            writeln!(out, "static const net_size {table}[] = {{")?;
            for size in sizes {
                let [factor, term, multiple] =
                    size.map_or([0, 0, 1], |Size { factor, term, multiple }| [factor, term, multiple]).map(literal);
                writeln!(out, "    {{{factor}, {term}, {multiple}}},")?;
            }
            writeln!(out, "    {{0, 0, 1}}\n}};")?;
        }
        writeln!(out)?;
    }
    if model.plan().appends > 0 {
        out += &states(model)?;
    }
    let none = format!("NULL, NULL, NULL, 0, 0, 0, {}0", of_size(0));
    writeln!(out, "#define NET_STEPS {n_steps}u")?;
    writeln!(out, "static const net_step net_steps[NET_STEPS + 1] = {{\n{steps}    {{{none}}}\n}};\n")?;
    writeln!(out, "/* Bytes of what the first context makes of constants, and the steps that do so. */")?;
    writeln!(out, "#define NET_MADE_BYTES ((size_t){}u)", constants.made_bytes)?;
    writeln!(out, "/* The first of these bytes, which runs read. */")?;
    writeln!(out, "#define NET_KEPT_BYTES ((size_t){}u)", constants.kept_bytes)?;
    writeln!(out, "static const net_widened net_all_widened[] = {{")?;
    for Widened { from, to, n, is_bf16 } in &constants.widened {
        writeln!(out, "    {{{from}, {to}, {n}, {}}},", u8::from(*is_bf16))?;
    }
    writeln!(out, "    {{0, 0, 0, 0}}\n}};\n")?;
    writeln!(out, "static const net_step net_makers[] = {{\n{makers}    {{{none}}}\n}};")?;
    Ok(out)
}
