//! Printing of modules as readable text.

use std::fmt::{self, Display, Formatter};

use crate::align::ARGUMENT_ALIGN;

use super::{
    AddressSpace, Def, Function, FunctionParameter, Global, Id, Instruction, LaneKind, Linkage, Module, SsaOp, Type,
    UnaliasedMemory, VectorConstant,
};

impl Display for Type {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        let kind = match self.kind {
            LaneKind::I1 => "i1",
            LaneKind::I8 => "i8",
            LaneKind::I16 => "i16",
            LaneKind::I32 => "i32",
            LaneKind::I64 => "i64",
            LaneKind::F16 => "f16",
            LaneKind::Bf16 => "bf16",
            LaneKind::F32 => "f32",
            LaneKind::F64 => "f64",
            LaneKind::Pointer(AddressSpace::All) => "ptr",
            LaneKind::Pointer(AddressSpace::Global) => "ptr.global",
            LaneKind::Pointer(AddressSpace::Shared) => "ptr.shared",
        };
        if self.lanes == 1 { f.write_str(kind) } else { write!(f, "{kind}x{}", self.lanes) }
    }
}

impl Display for Module {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        writeln!(f, "module {:?}", self.name)?;
        for (at, global) in self.globals.iter().enumerate() {
            match global {
                Global::Integer(name) => writeln!(f, "global {name}: i32")?,
                Global::Text(text) => writeln!(f, "global text{at}: {text:?}")?,
            }
        }
        self.functions.iter().try_for_each(|function| self.function(function, f))
    }
}

impl Module {
    fn function(&self, function: &Function, f: &mut Formatter) -> fmt::Result {
        let linkage = match function.linkage {
            Linkage::Exported => "exported",
            Linkage::Protected => "protected",
            Linkage::Hidden => "hidden",
            Linkage::Internal => "internal",
            Linkage::Outside => "outside",
            Linkage::Weak => "weak",
            Linkage::Library => "library",
        };
        write!(f, "\n{linkage} function {}(", function.name)?;
        for (at, FunctionParameter { ty, buffer, .. }) in function.parameters.iter().enumerate() {
            write!(f, "{}v{at}: {ty}", if at == 0 { "" } else { ", " })?;
            if let Some((_, name)) = function.names.iter().find(|(id, _)| id.at() == at) {
                write!(f, " {name}")?;
            }
            if let Some(UnaliasedMemory { bytes, is_constant, align }) = buffer {
                write!(f, " of {bytes} bytes{}", if *is_constant { ", constant" } else { "" })?;
                if *align != ARGUMENT_ALIGN {
                    write!(f, ", align {align}")?;
                }
            }
        }
        write!(f, ")")?;
        if let Some(result) = function.result {
            write!(f, " -> {result}")?;
        }
        if let Some([x, y, z]) = function.threads {
            write!(f, " by {x} x {y} x {z} threads")?;
            if function.cluster > 1 {
                write!(f, " in clusters of {}", function.cluster)?;
            }
        }
        if function.is_outside() {
            return writeln!(f);
        }
        writeln!(f, " for {:?} {{", function.cpu)?;
        for (at, block) in function.blocks.iter().enumerate() {
            writeln!(f, "b{at}:")?;
            block.iter().try_for_each(|instruction| self.instruction(function, instruction, f))?;
        }
        writeln!(f, "}}")
    }

    fn instruction(&self, function: &Function, instruction: &Instruction, f: &mut Formatter) -> fmt::Result {
        let Instruction { op, operands, result, align } = instruction;
        write!(f, "    ")?;
        if let Some(id) = result {
            write!(f, "v{}: {} = ", id.at(), function.values[id.at()].ty)?;
        }
        match op {
            SsaOp::Br(to) => write!(f, "Br b{}", to.at())?,
            SsaOp::CondBr(then, otherwise) => write!(f, "CondBr b{} b{}", then.at(), otherwise.at())?,
            SsaOp::Phi(_) => write!(f, "Phi")?,
            SsaOp::Variable(ty) | SsaOp::Element(ty) => {
                let name = if matches!(op, SsaOp::Element(_)) { "Element" } else { "Variable" };
                write!(f, "{name} {ty}")?;
            }
            op => write!(f, "{op:?}")?,
        }
        for (at, id) in operands.iter().enumerate() {
            write!(f, "{}", if at == 0 { " " } else { ", " })?;
            if let SsaOp::Phi(from) = op {
                write!(f, "b{}: ", from[at].at())?;
            }
            self.operand(function, *id, f)?;
        }
        if *align > 0 {
            write!(f, ", align {align}")?;
        }
        match function.names.iter().find(|(id, _)| Some(*id) == *result) {
            Some((_, name)) => writeln!(f, " ; {name}"),
            None => writeln!(f),
        }
    }

    fn operand(&self, function: &Function, id: Id, f: &mut Formatter) -> fmt::Result {
        let value = &function.values[id.at()];
        match &value.def {
            Def::Argument(_) | Def::Instruction => write!(f, "v{}", id.at()),
            Def::Undefined => write!(f, "{} undefined", value.ty),
            Def::Function(other) => write!(f, "{}", self.functions[other.at()].name),
            Def::Global(at) => match &self.globals[*at] {
                Global::Integer(name) => f.write_str(name),
                Global::Text(_) => write!(f, "text{at}"),
            },
            Def::Constant(VectorConstant { bits, undefined }) => {
                write!(f, "{}", value.ty)?;
                let is_splat = bits.iter().all(|b| *b == bits[0]) && *undefined == 0;
                let shown = bits.iter().take(if is_splat { 1 } else { bits.len() });
                shown.enumerate().try_for_each(|(lane, b)| match value.ty.kind {
                    _ if undefined >> lane & 1 == 1 => write!(f, " undefined"),
                    LaneKind::F32 => write!(f, " {:?}", f32::from_bits(*b as u32)),
                    LaneKind::F64 => write!(f, " {:?}", f64::from_bits(*b)),
                    LaneKind::I32 => write!(f, " {}", *b as i32),
                    _ => write!(f, " {}", *b as i64),
                })
            }
        }
    }
}
