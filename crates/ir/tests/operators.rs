//! Every operator on random shapes, compared with naive loops, and the texts of workloads.

mod common;

use common::Random;
use proptest::prelude::*;
use tilewright_ir::interp::{self, run_limited};
use tilewright_ir::op::{
    ALIASES, Epilogue, EpilogueFunction, FUNCTIONS, Layout, OPS, Operand, Operator, Structure, Workload,
};
use tilewright_ir::reference::{evaluate, random_input};
use tilewright_ir::text::parse;
use tilewright_ir::verify::check;
use tilewright_ir::{DType, Program, Role};

/// Row-major tensor.
struct Tensor {
    shape: Vec<i64>,
    values: Vec<f64>,
}

impl Tensor {
    fn zeros(shape: &[i64]) -> Tensor {
        Tensor { shape: shape.to_vec(), values: vec![0.0; shape.iter().product::<i64>() as usize] }
    }

    /// Position of an element; `None` if a subscript is out of bounds.
    fn position(&self, at: &[i64]) -> Option<usize> {
        assert_eq!(at.len(), self.shape.len());
        let inside = at.iter().zip(&self.shape).all(|(i, n)| (0..*n).contains(i));
        inside.then(|| at.iter().zip(&self.shape).fold(0, |sum, (i, n)| sum * n + i) as usize)
    }

    /// Element, or zero out of bounds.
    fn at(&self, at: &[i64]) -> f64 {
        self.position(at).map_or(0.0, |i| self.values[i])
    }

    fn add(&mut self, at: &[i64], value: f64) {
        if let Some(i) = self.position(at) {
            self.values[i] += value;
        }
    }

    fn each(&self) -> Vec<Vec<i64>> {
        each(&self.shape)
    }
}

/// All subscripts of a shape.
fn each(shape: &[i64]) -> Vec<Vec<i64>> {
    let mut all = vec![Vec::new()];
    for n in shape {
        all = all.iter().flat_map(|at| (0..*n).map(|i| [at.as_slice(), &[i]].concat())).collect();
    }
    all
}

/// Computes a workload before its epilogue, by the operator's formula.
fn naive(w: &Workload, a: &Tensor, b: &Tensor) -> Tensor {
    let size = |name: &str| w.size(name);
    let name = w.operator().name;
    match name {
        "matmul" | "dense" => {
            let mut out = Tensor::zeros(&[size("m"), size("n")]);
            for at in each(&[size("m"), size("n"), size("k")]) {
                let [i, j, k] = at[..] else { unreachable!() };
                let right = if name == "dense" { [j, k] } else { [k, j] };
                out.add(&[i, j], a.at(&[i, k]) * b.at(&right));
            }
            out
        }
        "batch_matmul" => {
            let mut out = Tensor::zeros(&[size("b"), size("m"), size("n")]);
            for at in each(&[size("b"), size("m"), size("n"), size("k")]) {
                let [n, i, j, k] = at[..] else { unreachable!() };
                let left = if size("ta") == 1 { [n, k, i] } else { [n, i, k] };
                let right = if size("tb") == 1 { [n, j, k] } else { [n, k, j] };
                out.add(&[n, i, j], a.at(&left) * b.at(&right));
            }
            out
        }
        "heads_matmul" => {
            let w_at = |at: &[i64]| b.at(at);
            let (b, is) = (size("b"), |name: &str| size(name) == 1);
            let shape = if is("hc") { [size("m"), b, size("n")] } else { [b, size("m"), size("n")] };
            let mut out = Tensor::zeros(&shape);
            for at in each(&[b, size("m"), size("n"), size("k")]) {
                let [n, i, j, k] = at[..] else { unreachable!() };
                let (in_a, in_b) = (n + size("a_before"), n + size("b_before"));
                let [outer, inner] = if is("tb") { [j, k] } else { [k, j] };
                let left = if is("ha") { [i, in_a, k] } else { [in_a, i, k] };
                let right = if is("hb") { [outer, in_b, inner] } else { [in_b, outer, inner] };
                let to = if is("hc") { [i, n, j] } else { [n, i, j] };
                out.add(&to, a.at(&left) * w_at(&right));
            }
            out
        }
        "conv2d_transpose" => {
            let extent = |input, filter, [stride, dilation, before, after, more]: [&str; 5]| {
                (size(input) - 1) * size(stride) + (size(filter) - 1) * size(dilation) + 1 + size(more)
                    - size(before)
                    - size(after)
            };
            let rows = extent("h", "r", ["stride_h", "dilation_h", "pad_top", "pad_bottom", "out_pad_h"]);
            let columns = extent("w", "s", ["stride_w", "dilation_w", "pad_left", "pad_right", "out_pad_w"]);
            let mut out = Tensor::zeros(&[size("n"), size("k"), rows, columns]);
            for at in each(&[size("n"), size("c"), size("h"), size("w"), size("k"), size("r"), size("s")]) {
                let [n, c, h, v, k, r, s] = at[..] else { unreachable!() };
                let row = h * size("stride_h") + r * size("dilation_h") - size("pad_top");
                let column = v * size("stride_w") + s * size("dilation_w") - size("pad_left");
                out.add(&[n, k, row, column], a.at(&[n, c, h, v]) * b.at(&[c, k, r, s]));
            }
            out
        }
        "conv2d" | "depthwise_conv2d" => {
            let depthwise = name == "depthwise_conv2d";
            let k = if depthwise { size("c") * size("multiplier") } else { size("k") };
            let groups = if depthwise { size("c") } else { size("groups") };
            let of_group = size("c") / groups;
            let (mut rows, mut columns) = (0, 0);
            while (rows * size("stride_h") + (size("r") - 1) * size("dilation_h"))
                < size("h") + size("pad_top") + size("pad_bottom")
            {
                rows += 1;
            }
            while (columns * size("stride_w") + (size("s") - 1) * size("dilation_w"))
                < size("w") + size("pad_left") + size("pad_right")
            {
                columns += 1;
            }
            let mut out = Tensor::zeros(&[size("n"), k, rows, columns]);
            for at in out.each() {
                let [n, mut k_at, p, q] = at[..] else { unreachable!() };
                if !depthwise && size("interleave") == 1 {
                    k_at = k_at % groups * (k / groups) + k_at / groups;
                }
                for tap in each(&[of_group, size("r"), size("s")]) {
                    let [c, r, s] = tap[..] else { unreachable!() };
                    let channel = k_at / (k / groups) * of_group + c;
                    let row = p * size("stride_h") + r * size("dilation_h") - size("pad_top");
                    let column = q * size("stride_w") + s * size("dilation_w") - size("pad_left");
                    let weight = if depthwise { b.at(&[k_at, r, s]) } else { b.at(&[k_at, c, r, s]) };
                    out.add(&at, a.at(&[n, channel, row, column]) * weight);
                }
            }
            out
        }
        other => panic!("{other} needs a formula here"),
    }
}

