//! Alignment of buffers and arguments.

/// Default alignment of buffers in bytes; a caller may require less of arguments.
pub const ARGUMENT_ALIGN: u64 = 64;

/// Alignment of a kernel's arguments. Kept buffers and scratch memory are always aligned to 64 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ArgumentAlign {
    /// 64 bytes, a cache line.
    #[default]
    Lines,
    /// Size of an element, for slices of tensors or memory of other programs.
    Elements,
}
