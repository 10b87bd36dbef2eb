//! Models with an open dimension: at each size the results are those of the model of that size, regardless of
//! earlier runs and of the data beyond the size.

use std::sync::atomic::{AtomicUsize, Ordering};

use tilewright::Records;
use tilewright::library::{Form, Weights, library, write_library};
use tilewright_device::host;
use tilewright_graph::{Bindings, DType, Graph, SplitMix64, Tensor, evaluate, specialise};
use tilewright_ir::Target;
use tilewright_model::{
    CompileOptions, Compiled, Fused, LayoutPurpose, OpenError, Runner, Step, compile_guessed, compile_known, laid_out,
    lower, open, open_items, open_or_repeat,
};
use tilewright_runtime::{Aligned, Context, OpenDimension, RunError, SharedPool};

use crate::blocks::graph_of;
use crate::common::agree;
use crate::whole;

pub(crate) fn at(graph: &Graph, name: &str, size: i64) -> Graph {
    at_sizes(graph, &[(name, size)], name)
}

fn at_sizes(graph: &Graph, sizes: &[(&str, i64)], open: &str) -> Graph {
    let dims = sizes.iter().map(|(name, size)| ((*name).to_owned(), *size as usize)).collect();
    let special = specialise(graph, &Bindings { dims, open: Some(open.to_owned()), ..Bindings::default() });
    assert!(special.problems.is_empty(), "{sizes:?}: {}", special.problems[0]);
    special.graph
}

/// Makes a model of any number of `items`, each of any size.
fn opened_items(graph: &Graph, items: &OpenDimension, dim: &OpenDimension) -> Result<Fused, OpenError> {
    opened_items_for(graph, items, dim, &host::target())
}

fn opened_items_for(
    graph: &Graph,
    items: &OpenDimension,
    dim: &OpenDimension,
    target: &Target,
) -> Result<Fused, OpenError> {
    open_items(items, dim, |[n, size], open| {
        let own = at_sizes(graph, &[(&items.name, n), (&dim.name, size)], &open.name);
        Ok(lower(&own, false, target, 1).unwrap())
    })
}

pub(crate) fn opened(graph: &Graph, dim: &OpenDimension) -> Result<Fused, OpenError> {
    opened_for(graph, dim, &host::target())
}

fn opened_for(graph: &Graph, dim: &OpenDimension, target: &Target) -> Result<Fused, OpenError> {
    open(dim, |size| Ok(lower(&at(graph, &dim.name, size), false, target, 1).unwrap()))
}

/// Memory of a tensor, followed by a fence.
struct Fenced {
    memory: Aligned,
    n_bytes: usize,
}

const FENCE: u8 = 0xA5;

impl Fenced {
    fn new(n_bytes: usize) -> Fenced {
        let mut memory = Aligned::new(n_bytes as u64 + 4096).unwrap();
        memory.bytes_mut().fill(FENCE);
        Fenced { memory, n_bytes }
    }

    fn of(bytes: &[u8]) -> Fenced {
        let mut made = Fenced::new(bytes.len());
        made.memory.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        made
    }

    fn bytes(&self) -> &[u8] {
        assert!(self.memory.bytes()[self.n_bytes..].iter().all(|byte| *byte == FENCE), "written beyond the size");
        &self.memory.bytes()[..self.n_bytes]
    }
}

pub(crate) fn inputs(graph: &Graph, seed: u64, fill: Option<f64>) -> Vec<(String, Tensor)> {
    let mut random = SplitMix64::new(seed);
    let given = |id: &tilewright_graph::ValueId| {
        let value = graph.value(*id);
        let ty = value.ty.clone().expect("inputs have types");
        let n = ty.n_elements();
        let x = match (ty.dtype, fill) {
            (DType::I64, _) => {
                whole(&ty.shape, &(0..n as i64).map(|at| (at * 3 + seed as i64) % 7).collect::<Vec<_>>())
            }
            (_, Some(x)) => Tensor::from_floats(ty.dtype, ty.shape.clone(), &vec![x; n]),
            (_, None) => random.input(&ty),
        };
        (value.name.clone(), x)
    };
    graph.inputs.iter().map(given).collect()
}

/// Runs a context at a size, and returns its outputs.
pub(crate) fn run(context: &mut Context, graph: &Graph, given: &[(String, Tensor)]) -> Vec<Tensor> {
    let passed: Vec<Fenced> = given.iter().map(|(_, x)| Fenced::of(x.bytes())).collect();
    let types: Vec<_> = graph.outputs.iter().map(|id| graph.value(*id).ty.clone().unwrap()).collect();
    let mut made: Vec<Fenced> = types.iter().map(|ty| Fenced::new(ty.checked_bytes().unwrap())).collect();
    let ins: Vec<&[u8]> = passed.iter().map(Fenced::bytes).collect();
    let mut outs: Vec<&mut [u8]> = made.iter_mut().map(|made| &mut made.memory.bytes_mut()[..made.n_bytes]).collect();
    context.run(&ins, &mut outs).unwrap();
    drop(outs);
    let tensor = |(made, ty): (&Fenced, &tilewright_graph::TensorType)| {
        Tensor::new(ty.clone(), bytes::Bytes::copy_from_slice(made.bytes())).unwrap()
    };
    made.iter().zip(&types).map(tensor).collect()
}

/// Whether the results of a run agree with the expected ones.
pub(crate) fn is_near(found: &Tensor, wanted: &Tensor) -> bool {
    let largest = wanted.floats().iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let is_near = |(x, y): (f64, f64)| (x - y).abs() <= 1e-5 * largest;
    let agrees = found.ty() == wanted.ty() && found.floats().into_iter().zip(wanted.floats()).all(is_near);
    agrees || agree(found, wanted).is_ok()
}

/// Checks a model at sizes up and down, each after runs at the largest size that leave NaN behind where they
/// can.
pub(crate) fn check(dim: &OpenDimension, ports: [&str; 2], statements: &str) {
    check_graph(dim, &graph_of(ports[0], ports[1], statements));
}

