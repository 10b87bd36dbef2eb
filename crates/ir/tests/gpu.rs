//! Kernels of GPU schedules compute the program's results in any order of threads, and the interpreter finds
//! faulty ones.
//!
//! `TILEWRIGHT_CASES=1000` selects a long run of random schedules.

mod common;
mod sources;

use common::{Random, program};
use sources::{difference, on_gpu, outputs};
use tilewright_ir::gpu::simt::{SimtFault, ThreadOrder};
use tilewright_ir::gpu::store::BoxStore;
use tilewright_ir::gpu::{Abi, BufferUse, MapError, producer_warp};
use tilewright_ir::index::Ranges;
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::{Cond, Expr, GpuProgram, Index, Program, Stmt, Target, lower_gpu, verify};

const LONGEST: u64 = 50_000_000;
const ORDERS: [ThreadOrder; 3] = [ThreadOrder::Forward, ThreadOrder::Reverse, ThreadOrder::Shuffled(7)];

/// Number of schedules of each kind in one run.
fn n_cases() -> usize {
    std::env::var("TILEWRIGHT_CASES").map_or(12, |n| n.parse().expect("a number of cases"))
}

/// Maps a program to kernels and checks that these compute bit-identical results in every order.
#[track_caller]
fn kernels(program: &Program) -> GpuProgram {
    verify::verify(program).unwrap_or_else(|e| panic!("{e}\n{program}"));
    let expected = outputs(program, LONGEST).expect("short");
    let gpu = lower_gpu(program).unwrap_or_else(|e| panic!("{e}\n{program}"));
    for order in ORDERS {
        let got = on_gpu(&gpu, order).unwrap_or_else(|fault| panic!("{order:?}: {fault}\n{program}\n{gpu}"));
        if let Some(how) = difference(&got, &expected, 0.0) {
            panic!("{order:?}: {how}\n{program}\n{gpu}");
        }
    }
    gpu
}

fn n_barriers(gpu: &GpuProgram) -> usize {
    let mut n = 0;
    let statements = gpu.kernels().flat_map(|kernel| &kernel.body);
    statements.for_each(|s| s.walk(&mut |s| n += usize::from(*s == Stmt::Barrier)));
    n
}

// Random schedules.

/// Random schedule of a product: tiles of blocks and threads, shared copies of both factors, and sums in
/// registers.
fn matmul(random: &mut Random) -> Program {
    let [mut m, mut n, k] = [0; 3].map(|_| random.in_range(1, 37));
    let [threads_y, threads_x] = [0; 2].map(|_| random.pick(&[1, 2, 3, 4, 8]));
    let [rows, columns] = [0; 2].map(|_| random.pick(&[1, 2, 3, 4]));
    let inner = random.in_range(1, 9);
    let (tile_m, tile_n) = (threads_y * rows, threads_x * columns);
    // A thread has adjacent elements or strided ones.
    let split = |tile: &str, threads: i64, elements: i64, names: [&str; 2], strided: bool| match strided {
        true => format!("split {tile} {threads} -> {} {} shrink\n", names[1], names[0]),
        false => format!("split {tile} {elements} -> {} {} shrink\n", names[0], names[1]),
    };
    let [of_rows, of_columns] = [0; 2].map(|_| random.chance(40));
    // Loops over elements can then be inside only if all threads have the same number of elements.
    for (size, tile, strided) in [(&mut m, tile_m, of_rows), (&mut n, tile_n, of_columns)] {
        if strided {
            *size = *size / tile * tile + tile;
        }
    }
    let mut steps = format!("split i {tile_m} -> by im shrink\nsplit j {tile_n} -> bx jm shrink\n");
    steps += &split("im", threads_y, rows, ["ty", "ir"], of_rows);
    steps += &split("jm", threads_x, columns, ["tx", "jr"], of_columns);
    steps += &format!("split k {inner} -> ko ki shrink\nreorder by bx ko ty tx ki ir jr\n");
    let copies = random.chance(85);
    if copies {
        let (a, b) = (random.pick(&["0 1", "1 0"]), random.pick(&["0 1", "1 0"]));
        steps += &format!("stage A at ko -> A.s {a} shared\nstage B at ko -> B.s {b} shared\n");
    }
    if random.chance(85) {
        steps += "accumulate C at bx -> C.r\n";
        if random.chance(50) {
            steps += "unroll jr\nunroll ir\n";
        }
    }
    for copy in if copies { &["A.s", "B.s"][..] } else { &[] } {
        // Each thread copies strided elements or adjacent ones; or only threads along one axis copy.
        match random.below(3) {
            0 => {
                steps += &format!("bind {copy}.1 thread.x\n");
            }
            1 => {
                steps += &format!("split {copy}.0 {threads_y} -> {copy}.p {copy}.y shrink\n");
                steps += &format!("split {copy}.1 {threads_x} -> {copy}.q {copy}.x shrink\n");
                steps += &format!("reorder {copy}.y {copy}.x {copy}.p {copy}.q\n");
                steps += &format!("bind {copy}.y thread.y\nbind {copy}.x thread.x\n");
            }
            _ => {
                steps += &format!("split {copy}.1 2 -> {copy}.x {copy}.v shrink\n");
                steps += &format!("bind {copy}.0 thread.y\nbind {copy}.x thread.x\nvectorize {copy}.v\n");
            }
        }
    }
    if copies && random.chance(40) {
        steps += &format!("stream A.s B.s at ko in {}\n", random.in_range(2, 4));
    }
    steps += "bind by block.y\nbind bx block.x\nbind ty thread.y\nbind tx thread.x\n";
    let start = tilewright_ir::op::Workload::parse(&format!("matmul:m={m},n={n},k={k}")).unwrap().program();
    let mut program = start;
    // Steps that do not fit the sizes are skipped.
    for step in parse_steps(&steps).unwrap() {
        match tilewright_ir::schedule::apply(&program, &step) {
            Ok(next) => program = next,
            Err(_) => continue,
        }
    }
    program
}

