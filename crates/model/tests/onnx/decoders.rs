//! Decoders of language models with a cache, compared with the same text computed from its first token on.

use std::collections::BTreeMap;

use tilewright::library::{Form, Weights, library, write_library};
use tilewright_device::host;
use tilewright_graph::{Bindings, DType, Graph, Tensor, evaluate, specialise};
use tilewright_model::{DecoderDims, Fused, OpenError, Runner, compile_guessed, lower, open, open_pieces};
use tilewright_runtime::{Aligned, Constant, Context, Model, OpenDimension, PlanStep, RunError, SharedPool, Work};

use crate::attention::{attended, turned};
use crate::blocks::graph_at;

/// Decoder of two layers: four query heads, two heads of keys and values.
struct Decoder {
    vocabulary: usize,
    hidden: usize,
    depth: usize,
    inner: usize,
}

const DECODER: Decoder = Decoder { vocabulary: 37, hidden: 24, depth: 6, inner: 40 };
const LAYERS: usize = 2;
const HEADS: [usize; 2] = [4, 2];

/// Statements of a decoder that compute the positions of its new tokens, `rows`, from the length of its past.
const PLACES: &str = "two = numbers[2]
    first = numbers[0]
    unit = integer[1]
    new = Shape(input_ids)
    n_new = Gather(new, unit)
    of_past = Shape(past_key_values.0.key)
    n_past1 = Gather(of_past, two)
    n_past = Squeeze(n_past1)
    n_all = Add(n_past, n_new)
    rows = Range(n_past, n_all, unit)
";

/// Statements that compute the term added to scores from a mask of ones and zeros.
const HIDDEN: &str = "seen = Cast[to=1](attention_mask)
    whole = number[1.0]
    unseen = Sub(whole, seen)
    mask = Mul(unseen, minus)";

/// Statements that compute the term from buckets of distances, and assign it to all positions of itself but
/// for the padding, as exporters of Transformers' models write.
const ASSIGNED: &str = "distance = Sub(columns, row)
    near = Min(distance, unit)
    bucket = Max(near, none)
    far = Cast[to=1](bucket)
    causal = Mul(far, minus)
    own = Range(none, n_new, unit)
    own1 = Unsqueeze(own, unit1)
    like = Shape(causal)
    of_rows = Expand(own1, like)
    of_columns = Expand(columns, like)
    rows2 = Unsqueeze(of_rows, two)
    columns2 = Unsqueeze(of_columns, two)
    places = Concat[axis=2](rows2, columns2)
    seen = Cast[to=1](attention_mask)
    sum = Add(causal, seen)
    padding = Equal(sum, zero)
    free = Where(padding, minus, causal)
    mask = ScatterND(causal, places, free)";

/// Form in which a decoder is written: with ONNX Runtime's operators, ONNX's `Attention`, or only older
/// operators.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Written {
    Grouped,
    Standard,
    Plain,
    /// With a mask input that has a row for each new token, as exporters to older operators write.
    Masked,
    /// With a mask that is assigned to its own positions.
    Assigned,
}

const FORMS: [Written; 5] = [Written::Grouped, Written::Standard, Written::Plain, Written::Masked, Written::Assigned];

impl Decoder {
    fn graph(&self, form: Written) -> Graph {
        let Decoder { vocabulary, hidden, depth, .. } = *self;
        let [n_q, n_kv] = HEADS;
        let depth_text = depth.to_string();
        // onnxruntime-genai's builder leaves the head size open.
        let of_past = if form == Written::Grouped { "kv_cache_dim" } else { depth_text.as_str() };
        let caches = |what: &str, name: &str, length: &str, depth: &str| {
            let of = |at: usize| format!("{name}.{}.{what}[1 {n_kv} {length} {depth}]", at);
            (0..LAYERS).map(of).collect::<Vec<_>>().join(", ")
        };
        let past = ["key", "value"].map(|what| caches(what, "past_key_values", "past", of_past)).join(", ");
        let present = ["key", "value"].map(|what| caches(what, "present", "total", &depth_text)).join(", ");
        let mask = match form {
            Written::Grouped | Written::Assigned => "attention_mask[1 total], ",
            Written::Masked => "attention_mask[1 1 tokens total], ",
            Written::Standard | Written::Plain => "",
        };
        let mut text = format!(
            "embed = weights[{vocabulary} {hidden}]
             x = Gather(embed, input_ids)
             cos = angles[cos {0}]
             sin = angles[sin {0}]\n",
            depth / 2
        );
        text += &match form {
            Written::Grouped => "axis = numbers[1]
                sum = ReduceSum[keepdims=0](attention_mask, axis)
                all = Cast[to=6](sum)
                one = single[1]
                last = Sub(all, one)
                shape = Shape(attention_mask)
                second = integer[1]
                long = Gather(shape, second)
                length = Cast[to=6](long)\n"
                .to_owned(),
            Written::Standard => format!("{PLACES}ids = Unsqueeze(rows, first)\n"),
            Written::Plain | Written::Masked | Written::Assigned => format!(
                "{PLACES}unit1 = numbers[1]
                none = integer[0]
                minus = number[-1e9]
                zero = number[0.0]
                middle = numbers[{0}]
                end = numbers[{depth}]
                axis3 = numbers[3]
                axis2 = numbers[2]
                c = Gather(cos, rows)
                s = Gather(sin, rows)
                columns = Range(none, n_all, unit)
                row = Unsqueeze(rows, unit1)
                late = Greater(columns, row)
                mask = Where(late, minus, zero)
                root = number[{1}]
                to_q = numbers[0 0 {n_q} {depth}]
                to_kv = numbers[0 0 {n_kv} {depth}]
                together = numbers[0 0 {2}]
                repeat = numbers[1 1 {3} 1 1]
                to_wide = numbers[0 {n_q} -1 {depth}]\n",
                depth / 2,
                1.0 / (depth as f64).sqrt(),
                n_q * depth,
                n_q / n_kv
            ),
        };
        match form {
            Written::Masked => text = text.replace("mask = Where(late, minus, zero)", HIDDEN),
            Written::Assigned => text = text.replace("mask = Where(late, minus, zero)", ASSIGNED),
            _ => {}
        }
        text += &format!(
            "g = weights[{hidden}]
             y0 = SimplifiedLayerNormalization[axis=-1,epsilon=1e-5](x, g)\n"
        );
        for l in 0..LAYERS {
            text += &self.layer(l, form);
        }
        text += &format!("head = weights[{hidden} {vocabulary}]\nlogits = MatMul(y{LAYERS}, head)");
        let inputs = format!("input_ids[1 tokens], {mask}{past}");
        let opset = if form == Written::Standard { 23 } else { 17 };
        graph_at(opset, &inputs, &format!("logits[1 tokens {vocabulary}], {present}"), &text)
    }

