//! Constraints: named predicates over some of a space's parameters.

use std::fmt;
use std::sync::Arc;

use super::Value;

type Predicate = Arc<dyn Fn(&[&Value]) -> bool + Send + Sync>;

/// A predicate that every legal configuration satisfies, with the name by which a rejection cites it.
#[derive(Clone)]
pub struct Constraint {
    /// Unique within its space, for example `registers`.
    pub name: String,
    /// The predicate as a reader would write it, for example `mr * nr / 16 + mr <= 32`.
    pub text: String,
    /// The parameters it reads, in the order in which their values are handed to the predicate.
    pub parameters: Vec<String>,
    holds: Predicate,
}

impl Constraint {
    /// A constraint over `parameters`; `holds` gets their values in that order and depends on nothing else.
    ///
    /// ```
    /// # use tilewright_tune::Constraint;
    /// Constraint::new("registers", "mr * nr <= 24", &["mr", "nr"], |v| v[0].int() * v[1].int() <= 24);
    /// ```
    pub fn new(
        name: &str,
        text: &str,
        parameters: &[&str],
        holds: impl Fn(&[&Value]) -> bool + Send + Sync + 'static,
    ) -> Constraint {
        let parameters = parameters.iter().map(|name| name.to_string()).collect();
        Constraint { name: name.into(), text: text.into(), parameters, holds: Arc::new(holds) }
    }

    /// The constraint where a categorical parameter has this value; elsewhere anything is legal.
    pub fn only_where(mut self, parameter: &str, value: &str) -> Constraint {
        self.text = format!("{}, where {parameter} = {value}", self.text);
        self.parameters.insert(0, parameter.into());
        let (holds, value) = (self.holds, value.to_owned());
        self.holds = Arc::new(move |v| v[0].text() != value || holds(&v[1..]));
        self
    }

    /// The constraint but where a categorical parameter has this value; there anything is legal.
    pub fn except_where(mut self, parameter: &str, value: &str) -> Constraint {
        self.text = format!("{}, except where {parameter} = {value}", self.text);
        self.parameters.insert(0, parameter.into());
        let (holds, value) = (self.holds, value.to_owned());
        self.holds = Arc::new(move |v| v[0].text() == value || holds(&v[1..]));
        self
    }

    /// Whether the predicate holds for these values of [`Constraint::parameters`].
    pub fn holds(&self, values: &[&Value]) -> bool {
        (self.holds)(values)
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "Constraint({}: {})", self.name, self.text)
    }
}
