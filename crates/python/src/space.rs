//! Spaces of parameters.

use std::sync::Arc;

use pyo3::exceptions::{PyIndexError, PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyList, PyString};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright::{Request, Workload};
use tilewright_search::expression::{Datum, Expression, ValueType, VariableNames};
use tilewright_search::{self as core, Config, Constraint, ListedProduct, Parameter, Value};

use crate::value::{self, Threads, Whole};

/// Name of spaces made from Python.
const NAME: &str = "python";
/// Maximum number of a parameter's values that a message lists.
const MOST_NAMED: usize = 12;

/// Space of the legal configurations of parameters under restrictions; a configuration is a dict.
///
/// `params` has a list of values for each parameter, like `tune_params` of Kernel Tuner. `restrictions` are
/// conditions in Python syntax, such as `"tile * threads <= 64"`, all of which must hold. If `configurations`
/// are given, only these are legal: dicts, or tuples in the order of the parameters.
///
/// A space knows exactly how many legal configurations it has, numbers them, and draws them uniformly.
#[pyclass(frozen, module = "tilewright")]
pub struct Space {
    pub space: Arc<core::Space>,
    /// Values by parameter; `None` for the space of a template.
    listed: Option<Vec<Listed>>,
}

/// Values of a parameter as given by Python.
struct Listed {
    name: Py<PyString>,
    /// Values by rank.
    values: Vec<Py<PyAny>>,
    /// Rank of each hashable value.
    ranks: Py<PyDict>,
}

impl Listed {
    fn rank(&self, value: &Bound<PyAny>) -> PyResult<Option<u64>> {
        let py = value.py();
        match self.ranks.bind(py).get_item(value) {
            Ok(rank) => rank.map(|rank| rank.extract()).transpose(),
            // Lists are not hashable.
            Err(_) => {
                let is_it = |known: &Py<PyAny>| known.bind(py).eq(value).unwrap_or(false);
                Ok(self.values.iter().position(is_it).map(|rank| rank as u64))
            }
        }
    }
}

/// Sorts values in the order in which searches see them; returns them with their representations there.
fn ordered<'py>(values: &Bound<'py, PyAny>) -> PyResult<(Vec<Bound<'py, PyAny>>, Vec<Datum>)> {
    let mut pairs = Vec::new();
    for value in listed(values, "a list of values, such as [8, 16, 32]")? {
        let value = value?;
        pairs.push((value::datum(&value)?, value));
    }
    let number = |datum: &Datum| match datum {
        Datum::Int(number) => Some(*number as f64),
        Datum::Float(number) if number.is_finite() => Some(*number),
        _ => None,
    };
    if pairs.iter().all(|(datum, _)| number(datum).is_some()) {
        pairs.sort_by(|(a, _), (b, _)| number(a).partial_cmp(&number(b)).unwrap_or(std::cmp::Ordering::Equal));
    }
    let (data, values) = pairs.into_iter().unzip();
    Ok((values, data))
}

/// Iterates over a list, and refuses texts and what cannot be iterated over; `takes` says what to give.
fn listed<'py>(given: &Bound<'py, PyAny>, takes: &str) -> PyResult<Bound<'py, PyIterator>> {
    let items = if given.is_instance_of::<PyString>() { None } else { given.try_iter().ok() };
    items.ok_or_else(|| value::refuse(format!("give {takes}, not {}", value::repr(given))))
}

/// Makes the parameter of these values. Non-integers are represented by their indices in ascending order.
fn parameter(name: &str, data: &[Datum]) -> Parameter {
    let is_number = |datum: &Datum| matches!(datum, Datum::Int(_) | Datum::Float(_));
    let has_fractions = data.iter().any(|datum| matches!(datum, Datum::Float(_)));
    if has_fractions && data.iter().all(is_number) {
        return Parameter::ordinal(name, 0..data.len() as i64);
    }
    Parameter::of_data(name, data)
}

