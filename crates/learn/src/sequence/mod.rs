//! Sequence models that predict the parameters of a kernel, one after another, from the sizes of a problem.
//!
//! A [`Vocabulary`] defines the fields of problems and the parameters of answers; [`train`] fits a
//! [`SequenceModel`] of an [`Architecture`] to [`Example`]s, and [`SequenceModel::answers`] decodes the most
//! likely answers for a new problem, restricted by [`Completions`] to valid ones.
//!
//! # Source
//! "Optimal Kernel Tuning Parameter Prediction using Deep Sequence Models", for all architectures except
//! [`Architecture::Chain`].

mod beam;
mod chain;
mod encoding;
mod error;
mod file;
mod network;

use std::io;
use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};

pub use beam::{Completions, LikelyAnswer};
pub use error::{FileKind, SequenceError};

use chain::Chain;
use network::SequenceNetwork;

/// Number of answers that a chain compares when a single one is requested.
const N_COMPARED: usize = 30;

/// Vocabulary of problems and answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vocabulary {
    /// Fields of a problem.
    pub fields: Vec<Field>,
    /// Parameters of an answer, in the order in which a model predicts them.
    pub parameters: Vec<KernelParameter>,
}

/// Field of a problem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Field {
    /// Name of the field.
    pub name: String,
    /// Kind of its values.
    pub kind: FieldKind,
}

/// Kind of a field's values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FieldKind {
    /// Integer, such as a size or count; close numbers, and those with common divisors, are similar.
    Integer,
    /// Category.
    Categorical {
        /// Categories in the training data; an example holds the index of one, or -1 for any other.
        values: Vec<String>,
    },
}

/// Parameter of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelParameter {
    /// Name of the parameter.
    pub name: String,
    /// Values as text, in a meaningful order; numbers ascend.
    pub values: Vec<String>,
}

/// Training example: a problem with its best parameters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Example {
    /// Value of each field: the number, or the index of the category (-1 for an unknown one).
    pub problem: Vec<i64>,
    /// Index of each parameter's value.
    pub answer: Vec<u32>,
}

/// Architecture of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "&str", try_from = "String")]
pub enum Architecture {
    /// See [`ARCHITECTURES`].
    EncDec,
    /// See [`ARCHITECTURES`].
    Attn,
    /// See [`ARCHITECTURES`].
    Attn2,
    /// See [`ARCHITECTURES`].
    Hybrid,
    /// See [`ARCHITECTURES`].
    Hybrid2,
    /// See [`ARCHITECTURES`].
    Chain,
}

/// Row of [`ARCHITECTURES`]: name and description.
#[derive(Debug)]
pub struct ArchitectureRow {
    /// The architecture.
    pub architecture: Architecture,
    /// Name for users.
    pub name: &'static str,
    /// Description for users, in one line.
    pub what: &'static str,
    /// Source of the architecture.
    pub source: &'static str,
    /// Whether training stops when the validation loss no longer falls. Otherwise the validation examples can
    /// be trained on, too.
    pub stops_early: bool,
}

/// Table of architectures.
pub const ARCHITECTURES: &[ArchitectureRow] = &[
    ArchitectureRow {
        architecture: Architecture::Chain,
        name: "chain",
        what: "classifier chain of random forests: each parameter from the problem and the parameters before it",
        source: "Read et al. 2009 (classifier chains); Geurts et al. 2006 (extremely randomized trees)",
        stops_early: false,
    },
    ArchitectureRow {
        architecture: Architecture::EncDec,
        name: "enc-dec",
        what: "LSTM encoder and LSTM decoder",
        source: "section IV-A",
        stops_early: true,
    },
    ArchitectureRow {
        architecture: Architecture::Attn,
        name: "attn",
        what: "bidirectional LSTM encoder, attention, LSTM decoder that sees what it has written",
        source: "section IV-B, with the feedback of Bahdanau et al.",
        stops_early: true,
    },
    ArchitectureRow {
        architecture: Architecture::Attn2,
        name: "attn-2",
        what: "as attn, but the decoder does not see what it has written",
        source: "section IV-B",
        stops_early: true,
    },
    ArchitectureRow {
        architecture: Architecture::Hybrid,
        name: "hybrid",
        what: "convolutional encoder, stack of bidirectional LSTMs as decoder",
        source: "section IV-C, figure 3",
        stops_early: true,
    },
    ArchitectureRow {
        architecture: Architecture::Hybrid2,
        name: "hybrid-2",
        what: "as hybrid, but only the last states of the first decoder layer go on to the second",
        source: "section IV-C, figure 4",
        stops_early: true,
    },
];

