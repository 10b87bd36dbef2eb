//! Tiled matrix products on GPUs: tiles of the result per block, operands in shared memory, accumulators in
//! registers.

use super::super::ceil_div;
use super::super::step::{
    accumulate, bind, compute_at, exact, fuse, guard, inline, layout, pad, reindex, reorder, rfactor, shared, split,
    stage, unroll, vectorize,
};
use super::copies::Copies;
use super::parts::{BlockThreads, BlockTile, Copied, Cut, cut, each_thread, spread};
use tilewright_ir::op::{self, Contraction, Layout, Structure, Window, Workload};
use tilewright_ir::schedule::LayoutAxis::{self, Inner, Outer, Whole};
use tilewright_ir::{LoopKind, Step};

/// Name of the stage that sums up products, once it is reindexed.
pub(super) const SUM: &str = "sum";
/// Buffer of the partial sums, if blocks share sums.
const PARTS: &str = "P";
/// Number of threads of a block that adds up partial sums.
const SUM_THREADS: i64 = 256;
/// Maximum number of elements of a thread that are kept in registers; more are loops over memory.
const MOST_UNROLLED: i64 = 256;

/// Workload as a batched product `sum[b, i, j] = Σ_k A.x[b, i, k] · B.x[b, j, k]`, with its epilogue.
pub struct GpuProduct {
    /// Steps that bring the workload's program into this form.
    pub(super) steps: Vec<Step>,
    /// Loops over products, if there are several, over rows, over columns and over the reduction.
    pub(super) loops: [&'static str; 4],
    /// Loops of the last stage, in the same order.
    pub(super) last: [&'static str; 3],
    /// Batch size; `None` without a batch loop.
    pub batch: Option<i64>,
    /// Rows of each product.
    pub m: i64,
    /// Columns of each product.
    pub n: i64,
    /// Extent of the reduction.
    pub k: i64,
    /// Operand A, of the rows.
    pub a: GpuFactor,
    /// Operand B, of the columns.
    pub b: GpuFactor,
    /// Number of adjacent elements of a result's row that can be stored at once.
    pub stores: i64,
    /// Whether the rows of a product are interleaved with those of others, so that blocks must not overlap
    /// into them.
    pub is_among_others: bool,
}

/// Smallest number of rows and of columns of a block.
pub const LEAST_BLOCK: i64 = 32;

/// Operand of a GPU product.
#[derive(Clone, Copy)]
pub struct GpuFactor {
    /// Whether the operand is contiguous along the reduction, rather than along rows or columns.
    pub along_k: bool,
    /// Number of adjacent elements that can be loaded at once.
    pub loads: i64,
}

/// Vector width for stores to rows of `n` elements.
fn aligned(n: i64) -> i64 {
    [4, 2].into_iter().find(|v| n % v == 0).unwrap_or(1)
}

/// Vector width for loads from rows of `n` elements: 16 bytes, and four in f64, too.
fn loaded(w: &Workload, n: i64) -> i64 {
    if w.dtype.is_half() && n % 8 == 0 { 8 } else { aligned(n) }
}

impl GpuProduct {
    /// Product of a workload; `None` if it is not a product.
    pub fn of(w: &Workload) -> Option<GpuProduct> {
        match w.structure() {
            // Shared memory and tensor cores require numbers of one type.
            _ if w.has_integer_factors() => None,
            Structure::Contraction(c) => Some(GpuProduct::of_contraction(w, &c, false)),
            Structure::Window(window) if !window.depthwise && w.layout() == Layout::Nchw => {
                let has_blocks = window.groups == 1 || (window.k / window.groups) % LEAST_BLOCK == 0;
                has_blocks.then(|| GpuProduct::of_window(w, &window))
            }
            Structure::Window(_) | Structure::Packed(_) | Structure::Nest(_) => None,
        }
    }

    /// Transposed product `sum[b, j, i]` of a workload, whose rows are the columns of the result; `None` if
    /// it is not a contraction.
    pub fn transposed(w: &Workload) -> Option<GpuProduct> {
        match w.structure() {
            Structure::Contraction(c) if !w.has_integer_factors() => Some(GpuProduct::of_contraction(w, &c, true)),
            _ => None,
        }
    }

    fn of_contraction(w: &Workload, c: &Contraction, transposed: bool) -> GpuProduct {
        let [products, mut i, mut j, k] = Contraction::LOOPS;
        let [of_last, mut oi, mut oj] = Contraction::FINISH;
        let [mut a, mut b] = [(&c.a, c.m), (&c.b, c.n)];
        if transposed {
            (i, j, oi, oj, a, b) = (j, i, oj, oi, b, a);
        }
        let plain = w.is_plain();
        let last = match (plain, c.batch.is_some()) {
            (false, _) => [of_last, oi, oj],
            (true, true) => ["sum.0", "sum.1", "sum.2"],
            (true, false) => ["", "sum.0", "sum.1"],
        };
        let sum = c.sum(w);
        let first = usize::from(c.batch.is_none());
        let is_reordered = c.output_beside || transposed;
        let loops = [products, i, j, k];
        let mut steps = Vec::new();
        if is_reordered {
            steps.push(reorder(&loops[first..]));
        }
        steps.push(reindex(sum, sum, SUM));
        if !plain {
            steps.push(inline(sum));
        }
        if is_reordered && !plain {
            steps.push(reorder(&last[first..]));
        }
        steps.extend([reindex(SUM, a.0.name, "A.x"), reindex(SUM, b.0.name, "B.x")]);
        let factor = |(factor, outer): (&op::Factor, i64)| GpuFactor {
            along_k: !factor.k_first,
            loads: loaded(w, if factor.k_first { outer } else { c.k }),
        };
        let stores = if transposed { 1 } else { aligned(c.n) };
        GpuProduct {
            steps,
            loops,
            last,
            batch: c.batch,
            m: a.1,
            n: b.1,
            k: c.k,
            a: factor(a),
            b: factor(b),
            stores,
            is_among_others: false,
        }
    }

    /// Batched product of Winograd's algorithm for tiles of `tile` × `tile` results: rows are output
    /// channels, columns are tiles, and the batch is the elements of a transformed tile. The transforms are
    /// separate kernels.
    pub fn of_winograd(window: &Window, tile: i64) -> GpuProduct {
        let [th, tw] = window.axes.map(|axis| ceil_div(axis.output, tile));
        let steps = vec![
            reorder(&["acc.m.a", "acc.m.b", "acc.m.k", "acc.m.n", "acc.m.th", "acc.m.tw", "acc.m.c"]),
            fuse("acc.m.a", "acc.m.b", "ab"),
            fuse("acc.m.n", "acc.m.th", "nt"),
            fuse("nt", "acc.m.tw", "x"),
            reindex("acc.m", "acc.m", SUM),
            reindex(SUM, "acc.u", "A.x"),
            reindex(SUM, "acc.v", "B.x"),
        ];
        let a = GpuFactor { along_k: true, loads: aligned(window.c) };
        let tiles = if window.n == 1 { aligned(th * tw) } else { 1 };
        GpuProduct {
            steps,
            loops: ["ab", "acc.m.k", "x", "acc.m.c"],
            last: ["sum.0", "sum.1", "sum.2"],
            batch: Some((tile + 2) * (tile + 2)),
            m: window.k,
            n: window.n * th * tw,
            k: window.c,
            a,
            b: GpuFactor { along_k: false, loads: tiles },
            stores: tiles,
            is_among_others: false,
        }
    }

    /// Product of a convolution: rows are output channels, columns are output pixels, and the reduction is
    /// over channels and taps. The matrix of patches exists in shared memory only.
    fn of_window(w: &Workload, window: &Window) -> GpuProduct {
        let Window { n, c, k, groups, .. } = *window;
        let [rows, columns] = window.program_axes();
        let (p, q, r, s) = (rows.output, columns.output, rows.filter, columns.filter);
        let k = k / groups;
        let mut steps = Vec::new();
        let input = if window.has_pad(w) { Window::PAD } else { Window::INPUT };
        let (loops, last) = if groups > 1 {
            steps.push(exact("k", k, "g", "kg"));
            // Groups of one channel are one channel after the other.
            steps.push(match window.interleaved && k > 1 {
                true => exact("ok", groups, "okg", "og"),
                false => exact("ok", k, "og", "okg"),
            });
            (["g", "kg", "x", "crs"], ["og", "okg", "ox"])
        } else {
            (["", "k", "x", "crs"], ["", "ok", "ox"])
        };
        let (group, out_group): (&[&str], &[&str]) = if groups > 1 { (&["g"], &["og"]) } else { (&[], &[]) };
        steps.push(reorder(&[group, &[loops[1], "n", "p", "q", "c", "r", "s"]].concat()));
        steps.extend([fuse("n", "p", "np"), fuse("np", "q", "x"), fuse("c", "r", "cr"), fuse("cr", "s", "crs")]);
        steps.push(reorder(&[out_group, &[last[1], "on", "op", "oq"]].concat()));
        steps.extend([fuse("on", "op", "onp"), fuse("onp", "oq", "ox")]);
        steps.extend([reindex(Window::ACC, Window::ACC, SUM), inline(Window::ACC)]);
        steps.extend([reindex(SUM, Window::WEIGHTS, "A.x"), reindex(SUM, input, "B.x")]);
        if input == Window::PAD {
            steps.push(inline(Window::PAD));
        }
        let sum = c / groups * r * s;
        let is_pointwise = (r, s) == (1, 1) && input == Window::INPUT && rows.stride == 1 && columns.stride == 1;
        let a = GpuFactor { along_k: !window.transposed, loads: if window.transposed { 1 } else { loaded(w, sum) } };
        let b = GpuFactor { along_k: false, loads: if is_pointwise && n == 1 { loaded(w, p * q) } else { 1 } };
        let stores = if n == 1 { aligned(p * q) } else { 1 };
        let batch = (groups > 1).then_some(groups);
        let is_among_others = groups > 1;
        GpuProduct { steps, loops, last, batch, m: k, n: n * p * q, k: sum, a, b, stores, is_among_others }
    }
}

/// Division of a product among blocks.
pub struct Division {
    /// Rows and columns of a block's tile.
    pub tile: [i64; 2],
    /// Number of batch elements that a block computes at a time.
    pub products: i64,
    /// Depth of the tiles in shared memory: number of reduction steps staged at a time.
    pub depth: i64,
    /// Number of blocks that share a reduction (split-k); a separate kernel adds up their partial sums in
    /// order.
    pub split: i64,
}

impl Division {
    /// Extent of the reduction, padded to whole tiles.
    pub fn padded_sum(&self, p: &GpuProduct) -> i64 {
        let whole = self.depth * self.split;
        ceil_div(p.k, whole) * whole
    }

    /// Name of the stage that a block computes.
    pub fn stage(&self) -> &'static str {
        if self.split == 1 { SUM } else { PARTS }
    }

    /// Splits the stage into blocks, `i.b` and `j.b`, inside the [`outer`](Division::outer) ones; also
    /// returns the names of a block's loops over batch, rows, columns and reduction.
    pub fn steps(&self, p: &GpuProduct) -> (Vec<Step>, [String; 4]) {
        let mut steps = p.steps.clone();
        let [b, i, j, k] = p.loops;
        let [bm, bn] = self.tile;
        steps.extend([pad(SUM, i, bm), pad(SUM, j, bn), pad(SUM, k, self.depth * self.split)]);
        let has_batch = p.batch.is_some();
        let batch = |name: &'static str| has_batch.then_some(name);
        if self.split == 1 {
            let [ob, oi, oj] = p.last;
            let loops: Vec<&str> = batch(ob).into_iter().chain([oi, oj]).collect();
            steps.extend(cut(
                &loops,
                &[
                    Cut { target: oi, size: bm, outer: "i.b", inner: "oi.b" },
                    Cut { target: oj, size: bn, outer: "j.b", inner: "oj.b" },
                ],
            ));
            if has_batch {
                steps.push(exact(ob, self.products, "b.b", "ob.t"));
                steps.push(reorder(&["b.b", "i.b", "j.b", "ob.t"]));
            }
            steps.push(compute_at(SUM, "j.b"));
            return (steps, [b, i, j, k].map(str::to_owned));
        }
        steps.push(exact(k, self.padded_sum(p) / self.split, "k.b", "k.r"));
        steps.push(reorder(&[&["k.b"][..], &batch(b).into_iter().collect::<Vec<_>>(), &[i, j, "k.r"]].concat()));
        steps.push(rfactor(SUM, "k.b", PARTS));
        let of = |name: &str| format!("{PARTS}.{name}");
        let [b, i, j, k] = [of(b), of(i), of(j), of("k.r")];
        steps.extend([exact(&i, bm, "i.b", "P.i.b"), exact(&j, bn, "j.b", "P.j.b")]);
        let mut outside = vec![of("k.b")];
        let mut inside = Vec::new();
        if has_batch {
            steps.push(exact(&b, self.products, "b.b", "P.b.t"));
            outside.push("b.b".to_owned());
            inside.push("P.b.t".to_owned());
        }
        outside.extend(["i.b", "j.b"].map(str::to_owned));
        inside.extend(["P.i.b", "P.j.b"].map(str::to_owned));
        let order = [outside, inside, vec![k.clone()]].concat();
        steps.push(reorder(&order.iter().map(String::as_str).collect::<Vec<_>>()));
        (steps, ["P.b.t", "P.i.b", "P.j.b", &k].map(str::to_owned))
    }

    /// Names of the block loops outside those over rows and columns, outermost first.
    pub fn outer(&self, p: &GpuProduct) -> Vec<String> {
        let parts = (self.split > 1).then_some("P.k.b");
        parts.into_iter().chain(p.batch.map(|_| "b.b")).map(str::to_owned).collect()
    }

    /// Steps for the kernel that adds up the partial sums of split-k.
    pub fn sums_of_parts(&self, p: &GpuProduct) -> Vec<Step> {
        let first = usize::from(p.batch.is_none());
        let mut steps = vec![reorder(&[&p.loops[first..3], &["k.b"][..]].concat())];
        let (bound, thread) = each_thread("last", &p.last[first..], SUM_THREADS);
        steps.extend(bound);
        steps.push(compute_at(SUM, &thread));
        steps
    }
}

/// Staging of operand fragments in a thread's registers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fragments {
    /// None: each multiplication reads shared memory.
    None,
    /// Registers for one reduction step at a time.
    Step,
    /// Registers for all steps of the innermost reduction loop.
    Inner,
}