    fn layer(&self, l: usize, form: Written) -> String {
        let Decoder { hidden, depth, inner, .. } = *self;
        let [n_q, n_kv] = HEADS.map(|n| n * depth);
        let before = if l == 0 { "x".to_owned() } else { format!("x{l}") };
        let next = l + 1;
        let rotated = |name: &str| {
            format!(
                "{name}.lo = Slice({name}.t, first, middle, axis3)
                 {name}.hi = Slice({name}.t, middle, end, axis3)
                 {name}.lc = Mul({name}.lo, c)
                 {name}.hs = Mul({name}.hi, s)
                 {name}.re = Sub({name}.lc, {name}.hs)
                 {name}.hc = Mul({name}.hi, c)
                 {name}.ls = Mul({name}.lo, s)
                 {name}.im = Add({name}.hc, {name}.ls)
                 {name}.r = Concat[axis=3]({name}.re, {name}.im)\n"
            )
        };
        let wide = |name: &str, present: &str| {
            format!(
                "{name}.u = Unsqueeze({present}, axis2)
                 {name}.e = Expand({name}.u, repeat)
                 {name}.w = Reshape({name}.e, to_wide)\n"
            )
        };
        let [pk, pv, ok, ov] = [
            format!("past_key_values.{l}.key"),
            format!("past_key_values.{l}.value"),
            format!("present.{l}.key"),
            format!("present.{l}.value"),
        ];
        let attention = match form {
            Written::Grouped => format!(
                "a{l}, {ok}, {ov} = com.microsoft.GroupQueryAttention[num_heads={},kv_num_heads={},do_rotary=1,\
                 sliding_window_cache=1](q{l}, k{l}, v{l}, {pk}, {pv}, last, length, cos, sin)\n",
                HEADS[0], HEADS[1]
            ),
            Written::Standard => format!(
                "qr{l} = RotaryEmbedding[num_heads={0}](q{l}, cos, sin, ids)
                 kr{l} = RotaryEmbedding[num_heads={1}](k{l}, cos, sin, ids)
                 a{l}, {ok}, {ov} = Attention[q_num_heads={0},kv_num_heads={1},is_causal=1]\
                 (qr{l}, kr{l}, v{l}, , {pk}, {pv})\n",
                HEADS[0], HEADS[1]
            ),
            Written::Plain | Written::Masked | Written::Assigned => {
                let mut text = String::new();
                for (name, shape) in [("q", "to_q"), ("k", "to_kv"), ("v", "to_kv")] {
                    text += &format!(
                        "{name}{l}.a = Reshape({name}{l}, {shape})
                         {name}{l}.t = Transpose[perm=0 2 1 3]({name}{l}.a)\n"
                    );
                }
                text += &(rotated(&format!("q{l}")) + &rotated(&format!("k{l}")));
                text += &format!("{ok} = Concat[axis=2]({pk}, k{l}.r)\n{ov} = Concat[axis=2]({pv}, v{l}.t)\n");
                text += &(wide(&format!("k{l}"), &ok) + &wide(&format!("v{l}"), &ov));
                text + &format!(
                    "qs{l} = Mul(q{l}.r, root)
                     kt{l} = Transpose[perm=0 1 3 2](k{l}.w)
                     p{l} = MatMul(qs{l}, kt{l})
                     m{l} = Add(p{l}, mask)
                     f{l} = Softmax[axis=-1](m{l})
                     h{l} = MatMul(f{l}, v{l}.w)
                     b{l} = Transpose[perm=0 2 1 3](h{l})
                     a{l} = Reshape(b{l}, together)\n"
                )
            }
        };
        format!(
            "wq{l} = weights[{hidden} {n_q}]
             wk{l} = weights[{hidden} {n_kv}]
             wv{l} = weights[{hidden} {n_kv}]
             q{l} = MatMul(y{l}, wq{l})
             k{l} = MatMul(y{l}, wk{l})
             v{l} = MatMul(y{l}, wv{l})
             {attention}wo{l} = weights[{n_q} {hidden}]
             o{l} = MatMul(a{l}, wo{l})
             ga{l} = weights[{hidden}]
             z{l}, , , w{l} = com.microsoft.SkipSimplifiedLayerNormalization[epsilon=1e-5]({before}, o{l}, ga{l})
             wg{l} = weights[{hidden} {inner}]
             wu{l} = weights[{hidden} {inner}]
             wd{l} = weights[{inner} {hidden}]
             gate{l} = MatMul(z{l}, wg{l})
             sig{l} = Sigmoid(gate{l})
             sw{l} = Mul(gate{l}, sig{l})
             up{l} = MatMul(z{l}, wu{l})
             in{l} = Mul(sw{l}, up{l})
             d{l} = MatMul(in{l}, wd{l})
             gb{l} = weights[{hidden}]
             y{next}, , , x{next} = com.microsoft.SkipSimplifiedLayerNormalization[epsilon=1e-5](w{l}, d{l}, gb{l})\n"
        )
    }

