//! Search spaces: parameters, each with its own topology, and constraints over them.
//!
//! A space knows exactly how many legal configurations it has, numbers them, and draws them uniformly,
//! however few of the combinations its constraints leave. Parameters that no constraint reads cost nothing;
//! those that constraints tie together are enumerated once, when the space is built.

mod automaton;
mod constraint;
mod diagram;
mod domain;
mod error;
mod factorization;
mod permutation;
#[cfg(test)]
mod tests;
mod value;

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use rand::{Rng, RngExt};
use serde_json::{Map, Value as Json, json};

pub use constraint::Constraint;
use diagram::Diagram;
use domain::CountedParameter;
pub use domain::{Domain, Parameter};
pub use error::{ConfigError, SpaceError};
pub use value::Value;

/// Name of the constraint that only listed configurations satisfy.
const LISTED: &str = "listed";

/// Name of the constraint that a part of a space adds.
const PART: &str = "part";

/// Configuration: for each parameter of its space, in order, the rank of its value in the domain.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Config(Box<[u64]>);

impl Config {
    /// Makes a configuration of these ranks, which need not be legal; see [`Space::contains`].
    pub fn new(ranks: impl Into<Box<[u64]>>) -> Config {
        Config(ranks.into())
    }

    /// Rank of each parameter's value, in the order of the space's parameters.
    pub fn ranks(&self) -> &[u64] {
        &self.0
    }

    /// Copy with the rank of one parameter replaced.
    pub fn with(&self, parameter: usize, rank: u64) -> Config {
        let mut ranks = self.0.clone();
        ranks[parameter] = rank;
        Config(ranks)
    }
}

/// Legal configurations: the combinations of values that satisfy all constraints; there is at least one.
#[derive(Debug, Clone)]
pub struct Space {
    name: String,
    axes: Vec<CountedParameter>,
    constraints: Vec<Constraint>,
    /// Positions of the parameters that each constraint reads.
    reads: Vec<Vec<usize>>,
    /// Constraints that only what searches propose satisfies.
    advice: Vec<Constraint>,
    /// Space that follows the advice, once somebody asked for it.
    advised: OnceLock<Option<Arc<Space>>>,
    /// Numbers of the legal configurations, once they are enumerated.
    numbering: OnceLock<Numbering>,
}

/// Numbering of the legal configurations of a space, in which the last component varies fastest.
#[derive(Debug, Clone)]
struct Numbering {
    components: Vec<Component>,
    size: u128,
}

/// Parameters whose legal combinations do not depend on any other's; the space is the product of its
/// components.
#[derive(Debug, Clone)]
enum Component {
    /// Parameter that no constraint reads.
    Free { axis: usize, len: u64 },
    /// Parameters tied together by constraints.
    Tied(Diagram),
}

impl Component {
    fn len(&self) -> u64 {
        match self {
            Component::Free { len, .. } => *len,
            Component::Tied(diagram) => diagram.len,
        }
    }

    fn write(&self, index: u64, ranks: &mut [u64]) {
        match self {
            Component::Free { axis, .. } => ranks[*axis] = index,
            Component::Tied(diagram) => diagram.write(index, ranks),
        }
    }

    fn index_of(&self, ranks: &[u64]) -> Option<u64> {
        match self {
            Component::Free { axis, len } => Some(ranks[*axis]).filter(|rank| rank < len),
            Component::Tied(diagram) => diagram.index_of(ranks),
        }
    }
}

impl Space {
    /// Builds a space of these parameters and constraints, and enumerates its legal configurations.
    ///
    /// # Errors
    /// [`SpaceError`], always a mistake in the template: names or values that occur twice, a parameter
    /// without values, a constraint that reads an unknown parameter, no legal configuration, more than 2^128
    /// configurations, or tied parameters with too many combinations to enumerate.
    ///
    /// # Cost
    /// Unconstrained parameters: O(1) each. Tied ones: one step of each constraint for each value that
    /// follows a prefix of their combinations, where prefixes with equal residuals of all constraints count
    /// once; at most 2^26.
    pub fn new(name: &str, parameters: Vec<Parameter>, constraints: Vec<Constraint>) -> Result<Space, SpaceError> {
        let space = Space::declare(name, parameters, constraints)?;
        space.enumerate()?;
        Ok(space)
    }

