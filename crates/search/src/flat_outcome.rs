//! Outcomes in the flat form of tables and files.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::other_costs::OtherCosts;
use crate::trial::{ErrorClass, Outcome, Timing};

/// Flat form of an [`Outcome`], a set of optional fields for JSON and SQL.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct FlatOutcome {
    /// Name of the error class; `no_error` for a success.
    pub class: String,
    /// Reason of a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Median over the samples, in nanoseconds a run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub median_ns: Option<f64>,
    /// Fastest sample, in nanoseconds a run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_ns: Option<f64>,
    /// Interquartile range over median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<f64>,
    /// Samples taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_samples: Option<u32>,
    /// Whether sampling ended early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_early: Option<bool>,
    /// Costs by the second and further objectives.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_costs: Vec<f64>,
}

impl From<Outcome> for FlatOutcome {
    fn from(outcome: Outcome) -> FlatOutcome {
        match outcome {
            Outcome::Measured(timing) => FlatOutcome {
                class: Outcome::NO_ERROR.into(),
                message: None,
                median_ns: Some(timing.median_ns),
                min_ns: Some(timing.min_ns),
                spread: Some(timing.spread),
                n_samples: Some(timing.n_samples),
                stopped_early: Some(timing.stopped_early),
                other_costs: timing.others.as_slice().to_vec(),
            },
            Outcome::Failed { class, message } => {
                FlatOutcome { class: class.name().into(), message: Some(message), ..FlatOutcome::default() }
            }
        }
    }
}

impl TryFrom<FlatOutcome> for Outcome {
    type Error = String;

    fn try_from(flat: FlatOutcome) -> Result<Outcome, String> {
        if flat.class != Outcome::NO_ERROR {
            let class =
                ErrorClass::from_name(&flat.class).ok_or_else(|| format!("unknown error class {:?}", flat.class))?;
            return Ok(Outcome::Failed { class, message: flat.message.unwrap_or_default() });
        }
        let median_ns = flat.median_ns.ok_or("missing field `median_ns`")?;
        if !(median_ns > 0.0 && median_ns.is_finite()) {
            return Err(format!("median_ns {median_ns} is not a positive number"));
        }
        Ok(Outcome::Measured(Timing {
            median_ns,
            min_ns: flat.min_ns.unwrap_or(median_ns),
            spread: flat.spread.unwrap_or(0.0),
            n_samples: flat.n_samples.unwrap_or(1),
            stopped_early: flat.stopped_early.unwrap_or(false),
            others: OtherCosts::new(&flat.other_costs).map_err(|error| format!("other_costs: {error}"))?,
        }))
    }
}

impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        FlatOutcome::from(self.clone()).serialize(to)
    }
}

impl<'de> Deserialize<'de> for Outcome {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Outcome, D::Error> {
        Outcome::try_from(FlatOutcome::deserialize(from)?).map_err(de::Error::custom)
    }
}