    /// Logits after the last token, computed from the first one on without a cache.
    fn logits(&self, graph: &Graph, tokens: &[usize]) -> Vec<f64> {
        let Decoder { vocabulary, hidden, depth, .. } = *self;
        let constants: BTreeMap<&str, Vec<f64>> = graph
            .values()
            .filter_map(|(_, value)| Some((value.name.as_str(), value.constant.as_ref()?.floats())))
            .collect();
        let of = |name: &str| constants.get(name).unwrap_or_else(|| panic!("no {name}"));
        let product = |x: &[f64], w: &[f64]| -> Vec<f64> {
            let n = w.len() / x.len();
            (0..n).map(|j| x.iter().enumerate().map(|(i, x)| x * w[i * n + j]).sum()).collect()
        };
        let norm = |x: &[f64], g: &[f64]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            x.iter().zip(g).map(|(x, g)| x / (mean + 1e-5).sqrt() * g).collect()
        };
        let plus = |a: &[f64], b: &[f64]| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
        let embed = of("embed");
        let mut rows: Vec<Vec<f64>> = tokens.iter().map(|t| embed[t * hidden..][..hidden].to_vec()).collect();
        let mut normal: Vec<Vec<f64>> = rows.iter().map(|x| norm(x, of("g"))).collect();
        for l in 0..LAYERS {
            let heads = |name: &str, turns: bool| -> Vec<Vec<f64>> {
                let of_token = |(at, y): (usize, &Vec<f64>)| {
                    let mut all = product(y, of(&format!("w{name}{l}")));
                    all.chunks_mut(depth).filter(|_| turns).for_each(|head| turned(head, at, false));
                    all
                };
                normal.iter().enumerate().map(of_token).collect()
            };
            let (q, k, v) = (heads("q", true), heads("k", true), heads("v", false));
            for at in 0..tokens.len() {
                let of_head = |i: usize| {
                    let first = i / (HEADS[0] / HEADS[1]) * depth;
                    let seen = |all: &'_ [Vec<f64>]| -> Vec<Vec<f64>> {
                        all[..=at].iter().map(|row| row[first..first + depth].to_vec()).collect()
                    };
                    let (keys, values) = (seen(&k), seen(&v));
                    let [keys, values] = [&keys, &values].map(|all| all.iter().map(Vec::as_slice).collect::<Vec<_>>());
                    let scale = 1.0 / (depth as f64).sqrt();
                    attended(&q[at][i * depth..][..depth], &keys, &values, scale, 0.0, &vec![0.0; at + 1])
                };
                let all: Vec<f64> = (0..HEADS[0]).flat_map(of_head).collect();
                let sum = plus(&rows[at], &product(&all, of(&format!("wo{l}"))));
                let z = norm(&sum, of(&format!("ga{l}")));
                let (gate, up) = (product(&z, of(&format!("wg{l}"))), product(&z, of(&format!("wu{l}"))));
                let inside: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                rows[at] = plus(&sum, &product(&inside, of(&format!("wd{l}"))));
                normal[at] = norm(&rows[at], of(&format!("gb{l}")));
            }
        }
        let logits = product(&normal[tokens.len() - 1], of("head"));
        assert_eq!(logits.len(), vocabulary);
        logits
    }
}

fn open_decoder(graph: &Graph, dim: &OpenDimension, n_tokens: usize) -> Result<Fused, OpenError> {
    open(dim, |size| {
        let dims = vec![("tokens".to_owned(), n_tokens), (dim.name.clone(), size as usize)];
        let special = specialise(graph, &Bindings { dims, open: Some(dim.name.clone()), ..Bindings::default() });
        assert!(special.problems.is_empty(), "{}", special.problems[0]);
        Ok(lower(&special.graph, false, &host::target(), 1).unwrap())
    })
}

/// Makes a decoder with pieces of these numbers of tokens, which can make up any number.
fn open_pieces_of(graph: &Graph, dim: &OpenDimension, numbers: &[i64]) -> Result<Fused, OpenError> {
    open_pieces(dim, "tokens", numbers, |n, size| {
        let dims = vec![("tokens".to_owned(), n as usize), (dim.name.clone(), size as usize)];
        let special = specialise(graph, &Bindings { dims, open: Some(dim.name.clone()), ..Bindings::default() });
        assert!(special.problems.is_empty(), "{}", special.problems[0]);
        Ok(lower(&special.graph, false, &host::target(), 1).unwrap())
    })
}

/// Runs a step, checks its logits against those computed from all tokens so far, and returns the next token.
fn step(context: &mut Context, graph: &Graph, tokens: &[usize]) -> usize {
    assert_eq!(context.past() as usize, tokens.len() - 1);
    let id = (*tokens.last().unwrap() as i64).to_le_bytes();
    let mut memory = Aligned::new(4 * DECODER.vocabulary as u64).unwrap();
    context.run(&[&id], &mut [memory.bytes_mut()]).unwrap();
    let found: Vec<f64> =
        memory.bytes().as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect();
    let wanted = DECODER.logits(graph, tokens);
    let most = wanted.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
        assert!((found - wanted).abs() <= 1e-5 * most, "token {}, logit {at}: {found}, {wanted}", tokens.len());
    }
    let best = |all: &[f64]| (0..all.len()).max_by(|a, b| all[*a].total_cmp(&all[*b])).unwrap();
    assert_eq!(best(&found), best(&wanted));
    best(&found)
}

