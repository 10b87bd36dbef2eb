//! Operators: tensor expressions with named sizes, and the text that names a workload.

mod builder;
mod matmul;

pub use builder::{Axes, ProgramBuilder, StageSpec};

use crate::program::{DType, Program};
use std::fmt;

/// A named size of an operator.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Its key in a workload's text.
    pub name: &'static str,
    /// What it is.
    pub text: &'static str,
    /// Its value where it is not given; `None` where it must be.
    pub default: Option<i64>,
    /// Smallest value accepted.
    pub least: i64,
}

/// Everything about an operator.
pub struct Operator {
    /// Its name in a workload's text.
    pub name: &'static str,
    /// One line on what it computes.
    pub text: &'static str,
    /// Its sizes, in canonical order.
    pub sizes: &'static [Size],
    /// Inputs that may be constant (`const=…`), by their lower-case names.
    pub constants: &'static [&'static str],
    /// The untransformed program.
    pub program: fn(&Workload) -> Program,
    /// Floating-point operations of one run: twice the multiply-accumulates.
    pub flops: fn(&Workload) -> f64,
}

/// All operators.
pub const OPS: &[Operator] = &[matmul::MATMUL];

/// Short names of workloads.
pub const ALIASES: &[(&str, &str)] = &[
    ("matmul-256", "matmul:m=256,n=256,k=256"),
    ("matmul-512", "matmul:m=512,n=512,k=512"),
    ("matmul-1024", "matmul:m=1024,n=1024,k=1024"),
    ("matmul-2048", "matmul:m=2048,n=2048,k=2048"),
    ("bert.MM1", "matmul:m=512,n=1024,k=1024"),
    ("bert.MM2", "matmul:m=512,n=4096,k=1024"),
    ("bert.MM3", "matmul:m=512,n=1024,k=4096"),
];

/// Largest size of all buffers of a workload together, in bytes: what 47-bit user addresses can hold.
const MOST_BYTES: u64 = 1 << 46;

/// An operator with its sizes.
#[derive(Clone, Copy)]
pub struct Workload {
    operator: &'static Operator,
    sizes: [i64; Workload::MOST_SIZES],
    /// Element type of all tensors.
    pub dtype: DType,
    /// The input that stays the same from run to run, if any.
    pub constant: Option<&'static str>,
}

impl PartialEq for Workload {
    fn eq(&self, other: &Workload) -> bool {
        self.to_string() == other.to_string()
    }
}

impl fmt::Debug for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Why a text does not name a workload. The fault is the caller's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    /// Neither an operator nor an alias.
    #[error("unknown workload `{given}`; operators: {operators}; aliases: {aliases}")]
    Unknown {
        /// What was given.
        given: String,
        /// The operators there are.
        operators: String,
        /// The aliases there are.
        aliases: String,
    },
    /// An attribute that the operator does not have.
    #[error("{operator} has no attribute `{key}`; it has {known}")]
    UnknownAttribute {
        /// The operator.
        operator: &'static str,
        /// The attribute given.
        key: String,
        /// The attributes there are.
        known: String,
    },
    /// The same attribute twice.
    #[error("attribute `{0}` is given twice")]
    Repeated(String),
    /// A required size is missing.
    #[error("{operator} needs `{key}` ({text})")]
    Missing {
        /// The operator.
        operator: &'static str,
        /// The size.
        key: &'static str,
        /// What it is.
        text: &'static str,
    },
    /// A value that is not accepted.
    #[error("`{key}={value}` is not accepted; expected {expected}")]
    Value {
        /// The attribute.
        key: String,
        /// The value given.
        value: String,
        /// What is accepted.
        expected: String,
    },
    /// The buffers together are larger than memory can be.
    #[error("the tensors of `{0}` do not fit into any memory; give smaller sizes")]
    TooLarge(String),
}

impl Workload {
    const MOST_SIZES: usize = 16;

