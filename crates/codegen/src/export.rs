//! Interface of an exported object, and its C header.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::hash::Hasher;

use fnv::FnvHasher;
use tilewright_ir::target::Arch;
use tilewright_ir::{Buffer, DType, OpenSize, Part, Program, Role, Target};

use crate::align::ARGUMENT_ALIGN;
use crate::generate::{cpu, plan};
use crate::{CompileError, ScratchLayout, scratch_layout};

/// Result of exported functions on success.
pub const OK: i32 = 0;
/// Result of exported functions, without effect, if the CPU or the operating system lacks a feature.
pub const CPU_UNSUPPORTED: i32 = 1;
/// Result of exported functions, without effect, if a pointer is null or misaligned.
pub const BAD_POINTER: i32 = 2;

/// Result of exported functions, without effect, if an open (dynamic) size is out of its range.
pub const BAD_SIZE: i32 = 3;

/// Alignment of buffers and scratch memory, in bytes.
pub const ALIGN: u64 = ARGUMENT_ALIGN;

/// Name of the exported function of a part.
pub fn function_name(prefix: &str, part: Part) -> String {
    format!("{prefix}_{}", part.name())
}

/// Name of the function that reports whether the CPU is supported.
pub fn supported_name(prefix: &str) -> String {
    format!("{prefix}_supported")
}

/// Name of the function with which TVM-FFI calls a part.
pub fn ffi_name(prefix: &str, part: Part) -> String {
    format!("__tvm_ffi_{}", function_name(prefix, part))
}

/// DLPack code of an element type, and its number of bits.
pub fn dlpack(dtype: DType) -> (u8, u64) {
    let code = match dtype {
        DType::I8 | DType::I7 | DType::I16 | DType::I32 | DType::I64 => 0,
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => 1,
        DType::F32 | DType::F64 | DType::F16 => 2,
        DType::Bf16 => 4,
        DType::Bool => 6,
    };
    (code, 8 * dtype.bytes())
}

/// Buffer passed by a caller.
#[derive(Clone, Debug, PartialEq)]
pub struct CallerBuffer {
    /// Name in the program.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first; the last dimension is contiguous.
    pub shape: Vec<i64>,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Role in the program's interface.
    pub role: Role,
    /// Parts that only read the buffer.
    pub read_by: Vec<Part>,
    /// Parts that write the buffer.
    pub written_by: Vec<Part>,
}

impl CallerBuffer {
    /// Describes a buffer that these parts read and write.
    fn of(buffer: &Buffer, read_by: Vec<Part>, written_by: Vec<Part>) -> CallerBuffer {
        let (name, shape, size_bytes) = (buffer.name.clone(), buffer.shape.clone(), buffer.size_bytes().unwrap_or(0));
        CallerBuffer { name, dtype: buffer.dtype, shape, size_bytes, role: buffer.role, read_by, written_by }
    }
}

/// Interface of an exported object, for C programs.
#[derive(Clone, Debug, PartialEq)]
pub struct Interface {
    /// Prefix of function names.
    pub prefix: String,
    /// Maximum number of threads of parallel loops.
    pub n_threads: usize,
    /// Buffers in the order of the call: the program's arguments, then its kept buffers.
    pub buffers: Vec<CallerBuffer>,
    /// Open (dynamic) sizes, in the order in which a call of the body passes them.
    pub sizes: Vec<OpenSize>,
    /// Size of the scratch memory in bytes.
    pub scratch_bytes: u64,
    /// Required CPU features beyond the family's baseline, by their LLVM names.
    pub cpu_features: Vec<&'static str>,
    arch: Arch,
}

impl Interface {
    /// Alignment of buffers and scratch memory, in bytes.
    pub const ALIGN: u64 = ALIGN;

