//! Loop context features: extents, operation counts, and buffer accesses of each loop (AutoTVM).

use tilewright_learn::{Matrix, TreeRows};

use super::{N_BUFFERS, log_scale};

/// Maximum number of loops in [`LoopContexts::features`]; of a longer chain, the innermost ones are
/// described.
const N_LOOPS: usize = 12;

/// Length, kind, top-down, bottom-up, nest level and three counts of operations.
const N_LOOP_FEATURES: usize = 7 + N_KINDS;
/// Number of loop kinds that a feature distinguishes: see [`LoopContext::kind`].
const N_KINDS: usize = 10;

/// Touch count, reuse ratio and stride.
const N_TOUCH_FEATURES: usize = 3;

/// Number of [`LoopContexts::features`].
pub const N_CONTEXT_FEATURES: usize = N_LOOPS * (N_LOOP_FEATURES + N_BUFFERS * N_TOUCH_FEATURES);

/// Row length of [`LoopContexts::tree`].
pub const N_TREE_FEATURES: usize = N_LOOP_FEATURES + N_BUFFERS * N_TOUCH_FEATURES;

/// Scale that brings logarithms of sizes, up to about 20, to order 1.
const TREE_SCALE: f32 = 0.1;

/// Context of a loop: its position in the nest, its operations, and its buffer accesses.
#[derive(Debug, Clone, PartialEq)]
pub struct LoopContext {
    /// Enclosing loop, as an index into the contexts; `None` for an outermost loop.
    pub parent: Option<usize>,
    /// Number of enclosing loops.
    pub depth: usize,
    /// Largest number of iterations.
    pub extent: f64,
    /// Kind of the loop as a number that the program chooses: serial, parallel, vectorized and so on. A model
    /// does not distinguish numbers from 10 on.
    pub kind: usize,
    /// Product of the extents of the enclosing loops: how often the loop is entered.
    pub top_down: f64,
    /// Product of the extents from this loop inwards, along the deepest path.
    pub bottom_up: f64,
    /// Counts of operations in the loop's code: additions (with subtractions, minima, maxima),
    /// multiplications, and divisions with all other functions.
    pub n_operations: [u32; 3],
    /// Accesses of one execution of the loop, by buffer in order of first occurrence.
    pub touches: Vec<Touch>,
}

/// Accesses of one execution of a loop to a buffer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Touch {
    /// Index of the buffer in the program.
    pub buffer: u32,
    /// Touch count: number of distinct elements accessed.
    pub count: f64,
    /// Reuse ratio: accesses per distinct element.
    pub reuse: f64,
    /// Stride in elements between the accesses of consecutive iterations.
    pub stride: f64,
}

/// Contexts of all loops in the `run` part of a program.
///
/// # Source
/// AutoTVM, appendix A.2.1; nest level and counts of operations are from its public implementation.
#[derive(Debug, Clone, PartialEq)]
pub struct LoopContexts {
    /// Outer loops before inner ones, in the order of the program.
    loops: Vec<LoopContext>,
    /// Longest chain, outermost first.
    chain: Vec<usize>,
    /// Buffers that the statements of the chain's innermost loop touch, in the order of first occurrence.
    innermost: Vec<u32>,
}

impl LoopContexts {
    /// Wraps the contexts of a program's loops.
    ///
    /// # Panics
    /// If a loop precedes its enclosing loop.
    pub fn new(loops: Vec<LoopContext>) -> LoopContexts {
        let is_after_parent = |(at, l): (usize, &LoopContext)| l.parent.is_none_or(|parent| parent < at);
        assert!(loops.iter().enumerate().all(is_after_parent), "invariant: outer loops stand before inner ones");
        let n_iterations = |l: &LoopContext| l.top_down * l.extent;
        let deepest = (0..loops.len()).reduce(|a, b| {
            let longer = |l: &LoopContext| (l.depth, n_iterations(l));
            if longer(&loops[b]) > longer(&loops[a]) { b } else { a }
        });
        let mut chain: Vec<usize> = std::iter::successors(deepest, |&at| loops[at].parent).collect();
        chain.reverse();
        let innermost = deepest.map_or(Vec::new(), |at| loops[at].touches.iter().map(|t| t.buffer).collect());
        LoopContexts { loops, chain, innermost }
    }

    /// All loops, outer ones before inner ones.
    pub fn loops(&self) -> &[LoopContext] {
        &self.loops
    }

    /// Longest chain of nested loops, outermost first; among equally long ones, the one with the most
    /// iterations.
    pub fn chain(&self) -> impl DoubleEndedIterator<Item = &LoopContext> + Clone {
        self.chain.iter().map(|&at| &self.loops[at])
    }

    /// Buffers accessed in the innermost loop of the chain, in order of first occurrence.
    pub fn innermost_buffers(&self) -> &[u32] {
        &self.innermost
    }

    /// Returns the contexts of the longest chain, innermost loop first, on a logarithmic scale. Absent
    /// numbers are NaN.
    ///
    /// [`N_CONTEXT_FEATURES`] numbers: for each loop its length, one-hot kind, top-down and bottom-up
    /// product, nest level and counts of operations, then touch count, reuse ratio and stride for each
    /// innermost buffer.
    pub fn features(&self) -> Vec<f32> {
        let mut out = Vec::with_capacity(N_CONTEXT_FEATURES);
        for l in self.chain().rev().take(N_LOOPS) {
            let touches = self.innermost.iter().map(|&buffer| l.touch(buffer));
            l.write_features(touches, &mut out);
        }
        out.resize(N_CONTEXT_FEATURES, f32::NAN);
        out
    }

    /// Contexts of all loops as a tree, with a row of [`N_TREE_FEATURES`] numbers of order 1 for each loop:
    /// the numbers of [`LoopContexts::features`], with the loop's own first buffers. Missing numbers are 0.
    pub fn tree(&self) -> TreeRows {
        let row = |l: &LoopContext| {
            let mut row = Vec::with_capacity(N_TREE_FEATURES);
            l.write_features(l.touches.iter().map(Some), &mut row);
            row.iter_mut().for_each(|x| *x = if x.is_nan() { 0.0 } else { *x * TREE_SCALE });
            row
        };
        let rows = Matrix::from_rows(N_TREE_FEATURES, self.loops.iter().map(row));
        TreeRows::new(self.loops.iter().map(|l| l.parent).collect(), rows)
    }
}

impl LoopContext {
    /// Length, one-hot kind, products, nest level and counts of operations, then touches of the first few
    /// buffers.
    fn write_features<'a>(&self, touches: impl Iterator<Item = Option<&'a Touch>>, out: &mut Vec<f32>) {
        out.push(log_scale(self.extent));
        out.extend((0..N_KINDS).map(|kind| f32::from(u8::from(kind == self.kind))));
        out.extend([log_scale(self.top_down), log_scale(self.bottom_up), self.depth as f32]);
        out.extend(self.n_operations.map(|n| log_scale(n.into())));
        for touch in touches.chain(std::iter::repeat(None)).take(N_BUFFERS) {
            match touch {
                Some(t) => out.extend([t.count, t.reuse, t.stride].map(log_scale)),
                None => out.extend([f32::NAN; N_TOUCH_FEATURES]),
            }
        }
    }

    /// Accesses of the loop to a buffer, if any.
    pub fn touch(&self, buffer: u32) -> Option<&Touch> {
        self.touches.iter().find(|touch| touch.buffer == buffer)
    }
}