    /// Parses `operator:key=value,…` or an alias, the latter optionally followed by `:key=value,…`.
    ///
    /// # Errors
    /// [`WorkloadError`] says which part is wrong and what is accepted.
    pub fn parse(text: &str) -> Result<Workload, WorkloadError> {
        let (head, rest) = text.split_once(':').unwrap_or((text, ""));
        let (name, given) = match ALIASES.iter().find(|(alias, _)| *alias == head) {
            Some((_, full)) => {
                let (name, sizes) = full.split_once(':').unwrap_or((full, ""));
                (name, if rest.is_empty() { sizes.to_owned() } else { format!("{sizes},{rest}") })
            }
            None => (head, rest.to_owned()),
        };
        let operator = OPS.iter().find(|op| op.name == name).ok_or_else(|| WorkloadError::Unknown {
            given: text.chars().take(100).collect(),
            operators: OPS.iter().map(|op| op.name).collect::<Vec<_>>().join(", "),
            aliases: ALIASES.iter().map(|(a, _)| *a).collect::<Vec<_>>().join(", "),
        })?;
        let mut sizes: [Option<i64>; Workload::MOST_SIZES] = [None; Workload::MOST_SIZES];
        let (mut dtype, mut constant) = (None, None);
        for pair in given.split(',').filter(|p| !p.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (key, value) = (key.trim(), value.trim());
            let wrong = |expected: String| WorkloadError::Value {
                key: key.chars().take(40).collect(),
                value: value.chars().take(40).collect(),
                expected,
            };
            let repeated = || WorkloadError::Repeated(key.to_owned());
            if let Some(at) = operator.sizes.iter().position(|s| s.name == key) {
                let least = operator.sizes[at].least;
                let n = value.parse().ok().filter(|n| *n >= least);
                let n = n.ok_or_else(|| wrong(format!("an integer of at least {least}")))?;
                if sizes[at].replace(n).is_some() {
                    return Err(repeated());
                }
            } else if key == "dtype" {
                let names = || DType::ALL.map(|(_, n)| n).join(" or ");
                let found = DType::ALL.iter().find(|(_, n)| *n == value).ok_or_else(|| wrong(names()))?;
                if dtype.replace(found.0).is_some() {
                    return Err(repeated());
                }
            } else if key == "const" {
                let found = operator.constants.iter().find(|c| **c == value);
                let found = found.ok_or_else(|| wrong(operator.constants.join(" or ")))?;
                if constant.replace(*found).is_some() {
                    return Err(repeated());
                }
            } else {
                let known = operator.sizes.iter().map(|s| s.name).chain(["dtype", "const"]);
                return Err(WorkloadError::UnknownAttribute {
                    operator: operator.name,
                    key: key.chars().take(40).collect(),
                    known: known.collect::<Vec<_>>().join(", "),
                });
            }
        }
        let mut all = [0; Workload::MOST_SIZES];
        for (at, size) in operator.sizes.iter().enumerate() {
            all[at] = sizes[at].or(size.default).ok_or(WorkloadError::Missing {
                operator: operator.name,
                key: size.name,
                text: size.text,
            })?;
        }
        let workload = Workload { operator, sizes: all, dtype: dtype.unwrap_or(DType::F32), constant };
        let bytes = workload.program().buffers.iter().try_fold(0u64, |sum, b| sum.checked_add(b.size_bytes()?));
        match bytes {
            Some(bytes) if bytes <= MOST_BYTES => Ok(workload),
            _ => Err(WorkloadError::TooLarge(workload.to_string())),
        }
    }

    /// The operator.
    pub fn operator(&self) -> &'static Operator {
        self.operator
    }

    /// The value of a size.
    ///
    /// # Panics
    /// Where the operator has no size of this name.
    pub fn size(&self, name: &str) -> i64 {
        let at = self.operator.sizes.iter().position(|s| s.name == name);
        self.sizes[at.unwrap_or_else(|| panic!("{} has no size {name}", self.operator.name))]
    }

    /// The untransformed program.
    pub fn program(&self) -> Program {
        (self.operator.program)(self)
    }

    /// Floating-point operations of one run.
    pub fn flops(&self) -> f64 {
        (self.operator.flops)(self)
    }
}

/// The canonical text, with defaults left out.
impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operator.name)?;
        let mut separator = ':';
        for (size, value) in self.operator.sizes.iter().zip(self.sizes) {
            if size.default != Some(value) {
                write!(f, "{separator}{}={value}", size.name)?;
                separator = ',';
            }
        }
        if self.dtype != DType::F32 {
            write!(f, "{separator}dtype={}", self.dtype.name())?;
            separator = ',';
        }
        if let Some(constant) = self.constant {
            write!(f, "{separator}const={constant}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<&str, &str>) {
        let got = Workload::parse(text);
        match (got, expected) {
            (Ok(w), Ok(canonical)) => {
                assert_eq!(w.to_string(), canonical);
                assert_eq!(Workload::parse(canonical).unwrap().to_string(), canonical);
            }
            (Err(e), Err(part)) => {
                let e = e.to_string();
                assert!(e.contains(part), "{e}");
                assert!(!e.contains('\n'), "{e}");
            }
            (got, _) => panic!("{text}: {got:?}"),
        }
    }

    #[test]
    fn workload_texts() {
        check("matmul-1024", Ok("matmul:m=1024,n=1024,k=1024"));
        check("matmul-1024:const=b", Ok("matmul:m=1024,n=1024,k=1024,const=b"));
        check("matmul:k=3,m=1,n=2,dtype=f64", Ok("matmul:m=1,n=2,k=3,dtype=f64"));
        check("matmul:m=1,n=2", Err("needs `k`"));
        check("matmul:m=0,n=2,k=1", Err("m=0"));
        check("matmul:m=x,n=2,k=1", Err("at least 1"));
        check("matmul:m=1,n=2,k=1,q=1", Err("no attribute `q`"));
        check("matmul:m=1,m=2,n=2,k=1", Err("twice"));
        check("matmul:m=1,n=2,k=1,const=c", Err("expected a or b"));
        check("matmul:m=9000000000,n=9000000000,k=9000000000", Err("do not fit"));
        check("frobnicate:m=1", Err("unknown workload"));
        check("", Err("unknown workload"));
    }
}