#[test]
fn products_in_tiles() {
    let mut random = Random::new(1);
    let mut n_mapped = 0;
    for _ in 0..3 * n_cases() {
        let program = matmul(&mut random);
        if verify::verify(&program).is_err() {
            continue;
        }
        match lower_gpu(&program) {
            Ok(_) => {
                kernels(&program);
                n_mapped += 1;
            }
            // If steps were skipped, sums may be shared between threads, or barriers may be inside an uneven
            // loop.
            Err(MapError::NotSeparable { .. } | MapError::UnevenLoop { .. }) => {}
            Err(why) => panic!("{why}\n{program}"),
        }
    }
    assert!(n_mapped > 2 * n_cases(), "only {n_mapped} of {} schedules are ones for a GPU", 3 * n_cases());
}

#[test]
fn convolutions() {
    let mut random = Random::new(2);
    for _ in 0..n_cases() {
        let [h, w] = [0; 2].map(|_| random.in_range(3, 9));
        let (c, k, stride) = (random.in_range(1, 5), random.in_range(1, 9), random.in_range(1, 2));
        let text = format!("conv2d:c={c},h={h},w={w},k={k},r=3,s=3,stride={stride},pad=1,epilogue=bias+relu");
        let start = tilewright_ir::op::Workload::parse(&text).unwrap().program();
        let [of_k, of_q, of_c] = [0; 3].map(|_| random.in_range(1, 4));
        // Padding is inlined into the copy; the threads of a block complete its sums.
        let steps = format!(
            "inline pad
            split ok {of_k} -> k.b k.t shrink
            split oq {of_q} -> q.b q.t shrink
            reorder on k.b op q.b k.t q.t
            compute_at acc at q.b
            split c {of_c} -> c.o c.i shrink
            reorder c.o k q c.i r s
            stage W at c.o -> W.s 0 1 2 3 shared
            accumulate acc at q.b -> acc.r
            bind k.b block.y
            bind op block.x
            bind q.b block.z
            bind W.s.0 thread.y
            bind k thread.y
            bind q thread.x
            bind k.t thread.y
            bind q.t thread.x"
        );
        let mut program = start;
        let mut left_out = Vec::new();
        for step in parse_steps(&steps).unwrap() {
            match tilewright_ir::schedule::apply(&program, &step) {
                Ok(next) => program = next,
                Err(why) => left_out.push(format!("{step}: {why}")),
            }
        }
        assert!(left_out.is_empty(), "{left_out:?}\n{program}");
        kernels(&program);
    }
}

