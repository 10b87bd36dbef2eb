//! Parts of schedules for GPUs: tiles of loops, copies that the threads of a block make together, blocks of
//! loops that nothing divides.

use super::super::ceil_div;
use super::super::step::{bind, exact, fuse, guard, layout, reorder, split, vectorize};
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};
use tilewright_ir::{LoopKind, Step};

/// Division of a block's part of a loop, outermost first.
#[derive(Clone, Copy, Debug)]
pub struct BlockTile {
    /// Parts a stride apart of each thread: TVM's virtual threads.
    pub strides: i64,
    /// Threads.
    pub threads: i64,
    /// Elements next to each other of each thread.
    pub elements: i64,
}

impl BlockTile {
    /// Iterations of a block.
    pub fn extent(&self) -> i64 {
        self.strides * self.stride()
    }

    /// Iterations from one part of a thread to its next.
    pub fn stride(&self) -> i64 {
        self.threads * self.elements
    }

    /// Elements of each thread.
    pub fn each(&self) -> i64 {
        self.strides * self.elements
    }

    /// Divides a loop over a block's part into `name.v`, `name.t` and `name.e`.
    pub fn divide(&self, target: &str, name: &str) -> [Step; 2] {
        let [v, rest, t, e] = ["v", "r", "t", "e"].map(|part| format!("{name}.{part}"));
        [exact(target, self.stride(), &v, &rest), exact(&rest, self.elements, &t, &e)]
    }
}

/// Lays out a block's part of a result so that the elements of a thread have subscripts of their own, as
/// [`BlockTile::divide`] divides the loops; dimensions without a tile stay as they are.
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

/// Numbers of threads of a block along each axis, x first.
#[derive(Clone, Copy, Debug)]
pub struct BlockThreads(pub [i64; 3]);

impl BlockThreads {
    /// Number of threads of a block.
    pub fn n(&self) -> i64 {
        self.0.iter().product()
    }
}

/// Copy into shared memory, and its division among threads.
pub struct Copied<'a> {
    /// Name of the copy's buffer.
    pub name: &'a str,
    /// Extents of its loops, by number.
    pub extents: &'a [i64],
    /// The loops in the order in which neighbours lie in memory, the last one next to each other.
    pub order: &'a [usize],
    /// Elements of a load.
    pub vector: i64,
    /// Whether each thread copies a run of neighbours rather than neighbouring threads copying neighbours.
    pub runs: bool,
    /// Whether neighbours in shared memory lie along the last loop but one: a load is then of elements apart.
    pub across: bool,
}

impl Copied<'_> {
    /// Shares the copy among the threads of the block.
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
        // One load is one thread's.
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

/// Elements that neighbours in shared memory and in the device's memory have of a copy that is made element
/// by element: of those the threads of a warp write to all banks, and read whole sectors.
const ACROSS: [i64; 2] = [4, 8];

impl Copied<'_> {
    /// Divides the last two loops where neighbours lie along the one in shared memory, along the other in
    /// the device's: vectors go along the first, or warps have some of both.
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

/// A loop of a stage that is cut into blocks.
pub struct Cut<'a> {
    /// The loop.
    pub target: &'a str,
    /// Iterations of a block.
    pub size: i64,
    /// The loop over blocks.
    pub outer: &'a str,
    /// The loop of a block, which is as long where less than a block is left.
    pub inner: &'a str,
}

/// Cuts loops of a perfect nest, `loops`, into whole blocks, and puts those over blocks outside, after the
/// loops that are not cut.
pub fn cut(loops: &[&str], cuts: &[Cut]) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut order: Vec<&str> = loops.to_vec();
    for cut in cuts {
        // Conditions come to stand inside all loops.
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

/// Has each thread compute one element of a nest of these loops, outermost first: they become one, of which
/// each block takes `n_threads` iterations, the last one what is left. Gives the name of the thread's loop
/// too.
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
