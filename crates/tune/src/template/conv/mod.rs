//! Templates of convolutions: one that chooses among the algorithms, and one for each algorithm alone.

mod direct;
mod im2col;
mod paper;
mod winograd;

use super::{Setting, Template, ceil_div};
use crate::space::{Config, Constraint, Domain, Parameter, Space, SpaceError, Value};
use tilewright_ir::Step;
use tilewright_ir::op::{Layout, Workload};
use tilewright_ir::schedule::LayoutAxis::{self, Inner, Outer, Whole};

pub use paper::CONV_4_4_4_2_2_2;

/// Whether the stages of a workload are those of a convolution.
fn is_convolution(w: &Workload) -> bool {
    ["conv2d", "depthwise_conv2d", "conv2d_transpose"].contains(&w.operator().name)
}

/// Every algorithm that applies, as a choice of the search.
pub const CONV: Template = Template {
    name: "conv",
    text: "direct convolution, im2col or Winograd's algorithm, whichever is faster",
    serves: is_convolution,
    space: |s| space("conv", s, ALGORITHMS),
    steps: |s, space, config| steps(s, ALGORITHMS, space, config),
    estimate: Some(|s, space, config| estimate(s, ALGORITHMS, space, config)),
};

/// Direct convolution alone.
pub const CONV_DIRECT: Template = Template {
    name: "conv-direct",
    text: "direct convolution: register tile of channels and pixels, channels or pixels as lanes, blocked layouts",
    serves: is_convolution,
    space: |s| space("conv-direct", s, &[direct::DIRECT]),
    steps: |s, space, config| steps(s, &[direct::DIRECT], space, config),
    estimate: Some(|s, space, config| estimate(s, &[direct::DIRECT], space, config)),
};

/// Winograd's algorithm alone.
pub const CONV_WINOGRAD: Template = Template {
    name: "conv-winograd",
    text: "Winograd's F(2x2, 3x3) and F(4x4, 3x3): transforms and products of a block of tile rows",
    serves: |w| is_convolution(w) && Shape::of(w).has_winograd,
    space: |s| space("conv-winograd", s, &[winograd::WINOGRAD]),
    steps: |s, space, config| steps(s, &[winograd::WINOGRAD], space, config),
    estimate: Some(|s, space, config| estimate(s, &[winograd::WINOGRAD], space, config)),
};

/// The matrix product of weights and patches alone.
pub const CONV_IM2COL: Template = Template {
    name: "conv-im2col",
    text: "matrix product of weights and patches: patches whole or by blocks, register tile of channels and pixels",
    serves: |w| is_convolution(w) && (im2col::IM2COL.applies)(&Shape::of(w)),
    space: |s| space("conv-im2col", s, &[im2col::IM2COL]),
    steps: |s, space, config| steps(s, &[im2col::IM2COL], space, config),
    estimate: Some(|s, space, config| estimate(s, &[im2col::IM2COL], space, config)),
};

/// A way to compute a convolution.
struct Algorithm {
    /// Its name as a value of `algorithm`.
    name: &'static str,
    /// Whether it computes convolutions of this shape.
    applies: fn(&Shape) -> bool,
    /// What it leaves open. Algorithms may share parameters.
    parameters: fn(&Setting, &Shape) -> Vec<Parameter>,
    /// Which combinations make sense.
    constraints: fn(&Setting, &Shape) -> Vec<Constraint>,
    /// The schedule of a configuration.
    steps: fn(&Setting, &Shape, &Space, &Config) -> Vec<Step>,
    /// See [`Template::estimate`].
    estimate: fn(&Setting, &Shape, &Space, &Config) -> f64,
}

/// All algorithms.
const ALGORITHMS: &[Algorithm] = &[direct::DIRECT, im2col::IM2COL, winograd::WINOGRAD];

/// The space of several algorithms: the parameters of all, where those that the chosen one does not have keep their
/// first value and those that it has keep to its values.
fn space(name: &str, s: &Setting, algorithms: &[Algorithm]) -> Result<Space, SpaceError> {
    let shape = Shape::of(&s.workload);
    let algorithms: Vec<&Algorithm> = algorithms.iter().filter(|a| (a.applies)(&shape)).collect();
    if let [only] = algorithms[..] {
        return Space::new(name, (only.parameters)(s, &shape), (only.constraints)(s, &shape));
    }
    let names: Vec<&str> = algorithms.iter().map(|a| a.name).collect();
    let of_each: Vec<Vec<Parameter>> = algorithms.iter().map(|a| (a.parameters)(s, &shape)).collect();
    let mut parameters = vec![Parameter::categorical("algorithm", &names)];
    let mut constraints = Vec::new();
    for parameter in of_each.iter().flatten() {
        if parameters.iter().any(|p| p.name == parameter.name) {
            continue;
        }
        let in_each: Vec<Option<Domain>> =
            of_each.iter().map(|all| all.iter().find(|p| p.name == parameter.name).map(|p| p.domain.clone())).collect();
        let domain = in_each.iter().flatten().cloned().reduce(union).expect("one algorithm has it");
        if in_each.iter().any(|d| d.as_ref() != Some(&domain)) {
            let (names, first) = (names.iter().map(|n| n.to_string()).collect::<Vec<_>>(), first(&domain));
            constraints.push(Constraint::new(
                &format!("{}_of_algorithm", parameter.name),
                "a parameter that the algorithm does not have keeps its first value",
                &["algorithm", &parameter.name],
                move |v| {
                    let chosen = names.iter().position(|n| n == v[0].text()).expect("a listed algorithm");
                    in_each[chosen].as_ref().map_or(*v[1] == first, |domain| holds(domain, v[1]))
                },
            ));
        }
        parameters.push(Parameter { name: parameter.name.clone(), domain });
    }
    for algorithm in algorithms {
        constraints
            .extend((algorithm.constraints)(s, &shape).into_iter().map(|c| c.only_where("algorithm", algorithm.name)));
    }
    Space::new(name, parameters, constraints)
}

