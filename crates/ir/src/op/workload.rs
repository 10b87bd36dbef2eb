//! Workloads, which are operators with their sizes, as text.

use super::alias::{set_of, sets};
use super::builder::kept;
use super::window::turned;
use super::{
    ALIASES, Contraction, Epilogue, NEST, Nest, NestError, OPS, Operand, Operator, ProgramBuilder, Structure, Window,
    WindowAxis,
};
use crate::dtype::DType;
use crate::expr::Expr;
use crate::program::Program;
use std::fmt;
use std::sync::Arc;

/// Maximum total size of a workload's buffers in bytes, half of the 47-bit user address space.
const MOST_BYTES: u64 = 1 << 46;

/// Layout of the activations, the tensors passed from layer to layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Plain layout: batch, channels, rows, columns.
    #[default]
    Nchw,
    /// Layout chosen by the template, as between the layers of a network; conversions to and from it are not
    /// timed.
    Blocked,
    /// Layout NCHWc, fixed by the caller to be the same in all layers of a network: activations are tensors
    /// of five dimensions.
    Channels {
        /// Channel block of the input; 1 for the plain layout.
        input: i64,
        /// Channel block of the result, and of operands of its shape; 1 for the plain layout.
        output: i64,
    },
}

impl Layout {
    /// Layouts with a name in a workload's text.
    pub const ALL: [(Layout, &'static str); 2] = [(Layout::Nchw, "nchw"), (Layout::Blocked, "blocked")];

    /// Channel block sizes, with their names in a workload's text.
    pub const BLOCKS: [(i64, &'static str); 5] = [(1, "nchw"), (4, "c4"), (8, "c8"), (16, "c16"), (32, "c32")];

    /// Layout with a channel block for the input and one for the result.
    pub fn of_channels([input, output]: [i64; 2]) -> Layout {
        if (input, output) == (1, 1) { Layout::Nchw } else { Layout::Channels { input, output } }
    }

    /// Channel blocks of the input and of the result; 1 each unless the layout is [`Layout::Channels`].
    pub fn channels(self) -> [i64; 2] {
        match self {
            Layout::Nchw | Layout::Blocked => [1, 1],
            Layout::Channels { input, output } => [input, output],
        }
    }
}

/// Values of a size: a single one, or a range for an open (dynamic) size whose value each run gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SizeRange {
    /// Smallest value.
    pub least: i64,
    /// Largest value.
    pub most: i64,
    /// Step between neighbouring values.
    pub step: i64,
}

impl SizeRange {
    /// Range of a single value.
    fn one(value: i64) -> SizeRange {
        SizeRange { least: value, most: value, step: 1 }
    }

    /// Whether there are several values.
    fn is_open(&self) -> bool {
        self.least < self.most
    }

    /// Parses a number, or `least..most` with an optional step, as in `32..512/32`.
    fn parse(text: &str) -> Option<SizeRange> {
        let Some((least, rest)) = text.split_once("..") else { return text.parse().ok().map(SizeRange::one) };
        let (most, step) = rest.split_once('/').unwrap_or((rest, "1"));
        let [least, most, step] = [least, most, step].map(|n| n.trim().parse::<i64>().ok());
        let range = SizeRange { least: least?, most: most?, step: step? };
        let width = range.most.checked_sub(range.least).filter(|_| range.step >= 1 && range.is_open())?;
        (width % range.step == 0).then_some(range)
    }

    /// Values in ascending order.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = i64> + Clone + use<> {
        let SizeRange { least, most, step } = *self;
        (0..usize::try_from((most - least) / step + 1).unwrap_or(0)).map(move |at| least + at as i64 * step)
    }

    /// Representative values: both ends, and between them numbers in about equal ratios, which are odd if the
    /// step allows, and thus not multiples of a tile; at most `n` values, where `n` is at least two.
    fn spread(&self, n: usize) -> Vec<i64> {
        let (least, ratio) = (self.least as f64, self.most as f64 / self.least as f64);
        let between = (1..n - 1).map(|i| {
            let steps = (least * ratio.powf(i as f64 / (n - 1) as f64) - least) / self.step as f64;
            let value = self.least + steps.round() as i64 * self.step;
            if value % 2 == 0 && self.step % 2 == 1 && value < self.most { value + self.step } else { value }
        });
        let mut values: Vec<i64> = [self.least].into_iter().chain(between).chain([self.most]).collect();
        values.sort_unstable();
        values.dedup();
        values
    }
}

/// Formats a range as in a workload's text.
impl fmt::Display for SizeRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SizeRange { least, most, .. } if least == most => write!(f, "{most}"),
            SizeRange { least, most, step: 1 } => write!(f, "{least}..{most}"),
            SizeRange { least, most, step } => write!(f, "{least}..{most}/{step}"),
        }
    }
}

/// Operator with its sizes and options: the unit of tuning.
#[derive(Clone)]
pub struct Workload {
    operator: &'static Operator,
    sizes: Vec<SizeRange>,
    /// Element type of all tensors; for an integer product, the type of its accumulators.
    pub dtype: DType,
    /// Element types of the factors of a product of integers.
    factors: Option<[DType; 2]>,
    /// Inputs that are constant across runs, by their lower-case names, in the order of the arguments.
    constants: Vec<String>,
    layout: Layout,
    prologue: Vec<Epilogue>,
    epilogue: Vec<Epilogue>,
    /// Whether algorithms that round more than the operator as written, such as Winograd's, are excluded. Has
    /// no effect, and is omitted from the text, if the operator has no such algorithm.
    pub exact: bool,
    /// Whether operands of products may be rounded to TF32 (11 significant bits), which tensor cores multiply
    /// fastest. Has no effect, and is omitted from the text, if there is no such algorithm or only exact ones
    /// are allowed.
    pub tf32: bool,
    /// Whether operands of products are rounded to bf16, at twice the rate of f32 on some CPUs; accumulators
    /// stay f32. Has no effect, and is omitted from the text, if there are no products or only exact
    /// algorithms are allowed.
    pub bf16: bool,
    /// Program of a workload without a named operator.
    pub(super) nest: Option<Arc<Nest>>,
}

