//! Tables for the template of CPU libraries.

use std::fmt::{self, Write};

use tilewright_codegen::dlpack;
use tilewright_ir::Part;
use tilewright_runtime::host::HOST_HEADER;
use tilewright_runtime::{
    Address, BaseMemory, Host, HostOperator, Member, Members, Model, OpenDimension, Piece, Plan, PlanStep, PlanTensor,
    RunSize, TensorSlice, Work,
};

use crate::constants::{ConstantHome, Constants, Widened};
use crate::narrow::NarrowForm;

use super::{data, function, kernel_prefix, literal, quoted};

/// Result of writing a part of a table.
type TableWritten = Result<(), fmt::Error>;

/// Tables of a library under construction.
struct CTables<'m> {
    name: &'m str,
    model: &'m Model,
    constants: &'m Constants,
    /// Kernels that are called, once for each call.
    kernels: Vec<usize>,
    addresses: String,
    n_addresses: usize,
    /// Indices of the addresses that differ between runs, and the item whose rows each is in.
    passed: Vec<String>,
    items: Vec<String>,
    /// Sizes that these addresses begin behind, counted from 1; 0 for none.
    part_starts: Vec<String>,
    steps: String,
    n_steps: usize,
    /// Index of the first row of each step of the plan: each part of a kernel has one row.
    starts: Vec<usize>,
    operators: Vec<HostOperator>,
    /// Parameters of the calls of host operators.
    parameters: String,
    /// Pitches of copied rows.
    all_rows: String,
    /// Sizes that depend on the open dimension.
    open_sizes: Vec<RunSize>,
    makers: String,
    guards: String,
}

/// Formats the tables of a model's library.
///
/// # Errors
/// Never; the text is in memory.
pub fn tables(name: &str, model: &Model, constants: &Constants, n_threads: usize) -> Result<String, fmt::Error> {
    let mut tables = CTables::new(name, model, constants);
    for step in &model.plan().steps {
        tables.add_step(step)?;
    }
    for &maker in &constants.makers {
        tables.add_maker(&model.plan().steps[maker])?;
    }
    tables.add_guards()?;
    tables.kernels.sort_unstable();
    tables.kernels.dedup();
    tables.text(n_threads)
}

