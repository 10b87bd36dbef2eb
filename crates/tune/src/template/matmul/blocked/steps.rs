//! The schedule of a configuration, stage by stage.

use super::super::super::TemplateSetting;
use super::super::super::share::SharedWork;
use super::super::super::step::{
    accumulate, compute_at, parallel, prefetch, prefetch_in_parts, reorder, split, stage_as, tensorize, unroll,
    vectorize,
};
use super::super::{MatmulFactor, MatmulProduct, ceil_div, finished_vectors};
use super::{NEXT_PANEL, block_of, k_block_of};
use tilewright_ir::Step;
use tilewright_ir::schedule::LayoutAxis::{self, Inner, Outer, Whole};
use tilewright_search::{Config, Space};

/// Steps of a configuration: those of the product, or of parts of its sums that threads share.
pub(super) fn steps(s: &TemplateSetting, p: &MatmulProduct, space: &Space, config: &Config) -> Vec<Step> {
    let share = SharedWork::of(s, space, config);
    let (k_blocks, lanes) = (space.int(config, "k_blocks"), s.target.lanes(s.workload.dtype));
    if share != SharedWork::Sum {
        let threads = if share == SharedWork::Result { space.text(config, "parallel") } else { String::new() };
        return BlockedDecisions::of(p, lanes, threads, k_blocks, space, config).steps();
    }
    let (before, parts, after) = p.in_parts(s);
    let blocks_of_part = ceil_div(k_blocks, s.n_threads as i64);
    [before, BlockedDecisions::of(&parts, lanes, String::new(), blocks_of_part, space, config).steps(), after].concat()
}

/// Decisions of a configuration, and values derived from them.
struct BlockedDecisions<'a> {
    p: &'a MatmulProduct,
    lanes: i64,
    /// Rows and columns of a tile.
    mr: i64,
    nr: i64,
    unroll_k: i64,
    /// Steps of the reduction in a block.
    k_block: i64,
    /// Loop that threads share, if any.
    threads: String,
    /// Loops over blocks and tiles, the outermost first.
    loops: Vec<&'static str>,
    /// Number of outermost loops that the epilogue shares; it reads its sums inside the last of them.
    n_finished: usize,
    rows: TiledLoops,
    columns: TiledLoops,
    pack_a: String,
    pack_b: String,
    prefetch_a: bool,
    prefetch_b: i64,
    prefetch_c: bool,
}

