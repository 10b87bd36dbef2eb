//! Targets, which describe a machine for schedules and code generation.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Instruction set family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// 64-bit x86
    X86_64,
    /// 64-bit Arm
    Aarch64,
    /// GPU, by the form in which its code is loaded.
    Gpu(GpuApi),
}

/// Form in which code is loaded on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GpuApi {
    /// OpenCL C source, for any device with an OpenCL driver.
    OpenCl,
    /// PTX, for NVIDIA GPUs.
    Cuda,
    /// Machine code, for AMD GPUs.
    AmdGpu,
}

impl Arch {
    /// Every family with its name.
    pub const ALL: [(Arch, &'static str); 5] = [
        (Arch::X86_64, "x86_64"),
        (Arch::Aarch64, "aarch64"),
        (Arch::Gpu(GpuApi::OpenCl), "opencl"),
        (Arch::Gpu(GpuApi::Cuda), "cuda"),
        (Arch::Gpu(GpuApi::AmdGpu), "amdgpu"),
    ];

    /// Name in a target's text.
    pub fn name(self) -> &'static str {
        Arch::ALL.iter().find(|(arch, _)| *arch == self).expect("every family is listed").1
    }
}

/// Machine to generate code for, with vector widths, register counts and cache sizes for templates.
///
/// The text form is complete and can be parsed back, for example
/// `x86_64/znver4/512:registers=32,fma=1,l1d=32768,l2=1048576,l3=33554432,features=+avx512f,-sse4a` or
/// `cuda/sm_90a:vector=128,fma=1,l1d=…,l2=…,l3=…,warp=32,threads=1024,…,features=`; the part before the colon
/// is its [name](Target::name) in records.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Instruction set family.
    pub arch: Arch,
    /// Name of the CPU in LLVM, such as `znver5`, `x86-64-v3` or `cortex-a53`; for a GPU, its kind, such as
    /// `sm_90a` or the device name that OpenCL reports.
    pub cpu: String,
    /// LLVM's feature string (`+avx512f,-sse4a`); empty for the features that `cpu` implies.
    pub features: String,
    /// Width in bits of the widest vector registers worth using; on a GPU, the width of a thread's widest
    /// load.
    pub vector_bits: u32,
    /// Number of vector registers; 0 for a GPU.
    pub n_vector_registers: u32,
    /// Whether there is a fused multiply-add instruction.
    pub has_fma: bool,
    /// Level 1 data cache of a core, in bytes.
    pub l1d_bytes: u64,
    /// Level 2 cache of a core, in bytes.
    pub l2_bytes: u64,
    /// Last-level cache, in bytes.
    pub l3_bytes: u64,
    /// Properties of the GPU; `None` for a CPU.
    pub gpu: Option<Gpu>,
}

/// Properties of a GPU for schedules and code generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gpu {
    /// Threads of a warp (wavefront, subgroup).
    pub warp_size: u32,
    /// Maximum number of threads per block.
    pub most_threads: u32,
    /// Maximum number of threads per block along x, y and z.
    pub most_threads_along: [u32; 3],
    /// Maximum number of blocks along x, y and z.
    pub most_blocks_along: [u32; 3],
    /// Shared memory per block without opting in for more, in bytes.
    pub shared_bytes: u64,
    /// Maximum shared memory per block, in bytes.
    pub most_shared_bytes: u64,
    /// Maximum number of 32-bit registers per thread.
    pub registers_per_thread: u32,
    /// Number of 32-bit registers per block.
    pub registers_per_block: u32,
    /// Number of multiprocessors (compute units).
    pub n_units: u32,
    /// Maximum number of resident threads per multiprocessor.
    pub unit_threads: u32,
    /// f32 multiply-adds per cycle of a multiprocessor.
    pub unit_fmas: u32,
    /// TF32 multiply-adds per cycle of a multiprocessor's tensor cores, half of the f16 rate; 0 without
    /// tensor cores.
    pub tensor_fmas: u32,
    /// Whether f64 arithmetic is supported.
    pub has_f64: bool,
    /// Whether f16 arithmetic is supported; every GPU can load and store f16.
    pub has_f16: bool,
    /// Index of the device among those of its kind in the machine.
    pub number: u32,
}