/// Softmax of rows that threads normalize together: each computes a part of the maximum and of the sum.
fn softmax(rows: i64, columns: i64, threads: i64) -> Program {
    let each = (columns + threads - 1) / threads;
    let (whole, at) = (format!("for k in min({each}, {columns} - {each}*t)"), format!("[i, {each}*t + k]"));
    program(&format!(
        "program \"softmax\"
        buffer X: f32[{rows}, {columns}] global input
        buffer Y: f32[{rows}, {columns}] global output
        buffer M: f32[{threads}] shared temporary
        buffer most: f32[1] shared temporary
        buffer E: f32[{threads}, {each}] local temporary
        buffer P: f32[{threads}] shared temporary
        buffer sum: f32[1] shared temporary
        loops i, t, k, s
        run {{ block.x i in {rows} {{
            alloc M alloc most alloc E alloc P alloc sum
            thread.x t in {used} {{ {whole} {{ M[t] max= X{at} first k == 0 }} }}
            for s in {used} {{ most[0] max= M[s] first s == 0 }}
            thread.x t in {used} {{
                {whole} {{ E[t, k] = exp(X{at} - most[0]) P[t] += E[t, k] first k == 0 }}
            }}
            for s in {used} {{ sum[0] += P[s] first s == 0 }}
            thread.x t in {used} {{ {whole} {{ Y{at} = E[t, k] / sum[0] }} }}
        }} }}",
        used = (columns + each - 1) / each,
    ))
}

#[test]
fn reductions_by_threads_together() {
    let mut random = Random::new(3);
    for _ in 0..n_cases() {
        let gpu = kernels(&softmax(random.in_range(1, 4), random.in_range(2, 41), random.in_range(2, 9)));
        assert_eq!(n_barriers(&gpu), 4, "{gpu}");
    }
}

// Properties of kernels.

#[test]
fn kernels_tell_their_arguments() {
    let gpu = kernels(&program(
        "program \"two\" buffer X: f32[8] global input buffer I: i64[8] global input
        buffer Y: f32[8] global output buffer T: f32[8] local temporary buffer S: f32[8] shared temporary
        loops b, t run {
            alloc T
            block.x b in 2 { thread.x t in 4 { T[4*b + t] = X[at(I[4*b + t])] } }
            block.x b in 1 {
                alloc S
                thread.x t in 8 { S[t] = T[t] }
                thread.x t in 8 { Y[t] = S[7 - t] }
                thread.x t in 8 { Y[t] += 1.0 first never }
            }
        }",
    ));
    let [first, second] = gpu.body.as_slice() else { panic!("{gpu}") };
    let names = |kernel: &tilewright_ir::GpuKernel| {
        let named = |(b, access)| (gpu.program.buffer(b).name.clone(), access);
        kernel.arguments(&gpu).into_iter().map(named).collect::<Vec<_>>()
    };
    let row = |name: &str, access| (name.to_owned(), access);
    let of_first = [row("X", BufferUse::Read), row("I", BufferUse::Read), row("T", BufferUse::Write)];
    assert_eq!(names(first), of_first);
    assert_eq!(names(second), [row("Y", BufferUse::ReadWrite), row("T", BufferUse::Read)]);
    assert_eq!((first.grid(), first.block()), ([2, 1, 1], [4, 1, 1]));
    assert_eq!((second.shared_bytes(&gpu), second.n_threads()), (32, 8));
    assert_eq!(gpu.device_buffers().len(), 4);
    // Each thread accesses only its own part of `Y`.
    assert_eq!(n_barriers(&gpu), 1, "{gpu}");
}

// Faults that the interpreter finds.

/// Fault of a program after a change of its only kernel.
#[track_caller]
fn fault(mut gpu: GpuProgram, change: impl Fn(&mut Vec<Stmt>), order: ThreadOrder) -> SimtFault {
    change(&mut gpu.body[0].body);
    on_gpu(&gpu, order).expect_err(&gpu.to_string())
}

fn copied() -> GpuProgram {
    kernels(&program(
        "program \"copied\" buffer X: f32[4, 8] global input buffer Y: f32[4, 8] global output
        buffer S: f32[8] shared temporary loops b, k, t run {
            block.x b in 2 { for k in 2 {
                alloc S
                thread.x t in 8 { S[t] = X[2*b + k, t] }
                thread.x t in 8 { Y[2*b + k, t] = S[7 - t] }
            } }
        }",
    ))
}

/// Calls `change` for all blocks of statements, outermost first.
fn each_block(block: &mut Vec<Stmt>, change: &mut dyn FnMut(&mut Vec<Stmt>)) {
    change(block);
    block.iter_mut().for_each(|s| s.blocks_mut().for_each(|inner| each_block(inner, change)));
}

