//! T1, the description of a space that belongs to T4 results.

use serde::Deserialize;
use serde_json::Value as Json;

use super::read::{Listed, ReplayError, parse};

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    configuration_space: ConfigurationSpace,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ConfigurationSpace {
    tuning_parameters: Vec<TuningParameter>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct TuningParameter {
    name: String,
    values: Json,
}

/// The parameters with their values. The conditions are left out: the results say what is legal.
pub(super) fn read(bytes: &[u8]) -> Result<Vec<Listed>, ReplayError> {
    let document: Document = parse(bytes)?;
    let listed = |parameter: TuningParameter| match literal(&parameter.values) {
        Some(values) => Ok(Listed { name: parameter.name, values }),
        None => Err(ReplayError::Entry {
            place: format!("parameter {}", parameter.name),
            problem: format!("{} is not a literal list of values", parameter.values),
        }),
    };
    document.configuration_space.tuning_parameters.into_iter().map(listed).collect()
}

/// The values of a list, or of a text that writes one in Python's syntax.
fn literal(values: &Json) -> Option<Vec<Json>> {
    match values {
        Json::Array(values) => Some(values.clone()),
        Json::String(text) => {
            let items = text.trim().strip_prefix('[')?.strip_suffix(']')?.trim().trim_end_matches(',');
            items.split(',').map(|item| scalar(item.trim())).collect()
        }
        _ => None,
    }
}

fn scalar(item: &str) -> Option<Json> {
    let quoted =
        |quote: char| item.strip_prefix(quote)?.strip_suffix(quote).filter(|text| !text.contains(['\\', quote]));
    match item {
        "True" => Some(true.into()),
        "False" => Some(false.into()),
        _ => match quoted('\'').or_else(|| quoted('"')) {
            Some(text) => Some(text.into()),
            None => serde_json::from_str(item).ok().filter(Json::is_number),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(values: Json, expected: Option<Json>) {
        assert_eq!(literal(&values).map(Json::from), expected, "{values}");
    }

    #[test]
    fn literal_lists_are_read_and_nothing_else() {
        check(json!([1, "a"]), Some(json!([1, "a"])));
        check(json!("[1, 2,4]"), Some(json!([1, 2, 4])));
        check(json!(" [ -1, 0.5, 'a b', \"c\", True, False, ] "), Some(json!([-1, 0.5, "a b", "c", true, false])));
        for computed in ["[32 * i for i in range(1, 32)]", "[1] + [2]", "[1", "", "[]", "[a]", "[[1], [2]]", "['a\\'']"]
        {
            check(json!(computed), None);
        }
        check(json!(3), None);
    }
}
