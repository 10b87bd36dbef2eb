//! Models and checkpoints as bytes of files.
//!
//! A model is two files: the weights as safetensors, and the rest as JSON. Numbers are four bytes wide, in
//! arrays without a shape: the JSON determines their shape.

use std::collections::HashMap;

use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorView};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::chain::{Chain, ClassifierTrees};
use super::encoding::Columns;
use super::network::{NetworkShape, SequenceNetwork};
use super::{FileKind, LearntWeights, ModelFiles, SequenceError, SequenceModel, Vocabulary};

/// Format name in a model's JSON file.
const FORMAT: &str = "tilewright sequence model 2";

/// Key of the metadata in a file of weights.
const TOLD: &str = "told";

/// Contents of the JSON file of a model.
#[derive(Serialize, Deserialize)]
struct ModelDescription {
    format: String,
    vocabulary: Vocabulary,
    inputs: ModelInputs,
    about: serde_json::Value,
}

/// Inputs of a model, which decide its shape.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ModelInputs {
    Chain(Columns),
    Network(NetworkShape),
}

pub(super) fn save(model: &SequenceModel, about: &serde_json::Value) -> ModelFiles {
    let mut stored = Stored::default();
    let inputs = match &model.weights {
        LearntWeights::Chain(chain) => {
            for (at, forest) in chain.forests.iter().enumerate() {
                let name = |what: &str| format!("forests.{at}.{what}");
                stored.push_places(name("roots"), &forest.roots);
                stored.push_places(name("column"), &forest.column);
                stored.push_floats(name("threshold"), &forest.threshold);
                stored.push_places(name("next"), &forest.next);
                stored.push_floats(name("leaves"), &forest.leaves);
                stored.push_floats(name("prior"), &forest.prior);
            }
            ModelInputs::Chain(chain.columns.clone())
        }
        LearntWeights::Network(network) => {
            network.weights().for_each(|(name, values)| stored.push_floats(name.into(), values));
            ModelInputs::Network(network.shape().clone())
        }
    };
    let description =
        ModelDescription { format: FORMAT.into(), vocabulary: model.vocabulary.clone(), inputs, about: about.clone() };
    let description = serde_json::to_vec_pretty(&description).expect("invariant: a description has only text keys");
    ModelFiles { weights: stored.to_bytes(None), description }
}

pub(super) fn load(files: &ModelFiles) -> Result<(SequenceModel, serde_json::Value), SequenceError> {
    let foreign = |reason: String| SequenceError::Foreign { kept: FileKind::Description, reason };
    let description: ModelDescription =
        serde_json::from_slice(&files.description).map_err(|e| foreign(e.to_string()))?;
    if description.format != FORMAT {
        return Err(foreign(format!("its format is \"{}\", this program reads \"{FORMAT}\"", description.format)));
    }
    let vocabulary = description.vocabulary;
    if let Some(parameter) = vocabulary.parameters.iter().find(|parameter| parameter.values.is_empty()) {
        return Err(foreign(format!("{} has no values", parameter.name)));
    }
    let reading = NumbersFile::open(&files.weights, FileKind::Weights)?;
    let weights = match description.inputs {
        ModelInputs::Chain(columns) => {
            let n_fields = vocabulary.fields.len();
            if !columns.fit(n_fields) {
                return Err(foreign(format!("its columns are of more than {n_fields} fields")));
            }
            let mut forests = Vec::with_capacity(vocabulary.parameters.len());
            for (at, parameter) in vocabulary.parameters.iter().enumerate() {
                let name = |what: &str| format!("forests.{at}.{what}");
                let n_values = parameter.values.len();
                let roots = reading.places(&name("roots"))?;
                let column = reading.places(&name("column"))?;
                let n_nodes = Some(column.len());
                let threshold = reading.floats(&name("threshold"), n_nodes)?;
                let next = reading.places(&name("next"))?;
                let leaves = reading.floats(&name("leaves"), None)?;
                let prior = reading.floats(&name("prior"), Some(n_values))?;
                let forest = ClassifierTrees { n_values, roots, column, threshold, next, leaves, prior };
                if !forest.is_sound(columns.len() + at) {
                    return Err(reading.foreign(format!("the trees of {} lead nowhere", parameter.name)));
                }
                forests.push(forest);
            }
            LearntWeights::Chain(Chain { columns, forests })
        }
        ModelInputs::Network(shape) => {
            if !shape.fits(&vocabulary) {
                return Err(foreign("its network is not one for its vocabulary".into()));
            }
            LearntWeights::Network(Box::new(SequenceNetwork::read(shape, |name, n| reading.floats(name, Some(n)))?))
        }
    };
    Ok((SequenceModel { vocabulary, weights }, description.about))
}

