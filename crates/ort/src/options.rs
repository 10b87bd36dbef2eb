//! Options of the provider, given as strings.

use std::path::PathBuf;

/// Lines that the provider adds to ONNX Runtime's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLines {
    /// No lines.
    Off,
    /// Problems, after which ONNX Runtime runs the nodes itself.
    Problems,
    /// Problems, and the parts that run here.
    All,
}

/// Policy for parts whose sizes are known only when they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeSizes {
    /// Compiled when sizes first occur.
    Compile,
    /// Left to ONNX Runtime.
    Leave,
}

/// Policy for claiming parts for which there are kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claims {
    /// Parts that are expected to be faster than in ONNX Runtime.
    Fast,
    /// All parts.
    All,
}

/// Options of a provider.
#[derive(Clone, Debug, PartialEq)]
pub struct ProviderOptions {
    /// Database of records; by default the user's.
    pub database: Option<PathBuf>,
    /// Shared store of best configurations for kernels that are not recorded; by default the one set in the
    /// environment.
    pub store: Option<String>,
    /// Cache folder of compiled kernels; by default the user's.
    pub cache: Option<PathBuf>,
    /// Name of the CPU in records; by default the detected one.
    pub cpu: Option<String>,
    /// Number of threads that kernels are chosen for; by default one for each CPU.
    pub threads: Option<usize>,
    /// Whether kernels sum in the order of the operators' definition.
    pub exact: bool,
    /// Whether products round their operands to bf16, if the CPU multiplies these faster than f32.
    pub bf16: bool,
    /// Parts that run here.
    pub claim: Claims,
    /// Policy for parts whose sizes are known only when they run.
    pub free_sizes: FreeSizes,
    /// Whether code stored in a model with compiled parts is trusted and run.
    pub context_code: bool,
    /// Seconds in which kernels without records are tuned when a session starts.
    pub tune_seconds: f64,
    /// Lines in the log.
    pub log: LogLines,
}

impl Default for ProviderOptions {
    /// Options of a session that sets none.
    fn default() -> ProviderOptions {
        ProviderOptions {
            database: None,
            store: None,
            cache: None,
            cpu: None,
            threads: None,
            exact: false,
            bf16: false,
            claim: Claims::Fast,
            free_sizes: FreeSizes::Compile,
            context_code: false,
            tune_seconds: 0.0,
            log: LogLines::Problems,
        }
    }
}

/// Option: its name, its accepted values, and the function that sets it.
struct OptionRow {
    name: &'static str,
    takes: &'static str,
    set: fn(&mut ProviderOptions, &str) -> Option<()>,
}

/// Maximum number of threads that kernels are chosen for.
const MOST_THREADS: usize = 1024;
/// Maximum tuning time: a day.
const MOST_TUNE_SECONDS: f64 = 86_400.0;

const ROWS: &[OptionRow] = &[
    OptionRow { name: "database", takes: "a file", set: |options, text| path(&mut options.database, text) },
    OptionRow {
        name: "store",
        takes: "a folder, or http://HOST/PATH",
        set: |options, text| {
            options.store = Some(Some(text).filter(|text| !text.is_empty())?.to_owned());
            Some(())
        },
    },
    OptionRow { name: "cache", takes: "a folder", set: |options, text| path(&mut options.cache, text) },
    OptionRow {
        name: "cpu",
        takes: "the name of a CPU, such as znver5",
        set: |options, text| {
            options.cpu = Some(Some(text).filter(|text| !text.is_empty() && !text.contains('/'))?.to_owned());
            Some(())
        },
    },
    OptionRow {
        name: "threads",
        takes: "a whole number from 1 to 1024",
        set: |options, text| {
            options.threads = Some(text.parse().ok().filter(|n| (1..=MOST_THREADS).contains(n))?);
            Some(())
        },
    },
    OptionRow {
        name: "exact",
        takes: "0 or 1",
        set: |options, text| {
            options.exact = one_of(text, &[("0", false), ("1", true)])?;
            Some(())
        },
    },
    OptionRow {
        name: "bf16",
        takes: "0 or 1",
        set: |options, text| {
            options.bf16 = one_of(text, &[("0", false), ("1", true)])?;
            Some(())
        },
    },
    OptionRow {
        name: "claim",
        takes: "fast or all",
        set: |options, text| {
            options.claim = one_of(text, &[("fast", Claims::Fast), ("all", Claims::All)])?;
            Some(())
        },
    },
    OptionRow {
        name: "free_sizes",
        takes: "compile or leave",
        set: |options, text| {
            options.free_sizes = one_of(text, &[("compile", FreeSizes::Compile), ("leave", FreeSizes::Leave)])?;
            Some(())
        },
    },
    OptionRow {
        name: "context_code",
        takes: "0 or 1",
        set: |options, text| {
            options.context_code = one_of(text, &[("0", false), ("1", true)])?;
            Some(())
        },
    },
    OptionRow {
        name: "tune_seconds",
        takes: "seconds from 0 to 86400",
        set: |options, text| {
            options.tune_seconds = text.parse().ok().filter(|seconds| (0.0..=MOST_TUNE_SECONDS).contains(seconds))?;
            Some(())
        },
    },
    OptionRow {
        name: "log",
        takes: "off, problems or all",
        set: |options, text| {
            options.log =
                one_of(text, &[("off", LogLines::Off), ("problems", LogLines::Problems), ("all", LogLines::All)])?;
            Some(())
        },
    },
];