/// Parameters of a tiled product's schedule.
pub struct Tiling {
    /// Tile of a block's rows.
    pub rows: BlockTile,
    /// Tile of a block's columns.
    pub columns: BlockTile,
    /// Number of adjacent threads that share rows: with fewer than a warp, a warp spans several rows of
    /// threads.
    pub warp: i64,
    /// Number of batch elements that a block computes at a time.
    pub products: i64,
    /// Depth of the tiles in shared memory: number of reduction steps staged at a time.
    pub depth: i64,
    /// Number of steps of the innermost reduction loop.
    pub inner: i64,
    /// Whether the innermost reduction loop is unrolled.
    pub unrolled: bool,
    /// Staging of operand fragments.
    pub fragments: Fragments,
    /// Number of blocks that share a reduction (split-k).
    pub split: i64,
    /// Rasterization order of the blocks.
    pub order: Rasterization,
    /// Vector width in elements of the loads of A and of B.
    pub vectors: [i64; 2],
    /// Copies of the operands to shared memory.
    pub copies: Copies,
    /// Whether a thread's columns are vectorized.
    pub lanes: bool,
    /// Whether operands are staged in shared memory; else threads read them from global memory as they
    /// multiply.
    pub shared: bool,
    /// Whether rows of operands in shared memory are padded where copies transpose them, so that the stores
    /// of a warp go to different banks.
    pub padded: bool,
}

