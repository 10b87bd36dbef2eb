//! Measuring: the seam between searches and whatever runs their candidates.

use std::ops::{AddAssign, ControlFlow};

use serde::{Deserialize, Serialize};

use crate::space::Config;
use crate::trial::{Limit, Outcome};

/// An error of a part that this crate does not know.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Where the time of a trial went, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Seconds {
    /// Instantiating and compiling. Candidates compile side by side, so sums may exceed the wall clock.
    pub build: f64,
    /// Running for the timing.
    pub run: f64,
    /// Running and comparing for the verification.
    pub verify: f64,
}

impl AddAssign for Seconds {
    fn add_assign(&mut self, other: Seconds) {
        self.build += other.build;
        self.run += other.run;
        self.verify += other.verify;
    }
}

/// The result for one candidate.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// What became of it.
    pub outcome: Outcome,
    /// Where its time went.
    pub seconds: Seconds,
    /// What it failed of that another run may allow more of.
    pub limit: Option<Limit>,
}

/// Something that turns configurations into outcomes: a device, or the replay of a recorded table.
pub trait Measure {
    /// Measures a batch and hands each result to `done` with the candidate's position in the batch, as soon as it is
    /// there and in any order, at most once each. `leading_ns` is the median of one that leads so far, against which an
    /// implementation may end hopeless timings early. When `done` says break, the rest of the batch is given
    /// up. Once `over` holds, no candidate is begun any more, and those that do not soon come to their end
    /// are given up.
    ///
    /// `next` tells what will be measured after this batch, as far as that can be known before its results are. An
    /// implementation that gains by working ahead calls it once, as soon as the batch is under way.
    ///
    /// # Errors
    /// Where measuring as a whole is impossible, such as a worker that cannot be started. A candidate that fails is
    /// an [`Outcome`].
    fn measure(
        &mut self,
        batch: &[Config],
        leading_ns: Option<f64>,
        over: &dyn Fn() -> bool,
        next: &mut dyn FnMut() -> Vec<Config>,
        done: &mut dyn FnMut(usize, Measured) -> ControlFlow<()>,
    ) -> Result<(), BoxError>;
}
