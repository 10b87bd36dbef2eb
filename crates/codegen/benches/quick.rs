//! Benchmark of the fast back end's compile time, without assertions.
//!
//! `cargo bench -p tilewright-codegen --bench quick`

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::Instant;

use common::{host, row_of_sums};
use tilewright_codegen::Compiler;

/// Number of runs, of which the fastest counts, as other processes may interfere.
const N_RUNS: usize = 7;

/// Register allocation compares registers pairwise, so twice the code may take about four times as long;
/// cubic growth, eight times, would be prohibitive for a large kernel.
fn main() {
    let mut before: Option<f64> = None;
    for n in [512, 1024, 2048, 4096, 8192] {
        let program = row_of_sums(n);
        let seconds = |_| {
            let start = Instant::now();
            let made = Compiler::new(host()).compile_quickly(&program);
            made.map(|_| start.elapsed().as_secs_f64())
        };
        match (0..N_RUNS).map(seconds).collect::<Result<Vec<f64>, _>>() {
            Ok(all) => {
                let least = all.into_iter().fold(f64::INFINITY, f64::min);
                let growth = before.map_or(String::new(), |before| format!(", {:.1} times half of it", least / before));
                println!("{n} sums: {:.2} ms{growth}", 1e3 * least);
                before = Some(least);
            }
            Err(error) => return println!("this machine has no quick code: {error}"),
        }
    }
}
