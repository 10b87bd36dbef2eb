//! ELF objects with data, written without a compiler.

use object::elf::{SHF_ALLOC, SHT_PROGBITS, SectionFlags};
use object::write::{Object, StandardSegment, Symbol, SymbolSection};
use object::{Architecture, BinaryFormat, Endianness, SectionKind, SymbolFlags, SymbolKind, SymbolScope};
use tilewright_ir::target::Arch;

/// Alignment of data, in bytes.
const ALIGN: usize = 64;
/// Size of a huge page in bytes. Systems map files in huge pages if the offsets in the file and in memory are
/// multiples of it.
const LARGE_PAGE: usize = 2 << 20;
/// Number of huge pages from which on data is aligned to one.
const LARGE_PAGES: usize = 8;
/// Section of data that code refers to only by full addresses: linkers place it after everything else, so
/// that data with shorter references stay within reach.
const SHF_X86_64_LARGE: SectionFlags = SectionFlags(0x1000_0000);

/// Makes a relocatable object with read-only data under a hidden symbol, which the library that it is linked
/// into does not export.
pub fn data_object(arch: Arch, symbol: &str, data: &[u8]) -> Vec<u8> {
    let (architecture, section, flags) = match arch {
        Arch::X86_64 => (Architecture::X86_64, ".lrodata", SHF_X86_64_LARGE),
        Arch::Aarch64 => (Architecture::Aarch64, ".rodata", SectionFlags(0)),
        Arch::Gpu(_) => unreachable!("libraries are for CPUs"),
    };
    let mut object = Object::new(BinaryFormat::Elf, architecture, Endianness::Little);
    let segment = object.segment_name(StandardSegment::Data).to_vec();
    // Declares that the stack need not be executable.
    object.add_section(segment.clone(), b".note.GNU-stack".to_vec(), SectionKind::Other);
    let section = object.add_section(segment, section.into(), SectionKind::ReadOnlyData);
    let flags = SHF_ALLOC | flags;
    *object.section_flags_mut(section) = object::SectionFlags::Elf { sh_type: SHT_PROGBITS, sh_flags: flags };
    let align = if data.len() >= LARGE_PAGES * LARGE_PAGE { LARGE_PAGE } else { ALIGN };
    object.section_mut(section).set_data(data, align as u64);
    object.add_symbol(Symbol {
        name: symbol.into(),
        value: 0,
        size: data.len() as u64,
        kind: SymbolKind::Data,
        // Hidden from users of the library.
        scope: SymbolScope::Linkage,
        weak: false,
        section: SymbolSection::Section(section),
        flags: SymbolFlags::None,
    });
    object.write().expect("invariant: a section with a symbol is an object")
}

#[cfg(test)]
mod tests {
    use object::read::elf::ElfFile64;
    use object::{Object as _, ObjectSection, ObjectSymbol};

    use super::*;

    #[test]
    fn data_stands_under_one_hidden_symbol_that_is_aligned() {
        let large = vec![3; LARGE_PAGES * LARGE_PAGE];
        for (arch, architecture, section, data) in [
            (Arch::X86_64, Architecture::X86_64, ".lrodata", &[1, 2, 3][..]),
            (Arch::X86_64, Architecture::X86_64, ".lrodata", &large),
            (Arch::Aarch64, Architecture::Aarch64, ".rodata", &[7; 100]),
            (Arch::Aarch64, Architecture::Aarch64, ".rodata", &[]),
        ] {
            let bytes = data_object(arch, "net_constants", data);
            let file: ElfFile64 = ElfFile64::parse(&*bytes).unwrap();
            assert_eq!((file.architecture(), file.kind()), (architecture, object::ObjectKind::Relocatable));
            let symbols: Vec<_> = file.symbols().filter(|symbol| symbol.is_definition()).collect();
            let [symbol] = &symbols[..] else { panic!("{} symbols", symbols.len()) };
            assert_eq!((symbol.name(), symbol.size()), (Ok("net_constants"), data.len() as u64));
            assert_eq!((symbol.scope(), symbol.is_global()), (SymbolScope::Linkage, true));
            let found = file.section_by_index(symbol.section_index().unwrap()).unwrap();
            assert_eq!((found.name(), found.data()), (Ok(section), Ok(data)));
            assert_eq!(found.align(), if data.len() < large.len() { 64 } else { 2 << 20 });
            let object::SectionFlags::Elf { sh_flags, .. } = found.flags() else { panic!("flags of ELF") };
            assert_eq!(sh_flags.0, if arch == Arch::X86_64 { 0x1000_0002 } else { 2 }, "it is read alone");
            assert!(file.section_by_name(".note.GNU-stack").is_some_and(|note| note.size() == 0));
        }
    }
}