impl<'m> CTables<'m> {
    fn new(name: &'m str, model: &'m Model, constants: &'m Constants) -> CTables<'m> {
        let n_rows = |step: &PlanStep| if let Work::Kernel { parts, .. } = &step.work { parts.len() } else { 1 };
        let add_up = |end: &mut usize, step: &PlanStep| Some(std::mem::replace(end, *end + n_rows(step)));
        CTables {
            name,
            model,
            constants,
            kernels: Vec::new(),
            addresses: String::new(),
            n_addresses: 0,
            passed: Vec::new(),
            items: Vec::new(),
            part_starts: Vec::new(),
            steps: String::new(),
            n_steps: 0,
            starts: model.plan().steps.iter().scan(0, add_up).collect(),
            operators: Vec::new(),
            parameters: String::new(),
            all_rows: String::new(),
            open_sizes: Vec::new(),
            makers: String::new(),
            guards: String::new(),
        }
    }

    /// Index of a size and a comma, in libraries with open sizes.
    fn of_size(&self, at: usize) -> String {
        if self.model.plan().dim.is_some() { format!("{at}, ") } else { String::new() }
    }

    /// Base, index and offset of a slice; `None` if the library never accesses it.
    fn home(&self, slice: &TensorSlice) -> Option<(&'static str, usize, usize)> {
        match self.constants.home(self.model, slice) {
            Some(ConstantHome::File(offset)) => return Some(("NET_IN_CONSTANTS", 0, offset)),
            Some(ConstantHome::Made(offset)) => return Some(("NET_IN_MADE", 0, offset)),
            None => {}
        }
        match self.model.address(slice)? {
            Address { base: BaseMemory::Arena, offset } => Some(("NET_IN_ARENA", 0, offset)),
            Address { base: BaseMemory::State(at), offset } => Some(("NET_IN_STATE", at, offset)),
            Address { base: BaseMemory::Input(at), offset } => Some(("NET_IN_INPUT", at, offset)),
            Address { base: BaseMemory::Output(at), offset } => Some(("NET_IN_OUTPUT", at, offset)),
            Address { base: BaseMemory::Constants, .. } => None,
        }
    }

    /// Adds the addresses of slices, each with whether it is used. Returns the index of the first.
    fn add_addresses<'s>(
        &mut self,
        slices: impl Iterator<Item = (&'s TensorSlice, bool)>,
        step: &str,
    ) -> Result<usize, fmt::Error> {
        let first = self.n_addresses;
        writeln!(self.addresses, "    /* {} */", step.replace("*/", "* /"))?;
        for (slice, is_used) in slices {
            let found = if is_used { self.home(slice) } else { None };
            let (base, index, offset) = found.unwrap_or(("NET_UNUSED", 0, 0));
            let mut offset = offset;
            if base == "NET_IN_INPUT" || base == "NET_IN_OUTPUT" {
                let (item, in_item) = self.model.plan().item_of(slice);
                self.passed.push(self.n_addresses.to_string());
                self.items.push(item.to_string());
                let start = self.model.plan().tensors[slice.tensor].start;
                let start = start.map_or(0, |start| self.first_size(&[start]) + 1);
                self.part_starts.push(start.to_string());
                offset = in_item;
            }
            writeln!(self.addresses, "    {{{base}, {index}, {offset}}},")?;
            self.n_addresses += 1;
        }
        Ok(first)
    }

    /// Adds a row of a step.
    fn add_row(&mut self, row: fmt::Arguments) -> TableWritten {
        self.n_steps += 1;
        writeln!(self.steps, "    {{{row}}},")
    }

    fn add_step(&mut self, step: &PlanStep) -> TableWritten {
        let guard = step.guard.map_or(0, |at| at + 1);
        let no_size = self.of_size(0);
        match &step.work {
            Work::Kernel { .. } => self.add_kernel(step, guard),
            Work::Copy { from, to, rows } => {
                let first = self.add_addresses([(from, true), (to, true)].into_iter(), &step.name)?;
                let size = rows.map_or(0, |(rows, _)| self.first_size(&[rows]) + 1);
                let size = self.of_size(size);
                let n_bytes = rows.map_or(from.n_bytes, |(_, row)| row);
                self.add_row(format_args!("NULL, NULL, NULL, {first}, 0, {n_bytes}, {size}{guard}"))
            }
            Work::Move { from, to, rows } => {
                let first = self.add_addresses([(from, true), (to, true)].into_iter(), &step.name)?;
                let name = format!("net_rows_{}", self.n_steps);
                let size = self.first_size(&[rows.offsets[0], rows.offsets[1], rows.n_bytes]);
                let [from, to] = rows.pitches;
                writeln!(self.all_rows, "static const int64_t {name}[] = {{{}, {from}, {to}}};", rows.n)?;
                self.add_row(format_args!("NULL, NULL, {name}, {first}, 0, 0, {size}, {guard}"))
            }
            Work::Host { inputs, outputs, run: Host::Call(call) } => {
                let slices = inputs.iter().chain(outputs).map(|slice| (slice, true));
                let first = self.add_addresses(slices, &step.name)?;
                let (operator, name) = (call.operator, format!("net_parameters_{}", self.n_steps));
                if !self.operators.iter().any(|known| known.name == operator.name) {
                    self.operators.push(operator);
                }
                let operator = operator.name;
                if !call.sizes.is_empty() {
                    let size = self.first_size(&call.sizes);
                    let row = format_args!("NULL, net_host_{operator}, NULL, {first}, 0, 0, {size}, {guard}");
                    return self.add_row(row);
                }
                let numbers: Vec<String> = call.parameters.iter().map(|&x| literal(x)).collect();
                writeln!(self.parameters, "static const int64_t {name}[] = {{{}}};", numbers.join(", "))?;
                self.add_row(format_args!("NULL, net_host_{operator}, {name}, {first}, 0, 0, {no_size}{guard}"))
            }
            Work::While { truth, end } => {
                let first = self.add_addresses(std::iter::once((truth, true)), &step.name)?;
                let end = self.starts[*end];
                self.add_row(format_args!("NULL, NULL, NULL, {first}, NET_LOOP_BEGIN, {end}, {no_size}{guard}"))
            }
            Work::Again { to } => {
                let (first, to) = (self.n_addresses, self.starts[*to]);
                self.add_row(format_args!("NULL, NULL, NULL, {first}, NET_LOOP_END, {to}, {no_size}{guard}"))
            }
            Work::Host { run: Host::Function(_), .. } => unreachable!("such a plan is refused"),
        }
    }

    /// Adds a row for each part of a kernel.
    fn add_kernel(&mut self, step: &PlanStep, guard: usize) -> TableWritten {
        let Work::Kernel { kernel, arguments, kept, parts, all_threads, sizes } = &step.work else { return Ok(()) };
        self.kernels.push(*kernel);
        let size = self.first_size(sizes);
        let size = self.of_size(size);
        let model = self.model;
        let used = |(slice, at)| (slice, model.is_used(*kernel, at, parts));
        let first = self.add_addresses(arguments.iter().chain(kept).zip(0..).map(used), &step.name)?;
        for part in parts {
            let (function, all_threads) = (function(self.name, *kernel, *part), u8::from(*all_threads));
            self.add_row(format_args!("{function}, NULL, NULL, {first}, {all_threads}, 0, {size}{guard}"))?;
        }
        Ok(())
    }

    /// Index of the first of some sizes, which are added unless they are already there in sequence.
    fn first_size(&mut self, sizes: &[RunSize]) -> usize {
        let known = self.open_sizes.windows(sizes.len().max(1)).position(|known| known == sizes);
        known.unwrap_or_else(|| {
            self.open_sizes.extend(sizes);
            self.open_sizes.len() - sizes.len()
        })
    }

    /// Adds the step that makes constants once.
    fn add_maker(&mut self, step: &PlanStep) -> TableWritten {
        let Work::Kernel { kernel, arguments, kept, .. } = &step.work else { return Ok(()) };
        let model = self.model;
        let used = |(slice, at)| (slice, model.is_used(*kernel, at, &[Part::Prepare]));
        let first = self.add_addresses(arguments.iter().chain(kept).zip(0..).map(used), &step.name)?;
        let (function, size) = (function(self.name, *kernel, Part::Prepare), self.of_size(0));
        writeln!(self.makers, "    {{{function}, NULL, NULL, {first}, 1, 0, {size}0}},")
    }

    fn add_guards(&mut self) -> TableWritten {
        for guard in &self.model.plan().guards {
            let first = self.add_addresses(std::iter::once((&guard.truth, true)), "guard")?;
            let outer = guard.outer.map_or(0, |at| at + 1);
            writeln!(self.guards, "    {{{first}, {}, {outer}}},", u8::from(guard.holds))?;
        }
        Ok(())
    }

    /// Formats all tables, in the order in which the template needs them.
    fn text(&self, n_threads: usize) -> Result<String, fmt::Error> {
        let (model, constants) = (self.model, self.constants);
        let mut out = String::new();
        writeln!(out, "/* Bytes of the tensors in between, and of what kernels use for themselves. */")?;
        writeln!(out, "#define NET_TENSOR_BYTES {}u", model.plan().arena_bytes())?;
        writeln!(out, "#define NET_SCRATCH_BYTES {}u\n", model.scratch_bytes(n_threads))?;
        out += &data(constants.n_bytes)?;
        self.declarations(&mut out)?;
        out += &host_operators(&self.operators, &self.parameters);
        out += &self.all_rows;
        self.address_tables(&mut out)?;
        if let Some(dim) = &model.plan().dim {
            self.size_tables(dim, &mut out)?;
        }
        if model.plan().appends > 0 {
            out += &states(model)?;
        }
        let start = |step: usize| self.starts.get(step).copied().unwrap_or(self.n_steps);
        out += &pieces(model.plan(), &start)?;
        out += &members(model.plan(), &start)?;
        self.step_tables(&mut out)?;
        Ok(out)
    }

    /// Writes the declarations of the kernels' functions.
    fn declarations(&self, out: &mut String) -> TableWritten {
        let sizes = if self.model.plan().dim.is_some() { ", const int64_t *sizes" } else { "" };
        for kernel in &self.kernels {
            writeln!(out, "int {}_supported(void);", kernel_prefix(self.name, *kernel))?;
            for (part, _) in Part::ALL {
                let function = function(self.name, *kernel, part);
                writeln!(
                    out,
                    "int {function}(void *const *buffers, void *scratch, const net_runtime *runtime{sizes});"
                )?;
            }
        }
        // All kernels are for the same CPU.
        let supported = |kernel: &usize| format!("{}_supported()", kernel_prefix(self.name, *kernel));
        let supported = self.kernels.first().map_or("1".to_owned(), supported);
        writeln!(out, "static int net_supported(void) {{ return {supported}; }}\n")
    }

    fn address_tables(&self, out: &mut String) -> TableWritten {
        writeln!(out, "#define NET_ADDRESSES {}u", self.n_addresses)?;
        writeln!(out, "static const net_address net_addresses[NET_ADDRESSES + 1] = {{")?;
        writeln!(out, "{}    {{NET_UNUSED, 0, 0}}\n}};\n", self.addresses)?;
        let n_passed = self.passed.len();
        writeln!(out, "/* The addresses that are different in each run. */\n#define NET_PASSED {n_passed}u")?;
        let passed: Vec<&str> = self.passed.iter().map(String::as_str).chain(["0"]).collect();
        writeln!(out, "static const uint32_t net_passed[NET_PASSED + 1] = {{{}}};\n", passed.join(", "))?;
        if self.model.plan().rows.is_some() {
            let items: Vec<&str> = self.items.iter().map(String::as_str).chain(["0"]).collect();
            writeln!(out, "/* The items whose rows these are of. */")?;
            writeln!(out, "static const uint32_t net_item_of_passed[NET_PASSED + 1] = {{{}}};", items.join(", "))?;
            for (what, tensors) in ["input", "output"].into_iter().zip(crate::tensors(self.model.plan())) {
                let all: String = tensors.iter().map(|tensor| format!("{}, ", tensor.n_outer())).collect();
                writeln!(out, "static const uint32_t net_{what}_outer[] = {{{all}1}};")?;
            }
            writeln!(out)?;
        }
        if crate::has_parts(self.model.plan()) {
            let starts: Vec<&str> = self.part_starts.iter().map(String::as_str).chain(["0"]).collect();
            writeln!(out, "/* The sizes that these begin behind, counted from 1. */")?;
            writeln!(out, "static const uint32_t net_start_of_passed[NET_PASSED + 1] = {{{}}};\n", starts.join(", "))?;
        }
        writeln!(out, "/* Conditions of steps, numbered from 1 on. */")?;
        writeln!(out, "static const net_guard net_guards[] = {{\n{}    {{0, 0, 0}}\n}};\n", self.guards)
    }

    /// Writes the open dimension, and the sizes that depend on it.
    fn size_tables(&self, dim: &OpenDimension, out: &mut String) -> TableWritten {
        if self.model.plan().members.is_none() {
            writeln!(out, "static const net_dimension net_the_dimension = {};", dimension(dim))?;
        }
        let second = self.model.plan().second.as_ref();
        if let Some(second) = second {
            writeln!(out, "static const net_dimension net_second_dimension = {};", dimension(second))?;
        }
        writeln!(out, "#define NET_SIZES {}u", self.open_sizes.len())?;
        let [inputs, outputs] = crate::tensors(self.model.plan());
        let of =
            |tensors: Vec<PlanTensor>| tensors.into_iter().map(|tensor| tensor.open.map(|(_, size)| size)).collect();
        let mut tables: Vec<(&str, Vec<Option<RunSize>>)> =
            vec![("net_sizes", self.open_sizes.iter().copied().map(Some).collect())];
        if self.model.plan().members.is_none() {
            tables.extend([("net_input_sizes", of(inputs)), ("net_output_sizes", of(outputs))]);
        }
        for (table, sizes) in tables {
            writeln!(out, "static const net_size {table}[] = {{")?;
            for size in sizes {
                let RunSize { dim, factor, term, divisor, multiple } = size.unwrap_or(RunSize::constant(0));
                let numbers = [factor, term, divisor, multiple].map(literal);
                let of_dim = second.map_or(String::new(), |_| format!(", {dim}"));
                writeln!(out, "    {{{}{of_dim}}},", numbers.join(", "))?;
            }
            let of_dim = second.map_or("", |_| ", 0");
            writeln!(out, "    {{0, 0, 1, 1{of_dim}}}\n}};")?;
        }
        writeln!(out)?;
        self.item_tables(out)
    }

    /// Writes the number of items of a run, and which inputs and outputs have items.
    fn item_tables(&self, out: &mut String) -> TableWritten {
        let Some(items) = &self.model.plan().items else { return Ok(()) };
        writeln!(out, "static const net_dimension net_of_items = {};", dimension(items))?;
        for (what, tensors) in ["input", "output"].into_iter().zip(crate::tensors(self.model.plan())) {
            let all: String = tensors.iter().map(|tensor| format!("{}, ", u8::from(tensor.in_items))).collect();
            writeln!(out, "static const uint8_t net_{what}_items[] = {{{all}0}};")?;
        }
        writeln!(out)
    }

    fn step_tables(&self, out: &mut String) -> TableWritten {
        let none = format!("NULL, NULL, NULL, 0, 0, 0, {}0", self.of_size(0));
        let constants = self.constants;
        writeln!(out, "#define NET_STEPS {}u", self.n_steps)?;
        writeln!(out, "static const net_step net_steps[NET_STEPS + 1] = {{\n{}    {{{none}}}\n}};\n", self.steps)?;
        writeln!(out, "/* Bytes of what the first context makes of constants, and the steps that do so. */")?;
        writeln!(out, "#define NET_MADE_BYTES ((size_t){}u)", constants.made_bytes)?;
        writeln!(out, "/* The first of these bytes, which runs read. */")?;
        writeln!(out, "#define NET_KEPT_BYTES ((size_t){}u)", constants.kept_bytes)?;
        writeln!(out, "static const net_widened net_all_widened[] = {{")?;
        for Widened { from, to, n, form } in &constants.widened {
            let (form, n_scales, n_each) = match form {
                NarrowForm::F16 => ("NET_F16", 0, 0),
                NarrowForm::Bf16 => ("NET_BF16", 0, 0),
                NarrowForm::Levels { n_scales, n_each } => ("NET_LEVELS", *n_scales, *n_each),
            };
            writeln!(out, "    {{{from}, {to}, {n}, {n_scales}, {n_each}, {form}}},")?;
        }
        writeln!(out, "    {{0, 0, 0, 0, 0, NET_F16}}\n}};\n")?;
        writeln!(out, "static const net_step net_makers[] = {{\n{}    {{{none}}}\n}};", self.makers)
    }
}

/// Text of the host operators that a library calls, and the parameters of the calls.
fn host_operators(operators: &[HostOperator], parameters: &str) -> String {
    if operators.is_empty() {
        return String::new();
    }
    let sources = operators.iter().map(|operator| operator.source);
    let parts = ["#include <math.h>\n\n#define NET_HOST static", HOST_HEADER].into_iter().chain(sources);
    let parts: Vec<&str> = parts.chain([parameters]).map(str::trim_end).collect();
    parts.join("\n\n") + "\n\n"
}

/// Tables of the pieces of a run; `step` maps a step of the plan to the first of the library's steps made
/// from it.
fn pieces(plan: &Plan, step: &dyn Fn(usize) -> usize) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    if let Some(rows) = &plan.rows {
        writeln!(out, "static const net_dimension net_of_rows = {};", dimension(rows))?;
    }
    if plan.pieces.is_empty() {
        return Ok(out);
    }
    writeln!(out, "static const net_piece net_pieces[] = {{")?;
    for Piece { items, n, steps, .. } in &plan.pieces {
        let [items, n] = [*items, *n].map(literal);
        writeln!(out, "    {{{items}, {n}, {}, {}}},", step(steps.start), step(steps.end))?;
    }
    writeln!(out, "    {{0, 0, 0, 0}}\n}};\n")?;
    Ok(out)
}

