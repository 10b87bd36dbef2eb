//! Parameters and their domains, each with its own topology.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::hash::Hash;

use serde_json::{Value as Json, json};

use super::factorization::Primes;
use super::{SpaceError, Value, permutation};
use crate::expression::Datum;

/// Domain of a parameter: its feasible values. The kind determines which values are neighbours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Domain {
    /// Factorization: ordered tuples of `parts` positive integers whose product is `n`. Neighbours: one prime
    /// factor moved.
    Factorization {
        /// Product, at least 1.
        n: u64,
        /// Number of factors, at least 1.
        parts: usize,
    },
    /// Ordinal: numbers in a meaningful order. Neighbours: the adjacent entries.
    Ordinal(Vec<i64>),
    /// Categorical: alternatives without order, or numbers that ascend or descend, such as fractions.
    /// Neighbours: every other one, or the adjacent entries of numbers.
    Categorical(Vec<String>),
    /// Permutation of these names. Neighbours: two adjacent entries swapped.
    Permutation(Vec<String>),
}

/// Named parameter of a space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Name, unique within its space.
    pub name: String,
    /// Domain of its values.
    pub domain: Domain,
    /// Whether a recorded configuration may lack the parameter, which then has its first value: for a
    /// parameter that was added to a template after configurations were recorded.
    pub optional: bool,
}

impl Parameter {
    /// Makes a parameter with this domain.
    pub fn new(name: &str, domain: Domain) -> Parameter {
        Parameter { name: name.into(), domain, optional: false }
    }

    /// Makes a parameter of ordered `parts`-tuples with product `n`.
    pub fn factorization(name: &str, n: u64, parts: usize) -> Parameter {
        Parameter::new(name, Domain::Factorization { n, parts })
    }

    /// Makes an ordinal parameter.
    pub fn ordinal(name: &str, values: impl IntoIterator<Item = i64>) -> Parameter {
        Parameter::new(name, Domain::Ordinal(values.into_iter().collect()))
    }

    /// Makes a categorical parameter.
    pub fn categorical(name: &str, values: &[&str]) -> Parameter {
        Parameter::new(name, Domain::Categorical(owned(values)))
    }

    /// Makes a parameter of the values of an expression: ordinal if all are integers, else categorical with
    /// texts as Python writes them. Numbers that neither ascend nor descend are put into ascending order.
    pub fn of_data(name: &str, values: &[Datum]) -> Parameter {
        let number = |datum: &Datum| match datum {
            Datum::Int(number) => Some(*number as f64),
            Datum::Float(number) => Some(*number),
            _ => None,
        };
        let mut values = values.to_vec();
        let numbers: Option<Vec<f64>> = values.iter().map(number).collect();
        if numbers.is_some_and(|numbers| !is_monotonic(&numbers)) {
            values.sort_by(|a, b| number(a).partial_cmp(&number(b)).unwrap_or(Ordering::Equal));
        }
        let whole = |datum: &Datum| if let Datum::Int(number) = datum { Some(*number) } else { None };
        let domain = match values.iter().map(whole).collect() {
            Some(numbers) => Domain::Ordinal(numbers),
            None => Domain::Categorical(values.iter().map(Datum::to_string).collect()),
        };
        Parameter::new(name, domain)
    }

    /// Makes a boolean parameter: the categories `"false"` and `"true"`.
    pub fn boolean(name: &str) -> Parameter {
        Parameter::categorical(name, &["false", "true"])
    }

    /// Makes a permutation parameter of these names.
    pub fn permutation(name: &str, names: &[&str]) -> Parameter {
        Parameter::new(name, Domain::Permutation(owned(names)))
    }

    /// Makes the parameter optional: a configuration may lack it.
    pub fn optional(self) -> Parameter {
        Parameter { optional: true, ..self }
    }
}

/// Whether numbers ascend or descend.
fn is_monotonic(numbers: &[f64]) -> bool {
    numbers.is_sorted_by(|a, b| a < b) || numbers.is_sorted_by(|a, b| a > b)
}

