//! Code for AMD GPUs: objects that the toolchain's linker accepts, with the resources of their kernels.
#![cfg(feature = "llvm")]

mod amd;
mod common;
mod gpu;

use std::path::Path;

use gpu::Product;

#[test]
fn kernels_fit_their_registers() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("amdgpu");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["gfx900", "gfx906", "gfx90a", "gfx942"] {
        for thread in [[4, 4], [8, 4], [8, 8]] {
            let block = [16 * thread[0], 16 * thread[1], 16];
            let program = Product { m: 256, n: 256, k: 64, block, thread, vector: 4 }.program();
            let made = amd::link(&program, name, &folder).unwrap_or_else(|why| panic!("{why}"));
            let [kernel] = made[..] else { panic!("{made:?}") };
            assert_eq!(kernel.shared_bytes, program.body[0].shared_bytes(&program), "{name}");
            assert!((kernel.n_spilled, kernel.private_bytes) == (0, 0) && kernel.n_registers <= 256, "{name} {made:?}");
        }
    }
}