/// Parses a restriction on these parameters with these values.
fn constraint(text: &str, parameters: &[Parameter], data: &[Vec<Datum>]) -> PyResult<Constraint> {
    let wrong = |error| value::refuse(format!("the restriction `{text}`: {error}"));
    let has_fractions = |data: &Vec<Datum>| data.iter().any(|datum| matches!(datum, Datum::Float(_)));
    if !data.iter().any(has_fractions) {
        return Constraint::parse(text, text, parameters).map_err(wrong);
    }
    let types = parameters.iter().zip(data).map(|(parameter, data)| (parameter.name.clone(), ValueType::of_all(data)));
    let scope: VariableNames = types.collect();
    let code = Expression::parse(text).and_then(|expression| expression.compile_condition(&scope)).map_err(wrong)?;
    let mut reads = Vec::new();
    code.reads(&mut reads);
    reads.sort_unstable();
    reads.dedup();
    // For each parameter read: the representation in the space of each value.
    let tables: Vec<Vec<(Value, Datum)>> = reads
        .iter()
        .map(|&at| {
            let space = core::Space::new("one", vec![parameters[at].clone()], Vec::new());
            let space = space.map_err(value::refuse)?;
            Ok((0..).map(|rank| space.value_at(0, rank)).zip(data[at].iter().cloned()).collect())
        })
        .collect::<PyResult<_>>()?;
    let names: Vec<&str> = reads.iter().map(|&at| parameters[at].name.as_str()).collect();
    let n_slots = parameters.len();
    let slots_of = reads.clone();
    Ok(Constraint::new(text, text, &names, move |values| {
        let mut slots: Vec<Option<Datum>> = vec![None; n_slots];
        for ((value, table), &slot) in values.iter().zip(&tables).zip(&slots_of) {
            slots[slot] = table.iter().find(|(known, _)| known == *value).map(|(_, datum)| datum.clone());
        }
        code.holds(&slots)
    }))
}

/// Texts of restrictions, given as one string or several.
fn texts(restrictions: Option<&Bound<PyAny>>) -> PyResult<Vec<String>> {
    let Some(restrictions) = restrictions else { return Ok(Vec::new()) };
    if let Ok(text) = restrictions.extract::<String>() {
        return Ok(vec![text]);
    }
    let text = |item: PyResult<Bound<PyAny>>| {
        let item = item?;
        item.extract::<String>().map_err(|_| {
            let advice = "write it as a text, such as \"tile * threads <= 64\", or list what is legal";
            let found = value::repr(&item);
            value::refuse(format!("the restriction {found} is no text ({advice} with configurations=)"))
        })
    };
    listed(restrictions, "a restriction as a text, such as \"tile * threads <= 64\", or a list of them")?
        .map(text)
        .collect()
}

#[pymethods]
impl Space {
    #[new]
    #[pyo3(signature = (params, restrictions=None, *, configurations=None))]
    fn new(
        params: &Bound<PyDict>,
        restrictions: Option<&Bound<PyAny>>,
        configurations: Option<&Bound<PyAny>>,
    ) -> PyResult<Space> {
        let py = params.py();
        if params.is_empty() {
            return Err(value::refuse("there are no parameters (give a dict of lists: {\"tile\": [8, 16, 32]})"));
        }
        let (mut parameters, mut data, mut listed) = (Vec::new(), Vec::new(), Vec::new());
        for (name, values) in params.iter() {
            let no_text = |_| value::refuse(format!("a parameter's name is a text, not {}", value::repr(&name)));
            let text: String = name.extract().map_err(no_text)?;
            let wrong = |error: PyErr| value::refuse(format!("parameter {text}: {}", error.value(py)));
            let (values, of_values) = ordered(&values).map_err(wrong)?;
            let ranks = PyDict::new(py);
            for (rank, value) in values.iter().enumerate() {
                if value.hash().is_err() {
                    continue;
                }
                if let Some(other) = ranks.get_item(value)? {
                    let [value, other] =
                        [value.repr()?, values[other.extract::<usize>()?].repr()?].map(|t| t.to_string());
                    let same = if value == other { String::new() } else { format!(": it equals {other}") };
                    return Err(value::refuse(format!("parameter {text} lists {value} twice{same}")));
                }
                ranks.set_item(value, rank)?;
            }
            let values = values.into_iter().map(Bound::unbind).collect();
            listed.push(Listed { name: PyString::intern(py, &text).unbind(), values, ranks: ranks.unbind() });
            parameters.push(parameter(&text, &of_values));
            data.push(of_values);
        }
        let restrictions = texts(restrictions)?;
        let constraint = |text: &String| constraint(text, &parameters, &data);
        let constraints = restrictions.iter().map(constraint).collect::<PyResult<Vec<_>>>()?;
        let space = match configurations {
            None => py.detach(|| core::Space::new(NAME, parameters, constraints)).map_err(value::refuse)?,
            Some(_) if !constraints.is_empty() => {
                return Err(value::refuse("give restrictions or configurations, which say themselves what is legal"));
            }
            Some(configurations) => {
                let configurations = self::listed(configurations, "a list of configurations: dicts or tuples")?;
                let configs = configurations.map(|item| ranks(&listed, &item?));
                let configs = configs.collect::<PyResult<Vec<Config>>>()?;
                let product = ListedProduct::new(NAME, parameters).map_err(value::refuse)?;
                py.detach(|| product.only(&configs)).map_err(value::refuse)?
            }
        };
        Ok(Space { space: Arc::new(space), listed: Some(listed) })
    }