/// Predefined target, with cache sizes typical of its kind.
pub struct Generic {
    /// Name of the target.
    pub name: &'static str,
    /// Description in a few words.
    pub text: &'static str,
    /// Instruction set family.
    pub arch: Arch,
    cpu: &'static str,
    vector_bits: u32,
    n_vector_registers: u32,
    has_fma: bool,
    caches_kib: [u64; 3],
    gpu: Option<Gpu>,
    /// LLVM features in addition to those of every CPU of the family.
    features: &'static str,
    /// Part number of an Arm CPU in `/proc/cpuinfo`.
    pub part: Option<&'static str>,
    core: Core,
}

/// Throughput of a core per cycle, for analytical estimates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Core {
    /// Instructions issued per cycle.
    pub issues: f64,
    /// Multiply-adds of full vectors per cycle.
    pub fmas: f64,
    /// Loads of full vectors per cycle.
    pub loads: f64,
    /// Latency of an accumulating multiply-add, in cycles.
    pub sum_latency: f64,
    /// Whether loads are issued in parallel with multiply-adds.
    pub overlaps: bool,
}

/// Current x86-64 cores.
const X86_CORE: Core = Core { issues: 6.0, fmas: 2.0, loads: 2.0, sum_latency: 4.0, overlaps: true };
/// Cortex-A53 and A55 (LLVM's AArch64SchedA53.td and A55.td, and ncnn's measurements of dual issue): in
/// order, at most two instructions; a 128-bit load delays multiply-adds by two cycles.
const A53_CORE: Core = Core { issues: 2.0, fmas: 1.0, loads: 0.5, sum_latency: 4.0, overlaps: false };
/// Cortex-A57 and A72 (Arm's software optimisation guides UAN 0015B and 0016A): three instructions; a 128-bit
/// multiply-add takes both pipelines, and an accumulator is forwarded after four cycles.
const A72_CORE: Core = Core { issues: 3.0, fmas: 1.0, loads: 1.0, sum_latency: 4.0, overlaps: true };
/// Cortex-A76 and Neoverse N1 (Arm's software optimisation guides PJDOC-466751330-7215 and -9707): four
/// instructions decoded, two vector pipelines and two for loads; an accumulator is forwarded after two
/// cycles.
const A76_CORE: Core = Core { issues: 4.0, fmas: 2.0, loads: 2.0, sum_latency: 2.0, overlaps: true };
/// Neoverse V1 (Arm's software optimisation guide PJDOC-466751330-9685): four 128-bit vector pipelines, two
/// pipelines for vector loads; an accumulator is forwarded after two cycles.
const V1_CORE: Core = Core { issues: 8.0, fmas: 4.0, loads: 2.0, sum_latency: 2.0, overlaps: true };

const X86_64: Generic = Generic {
    name: "x86-64",
    text: "any 64-bit x86: SSE2, 16 registers",
    arch: Arch::X86_64,
    cpu: "x86-64",
    vector_bits: 128,
    n_vector_registers: 16,
    has_fma: false,
    caches_kib: [32, 256, 8192],
    gpu: None,
    features: "",
    part: None,
    core: X86_CORE,
};

const AARCH64: Generic = Generic {
    name: "aarch64",
    text: "any 64-bit Arm: NEON, 32 registers",
    arch: Arch::Aarch64,
    cpu: "generic",
    vector_bits: 128,
    n_vector_registers: 32,
    has_fma: true,
    caches_kib: [32, 512, 4096],
    gpu: None,
    features: "",
    part: None,
    core: A72_CORE,
};

/// Row of an Arm CPU, by its LLVM name.
const fn arm(
    name: &'static str,
    text: &'static str,
    part: &'static str,
    features: &'static str,
    caches_kib: [u64; 3],
    core: Core,
) -> Generic {
    Generic { name, text, cpu: name, part: Some(part), features, caches_kib, core, ..AARCH64 }
}

