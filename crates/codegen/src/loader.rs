//! Loader of relocatable ELF objects into executable memory.
//!
//! Kernels refer only to their own constants, code of other kernels and a fixed list of C functions, so the
//! few relocations that LLVM generates for position-independent code suffice. Dropping the code releases the
//! memory.

use std::ptr::NonNull;

use object::elf::{self, RelocationType, SHF_ALLOC, SHF_EXECINSTR};
use object::read::elf::{ElfFile64, SectionHeader};
use object::{Object, ObjectSection, ObjectSymbol, RelocationFlags, RelocationTarget, SymbolKind, SymbolSection};
use tilewright_ir::target::Arch;

use crate::CompileError;
use crate::x86::{Image, PAGE};

/// Loaded machine code.
pub struct LoadedCode {
    memory: NonNull<u8>,
    len: usize,
    symbols: Vec<(String, usize)>,
}

// SAFETY: the memory is never written after loading, and unmapped only on drop.
unsafe impl Send for LoadedCode {}
// SAFETY: as above.
unsafe impl Sync for LoadedCode {}

impl Drop for LoadedCode {
    fn drop(&mut self) {
        // SAFETY: `load` created the mapping with this length, and calling the code borrows `self`.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.len) };
    }
}

unsafe extern "C" {
    fn expf(x: f32) -> f32;
    fn expm1f(x: f32) -> f32;
    fn logf(x: f32) -> f32;
    fn log1pf(x: f32) -> f32;
    fn tanhf(x: f32) -> f32;
    fn erff(x: f32) -> f32;
    fn sinf(x: f32) -> f32;
    fn cosf(x: f32) -> f32;
    fn powf(x: f32, y: f32) -> f32;
    fn sincosf(x: f32, sin: *mut f32, cos: *mut f32);
    fn exp(x: f64) -> f64;
    fn expm1(x: f64) -> f64;
    fn log(x: f64) -> f64;
    fn log1p(x: f64) -> f64;
    fn tanh(x: f64) -> f64;
    fn erf(x: f64) -> f64;
    fn sin(x: f64) -> f64;
    fn cos(x: f64) -> f64;
    fn pow(x: f64, y: f64) -> f64;
    fn sincos(x: f64, sin: *mut f64, cos: *mut f64);
}

/// Address of a C library function that code may call: functions of expressions, those that LLVM generates
/// from copy loops, and combined sine and cosine.
pub fn external(name: &str) -> Option<usize> {
    Some(match name {
        "expf" => expf as *const () as usize,
        "expm1f" => expm1f as *const () as usize,
        "logf" => logf as *const () as usize,
        "log1pf" => log1pf as *const () as usize,
        "tanhf" => tanhf as *const () as usize,
        "erff" => erff as *const () as usize,
        "sinf" => sinf as *const () as usize,
        "cosf" => cosf as *const () as usize,
        "powf" => powf as *const () as usize,
        "exp" => exp as *const () as usize,
        "expm1" => expm1 as *const () as usize,
        "log" => log as *const () as usize,
        "log1p" => log1p as *const () as usize,
        "tanh" => tanh as *const () as usize,
        "erf" => erf as *const () as usize,
        "sincosf" => sincosf as *const () as usize,
        "sincos" => sincos as *const () as usize,
        "sin" => sin as *const () as usize,
        "cos" => cos as *const () as usize,
        "pow" => pow as *const () as usize,
        "memset" => libc::memset as *const () as usize,
        "memcpy" => libc::memcpy as *const () as usize,
        "memmove" => libc::memmove as *const () as usize,
        _ => return None,
    })
}

/// Size in bytes of a jump to an external function, followed by its address.
const STUB_BYTES: usize = 24;

fn broken(what: &'static str) -> CompileError {
    CompileError::Object(what.into())
}

fn malformed(error: object::Error) -> CompileError {
    CompileError::Object(error.to_string())
}

/// Loads an object for this machine; `elsewhere` returns the addresses of functions in other objects.
pub fn load(object: &[u8], arch: Arch, elsewhere: &dyn Fn(&str) -> Option<usize>) -> Result<LoadedCode, CompileError> {
    let layout = ObjectLayout::of(object, PAGE)?;
    let mut code = LoadedCode::new(layout.len)?;
    let memory = code.memory;
    // SAFETY: the mapping is exclusively owned, readable and writable, and of this length.
    let image = unsafe { std::slice::from_raw_parts_mut(memory.as_ptr(), layout.len) };
    let address = |name: &str| external(name).or_else(|| elsewhere(name));
    code.symbols = layout.fill(image, memory.as_ptr() as usize, arch, &address)?;
    code.seal(layout.code_len)?;
    Ok(code)
}

/// Memory layout of an object: code first, then stubs for external functions, then everything else from a
/// page boundary on.
pub struct ObjectLayout<'o> {
    elf: ElfFile64<'o>,
    /// Offset in the mapping of each section that has one.
    places: Vec<Option<usize>>,
    stubs: usize,
    /// Size in bytes of the code, in whole pages.
    pub code_len: usize,
    /// Total size in bytes, in whole pages.
    pub len: usize,
}

