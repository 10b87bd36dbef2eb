//! Mini-batches, Adam, early stopping, checkpoints.

use std::hash::Hasher;
use std::ops::ControlFlow;

use fnv::FnvHasher;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::{Deserialize, Serialize};

use super::super::file::{NumbersFile, Stored};
use super::super::{
    Architecture, Checkpoint, Epoch, Example, FileKind, Fit, SequenceError, Training, TrainingData, TrainingProgress,
    likeliest,
};
use super::{DropoutMasks, NetworkRun, SequenceNetwork, Tokens};
use crate::tape::{Adam, Var, log_softmax};

/// Batch size for evaluation without training.
const VALIDATION_BATCH: usize = 256;

/// Trains a network.
pub(in super::super) fn train(
    architecture: Architecture,
    data: TrainingData,
    training: &Training,
    mut checkpoint: Option<Checkpoint>,
    progress: &mut dyn FnMut(&TrainingProgress) -> ControlFlow<()>,
) -> Result<SequenceNetwork, SequenceError> {
    check(training)?;
    let TrainingData { vocabulary, train, validation } = data;
    let tokens = Tokens::new(training.encoding, vocabulary, train.iter().map(|e| e.problem.as_slice()));
    let network = SequenceNetwork::new(architecture, vocabulary, tokens, training);
    let mut state = TrainingState::new(network);
    let fingerprint = fingerprint(architecture, data, training);
    if let Some(kept) = checkpoint.as_mut().and_then(|checkpoint| checkpoint.kept.take()) {
        state.read(&kept, fingerprint)?;
    }
    while state.n_epochs() < training.epochs && state.n_epochs() < state.at.best_epoch + training.patience {
        let epoch = Epoch { train: state.epoch(train, training), validation: fit(&state.network, validation) };
        state.at.epochs.push(epoch);
        let validation_loss = epoch.validation.loss;
        if validation_loss < state.at.best_loss || state.at.best_epoch == 0 {
            (state.at.best_epoch, state.at.best_loss) = (state.n_epochs(), validation_loss);
            state.best = state.network.parameters.values();
        }
        if let Some(checkpoint) = &mut checkpoint {
            (checkpoint.keep)(&state.write(fingerprint)).map_err(SequenceError::Unkept)?;
        }
        let now = TrainingProgress {
            epochs: state.at.epochs.clone(),
            n_epochs: training.epochs,
            best_epoch: state.at.best_epoch,
        };
        if progress(&now).is_break() {
            return Err(SequenceError::Stopped { epochs: state.n_epochs() });
        }
    }
    state.network.set(state.best);
    Ok(state.network)
}

fn check(training: &Training) -> Result<(), SequenceError> {
    let wrong = |option, value: String, expected| Err(SequenceError::BadOption { option, value, expected });
    let counts = [
        ("the number of epochs", training.epochs),
        ("the batch", training.batch),
        ("the patience", training.patience),
        ("the width", training.n_hidden),
    ];
    if let Some((option, _)) = counts.iter().find(|(_, count)| *count == 0) {
        return wrong(option, "0".into(), "at least 1");
    }
    if !(training.learning_rate > 0.0 && training.learning_rate.is_finite()) {
        return wrong("the learning rate", training.learning_rate.to_string(), "a number above 0");
    }
    if !(0.0..1.0).contains(&training.dropout) {
        return wrong("dropout", training.dropout.to_string(), "at least 0 and less than 1");
    }
    Ok(())
}

/// Hash that identifies a training by its architecture, data and options. Checkpoints store it, so it is
/// FNV-1a of a text: the standard library's hash may change with the compiler.
fn fingerprint(architecture: Architecture, data: TrainingData, training: &Training) -> u64 {
    let TrainingData { vocabulary, train, validation } = data;
    let mut hasher = FnvHasher::default();
    let rows =
        |examples: &[Example]| examples.iter().map(|e| (e.problem.clone(), e.answer.clone())).collect::<Vec<_>>();
    let told = serde_json::to_string(&(architecture, vocabulary, training, rows(train), rows(validation)));
    hasher.write(told.expect("invariant: what is told of a training has only text keys").as_bytes());
    hasher.finish()
}

/// State of a training.
struct TrainingState {
    network: SequenceNetwork,
    adam: Adam,
    /// Weights with the lowest validation loss.
    best: Vec<Vec<f32>>,
    at: Position,
}

/// Progress of a training.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Position {
    epochs: Vec<Epoch>,
    n_steps: i32,
    best_epoch: usize,
    best_loss: f64,
    fingerprint: u64,
}

impl TrainingState {
    fn new(network: SequenceNetwork) -> TrainingState {
        let (adam, best) = (Adam::new(&network.parameters), network.parameters.values());
        TrainingState { adam, network, best, at: Position::default() }
    }

    /// Number of epochs so far.
    fn n_epochs(&self) -> usize {
        self.at.epochs.len()
    }

    /// Runs an epoch, a pass over the examples, and returns their fit during it. The seed and the number of
    /// the epoch determine its order and dropout, so that they are the same in a resumed training.
    fn epoch(&mut self, train: &[Example], training: &Training) -> Fit {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(training.seed ^ (self.n_epochs() as u64 + 1).rotate_left(32));
        let mut order: Vec<&Example> = train.iter().collect();
        order.shuffle(&mut rng);
        let mut sum = Fit::default();
        for batch in order.chunks(training.batch) {
            let dropout =
                (training.dropout > 0.0).then_some(DropoutMasks { share: training.dropout as f32, rng: &mut rng });
            let (fit, gradients) = gradients(&self.network, batch, dropout);
            let share = batch.len() as f64 / train.len() as f64;
            sum = Fit { loss: sum.loss + share * fit.loss, accuracy: sum.accuracy + share * fit.accuracy };
            self.adam.step(&mut self.network.parameters, &gradients, training.learning_rate);
        }
        sum
    }