/// Checks a graph as [`check`] does.
pub(crate) fn check_graph(dim: &OpenDimension, graph: &Graph) {
    check_lowered(dim, graph, opened(graph, dim).unwrap_or_else(|error| panic!("{error}")));
}

/// Checks a model as [`check`] does, lowered for a level 2 cache that the scores of its attention exceed.
fn check_in_blocks(dim: &OpenDimension, ports: [&str; 2], statements: &str) {
    let graph = graph_of(ports[0], ports[1], statements);
    let fused = opened_for(&graph, dim, &with_small_cache(dim)).unwrap_or_else(|error| panic!("{error}"));
    assert!(fused.steps.iter().any(|step| matches!(step, Step::Sequence(_))), "it is not divided");
    check_lowered(dim, &graph, fused);
}

/// Target with a level 2 cache that the largest scores of two heads exceed.
fn with_small_cache(dim: &OpenDimension) -> Target {
    Target { l2_bytes: 4 * 2 * (dim.most * dim.most) as u64 - 1, ..host::target() }
}

fn check_lowered(dim: &OpenDimension, graph: &Graph, fused: Fused) {
    let compiled = compile_guessed(fused, &host::target(), 1).unwrap_or_else(|error| panic!("{error}"));
    let mut context = Context::new(compiled.model.cpu().unwrap(), &SharedPool::new(1).unwrap()).unwrap();
    let sizes: Vec<i64> = (dim.least..=dim.most).filter(|size| dim.has(*size)).collect();
    let largest = at(graph, &dim.name, dim.most);
    for (seed, &size) in sizes.iter().chain(sizes.iter().rev()).enumerate() {
        if seed % 3 == 0 {
            context.set_dim(&dim.name, dim.most).unwrap();
            run(&mut context, &largest, &inputs(&largest, 1, Some(f64::NAN)));
        }
        context.set_dim(&dim.name, size).unwrap();
        assert_eq!(context.size(), Some(size));
        let own = at(graph, &dim.name, size);
        let given = inputs(&own, seed as u64, None);
        let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
        let wanted = evaluate(&own, &named).unwrap();
        for (found, wanted) in run(&mut context, &own, &given).iter().zip(&wanted) {
            assert!(is_near(found, wanted), "{}={size}: {:?}", dim.name, agree(found, wanted));
        }
    }
    let before = context.size();
    for wrong in [dim.least - 1, dim.most + 1, dim.most + dim.step, i64::MIN, i64::MAX] {
        assert!(matches!(context.set_dim(&dim.name, wrong), Err(RunError::BadSize { .. })), "{wrong}");
    }
    assert!(matches!(context.set_dim("other", dim.most), Err(RunError::NoDim { .. })));
    assert_eq!(context.size(), before);
}

/// Checks a model of any number of items of any size, each after runs of the largest number and size, both as
/// in a library and as in this process, where steps may process several items.
pub(crate) fn check_items(items: &OpenDimension, dim: &OpenDimension, ports: [&str; 2], statements: &str) {
    let graph = graph_of(ports[0], ports[1], statements);
    let fused = opened_items(&graph, items, dim).unwrap_or_else(|error| panic!("{error}"));
    let compiled = compile_guessed(fused.clone(), &host::target(), 1).unwrap_or_else(|error| panic!("{error}"));
    check_compiled_items(items, dim, &graph, &compiled);
    check_compiled_items(items, dim, &graph, &for_runs(fused));
}

fn for_runs(fused: Fused) -> Compiled {
    let making = CompileOptions { for_runs: true, ..CompileOptions::default() };
    compile_known(fused, &host::target(), 1, &Records::default(), making).unwrap_or_else(|error| panic!("{error}"))
}

fn check_compiled_items(items: &OpenDimension, dim: &OpenDimension, graph: &Graph, compiled: &Compiled) {
    let mut context = Context::new(compiled.model.cpu().unwrap(), &SharedPool::new(1).unwrap()).unwrap();
    let mut runner = Runner::new(compiled, &SharedPool::new(1).unwrap()).unwrap();
    assert_eq!((context.items(), context.size()), (Some(items.most), Some(dim.most)));
    let own = |n: i64, size: i64| at_sizes(graph, &[(&items.name, n), (&dim.name, size)], &dim.name);
    let sizes: Vec<i64> = (dim.least..=dim.most).filter(|size| dim.has(*size)).collect();
    let largest = own(items.most, dim.most);
    for (seed, &size) in sizes.iter().chain(sizes.iter().rev()).enumerate() {
        let n = items.least + seed as i64 % ((items.most - items.least) / items.step + 1) * items.step;
        context.set_dim(&items.name, items.most).unwrap();
        context.set_dim(&dim.name, dim.most).unwrap();
        run(&mut context, &largest, &inputs(&largest, 1, Some(f64::NAN)));
        context.set_dim(&items.name, n).unwrap();
        context.set_dim(&dim.name, size).unwrap();
        let own = own(n, size);
        let given = inputs(&own, seed as u64, None);
        let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
        let wanted = evaluate(&own, &named).unwrap();
        let found = run(&mut context, &own, &given);
        let pairs = found.iter().zip(&wanted);
        pairs.for_each(|(found, wanted)| assert!(is_near(found, wanted), "{n}, {size}: {:?}", agree(found, wanted)));
        runner.set_dim(&dim.name, size).unwrap();
        runner.set_dim(&items.name, n).unwrap();
        named.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
        runner.run().unwrap();
        assert!(runner.outputs().iter().map(|(_, x)| x).eq(&found), "{n}, {size}: a runner makes other bits");
    }
    for wrong in [items.least - 1, items.most + 1] {
        assert!(matches!(context.set_dim(&items.name, wrong), Err(RunError::BadSize { .. })), "{wrong}");
    }
}