impl PartialEq for Workload {
    fn eq(&self, other: &Workload) -> bool {
        self.operator == other.operator
            && self.sizes == other.sizes
            && (self.dtype, self.factors) == (other.dtype, other.factors)
            && (self.layout, self.is_exact()) == (other.layout, other.is_exact())
            && (self.takes_tf32(), self.takes_bf16()) == (other.takes_tf32(), other.takes_bf16())
            && self.constants == other.constants
            && self.prologue == other.prologue
            && self.epilogue == other.epilogue
            && self.nest == other.nest
    }
}

impl fmt::Debug for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Reason why a text is not a workload, an error of the caller.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    /// Name that is neither an operator nor an alias.
    #[error("unknown workload `{given}`; operators: {operators}; aliases: {aliases}; sets of aliases: {sets}")]
    Unknown {
        /// Text that was given.
        given: String,
        /// Names of the operators.
        operators: String,
        /// Names of the aliases.
        aliases: String,
        /// Names of the sets of aliases.
        sets: String,
    },
    /// Attribute that the operator does not have.
    #[error("{operator} has no attribute `{key}`; it has {known}")]
    UnknownAttribute {
        /// The operator.
        operator: &'static str,
        /// Key that was given.
        key: String,
        /// Keys that the operator has.
        known: String,
    },
    /// Attribute that is given twice.
    #[error("attribute `{0}` is given twice")]
    Repeated(String),
    /// Required size that is missing.
    #[error("{operator} needs `{key}` ({text})")]
    Missing {
        /// The operator.
        operator: &'static str,
        /// The size.
        key: &'static str,
        /// Description of the size.
        text: &'static str,
    },
    /// Value that is not accepted.
    #[error("`{key}={value}` is not accepted; expected {expected}")]
    Value {
        /// The attribute.
        key: String,
        /// The value given.
        value: String,
        /// Description of the accepted values.
        expected: String,
    },
    /// Channels that do not divide evenly.
    #[error("{divisor_key}={divisor} does not divide {key}={value}")]
    Indivisible {
        /// Key of the divisor.
        divisor_key: &'static str,
        /// Value of the divisor.
        divisor: i64,
        /// Key of the size to be divided.
        key: &'static str,
        /// Value of the size to be divided.
        value: i64,
    },
    /// Dilated filter larger than the padded input.
    #[error(
        "the filter reaches over {reach} {unit} but the padded input has {available}; give more padding or a smaller filter"
    )]
    FilterTooLarge {
        /// Extent of the dilated filter, in elements.
        reach: i64,
        /// Extent of the padded input, in elements.
        available: i64,
        /// Dimension: rows or columns.
        unit: &'static str,
    },
    /// Transposed convolution whose cropping leaves no output.
    #[error("padding takes away {taken} of {available} output {unit}; give less padding")]
    NoOutput {
        /// Elements that padding crops.
        taken: i64,
        /// Elements of the uncropped output.
        available: i64,
        /// Dimension: rows or columns.
        unit: &'static str,
    },
    /// Output padding that corresponds to no forward convolution.
    #[error("{key}={value} must be less than the stride or the dilation, here {most}")]
    OutputPadding {
        /// Key of the output padding.
        key: &'static str,
        /// Value that was given.
        value: i64,
        /// Limit: the larger of stride and dilation.
        most: i64,
    },
    /// Buffers whose total size exceeds any memory.
    #[error("the tensors of `{0}` do not fit into any memory; give smaller sizes")]
    TooLarge(String),
    /// Program that is not a valid loop nest.
    #[error("a nest is some stages of loops around one assignment each, from inputs to one output; {0}")]
    Nest(NestError),
}

/// Element types of the sums, and of integer factors.
type Types = (DType, Option<[DType; 2]>);

/// Factor types of integer products, with their names in a workload's text; sums are 32-bit integers.
const INTEGER_FACTORS: [([DType; 2], &str); 3] =
    [([DType::U8, DType::I8], "u8i8"), ([DType::I8, DType::I8], "i8i8"), ([DType::U8, DType::I7], "u8i7")];

/// All types by their names.
fn types() -> Vec<(Types, &'static str)> {
    let floats =
        DType::ALL.into_iter().filter(|(dtype, _)| dtype.is_float()).map(|(dtype, name)| ((dtype, None), name));
    let integers = INTEGER_FACTORS.into_iter().map(|(factors, name)| ((DType::I32, Some(factors)), name));
    floats.chain(integers).collect()
}

/// Attributes as given.
struct GivenAttributes {
    /// Values of the operator's sizes, in order.
    sizes: Vec<Option<SizeRange>>,
    dtype: Option<Types>,
    constants: Option<Vec<String>>,
    layout: Option<Layout>,
    /// Channel block sizes of the input and of the result.
    channels: [Option<i64>; 2],
    prologue: Option<Vec<Epilogue>>,
    epilogue: Option<Vec<Epilogue>>,
    exact: Option<bool>,
    tf32: Option<bool>,
    bf16: Option<bool>,
}

impl GivenAttributes {
    fn nothing(operator: &Operator) -> GivenAttributes {
        let sizes = vec![None; operator.sizes.len()];
        let (dtype, constants, layout, channels) = (None, None, None, [None; 2]);
        let (prologue, epilogue, exact, tf32, bf16) = (None, None, None, None, None);
        GivenAttributes { sizes, dtype, constants, layout, channels, prologue, epilogue, exact, tf32, bf16 }
    }

