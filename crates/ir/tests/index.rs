//! Constructors and bounds of indices, compared with plain evaluation.

mod common;

use common::Random;
use tilewright_ir::index::Ranges;
use tilewright_ir::{Index, LoopId};

const N_LOOPS: usize = 3;

/// Random index, with its value for the given loop variables.
fn random_index(random: &mut Random, depth: usize, values: &[i64]) -> (Index, i64) {
    let mut sum = (Index::from(0), 0);
    for _ in 0..1 + random.below(3) {
        let inner = |random: &mut Random| random_index(random, depth - 1, values);
        let (index, value) = match if depth == 0 { random.below(2) } else { random.below(7) } {
            0 => {
                let c = random.in_range(-20, 20);
                (Index::from(c), c)
            }
            1 | 2 => {
                let v = random.below(N_LOOPS);
                (Index::from(LoopId(v as u32)), values[v])
            }
            3 => {
                let (d, (e, v)) = (random.in_range(1, 9), inner(random));
                (e.floor_div(d), v.div_euclid(d))
            }
            4 => {
                let (d, (e, v)) = (random.in_range(1, 9), inner(random));
                (e.modulo(d), v.rem_euclid(d))
            }
            5 => {
                let ((a, va), (b, vb)) = (inner(random), inner(random));
                (a.smaller(&b), va.min(vb))
            }
            _ => {
                let ((a, va), (b, vb)) = (inner(random), inner(random));
                (a.larger(&b), va.max(vb))
            }
        };
        let c = random.pick(&[1, 1, -1, 2, 3, 4, 8, -8, 12]);
        sum = (sum.0.add(&index.scale(c)), sum.1 + value * c);
    }
    sum
}

#[test]
fn constructors_keep_the_value() {
    for seed in 0..20_000 {
        let random = &mut Random::new(seed);
        let values = (0..N_LOOPS).map(|_| random.in_range(-30, 30)).collect::<Vec<_>>();
        let (index, value) = random_index(random, 3, &values);
        assert_eq!(index.eval(&|v| values[v.0 as usize]), Some(value), "seed {seed}: {index:?} {values:?}");
    }
}

#[test]
fn substitution_keeps_the_value() {
    for seed in 0..10_000 {
        let random = &mut Random::new(seed);
        let mut values = (0..N_LOOPS).map(|_| random.in_range(0, 30)).collect::<Vec<_>>();
        let (by, value) = random_index(random, 1, &values);
        let before = values[0];
        values[0] = value;
        let (index, value) = random_index(random, 3, &values);
        values[0] = before;
        let replaced = index.substitute(LoopId(0), &by);
        assert_eq!(replaced.eval(&|v| values[v.0 as usize]), Some(value), "seed {seed}: {index:?} {values:?}");
    }
}

#[test]
fn bounds_and_simplification_hold_for_every_iteration() {
    for seed in 0..3000 {
        let random = &mut Random::new(seed);
        let mut ranges = Ranges::default();
        let mut extents: Vec<Index> = Vec::new();
        for i in 0..N_LOOPS {
            let constant = Index::from(random.in_range(1, 7));
            let extent = match random.below(3) {
                1 if i > 0 => {
                    let outer = Index::from(LoopId(random.below(i) as u32)).scale(random.in_range(-3, 3));
                    constant.smaller(&outer.offset(random.in_range(0, 12)))
                }
                2 if i > 0 => Index::from(LoopId(random.below(i) as u32)).floor_div(2).offset(1),
                _ => constant,
            };
            ranges.push(LoopId(i as u32), extent.clone());
            extents.push(extent);
        }
        let start = random.next();
        let build = |values: &[i64]| random_index(&mut Random::new(start), 2, values);
        let (index, _) = build(&[0; N_LOOPS]);
        let (low, high, simple) = (ranges.lower(&index), ranges.upper(&index), ranges.simplify(&index));
        let mut values = [0; N_LOOPS];
        each_iteration(&extents, &mut values, 0, &mut |values| {
            let (_, value) = build(values);
            assert!(low.is_none_or(|l| l <= value), "seed {seed}: {index:?} is {value} < {low:?} at {values:?}");
            assert!(high.is_none_or(|h| h >= value), "seed {seed}: {index:?} is {value} > {high:?} at {values:?}");
            let simple_value = simple.eval(&|v| values[v.0 as usize]);
            assert_eq!(
                simple_value,
                Some(value),
                "seed {seed}: {index:?} became {simple:?} at {values:?} of {extents:?}"
            );
        });
    }
}

fn each_iteration(
    extents: &[Index],
    values: &mut [i64; N_LOOPS],
    depth: usize,
    visit: &mut dyn FnMut(&[i64; N_LOOPS]),
) {
    if depth == N_LOOPS {
        return visit(values);
    }
    for i in 0..extents[depth].eval(&|v| values[v.0 as usize]).unwrap() {
        values[depth] = i;
        each_iteration(extents, values, depth + 1, visit);
    }
}