impl Architecture {
    /// Row of the architecture in [`ARCHITECTURES`].
    pub fn row(self) -> &'static ArchitectureRow {
        ARCHITECTURES.iter().find(|row| row.architecture == self).expect("invariant: every architecture has a row")
    }

    /// Architecture by name; `None` for an unknown one.
    pub fn named(name: &str) -> Option<Architecture> {
        ARCHITECTURES.iter().find(|row| row.name == name).map(|row| row.architecture)
    }
}

impl From<Architecture> for &str {
    fn from(architecture: Architecture) -> Self {
        architecture.row().name
    }
}

impl TryFrom<String> for Architecture {
    type Error = String;

    fn try_from(name: String) -> Result<Architecture, String> {
        Architecture::named(&name).ok_or_else(|| format!("there is no architecture {name}"))
    }
}

/// Encoding of a problem's numbers as network inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Encoding {
    /// Magnitude, divisibility and products, which generalise to unseen numbers.
    Numeric,
    /// Token (one-hot) for each number in the training data, as in the paper; all others share one.
    OneHot,
}

/// Training options of a model. Defaults are those of the paper if it gives any, except for the encoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Training {
    /// Maximum number of epochs.
    pub epochs: usize,
    /// Batch size.
    pub batch: usize,
    /// Patience: epochs without a lower validation loss after which training stops.
    pub patience: usize,
    /// Learning rate of Adam.
    pub learning_rate: f64,
    /// Dropout rate of an LSTM's inputs and recurrent state.
    pub dropout: f64,
    /// Encoding of the numbers of problems.
    pub encoding: Encoding,
    /// Width of LSTM states; the decoders of attention models are twice as wide.
    pub n_hidden: usize,
    /// Number of trees in each forest.
    pub n_trees: usize,
    /// Seed of all randomness.
    pub seed: u64,
}

impl Default for Training {
    fn default() -> Training {
        Training {
            epochs: 200,
            batch: 64,
            patience: 10,
            learning_rate: 1e-3,
            dropout: 0.2,
            encoding: Encoding::Numeric,
            n_hidden: 256,
            n_trees: 100,
            seed: 0,
        }
    }
}

/// Progress of a training. For a network, an epoch is a pass over the examples; for a chain, it is a
/// parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainingProgress {
    /// Completed epochs, those before an interruption included.
    pub epochs: Vec<Epoch>,
    /// Maximum number of epochs.
    pub n_epochs: usize,
    /// Epoch with the lowest validation loss so far, from 1.
    pub best_epoch: usize,
}

/// Fit of a model after an epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Epoch {
    /// Fit to the training examples; for a network, averaged over the epoch and with dropout.
    pub train: Fit,
    /// Fit to the validation examples, without dropout.
    pub validation: Fit,
}

/// Fit of a model to examples, with teacher forcing: each value is predicted given the correct values before
/// it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// Cross-entropy loss: the mean over examples of the answer's negative log-likelihood.
    pub loss: f64,
    /// Accuracy: share of values whose most likely prediction is correct.
    pub accuracy: f64,
}

/// Trained model.
#[derive(Debug, Clone)]
pub struct SequenceModel {
    vocabulary: Vocabulary,
    weights: LearntWeights,
}

/// Learnt weights of a model.
#[derive(Debug, Clone)]
enum LearntWeights {
    Chain(Chain),
    Network(Box<SequenceNetwork>),
}

/// Serialized model: the contents of its two files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFiles {
    /// Weights, as safetensors.
    pub weights: Vec<u8>,
    /// Description of the model, as JSON.
    pub description: Vec<u8>,
}

/// Checkpointing, with which an interrupted training of a network can resume.
pub struct Checkpoint<'a> {
    /// Last checkpoint to resume from, if any.
    pub kept: Option<Vec<u8>>,
    /// Stores a checkpoint after each epoch, replacing the previous one.
    pub keep: &'a mut dyn FnMut(&[u8]) -> io::Result<()>,
}

/// Examples to train a model on, all of one vocabulary.
#[derive(Debug, Clone, Copy)]
pub struct TrainingData<'a> {
    /// Fields and parameters of the examples.
    pub vocabulary: &'a Vocabulary,
    /// Training examples.
    pub train: &'a [Example],
    /// Validation examples, for early stopping.
    pub validation: &'a [Example],
}

