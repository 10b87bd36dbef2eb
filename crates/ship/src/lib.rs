//! Compiled models as libraries for C, Rust and Python.
//!
//! [`Library::new`] makes the language-independent part from a prepared model: C source and header, objects
//! of its kernels, and its constants as an object. [`Library::for_gpu`] does so for a GPU, with kernels as
//! text for a driver. [`Library::c_files`], [`Library::crate_files`] and [`Library::wheel`] return the files
//! of each form; [`Library::object_arguments`] and [`Library::shared_arguments`] are the arguments of the C
//! compiler that is called in between. This crate opens no file and starts no process, and equal models give
//! equal bytes.

mod archive;
mod c;
mod constants;
mod elf;
mod gpu;
mod narrow;
mod python;
mod rust;
mod zip;

use serde_json::{Value as Json, json};
use thiserror::Error;
use tilewright_codegen::{CompileError, Interface, export_hidden, host_arch};
use tilewright_ir::target::Arch;
use tilewright_ir::{Part, Target};
use tilewright_runtime::{GpuModel, Host, Members, Model, OpenDimension, Place, Plan, PlanTensor, RunSize, Work};

use archive::{ArchiveMember, archive};
use constants::Constants;
pub use constants::Weights;

/// Maximum size of constants: beyond it, the index of an archive or of a wheel cannot address what follows.
const MOST_CONSTANT_BYTES: usize = (4 << 30) - (64 << 20);

/// Reason why a model cannot be shipped.
#[derive(Debug, Error)]
pub enum ShipError {
    /// Name that is not a C identifier.
    #[error("`{0}` is not a C identifier (give letters, digits and underscores, no digit first)")]
    Name(String),
    /// Step in a function of this process, which cannot be shipped.
    #[error("step `{0}` has no kernel, so that it runs in this process only")]
    Host(String),
    /// Constants too large for one object; their size in bytes.
    #[error("{0} bytes of constants are too many for a library, which takes {MOST_CONSTANT_BYTES}")]
    TooLarge(usize),
    /// Device that libraries cannot be made for.
    #[error("libraries are for CPUs, for OpenCL and for NVIDIA's GPUs, not for {0}")]
    Device(String),
    /// Kernel refused by the assembler.
    #[error("{0}")]
    Assemble(String),
    /// Kernel that cannot be compiled.
    #[error(transparent)]
    Compile(#[from] CompileError),
}

/// File of a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Path within the folder of the library.
    pub path: String,
    /// Contents of the file.
    pub bytes: Vec<u8>,
}

impl File {
    fn new(path: impl Into<String>, bytes: impl Into<Vec<u8>>) -> File {
        File { path: path.into(), bytes: bytes.into() }
    }
}

/// Library of a model, complete except for the work of a C compiler.
pub struct Library {
    name: String,
    /// Machine that calls the library.
    arch: Arch,
    /// Whether its kernels run on a GPU.
    is_for_gpu: bool,
    n_threads: usize,
    inputs: Vec<PlanTensor>,
    outputs: Vec<PlanTensor>,
    /// Open dimension, whose size each run sets.
    dim: Option<OpenDimension>,
    /// Rows that runs append to states, if runs set their number.
    rows: Option<OpenDimension>,
    /// Length of inputs beside that of states, if runs set it.
    second: Option<OpenDimension>,
    /// Whether steps read parts of inputs where they lie packed.
    has_parts: bool,
    /// Items, if runs set their number.
    items: Option<OpenDimension>,
    /// Whether runs consist of pieces.
    has_pieces: bool,
    /// Sizes that have separate steps.
    sized: Option<Members>,
    /// Shapes of the inputs, followed by those of the outputs, at each of these sizes.
    member_shapes: Vec<Vec<Vec<usize>>>,
    /// Whether steps depend on a size, of the open dimension or within a member.
    has_open_steps: bool,
    /// Tensors that are kept between runs.
    states: Vec<PlanTensor>,
    /// Origin of the library, in lines.
    origin: Vec<String>,
    /// Description of the library, for programs.
    build: Json,
    /// C source, without kernels and constants.
    source: String,
    /// Objects of the kernels, followed by the constants.
    members: Vec<ArchiveMember>,
}

