//! Tests of kernel specifications, look-ahead, tables and metrics through the public interface of `predict`.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::sequence::Completions;
use tilewright_tune::predict::{
    HoldOut, InputFields, KernelSpecification, LookAhead, TrainingTableError, TunedProblem, divide, read_rows, score,
};

/// Kernels whose specifications are in the repository.
const KERNELS: &[&str] = &["ConvAsm1x1U", "ConvAsmBwdWrW1x1", "ConvAsmBwdWrW3x3", "ConvOclDirectFwd1x1"];
/// Environment variable that names a folder with whole tables, named as those of the corpus, to check instead
/// of its samples.
const WHOLE_TABLES: &str = "TILEWRIGHT_MIOPEN_TABLES";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn kernel(name: &str) -> KernelSpecification {
    let path = root().join("kernels/miopen").join(format!("{name}.toml"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    KernelSpecification::parse(&text).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Tables of a kernel with their names.
fn tables(kernel: &str) -> Vec<(String, Vec<u8>)> {
    let folder = std::env::var_os(WHOLE_TABLES).map_or(root().join("tests/corpus/miopen"), PathBuf::from);
    let read = |precision| {
        let path = folder.join(format!("{kernel}.{precision}.csv"));
        (path.display().to_string(), std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    };
    ["fp32", "fp16"].map(read).into()
}

#[test]
fn every_row_of_the_database_is_valid_where_it_says_so() {
    for name in KERNELS {
        let kernel = kernel(name);
        for (path, table) in tables(name) {
            let rows = read_rows(&kernel, &table, &[], Some("valid")).unwrap_or_else(|e| panic!("{path}: {e}"));
            assert!(rows.len() > 100, "{path}");
            for row in &rows {
                let violated: Vec<&str> =
                    kernel.violated(&row.problem, &row.answer).map(|constraint| constraint.name.as_str()).collect();
                assert_eq!(violated.is_empty(), row.group == "1", "{path}: {row:?} violates {violated:?}");
            }
        }
    }
}

#[test]
fn constraints_tell_configurations_apart() {
    for name in KERNELS {
        let kernel = kernel(name);
        let (_, table) = tables(name).swap_remove(0);
        let rows = read_rows(&kernel, &table, &[], None).unwrap();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        let is_valid = |row: &TunedProblem, rng: &mut Xoshiro256PlusPlus| {
            let answer: Vec<u32> =
                kernel.parameters.iter().map(|p| rng.random_range(0..p.values.len() as u32)).collect();
            kernel.is_valid(&row.problem, &answer)
        };
        let n_valid = (0..2000).filter(|at| is_valid(&rows[at % rows.len()], &mut rng)).count();
        assert!(
            (1..1000).contains(&n_valid) || name.contains("Ocl"),
            "{name}: {n_valid} of 2000 random ones are valid"
        );
    }
}

/// Checks that for random problems every choice of allowed values ends in a valid configuration, without a
/// dead end.
#[test]
fn looking_ahead_leads_to_valid_configurations_only() {
    let n_problems = std::env::var("TILEWRIGHT_CASES").map_or(60, |n| n.parse().expect("a number"));
    for name in KERNELS {
        let kernel = kernel(name);
        let rows: Vec<TunedProblem> =
            tables(name).iter().flat_map(|(_, table)| read_rows(&kernel, table, &[], None).unwrap()).collect();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(2);
        let mut n_satisfiable = 0;
        for _ in 0..n_problems {
            // Each field is of another row, which gives sizes that do not fit together as well.
            let problem: Vec<i64> =
                (0..kernel.fields.len()).map(|at| rows[rng.random_range(0..rows.len())].problem[at]).collect();
            let mut look_ahead = LookAhead::new(&kernel, &problem);
            let is_satisfiable = look_ahead.is_satisfiable().expect("small enough to be exact");
            assert_eq!(kernel.unsatisfiable(&problem).is_none(), is_satisfiable);
            n_satisfiable += usize::from(is_satisfiable);
            for _ in 0..5 {
                let mut prefix: Vec<u32> = Vec::new();
                while prefix.len() < kernel.parameters.len() {
                    let allowed = look_ahead.allowed(&prefix);
                    let values: Vec<u32> = (0..allowed.len() as u32).filter(|&v| allowed[v as usize]).collect();
                    assert_eq!(values.is_empty(), !is_satisfiable, "{name}: {problem:?} after {prefix:?}");
                    if values.is_empty() {
                        break;
                    }
                    prefix.push(values[rng.random_range(0..values.len())]);
                }
                let is_whole = prefix.len() == kernel.parameters.len();
                assert!(!is_whole || kernel.is_valid(&problem, &prefix), "{name}: {problem:?}, {prefix:?}");
            }
        }
        assert!(n_satisfiable * 2 > n_problems, "{name}: {n_satisfiable} of {n_problems} problems have a solution");
    }
}

/// Constraints of a kernel that is small enough to enumerate.
const SMALL_CONSTRAINTS: &[&str] = &[
    "a + b <= n",
    "b * c % 3 != 1",
    "product < 12 or d == \"y\"",
    "n / (a - 1) > 1",
    "not (a == c and d == \"x\")",
    "rest in {0, 2}",
    "c <= 2 if d == \"x\" else c >= 2",
    "n % 2 == 0",
    "total > 5",
];

fn small(constraints: &[usize]) -> KernelSpecification {
    let listed: Vec<String> =
        constraints.iter().map(|&at| format!("{{ name = \"{at}\", is = '{}' }}", SMALL_CONSTRAINTS[at])).collect();
    let text = format!(
        r#"
        name = "small"
        fields = [{{ name = "n" }}, {{ name = "half", is = "n / 2" }}]
        parameters = [
            {{ name = "a", values = [1, 2, 3] }},
            {{ name = "b", values = [0, 1, 2, 4] }},
            {{ name = "c", values = [1, 2, 3] }},
            {{ name = "d", values = ["x", "y"] }},
        ]
        definitions = [
            {{ name = "product", is = "a * b * c" }},
            {{ name = "rest", is = "n % b" }},
            {{ name = "total", is = "product + half" }},
        ]
        constraints = [{}]
        "#,
        listed.join(", ")
    );
    KernelSpecification::parse(&text).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// All configurations of a kernel that begin with this prefix.
fn continued(kernel: &KernelSpecification, prefix: &[u32]) -> Vec<Vec<u32>> {
    match kernel.parameters.get(prefix.len()) {
        None => vec![prefix.to_vec()],
        Some(parameter) => (0..parameter.values.len() as u32)
            .flat_map(|value| continued(kernel, &[prefix, &[value]].concat()))
            .collect(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn looking_ahead_is_exact(
        constraints in proptest::sample::subsequence((0..SMALL_CONSTRAINTS.len()).collect::<Vec<_>>(), 0..=4),
        n in -3i64..9,
    ) {
        let kernel = small(&constraints);
        let text = n.to_string();
        let problem = kernel.problem(|_| Some(&text)).unwrap();
        let mut look_ahead = LookAhead::new(&kernel, &problem);
        let mut prefixes: Vec<Vec<u32>> = vec![vec![]];
        while let Some(prefix) = prefixes.pop() {
            if prefix.len() == kernel.parameters.len() {
                continue;
            }
            let allowed = look_ahead.allowed(&prefix);
            for (value, allowed) in (0..).zip(allowed) {
                let next = [&prefix[..], &[value]].concat();
                let is_valid = |answer: &Vec<u32>| kernel.is_valid(&problem, answer);
                prop_assert_eq!(allowed, continued(&kernel, &next).iter().any(is_valid), "{:?}", next);
                prefixes.push(next);
            }
        }
    }

    #[test]
    fn any_text_is_a_table_or_an_error(table in proptest::collection::vec(any::<u8>(), 0..80)) {
        let _ = read_rows(&small(&[]), &table, &[], None);
        let _ = read_rows(&small(&[]), &[b"n,a,b,c,d\n", &table[..]].concat(), &[], None);
    }

    #[test]
    fn any_text_is_a_specification_or_an_error(text in "\\PC{0,60}", cut in 0usize..2000) {
        let _ = KernelSpecification::parse(&text);
        let whole = small(&[0, 1]).text;
        let cut = (0..=cut.min(whole.len())).rev().find(|&at| whole.is_char_boundary(at)).unwrap_or(0);
        let _ = KernelSpecification::parse(&format!("{}{text}", &whole[..cut]));
    }
}

/// Makes a kernel of 24 parameters of eight values under one constraint.
fn wide(constraint: &str, definitions: &str) -> KernelSpecification {
    let parameter = |at: usize| format!("{{ name = \"p{at}\", values = [0, 1, 2, 3, 4, 5, 6, 7] }}");
    let parameters = (0..24).map(parameter).collect::<Vec<_>>().join(", ");
    let text = format!(
        "name = \"wide\"\nfields = [{{ name = \"n\" }}]\nparameters = [{parameters}]\ndefinitions = [{definitions}]\n\
         constraints = [{{ name = \"c\", is = \"{constraint}\" }}]\n"
    );
    KernelSpecification::parse(&text).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// Chooses allowed values at random; `None` if a parameter has none.
fn wander(look_ahead: &mut LookAhead, rng: &mut Xoshiro256PlusPlus) -> Option<Vec<u32>> {
    let mut prefix = Vec::new();
    while prefix.len() < 24 {
        let allowed = look_ahead.allowed(&prefix);
        let values: Vec<u32> = (0..8).filter(|&value| allowed[value as usize]).collect();
        prefix.push(*values.get(rng.random_range(0..values.len().max(1)))?);
    }
    Some(prefix)
}

/// Checks that prefixes with equal partial results are searched once: 8^24 of them would take forever.
#[test]
fn looking_ahead_over_a_long_sum_is_exact_and_quick() {
    let names: Vec<String> = (0..24).map(|at| format!("p{at}")).collect();
    let backwards: Vec<String> = names.iter().rev().cloned().collect();
    let (sum, reversed) = (names.join(" + "), backwards.join(" + "));
    let halves = format!("{} == n - ({})", names[..12].join(" + "), names[12..].join(" + "));
    let squares = names.iter().map(|name| format!("{name} * {name}")).collect::<Vec<_>>().join(" + ");
    let definition = format!("{{ name = \"all\", is = \"{reversed}\" }}");
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
    for (constraint, definitions, satisfiable, not) in [
        (format!("{sum} == n"), "", 100, 169),
        (format!("n == {reversed}"), "", 100, -1),
        (halves, "", 100, 169),
        (format!("{squares} == n and {reversed} <= 100"), "", 200, 1177),
        ("all % 64 == n".to_owned(), definition.as_str(), 63, 64),
        (format!("max({}) * 3 + min(p0, p23) == n", names.join(", ")), "", 28, 29),
    ] {
        let kernel = wide(&constraint, definitions);
        for (n, expected) in [(satisfiable, true), (not, false)] {
            let mut look_ahead = LookAhead::new(&kernel, &[n]).watched(|n_steps| {
                assert!(n_steps < 1 << 20, "{constraint}, {n}: too much is tried");
                std::ops::ControlFlow::Continue(())
            });
            assert_eq!(look_ahead.is_satisfiable(), Some(expected), "{constraint}, {n}");
            let found = wander(&mut look_ahead, &mut rng);
            assert_eq!(found.is_some_and(|found| kernel.is_valid(&[n], &found)), expected, "{constraint}, {n}");
            assert!(look_ahead.is_exact());
        }
        assert_eq!(kernel.unsatisfiable(&[not]), Some("c"));
    }
}

/// Checks that if no prefixes can be merged, the search stops when told to, and complete answers are still
/// valid.
#[test]
fn looking_ahead_that_takes_too_long_is_given_up_and_says_so() {
    let mixed = (1..24).fold("p0".to_owned(), |mixed, at| format!("({mixed} * 31 + p{at}) % 1000003"));
    let kernel = wide(&format!("{mixed} == n"), "");
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(6);
    let (mut n_told, mut n_whole) = (0, 0);
    // No remainder is that large.
    let mut look_ahead = LookAhead::new(&kernel, &[2_000_000]).watched(|n_steps| {
        n_told += 1;
        if n_steps < 1 << 14 { std::ops::ControlFlow::Continue(()) } else { std::ops::ControlFlow::Break(()) }
    });
    assert_eq!((look_ahead.is_satisfiable(), look_ahead.is_exact()), (None, false));
    assert_eq!(wander(&mut look_ahead, &mut rng), None);
    drop(look_ahead);
    assert!(n_told >= 4);
    // One configuration in a thousand is valid.
    let kernel = wide(&format!("{} % 1000 == n", mixed.replace("1000003", "1000000007")), "");
    let mut look_ahead = LookAhead::new(&kernel, &[7]).watched(|_| std::ops::ControlFlow::Break(()));
    for _ in 0..200 {
        if let Some(found) = wander(&mut look_ahead, &mut rng) {
            assert!(kernel.is_valid(&[7], &found));
            n_whole += 1;
        }
    }
    assert!(n_whole < 200 && !look_ahead.is_exact());
}

#[test]
fn the_constraint_to_blame_is_named() {
    let blamed = |constraints: &[usize], n: &str| {
        let kernel = small(constraints);
        let problem = kernel.problem(|_| Some(n)).unwrap();
        kernel.unsatisfiable(&problem).map(str::to_owned)
    };
    assert_eq!(blamed(&[0, 1], "9"), None);
    assert_eq!(blamed(&[1, 7], "3").as_deref(), Some("7"), "alone");
    assert_eq!(blamed(&[0, 8, 2], "1").as_deref(), Some("8"), "together with the one before it");
}

#[test]
fn specifications_are_refused_with_their_place() {
    let check = |text: &str, expected: &str| {
        let error = KernelSpecification::parse(text).err().unwrap_or_else(|| panic!("accepted: {text}")).to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error:?} lacks {expected:?}");
    };
    let with = |rest: &str| {
        format!("name = 'k'\nfields = [{{ name = 'n' }}]\nparameters = [{{ name = 'a', values = [1, 2] }}]\n{rest}\n")
    };
    assert!(KernelSpecification::parse(&with("")).is_ok());
    check("name = ", "line 1: ");
    check("name = 'k'\nfields = []\nparameters = []\n", "there are no fields");
    check(&with("colour = 'red'"), "line 4: unknown field `colour`");
    check(&with("constraints = [{ name = 'c', is = 'a <= m' }]"), "constraint c, position 6: unknown name m");
    check(&with("constraints = [{ name = 'c', is = 'a + 1' }]"), "constraint c is a number, not a condition");
    check(&with("constraints = [{ name = 'c', is = 'a == 1' }, { name = 'c', is = 'a == 2' }]"), "c is declared twice");
    check(&with("definitions = [{ name = 'a', is = '1' }]"), "a is declared twice");
    check(&with("definitions = [{ name = 'in', is = '1' }]"), "\"in\" cannot be a name");
    check(&with("definitions = [{ name = 'x', is = 'y' }, { name = 'y', is = '1' }]"), "definition x, position 1");
    check(&with("equivalence = ['a +']"), "equivalence 1, position 4");
    check(&with("").replace("[1, 2]", "[1, 1]"), "the values of a must be distinct");
    check(&with("").replace("[1, 2]", "[]"), "the values of a must be");
    check(&with("").replace("[1, 2]", "[1, 'two']"), "a list of numbers, or of texts");
}

#[test]
fn tables_are_refused_with_the_line() {
    let kernel = small(&[0]);
    let check = |table: &str, filters: &[(&str, &str)], expected: &str| {
        let filters: Vec<_> = filters.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        let error = read_rows(&kernel, table.as_bytes(), &filters, None).unwrap_err().to_string();
        assert_eq!(error, expected, "{table}");
    };
    let head = "d,n,a,b,c,arch\n";
    let rows = read_rows(&kernel, format!("{head}y,4,1,2,3,x\n").as_bytes(), &[], Some("arch")).unwrap();
    assert_eq!(rows, [TunedProblem { problem: vec![4, 2], answer: vec![0, 2, 2, 1], group: "x".into() }]);
    check("", &[], "there are no rows");
    check(head, &[], "there are no rows");
    check("a,b,c,d\n1,1,1,x\n", &[], "there is no column n; there are a, b, c, d");
    check(&format!("n,{head}1,1,1,1,1,1,1\n"), &[], "column n occurs twice");
    check(&format!("{head}y,4,1,2,3\n"), &[], "line 2: 5 values in 6 columns");
    check(
        &format!("{head}y,4,1,2,3,x\ny,4.5,1,2,3,x\n"),
        &[],
        "line 3: field n cannot be \"4.5\"; it is a whole number",
    );
    check(&format!("{head}y,4,7,2,3,x\n"), &[], "line 2: parameter a cannot be \"7\"; its values are 1, 2, 3");
    check(&format!("{head}y,4,1,2,3,x\n"), &[("arch", "z")], "no row has arch=z; its values are x");
    check(&format!("{head}y,4,1,2,3,x\n"), &[("arc", "x")], "there is no column arc; there are d, n, a, b, c, arch");
    check(&format!("{head}y,1,1,2,3,x\ny,1,1,4,3,x\n"), &[], "constraint 0 holds for none of the 2 rows (a + b <= n)");
    let not_text = read_rows(&kernel, b"d,n,a,b,c\ny,4,1,2,3\n\xff,4,1,2,3\n", &[], None).unwrap_err();
    assert!(matches!(not_text, TrainingTableError::NoText { line: 3 }), "{not_text}");
}

#[test]
fn splits_hold_out_a_tenth_and_keep_groups_together() {
    let row = |at: usize| TunedProblem { problem: vec![at as i64], answer: vec![0], group: (at / 5).to_string() };
    let rows: Vec<TunedProblem> = (0..1000).map(row).collect();
    for split in [HoldOut::Random, HoldOut::ByGroup] {
        let (kept, held_out) = divide(&rows, split, 1);
        let mut all = [&kept[..], &held_out].concat();
        all.sort_unstable();
        assert_eq!(all, (0..1000).collect::<Vec<_>>());
        assert_eq!(divide(&rows, split, 1), (kept.clone(), held_out.clone()));
        assert_ne!(divide(&rows, split, 2).1, held_out);
        assert!((60..150).contains(&held_out.len()), "{}", held_out.len());
        let groups = |places: &[usize]| places.iter().map(|&at| rows[at].group.clone()).collect::<Vec<_>>();
        let is_shared = groups(&held_out).iter().any(|group| groups(&kept).contains(group));
        assert_eq!(is_shared, split == HoldOut::Random);
    }
    assert_eq!(divide(&rows, HoldOut::Random, 1).1.len(), 100);
    // The groups are the same, whatever else a table contains.
    let (few, _) = rows.split_at(500);
    let (all, some) = (divide(&rows, HoldOut::ByGroup, 7).1, divide(few, HoldOut::ByGroup, 7).1);
    assert_eq!(all.into_iter().filter(|&at| at < 500).collect::<Vec<_>>(), some);
}

#[test]
fn scores_count_the_best_answer() {
    let kernel = small(&[0]);
    let row = |n: i64, answer: [u32; 4]| TunedProblem {
        problem: vec![n, n / 2],
        answer: answer.into(),
        group: String::new(),
    };
    let rows = [row(4, [0, 0, 0, 0]), row(4, [1, 1, 1, 1])];
    let answers = vec![vec![vec![2, 3, 0, 0], vec![0, 0, 0, 1]], vec![vec![1, 1, 1, 1]]];
    let score = score(&kernel, &rows.iter().collect::<Vec<_>>(), &answers);
    assert_eq!((score.average_accuracy, score.perfect, score.perfect_equivalent), (0.875, 0.5, 0.5));
    // a + b = 3 + 4 > 4 for one of the three.
    assert!((score.valid - 2.0 / 3.0).abs() < 1e-12);
}

#[test]
fn labels_that_compile_to_the_same_code_are_equivalent() {
    let kernel = kernel("ConvOclDirectFwd1x1");
    let problem = |n_inputs: &str, n_outputs: &str, width: &str, direction: &str| {
        let values = |name: &str| {
            Some(match name {
                "n_inputs" => n_inputs,
                "n_outputs" => n_outputs,
                "in_width" | "out_width" => width,
                "in_height" | "out_height" => "6",
                "data_type" => "FP32",
                "direction" => direction,
                "arch" => "gfx900",
                _ => "1",
            })
        };
        kernel.problem(values).unwrap_or_else(|e| panic!("{e}"))
    };
    let same = |problem: &[i64], a: [&str; 9], b: [&str; 9]| {
        let index = |(parameter, value): (usize, &str)| {
            let values = &kernel.parameters[parameter].values;
            values.iter().position(|v| v == value).unwrap_or_else(|| panic!("no value {value}")) as u32
        };
        let [a, b] = [a, b].map(|answer| answer.into_iter().enumerate().map(index).collect::<Vec<_>>());
        kernel.canonical(problem, &a) == kernel.canonical(problem, &b)
    };
    // All channels are divisible by 16 and the direction is forward: inputs beyond all of them make no
    // difference, nor does the group.
    let plain = problem("64", "96", "6", "F");
    assert!(same(
        &plain,
        ["1", "64", "1", "1", "1", "1", "32", "64", "0"],
        ["1", "64", "1", "1", "1", "1", "32", "2048", "0"]
    ));
    assert!(same(
        &plain,
        ["1", "64", "1", "1", "1", "1", "64", "64", "0"],
        ["8", "8", "8", "8", "1", "1", "32", "64", "1"]
    ));
    assert!(!same(
        &plain,
        ["1", "64", "1", "1", "1", "1", "16", "64", "0"],
        ["1", "64", "1", "1", "1", "1", "32", "64", "0"]
    ));
    // Tiles are halved until they divide: 8 of 12 inputs as 4, 16 of 24 outputs as 8, 4 of 6 pixels as 2.
    let other = problem("12", "24", "6", "B");
    assert!(same(
        &other,
        ["1", "64", "1", "1", "0", "4", "16", "8", "0"],
        ["1", "64", "1", "1", "0", "2", "8", "4", "0"]
    ));
    assert!(!same(
        &other,
        ["1", "64", "1", "1", "0", "4", "16", "8", "0"],
        ["1", "128", "1", "1", "0", "4", "16", "8", "0"]
    ));
}

#[test]
fn a_model_is_given_the_fields_that_vary() {
    let kernel = kernel("ConvAsm1x1U");
    let (_, table) = tables("ConvAsm1x1U").swap_remove(0);
    let rows = read_rows(&kernel, &table, &[("arch".into(), "gfx900".into())], None).unwrap();
    let inputs = InputFields::of(&kernel, &rows.iter().collect::<Vec<_>>());
    let vocabulary = inputs.vocabulary(&kernel);
    let names: Vec<&str> = vocabulary.fields.iter().map(|field| field.name.as_str()).collect();
    assert!(names.contains(&"n_inputs") && names.contains(&"direction"), "{names:?}");
    assert!(!names.contains(&"data_type") && !names.contains(&"bias") && !names.contains(&"arch"), "{names:?}");

    let (again, read) = InputFields::read(&inputs.describe(&kernel), &vocabulary).unwrap();
    assert_eq!((again.name.as_str(), &read), ("ConvAsm1x1U", &inputs));
    let given = |changes: &[(&str, &str)]| {
        let mut given: Vec<(String, String)> =
            ["n_inputs", "in_height", "in_width", "n_outputs", "out_height", "out_width"]
                .iter()
                .chain(&["batch_sz", "kernel_stride_h", "kernel_stride_w"])
                .map(|name| ((*name).to_owned(), "1".to_owned()))
                .collect();
        given.push(("direction".into(), "F".into()));
        for (name, value) in changes {
            given.retain(|(known, _)| known != name);
            given.extend((!value.is_empty()).then(|| ((*name).to_owned(), (*value).to_owned())));
        }
        inputs.ask(&kernel, &given).map(|problem| inputs.problem(&problem).len()).map_err(|error| error.to_string())
    };
    assert_eq!(given(&[("data_type", "FP32")]), Ok(names.len()));
    let refused = |changes: &[(&str, &str)], expected: &str| {
        let error = given(changes).unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    refused(&[("n_inputs", "")], "field n_inputs is missing");
    refused(&[("n_inputs", "many")], "field n_inputs cannot be \"many\"; it is a whole number");
    refused(&[("direction", "W")], "field direction cannot be \"W\"; it is F, B");
    refused(&[("colour", "1")], "ConvAsm1x1U has no field colour");
    refused(&[("data_type", "FP16")], "learnt only from data_type=FP32; it cannot answer for data_type=FP16");
}
