//! Building blocks of GPU schedules: tiles of loops, cooperative copies, and loops cut into partial blocks.

use super::super::ceil_div;
use super::super::step::{bind, exact, fuse, guard, layout, reorder, split, vectorize};
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};
use tilewright_ir::{LoopKind, Step};

/// Division of a block's tile of a loop, outermost first.
#[derive(Clone, Copy, Debug)]
pub struct BlockTile {
    /// Number of virtual threads (TVM's term): parts of a thread that lie a stride apart.
    pub strides: i64,
    /// Number of threads.
    pub threads: i64,
    /// Number of adjacent elements per part of a thread.
    pub elements: i64,
}

impl BlockTile {
    /// Extent of the block's tile.
    pub fn extent(&self) -> i64 {
        self.strides * self.stride()
    }

    /// Distance between two parts of a thread, in iterations.
    pub fn stride(&self) -> i64 {
        self.threads * self.elements
    }

    /// Number of elements per thread.
    pub fn each(&self) -> i64 {
        self.strides * self.elements
    }

    /// Splits a loop over a block's tile into `name.v` (virtual threads), `name.t` (threads) and `name.e`
    /// (elements).
    pub fn divide(&self, target: &str, name: &str) -> [Step; 2] {
        let [v, rest, t, e] = ["v", "r", "t", "e"].map(|part| format!("{name}.{part}"));
        [exact(target, self.stride(), &v, &rest), exact(&rest, self.elements, &t, &e)]
    }
}

/// Transforms the layout of a block's tile of a result so that a thread's elements have subscripts of their
/// own, matching [`BlockTile::divide`]; dimensions without a tile are unchanged.
pub fn spread(buffer: &str, tiles: &[Option<BlockTile>]) -> [Step; 2] {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for (d, tile) in tiles.iter().enumerate() {
        let at = first.len();
        match tile {
            None => {
                first.push(Whole(d));
                second.push(Whole(at));
            }
            Some(tile) => {
                first.extend([Outer(d, tile.stride()), Inner(d, tile.stride())]);
                second.extend([Whole(at), Outer(at + 1, tile.elements), Inner(at + 1, tile.elements)]);
            }
        }
    }
    [layout(buffer, &first), layout(buffer, &second)]
}

/// Number of threads of a block along x, y and z.
#[derive(Clone, Copy, Debug)]
pub struct BlockThreads(pub [i64; 3]);

impl BlockThreads {
    /// Total number of threads of a block.
    pub fn n(&self) -> i64 {
        self.0.iter().product()
    }
}

/// Cooperative copy to shared memory, divided among a block's threads.
pub struct Copied<'a> {
    /// Name of the copy's buffer.
    pub name: &'a str,
    /// Extents of the copy's loops, by loop number.
    pub extents: &'a [i64],
    /// Loops in memory order, the contiguous one last.
    pub order: &'a [usize],
    /// Number of elements per load.
    pub vector: i64,
    /// Whether each thread copies a run of adjacent elements, rather than adjacent threads copying adjacent
    /// elements.
    pub runs: bool,
    /// Whether elements adjacent in shared memory lie along the second to last loop, so that a load is of
    /// strided elements.
    pub across: bool,
}

impl Copied<'_> {
    /// Divides the copy among the threads of the block.
    pub fn by(&self, threads: BlockThreads) -> Vec<Step> {
        let of = |part: &str| format!("{}.{part}", self.name);
        let mut loops: Vec<String> = self.order.iter().map(|d| of(&d.to_string())).collect();
        let mut steps = Vec::new();
        if !self.order.is_sorted() {
            steps.push(reorder(&loops.iter().map(String::as_str).collect::<Vec<_>>()));
        }
        if self.across {
            steps.extend(self.divide_across(&mut loops));
        } else if self.vector > 1
            && let Some(last) = loops.pop()
        {
            steps.extend([exact(&last, self.vector, &of("q"), &of("v")), vectorize(&of("v"))]);
            loops.push(of("q"));
        }
        let mut all = loops.remove(0);
        for (at, inner) in loops.iter().enumerate() {
            let fused = of(&format!("f{at}"));
            steps.push(fuse(&all, inner, &fused));
            all = fused;
        }
        let n_loads = self.extents.iter().product::<i64>() / self.vector;
        let [x, y, z] = threads.0;
        let (t, o) = (of("t"), of("o"));
        // A single load is done by one thread.
        let is_one = n_loads == 1;
        if self.runs || is_one {
            steps.push(guard(&all, ceil_div(n_loads, threads.n()), &t, &o));
        } else {
            steps.push(guard(&all, threads.n(), &o, &t));
        }
        let mut axes = Vec::new();
        let mut rest = t;
        for (axis, n, inside) in [(2, z, x * y), (1, y, x)] {
            if n > 1 && !is_one {
                let (own, inner) = (of(["x", "y", "z"][axis]), of(["xr", "yr", "zr"][axis]));
                steps.push(guard(&rest, inside, &own, &inner));
                axes.push((own, LoopKind::Thread(axis as u8)));
                rest = inner;
            }
        }
        axes.push((rest, LoopKind::Thread(0)));
        if !self.runs && !is_one {
            let names = axes.iter().map(|(name, _)| name.as_str()).chain([o.as_str()]);
            steps.push(reorder(&names.collect::<Vec<_>>()));
        }
        steps.extend(axes.iter().map(|(name, axis)| bind(name, *axis)));
        steps
    }
}

