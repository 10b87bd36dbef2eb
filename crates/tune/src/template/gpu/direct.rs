//! Direct convolutions on GPUs, in tiles of channels, rows and columns.

use super::super::step::{accumulate, bind, compute_at, exact, fuse, inline, reorder, shared, unroll, vectorize};
use super::parts::{BlockThreads, BlockTile, Copied, each_thread, spread};
use tilewright_ir::op::{Window, Workload};
use tilewright_ir::schedule::LayoutAxis::{self, Whole};
use tilewright_ir::{LoopKind, Step};

/// Parameters of a direct convolution's schedule, whose tiles divide all loops evenly.
pub struct Direct {
    /// Tiles of channels, rows and columns of the output.
    pub tiles: [BlockTile; 3],
    /// Extents of the inner reduction loops: input channels, if there is such a loop, filter rows and filter
    /// columns.
    pub inner: [i64; 3],
    /// Whether input and weights are staged in shared memory, for each step of the outer reduction loops.
    pub is_shared: bool,
    /// Maximum number of operations in unrolled code.
    pub most_unrolled: i64,
    /// Whether a thread's columns are vectorized.
    pub lanes: bool,
}

/// Axes of the output that are divided, and the thread axes of their parts.
const AXES: [(&str, u8); 3] = [("k", 2), ("p", 1), ("q", 0)];

/// Number of threads of a block that pads the input in advance.
const PAD_THREADS: i64 = 256;

impl Direct {
    /// Schedule for a convolution without groups, or for a depthwise one with as many output as input
    /// channels.
    pub fn steps(&self, w: &Workload, window: &Window) -> Vec<Step> {
        let has_pad = window.has_pad(w);
        let input = if has_pad { Window::PAD } else { Window::INPUT };
        let mut steps = Vec::new();

        // Blocks of the output.
        for ((axis, _), tile) in AXES.iter().zip(self.tiles) {
            steps.push(exact(&format!("o{axis}"), tile.extent(), &format!("{axis}.b"), &format!("o{axis}.b")));
        }
        steps.push(reorder(&["on", "k.b", "p.b", "q.b", "ok.b", "op.b", "oq.b"]));
        steps.push(compute_at(Window::ACC, "q.b"));

        // Tiles of a block, and steps of the sum.
        for ((axis, _), tile) in AXES.iter().zip(self.tiles) {
            steps.extend(tile.divide(axis, axis));
        }
        let sums: &[(&str, &str, &str)] = &[("c", "c.o", "c.i"), ("r", "r.o", "r.i"), ("s", "s.o", "s.i")];
        let sums = if window.depthwise { &sums[1..] } else { sums };
        let inner = if window.depthwise { &self.inner[1..] } else { &self.inner[..] };
        for ((axis, outer, within), factor) in sums.iter().zip(inner) {
            steps.push(exact(axis, *factor, outer, within));
        }
        let outer = sums.iter().map(|(_, outer, _)| *outer);
        let within = sums.iter().map(|(_, _, within)| *within);
        let of_thread = ["k.v", "p.v", "q.v", "k.e", "p.e", "q.e"];
        let order: Vec<&str> = outer.chain(["k.t", "p.t", "q.t"]).chain(within.clone()).chain(of_thread).collect();
        steps.push(reorder(&order));
        steps.push(accumulate(Window::ACC, "q.b", "acc.r"));

        if self.is_shared {
            steps.extend(self.stage(window, input));
        } else if has_pad {
            steps.extend(each_thread("pad", &["pn", "pc", "ph", "pw"], PAD_THREADS).0);
        }
        steps.extend(AXES.map(|(axis, thread)| bind(&format!("{axis}.t"), LoopKind::Thread(thread))));
        let columns = self.tiles[2].elements;
        let mut inside: Vec<&str> = of_thread.into_iter().rev().chain(within.rev()).collect();
        let mut extents: Vec<i64> = self.tiles.iter().rev().map(|tile| tile.elements).collect();
        extents.extend(self.tiles.iter().rev().map(|tile| tile.strides));
        extents.extend(inner.iter().rev());
        let has_lanes = self.lanes && columns > 1;
        if has_lanes {
            steps.push(vectorize("q.e"));
            (inside, extents) = (inside.split_off(1), extents.split_off(1));
        }
        let mut n_operations = 1;
        for (name, extent) in inside.into_iter().zip(extents) {
            n_operations *= extent;
            if n_operations <= self.most_unrolled {
                steps.push(unroll(name));
            }
        }

        // Blocks, images included.
        steps.push(fuse("on", "k.b", "nk"));
        steps.extend([("nk", 2), ("p.b", 1), ("q.b", 0)].map(|(name, axis)| bind(name, LoopKind::Block(axis))));

        // The epilogue.
        for ((axis, _), tile) in AXES.iter().zip(self.tiles) {
            steps.extend(tile.divide(&format!("o{axis}.b"), &format!("o{axis}")));
        }
        let last = ["ok.t", "op.t", "oq.t", "ok.v", "op.v", "oq.v", "ok.e", "op.e", "oq.e"];
        steps.push(reorder(&last));
        let [k, p, q] = self.tiles.map(Some);
        steps.extend(spread(Window::ACC, &[None, k, p, q]));
        steps.extend(AXES.map(|(axis, thread)| bind(&format!("o{axis}.t"), LoopKind::Thread(thread))));
        if has_lanes {
            steps.push(vectorize("oq.e"));
        }
        steps
    }

    /// Steps that stage the input and the weights of a reduction step in shared memory, and pad the input on
    /// the way.
    fn stage(&self, window: &Window, input: &str) -> Vec<Step> {
        let [k, p, q] = self.tiles.map(|tile| tile.extent());
        let [c, r, s] = self.inner;
        let [rows, columns] = [(p, r, 0), (q, s, 1)].map(|(n, taps, at)| {
            let axis = window.program_axes()[at];
            (n - 1) * axis.stride + (taps - 1) * axis.dilation + 1
        });
        let whole = |rank: usize| (0..rank).map(Whole).collect::<Vec<LayoutAxis>>();
        let weights = if window.depthwise { vec![k, r, s] } else { vec![k, c, r, s] };
        let channels = if window.depthwise { k } else { c };
        let mut steps =
            vec![shared(input, "s.o", "X.s", &whole(4)), shared(Window::WEIGHTS, "s.o", "W.s", &whole(weights.len()))];
        if input == Window::PAD {
            steps.push(inline(Window::PAD));
        }
        let threads = BlockThreads([self.tiles[2].threads, self.tiles[1].threads, self.tiles[0].threads]);
        for (name, extents) in [("X.s", vec![1, channels, rows, columns]), ("W.s", weights)] {
            let order: Vec<usize> = (0..extents.len()).collect();
            steps.extend(
                Copied { name, extents: &extents, order: &order, vector: 1, runs: true, across: false }.by(threads),
            );
        }
        steps
    }
}