    /// Creates the interface of a lowered program's object; without `prefix`, a unique one is generated.
    ///
    /// # Errors
    /// If a buffer is too large.
    pub fn new(
        program: &Program,
        target: &Target,
        n_threads: usize,
        prefix: Option<&str>,
    ) -> Result<Interface, CompileError> {
        let scratch_bytes = scratch_layout(program, target)?.bytes(n_threads);
        let prefix = prefix.map_or_else(|| own_prefix(program, target, n_threads, scratch_bytes), str::to_owned);
        let uses = Part::ALL.map(|(part, _)| {
            let mut used = BTreeSet::new();
            plan::used_buffers(program.part(part), &mut used);
            (part, used, plan::written_buffers(program.part(part)))
        });
        let buffers = program.arguments().chain(program.kept()).map(|(id, b)| {
            let (mut read_by, mut written_by) = (Vec::new(), Vec::new());
            for (part, used, written) in &uses {
                if written.contains(&id) {
                    written_by.push(*part);
                } else if used.contains(&id) {
                    read_by.push(*part);
                }
            }
            CallerBuffer::of(b, read_by, written_by)
        });
        let (buffers, cpu_features) = (buffers.collect(), cpu::features(target));
        let sizes = program.sizes.clone();
        Ok(Interface { prefix, n_threads, buffers, sizes, scratch_bytes, cpu_features, arch: target.arch })
    }

    /// Encodes for [`Interface::of_uses`] the information in the interface that depends on statements: the
    /// sizes of the scratch memory, eight bytes each, and for each buffer the parts that read it and those
    /// that write it, a byte with a bit for each part.
    pub(crate) fn uses_to_bytes(&self, scratch: ScratchLayout) -> Vec<u8> {
        let bit = |part: &Part| Part::ALL.iter().position(|(other, _)| other == part).expect("every part is listed");
        let bits = |parts: &[Part]| parts.iter().fold(0, |bits, part| bits | 1 << bit(part));
        let uses = self.buffers.iter().flat_map(|buffer| [bits(&buffer.read_by), bits(&buffer.written_by)]);
        let sizes = [scratch.shared_bytes, scratch.per_thread_bytes].map(u64::to_le_bytes);
        sizes.into_iter().flatten().chain(uses).collect()
    }

