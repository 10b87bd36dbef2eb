//! Plausibility checks of records: the configuration must be in the space, and the time no shorter than a
//! machine can reach.
//!
//! Records may come from other machines and versions, by import or in a copied database. Implausible ones
//! stay in the database, but are skipped when the best is looked up, a search is resumed or a model is
//! trained.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value as Json;
use tilewright_ir::Target;
use tilewright_ir::op::Workload;
use tilewright_search::Space;

use super::Record;
use crate::template::{Task, TemplateSetting, least_flops};

/// Upper bound on a CPU clock, in GHz.
const FASTEST_CLOCK_GHZ: f64 = 8.0;
/// Largest number per core of units that multiply and add vectors of up to 128 bits, and of wider ones.
const MOST_UNITS: (f64, f64) = (4.0, 2.0);
/// Number of threads above that of CPUs in any machine: no space is made for more.
const MOST_THREADS: u32 = 4096;

/// Reason why a record is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RejectReason {
    /// Configuration that the current space does not have.
    OtherSpace,
    /// Time shorter than a machine of its target can reach.
    TooFast,
    /// Row that this version cannot read.
    Unreadable,
}

/// Numbers of skipped records, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct PassedOver {
    /// Records of configurations that the current space does not have.
    pub other_space: u64,
    /// Records of times shorter than a machine of their target can reach.
    pub too_fast: u64,
    /// Rows that this version cannot read.
    pub unreadable: u64,
}

impl PassedOver {
    /// Counts a further skipped record.
    pub fn count(&mut self, reason: RejectReason) {
        match reason {
            RejectReason::OtherSpace => self.other_space += 1,
            RejectReason::TooFast => self.too_fast += 1,
            RejectReason::Unreadable => self.unreadable += 1,
        }
    }

    /// Total of all reasons.
    pub fn total(&self) -> u64 {
        self.other_space + self.too_fast + self.unreadable
    }
}

impl std::ops::AddAssign for PassedOver {
    fn add_assign(&mut self, other: PassedOver) {
        self.other_space += other.other_space;
        self.too_fast += other.too_fast;
        self.unreadable += other.unreadable;
    }
}

/// `3 records are passed over: 2 not of the space as it is now, 1 faster than the machine can be`.
impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.other_space, "not of the space as it is now"),
            (self.too_fast, "faster than the machine can be"),
            (self.unreadable, "not understood by this version"),
        ];
        let parts: Vec<String> = parts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
        let (records, are) = if self.total() == 1 { ("record", "is") } else { ("records", "are") };
        write!(f, "{} {records} {are} passed over: {}", self.total(), parts.join(", "))
    }
}

/// Plausibility checks for the records of a space on a machine. By default all records are plausible.
#[derive(Debug, Clone, Default)]
pub struct Validator {
    space: KnownSpace,
    least_ns: f64,
}

/// Knowledge of a space.
#[derive(Debug, Clone, Default)]
enum KnownSpace {
    /// Unknown: the space depends on a machine that is not this one.
    #[default]
    Nothing,
    /// Absent: this version has no such template.
    Absent,
    /// The space.
    Space(Arc<Space>),
}

impl Validator {
    /// Checks for the records of a task.
    pub fn of(task: &Task) -> Validator {
        let TemplateSetting { workload, target, n_threads } = &task.setting;
        Validator {
            space: KnownSpace::Space(task.space.clone()),
            least_ns: least_ns(workload, &target.name(), *n_threads as f64),
        }
    }

    /// Checks for the records of a space, regardless of times.
    pub fn of_space(space: &Arc<Space>) -> Validator {
        Validator { space: KnownSpace::Space(space.clone()), least_ns: 0.0 }
    }

    /// Checks for records of a workload that name this target, threads and template. `machine` is the target,
    /// if known, from which the space follows; it is not enumerated.
    pub fn new(workload: &Workload, target: &str, threads: u32, template: &str, machine: Option<Target>) -> Validator {
        let setting =
            machine.map(|target| TemplateSetting { workload: workload.clone(), target, n_threads: threads as usize });
        let space = match setting.filter(|_| (1..=MOST_THREADS).contains(&threads)) {
            None => KnownSpace::Nothing,
            Some(setting) => {
                Task::declared(setting, Some(template)).map_or(KnownSpace::Absent, |task| KnownSpace::Space(task.space))
            }
        };
        Validator { space, least_ns: least_ns(workload, target, threads.into()) }
    }

    /// Shortest plausible time in nanoseconds; 0 if none is known.
    pub fn least_ns(&self) -> f64 {
        self.least_ns
    }

    /// Space, if known; it need not be enumerated.
    pub fn space(&self) -> Option<&Arc<Space>> {
        match &self.space {
            KnownSpace::Space(space) => Some(space),
            KnownSpace::Nothing | KnownSpace::Absent => None,
        }
    }

    /// Reason why this time of this configuration is implausible; `None` if it is plausible.
    pub fn reject_reason(&self, config: &Json, median_ns: Option<f64>) -> Option<RejectReason> {
        match &self.space {
            _ if median_ns.is_some_and(|ns| ns < self.least_ns) => Some(RejectReason::TooFast),
            KnownSpace::Absent => Some(RejectReason::OtherSpace),
            KnownSpace::Space(space) if space.config_from_json(config).is_err() => Some(RejectReason::OtherSpace),
            KnownSpace::Nothing | KnownSpace::Space(_) => None,
        }
    }

