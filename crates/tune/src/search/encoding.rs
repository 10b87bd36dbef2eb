//! Configurations as vectors of numbers, for searches that learn.

use crate::space::{Config, Domain, Space, Value};

/// The numbers of a configuration: an ordinal gives its value, a category a 1 among 0s, a factorization its factors, a
/// permutation the position of each name. They are never negative, unless an ordinal's values are.
pub(super) fn numbers(space: &Space, config: &Config) -> Vec<f64> {
    let mut numbers = Vec::new();
    for (parameter, &rank) in config.ranks().iter().enumerate() {
        match (space.value_at(parameter, rank), space.domain(parameter)) {
            (Value::Int(value), _) => numbers.push(value as f64),
            (Value::Factors(factors), _) => numbers.extend(factors.iter().map(|&factor| factor as f64)),
            (Value::Text(_), _) => {
                numbers.extend((0..space.n_values(parameter)).map(|r| f64::from(u8::from(r == rank))));
            }
            (Value::Order(order), Domain::Permutation(names)) => {
                let position = |name| order.iter().position(|other| other == name);
                numbers.extend(names.iter().map(|name| position(name).unwrap_or_default() as f64));
            }
            (Value::Order(_), _) => unreachable!("invariant: an order is the value of a permutation"),
        }
    }
    numbers
}