    fn parse(operator: &'static Operator, text: &str) -> Result<GivenAttributes, WorkloadError> {
        let mut given = GivenAttributes::nothing(operator);
        // A size given by its own name takes precedence over its shorthand.
        let mut by_shorthand = given.sizes.clone();
        let mut seen = Vec::new();
        for pair in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (key, value) = (key.trim(), value.trim());
            let wrong = |expected: String| WorkloadError::Value { key: brief(key), value: brief(value), expected };
            if seen.contains(&key) {
                return Err(WorkloadError::Repeated(brief(key)));
            }
            seen.push(key);
            let one = operator.sizes.iter().position(|s| s.name == key);
            if let Some(at) = one.or_else(|| operator.sizes.iter().position(|s| s.shorthand == Some(key))) {
                let size = &operator.sizes[at];
                let is_accepted = |n: &SizeRange| size.accept(n.least).and(size.accept(n.most)).is_some();
                let n = SizeRange::parse(value).filter(is_accepted);
                let expected = || match value.contains("..") {
                    true => format!("LEAST..MOST or LEAST..MOST/STEP of {}", size.expected()),
                    false => size.expected(),
                };
                let n = n.ok_or_else(|| wrong(expected()))?;
                match one {
                    Some(at) => given.sizes[at] = Some(n),
                    None => {
                        let all = operator.sizes.iter().zip(&mut by_shorthand);
                        all.filter(|(s, _)| s.shorthand == Some(key)).for_each(|(_, size)| *size = Some(n));
                    }
                }
            } else if key == "dtype" {
                given.dtype = Some(one_of(&types(), value).map_err(wrong)?);
            } else if key == "const" {
                given.constants = Some(value.split('+').map(|name| name.trim().to_owned()).collect());
            } else if key == "layout" && operator.has_layout {
                given.layout = Some(one_of(&Layout::ALL, value).map_err(wrong)?);
            } else if let Some(side) = SIDES.iter().position(|side| *side == key && operator.has_layout) {
                given.channels[side] = Some(one_of(&Layout::BLOCKS, value).map_err(wrong)?);
            } else if key == "prologue" && operator.has_prologue {
                given.prologue = Some(Epilogue::parse_prologue(value).map_err(wrong)?);
            } else if key == "epilogue" {
                given.epilogue = Some(Epilogue::parse_list(value).map_err(wrong)?);
            } else if key == "exact" {
                given.exact = Some(one_of(&[(false, "0"), (true, "1")], value).map_err(wrong)?);
            } else if key == "tf32" {
                given.tf32 = Some(one_of(&[(false, "0"), (true, "1")], value).map_err(wrong)?);
            } else if key == "bf16" {
                given.bf16 = Some(one_of(&[(false, "0"), (true, "1")], value).map_err(wrong)?);
            } else {
                return Err(WorkloadError::UnknownAttribute {
                    operator: operator.name,
                    key: brief(key),
                    known: attributes(operator).join(", "),
                });
            }
        }
        for (size, by_shorthand) in given.sizes.iter_mut().zip(by_shorthand) {
            *size = size.or(by_shorthand);
        }
        Ok(given)
    }

    /// Fills missing attributes from `other`.
    fn or(self, other: GivenAttributes) -> GivenAttributes {
        GivenAttributes {
            sizes: self.sizes.into_iter().zip(other.sizes).map(|(a, b)| a.or(b)).collect(),
            dtype: self.dtype.or(other.dtype),
            constants: self.constants.or(other.constants),
            layout: self.layout.or(other.layout),
            channels: [0, 1].map(|side| self.channels[side].or(other.channels[side])),
            prologue: self.prologue.or(other.prologue),
            epilogue: self.epilogue.or(other.epilogue),
            exact: self.exact.or(other.exact),
            tf32: self.tf32.or(other.tf32),
            bf16: self.bf16.or(other.bf16),
        }
    }
}

/// Keys of the channel layouts of the input and of the result.
const SIDES: [&str; 2] = ["in", "out"];

/// Keys that an operator accepts.
fn attributes(operator: &Operator) -> Vec<&'static str> {
    let mut keys: Vec<&str> = Vec::new();
    for size in operator.sizes {
        keys.extend(size.shorthand.filter(|s| !keys.contains(s)));
        keys.push(size.name);
    }
    keys.extend(["dtype", "const"]);
    if operator.has_layout {
        keys.push("layout");
        keys.extend(SIDES);
    }
    keys.extend(operator.has_prologue.then_some("prologue"));
    keys.extend(["epilogue", "exact", "tf32", "bf16"]);
    keys
}