/// Whether the values of a domain are numbers in order.
fn is_ordered(domain: &Domain) -> bool {
    let number = |text: &String| text.parse().ok().filter(|number: &f64| number.is_finite());
    match domain {
        Domain::Ordinal(_) => true,
        Domain::Categorical(texts) => {
            texts.iter().map(number).collect::<Option<Vec<f64>>>().is_some_and(|numbers| is_monotonic(&numbers))
        }
        Domain::Factorization { .. } | Domain::Permutation(_) => false,
    }
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

/// Parameter that has been checked and counted. Its values are numbered by ranks `0..len`.
#[derive(Debug, Clone)]
pub(super) struct CountedParameter {
    pub(super) name: String,
    pub(super) domain: Domain,
    pub(super) optional: bool,
    pub(super) len: u64,
    /// Whether the values are numbers in order.
    pub(super) is_ordered: bool,
    /// Prime factors of the product of a factorization; empty otherwise.
    pub(super) primes: Primes,
}

impl CountedParameter {
    pub(super) fn new(Parameter { name, domain, optional }: Parameter) -> Result<CountedParameter, SpaceError> {
        let mut primes = Primes::of(1);
        let len = match &domain {
            Domain::Factorization { n: 0, .. } | Domain::Factorization { parts: 0, .. } => Some(0),
            Domain::Factorization { n, parts } => {
                primes = Primes::of(*n);
                primes.count(*parts)
            }
            Domain::Ordinal(values) => Some(distinct(&name, values)?),
            Domain::Categorical(values) => Some(distinct(&name, values)?),
            Domain::Permutation(names) => {
                if distinct(&name, names)? == 0 {
                    Some(0)
                } else {
                    permutation::count(names.len())
                }
            }
        };
        match len {
            Some(0) => Err(SpaceError::NoValues { parameter: name }),
            None => Err(SpaceError::TooLarge { parameters: vec![name] }),
            Some(len) => Ok(CountedParameter { is_ordered: is_ordered(&domain), name, domain, optional, len, primes }),
        }
    }

    /// Returns the value with this rank, which is below `len`.
    pub(super) fn value(&self, rank: u64) -> Value {
        match &self.domain {
            Domain::Factorization { parts, .. } => Value::Factors(self.primes.unrank(*parts, rank)),
            Domain::Ordinal(values) => Value::Int(values[rank as usize]),
            Domain::Categorical(values) => Value::Text(values[rank as usize].clone()),
            Domain::Permutation(names) => {
                Value::Order(permutation::unrank(names.len(), rank).into_iter().map(|i| names[i].clone()).collect())
            }
        }
    }

    /// Returns the rank of the value that this JSON represents, if it is feasible.
    pub(super) fn rank_of_json(&self, json: &Json) -> Option<u64> {
        match &self.domain {
            Domain::Factorization { parts, .. } => {
                let factors: Vec<u64> = json.as_array()?.iter().map(Json::as_u64).collect::<Option<_>>()?;
                (factors.len() == *parts).then(|| self.primes.rank(&factors))?
            }
            // Numbers and their texts are equivalent: a list of numbers becomes one of texts when a text is
            // added.
            Domain::Ordinal(values) => {
                let of_word = |word: &str| word.parse::<i64>().ok().filter(|number| number.to_string() == word);
                position(values, &json.as_i64().or_else(|| of_word(json.as_str()?))?)
            }
            Domain::Categorical(values) => match json {
                Json::Number(number) => position(values, number.to_string().as_str()),
                _ => position(values, json.as_str()?),
            },
            Domain::Permutation(names) => {
                let order = json.as_array()?.iter().map(|name| position(names, name.as_str()?).map(|i| i as usize));
                let order: Vec<usize> = order.collect::<Option<_>>()?;
                let complete = order.len() == names.len() && order.iter().collect::<HashSet<_>>().len() == names.len();
                complete.then(|| permutation::rank(&order))
            }
        }
    }

    /// Returns the rank of the value that is nearest to one of a parameter with another feasible set, if it
    /// can be compared.
    ///
    /// Numbers are compared by their ratio. For a factorization of another number, the inner factors are kept
    /// as far as the product of this parameter allows, because they are tile sizes, and the outermost factor
    /// absorbs the difference.
    pub(super) fn nearest_to_json(&self, json: &Json) -> Option<u64> {
        if let Some(rank) = self.rank_of_json(json) {
            return Some(rank);
        }
        match &self.domain {
            Domain::Ordinal(values) => {
                let wanted = json.as_i64()?;
                let distance = |value: i64| match (wanted > 0, value > 0) {
                    (true, true) => (value as f64 / wanted as f64).ln().abs(),
                    _ => value.abs_diff(wanted) as f64,
                };
                (0..self.len).min_by(|&a, &b| distance(values[a as usize]).total_cmp(&distance(values[b as usize])))
            }
            Domain::Factorization { n, parts } => {
                let factors: Vec<u64> = json.as_array()?.iter().map(Json::as_u64).collect::<Option<_>>()?;
                if factors.len() != *parts || factors.contains(&0) {
                    return None;
                }
                let mut wanted: Vec<f64> = factors.iter().map(|&factor| (factor as f64).ln()).collect();
                wanted[0] = (*n as f64).ln() - wanted[1..].iter().sum::<f64>();
                let distance = |rank: u64| -> f64 {
                    let factors = self.primes.unrank(*parts, rank);
                    factors.iter().zip(&wanted).map(|(&factor, wanted)| ((factor as f64).ln() - wanted).powi(2)).sum()
                };
                // Descends from the untiled factorization, since there may be too many to try each.
                let (mut best, mut least) = (0, distance(0));
                while let Some((distance, rank)) = self
                    .neighbours(best)
                    .into_iter()
                    .map(|rank| (distance(rank), rank))
                    .min_by(|a, b| a.0.total_cmp(&b.0))
                    && distance < least
                {
                    (best, least) = (rank, distance);
                }
                Some(best)
            }
            Domain::Categorical(_) | Domain::Permutation(_) => None,
        }
    }

    /// Returns the ranks of the neighbours of a value.
    pub(super) fn neighbours(&self, rank: u64) -> Vec<u64> {
        match &self.domain {
            Domain::Factorization { parts, .. } => self.primes.neighbours(*parts, rank),
            Domain::Ordinal(_) | Domain::Categorical(_) if self.is_ordered => {
                rank.checked_sub(1).into_iter().chain(Some(rank + 1).filter(|&r| r < self.len)).collect()
            }
            Domain::Ordinal(_) | Domain::Categorical(_) => (0..self.len).filter(|&other| other != rank).collect(),
            Domain::Permutation(names) => permutation::neighbours(names.len(), rank),
        }
    }

    /// Allowed values, in words.
    pub(super) fn allowed(&self) -> String {
        match &self.domain {
            Domain::Factorization { n, parts } => format!("{parts} positive integers whose product is {n}"),
            Domain::Ordinal(values) => values.iter().map(i64::to_string).collect::<Vec<_>>().join(", "),
            Domain::Categorical(values) => values.iter().map(|v| json!(v).to_string()).collect::<Vec<_>>().join(", "),
            Domain::Permutation(names) => format!("an order of {}", json!(names)),
        }
    }

    /// `{"name", "kind", "values" | "n", "parts"}`.
    pub(super) fn describe(&self) -> Json {
        let name = &self.name;
        match &self.domain {
            Domain::Factorization { n, parts } => {
                json!({"name": name, "kind": "factorization", "n": n, "parts": parts})
            }
            Domain::Ordinal(values) => json!({"name": name, "kind": "ordinal", "values": values}),
            Domain::Categorical(values) => json!({"name": name, "kind": "categorical", "values": values}),
            Domain::Permutation(names) => json!({"name": name, "kind": "permutation", "values": names}),
        }
    }
}

fn distinct<T: Hash + Eq + ToString>(parameter: &str, values: &[T]) -> Result<u64, SpaceError> {
    let mut seen = HashSet::new();
    match values.iter().find(|value| !seen.insert(*value)) {
        Some(twice) => Err(SpaceError::ValueTwice { parameter: parameter.into(), value: twice.to_string() }),
        None => Ok(values.len() as u64),
    }
}

fn position<T: PartialEq<U>, U: ?Sized>(values: &[T], value: &U) -> Option<u64> {
    values.iter().position(|v| v == value).map(|i| i as u64)
}
