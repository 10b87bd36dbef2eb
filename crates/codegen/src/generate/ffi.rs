//! Wrapper functions of an exported object for TVM-FFI, with DLPack tensors as arguments.
//!
//! Arguments are the buffers in order, then the scratch memory, if any. TVM-FFI is not linked: its function
//! for setting errors is called if the process has it.

use std::collections::BTreeSet;

use tilewright_ir::{BufferId, Part};

use super::export::ExportChecks;
use super::{Generator, plan};
use crate::export::{ALIGN, OK, dlpack, ffi_name, function_name};
use crate::ssa::{Compare, FunctionId, Id, Linkage, SsaOp, Type};

/// Type indices of TVM-FFI values that are tensors: a pointer to one, and an object with a tensor after its
/// header.
const TENSOR_POINTER: i32 = 7;
const TENSOR_OBJECT: i32 = 70;
const OBJECT_BYTES: i64 = 24;

/// Size in bytes of a value, and offset of its pointer.
const VALUE_BYTES: i64 = 16;
const VALUE_POINTER: i64 = 8;

/// DLPack devices with memory that the host can read: CPU, and pinned memory of CUDA and ROCm.
const HOSTS: [i32; 3] = [1, 3, 11];

/// Offsets of a tensor's fields.
mod field {
    pub const DATA: i64 = 0;
    pub const DEVICE: i64 = 8;
    pub const RANK: i64 = 16;
    pub const TYPE: i64 = 20;
    pub const SHAPE: i64 = 24;
    pub const STRIDES: i64 = 32;
    pub const BYTE_OFFSET: i64 = 40;
}

/// Argument of the functions: a buffer, or the scratch memory.
struct FfiArgument {
    buffer: Option<BufferId>,
    /// Function that checks the argument and returns its address, or null with an error.
    address: FunctionId,
}

/// Expected tensor.
struct ExpectedTensor<'n> {
    /// Beginning of messages about the tensor.
    what: &'n str,
    dtype: tilewright_ir::DType,
    shape: &'n [i64],
}