/// Applies operations to a tensor; `names` are the names of their additional inputs.
fn changed(
    operations: &[Epilogue],
    names: Vec<(usize, String, Operand)>,
    mut out: Tensor,
    inputs: &[(String, Tensor)],
) -> Tensor {
    let input = |name: &str| &inputs.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no input {name}")).1;
    let channel = if out.shape.len() == 4 { 1 } else { out.shape.len() - 1 };
    let names: Vec<(usize, String)> = names.into_iter().map(|(e, n, _)| (e, n)).collect();
    let named = |e: usize| &names.iter().find(|(at, _)| *at == e).expect("the operation has an input").1;
    for (i, at) in out.each().into_iter().enumerate() {
        for (number, e) in operations.iter().enumerate() {
            let x = out.values[i];
            let of_channel = || input(named(number)).at(&[at[channel]]);
            let of_element = || input(named(number)).at(&at);
            let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
            out.values[i] = match (e.function(), e.numbers()) {
                (EpilogueFunction::Bias, _) => x + of_channel(),
                (EpilogueFunction::Scale, _) => x * of_channel(),
                (EpilogueFunction::Add, _) => x + of_element(),
                (EpilogueFunction::Mul, _) => x * of_element(),
                (EpilogueFunction::Relu, _) => x.max(0.0),
                (EpilogueFunction::LeakyRelu, [slope]) => {
                    if x < 0.0 {
                        x * slope
                    } else {
                        x
                    }
                }
                (EpilogueFunction::Clip, [low, high]) => x.clamp(*low, *high),
                (EpilogueFunction::Round, [low, high]) => x.round_ties_even().clamp(*low, *high),
                (EpilogueFunction::Linear, [factor, term]) => x * factor + term,
                (EpilogueFunction::Sigmoid, _) => sigmoid(x),
                (EpilogueFunction::Silu, _) => x * sigmoid(x),
                (EpilogueFunction::HardSigmoid, [factor, term]) => (x * factor + term).clamp(0.0, 1.0),
                (EpilogueFunction::HardSwish, [factor, term]) => x * (x * factor + term).clamp(0.0, 1.0),
                (EpilogueFunction::Tanh, _) => x.tanh(),
                (EpilogueFunction::Gelu, _) => {
                    0.5 * x * (1.0 + interp::apply_unary(tilewright_ir::expr::UnaryOp::Erf, x / 2f64.sqrt()))
                }
                (function, numbers) => panic!("{function:?} needs a formula here, of {numbers:?}"),
            };
        }
    }
    out
}

fn inputs(program: &Program, seed: u64) -> Vec<(String, Tensor)> {
    let of = program.arguments().filter(|(_, b)| b.role != Role::Output).enumerate();
    of.map(|(i, (_, b))| {
        let values = random_input(seed + i as u64, b.n_elements().unwrap() as usize).collect();
        (b.name.clone(), Tensor { shape: b.shape.clone(), values })
    })
    .collect()
}

/// Operators whose workloads are given by sizes, except for the one with packed weights, which has a separate
/// test.
fn with_sizes() -> impl Iterator<Item = &'static Operator> {
    OPS.iter().filter(|op| !op.sizes.is_empty() && op.name != "packed_matmul")
}

/// Workload text with random sizes, most of which are consistent.
fn random_text(random: &mut Random) -> String {
    let operators: Vec<_> = with_sizes().collect();
    let operator = operators[random.below(operators.len())].name;
    let mut pairs: Vec<String> = Vec::new();
    let mut give = |random: &mut Random, key: &str, low: i64, high: i64| {
        let value = random.in_range(low, high);
        pairs.push(format!("{key}={value}"));
    };
    let sizes = operators.iter().find(|op| op.name == operator).unwrap().sizes;
    for size in sizes.iter().filter(|s| s.default.is_none()) {
        let most = match size.name {
            "r" | "s" => 4,
            "c" | "k" if operator.starts_with("conv") => 6,
            _ => 12,
        };
        give(random, size.name, 1, most);
    }
    for size in sizes.iter().filter(|s| s.default.is_some()) {
        if random.chance(40) {
            give(random, size.name, size.least, 3.min(size.most));
        }
    }
    pairs.push("dtype=f64".to_owned());
    if sizes.iter().any(|s| s.name == "stride_h") && random.chance(40) {
        pairs.push("layout=blocked".to_owned());
    }
    if ["conv2d", "depthwise_conv2d"].contains(&operator) && random.chance(40) {
        let words = ["scale+bias+relu", "bias+clip(0;1)+bias", "linear(2;1)", "leaky_relu+scale", "hard_swish"];
        pairs.push(format!("prologue={}", words[random.below(words.len())]));
    }
    let mut epilogue = Vec::new();
    let with_numbers = ["clip(-1;1.5)", "leaky_relu(0.25)", "linear(-0.5;1)", "hard_swish(0.5;0.25)", "bias", "add"];
    // Some functions apply to integer sums only.
    let of_numbers = FUNCTIONS.iter().filter(|spec| !spec.function.is_of_integers());
    for word in of_numbers.map(|spec| spec.name).chain(with_numbers) {
        if epilogue.len() < 8 && random.chance(10) {
            epilogue.insert(random.below(epilogue.len() + 1), word);
        }
    }
    if !epilogue.is_empty() {
        pairs.push(format!("epilogue={}", epilogue.join("+")));
    }
    format!("{operator}:{}", pairs.join(","))
}

#[track_caller]
fn close(what: &str, w: &Workload, got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{w}: {what}");
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 1e-11 * b.abs().max(1.0), "{w}: {what}, element {i}: {a} instead of {b}");
    }
}