/// Assembler of PTX to machine code, for GPUs of the target's kind; returns `None` if only the driver
/// assembles.
pub type Assemble<'a> = &'a (dyn Fn(&[u8]) -> Result<Option<Vec<u8>>, String> + Sync);

/// Objects of a model's kernels, with the parts that a library calls.
fn kernel_members(
    name: &str,
    model: &Model,
    target: &Target,
    n_threads: usize,
    constants: &Constants,
) -> Result<Vec<ArchiveMember>, ShipError> {
    let mut members = Vec::new();
    for (kernel, code) in model.codes().iter().enumerate() {
        let parts = parts_of(model, constants, kernel);
        if parts.is_empty() {
            continue;
        }
        let mut program = code.program().clone();
        for (part, block) in [
            (Part::Prepare, &mut program.prepare),
            (Part::Body, &mut program.body),
            (Part::Finish, &mut program.finish),
        ] {
            if !parts.contains(&part) {
                block.clear();
            }
        }
        let prefix = c::kernel_prefix(name, kernel);
        let bytes = export_hidden(&program, target, &prefix)?;
        let symbols = Interface::new(&program, target, n_threads, Some(&prefix))?.symbols();
        members.push(ArchiveMember { name: format!("{prefix}.o"), symbols, bytes });
    }
    Ok(members)
}

impl Library {
    /// Makes the library of a model that was compiled for a target. All names that it exports begin with
    /// `name`; it runs on at most `n_threads` threads, and makes the buffers that kernels keep of weights
    /// when `weights` says. `origin` describes its source in a few lines.
    ///
    /// # Errors
    /// If the model has steps of this process, its constants are too large, the name is not an identifier, or
    /// the build lacks LLVM.
    pub fn new(
        name: &str,
        model: &Model,
        target: &Target,
        n_threads: usize,
        weights: Weights,
        origin: &[String],
    ) -> Result<Library, ShipError> {
        check(name, model.plan(), |run| matches!(run, Host::Call(_)))?;
        let mut constants = Constants::new(model, weights);
        let mut members = kernel_members(name, model, target, n_threads, &constants)?;
        members.extend(data_member(name, target.arch, std::mem::take(&mut constants.bytes))?);
        let mut library = Library { n_threads, members, ..Library::of_plan(name, origin, target.arch, model.plan()) };
        library.build = library.description(model, target, &constants)?;
        let ports = [&library.inputs[..], &library.outputs[..]];
        let interface = || c::interface(&library.build, ports, &|port, axis| library.is_open(port, axis));
        let tables = || Ok(interface()? + &c::tables(name, model, &constants, n_threads)?);
        let tables: Result<String, std::fmt::Error> = tables();
        let tables = tables.expect("writing to a string does not fail");
        let template = of_kind(include_str!("../templates/net.c"), library.kind());
        let of_second =
            |of: &str| library.second.as_ref().map_or(String::new(), |_| format!("{of} ? context->second : "));
        let template = template.replace("@SIZE@", &of_second("net_sizes[i].is_of_second"));
        let template = template.replace("@OPEN@", &of_second("open->is_of_second"));
        library.source = c::source(name, origin, &template, &tables, !library.has_dims());
        Ok(library)
    }

    /// Makes the library of a plan, without its description, source and members.
    fn of_plan(name: &str, origin: &[String], arch: Arch, plan: &Plan) -> Library {
        let [inputs, outputs] = tensors(plan);
        let shape = |port: &usize| plan.tensors[*port].shape.clone();
        let each = plan.members.iter().flat_map(|members| &members.each);
        Library {
            name: name.to_owned(),
            arch,
            is_for_gpu: false,
            n_threads: 1,
            inputs,
            outputs,
            dim: plan.dim.clone().filter(|_| plan.members.is_none()),
            rows: plan.rows.clone(),
            second: plan.second.clone(),
            has_parts: has_parts(plan),
            items: plan.items.clone(),
            has_pieces: !plan.pieces.is_empty(),
            sized: plan.members.clone(),
            has_open_steps: plan.dim.is_some(),
            member_shapes: each.map(|member| member.ports.iter().map(shape).collect()).collect(),
            states: plan.states().cloned().collect(),
            origin: origin.to_vec(),
            build: Json::Null,
            source: String::new(),
            members: Vec::new(),
        }
    }