    /// Builds a space without enumerating it, which suffices to read configurations and their values.
    /// [`Space::enumerate`] does so later, or the first call that needs it.
    ///
    /// # Errors
    /// [`SpaceError`], a mistake in the template: names or values that occur twice, a parameter without
    /// values, or a constraint that reads an unknown parameter.
    ///
    /// # Cost
    /// O(values and constraints).
    pub fn declare(name: &str, parameters: Vec<Parameter>, constraints: Vec<Constraint>) -> Result<Space, SpaceError> {
        let axes = axes(parameters)?;
        let (advice, constraints): (Vec<_>, Vec<_>) = constraints.into_iter().partition(|c| c.is_advice);
        let reads = constraints.iter().map(|c| positions(&axes, c)).collect::<Result<Vec<_>, _>>()?;
        advice.iter().try_for_each(|c| positions(&axes, c).map(drop))?;
        let (advised, numbering) = (OnceLock::new(), OnceLock::new());
        Ok(Space { name: name.into(), axes, constraints, reads, advice, advised, numbering })
    }

    /// Space of the configurations that searches propose: those that follow the advice, too. `None` without
    /// advice, and where nothing would be left. Its configurations are valid in the whole space.
    ///
    /// # Cost
    /// The first time as for [`Space::new`].
    pub fn advised(&self) -> Option<&Arc<Space>> {
        let narrower = || {
            let advice = self.advice.iter().cloned().map(Constraint::into_law);
            let all = self.constraints.iter().cloned().chain(advice).collect();
            Space::new(&self.name, self.parameters(), all).ok().map(Arc::new)
        };
        self.advised.get_or_init(|| if self.advice.is_empty() { None } else { narrower() }).as_ref()
    }

    /// Enumerates the legal configurations, unless that has been done.
    ///
    /// # Errors
    /// [`SpaceError`], a mistake in the template: no legal configuration, more than 2^128 configurations, or
    /// tied parameters with too many combinations to enumerate. All other functions rely on this call to
    /// succeed.
    ///
    /// # Cost
    /// As for [`Space::new`].
    pub fn enumerate(&self) -> Result<(), SpaceError> {
        if self.numbering.get().is_none() {
            let components = components(&self.axes, &self.constraints, &self.reads)?;
            let product = |size: u128, component: &Component| size.checked_mul(component.len().into());
            let size = components.iter().try_fold(1u128, product).ok_or_else(|| SpaceError::TooLarge {
                parameters: self.axes.iter().map(|axis| axis.name.clone()).collect(),
            })?;
            let _ = self.numbering.set(Numbering { components, size });
        }
        Ok(())
    }

    /// Whether the legal configurations have been enumerated.
    pub fn is_enumerated(&self) -> bool {
        self.numbering.get().is_some()
    }

    fn numbering(&self) -> &Numbering {
        if let Err(error) = self.enumerate() {
            panic!("invariant: space {} can be enumerated: {error}", self.name);
        }
        self.numbering.get().expect("invariant: it was enumerated")
    }

    fn components(&self) -> &[Component] {
        &self.numbering().components
    }

    /// Subspace in which a parameter has this rank; `None` if it is empty. Its configurations are valid in
    /// the whole space, too.
    ///
    /// # Cost
    /// As for [`Space::new`].
    ///
    /// # Panics
    /// If there is no such parameter or rank.
    pub fn part(&self, parameter: usize, rank: u64) -> Option<Space> {
        let axis = &self.axes[parameter];
        let wanted = axis.value(rank);
        let text = format!("{} = {wanted}", axis.name);
        let is_it = Constraint::new(PART, &text, &[&axis.name], move |v| *v[0] == wanted);
        let others = self.constraints.iter().chain(&self.advice).cloned();
        Space::new(&self.name, self.parameters(), [is_it].into_iter().chain(others).collect()).ok()
    }

