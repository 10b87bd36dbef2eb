//! Tests of the public interface of sequence models.

use std::ops::ControlFlow;

use tilewright_learn::sequence::{
    ARCHITECTURES, Architecture, Checkpoint, Completions, Encoding, Example, Field, FieldKind, FileKind,
    KernelParameter, ModelFiles, SequenceError, SequenceModel, Training, TrainingData, Vocabulary, train,
};

fn vocabulary() -> Vocabulary {
    let number = |name: &str| Field { name: name.into(), kind: FieldKind::Integer };
    let names = FieldKind::Categorical { values: vec!["F".into(), "B".into()] };
    let parameter =
        |name: &str, n: u32| KernelParameter { name: name.into(), values: (0..n).map(|v| v.to_string()).collect() };
    Vocabulary {
        fields: vec![number("size"), number("batch"), number("one"), Field { name: "direction".into(), kind: names }],
        parameters: vec![parameter("tile", 4), parameter("vector", 2), parameter("unroll", 3)],
    }
}

/// Examples in which tiles grow with the size, vectors need an even batch, and the unrolling depends on both
/// and on the direction.
fn examples() -> Vec<Example> {
    let example = |i: i64| {
        let (size, batch, direction) = (1 + i * 7 % 90, 1 + i % 6, i % 2);
        let tile = (i64::BITS - 1 - size.leading_zeros()) / 2;
        let vector = u32::from(batch % 2 == 0);
        let unroll = (tile + vector + direction as u32) % 3;
        Example { problem: vec![size, batch, 1, direction], answer: vec![tile, vector, unroll] }
    };
    (0..160).map(example).collect()
}

fn small() -> Training {
    Training {
        epochs: 30,
        batch: 8,
        patience: 30,
        learning_rate: 1e-2,
        n_hidden: 12,
        n_trees: 20,
        seed: 7,
        ..Training::default()
    }
}

/// Training data and validation data.
fn data<'a>(vocabulary: &'a Vocabulary, examples: &'a [Example]) -> TrainingData<'a> {
    TrainingData { vocabulary, train: examples, validation: examples }
}

