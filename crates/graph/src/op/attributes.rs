//! Attributes of nodes, and a node as an operator's import sees it.

use std::cell::Cell;

use super::Body;
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor};

/// Value of an attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum Attribute {
    /// Floating-point number.
    Float(f32),
    /// Integer.
    Int(i64),
    /// String.
    Text(String),
    /// Tensor.
    Tensor(Tensor),
    /// List of floating-point numbers.
    Floats(Vec<f32>),
    /// List of integers.
    Ints(Vec<i64>),
    /// List of strings.
    Texts(Vec<String>),
    /// Unsupported kind of attribute, by name.
    Foreign(String),
}

/// Attributes of a node, each with a flag whether the import has read it.
#[derive(Debug)]
pub struct Attributes(Vec<(String, Attribute, Cell<bool>)>);

/// Node to be imported as an operator.
#[derive(Debug)]
pub struct Import {
    /// Operator version that applies: the last of the row's `since` that is not newer than the model's opset.
    pub version: i64,
    /// Presence of each input; false for omitted optional ones.
    pub given: Vec<bool>,
    /// Number of outputs of the node.
    pub n_outputs: usize,
    /// Attributes of the node.
    pub attributes: Attributes,
    /// Subgraphs, each with the name of its attribute.
    pub bodies: Vec<(String, Body)>,
}

impl Attributes {
    /// Wraps attributes, none of them marked as read.
    pub fn new(attributes: Vec<(String, Attribute)>) -> Attributes {
        Attributes(attributes.into_iter().map(|(name, value)| (name, value, Cell::new(false))).collect())
    }

    fn get(&self, name: &str) -> Option<&Attribute> {
        let (_, value, used) = self.0.iter().find(|(n, ..)| n == name)?;
        used.set(true);
        Some(value)
    }

    /// Name of the first attribute that the import did not read, and therefore does not support.
    pub fn unused(&self) -> Option<&str> {
        self.0.iter().find(|(.., used)| !used.get()).map(|(name, ..)| name.as_str())
    }

    /// Tensor of a `Constant` node, whichever attribute holds it.
    ///
    /// # Errors
    /// If the attribute is missing or not supported.
    pub fn constant(&self) -> Result<Tensor, OpError> {
        match &self.0[..] {
            [(_, Attribute::Tensor(tensor), _)] => Ok(tensor.clone()),
            [(_, Attribute::Float(x), _)] => Ok(Tensor::scalar(DType::F32, f64::from(*x))),
            [(_, Attribute::Int(x), _)] => Ok(Tensor::from_integers(DType::I64, [], &[(*x).into()])),
            [(_, Attribute::Floats(xs), _)] => {
                let numbers: Vec<f64> = xs.iter().map(|&x| x.into()).collect();
                Ok(Tensor::from_floats(DType::F32, [xs.len()], &numbers))
            }
            [(_, Attribute::Ints(xs), _)] => Ok(Tensor::vector(xs)),
            [(_, Attribute::Foreign(what), _)] => Err(unsupported!("{what} is not supported")),
            [(name, ..)] => Err(unsupported!("a constant by `{name}` is not supported")),
            _ => Err(invalid!("a constant has one value")),
        }
    }
}

macro_rules! getters {
    ($($name:ident, $variant:ident, $type:ty, $kind:literal;)*) => {
        impl Import {
            $(
                #[doc = concat!("An attribute that is ", $kind, ", where it is given.\n\n# Errors\nWhere it is ",
                    "something else.")]
                pub fn $name(&self, name: &str) -> Result<Option<$type>, OpError> {
                    match self.attributes.get(name) {
                        None => Ok(None),
                        Some(Attribute::$variant(value)) => Ok(Some(value.clone())),
                        Some(Attribute::Foreign(what)) => Err(unsupported!("`{name}` is {what}: not supported")),
                        Some(_) => Err(invalid!("attribute `{name}` should be {}", $kind)),
                    }
                }
            )*
        }
    };
}

getters! {
    int, Int, i64, "an integer";
    float, Float, f32, "a number";
    ints, Ints, Vec<i64>, "integers";
    floats, Floats, Vec<f32>, "numbers";
    text, Text, String, "a text";
    texts, Texts, Vec<String>, "texts";
    tensor, Tensor, Tensor, "a tensor";
}

impl Import {
    /// Reads an integer attribute, or `default` if it is absent.
    ///
    /// # Errors
    /// If the attribute is not an integer.
    pub fn int_or(&self, name: &str, default: i64) -> Result<i64, OpError> {
        Ok(self.int(name)?.unwrap_or(default))
    }

    /// Reads a floating-point attribute, or `default` if it is absent.
    ///
    /// # Errors
    /// If the attribute is not a number.
    pub fn float_or(&self, name: &str, default: f32) -> Result<f64, OpError> {
        Ok(self.float(name)?.unwrap_or(default).into())
    }

    /// Reads a string attribute, or `default` if it is absent.
    ///
    /// # Errors
    /// If the attribute is not a string.
    pub fn text_or(&self, name: &str, default: &str) -> Result<String, OpError> {
        Ok(self.text(name)?.unwrap_or_else(|| default.to_owned()))
    }

    /// Reads an integer attribute as a flag: true unless it is 0; `default` if it is absent.
    ///
    /// # Errors
    /// If the attribute is not an integer.
    pub fn flag(&self, name: &str, default: bool) -> Result<bool, OpError> {
        Ok(self.int_or(name, default.into())? != 0)
    }

    /// Whether an input is present.
    pub fn has_input(&self, at: usize) -> bool {
        self.given.get(at).copied().unwrap_or(false)
    }

    /// Reads a string attribute that names one of `known`, and returns that name's value.
    ///
    /// # Errors
    /// If the attribute is not one of these names.
    pub fn one_of<T: Copy>(&self, name: &str, default: &str, known: &[(&str, T)]) -> Result<T, OpError> {
        let text = self.text_or(name, default)?;
        let found = known.iter().find(|(n, _)| *n == text).map(|(_, value)| *value);
        found.ok_or_else(|| unsupported!("{name}={text} is not supported"))
    }

    /// Takes the subgraph of an attribute.
    ///
    /// # Errors
    /// If there is no such subgraph.
    pub fn body(&self, name: &str) -> Result<Body, OpError> {
        let body = self.bodies.iter().find(|(n, _)| n == name).map(|(_, body)| body.clone());
        body.ok_or_else(|| invalid!("attribute `{name}` should be a graph"))
    }
}