/// Program that runs a library at each size in a file, on the data after it, and writes the results.
const MAIN: &str = r#"#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "net.h"
static size_t bytes_of(const net_context *context, int is_output) {
    const net_tensor *tensor = is_output ? net_output(0) : net_input(0);
    int64_t shape[8];
    size_t bytes = tensor->type_bits / 8;
    int n_open = 0;
    if (tensor->rank > 8 || net_shape(context, is_output, 0, shape)) exit(3);
    for (int32_t i = 0; i < tensor->rank; i++) {
        n_open += tensor->shape[i] == -1;
        bytes *= (size_t)shape[i];
    }
    if (n_open != (int)net_dims() || bytes > tensor->bytes) exit(4);
    return bytes;
}
int main(void) {
    net_context *context;
    FILE *in = fopen("in", "rb"), *out = fopen("out", "wb");
    const net_dimension *dim = net_dim(0);
    if (!in || !out || !dim || net_dim(net_dims()) || net_create(NULL, &context)) return 2;
    char *x = malloc(net_input(0)->bytes), *y = malloc(net_output(0)->bytes);
    int64_t size;
    while (fread(&size, sizeof size, 1, in) == 1) {
        if (net_set_dim(context, 0, size)) return 5;
        if (net_dims() == 2 && (fread(&size, sizeof size, 1, in) != 1 || net_set_dim(context, 1, size))) return 5;
        /* What is refused changes nothing. */
        if (net_set_dim(context, 0, dim->most + 1) != NET_BAD_SIZE || net_set_dim(context, 2, size) != NET_BAD_SIZE
            || net_set_dim(context, 0, dim->least - 1) != NET_BAD_SIZE
            || net_set_dim(NULL, 0, size) != NET_BAD_ARGUMENT)
            return 6;
        size_t n_in = bytes_of(context, 0), n_out = bytes_of(context, 1);
        memset(y, 0xA5, net_output(0)->bytes);
        if (fread(x, 1, n_in, in) != n_in) return 7;
        const void *inputs[] = {x};
        void *outputs[] = {y};
        if (net_run(context, inputs, outputs)) return 8;
        for (size_t i = n_out; i < net_output(0)->bytes; i++)
            if ((unsigned char)y[i] != 0xA5) return 9;
        if (fwrite(y, 1, n_out, out) != n_out) return 10;
    }
    net_destroy(context);
    free(x);
    free(y);
    return fclose(out);
}
"#;

/// Checks that a library in C has the bits of runs in this process, at sizes up and down.
pub(crate) fn check_library(dim: &OpenDimension, ports: [&str; 2], statements: &str) {
    let graph = graph_of(ports[0], ports[1], statements);
    let least = [dim.least, dim.most, dim.least + dim.step, dim.most - dim.step, dim.least];
    check_library_of(&graph, opened(&graph, dim).unwrap(), &least.map(|size| vec![(dim.name.as_str(), size)]));
}

/// Checks a library as [`check_library`] does, given the sizes of each run, the number of items last.
pub(crate) fn check_library_of(graph: &Graph, fused: Fused, runs: &[Vec<(&str, i64)>]) {
    let target = host::target();
    let compiled = compile_guessed(fused, &target, 1).unwrap();
    let model = compiled.model.cpu().unwrap();
    let mut context = Context::new(model, &SharedPool::new(1).unwrap()).unwrap();
    static N_FOLDERS: AtomicUsize = AtomicUsize::new(0);
    let own = format!("open-{}-{}", std::process::id(), N_FOLDERS.fetch_add(1, Ordering::Relaxed));
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(own);
    std::fs::create_dir_all(&folder).unwrap();
    let made = library("net", &compiled.model, &target, 1, Weights::Small, &["open".to_owned()]).unwrap();
    let (mut given, mut expected): (Vec<u8>, Vec<u8>) = Default::default();
    for (at, (name, _)) in runs[0].iter().enumerate() {
        assert_eq!(made.build()["dims"][at]["name"], *name);
    }
    write_library(&made, Form::C, &folder).unwrap();
    for sizes in runs {
        let own = at_sizes(graph, sizes, sizes[0].0);
        let passed = inputs(&own, sizes[0].1 as u64, None);
        for (name, size) in sizes {
            given.extend(size.to_le_bytes());
            context.set_dim(name, *size).unwrap();
        }
        given.extend(passed[0].1.bytes());
        expected.extend(run(&mut context, &own, &passed)[0].bytes());
    }
    std::fs::write(folder.join("main.c"), MAIN).unwrap();
    std::fs::write(folder.join("in"), given).unwrap();
    let words = "-std=c99 -Wall -Wextra -Werror -O1 main.c net.c net_kernels.a -lm -lpthread -o program";
    for (program, arguments) in [("cc", words), ("./program", "")] {
        let mut command = std::process::Command::new(program);
        let done = command.current_dir(&folder).args(arguments.split_whitespace()).output().unwrap();
        assert!(done.status.success(), "{program}: {:?} {}", done.status, String::from_utf8_lossy(&done.stderr));
    }
    assert!(std::fs::read(folder.join("out")).unwrap() == expected, "other bits");
    std::fs::remove_dir_all(&folder).unwrap();
}

pub(crate) fn dim(name: &str, least: i64, most: i64, step: i64) -> OpenDimension {
    OpenDimension { name: name.to_owned(), least, most, step }
}