    /// Description of a library for CPUs, for programs.
    fn description(&self, model: &Model, target: &Target, constants: &Constants) -> Result<Json, ShipError> {
        let mut features: Vec<&str> = Vec::new();
        for code in model.codes() {
            features = Interface::new(code.program(), target, self.n_threads, Some(&self.name))?.cpu_features;
        }
        let dims = [self.rows.as_ref().or(self.dim.as_ref()), self.second.as_ref()];
        let mut build = json!({
            "name": self.name,
            "abi": 1,
            "origin": self.origin,
            "target": target.name(),
            "cpu_features": features,
            "threads": self.n_threads,
            "inputs": tensors_json(&self.inputs, dims),
            "outputs": tensors_json(&self.outputs, dims),
            "tensor_bytes": model.plan().arena_bytes(),
            "constant_bytes": constants.n_bytes,
            "made_bytes": constants.made_bytes,
            "steps": model.plan().steps.len(),
        });
        let json =
            |dim: &OpenDimension| json!({"name": dim.name, "least": dim.least, "most": dim.most, "step": dim.step});
        if let Some(dim) = &self.dim {
            let other = self.items.as_ref().filter(|items| *items != dim);
            let all = std::iter::once(dim).chain(&self.rows).chain(&self.second).chain(other);
            build["dims"] = all.map(json).collect();
        }
        if let Some(members) = &self.sized {
            build["dims"] = members.dims.iter().map(json).collect();
            let shapes = members.each.iter().zip(&self.member_shapes).map(|(member, shapes)| {
                let (inputs, outputs) = shapes.split_at(self.inputs.len());
                json!({"sizes": member.sizes, "inputs": inputs, "outputs": outputs})
            });
            build["members"] = shapes.collect();
        }
        if !self.states.is_empty() {
            build["states"] = json!(tensors_json(&self.states, dims));
            build["appends"] = json!(model.plan().appends);
        }
        Ok(build)
    }

    /// Makes the library of a model compiled for a GPU, for machines with such a GPU. It contains the kernels
    /// as text that the driver compiles and, where `assemble` supports it, as machine code.
    ///
    /// # Errors
    /// As for [`Library::new`], and if the device is neither OpenCL's nor NVIDIA's, or refuses a kernel.
    pub fn for_gpu(name: &str, model: &GpuModel, assemble: Assemble, origin: &[String]) -> Result<Library, ShipError> {
        check(name, &model.plan, |_| false)?;
        let arch = host_arch().ok_or_else(|| ShipError::Device("a machine like this one".to_owned()))?;
        let gpu::GpuLibraryParts { build, source, data } = gpu::make(name, model, assemble, origin)?;
        let members = data_member(name, arch, data)?.into_iter().collect();
        Ok(Library { is_for_gpu: true, build, source, members, ..Library::of_plan(name, origin, arch, &model.plan) })
    }

    /// Prefix of its function names.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Instruction set family, or kind of GPU.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Metadata of the build, as JSON.
    pub fn build(&self) -> &Json {
        &self.build
    }

    /// Files for C programs: `NAME.h`, `NAME.c`, `NAME_kernels.a` and `NAME.json`.
    pub fn c_files(&self) -> Vec<File> {
        let name = &self.name;
        let members: Vec<&ArchiveMember> = self.members.iter().collect();
        vec![
            File::new(format!("{name}.h"), c::header(self)),
            File::new(format!("{name}.c"), self.source.as_str()),
            File::new(format!("{name}_kernels.a"), archive(&members)),
            self.build_file(),
        ]
    }

    /// Arguments of a C compiler, in the folder of [`Library::c_files`], to make the object that
    /// [`Library::crate_files`] takes; the file that it makes comes last.
    pub fn object_arguments(&self) -> Vec<String> {
        let name = &self.name;
        let words = format!("-O2 -ffp-contract=off -fPIC -fvisibility=hidden -c {name}.c -o {name}.o");
        words.split(' ').map(str::to_owned).collect()
    }

    /// Version script for the linker of [`Library::shared_arguments`]: the names that the library exports.
    pub fn version_script(&self) -> File {
        let shown: String = self.symbols().iter().map(|symbol| format!(" {symbol};")).collect();
        File::new(format!("{}.map", self.name), format!("{{ global:{shown} local: *; }};\n"))
    }