#[test]
fn decoders_keep_their_past() {
    let dim = OpenDimension { name: "past".to_owned(), least: 0, most: 47, step: 1 };
    for form in FORMS {
        let graph = DECODER.graph(form);
        let fused = open_decoder(&graph, &dim, 1).unwrap_or_else(|error| panic!("{form:?}: {error}"));
        let compiled = compile_guessed(fused, &host::target(), 1).unwrap_or_else(|error| panic!("{error}"));
        let model = compiled.model.cpu().unwrap();
        assert_eq!(model.plan().states().count(), 2 * LAYERS);
        // In each layer: norms, products, the rotation of queries and keys, scores, softmax, sums. Outside
        // layers: the embedding, two rows of angles, a norm, the head.
        let is_kernel = |step: &&PlanStep| matches!(step.work, Work::Kernel { .. });
        let n_kernels = model.plan().steps.iter().filter(is_kernel).count();
        assert!(form != Written::Grouped || n_kernels <= 11 * LAYERS + 5, "{n_kernels} kernels");
        // Keys and values that heads share are not repeated for them.
        let is_repeated = |step: &PlanStep| step.name.split(" + ").any(|name| name.ends_with(".e"));
        assert!(!model.plan().steps.iter().any(is_repeated), "{form:?}");
        assert_eq!((model.inputs().len(), model.outputs().len()), (1, 1));
        let mut context = Context::new(model, &SharedPool::new(1).unwrap()).unwrap();
        for start in [3, 30] {
            context.rewind(0).unwrap();
            let mut tokens = vec![start];
            while tokens.len() < 40 {
                let next = step(&mut context, &graph, &tokens);
                // The first tokens are those of a prompt.
                tokens.push(if tokens.len() < 5 { (start * tokens.len() * 7) % DECODER.vocabulary } else { next });
            }
            // Another continuation of the same beginning.
            context.rewind(9).unwrap();
            tokens.truncate(9);
            for token in [1, 36, 1] {
                tokens.push(token);
                step(&mut context, &graph, &tokens);
            }
            assert!(matches!(context.rewind(13), Err(RunError::BadSize { .. })));
            assert!(matches!(context.rewind(-1), Err(RunError::BadSize { .. })));
            // Another text in other memory, then back to the first one.
            let sizes: Vec<usize> = model.plan().states().map(|tensor| tensor.n_bytes()).collect();
            let small = Aligned::new(sizes[0] as u64 - 1).unwrap();
            assert!(matches!(context.bind_state(0, small), Err(RunError::State { .. })));
            let other = sizes.iter().map(|n| Aligned::new(*n as u64).unwrap());
            let other: Vec<Aligned> =
                other.enumerate().map(|(at, memory)| context.bind_state(at, memory).unwrap()).collect();
            context.rewind(0).unwrap();
            step(&mut context, &graph, &[17]);
            for (at, memory) in other.into_iter().enumerate() {
                context.bind_state(at, memory).unwrap();
            }
            context.set_dim("past", 12).unwrap();
            tokens.push(20);
            while tokens.len() <= 48 {
                let next = step(&mut context, &graph, &tokens);
                tokens.push(next);
            }
            let mut out = vec![0; 4 * DECODER.vocabulary];
            let full = context.run(&[&[0; 8]], &mut [&mut out]);
            assert!(matches!(full, Err(RunError::Full { size: 48, .. })), "{full:?}");
            assert_eq!(context.past(), 48);
        }
    }
}

/// Runs a program, and returns the numbers that it prints.
fn numbers_of(command: &mut std::process::Command) -> Vec<i64> {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {} {}", done.status, String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap().split_whitespace().map(|n| n.parse().unwrap()).collect()
}

