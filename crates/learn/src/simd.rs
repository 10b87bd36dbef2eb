//! Vector code for the CPU at hand.

/// Work that compiles to vector code, with the widest vectors of this CPU. What it calls must be inlined.
#[inline(always)]
pub(crate) fn wide<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}