fn steps(s: &Setting, algorithms: &[Algorithm], space: &Space, config: &Config) -> Vec<Step> {
    let shape = Shape::of(&s.workload);
    (chosen(&shape, algorithms, space, config).steps)(s, &shape, space, config)
}

fn estimate(s: &Setting, algorithms: &[Algorithm], space: &Space, config: &Config) -> f64 {
    let shape = Shape::of(&s.workload);
    (chosen(&shape, algorithms, space, config).estimate)(s, &shape, space, config)
}

/// The algorithm of a configuration.
fn chosen<'a>(shape: &Shape, algorithms: &'a [Algorithm], space: &Space, config: &Config) -> &'a Algorithm {
    let applying: Vec<&Algorithm> = algorithms.iter().filter(|a| (a.applies)(shape)).collect();
    match applying[..] {
        [only] => only,
        _ => {
            let name = space.text(config, "algorithm");
            applying.into_iter().find(|a| a.name == name).expect("the space lists the algorithms that apply")
        }
    }
}

/// The values of both, of parameters of the same name: numbers, or alternatives.
fn union(a: Domain, b: Domain) -> Domain {
    match (a, b) {
        (Domain::Ordinal(a), Domain::Ordinal(b)) => {
            let mut all = [a, b].concat();
            all.sort_unstable();
            all.dedup();
            Domain::Ordinal(all)
        }
        (Domain::Categorical(mut a), Domain::Categorical(b)) => {
            let new: Vec<String> = b.into_iter().filter(|v| !a.contains(v)).collect();
            a.extend(new);
            Domain::Categorical(a)
        }
        (a, b) => {
            assert_eq!(a, b, "parameters that algorithms share are of one kind");
            a
        }
    }
}

fn holds(domain: &Domain, value: &Value) -> bool {
    match domain {
        Domain::Ordinal(all) => all.contains(&value.int()),
        Domain::Categorical(all) => all.iter().any(|v| v == value.text()),
        Domain::Factorization { .. } | Domain::Permutation(_) => true,
    }
}

fn first(domain: &Domain) -> Value {
    match domain {
        Domain::Ordinal(all) => Value::Int(all[0]),
        Domain::Categorical(all) => Value::Text(all[0].clone()),
        Domain::Permutation(all) => Value::Order(all.clone()),
        Domain::Factorization { n, parts } => {
            Value::Factors((0..*parts).map(|part| if part == 0 { *n } else { 1 }).collect())
        }
    }
}

/// The sizes of a convolution's reduction, read off its untransformed program.
///
/// The stages are named alike in every operator of the kind: `acc[n, k, p, q]` sums over `c`, `r` and `s` the products
/// of the weights `W` with the input, `pad` where it is padded, and the last stage stores what the epilogue makes of it.
struct Shape {
    n: i64,
    k: i64,
    p: i64,
    q: i64,
    /// Input channels that one output sums over; none in a depthwise convolution.
    c: Option<i64>,
    /// Rows and columns of a filter.
    r: i64,
    s: i64,
    /// Elements from one output to the next, along rows and columns.
    stride: [i64; 2],
    /// Whether the input is read through a stage that pads it.
    padded: bool,
    /// Channels of the output that read the same channels of the input.
    k_group: i64,
    /// Whether Winograd's algorithm applies, 3×3, stride 1, no dilation, no groups, and its rounding is accepted.
    has_winograd: bool,
}

impl Shape {
    fn of(w: &Workload) -> Shape {
        let program = w.program();
        let shape =
            |name: &str| &program.buffer(program.find_buffer(name).expect("a stage of every convolution")).shape;
        let (acc, weights) = (shape("acc"), shape("W"));
        let depthwise = program.find_loop("c").is_none();
        let transposed = w.operator().name == "conv2d_transpose";
        let [r, s] = [weights[weights.len() - 2], weights[weights.len() - 1]];
        let groups = if depthwise || transposed { 1 } else { w.size("groups") };
        Shape {
            n: acc[0],
            k: acc[1],
            p: acc[2],
            q: acc[3],
            c: (!depthwise).then(|| if transposed { weights[0] } else { weights[1] }),
            r,
            s,
            stride: if transposed { [1, 1] } else { [w.size("stride_h"), w.size("stride_w")] },
            padded: program.find_buffer("pad").is_some(),
            k_group: acc[1] / groups,
            has_winograd: !w.exact
                && w.operator().name == "conv2d"
                && (r, s) == (3, 3)
                && groups == 1
                && ["stride_h", "stride_w", "dilation_h", "dilation_w"].iter().all(|size| w.size(size) == 1),
        }
    }
}

/// NCHW with blocks of channels next to each other.
fn channels_last(block: i64) -> [LayoutAxis; 5] {
    [Whole(0), Outer(1, block), Whole(2), Whole(3), Inner(1, block)]
}

/// Whether the template chooses the layouts in which activations come and go.
fn is_blocked(setting: &Setting) -> bool {
    setting.workload.layout() == Layout::Blocked
}
