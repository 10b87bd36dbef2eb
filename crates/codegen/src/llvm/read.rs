//! Reads the functions of a module, for a back end of our own.

use llvm_sys::core::*;
use llvm_sys::prelude::*;
use llvm_sys::{LLVMIntPredicate, LLVMLinkage, LLVMOpcode, LLVMTypeKind, LLVMValueKind};

use super::api::Module;
use super::map::Map;
use crate::ssa::{Compare, Def, Function, Id, Instruction, Kind, Op, Type, Value};

/// Where a function that a module does not define is.
type Outside<'m> = &'m dyn Fn(&str) -> Option<usize>;

/// The functions that a module defines, given where others are; `Err` names what there is no word for.
pub fn functions(module: &Module, outside: Outside) -> Result<Vec<Function>, String> {
    let mut defined = Vec::new();
    // SAFETY: walks the functions of a module that is alive.
    unsafe {
        let mut at = LLVMGetFirstFunction(module.raw());
        while !at.is_null() {
            if LLVMCountBasicBlocks(at) > 0 {
                defined.push(at);
            }
            at = LLVMGetNextFunction(at);
        }
    }
    let numbers: Map<usize, usize> = defined.iter().enumerate().map(|(i, f)| (*f as usize, i)).collect();
    let invariant = module.metadata_kind("invariant.load");
    defined.iter().map(|f| Reader { invariant, ..Reader::new(*f, &numbers, outside) }.function()).collect()
}

struct Reader<'m> {
    source: LLVMValueRef,
    /// The module's functions.
    numbers: &'m Map<usize, usize>,
    outside: Outside<'m>,
    invariant: u32,
    ids: Map<usize, Id>,
    blocks: Map<usize, usize>,
    out: Function,
}

fn name_of(value: LLVMValueRef) -> String {
    let mut len = 0;
    // SAFETY: LLVM gives the name's start and length, which live as long as the value.
    unsafe {
        let start = LLVMGetValueName2(value, &mut len);
        String::from_utf8_lossy(std::slice::from_raw_parts(start.cast::<u8>(), len)).into_owned()
    }
}

/// The type of a value or variable; `None` where there is no word for it.
fn type_of(ty: LLVMTypeRef) -> Option<Type> {
    // SAFETY: only looks at a type of a living context.
    unsafe {
        let (element, lanes) = match LLVMGetTypeKind(ty) {
            LLVMTypeKind::LLVMVectorTypeKind => (LLVMGetElementType(ty), LLVMGetVectorSize(ty) as usize),
            _ => (ty, 1),
        };
        let kind = match LLVMGetTypeKind(element) {
            LLVMTypeKind::LLVMFloatTypeKind => Kind::F32,
            LLVMTypeKind::LLVMDoubleTypeKind => Kind::F64,
            LLVMTypeKind::LLVMPointerTypeKind => Kind::I64,
            LLVMTypeKind::LLVMIntegerTypeKind => match LLVMGetIntTypeWidth(element) {
                1 => Kind::I1,
                32 => Kind::I32,
                64 => Kind::I64,
                _ => return None,
            },
            _ => return None,
        };
        Some(Type { kind, lanes })
    }
}

/// Bytes of an element or array type.
fn bytes_of(ty: LLVMTypeRef) -> Option<usize> {
    // SAFETY: as for `type_of`.
    unsafe {
        match LLVMGetTypeKind(ty) {
            LLVMTypeKind::LLVMArrayTypeKind => {
                Some(bytes_of(LLVMGetElementType(ty))? * LLVMGetArrayLength2(ty) as usize)
            }
            LLVMTypeKind::LLVMIntegerTypeKind if LLVMGetIntTypeWidth(ty) == 8 => Some(1),
            _ => type_of(ty).map(Type::bytes),
        }
    }
}