    /// Exact number of legal configurations.
    #[getter]
    fn size(&self) -> u128 {
        self.space.size()
    }

    /// Names of the parameters, in order.
    #[getter]
    fn names(&self) -> Vec<&str> {
        self.space.names().collect()
    }

    /// Values of each parameter, in the order in which searches see them, regardless of restrictions; a
    /// description for a factorization or an order, which have too many values.
    #[getter]
    fn params<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let dict = PyDict::new(py);
        match &self.listed {
            Some(listed) => {
                for Listed { name, values, .. } in listed {
                    dict.set_item(name, PyList::new(py, values.iter().map(|value| value.bind(py)))?)?;
                }
            }
            None => {
                let all = self.space.describe();
                for parameter in all["parameters"].as_array().into_iter().flatten() {
                    let what = if parameter["kind"] == "factorization" { parameter } else { &parameter["values"] };
                    dict.set_item(parameter["name"].as_str().unwrap_or_default(), value::python(py, what)?)?;
                }
            }
        }
        Ok(dict.into_any())
    }

    /// Restrictions as text.
    #[getter]
    fn restrictions(&self) -> Vec<&str> {
        self.space.constraints().iter().map(|constraint| constraint.text.as_str()).collect()
    }

    fn __len__(&self) -> PyResult<usize> {
        let too_large = || value::refuse("there are more configurations than `len` can say (`size` says it)");
        usize::try_from(self.space.size()).ok().filter(|n| isize::try_from(*n).is_ok()).ok_or_else(too_large)
    }

    fn __repr__(&self) -> String {
        let names = self.space.names().collect::<Vec<_>>().join(", ");
        format!("Space({names}: {} configurations)", self.space.size())
    }

    /// Whether a configuration is legal.
    fn contains(&self, config: &Bound<PyAny>) -> bool {
        self.config(config).is_ok()
    }

    fn __contains__(&self, config: &Bound<PyAny>) -> bool {
        self.contains(config)
    }

    /// Reason why a configuration is not legal; None if it is.
    fn violated(&self, config: &Bound<PyAny>) -> Option<String> {
        self.config(config).err().map(|error| error.value(config.py()).to_string())
    }

    /// Legal configuration with this index; negative ones count from the end.
    fn config_at<'py>(&self, py: Python<'py>, index: &Bound<PyAny>) -> PyResult<Bound<'py, PyDict>> {
        let size = self.space.size();
        let at = match index.extract::<i128>() {
            Ok(index) if index < 0 => size.checked_sub(index.unsigned_abs()),
            Ok(index) => Some(index.unsigned_abs()),
            Err(error) if error.is_instance_of::<PyOverflowError>(py) => None,
            Err(_) => {
                let reason = format!("an index is a whole number, not {}", value::repr(index));
                return Err(PyTypeError::new_err(reason));
            }
        };
        match at.filter(|at| *at < size) {
            Some(at) => self.dict(py, &self.space.config_at(at)),
            None => Err(PyIndexError::new_err(format!("there is no configuration {index} of {size}"))),
        }
    }

    /// Index of a legal configuration.
    fn index_of(&self, config: &Bound<PyAny>) -> PyResult<u128> {
        let config = self.config(config)?;
        Ok(self.space.index_of(&config).expect("invariant: it is legal"))
    }

    /// Legal configurations, each drawn with the same probability: one, or a list of `n`, drawn with
    /// replacement.
    #[pyo3(signature = (n=None, *, seed=Whole(0)))]
    fn sample<'py>(&self, py: Python<'py>, n: Option<Whole<usize>>, seed: Whole<u64>) -> PyResult<Bound<'py, PyAny>> {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed.0);
        let mut draw = || self.dict(py, &self.space.sample(&mut rng));
        match n {
            None => Ok(draw()?.into_any()),
            Some(Whole(n)) => {
                let drawn = (0..n).map(|_| draw()).collect::<PyResult<Vec<_>>>()?;
                Ok(PyList::new(py, drawn)?.into_any())
            }
        }
    }

    /// Legal configurations that differ in one parameter by one step.
    fn neighbours<'py>(&self, config: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let around = self.space.neighbours(&self.config(config)?);
        around.iter().map(|config_| self.dict(config.py(), config_)).collect()
    }

    fn __iter__(slf: Py<Space>) -> Configurations {
        Configurations { space: slf, next: 0 }
    }
}

