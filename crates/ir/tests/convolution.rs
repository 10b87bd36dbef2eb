//! Complete schedules of convolutions, like those of templates: every step is legal and preserves the
//! results, before and after lowering.

mod sources;

use sources::{difference, outputs, tolerance};
use tilewright_ir::schedule::{apply, parse_steps};
use tilewright_ir::{Program, lower, verify};

/// Applies steps to the program of a line and checks that its results stay the same, before and after
/// lowering.
fn scheduled(line: &str, steps: &str) -> Program {
    let source = sources::program(line);
    let steps = parse_steps(steps).unwrap_or_else(|e| panic!("{e}"));
    let mut program = source.clone();
    for step in &steps {
        program = apply(&program, step).unwrap_or_else(|e| panic!("{line}: `{step}`: {e}\n{program}"));
        verify::verify(&program).unwrap_or_else(|e| panic!("{line}, after `{step}`: {e}\n{program}"));
    }
    let compute = |program: &Program| outputs(program, u64::MAX).expect("no limit");
    let expected = compute(&source);
    for program in [&program, &lower::lower_verified(&program)] {
        if let Some(how) = difference(&compute(program), &expected, tolerance(line, &steps)) {
            panic!("{line}: {how}\n{program}");
        }
    }
    program
}

/// Schedules blocked channels, padding for a few rows at a time, and a register tile of result columns and
/// channels.
#[test]
fn direct_in_blocks_of_channels() {
    let steps = "
        layout pad 0 1/4 2 3 1%4
        layout acc 0 1/4 2 3 1%4
        stage W -> W.p 0/4 1 2 3 0%4
        split k 4 -> ko ki shrink
        split p 3 -> po pi shrink
        split q 2 -> qo qi shrink
        split c 2 -> co ci shrink
        reorder n po ko co pi qo ci r s qi ki
        accumulate acc at qo -> tile
        unroll qi
        vectorize ki
        parallel n";
    for line in [
        "conv:n=2,c=3,h=5,w=4,k=6,r=3,stride=1,dilation=1,pad=1,constant=1",
        "conv:n=1,c=4,h=7,w=8,k=5,r=3,stride=2,dilation=1,pad=1,constant=1",
        "conv:n=1,c=2,h=9,w=6,k=4,r=2,stride=1,dilation=2,pad=1,constant=0",
    ] {
        scheduled(line, steps);
    }
}

/// Schedules blocked layouts after moving stages: padding with each block of rows, the result's tile with its
/// epilogue.
#[test]
fn layouts_of_moved_stages() {
    let steps = "
        split op 2 -> opo opi shrink
        split ok 4 -> oko oki shrink
        reorder on opo oko opi oki oq
        compute_at acc at oko
        compute_at pad at opo
        layout pad 0 2 1/2 3 1%2
        layout acc 0 2 3 1
        reorder n p q c r s k
        accumulate acc at q -> tile
        vectorize k";
    for line in [
        "conv:n=2,c=3,h=5,w=4,k=6,r=1,stride=2,dilation=1,pad=1,constant=1",
        "conv:n=1,c=3,h=6,w=5,k=5,r=3,stride=1,dilation=1,pad=2,constant=1",
    ] {
        scheduled(line, steps);
    }
}

