//! Time that quick code takes to make. Numbers to look at; none is asserted.
//!
//! `cargo bench -p tilewright-codegen --bench quick`

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::Instant;

use common::{host, row_of_sums};
use tilewright_codegen::Compiler;

/// Runs of which the fastest counts: others take the core now and then.
const N_RUNS: usize = 7;

/// Registers are compared with each other, so that twice the code may take some four times as long; growth by
/// the third power, eight times, would not end for a large kernel.
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