/// Checks that the guide's loops, in each language, give the same tokens as runs in this process.
#[test]
fn loops_in_other_languages_give_the_same_tokens() {
    use std::process::Command;
    const N_NEW: usize = 30;
    let prompt = [4, 19, 19, 2];
    let dim = OpenDimension { name: "past".to_owned(), least: 0, most: 39, step: 1 };
    let graph = DECODER.graph(Written::Grouped);
    // A run takes at most three tokens of the prompt, so four tokens take two runs.
    let compiled = compile_guessed(open_pieces_of(&graph, &dim, &[1, 3]).unwrap(), &host::target(), 1).unwrap();
    let mut context = Context::new(compiled.model.cpu().unwrap(), &SharedPool::new(1).unwrap()).unwrap();
    let (mut tokens, mut expected) = (prompt.to_vec(), Vec::new());
    for n in 1..prompt.len() {
        step(&mut context, &graph, &tokens[..n]);
    }
    for _ in 0..N_NEW {
        let next = step(&mut context, &graph, &tokens);
        tokens.push(next);
        expected.push(next as i64);
    }
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("decoder-{}", std::process::id()));
    let made = library("decoder", &compiled.model, &host::target(), 1, Weights::Small, &["states".to_owned()]).unwrap();
    let example = |name: &str| format!("{}/../../examples/library/{name}", env!("CARGO_MANIFEST_DIR"));
    let passed: Vec<String> = [N_NEW].iter().chain(&prompt).map(usize::to_string).collect();
    // More tokens than there is room for are an error, after the tokens that fit.
    let refuse = |command: &mut Command| {
        let done = command.arg("45").args(&passed[1..]).output().unwrap();
        assert!(!done.status.success());
        let found = String::from_utf8(done.stdout).unwrap().lines().count();
        assert_eq!(found, 40 - prompt.len() + 1, "{}", String::from_utf8_lossy(&done.stderr));
    };

    let c = folder.join("c");
    std::fs::create_dir_all(&c).unwrap();
    write_library(&made, Form::C, &c).unwrap();
    let words = "-std=c99 -Wall -Wextra -Werror -O1 decoder.c decoder_kernels.a -I. -lm -lpthread -o generate";
    let (source, states) = (example("generate.c"), example("../../crates/model/tests/onnx/states.c"));
    numbers_of(Command::new("cc").current_dir(&c).arg(source).args(words.split_whitespace()));
    assert_eq!(numbers_of(Command::new(c.join("generate")).args(&passed)), expected);
    refuse(&mut Command::new(c.join("generate")));
    numbers_of(Command::new("cc").current_dir(&c).arg(states).args(words.split_whitespace()));
    assert_eq!(numbers_of(Command::new(c.join("generate")).args(&passed)), [&expected[..], &expected].concat());

    let crate_folder = folder.join("decoder");
    std::fs::create_dir_all(&crate_folder).unwrap();
    write_library(&made, Form::Rust, &crate_folder).unwrap();
    let program = folder.join("program");
    std::fs::create_dir_all(program.join("src")).unwrap();
    let manifest = "[package]\nname = \"generate\"\nversion = \"0.1.0\"\nedition = \"2021\"\n\n[dependencies]\n\
                    decoder = { path = \"../decoder\" }\n\n[workspace]\n";
    std::fs::write(program.join("Cargo.toml"), manifest).unwrap();
    let text = std::fs::read_to_string(example("generate.rs")).unwrap();
    let text = text.replace("32000", &DECODER.vocabulary.to_string());
    let text = text.replace("128", "3").replace("sequence_length", "tokens");
    std::fs::write(program.join("src/main.rs"), text).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--offline"]).current_dir(&program).env("CARGO_TARGET_DIR", folder.join("target"));
    numbers_of(cargo.env("RUSTFLAGS", "-D warnings").env_remove("CARGO_ENCODED_RUSTFLAGS"));
    assert_eq!(numbers_of(Command::new(folder.join("target/debug/generate")).args(&passed)), expected);
    refuse(&mut Command::new(folder.join("target/debug/generate")));

    // `.ci/tvm-ffi` fetches NumPy, too.
    let packages = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("tvm-ffi");
    let path = format!("{}:{}", folder.join("wheel").display(), packages.display());
    let has_numpy = Command::new("python3").args(["-c", "import numpy"]).env("PYTHONPATH", &path).output();
    if !has_numpy.is_ok_and(|done| done.status.success()) {
        eprintln!("skipped: there is no NumPy for Python's loop");
    } else {
        write_library(&made, Form::Python, &folder).unwrap();
        let wheel = folder.join(format!("decoder-0.1.0-py3-none-manylinux2014_{}.whl", std::env::consts::ARCH));
        // A wheel is a folder of modules once it is unpacked.
        let unpack = ["-m", "zipfile", "-e"];
        numbers_of(Command::new("python3").args(unpack).arg(&wheel).arg(folder.join("wheel")));
        let python = || {
            let mut command = Command::new("python3");
            command.arg(example("generate.py")).env("PYTHONPATH", &path);
            command
        };
        assert_eq!(numbers_of(python().args(&passed)), expected);
        refuse(&mut python());
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// A prompt is processed in pieces of several tokens, the last one padded, by a separate plan, whose states a
/// plan for one token continues.
#[test]
fn prompts_go_in_by_pieces() {
    const PIECE: usize = 5;
    const N_PROMPT: usize = 3 * PIECE - 3;
    let dim = |most: i64| OpenDimension { name: "past".to_owned(), least: 0, most, step: 1 };
    for form in FORMS {
        let graph = DECODER.graph(form);
        let contexts = [(48 - PIECE as i64, PIECE), (47, 1)].map(|(most, n_tokens)| {
            let fused = open_decoder(&graph, &dim(most), n_tokens).unwrap_or_else(|error| panic!("{form:?}: {error}"));
            let compiled = compile_guessed(fused, &host::target(), 1).unwrap_or_else(|error| panic!("{error}"));
            Context::new(compiled.model.cpu().unwrap(), &SharedPool::new(1).unwrap()).unwrap()
        });
        let [mut by_pieces, mut one] = contexts;
        let mut tokens: Vec<usize> = (0..N_PROMPT).map(|at| (at * 11 + 3) % DECODER.vocabulary).collect();
        for piece in 0..3 {
            let id = |at: usize| tokens.get(piece * PIECE + at).map_or(0, |id| *id as i64);
            let ids: Vec<u8> = (0..PIECE).flat_map(|at| id(at).to_le_bytes()).collect();
            let mut ids_memory = Aligned::new(ids.len() as u64).unwrap();
            ids_memory.bytes_mut().copy_from_slice(&ids);
            let mut memory = Aligned::new((4 * PIECE * DECODER.vocabulary) as u64).unwrap();
            by_pieces.run(&[ids_memory.bytes()], &mut [memory.bytes_mut()]).unwrap();
            assert_eq!(by_pieces.past() as usize, (piece + 1) * PIECE);
            let bytes = memory.bytes().as_chunks::<4>().0;
            let found: Vec<f64> = bytes.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect();
            let n_own = PIECE.min(N_PROMPT - piece * PIECE);
            for (at, found) in found.chunks(DECODER.vocabulary).enumerate().take(n_own) {
                let wanted = DECODER.logits(&graph, &tokens[..=piece * PIECE + at]);
                let most = wanted.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let is_near = found.iter().zip(&wanted).all(|(x, y)| (x - y).abs() <= 1e-5 * most);
                assert!(is_near, "{form:?}, piece {piece}, token {at}: {found:?}, and should be {wanted:?}");
            }
        }
        by_pieces.rewind(N_PROMPT as i64).unwrap();
        for state in 0..2 * LAYERS {
            let n_bytes = one.state_mut(state).unwrap().len();
            assert_eq!(by_pieces.state_mut(state).unwrap().len(), n_bytes);
            let memory = by_pieces.bind_state(state, Aligned::new(n_bytes as u64).unwrap()).unwrap();
            one.bind_state(state, memory).unwrap();
        }
        one.set_dim("past", by_pieces.past()).unwrap();
        tokens.push(8);
        for _ in 0..5 {
            let next = step(&mut one, &graph, &tokens);
            tokens.push(next);
        }
    }
}

/// Logits of tokens that are processed in one run, as bytes.
fn taken(context: &mut Context, ids: &[usize]) -> Result<Vec<u8>, RunError> {
    context.set_dim("tokens", ids.len() as i64)?;
    let bytes: Vec<u8> = ids.iter().flat_map(|id| (*id as i64).to_le_bytes()).collect();
    let mut given = Aligned::new(bytes.len() as u64).unwrap();
    given.bytes_mut().copy_from_slice(&bytes);
    let mut memory = Aligned::new((4 * ids.len() * DECODER.vocabulary) as u64).unwrap();
    context.run(&[given.bytes()], &mut [memory.bytes_mut()])?;
    Ok(memory.bytes().to_vec())
}

/// Total bytes of prepared weights.
fn prepared_bytes(model: &Model) -> usize {
    let made = model.plan().constants.iter().filter(|constant| matches!(constant, Constant::Prepared(_)));
    made.map(Constant::n_bytes).sum()
}

/// Prompts are processed at once, in any division, with the same logits; single tokens follow. One library
/// does all of this; its pieces share most weights.
#[test]
fn a_prompt_goes_in_at_once() {
    let dim = OpenDimension { name: "past".to_owned(), least: 0, most: 47, step: 1 };
    let prompt: Vec<usize> = (0..19).map(|at| (at * 11 + 3) % DECODER.vocabulary).collect();
    for form in FORMS {
        let graph = DECODER.graph(form);
        let made = |numbers: &[i64]| {
            let fused = open_pieces_of(&graph, &dim, numbers).unwrap_or_else(|error| panic!("{form:?}: {error}"));
            compile_guessed(fused, &host::target(), 1).unwrap_or_else(|error| panic!("{form:?}: {error}"))
        };
        let compiled = made(&[1, 4, 12]);
        let model = compiled.model.cpu().unwrap();
        // Keys and values that heads share are not repeated for them.
        let is_repeated = |step: &PlanStep| step.name.split(" + ").any(|name| name.ends_with(".e"));
        assert!(!model.plan().steps.iter().any(is_repeated), "{form:?}");
        let alone = compile_guessed(open_decoder(&graph, &dim, 1).unwrap(), &host::target(), 1).unwrap();
        let one_copy = prepared_bytes(alone.model.cpu().unwrap());
        // Three pieces share all their weights.
        let made = prepared_bytes(model);
        assert!(made <= one_copy, "{form:?}: {made} bytes of weights, for one token {one_copy}");
        let mut context = Context::new(model, &SharedPool::new(1).unwrap()).unwrap();
        let wanted: Vec<Vec<f64>> = (0..prompt.len()).map(|at| DECODER.logits(&graph, &prompt[..=at])).collect();
        let mut bits: Option<Vec<u8>> = None;
        for parts in [&[12, 5, 2][..], &[1; 19], &[4, 4, 4, 4, 3], &[7, 12], &[12, 7]] {
            context.rewind(0).unwrap();
            let (mut at, mut found) = (0, Vec::new());
            for &n in parts {
                found.extend(taken(&mut context, &prompt[at..at + n]).unwrap());
                at += n;
                assert_eq!(context.past() as usize, at);
            }
            let numbers = found.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes)));
            let numbers: Vec<f64> = numbers.collect();
            for (at, found) in numbers.chunks(DECODER.vocabulary).enumerate() {
                let wanted = &wanted[at];
                let most = wanted.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let is_near = found.iter().zip(wanted).all(|(x, y)| (x - y).abs() <= 1e-5 * most);
                assert!(is_near, "{form:?}, {parts:?}, token {at}: {found:?}, and should be {wanted:?}");
            }
            // The same pieces give the same bits.
            if parts[0] == 12 {
                assert_eq!(*bits.get_or_insert_with(|| found.clone()), found, "{form:?}, {parts:?}");
            }
            let mut tokens = prompt.clone();
            tokens.push(8);
            context.set_dim("tokens", 1).unwrap();
            for _ in 0..3 {
                let next = step(&mut context, &graph, &tokens);
                tokens.push(next);
            }
        }
        for n in [0, 13, -1] {
            assert!(matches!(context.set_dim("tokens", n), Err(RunError::BadSize { .. })), "{n}");
        }
        context.set_dim("past", 37).unwrap();
        assert!(matches!(taken(&mut context, &prompt[..12]), Err(RunError::Full { size: 37, .. })));
        taken(&mut context, &prompt[..11]).unwrap();
        assert_eq!(context.past(), 48);
    }
    for numbers in [&[1][..], &[4, 1], &[2, 5], &[]] {
        let refused = open_pieces_of(&DECODER.graph(Written::Grouped), &dim, numbers);
        assert!(matches!(refused, Err(OpenError::Node { .. })), "{numbers:?}");
    }
}