/// Schedules the matrix product of im2col, whose tiles are packed into panels directly from the operand.
#[test]
fn im2col_by_tiles() {
    let steps = "
        fuse p q -> pq
        fuse c r -> cr
        fuse cr s -> crs
        reindex acc pad as col
        inline pad
        split pq 4 -> pqo pqi shrink
        split k 3 -> ko ki shrink
        split crs 8 -> crso crsi shrink
        reorder n pqo crso ko crsi ki pqi
        compute_at col at crso
        layout col 0 1/4 2 1%4
        stage W -> W.p 0/3 1 2 3 0%3
        accumulate acc at ko -> tile
        unroll ki
        vectorize pqi";
    for line in [
        "conv:n=2,c=3,h=5,w=4,k=4,r=3,stride=2,dilation=1,pad=1,constant=1",
        "conv:n=1,c=2,h=6,w=7,k=3,r=3,stride=1,dilation=1,pad=1,constant=0",
        "conv:n=1,c=5,h=6,w=6,k=2,r=2,stride=1,dilation=2,pad=2,constant=1",
    ] {
        scheduled(line, steps);
    }
    // Padding for a tile whose rows and columns are quotients and remainders.
    let padded = steps.replace("inline pad", "").replace("layout col", "compute_at pad at pqo\n layout col");
    for (line, shape) in [
        ("conv:n=2,c=3,h=5,w=4,k=4,r=3,stride=2,dilation=1,pad=1,constant=1", [1, 3, 5, 5]),
        ("conv:n=1,c=3,h=12,w=7,k=4,r=3,stride=1,dilation=1,pad=1,constant=1", [1, 3, 4, 9]),
    ] {
        let program = scheduled(line, &padded);
        let pad = program.find_buffer("pad").expect("it is not inlined");
        assert_eq!(program.buffer(pad).shape, shape, "{line}");
    }
    let line = "conv:n=1,c=3,h=6,w=7,k=3,r=1,stride=1,dilation=1,pad=0,constant=1";
    scheduled(line, &steps.replace("acc pad", "acc X").replace("inline pad", ""));
}

/// Schedules Winograd's convolution by blocks of tile rows, with transforms unrolled and in vectors of
/// channels.
#[test]
fn winograd_by_rows_of_tiles() {
    let steps = |tile: i64| {
        let rows = 2 * tile;
        format!(
            "winograd acc {tile}
            inline acc
            inline pad
            split op {rows} -> po pi shrink
            split pi {tile} -> pt pii shrink
            split oq {tile} -> qt qi shrink
            split ok 4 -> oko oki shrink
            reorder on po pt qt oko pii qi oki
            compute_at acc.r at oko
            compute_at acc.m at po
            compute_at acc.v at po
            split acc.v.c 4 -> vco vci shrink
            reorder acc.v.n acc.v.th acc.v.tw vco acc.v.a acc.v.b vci
            compute_at acc.d at vco
            reorder acc.d.n acc.d.th acc.d.tw acc.d.j acc.d.a acc.d.c
            reorder acc.r.n acc.r.th acc.r.tw acc.r.b acc.r.i acc.r.k
            layout acc.u 0 1 2/4 3 2%4
            layout acc.v 0 1 2 4 5 3
            layout acc.m 0 1 2 4 5 3
            split acc.m.k 4 -> mko mki shrink
            reorder acc.m.a acc.m.b acc.m.n mko acc.m.th acc.m.c acc.m.tw mki
            accumulate acc.m at acc.m.th -> tile
            unroll acc.d.j
            unroll acc.d.a
            unroll acc.v.a
            unroll acc.v.b
            unroll acc.r.b
            unroll acc.r.i
            unroll pii
            unroll qi
            vectorize acc.d.c
            vectorize vci
            vectorize mki
            vectorize acc.r.k
            vectorize oki"
        )
    };
    for (tile, line) in [
        (2, "conv:n=1,c=4,h=8,w=8,k=4,r=3,stride=1,dilation=1,pad=1,constant=1"),
        (4, "conv:n=1,c=5,h=11,w=9,k=6,r=3,stride=1,dilation=1,pad=1,constant=1"),
        (4, "conv:n=2,c=3,h=9,w=10,k=4,r=3,stride=1,dilation=1,pad=2,constant=0,dtype=f64"),
    ] {
        let program = scheduled(line, &steps(tile));
        // Unrolled loops select the rows of the transforms, so that no select remains at run time.
        let lowered = lower::lower_verified(&program).to_string();
        for choice in ["acc.d.a ==", "acc.v.b ==", "acc.r.i ==", "qi =="] {
            assert!(!lowered.contains(choice), "{choice}\n{lowered}");
        }
    }
}
