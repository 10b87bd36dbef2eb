//! Operators of `ai.onnx.ml`, which converters for scikit-learn, LightGBM and XGBoost write, decomposed into
//! ONNX's own operators and tree ensembles. Where the specification is ambiguous, the behaviour is ONNX
//! Runtime's.

mod svm;
mod trees;

use super::draft::{Draft, Port, Row, row};
use crate::error::{invalid, unsupported};
use crate::op::{
    ArgReduce, Binary, Cast, Concat, Expand, Gather, Import, MatMul, Reduce, ReduceKind, Reshape, Softmax, SoftmaxKind,
    Texts, Unary, Unsqueeze, Where,
};
use crate::{DType, OpError, Tensor};

/// ONNX domain of these operators.
pub const DOMAIN: &str = "ai.onnx.ml";
/// Newest version of the domain that is supported.
pub const NEWEST: i64 = 5;

/// Supported operators of the domain.
pub const ROWS: &[Row] = &[
    row("ArrayFeatureExtractor", &[1], 2..=2, picked),
    row("Binarizer", &[1], 1..=1, binarized),
    row("FeatureVectorizer", &[1], 1..=usize::MAX, joined),
    row("Imputer", &[1], 1..=1, imputed),
    row("LabelEncoder", &[1, 2, 4], 1..=1, encoded),
    row("LinearClassifier", &[1], 1..=1, linear_classifier),
    row("LinearRegressor", &[1], 1..=1, linear_regressor),
    row("Normalizer", &[1], 1..=1, normalized),
    row("OneHotEncoder", &[1], 1..=1, one_hot),
    row("SVMClassifier", &[1], 1..=1, svm::classifier),
    row("SVMRegressor", &[1], 1..=1, svm::regressor),
    row("Scaler", &[1], 1..=1, scaled),
    row("TreeEnsemble", &[5], 1..=1, trees::ensemble),
    row("TreeEnsembleClassifier", &[1, 3, 5], 1..=1, trees::classifier),
    row("TreeEnsembleRegressor", &[1, 3, 5], 1..=1, trees::regressor),
    // The maps from classes to scores stay arrays, in the order of the labels.
    row("ZipMap", &[1], 1..=1, |node, _| {
        let _ = (node.ints("classlabels_int64s")?, node.texts("classlabels_strings")?);
        Ok(vec![Port::Input(0)])
    }),
];

impl Draft {
    fn floats(&mut self, shape: &[usize], numbers: &[f64]) -> Port {
        self.constant(Tensor::from_floats(DType::F32, shape, numbers))
    }

    fn number(&mut self, number: f64) -> Port {
        self.floats(&[], &[number])
    }

    fn ints(&mut self, numbers: &[i64]) -> Port {
        self.constant(Tensor::vector(numbers))
    }

    fn cast(&mut self, x: Port, to: DType) -> Port {
        self.op(Cast { to: Some(to) }, &[x])
    }

    /// Casts to f32.
    fn single(&mut self, x: Port) -> Port {
        self.cast(x, DType::F32)
    }

    /// Reshapes to two dimensions, if there is only one.
    fn rows(&mut self, x: Port) -> Port {
        let least = self.ints(&[1, 1]);
        self.op(Expand, &[x, least])
    }

    fn unsqueezed(&mut self, x: Port, axis: i64) -> Port {
        let axes = self.ints(&[axis]);
        self.op(Unsqueeze { axes: None }, &[x, axes])
    }

    fn reduced(&mut self, kind: ReduceKind, x: Port) -> Port {
        self.op(Reduce { kind, axes: Some(vec![-1]), keeps_dims: true, none_is_none: false }, &[x])
    }

    /// Selects a column, without its dimension.
    fn column(&mut self, x: Port, at: i64) -> Port {
        let at = self.constant(Tensor::from_integers(DType::I64, [], &[at.into()]));
        self.op(Gather { axis: 1 }, &[x, at])
    }

    fn beside(&mut self, columns: &[Port]) -> Port {
        self.op(Concat { axis: -1 }, columns)
    }

    /// Adds `1 − x`.
    fn complement(&mut self, x: Port) -> Port {
        let one = self.number(1.0);
        self.op(Binary::Sub, &[one, x])
    }

