//! CPU features that exported code requires, and the check for them.
//!
//! Such code is compiled for the family's baseline CPU and the features listed here, so that the features it
//! uses and those it checks come from the same list.

use std::fmt::Write;

use tilewright_ir::target::{Arch, Target};

/// Output register of CPUID.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

impl Register {
    fn name(self) -> &'static str {
        match self {
            Register::Eax => "eax",
            Register::Ebx => "ebx",
            Register::Ecx => "ecx",
            Register::Edx => "edx",
        }
    }
}

/// Extension of the x86-64 instruction set.
struct Feature {
    /// LLVM's name.
    name: &'static str,
    /// First level of x86-64 (`x86-64-v2` and so on) with the feature; `None` if no level has it.
    level: Option<u32>,
    /// CPUID bit of the feature: leaf, register, bit. [`LEAF_7_1`] is the second part of leaf 7.
    bit: (u32, Register, u32),
    /// Bits of XCR0 with which the operating system reports that it saves the registers.
    state: u32,
}

const AVX_STATE: u32 = 0x6;
const AVX512_STATE: u32 = 0xe6;
/// CPUID bit that reports that XCR0 can be read: leaf 1, ECX.
const OSXSAVE: u32 = 27;
/// Leaf 7 with 1 in ECX.
const LEAF_7_1: u32 = 0x1_0007;

const fn feature(
    name: &'static str,
    level: Option<u32>,
    leaf: u32,
    register: Register,
    bit: u32,
    state: u32,
) -> Feature {
    Feature { name, level, bit: (leaf, register, bit), state }
}

/// Features that LLVM uses in kernels. Without one of them, the code might differ from the measured code.
const FEATURES: [Feature; 30] = {
    use Register::{Eax, Ebx, Ecx, Edx};
    [
        feature("sse3", Some(2), 1, Ecx, 0, 0),
        feature("ssse3", Some(2), 1, Ecx, 9, 0),
        feature("sse4.1", Some(2), 1, Ecx, 19, 0),
        feature("sse4.2", Some(2), 1, Ecx, 20, 0),
        feature("popcnt", Some(2), 1, Ecx, 23, 0),
        feature("movbe", Some(3), 1, Ecx, 22, 0),
        feature("fma", Some(3), 1, Ecx, 12, AVX_STATE),
        feature("avx", Some(3), 1, Ecx, 28, AVX_STATE),
        feature("f16c", Some(3), 1, Ecx, 29, AVX_STATE),
        feature("bmi", Some(3), 7, Ebx, 3, 0),
        feature("avx2", Some(3), 7, Ebx, 5, AVX_STATE),
        feature("bmi2", Some(3), 7, Ebx, 8, 0),
        feature("lzcnt", Some(3), 0x8000_0001, Ecx, 5, 0),
        feature("sse4a", None, 0x8000_0001, Ecx, 6, 0),
        feature("prfchw", None, 0x8000_0001, Ecx, 8, 0),
        feature("avx512f", Some(4), 7, Ebx, 16, AVX512_STATE),
        feature("avx512dq", Some(4), 7, Ebx, 17, AVX512_STATE),
        feature("avx512cd", Some(4), 7, Ebx, 28, AVX512_STATE),
        feature("avx512bw", Some(4), 7, Ebx, 30, AVX512_STATE),
        feature("avx512vl", Some(4), 7, Ebx, 31, AVX512_STATE),
        feature("avx512ifma", None, 7, Ebx, 21, AVX512_STATE),
        feature("avx512vbmi", None, 7, Ecx, 1, AVX512_STATE),
        feature("avx512vbmi2", None, 7, Ecx, 6, AVX512_STATE),
        feature("gfni", None, 7, Ecx, 8, 0),
        feature("avx512vnni", None, 7, Ecx, 11, AVX512_STATE),
        feature("avx512bitalg", None, 7, Ecx, 12, AVX512_STATE),
        feature("avx512vpopcntdq", None, 7, Ecx, 14, AVX512_STATE),
        feature("avx512bf16", None, LEAF_7_1, Eax, 5, AVX512_STATE),
        feature("avxvnni", None, LEAF_7_1, Eax, 4, AVX_STATE),
        feature("avxvnniint8", None, LEAF_7_1, Edx, 4, AVX_STATE),
    ]
};

fn features_of(target: &Target) -> impl Iterator<Item = &'static Feature> {
    let level = target.cpu.strip_prefix("x86-64-v").and_then(|level| level.parse().ok()).unwrap_or(1);
    // With both, code uses the AVX-512 instructions, so that it runs without the AVX ones.
    let has_both = target.feature("avx512vnni") == Some(true);
    FEATURES.iter().filter(move |feature| {
        let implied = feature.level.is_some_and(|first| level >= first);
        let is_needed = feature.name != "avxvnni" || !has_both;
        target.arch == Arch::X86_64 && is_needed && target.feature(feature.name).unwrap_or(implied)
    })
}