/// Lower bounds for current OpenCL devices; a driver reports the real numbers.
const SMALL_GPU: Gpu = Gpu {
    warp_size: 32,
    most_threads: 1024,
    most_threads_along: [1024, 1024, 64],
    most_blocks_along: [i32::MAX as u32, 65535, 65535],
    shared_bytes: 48 << 10,
    most_shared_bytes: 48 << 10,
    registers_per_thread: 255,
    registers_per_block: 65536,
    n_units: 16,
    unit_threads: 2048,
    unit_fmas: 128,
    tensor_fmas: 0,
    has_f64: true,
    has_f16: false,
    number: 0,
};

impl Gpu {
    /// Properties common to NVIDIA GPUs of a compute capability, given as ten times its value: 89 for the RTX
    /// 4090.
    ///
    /// # Source
    /// NVIDIA, "CUDA C++ Programming Guide", version 12.9, tables of arithmetic instructions and of compute
    /// capabilities; tensor cores from the architecture whitepapers, without sparsity; GeForce GPUs have the
    /// numbers of the corresponding professional GPUs.
    pub const fn of_capability(capability: u32) -> Gpu {
        let unit_threads = match capability {
            75 => 1024,
            86..=89 | 120.. => 1536,
            _ => 2048,
        };
        let unit_fmas = if matches!(capability, 60 | 70..=80) { 64 } else { 128 };
        let tensor_fmas = match capability {
            ..70 => 0,
            70..80 | 81..90 | 120.. => 256,
            80 => 512,
            // Single warps (`mma.sync`) reach some 62 % of the throughput of warpgroups.
            90..120 => 640,
        };
        let has_f16 = capability >= 60 && capability != 61;
        Gpu { unit_threads, unit_fmas, tensor_fmas, has_f16, ..SMALL_GPU }
    }
}

const OPENCL: Generic = Generic {
    name: "opencl",
    text: "any OpenCL device: 48 KiB shared, 1024 threads a block",
    arch: Arch::Gpu(GpuApi::OpenCl),
    cpu: "generic",
    vector_bits: 128,
    n_vector_registers: 0,
    has_fma: true,
    caches_kib: [16, 1024, 1024],
    gpu: Some(SMALL_GPU),
    features: "",
    part: None,
    core: X86_CORE,
};

/// Row of an NVIDIA GPU by its compute capability; `numbers` are the last-level cache and the shared memory
/// of a block, both in KiB, and the number of multiprocessors.
const fn cuda(name: &'static str, text: &'static str, capability: u32, numbers: [u64; 3]) -> Generic {
    let [l2_kib, shared_kib, n_units] = numbers;
    let gpu = Gpu { most_shared_bytes: shared_kib << 10, n_units: n_units as u32, ..Gpu::of_capability(capability) };
    let arch = Arch::Gpu(GpuApi::Cuda);
    Generic { name, text, arch, cpu: name, caches_kib: [shared_kib, l2_kib, l2_kib], gpu: Some(gpu), ..OPENCL }
}

const fn amdgpu(name: &'static str, text: &'static str, l2_kib: u64, n_units: u32, has_matrices: bool) -> Generic {
    let gpu = Gpu {
        warp_size: 64,
        shared_bytes: 64 << 10,
        most_shared_bytes: 64 << 10,
        registers_per_thread: 256,
        n_units,
        unit_fmas: 64,
        tensor_fmas: if has_matrices { 128 } else { 0 },
        has_f16: true,
        ..SMALL_GPU
    };
    let arch = Arch::Gpu(GpuApi::AmdGpu);
    Generic { name, text, arch, cpu: name, caches_kib: [16, l2_kib, l2_kib], gpu: Some(gpu), ..OPENCL }
}

/// CPUs with dot products of 8-bit integers, by their LLVM names.
///
/// # Source
/// LLVM 22's `X86.td`: features `avx512vnni` and `avxvnni`.
const CPUS_WITH_DOT4: &[&str] = &[
    "cascadelake",
    "cooperlake",
    "icelake-client",
    "icelake-server",
    "rocketlake",
    "tigerlake",
    "sapphirerapids",
    "emeraldrapids",
    "graniterapids",
    "graniterapids-d",
    "diamondrapids",
    "alderlake",
    "raptorlake",
    "gracemont",
    "meteorlake",
    "arrowlake",
    "arrowlake-s",
    "lunarlake",
    "pantherlake",
    "sierraforest",
    "grandridge",
    "clearwaterforest",
    "znver4",
    "znver5",
];