    /// Compares each element of a single column with a limit: 1 if above, else 0, without the column's
    /// dimension.
    fn is_above(&mut self, scores: Port, limit: f64) -> Port {
        let (column, limit) = (self.column(scores, 0), self.number(limit));
        let is_above = self.op(Binary::Greater, &[column, limit]);
        self.cast(is_above, DType::I64)
    }

    /// Adds the position of the first largest element of each row.
    fn best(&mut self, scores: Port) -> Port {
        self.op(ArgReduce { is_min: false, axis: -1, keeps_dims: false, takes_last: false }, &[scores])
    }
}

/// Names of classes.
struct Labels {
    numbers: Vec<i64>,
    texts: Option<Texts>,
}

impl Labels {
    fn read(node: &Import, of_numbers: &str) -> Result<Labels, OpError> {
        let texts = node.texts("classlabels_strings")?.unwrap_or_default();
        let numbers = node.ints(of_numbers)?.unwrap_or_default();
        match (texts.is_empty(), numbers.is_empty()) {
            (true, true) => Err(invalid!("it has no labels of classes")),
            (true, false) => Ok(Labels { numbers, texts: None }),
            (false, _) => Ok(Labels { numbers: (0..texts.len() as i64).collect(), texts: Some(texts.into()) }),
        }
    }

    fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Looks up the labels at positions.
    fn at(&self, places: Port, draft: &mut Draft) -> Port {
        draft.constants.push((Tensor::vector(&self.numbers), self.texts.clone()));
        let labels = Port::Constant(draft.constants.len() - 1);
        draft.op(Gather { axis: 0 }, &[labels, places])
    }
}

/// Function of the scores, `post_transform`.
#[derive(Debug, Clone, Copy, PartialEq)]
enum PostTransform {
    None,
    Logistic,
    Softmax,
    SoftmaxZero,
    Probit,
}

impl PostTransform {
    fn read(node: &Import) -> Result<PostTransform, OpError> {
        use PostTransform as T;
        let known = [
            ("NONE", T::None),
            ("LOGISTIC", T::Logistic),
            ("SOFTMAX", T::Softmax),
            ("SOFTMAX_ZERO", T::SoftmaxZero),
            ("PROBIT", T::Probit),
        ];
        node.one_of("post_transform", "NONE", &known)
    }

    /// Transforms scores of several columns.
    fn of_many(self, scores: Port, draft: &mut Draft) -> Port {
        match self {
            PostTransform::None => scores,
            PostTransform::Logistic => draft.op(Unary::Sigmoid, &[scores]),
            PostTransform::Softmax => {
                draft.op(Softmax { kind: SoftmaxKind::Soft, axis: -1, is_flat: false }, &[scores])
            }
            PostTransform::SoftmaxZero => softmax_zero(scores, draft),
            PostTransform::Probit => probit(scores, draft),
        }
    }

    /// Transforms scores of `n` columns; a single column is changed only by [`PostTransform::Probit`].
    fn of(self, scores: Port, n: usize, draft: &mut Draft) -> Port {
        if n == 1 && self != PostTransform::Probit { scores } else { self.of_many(scores, draft) }
    }
}

/// Adds a softmax that excludes zeros; each of these becomes less than the smallest exponential.
fn softmax_zero(scores: Port, draft: &mut Draft) -> Port {
    let largest = draft.reduced(ReduceKind::Max, scores);
    let apart = draft.op(Binary::Sub, &[scores, largest]);
    let power = draft.op(Unary::Exp, &[apart]);
    let (size, limit) = (draft.op(Unary::Abs, &[scores]), draft.number(1e-7));
    let counts = draft.op(Binary::Greater, &[size, limit]);
    let none = draft.number(0.0);
    let counted = draft.op(Where, &[counts, power, none]);
    let sum = draft.reduced(ReduceKind::Sum, counted);
    let below = draft.op(Unary::Neg, &[largest]);
    let factor = draft.op(Unary::Exp, &[below]);
    let little = draft.op(Binary::Mul, &[scores, factor]);
    let shares = draft.op(Where, &[counts, power, little]);
    draft.op(Binary::Div, &[shares, sum])
}

