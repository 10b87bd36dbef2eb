//! Lowering of padded convolutions with tilings like those of templates preserves the results.
//!
//! `TILEWRIGHT_CASES=20000` selects a long run. A failure is shrunk and printed with its steps.

mod sources;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};
use sources::{difference, outputs, reversed};
use tilewright_ir::schedule::{apply, parse_steps};
use tilewright_ir::{Program, lower, text};

/// Maximum number of interpreter iterations of a case.
const LONGEST: u64 = 2_000_000;

/// Two-dimensional convolution of images [c, h, w] with filters [c, r, s, k] into [p, q, k]; `up - 1` zeros
/// separate neighbours of the input, as in a transposed strided convolution.
#[derive(Clone, Debug)]
struct Convolution {
    channels: [i64; 2],
    image: [i64; 2],
    filter: [i64; 2],
    stride: i64,
    pad: i64,
    up: i64,
}

impl Convolution {
    fn output(&self) -> [i64; 2] {
        [0, 1].map(|d| ((self.image[d] - 1) * self.up + 1 + 2 * self.pad - self.filter[d]).div_euclid(self.stride) + 1)
    }

    fn program(&self) -> Program {
        let Convolution { channels: [c, k], image: [h, w], filter: [r, s], stride, pad, up } = self;
        let [p, q] = self.output();
        let [rows, columns] = [(p - 1) * stride + r, (q - 1) * stride + s];
        let inside = |i: &str, n: i64| {
            let from = format!("{} < {i} && {i} < {}", pad - 1, pad + (n - 1) * up + 1);
            if *up == 1 { from } else { format!("{from} && ({i} - {pad}) % {up} == 0") }
        };
        let source = |i: &str| if *up == 1 { format!("{i} - {pad}") } else { format!("({i} - {pad}) // {up}") };
        let text = format!(
            "program \"convolution\"
            buffer X: f32[{c}, {h}, {w}] global input
            buffer W: f32[{c}, {r}, {s}, {k}] global const
            buffer P: f32[{c}, {rows}, {columns}] global temporary
            buffer Y: f32[{p}, {q}, {k}] global output
            loops d, i, j, p, q, k, c, r, s
            run {{
              alloc P
              for d in {c} {{ for i in {rows} {{ for j in {columns} {{
                P[d, i, j] = select({} && and(true, {}), X[d, {}, {}], 0.0)
              }} }} }}
              for p in {p} {{ for q in {q} {{ for k in {k} {{ for c in {c} {{ for r in {r} {{ for s in {s} {{
                Y[p, q, k] += P[c, {stride}*p + r, {stride}*q + s] * W[c, r, s, k] first c == 0 && r == 0 && s == 0
              }} }} }} }} }} }}
            }}",
            inside("i", *h),
            inside("j", *w),
            source("i"),
            source("j"),
        );
        text::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
    }
}

fn convolutions() -> impl Strategy<Value = Convolution> {
    let image = [1..12i64, 1..20i64];
    let sizes = (prop::array::uniform2(1..5i64), image, prop::array::uniform2(1..5i64));
    (sizes, 1..3i64, 0..4i64, prop_oneof![4 => Just(1i64), 1 => 2..4i64])
        .prop_map(|((channels, image, filter), stride, pad, up)| Convolution {
            channels,
            image,
            filter,
            stride,
            pad,
            up,
        })
        .prop_filter("the filter fits", |c| c.output().iter().all(|&n| n > 0))
}