fn learn(
    architecture: Architecture,
    training: &Training,
    kept: Option<&mut Option<Vec<u8>>>,
    epochs: usize,
) -> Result<SequenceModel, SequenceError> {
    let examples = examples();
    let before = kept.as_ref().and_then(|kept| (*kept).clone());
    let mut none = None;
    let last = kept.unwrap_or(&mut none);
    let mut keep = |bytes: &[u8]| {
        *last = Some(bytes.to_vec());
        Ok(())
    };
    let checkpoint = Some(Checkpoint { kept: before, keep: &mut keep });
    train(architecture, data(&vocabulary(), &examples), training, checkpoint, &mut |progress| {
        if progress.epochs.len() < epochs { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })
}

fn share_right(model: &SequenceModel) -> f64 {
    let examples = examples();
    let right = examples.iter().filter(|e| model.answers(&e.problem, 1, None)[0].values == e.answer).count();
    right as f64 / examples.len() as f64
}

/// The files of a model.
fn files(model: &SequenceModel) -> ModelFiles {
    model.save(&serde_json::json!({}))
}

#[test]
fn every_architecture_learns_a_small_task() {
    for row in ARCHITECTURES {
        let model = learn(row.architecture, &small(), None, usize::MAX).unwrap();
        let share = share_right(&model);
        assert!(share >= 0.95, "{}: {share}", row.name);
        assert_eq!(model.architecture(), row.architecture);
    }
}

#[test]
fn beams_of_models_are_sorted_whatever_the_problem() {
    let few = Training { epochs: 2, ..small() };
    for row in ARCHITECTURES {
        for encoding in [Encoding::Numeric, Encoding::OneHot] {
            let model = learn(row.architecture, &Training { encoding, ..few.clone() }, None, usize::MAX).unwrap();
            for problem in [[5, 2, 1, 0], [1 << 40, 0, -3, -1], [i64::MIN, i64::MAX, 0, 1]] {
                let answers = model.answers(&problem, 30, None);
                assert_eq!(answers.len(), 24, "{}: all there are", row.name);
                let sum: f64 = answers.iter().map(|a| a.log_probability.exp()).sum();
                assert!((sum - 1.0).abs() < 1e-4, "{}: probabilities sum to {sum}", row.name);
                assert!(answers.is_sorted_by(|a, b| a.log_probability >= b.log_probability));
                // A narrow beam keeps other prefixes, but assigns the same probability to those that it
                // finds.
                for answer in model.answers(&problem, 2, None) {
                    let same = answers.iter().find(|a| a.values == answer.values).unwrap();
                    assert!((same.log_probability - answer.log_probability).abs() < 1e-4, "{}", row.name);
                }
            }
        }
    }
}

#[test]
fn only_as_tokens_are_unseen_numbers_alike() {
    let few = Training { epochs: 2, ..small() };
    for row in ARCHITECTURES {
        let answers = |encoding: Encoding, size: i64| {
            let model = learn(row.architecture, &Training { encoding, ..few.clone() }, None, usize::MAX).unwrap();
            model.answers(&[size, 2, 1, 0], 24, None)
        };
        assert_eq!(answers(Encoding::OneHot, -5), answers(Encoding::OneHot, 5000), "{}", row.name);
        assert_ne!(answers(Encoding::Numeric, -5), answers(Encoding::Numeric, 5000), "{}", row.name);
    }
}

struct NoVectors;

impl Completions for NoVectors {
    fn allowed(&mut self, prefix: &[u32]) -> Vec<bool> {
        match prefix.len() {
            0 => vec![true; 4],
            1 => vec![true, false],
            _ => vec![true; 3],
        }
    }
}

#[test]
fn completions_bound_a_beam() {
    let model = learn(Architecture::Chain, &small(), None, usize::MAX).unwrap();
    let answers = model.answers(&[5, 2, 1, 0], 100, Some(&mut NoVectors));
    assert_eq!(answers.len(), 12);
    assert!(answers.iter().all(|a| a.values[1] == 0));
    assert!(answers[0].log_probability < 0.5f64.ln(), "what is left is not made likelier");
}

#[test]
fn the_same_seed_gives_the_same_weights() {
    for architecture in [Architecture::Chain, Architecture::Attn, Architecture::Hybrid2] {
        let few = Training { epochs: 3, ..small() };
        let [one, other] = [(); 2].map(|()| files(&learn(architecture, &few, None, usize::MAX).unwrap()));
        assert!(one == other);
        let third = files(&learn(architecture, &Training { seed: 8, ..few }, None, usize::MAX).unwrap());
        assert!(one.weights != third.weights, "another seed gives others");
    }
}

#[test]
fn a_stopped_training_goes_on_to_the_same_weights() {
    for row in ARCHITECTURES.iter().filter(|row| row.architecture != Architecture::Chain) {
        let mut kept = None;
        let few = Training { epochs: 5, ..small() };
        let whole = learn(row.architecture, &few, None, usize::MAX).unwrap();
        let stopped = learn(row.architecture, &few, Some(&mut kept), 2).unwrap_err();
        assert!(matches!(stopped, SequenceError::Stopped { epochs: 2 }), "{stopped}");
        let other = learn(row.architecture, &Training { seed: 8, ..few.clone() }, Some(&mut kept), 2).unwrap_err();
        assert!(matches!(other, SequenceError::OtherTraining), "{other}");
        let resumed = learn(row.architecture, &few, Some(&mut kept), usize::MAX).unwrap();
        assert!(files(&whole) == files(&resumed), "{}", row.name);
    }
}

#[test]
fn a_training_ends_where_its_state_cannot_be_kept() {
    let (few, examples) = (Training { epochs: 2, ..small() }, examples());
    let checkpoint = Checkpoint { kept: None, keep: &mut |_| Err(std::io::ErrorKind::StorageFull.into()) };
    let goes_on = &mut |_: &_| ControlFlow::Continue(());
    let learnt = train(Architecture::Attn, data(&vocabulary(), &examples), &few, Some(checkpoint), goes_on);
    assert!(matches!(learnt, Err(SequenceError::Unkept(_))));
}

#[test]
fn models_are_kept_in_files() {
    let few = Training { epochs: 2, ..small() };
    for row in ARCHITECTURES {
        let model = learn(row.architecture, &few, None, usize::MAX).unwrap();
        let about = serde_json::json!({ "kernel": "conv", "rows": 64 });
        let (loaded, about_loaded) = SequenceModel::load(&model.save(&about)).unwrap();
        assert_eq!(about_loaded, about);
        assert_eq!(loaded.vocabulary(), model.vocabulary());
        assert_eq!(loaded.answers(&[33, 4, 1, 0], 10, None), model.answers(&[33, 4, 1, 0], 10, None), "{}", row.name);
    }
}

#[test]
fn files_that_are_no_models_are_refused() {
    let few = Training { epochs: 1, ..small() };
    let [chain, attn] = [Architecture::Chain, Architecture::Attn2]
        .map(|architecture| files(&learn(architecture, &few, None, usize::MAX).unwrap()));
    let other = files(&learn(Architecture::EncDec, &few, None, usize::MAX).unwrap());
    for good in [&chain, &attn] {
        let refused = |weights: &[u8], description: &[u8], wrong: FileKind| {
            let (weights, description) = (weights.to_vec(), description.to_vec());
            let error = SequenceModel::load(&ModelFiles { weights, description }).unwrap_err();
            assert!(matches!(error, SequenceError::Foreign { kept, .. } if kept == wrong), "{error}");
            assert!(!error.to_string().contains('\n'), "{error}");
        };
        let ModelFiles { weights, description } = good;
        for size in [0, 7, 100, weights.len() / 2, weights.len() - 1] {
            refused(&weights[..size], description, FileKind::Weights);
        }
        refused(b"PK not weights at all, but long enough to be some", description, FileKind::Weights);
        refused(&other.weights, description, FileKind::Weights);
        refused(weights, &description[..description.len() / 2], FileKind::Description);
        refused(weights, b"", FileKind::Description);
        // The last numbers of the file are replaced by values that are not finite.
        for strange in [f32::NAN, f32::INFINITY] {
            let mut spoilt = weights.clone();
            spoilt.chunks_exact_mut(4).rev().take(8).for_each(|bytes| bytes.copy_from_slice(&strange.to_le_bytes()));
            refused(&spoilt, description, FileKind::Weights);
        }
        let valueless = String::from_utf8(description.clone()).unwrap();
        let mut valueless: serde_json::Value = serde_json::from_str(&valueless).unwrap();
        valueless["vocabulary"]["parameters"][0]["values"] = serde_json::json!([]);
        refused(weights, valueless.to_string().as_bytes(), FileKind::Description);
    }
}

#[test]
fn bad_input_is_one_line() {
    let says = |result: Result<SequenceModel, SequenceError>, what: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(what) && !error.contains('\n'), "{error}");
    };
    let with = |change: &dyn Fn(&mut Vec<Example>)| {
        let mut examples = examples();
        change(&mut examples);
        train(Architecture::Chain, data(&vocabulary(), &examples), &small(), None, &mut |_| ControlFlow::Continue(()))
    };
    says(with(&|examples| examples.clear()), "there are no training examples");
    says(with(&|examples| examples[3].problem.truncate(2)), "training example 3: 2 fields, but the vocabulary has 4");
    says(
        with(&|examples| examples[5].answer[1] = 2),
        "training example 5: vector has 2 values, so there is no value 2",
    );
    for architecture in [Architecture::Chain, Architecture::Hybrid] {
        let none = Training { n_trees: 0, dropout: 1.0, ..small() };
        says(learn(architecture, &none, None, usize::MAX), "cannot be");
    }
}