impl<'m> Reader<'m> {
    fn new(source: LLVMValueRef, numbers: &'m Map<usize, usize>, outside: Outside<'m>) -> Reader<'m> {
        let (ids, blocks) = (Map::default(), Map::default());
        Reader { source, numbers, outside, invariant: 0, ids, blocks, out: Function::default() }
    }

    fn function(mut self) -> Result<Function, String> {
        // SAFETY: walks the blocks and instructions of a function that is alive.
        unsafe {
            self.out.name = name_of(self.source);
            self.out.exported = LLVMGetLinkage(self.source) == LLVMLinkage::LLVMExternalLinkage;
            for at in 0..LLVMCountParams(self.source) {
                let parameter = LLVMGetParam(self.source, at);
                let id = self.new_value(parameter, Def::Argument(at as usize))?;
                self.ids.insert(parameter as usize, id);
            }
            let mut all = Vec::new();
            let mut block = LLVMGetFirstBasicBlock(self.source);
            while !block.is_null() {
                self.blocks.insert(block as usize, all.len());
                all.push(block);
                block = LLVMGetNextBasicBlock(block);
            }
            // Phis refer to what comes later.
            for block in &all {
                let mut at = LLVMGetFirstInstruction(*block);
                while !at.is_null() {
                    if LLVMGetTypeKind(LLVMTypeOf(at)) != LLVMTypeKind::LLVMVoidTypeKind {
                        let id = self.new_value(at, Def::Instruction)?;
                        self.ids.insert(at as usize, id);
                    }
                    at = LLVMGetNextInstruction(at);
                }
            }
            for block in all {
                let mut instructions = Vec::new();
                let mut at = LLVMGetFirstInstruction(block);
                while !at.is_null() {
                    let (op, operands) = self.instruction(at)?;
                    let result = self.ids.get(&(at as usize)).copied();
                    instructions.push(Instruction { op, operands, result });
                    at = LLVMGetNextInstruction(at);
                }
                self.out.blocks.push(instructions);
            }
        }
        Ok(self.out)
    }

    fn new_value(&mut self, value: LLVMValueRef, def: Def) -> Result<Id, String> {
        // SAFETY: the value is alive.
        let ty = type_of(unsafe { LLVMTypeOf(value) }).ok_or("type")?;
        self.out.values.push(Value { ty, def });
        Ok(self.out.values.len() as Id - 1)
    }

    fn operand(&mut self, value: LLVMValueRef) -> Result<Id, String> {
        if let Some(id) = self.ids.get(&(value as usize)) {
            return Ok(*id);
        }
        let def = self.constant(value)?;
        let id = self.new_value(value, def)?;
        self.ids.insert(value as usize, id);
        Ok(id)
    }

    fn constant(&self, value: LLVMValueRef) -> Result<Def, String> {
        // SAFETY: the value is a constant of a living module.
        unsafe {
            Ok(match LLVMGetValueKind(value) {
                LLVMValueKind::LLVMFunctionValueKind => match self.numbers.get(&(value as usize)) {
                    Some(number) => Def::Function(*number),
                    None => Def::Outside((self.outside)(&name_of(value)).ok_or("an unknown function")?),
                },
                LLVMValueKind::LLVMUndefValueValueKind | LLVMValueKind::LLVMPoisonValueKind => Def::Undefined,
                _ => {
                    let ty = type_of(LLVMTypeOf(value)).ok_or("type")?;
                    let lanes = (0..ty.lanes).map(|lane| {
                        let lane = if ty.lanes == 1 { value } else { LLVMGetAggregateElement(value, lane as u32) };
                        bits(lane, ty.kind)
                    });
                    Def::Constant(lanes.collect::<Option<_>>().ok_or("constant")?)
                }
            })
        }
    }

    fn instruction(&mut self, at: LLVMValueRef) -> Result<(Op, Vec<Id>), String> {
        use LLVMOpcode::*;
        // SAFETY: looks at an instruction that is alive, each of its parts by the words for its opcode.
        unsafe {
            let opcode = LLVMGetInstructionOpcode(at);
            let n = LLVMGetNumOperands(at) as u32;
            let block = |s: &Self, block: LLVMBasicBlockRef| s.blocks[&(block as usize)];
            let all = |s: &mut Self| (0..n).map(|i| s.operand(LLVMGetOperand(at, i))).collect::<Result<Vec<_>, _>>();
            let op = match opcode {
                LLVMBr => {
                    if n == 1 {
                        return Ok((Op::Br(block(self, LLVMGetSuccessor(at, 0))), Vec::new()));
                    }
                    let cond = self.operand(LLVMGetCondition(at))?;
                    let [then, otherwise] = [0, 1].map(|i| block(self, LLVMGetSuccessor(at, i)));
                    return Ok((Op::CondBr(then, otherwise), vec![cond]));
                }
                LLVMRet => Op::Return,
                LLVMPHI => {
                    let from = (0..n).map(|i| block(self, LLVMGetIncomingBlock(at, i))).collect();
                    let values = (0..n).map(|i| self.operand(LLVMGetIncomingValue(at, i)));
                    return Ok((Op::Phi(from), values.collect::<Result<_, _>>()?));
                }
                LLVMAlloca => {
                    let ty = LLVMGetAllocatedType(at);
                    return Ok((
                        match type_of(ty) {
                            Some(ty) => Op::Variable(ty),
                            None => Op::Stack(bytes_of(ty).ok_or("stack")?),
                        },
                        Vec::new(),
                    ));
                }
                LLVMLoad => Op::Load { invariant: !LLVMGetMetadata(at, self.invariant).is_null() },
                LLVMStore => Op::Store,
                LLVMGetElementPtr => Op::Element(bytes_of(LLVMGetGEPSourceElementType(at)).ok_or("element")?),
                LLVMAdd => Op::Add,
                LLVMSub => Op::Sub,
                LLVMMul => Op::Mul,
                LLVMSDiv => Op::SignedDiv,
                LLVMSRem => Op::SignedRem,
                LLVMUDiv => Op::UnsignedDiv,
                LLVMURem => Op::UnsignedRem,
                LLVMShl => Op::ShiftLeft,
                LLVMAShr => Op::ShiftSigned,
                LLVMLShr => Op::ShiftUnsigned,
                LLVMAnd => Op::And,
                LLVMOr => Op::Or,
                LLVMXor => Op::Xor,
                LLVMFAdd => Op::FAdd,
                LLVMFSub => Op::FSub,
                LLVMFMul => Op::FMul,
                LLVMFDiv => Op::FDiv,
                LLVMFNeg => Op::FNeg,
                LLVMICmp => Op::Compare(match LLVMGetICmpPredicate(at) {
                    LLVMIntPredicate::LLVMIntEQ => Compare::Equal,
                    LLVMIntPredicate::LLVMIntSLT => Compare::Less,
                    LLVMIntPredicate::LLVMIntSGT => Compare::Greater,
                    other => return Err(format!("comparison {other:?}")),
                }),
                LLVMFCmp => match LLVMGetFCmpPredicate(at) {
                    llvm_sys::LLVMRealPredicate::LLVMRealOLT => Op::FLess,
                    other => return Err(format!("comparison {other:?}")),
                },
                LLVMSelect => Op::Select,
                LLVMTrunc => Op::Truncate,
                LLVMSIToFP => Op::ToReal,
                LLVMFPExt | LLVMFPTrunc => Op::Convert,
                LLVMBitCast | LLVMFreeze => Op::Copy,
                LLVMShuffleVector => {
                    let mask = (0..LLVMGetNumMaskElements(at)).map(|i| LLVMGetMaskValue(at, i)).collect();
                    Op::Shuffle(mask)
                }
                LLVMInsertElement => {
                    let lane = LLVMConstIntGetZExtValue(LLVMGetOperand(at, 2)) as usize;
                    let [into, x] = [0, 1].map(|i| LLVMGetOperand(at, i));
                    return Ok((Op::Insert(lane), vec![self.operand(into)?, self.operand(x)?]));
                }
                LLVMExtractElement => {
                    let lane = LLVMConstIntGetZExtValue(LLVMGetOperand(at, 1)) as usize;
                    return Ok((Op::Extract(lane), vec![self.operand(LLVMGetOperand(at, 0))?]));
                }
                LLVMCall => return self.call(at, n),
                other => return Err(format!("instruction {other:?}")),
            };
            Ok((op, all(self)?))
        }
    }

    fn call(&mut self, at: LLVMValueRef, n: u32) -> Result<(Op, Vec<Id>), String> {
        // SAFETY: the instruction is a call.
        unsafe {
            let callee = LLVMGetCalledValue(at);
            // The callee is the last operand.
            let mut arguments = |n| (0..n).map(|i| self.operand(LLVMGetOperand(at, i))).collect::<Result<Vec<_>, _>>();
            if LLVMGetValueKind(callee) == LLVMValueKind::LLVMInlineAsmValueKind {
                return Ok((Op::Copy, arguments(1)?));
            }
            let name = name_of(callee);
            let Some(intrinsic) = name.strip_prefix("llvm.") else {
                return Ok((Op::Call, arguments(n)?));
            };
            // Overloads follow the name.
            let is =
                |name: &str| intrinsic.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
            let op = [
                ("fma", Op::Fma),
                ("minnum", Op::FMin),
                ("maxnum", Op::FMax),
                ("fabs", Op::FAbs),
                ("sqrt", Op::Sqrt),
                ("copysign", Op::CopySign),
                ("smin", Op::SignedMin),
                ("smax", Op::SignedMax),
                ("masked.load", Op::MaskedLoad),
                ("masked.store", Op::MaskedStore),
                ("masked.gather", Op::Gather),
                ("masked.scatter", Op::Scatter),
            ];
            if is("prefetch") {
                let for_write = LLVMConstIntGetZExtValue(LLVMGetOperand(at, 1)) == 1;
                return Ok((Op::Prefetch { for_write }, arguments(1)?));
            }
            let (_, op) = op.into_iter().find(|(name, _)| is(name)).ok_or(name)?;
            Ok((op, arguments(n - 1)?))
        }
    }
}

/// The bits of a scalar constant, undefined ones zero.
fn bits(value: LLVMValueRef, kind: Kind) -> Option<u64> {
    // SAFETY: the value is a scalar constant.
    unsafe {
        Some(match LLVMGetValueKind(value) {
            LLVMValueKind::LLVMUndefValueValueKind | LLVMValueKind::LLVMPoisonValueKind => 0,
            LLVMValueKind::LLVMConstantIntValueKind => LLVMConstIntGetSExtValue(value) as u64 & mask(kind),
            LLVMValueKind::LLVMConstantFPValueKind => {
                let x = LLVMConstRealGetDouble(value, &mut 0);
                if kind == Kind::F32 { u64::from((x as f32).to_bits()) } else { x.to_bits() }
            }
            LLVMValueKind::LLVMConstantPointerNullValueKind | LLVMValueKind::LLVMConstantAggregateZeroValueKind => 0,
            _ => return None,
        })
    }
}

fn mask(kind: Kind) -> u64 {
    match kind {
        Kind::I1 => 1,
        Kind::I32 | Kind::F32 => u64::from(u32::MAX),
        Kind::I64 | Kind::F64 => u64::MAX,
    }
}