/// Random steps in the order of a template, with random factors and loop orders.
fn steps() -> impl Strategy<Value = Vec<String>> {
    let split = |of: &'static str| {
        let tail = prop::sample::select(vec!["shrink", "guard"]);
        (2..8i64, tail).prop_map(move |(factor, tail)| format!("split {of} {factor} -> {of}o {of}i {tail}"))
    };
    let reduced = Just(vec!["c", "r", "s"]).prop_shuffle();
    let inner = Just(vec!["qi", "ki"]).prop_shuffle();
    let order = (reduced, inner)
        .prop_map(|(reduced, inner)| format!("reorder p qo ko {} {}", reduced.join(" "), inner.join(" ")));
    let at = prop::sample::select(vec!["qo", "ko", "c", "r"]);
    let kinds = prop::collection::vec(
        (
            prop::sample::select(vec!["unroll", "unroll", "vectorize"]),
            prop::sample::select(vec!["qi", "ki", "s", "r", "c"]),
        )
            .prop_map(|(kind, of)| format!("{kind} {of}")),
        0..6,
    );
    let outer = prop::sample::select(vec!["parallel p", "parallel qo", "unroll qo", ""]);
    (split("q"), split("k"), order, at, kinds, outer).prop_map(|(q, k, order, at, kinds, outer)| {
        let first = ["inline P".to_owned(), q, k, order, format!("accumulate Y at {at} -> acc")];
        first.into_iter().chain(kinds).chain([outer.to_owned()]).collect()
    })
}

fn check(convolution: &Convolution, steps: &[String]) -> Result<(), TestCaseError> {
    let mut program = convolution.program();
    let expected = outputs(&program, LONGEST).expect("convolutions are small");
    // Illegal steps are skipped.
    let mut done = String::new();
    for step in parse_steps(&steps.join("\n")).expect("steps are well formed") {
        if let Ok(next) = apply(&program, &step) {
            program = next;
            done += &format!("{step}\n");
        }
    }
    let lowered = lower::lower_verified(&program);
    for (program, what) in [(&lowered, "lowered"), (&reversed(&lowered), "lowered, in another order")] {
        let got = outputs(program, LONGEST).expect("lowering adds no iterations");
        if let Some(how) = difference(&got, &expected, 0.0) {
            return Err(TestCaseError::fail(format!("{what}: {how}\n{done}{program}")));
        }
    }
    Ok(())
}

fn cases() -> u32 {
    std::env::var("TILEWRIGHT_CASES").map_or(100, |n| n.parse().expect("TILEWRIGHT_CASES is a number"))
}

proptest! {
    #![proptest_config(Config { cases: cases(), failure_persistence: None, ..Config::default() })]

    #[test]
    fn lowering_changes_nothing_that_is_computed(convolution in convolutions(), steps in steps()) {
        check(&convolution, &steps)?;
    }
}

/// Scheduled ResNet convolution with 28 accumulators.
fn resnet() -> Program {
    let convolution = Convolution { channels: [64, 64], image: [56, 56], filter: [3, 3], stride: 1, pad: 1, up: 1 };
    let steps = "inline P
        split q 14 -> qo qi
        split k 32 -> ko ki
        split ki 16 -> kv kl
        split c 2 -> co ci
        reorder p ko qo co r s ci qi kv kl
        accumulate Y at qo -> acc
        unroll s
        unroll ci
        unroll qi
        unroll kv
        vectorize kl";
    let steps = parse_steps(steps).expect("steps are well formed");
    steps.iter().fold(convolution.program(), |p, step| apply(&p, step).unwrap_or_else(|e| panic!("{step}: {e}")))
}

/// Checks that only rows of the filter are tested, except in the tiles at the left and right border.
#[test]
fn no_tap_is_tested_in_the_middle() {
    let lowered = lower::lower_verified(&resnet()).to_string();
    let middle = lowered.split("for qo in 2 {").nth(1).expect("two tiles of four are in the middle");
    let middle = middle.split("for kl in").next().expect("text");
    let middle = &middle[..middle.find("if true {").expect("the tile at the right border follows")];
    assert!(!lowered.contains("select"), "{lowered}");
    assert_eq!(middle.matches("if ").count(), 1, "{middle}");
    assert_eq!(middle.matches("+=").count(), 3 * 2 * 28, "{middle}");
}
