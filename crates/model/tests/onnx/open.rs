//! Models with a dimension of which runs say a size: at each size the answers of the model of that size,
//! whatever ran before and lies beyond.

use tilewright::library::{Form, Weights, library, write_library};
use tilewright_device::host;
use tilewright_graph::{Bindings, DType, Graph, SplitMix64, Tensor, evaluate, specialise};
use tilewright_model::{Fused, OpenError, compile_guessed, lower, open};
use tilewright_runtime::{Aligned, Context, OpenDimension, RunError, SharedPool};

use crate::blocks::graph_of;
use crate::common::agree;
use crate::whole;

fn at(graph: &Graph, name: &str, size: i64) -> Graph {
    let dims = vec![(name.to_owned(), size as usize)];
    let special = specialise(graph, &Bindings { dims, open: Some(name.to_owned()), ..Bindings::default() });
    assert!(special.problems.is_empty(), "{name}={size}: {}", special.problems[0]);
    special.graph
}

fn opened(graph: &Graph, dim: &OpenDimension) -> Result<Fused, OpenError> {
    open(dim, |size| Ok(lower(&at(graph, &dim.name, size), false, &host::target()).unwrap()))
}

/// Memory of a tensor with a fence behind it.
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

fn inputs(graph: &Graph, seed: u64, fill: Option<f64>) -> Vec<(String, Tensor)> {
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
fn run(context: &mut Context, graph: &Graph, given: &[(String, Tensor)]) -> Vec<Tensor> {
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

/// Checks a model at sizes up and down, each after runs at the largest size that leave NaN behind where they
/// can.
fn check(dim: &OpenDimension, ports: [&str; 2], statements: &str) {
    let graph = graph_of(ports[0], ports[1], statements);
    let target = host::target();
    let fused = opened(&graph, dim).unwrap_or_else(|error| panic!("{error}"));
    let compiled = compile_guessed(fused, &target, 1).unwrap_or_else(|error| panic!("{error}"));
    let mut context = Context::new(compiled.model.cpu().unwrap(), &SharedPool::new(1).unwrap()).unwrap();
    let sizes: Vec<i64> = (dim.least..=dim.most).filter(|size| dim.has(*size)).collect();
    let largest = at(&graph, &dim.name, dim.most);
    for (seed, &size) in sizes.iter().chain(sizes.iter().rev()).enumerate() {
        if seed % 3 == 0 {
            context.set_dim(&dim.name, dim.most).unwrap();
            run(&mut context, &largest, &inputs(&largest, 1, Some(f64::NAN)));
        }
        context.set_dim(&dim.name, size).unwrap();
        assert_eq!(context.size(), Some(size));
        let own = at(&graph, &dim.name, size);
        let given = inputs(&own, seed as u64, None);
        let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
        let wanted = evaluate(&own, &named).unwrap();
        for (found, wanted) in run(&mut context, &own, &given).iter().zip(&wanted) {
            let largest = wanted.floats().iter().fold(0.0_f64, |most, x| most.max(x.abs()));
            let is_near = |(x, y): (f64, f64)| (x - y).abs() <= 1e-5 * largest;
            let agrees = found.ty() == wanted.ty() && found.floats().into_iter().zip(wanted.floats()).all(is_near);
            assert!(agrees || agree(found, wanted).is_ok(), "{}={size}: {:?}", dim.name, agree(found, wanted));
        }
    }
    let before = context.size();
    for wrong in [dim.least - 1, dim.most + 1, dim.most + dim.step, i64::MIN, i64::MAX] {
        assert!(matches!(context.set_dim(&dim.name, wrong), Err(RunError::BadSize { .. })), "{wrong}");
    }
    assert!(matches!(context.set_dim("other", dim.most), Err(RunError::NoDim { .. })));
    assert_eq!(context.size(), before);
}

/// Runs a library at each size in a file, on what lies behind it there, and writes what it makes.
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
    if (n_open != 1 || bytes > tensor->bytes) exit(4);
    return bytes;
}
int main(void) {
    net_context *context;
    FILE *in = fopen("in", "rb"), *out = fopen("out", "wb");
    const net_dimension *dim = net_dim(0);
    if (!in || !out || net_dims() != 1 || !dim || net_dim(1) || net_create(NULL, &context)) return 2;
    char *x = malloc(net_input(0)->bytes), *y = malloc(net_output(0)->bytes);
    int64_t size;
    while (fread(&size, sizeof size, 1, in) == 1) {
        if (net_set_dim(context, 0, size)) return 5;
        /* What is refused changes nothing. */
        if (net_set_dim(context, 0, dim->most + 1) != NET_BAD_SIZE || net_set_dim(context, 1, size) != NET_BAD_SIZE
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
fn check_library(dim: &OpenDimension, ports: [&str; 2], statements: &str) {
    let graph = graph_of(ports[0], ports[1], statements);
    let target = host::target();
    let compiled = compile_guessed(opened(&graph, dim).unwrap(), &target, 1).unwrap();
    let model = compiled.model.cpu().unwrap();
    let mut context = Context::new(model, &SharedPool::new(1).unwrap()).unwrap();
    let folder =
        std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("open-{}-{}", dim.name, std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let made = library("net", &compiled.model, &target, 1, Weights::Small, &["open".to_owned()]).unwrap();
    assert_eq!(made.build()["dims"][0]["name"], dim.name);
    write_library(&made, Form::C, &folder).unwrap();
    let (mut given, mut expected): (Vec<u8>, Vec<u8>) = Default::default();
    for size in [dim.least, dim.most, dim.least + dim.step, dim.most - dim.step, dim.least] {
        let own = at(&graph, &dim.name, size);
        let passed = inputs(&own, size as u64, None);
        given.extend(size.to_le_bytes());
        given.extend(passed[0].1.bytes());
        context.set_dim(&dim.name, size).unwrap();
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

fn dim(name: &str, least: i64, most: i64, step: i64) -> OpenDimension {
    OpenDimension { name: name.to_owned(), least, most, step }
}

/// An encoder's layer: words and their places, attention, a feed-forward part.
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
    // The mean's factor is of the size.
    refused(&n, ["x[n 4]", "y[1 4]"], "y = ReduceMean[axes=0](x)", &["differs", "n cannot be open"]);
    refused(&n, ["x[2 n 4]", "y[2 n 4]"], "y = Relu(x)", &["`x`", "behind another one"]);
    refused(&n, ["x[n 4]", "y[m 4]"], "y = Concat[axis=0](x, x)", &["joins tensors along the open dimension"]);
    refused(&dim("n", 1, 2, 1), ["x[n 4]", "y[n 4]"], "y = Relu(x)", &["n=1..2 has too few sizes"]);
}

/// Heads of queries, keys and values, for `HEADS` in statements.
const HEADS: &str = "
    q1 = Reshape(q0, of_heads)
    q = Transpose[perm=0 2 1 3](q1)
    k1 = Reshape(k0, of_heads)
    k = Transpose[perm=0 2 3 1](k1)
    v1 = Reshape(v0, of_heads)
    v = Transpose[perm=0 2 1 3](v1)";

/// A decoder layer as PyTorch's exporters write it: shapes are computed, positions counted from what is no
/// padding, and the causal mask made of positions.
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
    check_library(&dim("words", 1, 48, 1), ["ids[1 words]", "y[1 words 16]"], statements);
}

#[test]
fn running_sums_take_any_number_of_rows() {
    for flags in ["", "[exclusive=1]", "[reverse=1]", "[exclusive=1, reverse=1]"] {
        let statements = format!("axis = integer[0]\n y = CumSum{flags}(x, axis)");
        check(&dim("n", 1, 20, 1), ["x[n 3]", "y[n 3]"], &statements);
    }
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