/// Tables of the members, one of which is executed by a run; `step` as for [`pieces`].
fn members(plan: &Plan, step: &dyn Fn(usize) -> usize) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let Some(all @ Members { dims, each }) = &plan.members else { return Ok(out) };
    assert!(all.are_whole(), "invariant: a library takes each combination of sizes");
    let list = |numbers: &mut dyn Iterator<Item = i64>| numbers.map(literal).collect::<Vec<_>>().join(", ");
    writeln!(out, "#define NET_DIMENSIONS {}u", dims.len())?;
    if let Some(opened) = dims.iter().position(|dim| Some(dim) == plan.dim.as_ref()) {
        writeln!(out, "/* The dimension that steps are for any size of. */\n#define NET_OPENED {opened}u")?;
    }
    writeln!(out, "static const net_dimension net_all_dimensions[NET_DIMENSIONS] = {{")?;
    for dim in dims {
        writeln!(out, "    {},", dimension(dim))?;
    }
    writeln!(out, "}};\n/* Steps for one size of each dimension. */\ntypedef struct net_member {{")?;
    writeln!(out, "    int64_t sizes[NET_DIMENSIONS];\n    size_t first, end;\n}} net_member;\n")?;
    writeln!(out, "#define NET_MEMBERS {}u\nstatic const net_member net_members[NET_MEMBERS] = {{", each.len())?;
    for Member { sizes, steps, .. } in each {
        let sizes = list(&mut sizes.iter().copied());
        writeln!(out, "    {{{{{sizes}}}, {}, {}}},", step(steps.start), step(steps.end))?;
    }
    let shape = |port: &usize| plan.tensors[*port].shape.iter().map(|n| *n as i64);
    let n = each[0].ports.iter().flat_map(shape).count();
    writeln!(out, "}};\n/* Shapes of inputs and outputs, one behind the other. */")?;
    writeln!(out, "static const int64_t net_member_shapes[NET_MEMBERS][{}] = {{", n + 1)?;
    for Member { ports, .. } in each {
        writeln!(out, "    {{{}}},", list(&mut ports.iter().flat_map(shape).chain([0])))?;
    }
    writeln!(out, "}};\n")?;
    Ok(out)
}

/// Formats the name and the sizes of a dimension.
fn dimension(dim: &OpenDimension) -> String {
    let OpenDimension { name, least, most, step } = dim;
    format!("{{{}, {}}}", quoted(name), [least, most, step].map(|n| literal(*n)).join(", "))
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
