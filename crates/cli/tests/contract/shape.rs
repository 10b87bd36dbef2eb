//! Shapes of JSON documents, which scripts rely on.

use std::path::Path;

use serde_json::{Map, Value as Json};

/// Compares the shape of a document with `NAME.json` beside this file: every name, in order, with the type of
/// its value. A text there names a type, or several with ` | `, or is `any`; a list has the shapes of
/// elements; `{"*": …}` stands for an object whose names are data, and `{"?": …}` for a value that may be
/// null. `BLESS=1` writes the new shape where it differs, to which such alternatives must be added by hand.
#[track_caller]
pub fn check_shape(name: &str, document: &Json) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/contract").join(format!("{name}.json"));
    let golden = std::fs::read(&path).ok().map(|bytes| serde_json::from_slice(&bytes).expect("it is JSON"));
    let difference = match &golden {
        Some(golden) => difference("it", document, golden),
        None => Some("there is no such file".to_owned()),
    };
    let Some(difference) = difference else { return };
    let found = serde_json::to_string_pretty(&shape(document)).expect("texts by name") + "\n";
    if std::env::var_os("BLESS").is_some() {
        return std::fs::write(&path, found).unwrap();
    }
    panic!("{name}.json: {difference}\nfound: {found}repro: cargo test -p tilewright-cli; BLESS=1 rewrites shapes");
}

fn kind(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "boolean",
        Json::Number(_) => "number",
        Json::String(_) => "text",
        Json::Array(_) => "list",
        Json::Object(_) => "object",
    }
}

/// Shape of a document without alternatives, except those of elements.
fn shape(document: &Json) -> Json {
    match document {
        Json::Array(all) => {
            let mut shapes: Vec<Json> = Vec::new();
            for shape in all.iter().map(shape) {
                if !shapes.contains(&shape) {
                    shapes.push(shape);
                }
            }
            Json::Array(shapes)
        }
        Json::Object(fields) => Json::Object(fields.iter().map(|(name, value)| (name.clone(), shape(value))).collect()),
        plain => kind(plain).into(),
    }
}

/// First difference of a document from a shape.
fn difference(at: &str, found: &Json, golden: &Json) -> Option<String> {
    match (found, golden) {
        (_, Json::String(kinds)) => {
            let fits = kinds == "any" || kinds.split(" | ").any(|known| known == kind(found));
            (!fits).then(|| format!("{at} is {found}, not {kinds}"))
        }
        (_, Json::Object(fields)) if fields.contains_key("?") => {
            if found.is_null() {
                None
            } else {
                difference(at, found, &fields["?"])
            }
        }
        (Json::Array(all), Json::Array(shapes)) => all.iter().enumerate().find_map(|(n, found)| {
            let at = format!("{at}[{n}]");
            let mut differences = shapes.iter().map(|shape| difference(&at, found, shape));
            let fits = differences.clone().any(|difference| difference.is_none());
            (!fits).then(|| differences.next().flatten().unwrap_or(format!("{at} is {found}, where nothing stood")))
        }),
        (Json::Object(all), Json::Object(fields)) => match fields.get("*") {
            Some(shape) => all.iter().find_map(|(name, found)| difference(&format!("{at}.{name}"), found, shape)),
            None => {
                let names = |of: &Map<String, Json>| of.keys().cloned().collect::<Vec<_>>();
                if names(all) != names(fields) {
                    return Some(format!("{at} has {:?}, not {:?}", names(all), names(fields)));
                }
                all.iter().find_map(|(name, found)| difference(&format!("{at}.{name}"), found, &fields[name]))
            }
        },
        _ => Some(format!("{at} is {found}, not {golden}")),
    }
}

mod tests {
    use super::*;

    #[test]
    fn shapes_tell_documents_apart() {
        let golden: Json = serde_json::from_str(
            r#"{"a": "number | null", "b": [{"kind": "text"}, "number"], "c": {"*": "boolean"}, "d": {"?": {"e": "any"}}}"#,
        )
        .unwrap();
        let check = |document: &str, expected: Option<&str>| {
            let found = difference("it", &serde_json::from_str(document).unwrap(), &golden);
            match (&found, expected) {
                (None, None) => {}
                (Some(found), Some(expected)) => assert!(found.contains(expected), "{found}"),
                _ => panic!("{document}: {found:?}"),
            }
        };
        check(r#"{"a": 1, "b": [], "c": {}, "d": null}"#, None);
        check(r#"{"a": null, "b": [1, {"kind": "x"}], "c": {"x": true}, "d": {"e": []}}"#, None);
        check(r#"{"a": "1", "b": [], "c": {}, "d": null}"#, Some("it.a is \"1\", not number | null"));
        check(r#"{"a": 1, "b": ["x"], "c": {}, "d": null}"#, Some("it.b[0] is \"x\""));
        check(r#"{"a": 1, "b": [], "c": {"x": 1}, "d": null}"#, Some("it.c.x is 1, not boolean"));
        check(r#"{"a": 1, "b": [], "c": {}, "d": {}}"#, Some("it.d has []"));
        check(r#"{"a": 1, "c": {}, "b": [], "d": null}"#, Some("it has [\"a\", \"c\""));
    }
}