/// Layer of an encoder: embeddings of words and positions, attention, a feed-forward part.
const ENCODER: &str = "
    table = weights[7 16]
    places = weights[1 48 16]
    g1 = weights[16]
    b1 = weights[16]
    w1 = weights[16 48]
    c1 = weights[48]
    root = number[2.828427]
    of_heads = numbers[1 -1 2 8]
    of_rows = numbers[1 -1 16]
    w2 = weights[16 16]
    c2 = weights[16]
    w3 = weights[16 32]
    c3 = weights[32]
    w4 = weights[32 16]
    c4 = weights[16]
    from = numbers[0]
    to = numbers[1]
    rows = Shape[start=1, end=2](ids)
    own = Slice(places, from, rows, to)
    words = Gather[axis=0](table, ids)
    x = Add(words, own)
    n1 = LayerNormalization[axis=-1](x, g1, b1)
    p0 = MatMul(n1, w1)
    p1 = Add(p0, c1)
    q0, k0, v0 = Split[axis=-1, num_outputs=3](p1)
    q1 = Reshape(q0, of_heads)
    q = Transpose[perm=0 2 1 3](q1)
    k1 = Reshape(k0, of_heads)
    k = Transpose[perm=0 2 3 1](k1)
    v1 = Reshape(v0, of_heads)
    v = Transpose[perm=0 2 1 3](v1)
    s0 = MatMul(q, k)
    s1 = Div(s0, root)
    s = Softmax[axis=-1](s1)
    a0 = MatMul(s, v)
    a1 = Transpose[perm=0 2 1 3](a0)
    a2 = Reshape(a1, of_rows)
    a3 = MatMul(a2, w2)
    a4 = Add(a3, c2)
    r = Add(a4, x)
    f0 = MatMul(r, w3)
    f1 = Add(f0, c3)
    f = Relu(f1)
    o0 = MatMul(f, w4)
    o1 = Add(o0, c4)
    y = Add(r, o1)";

#[test]
fn an_encoder_takes_any_number_of_words() {
    let statements = ENCODER.replace(", num_outputs=3", "");
    check(&dim("words", 1, 48, 1), ["ids[1 words]", "y[1 words 16]"], &statements);
    check_library(&dim("words", 1, 48, 1), ["ids[1 words]", "y[1 words 16]"], &statements);
}

#[test]
fn an_encoder_takes_numbers_of_words_that_fill_one_vector_at_the_most() {
    let statements = ENCODER.replace(", num_outputs=3", "");
    check(&dim("words", 1, 16, 1), ["ids[1 words]", "y[1 words 16]"], &statements);
    check(&dim("words", 34, 48, 2), ["ids[1 words]", "y[1 words 16]"], &statements);
}

#[test]
fn an_encoder_takes_numbers_of_words_that_fill_no_vector() {
    let statements = ENCODER.replace(", num_outputs=3", "");
    check(&dim("words", 3, 39, 4), ["ids[1 words]", "y[1 words 16]"], &statements);
}

#[test]
fn a_network_of_images_takes_any_number_of_them() {
    let statements = "
        w1 = weights[16 3 3 3]
        c1 = weights[16]
        w2 = weights[16 16 3 3]
        c2 = weights[16]
        w3 = weights[10 16]
        c3 = weights[10]
        p1 = Conv[strides=2 2, kernel_shape=3 3, pads=1 1 1 1](x, w1, c1)
        r1 = Relu(p1)
        m = MaxPool[kernel_shape=3 3, strides=2 2, pads=1 1 1 1](r1)
        p2 = Conv[kernel_shape=3 3, pads=1 1 1 1](m, w2, c2)
        s = Add(p2, m)
        r2 = Relu(s)
        g = GlobalAveragePool(r2)
        f = Flatten(g)
        y = Gemm[transB=1](f, w3, c3)";
    check(&dim("n", 1, 9, 1), ["x[n 3 16 16]", "y[n 10]"], statements);
    check(&dim("n", 2, 12, 2), ["x[n 3 16 16]", "y[n 10]"], statements);
    check_library(&dim("n", 2, 12, 2), ["x[n 3 16 16]", "y[n 10]"], statements);
}

#[test]
fn images_in_blocks_are_read_as_plain_ones() {
    let statements = "
        w = weights[64 256 1 1]
        b = weights[64]
        c = Conv[kernel_shape=1 1](x, w)
        t = Transpose[perm=0 2 3 1](c)
        y = Add(t, b)";
    check(&dim("n", 1, 6, 1), ["x[n 256 14 14]", "y[n 14 14 64]"], statements);
}

#[test]
fn what_needs_a_number_is_named() {
    let refused = |dim: &OpenDimension, ports: [&str; 2], statements: &str, expected: &[&str]| {
        let graph = graph_of(ports[0], ports[1], statements);
        let error = match opened(&graph, dim) {
            Err(error) => error.to_string(),
            Ok(fused) => match compile_guessed(fused, &host::target(), 1) {
                Err(error) => error.to_string(),
                Ok(_) => panic!("it has code:\n{statements}"),
            },
        };
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        assert!(!error.contains('\n'), "{error}");
    };
    let n = dim("n", 1, 16, 1);
    // The number of nodes depends on the number of rows.
    refused(&n, ["x[n 4097]", "y[4097 n]"], "y = Transpose(x)", &["`y`", "behind another one"]);
    refused(&n, ["x[4097 n 4]", "y[4097 n 4]"], "y = Relu(x)", &["`x`", "behind another one"]);
    refused(&n, ["x[n 4]", "y[m 4]"], "y = Concat[axis=0](x, x)", &["joins tensors along the open dimension"]);
    refused(&dim("n", 1, 2, 1), ["x[n 4]", "y[n 4]"], "y = Relu(x)", &["n=1..2 has too few sizes"]);
}

#[test]
fn dimensions_behind_others_are_packed_for_callers() {
    let words = dim("behind", 1, 16, 1);
    for (ports, statements) in
        [(["x[behind 4]", "y[4 behind]"], "y = Transpose(x)"), (["x[2 behind 4]", "y[2 behind 4]"], "y = Relu(x)")]
    {
        check(&words, ports, statements);
        check_library(&words, ports, statements);
    }
    check(&words, ["x[2 behind 4]", "y[2 behind 4], z[2 behind 4]"], "y = Relu(x)\n z = Identity(x)");
    // A past of no tokens has no elements.
    check(&words, ["x[behind 4], past[1 0 4]", "y[behind 4]"], "y = Relu(x)");
}