    /// Arguments of a C compiler, in a folder with [`Library::c_files`] and [`Library::version_script`], for
    /// a shared library that needs glibc 2.17 at most; the file that it makes comes last.
    pub fn shared_arguments(&self) -> Vec<String> {
        let name = &self.name;
        let old = format!("-D{}_OLD_GLIBC", name.to_uppercase());
        let map = format!("-Wl,--version-script={name}.map");
        let soname = format!("-Wl,-soname,lib{name}.so");
        let flags =
            ["-O2", "-ffp-contract=off", "-shared", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", &old];
        // Functions of libm that have newer versions since.
        let wrapped: &[&str] = if self.is_for_gpu { &[] } else { &["expf", "logf", "exp", "log"] };
        let wrapped = wrapped.iter().map(|function| format!("-Wl,--wrap={function}"));
        let files = [format!("{name}.c"), format!("{name}_kernels.a")];
        let link = [
            "-Wl,-z,noexecstack",
            // Its threads execute its code, and its callers may have contexts when they close it.
            "-Wl,-z,nodelete",
            "-Wl,--gc-sections",
            "-Wl,--no-as-needed",
            // An old glibc has threads, and the dynamic loader's functions, in separate libraries.
            if self.is_for_gpu { "-l:libdl.so.2" } else { "-l:libpthread.so.0" },
            "-Wl,--as-needed",
            "-lm",
            "-s",
        ];
        let mut all: Vec<String> = flags.map(str::to_owned).into();
        all.extend(files);
        all.extend([map, soname]);
        all.extend(wrapped);
        all.extend(link.map(str::to_owned));
        all.extend(["-o".to_owned(), format!("lib{name}.so")]);
        all
    }

    /// Files that accompany a shared library: the header and the metadata.
    pub fn shared_files(&self) -> Vec<File> {
        vec![File::new(format!("{}.h", self.name), c::header(self)), self.build_file()]
    }

    /// Files of a Rust crate, with the object that a C compiler made of the source.
    pub fn crate_files(&self, object: Vec<u8>) -> Vec<File> {
        let runtime = ArchiveMember { name: format!("{}.o", self.name), symbols: self.symbols(), bytes: object };
        let members: Vec<&ArchiveMember> = std::iter::once(&runtime).chain(&self.members).collect();
        let archive = File::new(format!("lib{}.a", self.name), archive(&members));
        let mut files = rust::files(self);
        files.extend([archive, self.build_file()]);
        files
    }

    /// Python wheel, with the shared library that a C compiler made.
    pub fn wheel(&self, shared: Vec<u8>) -> File {
        python::wheel(self, shared)
    }

    fn build_file(&self) -> File {
        File::new(format!("{}.json", self.name), format!("{:#}\n", self.build))
    }

    /// Kind of the library, for selecting lines of templates.
    fn kind(&self) -> LibraryKind {
        let (is_open, has_states, has_rows) = (self.has_open_steps, !self.states.is_empty(), self.rows.is_some());
        LibraryKind {
            is_for_gpu: self.is_for_gpu,
            is_open,
            has_states,
            has_rows,
            has_pieces: self.has_pieces,
            has_members: self.sized.is_some(),
            has_second: self.second.is_some(),
            has_parts: self.has_parts,
            items_of: items_of(&self.items, &self.dim),
        }
    }

    /// Index of the second open dimension.
    fn second_at(&self) -> usize {
        1 + usize::from(self.rows.is_some())
    }

    /// Index of the dimension of the items.
    fn items_at(&self) -> usize {
        if self.items == self.dim { 0 } else { self.second_at() + usize::from(self.second.is_some()) }
    }

    /// Whether runs set a size.
    fn has_dims(&self) -> bool {
        self.dim.is_some() || self.sized.is_some()
    }

    /// Whether runs set the size of a dimension of an input or, at later indices, of an output.
    fn is_open(&self, port: usize, axis: usize) -> bool {
        let tensor = self.inputs.iter().chain(&self.outputs).nth(port);
        let is_dim =
            |tensor: &PlanTensor| tensor.open.is_some_and(|(own, _)| own == axis) || tensor.in_items && axis == 0;
        let mut sizes = self.member_shapes.iter().map(|shapes| shapes[port][axis]);
        let first = sizes.next();
        tensor.is_some_and(is_dim) || sizes.any(|size| Some(size) != first)
    }

    /// Functions that the library exports.
    fn symbols(&self) -> Vec<String> {
        let n = if self.is_for_gpu { c::FUNCTIONS.len() } else { c::FUNCTIONS.len() - 1 };
        let of_dims: &[&str] = if self.has_dims() { &c::FUNCTIONS_OF_DIMS } else { &[] };
        let of_states: &[&str] = if self.states.is_empty() { &[] } else { &c::FUNCTIONS_OF_STATES };
        let own = c::FUNCTIONS[..n]
            .iter()
            .chain(of_dims)
            .chain(of_states)
            .map(|function| format!("{}_{function}", self.name));
        // TVM-FFI's tensors have fixed shapes in a model without open dimensions.
        own.chain((!self.has_dims()).then(|| c::ffi_function(&self.name))).collect()
    }
}

/// Parts of a kernel that a library executes.
fn parts_of(model: &Model, constants: &Constants, of: usize) -> Vec<Part> {
    let mut all = Vec::new();
    for (at, step) in model.plan().steps.iter().enumerate() {
        match &step.work {
            Work::Kernel { kernel, parts, .. } if *kernel == of => {
                all.extend(parts);
                all.extend(constants.makers.contains(&at).then_some(Part::Prepare));
            }
            _ => {}
        }
    }
    all
}

/// Checks that a plan can be shipped under a name; `may_run` says which steps other than kernels are allowed.
fn check(name: &str, plan: &Plan, may_run: fn(&Host) -> bool) -> Result<(), ShipError> {
    if !Interface::is_prefix(name) {
        return Err(ShipError::Name(name.to_owned()));
    }
    match plan.steps.iter().find(|step| matches!(&step.work, Work::Host { run, .. } if !may_run(run))) {
        Some(step) => Err(ShipError::Host(step.name.clone())),
        None => Ok(()),
    }
}

/// Object of a library's data; `None` without data.
fn data_member(name: &str, arch: Arch, data: Vec<u8>) -> Result<Option<ArchiveMember>, ShipError> {
    if data.len() > MOST_CONSTANT_BYTES {
        return Err(ShipError::TooLarge(data.len()));
    }
    let symbol = c::constants_name(name);
    let bytes = (!data.is_empty()).then(|| elf::data_object(arch, &symbol, &data));
    Ok(bytes.map(|bytes| ArchiveMember { name: format!("{symbol}.o"), symbols: vec![symbol], bytes }))
}

/// Inputs and outputs of a plan, at the maximum number of items.
fn tensors(plan: &Plan) -> [Vec<PlanTensor>; 2] {
    let tensor = |at: usize| {
        let mut tensor = plan.tensors[at].clone();
        if let (Some(items), true) = (&plan.items, tensor.in_items) {
            tensor.shape[0] = items.most as usize;
        }
        tensor
    };
    let of = |place: fn(usize) -> Place| plan.ports(place).into_iter().map(tensor).collect();
    [of(Place::Input), of(Place::Output)]
}

/// Whether steps read parts of inputs that begin where a run says.
fn has_parts(plan: &Plan) -> bool {
    plan.tensors.iter().any(|tensor| tensor.start.is_some())
}

/// Descriptions of tensors; `dims` are the dimensions of [`tilewright_runtime::Sizes`].
fn tensors_json(tensors: &[PlanTensor], dims: [Option<&OpenDimension>; 2]) -> Vec<Json> {
    let json = |tensor: &PlanTensor| {
        let mut json = json!({
            "name": tensor.name,
            "dtype": tensor.dtype.name(),
            "shape": tensor.shape,
            "bytes": tensor.n_bytes(),
        });
        if tensor.in_items {
            json["items"] = json!(true);
        }
        if let Some((axis, RunSize { dim, factor, term, .. })) = tensor.open {
            let name = dims[dim].map(|dim| &dim.name);
            json["open"] = json!({"axis": axis, "factor": factor, "term": term, "dim": name});
        }
        json
    };
    tensors.iter().map(json).collect()
}

/// Kind of a library; templates have lines for some kinds only.
#[derive(Clone, Copy)]
struct LibraryKind {
    is_for_gpu: bool,
    is_open: bool,
    has_states: bool,
    has_rows: bool,
    has_pieces: bool,
    has_members: bool,
    has_second: bool,
    has_parts: bool,
    items_of: ItemsOf,
}

/// Dimension of the items of runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ItemsOf {
    /// No items.
    Nothing,
    /// Another dimension beside the open one.
    OpenDimension,
    /// Another one beside it.
    Another,
}

