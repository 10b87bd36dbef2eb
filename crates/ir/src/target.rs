//! What schedules and code generation need to know of a machine.

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
}

impl Arch {
    /// Every family with its name.
    pub const ALL: [(Arch, &'static str); 2] = [(Arch::X86_64, "x86_64"), (Arch::Aarch64, "aarch64")];

    /// The name in a target's text.
    pub fn name(self) -> &'static str {
        Arch::ALL.iter().find(|(arch, _)| *arch == self).expect("every family is listed").1
    }
}

/// A CPU to generate code for: the template's source for widths, register counts and cache sizes.
///
/// Its text says all of it and reads back, as
/// `x86_64/znver4/512:registers=32,fma=1,l1d=32768,l2=1048576,l3=33554432,features=+avx512f,-sse4a`; what
/// stands ahead of the colon is its [name](Target::name) in records.
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

/// A target known by name, with cache sizes typical of its kind.
pub struct Generic {
    /// The name.
    pub name: &'static str,
    /// What it stands for, in a few words.
    pub text: &'static str,
    arch: Arch,
    cpu: &'static str,
    vector_bits: u32,
    n_vector_registers: u32,
    has_fma: bool,
    caches_kib: [u64; 3],
}

const X86_64: Generic = Generic {
    name: "x86-64",
    text: "any 64-bit x86: SSE2, 16 registers",
    arch: Arch::X86_64,
    cpu: "x86-64",
    vector_bits: 128,
    n_vector_registers: 16,
    has_fma: false,
    caches_kib: [32, 256, 8192],
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
};

/// All targets known by name.
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
    Generic {
        name: "cortex-a53",
        text: "Arm Cortex-A53: NEON, 32 registers",
        cpu: "cortex-a53",
        caches_kib: [32, 512, 512],
        ..AARCH64
    },
];

impl Generic {
    /// The target itself.
    pub fn target(&self) -> Target {
        let [l1d_bytes, l2_bytes, l3_bytes] = self.caches_kib.map(|kib| kib << 10);
        Target {
            arch: self.arch,
            cpu: self.cpu.to_owned(),
            features: String::new(),
            vector_bits: self.vector_bits,
            n_vector_registers: self.n_vector_registers,
            has_fma: self.has_fma,
            l1d_bytes,
            l2_bytes,
            l3_bytes,
        }
    }
}

impl Target {
    /// A target by its name in [`GENERIC`].
    pub fn named(name: &str) -> Option<Target> {
        GENERIC.iter().find(|generic| generic.name == name).map(Generic::target)
    }

    /// Its name in records: family, CPU and vector width.
    pub fn name(&self) -> String {
        format!("{}/{}/{}", self.arch.name(), self.cpu, self.vector_bits)
    }

    /// Elements of a type in one vector register.
    pub fn lanes(&self, dtype: crate::DType) -> i64 {
        i64::from(self.vector_bits / 8) / dtype.bytes() as i64
    }
}

/// All that is known of it.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Target { n_vector_registers, has_fma, l1d_bytes, l2_bytes, l3_bytes, features, .. } = self;
        write!(f, "{}:registers={n_vector_registers},fma={},", self.name(), u8::from(*has_fma))?;
        write!(f, "l1d={l1d_bytes},l2={l2_bytes},l3={l3_bytes},features={features}")
    }
}

/// A text that is no target's. The fault is the text's.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{given}` is no target: {expected} is missing or malformed")]
pub struct TargetError {
    /// The text.
    pub given: String,
    /// What should be there.
    pub expected: &'static str,
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Target, TargetError> {
        let expected = |expected| TargetError { given: text.chars().take(80).collect(), expected };
        let (name, rest) = text.split_once(':').ok_or(expected("the colon after the name"))?;
        let mut words = name.splitn(3, '/');
        let arch = words.next().and_then(|word| Arch::ALL.iter().find(|(_, name)| *name == word));
        let cpu = words.next().filter(|cpu| !cpu.is_empty()).ok_or(expected("the CPU"))?;
        let vector_bits = words.next().and_then(|bits| bits.parse().ok()).ok_or(expected("the vector width"))?;
        let (numbers, features) = rest.split_once("features=").ok_or(expected("features"))?;
        let number = |key: &'static str| -> Result<u64, TargetError> {
            let pairs = numbers.split(',').filter_map(|pair| pair.split_once('='));
            pairs.filter(|(k, _)| *k == key).find_map(|(_, value)| value.parse().ok()).ok_or(expected(key))
        };
        Ok(Target {
            arch: arch.ok_or(expected("the instruction set family"))?.0,
            cpu: cpu.to_owned(),
            features: features.to_owned(),
            vector_bits,
            n_vector_registers: u32::try_from(number("registers")?).map_err(|_| expected("registers"))?,
            has_fma: number("fma")? == 1,
            l1d_bytes: number("l1d")?,
            l2_bytes: number("l2")?,
            l3_bytes: number("l3")?,
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
    }

    /// Names that databases are full of.
    #[test]
    fn names_in_records_stay() {
        let names: Vec<String> = GENERIC.iter().map(|generic| generic.target().name()).collect();
        let recorded = [
            "x86_64/x86-64/128",
            "x86_64/x86-64-v3/256",
            "x86_64/x86-64-v4/512",
            "aarch64/generic/128",
            "aarch64/cortex-a53/128",
        ];
        assert!(recorded.iter().all(|name| names.iter().any(|own| own == name)), "{names:?}");
        let host = Target { cpu: "znver4".to_owned(), ..Target::named("x86-64-v4").unwrap() };
        assert_eq!(host.name(), "x86_64/znver4/512");
    }
}
