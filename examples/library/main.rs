//! Runs the crate `layer`: reads its inputs from files of bare elements, and writes its output to a file.
//!
//! ```text
//! tilewright compile dense:m=32,n=48,k=64,const=w,epilogue=bias+gelu --name layer --constant w=w.bin \
//!     --as rust -o layer
//! ```
//!
//! In `Cargo.toml` it is `layer = { path = "layer" }`.

use std::error::Error;
use std::fs;

fn read(path: &str) -> Result<Vec<f32>, Box<dyn Error>> {
    Ok(fs::read(path)?.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect())
}

fn main() -> Result<(), Box<dyn Error>> {
    let files: Vec<String> = std::env::args().skip(1).collect();
    let [x, bias, y] = &files[..] else { return Err("give three files: x, bias, y".into()) };
    let (x, bias, mut result) = (read(x)?, read(bias)?, vec![0.0; 32 * 48]);
    layer::Context::new(0)?.run(&x, &bias, &mut result)?;
    fs::write(y, result.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())?;
    Ok(())
}