/// Heads of queries, keys and values, for `HEADS` in statements.
const HEADS: &str = "
    q1 = Reshape(q0, of_heads)
    q = Transpose[perm=0 2 1 3](q1)
    k1 = Reshape(k0, of_heads)
    k = Transpose[perm=0 2 3 1](k1)
    v1 = Reshape(v0, of_heads)
    v = Transpose[perm=0 2 1 3](v1)";

/// Decoder layer as PyTorch's exporters write it: shapes are computed, positions counted without padding, and
/// the causal mask made from positions.
const EXPORTED: &str = "
    table = weights[7 16]
    places = weights[49 16]
    w = weights[16 48]
    padding = integer[1]
    zero = integer[0]
    one = integer[1]
    first = numbers[0]
    second = numbers[1]
    batch = numbers[1]
    heads = numbers[2]
    width = numbers[8]
    all = numbers[16]
    root = number[2.828427]
    none = number[0.0]
    hidden = number[-1000000.0]
    n = Shape[start=1, end=2](ids)
    of_heads = Concat[axis=0](batch, n, heads, width)
    of_rows = Concat[axis=0](batch, n, all)
    length = Squeeze(n)
    counted = Range(zero, length, one)
    row = Unsqueeze(counted, second)
    column = Unsqueeze(counted, first)
    seen = LessOrEqual(column, row)
    mask = Where(seen, none, hidden)
    is_padding = Equal(ids, padding)
    is_word = Not(is_padding)
    words = Cast[to=7](is_word)
    sums = CumSum(words, one)
    place = Mul(sums, words)
    e0 = Gather[axis=0](table, ids)
    e1 = Gather[axis=0](places, place)
    x = Add(e0, e1)
    p = MatMul(x, w)
    q0, k0, v0 = Split[axis=-1](p)
    HEADS
    s0 = MatMul(q, k)
    s1 = Div(s0, root)
    s2 = Add(s1, mask)
    s = Softmax[axis=-1](s2)
    a0 = MatMul(s, v)
    a1 = Transpose[perm=0 2 1 3](a0)
    y = Reshape(a1, of_rows)";

#[test]
fn a_decoder_of_an_exporter_takes_any_number_of_words() {
    let statements = &EXPORTED.replace("HEADS", HEADS);
    check(&dim("words", 1, 48, 1), ["ids[1 words]", "y[1 words 16]"], statements);
    check(&dim("words", 3, 39, 4), ["ids[1 words]", "y[1 words 16]"], statements);
    check_in_blocks(&dim("words", 1, 48, 1), ["ids[1 words]", "y[1 words 16]"], statements);
    check_library(&dim("words", 1, 48, 1), ["ids[1 words]", "y[1 words 16]"], statements);
}

#[test]
fn running_sums_take_any_number_of_rows() {
    for flags in ["", "[exclusive=1]", "[reverse=1]", "[exclusive=1, reverse=1]"] {
        let statements = format!("axis = integer[0]\n y = CumSum{flags}(x, axis)");
        check(&dim("n", 1, 20, 1), ["x[n 3]", "y[n 3]"], &statements);
    }
}

/// Products of heads by a constant of as many heads for each image.
fn by_heads_of_constant(constant: &str) -> String {
    "
        of_heads = numbers[0 0 4 8]
        of_rows = numbers[-1 6 8]
        ones = numbers[1 1]
        n = Shape[start=0, end=1](x)
        CONSTANT
        q0 = Reshape(x, of_heads)
        q1 = Transpose[perm=0 2 1 3](q0)
        q = Reshape(q1, of_rows)
        y = MatMul(q, k)"
        .replace("CONSTANT", constant)
}

#[test]
fn a_constant_that_is_repeated_is_the_same_for_each_image() {
    let statements = &by_heads_of_constant(
        "encodings = weights[4 8 32]
        repeats = Concat[axis=0](n, ones)
        k = Tile(encodings, repeats)",
    );
    let ports = ["x[n 6 32]", "y[m 6 32]"];
    check(&dim("n", 1, 9, 1), ports, statements);
    check(&dim("n", 2, 12, 2), ports, statements);
    check_library(&dim("n", 1, 9, 1), ports, statements);
}

#[test]
fn a_constant_with_another_part_for_each_image_is_named() {
    let statements = &by_heads_of_constant(
        "encodings = weights[36 8 32]
        start = numbers[0]
        four = numbers[4]
        end = Mul(n, four)
        k = Slice(encodings, start, end)",
    );
    let fused = opened(&graph_of("x[n 6 32]", "y[m 6 32]", statements), &dim("n", 1, 9, 1)).unwrap();
    let error = compile_guessed(fused, &host::target(), 1).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("is a product whose size b would be open"), "{error}");
}

#[test]
fn attention_takes_any_number_of_images() {
    let statements = &"
        w = weights[16 48]
        of_heads = numbers[-1 6 2 8]
        of_rows = numbers[-1 6 16]
        p = MatMul(x, w)
        q0, k0, v0 = Split[axis=-1](p)
        HEADS
        s0 = MatMul(q, k)
        s = Softmax[axis=-1](s0)
        a0 = MatMul(s, v)
        a1 = Transpose[perm=0 2 1 3](a0)
        y = Reshape(a1, of_rows)"
        .replace("HEADS", HEADS);
    check(&dim("n", 1, 9, 1), ["x[n 6 16]", "y[n 6 16]"], statements);
    check(&dim("n", 2, 12, 2), ["x[n 6 16]", "y[n 6 16]"], statements);
    check_library(&dim("n", 1, 9, 1), ["x[n 6 16]", "y[n 6 16]"], statements);
}

