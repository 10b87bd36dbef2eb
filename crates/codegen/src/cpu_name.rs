//! LLVM's names of x86 CPUs, determined by CPUID, so that builds with and without LLVM write the same
//! records.

use std::arch::x86_64::__cpuid;

/// LLVM's name and feature string of this CPU; `None` for an unknown one.
pub fn host_cpu() -> Option<(String, String)> {
    let vendor = __cpuid(0);
    let vendor = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat();
    let signature = __cpuid(1).eax;
    let (mut family, mut model) = (signature >> 8 & 0xf, signature >> 4 & 0xf);
    if matches!(family, 6 | 15) {
        model |= signature >> 12 & 0xf0;
    }
    if family == 15 {
        family += signature >> 20 & 0xff;
    }
    let server = match (is_x86_feature_detected!("avx512bf16"), is_x86_feature_detected!("avx512vnni")) {
        (true, _) => "cooperlake",
        (false, true) => "cascadelake",
        (false, false) => "skylake-avx512",
    };
    let name = match &vendor[..] {
        b"GenuineIntel" if family == 6 => intel(model, server)?,
        b"AuthenticAMD" => amd(family, model)?,
        _ => return None,
    };
    let features = [
        (is_x86_feature_detected!("avx2"), "avx2"),
        (is_x86_feature_detected!("fma"), "fma"),
        (is_x86_feature_detected!("f16c"), "f16c"),
        (is_x86_feature_detected!("avx512f"), "avx512f"),
        (is_x86_feature_detected!("avx512bw"), "avx512bw"),
        (is_x86_feature_detected!("avx512vl"), "avx512vl"),
        (is_x86_feature_detected!("avx512vnni"), "avx512vnni"),
        (is_x86_feature_detected!("avx512bf16"), "avx512bf16"),
        (is_x86_feature_detected!("avxvnni"), "avxvnni"),
        (is_x86_feature_detected!("avxvnniint8"), "avxvnniint8"),
    ];
    let sign = |has: bool| if has { '+' } else { '-' };
    // Features that kernels depend on.
    let features: Vec<String> = features.iter().map(|(has, name)| format!("{}{name}", sign(*has))).collect();
    Some((name.to_owned(), features.join(",")))
}

/// Names of Intel CPUs of family 6; `server` is the name for model 85, which three CPUs share.
///
/// # Source
/// The list of models in LLVM 22's `TargetParser/Host.cpp`, from AVX2 on.
fn intel(model: u32, server: &'static str) -> Option<&'static str> {
    Some(match model {
        0x3c | 0x3f | 0x45 | 0x46 => "haswell",
        0x3d | 0x47 | 0x4f | 0x56 => "broadwell",
        0x4e | 0x5e | 0x8e | 0x9e | 0xa5 | 0xa6 => "skylake",
        0xa7 => "rocketlake",
        0x55 => server,
        0x66 => "cannonlake",
        0x6a | 0x6c => "icelake-server",
        0x7d | 0x7e => "icelake-client",
        0x8c | 0x8d => "tigerlake",
        0x8f => "sapphirerapids",
        0xcf => "emeraldrapids",
        0xad => "graniterapids",
        0xae => "graniterapids-d",
        0x97 | 0x9a => "alderlake",
        0xb7 | 0xba | 0xbf => "raptorlake",
        0xaa | 0xac => "meteorlake",
        0xaf => "sierraforest",
        0xbd => "lunarlake",
        _ => return None,
    })
}

/// Names of AMD CPUs, from Zen on.
///
/// # Source
/// See [`intel`].
fn amd(family: u32, model: u32) -> Option<&'static str> {
    Some(match (family, model) {
        (0x17, 0x30..=0x3f | 0x47 | 0x60..=0x7f | 0x84..=0x87 | 0x90..=0xaf) => "znver2",
        (0x17, _) => "znver1",
        (0x19, 0x10..=0x1f | 0x60..=0x7f | 0xa0..=0xaf) => "znver4",
        (0x19, _) => "znver3",
        (0x1a, 0x00..=0x77) => "znver5",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_llvms_names() {
        assert_eq!([amd(0x17, 0x01), amd(0x17, 0x31)], [Some("znver1"), Some("znver2")]);
        assert_eq!(
            [amd(0x19, 0x01), amd(0x19, 0x11), amd(0x19, 0x61)],
            [Some("znver3"), Some("znver4"), Some("znver4")]
        );
        assert_eq!([amd(0x1a, 0x02), amd(0x15, 0x02)], [Some("znver5"), None]);
        assert_eq!(intel(0x55, "cascadelake"), Some("cascadelake"));
        assert_eq!(
            [intel(0x8f, ""), intel(0x3f, ""), intel(0x01, "")],
            [Some("sapphirerapids"), Some("haswell"), None]
        );
    }

    #[cfg(feature = "llvm")]
    #[test]
    fn this_machine_has_llvms_name_and_features() {
        let Some((name, features)) = host_cpu() else {
            println!("skipped: this CPU has no name here");
            return;
        };
        let (meant, all) = crate::llvm::host_cpu().expect("this build has LLVM");
        assert_eq!(name, meant);
        let all: Vec<&str> = all.split(',').collect();
        features.split(',').for_each(|feature| assert!(all.contains(&feature), "LLVM does not say {feature}"));
    }
}
