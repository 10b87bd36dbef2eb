//! Libraries as Python wheels.

use std::fmt::Write;

use crate::zip::{wheel_hash, zip};
use crate::{File, Library, named, of_kind};

const VERSION: &str = "0.1.0";

/// Makes the wheel. Its shared library needs at most glibc 2.17, as its name promises, and works with every
/// Python 3, as it does not use Python's C API.
pub fn wheel(library: &Library, shared: Vec<u8>) -> File {
    let name = &library.name;
    let tag = format!("py3-none-manylinux2014_{}", library.arch().name());
    let package = of_kind(include_str!("../templates/package.py"), library.kind())
        .replace("@ORIGIN@", &format!("{:?}", library.origin.join("\n")))
        .replace("@ITEMS_AT@", &library.items_at().to_string())
        .replace("@SECOND_AT@", &library.second_at().to_string())
        .replace("@DIM_AT@", if library.rows.is_some() { "1" } else { "0" })
        .replace(
            "@AT_SIZE@",
            if library.items.is_some() { "_of(_at(tensor, sizes), n_items)" } else { "_at(tensor, sizes)" },
        )
        .replace("@NAME@", name);
    let info = format!("{name}-{VERSION}.dist-info");
    let summary = library.origin.first().map_or("", String::as_str);
    let mut files = vec![
        File::new(format!("{name}/__init__.py"), named(&package, name)),
        File::new(format!("{name}/lib{name}.so"), shared),
        File::new(
            format!("{info}/METADATA"),
            format!("Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\nSummary: {summary}\n"),
        ),
        File::new(
            format!("{info}/WHEEL"),
            format!("Wheel-Version: 1.0\nGenerator: tilewright\nRoot-Is-Purelib: false\nTag: {tag}\n"),
        ),
    ];
    let mut record = String::new();
    for File { path, bytes } in &files {
        writeln!(record, "{path},sha256={},{}", wheel_hash(bytes), bytes.len()).expect("strings can be written to");
    }
    writeln!(record, "{info}/RECORD,,").expect("strings can be written to");
    files.push(File::new(format!("{info}/RECORD"), record));
    let bytes = zip(files.iter().map(|file| (file.path.as_str(), &file.bytes[..])));
    File::new(format!("{name}-{VERSION}-{tag}.whl"), bytes)
}
