//! Translation of SSA form to LLVM IR: one instruction each, except for vectors built from a scalar.
//!
//! Differences between machines are in three places: [`LlvmPrinter::attributes`] sets the CPU of a function,
//! [`LlvmPrinter::kind`] chooses address spaces, and [`LlvmPrinter::convert`] converts 16-bit numbers.

use std::ops::Range;
use std::ptr;

use llvm_sys::core::*;
use llvm_sys::debuginfo::{LLVMMetadataReplaceAllUsesWith, LLVMTemporaryMDNode};
use llvm_sys::prelude::*;
use llvm_sys::{
    LLVMAtomicOrdering, LLVMFastMathNoSignedZeros, LLVMIntPredicate, LLVMLinkage, LLVMOpcode, LLVMRealPredicate,
    LLVMTypeKind, LLVMVisibility,
};
use tilewright_ir::target::{Arch, GpuApi, Target};

use super::module::{LlvmModule, c_string};
use crate::generate::cpu;
use crate::ssa::{
    self, AddressSpace, BlockId, Compare, Coordinate, Cpu, Def, Function, Global, Id, Instruction, LaneKind, Linkage,
    RoundingDirection, SsaOp, Type, UnaliasedMemory, VectorConstant,
};

/// Empty name.
const UNNAMED: *const libc::c_char = c"".as_ptr();

/// LLVM's numbers of the calling conventions of kernels.
const PTX_KERNEL: u32 = 71;
const AMDGPU_KERNEL: u32 = 91;

/// LLVM's address space of a GPU block's shared memory.
const SHARED: u32 = 3;

/// Calls functions of LLVM's C API.
macro_rules! llvm {
    ($($call:tt)*) => {
        // SAFETY: every handle passed comes from the context of the module being generated, which outlives
        // the printer; values are used only in their function, and arrays are passed with their lengths.
        unsafe { $($call)* }
    };
}

mod half_precision;

/// Translates a module in SSA form to LLVM IR.
pub fn print(source: &ssa::Module, target: &Target, into: &LlvmModule) {
    let (context, module) = (into.context(), into.raw());
    let builder = llvm!(LLVMCreateBuilderInContext(context));
    let invariant = metadata_kind(context, "invariant.load");
    let mut p = LlvmPrinter { target, context, module, builder, invariant, functions: Vec::new(), globals: Vec::new() };
    p.globals = source.globals.iter().map(|global| p.global(global)).collect();
    p.functions = source.functions.iter().map(|f| p.declaration(f)).collect();
    for (f, value) in source.functions.iter().zip(&p.functions) {
        if !f.is_outside() {
            p.body(f, *value);
        }
    }
    llvm!(LLVMDisposeBuilder(builder));
}

struct LlvmPrinter<'s> {
    target: &'s Target,
    context: LLVMContextRef,
    module: LLVMModuleRef,
    builder: LLVMBuilderRef,
    /// Metadata kind that marks a load as invariant.
    invariant: u32,
    functions: Vec<LLVMValueRef>,
    globals: Vec<LLVMValueRef>,
}

/// Function being translated.
struct FunctionBody<'s> {
    source: &'s Function,
    blocks: Vec<LLVMBasicBlockRef>,
    /// LLVM values; null until they are generated.
    values: Vec<LLVMValueRef>,
}

fn metadata_kind(context: LLVMContextRef, name: &str) -> u32 {
    llvm!(LLVMGetMDKindIDInContext(context, name.as_ptr().cast(), name.len() as u32))
}

/// Baseline CPU of the family, whose code all later ones can run.
fn baseline(arch: Arch) -> &'static str {
    match arch {
        Arch::X86_64 => "x86-64",
        Arch::Aarch64 => "generic",
        Arch::Gpu(_) => unreachable!("programs for GPUs are refused before"),
    }
}

/// CPU for which code of a target is tuned, which is LLVM's default for the target's CPU.
fn tuned_for(target: &Target) -> &str {
    if target.cpu == "x86-64" { "generic" } else { &target.cpu }
}

/// LLVM intrinsic of an operation.
fn intrinsic(op: &SsaOp) -> Option<&'static str> {
    Some(match op {
        SsaOp::Fma => "llvm.fma",
        SsaOp::FMin => "llvm.minimum",
        SsaOp::FMax => "llvm.maximum",
        SsaOp::FAbs => "llvm.fabs",
        SsaOp::Sqrt => "llvm.sqrt",
        SsaOp::Round(RoundingDirection::Nearest) => "llvm.roundeven",
        SsaOp::Round(RoundingDirection::Down) => "llvm.floor",
        SsaOp::Round(RoundingDirection::Up) => "llvm.ceil",
        SsaOp::Round(RoundingDirection::Zero) => "llvm.trunc",
        SsaOp::CopySign => "llvm.copysign",
        SsaOp::SignedMin => "llvm.smin",
        SsaOp::SignedMax => "llvm.smax",
        SsaOp::MaskedLoad => "llvm.masked.load",
        SsaOp::MaskedStore => "llvm.masked.store",
        SsaOp::Gather => "llvm.masked.gather",
        SsaOp::Scatter => "llvm.masked.scatter",
        SsaOp::Prefetch { .. } => "llvm.prefetch",
        SsaOp::ToInteger => "llvm.fptosi.sat",
        _ => return None,
    })
}

/// Binary LLVM instruction of an operation.
fn binary(op: &SsaOp) -> Option<LLVMOpcode> {
    Some(match op {
        SsaOp::AddWrapping => LLVMOpcode::LLVMAdd,
        SsaOp::SubWrapping => LLVMOpcode::LLVMSub,
        SsaOp::MulWrapping => LLVMOpcode::LLVMMul,
        SsaOp::SignedDiv => LLVMOpcode::LLVMSDiv,
        SsaOp::SignedRem => LLVMOpcode::LLVMSRem,
        SsaOp::UnsignedDiv => LLVMOpcode::LLVMUDiv,
        SsaOp::UnsignedRem => LLVMOpcode::LLVMURem,
        SsaOp::ShiftLeft => LLVMOpcode::LLVMShl,
        SsaOp::ShiftSigned => LLVMOpcode::LLVMAShr,
        SsaOp::ShiftUnsigned => LLVMOpcode::LLVMLShr,
        SsaOp::And => LLVMOpcode::LLVMAnd,
        SsaOp::Or => LLVMOpcode::LLVMOr,
        SsaOp::Xor => LLVMOpcode::LLVMXor,
        SsaOp::FAdd => LLVMOpcode::LLVMFAdd,
        SsaOp::FSub => LLVMOpcode::LLVMFSub,
        SsaOp::FMul => LLVMOpcode::LLVMFMul,
        SsaOp::FDiv => LLVMOpcode::LLVMFDiv,
        _ => return None,
    })
}

