//! The options of a search, parsed and checked against its row.

use std::ops::RangeInclusive;
use std::str::FromStr;

use super::{SearchError, SearchRow};

/// Value of every option of a row, given or default.
pub struct Options {
    search: &'static str,
    given: Vec<&'static str>,
    values: Vec<(&'static str, String)>,
}

impl Options {
    /// Reads `option=value,option=value`.
    pub(super) fn parse(row: &'static SearchRow, text: &str) -> Result<Options, SearchError> {
        let search = row.name;
        let mut values: Vec<_> = row.options.iter().map(|option| (option.name, None)).collect();
        for item in text.split(',').filter(|item| !item.is_empty()) {
            let malformed = || SearchError::Malformed { search, found: item.into() };
            let (name, value) = item.split_once('=').ok_or_else(malformed)?;
            let (_, slot) = values.iter_mut().find(|(known, _)| *known == name).ok_or_else(|| {
                let known = row.options.iter().map(|option| option.name).collect();
                SearchError::UnknownOption { search, option: name.into(), known }
            })?;
            if slot.replace(value.to_string()).is_some() {
                return Err(malformed());
            }
        }
        let given = values.iter().filter(|(_, value)| value.is_some()).map(|(name, _)| *name).collect();
        let or_default = |(option, (name, value)): (&super::SearchOption, (&'static str, Option<String>))| {
            (name, value.unwrap_or_else(|| option.default.into()))
        };
        Ok(Options { search, given, values: row.options.iter().zip(values).map(or_default).collect() })
    }

    /// Returns the value of an option as a number in `range`.
    pub(super) fn number<T>(&self, name: &str, range: RangeInclusive<T>) -> Result<T, SearchError>
    where
        T: FromStr + PartialOrd + std::fmt::Display,
    {
        let parsed = self.text(name).parse().ok().filter(|number| range.contains(number));
        parsed.ok_or_else(|| self.bad_value(name, format!("a number from {} to {}", range.start(), range.end())))
    }

    /// Returns the value of an option as an index into `alternatives`.
    pub(super) fn choice(&self, name: &str, alternatives: &[&str]) -> Result<usize, SearchError> {
        let position = alternatives.iter().position(|alternative| *alternative == self.text(name));
        position.ok_or_else(|| self.bad_value(name, alternatives.join(" or ")))
    }

    /// Whether an option was given, whatever its value.
    pub(super) fn is_given(&self, name: &str) -> bool {
        self.given.contains(&name)
    }

    /// Returns the value of an option.
    pub(super) fn text(&self, name: &str) -> &str {
        &self.entry(name).1
    }

    /// Makes the error for an invalid value of an option.
    pub(super) fn bad_value(&self, name: &str, expected: String) -> SearchError {
        let (option, value) = self.entry(name).clone();
        SearchError::BadValue { search: self.search, option, value, expected }
    }

    fn entry(&self, name: &str) -> &(&'static str, String) {
        let entry = self.values.iter().find(|(known, _)| *known == name);
        entry.unwrap_or_else(|| panic!("invariant: search {} declares the option {name}", self.search))
    }
}
