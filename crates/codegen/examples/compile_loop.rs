//! Compiles one kernel over and over, to profile.
#[path = "../tests/common/mod.rs"]
mod common;
use common::gemm::{ALayout, Gemm};
use std::time::Instant;
fn main() {
    let which = std::env::args().nth(1).unwrap_or_default();
    let n: u32 = std::env::args().nth(2).map_or(200, |x| x.parse().unwrap());
    let t = common::host();
    let p = match &*which {
        "tiny" => {
            let mut p = common::program("tiny");
            let c = common::output(&mut p, "C", tilewright_ir::DType::F32, &[16]);
            let i = p.add_loop("i");
            p.body = vec![common::for_(i, 16, vec![common::store(c, &[common::ix(i)], tilewright_ir::Expr::Const(1.0))])];
            p
        }
        "rows" => Gemm { a: ALayout::Rows, prepacked: true, m: 32, mc: 32, kc: 256, k: 256, ..Gemm::default() }.program(),
        "plain" => Gemm { a: ALayout::Plain, prepacked: true, m: 32, mc: 32, kc: 256, k: 256, ..Gemm::default() }.program(),
        _ => Gemm { prepacked: true, m: 32, mc: 32, kc: 256, k: 256, ..Gemm::default() }.program(),
    };
    let mut sum = [0u64; 4];
    let mut best = u64::MAX;
    let start = Instant::now();
    for _ in 0..n {
        let k = tilewright_codegen::compile(&p, &t).unwrap().times();
        let all = [k.generate_ns, k.passes_ns, k.machine_code_ns, k.load_ns];
        for (s, x) in sum.iter_mut().zip(all) { *s += x; }
        best = best.min(all.iter().sum());
    }
    println!("{which}: best {:.2} ms, mean {:.2} ms, split {:?} us", best as f64 / 1e6, start.elapsed().as_secs_f64() * 1e3 / f64::from(n), sum.map(|s| s / u64::from(n) / 1000));
}
