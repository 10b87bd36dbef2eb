//! Typed indices, with a distinct type for each kind.

/// Declares a typed index.
macro_rules! number {
    ($(#[$about:meta])* $name:ident) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);

        impl $name {
            /// Creates the index of a position.
            pub const fn new(at: usize) -> $name {
                $name(at as u32)
            }

            /// Position of the index.
            pub const fn at(self) -> usize {
                self.0 as usize
            }
        }
    };
}

pub(crate) use number;
