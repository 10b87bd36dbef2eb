//! Cache state for timing the kernels of a model: whether their constants are in cache or in main memory.

use std::collections::{HashMap, HashSet};

use tilewright::Caches;
use tilewright_ir::Target;
use tilewright_ir::op::Workload;

use crate::fuse::{Fused, Kernel, Step};
use crate::net::ValueId;

/// Divisor of the last-level cache's size for the share that a run may rely on: other cores use the cache
/// too.
const PART_OF_L3: u64 = 2;

/// Cache state for each kernel of a run.
pub struct CachesOfKernels {
    /// States, by the text of the representative of a kernel's workload.
    known: HashMap<String, Caches>,
    /// State for a kernel that runs once.
    others: Caches,
}

impl CachesOfKernels {
    /// Cache state for the kernel of a workload. A kernel that is not in the run, such as a variant in
    /// another layout, gets the state of kernels that run once.
    pub fn of(&self, workload: &Workload) -> Caches {
        self.known.get(&workload.representative().to_string()).copied().unwrap_or(self.others)
    }

    /// Cache state for kernels that run once.
    pub fn others(&self) -> Caches {
        self.others
    }
}

/// Constants that one execution of a kernel reads, each with its size in bytes.
type ConstantsUse = Vec<(ValueId, u64)>;

impl Fused {
    /// Determines the cache state for each kernel from the bytes of constants that are read between two of
    /// its executions. The kernel's constants are in cache if all of these fit a core's second-level cache
    /// or, within a sequence, half of the last-level cache. Where occurrences of a kernel differ, the
    /// majority counts. The caller's work between two runs is unknown, and assumed to evict the caches.
    pub fn caches(&self, target: &Target) -> CachesOfKernels {
        // Runs of few rows are the most frequent.
        let mut all = self.forms().map(|form| form.own_caches(target));
        let first = all.next().expect("there is one");
        all.fold(first, |mut all, CachesOfKernels { known, .. }| {
            all.known.extend(known);
            all
        })
    }

    fn own_caches(&self, target: &Target) -> CachesOfKernels {
        let mut names = Vec::new();
        let mut uses: Vec<ConstantsUse> = Vec::new();
        let mut add = |kernel: &Kernel| {
            let constants = kernel.inputs.iter().filter(|id| self.net.value(**id).constant.is_some());
            uses.push(constants.map(|id| (*id, self.net.value(*id).n_bytes())).collect());
            names.push(kernel.workload.representative().to_string());
        };
        for step in &self.steps {
            match step {
                Step::Kernel(kernel) => add(kernel),
                Step::Sequence(sequence) => {
                    for _ in 0..sequence.n_steps {
                        let kernels = sequence.steps.iter();
                        kernels.for_each(|step| {
                            if let Step::Kernel(kernel) = step {
                                add(kernel)
                            }
                        });
                    }
                }
                _ => {}
            }
        }
        let (l2, l3) = (target.l2_bytes, target.l3_bytes);
        let mut balance: HashMap<String, i64> = HashMap::new();
        for (at, name) in names.into_iter().enumerate().filter(|(at, _)| !uses[*at].is_empty()) {
            let is_warm = finds_constants(&uses, at, l2, l3 / PART_OF_L3);
            *balance.entry(name).or_default() += if is_warm { 1 } else { -1 };
        }
        let caches = |is_warm: bool| if is_warm { Caches::Warm } else { Caches::ColdConstants };
        let known = balance.into_iter().map(|(name, balance)| (name, caches(balance > 0))).collect();
        let all: HashSet<(ValueId, u64)> = uses.into_iter().flatten().collect();
        CachesOfKernels { known, others: caches(all.into_iter().map(|(_, n)| n).sum::<u64>() <= l2) }
    }
}

/// Whether an execution of a kernel finds its constants in a cache: in one of `between_runs` bytes or, after
/// an earlier use in the same run of the model, in one of `within_run` bytes.
fn finds_constants(uses: &[ConstantsUse], at: usize, between_runs: u64, within_run: u64) -> bool {
    let largest = uses[at].iter().max_by_key(|(_, n_bytes)| *n_bytes).expect("there is a constant").0;
    let mut seen: HashSet<ValueId> = HashSet::new();
    let mut n_bytes = 0;
    let mut read = |constants: &ConstantsUse| {
        let new = constants.iter().filter(|(id, _)| seen.insert(*id));
        n_bytes += new.map(|(_, n)| n).sum::<u64>();
        n_bytes
    };
    read(&uses[at]);
    for before in (0..at).rev() {
        let n_bytes = read(&uses[before]);
        if uses[before].iter().any(|(id, _)| *id == largest) {
            return n_bytes <= between_runs.max(within_run);
        }
        if n_bytes > between_runs.max(within_run) {
            return false;
        }
    }
    for before in (at..uses.len()).rev() {
        let n_bytes = read(&uses[before]);
        if n_bytes > between_runs {
            return false;
        }
        if uses[before].iter().any(|(id, _)| *id == largest) {
            return true;
        }
    }
    unreachable!("the run before used them too")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks which uses find their constants in a cache. Each use reads constants named by letters, of 100
    /// bytes each; the caches hold 250 bytes between runs and 450 bytes within a run.
    fn check(uses: &str, expected: &str) {
        let constants = |of: &str| of.bytes().map(|letter| (ValueId(letter as usize), 100)).collect();
        let each: Vec<ConstantsUse> = uses.split(' ').map(constants).collect();
        let found = |at: usize| if finds_constants(&each, at, 250, 450) { 'w' } else { 'c' };
        assert_eq!((0..each.len()).map(found).collect::<String>(), expected, "{uses}");
    }

    #[test]
    fn constants_are_found_where_what_is_read_between_fits() {
        // All constants stay in the cache from run to run.
        check("a b", "ww");
        check("a", "w");
        // The constants do not fit.
        check("a b c", "ccc");
        // A constant is used again at once, as from step to step of a sequence; others are read before the
        // first step.
        check("a b c c c", "cccww");
        check("abc abc abc", "cww");
        // Other constants are read between two steps, and do or do not fit in the last-level cache.
        check("a b c d a b c d", "ccccwwww");
        check("a b c d e a b c d e", "cccccccccc");
    }
}
