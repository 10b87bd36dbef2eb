//! Caches of Kernel Tuner.

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use super::read::{Contents, Listed, ReplayError, Row, failed, parse, timed};
use crate::trial::{ErrorClass, Outcome};

#[derive(Deserialize)]
struct Document {
    tune_params_keys: Vec<String>,
    tune_params: Map<String, Json>,
    #[serde(default = "time")]
    objective: String,
    cache: Map<String, Json>,
}

fn time() -> String {
    "time".into()
}

/// Times are in milliseconds.
const UNIT_NS: f64 = 1e6;

pub(super) fn read(bytes: &[u8]) -> Result<Contents, ReplayError> {
    let Document { tune_params_keys: keys, mut tune_params, objective, cache } = parse(bytes)?;
    let wrong = |place: String, problem: &str| ReplayError::Entry { place, problem: problem.into() };
    if objective != time() {
        return Err(wrong("objective".into(), &format!("{objective:?}, but only \"time\" can be replayed")));
    }
    let listed = |name: &String| match tune_params.remove(name) {
        Some(Json::Array(values)) => Ok(Listed { name: name.clone(), values }),
        _ => Err(wrong(format!("tune_params.{name}"), "no list of values")),
    };
    let parameters = keys.iter().map(listed).collect::<Result<_, _>>()?;
    let row = |(key, entry): (String, Json)| {
        let place = format!("cache[{key:?}]");
        let Json::Object(mut entry) = entry else { return Err(wrong(place, "not an object")) };
        let outcome = outcome(entry.get("time")).map_err(|problem| wrong(place.clone(), &problem))?;
        let config = keys.iter().filter_map(|name| entry.remove_entry(name)).collect();
        Ok(Row { place, config, outcome })
    };
    Ok(Contents { parameters: Some(parameters), rows: cache.into_iter().map(row).collect::<Result<_, _>>()? })
}

fn outcome(time: Option<&Json>) -> Result<Outcome, String> {
    match time {
        Some(Json::String(failure)) => {
            let class = match failure.as_str() {
                "CompilationFailedConfig" => ErrorClass::CompileErrorDevice,
                "RuntimeFailedConfig" => ErrorClass::RuntimeError,
                "InvalidConfig" => ErrorClass::InstantiationError,
                other => return Err(format!("unknown failure {other:?}")),
            };
            Ok(failed(class, failure))
        }
        Some(time) => {
            let outcome = time.as_f64().and_then(|time| timed(time, UNIT_NS));
            outcome.ok_or_else(|| format!("the time {time} is not a positive number"))
        }
        None => Err("no time".into()),
    }
}