/// Adds the inverse of the normal distribution, by Winitzki's approximation of the inverse error function.
fn probit(scores: Port, draft: &mut Draft) -> Port {
    let (two, one) = (draft.number(2.0), draft.number(1.0));
    let twice = draft.op(Binary::Mul, &[scores, two]);
    let x = draft.op(Binary::Sub, &[twice, one]);
    let (below, above) = (draft.complement(x), draft.op(Binary::Add, &[one, x]));
    let product = draft.op(Binary::Mul, &[below, above]);
    let log = draft.op(Unary::Log, &[product]);
    let half = draft.number(0.5);
    let half = draft.op(Binary::Mul, &[log, half]);
    let first = draft.number(2.0 / (std::f64::consts::PI * 0.147));
    let v = draft.op(Binary::Add, &[half, first]);
    let share = draft.number(1.0 / 0.147);
    let w = draft.op(Binary::Mul, &[log, share]);
    let square = draft.op(Binary::Mul, &[v, v]);
    let inner = draft.op(Binary::Sub, &[square, w]);
    let root = draft.op(Unary::Sqrt, &[inner]);
    let apart = draft.op(Binary::Sub, &[root, v]);
    let size = draft.op(Unary::Sqrt, &[apart]);
    let sign = draft.op(Unary::Sign, &[x]);
    let signed = draft.op(Binary::Mul, &[size, sign]);
    let factor = draft.number(std::f64::consts::SQRT_2);
    draft.op(Binary::Mul, &[signed, factor])
}

/// Expands the score of the second of two classes to two columns.
fn two_classes(score: Port, transform: PostTransform, is_share: bool, draft: &mut Draft) -> Result<Port, OpError> {
    let other = match (transform, is_share) {
        (PostTransform::Probit, _) => {
            return Err(unsupported!("post_transform=PROBIT of one score for two classes is not supported"));
        }
        (PostTransform::Logistic, _) | (_, false) => draft.op(Unary::Neg, &[score]),
        (_, true) => draft.complement(score),
    };
    let both = draft.beside(&[other, score]);
    Ok(if transform == PostTransform::Logistic { draft.op(Unary::Sigmoid, &[both]) } else { both })
}

/// Converts numbers to f64.
fn wide(numbers: Option<Vec<f32>>) -> Vec<f64> {
    numbers.unwrap_or_default().into_iter().map(f64::from).collect()
}

/// Multiplies rows by a matrix `[targets, features]`, and adds a number to each column.
fn linear(x: Port, rows: &[f64], n_targets: usize, added: &[f64], draft: &mut Draft) -> Result<Port, OpError> {
    if n_targets == 0 || rows.is_empty() || !rows.len().is_multiple_of(n_targets) {
        return Err(invalid!("{} coefficients do not fit {n_targets} targets", rows.len()));
    }
    let n_features = rows.len() / n_targets;
    let turned = (0..rows.len()).map(|at| rows[at % n_targets * n_features + at / n_targets]);
    let matrix = draft.floats(&[n_features, n_targets], &turned.collect::<Vec<_>>());
    let product = draft.op(MatMul, &[x, matrix]);
    match added.len() {
        0 => Ok(product),
        n if n == n_targets => {
            let added = draft.floats(&[n], added);
            Ok(draft.op(Binary::Add, &[product, added]))
        }
        n => Err(invalid!("{n} intercepts do not fit {n_targets} targets")),
    }
}

fn linear_regressor(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let (rows, added) = (wide(node.floats("coefficients")?), wide(node.floats("intercepts")?));
    let (n, transform) = (node.int_or("targets", 1)?, PostTransform::read(node)?);
    let n = usize::try_from(n).map_err(|_| invalid!("it has targets={n}"))?;
    let x = draft.single(Port::Input(0));
    let x = draft.rows(x);
    let scores = linear(x, &rows, n, &added, draft)?;
    Ok(vec![transform.of(scores, n, draft)])
}

fn linear_classifier(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let (rows, added) = (wide(node.floats("coefficients")?), wide(node.floats("intercepts")?));
    let (labels, transform) = (Labels::read(node, "classlabels_ints")?, PostTransform::read(node)?);
    let _ = node.int("multi_class")?;
    let n = if added.is_empty() { labels.len() } else { added.len() };
    let x = draft.single(Port::Input(0));
    let x = draft.rows(x);
    let scores = linear(x, &rows, n, &added, draft)?;
    match (n, labels.len()) {
        (1, 2) => {
            let place = draft.is_above(scores, 0.0);
            Ok(vec![labels.at(place, draft), two_classes(scores, transform, true, draft)?])
        }
        (n, n_labels) if n == n_labels && n > 1 => {
            let place = draft.best(scores);
            Ok(vec![labels.at(place, draft), transform.of_many(scores, draft)])
        }
        (n, n_labels) => Err(unsupported!("{n} scores for {n_labels} classes are not supported")),
    }
}