#[test]
fn a_batch_of_texts_takes_any_number_of_both() {
    let statements = &ENCODER
        .replace(", num_outputs=3", "")
        .replace("numbers[1 -1 2 8]", "numbers[0 -1 2 8]")
        .replace("numbers[1 -1 16]", "numbers[0 -1 16]");
    let ports = ["ids[n words]", "y[n words 16]"];
    let (items, words) = (dim("n", 1, 5, 1), dim("words", 1, 24, 1));
    check_items(&items, &words, ports, statements);
    check_items(&dim("n", 2, 4, 2), &dim("words", 3, 39, 4), ports, statements);
    let graph = graph_of(ports[0], ports[1], statements);
    let runs = [(1, 1), (24, 5), (7, 2), (24, 1), (3, 5)].map(|(size, n)| vec![("words", size), ("n", n)]);
    check_library_of(&graph, opened_items(&graph, &items, &words).unwrap(), &runs);
}

/// Makes two layers of attention, both with a bias that is computed once for each text.
fn layers_with_a_mask() -> String {
    let layer = |x: &str, y: &str| {
        "
        p_Y = MatMul(X, w1)
        q0_Y, k0_Y, v0_Y = Split[axis=-1](p_Y)
        q1_Y = Reshape(q0_Y, of_heads)
        q_Y = Transpose[perm=0 2 1 3](q1_Y)
        k1_Y = Reshape(k0_Y, of_heads)
        k_Y = Transpose[perm=0 2 3 1](k1_Y)
        v1_Y = Reshape(v0_Y, of_heads)
        v_Y = Transpose[perm=0 2 1 3](v1_Y)
        s0_Y = MatMul(q_Y, k_Y)
        s1_Y = Add(s0_Y, bias)
        s_Y = Softmax[axis=-1](s1_Y)
        a0_Y = MatMul(s_Y, v_Y)
        a1_Y = Transpose[perm=0 2 1 3](a0_Y)
        a2_Y = Reshape(a1_Y, of_rows)
        a3_Y = MatMul(a2_Y, w2)
        r_Y = Add(a3_Y, X)
        Y = LayerNormalization[axis=-1](r_Y, g, b)"
            .replace('X', x)
            .replace('Y', y)
    };
    let given = "
        w1 = weights[16 48]
        w2 = weights[16 16]
        g = weights[16]
        b = weights[16]
        factor = number[-3]
        of_heads = numbers[0 -1 2 8]
        of_rows = numbers[0 -1 16]
        inner = numbers[1 2]
        m = Unsqueeze(mask, inner)
        bias = Mul(m, factor)";
    given.to_owned() + &layer("x", "h") + &layer("h", "y")
}

/// Labels of the kernels of a model with an open dimension.
fn kernels_of(graph: &Graph, dim: &OpenDimension) -> Vec<String> {
    let fused = laid_out(opened(graph, dim).unwrap(), &host::target(), 1, LayoutPurpose::Guess).unwrap();
    let labels = fused.steps.iter().filter_map(|step| match step {
        Step::Kernel(kernel) => Some(kernel.workload.label()),
        _ => None,
    });
    labels.collect()
}

#[test]
fn rows_that_would_share_sets_of_the_caches_are_longer() {
    let of_words = |n: &str| ENCODER.replace(", num_outputs=3", "").replace("1 48 16", &format!("1 {n} 16"));
    let ports = ["ids[1 words]", "y[1 words 16]"];
    let kernels = |most: i64| kernels_of(&graph_of(ports[0], ports[1], &of_words("256")), &dim("words", 4, most, 4));
    let has = |kernels: &[String], text: &str| kernels.iter().any(|own| own.contains(text));
    // Scores have rows of 1 kB at 256 words: a cache line more. Sizes of runs stay as they are.
    let [whole, less] = [256, 252].map(kernels);
    for text in ["n=16..272/16,k=8", "n=8,k=4..272/4", "f32[2,256,272]"] {
        assert!(has(&whole, text), "{text}: {whole:?}");
    }
    assert!(has(&less, "f32[2,252,252]") && !has(&less, "272"), "{less:?}");
    let words = dim("words", 4, 256, 4);
    check(&words, ports, &of_words("256"));
    check_library(&words, ports, &of_words("256"));
    check(&dim("words", 16, 256, 16), ["x[1 words 16], mask[1 words]", "y[1 words 16]"], &layers_with_a_mask());
}

#[test]
fn products_by_weights_process_several_texts() {
    let statements = &layers_with_a_mask();
    let (items, words) = (dim("n", 1, 19, 1), dim("words", 1, 24, 1));
    let ports = ["x[n words 16], mask[n words]", "y[n words 16]"];
    check_items(&items, &words, ports, statements);
    let graph = graph_of(ports[0], ports[1], statements);
    let in_blocks = with_small_cache(&words);
    for target in [&host::target(), &in_blocks] {
        let compiled = for_runs(opened_items_for(&graph, &items, &words, target).unwrap());
        let plan = compiled.model.cpu().unwrap().plan();
        let together = plan.together.as_ref().unwrap();
        // Products with weights, maps and norms process a group; both attentions run for one text after the
        // other.
        let of_group: Vec<bool> = together.turns().map(|(_, is_together)| is_together).collect();
        assert_eq!(of_group, [true, false, true, false, true]);
        assert_eq!([24, 13, 12, 5, 1].map(|size| together.n_items(&words, size)), [1, 1, 2, 4, 16]);
    }
    let divided = opened_items_for(&graph, &items, &words, &in_blocks).unwrap();
    assert!(divided.steps.iter().any(|step| matches!(step, Step::Sequence(_))), "it is not divided");
    check_compiled_items(&items, &words, &graph, &for_runs(divided));
    // Rows of 1 kB are longer in memory.
    check_items(&dim("n", 1, 3, 1), &dim("words", 250, 256, 1), ports, statements);
}

#[test]
fn a_batch_of_texts_has_an_answer_each() {
    let pooled = "
        w = weights[4 3]
        last = integer[-1]
        mean = ReduceMean[axes=1, keepdims=0](x)
        end = Gather[axis=1](x, last)
        most = ReduceMax[axes=1, keepdims=0](x)
        a = Mul(mean, end)
        b = Add(a, most)
        y = MatMul(b, w)";
    check_items(&dim("n", 1, 4, 1), &dim("words", 1, 24, 1), ["x[n words 4]", "y[n 3]"], pooled);
}