#[test]
fn faults_are_found_in_every_order() {
    for order in ORDERS {
        let no_barriers = |block: &mut Vec<Stmt>| each_block(block, &mut |b| b.retain(|s| *s != Stmt::Barrier));
        let text = fault(copied(), no_barriers, order).to_string();
        // A thread that runs ahead reads unwritten elements; one that lags behind reads those of the next
        // iteration.
        let is_told = text.contains("is raced for by thread (") || text.contains("is read before it is written");
        assert!(text.starts_with("kernel run_0") && text.contains("S[") && is_told, "{text}");

        let first_barrier = |block: &mut Vec<Stmt>| {
            let mut found = false;
            each_block(block, &mut |b| b.retain(|s| *s != Stmt::Barrier || std::mem::replace(&mut found, true)));
        };
        assert!(matches!(fault(copied(), first_barrier, order), SimtFault::Race { .. }));

        // Barrier that only some threads reach.
        let guarded = |block: &mut Vec<Stmt>| {
            each_block(block, &mut |b| {
                // Skips a block that is already guarded.
                let is_guarded = b.len() == 1;
                for s in b.iter_mut().filter(|_| !is_guarded).filter(|s| **s == Stmt::Barrier) {
                    let thread = tilewright_ir::LoopId(3);
                    let cond = Cond::Lt(thread.into(), 4.into());
                    *s = Stmt::If { cond, then: vec![Stmt::Barrier], otherwise: Vec::new() };
                }
            });
        };
        let text = fault(copied(), guarded, order).to_string();
        assert!(text.contains("do not reach the same barriers, as thread.x < 4 differs"), "{text}");

        // Blocks that write the same elements.
        let same = |block: &mut Vec<Stmt>| {
            let b = tilewright_ir::LoopId(0);
            each_block(block, &mut |stmts| {
                stmts.iter_mut().for_each(|s| *s = s.substitute(b, &Index::from(0)));
            });
        };
        let text = fault(copied(), same, order).to_string();
        assert!(text.contains("kernel run_0: Y[") && text.contains("both write it"), "{text}");
        assert!(text.contains("of block (0, 0, 0)") && text.contains("of block (1, 0, 0)"), "{text}");

        // Subscripts that are one off.
        let beyond = |block: &mut Vec<Stmt>| {
            let k = tilewright_ir::LoopId(1);
            each_block(block, &mut |stmts| {
                stmts.iter_mut().filter(|s| s.own_write().is_some()).for_each(|s| {
                    *s = s.substitute(k, &Index::from(k).offset(1));
                });
            });
        };
        let text = fault(copied(), beyond, order).to_string();
        assert!(text.contains("is outside X[4, 8]") && text.contains("b=1, thread.x="), "{text}");

        // Shared memory that is never written.
        let unwritten = |block: &mut Vec<Stmt>| {
            each_block(block, &mut |stmts| {
                stmts.retain(|s| s.own_write().is_none_or(|(b, _)| b.0 != 2));
            });
        };
        let text = fault(copied(), unwritten, order).to_string();
        assert!(text.contains("S[") && text.contains("is read before it is written"), "{text}");
    }
}

/// Checks that asynchronous copies are available after a wait, and to other threads after the next barrier.
#[test]
fn copies_are_waited_for() {
    let gpu = kernels(&program(
        "program \"streamed\" buffer X: f32[5, 8] global input buffer Y: f32[5, 8] global output
        buffer S: f32[3, 8] async temporary loops b, k, t run {
            block.x b in 1 {
                alloc S
                thread.x t in 8 { S[0, t] = X[0, t] }
                wait 2
                thread.x t in 8 { S[1, t] = X[1, t] }
                for k in 5 {
                    wait 1
                    if k < 3 { thread.x t in 8 { S[(k + 2) % 3, t] = X[k + 2, t] } }
                    thread.x t in 8 { Y[k, t] = S[k % 3, 7 - t] }
                }
            }
        }",
    ));
    // One barrier after each wait.
    assert_eq!(n_barriers(&gpu), 2, "{gpu}");
    type Change<'c> = (&'c str, &'c dyn Fn(&mut Vec<Stmt>));
    let changes: [Change; 4] = [
        ("still on its way", &|b| b.retain(|s| *s != Stmt::Wait(1))),
        ("still on its way", &|b| b.iter_mut().filter(|s| **s == Stmt::Wait(1)).for_each(|s| *s = Stmt::Wait(2))),
        // Two of the copies then form one group.
        ("still on its way", &|b| b.retain(|s| *s != Stmt::Wait(2))),
        // Threads that run ahead read unwritten elements or overwrite elements that others have yet to read.
        ("S[", &|b| b.retain(|s| *s != Stmt::Barrier)),
    ];
    for (order, (found, change)) in ORDERS.iter().flat_map(|order| changes.iter().map(move |c| (*order, c))) {
        let text = fault(gpu.clone(), |body| each_block(body, &mut |b| change(b)), order).to_string();
        assert!(text.starts_with("kernel run_0") && text.contains("S[") && text.contains(found), "{text}");
    }
}