fn path(option: &mut Option<PathBuf>, text: &str) -> Option<()> {
    *option = Some(Some(text).filter(|text| !text.is_empty())?.into());
    Some(())
}

fn one_of<T: Copy>(text: &str, all: &[(&str, T)]) -> Option<T> {
    all.iter().find(|(name, _)| *name == text).map(|(_, value)| *value)
}

impl ProviderOptions {
    /// Reads options of a provider from pairs of name and value.
    ///
    /// # Errors
    /// If an option does not exist, or its value is invalid.
    pub fn read<'a>(given: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<ProviderOptions, String> {
        let mut options = ProviderOptions::default();
        for (name, text) in given {
            let Some(row) = ROWS.iter().find(|row| row.name == name) else {
                let names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
                return Err(format!("tilewright has no option `{name}` (there are {})", names.join(", ")));
            };
            (row.set)(&mut options, text)
                .ok_or_else(|| format!("option `{name}` of tilewright is `{text}` (give {})", row.takes))?;
        }
        if options.exact && options.bf16 {
            return Err("options `exact` and `bf16` of tilewright exclude each other (give one of them)".to_owned());
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(given: &[(&str, &str)], expected: Result<ProviderOptions, &str>) {
        assert_eq!(ProviderOptions::read(given.iter().copied()), expected.map_err(str::to_owned));
    }

    #[test]
    fn options_are_read() {
        check(&[], Ok(ProviderOptions::default()));
        check(
            &[
                ("database", "a.db"),
                ("cpu", "znver5"),
                ("threads", "2"),
                ("bf16", "1"),
                ("claim", "all"),
                ("free_sizes", "leave"),
                ("tune_seconds", "0.5"),
            ],
            Ok(ProviderOptions {
                database: Some("a.db".into()),
                cpu: Some("znver5".to_owned()),
                threads: Some(2),
                bf16: true,
                claim: Claims::All,
                free_sizes: FreeSizes::Leave,
                tune_seconds: 0.5,
                ..ProviderOptions::default()
            }),
        );
        let both = "options `exact` and `bf16` of tilewright exclude each other (give one of them)";
        check(&[("exact", "1"), ("bf16", "1")], Err(both));
        check(&[("threads", "0")], Err("option `threads` of tilewright is `0` (give a whole number from 1 to 1024)"));
        for text in ["-1", "nan", "inf", "1e9", ""] {
            let error = format!("option `tune_seconds` of tilewright is `{text}` (give seconds from 0 to 86400)");
            check(&[("tune_seconds", text)], Err(&error));
        }
        check(&[("cache", "")], Err("option `cache` of tilewright is `` (give a folder)"));
        let known = "database, store, cache, cpu, threads, exact, bf16, claim, free_sizes, context_code, \
                     tune_seconds, log";
        check(&[("thread", "1")], Err(&format!("tilewright has no option `thread` (there are {known})")));
    }
}
