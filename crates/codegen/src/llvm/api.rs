//! A thin layer over LLVM's C API: one method an instruction, no ownership puzzles.
//!
//! LLVM's instructions take scalars and vectors alike, and so does this layer: a [`Value`] carries no static type.

use std::ffi::{CStr, CString};
use std::ptr;

use llvm_sys::core::*;
use llvm_sys::prelude::*;
use llvm_sys::{LLVMIntPredicate, LLVMLinkage, LLVMOpcode, LLVMRealPredicate, LLVMVisibility};

/// A value of the module being built: an instruction, argument, function or constant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Value(pub LLVMValueRef);

/// A type of the module's context.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Type(pub LLVMTypeRef);

/// A basic block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Block(pub LLVMBasicBlockRef);

/// A function attribute or parameter attribute.
#[derive(Clone, Copy)]
pub struct Attribute(LLVMAttributeRef);

/// Integer comparisons in use.
pub use LLVMIntPredicate::{LLVMIntEQ as INT_EQ, LLVMIntNE as INT_NE, LLVMIntSGT as INT_GT, LLVMIntSLT as INT_LT};

/// The unnamed name.
const UNNAMED: *const libc::c_char = c"".as_ptr();

/// Calls a function of LLVM's C API.
macro_rules! llvm {
    ($($call:tt)*) => {
        // SAFETY: every handle passed comes from this module's own context, which lives as long as the `Module`;
        // values are used only in the function they belong to, and arrays are passed with their own lengths.
        unsafe { $($call)* }
    };
}

/// A context with one module and the place where the next instruction goes.
pub struct Module {
    context: LLVMContextRef,
    module: LLVMModuleRef,
    builder: LLVMBuilderRef,
    /// `ptr`
    pub ptr: Type,
    /// `i64`
    pub i64: Type,
    /// `i32`
    pub i32: Type,
    /// `i8`
    pub i8: Type,
    /// `i1`
    pub i1: Type,
    /// `float`
    pub f32: Type,
    /// `double`
    pub f64: Type,
    /// `void`
    pub void: Type,
}

impl Drop for Module {
    fn drop(&mut self) {
        llvm! {{
            LLVMDisposeBuilder(self.builder);
            LLVMDisposeModule(self.module);
            LLVMContextDispose(self.context);
        }}
    }
}

impl Module {
    /// An empty module. Value names are kept only where somebody will read them.
    pub fn new(name: &str, keep_names: bool) -> Module {
        let name = c_string(name);
        // SAFETY: the context is fresh, and the types, the module and the builder are all made in it.
        unsafe {
            let context = LLVMContextCreate();
            LLVMContextSetDiscardValueNames(context, i32::from(!keep_names));
            Module {
                context,
                module: LLVMModuleCreateWithNameInContext(name.as_ptr(), context),
                builder: LLVMCreateBuilderInContext(context),
                ptr: Type(LLVMPointerTypeInContext(context, 0)),
                i64: Type(LLVMInt64TypeInContext(context)),
                i32: Type(LLVMInt32TypeInContext(context)),
                i8: Type(LLVMInt8TypeInContext(context)),
                i1: Type(LLVMInt1TypeInContext(context)),
                f32: Type(LLVMFloatTypeInContext(context)),
                f64: Type(LLVMDoubleTypeInContext(context)),
                void: Type(LLVMVoidTypeInContext(context)),
            }
        }
    }

    /// The module for calls outside this layer.
    pub fn raw(&self) -> LLVMModuleRef {
        self.module
    }

    /// The module as text.
    pub fn print(&self) -> String {
        llvm! {{
            let text = LLVMPrintModuleToString(self.module);
            let out = CStr::from_ptr(text).to_string_lossy().into_owned();
            LLVMDisposeMessage(text);
            out
        }}
    }

    // Types and constants.

    /// `<n x element>`, or the element type itself for one lane.
    pub fn vector(&self, element: Type, n: usize) -> Type {
        if n == 1 { element } else { llvm!(Type(LLVMVectorType(element.0, n as u32))) }
    }

    /// `[n x element]`
    pub fn array(&self, element: Type, n: u64) -> Type {
        llvm!(Type(LLVMArrayType2(element.0, n)))
    }

