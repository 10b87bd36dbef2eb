//! Programs that the schedule tests start from, each named by one line such as `softmax:m=5,n=7,dtype=f64`.

#![allow(dead_code)]

use tilewright_ir::expr::{BinaryOp, ReduceOp, UnaryOp};
use tilewright_ir::gpu::simt::{self, SimtFault, ThreadOrder};
use tilewright_ir::op::{OPS, ProgramBuilder, StageSpec, Workload};
use tilewright_ir::{
    BufferId, Cond, DType, Expr, GpuProgram, Index, LoopKind, Program, Role, Step, Stmt, interp, text,
};

/// Program of a line: a workload, or one of [`SOURCES`].
///
/// # Panics
/// If the line names no program.
pub fn program(line: &str) -> Program {
    let name = line.split(':').next().unwrap_or(line);
    if OPS.iter().any(|op| op.name == name) {
        return Workload::parse(line).unwrap_or_else(|e| panic!("{e}")).program();
    }
    let source = SOURCES.iter().find(|s| s.name == name).unwrap_or_else(|| panic!("no program is called `{line}`"));
    let size = |key: &str| {
        let value = line.split([':', ',']).find_map(|part| part.strip_prefix(key)?.strip_prefix('='));
        value.unwrap_or_else(|| panic!("`{line}` needs `{key}`"))
    };
    let sizes: Vec<i64> = source.sizes.iter().map(|s| size(s).parse().expect("a size is an integer")).collect();
    let dtype = if line.ends_with("dtype=f64") { "f64" } else { "f32" };
    let mut program = (source.make)(&sizes, dtype);
    program.name = line.to_owned();
    program
}

/// Family of programs.
pub struct Source {
    pub name: &'static str,
    pub sizes: &'static [&'static str],
    /// Whether integer data gives integers in all operations, so that the order of operations does not
    /// matter.
    pub exact: bool,
    pub make: fn(&[i64], &str) -> Program,
}

/// Programs in addition to operators: several stages, and loops whose order or independence is error-prone.
pub const SOURCES: &[Source] = &[
    Source { name: "matmul_relu", sizes: &["m", "n", "k"], exact: true, make: matmul_relu },
    Source { name: "stencil", sizes: &["h", "w"], exact: true, make: stencil },
    Source { name: "softmax", sizes: &["m", "n"], exact: false, make: softmax },
    Source { name: "strided", sizes: &["n", "r"], exact: true, make: strided },
    Source { name: "chain", sizes: &["m", "n"], exact: true, make: chain },
    Source {
        name: "conv",
        sizes: &["n", "c", "h", "w", "k", "r", "stride", "dilation", "pad", "constant"],
        exact: true,
        make: conv,
    },
    Source { name: "triangular", sizes: &["n"], exact: true, make: triangular },
    Source { name: "scatter", sizes: &["m", "n"], exact: true, make: scatter },
    Source { name: "prefix_sum", sizes: &["m", "k"], exact: true, make: prefix_sum },
    Source { name: "in_place", sizes: &["m", "n"], exact: true, make: in_place },
    Source { name: "last_wins", sizes: &["m", "n"], exact: true, make: last_wins },
    Source { name: "two_writers", sizes: &["m", "k"], exact: true, make: two_writers },
    Source { name: "overwritten", sizes: &["n"], exact: true, make: overwritten },
    Source { name: "scan", sizes: &["n"], exact: true, make: scan },
    Source { name: "interleaved", sizes: &["n"], exact: true, make: interleaved },
    Source { name: "packed", sizes: &["m", "n"], exact: true, make: packed },
];

/// Whether the program of a line is computed without rounding on integers.
pub fn is_exact(line: &str) -> bool {
    SOURCES.iter().find(|s| line.split(':').next() == Some(s.name)).is_none_or(|s| s.exact)
}