#[test]
fn operators_compute_their_formulas() {
    let mut random = Random::new(1);
    let (mut n_checked, mut of_operator) = (0, vec![0; with_sizes().count()]);
    while n_checked < 400 {
        let Ok(w) = Workload::parse(&random_text(&mut random)) else { continue };
        n_checked += 1;
        of_operator[with_sizes().position(|op| op.name == w.operator().name).unwrap()] += 1;
        let program = w.program();
        let unproven = check(&program).unwrap_or_else(|e| panic!("{w}: {e}\n{program}"));
        assert_eq!(unproven, [], "{w}");
        assert_eq!(parse(&program.to_string()).as_ref(), Ok(&program), "{w}");
        let mut given = inputs(&program, random.next());
        let result = {
            let mut x = Tensor { shape: given[0].1.shape.clone(), values: given[0].1.values.clone() };
            // The program of a pointwise convolution has images flattened to one row.
            if let Structure::Window(window) = w.structure() {
                x.shape = vec![window.n, window.c, window.axes[0].input, window.axes[1].input];
            }
            let x = changed(w.prologue(), Epilogue::prologue_operands(w.prologue()), x, &given);
            naive(&w, &x, &given[1].1)
        };
        for (_, further) in given[2..].iter_mut().filter(|(_, t)| t.shape.len() == result.shape.len()) {
            further.shape.clone_from(&result.shape);
        }
        let expected = changed(w.epilogue(), Epilogue::operands(w.epilogue()), result, &given).values;
        let values: Vec<Vec<f64>> = given.into_iter().map(|(_, t)| t.values).collect();
        let mut arguments = values.clone();
        arguments.push(vec![0.0; expected.len()]);
        run_limited(&program, &mut arguments, 1 << 26).unwrap_or_else(|e| panic!("{w}: {e}"));
        close("interpreter", &w, &arguments[values.len()], &expected);
        let outputs = evaluate(&program, &values, 1).unwrap_or_else(|e| panic!("{w}: {e}"));
        close("reference", &w, &outputs[0], &expected);
    }
    assert!(of_operator.iter().all(|n| *n > 20), "{of_operator:?}");
}

#[test]
fn stages_and_loops_have_their_names() {
    let loops = |text: &str| Workload::parse(text).unwrap().program().loops.join(" ");
    assert_eq!(loops("matmul:m=2,n=3,k=4"), "i j k");
    assert_eq!(loops("matmul:m=2,n=3,k=4,epilogue=relu"), "i j k oi oj");
    assert_eq!(loops("batch_matmul:b=2,m=2,n=3,k=4,ta=1,epilogue=bias"), "b i j k ob oi oj");
    assert_eq!(loops("dense:m=2,n=3,k=4"), "i j k");
    let conv = "c=4,h=8,w=8,r=3,s=3";
    assert_eq!(loops(&format!("conv2d:{conv},k=4")), "n k p q c r s on ok op oq");
    assert_eq!(loops(&format!("conv2d:{conv},k=4,pad_left=1")), "pn pc ph pw n k p q c r s on ok op oq");
    assert_eq!(loops("conv2d:c=4,h=8,w=8,r=1,s=1,k=4"), "n k p q c r s on ok op oq");
    assert_eq!(loops("conv2d:c=4,h=8,w=8,r=1,s=1,k=4,prologue=relu"), "pn pc ph pw n k p q c r s on ok op oq");
    assert_eq!(loops(&format!("depthwise_conv2d:{conv}")), "n k p q r s on ok op oq");
    assert_eq!(loops(&format!("conv2d_transpose:{conv},k=4")), "pn pc ph pw n k p q c r s on ok op oq");
    assert_eq!(
        loops(&format!("conv2d:{conv},k=4,pad=1,layout=blocked,epilogue=add")),
        "xn xc xh xw rn rk rp rq pn pc ph pw n k p q c r s on ok op oq yn yk yp yq"
    );
    let blocked =
        Workload::parse(&format!("conv2d:{conv},k=4,pad=1,layout=blocked,epilogue=bias+add,const=w")).unwrap();
    assert_eq!(blocked.layout(), Layout::Blocked);
    let program = blocked.program();
    let buffers: Vec<(&str, Role)> = program.buffers.iter().map(|b| (b.name.as_str(), b.role)).collect();
    let expected = [
        ("X", Role::Input),
        ("W", Role::ConstInput),
        ("bias", Role::Input),
        ("R", Role::Input),
        ("X.in", Role::Kept),
        ("R.in", Role::Kept),
        ("pad", Role::Temporary),
        ("acc", Role::Temporary),
        ("Y.out", Role::Kept),
        ("Y", Role::Output),
    ];
    assert_eq!(buffers, expected);
    assert!(!program.finish.is_empty());
}