/// Banks of shared memory, each one word of 32 bits wide.
const BANKS: i64 = 32;
/// Elements of the vectors that threads load from shared memory: rows begin at multiples of these.
const ALIGNED: i64 = 4;

/// Elements from one row to the next of an operand in shared memory whose rows, of `row` elements, are
/// padded: a warp stores to `depth / vector` of them, and to all banks.
fn padded_row(row: i64, depth: i64, vector: i64) -> i64 {
    let each = (BANKS * vector / depth).max(ALIGNED);
    row + (each - row).rem_euclid(BANKS)
}

/// Rasterization: the order of blocks in the grid, which decides what neighbouring blocks share in cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Rasterization {
    /// Row by row: neighbours share rows.
    Rows,
    /// Column by column: neighbours share columns.
    Columns,
    /// Groups of this many rows of blocks, each column by column.
    Groups(i64),
    /// Groups of this many columns of blocks, each row by row.
    GroupsOfColumns(i64),
}

impl Tiling {
    /// Shape of the thread block.
    pub fn threads(&self) -> BlockThreads {
        BlockThreads([self.warp, self.rows.threads, self.columns.threads / self.warp * self.products])
    }

    /// Division of the product among blocks.
    pub fn division(&self) -> Division {
        let tile = [self.rows.extent(), self.columns.extent()];
        Division { tile, products: self.products, depth: self.depth, split: self.split }
    }

