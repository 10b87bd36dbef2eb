//! Instruction encoder: VEX and EVEX encodings of vector instructions, and the few others that kernels need.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, chapter 2.

use super::opcodes::Opcode;

/// Memory operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedMemory {
    pub base: EncodedBase,
    /// Index register, and the base-2 logarithm of its scale.
    pub index: Option<(u8, u8)>,
    pub disp: i32,
}

/// Base of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncodedBase {
    Register(u8),
    /// Constants after the code; [`EncodedMemory::disp`] is an offset into them.
    Pool,
}

/// r/m operand: a register or memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rm {
    Register(u8),
    Memory(EncodedMemory),
}

/// Fields that EVEX adds to an instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extra {
    /// Mask register; 0 for no mask.
    pub mask: u8,
    /// Whether lanes outside the mask become zero.
    pub zero: bool,
    /// Whether the memory operand is broadcast to all lanes.
    pub broadcast: bool,
}

/// Operands of a vector instruction, with their widths.
#[derive(Clone, Copy, Debug)]
pub struct VectorOperands {
    pub reg: u8,
    pub vvvv: u8,
    pub rm: Rm,
    /// Size in bytes of the vector registers: 16, 32 or 64.
    pub width: u8,
    /// Size in bytes of the memory operand, the unit of EVEX's compressed displacements.
    pub unit: u8,
    pub extra: Extra,
    pub immediate: Option<u8>,
}

/// Condition codes, with their numbers in opcodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ConditionCode {
    Equal = 4,
    NotEqual = 5,
    NotAbove = 6,
    Above = 7,
    Less = 12,
    NotLess = 13,
    NotGreater = 14,
    Greater = 15,
}

impl ConditionCode {
    /// Negates a condition.
    pub fn not(self) -> ConditionCode {
        match self {
            ConditionCode::Above => ConditionCode::NotAbove,
            ConditionCode::NotAbove => ConditionCode::Above,
            ConditionCode::Equal => ConditionCode::NotEqual,
            ConditionCode::NotEqual => ConditionCode::Equal,
            ConditionCode::Less => ConditionCode::NotLess,
            ConditionCode::NotLess => ConditionCode::Less,
            ConditionCode::NotGreater => ConditionCode::Greater,
            ConditionCode::Greater => ConditionCode::NotGreater,
        }
    }
}

/// Jump target in the code.
pub type Label = usize;

/// Target of a four-byte field, which holds the distance from the end of the instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldTarget {
    Label(Label),
    Function(usize),
    /// Offset in the constants.
    Pool(i32),
    /// External function; the field has eight bytes, for its address.
    Outside(usize),
}

/// Code under construction.
#[derive(Default)]
pub struct Assembler {
    pub code: Vec<u8>,
    /// Offset of each label.
    labels: Vec<Option<usize>>,
    /// Fixups: offset of the field, end of its instruction, and target.
    pub fixups: Vec<(usize, usize, FieldTarget)>,
}

pub const RAX: u8 = 0;
pub const RCX: u8 = 1;
pub const RDX: u8 = 2;
pub const RBX: u8 = 3;
pub const RSP: u8 = 4;
pub const RBP: u8 = 5;
pub const RSI: u8 = 6;
pub const RDI: u8 = 7;

impl Assembler {
    pub fn label(&mut self) -> Label {
        self.labels.push(None);
        self.labels.len() - 1
    }

    pub fn bind(&mut self, label: Label) {
        self.labels[label] = Some(self.code.len());
    }

    /// Fills in the distances to labels.
    pub fn resolve_labels(&mut self) {
        let fixups = std::mem::take(&mut self.fixups);
        for (at, end, target) in fixups {
            match target {
                FieldTarget::Label(label) => {
                    let to = self.labels[label].expect("every label is bound");
                    self.set_field(at, to as i64 - end as i64);
                }
                FieldTarget::Function(_) | FieldTarget::Pool(_) | FieldTarget::Outside(_) => {
                    self.fixups.push((at, end, target))
                }
            }
        }
        self.labels.clear();
    }