#[test]
fn items_that_depend_on_each_other_are_named() {
    let refused = |ports: [&str; 2], statements: &str, expected: &str| {
        let graph = graph_of(ports[0], ports[1], statements);
        let error = opened_items(&graph, &dim("n", 1, 5, 1), &dim("t", 1, 16, 1)).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("n cannot be open") && !error.contains('\n'), "{error}");
    };
    let ports = ["x[n t 4]", "y[n t 4]"];
    refused(ports, "m = ReduceMax[axes=0](x)\n y = Sub(x, m)", "several items");
    refused(ports, "y = Softmax[axis=0](x)", "several items");
    refused(["x[n t 4]", "y[1 t 4]"], "rows = numbers[0]\n y = ReduceSum(x, rows)", "several items");
    refused(["x[n t 4]", "y[t n 4]"], "y = Transpose[perm=1 0 2](x)", "not as its first dimension");
    let numbered = "
        zero = integer[0]
        one = integer[1]
        n = Shape[start=0, end=1](x)
        all = Squeeze(n)
        own = Range(zero, all, one)
        axes = numbers[1 2]
        each = Unsqueeze(own, axes)
        real = Cast[to=1](each)
        y = Add(x, real)";
    refused(ports, numbered, "number of each item");
    let counted = "
        n = Shape[start=0, end=1](x)
        real = Cast[to=1](n)
        y = Mul(x, real)";
    refused(ports, counted, "");
}

#[test]
fn means_and_last_elements_take_any_number_of_rows() {
    let n = dim("n", 1, 40, 1);
    for (statements, output) in [
        ("y = ReduceMean[axes=0](x)", "y[1 4]"),
        ("y = ReduceMean[axes=0 1, keepdims=0](x)", "y[]"),
        ("last = integer[-1]\n y = Gather[axis=0](x, last)", "y[4]"),
        ("from = numbers[-3]\n to = numbers[1000]\n axis = numbers[0]\n y = Slice(x, from, to, axis)", "y[3 4]"),
        ("y = ArgMax[axis=0](x)", "y[1 4]"),
        ("y = ArgMin[axis=0, select_last_index=1](x)", "y[1 4]"),
        ("m = ReduceMean[axes=0](x)\n d = Sub(x, m)\n y = Mul(d, d)", "y[n 4]"),
        // Rows at indices that are at most the last one.
        (
            "n = Shape[start=0, end=1](x)\n none = number[-0.9]\n more = Greater(x, none)\n whole = Cast[to=7](more)
             zero = numbers[0]\n one = numbers[1]\n some = ReduceSum(whole, zero)\n most = Sub(n, one)
             least = Min(some, most)\n y = Gather[axis=0](x, least)",
            "y[1 4 4]",
        ),
    ] {
        let n = if statements.contains("-3") { dim("n", 4, 40, 1) } else { n.clone() };
        check(&n, ["x[n 4]", output], statements);
    }
}

/// The last word of each of several texts, of what a kernel would compute together with it.
#[test]
fn last_words_of_several_texts_are_those_of_normalized_ones() {
    let statements = "
        scale = weights[8]
        shift = weights[8]
        last = integer[-1]
        z = LayerNormalization[axis=-1](x, scale, shift)
        w = Gather[axis=1](z, last)
        y = Relu(w)";
    check(&dim("n", 1, 24, 1), ["x[2 n 8]", "y[2 8]"], statements);
}

/// Parts of a tensor whose starts depend on the size, and perhaps their lengths, as encodings of relative
/// positions are looked up.
#[test]
fn slices_begin_where_the_size_says() {
    for (ports, statements) in [
        (
            ["x[n 4]", "y[n 4]"],
            "places = weights[48 4]\n n = Shape[start=0, end=1](x)\n most = numbers[48]\n from = Sub(most, n)
             axis = numbers[0]\n own = Slice(places, from, most, axis)\n y = Add(x, own)",
        ),
        (
            ["x[2 n]", "y[3 2 n]"],
            "places = weights[3 1 48]\n n = Shape[start=1, end=2](x)\n most = numbers[48]\n from = Sub(most, n)
             axis = numbers[2]\n own = Slice(places, from, most, axis)\n y = Add(x, own)",
        ),
        (
            ["x[n 4]", "y[m 4]"],
            "places = weights[48 4]\n n = Shape[start=0, end=1](x)\n middle = numbers[23]\n one = numbers[1]
             before = Sub(middle, n)\n from = Add(before, one)\n to = Add(middle, n)\n axis = numbers[0]
             both = Slice(places, from, to, axis)\n most = ReduceMax[axes=0](x)\n y = Mul(both, most)",
        ),
    ] {
        check(&dim("n", 1, 20, 1), ports, statements);
    }
}