fn scaled(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let (offset, scale) = (wide(node.floats("offset")?), wide(node.floats("scale")?));
    let mut x = draft.single(Port::Input(0));
    for (numbers, op) in [(offset, Binary::Sub), (scale, Binary::Mul)] {
        if !numbers.is_empty() {
            let numbers = draft.floats(&[numbers.len()], &numbers);
            x = draft.op(op, &[x, numbers]);
        }
    }
    Ok(vec![x])
}

fn normalized(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    use ReduceKind as R;
    let kind = node.one_of("norm", "MAX", &[("MAX", R::Max), ("L1", R::L1), ("L2", R::SumSquare)])?;
    let x = draft.single(Port::Input(0));
    let sum = draft.reduced(kind, x);
    let norm = if kind == R::SumSquare { draft.op(Unary::Sqrt, &[sum]) } else { sum };
    let (none, one) = (draft.number(0.0), draft.number(1.0));
    let is_none = draft.op(Binary::Equal, &[norm, none]);
    let norm = draft.op(Where, &[is_none, one, norm]);
    Ok(vec![draft.op(Binary::Div, &[x, norm])])
}

fn binarized(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let x = draft.single(Port::Input(0));
    let threshold = draft.number(node.float_or("threshold", 0.0)?);
    let is_above = draft.op(Binary::Greater, &[x, threshold]);
    Ok(vec![draft.op(Cast { to: None }, &[is_above, Port::Input(0)])])
}

fn picked(_: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let flat = draft.ints(&[-1]);
    let places = draft.op(Reshape { shape: None, allow_zero: false }, &[Port::Input(1), flat]);
    let found = draft.op(Gather { axis: -1 }, &[Port::Input(0), places]);
    Ok(vec![draft.rows(found)])
}

fn joined(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let _ = node.ints("inputdimensions")?;
    let mut columns = Vec::new();
    for at in 0..node.given.len() {
        let x = draft.single(Port::Input(at));
        columns.push(draft.rows(x));
    }
    Ok(vec![draft.beside(&columns)])
}

fn imputed(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let x = Port::Input(0);
    let (of_floats, of_ints) = (node.floats("imputed_value_floats")?, node.ints("imputed_value_int64s")?);
    let (float, int) = (node.float_or("replaced_value_float", 0.0)?, node.int_or("replaced_value_int64", 0)?);
    let (new, is_replaced) = match (of_floats, of_ints) {
        (Some(new), None) => {
            let new = draft.floats(&[new.len()], &wide(Some(new)));
            let is_replaced = if float.is_nan() {
                draft.op(Unary::IsNan, &[x])
            } else {
                let old = draft.number(float);
                draft.op(Binary::Equal, &[x, old])
            };
            (new, is_replaced)
        }
        (None, Some(new)) => {
            let (new, old) = (draft.ints(&new), draft.ints(&[int]));
            (new, draft.op(Binary::Equal, &[x, old]))
        }
        _ => return Err(invalid!("it has imputed values of both types, or none")),
    };
    Ok(vec![draft.op(Where, &[is_replaced, new, x])])
}

fn one_hot(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    if node.texts("cats_strings")?.is_some_and(|texts| !texts.is_empty()) {
        return Err(unsupported!("texts as categories are not supported (give it the numbers of the categories)"));
    }
    // An unknown category is not an error: its row is all zero.
    let _ = node.int("zeros")?;
    let categories = draft.ints(&node.ints("cats_int64s")?.unwrap_or_default());
    let x = draft.cast(Port::Input(0), DType::I64);
    let x = draft.unsqueezed(x, -1);
    let is_same = draft.op(Binary::Equal, &[x, categories]);
    Ok(vec![draft.single(is_same)])
}

/// Keys or values of an encoder.
enum Items {
    Numbers(Tensor),
    Texts(Vec<String>),
}

