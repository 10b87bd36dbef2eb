//! Tests of the language of constraints, against Python and on arbitrary texts.

use std::io::Write;
use std::process::{Command, Stdio};

use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::json;
use tilewright_search::expression::{Datum, Expression, ValueType, VariableNames, list};

/// Number of cases, larger in a long run.
fn cases(usual: u32) -> u32 {
    std::env::var("TILEWRIGHT_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

const PIECES: &str = "[ xydl0-9()<>=!+*/%{},\\[\\]'\"a-z.-]{0,60}|\\PC{0,40}|(range|sum|min|\\(|\\)|\\[|\\]| for a in | if | else | not | in | and |a|3|0.5|x|,|\\+|\\*\\*|//|<){0,24}";

fn scope() -> VariableNames {
    let values = ["F", "B"].map(String::from).into();
    [("x", ValueType::Number), ("y", ValueType::Number), ("d", ValueType::Category(values)), ("l", ValueType::List)]
        .map(|(name, kind)| (name.to_owned(), kind))
        .into()
}

/// Texts are refused before they fill the stack.
#[test]
fn deep_nesting_is_refused() {
    let why = Expression::parse(&"(".repeat(10_000)).and_then(|e| e.compile(&scope())).err().unwrap();
    assert!(why.to_string().contains("more than 500"), "{why}");
    for text in ["[".repeat(1000), "-".repeat(1000), format!("[{}1]", "1 + ".repeat(1000))] {
        assert!(list(&text).unwrap_err().to_string().contains("more than 500 deep"), "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(2000), ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_read_or_refused(text in PIECES) {
        match Expression::parse(&text) {
            Ok(parsed) => {
                prop_assert_eq!(Expression::parse(&parsed.to_string()), Ok(parsed.clone()));
                if let Ok((code, _)) = parsed.compile(&scope()) {
                    let list = Datum::List([4, 2, 8].map(Datum::Int).into());
                    code.evaluate(&[Some(i64::MAX.into()), Some(i64::MIN.into()), Some("B".into()), Some(list)]);
                }
            }
            Err(error) => prop_assert!(!error.to_string().contains('\n')),
        }
    }
}

/// A random expression over x, y and z that both languages support, as text.
fn text(rng: &mut Xoshiro256PlusPlus, depth: usize) -> String {
    if depth == 0 || rng.random_range(0..8) == 0 {
        let leaves = ["x", "y", "z", "0", "1", "2", "3", "7", "0.5", "1.5", "True", "False", "-3"];
        return leaves[rng.random_range(0..leaves.len())].to_owned();
    }
    let [a, b, c] = [(); 3].map(|()| text(rng, depth - 1));
    match rng.random_range(0..24) {
        0 | 1 => format!("{a} + {b}"),
        2 => format!("{a} - {b}"),
        3 | 4 => format!("({a}) * ({b})"),
        5 => format!("({a}) / ({b})"),
        6 => format!("({a}) // ({b})"),
        7 => format!("({a}) % ({b})"),
        8 => format!("({a}) ** {}", rng.random_range(-2..4)),
        9 => format!("-{a}"),
        10 => format!("(({a}) < ({b}) <= ({c}))"),
        11 => format!("((({a}) == ({b})) != (({c}) > ({b})))"),
        12 => format!("({a} and {b} or {c})"),
        13 => format!("(not {a})"),
        14 => format!("({a} if {b} else {c})"),
        15 => format!("min({a}, {b}, {c})"),
        16 => format!("max([{a}, {b}, {c}])"),
        17 => format!("abs({a})"),
        18 => format!("(({a}) in [{b}, {c}])"),
        19 => format!("(({a}) not in ({b}, {c}))"),
        20 => format!("sum([i * ({a}) for i in range(4) if i != {b}])"),
        21 => format!("len([{a}, {b}])"),
        22 => format!("(({a}) in range({}, 9, {}))", rng.random_range(-3..3), rng.random_range(1..4)),
        _ => format!("int({a})"),
    }
}

fn float(datum: &Datum) -> Option<f64> {
    match datum {
        Datum::Int(value) => Some(*value as f64),
        Datum::Float(value) => Some(*value),
        _ => None,
    }
}

#[test]
fn values_are_those_of_python() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    let n = cases(4000);
    let cases: Vec<(String, [i64; 3])> =
        (0..n).map(|_| (text(&mut rng, 4), [(); 3].map(|()| rng.random_range(-9..10)))).collect();
    let script = "import sys, json\nfor line in sys.stdin:\n  text, x, y, z = json.loads(line)\n  try:\n    v = eval(text)\n    \
                  v = 'complex' if isinstance(v, complex) else 'large' if isinstance(v, int) and abs(v) >= 2**63 else repr(v)\n  \
                  except Exception as e:\n    v = type(e).__name__\n  print(v)\n";
    let python = Command::new("python3")
        .args(["-W", "ignore", "-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut python) = python else {
        eprintln!("skipped: there is no python3 to compare with");
        return;
    };
    let lines: String = cases.iter().map(|(text, [x, y, z])| json!([text, x, y, z]).to_string() + "\n").collect();
    let mut input = python.stdin.take().unwrap();
    let writer = std::thread::spawn(move || input.write_all(lines.as_bytes()));
    let output = python.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.lines().count(), cases.len());
    let scope: VariableNames = ["x", "y", "z"].map(|name| (name.to_owned(), ValueType::Number)).into();
    let (mut n_values, mut n_large) = (0, 0);
    for ((text, values), expected) in cases.iter().zip(output.lines()) {
        let code = Expression::parse(text).unwrap_or_else(|e| panic!("{text}: {e}")).compile(&scope);
        let code = code.unwrap_or_else(|e| panic!("{text}: {e}")).0;
        let known = values.map(|value| Some(Datum::Int(value)));
        let found = code.evaluate(&known);
        let has_none = expected.ends_with("Error") || expected == "complex" || expected == "large";
        match found {
            // Python's integers are unbounded and ours are not: an intermediate result may be too large.
            None if !has_none => n_large += 1,
            None => {}
            Some(found) => {
                let is_same = match expected.parse::<f64>() {
                    Ok(number) if !has_none => {
                        float(&found) == Some(number)
                            && (found.int().is_none() == (expected.contains(['.', 'e']) || number.is_nan()))
                    }
                    _ => found.to_string() == expected || found.to_string() == "NaN" && expected == "nan",
                };
                assert!(is_same, "{text} for {values:?}: {found}, Python has {expected}");
                n_values += 1;
            }
        }
    }
    assert!(n_values > cases.len() / 2 && n_large <= cases.len() / 50, "{n_values} compared, {n_large} too large");
}