#[test]
fn texts_are_canonical() {
    #[track_caller]
    fn is(text: &str, canonical: &str) {
        let w = Workload::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(w.to_string(), canonical);
        assert_eq!(Workload::parse(canonical).unwrap(), w);
    }
    is("matmul-1024:const=b", "matmul:m=1024,n=1024,k=1024,const=b");
    is("matmul:k=3,m=1,n=2,dtype=f64", "matmul:m=1,n=2,k=3,dtype=f64");
    is("bert.BMM1:b=96", "batch_matmul:b=96,m=128,n=64,k=128");
    is("bert.BMM3", "batch_matmul:b=960,m=128,n=128,k=64,tb=1");
    is("alexnet.C1:n=8", "conv2d:n=8,c=3,h=227,w=227,k=64,r=11,s=11,stride=4");
    is(
        "resnet18.C1:epilogue=bias+relu, layout=blocked",
        "conv2d:c=3,h=224,w=224,k=64,r=7,s=7,stride=2,pad=3,const=w,layout=blocked,epilogue=bias+relu",
    );
    let conv = "conv2d:c=4,h=8,w=8,k=4,r=3,s=3";
    is(&format!("{conv},stride=2,stride_h=1,layout=nchw"), &format!("{conv},stride_w=2"));
    is(&format!("{conv},pad_top=1,pad_right=1,pad_left=1,pad_bottom=1"), &format!("{conv},pad=1"));
    is(&format!("{conv},pad_top=0,pad=1"), &format!("{conv},pad_left=1,pad_bottom=1,pad_right=1"));
    is("resnet18.C2:pad_top=0", "conv2d:c=64,h=56,w=56,k=64,r=3,s=3,pad_left=1,pad_bottom=1,pad_right=1,const=w");
    is(
        &format!("{conv},groups=2,dilation=2,epilogue=clip( 0; 6)"),
        &format!("{conv},dilation=2,groups=2,epilogue=clip"),
    );
    is(
        &format!("{conv},epilogue=bias,prologue=scale+bias+relu,const=bias+in_bias+w"),
        &format!("{conv},const=w+in_bias+bias,prologue=scale+bias+relu,epilogue=bias"),
    );
    is(
        &format!("{conv},epilogue=init+dequant+quant_u8,const=x_zero+w+zero,x_zero=1,pad=1,dtype=u8i8"),
        &format!("{conv},pad=1,x_zero=1,dtype=u8i8,const=w+x_zero+zero,epilogue=init+dequant+quant_u8"),
    );
    is(&format!("{conv},epilogue=clip(-0.5;1e3)+add"), &format!("{conv},epilogue=clip(-0.5;1000)+add"));
    // A column of pixels becomes a row, with the same layout in memory.
    is(
        "conv2d:c=4,h=90,w=1,k=4,r=3,s=1,stride_h=2,dilation_h=4,pad_top=1,pad_bottom=2,out=c4",
        "conv2d:c=4,h=1,w=90,k=4,r=1,s=3,stride_w=2,pad_left=1,pad_right=2,dilation_w=4,out=c4",
    );
    is("conv2d:c=4,h=90,w=1,k=4,r=1,s=1,stride=2", "conv2d:c=4,h=1,w=90,k=4,r=1,s=1,stride=2");
    is(
        "depthwise_conv2d:c=4,h=1,w=1,r=3,s=1,pad_top=2,pad_bottom=2",
        "depthwise_conv2d:c=4,h=1,w=1,r=1,s=3,pad_left=2,pad_right=2",
    );
    is(
        "conv2d_transpose:c=4,h=9,w=1,k=4,r=4,s=1,stride_h=2,pad_top=1,out_pad_h=1",
        "conv2d_transpose:c=4,h=1,w=9,k=4,r=1,s=4,stride_w=2,pad_left=1,out_pad_w=1",
    );
    // Only without neighbours beside the column.
    is("conv2d:c=4,h=9,w=1,k=4,r=3,s=3,pad=1", "conv2d:c=4,h=9,w=1,k=4,r=3,s=3,pad=1");
    is("conv2d:c=4,h=9,w=2,k=4,r=3,s=1", "conv2d:c=4,h=9,w=2,k=4,r=3,s=1");
    is(
        "conv2d_transpose:c=4,h=9,w=1,k=4,r=1,s=1,out_pad_w=1,stride=2",
        "conv2d_transpose:c=4,h=9,w=1,k=4,r=1,s=1,stride=2,out_pad_w=1",
    );
    is("conv2d:c=8,h=8,w=8,k=4,r=3,s=3,out=c4,in=c8,const=w", "conv2d:c=8,h=8,w=8,k=4,r=3,s=3,const=w,in=c8,out=c4");
    is("depthwise_conv2d:c=32,h=8,w=8,r=3,s=3,in=nchw,out=c32", "depthwise_conv2d:c=32,h=8,w=8,r=3,s=3,out=c32");
}

#[test]
fn degenerate_texts_are_refused_in_one_line() {
    #[track_caller]
    fn is(text: &str, part: &str) {
        let e = Workload::parse_all(text).map(|w| format!("{w:?}")).expect_err("it is degenerate").to_string();
        assert!(e.contains(part) && !e.contains('\n'), "{text}: {e}");
    }
    is("", "unknown workload");
    is("frobnicate:m=1", "unknown workload `frobnicate:m=1`; operators: matmul, batch_matmul");
    is("resnet", "sets of aliases: bert, resnet18, alexnet, mobilenet");
    is("matmul:m=1,n=2", "matmul needs `k`");
    is("matmul:m=0,n=2,k=1", "`m=0` is not accepted");
    is("matmul:m=x,n=2,k=1", "an integer from 1 to");
    is("matmul:m=99999999999999999999,n=2,k=1", "an integer from 1 to");
    is("matmul:m=1,n=2,k=1,q=1", "no attribute `q`");
    is("matmul:m=1,n=2,k=1,layout=blocked", "no attribute `layout`");
    is("matmul:m=1,m=2,n=2,k=1", "`m` is given twice");
    is("matmul:m=1,n=2,k=1,const=c", "expected a or b");
    is("matmul:m=1000000000,n=1000000000,k=1000000000", "do not fit");
    is("batch_matmul:b=1,m=1,n=2,k=1,ta=2", "an integer from 0 to 1");
    is("bert:layout=blocked", "no attribute `layout`");
    let conv = "conv2d:c=4,h=8,w=8,k=4,r=3,s=3";
    is(&format!("{conv},stride=0"), "`stride=0` is not accepted");
    is(&format!("{conv},stride=1,stride=2"), "`stride` is given twice");
    is(&format!("{conv},interleave=2"), "`interleave=2` is not accepted; expected an integer from 0 to 1");
    is(&format!("{conv},in=c8"), "in=8 does not divide c=4");
    is(&format!("{conv},out=c16"), "out=16 does not divide k=4");
    is(&format!("{conv},in=c5"), "expected nchw or c4 or c8 or c16 or c32");
    is(&format!("{conv},layout=blocked,in=c4"), "expected nchw where `in` or `out` is given");
    is("matmul:m=1,n=2,k=1,in=c4", "no attribute `in`");
    is(&format!("{conv},groups=3"), "groups=3 does not divide c=4");
    is("conv2d:c=4,h=8,w=8,k=5,r=3,s=3,groups=2", "groups=2 does not divide k=5");
    is(&format!("{conv},dilation_w=4"), "reaches over 9 columns but the padded input has 8");
    is("conv2d:c=4,h=1,w=8,k=4,r=3,s=3,pad_left=1", "reaches over 3 rows but the padded input has 1");
    is("conv2d:c=1,h=1,w=1,k=1,r=1073741824,s=1,dilation=1073741824", "the padded input has 1;");
    is(&format!("{conv},pad=1000000000"), "do not fit");
    is("conv2d_transpose:c=1,h=2,w=2,k=1,r=3,s=3,pad=2", "padding takes away 4 of 4 output rows");
    is("conv2d_transpose:c=1,h=2,w=2,k=1,r=3,s=3,stride=2,out_pad_w=2", "out_pad_w=2 must be less than");
    is(&format!("{conv},epilogue="), "bias, add, relu");
    is(&format!("{conv},epilogue=relu+blur"), "bias, add, relu");
    is(&format!("{conv},epilogue=leaky_relu(1;2)"), "leaky_relu(slope)");
    is(&format!("{conv},const=bias"), "expected w");
    is(&format!("{conv},prologue=relu+add"), "which read nothing of the result's shape");
    is(&format!("{conv},prologue=blur"), "bias, add, relu");
    is(&format!("{conv},prologue=bias,const=bias"), "expected w or in_bias");
    is("matmul:m=1,n=2,k=1,prologue=relu", "no attribute `prologue`");
    is("conv2d_transpose:c=1,h=2,w=2,k=1,r=3,s=3,prologue=relu", "no attribute `prologue`");
    is(&format!("{conv},const=w+r,epilogue=bias"), "expected w or bias");
    is(&format!("{conv},pad=1,x_zero=1"), "`x_zero=1` is not accepted; expected 0 where no integers are padded");
    is(&format!("{conv},dtype=u8i8,x_zero=1"), "expected 0 where no integers are padded");
    is(&format!("{conv},dtype=u8i8,const=x_zero"), "expected w");
    is(&format!("{conv},dtype=u8i8,prologue=relu"), "expected none: integers are multiplied as they are");
    is("conv2d_transpose:c=1,h=2,w=2,k=1,r=3,s=3,dtype=u8i8", "f32 or f64 or f16 or bf16 of conv2d_transpose");
    is(&format!("{conv},epilogue=clip(1;0)"), "clip(low;high)");
    is(&format!("{conv},epilogue=clip(0;inf)"), "clip(low;high)");
    is(&format!("{conv},epilogue={}", ["gelu"; 13].join("+")), "at most 12 operations");
}