/// A graph for a number of tokens and a length.
fn at(graph: &Graph, n_tokens: i64, past: i64) -> Graph {
    let dims = vec![("tokens".to_owned(), n_tokens as usize), ("past".to_owned(), past as usize)];
    specialise(graph, &Bindings { dims, open: Some("past".to_owned()), ..Bindings::default() }).graph
}

/// Products of dynamically quantized rows have numbers for each column that a run computes, which are as many
/// in pieces of any size. Rows of a quantized table of positions begin where the past ends.
#[test]
fn quantized_products_of_pieces_share_weights() {
    let graph = graph_at(
        17,
        "input_ids[1 tokens], past_key_values.0.key[1 1 past 8]",
        "y[1 tokens 8], present.0.key[1 1 total 8]",
        &format!(
            "{PLACES}
         embed = weights[37 8]
         words = Gather(embed, input_ids)
         table = bytes[64 8]
         places = Gather(table, rows)
         fine = number[0.01]
         positions = DequantizeLinear(places, fine)
         x = Add(words, positions)
         q, s, z = DynamicQuantizeLinear(x)
         w = bytes[8 8]
         p = MatMulInteger(q, w, z)
         f = Cast[to=1](p)
         y = Mul(f, s)
         heads = numbers[0 1 -1 8]
         k = Reshape(y, heads)
         present.0.key = Concat[axis=2](past_key_values.0.key, k)"
        ),
    );
    let dim = OpenDimension { name: "past".to_owned(), least: 0, most: 47, step: 1 };
    let fused = open_pieces_of(&graph, &dim, &[1, 12]).unwrap_or_else(|error| panic!("{error}"));
    let compiled = compile_guessed(fused, &host::target(), 1).unwrap_or_else(|error| panic!("{error}"));
    let mut context = Context::new(compiled.model.cpu().unwrap(), &SharedPool::new(1).unwrap()).unwrap();
    for (n, past) in [(1, 0), (12, 1), (1, 13)] {
        let own = at(&graph, n, past);
        let given = crate::open::inputs(&own, n as u64, None);
        let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
        let wanted = evaluate(&own, &named).unwrap().remove(0);
        context.set_dim("tokens", n).unwrap();
        let mut found = Aligned::new(wanted.bytes().len() as u64).unwrap();
        let mut ids = Aligned::new(8 * n as u64).unwrap();
        ids.bytes_mut().copy_from_slice(given[0].1.bytes());
        context.run(&[ids.bytes()], &mut [found.bytes_mut()]).unwrap();
        let found = Tensor::new(wanted.ty().clone(), bytes::Bytes::copy_from_slice(found.bytes())).unwrap();
        assert!(crate::open::is_near(&found, &wanted), "{n} tokens: {found:?}, and should be {wanted:?}");
    }
}

