//! The convolution space of the AutoTVM, OpEvo and NoSE papers: a GPU template, which a CPU runs too.

use super::super::gpu::{self, BlockTile, Direct};
use super::super::step::{accumulate, compute_at, fuse, parallel, reorder, split, unroll, vectorize};
use super::super::{Template, TemplateSetting};
use super::{ReductionSizes, is_blocked};
use tilewright_ir::Step;
use tilewright_ir::op::{Structure, Window};
use tilewright_search::{Config, Parameter, Space, SpaceError};

/// Output channels, rows and columns in 4 loops each, input channels and both kernel axes in 2,
/// and unrolling.
///
/// # Source
/// The space is that of OpEvo, section 4 (Conv2D), and of NoSE: TVM's direct convolution for GPUs in NCHW,
/// whose four loops are blocks, virtual threads, threads and the elements of a thread, and whose kernel is
/// left as it is.
///
/// On a GPU the schedule is the same: each step of the outer reduction loops has its part of the padded input
/// and of the weights in shared memory, to which each thread copies a run of adjacent elements; sums are in
/// registers. Ours differs in `auto_unroll_max_step`: with `unroll_explicit` we unroll a thread's loops up to
/// this many operations, and otherwise leave them to the compiler; images are blocks along z, with channels.
///
/// The papers leave open what a CPU does with the loops; here, as in `gemm-4-2-4`,
/// - blocks `k0 p0 q0` are outermost and shared among threads, and each has a buffer of its own for its sum;
/// - inside, loops nest as `k1 p1 q1 c0 r0 s0 k2 p2 q2 c1 r1 s1 k3 p3 q3`, so that what a GPU's threads
///   `k2 p2 q2` share is read from cache;
/// - columns `q3` are vector lanes, since they are contiguous in NCHW, in both input and output;
/// - a tile `k3 × p3 × q3` that fits the registers is kept in them, a larger one in memory;
/// - the input is padded before the blocks, for which a GPU uses shared memory;
/// - `unroll_explicit` unrolls the innermost loops of at most `auto_unroll_max_step` vector operations.
///   Without it, unrolling is left to LLVM, which does not unroll them.
pub const CONV_4_4_4_2_2_2: Template = Template {
    name: "conv-4-4-4-2-2-2",
    text: "the OpEvo and NoSE papers' space: factorizations of outputs into 4, of the reduction into 2, unrolling",
    serves,
    space,
    steps: |s, space, config| {
        if s.target.gpu.is_some() { gpu_steps(s, space, config) } else { steps(s, space, config) }
    },
    estimate: None,
};

/// Whether the template serves a workload: on a CPU, all but transposed convolutions and layouts that others
/// chose; on a GPU, those without groups and without our own layouts.
fn serves(s: &TemplateSetting) -> bool {
    let Structure::Window(window) = s.workload.structure() else { return false };
    let is_plain = window.groups == 1 && !is_blocked(s);
    let is_open = s.workload.layout().channels() == [1, 1] && !s.workload.has_integer_factors();
    !window.depthwise && !window.transposed && is_open && (s.target.gpu.is_none() || is_plain)
}

fn space(setting: &TemplateSetting) -> Result<Space, SpaceError> {
    let ReductionSizes { k, p, q, c, r, s, stride, axes, .. } = ReductionSizes::of(&setting.workload);
    let factors = |name: &str, n: i64, parts| Parameter::factorization(name, n as u64, parts);
    let parameters = vec![
        factors("k", k, 4),
        factors("p", p, 4),
        factors("q", q, 4),
        factors("c", c.unwrap_or(1), 2),
        factors("r", r, 2),
        factors("s", s, 2),
        Parameter::boolean("unroll_explicit"),
        Parameter::ordinal("auto_unroll_max_step", [0, 512, 1500]),
    ];
    let mut constraints = Vec::new();
    if setting.target.gpu.is_some() {
        constraints.extend(gpu::threads(setting, &["q[2]", "p[2]", "k[2]"], &parameters));
        // The extent of a block in a dimension is the dimension divided by the number of blocks.
        let reach = |output: &str, n: i64, tap: &str, at: usize| {
            let (stride, dilation) = (stride[at], axes[at].dilation);
            format!("(({n} // {output}[0] - 1) * {stride} + ({tap}[1] - 1) * {dilation} + 1)")
        };
        let input = format!("c[1] * {} * {}", reach("p", p, "r", 0), reach("q", q, "s", 1));
        let weights = format!("({k} // k[0]) * c[1] * r[1] * s[1]");
        constraints.push(gpu::shared_bytes(setting, &[input, weights], &parameters));
    }
    Space::declare("conv-4-4-4-2-2-2", parameters, constraints)
}