    /// Each operand with the tile of its block and the vector width of its loads.
    pub fn operands<'p>(&self, p: &'p GpuProduct) -> [(&'p GpuFactor, BlockTile, i64); 2] {
        [(&p.a, self.rows, self.vectors[0]), (&p.b, self.columns, self.vectors[1])]
    }

    /// Number of elements from one row to the next of an operand in shared memory.
    pub fn row(&self, (factor, tile, vector): (&GpuFactor, BlockTile, i64)) -> i64 {
        if self.padded && factor.along_k { padded_row(tile.stride(), self.depth, vector) } else { tile.stride() }
    }

    /// Number of elements that a warp stores to one bank in an instruction, where copies transpose an
    /// operand: neighbouring threads have neighbouring vectors of the reduction.
    pub fn bank_conflicts(&self, (factor, tile, vector): (&GpuFactor, BlockTile, i64)) -> i64 {
        let row = self.row((factor, tile, vector));
        let (vectors, distance) = (self.depth / vector, if self.padded { row } else { vector * row });
        let mut stored = [0; BANKS as usize];
        (0..BANKS).for_each(|lane| stored[((lane % vectors * distance + lane / vectors) % BANKS) as usize] += 1);
        stored.into_iter().max().unwrap_or(1)
    }

    /// Steps of the schedule.
    pub fn steps(&self, p: &GpuProduct) -> Vec<Step> {
        let division = self.division();
        let (mut steps, [b, i, j, k]) = division.steps(p);
        let [b, i, j, k] = [&b, &i, &j, &k];
        let has_batch = p.batch.is_some();

        // Tiles of a block.
        steps.extend(self.rows.divide(i, "i"));
        let (divided, columns) = self.divide_columns(j, "j");
        steps.extend(divided);
        steps.extend([exact(k, self.depth, "k.o", "k.s"), exact("k.s", self.inner, "k.m", "k.i")]);
        let products: Vec<&str> = if has_batch { vec![b] } else { vec![] };
        let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
        let elements = ["k.m", "k.i", "i.v", "i.e", "j.v", "j.e"];
        steps.push(reorder(&[&["k.o"][..], &products, &["i.t"], &columns, &elements].concat()));
        steps.push(accumulate(division.stage(), "j.b", "C.r"));

        // Operands in shared memory, and in registers.
        if self.shared {
            steps.extend(self.share(p));
        } else {
            steps.extend(["A.x", "B.x"].map(inline));
        }
        steps.extend(bind_threads("i.t", &columns, has_batch.then_some(b)));
        if self.unrolled {
            steps.push(unroll("k.i"));
        }
        steps.extend(self.tile(["i.v", "i.e", "j.v", "j.e"], self.lanes));
        steps.extend(bind_blocks(self.order, division.outer(p)));

        // The epilogue.
        if self.split == 1 {
            steps.extend(self.rows.divide("oi.b", "oi"));
            let (divided, columns) = self.divide_columns("oj.b", "oj");
            steps.extend(divided);
            let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
            let products: &[&str] = if has_batch { &["ob.t"] } else { &[] };
            steps.push(reorder(&[products, &["oi.t"], &columns, &["oi.v", "oi.e", "oj.v", "oj.e"]].concat()));
            let of_batch = has_batch.then_some(None);
            let tiles: Vec<Option<BlockTile>> =
                of_batch.into_iter().chain([Some(self.rows), Some(self.columns)]).collect();
            steps.extend(spread(SUM, &tiles));
            steps.extend(bind_threads("oi.t", &columns, has_batch.then_some("ob.t")));
            let [bm, bn] = division.tile;
            let is_whole = p.m % bm == 0 && p.n % bn == 0;
            let lanes = self.lanes && is_whole && p.stores % self.columns.elements.min(4) == 0;
            steps.extend(self.tile(["oi.v", "oi.e", "oj.v", "oj.e"], lanes));
        } else {
            steps.extend(division.sums_of_parts(p));
        }
        steps
    }

    /// Steps that copy both operands to shared memory, and from there to registers.
    fn share(&self, p: &GpuProduct) -> Vec<Step> {
        let [a, b] = self.operands(p);
        let staged = [self.factor("A", a, p.batch.is_some()), self.factor("B", b, p.batch.is_some())];
        let mut steps: Vec<Step> = staged.iter().flat_map(|factor| factor.stage.iter().cloned()).collect();
        let at = match self.fragments {
            Fragments::None => None,
            Fragments::Step => Some("k.i"),
            Fragments::Inner => Some("k.m"),
        };
        if let Some(at) = at {
            for ((name, tile), factor) in [("A", self.rows), ("B", self.columns)].into_iter().zip(&staged) {
                let [from, to] = [format!("{name}.s"), format!("{name}.r")];
                let rank = factor.extents.len();
                let axes: Vec<LayoutAxis> = (0..rank).map(Whole).collect();
                steps.push(stage(&from, Some(at), &to, &axes));
                if tile.each() <= MOST_UNROLLED {
                    steps.extend((0..rank - 1).map(|d| unroll(&format!("{to}.{d}"))));
                    let element = format!("{to}.{}", rank - 1);
                    steps.push(if self.lanes { vectorize(&element) } else { unroll(&element) });
                }
            }
        }
        steps.extend(staged.iter().flat_map(|factor| factor.padding.iter().cloned()));
        let mut copies = Vec::new();
        for ((name, factor), vector) in ["A.s", "B.s"].into_iter().zip(&staged).zip(self.vectors) {
            let copied =
                Copied { name, extents: &factor.extents, order: &factor.order, vector, runs: false, across: false };
            steps.extend(copied.by(self.threads()));
            let n_loads = ceil_div(factor.extents.iter().product::<i64>() / vector, self.threads().n());
            steps.extend(self.copies.through_registers("k.o", name, n_loads));
            copies.push((name, n_loads));
        }
        steps.extend(self.copies.stream("k.o", &copies, [false; 4]));
        steps
    }

    /// Unrolls the loops over a thread's elements, or vectorizes the last one, if they fit the registers.
    fn tile(&self, [iv, ie, jv, je]: [&str; 4], lanes: bool) -> Vec<Step> {
        if self.rows.each() * self.columns.each() > MOST_UNROLLED {
            return Vec::new();
        }
        let last = if lanes && self.columns.elements > 1 { vectorize(je) } else { unroll(je) };
        vec![last, unroll(jv), unroll(ie), unroll(iv)]
    }

    /// Divides a loop over a block's columns; also returns the names of its loops over threads, outermost
    /// first.
    fn divide_columns(&self, target: &str, name: &str) -> (Vec<Step>, Vec<String>) {
        let mut steps = self.columns.divide(target, name).to_vec();
        let threads = format!("{name}.t");
        if self.warp == self.columns.threads {
            return (steps, vec![threads]);
        }
        let [outer, inner] = ["w", "l"].map(|part| format!("{name}.{part}"));
        steps.push(exact(&threads, self.warp, &outer, &inner));
        (steps, vec![outer, inner])
    }

    fn factor(&self, name: &str, operand: (&GpuFactor, BlockTile, i64), has_batch: bool) -> StagedFactor {
        let (factor, tile, vector) = operand;
        let stride = tile.stride();
        let first = usize::from(has_batch);
        let batch: &[LayoutAxis] = if has_batch { &[Whole(0)] } else { &[] };
        let axes = [batch, &[Outer(first, stride), Whole(first + 1), Inner(first, stride)]].concat();
        let [x, s] = ["x", "s"].map(|part| format!("{name}.{part}"));
        let stage = vec![shared(&x, "k.o", &s, &axes), inline(&x)];
        let mut padding = Vec::new();
        if self.padded && factor.along_k {
            // Steps of a vector lie apart, and next to each one what neighbouring threads store with it.
            let row = self.row(operand);
            let batch = (0..first).map(Whole);
            let divided = [Whole(first), Outer(first + 1, vector), Inner(first + 1, vector), Whole(first + 2)];
            let padded =
                [Whole(first), Whole(first + 2), Whole(first + 1), Outer(first + 3, row), Inner(first + 3, row)];
            padding.push(layout(&s, &batch.clone().chain(divided).collect::<Vec<_>>()));
            padding.push(layout(&s, &batch.chain(padded).collect::<Vec<_>>()));
        }
        let products = has_batch.then_some(self.products);
        let extents: Vec<i64> = products.into_iter().chain([tile.strides, self.depth, stride]).collect();
        let [strip, k, within] = [first, first + 1, first + 2];
        let within_product = if factor.along_k { [strip, within, k] } else { [k, strip, within] };
        let order = (0..first).chain(within_product).collect();
        StagedFactor { stage, padding, extents, order }
    }
}