fn items_of(items: &Option<OpenDimension>, dim: &Option<OpenDimension>) -> ItemsOf {
    match items {
        None => ItemsOf::Nothing,
        Some(_) if items == dim => ItemsOf::OpenDimension,
        Some(_) => ItemsOf::Another,
    }
}

/// Lines of a template that are for all libraries or for this kind.
fn of_kind(template: &'static str, kind: LibraryKind) -> String {
    let LibraryKind { is_for_gpu, is_open, has_states, has_rows, has_pieces, has_members, .. } = kind;
    let LibraryKind { has_second, has_parts, items_of, .. } = kind;
    let (has_items, is_pair) = (items_of != ItemsOf::Nothing, items_of == ItemsOf::Another);
    let kinds = [
        ("@GPU@", is_for_gpu),
        ("@CPU@", !is_for_gpu),
        ("@DIM@", is_open),
        ("@NODIM@", !is_open),
        ("@RANGED@", is_open && !has_members),
        ("@OPENED@", is_open && has_members),
        ("@DIMS@", is_open || has_members),
        ("@FIXED@", !is_open && !has_members),
        ("@MEMBER@", has_members),
        ("@STATE@", has_states),
        ("@NOSTATE@", !has_states),
        ("@ROWS@", has_rows),
        ("@SIZES@", is_open && !has_members && !has_rows),
        ("@SECOND@", has_second),
        ("@PARTS@", has_parts),
        ("@SECONDROWS@", has_second && has_rows),
        ("@PIECES@", has_pieces),
        ("@BATCHES@", has_pieces && has_items),
        ("@NOPIECES@", !has_pieces && !has_members),
        ("@ITEMS@", has_items),
        ("@APART@", has_items && !has_pieces),
        ("@PAIR@", is_pair),
        ("@SOLE@", items_of == ItemsOf::OpenDimension),
        ("@WHOLE@", !has_pieces && !has_items),
        ("@ALONE@", has_states && !has_rows),
        ("@APPENDS@", has_states && !has_pieces),
        ("@RANGE@", is_open && !has_members && !has_states),
        ("@SIZED@", (is_open || has_members) && !has_states),
    ];
    let own = |line: &'static str| match kinds.iter().find(|(mark, _)| line.starts_with(mark)) {
        None => Some(line),
        Some((mark, is_own)) => is_own.then(|| &line[mark.len()..]),
    };
    template.lines().filter_map(own).flat_map(|line| [line, "\n"]).collect()
}

