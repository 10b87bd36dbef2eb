//! LLVM module with its context.

use std::ffi::{CStr, CString};

use llvm_sys::core::*;
use llvm_sys::prelude::*;

/// LLVM context with one module.
pub struct LlvmModule {
    context: LLVMContextRef,
    module: LLVMModuleRef,
}

impl Drop for LlvmModule {
    fn drop(&mut self) {
        // SAFETY: `new` created both, and there are no other references to them.
        unsafe {
            LLVMDisposeModule(self.module);
            LLVMContextDispose(self.context);
        }
    }
}

impl LlvmModule {
    /// Creates an empty module. Value names are kept only for readable output.
    pub fn new(name: &str, keep_names: bool) -> LlvmModule {
        let name = c_string(name);
        // SAFETY: the context is new, and the module is created in it.
        unsafe {
            let context = LLVMContextCreate();
            LLVMContextSetDiscardValueNames(context, i32::from(!keep_names));
            LlvmModule { context, module: LLVMModuleCreateWithNameInContext(name.as_ptr(), context) }
        }
    }

    /// Module for LLVM's C API.
    pub fn raw(&self) -> LLVMModuleRef {
        self.module
    }

    /// Context for LLVM's C API.
    pub fn context(&self) -> LLVMContextRef {
        self.context
    }

    /// Formats the module as LLVM IR.
    pub fn print(&self) -> String {
        // SAFETY: the module is alive, and LLVM returns a zero-terminated string that the caller owns and
        // disposes of.
        unsafe {
            let text = LLVMPrintModuleToString(self.module);
            let out = CStr::from_ptr(text).to_string_lossy().into_owned();
            LLVMDisposeMessage(text);
            out
        }
    }

    /// Checks the module.
    ///
    /// # Errors
    /// LLVM's description of the error.
    pub fn verify(&self) -> Result<(), String> {
        let mut message = std::ptr::null_mut();
        // SAFETY: as for `print`.
        unsafe {
            let broken = llvm_sys::analysis::LLVMVerifyModule(
                self.module,
                llvm_sys::analysis::LLVMVerifierFailureAction::LLVMReturnStatusAction,
                &mut message,
            );
            let text = CStr::from_ptr(message).to_string_lossy().into_owned();
            LLVMDisposeMessage(message);
            if broken != 0 { Err(text) } else { Ok(()) }
        }
    }
}

/// Creates a C string; an interior zero byte, which no name here has, truncates it.
pub fn c_string(text: &str) -> CString {
    CString::new(text.split('\0').next().unwrap_or_default()).expect("cut at the first zero byte")
}