/// Table of predefined targets.
pub const GENERIC: &[Generic] = &[
    X86_64,
    Generic {
        name: "x86-64-v3",
        text: "AVX2 and FMA, 16 registers",
        cpu: "x86-64-v3",
        vector_bits: 256,
        has_fma: true,
        caches_kib: [32, 512, 8192],
        ..X86_64
    },
    Generic {
        name: "x86-64-v4",
        text: "AVX-512, 32 registers",
        cpu: "x86-64-v4",
        vector_bits: 512,
        n_vector_registers: 32,
        has_fma: true,
        caches_kib: [32, 1024, 16384],
        ..X86_64
    },
    AARCH64,
    // Caches of the named machine; the last two are shared by its cores.
    arm("cortex-a53", "Arm Cortex-A53: NEON (Raspberry Pi 3)", "0xd03", "+neon", [32, 512, 512], A53_CORE),
    arm("cortex-a55", "Arm Cortex-A55: dot products", "0xd05", "+neon,+fullfp16,+dotprod", [32, 128, 1024], A53_CORE),
    arm("cortex-a57", "Arm Cortex-A57: NEON", "0xd07", "+neon", [32, 2048, 2048], A72_CORE),
    arm("cortex-a72", "Arm Cortex-A72: NEON (Raspberry Pi 4)", "0xd08", "+neon", [32, 1024, 1024], A72_CORE),
    arm(
        "cortex-a76",
        "Arm Cortex-A76: dot products (Raspberry Pi 5)",
        "0xd0b",
        "+neon,+fullfp16,+dotprod",
        [64, 512, 2048],
        A76_CORE,
    ),
    arm(
        "neoverse-n1",
        "Arm Neoverse N1: dot products (AWS Graviton2)",
        "0xd0c",
        "+neon,+fullfp16,+dotprod",
        [64, 1024, 32768],
        A76_CORE,
    ),
    arm(
        "neoverse-v1",
        "Arm Neoverse V1: products of 8-bit matrices (AWS Graviton3)",
        "0xd40",
        "+neon,+fullfp16,+dotprod,+i8mm,+bf16",
        [64, 1024, 32768],
        V1_CORE,
    ),
    OPENCL,
    // The numbers of NVIDIA GPUs have the same source as [`Gpu::of_capability`].
    cuda("sm_52", "NVIDIA GTX 980 and its like", 52, [2048, 48, 16]),
    cuda("sm_61", "NVIDIA GTX 1080 Ti and its like", 61, [2816, 48, 28]),
    cuda("sm_70", "NVIDIA V100", 70, [6144, 96, 80]),
    cuda("sm_75", "NVIDIA T4, RTX 2080 and their like", 75, [4096, 64, 40]),
    cuda("sm_80", "NVIDIA A100", 80, [40960, 163, 108]),
    cuda("sm_86", "NVIDIA RTX 3090 and its like", 86, [6144, 99, 82]),
    cuda("sm_89", "NVIDIA RTX 4090, L4 and their like", 89, [73728, 99, 128]),
    cuda("sm_90a", "NVIDIA H100", 90, [51200, 227, 132]),
    cuda("sm_100", "NVIDIA B200", 100, [129024, 227, 148]),
    cuda("sm_120", "NVIDIA RTX 5090 and its like", 120, [98304, 99, 170]),
    amdgpu("gfx900", "AMD Vega 64", 4096, 64, false),
    amdgpu("gfx906", "AMD Vega 20: Radeon VII, MI50", 4096, 60, false),
    amdgpu("gfx90a", "AMD MI250", 8192, 104, true),
    amdgpu("gfx942", "AMD MI300X", 4096, 304, true),
];

