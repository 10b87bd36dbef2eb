//! Machine code for x86-64 with AVX2 or AVX-512, fast to make: what a search runs.
//!
//! LLVM takes 30 ms for a kernel, most of what a trial costs. Kernels are few shapes of code (loops,
//! addresses that advance, register tiles of vectors), and the generator hoists, reuses and unrolls by
//! itself; so a selection in one pass, a linear scan over exact live ranges and an encoder give code about as
//! fast in a hundredth of the time.

mod emit;
mod encode;
mod inst;
mod opcodes;
mod regalloc;
mod select;
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;

use tilewright_ir::Target;
use tilewright_ir::target::Arch;

use crate::ssa::{self, Linkage, Module};
use encode::{Assembler, Target as Field};
use regalloc::Registers;
use select::Pool;

/// Code and constants of a module, before they have an address.
pub struct Image {
    /// Instructions, from a multiple of 64 bytes on constants.
    pub bytes: Vec<u8>,
    /// Offset of the constants.
    pub code_len: usize,
    /// The exported functions.
    pub symbols: Vec<(String, usize)>,
}

/// Instructions that a target has or has not.
#[derive(Clone, Copy)]
struct Machine {
    /// Registers for masks, and 32 of 64 bytes.
    has_masks: bool,
    /// Dot products of bytes in the encoding of AVX-512.
    has_avx512_dot: bool,
}

/// Whether this back end has code for a target. Targets of 512-bit vectors with 16 registers, AVX2 in two
/// halves, it does not.
pub fn serves(target: &Target) -> bool {
    let n_registers = if target.vector_bits >= 512 { 32 } else { 16 };
    let has_vectors = target.vector_bits >= 256 && target.n_vector_registers >= n_registers;
    target.arch == Arch::X86_64 && target.has_fma && has_vectors
}

/// Compiles a module; `Err` names the operation without code. `outside` has the addresses of functions that
/// the module lacks.
pub fn compile(mut module: Module, target: &Target, outside: &dyn Fn(&str) -> Option<usize>) -> Result<Image, String> {
    let has_masks = target.vector_bits >= 512;
    let machine = Machine { has_masks, has_avx512_dot: target.feature("avx512vnni") == Some(true) };
    let registers = Registers { n_vectors: if has_masks { 32 } else { 16 } };
    let mut pool = Pool::default();
    let mut asm = Assembler::default();
    let address = |f: &ssa::Function| f.is_outside().then(|| outside(&f.name).ok_or("an unknown function")).transpose();
    let addresses: Vec<Option<usize>> = module.functions.iter().map(address).collect::<Result<_, _>>()?;
    // By function; none of one that is outside.
    let mut starts = Vec::new();
    for f in &mut module.functions {
        if f.is_outside() {
            starts.push(None);
            continue;
        }
        f.pointers_as_integers();
        f.share();
        if !has_masks {
            f.masks_as_integers();
        }
        f.split_long(target.vector_bits as usize / 8);
        let selected = select::select(f, machine, &addresses, &mut pool)?;
        let places = regalloc::allocate(&selected, &registers)?;
        asm.align(64);
        starts.push(Some(asm.code.len()));
        emit::emit(&mut asm, &selected, &places, &registers, has_masks, &pool.bytes);
    }
    let code_len = asm.code.len().next_multiple_of(4096);
    for (at, end, field) in std::mem::take(&mut asm.fixups) {
        let to = match field {
            Field::Function(number) => starts[number].expect("it is the module's own") as i64,
            Field::Pool(at) => code_len as i64 + i64::from(at),
            Field::Label(_) => unreachable!("labels are resolved with their functions"),
        };
        asm.set_field(at, to - end as i64);
    }
    let mut bytes = asm.code;
    bytes.resize(code_len, 0xcc);
    bytes.extend_from_slice(&pool.bytes);
    // What is read of a short constant may be longer than it.
    bytes.resize(bytes.len() + 64, 0);
    let exported = module.functions.into_iter().zip(starts).filter(|(f, _)| f.linkage == Linkage::Exported);
    Ok(Image { bytes, code_len, symbols: exported.filter_map(|(f, start)| Some((f.name, start?))).collect() })
}
