//! Text format tests: printed programs parse back, and no text makes the parser panic.

mod common;

use common::{Conv, Nonsense, Random, conv2d, matmul, nonsense, program, softmax};
use tilewright_ir::text::{MAX_DEPTH, Message, index_to_string, parse, stmt_to_string};
use tilewright_ir::verify::verify;
use tilewright_ir::{Index, LoopId, Program};

#[track_caller]
fn round_trip(program: &Program) {
    let text = program.to_string();
    let read = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    assert_eq!(&read, program, "\n{text}");
    assert_eq!(read.to_string(), text);
}

#[test]
fn operators_round_trip() {
    round_trip(&matmul("f64", 17, 333, 129));
    round_trip(&conv2d(Conv { c: 3, h: 9, w: 8, k: 4, r: 3, stride: 2, pad: 1 }));
    round_trip(&softmax(5, 7));
}

#[test]
fn open_sizes_round_trip() {
    for size in ["m = i + 1 in 512", "m = 32*i + 32 in 16", "size = i in 3", "m = 2 - 3*i in -1"] {
        let text = format!("program \"p\"\nloops i\nsize {size}\nrun {{\n}}\n");
        let read = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert_eq!(read.to_string(), text);
        round_trip(&read);
    }
}

#[test]
fn random_programs_round_trip() {
    for seed in 0..3000 {
        let program = nonsense(&mut Random::new(seed));
        let text = program.to_string();
        let read = parse(&text).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{text}"));
        assert!(read == program, "seed {seed}\n{text}read as\n{read}");
    }
}

#[test]
fn random_indices_are_stable_when_rebuilt() {
    let mut random = Random::new(7);
    for _ in 0..20_000 {
        let e = Nonsense { n_loops: 4, n_buffers: 1, random: &mut random }.index(4);
        assert_eq!(e.rewrite(&mut |_| None), e, "{e:?}");
    }
}

/// Checks the example of the module's documentation.
#[test]
fn layout_is_as_documented() {
    let text = "program \"matmul:m=8,n=8,k=8\"
buffer A: f32[8, 8] global input
buffer B: f32[8, 8] global input
buffer C: f32[8, 8] global output
buffer C.r: f32[4, 8] register temporary
loops io, i, j, k
run {
  parallel io in 2 {
    alloc C.r
    for k in 8 {
      unrolled i in 4 {
        vectorized j in 8 {
          C.r[i, j] += A[4*io + i, k] * B[k, j] first k == 0
        }
      }
    }
    for i in min(4, 8 - 4*io) {
      for j in 8 {
        C[4*io + i, j] = C.r[i, j]
      }
    }
  }
}
";
    assert_eq!(program(text).to_string(), text);
    verify(&program(text)).unwrap();
}