/// Largest allowed difference between the results of a line's program and those after these steps, see
/// [`difference`].
///
/// Data are integers below five, so most programs stay exact. Winograd's tiles of four have weights that are
/// multiples of thirds, and transforms that amplify rounding errors up to a few hundred times, to a few
/// thousandths in f32.
pub fn tolerance(line: &str, steps: &[Step]) -> f64 {
    let rounds = steps.iter().any(|s| matches!(s, Step::Winograd { tile: 4, .. }));
    match (rounds, is_exact(line), line.ends_with("dtype=f64")) {
        (true, _, true) => 1e-10,
        (true, _, false) => 1e-2,
        (false, true, _) => 0.0,
        (false, false, true) => 1e-13,
        (false, false, false) => 1e-5,
    }
}

fn builder(dtype: &str) -> ProgramBuilder {
    let (dtype, _) = DType::ALL.iter().find(|(_, name)| *name == dtype).expect("an element type");
    ProgramBuilder::new("source", *dtype, Vec::new())
}

fn load(b: BufferId, index: &[&Index]) -> Expr {
    Expr::Load(b, index.iter().map(|i| (*i).clone()).collect())
}

fn add(a: Expr, b: Expr) -> Expr {
    Expr::binary(BinaryOp::Add, a, b)
}

fn mul(a: Expr, b: Expr) -> Expr {
    Expr::binary(BinaryOp::Mul, a, b)
}

fn relu(x: Expr) -> Expr {
    Expr::binary(BinaryOp::Max, x, Expr::Const(0.0))
}

/// Matrix product, bias and relu: a reduction with an epilogue as a separate stage.
fn matmul_relu(s: &[i64], dtype: &str) -> Program {
    let [m, n, k] = s else { panic!("three sizes") };
    let mut p = builder(dtype);
    let (a, b, bias) = (p.input("A", &[*m, *k]), p.input("B", &[*k, *n]), p.input("bias", &[*n]));
    let (axes, reduced) = ([("i", *m), ("j", *n)], [("k", *k)]);
    let spec = StageSpec { name: "T", axes: &axes, reduce: Some((ReduceOp::Sum, &reduced)), role: Role::Temporary };
    let t = p.stage(spec, |v| mul(load(a, &[&v[0], &v[2]]), load(b, &[&v[2], &v[1]])));
    let spec = StageSpec { name: "Y", axes: &axes, reduce: None, role: Role::Output };
    p.stage(spec, |v| relu(add(load(t, &[&v[0], &v[1]]), load(bias, &[&v[1]]))));
    p.finish()
}

/// Padding with `select`, a 3 × 3 window, relu.
fn stencil(s: &[i64], dtype: &str) -> Program {
    let [h, w] = s else { panic!("two sizes") };
    let mut p = builder(dtype);
    let (x, weights) = (p.input("X", &[*h, *w]), p.input("W", &[3, 3]));
    let spec = StageSpec { name: "P", axes: &[("i", h + 2), ("j", w + 2)], reduce: None, role: Role::Temporary };
    let pad = p.stage(spec, |v| {
        let inside = |e: &Index, n: i64| Cond::Lt(0.into(), e.clone()).and(Cond::Lt(e.clone(), (n + 1).into()));
        let value = load(x, &[&v[0].offset(-1), &v[1].offset(-1)]);
        let cond = inside(&v[0], *h).and(inside(&v[1], *w));
        Expr::Select(Box::new(cond), Box::new(value), Box::new(Expr::Const(0.0)))
    });
    let axes = [("i", *h), ("j", *w)];
    let spec = StageSpec {
        name: "S",
        axes: &axes,
        reduce: Some((ReduceOp::Sum, &[("r", 3), ("s", 3)])),
        role: Role::Temporary,
    };
    let sum = p.stage(spec, |v| mul(load(pad, &[&v[0].add(&v[2]), &v[1].add(&v[3])]), load(weights, &[&v[2], &v[3]])));
    let spec = StageSpec { name: "Y", axes: &axes, reduce: None, role: Role::Output };
    p.stage(spec, |v| relu(load(sum, &[&v[0], &v[1]])));
    p.finish()
}