    /// Creates the interface of a program without analyzing its statements, from bytes that begin with the
    /// result of [`Interface::uses_to_bytes`]; also returns the layout of the scratch memory and the
    /// remaining bytes. `None` if there are too few bytes.
    pub(crate) fn of_uses<'a>(
        program: &Program,
        target: &Target,
        n_threads: usize,
        prefix: &str,
        bytes: &'a [u8],
    ) -> Option<(Interface, ScratchLayout, &'a [u8])> {
        let (shared, rest) = bytes.split_first_chunk()?;
        let (per_thread, mut rest) = rest.split_first_chunk()?;
        let [shared_bytes, per_thread_bytes] = [shared, per_thread].map(|bytes| u64::from_le_bytes(*bytes));
        let scratch = ScratchLayout { shared_bytes, per_thread_bytes };
        let parts = |bits: u8| {
            let with_bits = Part::ALL.iter().enumerate().filter(move |(at, _)| bits >> at & 1 == 1);
            with_bits.map(|(_, (part, _))| *part).collect()
        };
        let mut buffers = Vec::new();
        for (_, buffer) in program.arguments().chain(program.kept()) {
            let ([read_by, written_by], behind) = rest.split_first_chunk()?;
            buffers.push(CallerBuffer::of(buffer, parts(*read_by), parts(*written_by)));
            rest = behind;
        }
        let interface = Interface {
            prefix: prefix.to_owned(),
            n_threads,
            buffers,
            sizes: program.sizes.clone(),
            scratch_bytes: scratch.bytes(n_threads),
            cpu_features: cpu::features(target),
            arch: target.arch,
        };
        Some((interface, scratch, rest))
    }

    /// Whether a text is a C identifier and thus a valid prefix.
    pub fn is_prefix(text: &str) -> bool {
        text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    }

    /// Names of the functions, the only symbols that a hidden object exports.
    pub fn symbols(&self) -> Vec<String> {
        let parts = Part::ALL.iter().map(|(part, _)| function_name(&self.prefix, *part));
        [supported_name(&self.prefix)].into_iter().chain(parts).collect()
    }

    /// Names of the functions with which TVM-FFI calls an object that is not hidden: one for each non-empty
    /// part, if there are no open sizes.
    pub fn ffi_symbols(&self) -> Vec<String> {
        let is_fixed = self.sizes.is_empty();
        let parts = Part::ALL.iter().map(|(part, _)| *part).filter(|part| is_fixed && self.has(*part));
        parts.map(|part| ffi_name(&self.prefix, part)).collect()
    }

    /// Whether a part is non-empty.
    pub fn has(&self, part: Part) -> bool {
        self.buffers.iter().any(|b| b.written_by.contains(&part))
    }

    /// Total size of the kept buffers in bytes, each padded to [`Interface::ALIGN`].
    pub fn kept_bytes(&self) -> u64 {
        let kept = self.buffers.iter().filter(|b| b.role == Role::Kept);
        kept.map(|b| b.size_bytes.next_multiple_of(ALIGN)).sum()
    }

    /// Generates the header for C99 and C++; `origin` describes the origin of the object in a few lines.
    pub fn header(&self, origin: &[String]) -> String {
        let mut out = String::new();
        self.write_header(&mut out, origin).expect("writing to a string does not fail");
        out
    }

    fn write_header(&self, out: &mut String, origin: &[String]) -> std::fmt::Result {
        let p = &self.prefix;
        for (at, line) in origin.iter().enumerate() {
            writeln!(out, "{} {}", if at == 0 { "/*" } else { " *" }, line.replace("*/", "* /"))?;
        }
        writeln!(
            out,
            " *\n * Here P stands for {p}.\n *\n * Buffers, in the order in which their addresses are passed:"
        )?;
        let constants = self.constants();
        for (b, constant) in self.buffers.iter().zip(&constants) {
            let ty = match b.dtype {
                DType::F32 => "float",
                DType::F64 => "double",
                DType::F16 => "_Float16",
                DType::Bf16 => "__bf16",
                DType::I8 | DType::I7 => "int8_t",
                DType::U8 => "uint8_t",
                DType::I16 => "int16_t",
                DType::U16 => "uint16_t",
                DType::I32 => "int32_t",
                DType::U32 => "uint32_t",
                DType::I64 => "int64_t",
                DType::U64 => "uint64_t",
                DType::Bool => "bool",
            };
            let shape: String = b.shape.iter().map(|extent| format!("[{extent}]")).collect();
            let uses = [("read", &b.read_by), ("written", &b.written_by)].into_iter().filter(|(_, by)| !by.is_empty());
            let uses = uses.map(|(verb, by)| {
                format!("{verb} by {}", join(by.iter().map(|part| function_name("P", *part)), " and "))
            });
            let (role, uses) = (role_text(b.role), join(uses, ", "));
            writeln!(out, " *   P_{constant}: {ty} {shape}, {} bytes, {role}, {uses}", b.size_bytes)?;
        }
        for size in &self.sizes {
            let step = if size.step == 1 { String::new() } else { format!(" in steps of {}", size.step) };
            let (name, least, most) = (&size.name, size.least, size.most());
            writeln!(out, " *   P_SIZE_{name}: a size that each call of P_run says, {least} to {most}{step}")?;
        }
        if !self.sizes.is_empty() {
            writeln!(out, " * Arrays have room for the largest sizes; beyond the size of a call nothing is used.")?;
        }
        writeln!(out, " * Arrays are dense, the last dimension contiguous.\n *\n * {}", self.cpu_text())?;
        write!(out, "{CALL_TEXT}")?;
        let written = join(self.named(|b| b.written_by.contains(&Part::Body)), ", ");
        writeln!(out, " * Calls of P_run at the same time need scratch memory and {written} of their own.\n */")?;
        write!(out, "#ifndef {p}_H\n#define {p}_H\n\n#include <stddef.h>\n#include <stdint.h>\n\n")?;
        write!(out, "#ifdef __cplusplus\nextern \"C\" {{\n#endif\n\n{COMMON}\n")?;

        if !self.sizes.is_empty() {
            write!(out, "{BAD_SIZE_TEXT}\n/* Positions of the sizes, and their number. */\nenum {{\n")?;
            self.sizes.iter().try_for_each(|size| writeln!(out, "    {p}_SIZE_{},", size.name))?;
            writeln!(out, "    {p}_SIZES\n}};\n")?;
        }
        writeln!(out, "/* Positions of the buffers, and their number. */\nenum {{")?;
        constants.iter().try_for_each(|constant| writeln!(out, "    {p}_{constant},"))?;
        writeln!(out, "    {p}_BUFFERS\n}};\n")?;
        let sizes = join(self.buffers.iter().map(|b| b.size_bytes.to_string()), ", ");
        writeln!(
            out,
            "/* Their sizes, to initialize an array of size_t with. */\n#define {p}_BUFFER_BYTES {{ {sizes} }}"
        )?;
        for (text, name, value) in [
            ("Alignment in bytes of buffers and scratch memory.", "ALIGN", ALIGN.to_string()),
            ("The scratch memory.", "SCRATCH_BYTES", format!("((size_t){})", self.scratch_bytes)),
            (
                "All kept buffers, each in whole steps of that.",
                "KEPT_BYTES",
                format!("((size_t){})", self.kept_bytes()),
            ),
            ("Threads that a runtime may use.", "THREADS", self.n_threads.to_string()),
        ] {
            writeln!(out, "/* {text} */\n#define {p}_{name} {value}")?;
        }

        writeln!(
            out,
            "\n/* 1 where CPU and operating system have what the kernel needs, else 0. */\nint {}(void);",
            supported_name(p)
        )?;
        let parameters = "void *const *buffers, void *scratch, const tilewright_runtime *runtime";
        for (part, _) in Part::ALL {
            let sizes = if part == Part::Body && !self.sizes.is_empty() { ", const int64_t *sizes" } else { "" };
            writeln!(out, "\n/* {} */\nint {}({parameters}{sizes});", self.part_text(part), function_name(p, part))?;
        }
        writeln!(out, "\n#ifdef __cplusplus\n}}\n#endif\n\n#endif")
    }

    /// Names of the constants for the positions of the buffers, without the prefix.
    fn constants(&self) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        for b in &self.buffers {
            let mut name = b.name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
            while all.contains(&name) {
                name.push('_');
            }
            all.push(name);
        }
        all
    }

    fn named(&self, wanted: impl Fn(&CallerBuffer) -> bool) -> Vec<&str> {
        self.buffers.iter().filter(|b| wanted(b)).map(|b| b.name.as_str()).collect()
    }

    fn part_text(&self, part: Part) -> String {
        let read = join(self.named(|b| b.read_by.contains(&part)), ", ");
        let written = join(self.named(|b| b.written_by.contains(&part)), ", ");
        match part {
            _ if !self.has(part) => "Does nothing for this kernel, and need not be called.".to_owned(),
            Part::Prepare => {
                format!("Makes {written} of {read}: call it before the first run, and again after a change of {read}.")
            }
            Part::Body => format!("The kernel: makes {written} of {read}."),
            Part::Finish => format!("Makes {written} of {read}: call it after a run whose results are wanted."),
        }
    }

    fn cpu_text(&self) -> String {
        match (self.arch, self.cpu_features.is_empty()) {
            (Arch::X86_64, true) => "Any x86-64 CPU will do.".to_owned(),
            (Arch::X86_64, false) => format!("The CPU needs {}.", self.cpu_features.join(", ")),
            (Arch::Aarch64, _) => "Any 64-bit Arm CPU with NEON will do.".to_owned(),
            (Arch::Gpu(_), _) => unreachable!("objects are for CPUs"),
        }
    }
}

