//! Models as files: the weights as safetensors, the rest as JSON beside them.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};

use super::chain::{Chain, Forest};
use super::encoding::Columns;
use super::{Architecture, Model, SequenceError, Vocabulary, Weights};

/// What the JSON file says.
#[derive(Serialize, Deserialize)]
struct Description {
    /// Says that the file is one of these, and which version of them.
    format: String,
    architecture: String,
    vocabulary: Vocabulary,
    columns: Columns,
    about: serde_json::Value,
}

const FORMAT: &str = "tilewright sequence model 1";

/// A tensor by its name; numbers are all four bytes wide.
struct Tensor {
    name: String,
    dtype: Dtype,
    bytes: Vec<u8>,
}

impl Tensor {
    fn of_floats(name: String, values: &[f32]) -> Tensor {
        Tensor { name, dtype: Dtype::F32, bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect() }
    }

    fn of_places(name: String, values: &[u32]) -> Tensor {
        Tensor { name, dtype: Dtype::U32, bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect() }
    }
}

pub(super) fn save(model: &Model, path: &Path, about: &serde_json::Value) -> Result<(), SequenceError> {
    let Weights::Chain(chain) = &model.weights;
    let mut tensors = Vec::new();
    for (at, forest) in chain.forests.iter().enumerate() {
        let name = |what: &str| format!("forests.{at}.{what}");
        tensors.extend([
            Tensor::of_places(name("roots"), &forest.roots),
            Tensor::of_places(name("column"), &forest.column),
            Tensor::of_floats(name("threshold"), &forest.threshold),
            Tensor::of_places(name("next"), &forest.next),
            Tensor::of_floats(name("leaves"), &forest.leaves),
            Tensor::of_floats(name("prior"), &forest.prior),
        ]);
    }
    let views: Vec<(String, TensorView)> = tensors
        .iter()
        .map(|t| {
            let view = TensorView::new(t.dtype, vec![t.bytes.len() / 4], &t.bytes);
            (t.name.clone(), view.expect("invariant: a tensor's length is that of its bytes"))
        })
        .collect();
    let bytes = safetensors::serialize(views, None).expect("invariant: names and lengths of tensors are in order");
    let description = Description {
        format: FORMAT.into(),
        architecture: model.architecture().row().name.into(),
        vocabulary: model.vocabulary.clone(),
        columns: chain.columns.clone(),
        about: about.clone(),
    };
    let json = serde_json::to_vec_pretty(&description).expect("invariant: a description has only text keys");
    write(path, &bytes)?;
    write(&beside(path), &json)
}

/// The JSON file of these weights.
fn beside(path: &Path) -> PathBuf {
    path.with_extension("json")
}

/// Writes a file so that it is there in whole or not at all.
fn write(path: &Path, bytes: &[u8]) -> Result<(), SequenceError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    let part = path.with_file_name(name);
    fs::write(&part, bytes).and_then(|()| fs::rename(&part, path)).map_err(|source| SequenceError::File {
        path: path.into(),
        action: "write",
        source,
    })
}

fn read(path: &Path) -> Result<Vec<u8>, SequenceError> {
    fs::read(path).map_err(|source| SequenceError::File { path: path.into(), action: "read", source })
}

pub(super) fn load(path: &Path) -> Result<(Model, serde_json::Value), SequenceError> {
    let foreign = |expected, reason: String| SequenceError::Foreign { path: path.into(), expected, reason };
    let json_path = beside(path);
    let json = read(&json_path)?;
    let description: Description = serde_json::from_slice(&json).map_err(|e| SequenceError::Foreign {
        path: json_path,
        expected: "the description of a model",
        reason: e.to_string(),
    })?;
    let bytes = read(path)?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| foreign("a whole file of weights", e.to_string()))?;
    let numbers = |name: &str, dtype: Dtype| -> Result<Vec<[u8; 4]>, SequenceError> {
        let tensor = tensors.tensor(name).map_err(|e| foreign("the weights of this model", e.to_string()))?;
        if tensor.dtype() != dtype {
            return Err(foreign("the weights of this model", format!("{name} is of {:?}", tensor.dtype())));
        }
        Ok(tensor.data().as_chunks::<4>().0.to_vec())
    };
    let floats = |name: &str| numbers(name, Dtype::F32).map(|v| v.into_iter().map(f32::from_le_bytes).collect());
    let places = |name: &str| numbers(name, Dtype::U32).map(|v| v.into_iter().map(u32::from_le_bytes).collect());
    let mut forests = Vec::new();
    for (at, parameter) in description.vocabulary.parameters.iter().enumerate() {
        let name = |what: &str| format!("forests.{at}.{what}");
        forests.push(Forest {
            n_values: parameter.values.len(),
            roots: places(&name("roots"))?,
            column: places(&name("column"))?,
            threshold: floats(&name("threshold"))?,
            next: places(&name("next"))?,
            leaves: floats(&name("leaves"))?,
            prior: floats(&name("prior"))?,
        });
    }
    let _ = Architecture::named(&description.architecture);
    let weights = Weights::Chain(Chain { columns: description.columns, forests });
    Ok((Model { vocabulary: description.vocabulary, weights }, description.about))
}