/// Checks sums with packed weights, with rows of blocks quantized in f32 if the workload requires it.
#[test]
fn products_with_packed_weights_are_their_formula() {
    let mut random = Random::new(3);
    for text in [
        "m=3,n=5,k=64",
        "m=2,n=7,k=64,block=16,zeros=1,epilogue=bias+relu",
        "m=1,n=3,k=128,bits=8,block=64",
        "m=3,n=5,k=64,int8=1",
        "m=2,n=7,k=96,block=16,zeros=1,int8=1,epilogue=bias",
        "m=2,n=4,k=512,bits=8,block=256,int8=1",
        "m=2,n=4,k=64,bits=8,block=32,zeros=1,int8=1,epilogue=add",
        "m=6,n=9,k=64,block=16,zeros=1",
        "m=6,n=9,k=64,int8=1",
    ] {
        let w = Workload::parse(&format!("packed_matmul:{text}")).unwrap();
        let [m, n, k, bits, block] = ["m", "n", "k", "bits", "block"].map(|size| w.size(size) as usize);
        let program = w.program();
        assert_eq!(check(&program).unwrap_or_else(|e| panic!("{w}: {e}")), [], "{w}");
        assert_eq!(parse(&program.to_string()).as_ref(), Ok(&program), "{w}");
        let of = |name: &str, n: usize, random: &mut Random| match name {
            "W" => (0..n).map(|_| random.below(256) as f64).collect::<Vec<f64>>(),
            "Z" => (0..n).map(|_| random.below(1 << bits) as f64).collect(),
            _ => random_input(random.next(), n).collect(),
        };
        let inputs: Vec<(String, Vec<f64>)> = program
            .arguments()
            .filter(|(_, b)| b.role != Role::Output)
            .map(|(_, b)| (b.name.clone(), of(&b.name, b.n_elements().unwrap() as usize, &mut random)))
            .collect();
        let input = |name: &str| inputs.iter().find(|(own, _)| own == name).map(|(_, values)| values.as_slice());
        let (a, weights, scales) = (input("A").unwrap(), input("W").unwrap(), input("S").unwrap());
        let rounded = |row: usize, at: usize| -> f64 {
            let first = row * k + at / block * block;
            let most = a[first..first + block].iter().fold(0.0f32, |most, x| most.max(x.abs() as f32));
            f64::from((a[row * k + at] as f32 * (127.0 / most)).round_ties_even()) * f64::from(most / 127.0)
        };
        let weight = |at: usize, column: usize| -> f64 {
            let number = match bits {
                8 => weights[at * n + column] as usize,
                _ => (weights[(at / 8 * 4 + at % 4) * n + column] as usize >> (4 * (at / 4 % 2))) & 15,
            };
            let of_block = at / block * n + column;
            let zero = input("Z").map_or((1 << (bits - 1)) as f64, |zeros| zeros[of_block]);
            (number as f64 - zero) * scales[of_block]
        };
        let mut expected = Vec::new();
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let factor = |at: usize| if w.multiplies_bytes() { rounded(row, at) } else { a[row * k + at] };
            let mut sum = (0..k).map(|at| factor(at) * weight(at, column)).sum::<f64>();
            sum += input("bias").map_or(0.0, |bias| bias[column]) + input("R").map_or(0.0, |r| r[row * n + column]);
            expected.push(if text.ends_with("relu") { sum.max(0.0) } else { sum });
        }
        let values: Vec<Vec<f64>> = inputs.iter().map(|(_, values)| values.clone()).collect();
        let mut arguments = [values.clone(), vec![vec![0.0; m * n]]].concat();
        run_limited(&program, &mut arguments, 1 << 26).unwrap_or_else(|e| panic!("{w}: {e}"));
        let outputs = evaluate(&program, &values, 1).unwrap_or_else(|e| panic!("{w}: {e}"));
        let most = expected.iter().fold(1.0f64, |most, x| most.max(x.abs()));
        for found in [&arguments[values.len()], &outputs[0]] {
            let error = found.iter().zip(&expected).fold(0.0f64, |most, (a, b)| most.max((a - b).abs()));
            assert!(error <= 2e-6 * most, "{w}: {error} of {most}");
        }
    }
    let refused = |text: &str, expected: &str| {
        let error = Workload::parse(&format!("packed_matmul:{text}")).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    };
    refused("m=1,n=1,k=64,bits=5", "4 or 8");
    refused("m=1,n=1,k=96,block=48", "a power of two from 16 to 256");
    refused("m=1,n=1,k=48", "a multiple of the block, 32");
    refused("m=1,n=1,k=64,dtype=f64", "f32 of packed_matmul");
    refused("m=1,n=1,k=64,dtype=u8i8", "f32");
}