/// Elements along the dimension contiguous in shared memory and along the one contiguous in device memory, in
/// an element-by-element copy: with these, the threads of a warp write to all banks and read whole sectors.
const ACROSS: [i64; 2] = [4, 8];

impl Copied<'_> {
    /// Divides the last two loops if one is contiguous in shared memory and the other in device memory:
    /// vectors lie along the first, or warps cover some of both.
    fn divide_across(&self, loops: &mut Vec<String>) -> Vec<Step> {
        let of = |part: &str| format!("{}.{part}", self.name);
        let (last, before) = (loops.pop(), loops.pop());
        let (Some(last), Some(before)) = (last, before) else { return Vec::new() };
        let [near, far] = ACROSS;
        let mut steps = vec![exact(&before, if self.vector > 1 { self.vector } else { near }, &of("q"), &of("v"))];
        if self.vector > 1 {
            loops.extend([of("q"), last]);
        } else {
            steps.push(exact(&last, far, &of("p"), &of("u")));
            loops.extend([of("q"), of("p"), of("v"), of("u")]);
        }
        let innermost = (self.vector > 1).then(|| of("v"));
        let order: Vec<&str> = loops.iter().chain(&innermost).map(String::as_str).collect();
        steps.push(reorder(&order));
        steps.extend(innermost.as_deref().map(vectorize));
        steps
    }
}

/// Loop to be cut into blocks.
pub struct Cut<'a> {
    /// Name of the loop.
    pub target: &'a str,
    /// Iterations per block.
    pub size: i64,
    /// Name of the loop over blocks.
    pub outer: &'a str,
    /// Name of the loop within a block, whose extent does not shrink in the last, partial block.
    pub inner: &'a str,
}

/// Cuts loops of the perfect nest `loops` into blocks, and moves the loops over blocks outwards, just inside
/// the loops that are not cut.
pub fn cut(loops: &[&str], cuts: &[Cut]) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut order: Vec<&str> = loops.to_vec();
    for cut in cuts {
        // Conditions are moved inside all loops.
        if order.last() != Some(&cut.target) {
            order.retain(|name| *name != cut.target);
            order.push(cut.target);
            steps.push(reorder(&order));
        }
        steps.push(guard(cut.target, cut.size, cut.outer, cut.inner));
        order.pop();
        order.extend([cut.outer, cut.inner]);
    }
    let whole = loops.iter().filter(|name| cuts.iter().all(|cut| cut.target != **name)).copied();
    let wanted: Vec<&str> = whole.chain(cuts.iter().map(|c| c.outer)).chain(cuts.iter().map(|c| c.inner)).collect();
    if order != wanted {
        steps.push(reorder(&wanted));
    }
    steps
}

/// Maps each element of a nest of these loops, outermost first, to a thread: fuses them and splits the result
/// into blocks of `n_threads`, the last one partial. Also returns the name of the thread loop.
pub fn each_thread(name: &str, loops: &[&str], n_threads: i64) -> (Vec<Step>, String) {
    let mut steps = Vec::new();
    let mut all = loops[0].to_owned();
    for (at, inner) in loops[1..].iter().enumerate() {
        let fused = format!("{name}.f{at}");
        steps.push(fuse(&all, inner, &fused));
        all = fused;
    }
    let (block, thread) = (format!("{name}.block"), format!("{name}.thread"));
    steps.push(split(&all, n_threads, &block, &thread));
    steps.extend([bind(&block, LoopKind::Block(0)), bind(&thread, LoopKind::Thread(0))]);
    (steps, thread)
}
