//! Libraries for GPUs: kernels as text for the driver, and tables of their launches.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;

use serde_json::{Value as Json, json};
use tilewright_codegen::{ARGUMENT_ALIGN, compile_gpu, opencl_c};
use tilewright_ir::Target;
use tilewright_ir::gpu::{Abi, GpuProgram, bulk};
use tilewright_ir::target::{Arch, GpuApi};
use tilewright_runtime::gpu::{GPU_LINE, Home, Launch, Launches, Span};
use tilewright_runtime::{Constant, GpuModel, on_all_cores};

use crate::c::{self, quoted};
use crate::{Assemble, ShipError, tensors, tensors_json};

/// Alignment of the contents of a library's data object, in bytes.
const ALIGN: usize = 64;

/// Contents of a library for a GPU.
pub struct GpuLibraryParts {
    /// Metadata of the build, as JSON.
    pub build: Json,
    /// C source.
    pub source: String,
    /// Constants and machine code, in their memory layout.
    pub data: Vec<u8>,
}

/// Kernels in the form that a driver takes: a text, and machine code if available.
struct DriverCode {
    text: String,
    machine_code: Option<Vec<u8>>,
}

impl DriverCode {
    fn new(program: &GpuProgram, target: &Target, api: GpuApi, assemble: Assemble) -> Result<DriverCode, ShipError> {
        if api == GpuApi::OpenCl {
            return Ok(DriverCode { text: opencl_c(program, target), machine_code: None });
        }
        let ptx = compile_gpu(program, target)?.code;
        let machine_code = assemble(&ptx).map_err(ShipError::Assemble)?;
        Ok(DriverCode { text: String::from_utf8_lossy(&ptx).into_owned(), machine_code })
    }
}

/// Makes the library of a model.
///
/// # Errors
/// If there are no libraries for the device, or a kernel is refused.
pub fn make(name: &str, model: &GpuModel, assemble: Assemble, origin: &[String]) -> Result<GpuLibraryParts, ShipError> {
    let target = &model.target;
    let (api, driver, align) = match target.arch {
        Arch::Gpu(api @ GpuApi::OpenCl) => (api, include_str!("../templates/opencl.c"), GPU_LINE as u64),
        Arch::Gpu(api @ GpuApi::Cuda) => (api, include_str!("../templates/cuda.c"), ARGUMENT_ALIGN),
        Arch::Gpu(GpuApi::AmdGpu) | Arch::X86_64 | Arch::Aarch64 => return Err(ShipError::Device(target.name())),
    };
    let launches = Launches::new(model, align);
    let used: BTreeSet<usize> = all(&launches).map(|launch| launch.program).collect();
    let code =
        |(): &mut (), number: usize| Ok((number, DriverCode::new(launches.program(number), target, api, assemble)?));
    let codes = on_all_cores(used.into_iter().collect(), || (), code);
    let codes: BTreeMap<usize, DriverCode> = codes.into_iter().collect::<Result<_, ShipError>>()?;
    let mut data = Vec::new();
    let tables = GpuTables::new(model, &launches, &codes, &mut data);
    let [inputs, outputs] = tensors(&model.plan);
    let made = model.plan.constants.iter().filter(|constant| matches!(constant, Constant::Prepared(_)));
    let mut forms = vec![if api == GpuApi::OpenCl { "OpenCL C".to_owned() } else { "PTX".to_owned() }];
    forms.extend(codes.values().any(|code| code.machine_code.is_some()).then(|| target.cpu.clone()));
    let build = json!({
        "name": name,
        "abi": 1,
        "origin": origin,
        "target": target.name(),
        "device": target.arch.name(),
        "code": forms,
        "inputs": tensors_json(&inputs, [None; 2]),
        "outputs": tensors_json(&outputs, [None; 2]),
        "tensor_bytes": model.plan.arena_bytes(),
        "constant_bytes": data.len(),
        "made_bytes": made.map(Constant::n_bytes).sum::<usize>(),
        "steps": model.plan.steps.len(),
        "launches": launches.launches.len(),
    });
    let interface = || c::interface(&build, [&inputs, &outputs], &|_, _| false);
    let text = || Ok(interface()? + &c::data(data.len())? + &tables.text(target, align)?);
    let text: Result<String, std::fmt::Error> = text();
    let text = text.expect("writing to a string does not fail");
    let template = include_str!("../templates/gpu.c").replace("@DRIVER@\n", driver);
    Ok(GpuLibraryParts { source: c::source(name, origin, &template, &text, true), build, data })
}

/// All launches, ordered by index.
fn all<'l>(launches: &'l Launches) -> impl Iterator<Item = &'l Launch> + Clone {
    launches.preparations.iter().chain(&launches.launches)
}