impl Generator<'_> {
    /// Generates the functions for non-empty parts; `parts` holds the functions to call.
    pub(super) fn ffi_functions(&mut self, guard: &ExportChecks, parts: &[(Part, FunctionId)]) {
        let refuse = self.refuse_function();
        let prefix = guard.prefix;
        let buffers: Vec<BufferId> = self.program.arguments().chain(self.program.kept()).map(|(id, _)| id).collect();
        let mut arguments = Vec::new();
        for id in buffers {
            let b = self.program.buffer(id);
            let what = format!("{prefix}: argument {}, `{}`,", arguments.len(), b.name);
            let wanted = ExpectedTensor { what: &what, dtype: b.dtype, shape: &b.shape };
            let address = self.address_function(arguments.len(), &wanted, refuse);
            arguments.push(FfiArgument { buffer: Some(id), address });
        }
        let scratch_bytes = self.plan.scratch.bytes(1) as i64;
        if scratch_bytes > 0 {
            let what = format!("{prefix}: argument {}, the scratch memory,", arguments.len());
            let wanted = ExpectedTensor { what: &what, dtype: tilewright_ir::DType::U8, shape: &[scratch_bytes] };
            let address = self.address_function(arguments.len(), &wanted, refuse);
            arguments.push(FfiArgument { buffer: None, address });
        }
        for &(part, function) in parts {
            if !self.program.part(part).is_empty() {
                self.ffi_function(guard, part, function, &arguments, refuse);
            }
        }
    }

    /// Generates a function that reports an error of a kind with a text, and returns the functions' error
    /// code.
    fn refuse_function(&mut self) -> FunctionId {
        let ptr = Type::POINTER;
        let raise = self.m.function("TVMFFIErrorSetRaisedFromCStr", Linkage::Weak, None, &[ptr; 2]);
        let function = self.begin("tilewright_refuse", Linkage::Internal, Some(Type::I32), &[ptr; 2]);
        let [tell, end] = [0; 2].map(|_| self.m.block(function));
        let is_there = self.m.compare(Compare::NotEqual, self.m.function_address(raise), self.m.zero(ptr));
        self.m.cond_br(is_there, tell, end);
        self.m.go_to(function, tell);
        self.m.call(raise, &[self.m.parameter(0), self.m.parameter(1)]);
        self.m.br(end);
        self.m.go_to(function, end);
        self.m.ret_value(self.m.int32(-1));
        function
    }

    /// Continues if a condition holds, else returns a value with an error.
    fn expect(&mut self, function: FunctionId, holds: Id, refuse: FunctionId, [kind, text]: [&str; 2], otherwise: Id) {
        let [on, out] = [0; 2].map(|_| self.m.block(function));
        self.m.cond_br(holds, on, out);
        self.m.go_to(function, out);
        let [kind, text] = [kind, text].map(|text| self.m.global_address(self.m.text(text)));
        self.m.call(refuse, &[kind, text]);
        self.m.ret_value(otherwise);
        self.m.go_to(function, on);
    }

    fn byte_at(&self, base: Id, offset: i64) -> Id {
        self.m.element(Type::I8, base, self.m.int(offset))
    }

    /// Compares the integers at an address with expected ones.
    fn are(&self, address: Id, expected: impl Iterator<Item = (usize, i64)>) -> Id {
        expected.fold(self.m.bool(true), |all, (at, n)| {
            let found = self.m.load(Type::I64, self.byte_at(address, 8 * at as i64), 8, false);
            self.m.binary(SsaOp::And, all, self.m.compare(Compare::Equal, found, self.m.int(n)))
        })
    }

    /// Generates the function that returns the address of an argument, or null, with an error, if the
    /// argument does not match the expected tensor.
    fn address_function(&mut self, at: usize, wanted: &ExpectedTensor, refuse: FunctionId) -> FunctionId {
        let ptr = Type::POINTER;
        let ExpectedTensor { what, dtype, shape } = *wanted;
        let function = self.begin(&format!("tilewright_argument_{at}"), Linkage::Internal, Some(ptr), &[ptr]);
        let (value, null) = (self.m.parameter(0), self.m.zero(ptr));
        let check = |me: &mut Self, holds: Id, kind: &str, reason: &str| {
            me.expect(function, holds, refuse, [kind, &format!("{what} {reason}")], null);
        };
        let ty = self.m.load(Type::I32, value, 8, false);
        let pointer = self.m.load(ptr, self.byte_at(value, VALUE_POINTER), 8, false);
        let is = |me: &Self, x: Id, n: i32| me.m.compare(Compare::Equal, x, me.m.int32(n));
        let is_object = is(self, ty, TENSOR_OBJECT);
        let is_tensor = self.m.binary(SsaOp::Or, is_object, is(self, ty, TENSOR_POINTER));
        let is_there = self.m.compare(Compare::NotEqual, pointer, null);
        check(self, self.m.binary(SsaOp::And, is_tensor, is_there), "TypeError", "takes a tensor");
        let tensor = self.m.select(is_object, self.byte_at(pointer, OBJECT_BYTES), pointer);

        let (code, bits) = dlpack(dtype);
        let found = self.m.load(Type::I32, self.byte_at(tensor, field::TYPE), 4, false);
        let expected = i32::from(code) | (bits as i32) << 8 | 1 << 16;
        check(self, is(self, found, expected), "TypeError", &format!("takes {}", dtype.name()));

        let words = format!("takes the shape {shape:?}");
        let rank = self.m.load(Type::I32, self.byte_at(tensor, field::RANK), 8, false);
        check(self, is(self, rank, shape.len() as i32), "ValueError", &words);
        let extents = self.m.load(ptr, self.byte_at(tensor, field::SHAPE), 8, false);
        let has_shape = self.are(extents, shape.iter().copied().enumerate());
        check(self, has_shape, "ValueError", &words);

        let device = self.m.load(Type::I32, self.byte_at(tensor, field::DEVICE), 8, false);
        let is_host =
            HOSTS.iter().fold(self.m.bool(false), |any, &host| self.m.binary(SsaOp::Or, any, is(self, device, host)));
        check(self, is_host, "ValueError", "takes the host's memory");

        let strides = self.m.load(ptr, self.byte_at(tensor, field::STRIDES), 8, false);
        let [look, done] = [0; 2].map(|_| self.m.block(function));
        self.m.cond_br(self.m.compare(Compare::Equal, strides, null), done, look);
        self.m.go_to(function, look);
        // The stride of a dimension of extent 1 is irrelevant.
        let packed = (0..shape.len()).filter(|&at| shape[at] != 1).map(|at| (at, shape[at + 1..].iter().product()));
        let is_packed = self.are(strides, packed);
        check(self, is_packed, "ValueError", "takes contiguous elements, the last dimension first (make a copy)");
        self.m.br(done);
        self.m.go_to(function, done);

        let data = self.m.load(ptr, self.byte_at(tensor, field::DATA), 8, false);
        let offset = self.m.load(Type::I64, self.byte_at(tensor, field::BYTE_OFFSET), 8, false);
        let address = self.m.element(Type::I8, data, offset);
        let low = self.m.binary(SsaOp::And, self.m.address(address), self.m.int(ALIGN as i64 - 1));
        let is_aligned = self.m.compare(Compare::Equal, low, self.m.int(0));
        let is_there = self.m.compare(Compare::NotEqual, data, null);
        let is_good = self.m.binary(SsaOp::And, is_aligned, is_there);
        check(self, is_good, "ValueError", &format!("takes memory at a multiple of {ALIGN} bytes (make a copy)"));
        self.m.ret_value(address);
        function
    }

    /// Generates the function that calls a part.
    fn ffi_function(
        &mut self,
        guard: &ExportChecks,
        part: Part,
        called: FunctionId,
        arguments: &[FfiArgument],
        refuse: FunctionId,
    ) {
        let ptr = Type::POINTER;
        let name = function_name(guard.prefix, part);
        let function =
            self.begin(&ffi_name(guard.prefix, part), guard.linkage, Some(Type::I32), &[ptr, ptr, Type::I32, ptr]);
        let (null, failed) = (self.m.zero(ptr), self.m.int32(-1));
        let buffers = self.m.stack(8 * arguments.len() as u64, 8);
        let [given, n, result] = [1, 2, 3].map(|at| self.m.parameter(at));
        let is_right = self.m.compare(Compare::Equal, n, self.m.int32(arguments.len() as i32));
        let named: Vec<&str> = arguments
            .iter()
            .map(|argument| argument.buffer.map_or("scratch memory", |id| &self.program.buffer(id).name))
            .collect();
        let text = format!("{name} takes {} tensors ({})", arguments.len(), named.join(", "));
        self.expect(function, is_right, refuse, ["TypeError", &text], failed);
        let mut used = BTreeSet::new();
        plan::used_buffers(self.program.part(part), &mut used);
        let mut scratch = null;
        for (at, argument) in arguments.iter().enumerate() {
            let slot = self.m.element(ptr, buffers, self.m.int(at as i64));
            if argument.buffer.is_some_and(|id| !used.contains(&id)) {
                self.m.store(null, slot, 8);
                continue;
            }
            let value = self.byte_at(given, VALUE_BYTES * at as i64);
            let address = self.m.call(argument.address, &[value]).expect("it gives an address");
            let [on, out] = [0; 2].map(|_| self.m.block(function));
            self.m.cond_br(self.m.compare(Compare::NotEqual, address, null), on, out);
            self.m.go_to(function, out);
            self.m.ret_value(failed);
            self.m.go_to(function, on);
            match argument.buffer {
                Some(_) => self.m.store(address, slot, 8),
                None => scratch = address,
            }
        }
        let code = self.m.call(called, &[buffers, scratch, null]).expect("it gives a code");
        let is_done = self.m.compare(Compare::Equal, code, self.m.int32(OK));
        let text = format!("{name}: CPU or operating system lack what the kernel needs");
        self.expect(function, is_done, refuse, ["RuntimeError", &text], failed);
        // The result is `None`.
        for offset in [0, VALUE_POINTER] {
            self.m.store(self.m.int(0), self.byte_at(result, offset), 8);
        }
        self.m.ret_value(self.m.int32(OK));
    }
}