/// Checks that a warp's stores form a box if its threads have all elements of 16 rows of 128 bytes, two
/// adjacent ones each.
#[test]
fn stores_of_a_warp_are_boxes() {
    let place = "2*b + v, 16*w + 8*i + y, 8*t + 2*x + j";
    let of = |dtype: &str, parts: i64, columns: i64, place: &str| {
        let text = format!(
            "program \"store\" buffer X: {dtype}[4, 64, {columns}] global input
            buffer Y: {dtype}[4, 64, {columns}] global output loops b, v, w, y, x, t, i, j run {{
                block.x b in 2 {{ for v in 2 {{ thread.z w in 4 {{ thread.y y in 8 {{ thread.x x in 4 {{
                    for t in {parts} {{ unrolled i in 2 {{ vectorized j in 2 {{ Y[{place}] = X[{place}] }} }} }}
                }} }} }} }} }}
            }}"
        );
        let marked =
            apply_all(&program(&text), &parse_steps("tensorize t tma").unwrap()).map_err(|(_, e)| e.to_string())?;
        lower_gpu(&marked).map_err(|e| e.to_string())
    };
    let gpu = of("f32", 4, 32, place).unwrap();
    let kernel = &gpu.body[0];
    // Two boxes for each warp.
    assert_eq!(kernel.shared_bytes(&gpu), 4 * 2 * 16 * 128);
    // A kernel without products has no producer warp and no tensor maps.
    assert!(Abi::of(&gpu, kernel, &Target::named("sm_90a").unwrap()).maps.is_empty());
    let [x, y] = [0, 1].map(|axis| kernel.threads[axis].unwrap().0);
    let mut found = Vec::new();
    kernel.body.iter().for_each(|s| {
        s.walk(&mut |s| {
            if let Stmt::For(l) = s {
                found.extend(BoxStore::of(&gpu.program, l, [x, y], &Ranges::default()).ok().map(|store| store.map));
            }
        });
    });
    assert_eq!(found.len(), 1);
    assert_eq!((&found[0].extents[..], found[0].rounded), (&[1, 16, 32][..], false));
    // Numbers are stored without rounding.
    assert_eq!(found[0].described(&gpu.program).kind, 2);
    assert!(of("bf16", 8, 64, place).is_ok());
    for (dtype, parts, columns, place, why) in [
        ("f32", 8, 64, place, "parts of eight columns are not 128 bytes"),
        ("f64", 2, 16, place, "f32, f16 or bf16"),
        ("f32", 4, 33, place, "multiples of 16 bytes"),
        ("f32", 4, 32, "2*b + v, 16*w + 2*y + i, 8*t + 2*x + j", "do not store rows of a box"),
        ("f32", 4, 32, "2*b + v, 16*w + 8*i + y, 8*t + x + 4*j", "do not store rows of a box"),
        ("f32", 4, 32, "2*b + v, 16*w + 8*i + y, 8*x + 2*t + j", "do not store rows of a box"),
        ("f32", 4, 64, "2*b + v, 8*i + y, 16*t + 2*x + j", "do not store rows of a box"),
    ] {
        let refused = of(dtype, parts, columns, place).unwrap_err();
        assert!(refused.contains(why), "{place}: {refused}");
    }
}

