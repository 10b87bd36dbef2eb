//! Tables of tuned kernels, as vLLM and SGLang store them with their kernels: for each number of rows the
//! configuration that won, without its time.
//!
//! The name of the file identifies the kernel and the device:
//!
//! # Source
//! `get_moe_configs` and `get_config_file_name` of vLLM's `fused_moe.py`, which reads them.

use std::io::{self, Write};

use serde_json::Value as Json;

use crate::json::JsonReader;
use crate::outcome::brief;
use crate::read::{FormatError, Input, ReadResults};
use crate::results::TunerTask;
use crate::rows::{ConfigInFile, Sheets, TaskRows, read_value};

/// Number of rows, by which the kernel chooses a configuration.
const ROWS: &str = "M";
/// Field of the file's name for the device.
const DEVICE: &str = "device_name";
/// Number of experts: tables with this field are those of `fused_moe`.
const EXPERTS: &str = "E";

/// Reads a table, with a task for each number of rows.
pub(super) fn read(input: Input) -> Result<ReadResults, FormatError> {
    let task = task_of_name(input.name);
    let mut sheets = Sheets::default();
    let mut reader = JsonReader::new(input.file)?;
    let read = reader.object(|reader, name| {
        let rows = name.parse::<u64>().ok();
        let (Some(n_rows), Some(b'{')) = (rows, reader.peek()?) else {
            // The version of Triton is a member, too.
            let is_remark = rows.is_none() && !matches!(reader.peek()?, Some(b'{'));
            if !is_remark {
                sheets.leave_out(&brief(&name), "no number of rows with its configuration");
            }
            return reader.skip();
        };
        let mut config = ConfigInFile::new();
        reader.object(|reader, name| {
            config.push((name, read_value(reader)?));
            Ok(())
        })?;
        let rows = sheets.of(task.clone().with(ROWS, &n_rows.into()), |task| TaskRows::new(task, None, Vec::new()))?;
        rows.begin(name);
        Ok(rows.add_winner(config)?)
    });
    sheets.end(&mut reader, read)
}

/// Task that the name of a table describes.
fn task_of_name(name: &str) -> TunerTask {
    let mut task = TunerTask::default();
    for part in parts(name) {
        match part.split_once('=') {
            Some((DEVICE, device)) => task.device = device.to_owned(),
            // Numbers and lists are parsed; everything else is text.
            Some((field, value)) if !field.is_empty() => {
                let value = serde_json::from_str(value).unwrap_or_else(|_| Json::from(value));
                task = task.with(field, &value);
            }
            _ => return TunerTask { kernel: name.to_owned(), ..TunerTask::default() },
        }
    }
    task.kernel = if task.field(EXPERTS).is_some() { "fused_moe" } else { "matmul" }.to_owned();
    task
}

/// Parts of a name between commas outside of brackets.
fn parts(name: &str) -> Vec<&str> {
    let mut depth = 0i64;
    name.split(|c| {
        depth += i64::from(c == '[') - i64::from(c == ']');
        c == ',' && depth == 0
    })
    .collect()
}

/// Writes a table of configurations by their numbers of rows.
pub(super) fn write(configs: &[(u64, Json)], out: &mut dyn Write) -> io::Result<()> {
    write!(out, "{{")?;
    for (at, (n_rows, config)) in configs.iter().enumerate() {
        let comma = if at == 0 { "" } else { "," };
        write!(out, "{comma}\n    \"{n_rows}\": {config}")?;
    }
    writeln!(out, "\n}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tables_say_what_was_tuned() {
        let check = |name: &str, kernel: &str, device: &str, problem: &[(&str, &str)]| {
            let problem = problem.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
            let expected = TunerTask { kernel: kernel.to_owned(), device: device.to_owned(), problem };
            assert_eq!(task_of_name(name), expected);
        };
        check(
            "E=8,N=14336,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128]",
            "fused_moe",
            "NVIDIA_H200",
            &[("E", "8"), ("N", "14336"), ("dtype", "\"fp8_w8a8\""), ("block_shape", "[128,128]")],
        );
        check("N=24576,K=1536,device_name=NVIDIA_B200", "matmul", "NVIDIA_B200", &[("N", "24576"), ("K", "1536")]);
        for name in ["my-table", "", "a,b=2", "=3"] {
            check(name, name, "", &[]);
        }
    }
}