/// Replaces `net` in a template by the name of a library, and `NET` by the name in capitals.
fn named(template: &str, name: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    let mut before = ' ';
    while let Some(c) = rest.chars().next() {
        let is_start = !before.is_ascii_alphanumeric() && before != '_';
        let found = [("net_", format!("{name}_")), ("NET_", format!("{}_", name.to_uppercase()))];
        let found = found.into_iter().find(|(word, _)| is_start && rest.starts_with(word));
        let (taken, put) = found.map_or((c.len_utf8(), c.to_string()), |(word, put)| (word.len(), put));
        before = rest[..taken].chars().next_back().unwrap_or(c);
        out += &put;
        rest = &rest[taken..];
    }
    out
}

/// Converts a name to an identifier of C and its relatives that differs from the others.
fn identifier(name: &str, others: &[String]) -> String {
    let mut text: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' }).collect();
    if !text.starts_with(|c: char| c.is_ascii_lowercase()) || rust::is_reserved(&text) {
        text.insert_str(0, "x_");
    }
    while others.contains(&text) {
        text.push('_');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_get_names() {
        assert_eq!(
            named("net_run(NET_ABI) __net_x net.h kernel_ \"net_b\"", "my"),
            "my_run(MY_ABI) __net_x net.h kernel_ \"my_b\""
        );
    }

    #[test]
    fn names_become_identifiers() {
        let others = ["x_9".to_owned(), "a".to_owned()];
        for (name, expected) in [("A", "a_"), ("9", "x_9_"), ("in:0/x", "in_0_x"), ("type", "x_type"), ("", "x_")] {
            assert_eq!(identifier(name, &others), expected, "{name}");
        }
    }
}
