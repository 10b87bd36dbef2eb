//! An object that holds data: what no compiler is needed for.

use std::borrow::Cow;

use tilewright_ir::target::Arch;

/// Alignment of data, in bytes.
const ALIGN: usize = 64;
/// Bytes of a large page. Systems map files in such pages where they begin at multiples of one in the file
/// and in memory.
const LARGE_PAGE: usize = 2 << 20;
/// Number of large pages from which on data is aligned to one.
const LARGE_PAGES: usize = 8;
const HEADER_BYTES: usize = 64;
const SECTION_BYTES: usize = 64;
const SYMBOL_BYTES: usize = 24;

const SHT_PROGBITS: u32 = 1;
const SHT_SYMTAB: u32 = 2;
const SHT_STRTAB: u32 = 3;
const SHF_ALLOC: u64 = 2;
/// Data that code refers to by whole addresses alone: linkers put it behind all else, so that what code
/// refers to by less stays within its reach.
const SHF_X86_64_LARGE: u64 = 0x1000_0000;
/// A global symbol of data.
const GLOBAL_OBJECT: u8 = 0x11;
const HIDDEN: u8 = 2;

struct Section<'d> {
    name: &'static str,
    kind: u32,
    flags: u64,
    data: Cow<'d, [u8]>,
    link: u32,
    info: u32,
    align: u64,
    entry_bytes: u64,
}

impl<'d> Section<'d> {
    fn new(name: &'static str, kind: u32, data: impl Into<Cow<'d, [u8]>>, align: u64) -> Section<'d> {
        Section { name, kind, flags: 0, data: data.into(), link: 0, info: 0, align, entry_bytes: 0 }
    }
}

/// Relocatable object with read-only data under a hidden symbol, which the library it is linked into does not
/// export.
pub fn data_object(arch: Arch, symbol: &str, data: &[u8]) -> Vec<u8> {
    let mut symbols = vec![0; SYMBOL_BYTES];
    symbols.extend(1u32.to_le_bytes());
    // In the first section.
    symbols.extend([GLOBAL_OBJECT, HIDDEN, 1, 0]);
    symbols.extend(0u64.to_le_bytes());
    symbols.extend((data.len() as u64).to_le_bytes());
    let strings = format!("\0{symbol}\0").into_bytes();
    let (name, flags) = match arch {
        Arch::X86_64 => (".lrodata", SHF_ALLOC | SHF_X86_64_LARGE),
        Arch::Aarch64 | Arch::Gpu(_) => (".rodata", SHF_ALLOC),
    };
    let align = if data.len() >= LARGE_PAGES * LARGE_PAGE { LARGE_PAGE } else { ALIGN };
    let sections = [
        Section { flags, ..Section::new(name, SHT_PROGBITS, data, align as u64) },
        Section {
            link: 3,
            // The number of the first global symbol.
            info: 1,
            entry_bytes: SYMBOL_BYTES as u64,
            ..Section::new(".symtab", SHT_SYMTAB, symbols, 8)
        },
        Section::new(".strtab", SHT_STRTAB, strings, 1),
        // Says that no stack need be executable.
        Section::new(".note.GNU-stack", SHT_PROGBITS, Vec::new(), 1),
        Section::new(".shstrtab", SHT_STRTAB, Vec::new(), 1),
    ];
    object(arch, sections)
}

fn object<const N: usize>(arch: Arch, mut sections: [Section<'_>; N]) -> Vec<u8> {
    let mut names = vec![0];
    let name_offsets: Vec<u32> = sections
        .iter()
        .map(|section| {
            let at = names.len() as u32;
            names.extend(section.name.as_bytes());
            names.push(0);
            at
        })
        .collect();
    sections[N - 1].data = names.into();
    let n_bytes: usize = sections.iter().map(|section| section.data.len()).sum();
    let mut out = Vec::with_capacity(n_bytes + (N + 2) * SECTION_BYTES);
    out.resize(HEADER_BYTES, 0);
    let mut headers = vec![0; SECTION_BYTES];
    for (section, name) in sections.iter().zip(name_offsets) {
        // What is linked is aligned; the object itself need not be.
        out.resize(out.len().next_multiple_of(section.align.min(ALIGN as u64) as usize), 0);
        headers.extend(name.to_le_bytes());
        headers.extend(section.kind.to_le_bytes());
        for field in [section.flags, 0, out.len() as u64, section.data.len() as u64] {
            headers.extend(field.to_le_bytes());
        }
        headers.extend(section.link.to_le_bytes());
        headers.extend(section.info.to_le_bytes());
        headers.extend(section.align.to_le_bytes());
        headers.extend(section.entry_bytes.to_le_bytes());
        out.extend_from_slice(&section.data);
    }
    out.resize(out.len().next_multiple_of(8), 0);
    let table = out.len() as u64;
    out.extend(headers);
    let machine: u16 = match arch {
        Arch::X86_64 => 62,
        Arch::Aarch64 => 183,
        Arch::Gpu(_) => unreachable!("libraries are for CPUs"),
    };
    // 64 bits, little-endian, version 1; relocatable.
    let mut header = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    header.extend(machine.to_le_bytes());
    header.extend(1u32.to_le_bytes());
    for field in [0, 0, table] {
        header.extend(field.to_le_bytes());
    }
    header.extend(0u32.to_le_bytes());
    for field in [HEADER_BYTES, 0, 0, SECTION_BYTES, N + 1, N] {
        header.extend((field as u16).to_le_bytes());
    }
    out[..HEADER_BYTES].copy_from_slice(&header);
    out
}