impl<'o> ObjectLayout<'o> {
    /// Reads the layout of an object, for pages of `page` bytes.
    pub fn of(object: &'o [u8], page: usize) -> Result<ObjectLayout<'o>, CompileError> {
        let elf = ElfFile64::parse(object).map_err(malformed)?;
        let places = vec![None; elf.elf_section_table().len()];
        let mut layout = ObjectLayout { elf, places, stubs: 0, code_len: 0, len: 0 };
        layout.lay_out(true);
        layout.stubs = layout.len.next_multiple_of(8);
        let n_external = layout.elf.symbols().filter(|symbol| symbol.is_undefined()).count();
        layout.code_len = (layout.stubs + n_external * STUB_BYTES).next_multiple_of(page);
        layout.len = layout.code_len;
        layout.lay_out(false);
        layout.len = layout.len.next_multiple_of(page);
        Ok(layout)
    }

    /// Assigns offsets to the sections of one kind, after those already placed.
    fn lay_out(&mut self, executable: bool) {
        for section in self.elf.sections() {
            let flags = section.elf_section_header().sh_flags(self.elf.endian());
            let has = |flag| flags & flag == flag;
            if has(SHF_ALLOC) && has(SHF_EXECINSTR) == executable {
                self.len = self.len.next_multiple_of(section.align().max(1) as usize);
                self.places[section.index().0] = Some(self.len);
                self.len += section.size() as usize;
            }
        }
    }

    /// Links the object into a zeroed image for address `base`, with the addresses of external functions from
    /// `address`. Returns the exported functions with their offsets.
    pub fn fill(
        &self,
        image: &mut [u8],
        base: usize,
        arch: Arch,
        address: &dyn Fn(&str) -> Option<usize>,
    ) -> Result<Vec<(String, usize)>, CompileError> {
        let mut symbols = Vec::new();
        // Address of the null symbol 0.
        let mut addresses = vec![0];
        let mut next_stub = self.stubs;
        for symbol in self.elf.symbols() {
            let name = symbol.name().map_err(malformed)?;
            addresses.push(match symbol.section() {
                SymbolSection::Undefined => {
                    let to = address(name).ok_or_else(|| CompileError::UnknownSymbol { name: name.into() })?;
                    image[next_stub..next_stub + STUB_BYTES].copy_from_slice(&stub(arch, to));
                    next_stub += STUB_BYTES;
                    base + next_stub - STUB_BYTES
                }
                SymbolSection::Section(section) => {
                    match self.places.get(section.0).ok_or(broken("symbol's section"))? {
                        Some(place) => {
                            let place = place + symbol.address() as usize;
                            if symbol.kind() != SymbolKind::Section && !symbol.is_local() {
                                symbols.push((name.into(), place));
                            }
                            base + place
                        }
                        None => 0,
                    }
                }
                _ => symbol.address() as usize,
            });
        }
        for section in self.elf.sections() {
            let Some(start) = self.places[section.index().0] else { continue };
            let data = section.data().map_err(malformed)?;
            image[start..start + data.len()].copy_from_slice(data);
            for (offset, relocation) in section.relocations() {
                let (RelocationTarget::Symbol(symbol), RelocationFlags::Elf { r_type }) =
                    (relocation.target(), relocation.flags())
                else {
                    return Err(broken("relocation without a symbol"));
                };
                let symbol: usize = *addresses.get(symbol.0).ok_or(broken("relocation's symbol"))?;
                let place = start + offset as usize;
                let field = image.get_mut(place..).ok_or(broken("relocation's place"))?;
                let value = (symbol as i64).wrapping_add(relocation.addend());
                relocate(arch, r_type, field, value, (base + place) as i64)?;
            }
        }
        Ok(symbols)
    }
}

/// Loads code of the fast back end; `elsewhere` returns the addresses of external functions.
pub fn place(image: Image, elsewhere: &dyn Fn(&str) -> Option<usize>) -> Result<LoadedCode, CompileError> {
    let Image { mut bytes, code_len, symbols, outside } = image;
    for (name, at) in outside {
        let to = external(&name).or_else(|| elsewhere(&name)).ok_or(CompileError::UnknownSymbol { name })?;
        bytes[at..at + 8].copy_from_slice(&(to as u64).to_le_bytes());
    }
    let mut code = LoadedCode::new(bytes.len().next_multiple_of(PAGE))?;
    // SAFETY: the mapping is exclusively owned, writable, and at least as long.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), code.memory.as_ptr(), bytes.len()) };
    code.symbols = symbols;
    code.seal(code_len)?;
    Ok(code)
}

impl LoadedCode {
    /// Allocates writable memory of `len` bytes.
    fn new(len: usize) -> Result<LoadedCode, CompileError> {
        // SAFETY: this requests new memory at any address.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(CompileError::NoMemory(std::io::Error::last_os_error().to_string()));
        }
        let memory = NonNull::new(memory.cast::<u8>()).expect("a mapping is not at address zero");
        Ok(LoadedCode { memory, len, symbols: Vec::new() })
    }

