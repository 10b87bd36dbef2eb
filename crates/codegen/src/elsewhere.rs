//! Code for another machine, into whose memory another program writes it.

use tilewright_ir::target::Arch;
use tilewright_ir::{Part, Program, Target};

use crate::generate::{self, GenerateOptions, plan::ScratchLayout, unit::Units};
use crate::loader::ObjectLayout;
use crate::{CompileError, Emit, Generated, llvm};

/// Compiled program that is not yet linked to an address.
pub struct Object {
    bytes: Vec<u8>,
    arch: Arch,
    scratch: ScratchLayout,
    kept_bytes: Vec<u64>,
}

/// Addresses for linking: of the code, and of the functions that it calls.
pub struct LinkAddresses<'a> {
    /// Address of the image's first byte.
    pub at: u64,
    /// Page size in bytes.
    pub page_bytes: u64,
    /// Address of a C library function, by name.
    pub function: &'a dyn Fn(&str) -> Option<u64>,
}

/// Program linked for an address, in whole pages.
pub struct LinkedImage {
    /// The linked image, padded to whole pages.
    pub bytes: Vec<u8>,
    /// Size of the executable, read-only part at the start; the rest is read-only data.
    pub code_bytes: u64,
    functions: Vec<(String, usize)>,
}

impl Object {
    /// Compiles a lowered program, for any CPU; needs LLVM.
    ///
    /// # Errors
    /// See [`CompileError`].
    ///
    /// # Panics
    /// If the program is malformed: run the verifier first.
    pub fn new(program: &Program, target: &Target) -> Result<Object, CompileError> {
        let Generated { module, scratch, .. } =
            Generated::of(program, target, &Units::default(), GenerateOptions::default())?;
        let (bytes, _) = llvm::compile(&module, target, Emit::Object)?;
        let kept_bytes = program.kept().map(|(_, b)| b.size_bytes().unwrap_or(0)).collect();
        Ok(Object { bytes, arch: target.arch, scratch, kept_bytes })
    }

    /// Size in bytes of the scratch memory for `n_threads` threads, which must be aligned to
    /// [`crate::SCRATCH_ALIGN`].
    pub fn scratch_bytes(&self, n_threads: usize) -> u64 {
        self.scratch.bytes(n_threads)
    }

    /// Size of each kept buffer in bytes, in order.
    pub fn kept_bytes(&self) -> &[u64] {
        &self.kept_bytes
    }

    /// Links the object for `address`.
    ///
    /// # Errors
    /// [`CompileError::UnknownSymbol`] if the object calls a function without an address.
    pub fn link(&self, address: &LinkAddresses) -> Result<LinkedImage, CompileError> {
        let too_far = || CompileError::Object("its address does not fit this machine's pointers".into());
        let [at, page] = [address.at, address.page_bytes].map(|n| usize::try_from(n).map_err(|_| too_far()));
        let layout = ObjectLayout::of(&self.bytes, page?)?;
        let mut bytes = vec![0; layout.len];
        let function = |name: &str| (address.function)(name).and_then(|at| usize::try_from(at).ok());
        let functions = layout.fill(&mut bytes, at?, self.arch, &function)?;
        Ok(LinkedImage { bytes, code_bytes: layout.code_len as u64, functions })
    }
}

impl LinkedImage {
    /// Offset of the function of a part; `None` if the program has no such function, for example without
    /// `finish`.
    pub fn entry(&self, part: Part) -> Option<u64> {
        let name = generate::symbol(part);
        self.functions.iter().find(|(known, _)| known == name).map(|(_, place)| *place as u64)
    }
}