/// Trains a model.
///
/// Runs on the calling thread. The same arguments give the same model, bit for bit, on the same kind of
/// processor. With a checkpoint, a network's training that was killed continues after the last complete
/// epoch, with the same final result.
///
/// # Errors
/// [`SequenceError`] for examples that do not fit the vocabulary, options out of range, a checkpoint that is
/// of another training or cannot be stored; [`SequenceError::Stopped`] if `progress` stops the training.
pub fn train(
    architecture: Architecture,
    data: TrainingData,
    training: &Training,
    checkpoint: Option<Checkpoint>,
    progress: &mut dyn FnMut(&TrainingProgress) -> ControlFlow<()>,
) -> Result<SequenceModel, SequenceError> {
    check(data.vocabulary, "training", data.train)?;
    check(data.vocabulary, "validation", data.validation)?;
    let weights = match architecture {
        Architecture::Chain => LearntWeights::Chain(Chain::train(data, training, progress)?),
        Architecture::EncDec
        | Architecture::Attn
        | Architecture::Attn2
        | Architecture::Hybrid
        | Architecture::Hybrid2 => {
            let network = network::train(architecture, data, training, checkpoint, progress)?;
            LearntWeights::Network(Box::new(network))
        }
    };
    Ok(SequenceModel { vocabulary: data.vocabulary.clone(), weights })
}

/// Index of the most likely value; the first one among equals.
fn likeliest(row: &[f32]) -> usize {
    let places = row.iter().enumerate();
    places.fold((0, f32::NEG_INFINITY), |best, (at, &value)| if value > best.1 { (at, value) } else { best }).0
}

/// Checks that there are examples and that they fit the vocabulary.
fn check(vocabulary: &Vocabulary, what: &'static str, examples: &[Example]) -> Result<(), SequenceError> {
    if vocabulary.fields.is_empty() || vocabulary.parameters.is_empty() {
        return Err(SequenceError::BadVocabulary { what: "no fields or no parameters".into() });
    }
    if let Some(parameter) = vocabulary.parameters.iter().find(|p| p.values.is_empty()) {
        return Err(SequenceError::BadVocabulary { what: format!("no values for {}", parameter.name) });
    }
    if examples.is_empty() {
        return Err(SequenceError::Empty { what });
    }
    for (index, example) in examples.iter().enumerate() {
        let counts = [
            ("fields", example.problem.len(), vocabulary.fields.len()),
            ("parameters", example.answer.len(), vocabulary.parameters.len()),
        ];
        for (things, found, expected) in counts {
            if found != expected {
                return Err(SequenceError::Mismatch { what, index, things, found, expected });
            }
        }
        for (parameter, &found) in vocabulary.parameters.iter().zip(&example.answer) {
            let expected = parameter.values.len();
            if found as usize >= expected {
                let parameter = parameter.name.clone();
                return Err(SequenceError::NoSuchValue { what, index, parameter, found, expected });
            }
        }
    }
    Ok(())
}

impl SequenceModel {
    /// Predicts up to `n` different answers for a problem, most likely first.
    ///
    /// Beam search: of all prefixes of answers, the `n` most likely are extended. With `completions`,
    /// prefixes that no valid answer begins with are dropped, without renormalizing probabilities. There are
    /// fewer answers if no more exist. Answers of equal probability are in the order of their values.
    ///
    /// For a single answer, a network chooses the most likely value of each parameter in turn, as in the
    /// paper. A chain chooses the answer of a beam that is expected to be best: it has most parameters in
    /// common with the others.
    ///
    /// # Panics
    /// If the problem does not have a number for each field, or `completions` returns another number of
    /// values.
    ///
    /// # Source
    /// Section V.
    pub fn answers(&self, problem: &[i64], n: usize, completions: Option<&mut dyn Completions>) -> Vec<LikelyAnswer> {
        assert_eq!(problem.len(), self.vocabulary.fields.len(), "invariant: a problem has a number for each field");
        let sizes: Vec<usize> = self.vocabulary.parameters.iter().map(|p| p.values.len()).collect();
        match &self.weights {
            LearntWeights::Chain(chain) if n == 1 => {
                let mut answers = beam::search(&mut chain.decoder(problem), &sizes, N_COMPARED, completions);
                beam::expected_best(&answers).map(|best| answers.swap_remove(best)).into_iter().collect()
            }
            LearntWeights::Chain(chain) => beam::search(&mut chain.decoder(problem), &sizes, n, completions),
            LearntWeights::Network(network) => beam::search(&mut network.decoder(problem), &sizes, n, completions),
        }
    }

    /// Vocabulary that the model was trained with.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Architecture of the model.
    pub fn architecture(&self) -> Architecture {
        match &self.weights {
            LearntWeights::Chain(_) => Architecture::Chain,
            LearntWeights::Network(network) => network.shape().architecture,
        }
    }

    /// Serializes the model. `about` is metadata of the caller, which [`SequenceModel::load`] returns.
    pub fn save(&self, about: &serde_json::Value) -> ModelFiles {
        file::save(self, about)
    }

    /// Deserializes a model of [`SequenceModel::save`], with the caller's metadata.
    ///
    /// # Errors
    /// [`SequenceError::Foreign`] if the files are not those of a model.
    pub fn load(files: &ModelFiles) -> Result<(SequenceModel, serde_json::Value), SequenceError> {
        file::load(files)
    }
}