    /// The type of a value.
    pub fn type_of(&self, v: Value) -> Type {
        llvm!(Type(LLVMTypeOf(v.0)))
    }

    /// The number of lanes of a vector type; 1 for a scalar.
    pub fn n_lanes(&self, ty: Type) -> usize {
        if self.element_of(ty) == ty { 1 } else { llvm!(LLVMGetVectorSize(ty.0) as usize) }
    }

    /// The type of a vector's lanes; a scalar's own.
    pub fn element_of(&self, ty: Type) -> Type {
        llvm! {{
            match LLVMGetTypeKind(ty.0) {
                llvm_sys::LLVMTypeKind::LLVMVectorTypeKind => Type(LLVMGetElementType(ty.0)),
                _ => ty,
            }
        }}
    }

    /// A 64-bit integer.
    pub fn int(&self, v: i64) -> Value {
        llvm!(Value(LLVMConstInt(self.i64.0, v as u64, 1)))
    }

    /// A 32-bit integer.
    pub fn int32(&self, v: i32) -> Value {
        llvm!(Value(LLVMConstInt(self.i32.0, v as u64, 1)))
    }

    /// An integer of a type.
    pub fn integer(&self, ty: Type, v: i64) -> Value {
        llvm!(Value(LLVMConstInt(ty.0, v as u64, 1)))
    }

    /// A truth value.
    pub fn bool(&self, v: bool) -> Value {
        llvm!(Value(LLVMConstInt(self.i1.0, u64::from(v), 0)))
    }

    /// The truth of a constant condition.
    pub fn as_const_bool(&self, v: Value) -> Option<bool> {
        llvm!((!LLVMIsAConstantInt(v.0).is_null()).then(|| LLVMConstIntGetZExtValue(v.0) != 0))
    }

    /// A floating-point number.
    pub fn real(&self, ty: Type, v: f64) -> Value {
        llvm!(Value(LLVMConstReal(ty.0, v)))
    }

    /// An undefined value.
    pub fn undef(&self, ty: Type) -> Value {
        llvm!(Value(LLVMGetUndef(ty.0)))
    }

    /// Zero of any type.
    pub fn zero(&self, ty: Type) -> Value {
        llvm!(Value(LLVMConstNull(ty.0)))
    }

    /// A constant vector.
    pub fn const_vector(&self, lanes: &[Value]) -> Value {
        let mut lanes: Vec<LLVMValueRef> = lanes.iter().map(|v| v.0).collect();
        llvm!(Value(LLVMConstVector(lanes.as_mut_ptr(), lanes.len() as u32)))
    }

    // Functions.

    /// Adds a function.
    pub fn function(&self, name: &str, result: Type, parameters: &[Type], internal: bool) -> Value {
        let name = c_string(name);
        llvm! {{
            let f = LLVMAddFunction(self.module, name.as_ptr(), self.function_type(result, parameters).0);
            if internal {
                LLVMSetLinkage(f, LLVMLinkage::LLVMInternalLinkage);
            }
            Value(f)
        }}
    }

    /// Hides a function or variable from other objects.
    pub fn make_internal(&self, global: Value) {
        llvm!(LLVMSetLinkage(global.0, LLVMLinkage::LLVMInternalLinkage))
    }

    /// Lets other objects see a function, but not put one of theirs in its place.
    pub fn make_protected(&self, function: Value) {
        llvm!(LLVMSetVisibility(function.0, LLVMVisibility::LLVMProtectedVisibility))
    }

    /// Adds a variable of this object's own that starts as zero.
    pub fn variable(&self, name: &str, ty: Type) -> Value {
        let name = c_string(name);
        let variable = llvm!(Value(LLVMAddGlobal(self.module, ty.0, name.as_ptr())));
        self.make_internal(variable);
        llvm!(LLVMSetInitializer(variable.0, self.zero(ty).0));
        variable
    }

    /// The type of a function.
    pub fn function_type(&self, result: Type, parameters: &[Type]) -> Type {
        let mut types: Vec<LLVMTypeRef> = parameters.iter().map(|t| t.0).collect();
        llvm!(Type(LLVMFunctionType(result.0, types.as_mut_ptr(), types.len() as u32, 0)))
    }