/// Product of four warps with K-major operands in ring buffers; `rows` is the kind of the loop over the two
/// tiles of rows.
fn of_rings(n_steps: i64, stream: &str, rows: &str) -> GpuProgram {
    let k = 32 * n_steps;
    let product = program(&format!(
        "program \"product\" buffer X: f32[128, {k}] global input buffer W: f32[16, {k}] global input
        buffer Y: f32[128, 16] global output loops i, j, k run {{
            for i in 128 {{ for j in 16 {{ for k in {k} {{ Y[i, j] += X[i, k] * W[j, k] first k == 0 }} }} }}
        }}"
    ));
    let steps = format!(
        "split i 64 -> ib ir
        split ir 16 -> iw iq
        split iq 8 -> ih il
        split j 8 -> jm jt
        split jt 2 -> jl je
        split k 32 -> ko ks
        split ks 8 -> kn ki
        reorder ib ko iw il jl kn ki jm ih je
        accumulate Y at ib -> C.r
        stage X at ko -> A.s 1/32 0 1%32 shared
        stage W at ko -> B.s 1/32 0 1%32 shared
        stream {stream}
        unroll je
        unroll ih
        unroll jm
        unroll kn
        tensorize ki wgmma
        {rows}
        bind iw thread.z
        bind il thread.y
        bind jl thread.x"
    );
    kernels(&apply_all(&product, &parse_steps(&steps).unwrap()).unwrap_or_else(|(at, e)| panic!("step {at}: {e}")))
}

/// Checks that a producer warp can perform the copies of a kernel if the n-th products read the n-th copies
/// and no other buffer is shared.
#[test]
fn a_warp_may_copy_for_others() {
    let target = Target::named("sm_90a").unwrap();
    let has_producer_warp = |gpu: &GpuProgram| producer_warp::has_producer_warp(gpu, &gpu.body[0]);
    let rows = "bind ib block.x";
    for (n_steps, stream, rows) in [
        (1, "A.s B.s at ko in 3 fed", rows),
        (2, "A.s B.s at ko in 4 last fed", rows),
        (3, "A.s B.s at ko in 2 fed", rows),
        (5, "B.s A.s at ko in 3 last fed", rows),
        (6, "A.s B.s at ko in 4 held last fed", rows),
        // A block processes both tiles, and the stages of the second one start from zero again.
        (4, "A.s B.s at ko in 3 last fed", ""),
        (5, "A.s B.s at ko in 4 held last fed", ""),
    ] {
        let gpu = of_rings(n_steps, stream, rows);
        assert!(has_producer_warp(&gpu), "{stream}: {gpu}");
        let [kernel] = &gpu.body[..] else { panic!("one kernel") };
        assert_eq!((kernel.block(), Abi::of(&gpu, kernel, &target).block), ([4, 8, 4], [4, 8, 5]));
        assert_eq!(Abi::of(&gpu, kernel, &Target::named("sm_80").unwrap()).block, [4, 8, 4]);
    }
    assert!(!has_producer_warp(&of_rings(7, "A.s B.s at ko in 3", rows)), "no ring says so");
    assert!(!has_producer_warp(&of_rings(7, "A.s at ko in 3 fed", rows)), "threads copy the other factor");
    // If one of the multiplying threads copies, it counts stages from the first one on.
    let n_maps = |rows: &str| {
        let gpu = of_rings(7, "A.s B.s at ko in 3", rows);
        Abi::of(&gpu, &gpu.body[0], &target).maps.len()
    };
    assert_eq!([n_maps(rows), n_maps("")], [2, 0]);
    let gpu = of_rings(7, "A.s B.s at ko in 3 last fed", rows);
    let is_copy = |s: &Stmt| matches!(s, Stmt::If { cond: Cond::Lt(..), .. });
    let elsewhere = |s: &Stmt, name: &str| {
        let ring = gpu.program.find_buffer(name).unwrap();
        s.clone().map_own_loads(&mut |b, index| {
            let next = [&[index[0].offset(1).modulo(3)], &index[1..]].concat();
            (b == ring).then_some(Expr::Load(b, next))
        })
    };
    type Change<'c> = (&'c str, &'c dyn Fn(&mut Vec<Stmt>));
    let changes: [Change; 4] = [
        ("nothing is copied further on", &|b| b.retain(|s| !is_copy(s))),
        ("products of several places", &|b| b.iter_mut().for_each(|s| *s = elsewhere(s, "A.s"))),
        ("products of the place before", &|b| {
            b.iter_mut().for_each(|s| *s = elsewhere(&elsewhere(s, "A.s"), "B.s"));
        }),
        ("each place is copied to twice", &|b| {
            if let Some(at) = b.iter().position(is_copy) {
                b.insert(at, b[at].clone());
            }
        }),
    ];
    for (what, change) in changes {
        let mut gpu = gpu.clone();
        each_block(&mut gpu.body[0].body, &mut |block| change(block));
        assert!(!has_producer_warp(&gpu), "{what}: {gpu}");
    }
}