    /// Makes the first `code_len` bytes executable and all memory read-only.
    fn seal(&self, code_len: usize) -> Result<(), CompileError> {
        let (memory, len) = (self.memory, self.len);
        // SAFETY: the range is the start of the mapping, in whole pages.
        let failed = unsafe {
            libc::mprotect(memory.as_ptr().cast(), code_len, libc::PROT_READ | libc::PROT_EXEC) != 0
                || (len > code_len
                    && libc::mprotect(memory.as_ptr().add(code_len).cast(), len - code_len, libc::PROT_READ) != 0)
        };
        if failed {
            return Err(CompileError::Object(format!(
                "cannot make code executable: {}",
                std::io::Error::last_os_error()
            )));
        }
        synchronize(memory.as_ptr(), code_len);
        Ok(())
    }

    /// Names of the exported functions.
    pub fn symbols(&self) -> impl Iterator<Item = &str> {
        self.symbols.iter().map(|(name, _)| name.as_str())
    }

    /// Address of a function by name.
    pub fn symbol(&self, name: &str) -> Option<*const u8> {
        let (_, place) = self.symbols.iter().find(|(n, _)| n == name)?;
        // SAFETY: symbols lie inside the mapping.
        Some(unsafe { self.memory.as_ptr().add(*place) })
    }
}

/// Code that jumps to any address.
fn stub(arch: Arch, to: usize) -> [u8; STUB_BYTES] {
    let mut out = [0; STUB_BYTES];
    match arch {
        // jmp *2(%rip)
        Arch::X86_64 => out[..8].copy_from_slice(&[0xff, 0x25, 2, 0, 0, 0, 0xcc, 0xcc]),
        // ldr x16, .+8; br x16
        Arch::Aarch64 => out[..8].copy_from_slice(&[0x50, 0, 0, 0x58, 0, 2, 0x1f, 0xd6]),
        Arch::Gpu(_) => unreachable!("code of GPUs is loaded by their drivers"),
    }
    out[8..16].copy_from_slice(&(to as u64).to_le_bytes());
    out
}

/// Applies a relocation to a field.
fn relocate(arch: Arch, kind: RelocationType, field: &mut [u8], value: i64, place: i64) -> Result<(), CompileError> {
    let relative = value.wrapping_sub(place);
    let narrow = |v: i64| i32::try_from(v).map(|v| v as u32).map_err(|_| broken("relocation out of range"));
    let old = field.get(..4).ok_or(broken("relocation's place"))?;
    let old = u32::from_le_bytes(old.try_into().expect("four bytes"));
    let low_bits = |shift: u32| old & !(0xfff << 10) | ((value as u32 & 0xfff) >> shift) << 10;
    let word = match (arch, kind) {
        (Arch::X86_64, elf::R_X86_64_64) | (Arch::Aarch64, elf::R_AARCH64_ABS64) => {
            field.get_mut(..8).ok_or(broken("relocation's place"))?.copy_from_slice(&value.to_le_bytes());
            return Ok(());
        }
        (Arch::X86_64, elf::R_X86_64_PC32 | elf::R_X86_64_PLT32) | (Arch::Aarch64, elf::R_AARCH64_PREL32) => {
            narrow(relative)?
        }
        (Arch::Aarch64, elf::R_AARCH64_ADR_PREL_PG_HI21) => {
            let pages = narrow((value & !0xfff).wrapping_sub(place & !0xfff) >> 12)?;
            old & !(3 << 29 | 0x7_ffff << 5) | (pages & 3) << 29 | (pages >> 2 & 0x7_ffff) << 5
        }
        (Arch::Aarch64, elf::R_AARCH64_ADD_ABS_LO12_NC | elf::R_AARCH64_LDST8_ABS_LO12_NC) => low_bits(0),
        (Arch::Aarch64, elf::R_AARCH64_LDST16_ABS_LO12_NC) => low_bits(1),
        (Arch::Aarch64, elf::R_AARCH64_LDST32_ABS_LO12_NC) => low_bits(2),
        (Arch::Aarch64, elf::R_AARCH64_LDST64_ABS_LO12_NC) => low_bits(3),
        (Arch::Aarch64, elf::R_AARCH64_LDST128_ABS_LO12_NC) => low_bits(4),
        (Arch::Aarch64, elf::R_AARCH64_JUMP26 | elf::R_AARCH64_CALL26) => {
            old & !0x3ff_ffff | (relative >> 2) as u32 & 0x3ff_ffff
        }
        (Arch::X86_64 | Arch::Aarch64 | Arch::Gpu(_), _) => {
            return Err(CompileError::Object(format!("relocation {}", kind.0)));
        }
    };
    field[..4].copy_from_slice(&word.to_le_bytes());
    Ok(())
}

/// Makes new code visible to instruction fetch on hardware without coherent instruction caches.
fn synchronize(start: *mut u8, len: usize) {
    #[cfg(target_arch = "aarch64")]
    {
        unsafe extern "C" {
            fn __clear_cache(start: *mut libc::c_char, end: *mut libc::c_char);
        }
        // SAFETY: the range is mapped.
        unsafe { __clear_cache(start.cast(), start.add(len).cast()) };
    }
    #[cfg(not(target_arch = "aarch64"))]
    let _ = (start, len);
}
