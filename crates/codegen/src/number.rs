//! Typed indices, each kind a type of its own.

/// Declares a typed index.
macro_rules! number {
    ($(#[$about:meta])* $name:ident) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);

        impl $name {
            /// Makes the index of this position.
            pub const fn new(at: usize) -> $name {
                $name(at as u32)
            }

            /// Position that it refers to.
            pub const fn at(self) -> usize {
                self.0 as usize
            }
        }
    };
}

pub(crate) use number;