impl<'a> BlockedDecisions<'a> {
    /// `threads`: the parallel loop, or empty; `k_blocks`: number of blocks of the reduction that threads do
    /// not share.
    fn of(
        p: &'a MatmulProduct,
        lanes: i64,
        threads: String,
        k_blocks: i64,
        space: &Space,
        config: &Config,
    ) -> BlockedDecisions<'a> {
        let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
        let (mr, nr, k_block) = (int("mr"), int("nv") * lanes, k_block_of(p, k_blocks));
        let order = space.order(config, "order");
        let is_there = |l: &&str| k_block < p.k || *l != "pc";
        let blocks = order.iter().filter_map(|l| ["jc", "pc", "ic"].into_iter().find(|known| known == l));
        let mut loops: Vec<&str> = blocks.filter(is_there).collect();
        loops.extend(if text("inner") == "jr-ir" { ["jr", "ir"] } else { ["ir", "jr"] });
        let position = |l: &str| loops.iter().position(|o| *o == l);
        let n_finished = match p.has_epilogue {
            false => 0,
            true if text("epilogue") == "tile" => loops.len(),
            true => position("pc").unwrap_or(loops.len() - 2),
        };
        let finished = |blocks: &str, tiles: &str| {
            let is_outside = |l: &str| position(l).is_some_and(|at| at < n_finished);
            match (is_outside(tiles), is_outside(blocks)) {
                (true, _) => EpilogueLoops::Tiles,
                (false, true) => EpilogueLoops::Blocks,
                (false, false) => EpilogueLoops::Whole,
            }
        };
        let [_, row, column, _] = p.loops;
        let (row_blocks, column_blocks) =
            (block_of(p.m, mr, int("m_blocks")) / mr, block_of(p.n, nr, int("n_blocks")) / nr);
        BlockedDecisions {
            p,
            lanes,
            mr,
            nr,
            unroll_k: int("unroll_k"),
            k_block,
            threads,
            n_finished,
            rows: TiledLoops::new(finished("ic", "ir"), [row, "oi", "ic", "ir", "im"], [mr, 1], row_blocks),
            columns: TiledLoops::new(
                finished("jc", "jr"),
                [column, "oj", "jc", "jr", "jm"],
                [nr, p.sums_at_once()],
                column_blocks,
            ),
            loops,
            pack_a: text("pack_a"),
            pack_b: text("pack_b"),
            prefetch_a: space.flag(config, "prefetch_a"),
            prefetch_b: int("prefetch_b"),
            // With an epilogue there is no such choice, even for parts of sums that it follows later.
            prefetch_c: space.has("prefetch_c") && space.flag(config, "prefetch_c"),
        }
    }

    /// All steps, outermost loops first.
    fn steps(&self) -> Vec<Step> {
        let stages = [self.finished(), self.sum(), self.copy_of_b(), self.copy_of_a(), self.tile(), self.ends()];
        stages.concat()
    }

    /// Position of a loop over blocks or tiles.
    fn position(&self, l: &str) -> Option<usize> {
        self.loops.iter().position(|o| *o == l)
    }

    /// Returns the inner one of the loops over the sum's blocks and those of rows or columns.
    fn innermost(&self, blocks: &'static str) -> &'static str {
        if self.position("pc") > self.position(blocks) { "pc" } else { blocks }
    }

    /// Returns the innermost loop over tiles.
    fn at(&self) -> &'static str {
        self.loops[self.loops.len() - 1]
    }

    /// Steps for the loops of the epilogue, around the sums that it reads.
    fn finished(&self) -> Vec<Step> {
        let BlockedDecisions { p, n_finished, rows, columns, .. } = self;
        if *n_finished == 0 {
            return Vec::new();
        }
        let outer = &self.loops[..*n_finished];
        let mut steps: Vec<Step> = rows.last.iter().chain(&columns.last).cloned().collect();
        steps.push(reorder(&p.in_batch("ob", &[outer, &[rows.finish, columns.finish]].concat())));
        steps.push(compute_at(p.sum, outer[n_finished - 1]));
        steps
    }

    /// Steps for the loops of the stage that sums: blocks, tiles, the reduction, then a tile.
    fn sum(&self) -> Vec<Step> {
        let BlockedDecisions { p, rows, columns, .. } = self;
        let [batch, .., k] = p.loops;
        let mut steps: Vec<Step> = rows.sum.iter().chain(&columns.sum).cloned().collect();
        steps.push(split(columns.inside, self.lanes, "jv", "jl"));
        let mut block = k;
        if self.k_block < p.k {
            steps.push(split(k, self.k_block, "pc", "kb"));
            block = "kb";
        }
        let (unroll_k, at_once) = (self.unroll_k, p.steps_at_once());
        let mut inside = vec!["ko", "ki", rows.inside, "jv", "jl"];
        if p.dot.is_some() {
            steps.extend([split(block, unroll_k * at_once, "ko", "kr"), split("kr", at_once, "ki", "kk")]);
            inside.insert(2, "kk");
        } else {
            steps.push(split(block, unroll_k, "ko", "ki"));
        }
        let sum = [&self.loops[self.n_finished..], &inside].concat();
        steps.push(reorder(&if self.n_finished == 0 { p.in_batch(batch, &sum) } else { sum }));
        steps
    }

    /// Whether all threads share a copy, which is then made outside the parallel loop.
    fn is_shared(&self, at: Option<&str>) -> bool {
        match at {
            _ if self.threads.is_empty() => false,
            None => true,
            // The loop over products is outside all others.
            Some(at) => self.threads != "b" && self.position(at) < self.position(&self.threads),
        }
    }

    /// Copies of B, all at once or block by block.
    fn copy_of_b(&self) -> Vec<Step> {
        let p = self.p;
        if self.pack_b == "none" {
            return Vec::new();
        }
        let at = (self.pack_b == "block").then(|| self.innermost("jc"));
        let mut steps = pack(p, &p.b, "B.p", at, self.nr, self.lanes);
        if self.is_shared(at) {
            let outermost = if at.is_none() { 0 } else { usize::from(p.batch.is_some()) };
            steps.push(parallel(&format!("B.p.{outermost}")));
        }
        steps
    }

    /// Copies of blocks of A.
    fn copy_of_a(&self) -> Vec<Step> {
        let (p, at) = (self.p, self.innermost("ic"));
        if self.pack_a == "none" {
            return Vec::new();
        }
        let [panel, k] = [0, 1].map(|axis| format!("A.p.{}", axis + usize::from(p.batch.is_some())));
        let mut outermost = &panel;
        let mut steps = if self.pack_a == "rows" && p.a.is_k_last() {
            copy_rows(p, at, self.mr, self.lanes)
        } else {
            pack(p, &p.a, "A.p", Some(at), self.mr, self.lanes)
        };
        // Rows of a transposed A are interleaved already; read to their ends, they arrive at memory
        // bandwidth.
        if self.pack_a == "rows" && !p.a.is_k_last() {
            steps.push(reorder(&[&k, &panel]));
            outermost = &k;
        }
        if self.is_shared(Some(at)) {
            steps.push(parallel(outermost));
        }
        steps
    }

    /// Steps that keep the sums of a tile in registers, and prefetch.
    fn tile(&self) -> Vec<Step> {
        let p = self.p;
        let mut steps = vec![accumulate(p.sum, self.at(), "C.r"), vectorize("jl")];
        steps.extend(["jv", self.rows.inside, "ki"].map(unroll));
        steps.extend(p.dot.map(|how| tensorize("kk", how)));
        if self.prefetch_c {
            steps.push(prefetch(p.sum, self.at(), 0));
        }
        if self.prefetch_a {
            steps.push(prefetch(p.a.name, "ir", 1));
        }
        let read = if self.pack_b == "none" { p.b.name } else { "B.p" };
        steps.extend(match self.prefetch_b {
            0 => None,
            NEXT_PANEL => Some(prefetch_in_parts(read, "jr", 1, &["ir", "ko"])),
            ahead => Some(prefetch(read, "ko", ahead)),
        });
        // If there are few rows, the tiles before have not fetched all of a panel.
        if self.prefetch_b == NEXT_PANEL && p.open[0].is_some() {
            steps.push(prefetch(read, "ko", OWN_PANEL_AHEAD));
        }
        steps
    }

    /// Steps for the epilogue of a tile or a block, and for the parallel loop.
    fn ends(&self) -> Vec<Step> {
        let BlockedDecisions { p, rows, columns, n_finished, threads, .. } = self;
        let mut steps = Vec::new();
        if p.has_epilogue {
            let (vectors, of_vectors) = finished_vectors(columns.finish, p.pairs, self.lanes);
            steps.extend(of_vectors);
            if *n_finished == self.loops.len() {
                steps.extend([rows.finish, vectors].map(unroll));
            }
        }
        if !threads.is_empty() {
            let batch = if *n_finished > 0 { "ob" } else { p.loops[0] };
            steps.push(parallel(if threads == "b" { batch } else { threads }));
            // Threads that share the work on a block also share its epilogue.
            if p.has_epilogue && threads != "b" && self.position(threads) >= Some(*n_finished) {
                steps.push(parallel(rows.finish));
            }
        }
        steps
    }
}

