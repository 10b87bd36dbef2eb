//! Tunes a matrix multiplication and calls the winner on slices: `cargo run --release -p tilewright --example
//! matmul -- records.db`

use std::time::Duration;
use tilewright::{Error, Request, Session};

fn main() -> Result<(), Error> {
    // Candidates run in other processes of this same program.
    tilewright::serve_if_worker();
    let session = Session::open(std::env::args_os().nth(1).unwrap_or("records.db".into()))?;
    let request = Request::parse("matmul:m=64,n=48,k=32")?.time(Duration::from_secs(2));
    let tuned = session.tune(&request)?;
    println!("{:.1} GFLOP/s", tuned.best.expect("some candidate is right").gflops);

    let mut kernel = session.kernel(request.workload()?, 1)?;
    let (a, b, mut c) = (vec![1f32; 64 * 32], vec![0.5; 32 * 48], vec![0.0; 64 * 48]);
    kernel.run(&[&a, &b], &mut [&mut c])?;
    assert!(c.iter().all(|&sum| sum == 16.0));
    println!("{} sums of 32 products, each {}", c.len(), c[0]);
    Ok(())
}
