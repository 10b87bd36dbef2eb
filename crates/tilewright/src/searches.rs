//! Searches that a run can use, with their options.

use serde_json::{Value as Json, json};
use tilewright_search::SEARCHES;

/// List of all searches with their options: as JSON, as `tilewright searches --json` prints it, and as text.
pub fn searches() -> (Json, String) {
    let mut text = String::new();
    for row in SEARCHES {
        let paper = if row.paper.is_empty() { String::new() } else { format!(" ({})", row.paper) };
        text += &format!("{}: {}{paper}\n", row.name, row.text);
        for option in row.options {
            text += &format!("    {}={}: {}\n", option.name, option.default, option.text);
        }
    }
    let json = json!({"searches": SEARCHES.iter().map(|row| json!({
        "name": row.name,
        "text": row.text,
        "paper": row.paper,
        "options": row.options.iter().map(|option| json!({
            "name": option.name,
            "default": option.default,
            "text": option.text,
        })).collect::<Vec<_>>(),
    })).collect::<Vec<_>>()});
    (json, text)
}