    /// Space without the constraints of these names.
    ///
    /// # Errors
    /// [`SpaceError`] if what is left has too many combinations to enumerate.
    ///
    /// # Cost
    /// As for [`Space::new`].
    pub fn without(&self, constraints: &[&str]) -> Result<Space, SpaceError> {
        let all = self.constraints.iter().chain(&self.advice);
        let kept = all.filter(|c| !constraints.contains(&c.name.as_str()));
        Space::new(&self.name, self.parameters(), kept.cloned().collect())
    }

    /// Parameters of the space.
    fn parameters(&self) -> Vec<Parameter> {
        let parameter =
            |a: &CountedParameter| Parameter { name: a.name.clone(), domain: a.domain.clone(), optional: a.optional };
        self.axes.iter().map(parameter).collect()
    }

    /// Restricts the space to these configurations, by a constraint named `listed` on all parameters.
    /// Configurations outside this space are ignored, and so are duplicates.
    ///
    /// # Errors
    /// [`SpaceError`] if nothing is left, or a parameter has more values than a listing can tell apart.
    pub fn only<'a>(self, configs: impl IntoIterator<Item = &'a Config>) -> Result<Space, SpaceError> {
        let listed = configs.into_iter().filter(|config| self.contains(config)).map(Config::ranks).collect();
        self.listing(listed)
    }

    fn listing(mut self, mut listed: Vec<&[u64]>) -> Result<Space, SpaceError> {
        listed.sort();
        listed.dedup();
        if let Some(axis) = self.axes.iter().find(|axis| axis.len > u64::from(u32::MAX)) {
            return Err(SpaceError::TooLarge { parameters: vec![axis.name.clone()] });
        }
        if listed.is_empty() {
            let (constraint, text) = (LISTED.into(), "one of none".into());
            return Err(SpaceError::NothingLegal { constraint, text, earlier: Vec::new() });
        }
        if self.axes.is_empty() {
            return Ok(self);
        }
        let value = |(axis, &rank): (&CountedParameter, &u64)| axis.value(rank);
        let values: HashSet<Vec<Value>> =
            listed.iter().map(|ranks| self.axes.iter().zip(*ranks).map(value).collect()).collect();
        let names: Vec<&str> = self.names().collect();
        let text = format!("one of the {} listed configurations", listed.len());
        let constraint = Constraint::new(LISTED, &text, &names, move |v| {
            values.contains(&v.iter().map(|&value| value.clone()).collect::<Vec<_>>())
        });
        let diagram = Diagram::of_list(&listed, self.axes.len());
        let size = diagram.len.into();
        self.numbering = Numbering { components: vec![Component::Tied(diagram)], size }.into();
        self.reads.push((0..self.axes.len()).collect());
        self.constraints.push(constraint);
        self.advised = OnceLock::new();
        Ok(self)
    }

    /// Name of the template that declares the space.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Exact number of legal configurations, at least 1.
    pub fn size(&self) -> u128 {
        self.numbering().size
    }

    /// Number of combinations of values without constraints; `None` on overflow of 2^128.
    pub fn n_combinations(&self) -> Option<u128> {
        self.axes.iter().try_fold(1u128, |n, axis| n.checked_mul(axis.len.into()))
    }

    /// Number of parameters.
    pub fn n_parameters(&self) -> usize {
        self.axes.len()
    }

    /// Number of a parameter's values, without constraints.
    pub fn n_values(&self, parameter: usize) -> u64 {
        self.axes[parameter].len
    }

    /// Names of the parameters, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.axes.iter().map(|axis| axis.name.as_str())
    }

    /// Whether a parameter of this name exists.
    pub fn has(&self, name: &str) -> bool {
        self.names().any(|known| known == name)
    }

    /// Domain of a parameter.
    pub fn domain(&self, parameter: usize) -> &Domain {
        &self.axes[parameter].domain
    }

    /// Whether the values of a parameter are numbers in order: those of an ordinal, or categories whose texts
    /// are numbers that ascend or descend.
    pub fn is_ordered(&self, parameter: usize) -> bool {
        self.axes[parameter].is_ordered
    }

    /// Whether a configuration in JSON may omit a parameter.
    pub fn is_optional(&self, parameter: usize) -> bool {
        self.axes[parameter].optional
    }

    /// Returns the value of a parameter with this rank.
    ///
    /// # Panics
    /// If the rank is not below [`Space::n_values`].
    pub fn value_at(&self, parameter: usize, rank: u64) -> Value {
        self.axes[parameter].value(rank)
    }

    /// Returns the primes of a factorization's product with their exponents, in ascending order; empty for
    /// other parameters.
    pub(crate) fn prime_powers(&self, parameter: usize) -> &[(u64, u32)] {
        self.axes[parameter].primes.powers()
    }

    /// Returns the rank of a factorization with these factors, one for each part; `None` if their product is
    /// another number.
    pub(crate) fn rank_of_factors(&self, parameter: usize, factors: &[u64]) -> Option<u64> {
        self.axes[parameter].primes.rank(factors)
    }

    /// The advice, in order: constraints that only what searches propose satisfies.
    pub fn advice(&self) -> &[Constraint] {
        &self.advice
    }

    /// The constraints, in order.
    pub fn constraints(&self) -> &[Constraint] {
        &self.constraints
    }

    /// Legal configuration with this index.
    ///
    /// # Panics
    /// If `index` is not below [`Space::size`].
    pub fn config_at(&self, mut index: u128) -> Config {
        assert!(index < self.size(), "invariant: index {index} below the space's size {}", self.size());
        let mut ranks = vec![0; self.axes.len()].into_boxed_slice();
        for component in self.components().iter().rev() {
            let len = u128::from(component.len());
            component.write((index % len) as u64, &mut ranks);
            index /= len;
        }
        Config(ranks)
    }

    /// Index of a configuration; `None` if it is not a legal one of this space.
    pub fn index_of(&self, config: &Config) -> Option<u128> {
        if config.0.len() != self.axes.len() {
            return None;
        }
        self.components().iter().try_fold(0, |index, component| {
            Some(index * u128::from(component.len()) + u128::from(component.index_of(&config.0)?))
        })
    }

    /// Whether this is a legal configuration of this space.
    pub fn contains(&self, config: &Config) -> bool {
        self.index_of(config).is_some()
    }

    /// Uniformly random legal configuration.
    pub fn sample(&self, rng: &mut (impl Rng + ?Sized)) -> Config {
        self.config_at(rng.random_range(0..self.size()))
    }

    /// Ranks of a parameter that occur in legal configurations whose ranks are all allowed. `allowed` is by
    /// parameter; `None` allows every rank.
    ///
    /// # Cost
    /// O(edges) of the diagram of the parameter and those it is tied to.
    pub fn ranks_possible(&self, parameter: usize, allowed: &[Option<Vec<bool>>]) -> Vec<bool> {
        let of_axis = |component: &Component, axis: usize| {
            let mut found = allowed[axis].clone().unwrap_or_else(|| vec![true; self.axes[axis].len as usize]);
            if let Component::Tied(diagram) = component {
                found.fill(false);
                diagram.ranks_possible(axis, allowed, &mut found);
            }
            found
        };
        let mut possible = Vec::new();
        for component in self.components() {
            let axes = match component {
                Component::Free { axis, .. } => std::slice::from_ref(axis),
                Component::Tied(diagram) => &diagram.order,
            };
            if axes.contains(&parameter) {
                possible = of_axis(component, parameter);
            } else if !of_axis(component, axes[0]).contains(&true) {
                // Whatever the value of this parameter, another one has no rank left.
                return vec![false; self.axes[parameter].len as usize];
            }
        }
        possible
    }

    /// Nearest legal configuration: it differs in the fewest parameters, and among these by the fewest ranks.
    ///
    /// # Panics
    /// If a rank is not below [`Space::n_values`].
    pub fn nearest(&self, config: &Config) -> Config {
        let mut ranks = config.0.clone();
        for component in self.components() {
            match component {
                Component::Free { axis, len } => assert!(ranks[*axis] < *len, "invariant: a feasible rank"),
                Component::Tied(diagram) if diagram.index_of(&ranks).is_some() => {}
                Component::Tied(diagram) => diagram.write_nearest(&mut ranks),
            }
        }
        Config(ranks)
    }

    /// First constraint that a configuration violates, in order of declaration.
    ///
    /// # Panics
    /// If a rank is not below [`Space::n_values`].
    pub fn violated(&self, config: &Config) -> Option<&Constraint> {
        (0..self.constraints.len())
            .find(|&i| {
                let values = self.values_read(i, config);
                !self.constraints[i].holds(&values.iter().collect::<Vec<_>>())
            })
            .map(|i| &self.constraints[i])
    }

    fn values_read(&self, constraint: usize, config: &Config) -> Vec<Value> {
        self.reads[constraint].iter().map(|&axis| self.axes[axis].value(config.0[axis])).collect()
    }

    /// Ranks of the neighbours of a parameter's value in its topology, without constraints.
    pub fn rank_neighbours(&self, parameter: usize, rank: u64) -> Vec<u64> {
        self.axes[parameter].neighbours(rank)
    }

    /// Legal configurations that differ in one parameter by one step of its topology.
    pub fn neighbours(&self, config: &Config) -> Vec<Config> {
        let each = |parameter: usize| {
            let around = self.rank_neighbours(parameter, config.0[parameter]);
            around.into_iter().map(move |rank| config.with(parameter, rank))
        };
        (0..self.axes.len()).flat_map(each).filter(|neighbour| self.contains(neighbour)).collect()
    }

    fn axis(&self, name: &str) -> Option<usize> {
        self.axes.iter().position(|axis| axis.name == name)
    }

    /// Value of the parameter with this name.
    ///
    /// # Panics
    /// If the space has no such parameter: a bug in the template, which reads an undeclared parameter.
    pub fn value(&self, config: &Config, name: &str) -> Value {
        let axis = self.axis(name).unwrap_or_else(|| panic!("invariant: space {} declares {name}", self.name));
        self.axes[axis].value(config.0[axis])
    }

    /// [`Space::value`] of an ordinal parameter.
    ///
    /// # Panics
    /// If there is no ordinal parameter of this name.
    pub fn int(&self, config: &Config, name: &str) -> i64 {
        self.value(config, name).int()
    }

    /// [`Space::value`] of a categorical parameter.
    ///
    /// # Panics
    /// If there is no categorical parameter of this name.
    pub fn text(&self, config: &Config, name: &str) -> String {
        self.value(config, name).text().to_string()
    }

    /// Whether a boolean parameter is `"true"`.
    ///
    /// # Panics
    /// If there is no categorical parameter of this name.
    pub fn flag(&self, config: &Config, name: &str) -> bool {
        self.value(config, name).text() == "true"
    }

    /// [`Space::value`] of a factorization, outermost factor first.
    ///
    /// # Panics
    /// If there is no factorization of this name.
    pub fn factors(&self, config: &Config, name: &str) -> Vec<u64> {
        self.value(config, name).factors().to_vec()
    }

    /// [`Space::value`] of a permutation, outermost first.
    ///
    /// # Panics
    /// If there is no permutation of this name.
    pub fn order(&self, config: &Config, name: &str) -> Vec<String> {
        self.value(config, name).order().to_vec()
    }

    /// Configuration as a JSON object from parameter to value, in order of declaration.
    pub fn config_to_json(&self, config: &Config) -> Json {
        let values = self.axes.iter().zip(config.ranks());
        Json::Object(values.map(|(axis, &rank)| (axis.name.clone(), axis.value(rank).to_json())).collect())
    }

    /// Reads a configuration from a JSON object from parameter to value.
    ///
    /// # Errors
    /// [`ConfigError`] if the object lacks a parameter that is not optional, has one too many, holds a value
    /// that is not feasible, or violates a constraint: a mistake of its author.
    pub fn config_from_json(&self, json: &Json) -> Result<Config, ConfigError> {
        let object = json.as_object().ok_or_else(|| ConfigError::NotAnObject { found: json.to_string() })?;
        if let Some(name) = object.keys().find(|name| self.axis(name).is_none()) {
            let known = self.names().collect::<Vec<_>>().join(", ");
            return Err(ConfigError::UnknownParameter { parameter: name.clone(), known });
        }
        let rank = |axis: &CountedParameter| match object.get(&axis.name) {
            None if axis.optional => Ok(0),
            None => Err(ConfigError::MissingParameter { parameter: axis.name.clone() }),
            Some(value) => axis.rank_of_json(value).ok_or_else(|| ConfigError::NotFeasible {
                parameter: axis.name.clone(),
                value: value.to_string(),
                allowed: axis.allowed(),
            }),
        };
        let config = Config(self.axes.iter().map(rank).collect::<Result<_, _>>()?);
        match self.violated(&config) {
            None => Ok(config),
            Some(constraint) => Err(ConfigError::Violated {
                constraint: constraint.name.clone(),
                text: constraint.text.clone(),
                values: constraint.parameters.iter().map(|name| (name.clone(), self.value(&config, name))).collect(),
            }),
        }
    }

    /// Nearest legal configuration to one of another space with parameters of the same names; `None` if names
    /// differ, or a category or permutation does not exist here.
    pub fn nearest_to_json(&self, json: &Json) -> Option<Config> {
        let object = json.as_object().filter(|object| object.keys().all(|name| self.axis(name).is_some()))?;
        let ranks = self.axes.iter().map(|axis| match object.get(&axis.name) {
            None => axis.optional.then_some(0),
            Some(value) => axis.nearest_to_json(value),
        });
        Some(self.nearest(&Config(ranks.collect::<Option<_>>()?)))
    }

    /// The space as JSON:
    /// `{"parameters":[{"name","kind","values"|"n","parts"}],"constraints":[{"name","text"}],"size",
    /// "combinations"}`. A size above 2^64 is given as the nearest floating-point number.
    pub fn describe(&self) -> Json {
        let constraint = |c: &Constraint| json!({"name": c.name, "text": c.text});
        let mut object = Map::new();
        object.insert("parameters".into(), self.axes.iter().map(CountedParameter::describe).collect());
        object.insert("constraints".into(), self.constraints.iter().map(constraint).collect());
        let number = |n: u128| u64::try_from(n).map_or_else(|_| Json::from(n as f64), Json::from);
        object.insert("size".into(), number(self.size()));
        object.insert("combinations".into(), self.n_combinations().map_or(Json::Null, number));
        Json::Object(object)
    }
}