/// Blocks of the loop whose back edge leaves block `last`, in [order](Function::order).
fn loop_up_to<'b>(f: &Function, last: usize, order: &'b [BlockId]) -> Option<&'b [BlockId]> {
    let first = f.successors(order[last]).filter_map(|to| order[..=last].iter().position(|b| *b == to)).min();
    first.map(|first| &order[first..=last])
}

/// Whether some blocks of a function use shared memory or barriers.
fn shares(f: &Function, blocks: &[BlockId]) -> bool {
    let is_shared = |id: &Id| f.values[id.at()].ty == Type::SHARED;
    let mut instructions = blocks.iter().flat_map(|block| &f.blocks[block.at()]);
    instructions.any(|i| i.op == SsaOp::Barrier || i.operands.iter().any(is_shared))
}

impl LlvmPrinter<'_> {
    // Types.

    fn kind(&self, kind: LaneKind) -> LLVMTypeRef {
        llvm!(match kind {
            LaneKind::I1 => LLVMInt1TypeInContext(self.context),
            LaneKind::I8 => LLVMInt8TypeInContext(self.context),
            LaneKind::I16 => LLVMInt16TypeInContext(self.context),
            LaneKind::I32 => LLVMInt32TypeInContext(self.context),
            LaneKind::I64 => LLVMInt64TypeInContext(self.context),
            // CPUs move these types as integers.
            LaneKind::F16 | LaneKind::Bf16 if self.target.gpu.is_none() => LLVMInt16TypeInContext(self.context),
            LaneKind::F16 => LLVMHalfTypeInContext(self.context),
            LaneKind::Bf16 => LLVMBFloatTypeInContext(self.context),
            LaneKind::F32 => LLVMFloatTypeInContext(self.context),
            LaneKind::F64 => LLVMDoubleTypeInContext(self.context),
            LaneKind::Pointer(AddressSpace::All) => LLVMPointerTypeInContext(self.context, 0),
            LaneKind::Pointer(AddressSpace::Global) => LLVMPointerTypeInContext(self.context, 1),
            LaneKind::Pointer(AddressSpace::Shared) => LLVMPointerTypeInContext(self.context, SHARED),
        })
    }

    fn ty(&self, ty: Type) -> LLVMTypeRef {
        let kind = self.kind(ty.kind);
        if ty.lanes == 1 { kind } else { llvm!(LLVMVectorType(kind, ty.lanes as u32)) }
    }

    fn function_type(&self, result: Option<Type>, parameters: impl Iterator<Item = Type>) -> LLVMTypeRef {
        let mut types: Vec<LLVMTypeRef> = parameters.map(|ty| self.ty(ty)).collect();
        let result = result.map_or_else(|| llvm!(LLVMVoidTypeInContext(self.context)), |ty| self.ty(ty));
        llvm!(LLVMFunctionType(result, types.as_mut_ptr(), types.len() as u32, 0))
    }

    // Declarations.

    fn global(&self, global: &Global) -> LLVMValueRef {
        let name = match global {
            Global::Integer(name) => c_string(name),
            Global::Text(text) => return self.text(text),
        };
        let ty = self.kind(LaneKind::I32);
        llvm! {{
            let variable = LLVMAddGlobal(self.module, ty, name.as_ptr());
            LLVMSetLinkage(variable, LLVMLinkage::LLVMInternalLinkage);
            LLVMSetInitializer(variable, LLVMConstNull(ty));
            variable
        }}
    }

    fn text(&self, text: &str) -> LLVMValueRef {
        let text = c_string(text);
        llvm! {{
            let contents = LLVMConstStringInContext2(self.context, text.as_ptr(), text.as_bytes().len(), 0);
            let variable = LLVMAddGlobal(self.module, LLVMTypeOf(contents), c"".as_ptr());
            LLVMSetLinkage(variable, LLVMLinkage::LLVMPrivateLinkage);
            LLVMSetInitializer(variable, contents);
            LLVMSetGlobalConstant(variable, 1);
            variable
        }}
    }

    fn declaration(&self, f: &Function) -> LLVMValueRef {
        let name = c_string(&f.name);
        let ty = self.function_type(f.result, f.parameters.iter().map(|p| p.ty));
        let value = llvm!(LLVMAddFunction(self.module, name.as_ptr(), ty));
        match f.linkage {
            Linkage::Exported | Linkage::Outside => {}
            Linkage::Weak => llvm!(LLVMSetLinkage(value, LLVMLinkage::LLVMExternalWeakLinkage)),
            Linkage::Protected => llvm!(LLVMSetVisibility(value, LLVMVisibility::LLVMProtectedVisibility)),
            Linkage::Hidden => llvm!(LLVMSetVisibility(value, LLVMVisibility::LLVMHiddenVisibility)),
            Linkage::Internal => llvm!(LLVMSetLinkage(value, LLVMLinkage::LLVMInternalLinkage)),
            Linkage::Library => {
                // The last attribute says that no memory is read or written.
                for name in ["nounwind", "willreturn", "memory"] {
                    self.add_attribute(value, llvm_sys::LLVMAttributeFunctionIndex, self.attribute(name, 0));
                }
            }
        }
        if !f.is_outside() {
            match f.threads {
                None => self.attributes(f, value),
                Some(threads) => self.kernel_attributes(threads, f.cluster, value),
            }
        }
        for (at, parameter) in f.parameters.iter().enumerate() {
            if parameter.is_map {
                self.map_attributes(value, at as u32 + 1);
            }
            if let Some(UnaliasedMemory { bytes, is_constant, align }) = parameter.buffer {
                let add = |name, n| self.add_attribute(value, at as u32 + 1, self.attribute(name, n));
                add("noalias", 0);
                add("nonnull", 0);
                add("align", align);
                if bytes > 0 {
                    add("dereferenceable", bytes);
                }
                if is_constant {
                    add("readonly", 0);
                }
            }
        }
        value
    }

    /// Sets the attributes of a function: its CPU, and the effects that it does not have.
    fn attributes(&self, f: &Function, value: LLVMValueRef) {
        let index = llvm_sys::LLVMAttributeFunctionIndex;
        let add = |name: &str, text: &str| self.add_attribute(value, index, self.text_attribute(name, text));
        self.add_attribute(value, index, self.attribute("nounwind", 0));
        match f.cpu {
            Cpu::Target => {
                add("target-cpu", &self.target.cpu);
                if !self.target.features.is_empty() {
                    add("target-features", &self.target.features);
                }
            }
            Cpu::Checked => {
                let features: Vec<String> = cpu::features(self.target).iter().map(|name| format!("+{name}")).collect();
                add("target-cpu", baseline(self.target.arch));
                add("tune-cpu", tuned_for(self.target));
                add("target-features", &features.join(","));
            }
            Cpu::First => {
                add("target-cpu", baseline(self.target.arch));
                add("target-features", "");
                return;
            }
        }
        let bits = self.target.vector_bits.to_string();
        add("no-trapping-math", "true");
        add("prefer-vector-width", &bits);
        add("min-legal-vector-width", &bits);
    }

    /// Marks a function as a GPU kernel, with its GPU, the number of threads of a block and of blocks of a
    /// cluster.
    fn kernel_attributes(&self, threads: [i64; 3], cluster: i64, value: LLVMValueRef) {
        let index = llvm_sys::LLVMAttributeFunctionIndex;
        let add = |name: &str, text: &str| self.add_attribute(value, index, self.text_attribute(name, text));
        self.add_attribute(value, index, self.attribute("nounwind", 0));
        add("target-cpu", &self.target.cpu);
        if !self.target.features.is_empty() {
            add("target-features", &self.target.features);
        }
        let [x, y, z] = threads;
        if self.target.arch == Arch::Gpu(GpuApi::AmdGpu) {
            llvm!(LLVMSetFunctionCallConv(value, AMDGPU_KERNEL));
            let n = x * y * z;
            add("amdgpu-flat-work-group-size", &format!("{n},{n}"));
        } else {
            llvm!(LLVMSetFunctionCallConv(value, PTX_KERNEL));
            add("nvvm.reqntid", &format!("{x},{y},{z}"));
            add("nvvm.minctasm", "1");
            if cluster > 1 {
                add("nvvm.cluster_dim", &format!("{cluster},1,1"));
            }
        }
    }

    /// Marks a parameter as a tensor map, which is read from parameter memory.
    fn map_attributes(&self, f: LLVMValueRef, index: u32) {
        const BYTES: u64 = 128;
        let name = "byval";
        let by_value = llvm! {{
            let kind = LLVMGetEnumAttributeKindForName(name.as_ptr().cast(), name.len());
            LLVMCreateTypeAttribute(self.context, kind, LLVMArrayType2(self.kind(LaneKind::I8), BYTES))
        }};
        self.add_attribute(f, index, by_value);
        self.add_attribute(f, index, self.attribute("align", 64));
        self.add_attribute(f, index, self.text_attribute("nvvm.grid_constant", ""));
    }

    /// Creates an attribute that LLVM knows by name.
    fn attribute(&self, name: &str, value: u64) -> LLVMAttributeRef {
        llvm! {{
            let kind = LLVMGetEnumAttributeKindForName(name.as_ptr().cast(), name.len());
            assert!(kind != 0, "LLVM has no attribute {name}");
            LLVMCreateEnumAttribute(self.context, kind, value)
        }}
    }

    /// Creates a target-dependent attribute.
    fn text_attribute(&self, name: &str, value: &str) -> LLVMAttributeRef {
        llvm!(LLVMCreateStringAttribute(
            self.context,
            name.as_ptr().cast(),
            name.len() as u32,
            value.as_ptr().cast(),
            value.len() as u32
        ))
    }

    fn add_attribute(&self, function: LLVMValueRef, index: u32, attribute: LLVMAttributeRef) {
        llvm!(LLVMAddAttributeAtIndex(function, index, attribute));
    }

    // Bodies.

    fn body(&self, f: &Function, function: LLVMValueRef) {
        let append = |_: &_| llvm!(LLVMAppendBasicBlockInContext(self.context, function, UNNAMED));
        let blocks = f.blocks.iter().map(append).collect();
        let mut body = FunctionBody { source: f, blocks, values: vec![ptr::null_mut(); f.values.len()] };
        for at in 0..f.parameters.len() {
            body.values[at] = llvm!(LLVMGetParam(function, at as u32));
        }
        let order = f.order();
        for (at, block) in order.iter().enumerate() {
            llvm!(LLVMPositionBuilderAtEnd(self.builder, body.blocks[block.at()]));
            for instruction in &f.blocks[block.at()] {
                let value = self.instruction(&mut body, instruction);
                if let Some(result) = instruction.result {
                    body.values[result.at()] = value;
                }
            }
            if loop_up_to(f, at, &order).is_some_and(|blocks| shares(f, blocks)) {
                self.keep_as_it_is(body.blocks[block.at()]);
            }
        }
        for instruction in order.iter().flat_map(|block| &f.blocks[block.at()]) {
            if let (SsaOp::Phi(from), Some(result)) = (&instruction.op, instruction.result) {
                for (from, value) in from.iter().zip(&instruction.operands) {
                    let (mut value, mut from) = (self.value(&mut body, *value), body.blocks[from.at()]);
                    llvm!(LLVMAddIncoming(body.values[result.at()], &mut value, &mut from, 1));
                }
            }
        }
        for (id, name) in &f.names {
            llvm!(LLVMSetValueName2(body.values[id.at()], name.as_ptr().cast(), name.len()));
        }
    }

    /// Disables unrolling of the loop whose back edge is at the end of a block.
    ///
    /// The schedule already unrolls loops over shared memory. NVIDIA's assembler would unroll them again and
    /// hoist the loads of several iterations, which fill the registers.
    fn keep_as_it_is(&self, end: LLVMBasicBlockRef) {
        let text = "llvm.loop.unroll.disable";
        llvm! {{
            // A first operand that refers to the node itself makes the node distinct.
            let itself = LLVMTemporaryMDNode(self.context, ptr::null_mut(), 0);
            let text = LLVMMDStringInContext2(self.context, text.as_ptr().cast(), text.len());
            let says = LLVMMDNodeInContext2(self.context, [text].as_mut_ptr(), 1);
            let node = LLVMMDNodeInContext2(self.context, [itself, says].as_mut_ptr(), 2);
            LLVMMetadataReplaceAllUsesWith(itself, node);
            let node = LLVMMetadataAsValue(self.context, node);
            LLVMSetMetadata(LLVMGetBasicBlockTerminator(end), metadata_kind(self.context, "llvm.loop"), node);
        }}
    }

    fn value(&self, body: &mut FunctionBody, id: Id) -> LLVMValueRef {
        let known = body.values[id.at()];
        if !known.is_null() {
            return known;
        }
        let value = &body.source.values[id.at()];
        let ty = self.ty(value.ty);
        let made = match &value.def {
            Def::Constant(VectorConstant { bits, undefined }) => {
                let lane = |(at, b): (usize, &u64)| match undefined >> at & 1 {
                    0 => self.scalar(value.ty.kind, *b),
                    _ => llvm!(LLVMGetUndef(self.kind(value.ty.kind))),
                };
                let mut lanes: Vec<LLVMValueRef> = bits.iter().enumerate().map(lane).collect();
                if value.ty.lanes == 1 {
                    lanes[0]
                } else {
                    llvm!(LLVMConstVector(lanes.as_mut_ptr(), lanes.len() as u32))
                }
            }
            Def::Undefined => llvm!(LLVMGetUndef(ty)),
            Def::Function(f) => self.functions[f.at()],
            Def::Global(at) => self.globals[*at],
            Def::Argument(_) | Def::Instruction => panic!("a value is given before it is used"),
        };
        body.values[id.at()] = made;
        made
    }

    fn scalar(&self, kind: LaneKind, bits: u64) -> LLVMValueRef {
        let ty = self.kind(kind);
        llvm!(match kind {
            LaneKind::F16 | LaneKind::Bf16 =>
                LLVMConstBitCast(LLVMConstInt(LLVMInt16TypeInContext(self.context), bits, 0), ty),
            LaneKind::F32 => LLVMConstReal(ty, f32::from_bits(bits as u32).into()),
            LaneKind::F64 => LLVMConstReal(ty, f64::from_bits(bits)),
            LaneKind::Pointer(_) => {
                assert_eq!(bits, 0, "the only constant address is none");
                LLVMConstNull(ty)
            }
            LaneKind::I1 | LaneKind::I8 | LaneKind::I16 | LaneKind::I32 | LaneKind::I64 => LLVMConstInt(ty, bits, 0),
        })
    }

    /// Mask of a shuffle.
    fn lanes(&self, mask: &[i32]) -> LLVMValueRef {
        let i32 = self.kind(LaneKind::I32);
        let lane = |lane: &i32| llvm!(if *lane < 0 { LLVMGetPoison(i32) } else { LLVMConstInt(i32, *lane as u64, 0) });
        let mut lanes: Vec<LLVMValueRef> = mask.iter().map(lane).collect();
        llvm!(LLVMConstVector(lanes.as_mut_ptr(), lanes.len() as u32))
    }

    fn instruction(&self, body: &mut FunctionBody, instruction: &Instruction) -> LLVMValueRef {
        let Instruction { op, operands, result, align } = instruction;
        let b = self.builder;
        let source = body.source;
        let result = result.map(|id| source.values[id.at()].ty);
        let ty = result.map(|ty| self.ty(ty)).unwrap_or(ptr::null_mut());
        if let SsaOp::Phi(_) = op {
            return llvm!(LLVMBuildPhi(b, ty, UNNAMED));
        }
        let of = |at: usize| source.values[operands[at].at()].ty;
        let mut x: Vec<LLVMValueRef> = operands.iter().map(|id| self.value(body, *id)).collect();
        if let Some(opcode) = binary(op) {
            return llvm!(LLVMBuildBinOp(b, opcode, x[0], x[1], UNNAMED));
        }
        if let Some(name) = intrinsic(op) {
            let pointer = |at: usize| self.ty(of(at));
            let (overloads, aligned) = match op {
                SsaOp::MaskedLoad | SsaOp::Gather => (vec![ty, pointer(0)], Some(0)),
                SsaOp::MaskedStore | SsaOp::Scatter => (vec![self.ty(of(0)), pointer(1)], Some(1)),
                SsaOp::Prefetch { for_write } => {
                    // Prefetches data into all caches.
                    let how = [u64::from(*for_write), 3, 1];
                    x.extend(how.map(|how| self.scalar(LaneKind::I32, how)));
                    (vec![pointer(0)], None)
                }
                SsaOp::ToInteger => (vec![ty, self.ty(of(0))], None),
                _ => (vec![ty], None),
            };
            let call = self.intrinsic(name, overloads, x);
            if let Some(at) = aligned {
                let attribute = self.attribute("align", u64::from(*align));
                llvm!(LLVMAddCallSiteAttribute(call, at + 1, attribute));
            }
            if let SsaOp::FMin | SsaOp::FMax = op {
                // Ordering signed zeros would take more instructions.
                llvm!(LLVMSetFastMathFlags(call, LLVMFastMathNoSignedZeros));
            }
            return call;
        }
        llvm!(match op {
            SsaOp::Variable(ty) => self.stack(self.ty(*ty), *align),
            SsaOp::SharedMemory(bytes) => self.shared_memory(source, *bytes as u64, *align),
            SsaOp::Coordinate(coordinate) => self.intrinsic(&self.coordinate(*coordinate), Vec::new(), x),
            SsaOp::Barrier => self.barrier(),
            SsaOp::Copy { bytes } => self.copy(*bytes, x),
            SsaOp::Wait(n) => {
                self.intrinsic("llvm.nvvm.cp.async.commit.group", Vec::new(), Vec::new());
                let n = self.scalar(LaneKind::I32, (*n).into());
                self.intrinsic("llvm.nvvm.cp.async.wait.group", Vec::new(), vec![n])
            }
            SsaOp::Dot4 { signed } => self.dot4(*signed, x, result.map_or(0, |ty| ty.lanes)),
            SsaOp::Dot2 => self.dot2(x, result.map_or(0, |ty| ty.lanes)),
            SsaOp::Dot4BySums => self.dot4_by_sums(&x, result.map_or(0, |ty| ty.lanes)),
            SsaOp::DotOfHalves => {
                let bits = 32 * result.map_or(0, |ty| ty.lanes);
                self.of_bits(&format!("llvm.x86.avx512bf16.dpbf16ps.{bits}"), Vec::new(), x)
            }
            SsaOp::Scale => {
                let ty = result.expect("it gives a number");
                let (kind, bits) = (if ty.kind == LaneKind::F32 { "ps" } else { "pd" }, 8 * ty.bytes());
                // All lanes, and the current rounding direction.
                let all = self.scalar(if ty.lanes > 8 { LaneKind::I16 } else { LaneKind::I8 }, (1 << ty.lanes) - 1);
                let given = [x[0], x[1], x[0], all];
                let current = (bits == 512).then(|| self.scalar(LaneKind::I32, 4));
                let name = format!("llvm.x86.avx512.mask.scalef.{kind}.{bits}");
                self.intrinsic(&name, Vec::new(), given.into_iter().chain(current).collect())
            }
            SsaOp::NearestBf16 => {
                let bits = 32 * of(0).lanes;
                let nearest = self.of_bits(&format!("llvm.x86.avx512bf16.cvtneps2bf16.{bits}"), Vec::new(), x);
                LLVMBuildBitCast(b, nearest, ty, UNNAMED)
            }
            SsaOp::PickBytes => self.pick_bytes(x),
            SsaOp::Tf32 => {
                let bits = self.intrinsic("llvm.nvvm.f2tf32.rna", Vec::new(), x);
                LLVMBuildBitCast(b, bits, ty, UNNAMED)
            }
            SsaOp::TileProduct(factors) => self.tile_product(*factors, x, ty),
            SsaOp::ProxyFence | SsaOp::GroupEnd => {
                let is_fence = matches!(op, SsaOp::ProxyFence);
                let text = if is_fence { "fence.proxy.async.shared::cta;" } else { "wgmma.commit_group.sync.aligned;" };
                self.assembly(text, "~{memory}", self.function_type(None, [].into_iter()), x)
            }
            SsaOp::GroupFence => self.on_sums("wgmma.fence.sync.aligned;", Vec::new(), x),
            SsaOp::GroupWait(n) => self.on_sums(&format!("wgmma.wait_group.sync.aligned {n};"), Vec::new(), x),
            SsaOp::GroupProduct { factors, across, begins } => {
                let sums = x.split_off(x.len() - result.map_or(0, |ty| ty.lanes));
                self.group_product(*factors, *across, *begins, (x, sums))
            }
            SsaOp::LoadTiles { transposed } => self.load_tiles(x, *transposed, result.map_or(0, |ty| ty.lanes), ty),
            SsaOp::Stack(bytes) => {
                let memory = self.stack(LLVMArrayType2(self.kind(LaneKind::I8), *bytes as u64), *align);
                // On some machines, the stack has its own address space.
                if LLVMTypeOf(memory) == ty { memory } else { LLVMBuildAddrSpaceCast(b, memory, ty, UNNAMED) }
            }
            SsaOp::Load { invariant } => {
                let v = LLVMBuildLoad2(b, ty, x[0], UNNAMED);
                LLVMSetAlignment(v, *align);
                if *invariant {
                    let node = LLVMMDNodeInContext2(self.context, ptr::null_mut(), 0);
                    LLVMSetMetadata(v, self.invariant, LLVMMetadataAsValue(self.context, node));
                }
                v
            }
            SsaOp::Store => {
                let v = LLVMBuildStore(b, x[0], x[1]);
                LLVMSetAlignment(v, *align);
                v
            }
            SsaOp::Element(element) => LLVMBuildGEP2(b, self.ty(*element), x[0], &mut x[1], 1, UNNAMED),
            SsaOp::Add => LLVMBuildNSWAdd(b, x[0], x[1], UNNAMED),
            SsaOp::Sub => LLVMBuildNSWSub(b, x[0], x[1], UNNAMED),
            SsaOp::Mul => LLVMBuildNSWMul(b, x[0], x[1], UNNAMED),
            SsaOp::Compare(how) => {
                let how = match how {
                    Compare::Equal => LLVMIntPredicate::LLVMIntEQ,
                    Compare::NotEqual => LLVMIntPredicate::LLVMIntNE,
                    Compare::Less => LLVMIntPredicate::LLVMIntSLT,
                    Compare::Greater => LLVMIntPredicate::LLVMIntSGT,
                };
                LLVMBuildICmp(b, how, x[0], x[1], UNNAMED)
            }
            SsaOp::FNeg => LLVMBuildFNeg(b, x[0], UNNAMED),
            SsaOp::FLess => LLVMBuildFCmp(b, LLVMRealPredicate::LLVMRealOLT, x[0], x[1], UNNAMED),
            SsaOp::Select => LLVMBuildSelect(b, x[0], x[1], x[2], UNNAMED),
            SsaOp::Truncate => LLVMBuildTrunc(b, x[0], ty, UNNAMED),
            SsaOp::ExtendSigned => LLVMBuildSExt(b, x[0], ty, UNNAMED),
            SsaOp::ExtendUnsigned => LLVMBuildZExt(b, x[0], ty, UNNAMED),
            SsaOp::ToReal => LLVMBuildSIToFP(b, x[0], ty, UNNAMED),
            SsaOp::TruncateSaturated => {
                let most = self.constant_lanes(of(0), result.expect("it gives an integer").kind);
                let least = self.intrinsic("llvm.umin", vec![LLVMTypeOf(x[0])], vec![x[0], most]);
                LLVMBuildTrunc(b, least, ty, UNNAMED)
            }
            SsaOp::PackSaturated { unsigned } => {
                let name = match (of(0).kind, unsigned) {
                    (LaneKind::I32, _) => "packssdw",
                    (_, false) => "packsswb",
                    (_, true) => "packuswb",
                };
                self.intrinsic(&format!("llvm.x86.avx512.{name}.512"), Vec::new(), x)
            }
            SsaOp::AddSaturated => self.intrinsic("llvm.sadd.sat", vec![ty], x),
            SsaOp::ToIntegerInRange => LLVMBuildFPToSI(b, x[0], ty, UNNAMED),
            SsaOp::ToIntegerOrLeast { nearest } => self.integer_or_least(*nearest, x[0], of(0).lanes),
            SsaOp::Convert => self.convert(x[0], of(0), result.expect("it gives a number")),
            SsaOp::Bitcast => LLVMBuildBitCast(b, x[0], ty, UNNAMED),
            SsaOp::Address => LLVMBuildPtrToInt(b, x[0], ty, UNNAMED),
            SsaOp::Splat => {
                let none = LLVMGetPoison(ty);
                let one = LLVMBuildInsertElement(b, none, x[0], self.scalar(LaneKind::I64, 0), UNNAMED);
                let lanes = vec![0; result.map_or(0, |ty| ty.lanes)];
                LLVMBuildShuffleVector(b, one, none, self.lanes(&lanes), UNNAMED)
            }
            SsaOp::Shuffle(mask) => LLVMBuildShuffleVector(b, x[0], x[1], self.lanes(mask), UNNAMED),
            SsaOp::Insert(lane) =>
                LLVMBuildInsertElement(b, x[0], x[1], self.scalar(LaneKind::I64, *lane as u64), UNNAMED),
            // Results of instructions with several results.
            SsaOp::Extract(lane) if LLVMGetTypeKind(LLVMTypeOf(x[0])) == LLVMTypeKind::LLVMStructTypeKind =>
                LLVMBuildExtractValue(b, x[0], *lane as u32, UNNAMED),
            SsaOp::Extract(lane) => LLVMBuildExtractElement(b, x[0], self.scalar(LaneKind::I64, *lane as u64), UNNAMED),
            SsaOp::Call => {
                let callee = x.pop().expect("a call has a callee");
                self.call(self.function_type(result, (0..x.len()).map(of)), callee, x)
            }
            // Empty inline assembly returns its operand.
            SsaOp::Opaque => self.assembly(
                "",
                if self.target.gpu.is_some() { "=l,0" } else { "=r,0" },
                self.function_type(result, [of(0)].into_iter()),
                x
            ),
            SsaOp::Assembly(a) => {
                let ty = self.function_type(result, (0..x.len()).map(of));
                self.assembly(&a.text, &a.constraints, ty, x)
            }
            SsaOp::Br(to) => LLVMBuildBr(b, body.blocks[to.at()]),
            SsaOp::CondBr(then, otherwise) =>
                LLVMBuildCondBr(b, x[0], body.blocks[then.at()], body.blocks[otherwise.at()]),
            SsaOp::Return => match x.first() {
                Some(v) => LLVMBuildRet(b, *v),
                None => LLVMBuildRetVoid(b),
            },
            other => unreachable!("{other:?} is printed above"),
        })
    }

    /// Allocates shared memory: static up to the GPU's default limit, else dynamic with the size given at the
    /// launch.
    fn shared_memory(&self, f: &Function, bytes: u64, align: u32) -> LLVMValueRef {
        let most = self.target.gpu.as_ref().map_or(u64::MAX, |gpu| gpu.shared_bytes);
        let is_fixed = bytes <= most;
        let ty = llvm!(LLVMArrayType2(self.kind(LaneKind::I8), if is_fixed { bytes } else { 0 }));
        let name = c_string(&format!("{}_shared", f.name));
        llvm! {{
            let memory = LLVMAddGlobalInAddressSpace(self.module, ty, name.as_ptr(), SHARED);
            if is_fixed {
                LLVMSetLinkage(memory, LLVMLinkage::LLVMInternalLinkage);
                LLVMSetInitializer(memory, LLVMGetPoison(ty));
            }
            LLVMSetAlignment(memory, align);
            memory
        }}
    }

    /// Accumulates dot products of four 8-bit integers per lane.
    fn dot4(&self, signed: [bool; 2], x: Vec<LLVMValueRef>, lanes: usize) -> LLVMValueRef {
        let [sums, a, b] = x[..] else { unreachable!("a dot product has three operands") };
        let is_mixed = signed[0] != signed[1];
        // Instructions of mixed signedness take the unsigned factor first.
        let (a, b) = if is_mixed && signed[0] { (b, a) } else { (a, b) };
        let bits = 32 * lanes;
        match self.target.arch {
            Arch::Aarch64 => {
                let name = if is_mixed { "usdot" } else { ["udot", "sdot"][usize::from(signed[0])] };
                let [of_sums, of_factors] = [(LaneKind::I32, lanes), (LaneKind::I8, 4 * lanes)]
                    .map(|(kind, n)| llvm!(LLVMVectorType(self.kind(kind), n as u32)));
                self.of_bits(&format!("llvm.aarch64.neon.{name}"), vec![of_sums, of_factors], vec![sums, a, b])
            }
            _ if is_mixed => self.of_bits(&format!("llvm.x86.avx512.vpdpbusd.{bits}"), Vec::new(), vec![sums, a, b]),
            _ => {
                let signs = ["uu", "ss"][usize::from(signed[0])];
                self.of_bits(&format!("llvm.x86.avx2.vpdpb{signs}d.{bits}"), Vec::new(), vec![sums, a, b])
            }
        }
    }

    /// Accumulates dot products of two signed 16-bit integers per lane, on x86-64.
    fn dot2(&self, x: Vec<LLVMValueRef>, lanes: usize) -> LLVMValueRef {
        let name = match lanes {
            16 => "avx512.pmaddw.d.512",
            8 => "avx2.pmadd.wd",
            _ => "sse2.pmadd.wd",
        };
        let products = self.of_bits(&format!("llvm.x86.{name}"), Vec::new(), x[1..].to_vec());
        llvm!(LLVMBuildAdd(self.builder, x[0], products, UNNAMED))
    }

    /// Accumulates dot products of four 8-bit integers per lane, through sums of two in 16 bits, on x86-64.
    fn dot4_by_sums(&self, x: &[LLVMValueRef], lanes: usize) -> LLVMValueRef {
        let name = match lanes {
            16 => "avx512.pmaddubs.w.512",
            8 => "avx2.pmadd.ub.sw",
            _ => "ssse3.pmadd.ub.sw.128",
        };
        let pairs = self.of_bits(&format!("llvm.x86.{name}"), Vec::new(), x[1..].to_vec());
        let mut ones = vec![self.scalar(LaneKind::I16, 1); 2 * lanes];
        let ones = llvm!(LLVMConstVector(ones.as_mut_ptr(), ones.len() as u32));
        self.dot2(vec![x[0], pairs, ones], lanes)
    }

    /// Converts f32 numbers to 32-bit integers, on x86-64.
    fn integer_or_least(&self, nearest: bool, x: LLVMValueRef, lanes: usize) -> LLVMValueRef {
        let how = if nearest { "" } else { "t" };
        match lanes {
            16 => {
                let other = llvm!(LLVMConstNull(LLVMVectorType(self.kind(LaneKind::I32), 16)));
                let [all, rounding] =
                    [(LaneKind::I16, 0xffff), (LaneKind::I32, 4)].map(|(kind, n)| self.scalar(kind, n));
                let name = format!("llvm.x86.avx512.mask.cvt{how}ps2dq.512");
                self.of_bits(&name, Vec::new(), vec![x, other, all, rounding])
            }
            8 => self.of_bits(&format!("llvm.x86.avx.cvt{how}.ps2dq.256"), Vec::new(), vec![x]),
            _ => self.of_bits(&format!("llvm.x86.sse2.cvt{how}ps2dq"), Vec::new(), vec![x]),
        }
    }

    /// Largest unsigned integer of a kind, in the lanes of a type.
    fn constant_lanes(&self, ty: Type, kind: LaneKind) -> LLVMValueRef {
        let most = self.scalar(ty.kind, u64::MAX >> (64 - 8 * kind.bytes()));
        let mut all = vec![most; ty.lanes];
        if ty.lanes == 1 { most } else { llvm!(LLVMConstVector(all.as_mut_ptr(), ty.lanes as u32)) }
    }

    /// Selects bytes of two vectors of 64 bytes, on x86-64 with AVX-512 VBMI.
    fn pick_bytes(&self, x: Vec<LLVMValueRef>) -> LLVMValueRef {
        let [indices, first, second] = x[..] else { unreachable!("two vectors are indexed") };
        let ty = llvm!(LLVMTypeOf(indices));
        let picked = self.of_bits("llvm.x86.avx512.vpermi2var.qi.512", Vec::new(), vec![first, indices, second]);
        llvm!(LLVMBuildBitCast(self.builder, picked, ty, UNNAMED))
    }

    /// Calls an LLVM intrinsic with operands bitcast to its parameter types.
    fn of_bits(&self, name: &str, overloads: Vec<LLVMTypeRef>, mut operands: Vec<LLVMValueRef>) -> LLVMValueRef {
        let f = self.own_function(name, overloads);
        for (at, x) in operands.iter_mut().enumerate() {
            *x = llvm!(LLVMBuildBitCast(self.builder, *x, LLVMTypeOf(LLVMGetParam(f, at as u32)), UNNAMED));
        }
        self.call(llvm!(LLVMGlobalGetValueType(f)), f, operands)
    }

    /// Generates a warp's load of tiles, as lanes of a vector.
    fn load_tiles(&self, x: Vec<LLVMValueRef>, transposed: bool, n: usize, ty: LLVMTypeRef) -> LLVMValueRef {
        let b = self.builder;
        let how = if transposed { ".trans" } else { "" };
        let name = format!("llvm.nvvm.ldmatrix.sync.aligned.m8n8.x{n}{how}.b16");
        let tiles = self.intrinsic(&name, vec![llvm!(LLVMTypeOf(x[0]))], x);
        let bits = llvm!(LLVMVectorType(self.kind(LaneKind::I32), n as u32));
        let all = (0..n as u32).fold(llvm!(LLVMGetPoison(bits)), |out, at| {
            let tile = llvm!(LLVMBuildExtractValue(b, tiles, at, UNNAMED));
            llvm!(LLVMBuildInsertElement(b, out, tile, self.scalar(LaneKind::I64, at.into()), UNNAMED))
        });
        llvm!(LLVMBuildBitCast(b, all, ty, UNNAMED))
    }

    /// Generates a warp's tile product: six factors as bits, then four sums.
    fn tile_product(&self, factors: LaneKind, mut x: Vec<LLVMValueRef>, ty: LLVMTypeRef) -> LLVMValueRef {
        let b = self.builder;
        let (name, register) = match factors {
            LaneKind::F16 => ("m16n8k16.row.col.f32.f32", llvm!(LLVMVectorType(self.kind(LaneKind::F16), 2))),
            LaneKind::Bf16 => ("m16n8k16.row.col.bf16", self.kind(LaneKind::I32)),
            _ => ("m16n8k8.row.col.tf32", self.kind(LaneKind::I32)),
        };
        for factor in &mut x[..6] {
            *factor = llvm!(LLVMBuildBitCast(b, *factor, register, UNNAMED));
        }
        let sums = self.intrinsic(&format!("llvm.nvvm.mma.{name}"), Vec::new(), x);
        (0..4).fold(llvm!(LLVMGetPoison(ty)), |out, at| {
            let sum = llvm!(LLVMBuildExtractValue(b, sums, at, UNNAMED));
            llvm!(LLVMBuildInsertElement(b, out, sum, self.scalar(LaneKind::I64, at.into()), UNNAMED))
        })
    }

    /// Generates a warpgroup product as inline assembly, as LLVM has no intrinsic for it.
    fn group_product(
        &self,
        factors: LaneKind,
        across: [bool; 2],
        begins: bool,
        (described, sums): (Vec<LLVMValueRef>, Vec<LLVMValueRef>),
    ) -> LLVMValueRef {
        let n = sums.len();
        let registers = |all: Range<usize>| all.map(|at| format!("${at}")).collect::<Vec<_>>().join(", ");
        let (list, columns, last) = (registers(0..n), 2 * n, n + described.len() - 1);
        let rows = if last == n + 1 { format!("${n}") } else { format!("{{{}}}", registers(n..last)) };
        let (shape, name) = match factors {
            LaneKind::F16 => ("k16", "f16"),
            LaneKind::Bf16 => ("k16", "bf16"),
            _ => ("k8", "tf32"),
        };
        // Flags: whether the product adds to the sums, no negation, and the layouts of 16-bit operands.
        let adds = u8::from(!begins);
        let [rows_across, columns_across] = across.map(u8::from);
        let how = if name == "tf32" { String::new() } else { format!(", {rows_across}, {columns_across}") };
        let text = format!(
            "wgmma.mma_async.sync.aligned.m64n{columns}{shape}.f32.{name}.{name} {{{list}}}, {rows}, ${last}, {adds}, 1, 1{how};"
        );
        self.on_sums(&text, described, sums)
    }

    /// Generates inline assembly that updates a thread's sums in place and has additional 32-bit and 64-bit
    /// operands.
    fn on_sums(&self, text: &str, others: Vec<LLVMValueRef>, sums: Vec<LLVMValueRef>) -> LLVMValueRef {
        let (n, float, short) = (sums.len(), self.kind(LaneKind::F32), self.kind(LaneKind::I32));
        let mut types: Vec<LLVMTypeRef> = others.iter().map(|x| llvm!(LLVMTypeOf(*x))).collect();
        let of = types.iter().map(|ty| if *ty == short { "r" } else { "l" }.to_owned());
        let parts = (0..n).map(|_| "=f".to_owned()).chain(of);
        let parts: Vec<String> = parts.chain((0..n).map(|at| at.to_string())).chain(["~{memory}".to_owned()]).collect();
        let mut results = vec![float; n];
        types.extend(&results);
        let ty = llvm! {{
            let all = LLVMStructTypeInContext(self.context, results.as_mut_ptr(), n as u32, 0);
            LLVMFunctionType(all, types.as_mut_ptr(), types.len() as u32, 0)
        }};
        self.assembly(text, &parts.join(","), ty, [others, sums].concat())
    }

    /// LLVM intrinsic of a thread coordinate.
    fn coordinate(&self, coordinate: Coordinate) -> String {
        let is_amd = self.target.arch == Arch::Gpu(GpuApi::AmdGpu);
        let (name, axis) = match (coordinate, is_amd) {
            (Coordinate::Block(axis), false) => ("nvvm.read.ptx.sreg.ctaid", axis),
            (Coordinate::Thread(axis), false) => ("nvvm.read.ptx.sreg.tid", axis),
            (Coordinate::Block(axis), true) => ("amdgcn.workgroup.id", axis),
            (Coordinate::Thread(axis), true) => ("amdgcn.workitem.id", axis),
        };
        format!("llvm.{name}.{}", ["x", "y", "z"][usize::from(axis)])
    }

    /// Generates a barrier of the block, which makes the threads' writes visible to each other.
    fn barrier(&self) -> LLVMValueRef {
        if self.target.arch != Arch::Gpu(GpuApi::AmdGpu) {
            let all = self.scalar(LaneKind::I32, 0);
            return self.intrinsic("llvm.nvvm.barrier.cta.sync.aligned.all", Vec::new(), vec![all]);
        }
        let scope = "workgroup";
        let scope = llvm!(LLVMGetSyncScopeID(self.context, scope.as_ptr().cast(), scope.len()));
        let fence = |ordering| llvm!(LLVMBuildFenceSyncScope(self.builder, ordering, scope, UNNAMED));
        fence(LLVMAtomicOrdering::LLVMAtomicOrderingRelease);
        self.intrinsic("llvm.amdgcn.s.barrier", Vec::new(), Vec::new());
        fence(LLVMAtomicOrdering::LLVMAtomicOrderingAcquire)
    }

    /// Issues an asynchronous copy to shared memory; 16-byte copies bypass the L1 cache.
    fn copy(&self, bytes: usize, x: Vec<LLVMValueRef>) -> LLVMValueRef {
        let cache = if bytes == 16 { "cg" } else { "ca" };
        let part = if x.len() > 2 { ".s" } else { "" };
        self.intrinsic(&format!("llvm.nvvm.cp.async.{cache}.shared.global.{bytes}{part}"), Vec::new(), x)
    }

    fn stack(&self, ty: LLVMTypeRef, align: u32) -> LLVMValueRef {
        llvm! {{
            let v = LLVMBuildAlloca(self.builder, ty, UNNAMED);
            LLVMSetAlignment(v, align);
            v
        }}
    }

    fn call(&self, ty: LLVMTypeRef, callee: LLVMValueRef, mut arguments: Vec<LLVMValueRef>) -> LLVMValueRef {
        let n = arguments.len() as u32;
        llvm!(LLVMBuildCall2(self.builder, ty, callee, arguments.as_mut_ptr(), n, UNNAMED))
    }

    /// Calls an LLVM intrinsic, overloaded for some types.
    fn intrinsic(&self, name: &str, overloads: Vec<LLVMTypeRef>, arguments: Vec<LLVMValueRef>) -> LLVMValueRef {
        let f = self.own_function(name, overloads);
        self.call(llvm!(LLVMGlobalGetValueType(f)), f, arguments)
    }

    /// Declares an LLVM intrinsic, overloaded for some types.
    fn own_function(&self, name: &str, mut overloads: Vec<LLVMTypeRef>) -> LLVMValueRef {
        llvm! {{
            let id = LLVMLookupIntrinsicID(name.as_ptr().cast(), name.len());
            assert!(id != 0, "LLVM has no intrinsic {name}");
            LLVMGetIntrinsicDeclaration(self.module, id, overloads.as_mut_ptr(), overloads.len())
        }}
    }

    /// Generates inline assembly with side effects. Threads execute it together (`convergent`), so that no
    /// copy of it moves to divergent code.
    fn assembly(&self, text: &str, constraints: &str, ty: LLVMTypeRef, arguments: Vec<LLVMValueRef>) -> LLVMValueRef {
        llvm! {{
            let assembly = LLVMGetInlineAsm(
                ty,
                text.as_ptr().cast(),
                text.len(),
                constraints.as_ptr().cast(),
                constraints.len(),
                1,
                0,
                llvm_sys::LLVMInlineAsmDialect::LLVMInlineAsmDialectATT,
                0,
            );
            let call = self.call(ty, assembly, arguments);
            let convergent = self.attribute("convergent", 0);
            LLVMAddCallSiteAttribute(call, llvm_sys::LLVMAttributeFunctionIndex, convergent);
            call
        }}
    }
}