impl Generic {
    /// Target of the row.
    pub fn target(&self) -> Target {
        let [l1d_bytes, l2_bytes, l3_bytes] = self.caches_kib.map(|kib| kib << 10);
        Target {
            arch: self.arch,
            cpu: self.cpu.to_owned(),
            features: self.features.to_owned(),
            vector_bits: self.vector_bits,
            n_vector_registers: self.n_vector_registers,
            has_fma: self.has_fma,
            l1d_bytes,
            l2_bytes,
            l3_bytes,
            gpu: self.gpu,
        }
    }
}

impl Target {
    /// Predefined target by name.
    pub fn named(name: &str) -> Option<Target> {
        GENERIC.iter().find(|generic| generic.name == name).map(Generic::target)
    }

    /// Name in records: family, CPU and vector width, for a GPU without the width. A machine without its
    /// CPU's dot product instructions, such as a virtual machine that hides them, has a distinct name.
    pub fn name(&self) -> String {
        let hides_dot4 = || !self.features.is_empty() && self.widens_bytes() && CPUS_WITH_DOT4.contains(&&*self.cpu);
        match self.arch {
            Arch::X86_64 if hides_dot4() => format!("x86_64/{}-dot4/{}", self.cpu, self.vector_bits),
            Arch::X86_64 | Arch::Aarch64 => format!("{}/{}/{}", self.arch.name(), self.cpu, self.vector_bits),
            Arch::Gpu(_) => format!("{}/{}", self.arch.name(), self.cpu),
        }
    }

    /// Throughput of the core; that of the family's default CPU if this one is unknown.
    pub fn core(&self) -> Core {
        match self.arch {
            Arch::X86_64 | Arch::Gpu(_) => X86_CORE,
            Arch::Aarch64 => GENERIC
                .iter()
                .find(|generic| generic.arch == self.arch && generic.cpu == self.cpu)
                .map_or(AARCH64.core, |generic| generic.core),
        }
    }

    /// Whether this is an NVIDIA GPU with TF32 tensor cores.
    pub fn has_tf32(&self) -> bool {
        self.is_since(80)
    }

    /// Whether this is an NVIDIA GPU with asynchronous copies to shared memory (`cp.async`).
    pub fn has_async_copies(&self) -> bool {
        self.is_since(80)
    }

    /// Whether this is an NVIDIA GPU with warpgroup products (`wgmma`).
    pub fn has_wgmma(&self) -> bool {
        self.arch == Arch::Gpu(GpuApi::Cuda) && self.cpu == "sm_90a"
    }

    /// Whether this is an NVIDIA GPU of this compute capability or a later one.
    fn is_since(&self, least: u32) -> bool {
        let version = self.cpu.strip_prefix("sm_").map(|v| v.trim_end_matches(|c: char| !c.is_ascii_digit()));
        self.arch == Arch::Gpu(GpuApi::Cuda) && version.and_then(|v| v.parse().ok()).is_some_and(|v: u32| v >= least)
    }

    /// Number of 32-bit accumulators to which one instruction adds dot products of four 8-bit integers each
    /// (`vpdpbusd` and variants, `sdot`, `udot`, `usdot`), for operands with the given signedness; 0 without
    /// such an instruction.
    pub fn dot4_lanes(&self, signed: [bool; 2]) -> usize {
        let is_mixed = signed[0] != signed[1];
        let has = |name| self.feature(name) == Some(true);
        match self.arch {
            Arch::X86_64 if is_mixed && has("avx512vnni") && self.vector_bits >= 512 => 16,
            Arch::X86_64 if is_mixed && has("avx512vnni") && has("avx512vl") => 8,
            Arch::X86_64 if is_mixed && has("avxvnni") => 8,
            Arch::X86_64 if has("avxvnniint8") && !is_mixed => 8,
            Arch::Aarch64 if has(if is_mixed { "i8mm" } else { "dotprod" }) => 4,
            Arch::X86_64 | Arch::Aarch64 | Arch::Gpu(_) => 0,
        }
    }

    /// Whether 8-bit integers are best widened to 16 bits and multiplied in pairs (`vpmaddwd`, `vpaddd`), as
    /// on x86-64 without dot products of four. This is up to twice as fast as f32.
    pub fn widens_bytes(&self) -> bool {
        let has_none = || [[false, true], [true, true]].iter().all(|signed| self.dot4_lanes(*signed) == 0);
        self.arch == Arch::X86_64 && has_none()
    }