    /// The function of a name, declared where it is not yet.
    pub fn declare(&self, name: &str, result: Type, parameters: &[Type]) -> Value {
        let c_name = c_string(name);
        let known = llvm!(LLVMGetNamedFunction(self.module, c_name.as_ptr()));
        if known.is_null() { self.function(name, result, parameters, false) } else { Value(known) }
    }

    /// A parameter of a function.
    pub fn parameter(&self, function: Value, at: usize) -> Value {
        llvm!(Value(LLVMGetParam(function.0, at as u32)))
    }

    /// Names a value for readers of the module's text.
    pub fn name(&self, v: Value, name: &str) {
        llvm!(LLVMSetValueName2(v.0, name.as_ptr().cast(), name.len()))
    }

    /// An attribute known to LLVM by name.
    pub fn attribute(&self, name: &str, value: u64) -> Attribute {
        llvm! {{
            let kind = LLVMGetEnumAttributeKindForName(name.as_ptr().cast(), name.len());
            assert!(kind != 0, "LLVM has no attribute {name}");
            Attribute(LLVMCreateEnumAttribute(self.context, kind, value))
        }}
    }

    /// A target-dependent attribute.
    pub fn string_attribute(&self, name: &str, value: &str) -> Attribute {
        llvm!(Attribute(LLVMCreateStringAttribute(
            self.context,
            name.as_ptr().cast(),
            name.len() as u32,
            value.as_ptr().cast(),
            value.len() as u32
        )))
    }

    /// Attaches an attribute to a function.
    pub fn add_attribute(&self, function: Value, attribute: Attribute) {
        llvm!(LLVMAddAttributeAtIndex(function.0, llvm_sys::LLVMAttributeFunctionIndex, attribute.0))
    }

    /// Attaches an attribute to a parameter of a function.
    pub fn add_parameter_attribute(&self, function: Value, at: usize, attribute: Attribute) {
        llvm!(LLVMAddAttributeAtIndex(function.0, at as u32 + 1, attribute.0))
    }

    // Blocks and positions.

    /// Adds a block at the end of a function.
    pub fn block(&self, function: Value) -> Block {
        llvm!(Block(LLVMAppendBasicBlockInContext(self.context, function.0, UNNAMED)))
    }

    /// The block that is being written.
    pub fn current_block(&self) -> Block {
        llvm!(Block(LLVMGetInsertBlock(self.builder)))
    }

    /// Goes on at the end of a block.
    pub fn position_at_end(&self, block: Block) {
        llvm!(LLVMPositionBuilderAtEnd(self.builder, block.0))
    }

    /// Goes on before an instruction.
    pub fn position_before(&self, instruction: Value) {
        llvm!(LLVMPositionBuilderBefore(self.builder, instruction.0))
    }

    /// The first instruction of a block.
    pub fn first_instruction(&self, block: Block) -> Option<Value> {
        let first = llvm!(LLVMGetFirstInstruction(block.0));
        (!first.is_null()).then_some(Value(first))
    }

    /// An instruction without effect, as a mark to insert before; [`Module::erase`] takes it away.
    pub fn mark(&self) -> Value {
        llvm!(Value(LLVMBuildFreeze(self.builder, LLVMGetUndef(self.i1.0), UNNAMED)))
    }

    /// Removes an instruction that nothing uses.
    pub fn erase(&self, instruction: Value) {
        llvm!(LLVMInstructionEraseFromParent(instruction.0))
    }

    /// Goes to a block.
    pub fn br(&self, to: Block) {
        llvm!(LLVMBuildBr(self.builder, to.0));
    }

    /// Goes to one of two blocks.
    pub fn cond_br(&self, cond: Value, then: Block, otherwise: Block) {
        llvm!(LLVMBuildCondBr(self.builder, cond.0, then.0, otherwise.0));
    }

    /// Leaves the function.
    pub fn ret(&self) {
        llvm!(LLVMBuildRetVoid(self.builder));
    }

    /// Leaves the function with a value.
    pub fn ret_value(&self, v: Value) {
        llvm!(LLVMBuildRet(self.builder, v.0));
    }

    /// A value that depends on where control came from.
    pub fn phi(&self, ty: Type) -> Value {
        llvm!(Value(LLVMBuildPhi(self.builder, ty.0, UNNAMED)))
    }

