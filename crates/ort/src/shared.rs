//! Compiled parts that sessions of a process share.
//!
//! A server often has a session of the same model for each of its threads. If parts of sessions are equal,
//! including weights, they share one model with one copy of the packed weights, for as long as one of the
//! sessions lives. The memory of runs is not shared.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use tilewright_graph::onnx::{self, ModelFile};
use tilewright_graph::{Tensor, TensorType};
use tilewright_runtime::Model;

/// Key of a compiled part: everything that determines it, with a hash in place of the weights.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PartKey {
    /// Model of the part, without its constants.
    outline: Vec<u8>,
    /// Settings of the session, and the state of its records.
    settings: String,
    weights: [u64; LANES],
}

/// Compiled part.
#[derive(Clone)]
pub struct ModelOfPart {
    /// Model of the part.
    pub model: Arc<Model>,
    /// Index of the part's input for each input of the model.
    pub inputs: Vec<usize>,
    /// Types of the part's outputs, at the largest size of the open dimension.
    pub outputs: Vec<TensorType>,
    /// Number of kernels without records.
    pub n_guessed: usize,
}

/// Compiled part, kept alive only by sessions.
struct KeptModel {
    model: Weak<Model>,
    inputs: Vec<usize>,
    outputs: Vec<TensorType>,
    n_guessed: usize,
}

/// Compiled parts of the process's sessions.
static KNOWN: LazyLock<Mutex<HashMap<PartKey, KeptModel>>> = LazyLock::new(Mutex::default);

impl PartKey {
    /// Makes the key of a part with these constants.
    pub fn new<'a>(outline: &ModelFile, settings: String, constants: impl Iterator<Item = &'a Tensor>) -> PartKey {
        let mut hash = Weights::new();
        for tensor in constants {
            hash.add(tensor.ty().to_string().as_bytes());
            hash.add(tensor.bytes());
        }
        PartKey { outline: onnx::write(outline), settings, weights: hash.lanes }
    }

    /// Finds the part, if a session has it.
    pub fn find(&self) -> Option<ModelOfPart> {
        let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let KeptModel { model, inputs, outputs, n_guessed } = known.get(self)?;
        let (inputs, outputs) = (inputs.clone(), outputs.clone());
        Some(ModelOfPart { model: model.upgrade()?, inputs, outputs, n_guessed: *n_guessed })
    }

    /// Makes a part available to later sessions, and drops entries of parts that no session has any more.
    pub fn keep(self, made: &ModelOfPart) {
        let ModelOfPart { model, inputs, outputs, n_guessed } = made.clone();
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, known| known.model.strong_count() > 0);
        known.insert(self, KeptModel { model: Arc::downgrade(&model), inputs, outputs, n_guessed });
    }
}

/// Number of independent lanes of a hash, which are combined only at the end of a tensor.
const LANES: usize = 4;

/// Hash of weights with secret factors that differ from process to process, so that a model cannot be crafted
/// to collide with another. A session hashes all its weights: a hash of the standard library would take
/// longer than packing them.
struct Weights {
    lanes: [u64; LANES],
    factors: [u64; LANES],
}

impl Weights {
    fn new() -> Weights {
        static SECRET: LazyLock<[[u64; LANES]; 2]> = LazyLock::new(|| {
            let random = RandomState::new();
            [0, 1].map(|kind| std::array::from_fn(|lane| random.hash_one((kind, lane)) | 1))
        });
        let [lanes, factors] = *SECRET;
        Weights { lanes, factors }
    }

    /// Adds the bytes of a tensor and their number, so that the same bytes divided differently have another
    /// hash.
    fn add(&mut self, bytes: &[u8]) {
        const BLOCK: usize = 8 * LANES;
        let (blocks, rest) = bytes.as_chunks::<BLOCK>();
        blocks.iter().for_each(|block| self.step(words_of(block)));
        let mut last = [0; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        self.step(words_of(&last));
        self.step([bytes.len() as u64; LANES]);
        // Mixes the sum of all lanes into each.
        let sum = self.lanes.iter().fold(0_u64, |sum, lane| sum.rotate_left(17) ^ lane);
        self.step([sum; LANES]);
    }

    fn step(&mut self, words: [u64; LANES]) {
        for ((lane, factor), word) in self.lanes.iter_mut().zip(self.factors).zip(words) {
            // The secret factor determines how each bit of the word affects the result.
            let product = u128::from(*lane ^ word) * u128::from(factor);
            *lane = product as u64 ^ (product >> 64) as u64;
        }
    }
}

fn words_of(block: &[u8; 8 * LANES]) -> [u64; LANES] {
    let (words, _) = block.as_chunks::<8>();
    std::array::from_fn(|lane| u64::from_le_bytes(words[lane]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use std::collections::HashSet;
    use tilewright_graph::DType;
    use tilewright_graph::onnx::NodeFile;
    use tilewright_graph::op::Attribute;

    fn key(parts: &[&[u8]]) -> PartKey {
        let tensor = |part: &&[u8]| {
            let ty = TensorType::new(DType::U8, vec![part.len()]);
            Tensor::new(ty, Bytes::copy_from_slice(part)).expect("so many bytes")
        };
        let tensors: Vec<Tensor> = parts.iter().map(tensor).collect();
        PartKey::new(&ModelFile::default(), String::new(), tensors.iter())
    }

    /// A tensor in an attribute is part of a node.
    #[test]
    fn keys_differ_with_any_attribute() {
        let key = |fill: u8| {
            let tensor = Tensor::new(TensorType::new(DType::U8, vec![1]), Bytes::from(vec![fill])).expect("a byte");
            let attributes = vec![("value".to_owned(), Attribute::Tensor(tensor))];
            let node = NodeFile { op: "ConstantOfShape".to_owned(), attributes, ..NodeFile::default() };
            PartKey::new(&ModelFile { nodes: vec![node], ..ModelFile::default() }, String::new(), [].iter())
        };
        assert_eq!(key(1), key(1));
        assert_ne!(key(1), key(2));
    }

    #[test]
    fn keys_differ_with_any_weight() {
        let weights: Vec<u8> = (1..150).collect();
        assert_eq!(key(&[&weights]), key(&[&weights]));
        let mut seen = HashSet::from([key(&[&weights]), key(&[]), key(&[&[]])]);
        for at in 0..weights.len() {
            let mut changed = weights.clone();
            changed[at] ^= 1;
            assert!(seen.insert(key(&[&changed])), "byte {at}");
            let (first, second) = weights.split_at(at);
            assert!(seen.insert(key(&[first, second])), "two constants, of {at} bytes and more");
            assert!(at == 0 || seen.insert(key(&[second, first])), "the same the other way round");
        }
    }
}
