//! Vector code for the CPU at hand.

/// Work that compiles to vector code, with the widest vectors of this CPU. What it calls must be inlined.
#[inline(always)]
pub(crate) fn wide<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    #[test]
    fn vectors_are_wide_where_the_cpu_has_such() {
        let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        if !has_avx2 {
            eprintln!("skipped: this CPU has no AVX2");
            return;
        }
        assert!(!matches!(pulp::Arch::new(), pulp::Arch::Scalar), "a feature of pulp is missing");
    }
}