/// Cartesian product of parameters, for listing its legal combinations explicitly. The number of all
/// combinations may exceed what a [`Space`] can number.
pub struct ListedProduct(Space);

impl ListedProduct {
    /// Cartesian product of these parameters.
    ///
    /// # Errors
    /// As for [`Space::new`].
    pub fn new(name: &str, parameters: Vec<Parameter>) -> Result<ListedProduct, SpaceError> {
        Ok(ListedProduct(Space::declare(name, parameters, Vec::new())?))
    }

    /// Rank of a JSON value in a parameter's domain; `None` if it is not in the domain.
    pub fn rank_of_json(&self, parameter: usize, value: &Json) -> Option<u64> {
        self.0.axes[parameter].rank_of_json(value)
    }

    /// Space of these configurations, as by [`Space::only`]; their ranks must be feasible.
    ///
    /// # Errors
    /// As for [`Space::only`].
    pub fn only<'a>(self, configs: impl IntoIterator<Item = &'a Config>) -> Result<Space, SpaceError> {
        self.0.listing(configs.into_iter().map(Config::ranks).collect())
    }
}

fn axes(parameters: Vec<Parameter>) -> Result<Vec<CountedParameter>, SpaceError> {
    for (i, parameter) in parameters.iter().enumerate() {
        if parameters[..i].iter().any(|earlier| earlier.name == parameter.name) {
            return Err(SpaceError::ParameterTwice { parameter: parameter.name.clone() });
        }
    }
    parameters.into_iter().map(CountedParameter::new).collect()
}