/// Attention over the embeddings of all tokens so far, of several texts.
fn attention_of_texts() -> Graph {
    graph_at(
        17,
        "input_ids[batch tokens], attention_mask[batch total], past_key_values.0.key[batch 1 past 8]",
        "y[batch tokens 8], present.0.key[batch 1 total 8]",
        "embed = weights[37 8]
         x = Gather(embed, input_ids)
         axis = numbers[1]
         k = Unsqueeze(x, axis)
         present.0.key = Concat[axis=2](past_key_values.0.key, k)
         all = Shape(present.0.key)
         two = integer[2]
         n_all = Gather(all, two)
         zero = integer[0]
         one = integer[1]
         texts = Gather(all, zero)
         columns = Range(zero, n_all, one)
         each = Range(zero, texts, one)
         each1 = Unsqueeze(each, axis)
         starts = Mul(each1, n_all)
         places = Add(starts, columns)
         seen = Cast[to=9](attention_mask)
         flat = Flatten[axis=2](seen)
         each_own = Gather(flat, places)
         last = numbers[-1]
         own = Squeeze(each_own, last)
         nothing = number[0.0]
         hidden = number[-1e9]
         mask = Where(own, nothing, hidden)
         between = Unsqueeze(mask, axis)
         of_ids = Shape(input_ids)
         n_new = Gather(of_ids, one)
         n_past = Sub(n_all, n_new)
         rows = Range(n_past, n_all, one)
         row = Unsqueeze(rows, axis)
         late = Greater(columns, row)
         causal = Where(late, hidden, nothing)
         keys = Squeeze(present.0.key, axis)
         turned = Transpose[perm=0 2 1](keys)
         scores = MatMul(x, turned)
         masked1 = Add(scores, between)
         masked = Add(masked1, causal)
         shares = Softmax[axis=-1](masked)
         mixed = MatMul(shares, keys)
         w = weights[8 8]
         y = MatMul(mixed, w)",
    )
}

/// Texts whose attention is computed token by token.
struct Texts {
    embed: Vec<f64>,
    weights: Vec<f64>,
    each: Vec<Vec<i64>>,
}

impl Texts {
    fn new(graph: &Graph, n: usize) -> Texts {
        let constant = |name: &str| {
            graph.values().find(|(_, value)| value.name == name).unwrap().1.constant.clone().unwrap().floats()
        };
        Texts { embed: constant("embed"), weights: constant("w"), each: vec![Vec::new(); n] }
    }

    /// Adds tokens to each text in one run, and checks its result.
    fn take(&mut self, context: &mut Context, n: usize) {
        let n_texts = self.each.len();
        let mut ids = Aligned::new((8 * n_texts * n) as u64).unwrap();
        for (text, tokens) in self.each.iter_mut().enumerate() {
            for at in 0..n {
                tokens.push((tokens.len() as i64 * 11 + text as i64 * 5) % 37);
                let id = tokens.last().unwrap().to_le_bytes();
                ids.bytes_mut()[8 * (text * n + at)..][..8].copy_from_slice(&id);
            }
        }
        let mut memory = Aligned::new((n_texts * n * 8 * 4) as u64).unwrap();
        context.run(&[ids.bytes()], &mut [memory.bytes_mut()]).unwrap();
        let found = memory.bytes().as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes)));
        let row = |token: &i64| &self.embed[*token as usize * 8..][..8];
        let wanted = self.each.iter().flat_map(|tokens| {
            (tokens.len() - n..tokens.len()).flat_map(|at| {
                let keys: Vec<&[f64]> = tokens[..=at].iter().map(row).collect();
                let mixed = attended(keys[at], &keys, &keys, 1.0, 0.0, &vec![0.0; at + 1]);
                let of_column = |column: usize| (0..8).map(|k| mixed[k] * self.weights[8 * k + column]).sum::<f64>();
                (0..8).map(of_column).collect::<Vec<f64>>()
            })
        });
        let is_near = found.zip(wanted).all(|(x, y)| (x - y).abs() < 1e-4);
        assert!(is_near, "{n} tokens of {n_texts} texts after {}", self.each[0].len() - n);
    }
}

fn graph_of_texts(graph: &Graph, n_texts: i64, n_tokens: i64, dim: &OpenDimension, size: i64) -> Fused {
    let sizes = [("batch", n_texts), ("tokens", n_tokens), (dim.name.as_str(), size)];
    let dims = sizes.into_iter().map(|(name, n)| (name.to_owned(), n as usize)).collect();
    let special = specialise(graph, &Bindings { dims, open: Some(dim.name.clone()), ..Bindings::default() });
    assert!(special.problems.is_empty(), "{}", special.problems[0]);
    lower(&special.graph, false, &host::target(), 1).unwrap()
}

fn context_of(fused: Result<Fused, OpenError>) -> Context {
    let fused = fused.unwrap_or_else(|error| panic!("{error}"));
    let compiled = compile_guessed(fused, &host::target(), 1).unwrap_or_else(|error| panic!("{error}"));
    Context::new(compiled.model.cpu().unwrap(), &SharedPool::new(1).unwrap()).unwrap()
}