/// Arrays of numbers to be written to a file.
#[derive(Default)]
pub(super) struct Stored {
    tensors: Vec<(String, Dtype, Vec<u8>)>,
}

impl Stored {
    pub(super) fn push_floats(&mut self, name: String, values: &[f32]) {
        self.tensors.push((name, Dtype::F32, values.iter().flat_map(|v| v.to_le_bytes()).collect()));
    }

    fn push_places(&mut self, name: String, values: &[u32]) {
        self.tensors.push((name, Dtype::U32, values.iter().flat_map(|v| v.to_le_bytes()).collect()));
    }

    /// Returns the bytes of a file of the arrays, with a text as metadata.
    pub(super) fn to_bytes(&self, told: Option<String>) -> Vec<u8> {
        let views = self.tensors.iter().map(|(name, dtype, bytes)| {
            let view = TensorView::new(*dtype, vec![bytes.len() / 4], bytes);
            (name.clone(), view.expect("invariant: a tensor is as long as its bytes"))
        });
        let told = told.map(|told| HashMap::from([(TOLD.to_owned(), told)]));
        safetensors::serialize(views, told).expect("invariant: the tensors of a model can be written down")
    }
}

/// File of numbers.
pub(super) struct NumbersFile<'a> {
    kept: FileKind,
    bytes: &'a [u8],
    /// Description of the arrays in the file.
    metadata: Metadata,
    /// Offset of the numbers.
    start: usize,
}

impl<'a> NumbersFile<'a> {
    /// Opens the bytes of a file that should be of the kind `kept`.
    pub(super) fn open(bytes: &'a [u8], kept: FileKind) -> Result<NumbersFile<'a>, SequenceError> {
        let header = SafeTensors::read_metadata(bytes);
        let (n_header, metadata) = header.map_err(|e| SequenceError::Foreign { kept, reason: e.to_string() })?;
        // The header follows its length.
        Ok(NumbersFile { kept, start: size_of::<u64>() + n_header, metadata, bytes })
    }

    fn foreign(&self, reason: String) -> SequenceError {
        SequenceError::Foreign { kept: self.kept, reason }
    }

    /// Reads the metadata that were written with the numbers.
    pub(super) fn told<T: DeserializeOwned>(&self) -> Result<T, SequenceError> {
        let told = self.metadata.metadata().as_ref().and_then(|m| m.get(TOLD));
        let told = told.ok_or_else(|| self.foreign("it says nothing about itself".into()))?;
        serde_json::from_str(told).map_err(|e| self.foreign(e.to_string()))
    }

    fn numbers(&self, name: &str, dtype: Dtype, n: Option<usize>) -> Result<&[[u8; 4]], SequenceError> {
        let info = self.metadata.info(name).ok_or_else(|| self.foreign(format!("there is no {name}")))?;
        let (from, to) = info.data_offsets;
        let numbers = self.bytes[self.start + from..self.start + to].as_chunks::<4>().0;
        if info.dtype != dtype || n.is_some_and(|n| n != numbers.len()) {
            let (found, wanted) = (numbers.len(), n.map_or(String::new(), |n| format!("{n} ")));
            return Err(self.foreign(format!("{name} holds {found} of {:?}, not {wanted}of {dtype:?}", info.dtype)));
        }
        Ok(numbers)
    }

    /// Reads the numbers with this name; `n` is their expected count.
    pub(super) fn floats(&self, name: &str, n: Option<usize>) -> Result<Vec<f32>, SequenceError> {
        let numbers = self.numbers(name, Dtype::F32, n)?.iter().map(|&bytes| f32::from_le_bytes(bytes));
        let finite = |x: f32| if x.is_finite() { Ok(x) } else { Err(self.foreign(format!("{name} holds {x}"))) };
        numbers.map(finite).collect()
    }

    fn places(&self, name: &str) -> Result<Vec<u32>, SequenceError> {
        Ok(self.numbers(name, Dtype::U32, None)?.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect())
    }
}
