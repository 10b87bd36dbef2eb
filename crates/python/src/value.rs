//! Conversion of values between Python and Rust.

use std::ffi::CString;

use pyo3::exceptions::{PyOverflowError, PyRuntimeError, PyTypeError, PyUserWarning, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyList, PyString, PyTuple};
use serde_json::{Map, Number, Value as Json};
use tilewright::Error;
use tilewright_search::expression::Datum;

/// Argument that is a whole number, `LEAST` or above.
pub struct Whole<T, const LEAST: u64 = 0>(pub T);

/// Argument `threads`, 1 or more.
pub struct Threads(pub usize);

impl<T: TryFrom<u64>, const LEAST: u64> FromPyObject<'_, '_> for Whole<T, LEAST> {
    type Error = PyErr;

    fn extract(given: Borrowed<PyAny>) -> PyResult<Self> {
        let error = match given.extract::<u64>() {
            Ok(number) if number >= LEAST => match T::try_from(number) {
                Ok(number) => return Ok(Whole(number)),
                Err(_) => None,
            },
            found => found.err(),
        };
        let reason = format!("give a whole number from {LEAST} to {}, not {}", u64::MAX, repr(&given));
        let is_number = error.is_none_or(|error| error.is_instance_of::<PyOverflowError>(given.py()));
        Err(if is_number { PyValueError::new_err(reason) } else { PyTypeError::new_err(reason) })
    }
}

impl FromPyObject<'_, '_> for Threads {
    type Error = PyErr;

    fn extract(given: Borrowed<PyAny>) -> PyResult<Self> {
        let threads = given.extract().ok().filter(|threads| *threads > 0).map(Threads);
        threads.ok_or_else(|| refuse(format!("threads takes a whole number of 1 or above, not {}", repr(&given))))
    }
}

/// Python's text of a value, for messages.
pub fn repr(value: &Bound<PyAny>) -> String {
    value.repr().map_or_else(|_| "this".to_owned(), |text| text.to_string())
}

/// Converts a value to the form that expressions see.
///
/// # Errors
/// If the value is not a number, string, boolean, `None`, or list of these.
pub fn datum(value: &Bound<PyAny>) -> PyResult<Datum> {
    if value.is_none() {
        Ok(Datum::Nothing)
    } else if let Ok(text) = value.cast::<PyString>() {
        Ok(Datum::Text(text.to_string().into()))
    } else if value.is_instance_of::<PyBool>() {
        Ok(Datum::Bool(value.is_truthy()?))
    } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        Ok(Datum::List(value.try_iter()?.map(|item| datum(&item?)).collect::<PyResult<Vec<_>>>()?.into()))
    } else if value.is_instance_of::<PyFloat>() {
        Ok(Datum::Float(value.extract()?))
    } else if let Ok(number) = value.extract::<i64>() {
        // NumPy's integers, too.
        Ok(Datum::Int(number))
    } else if let Ok(number) = value.extract::<f64>() {
        Ok(Datum::Float(number))
    } else {
        let reason = "give numbers of 64 bits, texts, True and False, None, or lists of these";
        Err(PyTypeError::new_err(format!("{} cannot be the value of a parameter ({reason})", value.repr()?)))
    }
}

/// Converts a value to JSON.
///
/// # Errors
/// As [`datum`], or if a number does not exist in JSON, or the key of an entry is not a string.
pub fn json(value: &Bound<PyAny>) -> PyResult<Json> {
    if let Ok(entries) = value.cast::<PyDict>() {
        let entry = |(name, value): (Bound<PyAny>, Bound<PyAny>)| {
            let name: String = name.extract()?;
            let wrong = |error: PyErr| refuse(format!("{name}: {}", error.value(value.py())));
            let value = json(&value).map_err(wrong)?;
            Ok((name, value))
        };
        return Ok(Json::Object(entries.iter().map(entry).collect::<PyResult<Map<_, _>>>()?));
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        return value.try_iter()?.map(|item| json(&item?)).collect::<PyResult<Vec<_>>>().map(Json::Array);
    }
    match value.extract::<u64>() {
        Ok(large) if large > i64::MAX as u64 => Ok(large.into()),
        _ => match datum(value)? {
            Datum::Float(number) if !number.is_finite() => Err(refuse(format!("{number} is not a finite number"))),
            datum => Ok(datum.to_json()),
        },
    }
}

/// Converts JSON to Python values.
///
/// # Errors
/// If memory does not suffice.
pub fn python<'py>(py: Python<'py>, json: &Json) -> PyResult<Bound<'py, PyAny>> {
    let number = |number: &Number| match (number.as_i64(), number.as_u64()) {
        (Some(whole), _) => Ok(whole.into_pyobject(py)?.into_any()),
        (None, Some(whole)) => Ok(whole.into_pyobject(py)?.into_any()),
        (None, None) => Ok(number.as_f64().into_pyobject(py)?),
    };
    match json {
        Json::Null => Ok(py.None().into_bound(py)),
        Json::Bool(holds) => Ok(PyBool::new(py, *holds).to_owned().into_any()),
        Json::Number(value) => number(value),
        Json::String(text) => Ok(PyString::new(py, text).into_any()),
        Json::Array(items) => {
            let items = items.iter().map(|item| python(py, item)).collect::<PyResult<Vec<_>>>()?;
            Ok(PyList::new(py, items)?.into_any())
        }
        Json::Object(entries) => {
            let dict = PyDict::new(py);
            entries.iter().try_for_each(|(name, value)| dict.set_item(name, python(py, value)?))?;
            Ok(dict.into_any())
        }
    }
}

/// Issues a warning for each line.
pub fn warn(py: Python, lines: &[String]) -> PyResult<()> {
    let category = py.get_type::<PyUserWarning>();
    let warn = |line: &String| PyErr::warn(py, &category, &CString::new(line.replace('\0', " "))?, 1);
    lines.iter().try_for_each(warn)
}

/// Error for an invalid argument.
pub fn refuse(reason: impl ToString) -> PyErr {
    PyValueError::new_err(reason.to_string())
}

/// Converts an error to a Python exception: `ValueError` if the input is at fault, else `RuntimeError`.
pub fn error(error: Error) -> PyErr {
    if error.is_input() { refuse(error) } else { PyRuntimeError::new_err(error.to_string()) }
}