#[test]
fn every_form_prints_readably() {
    let text = "program \"p\"
buffer A: f64[4, 4] local temporary
buffer S: f64[] shared output
buffer W: f64[16] global const
buffer W.packed: f64[16] global kept
loops i, j, k
prepare {
  for i in 16 {
    W.packed[i] = W[i]
  }
}
run {
  for i in max(1, 3 - j) {
    if not(i < 3) && i == 2*j && and(true, less(A[i, 0], -1.5)) {
      alloc A
    } else {
      prefetch A[i // 3 + (2*i + j) % 5, 3*(i // 4) - j % 2 - 1] write
    }
    S[] max= (A[i, 0] - (A[i, 1] - 2.0)) * neg(A[0, 0] / 3.0) / inf first never
    S[] min= select(true, nan, erf(index(i + 1))) first i == 0
    S[] = u8(f16(A[0, 0] + 1.0) * 2.0) + bool(nan)
  }
}
finish {
  S[] = W.packed[0]
}
";
    let read = program(text);
    assert_eq!(read.to_string(), text);
    assert_eq!(index_to_string(&read, &Index::from(127).sub(&Index::from(LoopId(1)).scale(12))), "127 - 12*j");
    assert_eq!(stmt_to_string(&read, &read.prepare[0]), "for i in 16 {\n  W.packed[i] = W[i]\n}\n");
    assert_eq!(index_to_string(&read, &Index::from(LoopId(9))), "?loop9");
}

fn message(text: &str) -> (usize, usize, String) {
    let error = parse(text).expect_err("faulty");
    (error.line, error.column, error.message.to_string())
}

#[test]
fn errors_say_what_and_where() {
    let head = "program \"p\"\nbuffer A: f32[8] global input\nloops i, j\nrun {\n";
    let cases = [
        ("for i in 8 { A[k] = 0.0 } }", 16, "there is no loop variable k"),
        ("B[i] = 0.0 }", 1, "there is no buffer B"),
        ("A[i] = 1e999 }", 8, "1e999 is out of range"),
        ("A[99999999999999999999] = 0 }", 3, "99999999999999999999 is out of range"),
        ("A[9223372036854775807*i + 9223372036854775807*i] = 0 }", 48, "the index overflows"),
        ("A[i * j] = 0 }", 8, "an index is multiplied by something that is not an integer"),
        ("A[i] -= 0 }", 6, "expected =, +=, *=, max= or min=, found -"),
        ("A[i] += 1.0 }", 13, "expected `first`, found }"),
        ("A[i] = $ }", 8, "unexpected character '$'"),
        ("A[i] = tan(1.0) }", 8, "expected a function of values, found tan"),
        ("for i in 8 {", 13, "expected a statement or }, found the end"),
        ("} }", 3, "expected the end, found }"),
    ];
    for (tail, column, expected) in cases {
        assert_eq!(message(&format!("{head}{tail}")), (5, column, expected.to_owned()), "{tail}");
    }
    assert_eq!(message("program p"), (1, 9, "expected the name in quotes, found p".to_owned()));
    assert_eq!(message("program \"p"), (1, 9, "unfinished or malformed string".to_owned()));
    let no_size = "expected a loop variable, perhaps times a number, and perhaps a number more, found i";
    assert_eq!(message("program \"p\" loops i size m = i//2 in 4 run { }"), (1, 30, no_size.to_owned()));
    assert_eq!(
        message("program \"p\" loops i size m = 2*i + 1 run { }"),
        (1, 38, "expected `in`, found run".to_owned())
    );
    assert_eq!(message("program \"p\" loops i, i"), (1, 22, "i is declared twice".to_owned()));
    assert_eq!(message("program \"ö\" loops 3"), (1, 19, "expected a loop name, found 3".to_owned()));
}

#[test]
fn deep_nesting_is_refused() {
    let n = 100_000;
    let head = "program \"p\" buffer A: f32[8] global output loops i run { ";
    let texts = [
        "if true { ".repeat(n),
        format!("A[{}", "(".repeat(n)),
        format!("A[{}", "min(".repeat(n)),
        format!("A[i{}", " % 7 % 5".repeat(n)),
        format!("A[i{}", " // 9223372036854775807".repeat(n)),
        format!("A[0] = {}", "neg(".repeat(n)),
        format!("A[0] = {}", "(".repeat(n)),
        format!("A[0] = 0{}", " + 1".repeat(n)),
        format!("A[0] = 0{}", " * (1 + 1".repeat(n)),
        format!("A[0] = {}", "select(less(".repeat(n)),
        format!("if true{}", " && true".repeat(n)),
        format!("if {}", "not(".repeat(n)),
    ];
    for text in texts {
        let error = parse(&format!("{head}{text}")).expect_err("too deep");
        assert_eq!(error.message, Message::Depth, "{}", &text[..30]);
    }
    // Just within the limit.
    let n = MAX_DEPTH - 2;
    round_trip(&program(&format!("{head} {} {} }}", "if true { ".repeat(n), "} ".repeat(n))));
    round_trip(&program(&format!("{head} A[0] = {}1{} }}", "neg(".repeat(n), ")".repeat(n))));
}

#[test]
fn mutated_texts_never_panic() {
    let pieces = [
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "+",
        "-",
        "*",
        "//",
        "%",
        "0",
        "-1",
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775808",
        "1.5",
        "1e9",
        "i",
        "j",
        "A",
        "min(",
        "max(",
        "select(",
        "less(",
        "first",
        "never",
        "true",
        "and(",
        "not(",
        "&&",
        "<",
        "==",
        "=",
        "+=",
        "max=",
        "loops",
        "buffer",
        "run",
        "for",
        "in",
        "alloc",
        ",",
        ":",
        "\"",
        "\\",
        "#",
        "\n",
        "ö",
        "\u{0}",
        "i // 0",
        "i // -3",
        "i % 4611686018427387904",
        "4611686018427387905*i",
    ];
    for seed in 0..4000 {
        let random = &mut Random::new(seed);
        let mut text =
            if random.chance(50) { nonsense(random).to_string() } else { matmul("f32", 8, 9, 10).to_string() };
        for _ in 0..1 + random.below(6) {
            let at = |random: &mut Random, text: &str| {
                let mut at = random.below(text.len() + 1);
                while !text.is_char_boundary(at) {
                    at -= 1;
                }
                at
            };
            let (a, b) = (at(random, &text), at(random, &text));
            let (a, b) = (a.min(b), a.max(b).min(a.min(b) + 12));
            if random.chance(50) && text.is_char_boundary(b) {
                text.replace_range(a..b, random.pick(&pieces));
            } else {
                text.insert_str(a, &format!(" {} ", random.pick(&pieces)));
            }
        }
        if let Ok(program) = parse(&text) {
            round_trip_or_nan(&program, &text);
            // The verifier does not panic either.
            let _ = verify(&program);
        }
    }
}

#[track_caller]
fn round_trip_or_nan(program: &Program, from: &str) {
    let text = program.to_string();
    let read = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}\nfrom\n{from}"));
    assert_eq!(read.to_string(), text, "from\n{from}");
    assert!(text.contains("nan") || read == *program, "{text}\nfrom\n{from}");
}

#[test]
fn noise_never_panics() {
    for seed in 0..2000 {
        let random = &mut Random::new(seed);
        let bytes = (0..random.below(200)).map(|_| random.below(256) as u8).collect::<Vec<_>>();
        let _ = parse(&String::from_utf8_lossy(&bytes));
    }
}