/// Tables that the template reads.
struct GpuTables<'l> {
    model: &'l GpuModel,
    launches: &'l Launches<'l>,
    codes: &'l BTreeMap<usize, DriverCode>,
    /// Offsets of machine code in the data.
    machine_code: BTreeMap<usize, usize>,
    /// Memory that belongs to the context, and the offsets of its initial contents in the data.
    memories: BTreeMap<Home, Option<usize>>,
    /// Spans of memory, those of the context's own memory first.
    spans: Vec<Span>,
    /// Kernels, by program and by index in it.
    kernels: BTreeSet<(usize, usize)>,
}

impl<'l> GpuTables<'l> {
    fn new(
        model: &'l GpuModel,
        launches: &'l Launches<'l>,
        codes: &'l BTreeMap<usize, DriverCode>,
        data: &mut Vec<u8>,
    ) -> GpuTables<'l> {
        let mut add = |bytes: &[u8]| {
            data.resize(data.len().next_multiple_of(ALIGN), 0);
            data.extend_from_slice(bytes);
            data.len() - bytes.len()
        };
        let (mut spans, mut passed, mut known) = (Vec::new(), Vec::new(), BTreeSet::new());
        let mut memories = BTreeMap::new();
        let is_own = |home: Home| !matches!(home, Home::Input(_) | Home::Output(_));
        for span in all(launches).flat_map(|launch| &launch.arguments) {
            if known.insert((span.home, span.at, span.n_bytes)) {
                if is_own(span.home) { &mut spans } else { &mut passed }.push(*span);
            }
            if is_own(span.home) && !memories.contains_key(&span.home) {
                let contents = match span.home {
                    Home::Constant(at) => match &model.plan.constants[at] {
                        Constant::Data(bytes) => Some(add(bytes)),
                        Constant::Prepared(_) | Constant::Forgotten(_) => None,
                    },
                    Home::Arena | Home::Scratch | Home::Input(_) | Home::Output(_) => None,
                };
                memories.insert(span.home, contents);
            }
        }
        spans.extend(passed);
        let machine_code =
            codes.iter().filter_map(|(number, code)| Some((*number, add(code.machine_code.as_ref()?)))).collect();
        let kernels = all(launches).map(|launch| (launch.program, launch.kernel)).collect();
        GpuTables { model, launches, codes, machine_code, memories, spans, kernels }
    }

    /// Index of a memory.
    fn memory(&self, home: Home) -> usize {
        let n = self.memories.len();
        match home {
            Home::Input(at) => n + at,
            Home::Output(at) => n + tensors(&self.model.plan)[0].len() + at,
            Home::Arena | Home::Scratch | Home::Constant(_) => self.memories.range(..home).count(),
        }
    }

    fn text(&self, target: &Target, align: u64) -> Result<String, std::fmt::Error> {
        let (launches, mut out) = (self.launches, String::new());
        let place = |offset: Option<usize>| offset.map_or_else(|| "NET_NOTHING".to_owned(), |at| at.to_string());
        writeln!(out, "/* The device that this is for, and what arguments begin at multiples of there. */")?;
        writeln!(out, "#define NET_DEVICE_NAME {}", quoted(&target.cpu))?;
        writeln!(out, "#define NET_ALIGN {align}u\n")?;

        let in_runs: BTreeSet<Home> =
            launches.launches.iter().flat_map(|launch| &launch.arguments).map(|span| span.home).collect();
        writeln!(out, "#define NET_MEMORIES {}u", self.memories.len())?;
        writeln!(out, "static const net_memory net_memories[NET_MEMORIES + 1] = {{")?;
        for (home, contents) in &self.memories {
            let (n_bytes, is_kept) = (launches.memory_bytes(*home), u8::from(in_runs.contains(home)));
            writeln!(out, "    {{{n_bytes}, {}, {is_kept}}},", place(*contents))?;
        }
        writeln!(out, "    {{0, 0, 0}}\n}};\n")?;

        let n_own = self.spans.iter().filter(|span| self.memories.contains_key(&span.home)).count();
        writeln!(out, "/* Those in the context's own memory come first. */\n#define NET_OWN_SPANS {n_own}u")?;
        writeln!(out, "#define NET_SPANS {}u", self.spans.len())?;
        writeln!(out, "static const net_span net_spans[NET_SPANS + 1] = {{")?;
        for span in &self.spans {
            writeln!(out, "    {{{}, {}, {}}},", self.memory(span.home), span.at, span.n_bytes)?;
        }
        writeln!(out, "    {{0, 0, 0}}\n}};\n")?;

        writeln!(out, "#define NET_CODES {}u", self.codes.len())?;
        writeln!(out, "static const net_code net_codes[NET_CODES + 1] = {{")?;
        for (number, code) in self.codes {
            writeln!(out, "    {{")?;
            for line in code.text.lines() {
                writeln!(out, "        {}", quoted(&format!("{line}\n")))?;
            }
            writeln!(out, "        , {}}},", place(self.machine_code.get(number).copied()))?;
        }
        writeln!(out, "    {{NULL, 0}}\n}};\n")?;

        writeln!(out, "#define NET_KERNELS {}u", self.kernels.len())?;
        writeln!(out, "static const net_kernel net_kernels[NET_KERNELS + 1] = {{")?;
        let mut most_shared_bytes = 0;
        for &(number, at) in &self.kernels {
            let program = launches.program(number);
            let kernel = program.kernels().nth(at).expect("invariant: a launch is of a kernel of its program");
            let Abi { block: [x, y, z], shared_bytes, dynamic_shared_bytes: asked_bytes, .. } =
                Abi::of(program, kernel, target);
            most_shared_bytes = most_shared_bytes.max(shared_bytes);
            let code = self.codes.range(..number).count();
            writeln!(out, "    {{{code}, {}, {{{x}, {y}, {z}}}, {asked_bytes}}},", quoted(&kernel.name))?;
        }
        writeln!(out, "    {{0, NULL, {{0, 0, 0}}, 0}}\n}};")?;
        writeln!(out, "#define NET_MOST_SHARED_BYTES {most_shared_bytes}u\n")?;
        self.launches(target, out)
    }

    /// Tables of the launches and their arguments.
    fn launches(&self, target: &Target, mut out: String) -> Result<String, std::fmt::Error> {
        let numbers: HashMap<&Span, usize> = self.spans.iter().zip(0..).collect();
        let (mut arguments, mut maps, mut rows) = (String::new(), String::new(), String::new());
        let (mut n_arguments, mut n_maps, mut most_arguments, mut most_maps) = (0, 0, 0, 0);
        for launch in all(self.launches) {
            let (program, kernel) = (self.launches.program(launch.program), self.launches.kernel_of(launch));
            let abi = Abi::of(program, kernel, target);
            for map in &abi.maps {
                let at = abi.array_of(map);
                let bulk::TensorMapFields { kind, extents, strides, boxes } = map.described(&program.program);
                let (rank, swizzled) = (extents.len(), u8::from(map.swizzled));
                let list = |all: Vec<String>| all.join(", ");
                let [extents, strides] = [extents, strides].map(|all| list(all.iter().map(u64::to_string).collect()));
                let boxes = list(boxes.iter().map(u32::to_string).collect());
                // A list may be empty, which C does not allow.
                let strides = if strides.is_empty() { "0" } else { &strides };
                writeln!(maps, "    {{{at}, {kind}, {rank}, {swizzled}, {{{extents}}}, {{{strides}}}, {{{boxes}}}}},")?;
            }
            let step = &self.model.plan.steps[launch.step].name;
            let spans: Vec<String> = launch.arguments.iter().map(|span| numbers[span].to_string()).collect();
            writeln!(arguments, "    {}, /* {} */", spans.join(", "), step.replace("*/", "* /"))?;
            let (n, [x, y, z]) = (spans.len(), abi.grid);
            let of = self.kernels.range(..(launch.program, launch.kernel)).count();
            let (first_map, n_own, step) = (n_maps, abi.maps.len(), quoted(step));
            writeln!(rows, "    {{{of}, {{{x}, {y}, {z}}}, {n_arguments}, {n}, {first_map}, {n_own}, {step}}},")?;
            most_arguments = most_arguments.max(n + n_own);
            most_maps = most_maps.max(n_own);
            n_arguments += n;
            n_maps += n_own;
        }
        writeln!(out, "static const uint32_t net_arguments[] = {{\n{arguments}    0\n}};\n")?;
        if target.arch == Arch::Gpu(GpuApi::Cuda) {
            writeln!(out, "#define NET_MOST_ARGUMENTS {}u", most_arguments.max(1))?;
            writeln!(out, "#define NET_MOST_MAPS {most_maps}u")?;
            let end = "    {0, 0, 0, 0, {0}, {0}, {0}}\n";
            writeln!(out, "static const net_map net_maps[] = {{\n{maps}{end}}};\n")?;
            let digits = target.cpu.trim_start_matches("sm_").trim_end_matches(|c: char| !c.is_ascii_digit());
            writeln!(out, "/* The devices that machine code is for: ten times the first number and the second. */")?;
            writeln!(out, "#define NET_CAPABILITY {digits}\n")?;
        }
        writeln!(out, "/* What is launched once comes first. */")?;
        writeln!(out, "#define NET_PREPARATIONS {}u", self.launches.preparations.len())?;
        writeln!(out, "#define NET_LAUNCHES {}u", all(self.launches).count())?;
        writeln!(out, "static const net_launch net_launches[NET_LAUNCHES + 1] = {{")?;
        writeln!(out, "{rows}    {{0, {{0, 0, 0}}, 0, 0, 0, 0, NULL}}\n}};")?;
        Ok(out)
    }
}
