//! Alignment of buffers and arguments.

/// Buffers are aligned to at least this many bytes, but for arguments where a caller says less.
pub const ARGUMENT_ALIGN: u64 = 64;

/// Alignment of the arguments of a kernel. Kept buffers and scratch memory are always aligned to 64 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ArgumentAlign {
    /// 64 bytes, a cache line.
    #[default]
    Lines,
    /// The size of an element, as for a part of a tensor, or for memory of other programs.
    Elements,
}
