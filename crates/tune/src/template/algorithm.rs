//! Spaces that include the choice of an algorithm as a parameter.

use super::TemplateSetting;
use tilewright_ir::Step;
use tilewright_search::{Config, Constraint, Domain, Parameter, Space, SpaceError, Value};

/// Name of the parameter that selects the algorithm.
pub const CHOICE: &str = "algorithm";

/// Algorithm for a problem, which holds the operator's sizes in the form that its templates need.
pub struct Algorithm<Problem> {
    /// Value of the parameter `algorithm`.
    pub name: &'static str,
    /// Whether the algorithm applies to a problem.
    pub applies: fn(&Problem) -> bool,
    /// Parameters of the algorithm, which several algorithms may share.
    pub parameters: fn(&TemplateSetting, &Problem) -> Vec<Parameter>,
    /// Constraints between its parameters.
    pub constraints: fn(&TemplateSetting, &Problem) -> Vec<Constraint>,
    /// Schedule of a configuration.
    pub steps: fn(&TemplateSetting, &Problem, &Space, &Config) -> Vec<Step>,
    /// Estimated cost of a configuration; see [`super::Template::estimate`].
    pub estimate: fn(&TemplateSetting, &Problem, &Space, &Config) -> f64,
}

/// Whether more than one of these algorithms applies to a problem.
pub fn is_choice<P>(problem: &P, algorithms: &[Algorithm<P>]) -> bool {
    algorithms.iter().filter(|a| (a.applies)(problem)).nth(1).is_some()
}

/// Builds the joint space of several algorithms, with the parameters of all. Parameters that the selected
/// algorithm does not use are fixed at their first value.
pub fn space<P>(
    name: &str,
    s: &TemplateSetting,
    problem: &P,
    algorithms: &[Algorithm<P>],
) -> Result<Space, SpaceError> {
    let (parameters, constraints) = declarations(s, problem, algorithms);
    Space::declare(name, parameters, constraints)
}

/// Parameters and constraints of the joint space.
pub fn declarations<P>(
    s: &TemplateSetting,
    problem: &P,
    algorithms: &[Algorithm<P>],
) -> (Vec<Parameter>, Vec<Constraint>) {
    let algorithms: Vec<&Algorithm<P>> = algorithms.iter().filter(|a| (a.applies)(problem)).collect();
    if let [only] = algorithms[..] {
        return ((only.parameters)(s, problem), (only.constraints)(s, problem));
    }
    let names: Vec<&str> = algorithms.iter().map(|a| a.name).collect();
    let of_each: Vec<Vec<Parameter>> = algorithms.iter().map(|a| (a.parameters)(s, problem)).collect();
    let mut parameters = vec![Parameter::categorical(CHOICE, &names)];
    let mut constraints = Vec::new();
    for parameter in of_each.iter().flatten() {
        if parameters.iter().any(|p| p.name == parameter.name) {
            continue;
        }
        let in_each: Vec<Option<Domain>> =
            of_each.iter().map(|all| all.iter().find(|p| p.name == parameter.name).map(|p| p.domain.clone())).collect();
        let domain = in_each.iter().flatten().cloned().reduce(union).expect("one algorithm has it");
        let optional = parameter.optional;
        if in_each.iter().any(|d| d.as_ref() != Some(&domain)) {
            let (names, first) = (names.iter().map(|n| n.to_string()).collect::<Vec<_>>(), first(&domain));
            constraints.push(Constraint::new(
                &format!("{}_of_algorithm", parameter.name),
                "a parameter that the algorithm does not have keeps its first value",
                &[CHOICE, &parameter.name],
                move |v| {
                    let chosen = names.iter().position(|n| n == v[0].text()).expect("a listed algorithm");
                    in_each[chosen].as_ref().map_or(*v[1] == first, |domain| holds(domain, v[1]))
                },
            ));
        }
        parameters.push(Parameter { name: parameter.name.clone(), domain, optional });
    }
    for algorithm in algorithms {
        constraints
            .extend((algorithm.constraints)(s, problem).into_iter().map(|c| c.only_where(CHOICE, algorithm.name)));
    }
    (parameters, constraints)
}

/// Schedule of a configuration of the joint space.
pub fn steps<P>(s: &TemplateSetting, problem: &P, all: &[Algorithm<P>], space: &Space, config: &Config) -> Vec<Step> {
    (chosen(problem, all, space, config).steps)(s, problem, space, config)
}

/// Estimated cost of a configuration of the joint space.
pub fn estimate<P>(s: &TemplateSetting, problem: &P, all: &[Algorithm<P>], space: &Space, config: &Config) -> f64 {
    (chosen(problem, all, space, config).estimate)(s, problem, space, config)
}

/// Algorithm that a configuration selects.
pub fn chosen<'a, P>(problem: &P, all: &'a [Algorithm<P>], space: &Space, config: &Config) -> &'a Algorithm<P> {
    let applying: Vec<&Algorithm<P>> = all.iter().filter(|a| (a.applies)(problem)).collect();
    match applying[..] {
        [only] => only,
        _ => {
            let name = space.text(config, CHOICE);
            applying.into_iter().find(|a| a.name == name).expect("the space lists the algorithms that apply")
        }
    }
}

/// Union of the domains of two parameters of the same name: numbers, or alternatives.
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

/// Parameter reduced to its first value, for a space without the choice.
pub fn held(parameter: &Parameter) -> Parameter {
    match first(&parameter.domain) {
        Value::Int(value) => Parameter::ordinal(&parameter.name, [value]),
        Value::Text(value) => Parameter::categorical(&parameter.name, &[&value]),
        value @ (Value::Order(_) | Value::Factors(_)) => panic!("{value:?} is a number or an alternative"),
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
