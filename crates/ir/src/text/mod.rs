//! Text format, in which programs are printed and parsed at every stage.
//!
//! ```text
//! program "matmul:m=8,n=8,k=8"
//! buffer A: f32[8, 8] global input
//! buffer B: f32[8, 8] global input
//! buffer C: f32[8, 8] global output
//! buffer C.r: f32[4, 8] register temporary
//! loops io, i, j, k
//! run {
//!   parallel io in 2 {
//!     alloc C.r
//!     for k in 8 {
//!       unrolled i in 4 {
//!         vectorized j in 8 {
//!           C.r[i, j] += A[4*io + i, k] * B[k, j] first k == 0
//!         }
//!       }
//!     }
//!     for i in min(4, 8 - 4*io) {
//!       for j in 8 {
//!         C[4*io + i, j] = C.r[i, j]
//!       }
//!     }
//!   }
//! }
//! ```
//!
//! The `buffer` lines and the `loops` line list the tables of the program in the order of their ids, so that
//! a parsed program equals the printed one, ids included. An optional `prepare { … }` section comes before
//! `run`, an optional `finish { … }` section after it. White space is insignificant; `#` starts a comment
//! that ends with the line.
//!
//! A program with open sizes has a line for each after the loops: `size m = 32*m.steps + 32 in 16` is a size
//! `m` of 32, 64, …, 512, whose variable `m.steps` is in scope in all of `run`.
//!
//! # Names
//! A letter or `_`, followed by letters, digits, `_` and `.`; see [`is_name`]. No word is reserved.
//!
//! # Statements
//! | text | meaning |
//! |---|---|
//! | `for i in 8 { … }` | a loop; the other kinds are in [`LoopKind::ALL`](crate::LoopKind::ALL) |
//! | `if i < 3 { … } else { … }` | a guard; `else` may be left out |
//! | `alloc T` | starts the life of a temporary |
//! | `C[i, j] = …` | a store |
//! | `C[i, j] += … first k == 0` | an update, also `*=`, `max=`, `min=`; `first never` keeps the old value |
//! | `prefetch A[i, 0] read` | a prefetch, or `write` |
//! | `barrier` | the threads of a GPU block wait for each other |
//!
//! # Indices
//! Sums of products with integers, `x // 3` (division rounded down), `x % 3` (its remainder), `min(a, b)`,
//! `max(a, b)`. Products, divisions and remainders have the same precedence and associate to the left. A
//! divisor is an integer and may be zero or negative, so that invalid programs can be represented. The parser
//! converts indices to the canonical form of [`Index`](crate::Index).
//!
//! # Values
//! Loads, numbers (also `inf`, `nan`), `+ - * /` from left to right with the usual precedence, `min(a, b)`,
//! `max(a, b)`, `pow(a, b)`, the functions of [`UnaryOp::ALL`](crate::expr::UnaryOp::ALL), `index(8*i + j)`
//! for an index as a number, and `select(condition, a, b)`.
//!
//! # Conditions
//! `true`, `a < b` and `a == b` on indices, `less(a, b)` on values, `not(c)`, and `c && d`, which associates
//! to the left; `and(c, d)` expresses other groupings.

mod parse;
mod print;

pub use parse::{MAX_DEPTH, Message, ParseError, parse};
pub(crate) use print::loop_name;
pub use print::{cond_to_string, expr_to_string, index_to_string, stmt_to_string};

/// Whether a text is a valid name of a loop or a buffer.
pub fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'.')
}