/// Finds the value of a name; the error lists the known names.
fn one_of<T: Copy>(table: &[(T, &'static str)], name: &str) -> Result<T, String> {
    match table.iter().find(|(_, n)| *n == name) {
        Some((value, _)) => Ok(*value),
        None => Err(table.iter().map(|(_, n)| *n).collect::<Vec<_>>().join(" or ")),
    }
}

/// Shortens a long text to its start.
fn brief(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(40).collect()
}

impl Workload {
    /// Parses `operator:key=value,…` or an alias, the latter optionally followed by `:key=value,…`, which
    /// overrides or adds attributes.
    ///
    /// # Errors
    /// [`WorkloadError`], which says which part is wrong and what is accepted.
    pub fn parse(text: &str) -> Result<Workload, WorkloadError> {
        let (head, rest) = text.split_once(':').unwrap_or((text, ""));
        let alias = ALIASES.iter().find(|(alias, _)| *alias == head).map(|(_, full)| *full);
        let (name, base) = alias.map_or((head, ""), |full| full.split_once(':').unwrap_or((full, "")));
        if name == NEST.name {
            return Workload::of_nest_text(rest);
        }
        let operator = OPS.iter().find(|op| op.name == name).ok_or_else(|| WorkloadError::Unknown {
            given: brief(text),
            operators: OPS.iter().map(|op| op.name).collect::<Vec<_>>().join(", "),
            aliases: ALIASES.iter().map(|(a, _)| *a).collect::<Vec<_>>().join(", "),
            sets: sets().join(", "),
        })?;
        Workload::of(operator, GivenAttributes::parse(operator, rest)?.or(GivenAttributes::parse(operator, base)?))
    }

    /// Creates a workload of an operator with sizes given by name; other sizes have their defaults.
    ///
    /// # Errors
    /// [`WorkloadError`] for a size that the operator does not have or accept, or that is missing, and for a
    /// nest, which [`Workload::nest`] creates.
    pub fn new(operator: &'static Operator, sizes: &[(&str, i64)]) -> Result<Workload, WorkloadError> {
        Workload::of_factors(operator, None, sizes)
    }

    /// Creates a workload like [`Workload::new`]; if operand types are given, A first, of an integer product
    /// of these types.
    ///
    /// # Errors
    /// See [`Workload::new`]; [`WorkloadError::Value`] if no integer product has these types.
    pub fn of_factors(
        operator: &'static Operator,
        factors: Option<[DType; 2]>,
        sizes: &[(&str, i64)],
    ) -> Result<Workload, WorkloadError> {
        if *operator == NEST {
            return Workload::of_nest_text("");
        }
        let mut given = GivenAttributes::nothing(operator);
        if let Some(factors) = factors {
            let of_factors = |(types, _): &(Types, &str)| types.1 == Some(factors);
            let known = types().into_iter().find(of_factors).ok_or_else(|| WorkloadError::Value {
                key: "dtype".to_owned(),
                value: factors.map(DType::name).concat(),
                expected: INTEGER_FACTORS.map(|(_, name)| name).join(" or "),
            })?;
            given.dtype = Some(known.0);
        }
        for &(name, n) in sizes {
            let at = operator.sizes.iter().position(|size| size.name == name);
            let at = at.ok_or_else(|| WorkloadError::UnknownAttribute {
                operator: operator.name,
                key: brief(name),
                known: operator.sizes.iter().map(|size| size.name).collect::<Vec<_>>().join(", "),
            })?;
            let size = &operator.sizes[at];
            given.sizes[at] = Some(size.accept(n).map(SizeRange::one).ok_or_else(|| WorkloadError::Value {
                key: name.to_owned(),
                value: n.to_string(),
                expected: size.expected(),
            })?);
        }
        Workload::of(operator, given)
    }

    fn of(operator: &'static Operator, given: GivenAttributes) -> Result<Workload, WorkloadError> {
        let sizes = operator.sizes.iter().zip(&given.sizes).map(|(size, given)| {
            let missing = WorkloadError::Missing { operator: operator.name, key: size.name, text: size.text };
            given.or(size.default.map(SizeRange::one)).ok_or(missing)
        });
        let sizes = sizes.collect::<Result<_, _>>()?;
        let layout = match (given.layout.unwrap_or_default(), given.channels.map(|channels| channels.unwrap_or(1))) {
            (Layout::Blocked, [1, 1]) => Layout::Blocked,
            (Layout::Blocked, _) => {
                let (key, value) = ("layout".to_owned(), "blocked".to_owned());
                let expected = format!("nchw where `{}` is given", SIDES.join("` or `"));
                return Err(WorkloadError::Value { key, value, expected });
            }
            (_, channels) => Layout::of_channels(channels),
        };
        let workload = Workload {
            prologue: given.prologue.unwrap_or_default(),
            epilogue: given.epilogue.unwrap_or_default(),
            exact: given.exact.unwrap_or(false),
            tf32: given.tf32.unwrap_or(false),
            bf16: given.bf16.unwrap_or(false),
            factors: given.dtype.and_then(|(_, factors)| factors),
            ..Workload::plain(operator, sizes, given.dtype.map_or(DType::F32, |(dtype, _)| dtype))
        };
        (operator.check)(&workload)?;
        workload.require_types()?;
        workload.require_closed()?;
        workload.turned().with_layout(layout)?.with_constants(given.constants.unwrap_or_default())?.checked()
    }

    /// Rejects integer factors if the operator has no integer product, and epilogues that do not accept the
    /// type of the sums.
    fn require_types(&self) -> Result<(), WorkloadError> {
        let wrong = |key: &str, value: String, expected: String| {
            Err(WorkloadError::Value { key: key.to_owned(), value: brief(&value), expected })
        };
        let structure = self.structure();
        let has_integers = match &structure {
            Structure::Contraction(_) => true,
            Structure::Window(window) => !window.transposed,
            Structure::Packed(_) | Structure::Nest(_) => false,
        };
        if let Structure::Window(window) = &structure
            && window.zero_point
            && (self.factors.is_none() || !window.is_padded())
        {
            let expected = "0 where no integers are padded".to_owned();
            return wrong(Window::ZERO, "1".to_owned(), expected);
        }
        if self.factors.is_some() && !self.prologue.is_empty() {
            let expected = "none: integers are multiplied as they are".to_owned();
            return wrong("prologue", Epilogue::list_to_string(&self.prologue), expected);
        }
        if self.factors.is_some() && !has_integers {
            let floats = types().into_iter().filter(|((_, factors), _)| factors.is_none()).map(|(_, name)| name);
            let floats = floats.collect::<Vec<_>>().join(" or ");
            return wrong("dtype", self.dtype_name().to_owned(), format!("{floats} of {}", self.operator.name));
        }
        self.require_pairs(&structure)?;
        for (key, list) in [("prologue", &self.prologue), ("epilogue", &self.epilogue)] {
            if let Err(expected) = Epilogue::result_of(self.dtype, list) {
                return wrong(key, Epilogue::list_to_string(list), expected);
            }
        }
        Ok(())
    }

    /// Rejects gated epilogues except for products whose columns form whole pairs of groups.
    fn require_pairs(&self, structure: &Structure) -> Result<(), WorkloadError> {
        let Some(columns) = self.pairs() else { return Ok(()) };
        let n = match structure {
            Structure::Contraction(product) if product.batch.is_none() => product.n,
            Structure::Packed(product) => product.n,
            _ => 1,
        };
        let n_pairs = self.epilogue.iter().filter(|operation| operation.operand() == Some(Operand::Pair)).count();
        let is_open = self.open_sizes().any(|(name, _)| name == "n");
        if n_pairs == 1 && n % (2 * columns) == 0 && !is_open {
            return Ok(());
        }
        let (key, value) = ("epilogue".to_owned(), brief(&Epilogue::list_to_string(&self.epilogue)));
        let expected = format!("gated once, of a product of {} columns or a multiple", 2 * columns);
        Err(WorkloadError::Value { key, value, expected })
    }

    /// Turns images that are columns of pixels into rows: the same elements in memory, and one task.
    fn turned(self) -> Workload {
        match self.structure() {
            Structure::Window(window) if window.is_column() => self.exchanged(),
            _ => self,
        }
    }

    /// The workload with rows and columns exchanged.
    fn exchanged(mut self) -> Workload {
        let names = self.operator.sizes.iter().map(|size| size.name);
        self.sizes = names.map(|name| self.range(turned(name).unwrap_or(name))).collect();
        self
    }

    /// Convolution of images of one column that a convolution of images of one row is: its rows may be open.
    pub fn in_column(&self) -> Option<Workload> {
        matches!(self.structure(), Structure::Window(_)).then_some(())?;
        let column = self.clone().exchanged();
        matches!(column.structure(), Structure::Window(window) if window.is_column()).then_some(column)
    }

    /// A program of its own.
    pub(super) fn of_program(
        operator: &'static Operator,
        dtype: DType,
        constants: Vec<String>,
        nest: Arc<Nest>,
    ) -> Result<Workload, WorkloadError> {
        Workload { constants, nest: Some(nest), ..Workload::plain(operator, Vec::new(), dtype) }.checked()
    }

    /// Creates a workload of an operator with sizes only.
    fn plain(operator: &'static Operator, sizes: Vec<SizeRange>, dtype: DType) -> Workload {
        let (constants, layout, prologue, epilogue) = (Vec::new(), Layout::default(), Vec::new(), Vec::new());
        let (exact, tf32, bf16, nest, factors) = (false, false, false, None, None);
        Workload { operator, sizes, dtype, factors, constants, layout, prologue, epilogue, exact, tf32, bf16, nest }
    }

    /// Returns the workload if its tensors fit into memory.
    fn checked(self) -> Result<Workload, WorkloadError> {
        let bytes = self.program().buffers.iter().try_fold(0u64, |sum, b| sum.checked_add(b.size_bytes()?));
        match bytes {
            Some(bytes) if bytes <= MOST_BYTES => Ok(self),
            _ => Err(WorkloadError::TooLarge(self.label())),
        }
    }

    /// Parses a workload, or the name of a set of aliases, such as `resnet18`, with attributes that apply to
    /// all of them.
    ///
    /// # Errors
    /// See [`Workload::parse`], for the first workload of the set that does not accept the attributes.
    pub fn parse_all(text: &str) -> Result<Vec<Workload>, WorkloadError> {
        let (head, rest) = text.split_once(':').unwrap_or((text, ""));
        let of_set = |alias: &&str| set_of(alias) == Some(head);
        let mut members = ALIASES.iter().map(|(alias, _)| *alias).filter(of_set).peekable();
        match members.peek() {
            None => Ok(vec![Workload::parse(text)?]),
            Some(_) => members.map(|alias| Workload::parse(&format!("{alias}:{rest}"))).collect(),
        }
    }

    /// Operator of the workload.
    pub fn operator(&self) -> &'static Operator {
        self.operator
    }

    /// Element types of operands A and B.
    pub fn factors(&self) -> [DType; 2] {
        self.factors.unwrap_or([self.dtype; 2])
    }

    /// Element type of the result.
    pub fn result_dtype(&self) -> DType {
        Epilogue::result_of(self.dtype, &self.epilogue).unwrap_or(self.dtype)
    }

    /// Whether operands are integers.
    pub fn has_integer_factors(&self) -> bool {
        self.factors.is_some()
    }

    /// Variant of this product of unsigned bytes with 7-bit instead of 8-bit weights.
    pub fn with_7_bit_weights(&self) -> Option<Workload> {
        let factors = Some([DType::U8, DType::I7]);
        (self.factors == Some([DType::U8, DType::I8])).then(|| Workload { factors, ..self.clone() })
    }

    /// Whether the operands are 8-bit integers, which CPUs multiply at four times the rate of f32.
    pub fn multiplies_bytes(&self) -> bool {
        self.factors.is_some() || matches!(self.structure(), Structure::Packed(packed) if packed.rounds)
    }

    /// Whether the operator sums products over all channels, or over the inner dimension of matrices.
    fn sums_products(&self) -> bool {
        match self.structure() {
            Structure::Contraction(_) => true,
            Structure::Window(window) => !window.depthwise && !window.transposed && window.groups == 1,
            Structure::Packed(_) | Structure::Nest(_) => false,
        }
    }

    /// Whether f32 operands are rounded to bf16.
    pub fn takes_bf16(&self) -> bool {
        self.bf16 && !self.exact && self.dtype == DType::F32 && self.factors.is_none() && self.sums_products()
    }

    /// Whether operands are bf16, stored or rounded, which some CPUs multiply faster than f32.
    pub fn multiplies_bf16(&self) -> bool {
        self.takes_bf16() || self.dtype == DType::Bf16 && self.sums_products()
    }

    /// Converts a factor to the type in which it is multiplied.
    pub(super) fn factor(&self, x: Expr) -> Expr {
        if self.takes_bf16() { Expr::cast(DType::Bf16, x) } else { x }
    }

    /// Name of the element types in a workload's text.
    pub fn dtype_name(&self) -> &'static str {
        let of_factors = |factors| INTEGER_FACTORS.iter().find(|(known, _)| *known == factors).map(|(_, name)| *name);
        self.factors.and_then(of_factors).unwrap_or(self.dtype.name())
    }

    /// Value of a size; the largest value for an open (dynamic) size.
    ///
    /// # Panics
    /// If the operator has no size of this name.
    pub fn size(&self, name: &str) -> i64 {
        self.range(name).most
    }

    /// Range of a size's values.
    ///
    /// # Panics
    /// If the operator has no size of this name.
    pub fn range(&self, name: &str) -> SizeRange {
        let at = self.operator.sizes.iter().position(|s| s.name == name);
        self.sizes[at.unwrap_or_else(|| panic!("{} has no size {name}", self.operator.name))]
    }

    /// Open (dynamic) sizes, with their names and ranges.
    pub fn open_sizes(&self) -> impl Iterator<Item = (&'static str, SizeRange)> {
        let names = self.operator.sizes.iter().map(|size| size.name);
        let own = names.zip(self.sizes.iter().copied()).filter(|(_, range)| range.is_open());
        let of_nest = self.nest.iter().flat_map(|nest| nest.sizes());
        own.chain(of_nest)
    }

    /// Whether some size is open (dynamic), so that the workload represents a family of fixed workloads.
    pub fn is_family(&self) -> bool {
        self.open_sizes().next().is_some()
    }

    /// Whether a smaller member's results are a part of the largest member's, as for open rows and columns of
    /// products, but not for an open reduction or rows of images, after which zeros may be read. Other
    /// families can be run but not tuned, as a kernel is checked against the largest member.
    pub fn has_members_of_one_answer(&self) -> bool {
        self.nest.as_ref().is_none_or(|nest| nest.sizes().next().is_none())
            && self.open_sizes().all(|(name, _)| name != "k" && name != Window::OPEN)
    }

    /// Representative values of the open (dynamic) sizes, at which a family is measured; several sizes grow
    /// together. Without open sizes, one empty list.
    pub fn anchors(&self) -> Vec<Vec<i64>> {
        const N: usize = 7;
        let spreads: Vec<Vec<i64>> = self.open_sizes().map(|(_, range)| range.spread(N)).collect();
        let n = spreads.iter().map(Vec::len).max().unwrap_or(1);
        (0..n).map(|at| spreads.iter().map(|values| values[at * values.len() / n]).collect()).collect()
    }

    /// Member of a family with the largest sizes, whose tensors have the family's shapes.
    pub fn largest(&self) -> Workload {
        let most: Vec<i64> = self.open_sizes().map(|(_, range)| range.most).collect();
        self.at(&most).expect("invariant: the largest sizes are sizes")
    }

    /// Member of a family with a value for each open size, in order; `None` if a value is not in the size's
    /// range.
    pub fn at(&self, sizes: &[i64]) -> Option<Workload> {
        if let Some(nest) = self.nest.as_ref().filter(|nest| nest.sizes().next().is_some()) {
            return Workload::nest(nest.program().at(sizes)?).ok();
        }
        let mut values = sizes.iter();
        let mut member = self.clone();
        for range in member.sizes.iter_mut().filter(|range| range.is_open()) {
            let value = *values.next()?;
            let is_one = (range.least..=range.most).contains(&value) && (value - range.least) % range.step == 0;
            *range = is_one.then_some(SizeRange::one(value))?;
        }
        values.next().is_none().then_some(member)
    }

    /// Rejects open sizes other than those of products, whose buffers have room for the largest value.
    fn require_closed(&self) -> Result<(), WorkloadError> {
        let structure = self.structure();
        let may_be = |(name, range): &(&str, SizeRange)| match &structure {
            Structure::Contraction(_) => Contraction::OPEN.contains(name),
            Structure::Window(window) => *name == Window::OPEN && window.may_open(*range),
            Structure::Packed(_) | Structure::Nest(_) => false,
        };
        let refused = self.open_sizes().find(|size| !may_be(size));
        match refused {
            None => Ok(()),
            Some((name, range)) => Err(WorkloadError::Value {
                key: name.to_owned(),
                value: range.to_string(),
                expected: format!(
                    "a number; only {} of products, and {} of convolutions in steps of their stride, may be ranges",
                    Contraction::OPEN.join(", "),
                    Window::OPEN
                ),
            }),
        }
    }

    /// Inputs that are constant across runs: their lower-case names, in argument order.
    pub fn constants(&self) -> &[String] {
        &self.constants
    }

    /// Whether an input is constant across runs.
    pub fn is_constant(&self, input: &str) -> bool {
        self.constants.iter().any(|c| c.eq_ignore_ascii_case(input))
    }

    /// Replaces the set of constant inputs, given by their lower-case names.
    ///
    /// # Errors
    /// [`WorkloadError::Value`] for a name that is not an input that may be constant.
    pub fn with_constants(self, constants: Vec<String>) -> Result<Workload, WorkloadError> {
        if self.nest.is_some() && constants == self.constants {
            return Ok(self);
        }
        let known = self.known_constants();
        match constants.iter().find(|name| !known.contains(name)) {
            Some(unknown) => Err(WorkloadError::Value {
                key: "const".to_owned(),
                value: brief(unknown),
                expected: known.join(" or "),
            }),
            None => {
                Ok(Workload { constants: known.into_iter().filter(|name| constants.contains(name)).collect(), ..self })
            }
        }
    }

    /// Inputs that may be constant at these sizes, in the order of the arguments.
    fn known_constants(&self) -> Vec<String> {
        let mut known = self.possible_constants();
        if let (Structure::Contraction(product), true) = (self.structure(), self.is_family()) {
            // The precomputed form of a factor would depend on its sizes.
            let is_open = |sizes: [&str; 2]| self.open_sizes().any(|(name, _)| sizes.contains(&name));
            for (factor, sizes) in [(product.a, ["m", "k"]), (product.b, ["n", "k"])] {
                known.retain(|name| !is_open(sizes) || !name.eq_ignore_ascii_case(factor.name));
            }
        }
        known
    }

    /// Inputs that may be constant, in the order of the arguments.
    fn possible_constants(&self) -> Vec<String> {
        let ahead = Epilogue::prologue_operands(&self.prologue);
        let operands = ahead.into_iter().chain(Epilogue::operands(&self.epilogue));
        let operands = operands.map(|(_, name, _)| name.to_lowercase());
        let zero = matches!(self.structure(), Structure::Window(w) if w.zero_point).then(|| Window::ZERO.to_owned());
        self.operator.constants.iter().map(|name| (*name).to_owned()).chain(zero).chain(operands).collect()
    }

    /// Replaces the layout of the activations.
    ///
    /// # Errors
    /// [`WorkloadError::UnknownAttribute`] if the operator has no choice of layouts,
    /// [`WorkloadError::Indivisible`] if channels do not fill their blocks.
    pub fn with_layout(self, layout: Layout) -> Result<Workload, WorkloadError> {
        if layout != Layout::default() && !self.operator.has_layout {
            return Err(WorkloadError::UnknownAttribute {
                operator: self.operator.name,
                key: "layout".to_owned(),
                known: attributes(self.operator).join(", "),
            });
        }
        if let Structure::Window(window) = self.structure() {
            for (at, value) in [window.c, window.k].into_iter().enumerate() {
                let (divisor_key, divisor) = (SIDES[at], layout.channels()[at]);
                if value % divisor != 0 {
                    let key = ["c", "k"][at];
                    return Err(WorkloadError::Indivisible { divisor_key, divisor, key, value });
                }
            }
        }
        Ok(Workload { layout, ..self })
    }

    /// Replaces the epilogue and drops the constant inputs of the old one.
    ///
    /// # Errors
    /// [`WorkloadError`] if it has too many operations, or its tensors do not fit into memory.
    pub fn with_epilogue(self, epilogue: Vec<Epilogue>) -> Result<Workload, WorkloadError> {
        let checked = match self.nest.is_some() && !epilogue.is_empty() {
            true => Err("none: the program of a nest has it".to_owned()),
            false => Epilogue::check_list(&epilogue),
        };
        if let Err(expected) = checked {
            let value = brief(&Epilogue::list_to_string(&epilogue));
            return Err(WorkloadError::Value { key: "epilogue".to_owned(), value, expected });
        }
        let workload = Workload { epilogue, ..self };
        workload.require_types()?;
        workload.without_unknown_constants().checked()
    }

    /// Replaces the prologue and drops the constant inputs of the old one.
    ///
    /// # Errors
    /// [`WorkloadError`] if the operator does not support prologues, the prologue has too many operations or
    /// one that reads an input of the result's shape, or its tensors do not fit into memory.
    pub fn with_prologue(self, prologue: Vec<Epilogue>) -> Result<Workload, WorkloadError> {
        let checked = match self.operator.has_prologue || prologue.is_empty() {
            true => Epilogue::check_prologue(&prologue),
            false => Err(format!("none: {} has no prologue", self.operator.name)),
        };
        if let Err(expected) = checked {
            let value = brief(&Epilogue::list_to_string(&prologue));
            return Err(WorkloadError::Value { key: "prologue".to_owned(), value, expected });
        }
        let workload = Workload { prologue, ..self };
        workload.require_types()?;
        workload.without_unknown_constants().checked()
    }

    /// Drops constants that are not inputs of the workload.
    fn without_unknown_constants(mut self) -> Workload {
        if self.nest.is_none() {
            let known = self.possible_constants();
            self.constants.retain(|name| known.contains(name));
        }
        self
    }

    /// Representative of all workloads that differ only in the parameters of prologue and epilogue, such as
    /// learned factors, and have the same fastest schedules.
    pub fn representative(&self) -> Workload {
        let [prologue, epilogue] =
            [&self.prologue, &self.epilogue].map(|list| list.iter().map(Epilogue::alike).collect());
        Workload { prologue, epilogue, ..self.clone() }
    }

    /// Layout of the activations.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Operations on each element of the first input as it is read, in order; they do not apply to padding.
    pub fn prologue(&self) -> &[Epilogue] {
        &self.prologue
    }

    /// Whether the accumulators are the result, because there is no epilogue and both have the same type.
    pub fn is_plain(&self) -> bool {
        self.epilogue.is_empty() && !self.dtype.is_half()
    }

    /// Group size in columns, if the epilogue [gates](super::EpilogueFunction::Gated) columns by others.
    pub fn pairs(&self) -> Option<i64> {
        Epilogue::pairs_of(&self.epilogue)
    }

    /// Number of sums from which an element of the result is computed.
    pub(super) fn sums_per_element(&self) -> i64 {
        if self.pairs().is_some() { 2 } else { 1 }
    }

    /// Operations on each element of the result, in order.
    pub fn epilogue(&self) -> &[Epilogue] {
        &self.epilogue
    }

    /// Names of the epilogue operands' copies in the layout that the template chooses.
    pub fn kept_operands(&self) -> Vec<String> {
        let of_element = Epilogue::operands(&self.epilogue).into_iter().filter(|(.., kind)| *kind == Operand::Element);
        let is_kept = self.layout == Layout::Blocked;
        of_element.filter(|_| is_kept).map(|(_, name, _)| kept(&name)).collect()
    }

    /// Whether less exact algorithms exist and are excluded.
    pub fn is_exact(&self) -> bool {
        self.exact && self.has_inexact()
    }

    /// Whether an algorithm exists that rounds more than the operator as written.
    pub fn has_inexact(&self) -> bool {
        (self.operator.has_inexact)(self)
    }

    /// Whether operands may be rounded to TF32.
    pub fn takes_tf32(&self) -> bool {
        self.tf32 && !self.exact && self.dtype == DType::F32 && self.fills_tiles()
    }

    /// Whether tensor cores can compute the workload, a sufficiently large matrix product or a convolution
    /// expressed as one.
    pub fn fills_tiles(&self) -> bool {
        const LEAST: i64 = 16;
        let sizes = match self.structure() {
            Structure::Contraction(c) => [c.m, c.n, c.k],
            Structure::Window(w) if !w.depthwise => {
                let [rows, columns] = w.axes;
                let taps = rows.filter * columns.filter;
                [w.k / w.groups, w.n * rows.output * columns.output, w.c / w.groups * taps]
            }
            Structure::Window(_) | Structure::Packed(_) | Structure::Nest(_) => return false,
        };
        self.dtype.is_float() && self.dtype != DType::F64 && sizes.iter().all(|n| *n >= LEAST)
    }

    /// Whether Winograd's algorithm applies, which rounds more than the operator as written: to convolutions
    /// with dense 3 × 3 filters, except in f16 or bf16, whose precision does not allow it, or with factors
    /// rounded to bf16.
    pub fn has_winograd(&self) -> bool {
        let Structure::Window(w) = self.structure() else { return false };
        let has_taps_in_a_row = |axis: &WindowAxis| (axis.filter, axis.stride, axis.dilation) == (3, 1, 1);
        let is_dense = w.groups == 1 && !w.depthwise && !w.transposed;
        let has_bits = self.dtype.is_float() && !self.dtype.is_half() && !self.takes_bf16();
        is_dense && has_bits && w.axes.iter().all(has_taps_in_a_row)
    }

    /// Replaces a size; `None` if the result is not a valid workload.
    ///
    /// # Panics
    /// If the operator has no size of this name.
    pub fn with_size(&self, name: &str, value: i64) -> Option<Workload> {
        let mut other = self.clone();
        let at = self.operator.sizes.iter().position(|s| s.name == name);
        other.sizes[at.unwrap_or_else(|| panic!("{} has no size {name}", self.operator.name))] = SizeRange::one(value);
        (self.operator.check)(&other).is_ok().then_some(other)
    }

    /// Makes some sizes open (dynamic); inputs whose shape depends on them are no longer constant.
    ///
    /// # Errors
    /// [`WorkloadError::Value`] for a size that may not be a range; else see [`Workload::new`].
    ///
    /// # Panics
    /// If the operator has no size of a given name.
    pub fn with_ranges(&self, ranges: &[(&str, SizeRange)]) -> Result<Workload, WorkloadError> {
        let mut open = self.clone();
        for (name, range) in ranges {
            let at = self.operator.sizes.iter().position(|s| s.name == *name);
            open.sizes[at.unwrap_or_else(|| panic!("{} has no size {name}", self.operator.name))] = *range;
        }
        (self.operator.check)(&open)?;
        open.require_types()?;
        open.require_closed()?;
        let known = open.known_constants();
        let mut constants = std::mem::take(&mut open.constants);
        constants.retain(|name| known.contains(name));
        open.with_constants(constants)?.checked()
    }

    /// Structure of the computation between prologue and epilogue, for schedules and libraries.
    pub fn structure(&self) -> Structure {
        (self.operator.structure)(self)
    }

    /// Human-readable label: the text, or a short description of a loop nest.
    pub fn label(&self) -> String {
        self.nest.as_ref().map_or_else(|| self.to_string(), |nest| nest.label())
    }

    /// Builds the untransformed program.
    pub fn program(&self) -> Program {
        self.structure().program(self)
    }

    /// Creates a builder of a program named after the workload, without stages.
    pub(super) fn builder(&self) -> ProgramBuilder {
        ProgramBuilder::new(self.to_string(), self.dtype, self.constants.clone())
    }

    /// Number of floating-point operations of one run: twice the number of multiply-accumulates, including
    /// those with padding and excluding prologue and epilogue. For a family, the geometric mean over its
    /// [anchors](Workload::anchors), as with times.
    pub fn flops(&self) -> f64 {
        if !self.is_family() {
            return self.structure().flops();
        }
        let anchors = self.anchors();
        let members = anchors.iter().filter_map(|sizes| self.at(sizes));
        (members.map(|member| member.structure().flops().ln()).sum::<f64>() / anchors.len() as f64).exp()
    }

    /// Number of floating-point operations, excluding products with padding.
    pub fn flops_inside(&self) -> f64 {
        self.flops() * self.structure().share_inside()
    }
}