fn role_text(role: Role) -> &'static str {
    match role {
        Role::Input => "input",
        Role::ConstInput => "constant input",
        Role::Output => "output",
        Role::Kept => "kept between calls",
        Role::Temporary => "temporary",
    }
}

fn join<T: AsRef<str>>(words: impl IntoIterator<Item = T>, between: &str) -> String {
    words.into_iter().fold(String::new(), |mut out, word| {
        if !out.is_empty() {
            out += between;
        }
        out + word.as_ref()
    })
}

/// Returns a prefix unique to the program's object: the workload, for readability, and a hash of everything
/// that determines the code.
fn own_prefix(program: &Program, target: &Target, n_threads: usize, scratch_bytes: u64) -> String {
    let mut name = String::new();
    let mut chars = program.name.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            _ if c.is_ascii_alphanumeric() => name.push(c),
            // `m=64` becomes `m64`.
            '=' if chars.peek().is_some_and(char::is_ascii_digit) => {}
            _ if name.ends_with('_') => {}
            _ => name.push('_'),
        }
    }
    if !Interface::is_prefix(&name) {
        name.insert_str(0, "kernel_");
    }
    // FNV-1a, as the standard library's hash may change.
    let mut hash = FnvHasher::default();
    hash.write(format!("{} {}\n{n_threads} {scratch_bytes}\n{program}", target.name(), target.features).as_bytes());
    format!("{}_{:016x}", name.trim_end_matches('_'), hash.finish())
}

