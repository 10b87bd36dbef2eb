//! Nest workloads: programs of the same computation have the same text.

use tilewright_ir::op::{Structure, Workload};
use tilewright_ir::text::parse;

fn nest(text: &str) -> Workload {
    Workload::nest(parse(&format!("program \"p\" {text}")).unwrap()).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

#[test]
fn equal_computations_are_one_workload() {
    let a = nest(
        "buffer X: f32[1, 4, 5, 6] global input buffer B: f32[1, 4, 1, 1] global input
         buffer Y: f32[1, 4, 5, 6] global output loops n, c, h, w
         run { for n in 1 { for c in 4 { for h in 5 { for w in 6 { Y[n, c, h, w] = X[n, c, h, w] + B[0, c, 0, 0] }}}}}",
    );
    let b = nest(
        "buffer in: f32[4, 30] global input buffer bias: f32[4] global input buffer out: f32[4, 30] global output
         loops i, j run { for i in 4 { for j in 30 { out[i, j] = in[i, j] + bias[i] } } }",
    );
    assert_eq!(a, b);
    assert_eq!(
        a.to_string(),
        "nest:buffer x0:f32[4,30]global input buffer x1:f32[4]global input buffer y:f32[4,30]global output \
         loops i0,i1 run{for i0 in 4{for i1 in 30{y[i0,i1]=x0[i0,i1]+x1[i0]}}}"
    );
    assert_eq!(Workload::parse(&a.to_string()).unwrap(), a);
    assert_eq!(a.flops(), 120.0);
    assert!(a.label().starts_with("nest:map f32[4,30] #"), "{}", a.label());
    assert!(matches!(a.structure(), Structure::Nest(_)));
}

/// Checks that two loops stay separate in every stage if some access traverses them differently.
#[test]
fn loops_that_something_tells_apart_stay() {
    let loops = |text: &str| nest(text).program().loops.len();
    let buffers = "buffer X: f32[4, 6] global input buffer Y: f32[4, 6] global output loops i, j, k, l";
    assert_eq!(loops(&format!("{buffers} run {{ for i in 4 {{ for j in 6 {{ Y[i, j] = X[i, j] }} }} }}")), 1);
    assert_eq!(loops(&format!("{buffers} run {{ for i in 4 {{ for j in 6 {{ Y[i, j] = X[i, 5 - j] }} }} }}")), 2);
    assert_eq!(loops(&format!("{buffers} run {{ for i in 4 {{ for j in 6 {{ Y[i, j] = index(i) }} }} }}")), 2);
    let stages = "buffer X: f32[4, 6] global input buffer T: f32[4, 6] global temporary
        buffer Y: f32[6, 4] global output loops i, j, k, l
        run { alloc T for i in 4 { for j in 6 { T[i, j] = X[i, j] } } for k in 6 { for l in 4 { Y[k, l] = T[l, k] } } }";
    assert_eq!(loops(stages), 4);
    let pool = "buffer X: f32[3, 4, 6] global input buffer Y: f32[3] global output loops c, i, j
        run { for c in 3 { for i in 4 { for j in 6 { Y[c] += X[c, i, j] first i == 0 && j == 0 } } } }";
    assert_eq!(loops(pool), 2);
}

#[test]
fn kinds_say_what_a_nest_does() {
    let of = |text: &str| match nest(text).structure() {
        Structure::Nest(nest) => nest.kind(),
        _ => unreachable!("it is a nest"),
    };
    let rows = "buffer X: f32[4, 6] global input buffer Y: f32[4] global output loops i, j";
    assert_eq!(
        of(&format!("{rows} run {{ for i in 4 {{ for j in 6 {{ Y[i] max= X[i, j] first j == 0 }} }} }}")),
        "reduce"
    );
    let all = "buffer X: f32[4, 6] global input buffer T: f32[4] global temporary buffer Y: f32[4, 6] global output
        loops i, j, k, l run { alloc T for i in 4 { for j in 6 { T[i] += X[i, j] first j == 0 } }
        for k in 4 { for l in 6 { Y[k, l] = X[k, l] / T[k] } } }";
    assert_eq!(of(all), "normalize");
    let copy = "buffer X: f32[4, 6] global input buffer Y: f32[6, 4] global output loops i, j
        run { for i in 6 { for j in 4 { Y[i, j] = X[j, i] } } }";
    assert_eq!(of(copy), "copy");
}

#[test]
fn what_is_no_nest_is_refused_with_its_reason() {
    #[track_caller]
    fn is(text: &str, part: &str) {
        let e = Workload::parse(&format!("nest:{text}")).expect_err("it is no nest").to_string();
        assert!(e.contains(part) && !e.contains('\n'), "{e}");
    }
    let buffers = "buffer X: f32[4] global input buffer Y: f32[4] global output loops i, j";
    is("", "expected");
    is("buffer X: f32[4] global input run { }", "0 outputs");
    is(&format!("{buffers} run {{ for i in 4 {{ Y[i] = X[i + 1] }} }}"), "outside");
    is(&format!("{buffers} run {{ for i in 4 {{ Y[i] = X[i] Y[i] = X[i] }} }}"), "nest of serial loops");
    is(&format!("{buffers} run {{ parallel i in 4 {{ Y[i] = X[i] }} }}"), "nest of serial loops");
    is(&format!("{buffers} run {{ for i in 4 {{ for j in 4 {{ Y[i] += X[j] first j == 1 }} }} }}"), "does not start");
    is(&format!("{buffers} run {{ for i in 4 {{ Y[i] = Y[i] + X[i] }} }}"), "reads it");
    is(&format!("{buffers} run {{ for i in 4 {{ Y[i] = Z[i] }} }}"), "there is no buffer Z");
}
