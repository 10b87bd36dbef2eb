use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::{Value as Json, json};

use super::*;

fn product(n: u64, parts: &[(&str, usize)]) -> Vec<Parameter> {
    parts.iter().map(|&(name, parts)| Parameter::factorization(name, n, parts)).collect()
}

fn small() -> Space {
    let parameters = vec![
        Parameter::ordinal("mr", [2, 4, 8, 16]),
        Parameter::categorical("pack", &["none", "a"]),
        Parameter::ordinal("nr", [16, 32, 48]),
        Parameter::factorization("k", 12, 2),
        Parameter::permutation("order", &["i", "j", "k"]),
    ];
    let constraints =
        vec![Constraint::new("registers", "mr * nr <= 256", &["nr", "mr"], |v| v[0].int() * v[1].int() <= 256)];
    Space::new("small", parameters, constraints).unwrap()
}

/// Checks that a declared space reads configurations as an enumerated one does, and evaluates constraints for
/// no others.
#[test]
fn declared_spaces_read_configurations_before_they_are_enumerated() {
    let n_asked = Arc::new(AtomicU64::new(0));
    let parameters = vec![Parameter::ordinal("a", 1..=1000), Parameter::ordinal("b", 1..=1000)];
    let asked = Arc::clone(&n_asked);
    let constraint = Constraint::new("sum", "a + b = 1000", &["a", "b"], move |v| {
        asked.fetch_add(1, Ordering::Relaxed);
        v[0].int() + v[1].int() == 1000
    });
    let space = Space::declare("lazy", parameters.clone(), vec![constraint]).unwrap();
    let config = space.config_from_json(&json!({"a": 1, "b": 999})).unwrap();
    assert!(space.config_from_json(&json!({"a": 1, "b": 998})).is_err());
    assert_eq!(space.int(&config, "b"), 999);
    assert!(!space.is_enumerated() && n_asked.load(Ordering::Relaxed) == 2);
    assert!(space.contains(&config));
    assert_eq!(space.size(), 999);
    assert!(space.is_enumerated());

    let never = Constraint::new("never", "a > 1000", &["a"], |v| v[0].int() > 1000);
    let empty = Space::declare("empty", parameters, vec![never]).unwrap();
    assert!(empty.config_from_json(&json!({"a": 1, "b": 1})).is_err());
    assert!(matches!(empty.enumerate(), Err(SpaceError::NothingLegal { .. })));
}

fn check_size(parameters: Vec<Parameter>, expected: u128) {
    let space = Space::new("size", parameters, vec![]).unwrap();
    assert_eq!(space.size(), expected);
    for index in [0, expected / 3, expected - 1] {
        assert_eq!(space.index_of(&space.config_at(index)), Some(index));
    }
}

#[test]
fn gemm_sizes_are_exact() {
    let parts = [("m", 4), ("k", 2), ("n", 4)];
    check_size(product(512, &parts), 484_000);
    check_size(product(1024, &parts), 899_756);
    check_size(product(2048, &parts), 1_589_952);
}

#[test]
fn conv_sizes_are_exact() {
    let conv = |out_channels, out_side, in_channels, filter| {
        let split = Parameter::factorization;
        vec![
            split("out_channel", out_channels, 4),
            split("out_row", out_side, 4),
            split("out_column", out_side, 4),
            split("in_channel", in_channels, 2),
            split("filter_row", filter, 2),
            split("filter_column", filter, 2),
            Parameter::ordinal("auto_unroll_max_step", [0, 512, 1500]),
            Parameter::boolean("unroll_explicit"),
        ]
    };
    check_size(conv(64, 56, 64, 3), 90_316_800);
    check_size(conv(128, 28, 128, 3), 36_864_000);
    check_size(conv(256, 14, 256, 3), 9_123_840);
    check_size(conv(512, 7, 512, 3), 844_800);
}

#[test]
fn large_domains_cost_nothing() {
    check_size(vec![Parameter::factorization("m", (1 << 30) * 243, 6)], 324_632 * 252);
    check_size((0..6).map(|i| Parameter::ordinal(&format!("p{i}"), 0..1000)).collect(), 10u128.pow(18));
    let loops: Vec<String> = (0..20).map(|i| format!("l{i}")).collect();
    let loops: Vec<&str> = loops.iter().map(String::as_str).collect();
    check_size(vec![Parameter::permutation("order", &loops)], (1..=20).product());
    check_size(vec![], 1);
}

