//! Cases of `tests/golden`: a program, steps or lowering passes, and the resulting program or error.
//!
//! ```text
//! # What the case shows.
//! --- program
//! matmul:m=9,n=8,k=4                     a line that names a program, or a whole one in the text format
//! --- steps
//! split i 4 -> io ii shrink
//! --- lower
//! simplify specialize_tails              names of passes, or `all`; `gpu` makes kernels
//! --- expected
//! program …                              or `--- refused` and the message
//! ```
//!
//! All sections except the first and the last are optional. `BLESS=1` rewrites the last section;
//! `CASE=split/shrink` runs the cases whose path contains this text. Every intermediate program is verified,
//! and interpreted to check that it gives the results of the first.

mod sources;

use sources::{difference, on_gpu, outputs, tolerance};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use tilewright_ir::gpu::simt::ThreadOrder;
use tilewright_ir::schedule::{FORMS, Illegal, apply, parse_steps};
use tilewright_ir::{Program, lower, lower_gpu, text, verify};

/// Maximum number of interpreter iterations of a case.
const LONGEST: u64 = 50_000_000;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

/// All cases with their texts, by their paths without extension, such as `split/shrink`.
fn cases() -> Vec<(String, String)> {
    let list = |dir: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
        paths.sort();
        paths
    };
    let files = list(&root()).into_iter().filter(|dir| dir.is_dir()).flat_map(|dir| list(&dir));
    files
        .map(|path| {
            let name = path.strip_prefix(root()).expect("inside").with_extension("");
            (name.to_str().expect("a plain name").to_owned(), fs::read_to_string(&path).expect("a text file"))
        })
        .collect()
}

/// Case, with sections without trailing line breaks.
struct Case<'a> {
    program: &'a str,
    steps: &'a str,
    passes: Vec<&'a str>,
    /// Whether the last step is expected to be refused.
    refused: bool,
    /// Text before the body of the last section.
    before_expected: &'a str,
    expected: &'a str,
}

fn parse(case: &str) -> Result<Case<'_>, String> {
    let mut sections: Vec<(&str, &str)> = Vec::new();
    let mut marks =
        case.match_indices("--- ").filter(|(at, _)| *at == 0 || case.as_bytes()[at - 1] == b'\n').peekable();
    let mut before_expected = case;
    while let Some((at, mark)) = marks.next() {
        let end = marks.peek().map_or(case.len(), |(next, _)| *next);
        let (name, text) = case[at + mark.len()..end].split_once('\n').unwrap_or((&case[at + mark.len()..end], ""));
        sections.push((name, text.trim_end()));
        before_expected = &case[..end - text.len()];
    }
    let find = |name: &str| sections.iter().find(|(n, _)| *n == name).map(|(_, text)| *text);
    let Some(("expected" | "refused", expected)) = sections.last() else {
        return Err("the last section must be `expected` or `refused`".to_owned());
    };
    if let Some((name, _)) =
        sections.iter().find(|(n, _)| !["program", "steps", "lower", "expected", "refused"].contains(n))
    {
        return Err(format!("`{name}` is not a section"));
    }
    let program = find("program").ok_or("there is no section `program`")?;
    let passes = find("lower").unwrap_or("").split_whitespace().collect();
    let refused = find("refused").is_some();
    Ok(Case { program, steps: find("steps").unwrap_or(""), passes, refused, before_expected, expected })
}

fn start(program: &str) -> Result<Program, String> {
    if program.starts_with("program ") {
        text::parse(program).map_err(|e| e.to_string())
    } else {
        Ok(sources::program(program))
    }
}

/// Checks the program after a step or pass: it is valid, can be parsed back, and computes the expected
/// results.
fn check(program: &Program, what: &str, expected: &[Vec<f64>], tolerance: f64) -> Result<(), String> {
    verify::verify(program).map_err(|e| format!("after {what}: {e}\n{program}"))?;
    if text::parse(&program.to_string()).as_ref() != Ok(program) {
        return Err(format!("after {what}: the text does not read back\n{program}"));
    }
    let got = outputs(program, LONGEST).ok_or_else(|| format!("after {what}: too long to interpret\n{program}"))?;
    difference(&got, expected, tolerance).map_or(Ok(()), |how| Err(format!("after {what}: {how}\n{program}")))
}

