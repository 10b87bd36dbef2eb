//! What schedules and code generation need to know of a machine.

use std::fmt;

/// Instruction set family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// 64-bit x86
    X86_64,
    /// 64-bit Arm
    Aarch64,
}

/// A CPU to generate code for: the template's source for widths, register counts and cache sizes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Instruction set family.
    pub arch: Arch,
    /// LLVM's name of the CPU, such as `znver5`, `x86-64-v3` or `cortex-a53`.
    pub cpu: String,
    /// LLVM's feature string (`+avx512f,-sse4a`), empty for what `cpu` implies.
    pub features: String,
    /// Width of the widest vector registers worth using, in bits.
    pub vector_bits: u32,
    /// Number of vector registers.
    pub n_vector_registers: u32,
    /// Whether a fused multiply-add is one instruction.
    pub has_fma: bool,
    /// Level 1 data cache of a core in bytes.
    pub l1d_bytes: u64,
    /// Level 2 cache of a core in bytes.
    pub l2_bytes: u64,
    /// Last-level cache in bytes.
    pub l3_bytes: u64,
}

/// Names accepted by [`Target::named`] with what they stand for.
pub const NAMED: [(&str, &str); 5] = [
    ("x86-64", "any 64-bit x86: SSE2, 16 registers"),
    ("x86-64-v3", "AVX2 and FMA, 16 registers"),
    ("x86-64-v4", "AVX-512, 32 registers"),
    ("aarch64", "any 64-bit Arm: NEON, 32 registers"),
    ("cortex-a53", "Arm Cortex-A53: NEON, 32 registers"),
];

impl Target {
    /// A generic target by name, with cache sizes typical of its kind; see [`NAMED`].
    pub fn named(name: &str) -> Option<Target> {
        let (arch, vector_bits, n_vector_registers, has_fma, caches_kib) = match name {
            "x86-64" => (Arch::X86_64, 128, 16, false, [32, 256, 8192]),
            "x86-64-v3" => (Arch::X86_64, 256, 16, true, [32, 512, 8192]),
            "x86-64-v4" => (Arch::X86_64, 512, 32, true, [32, 1024, 16384]),
            "aarch64" => (Arch::Aarch64, 128, 32, true, [32, 512, 4096]),
            "cortex-a53" => (Arch::Aarch64, 128, 32, true, [32, 512, 512]),
            _ => return None,
        };
        Some(Target {
            arch,
            cpu: if name == "aarch64" { "generic".into() } else { name.into() },
            features: String::new(),
            vector_bits,
            n_vector_registers,
            has_fma,
            l1d_bytes: caches_kib[0] << 10,
            l2_bytes: caches_kib[1] << 10,
            l3_bytes: caches_kib[2] << 10,
        })
    }

    /// Elements of a type in one vector register.
    pub fn lanes(&self, dtype: crate::DType) -> i64 {
        i64::from(self.vector_bits / 8) / dtype.bytes() as i64
    }
}

/// The target's name in records: family, CPU and vector width.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arch = match self.arch {
            Arch::X86_64 => "x86_64",
            Arch::Aarch64 => "aarch64",
        };
        write!(f, "{arch}/{}/{}", self.cpu, self.vector_bits)
    }
}