/// Softmax of rows: maximum, exponential, sum, division.
fn softmax(s: &[i64], dtype: &str) -> Program {
    let [m, n] = s else { panic!("two sizes") };
    let mut p = builder(dtype);
    let x = p.input("X", &[*m, *n]);
    let (rows, columns, all) = ([("i", *m)], [("j", *n)], [("i", *m), ("j", *n)]);
    let reduce = |name, op| StageSpec { name, axes: &rows, reduce: Some((op, &columns)), role: Role::Temporary };
    let most = p.stage(reduce("M", ReduceOp::Max), |v| load(x, &[&v[0], &v[1]]));
    let spec = StageSpec { name: "E", axes: &all, reduce: None, role: Role::Temporary };
    let e = p.stage(spec, |v| {
        let shifted = Expr::binary(BinaryOp::Sub, load(x, &[&v[0], &v[1]]), load(most, &[&v[0]]));
        Expr::unary(UnaryOp::Exp, shifted)
    });
    let total = p.stage(reduce("S", ReduceOp::Sum), |v| load(e, &[&v[0], &v[1]]));
    let spec = StageSpec { name: "Y", axes: &all, reduce: None, role: Role::Output };
    p.stage(spec, |v| Expr::binary(BinaryOp::Div, load(e, &[&v[0], &v[1]]), load(total, &[&v[0]])));
    p.finish()
}