#[test]
fn the_indices_are_a_bijection_onto_the_legal_configurations() {
    let space = small();
    let by_index: Vec<Config> = (0..space.size()).map(|index| space.config_at(index)).collect();
    let mut legal = HashSet::new();
    let lens: Vec<u64> = (0..space.n_parameters()).map(|parameter| space.n_values(parameter)).collect();
    for mut i in 0..lens.iter().product::<u64>() {
        let ranks: Vec<u64> = lens
            .iter()
            .map(|len| {
                let rank = i % len;
                i /= len;
                rank
            })
            .collect();
        let config = Config::new(ranks);
        assert_eq!(space.contains(&config), space.violated(&config).is_none());
        if space.contains(&config) {
            legal.insert(config);
        }
    }
    assert_eq!(by_index.iter().cloned().collect::<HashSet<_>>(), legal);
    assert_eq!(by_index.len(), legal.len());
    for (index, config) in by_index.iter().enumerate() {
        assert_eq!(space.index_of(config), Some(index as u128));
    }
    assert_eq!(space.index_of(&Config::new([0, 0])), None);
    assert_eq!(space.index_of(&Config::new([9, 0, 0, 0, 0])), None);
    assert_eq!(space.index_of(&Config::new([0, 9, 0, 0, 0])), None);
}

#[test]
fn chains_of_constraints_stay_small() {
    // 64^12 combinations, of which a list of the legal ones would not fit in memory.
    let names: Vec<String> = (0..12).map(|i| format!("p{i}")).collect();
    let parameters = names.iter().map(|name| Parameter::ordinal(name, 0..64)).collect();
    let ascending = |pair: &[String]| {
        Constraint::new("ascending", "left <= right", &[&pair[0], &pair[1]], |v| v[0].int() <= v[1].int())
    };
    let space = Space::new("chain", parameters, names.windows(2).map(ascending).collect()).unwrap();
    // Multisets of 12 out of 64: C(75, 12).
    assert_eq!(space.size(), 26_123_889_412_400);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    for _ in 0..1000 {
        let config = space.sample(&mut rng);
        assert!(space.violated(&config).is_none() && config.ranks().is_sorted());
        assert_eq!(space.config_at(space.index_of(&config).unwrap()), config);
    }
}

#[test]
fn neighbours_follow_each_topology_and_the_constraints() {
    let space = small();
    let config = space
        .config_from_json(&json!({"mr": 8, "pack": "none", "nr": 32, "k": [6, 2], "order": ["i", "j", "k"]}))
        .unwrap();
    let changed: HashSet<String> = space
        .neighbours(&config)
        .iter()
        .map(|neighbour| {
            let differs = |name: &&str| space.value(neighbour, name) != space.value(&config, name);
            let names: Vec<&str> = space.names().filter(differs).collect();
            assert_eq!(names.len(), 1, "one parameter at a time");
            format!("{}={}", names[0], space.value(neighbour, names[0]))
        })
        .collect();
    let expected = [
        "mr=4",
        "nr=16",
        "pack=\"a\"",
        "k=[12,1]",
        "k=[3,4]",
        "k=[2,6]",
        r#"order=["j","i","k"]"#,
        r#"order=["i","k","j"]"#,
    ];
    assert_eq!(changed, expected.map(String::from).into());
}

#[test]
fn values_are_read_by_name() {
    let space = small();
    let json = json!({"mr": 4, "pack": "a", "nr": 48, "k": [3, 4], "order": ["k", "i", "j"]});
    let config = space.config_from_json(&json).unwrap();
    assert_eq!(space.config_to_json(&config).to_string(), json.to_string());
    assert_eq!(space.int(&config, "nr"), 48);
    assert_eq!(space.text(&config, "pack"), "a");
    assert_eq!(space.factors(&config, "k"), [3, 4]);
    assert_eq!(space.order(&config, "order"), ["k", "i", "j"]);
}

fn check_config_error(change: Json, expected: &str) {
    let mut json = json!({"mr": 4, "pack": "a", "nr": 48, "k": [3, 4], "order": ["k", "i", "j"]});
    match change {
        Json::Object(change) => {
            for (name, value) in change {
                match value {
                    Json::Null => drop(json.as_object_mut().unwrap().shift_remove(&name)),
                    value => json[name] = value,
                }
            }
        }
        other => json = other,
    }
    assert_eq!(small().config_from_json(&json).unwrap_err().to_string(), expected);
}