fn positions(axes: &[CountedParameter], constraint: &Constraint) -> Result<Vec<usize>, SpaceError> {
    if constraint.parameters.is_empty() {
        return Err(SpaceError::ReadsNothing { constraint: constraint.name.clone() });
    }
    let position = |name: &String| {
        axes.iter()
            .position(|axis| axis.name == *name)
            .ok_or_else(|| SpaceError::ReadsUnknown { constraint: constraint.name.clone(), parameter: name.clone() })
    };
    constraint.parameters.iter().map(position).collect()
}

/// Finds the constraint that leaves no legal combination: the first that excludes everything, alone or
/// together with those before it.
fn nothing_legal(axes: &[CountedParameter], tied: &[(&Constraint, &[usize])]) -> SpaceError {
    let leaves_nothing = |some: &[(&Constraint, &[usize])]| {
        let mut members: Vec<usize> = some.iter().flat_map(|(_, reads)| reads.iter().copied()).collect();
        members.sort_unstable();
        members.dedup();
        Diagram::new(axes, &members, some).is_ok_and(|diagram| diagram.len == 0)
    };
    let alone = (0..tied.len()).find(|&at| leaves_nothing(&tied[at..=at]));
    let together = || (0..tied.len()).find(|&at| leaves_nothing(&tied[..=at]));
    let at = alone.or_else(together).unwrap_or(tied.len() - 1);
    let earlier = if alone.is_some() { &[] } else { &tied[..at] };
    SpaceError::NothingLegal {
        constraint: tied[at].0.name.clone(),
        text: tied[at].0.text.clone(),
        earlier: earlier.iter().map(|(constraint, _)| constraint.name.clone()).collect(),
    }
}