    /// Gives a phi its value on coming from a block.
    pub fn add_incoming(&self, phi: Value, value: Value, from: Block) {
        let (mut value, mut from) = (value.0, from.0);
        llvm!(LLVMAddIncoming(phi.0, &mut value, &mut from, 1))
    }

    // Memory.

    /// Stack memory with an alignment in bytes.
    pub fn alloca(&self, ty: Type, align: u32) -> Value {
        llvm! {{
            let a = LLVMBuildAlloca(self.builder, ty.0, UNNAMED);
            LLVMSetAlignment(a, align);
            Value(a)
        }}
    }

    /// Reads memory.
    pub fn load(&self, ty: Type, from: Value, align: u32) -> Value {
        llvm! {{
            let v = LLVMBuildLoad2(self.builder, ty.0, from.0, UNNAMED);
            LLVMSetAlignment(v, align);
            Value(v)
        }}
    }

    /// Writes memory.
    pub fn store(&self, value: Value, to: Value, align: u32) -> Value {
        llvm! {{
            let s = LLVMBuildStore(self.builder, value.0, to.0);
            LLVMSetAlignment(s, align);
            Value(s)
        }}
    }

    /// Forbids to optimise a load or store away.
    pub fn set_volatile(&self, access: Value) {
        llvm!(LLVMSetVolatile(access.0, 1))
    }

    /// A metadata kind by name.
    pub fn metadata_kind(&self, name: &str) -> u32 {
        llvm!(LLVMGetMDKindIDInContext(self.context, name.as_ptr().cast(), name.len() as u32))
    }

    /// Attaches metadata to an instruction.
    pub fn set_metadata(&self, instruction: Value, kind: u32, node: Value) {
        llvm!(LLVMSetMetadata(instruction.0, kind, node.0))
    }

    /// A metadata node without parts.
    pub fn empty_metadata(&self) -> Value {
        llvm! {{
            let node = LLVMMDNodeInContext2(self.context, ptr::null_mut(), 0);
            Value(LLVMMetadataAsValue(self.context, node))
        }}
    }

    /// The address of element `index` from `base`.
    pub fn element(&self, element: Type, base: Value, index: Value) -> Value {
        let mut index = index.0;
        llvm!(Value(LLVMBuildGEP2(self.builder, element.0, base.0, &mut index, 1, UNNAMED)))
    }

    // Arithmetic.

    /// Integer `a + b`
    pub fn add(&self, a: Value, b: Value) -> Value {
        llvm!(Value(LLVMBuildNSWAdd(self.builder, a.0, b.0, UNNAMED)))
    }

    /// Integer `a − b`
    pub fn sub(&self, a: Value, b: Value) -> Value {
        llvm!(Value(LLVMBuildNSWSub(self.builder, a.0, b.0, UNNAMED)))
    }

    /// Integer `a · b`
    pub fn mul(&self, a: Value, b: Value) -> Value {
        llvm!(Value(LLVMBuildNSWMul(self.builder, a.0, b.0, UNNAMED)))
    }

    /// A two-operand instruction by opcode.
    pub fn binary(&self, opcode: LLVMOpcode, a: Value, b: Value) -> Value {
        llvm!(Value(LLVMBuildBinOp(self.builder, opcode, a.0, b.0, UNNAMED)))
    }

    /// Floating-point negation.
    pub fn fneg(&self, x: Value) -> Value {
        llvm!(Value(LLVMBuildFNeg(self.builder, x.0, UNNAMED)))
    }

    /// Integer comparison.
    pub fn icmp(&self, how: LLVMIntPredicate, a: Value, b: Value) -> Value {
        llvm!(Value(LLVMBuildICmp(self.builder, how, a.0, b.0, UNNAMED)))
    }

    /// `a < b` on floating-point numbers, false where one is NaN.
    pub fn fless(&self, a: Value, b: Value) -> Value {
        llvm!(Value(LLVMBuildFCmp(self.builder, LLVMRealPredicate::LLVMRealOLT, a.0, b.0, UNNAMED)))
    }

    /// `a` where the condition holds, else `b`.
    pub fn select(&self, cond: Value, a: Value, b: Value) -> Value {
        llvm!(Value(LLVMBuildSelect(self.builder, cond.0, a.0, b.0, UNNAMED)))
    }