/// Binds the loops over a block's threads: those of rows, of columns, and of products if columns leave them
/// the third axis.
fn bind_threads(rows: &str, columns: &[&str], products: Option<&str>) -> Vec<Step> {
    let mut third = products;
    let first = match *columns {
        [outer, inner] => {
            third = Some(outer);
            inner
        }
        _ => columns[0],
    };
    let mut steps = vec![bind(rows, LoopKind::Thread(1)), bind(first, LoopKind::Thread(0))];
    steps.extend(third.map(|third| bind(third, LoopKind::Thread(2))));
    steps
}

/// Binds the block loops `i.b` and `j.b`, and the `outer` ones, outermost first, to grid axes; the outer ones
/// share z.
pub fn bind_blocks(order: Rasterization, outer: Vec<String>) -> Vec<Step> {
    let (mut steps, mut third) = (Vec::new(), outer);
    let [first, second] = match order {
        Rasterization::Rows => ["j.b", "i.b"],
        Rasterization::Columns => ["i.b", "j.b"],
        Rasterization::Groups(n) => {
            steps.push(split("i.b", n, "i.g", "i.n"));
            third.push("i.g".to_owned());
            ["i.n", "j.b"]
        }
        Rasterization::GroupsOfColumns(n) => {
            steps.extend([split("j.b", n, "j.g", "j.n"), reorder(&["j.g", "i.b", "j.n"])]);
            third.push("j.g".to_owned());
            ["j.n", "i.b"]
        }
    };
    steps.extend([bind(first, LoopKind::Block(0)), bind(second, LoopKind::Block(1))]);
    let third = fuse_all(third, &mut steps);
    steps.extend(third.map(|name| bind(&name, LoopKind::Block(2))));
    steps
}