/// Result of a case: the text of the last section, and the error if a step is refused.
fn outcome(case: &Case) -> Result<(String, Option<Illegal>), String> {
    let mut program = start(case.program)?;
    verify::verify(&program).map_err(|e| e.to_string())?;
    let before = outputs(&program, LONGEST).ok_or("too long to interpret")?;
    let steps = parse_steps(case.steps).map_err(|e| e.to_string())?;
    let tolerance = tolerance(case.program, &steps);
    for (at, step) in steps.iter().enumerate() {
        match apply(&program, step) {
            Ok(next) => program = next,
            Err(why) if case.refused && at + 1 == steps.len() => return Ok((why.to_string(), Some(why))),
            Err(why) => return Err(format!("`{step}`: {why}")),
        }
        check(&program, &step.to_string(), &before, tolerance)?;
    }
    if case.passes == ["gpu"] {
        return match lower_gpu(&program) {
            Err(why) if case.refused => Ok((why.to_string(), None)),
            Err(why) => Err(why.to_string()),
            Ok(_) if case.refused => Err("the program is not refused".to_owned()),
            Ok(gpu) => {
                let got = on_gpu(&gpu, ThreadOrder::Forward).map_err(|fault| format!("{fault}\n{gpu}"))?;
                difference(&got, &before, tolerance).map_or(Ok(()), |how| Err(format!("{how}\n{gpu}")))?;
                Ok((gpu.to_string(), None))
            }
        };
    }
    if case.refused {
        return Err("the last step is not refused".to_owned());
    }
    if case.passes == ["all"] {
        program = lower::lower_verified(&program);
        check(&program, "lowering", &before, tolerance)?;
        return Ok((program.to_string(), None));
    }
    for name in &case.passes {
        let pass =
            lower::PASSES.iter().find(|(n, _)| n == name).ok_or_else(|| format!("no pass is called `{name}`"))?;
        program = lower::run_pass(program, pass.1);
        check(&program, name, &before, tolerance)?;
    }
    Ok((program.to_string(), None))
}

/// Whether `BLESS` is set.
fn blessing() -> bool {
    std::env::var("BLESS").is_ok_and(|v| v == "1")
}

#[test]
fn cases_give_what_they_expect() {
    let only = std::env::var("CASE").unwrap_or_default();
    let bless = blessing();
    let mut failures = Vec::new();
    for (name, text) in cases().iter().filter(|(name, _)| name.contains(&only)) {
        let check = || -> Result<(), String> {
            let case = parse(text)?;
            let (got, _) = outcome(&case)?;
            let got = got.trim_end();
            if got == case.expected {
                return Ok(());
            }
            if bless {
                let file = root().join(name).with_extension("txt");
                return fs::write(file, format!("{}{got}\n", case.before_expected)).map_err(|e| e.to_string());
            }
            Err(format!("expected\n{}\n\ngot\n{got}", case.expected))
        };
        if let Err(why) = check() {
            failures.push(format!("{name}: {why}\nrepro: CASE={name} cargo test -p tilewright-ir --test golden\n"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Checks that every step, pass and kind of error has a case.
#[test]
fn cases_cover_steps_passes_and_refusals() {
    if blessing() {
        return;
    }
    let all = cases();
    let folders: BTreeSet<&str> = all.iter().filter_map(|(name, _)| name.split('/').next()).collect();
    let steps = FORMS.iter().map(|(word, _)| (*word).to_owned());
    let passes = lower::PASSES.iter().map(|(name, _)| format!("lower_{name}"));
    let missing: Vec<String> = steps.chain(passes).filter(|f| !folders.contains(f.as_str())).collect();
    assert!(missing.is_empty(), "no cases in tests/golden of {missing:?}");

    let refusals = all.iter().filter_map(|(name, text)| {
        let case = parse(text).unwrap_or_else(|e| panic!("{name}: {e}"));
        outcome(&case).ok()?.1
    });
    let kinds: BTreeSet<&str> = refusals.map(|why| kind(&why)).collect();
    let missing: Vec<&&str> = KINDS.iter().filter(|k| !kinds.contains(**k)).collect();
    assert!(missing.is_empty(), "no cases in tests/golden/illegal of {missing:?}");
}

const KINDS: [&str; 14] = [
    "no loop",
    "cloned",
    "no buffer",
    "not a name",
    "name taken",
    "not divisible",
    "out of range",
    "not serial",
    "not nested",
    "extent depends",
    "dependent",
    "body",
    "buffer",
    "too long",
];

/// Names a kind of error. The compiler requires a row for each new variant, and thus a case.
fn kind(why: &Illegal) -> &'static str {
    KINDS[match why {
        Illegal::NoLoop(..) => 0,
        Illegal::Cloned(..) => 1,
        Illegal::NoBuffer(..) => 2,
        Illegal::NotAName(..) => 3,
        Illegal::NameTaken(..) => 4,
        Illegal::NotDivisible { .. } => 5,
        Illegal::OutOfRange { .. } => 6,
        Illegal::NotSerial { .. } => 7,
        Illegal::NotNested { .. } => 8,
        Illegal::ExtentDepends { .. } => 9,
        Illegal::Dependent { .. } => 10,
        Illegal::Body { .. } => 11,
        Illegal::Buffer { .. } => 12,
        Illegal::TooLong { .. } => 13,
    }]
}