/// Checks that groups of columns of one product gate the following groups.
#[test]
fn columns_gate_others_in_pairs() {
    for (text, columns) in [
        ("matmul:m=3,n=48,k=5,dtype=f64,epilogue=silu+gated(8)", 8),
        ("dense:m=2,n=32,k=7,dtype=f64,epilogue=linear(2;1)+gated+relu", 16),
        ("matmul:m=1,n=8,k=3,dtype=f64,epilogue=gated(4)+bias+add", 4),
        ("matmul:m=1..4,n=16,k=3,dtype=f64,epilogue=gated(4)", 4),
    ] {
        let w = Workload::parse(text).unwrap();
        assert_eq!(w.to_string(), text);
        assert_eq!(w.pairs(), Some(columns));
        let w = w.largest();
        let program = w.program();
        check(&program).unwrap();
        let inputs = inputs(&program, 3);
        let sums = naive(&w, &inputs[0].1, &inputs[1].1);
        let [m, n] = [w.size("m"), w.size("n") / 2];
        let mut expected = Tensor::zeros(&[m, n]);
        let gate = w.epilogue().iter().position(|e| e.function() == EpilogueFunction::Gated).unwrap();
        let (before, after) = (&w.epilogue()[..gate], &w.epilogue()[gate + 1..]);
        for (i, at) in expected.each().into_iter().enumerate() {
            let x = at[1] / columns * 2 * columns + at[1] % columns;
            let [x, y] = [x, x + columns].map(|j| sums.at(&[at[0], j]));
            expected.values[i] = before.iter().fold(x, |x, e| e.value(x, None)) * y;
        }
        let expected = changed(after, Epilogue::operands(after), expected, &inputs);
        let values: Vec<Vec<f64>> = inputs.into_iter().map(|(_, x)| x.values).collect();
        let mut arguments = values.clone();
        arguments.push(vec![0.0; expected.values.len()]);
        run_limited(&program, &mut arguments, 1 << 20).unwrap();
        close("interpreter", &w, &arguments[values.len()], &expected.values);
        close("reference", &w, &evaluate(&program, &values, 1).unwrap()[0], &expected.values);
    }
    for text in [
        "matmul:m=1,n=24,k=3,epilogue=gated(8)",
        "matmul:m=1,n=32,k=3,epilogue=gated(5)",
        "matmul:m=1,n=32,k=3,epilogue=gated+gated",
        "matmul:m=1,n=32,k=3,dtype=u8i8,epilogue=dequant+gated",
        "matmul:m=1,n=16..32/16,k=3,epilogue=gated(8)",
        "batch_matmul:b=2,m=1,n=32,k=3,epilogue=gated",
        "conv2d:c=3,h=4,w=4,k=32,r=1,s=1,epilogue=gated",
        "conv2d:c=3,h=4,w=4,k=32,r=1,s=1,prologue=gated",
    ] {
        let error = Workload::parse(text).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn workloads_need_no_text() {
    let operator = |name: &str| OPS.iter().find(|op| op.name == name).unwrap();
    let conv = operator("conv2d");
    let sizes = [("c", 4), ("h", 9), ("w", 8), ("k", 6), ("r", 3), ("s", 3), ("pad_left", 1)];
    let plain = Workload::new(conv, &sizes).unwrap();
    assert_eq!(plain, Workload::parse("conv2d:c=4,h=9,w=8,k=6,r=3,s=3,pad_left=1").unwrap());
    let text =
        "conv2d:c=4,h=9,w=8,k=6,r=3,s=3,pad_left=1,const=w+bias+r,layout=blocked,epilogue=add+bias+leaky_relu(0.5)";
    let functions =
        [(EpilogueFunction::Add, &[][..]), (EpilogueFunction::Bias, &[]), (EpilogueFunction::LeakyRelu, &[0.5])];
    let epilogue = functions.map(|(function, numbers)| Epilogue::new(function, numbers).unwrap());
    let fused = plain.clone().with_epilogue(epilogue.to_vec()).unwrap().with_layout(Layout::Blocked).unwrap();
    let fused = fused.with_constants(["r", "bias", "w"].map(str::to_owned).to_vec()).unwrap();
    assert_eq!((&fused, fused.to_string().as_str()), (&Workload::parse(text).unwrap(), text));
    let constants: Vec<String> =
        fused.program().buffers.into_iter().filter(|b| b.role == Role::ConstInput).map(|b| b.name).collect();
    assert_eq!(constants, ["W", "bias", "R"]);
    assert_eq!(fused.with_epilogue(Vec::new()).unwrap().constants(), ["w"]);
    let bias = || vec![Epilogue::new(EpilogueFunction::Bias, &[]).unwrap()];
    let changed = plain.clone().with_prologue(bias()).unwrap().with_epilogue(bias()).unwrap();
    let changed = changed.with_constants(["in_bias", "bias"].map(str::to_owned).to_vec()).unwrap();
    let text = "conv2d:c=4,h=9,w=8,k=6,r=3,s=3,pad_left=1,const=in_bias+bias,prologue=bias,epilogue=bias";
    assert_eq!((&changed, changed.to_string().as_str()), (&Workload::parse(text).unwrap(), text));
    assert_eq!(changed.with_prologue(Vec::new()).unwrap().constants(), ["bias"]);
    assert!(Workload::parse("matmul-256").unwrap().with_prologue(bias()).is_err());
    assert!(plain.clone().with_prologue(vec![Epilogue::new(EpilogueFunction::Add, &[]).unwrap()]).is_err());

    let fails = |sizes: &[(&str, i64)], part: &str| {
        let e = Workload::new(operator("matmul"), sizes).expect_err("it is no workload").to_string();
        assert!(e.contains(part), "{e}");
    };
    fails(&[("m", 1), ("n", 2)], "matmul needs `k`");
    fails(&[("m", 1), ("n", 2), ("k", 0)], "an integer from 1 to");
    fails(&[("q", 1)], "no attribute `q`");
    let padded = [("c", 4), ("h", 9), ("w", 8), ("k", 6), ("r", 3), ("s", 3), ("pad_left", 1), ("x_zero", 1)];
    let of_factors = |factors| Workload::of_factors(conv, Some(factors), &padded);
    let text = "conv2d:c=4,h=9,w=8,k=6,r=3,s=3,pad_left=1,x_zero=1,dtype=u8i8";
    assert_eq!(of_factors([DType::U8, DType::I8]).unwrap(), Workload::parse(text).unwrap());
    let e = of_factors([DType::I8, DType::U8]).expect_err("there is none").to_string();
    assert_eq!(e, "`dtype=i8u8` is not accepted; expected u8i8 or i8i8 or u8i7");
    assert!(
        Workload::new(operator("matmul"), &[("m", 1), ("n", 1), ("k", 1)])
            .unwrap()
            .with_layout(Layout::Blocked)
            .is_err()
    );
}

#[test]
fn sets_give_all_their_members() {
    let all = Workload::parse_all("resnet18:layout=blocked").unwrap();
    assert_eq!(all.len(), 12);
    assert!(all.iter().all(|w| w.layout() == Layout::Blocked && w.is_constant("W")));
    assert_eq!(all[11], Workload::parse("resnet18.C12:layout=blocked").unwrap());
    assert_eq!(Workload::parse_all("bert").unwrap().len(), 6);
    assert_eq!(Workload::parse_all("alexnet:n=1").unwrap()[0].size("n"), 1);
    assert_eq!(Workload::parse_all("mobilenet:dtype=f64").unwrap()[2].dtype, DType::F64);
    assert_eq!(Workload::parse_all("matmul-256").unwrap(), [Workload::parse("matmul-256").unwrap()]);
    for (alias, _) in ALIASES {
        assert!(Workload::parse(alias).is_ok(), "{alias}");
    }
}

#[test]
fn operations_are_those_that_libraries_count() {
    let flops = |text: &str| Workload::parse(text).unwrap().flops();
    assert_eq!(flops("resnet18.C2"), 2.0 * 56.0 * 56.0 * 64.0 * 64.0 * 9.0);
    assert_eq!(flops("resnet18.C2:groups=4,epilogue=bias"), 2.0 * 56.0 * 56.0 * 64.0 * 16.0 * 9.0);
    assert_eq!(flops("mobilenet.DW2"), 2.0 * 28.0 * 28.0 * 128.0 * 9.0);
    assert_eq!(flops("conv2d_transpose:c=3,h=5,w=6,k=2,r=4,s=4,stride=2,pad=1"), 2.0 * 3.0 * 30.0 * 2.0 * 16.0);
    assert_eq!(flops("bert.BMM2"), 2.0 * 960.0 * 128.0 * 64.0 * 128.0);
}

#[test]
fn operations_with_padding_can_be_left_out() {
    // Outputs, stride, taps, dilation, padding before and inputs of one axis; inputs come first for a
    // transposed convolution.
    let forward = |outputs: i64, stride: i64, taps: i64, dilation: i64, pad: i64, inputs: i64| {
        let met = |o: i64| (0..taps).filter(move |t| (0..inputs).contains(&(o * stride + t * dilation - pad))).count();
        (0..outputs).map(met).sum::<usize>() as f64 / (outputs * taps) as f64
    };
    let check = |text: &str, rows: f64, columns: f64| {
        let w = Workload::parse(text).unwrap();
        let share = w.flops_inside() / w.flops();
        assert!((share - rows * columns).abs() < 1e-12, "{text}: {share}");
    };
    check("matmul-256", 1.0, 1.0);
    check("resnet18.C2", forward(56, 1, 3, 1, 1, 56), forward(56, 1, 3, 1, 1, 56));
    check("conv2d:c=2,h=14,w=14,k=2,r=3,s=3,pad=13,dilation=13", 16.0 / 42.0, 16.0 / 42.0);
    let uneven = "h=10,w=20,r=5,s=4,stride_h=3,pad_top=4,pad_right=7,dilation_w=2";
    let (rows, columns) = (forward(4, 3, 5, 1, 4, 10), forward(21, 1, 4, 2, 0, 20));
    check(&format!("conv2d:c=2,k=2,{uneven}"), rows, columns);
    check(&format!("depthwise_conv2d:c=2,{uneven}"), rows, columns);
    // An input and a tap contribute to an output unless it is cropped.
    check("conv2d_transpose:c=3,h=5,w=6,k=2,r=4,s=4,stride=2", 1.0, 1.0);
    check(
        "conv2d_transpose:c=3,h=5,w=6,k=2,r=4,s=4,stride=2,pad=1",
        forward(5, 2, 4, 1, 1, 10),
        forward(6, 2, 4, 1, 1, 12),
    );
    check("conv2d_transpose:c=3,h=5,w=6,k=2,r=3,s=1,pad_top=3", forward(5, 1, 3, 1, 3, 4), 1.0);
}

/// Pieces of texts that are almost workloads.
fn piece() -> impl Strategy<Value = String> {
    let names = OPS.iter().map(|op| op.name).chain(ALIASES.iter().map(|(alias, _)| *alias)).map(str::to_owned);
    let keys =
        OPS.iter().flat_map(|op| op.sizes).flat_map(|s| [Some(s.name), s.shorthand]).flatten().map(str::to_owned);
    let words =
        [":", ",", "=", "dtype=f64", "const=w", "layout=blocked", "epilogue=", "bias", "+", "clip(", "0;", "1)"];
    let numbers = ["0", "1", "2", "7", "-1", "1073741824", "9223372036854775807", "x", "", "\n", "é"];
    prop_oneof![
        proptest::sample::select(names.collect::<Vec<_>>()),
        proptest::sample::select(keys.collect::<Vec<_>>()).prop_map(|k| format!("{k}=")),
        proptest::sample::select(words.to_vec()).prop_map(str::to_owned),
        proptest::sample::select(numbers.to_vec()).prop_map(str::to_owned),
        any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Checks that any text gives workloads that print and parse back, or an error of one line.
    #[test]
    fn no_text_makes_parsing_panic(pieces in proptest::collection::vec(piece(), 0..20)) {
        match Workload::parse_all(&pieces.concat()) {
            Ok(all) => for w in all {
                prop_assert_eq!(&Workload::parse(&w.to_string()).unwrap(), &w);
            },
            Err(e) => prop_assert!(!e.to_string().contains('\n'), "{}", e),
        }
    }

    /// Checks that sizes from the whole range, including the largest, cause neither overflows nor panics.
    #[test]
    fn no_sizes_make_parsing_panic(
        operator in 0..OPS.len(),
        sizes in proptest::collection::vec(prop_oneof![0i64..4, 1i64..100, Just(1 << 30), 1i64..(1 << 30)], 17),
    ) {
        let pairs = OPS[operator].sizes.iter().zip(sizes).map(|(s, n)| format!("{}={n}", s.name));
        let text = format!("{}:{}", OPS[operator].name, pairs.collect::<Vec<_>>().join(","));
        if let Ok(w) = Workload::parse(&text) {
            prop_assert!(w.flops() > 0.0);
        }
    }
}

/// Checks that layouts shared between layers change positions of elements but not results.
#[test]
fn images_in_blocks_of_channels_have_the_same_elements() {
    let numbers = |n: u64| -> Vec<f64> { (0..n).map(|at| ((at * 37) % 23) as f64 - 11.0).collect() };
    // Converts from NCHW to blocks of `block` channels.
    let in_blocks = |x: &[f64], shape: [usize; 4], block: usize| -> Vec<f64> {
        let [n, c, h, w] = shape;
        let place = |at: usize| {
            let (pixel, channel, image) = (at % (h * w), at / (h * w) % c, at / (h * w * c));
            ((image * (c / block) + channel / block) * h * w + pixel) * block + channel % block
        };
        let mut out = vec![0.0; n * c * h * w];
        x.iter().enumerate().for_each(|(at, x)| out[place(at)] = *x);
        out
    };
    for text in ["conv2d:n=2,c=8,h=6,w=5,k=12,r=3,s=3,pad=1", "conv2d:n=2,c=8,h=6,w=5,k=12,r=1,s=1"] {
        let plain = Workload::parse(&format!("{text},epilogue=bias+add+relu")).unwrap();
        let program = plain.program();
        let inputs: Vec<Vec<f64>> = program
            .arguments()
            .filter(|(_, b)| b.role != Role::Output)
            .map(|(_, b)| numbers(b.n_elements().unwrap()))
            .collect();
        let wanted = evaluate(&program, &inputs, 1).unwrap().remove(0);
        for [input, output] in [[1, 4], [8, 1], [4, 4]] {
            let channels = Layout::Channels { input, output };
            let program = plain.clone().with_layout(channels).unwrap().program();
            let [x, y] = [[2, 8, 6, 5], [2, 12, 6, 5]];
            let mut inputs = inputs.clone();
            inputs[0] = in_blocks(&inputs[0], x, input as usize);
            inputs[3] = in_blocks(&inputs[3], y, output as usize);
            let found = evaluate(&program, &inputs, 1).unwrap().remove(0);
            assert_eq!(found, in_blocks(&wanted, y, output as usize), "{text} {channels:?}");
        }
    }
}

/// Checks the requantization of byte sums by the formula of QLinearMatMul, in f32 step by step, with which
/// kernels must agree bit for bit.
#[test]
fn sums_of_integers_are_quantized_exactly() {
    use tilewright_ir::reference::{Tolerance, random_argument};
    let [m, n, k] = [9, 24, 37];
    for (first, kind, low, high) in [("u8", "u8", 0.0, 255.0), ("i8", "i8", -128.0, 127.0)] {
        let text = format!("dense:m={m},n={n},k={k},dtype={first}i8,epilogue=init+dequant+quant_{kind}");
        let program = Workload::parse(&text).unwrap().program();
        let Tolerance { abs, rel } = Tolerance::for_program(&program);
        assert_eq!((abs, rel), (0.0, 0.0), "{text}");
        let inputs: Vec<Vec<f64>> = program
            .arguments()
            .filter(|(_, b)| b.role != Role::Output)
            .map(|(id, b)| if b.name == "zero" { vec![3.0] } else { random_argument(&program, id, 7) })
            .collect();
        let got = evaluate(&program, &inputs, 1).unwrap().remove(0);
        let [x, w, init, factor, _] = &inputs[..] else { panic!("{text} has five inputs") };
        let mut n_between = 0;
        for (at, got) in got.iter().enumerate() {
            let (i, j) = (at / n, at % n);
            let sum: i64 = (0..k).map(|t| x[i * k + t] as i64 * w[j * k + t] as i64).sum::<i64>() + init[j] as i64;
            let scaled = sum as i32 as f32 * factor[j] as f32;
            let expected = f64::from((scaled.round_ties_even() + 3.0).clamp(low, high));
            n_between += usize::from(expected > f64::from(low) && expected < f64::from(high));
            assert_eq!(*got, expected, "{text}: [{i}, {j}]");
        }
        assert!(n_between > m * n / 4, "{text}: only {n_between} are not saturated");
    }
}

/// Checks integer convolutions against the definition in integer arithmetic: groups, strides, dilation,
/// depthwise, and padding with the zero point.
#[test]
fn convolutions_of_integers_are_exact() {
    use tilewright_ir::reference::{Tolerance, random_argument};
    let texts = [
        "conv2d:n=2,c=6,h=7,w=5,k=9,r=3,s=3,pad=1,dtype=u8i8,x_zero=1",
        "conv2d:c=5,h=9,w=8,k=4,r=3,s=2,stride=2,pad_top=2,pad_right=1,dtype=i8i8,x_zero=1",
        "conv2d:c=8,h=6,w=9,k=6,r=2,s=3,pad=1,dilation_w=2,groups=2,dtype=u8i8",
        "conv2d:c=7,h=4,w=5,k=3,r=1,s=1,dtype=i8i8",
        "depthwise_conv2d:c=5,h=6,w=7,r=3,s=3,multiplier=2,stride_h=2,pad=1,dtype=u8i8,x_zero=1",
        "depthwise_conv2d:c=3,h=9,w=9,r=5,s=5,pad=2,dtype=i8i8,x_zero=1,layout=blocked",
    ];
    for text in texts {
        let w = Workload::parse(text).unwrap();
        let program = w.program();
        let Tolerance { abs, rel } = Tolerance::for_program(&program);
        assert_eq!((abs, rel), (0.0, 0.0), "{text}");
        let of_inputs = program.arguments().filter(|(_, b)| b.role != Role::Output);
        let inputs: Vec<Vec<f64>> = of_inputs.map(|(id, _)| random_argument(&program, id, 7)).collect();
        let got = evaluate(&program, &inputs, 1).unwrap().remove(0);
        let zero = inputs.get(2).map_or(0, |zero| zero[0] as i64);
        assert_eq!(zero != 0, text.contains("x_zero"), "{text}");
        let Structure::Window(window) = w.structure() else { panic!("{text} is a convolution") };
        let [rows, columns] = window.axes;
        let of_group = window.c / window.groups;
        let out = Tensor::zeros(&[window.n, window.k, rows.output, columns.output]);
        for (at, got) in out.each().into_iter().zip(&got) {
            let [n, k, p, q] = at[..] else { unreachable!() };
            let mut sum = 0;
            for tap in each(&[of_group, rows.filter, columns.filter]) {
                let [c, r, s] = tap[..] else { unreachable!() };
                let (row, column) = (p * rows.stride + r * rows.dilation, q * columns.stride + s * columns.dilation);
                let (row, column) = (row - rows.before, column - columns.before);
                let channel = k / (window.k / window.groups) * of_group + c;
                let is_inside = (0..rows.input).contains(&row) && (0..columns.input).contains(&column);
                let pixel = ((n * window.c + channel) * rows.input + row) * columns.input + column;
                let x = if is_inside { inputs[0][pixel as usize] as i64 } else { zero };
                let weight = ((k * of_group + c) * rows.filter + r) * columns.filter + s;
                sum += x * inputs[1][weight as usize] as i64;
            }
            assert_eq!(*got, sum as f64, "{text}: {at:?}");
        }
    }
}