fn parse(text: &str) -> Program {
    text::parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Window of stride two.
fn strided(s: &[i64], dtype: &str) -> Program {
    let [n, r] = s else { panic!("two sizes") };
    parse(&format!(
        "program \"\"
        buffer X: {dtype}[{}] global input
        buffer W: {dtype}[{r}] global const
        buffer Y: {dtype}[{n}] global output
        loops x, r
        run {{ for x in {n} {{ for r in {r} {{ Y[x] += X[2*x + r] * W[r] first r == 0 }} }} }}",
        2 * (n - 1) + r
    ))
}

/// Convolution with an r × r window: optional padding, the sum, bias and relu. Weights may be constant.
fn conv(s: &[i64], dtype: &str) -> Program {
    let [n, c, h, w, k, r, stride, dilation, pad, constant] = s else { panic!("ten sizes") };
    let (hp, wp, reach) = (h + 2 * pad, w + 2 * pad, dilation * (r - 1) + 1);
    let (p, q) = ((hp - reach) / stride + 1, (wp - reach) / stride + 1);
    let (operand, padded, padding) = if *pad == 0 {
        ("X", String::new(), String::new())
    } else {
        let inside =
            format!("{p0} < ph && ph < {ph} && {p0} < pw && pw < {pw}", p0 = pad - 1, ph = pad + h, pw = pad + w);
        let fill = format!("pad[pn, pc, ph, pw] = select({inside}, X[pn, pc, ph - {pad}, pw - {pad}], 0.0)");
        let nest = format!("for pn in {n} {{ for pc in {c} {{ for ph in {hp} {{ for pw in {wp} {{ {fill} }} }} }} }}");
        ("pad", format!("buffer pad: {dtype}[{n}, {c}, {hp}, {wp}] global temporary"), format!("alloc pad {nest}"))
    };
    parse(&format!(
        "program \"\"
        buffer X: {dtype}[{n}, {c}, {h}, {w}] global input
        buffer W: {dtype}[{k}, {c}, {r}, {r}] global {weights}
        buffer bias: {dtype}[{k}] global input
        {padded}
        buffer acc: {dtype}[{n}, {k}, {p}, {q}] global temporary
        buffer Y: {dtype}[{n}, {k}, {p}, {q}] global output
        loops pn, pc, ph, pw, n, k, p, q, c, r, s, on, ok, op, oq
        run {{
            {padding}
            alloc acc
            for n in {n} {{ for k in {k} {{ for p in {p} {{ for q in {q} {{ for c in {c} {{ for r in {r} {{ for s in {r} {{
                acc[n, k, p, q] += {operand}[n, c, {stride}*p + {dilation}*r, {stride}*q + {dilation}*s] * W[k, c, r, s]
                    first c == 0 && r == 0 && s == 0
            }} }} }} }} }} }} }}
            for on in {n} {{ for ok in {k} {{ for op in {p} {{ for oq in {q} {{
                Y[on, ok, op, oq] = max(acc[on, ok, op, oq] + bias[ok], 0.0)
            }} }} }} }}
        }}",
        weights = if *constant == 0 { "input" } else { "const" },
    ))
}

/// Two stages without reductions; the second and the last stage read the first, the last one in reverse
/// order.
fn chain(s: &[i64], dtype: &str) -> Program {
    let [m, n] = s else { panic!("two sizes") };
    parse(&format!(
        "program \"\"
        buffer X: {dtype}[{m}, {n}] global input
        buffer T: {dtype}[{m}, {n}] global temporary
        buffer U: {dtype}[{n}, {m}] global temporary
        buffer Y: {dtype}[{m}, {n}] global output
        loops i, j, u, v, p, q
        run {{
            alloc T
            for i in {m} {{ for j in {n} {{ T[i, j] = X[i, j] + index(i) }} }}
            alloc U
            for u in {n} {{ for v in {m} {{ U[u, v] = T[{m1} - v, u] * 2.0 }} }}
            for p in {m} {{ for q in {n} {{ Y[p, q] = U[q, p] + T[p, {n1} - q] }} }}
        }}",
        m1 = m - 1,
        n1 = n - 1,
    ))
}

/// Loops whose extents depend on other loops.
fn triangular(s: &[i64], dtype: &str) -> Program {
    let [n] = s else { panic!("one size") };
    parse(&format!(
        "program \"\"
        buffer L: {dtype}[{n}, {n}] global input
        buffer X: {dtype}[{n}] global input
        buffer T: {dtype}[{n}] global temporary
        buffer Y: {dtype}[{n}] global output
        loops i, k, x, z
        run {{
            alloc T
            for i in {n} {{ for k in i + 1 {{ T[i] += L[i, k] * X[k] first k == 0 }} }}
            for x in {n} {{ Y[x] = 0.0 }}
            for x in {n} {{ for z in {n} - x {{ Y[x + z] += T[x] first never }} }}
        }}"
    ))
}

/// Product of polynomials: many pairs contribute to an element of the result.
fn scatter(s: &[i64], dtype: &str) -> Program {
    let [m, n] = s else { panic!("two sizes") };
    parse(&format!(
        "program \"\"
        buffer A: {dtype}[{m}] global input
        buffer B: {dtype}[{n}] global input
        buffer C: {dtype}[{c}] global output
        loops x, i, j
        run {{
            for x in {c} {{ C[x] = 0.0 }}
            for i in {m} {{ for j in {n} {{ C[i + j] += A[i] * B[j] first never }} }}
        }}",
        c = m + n - 1
    ))
}

/// Running sum that stores every intermediate state.
fn prefix_sum(s: &[i64], dtype: &str) -> Program {
    let [m, k] = s else { panic!("two sizes") };
    parse(&format!(
        "program \"\"
        buffer X: {dtype}[{m}, {k}] global input
        buffer S: {dtype}[{m}] global temporary
        buffer P: {dtype}[{m}, {k}] global output
        loops i, k
        run {{
            alloc S
            for i in {m} {{ for k in {k} {{
                S[i] += X[i, k] first k == 0
                P[i, k] = S[i]
            }} }}
        }}"
    ))
}

/// Stencil that reads elements just written.
fn in_place(s: &[i64], dtype: &str) -> Program {
    let [m, n] = s else { panic!("two sizes") };
    parse(&format!(
        "program \"\"
        buffer X: {dtype}[{m}, {n}] global input
        buffer Y: {dtype}[{m}, {n}] global output
        loops i, j, p, q
        run {{
            for i in {m} {{ for j in {n} {{ Y[i, j] = X[i, j] }} }}
            for p in {m} {{ for q in {n} {{
                Y[p, q] = Y[p, q] + select(0 < q, Y[p, q - 1], 1.0)
            }} }}
        }}"
    ))
}

/// Elements written several times, of which the last write counts.
fn last_wins(s: &[i64], dtype: &str) -> Program {
    let [m, n] = s else { panic!("two sizes") };
    parse(&format!(
        "program \"\"
        buffer X: {dtype}[{m}, {n}] global input
        buffer Y: {dtype}[{y}] global output
        buffer Z: {dtype}[{m}] global output
        loops i, j
        run {{
            for i in {m} {{ for j in {n} {{
                Y[i + j] = X[i, j]
                Z[i] = X[i, j]
            }} }}
        }}",
        y = m + n - 1
    ))
}

/// Stage with a separate nest for initialization.
fn two_writers(s: &[i64], dtype: &str) -> Program {
    let [m, k] = s else { panic!("two sizes") };
    parse(&format!(
        "program \"\"
        buffer X: {dtype}[{m}, {k}] global input
        buffer bias: {dtype}[{m}] global input
        buffer T: {dtype}[{m}] global temporary
        buffer Y: {dtype}[{m}] global output
        loops i, p, k, y
        run {{
            alloc T
            for i in {m} {{ T[i] = bias[i] }}
            for p in {m} {{ for k in {k} {{ T[p] += X[p, k] first never }} }}
            for y in {m} {{ Y[y] = max(T[y], 0.0) }}
        }}"
    ))
}

/// Stage whose source is overwritten before and while the stage is read.
fn overwritten(s: &[i64], dtype: &str) -> Program {
    let [n] = s else { panic!("one size") };
    parse(&format!(
        "program \"\"
        buffer X: {dtype}[{n}] global input
        buffer Z: {dtype}[{n}] global output
        buffer T: {dtype}[{n}] global temporary
        loops i, t, z, y
        run {{
            for i in {n} {{ Z[i] = X[i] }}
            alloc T
            for t in {n} {{ T[t] = Z[t] + 1.0 }}
            for z in {n} {{ Z[z] = 2.0 * T[{last} - z] + T[z] }}
        }}",
        last = n - 1
    ))
}

/// Stage that reads itself.
fn scan(s: &[i64], dtype: &str) -> Program {
    let [n] = s else { panic!("one size") };
    parse(&format!(
        "program \"\"
        buffer X: {dtype}[{n}] global input
        buffer T: {dtype}[{n}] global temporary
        buffer Y: {dtype}[{n}] global output
        loops i, y
        run {{
            alloc T
            for i in {n} {{ T[i] = select(0 < i, T[i - 1], 0.0) + X[i] }}
            for y in {n} {{ Y[y] = T[y] }}
        }}"
    ))
}

/// Two statements that write neighbouring elements.
fn interleaved(s: &[i64], dtype: &str) -> Program {
    let [n] = s else { panic!("one size") };
    parse(&format!(
        "program \"\"
        buffer X: {dtype}[{n}] global input
        buffer Y: {dtype}[{}] global output
        buffer Z: {dtype}[{}] global output
        loops i
        run {{
            for i in {n} {{
                Y[i] = X[i]
                Y[i + 1] = X[i] + 1.0
                Z[2*i] = X[i]
                Z[2*i + 1] = Y[i]
            }}
        }}",
        n + 1,
        2 * n
    ))
}

/// Copy into tiles of four, read through division and remainder.
fn packed(s: &[i64], dtype: &str) -> Program {
    let [m, n] = s else { panic!("two sizes") };
    parse(&format!(
        "program \"\"
        buffer X: {dtype}[{m}, {n}] global input
        buffer P: {dtype}[{tiles}, {n}, 4] global temporary
        buffer Y: {dtype}[{n}, {m}] global output
        loops o, j, i, p, q
        run {{
            alloc P
            for o in {tiles} {{ for j in {n} {{ for i in min(4, {m} - 4*o) {{ P[o, j, i] = X[4*o + i, j] }} }} }}
            for p in {n} {{ for q in {m} {{ Y[p, q] = P[q // 4, p, q % 4] }} }}
        }}",
        tiles = (m + 3) / 4
    ))
}

/// Runs a program on small integers; `None` if it takes too many iterations or too much memory.
///
/// # Panics
/// If the program has a fault.
pub fn outputs(program: &Program, limit: u64) -> Option<Vec<Vec<f64>>> {
    if !program.sizes.is_empty() {
        return Some(outputs_at_sizes(program));
    }
    let mut arguments = whole_arguments(program);
    match interp::run_limited(program, &mut arguments, limit) {
        Ok(()) => {}
        // Nested padded layouts may grow without limit.
        Err(interp::Fault::TooLong { .. } | interp::Fault::TooLarge { .. }) => return None,
        Err(fault) => panic!("{fault}"),
    }
    Some(only_outputs(program, arguments))
}

/// Runs a program at each value of its open sizes, which increase together.
fn outputs_at_sizes(program: &Program) -> Vec<Vec<f64>> {
    let n = program.sizes.iter().map(|size| size.n_values).max().unwrap_or(0);
    let run = |i: i64| {
        let sizes: Vec<i64> = program.sizes.iter().map(|s| s.least + s.step * i.min(s.n_values - 1)).collect();
        let mut arguments = whole_arguments(program);
        interp::run_at(program, &sizes, &mut arguments).unwrap_or_else(|fault| panic!("{sizes:?}: {fault}"));
        only_outputs(program, arguments)
    };
    (0..n).flat_map(run).collect()
}

/// Runs kernels on the inputs of [`outputs`].
pub fn on_gpu(gpu: &GpuProgram, order: ThreadOrder) -> Result<Vec<Vec<f64>>, SimtFault> {
    let mut arguments = whole_arguments(&gpu.program);
    simt::run(gpu, &mut arguments, order)?;
    Ok(only_outputs(&gpu.program, arguments))
}

/// Small integers as inputs, zeros as outputs.
fn whole_arguments(program: &Program) -> Vec<Vec<f64>> {
    let whole = |at: usize, buffer: u32| {
        let mixed = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(buffer).wrapping_mul(0xd1b5_4a32);
        ((mixed >> 29) % 9) as f64 - 4.0
    };
    let argument = |(id, b): (BufferId, &tilewright_ir::Buffer)| {
        let n = b.n_elements().expect("small") as usize;
        (0..n).map(|i| if b.role == Role::Output { 0.0 } else { whole(i, id.0) }).collect()
    };
    program.arguments().map(argument).collect()
}

fn only_outputs(program: &Program, arguments: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    let is_output: Vec<bool> = program.arguments().map(|(_, b)| b.role == Role::Output).collect();
    arguments.into_iter().zip(is_output).filter(|(_, o)| *o).map(|(a, _)| a).collect()
}

/// Describes the first element in which two results differ by more than `tolerance` times the expected value;
/// 0 requires equality.
pub fn difference(got: &[Vec<f64>], expected: &[Vec<f64>], tolerance: f64) -> Option<String> {
    let pairs = got.iter().flatten().zip(expected.iter().flatten()).enumerate();
    let near = |g: f64, e: f64| g == e || (g - e).abs() <= tolerance * e.abs().max(1.0);
    let mut far = pairs.filter(|(_, (g, e))| !near(**g, **e));
    far.next().map(|(at, (g, e))| format!("element {at} of the outputs is {g} instead of {e}"))
}

/// Reverses the iterations of loops that may run in any order, statement by statement for lanes, which must
/// not change results if iterations are independent.
pub fn reversed(program: &Program) -> Program {
    fn block(stmts: &[Stmt]) -> Vec<Stmt> {
        stmts.iter().flat_map(stmt).collect()
    }
    fn stmt(s: &Stmt) -> Vec<Stmt> {
        match s {
            Stmt::For(l) => {
                let back = |s: &Stmt| s.substitute(l.var, &l.extent.offset(-1).sub(&l.var.into()));
                let with = |body| Stmt::For(tilewright_ir::Loop { body, ..l.clone() });
                match l.kind {
                    LoopKind::Serial | LoopKind::Unrolled | LoopKind::Tensor(_) | LoopKind::Turns => {
                        vec![with(block(&l.body))]
                    }
                    LoopKind::Vectorized => l.body.iter().map(|s| with(vec![back(s)])).collect(),
                    LoopKind::Parallel | LoopKind::Block(_) | LoopKind::Thread(_) => {
                        vec![with(block(&l.body).iter().map(back).collect())]
                    }
                }
            }
            Stmt::If { cond, then, otherwise } => {
                vec![Stmt::If { cond: cond.clone(), then: block(then), otherwise: block(otherwise) }]
            }
            leaf => vec![leaf.clone()],
        }
    }
    program.clone().map_parts(|stmts| block(&stmts))
}