    /// Writes a four-byte field.
    pub fn set_field(&mut self, at: usize, value: i64) {
        let value = i32::try_from(value).expect("code is short");
        self.code[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// Pads with nops to a multiple of `bytes`.
    pub fn align(&mut self, bytes: usize) {
        const LONGEST: [u8; 9] = [0x66, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0];
        let mut left = self.code.len().next_multiple_of(bytes) - self.code.len();
        while left > 0 {
            let n = left.min(9);
            match n {
                1 => self.code.push(0x90),
                2 => self.code.extend([0x66, 0x90]),
                3 => self.code.extend([0x0f, 0x1f, 0x00]),
                4 => self.code.extend([0x0f, 0x1f, 0x40, 0]),
                5 => self.code.extend([0x0f, 0x1f, 0x44, 0, 0]),
                6 => self.code.extend([0x66, 0x0f, 0x1f, 0x44, 0, 0]),
                7 => self.code.extend([0x0f, 0x1f, 0x80, 0, 0, 0, 0]),
                8 => self.code.extend([0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0]),
                _ => self.code.extend(LONGEST),
            }
            left -= n;
        }
    }

    /// Emits the ModRM byte, the rest of the operand, and the immediate. Short displacements are in units of
    /// `unit` bytes.
    fn operand(&mut self, reg: u8, rm: Rm, unit: i32, immediate: &[u8]) {
        let reg = (reg & 7) << 3;
        match rm {
            Rm::Register(r) => self.code.push(0xc0 | reg | r & 7),
            Rm::Memory(EncodedMemory { base: EncodedBase::Pool, disp, .. }) => {
                self.code.push(reg | 5);
                let at = self.code.len();
                self.code.extend([0; 4]);
                self.fixups.push((at, at + 4 + immediate.len(), FieldTarget::Pool(disp)));
            }
            Rm::Memory(EncodedMemory { base: EncodedBase::Register(base), index, disp }) => {
                let short = (disp % unit == 0).then(|| i8::try_from(disp / unit).ok()).flatten();
                let mode = match short {
                    Some(0) if base & 7 != RBP => 0,
                    Some(_) => 0x40,
                    None => 0x80,
                };
                match index {
                    None if base & 7 != RSP => self.code.push(mode | reg | base & 7),
                    None => self.code.extend([mode | reg | 4, 0x24]),
                    Some((index, log_scale)) => {
                        self.code.extend([mode | reg | 4, log_scale << 6 | (index & 7) << 3 | base & 7]);
                    }
                }
                match (mode, short) {
                    (0x40, Some(short)) => self.code.push(short as u8),
                    (0x80, _) => self.code.extend(disp.to_le_bytes()),
                    _ => {}
                }
            }
        }
        self.code.extend_from_slice(immediate);
    }

    /// High bits of the registers in an operand: of the base or register, of the index, and the fifth bit of
    /// a register.
    fn high_bits(rm: Rm) -> (u8, u8) {
        match rm {
            Rm::Register(r) => (r >> 3 & 1, r >> 4 & 1),
            Rm::Memory(EncodedMemory { base, index, .. }) => {
                let base = match base {
                    EncodedBase::Register(r) => r >> 3 & 1,
                    EncodedBase::Pool => 0,
                };
                (base, index.map_or(0, |(r, _)| r >> 3 & 1))
            }
        }
    }

    /// Emits a vector instruction.
    pub fn vector(&mut self, op: Opcode, o: VectorOperands) {
        let Opcode { map, prefix, opcode, wide, evex, .. } = op;
        let VectorOperands { reg, vvvv, rm, width, unit, extra, immediate } = o;
        let (b, x) = Assembler::high_bits(rm);
        let high_rm = matches!(rm, Rm::Register(r) if r >= 16);
        let immediate = immediate.map(|i| [i]);
        let immediate: &[u8] = immediate.as_ref().map_or(&[], |i| i);
        let w = u8::from(wide);
        if evex || width == 64 || reg >= 16 || vvvv >= 16 || high_rm || extra != Extra::default() {
            let p0 = (!reg >> 3 & 1) << 7 | (x ^ 1) << 6 | (b ^ 1) << 5 | (!reg >> 4 & 1) << 4 | map;
            let p1 = w << 7 | (!vvvv & 15) << 3 | 4 | prefix;
            let length = match width {
                64 => 2,
                32 => 1,
                _ => 0,
            };
            let p2 = u8::from(extra.zero) << 7
                | length << 5
                | u8::from(extra.broadcast) << 4
                | (!vvvv >> 4 & 1) << 3
                | extra.mask;
            self.code.extend([0x62, p0, p1, p2, opcode]);
            self.operand(reg, rm, i32::from(unit), immediate);
            return;
        }
        // For other instructions, VEX ignores the W bit.
        let w = w & u8::from(
            map == 2 && (opcode >= 0x90 || matches!(opcode, 0x45..=0x47))
                || map == 3 && matches!(opcode, 0x01 | 0x16 | 0x22 | 0x30)
                || map == 1 && matches!(opcode, 0x2a | 0x2c | 0x6e | 0x7e),
        );
        let tail = (!vvvv & 15) << 3 | u8::from(width == 32) << 2 | prefix;
        if map == 1 && w == 0 && x == 0 && b == 0 {
            self.code.extend([0xc5, (!reg >> 3 & 1) << 7 | tail, opcode]);
        } else {
            let first = (!reg >> 3 & 1) << 7 | (x ^ 1) << 6 | (b ^ 1) << 5 | map;
            self.code.extend([0xc4, first, w << 7 | tail, opcode]);
        }
        self.operand(reg, rm, 1, immediate);
    }

    /// Emits an instruction on 64-bit integers if `wide`, else on 32-bit integers.
    pub fn integer(&mut self, opcode: &[u8], reg: u8, rm: Rm, wide: bool, immediate: &[u8]) {
        let (b, x) = Assembler::high_bits(rm);
        let rex = 0x40 | u8::from(wide) << 3 | (reg >> 3 & 1) << 2 | x << 1 | b;
        if rex != 0x40 {
            self.code.push(rex);
        }
        self.code.extend_from_slice(opcode);
        self.operand(reg, rm, 1, immediate);
    }

    pub fn move_register(&mut self, to: u8, from: u8) {
        if to != from {
            self.integer(&[0x8b], to, Rm::Register(from), true, &[]);
        }
    }

    /// Moves a constant into a register, without changing the flags.
    pub fn move_constant(&mut self, to: u8, value: i64) {
        if let Ok(value) = u32::try_from(value) {
            if to >= 8 {
                self.code.push(0x41);
            }
            self.code.push(0xb8 | to & 7);
            self.code.extend(value.to_le_bytes());
        } else if let Ok(value) = i32::try_from(value) {
            self.integer(&[0xc7], 0, Rm::Register(to), true, &value.to_le_bytes());
        } else {
            self.code.extend([0x48 | to >> 3, 0xb8 | to & 7]);
            self.code.extend(value.to_le_bytes());
        }
    }

    pub fn load(&mut self, to: u8, from: EncodedMemory) {
        self.integer(&[0x8b], to, Rm::Memory(from), true, &[]);
    }

    /// Stores the low 1, 2, 4 or 8 bytes of a register.
    pub fn store(&mut self, to: EncodedMemory, from: u8, bytes: usize) {
        if bytes == 2 {
            self.code.push(0x66);
        }
        match bytes {
            1 => self.of_low_byte(&[0x88], from, Rm::Memory(to), false),
            _ => self.integer(&[0x89], from, Rm::Memory(to), bytes == 8, &[]),
        }
    }

    /// Extends the low 1, 2 or 4 bytes of a register or memory to a 64-bit register.
    pub fn extend(&mut self, to: u8, from: Rm, bytes: usize, signed: bool) {
        match (bytes, signed) {
            (1, _) => self.of_low_byte(&[0x0f, if signed { 0xbe } else { 0xb6 }], to, from, signed),
            (2, _) => self.integer(&[0x0f, if signed { 0xbf } else { 0xb7 }], to, from, signed, &[]),
            (_, true) => self.integer(&[0x63], to, from, true, &[]),
            // Writing the lower half clears the upper one.
            (_, false) => self.integer(&[0x8b], to, from, false, &[]),
        }
    }

    /// Emits an instruction on a low byte, which some registers have only with a REX prefix.
    fn of_low_byte(&mut self, opcode: &[u8], reg: u8, rm: Rm, wide: bool) {
        let (b, x) = Assembler::high_bits(rm);
        self.code.push(0x40 | u8::from(wide) << 3 | (reg >> 3 & 1) << 2 | x << 1 | b);
        self.code.extend_from_slice(opcode);
        self.operand(reg, rm, 1, &[]);
    }

    pub fn lea(&mut self, to: u8, from: EncodedMemory) {
        self.integer(&[0x8d], to, Rm::Memory(from), true, &[]);
    }

    /// Emits `add`, `or`, `and`, `sub`, `xor` or `cmp` with a constant, numbered 0, 1, 4, 5, 6 and 7.
    pub fn with_constant(&mut self, number: u8, r: u8, value: i32, wide: bool) {
        match i8::try_from(value) {
            Ok(short) => self.integer(&[0x83], number, Rm::Register(r), wide, &[short as u8]),
            Err(_) => self.integer(&[0x81], number, Rm::Register(r), wide, &value.to_le_bytes()),
        }
    }

    pub fn jump(&mut self, to: Label) {
        self.code.push(0xe9);
        self.field(FieldTarget::Label(to));
    }

    pub fn jump_if(&mut self, condition: ConditionCode, to: Label) {
        if let Some(place) = self.labels[to]
            && let Ok(short) = i8::try_from(place as i64 - self.code.len() as i64 - 2)
        {
            self.code.extend([0x70 | condition as u8, short as u8]);
            return;
        }
        self.code.extend([0x0f, 0x80 | condition as u8]);
        self.field(FieldTarget::Label(to));
    }

    pub fn call(&mut self, function: usize) {
        self.code.push(0xe8);
        self.field(FieldTarget::Function(function));
    }

    /// Calls a function defined by another module, loading its address to `RAX`.
    pub fn call_outside(&mut self, function: usize) {
        self.code.extend([0x48, 0xb8]);
        let at = self.code.len();
        self.code.extend([0; 8]);
        self.fixups.push((at, at + 8, FieldTarget::Outside(function)));
        self.code.extend([0xff, 0xd0]);
    }

    pub fn address_of(&mut self, to: u8, function: usize) {
        self.code.extend([0x48 | (to >> 3) << 2, 0x8d, (to & 7) << 3 | 5]);
        self.field(FieldTarget::Function(function));
    }

    pub fn push(&mut self, r: u8) {
        if r >= 8 {
            self.code.push(0x41);
        }
        self.code.push(0x50 | r & 7);
    }

    pub fn pop(&mut self, r: u8) {
        if r >= 8 {
            self.code.push(0x41);
        }
        self.code.push(0x58 | r & 7);
    }

    fn field(&mut self, target: FieldTarget) {
        let at = self.code.len();
        self.code.extend([0; 4]);
        self.fixups.push((at, at + 4, target));
    }
}

#[cfg(all(test, feature = "llvm"))]
mod tests {
    use std::ffi::{CStr, c_char};
    use std::ptr;

    use llvm_sys::disassembler::{LLVMCreateDisasmCPU, LLVMDisasmDispose, LLVMDisasmInstruction, LLVMSetDisasmOptions};
    use llvm_sys::target::{LLVMInitializeX86Disassembler, LLVMInitializeX86TargetInfo, LLVMInitializeX86TargetMC};
    use proptest::prelude::*;

    use super::*;
    use crate::ssa::{LaneKind, Type};
    use crate::x86::opcodes::*;

    /// Option for Intel syntax.
    const INTEL: u64 = 4;

    /// Disassembles code with LLVM, one instruction per line.
    fn disassemble(mut code: Vec<u8>) -> String {
        let mut text = String::new();
        // SAFETY: registering the disassembler again is allowed; the context lives until it is disposed of;
        // LLVM reads within the code and writes a zero-terminated line into the buffer.
        unsafe {
            LLVMInitializeX86TargetInfo();
            LLVMInitializeX86TargetMC();
            LLVMInitializeX86Disassembler();
            let (triple, cpu) = (c"x86_64-unknown-linux-gnu", c"sapphirerapids");
            let context = LLVMCreateDisasmCPU(triple.as_ptr(), cpu.as_ptr(), ptr::null_mut(), 0, None, None);
            assert!(!context.is_null() && LLVMSetDisasmOptions(context, INTEL) == 1);
            let mut at = 0;
            while at < code.len() {
                let mut line = [0 as c_char; 256];
                let rest = &mut code[at..];
                let n = LLVMDisasmInstruction(
                    context,
                    rest.as_mut_ptr(),
                    rest.len() as u64,
                    at as u64,
                    line.as_mut_ptr(),
                    256,
                );
                assert!(n > 0, "no instruction at {at} of {code:02x?}");
                at += n;
                let line = CStr::from_ptr(line.as_ptr()).to_string_lossy();
                text += &line.split_whitespace().collect::<Vec<_>>().join(" ");
                text += "\n";
            }
            LLVMDisasmDispose(context);
        }
        text
    }

    const INTEGERS: [&str; 16] =
        ["rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15"];

    fn vector(r: u8, width: u8) -> String {
        format!(
            "{}mm{r}",
            match width {
                16 => 'x',
                32 => 'y',
                _ => 'z',
            }
        )
    }

    /// Memory operand of `bytes` bytes in Intel syntax.
    fn memory(EncodedMemory { base, index, disp }: EncodedMemory, bytes: u8) -> String {
        let size = match bytes {
            1 => "byte",
            2 => "word",
            4 => "dword",
            8 => "qword",
            16 => "xmmword",
            32 => "ymmword",
            _ => "zmmword",
        };
        let mut text = match base {
            EncodedBase::Register(r) => INTEGERS[usize::from(r)].to_owned(),
            EncodedBase::Pool => "rip".to_owned(),
        };
        match index {
            Some((r, 0)) => text += &format!(" + {}", INTEGERS[usize::from(r)]),
            Some((r, log_scale)) => text += &format!(" + {}*{}", 1 << log_scale, INTEGERS[usize::from(r)]),
            None => {}
        }
        match disp {
            0 => {}
            1.. => text += &format!(" + {disp}"),
            _ => text += &format!(" - {}", -i64::from(disp)),
        }
        format!("{size} ptr [{text}]")
    }

    fn addresses() -> impl Strategy<Value = EncodedMemory> {
        let index = (0u8..16).prop_filter("rsp is no index", |r| *r != RSP);
        let disp = prop_oneof![
            Just(0),
            -5i32..5,
            (-200i32..200).prop_map(|d| d * 4),
            (-200i32..200).prop_map(|d| d * 64),
            any::<i32>()
        ];
        (0u8..16, proptest::option::of((index, 0u8..4)), disp).prop_map(|(base, index, disp)| EncodedMemory {
            base: EncodedBase::Register(base),
            index,
            disp,
        })
    }

    /// Three-operand instructions on all lanes.
    fn instructions() -> Vec<(&'static str, Opcode)> {
        let type_of = |kind| Type { kind, lanes: 16 };
        vec![
            ("vaddps", arithmetic(0x58, type_of(LaneKind::F32))),
            ("vmulpd", arithmetic(0x59, type_of(LaneKind::F64))),
            ("vmaxps", packed(0x5f, LaneKind::F32)),
            ("vdivpd", packed(0x5e, LaneKind::F64)),
            ("vfmadd213ps", opcode(2, 1, 0xa8, false)),
            ("vfmadd231ps", opcode(2, 1, 0xb8, false)),
            ("vfnmadd231pd", opcode(2, 1, 0xbc, true)),
            ("vpermi2ps", evex(2, 1, 0x77, false)),
            ("vpermt2pd", evex(2, 1, 0x7f, true)),
            ("vpmulld", multiply_integers(false)),
            ("vpmullq", multiply_integers(true)),
            ("vpminsd", extremum(false, false)),
            ("vpmaxsq", extremum(true, true)),
            ("vpmuludq", MULTIPLY_HALVES),
            ("vpdpbusd", dot(true)),
            ("vdpbf16ps", DOT_OF_HALVES),
            ("vscalefps", scale(false)),
            ("vscalefpd", scale(true)),
        ]
    }

    /// Instructions that convert a vector to another one, with the size of their memory operand relative to
    /// the wider vector, and whether that operand is the result.
    fn conversions() -> Vec<(&'static str, Opcode, Part, bool)> {
        use Part::{Fixed, Of};
        vec![
            ("vpmovzxbd", widen(1, 4, false), Of(4), false),
            ("vpmovsxbd", widen(1, 4, true), Of(4), false),
            ("vpmovsxwd", widen(2, 4, true), Of(2), false),
            ("vpmovzxwq", widen(2, 8, false), Of(4), false),
            ("vpmovzxbq", widen(1, 8, false), Of(8), false),
            ("vpmovsxdq", widen(4, 8, true), Of(2), false),
            ("vpmovzxbw", widen(1, 2, false), Of(2), false),
            ("vpmovdb", narrow(4, 1), Of(4), true),
            ("vpmovdw", narrow(4, 2), Of(2), true),
            ("vpmovqb", narrow(8, 1), Of(8), true),
            ("vpmovqw", narrow(8, 2), Of(4), true),
            ("vpmovqd", narrow(8, 4), Of(2), true),
            ("vpbroadcastb", broadcast_integer(1), Fixed(1), false),
            ("vpbroadcastw", broadcast_integer(2), Fixed(2), false),
            ("vpbroadcastd", broadcast_integer(4), Fixed(4), false),
            ("vpbroadcastq", broadcast_integer(8), Fixed(8), false),
        ]
    }

    /// Size of a memory operand.
    #[derive(Clone, Copy)]
    enum Part {
        Fixed(u8),
        /// Vector size divided by a number.
        Of(u8),
    }

    /// Name of the low half of an integer register.
    fn short(r: u8) -> String {
        match INTEGERS[usize::from(r)] {
            name if r >= 8 => format!("{name}d"),
            name => format!("e{}", &name[1..]),
        }
    }

    proptest! {
        #[test]
        fn vector_instructions_are_read_as_they_were_meant(
            at in 0usize..15,
            [reg, vvvv, rm] in [0u8..32, 0u8..32, 0u8..32],
            address in addresses(),
            form in 0u8..3,
            width in prop::sample::select(vec![16u8, 32, 64]),
            mask in 0u8..8,
            zero: bool,
        ) {
            let (name, op) = instructions()[at];
            let lane = if op.wide { 8 } else { 4 };
            let extra = Extra { mask, zero: zero && mask > 0, broadcast: form == 2 };
            let (rm, last, unit) = match form {
                0 => (Rm::Register(rm), vector(rm, width), 1),
                1 => (Rm::Memory(address), memory(address, width), width),
                _ => (Rm::Memory(address), memory(address, lane) + &format!("{{1to{}}}", width / lane), lane),
            };
            let mut asm = Assembler::default();
            asm.vector(op, VectorOperands { reg, vvvv, rm, width, unit, extra, immediate: None });
            let masked = match extra {
                Extra { mask: 0, .. } => String::new(),
                Extra { zero: false, .. } => format!(" {{k{mask}}}"),
                Extra { zero: true, .. } => format!(" {{k{mask}}} {{z}}"),
            };
            let meant = format!("{name} {}{masked}, {}, {last}\n", vector(reg, width), vector(vvvv, width));
            prop_assert_eq!(disassemble(asm.code), meant);
        }

        #[test]
        fn integer_instructions_are_read_as_they_were_meant(
            [r, s] in [0u8..16, 0u8..16],
            address in addresses(),
            value in prop_oneof![any::<i32>().prop_map(i64::from), any::<u32>().prop_map(i64::from), any::<i64>()],
            small in prop_oneof![-128i32..128, any::<i32>()],
        ) {
            let [to, from] = [r, s].map(|r| INTEGERS[usize::from(r)]);
            let place = memory(address, 8);
            let bare = place.trim_start_matches("qword ptr ");
            let mut asm = Assembler::default();
            asm.load(r, address);
            asm.store(address, r, 8);
            asm.lea(r, address);
            asm.integer(&[0x0f, 0xaf], r, Rm::Register(s), true, &[]);
            asm.with_constant(5, r, small, true);
            asm.push(r);
            asm.pop(r);
            let mut meant = format!("mov {to}, {place}\nmov {place}, {to}\nlea {to}, {bare}\nimul {to}, {from}\n");
            meant += &format!("sub {to}, {small}\npush {to}\npop {to}\n");
            prop_assert_eq!(disassemble(asm.code), meant);
            let mut asm = Assembler::default();
            asm.move_constant(r, value);
            let read = disassemble(asm.code);
            let number: i64 = read.trim().rsplit(' ').next().unwrap().parse().unwrap();
            prop_assert_eq!(number, value, "{}", read);
        }
    }

    proptest! {
        #[test]
        fn conversions_are_read_as_they_were_meant(
            at in 0usize..16,
            [reg, other] in [0u8..32, 0u8..32],
            address in addresses(),
            in_memory: bool,
            width in prop::sample::select(vec![16u8, 32, 64]),
        ) {
            let (name, op, part, is_result) = conversions()[at];
            let bytes = match part {
                Part::Fixed(bytes) => bytes,
                Part::Of(n) => width / n,
            };
            let (rm, operand) = match in_memory {
                true => (Rm::Memory(address), memory(address, bytes)),
                false => (Rm::Register(other), vector(other, bytes.max(16))),
            };
            let unit = op.unit(width.into(), false) as u8;
            prop_assert_eq!(unit, bytes);
            let mut asm = Assembler::default();
            let extra = Extra::default();
            asm.vector(op, VectorOperands { reg, vvvv: 0, rm, width, unit, extra, immediate: None });
            let own = vector(reg, width);
            let (first, second) = if is_result { (operand, own) } else { (own, operand) };
            prop_assert_eq!(disassemble(asm.code), format!("{name} {first}, {second}\n"));
        }

        #[test]
        fn lanes_of_integers_are_read_as_they_were_meant(
            [reg, vvvv] in [0u8..32, 0u8..32],
            r in 0u8..16,
            address in addresses(),
            log_bytes in 0usize..4,
            lane in 0u8..16,
            by in 0u8..64,
        ) {
            let bytes = 1 << log_bytes;
            let suffix = ["b", "w", "d", "q"][log_bytes];
            let lane = lane % (16 / bytes as u8);
            let register = if bytes == 8 { INTEGERS[usize::from(r)].to_owned() } else { short(r) };
            let [x, y] = [reg, vvvv].map(|r| vector(r, 16));
            let mut asm = Assembler::default();
            let mut write = |op: Opcode, vvvv: u8, rm: Rm, immediate: Option<u8>| {
                let unit = op.unit(16, false) as u8;
                asm.vector(op, VectorOperands { reg, vvvv, rm, width: 16, unit, extra: Extra::default(), immediate });
            };
            write(insert_integer(bytes), vvvv, Rm::Register(r), Some(lane));
            write(insert_integer(bytes), vvvv, Rm::Memory(address), Some(lane));
            write(extract_integer(bytes), 0, Rm::Register(r), Some(lane));
            write(extract_integer(bytes), 0, Rm::Memory(address), Some(lane));
            write(splat_integer(bytes), 0, Rm::Register(r), None);
            write(to_integer(true), 0, Rm::Register(r), None);
            let place = memory(address, bytes as u8);
            let mut meant = format!("vpinsr{suffix} {x}, {y}, {register}, {lane}\n");
            meant += &format!("vpinsr{suffix} {x}, {y}, {place}, {lane}\n");
            meant += &format!("vpextr{suffix} {register}, {x}, {lane}\nvpextr{suffix} {place}, {x}, {lane}\n");
            meant += &format!("vpbroadcast{suffix} {x}, {register}\nvmovq {}, {x}\n", INTEGERS[usize::from(r)]);
            prop_assert_eq!(disassemble(asm.code), meant);
            let mut asm = Assembler::default();
            let unit = Rm::Register(reg);
            for (op, number) in [(shift(2), SHIFT_SIGNED), (shift(4), SHIFT_LEFT), (shift(8), SHIFT_RIGHT)] {
                let extra = Extra::default();
                asm.vector(op, VectorOperands { reg: number, vvvv, rm: unit, width: 64, unit: 1, extra, immediate: Some(by) });
            }
            let [x, y] = [reg, vvvv].map(|r| vector(r, 64));
            let meant = format!("vpsraw {y}, {x}, {by}\nvpslld {y}, {x}, {by}\nvpsrlq {y}, {x}, {by}\n");
            prop_assert_eq!(disassemble(asm.code), meant);
        }

        #[test]
        fn short_integers_are_read_as_they_were_meant(
            [r, s] in [0u8..16, 0u8..16],
            address in addresses(),
        ) {
            let [to, from] = [r, s].map(|r| INTEGERS[usize::from(r)]);
            let byte = match s {
                0..=3 => format!("{}l", &from[1..2]),
                4..=7 => format!("{}l", &from[1..]),
                _ => format!("{from}b"),
            };
            let word = if s >= 8 { format!("{from}w") } else { from[1..].to_owned() };
            let mut asm = Assembler::default();
            for bytes in [1, 2, 4] {
                asm.store(address, s, bytes);
                for signed in [false, true] {
                    asm.extend(r, Rm::Memory(address), bytes, signed);
                    asm.extend(r, Rm::Register(s), bytes, signed);
                }
            }
            let [in_1, in_2, in_4] = [1, 2, 4].map(|bytes| memory(address, bytes));
            let (to_4, from_4) = (short(r), short(s));
            let mut meant = format!("mov {in_1}, {byte}\nmovzx {to_4}, {in_1}\nmovzx {to_4}, {byte}\n");
            meant += &format!("movsx {to}, {in_1}\nmovsx {to}, {byte}\n");
            meant += &format!("mov {in_2}, {word}\nmovzx {to_4}, {in_2}\nmovzx {to_4}, {word}\n");
            meant += &format!("movsx {to}, {in_2}\nmovsx {to}, {word}\n");
            meant += &format!("mov {in_4}, {from_4}\nmov {to_4}, {in_4}\nmov {to_4}, {from_4}\n");
            meant += &format!("movsxd {to}, {in_4}\nmovsxd {to}, {from_4}\n");
            prop_assert_eq!(disassemble(asm.code), meant);
        }

        /// Checks that the dot products of AVX-VNNI have only VEX encodings, with the registers that these
        /// can address.
        #[test]
        fn dot_products_are_read_as_they_were_meant([reg, vvvv, rm] in [0u8..16, 0u8..16, 0u8..16], of_16: bool) {
            let width = if of_16 { 16 } else { 32 };
            let [x, y, z] = [reg, vvvv, rm].map(|r| vector(r, width));
            for (name, op) in [("{vex} vpdpbusd", dot(false)), ("vpdpbssd", dot_alike(true)), ("vpdpbuud", dot_alike(false))] {
                let mut asm = Assembler::default();
                let extra = Extra::default();
                asm.vector(op, VectorOperands { reg, vvvv, rm: Rm::Register(rm), width, unit: 1, extra, immediate: None });
                prop_assert_eq!(disassemble(asm.code), format!("{name} {x}, {y}, {z}\n"));
            }
        }
    }

    #[test]
    fn padding_is_instructions_that_do_nothing() {
        for n in 1..=40 {
            let mut asm = Assembler::default();
            asm.code.resize(n, 0x90);
            asm.align(64);
            assert_eq!(asm.code.len(), 64);
            assert!(disassemble(asm.code).lines().all(|line| line.contains("nop") || line.starts_with("xchg")));
        }
    }
}