/// Declarations that the headers of all objects share.
const COMMON: &str = "#ifndef TILEWRIGHT_RUNTIME
#define TILEWRIGHT_RUNTIME 1

/* What a kernel's functions return. */
enum {
    TILEWRIGHT_OK = 0,
    /* CPU or operating system lack a feature; nothing was done. */
    TILEWRIGHT_CPU_UNSUPPORTED = 1,
    /* A buffer, or the scratch memory, is null or not aligned; nothing was done. */
    TILEWRIGHT_BAD_POINTER = 2
};

/* How parallel loops run. parallel_for(context, body, env, n) calls body(env, iteration, thread) once for each
 * iteration from 0 to n - 1, in any order and on any threads, and returns when all are done. thread is from 0 to the
 * kernel's number of threads less 1, and different for iterations that run at the same time. */
typedef struct tilewright_runtime {
    void *context;
    void (*parallel_for)(void *context, void (*body)(void *env, int64_t iteration, int64_t thread), void *env,
                         int64_t n);
} tilewright_runtime;

#endif
";

/// Declaration that the headers of objects with open sizes share.
const BAD_SIZE_TEXT: &str = "#ifndef TILEWRIGHT_BAD_SIZE
/* What P_run returns, too: a size is none of its values; nothing was done. */
#define TILEWRIGHT_BAD_SIZE 3
#endif
";

/// Comment on the functions that take buffers.
const CALL_TEXT: &str =
    " * The kernel calls nothing but libm (link with -lm), memcpy, memmove and memset, and allocates nothing.
 *
 * P_prepare, P_run and P_finish return TILEWRIGHT_OK or another of the codes below.
 * buffers: P_BUFFERS addresses, aligned to P_ALIGN, of memory that does not overlap; one that a function neither
 * reads nor writes may be null. scratch: P_SCRATCH_BYTES, aligned alike, null where that is 0; nothing in it lasts
 * from call to call. runtime: how parallel loops run; where it is null, on the calling thread.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_identifiers() {
        for (text, expected) in
            [("k", true), ("_k9", true), ("", false), ("9k", false), ("a-b", false), ("a b", false), ("é", false)]
        {
            assert_eq!(Interface::is_prefix(text), expected, "{text}");
        }
    }

    #[test]
    fn programs_have_prefixes_of_their_own() {
        let target = |name| Target::named(name).unwrap();
        let program = Program { name: "conv2d:c=3,k=16,epilogue=bias+relu".to_owned(), ..Program::default() };
        let prefix = |program: &Program, target: &Target, n_threads| {
            Interface::new(program, target, n_threads, None).unwrap().prefix
        };
        let base = prefix(&program, &target("x86-64"), 1);
        // Users' builds and sources contain the prefix, so it must not change.
        assert_eq!(base, "conv2d_c3_k16_epilogue_bias_relu_5f4da5c29fc7c2e3");
        let other = Program { loops: vec!["i".to_owned()], ..program.clone() };
        let more = Target { features: "+avx".to_owned(), ..target("x86-64") };
        let mut all = BTreeSet::from([base]);
        for (program, target, n_threads) in [
            (&program, target("x86-64-v3"), 1),
            (&program, more, 1),
            (&program, target("x86-64"), 2),
            (&other, target("x86-64"), 1),
        ] {
            let prefix = prefix(program, &target, n_threads);
            assert!(Interface::is_prefix(&prefix) && all.insert(prefix));
        }
        let named = Program { name: "9 × 9".to_owned(), ..Program::default() };
        assert!(prefix(&named, &target("x86-64"), 1).starts_with("kernel_9_9_"));
        assert_eq!(Interface::new(&program, &target("x86-64"), 1, Some("k")).unwrap().prefix, "k");
    }
}
