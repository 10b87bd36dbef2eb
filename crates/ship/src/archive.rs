//! Static libraries: `ar` archives of objects.

use std::fmt::Write;

/// Member of an archive: an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveMember {
    /// File name with its extension.
    pub name: String,
    /// Symbols that it defines for others.
    pub symbols: Vec<String>,
    /// The object.
    pub bytes: Vec<u8>,
}

const MAGIC: &[u8] = b"!<arch>\n";
const HEADER_BYTES: usize = 60;

/// Makes an archive in GNU format with a symbol index. Equal members give equal bytes.
pub fn archive(members: &[&ArchiveMember]) -> Vec<u8> {
    let mut names = String::new();
    let name_offsets: Vec<usize> = members
        .iter()
        .map(|member| {
            let at = names.len();
            writeln!(names, "{}/", member.name).expect("writing to a string does not fail");
            at
        })
        .collect();
    let n_symbols: usize = members.iter().map(|member| member.symbols.len()).sum();
    let symbol_bytes: usize = members.iter().flat_map(|member| &member.symbols).map(|name| name.len() + 1).sum();
    let index_bytes = 4 + 4 * n_symbols + symbol_bytes;
    let mut at = MAGIC.len() + [index_bytes, names.len()].map(|n| HEADER_BYTES + even(n)).iter().sum::<usize>();
    let mut index = (n_symbols as u32).to_be_bytes().to_vec();
    for member in members {
        member.symbols.iter().for_each(|_| index.extend((at as u32).to_be_bytes()));
        at += HEADER_BYTES + even(member.bytes.len());
    }
    for symbol in members.iter().flat_map(|member| &member.symbols) {
        index.extend(symbol.as_bytes());
        index.push(0);
    }
    let mut out = MAGIC.to_vec();
    add(&mut out, "/", &index);
    add(&mut out, "//", names.as_bytes());
    for (member, offset) in members.iter().zip(name_offsets) {
        add(&mut out, &format!("/{offset}"), &member.bytes);
    }
    out
}

fn even(n: usize) -> usize {
    n.next_multiple_of(2)
}

fn add(out: &mut Vec<u8>, name: &str, bytes: &[u8]) {
    // Name, time, owner, group, mode, size.
    let header = format!("{name:<16}{:<12}{:<6}{:<6}{:<8}{:<10}`\n", 0, 0, 0, "100644", bytes.len());
    out.extend(header.as_bytes());
    out.extend(bytes);
    out.resize(even(out.len()), b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_leads_to_the_members() {
        let member = |name: &str, symbols: &[&str], bytes: &[u8]| ArchiveMember {
            name: name.into(),
            symbols: symbols.iter().map(|symbol| (*symbol).to_owned()).collect(),
            bytes: bytes.into(),
        };
        // Members of odd lengths too, and with a name longer than a header allows.
        let members = [
            member("a.o", &["f", "g"], b"first"),
            member("a_long_name_of_a_member.o", &["h"], b""),
            member("c.o", &[], b"c"),
        ];
        let bytes = archive(&members.each_ref());
        assert_eq!(&bytes[..8], b"!<arch>\n");
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        let text = |at: usize, n: usize| std::str::from_utf8(&bytes[at..at + n]).unwrap().trim_end();
        let (index, names) = (68, 68 + text(56, 10).parse::<usize>().unwrap().next_multiple_of(2) + 60);
        assert_eq!((text(8, 16), text(names - 60, 16), word(index)), ("/", "//", 3));
        let mut symbols = bytes[index + 16..].split(|byte| *byte == 0);
        for (nth, (symbol, of)) in [("f", 0), ("g", 0), ("h", 1)].into_iter().enumerate() {
            assert_eq!(symbols.next(), Some(symbol.as_bytes()));
            let at = word(index + 4 + 4 * nth);
            let name = names + text(at + 1, 15).parse::<usize>().unwrap();
            assert!(bytes[name..].starts_with(format!("{}/\n", members[of].name).as_bytes()), "{symbol}");
            let n_bytes = text(at + 48, 10).parse::<usize>().unwrap();
            assert_eq!(&bytes[at + 60..at + 60 + n_bytes], members[of].bytes, "{symbol}");
        }
        assert_eq!(bytes, archive(&members.each_ref()), "the same members give the same bytes");
    }
}