    /// Logical complement.
    pub fn not(&self, x: Value) -> Value {
        llvm!(Value(LLVMBuildNot(self.builder, x.0, UNNAMED)))
    }

    /// A signed integer as floating-point number.
    pub fn int_to_real(&self, x: Value, ty: Type) -> Value {
        llvm!(Value(LLVMBuildSIToFP(self.builder, x.0, ty.0, UNNAMED)))
    }

    /// A pointer as a number.
    pub fn address(&self, pointer: Value) -> Value {
        llvm!(Value(LLVMBuildPtrToInt(self.builder, pointer.0, self.i64.0, UNNAMED)))
    }

    /// The low bits of an integer.
    pub fn truncate(&self, x: Value, ty: Type) -> Value {
        llvm!(Value(LLVMBuildTrunc(self.builder, x.0, ty.0, UNNAMED)))
    }

    /// The same bits as another type.
    pub fn bitcast(&self, x: Value, ty: Type) -> Value {
        llvm!(Value(LLVMBuildBitCast(self.builder, x.0, ty.0, UNNAMED)))
    }

    /// A floating-point number in another width.
    pub fn real_to_real(&self, x: Value, ty: Type, wider: bool) -> Value {
        llvm! {{
            Value(if wider {
                LLVMBuildFPExt(self.builder, x.0, ty.0, UNNAMED)
            } else {
                LLVMBuildFPTrunc(self.builder, x.0, ty.0, UNNAMED)
            })
        }}
    }

    // Vectors.

    /// One lane.
    pub fn extract(&self, v: Value, lane: usize) -> Value {
        let lane = self.int(lane as i64);
        llvm!(Value(LLVMBuildExtractElement(self.builder, v.0, lane.0, UNNAMED)))
    }

    /// The vector with one lane replaced.
    pub fn insert(&self, v: Value, x: Value, lane: usize) -> Value {
        let lane = self.int(lane as i64);
        llvm!(Value(LLVMBuildInsertElement(self.builder, v.0, x.0, lane.0, UNNAMED)))
    }

    /// Picks lanes of two vectors laid side by side; `None` lanes are undefined.
    pub fn shuffle(&self, a: Value, b: Value, mask: &[Option<usize>]) -> Value {
        let mut lanes: Vec<LLVMValueRef> = mask
            .iter()
            .map(|lane| match lane {
                Some(l) => self.int32(*l as i32).0,
                None => llvm!(LLVMGetPoison(self.i32.0)),
            })
            .collect();
        llvm! {{
            let mask = LLVMConstVector(lanes.as_mut_ptr(), lanes.len() as u32);
            Value(LLVMBuildShuffleVector(self.builder, a.0, b.0, mask, UNNAMED))
        }}
    }

    /// A scalar in every lane.
    pub fn splat(&self, x: Value, n: usize) -> Value {
        if n == 1 {
            return x;
        }
        llvm! {{
            if LLVMIsConstant(x.0) != 0 {
                let mut lanes = vec![x.0; n];
                return Value(LLVMConstVector(lanes.as_mut_ptr(), n as u32));
            }
        }}
        let ty = self.vector(self.type_of(x), n);
        let poison = llvm!(Value(LLVMGetPoison(ty.0)));
        let one = self.insert(poison, x, 0);
        let zeros = self.zero(self.vector(self.i32, n));
        llvm!(Value(LLVMBuildShuffleVector(self.builder, one.0, poison.0, zeros.0, UNNAMED)))
    }

    // Calls.

    /// Calls a function.
    pub fn call(&self, function: Value, result: Type, parameters: &[Type], arguments: &[Value]) -> Value {
        let ty = self.function_type(result, parameters);
        self.call_pointer(ty, function, arguments)
    }

    /// Calls through a pointer.
    pub fn call_pointer(&self, ty: Type, function: Value, arguments: &[Value]) -> Value {
        let mut arguments: Vec<LLVMValueRef> = arguments.iter().map(|v| v.0).collect();
        llvm!(Value(LLVMBuildCall2(
            self.builder,
            ty.0,
            function.0,
            arguments.as_mut_ptr(),
            arguments.len() as u32,
            UNNAMED
        )))
    }