#[test]
fn a_batch_that_cannot_be_open_is_repeated() {
    // Heads of all texts side by side, as in PyTorch's attention.
    let statements = "
        q0 = weights[16 16]
        k0 = weights[16 16]
        by_heads = numbers[6 -1 8]
        by_texts = numbers[6 -1 16]
        t = Transpose[perm=1 0 2](x)
        q1 = MatMul(t, q0)
        q2 = Reshape(q1, by_heads)
        q = Transpose[perm=1 0 2](q2)
        k1 = MatMul(t, k0)
        k2 = Reshape(k1, by_heads)
        k = Transpose[perm=1 2 0](k2)
        v = Transpose[perm=1 0 2](k2)
        s0 = MatMul(q, k)
        s = Softmax[axis=-1](s0)
        a0 = MatMul(s, v)
        a1 = Transpose[perm=1 0 2](a0)
        a2 = Reshape(a1, by_texts)
        y = Transpose[perm=1 0 2](a2)";
    let graph = graph_of("x[n 6 16]", "y[n 6 16]", statements);
    let n = dim("n", 1, 5, 1);
    let lower_at = |size| Ok(lower(&at(&graph, "n", size), false, &host::target(), 1).unwrap());
    let fused = open_or_repeat::<OpenError>(&n, lower_at).unwrap();
    assert!(fused.items.is_some(), "it is another way");
    let compiled = compile_guessed(fused.clone(), &host::target(), 1).unwrap();
    let mut context = Context::new(compiled.model.cpu().unwrap(), &SharedPool::new(1).unwrap()).unwrap();
    for size in [5, 1, 3, 2, 5, 4] {
        context.set_dim("n", size).unwrap();
        let own = at(&graph, "n", size);
        let given = inputs(&own, size as u64, None);
        let wanted = evaluate(&own, &[("x", given[0].1.clone())]).unwrap();
        assert!(is_near(&run(&mut context, &own, &given)[0], &wanted[0]), "{size}");
    }
    check_library_of(&graph, fused, &[5, 1, 3].map(|size| vec![("n", size)]));
    let others = graph_of("x[n 4]", "y[n 4]", "y = Softmax[axis=0](x)");
    let lower_at = |size| Ok(lower(&at(&others, "n", size), false, &host::target(), 1).unwrap());
    let made = open_or_repeat::<OpenError>(&n, lower_at).unwrap();
    assert!(made.items.is_none(), "rows depend on each other");
}

#[test]
fn outputs_of_half_the_length_are_open_beside_a_batch() {
    let halves = "
        w = weights[8 4 3]
        t = Transpose[perm=0 2 1](x)
        c = Conv[kernel_shape=3, strides=2, pads=1 1](t, w)
        y = Transpose[perm=0 2 1](c)";
    let (items, dim, ports) = (dim("n", 1, 4, 1), dim("t", 2, 24, 2), ["x[n t 4]", "y[n m 8]"]);
    check_items(&items, &dim, ports, halves);
    let graph = graph_of(ports[0], ports[1], halves);
    let runs = [(24, 1), (6, 4), (2, 3), (24, 4)].map(|(size, n)| vec![("t", size), ("n", n)]);
    check_library_of(&graph, opened_items(&graph, &items, &dim).unwrap(), &runs);
}

#[test]
fn rows_of_a_mask_are_those_of_each_text() {
    // As exporters look a mask up: by the indices of texts and tokens.
    let statements = "
        zero = integer[0]
        one = integer[1]
        first = numbers[0]
        second = numbers[1]
        flat = numbers[-1]
        n = Shape[start=0, end=1](mask)
        t = Shape[start=1, end=2](mask)
        n0 = Squeeze(n)
        t0 = Squeeze(t)
        texts = Range(zero, n0, one)
        tokens = Range(zero, t0, one)
        begin = Mul(texts, t0)
        rows = Unsqueeze(begin, second)
        columns = Unsqueeze(tokens, first)
        places = Add(rows, columns)
        all = Reshape(mask, flat)
        inner = numbers[2]
        own = Gather[axis=0](all, places)
        factors = Unsqueeze(own, inner)
        y = Mul(factors, x)";
    check_items(&dim("n", 1, 5, 1), &dim("t", 1, 20, 1), ["mask[n t], x[n t 4]", "y[n t 4]"], statements);
}

#[test]
fn words_behind_others_take_any_number() {
    let (n, first) = (dim("n", 1, 40, 1), "first = weights[2 4]\n w = weights[4 4]\n");
    for statements in [
        "y = Concat[axis=0](first, x)",
        "r = Relu(x)\n all = Concat[axis=0](first, r)\n y = MatMul(all, w)",
        "all = Concat[axis=0](first, x)\n t = Transpose(all)\n s = MatMul(all, t)\n p = Softmax(s)\n y = MatMul(p, all)",
    ] {
        check(&n, ["x[n 4]", "y[m 4]"], &format!("{first}{statements}"));
    }
    check_library(&n, ["x[n 4]", "y[m 4]"], &format!("{first}y = Concat[axis=0](first, x)"));
}

#[test]
fn heads_that_share_keys_take_any_number_of_words() {
    let statements = "
        w = weights[16 16]
        of_heads = numbers[1 -1 4 4]
        of_rows = numbers[1 -1 16]
        shared = weights[16 4]
        q0 = MatMul(x, w)
        q1 = Reshape(q0, of_heads)
        q = Transpose[perm=0 2 1 3](q1)
        one = numbers[1]
        k0 = MatMul(x, shared)
        k1 = Unsqueeze(k0, one)
        k = Transpose[perm=0 1 3 2](k1)
        s0 = MatMul(q, k)
        s = Softmax[axis=-1](s0)
        a0 = MatMul(s, k1)
        a1 = Transpose[perm=0 2 1 3](a0)
        y = Reshape(a1, of_rows)";
    check(&dim("words", 1, 40, 1), ["x[1 words 16]", "y[1 words 16]"], statements);
}

#[test]
fn attention_of_any_number_of_words_is_computed_in_blocks_of_heads() {
    let statements = "
        a = Tanh(x)
        q = Transpose[perm=0 2 1 3](a)
        k = Transpose[perm=0 2 3 1](a)
        s0 = MatMul(q, k)
        bias = Mul(rows, columns)
        s1 = Add(s0, bias)
        s2 = Add(s1, mask)
        s = Softmax[axis=-1](s2)
        b = Tanh(z)
        v = Transpose[perm=0 2 1 3](b)
        y = MatMul(s, v)";
    let ports = ["x[1 n 3 8], z[1 n 3 5], mask[n]", "y[1 3 n 5]"];
    for bias in ["rows[n 1], columns[3 1 n]", "rows[3 n 1], columns[1 n]"] {
        for dim in [dim("n", 1, 40, 1), dim("n", 8, 64, 8)] {
            check_in_blocks(&dim, [&format!("{}, {bias}", ports[0]), ports[1]], statements);
        }
    }
}