    /// Reason why this record is implausible; `None` if it is plausible.
    pub fn reject_reason_of(&self, record: &Record) -> Option<RejectReason> {
        self.reject_reason(&record.config, record.outcome.timing().map(|timing| timing.median_ns))
    }
}

/// Lower bound on the time of a workload, in nanoseconds, on a target by its name in records; 0 for an
/// unknown CPU.
///
/// No real time is below the bound: it assumes the fewest operations that any template needs, more
/// multiply-adds per cycle and a higher clock than any core has. Measured peak rates are a quarter to a half
/// of the assumed one.
pub fn least_ns(workload: &Workload, target: &str, threads: f64) -> f64 {
    // The machine class after the `@` is removed.
    let mut parts = target.split('@').next().unwrap_or_default().split('/');
    let is_cpu = matches!(parts.next(), Some("x86_64" | "aarch64"));
    let bits = parts.nth(1).and_then(|bits| bits.parse::<u32>().ok()).filter(|bits| is_cpu && *bits > 0);
    let Some(bits) = bits else { return 0.0 };
    let units = if bits <= 128 { MOST_UNITS.0 } else { MOST_UNITS.1 };
    // A lane of 32 bits adds four products of 8-bit integers at once.
    let each = if workload.multiplies_bytes() { 4.0 } else { 1.0 };
    let lanes = f64::from(bits) / (8.0 * workload.dtype.bytes() as f64) * each;
    least_flops(workload) / (2.0 * lanes * units * FASTEST_CLOCK_GHZ * threads.max(1.0))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(workload: &str, target: &str, threads: u32, most_gflops: f64) {
        let workload = Workload::parse(workload).unwrap();
        let found = workload.flops() / least_ns(&workload, target, threads.into());
        let is_it = found == most_gflops || (found / most_gflops - 1.0).abs() < 1e-9;
        assert!(is_it, "{workload} on {target}: {found}");
    }

    #[test]
    fn no_machine_is_as_fast_as_the_bound() {
        check("matmul-256", "x86_64/znver5/512", 1, 512.0);
        check("matmul-256", "x86_64/znver5/512/cold", 2, 1024.0);
        check("matmul-256:dtype=f64", "x86_64/znver3/256", 1, 128.0);
        check("matmul-256:dtype=u8i8", "x86_64/znver5/512", 1, 2048.0);
        check("matmul-256", "aarch64/neoverse-v2/128", 1, 256.0);
        // Winograd's algorithm needs a quarter of the multiplications, and if one tap of nine meets each
        // output, that can be all of them.
        let inside = |n: f64| (n - 2.0 / 3.0) / n;
        check("resnet18.C2", "x86_64/znver5/512", 1, 4.0 * 512.0 / inside(56.0).powi(2));
        check("resnet18.C2:exact=1", "x86_64/znver5/512", 1, 512.0 / inside(56.0).powi(2));
        check(
            "conv2d:c=8,h=14,w=14,k=8,r=3,s=3,pad=13,dilation=13",
            "x86_64/znver5/512",
            1,
            (42f64 / 16.0).powi(2) * 512.0,
        );
        check("matmul-256", "cuda/sm_90/1024", 1, f64::INFINITY);
        check("matmul-256", "somewhere", 1, f64::INFINITY);
    }

    #[test]
    fn what_is_passed_over_is_said() {
        let workload = Workload::parse("matmul:m=64,n=64,k=64").unwrap();
        let target = Target::named("x86-64-v3").unwrap();
        let name = target.name();
        let validator = |template: &str, threads: u32, machine: Option<&Target>| {
            Validator::new(&workload, &name, threads, template, machine.cloned())
        };
        let here = validator("matmul", 1, Some(&target));
        let task =
            Task::new(TemplateSetting { workload: workload.clone(), target: target.clone(), n_threads: 1 }, None)
                .unwrap();
        let config = task.space.config_to_json(&task.space.config_at(0));
        let mut passed_over = PassedOver::default();
        let is_enumerated =
            |validator: &Validator| matches!(&validator.space, KnownSpace::Space(space) if space.is_enumerated());
        for (validator, config, ns, expected) in [
            (&here, &config, Some(1e5), None),
            (&here, &config, None, None),
            (&here, &config, Some(1.0), Some(RejectReason::TooFast)),
            (&here, &json!({}), Some(1e5), Some(RejectReason::OtherSpace)),
            (&here, &json!({}), None, Some(RejectReason::OtherSpace)),
            (&validator("nosuch", 1, Some(&target)), &config, Some(1e5), Some(RejectReason::OtherSpace)),
            (&validator("nosuch", 1, None), &json!({}), Some(1e5), None),
            (&validator("nosuch", 1, None), &json!({}), Some(1.0), Some(RejectReason::TooFast)),
            (&validator("matmul", u32::MAX, Some(&target)), &json!({}), Some(1.0), None),
            (&Validator::default(), &json!({}), Some(1e-9), None),
        ] {
            let found = validator.reject_reason(config, ns);
            assert_eq!(found, expected, "{config} {ns:?}");
            assert!(!is_enumerated(validator), "to enumerate the space takes longer than all else of a look-up");
            found.into_iter().for_each(|reason| passed_over.count(reason));
        }
        assert_eq!(
            passed_over.to_string(),
            "5 records are passed over: 3 not of the space as it is now, 2 faster than the machine can be"
        );
    }
}