/// CPU features that code for a target uses beyond the family's baseline, by their LLVM names.
pub fn features(target: &Target) -> Vec<&'static str> {
    features_of(target).map(|feature| feature.name).collect()
}

/// Assembly that sets `eax` to 1 if CPU and operating system support all features, else to 2, and clobbers
/// `ebx`, `ecx` and `edx`. `None` if every CPU of the family has them.
pub fn check(target: &Target) -> Option<String> {
    let state = features_of(target).fold(0, |all, feature| all | feature.state);
    let mut text = String::new();
    let mut ask = |leaf: u32, register: Register, bits: u32| {
        if bits != 0 {
            let register = register.name();
            let part = if leaf == LEAF_7_1 { "movl $$1, %ecx" } else { "xorl %ecx, %ecx" };
            let _ = write!(text, "movl $${}, %eax\n{part}\ncpuid\n", if leaf == LEAF_7_1 { 7 } else { leaf });
            let _ = write!(text, "notl %{register}\ntestl $${bits}, %{register}\njne 1f\n");
        }
    };
    let bits = |leaf, register| {
        let there = features_of(target).filter(|feature| (feature.bit.0, feature.bit.1) == (leaf, register));
        there.fold(0, |all, feature| all | 1 << feature.bit.2)
    };
    let saves = if state == 0 { 0 } else { 1 << OSXSAVE };
    ask(1, Register::Ecx, bits(1, Register::Ecx) | saves);
    let more = [
        (7, Register::Ebx),
        (7, Register::Ecx),
        (LEAF_7_1, Register::Eax),
        (LEAF_7_1, Register::Edx),
        (0x8000_0001, Register::Ecx),
    ];
    more.iter().for_each(|(leaf, register)| ask(*leaf, *register, bits(*leaf, *register)));
    if text.is_empty() {
        return None;
    }
    // Older CPUs return another leaf's bits for a leaf that they lack.
    let has_leaf_7 = if !features_of(target).any(|feature| matches!(feature.bit.0, 7 | LEAF_7_1)) {
        ""
    } else {
        "xorl %eax, %eax\ncpuid\ncmpl $$7, %eax\njb 1f\n"
    };
    // The last check, as XCR0 can be read only if the CPU reports so.
    let has_state = match state {
        0 => String::new(),
        _ => format!("xorl %ecx, %ecx\nxgetbv\nnotl %eax\ntestl $${state}, %eax\njne 1f\n"),
    };
    Some(format!("{has_leaf_7}{text}{has_state}movl $$1, %eax\njmp 2f\n1:\nmovl $$2, %eax\n2:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_target_has_is_asked_for() {
        let named = |name| Target::named(name).unwrap();
        let check = |target: &Target, n_features: usize, words: &[(&str, bool)]| {
            assert_eq!(features(target).len(), n_features, "{target}");
            let text = super::check(target).unwrap_or_default();
            for (word, expected) in words {
                assert_eq!(text.contains(word), *expected, "{target}: {word} in {text}");
            }
        };
        check(&named("x86-64"), 0, &[("cpuid", false)]);
        check(&named("aarch64"), 0, &[("cpuid", false)]);
        check(&named("cortex-a53"), 0, &[("cpuid", false)]);
        check(&named("x86-64-v3"), 13, &[("xgetbv", true), ("testl $$6, %eax", true), ("$$7", true)]);
        check(&named("x86-64-v4"), 18, &[("testl $$230, %eax", true)]);
        let mut host = Target { cpu: "nehalem".into(), ..named("x86-64") };
        host.features = "+sse3,-avx,+popcnt,+rdpid,-sse4.2".into();
        check(&host, 2, &[("cpuid", true), ("xgetbv", false), ("$$8388609, %ecx", true), ("cmpl $$7", false)]);
        host.features = "+avxvnni,+avxvnniint8".into();
        check(
            &host,
            2,
            &[("movl $$1, %ecx", true), ("testl $$16, %eax", true), ("testl $$16, %edx", true), ("$$7", true)],
        );
        host.features = "+avx512bf16".into();
        check(&host, 1, &[("movl $$1, %ecx", true), ("testl $$32, %eax", true), ("testl $$230, %eax", true)]);
        host.features = "+avx512vnni,+avxvnni".into();
        check(&host, 1, &[("movl $$1, %ecx", false), ("testl $$2048, %ecx", true)]);
        let less = Target { features: "-avx512vl".into(), ..named("x86-64-v4") };
        assert!(!features(&less).contains(&"avx512vl") && features(&less).contains(&"avx512f"));
    }
}