#[test]
fn wrong_configurations_are_refused_with_what_is_allowed() {
    check_config_error(json!([1]), "a configuration is an object from parameter to value, not [1]");
    check_config_error(json!({"x": 1}), "unknown parameter x; the space has mr, pack, nr, k, order");
    check_config_error(json!({"mr": null}), "parameter mr is missing");
    check_config_error(json!({"mr": 3}), "parameter mr cannot be 3; allowed: 2, 4, 8, 16");
    check_config_error(json!({"mr": 4.5}), "parameter mr cannot be 4.5; allowed: 2, 4, 8, 16");
    check_config_error(json!({"pack": "b"}), r#"parameter pack cannot be "b"; allowed: "none", "a""#);
    let factors = "allowed: 2 positive integers whose product is 12";
    for value in [json!([3, 5]), json!([12]), json!([12, 1, 1]), json!([-3, -4]), json!([0, 12]), json!(12)] {
        check_config_error(json!({"k": value}), &format!("parameter k cannot be {value}; {factors}"));
    }
    for value in [json!(["i", "j"]), json!(["i", "j", "j"]), json!(["i", "j", "x"]), json!(["i", "j", "k", "k"])] {
        let expected = format!(r#"parameter order cannot be {value}; allowed: an order of ["i","j","k"]"#);
        check_config_error(json!({"order": value}), &expected);
    }
    let expected = "constraint registers (mr * nr <= 256) does not hold for nr=48, mr=16";
    check_config_error(json!({"mr": 16}), expected);
}

#[test]
fn a_listing_is_a_space_of_its_own() {
    let space = small();
    let listed: Vec<Config> = (0..space.size()).step_by(7).map(|index| space.config_at(index)).collect();
    let part = space.clone().only(listed.iter().chain([&listed[3], &Config::new([9])])).unwrap();
    assert_eq!(part.size(), listed.len() as u128);
    let by_index: HashSet<Config> = (0..part.size()).map(|index| part.config_at(index)).collect();
    assert_eq!(by_index, listed.iter().cloned().collect());
    for index in 0..space.size() {
        let config = space.config_at(index);
        assert_eq!(part.contains(&config), by_index.contains(&config));
        assert_eq!(part.violated(&config).is_none(), by_index.contains(&config));
    }
    assert_eq!(space.only([]).unwrap_err().to_string(), "no configuration satisfies listed (one of none)");
}

#[test]
fn the_parts_by_a_parameter_are_the_space() {
    let space = small();
    for parameter in 0..space.n_parameters() {
        let parts = (0..space.n_values(parameter)).filter_map(|rank| space.part(parameter, rank));
        let all: Vec<Config> =
            parts.flat_map(|p| (0..p.size()).map(move |at| p.config_at(at)).collect::<Vec<_>>()).collect();
        assert_eq!(all.len() as u128, space.size());
        assert_eq!(all.into_iter().collect::<HashSet<_>>(), (0..space.size()).map(|at| space.config_at(at)).collect());
    }
}

#[test]
fn the_description_holds_parameters_constraints_and_size() {
    assert_eq!(
        small().describe().to_string(),
        concat!(
            r#"{"parameters":[{"name":"mr","kind":"ordinal","values":[2,4,8,16]},"#,
            r#"{"name":"pack","kind":"categorical","values":["none","a"]},"#,
            r#"{"name":"nr","kind":"ordinal","values":[16,32,48]},"#,
            r#"{"name":"k","kind":"factorization","n":12,"parts":2},"#,
            r#"{"name":"order","kind":"permutation","values":["i","j","k"]}],"#,
            r#""constraints":[{"name":"registers","text":"mr * nr <= 256"}],"size":648,"combinations":864}"#
        )
    );
}

/// Checks that a condition that is decided by the sizes still ties its parameters, so that configurations
/// keep their indices.
#[test]
fn a_constraint_over_parameters_ties_those_that_it_does_not_read() {
    let parameters =
        || vec![Parameter::ordinal("a", [1, 2, 3]), Parameter::ordinal("b", [1, 2]), Parameter::ordinal("c", [1, 2])];
    let space = |text: &str| {
        let over = [&parameters()[..1], &parameters()[2..]].concat();
        let constraint = Constraint::parse_over("fits", text, &over).unwrap();
        assert_eq!(constraint.parameters, ["a", "c"]);
        Space::new("over", parameters(), vec![constraint]).unwrap()
    };
    let all = |space: &Space| (0..space.size()).map(|at| space.config_at(at)).collect::<Vec<_>>();
    let (decided, read) = (space("7 <= 8"), space("7 <= 8 or a * c < 0"));
    assert_eq!((decided.size(), all(&decided)), (12, all(&read)));
    assert_eq!(space("a * c <= 2").size(), 2 * 3);
    assert!(Constraint::parse_over("fits", "b == 1", &parameters()[..1]).is_err());
}

#[test]
fn constraints_read_parameters_that_are_places_of_a_list() {
    let place = |name: &str| Parameter::ordinal(name, [16, 32, 64]);
    let size = |text: &str| {
        let parameters = vec![place("sizes[0]"), place("sizes[1]"), place("order[0][1]")];
        let constraint = Constraint::parse("fits", text, &parameters).map_err(|error| error.to_string())?;
        Ok::<_, String>(Space::new("s", parameters, vec![constraint]).unwrap().size())
    };
    assert_eq!(size("sizes[0] * sizes[1] <= 1024"), Ok(6 * 3));
    assert_eq!(size("sizes[0] == sizes[ 1 ] == order[0][1]"), Ok(3));
    // Other names and items of other lists are not confused with these.
    assert_eq!(size("[sizes[0], 1][1] == 1"), Ok(27));
    assert_eq!(size("sizes[1] == 16 and sum(sizes[0] for sizes in [[5]]) == 5"), Ok(9));
    for unknown in ["sizes[2] > 1", "sizes > 1", "sizes[-1] > 1", "sizes[True] > 1"] {
        let error = size(unknown).unwrap_err();
        assert!(error.starts_with("position 1: unknown name sizes; "), "{error}");
    }
}

fn check_space_error(parameters: Vec<Parameter>, constraints: Vec<Constraint>, expected: &str) {
    assert_eq!(Space::new("bad", parameters, constraints).unwrap_err().to_string(), expected);
}

#[test]
fn impossible_spaces_are_refused() {
    let a = || Parameter::ordinal("a", [1, 2]);
    let never = |name| Constraint::new(name, "false", &["a"], |_| false);
    check_space_error(vec![a(), a()], vec![], "parameter a is declared twice");
    check_space_error(vec![Parameter::ordinal("a", [1, 1])], vec![], "parameter a lists 1 twice");
    check_space_error(vec![Parameter::ordinal("a", [])], vec![], "parameter a has no feasible value");
    check_space_error(vec![Parameter::factorization("a", 0, 2)], vec![], "parameter a has no feasible value");
    check_space_error(vec![Parameter::factorization("a", 4, 0)], vec![], "parameter a has no feasible value");
    check_space_error(vec![Parameter::factorization("a", 1 << 63, 99)], vec![], "too many combinations of a to number");
    let many = (0..140).map(|at| Parameter::ordinal(&format!("b{at}"), [0, 1])).collect();
    let names = "b0, b1, b2, b3, b4, b5, b6, b7, b8, b9 and 130 more";
    check_space_error(many, vec![], &format!("too many combinations of {names} to number"));
    check_space_error(vec![a()], vec![never("x"), never("y")], "no configuration satisfies x (false)");
    let is = |name, value| Constraint::new(name, "a is it", &["a"], move |v| v[0].int() == value);
    let expected = "no configuration satisfies two (a is it) together with one";
    check_space_error(vec![a()], vec![is("one", 1), is("two", 2), never("x")], "no configuration satisfies x (false)");
    check_space_error(vec![a()], vec![is("one", 1), is("two", 2)], expected);
    let reads = |names: &[&str]| Constraint::new("c", "true", names, |_| true);
    check_space_error(vec![a()], vec![reads(&["z"])], "constraint c reads the unknown parameter z");
    check_space_error(vec![a()], vec![reads(&[])], "constraint c reads no parameter");
    let large = Parameter::factorization("large", (1 << 30) * 243, 6);
    let limit = 1 << 22;
    let tied = Constraint::new("c", "true", &["large"], |_| true);
    check_space_error(vec![large], vec![tied], &too_many(limit, "large"));
}

fn too_many(limit: u64, names: &str) -> String {
    let mend = "list fewer values, or let each constraint read fewer parameters";
    format!("more than {limit} combinations of {names} to check against their constraints ({mend})")
}

#[test]
fn components_too_large_to_enumerate_are_refused() {
    let parameters = ["a", "b", "c"].map(|name| Parameter::ordinal(name, 0..1000)).to_vec();
    let odd =
        Constraint::new("odd", "a + b + c odd", &["a", "b", "c"], |v| v.iter().map(|v| v.int()).sum::<i64>() % 2 == 1);
    let limit = 1 << 26;
    check_space_error(parameters, vec![odd], &too_many(limit, "a, b, c"));
}

/// Random spaces of up to four small parameters under random relations between pairs of them.
fn any_space() -> impl Strategy<Value = Space> {
    let parameter = prop_oneof![
        (1u64..40, 1usize..4).prop_map(|(n, parts)| Domain::Factorization { n, parts }),
        (1i64..6).prop_map(|n| Domain::Ordinal((0..n).collect())),
        (1usize..4).prop_map(|n| Domain::Categorical((0..n).map(|i| i.to_string()).collect())),
        (1usize..4).prop_map(|n| Domain::Permutation((0..n).map(|i| i.to_string()).collect())),
    ];
    let relation = (0usize..4, 0usize..4, 1usize..5);
    (prop::collection::vec(parameter, 1..5), prop::collection::vec(relation, 0..4)).prop_filter_map(
        "something is legal",
        |(domains, relations)| {
            let name = |i: usize| format!("p{}", i % domains.len());
            let parameters = domains.iter().enumerate().map(|(i, d)| Parameter::new(&name(i), d.clone()));
            let constraint = |(a, b, modulus): (usize, usize, usize)| {
                Constraint::new("c", "text", &[&name(a), &name(b)], move |v| {
                    let text = format!("{}{}", v[0], v[1]);
                    text.bytes().map(usize::from).sum::<usize>().is_multiple_of(modulus)
                })
            };
            Space::new("any", parameters.collect(), relations.into_iter().map(constraint).collect()).ok()
        },
    )
}

proptest! {
    #[test]
    fn every_space_counts_numbers_and_connects_what_is_legal(space in any_space()) {
        let lens: Vec<u64> = (0..space.n_parameters()).map(|parameter| space.n_values(parameter)).collect();
        let total = lens.iter().product::<u64>();
        prop_assume!(total < 20_000);
        let config_of = |mut i: u64| {
            let digit = |len: &u64| { let rank = i % len; i /= len; rank };
            Config::new(lens.iter().map(digit).collect::<Vec<_>>())
        };
        let legal: Vec<Config> = (0..total).map(config_of).filter(|config| space.violated(config).is_none()).collect();
        prop_assert_eq!(space.size(), legal.len() as u128);
        let mut indices: Vec<u128> = legal.iter().map(|config| space.index_of(config).unwrap()).collect();
        indices.sort();
        prop_assert!(indices.iter().copied().eq(0..space.size()));
        let changes = |a: &Config, b: &Config| a.ranks().iter().zip(b.ranks()).filter(|(a, b)| a != b).count();
        for i in (0..total).step_by(1 + total as usize / 20) {
            let config = config_of(i);
            let nearest = space.nearest(&config);
            let fewest = legal.iter().map(|other| changes(other, &config)).min().unwrap();
            prop_assert!(space.contains(&nearest));
            prop_assert_eq!(changes(&nearest, &config), fewest);
        }
        for config in legal.iter().take(20) {
            prop_assert_eq!(&space.config_from_json(&space.config_to_json(config)).unwrap(), config);
            prop_assert_eq!(&space.config_at(space.index_of(config).unwrap()), config);
            for neighbour in space.neighbours(config) {
                prop_assert!(space.neighbours(&neighbour).contains(config), "neighbourhood is symmetric");
            }
        }
    }
}

#[test]
fn values_of_another_space_become_the_nearest_ones() {
    let check = |parameter: Parameter, found: Json, expected: Option<Json>| {
        let space = Space::new("one", vec![parameter], vec![]).unwrap();
        let name = space.names().next().unwrap().to_owned();
        let carried =
            space.nearest_to_json(&json!({ name.clone(): found })).map(|c| space.config_to_json(&c)[&name].clone());
        assert_eq!(carried, expected, "{found}");
    };
    let tiles = |n| Parameter::factorization("m", n, 4);
    check(tiles(1024), json!([8, 4, 4, 8]), Some(json!([8, 4, 4, 8])));
    check(tiles(512), json!([8, 4, 4, 8]), Some(json!([4, 4, 4, 8])));
    check(tiles(4096), json!([8, 4, 4, 8]), Some(json!([32, 4, 4, 8])));
    check(tiles(7), json!([8, 1, 1, 8]), Some(json!([1, 1, 1, 7])));
    check(tiles(1), json!([8, 4, 4, 8]), Some(json!([1, 1, 1, 1])));
    for wrong in [json!([8, 4, 32]), json!([0, 1, 1, 1]), json!(8), json!(["a", 1, 1, 1])] {
        check(tiles(512), wrong, None);
    }
    let blocks = || Parameter::ordinal("b", [0, 1, 6, 16]);
    check(blocks(), json!(6), Some(json!(6)));
    check(blocks(), json!(3), Some(json!(6)));
    check(blocks(), json!(9), Some(json!(6)));
    check(blocks(), json!(1_000_000), Some(json!(16)));
    check(blocks(), json!(-5), Some(json!(0)));
    check(Parameter::categorical("p", &["none", "a"]), json!("a"), Some(json!("a")));
    check(Parameter::categorical("p", &["none", "a"]), json!("b"), None);
    check(Parameter::permutation("o", &["i", "j"]), json!(["j", "i"]), Some(json!(["j", "i"])));
    check(Parameter::permutation("o", &["i", "j"]), json!(["j", "k"]), None);
    let space = small();
    assert_eq!(space.nearest_to_json(&json!({"mr": 2})), None, "parameters are missing");
    assert_eq!(space.nearest_to_json(&json!(3)), None);
}

#[test]
fn what_a_configuration_may_lack_has_its_first_value() {
    let parameters =
        vec![Parameter::ordinal("n", [1, 2]), Parameter::categorical("new", &["old way", "new way"]).optional()];
    let space = Space::new("space", parameters, vec![]).unwrap();
    let expected = space.config_from_json(&json!({"n": 2, "new": "old way"})).unwrap();
    assert_eq!(space.config_from_json(&json!({"n": 2})).unwrap(), expected);
    assert_eq!(space.nearest_to_json(&json!({"n": 3})).unwrap(), expected);
    assert_eq!(space.config_from_json(&json!({"new": "old way"})).unwrap_err().to_string(), "parameter n is missing");
    assert!(space.part(0, 1).unwrap().is_optional(1));
}

/// Space of these parameters under constraints given as expressions, and the same space with functions.
fn by_expressions(parameters: &[Parameter], texts: &[&str]) -> Result<Space, SpaceError> {
    let constraint = |text: &&str| Constraint::parse(text, text, parameters).unwrap_or_else(|e| panic!("{text}: {e}"));
    Space::new("expressions", parameters.to_vec(), texts.iter().map(constraint).collect())
}

#[test]
fn constraints_may_be_expressions() {
    let space = by_expressions(
        &small().axes.iter().map(|a| Parameter::new(&a.name, a.domain.clone())).collect::<Vec<_>>(),
        &["mr * nr <= 256", "pack == 'a' or k[0] > 1", "order[0] != 'k' if pack == 'none' else len(order) == 3"],
    )
    .unwrap();
    let holds = |config: &Config| {
        let (mr, nr, k) = (space.int(config, "mr"), space.int(config, "nr"), space.factors(config, "k"));
        let is_packed = space.text(config, "pack") == "a";
        mr * nr <= 256 && (is_packed || k[0] > 1) && (is_packed || space.order(config, "order")[0] != "k")
    };
    let all: u64 = (0..space.n_parameters()).map(|at| space.n_values(at)).product();
    assert!(u128::from(all) > space.size());
    let n_legal = (0..space.n_values(0))
        .flat_map(|a| (0..space.n_values(1)).map(move |b| (a, b)))
        .flat_map(|(a, b)| (0..space.n_values(2)).map(move |c| (a, b, c)))
        .flat_map(|(a, b, c)| (0..space.n_values(3)).map(move |d| (a, b, c, d)))
        .flat_map(|(a, b, c, d)| (0..space.n_values(4)).map(move |e| Config::new([a, b, c, d, e])))
        .filter(|config| {
            assert_eq!(holds(config), space.contains(config) && space.violated(config).is_none());
            holds(config)
        })
        .count();
    assert_eq!(space.size(), n_legal as u128);
    let error =
        space.config_from_json(&json!({"mr": 16, "pack": "a", "nr": 48, "k": [1, 12], "order": ["i", "j", "k"]}));
    assert!(matches!(error, Err(ConfigError::Violated { constraint, .. }) if constraint == "mr * nr <= 256"));
}

#[test]
fn texts_that_are_numbers_or_yes_and_no_are_read_as_such() {
    let parameters = [
        Parameter::of_data("alpha", &crate::expression::list("[0.5, 1.0, 2.0]").unwrap()),
        Parameter::of_data("on", &crate::expression::list("[True, False]").unwrap()),
        Parameter::of_data("tile", &crate::expression::list("[2**i for i in range(4)]").unwrap()),
        Parameter::boolean("own"),
    ];
    assert_eq!(parameters[2].domain, Domain::Ordinal(vec![1, 2, 4, 8]));
    let unsorted = |text: &str| Parameter::of_data("x", &crate::expression::list(text).unwrap()).domain;
    assert_eq!(unsorted("[4, 1, 8]"), Domain::Ordinal(vec![1, 4, 8]));
    assert_eq!(unsorted("[8, 4, 1]"), Domain::Ordinal(vec![8, 4, 1]));
    assert_eq!(unsorted("[1, 0.25, 0.5]"), unsorted("[0.25, 0.5, 1]"));
    assert_eq!(unsorted("['b', 'a', 1]"), Domain::Categorical(["b", "a", "1"].map(String::from).to_vec()));
    let space = by_expressions(&parameters, &["alpha * tile <= 2 or not on", "own == on"]).unwrap();
    // With `on`: 2 + 2 + ... pairs whose product is at most 2, each with one value of `own`.
    assert_eq!(space.size(), (3 + 2 + 1) + 3 * 4);
    assert_eq!(space.config_to_json(&space.config_at(0))["on"], "True");
}

/// Checks that partial results replace the 10⁹ single combinations.
#[test]
fn a_space_of_a_billion_combinations_is_built_at_once() {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
    let parameters: Vec<Parameter> = names.iter().map(|name| Parameter::ordinal(name, 1..=10)).collect();
    let texts = [
        "a * b * c * d <= 1000",
        "a + b + c + d + e + f + g + h + i <= 40",
        "e * f % 2 == 0",
        "max(a, b, c) >= g",
        "32 <= h * i < 64 or h == i",
        "a % 2 == 0 or b in [1, 2, 4, 8]",
        "c <= d",
        "not (f == 1 and g == 1)",
    ];
    let start = std::time::Instant::now();
    let space = by_expressions(&parameters, &texts).unwrap();
    eprintln!("{} of 10^9 in {:.3} s", space.size(), start.elapsed().as_secs_f64());
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    for _ in 0..100 {
        let config = space.sample(&mut rng);
        assert!(space.violated(&config).is_none());
        assert_eq!(space.config_at(space.index_of(&config).unwrap()), config);
    }
}

/// Checks that of a remainder only the remainders of partial results count, and that too many are refused
/// before most are tried.
#[test]
fn remainders_of_a_trillion_combinations_are_counted_or_refused_at_once() {
    let names = ["a", "b", "c", "d", "e", "f"];
    let parameters: Vec<Parameter> = names.iter().map(|name| Parameter::ordinal(name, 0..100)).collect();
    let start = std::time::Instant::now();
    // Multiples of 7 are 15 of 100; a product leaves each other remainder equally often.
    let products = by_expressions(&parameters, &["a * b * c * d * e * f % 7 == 0"]).unwrap();
    assert_eq!(products.size(), 100u128.pow(6) - 85u128.pow(6));
    let sums = by_expressions(&parameters, &["(3 * a + b - c + 11 * d * 5 + e + f) % 100 == 7"]).unwrap();
    assert_eq!(sums.size(), 100u128.pow(5));
    let parameters = ["a", "b", "c"].map(|name| Parameter::ordinal(name, 0..10_000));
    let error = by_expressions(&parameters, &["(a + b * 10**4 + c * 10**8) % 1000003 == 5"]).unwrap_err();
    assert!(matches!(error, SpaceError::TooManyToEnumerate { .. }), "{error}");
    assert!(start.elapsed().as_secs() < 10, "{:.1} s", start.elapsed().as_secs_f64());
}

/// Checks that texts that are all lists are lists to constraints, as in a space of Python's.
#[test]
fn constraints_read_items_of_values_that_are_lists() {
    let of = |name: &str, values: &str| Parameter::of_data(name, &crate::expression::list(values).unwrap());
    let parameters = [of("n", "[[1, 2], [2, 3], [4, 1]]"), of("m", "[[1], [2, 'x'], []]")];
    let legal = |text: &str| {
        let space = by_expressions(&parameters, &[text]).unwrap();
        (0..space.size()).map(|at| space.value(&space.config_at(at), "n").text().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(legal("n[0] > 1 and len(m) == 2"), ["[2, 3]", "[4, 1]"]);
    assert_eq!(legal("sum(n) == 3 and m == []"), ["[1, 2]"]);
    assert_eq!(legal("n in [[2, 3], [9, 9]] and m[0] == 1"), ["[2, 3]"]);
    // A text equals no list.
    for text in ["n == '[1, 2]'", "n != '[1, 2]'", "n in ['[1, 2]']"] {
        let error = Constraint::parse(text, text, &parameters).unwrap_err().to_string();
        assert!(error.contains("takes a list, found a text"), "{error}");
    }
}

#[test]
fn an_expression_that_reads_nothing_or_holds_nowhere_is_named() {
    let parameters = [Parameter::ordinal("a", 1..=3), Parameter::ordinal("b", 1..=3)];
    let error = |texts: &[&str]| by_expressions(&parameters, texts).unwrap_err().to_string();
    assert_eq!(error(&["1 < 2"]), "constraint 1 < 2 reads no parameter");
    assert_eq!(error(&["a < 3", "a * b > 9"]), "no configuration satisfies a * b > 9");
    assert_eq!(error(&["a / (b - b) > 0"]), "no configuration satisfies a / (b - b) > 0");
}

/// Checks that constraints of single values of a parameter are joined with others of these values alone.
#[test]
fn guarded_constraints_are_expressions_still() {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let own: Vec<Parameter> = names.iter().map(|name| Parameter::ordinal(name, 0..=9)).collect();
    let ways = Parameter::categorical("way", &["sum", "product", "free"]);
    let say = |text: &str| Constraint::parse(text, text, &own).unwrap();
    let constraints = vec![
        say("a + b + c + d + e + f + g + h == 30").only_where("way", "sum"),
        say("a * b * c * d * e * f * g * h in [0, 5040]").only_where("way", "product"),
        say("a <= b").except_where("way", "free"),
        Constraint::new("first", "first", &["h"], |v| v[0].int() == 0).only_where("way", "free"),
    ];
    let space = Space::new("guarded", [own.clone(), vec![ways]].concat(), constraints.clone()).unwrap();
    let of = |way: u64| space.part(8, way).unwrap().size();
    assert_eq!(of(0) + of(1) + of(2), space.size());
    assert_eq!(of(2), 10_000_000);
    let of_sum = by_expressions(&own, &["a + b + c + d + e + f + g + h == 30", "a <= b"]).unwrap();
    assert_eq!(of(0), of_sum.size());
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(2);
    for _ in 0..200 {
        let config = space.sample(&mut rng);
        assert!(space.violated(&config).is_none());
        assert_eq!(space.config_at(space.index_of(&config).unwrap()), config);
    }
}

fn condition() -> impl Strategy<Value = String> {
    let leaf = prop_oneof!["[abcd]", "[0-9]", Just("0.5".to_owned())];
    let number = leaf.prop_recursive(3, 12, 3, |inner| {
        ("[+*%-]|//|/|min|max|sum", inner.clone(), inner).prop_map(|(operator, a, b)| match operator.as_str() {
            "min" | "max" => format!("{operator}({a}, {b})"),
            "sum" => format!("sum([x * {a} for x in range(3) if x != {b}])"),
            _ => format!("({a} {operator} {b})"),
        })
    });
    let compared = ("<=|<|==|!=|in", number.clone(), number).prop_map(|(operator, a, b)| match operator.as_str() {
        "in" => format!("{a} in [{b}, 3]"),
        _ => format!("{a} {operator} {b}"),
    });
    let leaf = compared.boxed();
    (leaf.clone(), leaf.clone(), leaf, " and | or ").prop_map(|(a, b, c, word)| format!("{a}{word}({b} or not {c})"))
}

proptest! {
    /// Checks that a space built from partial results has exactly the configurations for which the
    /// constraints hold.
    #[test]
    fn expressions_leave_what_they_hold_for(texts in proptest::collection::vec((condition(), 0..6), 1..4)) {
        let mut parameters: Vec<Parameter> =
            ["a", "b", "c", "d"].iter().map(|name| Parameter::ordinal(name, [-2, 0, 1, 3])).collect();
        let parse = |text: &String| Constraint::parse("c", text, &parameters).unwrap();
        let constraint = |(text, guard): &(String, i32)| match guard {
            0 => parse(text).only_where("way", "x"),
            1 => parse(text).only_where("way", "y"),
            2 => parse(text).except_where("way", "x"),
            3 => parse(text).only_where("other", "2").except_where("way", "y"),
            _ => parse(text),
        };
        let constraints: Vec<Constraint> = texts.iter().map(constraint).collect();
        parameters.push(Parameter::categorical("way", &["x", "y"]));
        parameters.push(Parameter::categorical("other", &["1", "2"]));
        let free = Space::new("free", parameters.clone(), vec![]).unwrap();
        let is_legal = |config: &Config| constraints.iter().all(|constraint| {
            let values: Vec<Value> = constraint.parameters.iter().map(|name| free.value(config, name)).collect();
            constraint.holds(&values.iter().collect::<Vec<_>>())
        });
        let legal: Vec<Config> = (0..free.size()).map(|at| free.config_at(at)).filter(is_legal).collect();
        match Space::new("tied", parameters, constraints.clone()) {
            Ok(space) => {
                prop_assert_eq!(space.size(), legal.len() as u128);
                prop_assert!(legal.iter().all(|config| space.contains(config)));
                let by_index: Vec<Config> = (0..space.size()).map(|at| space.config_at(at)).collect();
                let functions = constraints.iter().map(Constraint::as_function).collect();
                let by_functions = Space::new("tied", space.parameters(), functions).unwrap();
                prop_assert!((0..space.size()).all(|at| by_functions.config_at(at) == by_index[at as usize]));
            }
            Err(SpaceError::ReadsNothing { .. }) => {}
            Err(error) => prop_assert!(legal.is_empty(), "{}", error),
        }
    }
}

#[test]
fn a_number_is_the_word_that_it_is_written_as() {
    let parameters = vec![Parameter::ordinal("n", [8, -16]), Parameter::categorical("w", &["8", "auto", "0.5"])];
    let space = Space::new("test", parameters, vec![]).unwrap();
    let ranks = |json: Json| space.config_from_json(&json).ok().map(|config| config.ranks().to_vec());
    assert_eq!(ranks(json!({"n": "-16", "w": 8})), ranks(json!({"n": -16, "w": "8"})));
    assert_eq!(ranks(json!({"n": 8, "w": 0.5})), Some(vec![0, 2]));
    for other in
        [json!({"n": "+8", "w": 8}), json!({"n": "08", "w": 8}), json!({"n": 8, "w": 16}), json!({"n": 8, "w": true})]
    {
        assert_eq!(ranks(other.clone()), None, "{other}");
    }
}

/// Configurations that advice excludes are legal and told apart; searches are offered the others.
#[test]
fn advice_narrows_what_is_proposed_alone() {
    let parameters = [Parameter::ordinal("tile", [1, 2, 4, 8]), Parameter::ordinal("t", 1..=4)];
    let parse = |name: &str, text: &str| Constraint::parse(name, text, &parameters).unwrap();
    let space = |advice: &str| {
        let constraints = vec![parse("fits", "tile * t <= 16"), parse("wide", advice).into_advice()];
        Space::new("s", parameters.to_vec(), constraints).unwrap()
    };
    let whole = space("tile >= 4 or t == 1");
    let advised = whole.advised().unwrap();
    assert_eq!((whole.size(), advised.size()), (14, 8));
    let narrow = whole.config_from_json(&json!({"tile": 2, "t": 3})).unwrap();
    assert!(whole.contains(&narrow) && whole.violated(&narrow).is_none() && !advised.contains(&narrow));
    assert_eq!(advised.violated(&narrow).map(|c| c.name.as_str()), Some("wide"));
    // A part of the space has its advice, and advice that leaves nothing is none.
    assert_eq!(whole.part(0, 1).unwrap().advised().unwrap().size(), 1);
    assert!(space("tile > 8").advised().is_none());
    // What a store knows the space by does not change with it.
    let plain = Space::new("s", parameters.to_vec(), vec![parse("fits", "tile * t <= 16")]).unwrap();
    assert_eq!((plain.advised().is_none(), plain.describe()), (true, whole.describe()));
}