    /// Whether unsigned bytes and 7-bit weights are best multiplied without widening (`vpmaddubsw`), as sums
    /// of two of their products fit 16 bits.
    pub fn adds_pairs_of_bytes(&self) -> bool {
        self.widens_bytes() && self.vector_bits >= 256
    }

    /// Number of f32 accumulators to which one instruction adds dot products of two bf16 numbers each
    /// (`vdpbf16ps`); 0 without such an instruction.
    pub fn dot2_lanes(&self) -> usize {
        let has = |name| self.feature(name) == Some(true);
        match self.arch {
            Arch::X86_64 if has("avx512bf16") && self.vector_bits >= 512 => 16,
            Arch::X86_64 if has("avx512bf16") && has("avx512vl") => 8,
            Arch::X86_64 | Arch::Aarch64 | Arch::Gpu(_) => 0,
        }
    }

    /// Whether a core multiplies pairs of bf16 numbers faster than f32. AMD cores do so at twice the rate of
    /// f32; Intel cores, which rely on AMX for bf16 products, at half of it.
    pub fn prefers_dot2(&self) -> bool {
        self.dot2_lanes() > 0 && self.cpu.starts_with("znver")
    }

    /// State of a feature in the feature string, by its LLVM name; `None` if the string does not mention it.
    pub fn feature(&self, name: &str) -> Option<bool> {
        let given = self.features.split(',').rev().find(|word| word.get(1..) == Some(name));
        given.map(|word| word.starts_with('+'))
    }

    /// Number of elements of a type per vector register; f16 and bf16 count as f32.
    pub fn lanes(&self, dtype: crate::DType) -> i64 {
        let held = if dtype.is_half() { dtype.arithmetic() } else { dtype };
        i64::from(self.vector_bits / 8) / held.bytes() as i64
    }
}

/// Formats the complete description.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Target { n_vector_registers, has_fma, l1d_bytes, l2_bytes, l3_bytes, features, .. } = self;
        match &self.gpu {
            None => write!(f, "{}:registers={n_vector_registers},fma={},", self.name(), u8::from(*has_fma))?,
            Some(_) => write!(f, "{}:vector={},fma={},", self.name(), self.vector_bits, u8::from(*has_fma))?,
        }
        write!(f, "l1d={l1d_bytes},l2={l2_bytes},l3={l3_bytes},")?;
        if let Some(mut gpu) = self.gpu {
            for (key, value) in gpu.fields() {
                write!(f, "{key}={},", value.get())?;
            }
        }
        write!(f, "features={features}")
    }
}