/// Iterations of the reduction that tiles of open rows prefetch their own panel ahead.
const OWN_PANEL_AHEAD: i64 = 8;

/// Loops over rows or columns that the epilogue shares, and inside which the sums that it reads are computed.
#[derive(Clone, Copy)]
enum EpilogueLoops {
    /// No fusion: the product is computed first, or there is no epilogue.
    Whole,
    /// Over blocks.
    Blocks,
    /// Over tiles.
    Tiles,
}

/// Loops of one dimension of the result, cut into blocks of tiles.
struct TiledLoops {
    /// Steps that split the loops of the last stage, before it is fused with the one that sums.
    last: Vec<Step>,
    /// Steps that then split the loops of the stage that sums.
    sum: Vec<Step>,
    /// Loop over a tile.
    inside: &'static str,
    /// Loop of the epilogue over the elements that it finishes at a time.
    finish: &'static str,
}

impl TiledLoops {
    /// `names`: the product's loop, the epilogue's, and those over blocks, tiles, and elements of a tile;
    /// `at_once`: number of sums per iteration of the epilogue's loop.
    fn new(finished: EpilogueLoops, names: [&'static str; 5], [tile, at_once]: [i64; 2], block: i64) -> TiledLoops {
        let [product, epilogue, blocks, tiles, elements] = names;
        let (rest, finish) = (format!("{product}.rest"), if epilogue == "oi" { "om" } else { "on" });
        match finished {
            EpilogueLoops::Whole => TiledLoops {
                last: vec![],
                sum: vec![split(product, tile, &rest, elements), split(&rest, block, blocks, tiles)],
                inside: elements,
                finish: epilogue,
            },
            EpilogueLoops::Blocks => TiledLoops {
                last: vec![split(epilogue, tile * block / at_once, blocks, finish)],
                sum: vec![split(product, tile, tiles, elements)],
                inside: elements,
                finish,
            },
            EpilogueLoops::Tiles => TiledLoops {
                last: vec![split(epilogue, tile / at_once, &rest, finish), split(&rest, block, blocks, tiles)],
                sum: vec![],
                inside: product,
                finish,
            },
        }
    }
}

/// Copies panels of `width` rows or columns of an operand, step by step of the reduction.
fn pack(p: &MatmulProduct, factor: &MatmulFactor, name: &str, at: Option<&str>, width: i64, lanes: i64) -> Vec<Step> {
    if p.dot.is_some() {
        return pack_in_groups(p, factor, name, at, width, lanes);
    }
    let axes = [Outer(factor.outer, width), Whole(factor.k), Inner(factor.outer, width)];
    let [k, element] = [1, 2].map(|axis| format!("{name}.{}", axis + usize::from(p.batch.is_some())));
    let [v, l] = ["v", "l"].map(|part| format!("{name}.{part}"));
    let mut steps = vec![stage_as(factor.name, at, name, &p.copy_layout(factor, &axes), p.copied)];
    if !factor.is_k_last() {
        steps.extend([split(&element, lanes, &v, &l), unroll(&v), vectorize(&l)]);
    } else if width < 2 * lanes {
        // Loads along rows; the panel's stores interleave them.
        steps.extend([split(&k, lanes, &v, &l), reorder(&[&v, &l, &element]), unroll(&element), vectorize(&l)]);
    } else {
        // Squares of vectors, transposed between loads along rows and stores along the panel.
        let [kv, kl] = ["kv", "kl"].map(|part| format!("{name}.{part}"));
        steps.extend([split(&k, lanes, &kv, &kl), split(&element, lanes, &v, &l)]);
        steps.extend([reorder(&[&kv, &v, &l, &kl]), unroll(&kl), vectorize(&l)]);
    }
    steps
}

/// Copies panels of `width` rows or columns of an operand, in which the elements of a dot product are
/// adjacent.
fn pack_in_groups(
    p: &MatmulProduct,
    factor: &MatmulFactor,
    name: &str,
    at: Option<&str>,
    width: i64,
    lanes: i64,
) -> Vec<Step> {
    let n = p.steps_at_once();
    let axes = [Outer(factor.outer, width), Outer(factor.k, n), Inner(factor.outer, width), Inner(factor.k, n)];
    let [element, step] = [2, 3].map(|axis| format!("{name}.{}", axis + usize::from(p.batch.is_some())));
    let mut steps = vec![stage_as(factor.name, at, name, &p.copy_layout(factor, &axes), p.copied)];
    if factor.is_k_last() {
        steps.push(vectorize(&step));
    } else {
        // Loads along rows; the panel's stores interleave them.
        let [v, l] = ["v", "l"].map(|part| format!("{name}.{part}"));
        steps.extend([split(&element, lanes, &v, &l), unroll(&step), vectorize(&l)]);
    }
    steps
}

/// Copies blocks of `mr` rows of the first operand in their layout.
fn copy_rows(p: &MatmulProduct, at: &str, mr: i64, lanes: i64) -> Vec<Step> {
    let axes: [LayoutAxis; 3] = [Outer(p.a.outer, mr), Inner(p.a.outer, mr), Whole(p.a.k)];
    let k = format!("A.p.{}", 2 + usize::from(p.batch.is_some()));
    vec![
        stage_as(p.a.name, Some(at), "A.p", &p.copy_layout(&p.a, &axes), p.copied),
        split(&k, lanes, "A.p.v", "A.p.l"),
        vectorize("A.p.l"),
    ]
}