fn items(node: &Import, what: &str) -> Result<Option<Items>, OpError> {
    let name = |kind: &str| format!("{what}_{kind}");
    let (ints, floats) = (node.ints(&name("int64s"))?, node.floats(&name("floats"))?);
    let (texts, tensor) = (node.texts(&name("strings"))?, node.tensor(&name("tensor"))?);
    let given = [
        ints.filter(|list| !list.is_empty()).map(|list| Items::Numbers(Tensor::vector(&list))),
        floats
            .filter(|list| !list.is_empty())
            .map(|list| Items::Numbers(Tensor::from_floats(DType::F32, [list.len()], &wide(Some(list))))),
        texts.filter(|list| !list.is_empty()).map(Items::Texts),
        tensor.map(|tensor| Items::Numbers(tensor.reshaped([tensor.n_elements()]))),
    ];
    Ok(given.into_iter().flatten().next())
}

fn encoded(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let of_text = node.text_or("default_string", "_Unused")?;
    let (of_int, of_float) = (node.int_or("default_int64", -1)?, node.float_or("default_float", -0.0)?);
    let of_tensor = node.tensor("default_tensor")?;
    let (keys, values) = if node.version < 2 {
        // Strings are keys whose values are their indices, or the other way round.
        let texts = node.texts("classes_strings")?.unwrap_or_default();
        let places: Vec<i64> = (0..texts.len() as i64).collect();
        (Some(Items::Numbers(Tensor::vector(&places))), Some(Items::Texts(texts)))
    } else {
        (items(node, "keys")?, items(node, "values")?)
    };
    let (keys, values) = match (keys, values) {
        (Some(Items::Texts(_)), _) => {
            return Err(unsupported!("texts as keys are not supported (give the model their numbers)"));
        }
        (Some(Items::Numbers(keys)), Some(values)) => (keys, values),
        _ => return Err(invalid!("it has no keys, or no values")),
    };
    let n = keys.n_elements();
    let n_values = match &values {
        Items::Numbers(values) => values.n_elements(),
        Items::Texts(texts) => texts.len(),
    };
    if n_values != n {
        return Err(invalid!("{n} keys do not fit {n_values} values"));
    }
    let (table, default) = match values {
        Items::Numbers(values) => {
            let default = match (of_tensor, values.dtype().is_float()) {
                (Some(tensor), _) => tensor.reshaped([tensor.n_elements()]),
                (None, true) => Tensor::from_floats(values.dtype(), [1], &[of_float]),
                (None, false) => Tensor::from_integers(values.dtype(), [1], &[of_int.into()]),
            };
            (draft.constant(values), draft.constant(default))
        }
        // The default follows the items.
        Items::Texts(texts) => {
            let places: Vec<i64> = (0..texts.len() as i64).collect();
            let all: Texts = texts.iter().cloned().chain([of_text]).collect();
            let default = Tensor::vector(&[texts.len() as i64]);
            draft.constants.push((Tensor::vector(&places), Some(all.clone())));
            draft.constants.push((default, Some(all)));
            let n = draft.constants.len();
            (Port::Constant(n - 2), Port::Constant(n - 1))
        }
    };
    let is_any = keys.floats().iter().map(|key| f64::from(u8::from(key.is_nan()))).collect::<Vec<_>>();
    // Before version 4, NaN is not a key.
    let has_any = node.version >= 4 && keys.dtype().is_float() && is_any.contains(&1.0);
    let keys = draft.constant(keys);
    let x = draft.unsqueezed(Port::Input(0), -1);
    let mut is_same = draft.op(Binary::Equal, &[x, keys]);
    if has_any {
        let is_none = draft.op(Unary::IsNan, &[x]);
        let (is_any, zero) = (draft.floats(&[n], &is_any), draft.number(0.0));
        let is_any = draft.op(Binary::Greater, &[is_any, zero]);
        let both = draft.op(Binary::And, &[is_none, is_any]);
        is_same = draft.op(Binary::Or, &[is_same, both]);
    }
    let hits = draft.single(is_same);
    let place = draft.best(hits);
    let found = draft.op(Gather { axis: 0 }, &[table, place]);
    let hit = draft
        .op(Reduce { kind: ReduceKind::Max, axes: Some(vec![-1]), keeps_dims: false, none_is_none: false }, &[hits]);
    let zero = draft.number(0.0);
    let is_known = draft.op(Binary::Greater, &[hit, zero]);
    Ok(vec![draft.op(Where, &[is_known, found, default])])
}