/// Checks that neighbouring blocks along x share the copies that both make, if they run the same sequence of
/// copies.
#[test]
fn neighbouring_blocks_copy_for_each_other() {
    let target = Target::named("sm_90a").unwrap();
    let shared = |gpu: &GpuProgram, target: &Target| -> Vec<String> {
        let rings = Abi::of(gpu, &gpu.body[0], target).shared_rings;
        rings.into_iter().map(|b| gpu.program.buffer(b).name.clone()).collect()
    };
    let of = |stream: &str, rows: &str| of_rings(5, stream, rows);
    let (rows, multicast) = ("bind ib block.x", "A.s B.s at ko in 3 last fed multicast");
    let gpu = of(multicast, rows);
    assert_eq!(shared(&gpu, &target), ["B.s"], "{gpu}");
    let abi = Abi::of(&gpu, &gpu.body[0], &target);
    let boxes: Vec<&[i64]> = abi.maps.iter().map(|map| &map.extents[..]).collect();
    assert_eq!(boxes, [&[64, 32], &[8, 32]], "half of the columns, all of the rows");
    // Other GPUs, blocks that are not neighbours along x, and an odd number of blocks.
    assert!(shared(&gpu, &Target::named("sm_80").unwrap()).is_empty());
    for (stream, rows) in [
        ("A.s B.s at ko in 3 last fed", rows),
        (multicast, "bind ib block.y"),
        (multicast, ""),
        (multicast, "split ib 2 -> ic id\nbind ic block.x"),
    ] {
        assert!(shared(&of(stream, rows), &target).is_empty(), "{stream} {rows}");
    }
    // Copies or products that only one of the two blocks makes, or makes with other columns or reduction
    // steps.
    let block = Index::from(gpu.body[0].blocks[0].unwrap().0);
    let of_columns = |stmt: Stmt, by: &dyn Fn(&[Index]) -> Vec<Index>| {
        let array = gpu.program.find_buffer("W").unwrap();
        let change = |s: &Stmt| s.clone().map_own_loads(&mut |b, index| (b == array).then(|| Expr::Load(b, by(index))));
        let mut block = vec![stmt];
        each_block(&mut block, &mut |block| block.iter_mut().for_each(|s| *s = change(s)));
        block.remove(0)
    };
    type Change<'c> = (&'c str, &'c dyn Fn(&mut Vec<Stmt>), &'c [&'c str]);
    let changes: [Change; 5] = [
        (
            "the first block alone has steps",
            &|body| {
                let cond = Cond::Lt(block.clone(), 1.into());
                *body = vec![Stmt::If { cond, then: std::mem::take(body), otherwise: Vec::new() }];
            },
            &[],
        ),
        (
            "the first two blocks have steps",
            &|body| {
                let cond = Cond::Lt(block.clone(), 2.into());
                *body = vec![Stmt::If { cond, then: std::mem::take(body), otherwise: Vec::new() }];
            },
            &["B.s"],
        ),
        (
            "columns differ",
            &|body| {
                let by = |index: &[Index]| vec![index[0].add(&block.scale(16)), index[1].clone()];
                *body = std::mem::take(body).into_iter().map(|s| of_columns(s, &by)).collect();
            },
            &[],
        ),
        (
            "columns are those of four blocks",
            &|body| {
                let by = |index: &[Index]| vec![index[0].add(&block.floor_div(4).scale(16)), index[1].clone()];
                *body = std::mem::take(body).into_iter().map(|s| of_columns(s, &by)).collect();
            },
            &["B.s"],
        ),
        (
            "columns are those of three blocks",
            &|body| {
                let by = |index: &[Index]| vec![index[0].add(&block.floor_div(3).scale(16)), index[1].clone()];
                *body = std::mem::take(body).into_iter().map(|s| of_columns(s, &by)).collect();
            },
            &[],
        ),
    ];
    for (what, change, expected) in changes {
        let mut gpu = gpu.clone();
        change(&mut gpu.body[0].body);
        // There must be other clusters.
        gpu.body[0].blocks[0].as_mut().unwrap().1 = 8;
        assert_eq!(shared(&gpu, &target), expected, "{what}: {gpu}");
    }
}

// Mutants.

/// Way to break a kernel, with the number of the location.
#[derive(Clone, Copy, Debug)]
enum Mutation {
    Barrier(usize),
    Wait(usize),
    Subscript(usize, usize, i64),
    Guard(usize),
}

/// Applies a mutation; returns a description of the location, or `None` if there is no such location.
fn mutate(gpu: &mut GpuProgram, mutation: Mutation) -> Option<String> {
    let tables = gpu.program.clone();
    let mut seen = 0;
    let mut done = None;
    let mut change = |block: &mut Vec<Stmt>| {
        let mut at = 0;
        while at < block.len() && done.is_none() {
            let text = tilewright_ir::text::stmt_to_string(&tables, &block[at]);
            match (mutation, &mut block[at]) {
                (Mutation::Barrier(n), Stmt::Barrier) => {
                    seen += 1;
                    if seen == n + 1 {
                        block.remove(at);
                        done = Some(format!("barrier {n}"));
                    }
                }
                (Mutation::Wait(n), Stmt::Wait(_)) => {
                    seen += 1;
                    if seen == n + 1 {
                        block.remove(at);
                        done = Some(format!("wait {n}"));
                    }
                }
                (Mutation::Guard(n), Stmt::If { cond, .. }) if *cond != Cond::True => {
                    seen += 1;
                    if seen == n + 1 {
                        done = Some(format!("guard of {}", text));
                        let Stmt::If { cond, .. } = &mut block[at] else { unreachable!() };
                        *cond = Cond::True;
                    }
                }
                (Mutation::Subscript(n, d, by), Stmt::Store { buffer, .. })
                    if tables.buffer(*buffer).scope.is_shared() =>
                {
                    seen += 1;
                    if seen == n + 1 {
                        done = Some(format!("subscript {d} of {}", text));
                        let Stmt::Store { index, .. } = &mut block[at] else { unreachable!() };
                        let d = d % index.len();
                        index[d] = index[d].offset(by);
                    }
                }
                _ => {}
            }
            at += 1;
        }
    };
    for kernel in &mut gpu.body {
        each_block(&mut kernel.body, &mut change);
    }
    done
}

/// Drops barriers, shifts subscripts of copies and removes guards: a mutant that changes results in some
/// order of threads is detected in one order, and an undetected mutant changes no results.
#[test]
fn mutants_are_found() {
    let mut random = Random::new(4);
    let (mut n_mutants, mut n_matter, mut n_found, mut survivors) = (0, 0, 0, Vec::new());
    while n_matter < 200 {
        let program = match random.below(4) {
            0 => softmax(2, random.in_range(5, 20), random.in_range(2, 5)),
            _ => matmul(&mut random),
        };
        if verify::verify(&program).is_err() || lower_gpu(&program).is_err() {
            continue;
        }
        let gpu = kernels(&program);
        let expected = outputs(&program, LONGEST).expect("short");
        for _ in 0..4 {
            let mutation = match random.below(4) {
                0 => Mutation::Barrier(random.below(4)),
                3 => Mutation::Wait(random.below(3)),
                1 => Mutation::Subscript(random.below(6), random.below(2), random.pick(&[-1, 1])),
                _ => Mutation::Guard(random.below(6)),
            };
            let mut mutant = gpu.clone();
            let Some(what) = mutate(&mut mutant, mutation) else { continue };
            n_mutants += 1;
            // Fault or different result.
            let is_wrong = |order| match on_gpu(&mutant, order) {
                Err(_) => true,
                Ok(got) => difference(&got, &expected, 0.0).is_some(),
            };
            let is_found = is_wrong(ThreadOrder::Forward);
            let matters =
                is_found || (0..6).any(|seed| is_wrong(ThreadOrder::Shuffled(seed))) || is_wrong(ThreadOrder::Reverse);
            n_matter += usize::from(matters);
            n_found += usize::from(is_found);
            if !is_found {
                survivors.push(what);
            }
        }
    }
    println!("{n_mutants} mutants, {n_matter} matter, {n_found} found; survivors:\n{}", survivors.join("\n"));
    assert!(100 * n_found >= 99 * n_matter, "{n_found} of {n_matter} are found");
    assert!(2 * n_matter > n_mutants, "{n_matter} of {n_mutants} matter: what else would be found?");
}
