//! Random configurations of every template that serves a GPU, as code for AMD's.
//!
//! `TILEWRIGHT_CONFIGS=100` makes a long run: that many configurations on each GPU; by default, one of each
//! template for each shape on the newest GPU.
#![cfg(feature = "llvm")]

#[path = "../../codegen/tests/amd/mod.rs"]
mod amd;
mod random;

use std::path::Path;

use random::{LARGE, SHAPES, each, models_registers, n_configs};

const GPUS: [&str; 4] = ["gfx900", "gfx906", "gfx90a", "gfx942"];

#[test]
fn kernels_fit_their_registers() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("random-amdgpu");
    std::fs::create_dir_all(&folder).unwrap();
    for gpu in if n_configs().is_some() { &GPUS[..] } else { &GPUS[3..] } {
        let (mut n_kernels, mut n_spilling) = (0, 0);
        each(&[SHAPES.as_slice(), &LARGE].concat(), gpu, |_, task, _, kernels| {
            let made = amd::link(kernels, gpu, &folder)?;
            for (made, kernel) in made.iter().zip(kernels.kernels()) {
                if made.shared_bytes != kernel.shared_bytes(kernels) {
                    return Err(format!("{} is {made:?}\n{kernels}", kernel.name));
                }
                let is_modelled = models_registers(task);
                n_kernels += usize::from(is_modelled);
                n_spilling += usize::from(is_modelled && (made.n_spilled > 0 || made.n_registers > 256));
            }
            Ok(())
        });
        println!("{gpu}: of {n_kernels} kernels with a model of registers {n_spilling} spill or have more than 256");
        let is_few = 50 * n_spilling <= n_kernels;
        assert!(is_few || n_configs().is_none(), "{gpu}: {n_spilling} of {n_kernels} spill or have more than 256");
    }
}
