//! Fast back end for x86-64 with AVX2 or AVX-512, for searches.
//!
//! LLVM takes 30 ms for a kernel, most of the cost of a trial. Kernels consist of few patterns (loops,
//! advancing addresses, register tiles of vectors), and the generator itself hoists, reuses and unrolls.
//! Therefore, one pass of instruction selection, a linear scan over exact live ranges and an encoder yield
//! code of about equal speed in a hundredth of the time.

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
use encode::{Assembler, FieldTarget as Field};
use regalloc::Registers;
use select::ConstantPool;

/// Page size in bytes, to which constants are aligned after the code.
pub const PAGE: usize = 4096;

/// Position-independent code and constants of a module, the same in every process.
#[derive(Debug, PartialEq, Eq)]
pub struct Image {
    /// Code, followed by the constants from a multiple of 4096 bytes on.
    pub bytes: Vec<u8>,
    /// Offset of the constants.
    pub code_len: usize,
    /// Exported functions with their offsets.
    pub symbols: Vec<(String, usize)>,
    /// External functions, each with the offset of the eight bytes to fill with its address.
    pub outside: Vec<(String, usize)>,
}

impl Image {
    /// Serializes the image: offset of the constants, both lists of functions, and the bytes. A list is its
    /// length and, for each function, the offset, the length of the name, and the name.
    pub fn to_bytes(&self) -> Vec<u8> {
        let number = |n: usize| (n as u64).to_le_bytes();
        let mut out = number(self.code_len).to_vec();
        for list in [&self.symbols, &self.outside] {
            out.extend(number(list.len()));
            for (name, offset) in list {
                out.extend([number(*offset), number(name.len())].concat());
                out.extend_from_slice(name.as_bytes());
            }
        }
        out.extend_from_slice(&self.bytes);
        out
    }

    /// Deserializes an image of [`Image::to_bytes`]; `None` if it is malformed.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<Image> {
        let code_len = number(&mut bytes)?;
        let symbols = functions(&mut bytes)?;
        let outside = functions(&mut bytes)?;
        let is_inside = |list: &[(String, usize)], len: usize| {
            list.iter().all(|(_, offset)| offset.checked_add(len).is_some_and(|end| end <= code_len))
        };
        let is_whole = code_len > 0 && code_len.is_multiple_of(PAGE) && code_len <= bytes.len();
        let is_image = is_whole && is_inside(&symbols, 1) && is_inside(&outside, 8);
        is_image.then(|| Image { bytes: bytes.to_vec(), code_len, symbols, outside })
    }
}

/// Reads a number from the front.
fn number(bytes: &mut &[u8]) -> Option<usize> {
    let (number, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    usize::try_from(u64::from_le_bytes(*number)).ok()
}

/// Reads a list of functions with offsets from the front.
fn functions(bytes: &mut &[u8]) -> Option<Vec<(String, usize)>> {
    let mut list = Vec::new();
    for _ in 0..number(bytes)? {
        let (offset, len) = (number(bytes)?, number(bytes)?);
        let (name, rest) = bytes.split_at_checked(len)?;
        *bytes = rest;
        list.push((String::from_utf8(name.to_vec()).ok()?, offset));
    }
    Some(list)
}

/// Instruction set extensions of a target.
#[derive(Clone, Copy)]
struct CpuFeatures {
    /// Mask registers, and 32 vector registers of 64 bytes.
    has_masks: bool,
    /// Byte dot products in the AVX-512 encoding.
    has_avx512_dot: bool,
}

/// Whether this back end supports a target. 512-bit vectors with 16 registers (AVX2 in two halves) are not
/// supported.
pub fn serves(target: &Target) -> bool {
    let n_registers = if target.vector_bits >= 512 { 32 } else { 16 };
    let has_vectors = target.vector_bits >= 256 && target.n_vector_registers >= n_registers;
    target.arch == Arch::X86_64 && target.has_fma && has_vectors
}

/// Compiles a module; `Err` names an unsupported operation, or an undefined function that is not `known`
/// elsewhere.
pub fn compile(mut module: Module, target: &Target, known: &dyn Fn(&str) -> bool) -> Result<Image, String> {
    let has_masks = target.vector_bits >= 512;
    let machine = CpuFeatures { has_masks, has_avx512_dot: target.feature("avx512vnni") == Some(true) };
    let registers = Registers { n_vectors: if has_masks { 32 } else { 16 } };
    let mut pool = ConstantPool::default();
    let mut asm = Assembler::default();
    let is_outside: Vec<bool> = module.functions.iter().map(ssa::Function::is_outside).collect();
    if module.functions.iter().any(|f| f.is_outside() && !known(&f.name)) {
        return Err("an unknown function".to_owned());
    }
    // Start of each function; `None` for external ones.
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
        let selected = select::select(f, machine, &is_outside, &mut pool)?;
        let places = regalloc::allocate(&selected, &registers)?;
        asm.align(64);
        starts.push(Some(asm.code.len()));
        emit::emit(&mut asm, &selected, &places, &registers, has_masks, &pool.bytes);
    }
    let code_len = asm.code.len().next_multiple_of(PAGE);
    let mut outside = Vec::new();
    for (at, end, field) in std::mem::take(&mut asm.fixups) {
        let to = match field {
            Field::Function(number) => starts[number].expect("it is the module's own") as i64,
            Field::Pool(at) => code_len as i64 + i64::from(at),
            Field::Outside(number) => {
                outside.push((module.functions[number].name.clone(), at));
                continue;
            }
            Field::Label(_) => unreachable!("labels are resolved with their functions"),
        };
        asm.set_field(at, to - end as i64);
    }
    let mut bytes = asm.code;
    bytes.resize(code_len, 0xcc);
    bytes.extend_from_slice(&pool.bytes);
    // Reads of a short constant may extend beyond it.
    bytes.resize(bytes.len() + 64, 0);
    let exported = module.functions.into_iter().zip(starts).filter(|(f, _)| f.linkage == Linkage::Exported);
    let symbols = exported.filter_map(|(f, start)| Some((f.name, start?))).collect();
    Ok(Image { bytes, code_len, symbols, outside })
}
