//! Lists of configurations: a sequence or a list of JSON objects.

use std::collections::HashSet;

use serde_json::Value as Json;
use tilewright::Error;
use tilewright_search::{Config, Space};

use super::MOST;

/// Reads configurations of a space: JSON objects from parameter to value, one per line or separated by any
/// white space, or a JSON list of such objects. Repeated ones are removed.
///
/// # Errors
/// Bad input if the text has another form, lists nothing or more than [`MOST`], or contains a configuration
/// that is not in the space: the error names `name`, the line or the index in the list, and the parameter.
pub fn read_configs(text: &str, name: &str, space: &Space) -> Result<Vec<Config>, Error> {
    let is_list = text.trim_start().starts_with('[');
    let line_at = |offset: usize| {
        // After the white space before a value.
        let start = text.len() - text[offset..].trim_start().len();
        1 + text[..start].matches('\n').count()
    };
    let hint = "give JSON objects from parameter to value, one a line, or a list of them";
    let mut configs = Vec::new();
    let mut seen = HashSet::new();
    let mut add = |json: &Json, place: String| {
        let config = space.config_from_json(json).map_err(|error| {
            Error::input(format!("{name}: {place}: {error} (see `tilewright space`, and --template for another space)"))
        })?;
        if seen.insert(config.clone()) {
            configs.push(config);
        }
        Ok(())
    };
    if is_list {
        let list: Vec<Json> =
            serde_json::from_str(text).map_err(|error| Error::input(format!("{name}: {error} ({hint})")))?;
        list.iter().enumerate().try_for_each(|(at, json)| add(json, format!("configuration {}", at + 1)))?;
    } else {
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<Json>();
        loop {
            let offset = values.byte_offset();
            let Some(json) = values.next() else { break };
            let json = json.map_err(|error| Error::input(format!("{name}: {error} ({hint})")))?;
            add(&json, format!("line {}", line_at(offset)))?;
        }
    }
    match configs.len() {
        0 => Err(Error::input(format!("{name} lists no configuration ({hint})"))),
        n if n as u64 > MOST => Err(Error::input(format!("{name} lists more than {MOST} configurations"))),
        _ => Ok(configs),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;
    use tilewright_search::{Parameter, Space};

    use super::*;

    fn space() -> Space {
        let parameters =
            vec![Parameter::ordinal("n", [1, 2, 4]), Parameter::categorical("order", &["rows", "columns"])];
        Space::new("small", parameters, Vec::new()).unwrap()
    }

    #[track_caller]
    fn check(text: &str, expected: &[(i64, &str)]) {
        let space = space();
        let configs: Vec<Config> = expected
            .iter()
            .map(|(n, order)| space.config_from_json(&json!({"n": n, "order": order})).unwrap())
            .collect();
        assert_eq!(read_configs(text, "file", &space).unwrap(), configs, "{text}");
    }

    #[track_caller]
    fn refused(text: &str, expected: &str) {
        let error = read_configs(text, "file", &space()).unwrap_err().to_string();
        assert!(error.starts_with("file") && error.contains(expected) && !error.contains('\n'), "{text}: {error}");
    }

    #[test]
    fn objects_stand_in_lines_or_in_a_list() {
        let (one, two) = (r#"{"n": 1, "order": "rows"}"#, r#"{"order": "columns", "n": 4}"#);
        let both = [(1, "rows"), (4, "columns")];
        check(&format!("{one}\n\n{two}"), &both);
        check(&format!("\r\n{one}\r\n{two}\r\n{one}\r\n"), &both);
        check(&format!("{one}{two}"), &both);
        check(&format!(" [{one},\n{two}, {two}]\n"), &both);
        check("{\n  \"n\": 2,\n  \"order\": \"rows\"\n}", &[(2, "rows")]);
    }

    #[test]
    fn an_error_says_where_it_is() {
        let one = r#"{"n": 1, "order": "rows"}"#;
        refused(&format!("{one}\n\n{{\"n\": 3, \"order\": \"rows\"}}\n"), "line 3: parameter n cannot be 3");
        refused(&format!("[{one}, {{\"n\": 1}}]"), "configuration 2: parameter order is missing");
        refused(&format!("{one}\n{{\"m\": 1}}"), "line 2: unknown parameter m; the space has n, order");
        refused(&format!("{one}\n17"), "line 2: a configuration is an object");
        refused(&format!("{one}\n{{\"n\": "), "line 2");
        refused(&format!("{one}\nrows"), "line 2");
        for nothing in ["", " \n", "[]"] {
            refused(nothing, "lists no configuration");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in r#"[\[\]{},:0-9"nredowsé \n]{0,60}"#) {
            if let Ok(configs) = read_configs(&text, "file", &space()) {
                prop_assert!(!configs.is_empty());
            }
        }
    }
}