    /// The same pointer, where LLVM does not know that it is: an empty instruction that gives it back.
    pub fn opaque(&self, pointer: Value) -> Value {
        self.assembly("", "=r,0", self.ptr, &[self.ptr], &[pointer])
    }

    /// Instructions in AT&T's syntax, with effects that LLVM does not know.
    pub fn assembly(
        &self,
        text: &str,
        constraints: &str,
        result: Type,
        parameters: &[Type],
        arguments: &[Value],
    ) -> Value {
        llvm! {{
            let ty = self.function_type(result, parameters);
            let assembly = LLVMGetInlineAsm(
                ty.0,
                text.as_ptr().cast(),
                text.len(),
                constraints.as_ptr().cast(),
                constraints.len(),
                1,
                0,
                llvm_sys::LLVMInlineAsmDialect::LLVMInlineAsmDialectATT,
                0,
            );
            self.call_pointer(ty, Value(assembly), arguments)
        }}
    }

    /// Calls one of LLVM's own functions, overloaded for some types.
    pub fn intrinsic(&self, name: &str, overloads: &[Type], arguments: &[Value]) -> Value {
        let mut types: Vec<LLVMTypeRef> = overloads.iter().map(|t| t.0).collect();
        llvm! {{
            let id = LLVMLookupIntrinsicID(name.as_ptr().cast(), name.len());
            assert!(id != 0, "LLVM has no intrinsic {name}");
            let f = LLVMGetIntrinsicDeclaration(self.module, id, types.as_mut_ptr(), types.len());
            let ty = LLVMGlobalGetValueType(f);
            self.call_pointer(Type(ty), Value(f), arguments)
        }}
    }

    /// Says how far an argument of a call is aligned.
    fn align_argument(&self, call: Value, at: usize, align: u32) {
        let attribute = self.attribute("align", u64::from(align));
        llvm!(LLVMAddCallSiteAttribute(call.0, at as u32 + 1, attribute.0))
    }

    /// Reads the lanes in a mask; the others are `otherwise`.
    pub fn masked_load(&self, ty: Type, from: Value, align: u32, mask: Value, otherwise: Value) -> Value {
        let v = self.intrinsic("llvm.masked.load", &[ty, self.ptr], &[from, mask, otherwise]);
        self.align_argument(v, 0, align);
        v
    }

    /// Writes the lanes in a mask.
    pub fn masked_store(&self, ty: Type, value: Value, to: Value, align: u32, mask: Value) {
        let call = self.intrinsic("llvm.masked.store", &[ty, self.ptr], &[value, to, mask]);
        self.align_argument(call, 1, align);
    }

    /// Reads each lane in a mask from its own address; the others are `otherwise`.
    pub fn masked_gather(
        &self,
        ty: Type,
        pointer_type: Type,
        from: Value,
        align: u32,
        mask: Value,
        otherwise: Value,
    ) -> Value {
        let v = self.intrinsic("llvm.masked.gather", &[ty, pointer_type], &[from, mask, otherwise]);
        self.align_argument(v, 0, align);
        v
    }

    /// Writes each lane in a mask to its own address.
    pub fn masked_scatter(&self, ty: Type, pointer_type: Type, value: Value, to: Value, align: u32, mask: Value) {
        let call = self.intrinsic("llvm.masked.scatter", &[ty, pointer_type], &[value, to, mask]);
        self.align_argument(call, 1, align);
    }

    /// Checks the module.
    ///
    /// # Errors
    /// LLVM's description of what is wrong.
    pub fn verify(&self) -> Result<(), String> {
        let mut message = ptr::null_mut();
        llvm! {{
            let broken = llvm_sys::analysis::LLVMVerifyModule(
                self.module,
                llvm_sys::analysis::LLVMVerifierFailureAction::LLVMReturnStatusAction,
                &mut message,
            );
            let text = CStr::from_ptr(message).to_string_lossy().into_owned();
            LLVMDisposeMessage(message);
            if broken != 0 { Err(text) } else { Ok(()) }
        }}
    }
}

/// A C string; interior zero bytes, which no name here has, end it early.
pub fn c_string(text: &str) -> CString {
    CString::new(text.split('\0').next().unwrap_or_default()).expect("cut at the first zero byte")
}