impl Space {
    /// Wraps a space whose values can all be converted to JSON.
    pub fn of_json(space: Arc<core::Space>) -> Space {
        Space { space, listed: None }
    }

    /// Converts a configuration to a dict.
    pub fn dict<'py>(&self, py: Python<'py>, config: &Config) -> PyResult<Bound<'py, PyDict>> {
        let Some(listed) = &self.listed else {
            let dict = value::python(py, &self.space.config_to_json(config))?;
            return Ok(dict.cast_into::<PyDict>()?);
        };
        let dict = PyDict::new(py);
        for (Listed { name, values, .. }, &rank) in listed.iter().zip(config.ranks()) {
            dict.set_item(name, &values[rank as usize])?;
        }
        Ok(dict)
    }

    /// Converts a dict, or a tuple in the order of the parameters, to a legal configuration.
    pub fn config(&self, given: &Bound<PyAny>) -> PyResult<Config> {
        let Some(listed) = &self.listed else {
            return self.space.config_from_json(&value::json(given)?).map_err(value::refuse);
        };
        let config = ranks(listed, given)?;
        if self.space.contains(&config) {
            return Ok(config);
        }
        let dict = self.dict(given.py(), &config)?;
        let text = self.space.violated(&config).map_or("listed", |constraint| constraint.text.as_str());
        Err(value::refuse(format!("the restriction `{text}` does not hold for {dict}")))
    }
}

/// Converts a dict, or a tuple in the order of the parameters, to a combination of values, legal or not.
fn ranks(listed: &[Listed], given: &Bound<PyAny>) -> PyResult<Config> {
    let py = given.py();
    let dict = given.cast::<PyDict>().ok();
    let mut ranks = Vec::with_capacity(listed.len());
    for (at, parameter) in listed.iter().enumerate() {
        let name = parameter.name.bind(py);
        let value = match dict {
            Some(dict) => dict.get_item(name)?,
            None => given.get_item(at).ok(),
        };
        let value = value.ok_or_else(|| value::refuse(format!("parameter {name} is missing")))?;
        let rank = parameter.rank(&value)?.ok_or_else(|| {
            let known = parameter.values.iter().take(MOST_NAMED).map(|value| value.to_string());
            let known = known.collect::<Vec<_>>().join(", ");
            let more = if parameter.values.len() > MOST_NAMED { ", …" } else { "" };
            let value = value::repr(&value);
            value::refuse(format!("parameter {name} cannot be {value}; allowed: {known}{more}"))
        })?;
        ranks.push(rank);
    }
    let n_given = given.len()?;
    if n_given != listed.len() {
        let names = listed.iter().map(|parameter| parameter.name.to_string()).collect::<Vec<_>>().join(", ");
        let reason = format!("a configuration has {} parameters, not {n_given}: {names}", listed.len());
        return Err(value::refuse(reason));
    }
    Ok(Config::new(ranks))
}

/// Iterator over the configurations of a space, in order.
#[pyclass]
struct Configurations {
    space: Py<Space>,
    next: u128,
}

#[pymethods]
impl Configurations {
    fn __iter__(slf: PyRef<Self>) -> PyRef<Self> {
        slf
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let of = self.space.get();
        if self.next >= of.space.size() {
            return Ok(None);
        }
        self.next += 1;
        of.dict(py, &of.space.config_at(self.next - 1)).map(Some)
    }
}

/// Space of a workload's template on this machine; the default template is the operator's first one.
#[pyfunction]
#[pyo3(signature = (workload, *, threads=Threads(1), template=None))]
pub fn workload_space(workload: &str, threads: Threads, template: Option<String>) -> PyResult<Space> {
    let workload = Workload::parse(workload).map_err(value::refuse)?;
    let request = Request::new(workload).threads(threads.0);
    let request = template.into_iter().fold(request, Request::template);
    Ok(Space::of_json(request.task().map_err(value::error)?.space))
}