/// The mask of several sequences of one length is all ones, however it is read.
#[test]
fn masks_of_a_batch_have_no_hole() {
    let graph = attention_of_texts();
    let dim = OpenDimension { name: "past".to_owned(), least: 0, most: 47, step: 1 };
    let mut context = context_of(open(&dim, |size| Ok(graph_of_texts(&graph, 3, 1, &dim, size))));
    let mut texts = Texts::new(&graph, 3);
    for _ in 0..20 {
        texts.take(&mut context, 1);
    }
}

/// Several sequences take several tokens in a run, in pieces, whose rows are not contiguous.
#[test]
fn sequences_of_a_batch_take_several_tokens() {
    let graph = attention_of_texts();
    let dim = OpenDimension { name: "past".to_owned(), least: 0, most: 47, step: 1 };
    let made = open_pieces(&dim, "tokens", &[1, 4], |n, size| Ok(graph_of_texts(&graph, 3, n, &dim, size)));
    let mut context = context_of(made);
    let mut texts = Texts::new(&graph, 3);
    for n in [3, 4, 2, 1, 4, 1] {
        context.set_dim("tokens", n).unwrap();
        texts.take(&mut context, n as usize);
    }
}

/// Any number of sequences runs at once, with states that are the first of those of the most sequences, and
/// as many tokens as a run says. All numbers read the same weights.
#[test]
fn the_batch_of_a_decoder_is_open() {
    let graph = attention_of_texts();
    let dim = OpenDimension { name: "past".to_owned(), least: 0, most: 47, step: 1 };
    let items = OpenDimension { name: "batch".to_owned(), least: 1, most: 3, step: 1 };
    for numbers in [&[1, 4][..], &[]] {
        let rows = (!numbers.is_empty()).then_some(("tokens", numbers));
        let dims = DecoderDims { past: &dim, second: None, items: Some(&items), rows };
        let mut context = context_of(tilewright_model::open_decoder(dims, |sizes| {
            Ok(graph_of_texts(&graph, sizes.items.unwrap(), sizes.rows.unwrap_or(1), &dim, sizes.past))
        }));
        let alone = context_of(open(&dim, |size| Ok(graph_of_texts(&graph, 3, 1, &dim, size))));
        assert!(prepared_bytes(context.model()) <= prepared_bytes(alone.model()), "{numbers:?}");
        // Several texts do not run one by one: they take no more kernels than one text does.
        let plan = context.model().plan();
        let is_kernel = |step: &&PlanStep| matches!(step.work, Work::Kernel { .. });
        let kernels = plan.pieces.iter().map(|piece| plan.steps[piece.steps.clone()].iter().filter(is_kernel).count());
        let kernels: Vec<usize> = kernels.collect();
        let (of_one, n_kinds) = (plan.pieces.iter().filter(|piece| piece.items == 1), numbers.len().max(1));
        assert_eq!((of_one.count(), kernels.len()), (n_kinds, 3 * n_kinds));
        let most = kernels[2 * n_kinds..].iter().max();
        assert!(kernels.iter().max() == most, "{kernels:?}");
        for n_texts in [2, 3, 1, 3] {
            context.rewind(0).unwrap();
            context.set_dim("batch", n_texts).unwrap();
            let mut texts = Texts::new(&graph, n_texts as usize);
            for n in [3, 4, 2, 1, 6] {
                let n = if numbers.is_empty() { 1 } else { n.min(4) };
                if !numbers.is_empty() {
                    context.set_dim("tokens", n).unwrap();
                }
                texts.take(&mut context, n as usize);
            }
        }
        for n in [0, 4, -1] {
            assert!(matches!(context.set_dim("batch", n), Err(RunError::BadSize { .. })), "{n}");
        }
    }
}

/// Caches of f16 are states of f32; a caller gives and gets f16.
#[test]
fn caches_of_16_bits_are_kept_in_f32() {
    let mut graph = graph_at(
        17,
        "input_ids[1 tokens], past_key_values.0.key[1 1 past 8]",
        "y[1 tokens 8], present.0.key[1 1 total 8]",
        "embed = weights[37 8]
         x = Gather(embed, input_ids)
         heads = numbers[0 1 -1 8]
         k = Reshape(x, heads)
         half = Cast[to=10](k)
         present.0.key = Concat[axis=2](past_key_values.0.key, half)
         wide = Cast[to=1](present.0.key)
         axis = numbers[1]
         keys = Squeeze(wide, axis)
         turned = Transpose[perm=0 2 1](keys)
         scores = MatMul(x, turned)
         shares = Softmax[axis=-1](scores)
         y = MatMul(shares, keys)",
    );
    let cache = graph.inputs[1];
    graph.value_mut(cache).declared.as_mut().unwrap().dtype = DType::F16;
    let dim = OpenDimension { name: "past".to_owned(), least: 0, most: 47, step: 1 };
    let fused = open_decoder(&graph, &dim, 1).unwrap_or_else(|error| panic!("{error}"));
    let compiled = compile_guessed(fused, &host::target(), 1).unwrap_or_else(|error| panic!("{error}"));
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    let own = at(&graph, 1, 5);
    let given = crate::open::inputs(&own, 3, None);
    runner.set_dim("past", 5).unwrap();
    given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
    runner.run().unwrap();
    let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
    let wanted = evaluate(&own, &named).unwrap();
    for ((name, found), wanted) in runner.outputs().iter().zip(&wanted) {
        // A key is rounded to 11 bits in the model's own type.
        let is_near = |(x, y): (&f64, &f64)| (x - y).abs() < 1e-3;
        assert_eq!(found.ty(), wanted.ty(), "{name}");
        assert!(found.floats().iter().zip(&wanted.floats()).all(is_near), "{name}: {found:?}, {wanted:?}");
    }
}