/// Returns the schedule of a configuration on a GPU.
fn gpu_steps(s: &TemplateSetting, space: &Space, config: &Config) -> Vec<Step> {
    let Structure::Window(window) = s.workload.structure() else { unreachable!("the template serves convolutions") };
    let factors = |name: &str| space.factors(config, name).into_iter().map(|f| f as i64).collect::<Vec<_>>();
    let tile = |name: &str| {
        let f = factors(name);
        BlockTile { strides: f[1], threads: f[2], elements: f[3] }
    };
    let explicit = space.flag(config, "unroll_explicit");
    let direct = Direct {
        tiles: ["k", "p", "q"].map(tile),
        inner: ["c", "r", "s"].map(|name| factors(name)[1]),
        is_shared: true,
        most_unrolled: if explicit { space.int(config, "auto_unroll_max_step") } else { 0 },
        lanes: false,
    };
    direct.steps(&s.workload, &window)
}

fn steps(s: &TemplateSetting, space: &Space, config: &Config) -> Vec<Step> {
    let shape = ReductionSizes::of(&s.workload);
    let lanes = s.target.lanes(s.workload.dtype);
    let factors = |name: &str| space.factors(config, name).into_iter().map(|f| f as i64).collect::<Vec<_>>();
    let mut steps = Vec::new();
    if shape.padded {
        steps.extend([split("pw", lanes, "pw.v", "pw.l"), vectorize("pw.l")]);
    }

    // Blocks of the output; the sum of each is computed inside, followed by the epilogue.
    for axis in ["k", "p", "q"] {
        let block = factors(axis)[1..].iter().product();
        steps.push(split(&format!("o{axis}"), block, &format!("{axis}0"), &format!("o{axis}.b")));
    }
    steps.extend([reorder(&["k0", "p0", "q0", "ok.b", "op.b", "oq.b"]), compute_at(Window::ACC, "q0")]);
    steps.extend([split("oq.b", lanes, "oq.v", "oq.l"), vectorize("oq.l")]);

    for axis in ["k", "p", "q"] {
        let f = factors(axis);
        let rest = format!("{axis}.rest");
        steps.push(split(axis, f[2] * f[3], &format!("{axis}1"), &rest));
        steps.push(split(&rest, f[3], &format!("{axis}2"), &format!("{axis}3")));
    }
    for axis in ["c", "r", "s"] {
        steps.push(split(axis, factors(axis)[1], &format!("{axis}0"), &format!("{axis}1")));
    }
    steps.push(split("q3", lanes, "q3.v", "q3.l"));
    steps.push(reorder(&[
        "k1", "p1", "q1", "c0", "r0", "s0", "k2", "p2", "q2", "c1", "r1", "s1", "k3", "p3", "q3.v", "q3.l",
    ]));

    let [channels, rows, columns] = ["k", "p", "q"].map(|axis| factors(axis)[3]);
    let row = (columns + lanes - 1) / lanes;
    // The tile and one channel's vectors of the input; weights are broadcast as they are multiplied.
    let in_registers = channels * rows * row + rows * row < i64::from(s.target.n_vector_registers);
    if in_registers {
        steps.push(accumulate(Window::ACC, "q2", "acc.r"));
    }
    let most = if space.flag(config, "unroll_explicit") { space.int(config, "auto_unroll_max_step") } else { 0 };
    let tile = [("q3.v", row), ("p3", rows), ("k3", channels)];
    let taps = [("s1", factors("s")[1]), ("r1", factors("r")[1]), ("c1", factors("c")[1])];
    let mut n_operations = 1;
    for (at, (name, extent)) in tile.into_iter().chain(taps).enumerate() {
        n_operations *= extent;
        if n_operations <= most || (in_registers && at < tile.len()) {
            steps.push(unroll(name));
        }
    }
    steps.push(vectorize("q3.l"));

    if s.n_threads > 1 {
        steps.extend([
            fuse("on", "k0", "nk"),
            fuse("nk", "p0", "nkp"),
            fuse("nkp", "q0", "blocks"),
            parallel("blocks"),
        ]);
        if shape.padded {
            steps.extend([fuse("pn", "pc", "pnc"), parallel("pnc")]);
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewright_ir::Target;
    use tilewright_ir::op::Workload;

    /// The sizes that NoSE (table II) and AutoTVM's template give.
    #[test]
    fn spaces_are_as_large_as_the_papers() {
        for (layer, size) in [("C2", 90_316_800), ("C6", 36_864_000), ("C9", 9_123_840), ("C12", 844_800)] {
            let workload = Workload::parse(&format!("resnet18.{layer}")).unwrap();
            let setting = TemplateSetting { workload, target: Target::named("x86-64-v4").unwrap(), n_threads: 1 };
            assert_eq!(space(&setting).unwrap().size(), size, "{layer}");
        }
    }
}