/// Splits the parameters into the classes that constraints connect, in the order of their first parameters.
fn components(
    axes: &[CountedParameter],
    constraints: &[Constraint],
    reads: &[Vec<usize>],
) -> Result<Vec<Component>, SpaceError> {
    let mut class: Vec<usize> = (0..axes.len()).collect();
    for read in reads {
        let merged: Vec<usize> = read.iter().map(|&axis| class[axis]).collect();
        let lowest = *merged.iter().min().expect("invariant: a constraint reads something");
        class.iter_mut().filter(|c| merged.contains(c)).for_each(|c| *c = lowest);
    }
    let first = (0..axes.len()).filter(|&axis| class[axis] == axis);
    first
        .map(|axis| {
            let tied: Vec<_> = constraints
                .iter()
                .zip(reads)
                .filter(|(_, read)| class[read[0]] == axis)
                .map(|(c, r)| (c, r.as_slice()))
                .collect();
            if tied.is_empty() {
                return Ok(Component::Free { axis, len: axes[axis].len });
            }
            let members: Vec<usize> = (0..axes.len()).filter(|&other| class[other] == axis).collect();
            let diagram = Diagram::new(axes, &members, &tied)?;
            if diagram.len == 0 {
                return Err(nothing_legal(axes, &tied));
            }
            Ok(Component::Tied(diagram))
        })
        .collect()
}