/// Formats the canonical text, with shorthands where possible and without defaults.
impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(nest) = &self.nest {
            return write!(f, "{}:{}", self.operator.name, nest.text());
        }
        let mut pairs = Vec::new();
        let sizes: Vec<_> = self.operator.sizes.iter().zip(&self.sizes).collect();
        // Adjacent sizes with the same shorthand form a group; a size without a shorthand forms its own.
        for group in sizes.chunk_by(|(a, _), (b, _)| a.shorthand.is_some() && a.shorthand == b.shorthand) {
            let (first, value) = group[0];
            match first.shorthand.filter(|_| group.iter().all(|(_, v)| *v == value)) {
                Some(shorthand) if first.default.map(SizeRange::one) != Some(*value) => {
                    pairs.push(format!("{shorthand}={value}"))
                }
                Some(_) => {}
                None => {
                    let given = group.iter().filter(|(size, v)| size.default.map(SizeRange::one) != Some(**v));
                    pairs.extend(given.map(|(size, v)| format!("{}={v}", size.name)));
                }
            }
        }
        if self.dtype != DType::F32 {
            pairs.push(format!("dtype={}", self.dtype_name()));
        }
        pairs.extend((!self.constants.is_empty()).then(|| format!("const={}", self.constants.join("+"))));
        if let Some((_, name)) = Layout::ALL.iter().find(|(l, _)| *l == self.layout && *l != Layout::default()) {
            pairs.push(format!("layout={name}"));
        }
        for (side, channels) in SIDES.iter().zip(self.layout.channels()) {
            let named = Layout::BLOCKS.iter().find(|(n, _)| *n == channels && channels > 1);
            pairs.extend(named.map(|(_, name)| format!("{side}={name}")));
        }
        if !self.prologue.is_empty() {
            pairs.push(format!("prologue={}", Epilogue::list_to_string(&self.prologue)));
        }
        if !self.epilogue.is_empty() {
            pairs.push(format!("epilogue={}", Epilogue::list_to_string(&self.epilogue)));
        }
        pairs.extend(self.is_exact().then(|| "exact=1".to_owned()));
        pairs.extend(self.takes_tf32().then(|| "tf32=1".to_owned()));
        pairs.extend(self.takes_bf16().then(|| "bf16=1".to_owned()));
        write!(f, "{}:{}", self.operator.name, pairs.join(","))
    }
}