/// Makes blocks persistent: each of `n_units` blocks processes several tiles of [`bind_blocks`], in the same
/// order.
pub fn bind_units(order: Rasterization, outer: Vec<String>, n_units: i64) -> Vec<Step> {
    let (mut steps, mut all) = (Vec::new(), outer);
    let inner: &[&str] = match order {
        Rasterization::Rows => &["i.b", "j.b"],
        Rasterization::Columns => &["j.b", "i.b"],
        Rasterization::Groups(n) => {
            steps.push(split("i.b", n, "i.g", "i.n"));
            &["i.g", "j.b", "i.n"]
        }
        Rasterization::GroupsOfColumns(n) => {
            steps.push(split("j.b", n, "j.g", "j.n"));
            &["j.g", "i.b", "j.n"]
        }
    };
    steps.push(reorder(inner));
    all.extend(inner.iter().map(|name| (*name).to_owned()));
    let all = fuse_all(all, &mut steps).expect("there are rows and columns");
    steps.extend([guard(&all, n_units, "round", "unit"), reorder(&["unit", "round"])]);
    steps.push(bind("unit", LoopKind::Block(0)));
    steps
}

/// Fuses loops, outermost first; returns the name of the fused loop, if there are any.
fn fuse_all(loops: Vec<String>, steps: &mut Vec<Step>) -> Option<String> {
    let fused = loops.into_iter().enumerate().reduce(|(_, outer), (at, inner)| {
        let name = format!("z{at}");
        steps.push(fuse(&outer, &inner, &name));
        (at, name)
    });
    fused.map(|(_, name)| name)
}

/// Operand that is copied to shared memory.
struct StagedFactor {
    stage: Vec<Step>,
    /// Steps that pad its rows, once nothing is staged from them any more.
    padding: Vec<Step>,
    /// Extents of the copy's loops.
    extents: Vec<i64>,
    /// Loops in memory order, the contiguous one last.
    order: Vec<usize>,
}