    fn names(&self) -> Vec<String> {
        self.network.weights().map(|(name, _)| name.to_owned()).collect()
    }

    fn arrays(&mut self) -> [(&'static str, &mut Vec<Vec<f32>>); 3] {
        [("first", &mut self.adam.first), ("second", &mut self.adam.second), ("best", &mut self.best)]
    }

    fn write(&mut self, fingerprint: u64) -> Vec<u8> {
        let mut stored = Stored::default();
        (self.at.n_steps, self.at.fingerprint) = (self.adam.n_steps, fingerprint);
        let told = serde_json::to_string(&self.at).expect("invariant: a position has only text keys");
        for (name, values) in self.network.weights() {
            stored.push_floats(format!("weights.{name}"), values);
        }
        let names = self.names();
        for (what, arrays) in self.arrays() {
            for (name, values) in names.iter().zip(arrays) {
                stored.push_floats(format!("{what}.{name}"), values);
            }
        }
        stored.to_bytes(Some(told))
    }

    fn read(&mut self, kept: &[u8], fingerprint: u64) -> Result<(), SequenceError> {
        let reading = NumbersFile::open(kept, FileKind::Checkpoint)?;
        let at: Position = reading.told()?;
        if at.fingerprint != fingerprint {
            return Err(SequenceError::OtherTraining);
        }
        (self.adam.n_steps, self.at) = (at.n_steps, at);
        let names = self.names();
        let mut weights = self.network.parameters.values();
        for (name, values) in names.iter().zip(&mut weights) {
            *values = reading.floats(&format!("weights.{name}"), Some(values.len()))?;
        }
        for (what, arrays) in self.arrays() {
            for (name, values) in names.iter().zip(arrays) {
                *values = reading.floats(&format!("{what}.{name}"), Some(values.len()))?;
            }
        }
        self.network.set(weights);
        Ok(())
    }
}

/// Computes the scores of every parameter's values, with teacher forcing.
fn scores(run: &mut NetworkRun, examples: &[&Example]) -> Vec<Var> {
    run.encode();
    (0..run.network.shape.sizes.len())
        .map(|at| {
            let written: Option<Vec<u32>> =
                at.checked_sub(1).map(|before| examples.iter().map(|e| e.answer[before]).collect());
            run.decode(at, written.as_deref())
        })
        .collect()
}

/// Fit of examples, and the gradients of their mean loss.
pub(super) fn gradients(
    network: &SequenceNetwork,
    examples: &[&Example],
    dropout: Option<DropoutMasks>,
) -> (Fit, Vec<Vec<f32>>) {
    let problems: Vec<&[i64]> = examples.iter().map(|e| e.problem.as_slice()).collect();
    let mut run = NetworkRun::new(network, network.shape.tokens.rows(&problems), examples.len(), dropout);
    let mut sum = Sum::default();
    let mut seeds = Vec::new();
    for (at, scores) in scores(&mut run, examples).into_iter().enumerate() {
        let mut rows = run.tape.value(scores).clone();
        for (row, example) in rows.values.chunks_exact_mut(rows.n_columns).zip(examples) {
            let right = example.answer[at] as usize;
            log_softmax(row);
            sum.add(row, right);
            row.iter_mut().for_each(|x| *x = x.exp() / examples.len() as f32);
            row[right] -= 1.0 / examples.len() as f32;
        }
        seeds.push((scores, rows.values));
    }
    (sum.fit(examples.len()), run.tape.backward(seeds))
}

/// Sums of values' log-probabilities.
#[derive(Default)]
struct Sum {
    loss: f64,
    n_right: usize,
    n_values: usize,
}

impl Sum {
    /// Adds a parameter's log-probabilities in one example.
    fn add(&mut self, row: &[f32], right: usize) {
        self.loss -= f64::from(row[right]);
        self.n_right += usize::from(likeliest(row) == right);
        self.n_values += 1;
    }

    /// Returns the mean loss and accuracy over `n_examples` examples.
    fn fit(&self, n_examples: usize) -> Fit {
        Fit { loss: self.loss / n_examples as f64, accuracy: self.n_right as f64 / self.n_values as f64 }
    }
}

/// Fit of examples, without dropout.
pub(super) fn fit(network: &SequenceNetwork, examples: &[Example]) -> Fit {
    let mut sum = Sum::default();
    for batch in examples.chunks(VALIDATION_BATCH) {
        let batch: Vec<&Example> = batch.iter().collect();
        let problems: Vec<&[i64]> = batch.iter().map(|e| e.problem.as_slice()).collect();
        let mut run = NetworkRun::new(network, network.shape.tokens.rows(&problems), batch.len(), None);
        for (at, scores) in scores(&mut run, &batch).into_iter().enumerate() {
            let mut rows = run.tape.value(scores).clone();
            for (row, example) in rows.values.chunks_exact_mut(rows.n_columns).zip(&batch) {
                log_softmax(row);
                sum.add(row, example.answer[at] as usize);
            }
        }
    }
    sum.fit(examples.len())
}
