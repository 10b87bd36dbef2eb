//! Numbers of things, each kind a type of its own, so that none is taken for another.

/// Declares a kind of number.
macro_rules! number {
    ($(#[$about:meta])* $name:ident) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);

        impl $name {
            /// The thing at a place.
            pub const fn new(at: usize) -> $name {
                $name(at as u32)
            }

            /// Index of the thing.
            pub const fn at(self) -> usize {
                self.0 as usize
            }
        }
    };
}

pub(crate) use number;