/// Numeric property of a GPU, in the text of a target.
enum GpuField<'g> {
    Number(&'g mut u32),
    Bytes(&'g mut u64),
    Has(&'g mut bool),
}

impl GpuField<'_> {
    fn get(&self) -> u64 {
        match self {
            GpuField::Number(n) => u64::from(**n),
            GpuField::Bytes(n) => **n,
            GpuField::Has(has) => u64::from(**has),
        }
    }

    /// Sets the number; false if it does not fit.
    fn set(&mut self, value: u64) -> bool {
        match self {
            GpuField::Number(n) => return u32::try_from(value).map(|value| **n = value).is_ok(),
            GpuField::Bytes(n) => **n = value,
            GpuField::Has(has) => **has = value == 1,
        }
        true
    }
}

impl Gpu {
    /// All numbers with their keys in the text of a target.
    fn fields(&mut self) -> [(&'static str, GpuField<'_>); 19] {
        let [threads_x, threads_y, threads_z] = &mut self.most_threads_along;
        let [blocks_x, blocks_y, blocks_z] = &mut self.most_blocks_along;
        [
            ("warp", GpuField::Number(&mut self.warp_size)),
            ("threads", GpuField::Number(&mut self.most_threads)),
            ("threads_x", GpuField::Number(threads_x)),
            ("threads_y", GpuField::Number(threads_y)),
            ("threads_z", GpuField::Number(threads_z)),
            ("blocks_x", GpuField::Number(blocks_x)),
            ("blocks_y", GpuField::Number(blocks_y)),
            ("blocks_z", GpuField::Number(blocks_z)),
            ("shared", GpuField::Bytes(&mut self.shared_bytes)),
            ("most_shared", GpuField::Bytes(&mut self.most_shared_bytes)),
            ("thread_registers", GpuField::Number(&mut self.registers_per_thread)),
            ("block_registers", GpuField::Number(&mut self.registers_per_block)),
            ("units", GpuField::Number(&mut self.n_units)),
            ("unit_threads", GpuField::Number(&mut self.unit_threads)),
            ("unit_fmas", GpuField::Number(&mut self.unit_fmas)),
            ("tensor_fmas", GpuField::Number(&mut self.tensor_fmas)),
            ("f64", GpuField::Has(&mut self.has_f64)),
            ("f16", GpuField::Has(&mut self.has_f16)),
            ("number", GpuField::Number(&mut self.number)),
        ]
    }
}

/// Parse error: a text that is not a target.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{given}` is not a target: {expected} is missing or malformed")]
pub struct TargetError {
    /// Text given.
    pub given: String,
    /// Expected text.
    pub expected: &'static str,
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Target, TargetError> {
        let expected = |expected| TargetError { given: text.chars().take(80).collect(), expected };
        let (name, rest) = text.split_once(':').ok_or(expected("the colon after the name"))?;
        let mut words = name.splitn(3, '/');
        let arch = words.next().and_then(|word| Arch::ALL.iter().find(|(_, name)| *name == word));
        let arch = arch.ok_or(expected("the instruction set family"))?.0;
        let cpu = words.next().filter(|cpu| !cpu.is_empty()).ok_or(expected("the CPU"))?;
        let (numbers, features) = rest.split_once("features=").ok_or(expected("features"))?;
        let number = |key: &'static str| -> Result<u64, TargetError> {
            let pairs = numbers.split(',').filter_map(|pair| pair.split_once('='));
            pairs.filter(|(k, _)| *k == key).find_map(|(_, value)| value.parse().ok()).ok_or(expected(key))
        };
        let small = |key| u32::try_from(number(key)?).map_err(|_| expected(key));
        let (vector_bits, n_vector_registers, gpu) = match arch {
            Arch::X86_64 | Arch::Aarch64 => {
                let bits = words.next().and_then(|bits| bits.parse().ok()).ok_or(expected("the vector width"))?;
                (bits, small("registers")?, None)
            }
            Arch::Gpu(_) => {
                let mut gpu = SMALL_GPU;
                for (key, mut field) in gpu.fields() {
                    if !field.set(number(key)?) {
                        return Err(expected(key));
                    }
                }
                (small("vector")?, 0, Some(gpu))
            }
        };
        Ok(Target {
            arch,
            cpu: cpu.to_owned(),
            features: features.to_owned(),
            vector_bits,
            n_vector_registers,
            has_fma: number("fma")? == 1,
            l1d_bytes: number("l1d")?,
            l2_bytes: number("l2")?,
            l3_bytes: number("l3")?,
            gpu,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_say_all_and_read_back() {
        let features = ["", "+avx512f,-sse4a", "+sve2"];
        for (generic, features) in GENERIC.iter().flat_map(|generic| features.map(|features| (generic, features))) {
            let target = Target { features: features.to_owned(), l2_bytes: 3 << 19, ..generic.target() };
            assert_eq!(target.to_string().parse(), Ok(target.clone()), "{target}");
        }
        for text in ["", "x86_64/znver4/512", "x86_64/znver4/512:registers=32", "vax/znver4/512:", "x86_64//512:"] {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
        let target = Target::named("x86-64-v3").unwrap();
        assert!(target.to_string().replace("l2=", "l4=").parse::<Target>().is_err());
        let gpu = Target::named("sm_90a").unwrap().to_string();
        assert!(gpu.starts_with("cuda/sm_90a:vector=128,fma=1,"), "{gpu}");
        for (from, to) in [("warp=32,", ""), ("threads_z=64", "threads_z=5000000000"), ("vector=", "vectors=")] {
            assert!(gpu.replace(from, to).parse::<Target>().is_err(), "without {from}");
        }
    }

    #[test]
    fn dot_products_are_those_of_the_features() {
        let check = |name: &str, features: &str, expected: [usize; 3]| {
            let own = Target::named(name).unwrap();
            let features = if features.is_empty() { own.features.clone() } else { features.to_owned() };
            let target = Target { features, ..own };
            let signs = [[false, true], [true, true], [false, false]];
            assert_eq!(signs.map(|signed| target.dot4_lanes(signed)), expected, "{target}");
            assert_eq!(target.dot4_lanes([true, false]), expected[0], "{target}");
        };
        check("x86-64", "", [0, 0, 0]);
        check("x86-64-v4", "", [0, 0, 0]);
        check("x86-64-v4", "+avx512vl,+avx512vnni", [16, 0, 0]);
        check("x86-64-v4", "+avx512vnni,-avx512vnni", [0, 0, 0]);
        check("x86-64-v4", "+avx512vnni,+avxvnni,+avxvnniint8", [16, 8, 8]);
        check("x86-64-v3", "+avx512vnni,+avx512vl", [8, 0, 0]);
        check("x86-64-v3", "+avxvnni", [8, 0, 0]);
        check("x86-64-v3", "+avxvnni,+avxvnniint8", [8, 8, 8]);
        check("cortex-a53", "", [0, 0, 0]);
        check("cortex-a76", "", [0, 4, 4]);
        check("neoverse-v1", "", [4, 4, 4]);
        check("sm_90a", "", [0, 0, 0]);
    }

    /// Checks that a machine that hides dot product instructions does not share records with one that has
    /// them.
    #[test]
    fn machines_that_hide_dot_products_have_names_of_their_own() {
        let check = |cpu: &str, features: &str, expected: (bool, &str)| {
            let own = Target::named("x86-64-v4").unwrap();
            let target = Target { cpu: cpu.to_owned(), features: features.to_owned(), ..own };
            assert_eq!((target.widens_bytes(), target.name().as_str()), expected, "{target}");
        };
        check("znver5", "+avx512f,+avx512vnni", (false, "x86_64/znver5/512"));
        check("znver5", "+avx512f,-avx512vnni,-avxvnni", (true, "x86_64/znver5-dot4/512"));
        check("skylake-avx512", "+avx512f,-avx512vnni", (true, "x86_64/skylake-avx512/512"));
        assert!(!Target::named("cortex-a53").unwrap().widens_bytes());
    }

    #[test]
    fn pairs_of_bf16_are_multiplied_where_that_is_faster() {
        let check = |cpu: &str, features: &str, expected: (usize, bool)| {
            let own = Target::named("x86-64-v4").unwrap();
            let target = Target { cpu: cpu.to_owned(), features: features.to_owned(), ..own };
            assert_eq!((target.dot2_lanes(), target.prefers_dot2()), expected, "{target}");
        };
        check("znver5", "+avx512f,+avx512bf16", (16, true));
        check("sapphirerapids", "+avx512bf16", (16, false));
        check("znver5", "+avx512bf16,-avx512bf16", (0, false));
        check("znver3", "", (0, false));
        assert_eq!(Target::named("sm_90a").unwrap().dot2_lanes(), 0);
    }

    /// Checks names that existing databases contain.
    #[test]
    fn names_in_records_stay() {
        let names: Vec<String> = GENERIC.iter().map(|generic| generic.target().name()).collect();
        let recorded = [
            "x86_64/x86-64/128",
            "x86_64/x86-64-v3/256",
            "x86_64/x86-64-v4/512",
            "aarch64/generic/128",
            "aarch64/cortex-a53/128",
            "opencl/generic",
            "cuda/sm_61",
            "cuda/sm_70",
            "cuda/sm_80",
            "cuda/sm_90a",
        ];
        assert!(recorded.iter().all(|name| names.iter().any(|own| own == name)), "{names:?}");
        let host = Target { cpu: "znver4".to_owned(), ..Target::named("x86-64-v4").unwrap() };
        assert_eq!(host.name(), "x86_64/znver4/512");
    }
}
