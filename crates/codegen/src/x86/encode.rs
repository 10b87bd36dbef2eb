//! Instructions as bytes: the VEX and EVEX encodings of vector instructions, and the few others that kernels need.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, chapter 2.

/// A memory operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub base: Base,
    /// A register, and the logarithm of what it is multiplied by.
    pub index: Option<(u8, u8)>,
    pub disp: i32,
}

/// What an address starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    Register(u8),
    /// The constants behind the code; [`Address::disp`] counts from their first byte.
    Pool,
}

/// The last operand: a register or memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rm {
    Register(u8),
    Memory(Address),
}

/// The encoding of a vector instruction: opcode map (1 is `0F`, 2 `0F 38`, 3 `0F 3A`), mandatory prefix (0 is none, 1
/// `66`, 2 `F3`, 3 `F2`), opcode, and the bit that mostly tells double precision from single.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opcode {
    pub map: u8,
    pub prefix: u8,
    pub opcode: u8,
    pub wide: bool,
    /// Whether only EVEX has it.
    pub evex: bool,
}

/// What EVEX adds to an instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extra {
    /// The mask register; 0 is none.
    pub mask: u8,
    /// Whether lanes outside the mask become zero.
    pub zero: bool,
    /// Whether the memory operand is one lane, for all.
    pub broadcast: bool,
}

/// Operands of a vector instruction, and how wide they are.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    pub reg: u8,
    pub vvvv: u8,
    pub rm: Rm,
    /// Bytes of the vector registers: 16, 32 or 64.
    pub width: u8,
    /// Bytes that the memory operand has, in units of which EVEX counts short displacements.
    pub unit: u8,
    pub extra: Extra,
    pub immediate: Option<u8>,
}

/// Conditions, by their numbers in opcodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Condition {
    Equal = 4,
    NotEqual = 5,
    NotAbove = 6,
    Above = 7,
    Less = 12,
    NotLess = 13,
    NotGreater = 14,
    Greater = 15,
}

impl Condition {
    /// The opposite one.
    pub fn not(self) -> Condition {
        match self {
            Condition::Above => Condition::NotAbove,
            Condition::NotAbove => Condition::Above,
            Condition::Equal => Condition::NotEqual,
            Condition::NotEqual => Condition::Equal,
            Condition::Less => Condition::NotLess,
            Condition::NotLess => Condition::Less,
            Condition::NotGreater => Condition::Greater,
            Condition::Greater => Condition::NotGreater,
        }
    }
}

/// A place in the code that jumps go to.
pub type Label = usize;

/// What a field of four bytes will hold: the distance from behind its instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Label(Label),
    Function(usize),
    /// So many bytes into the constants.
    Pool(i32),
}

/// Code as it grows.
#[derive(Default)]
pub struct Assembler {
    pub code: Vec<u8>,
    /// Where each label is.
    labels: Vec<Option<usize>>,
    /// Fields to fill in: where they are, where their instructions end, what they are to hold.
    pub fixups: Vec<(usize, usize, Target)>,
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
                Target::Label(label) => {
                    let to = self.labels[label].expect("every label is bound");
                    self.set_field(at, to as i64 - end as i64);
                }
                Target::Function(_) | Target::Pool(_) => self.fixups.push((at, end, target)),
            }
        }
        self.labels.clear();
    }

    /// Writes a field of four bytes.
    pub fn set_field(&mut self, at: usize, value: i64) {
        let value = i32::try_from(value).expect("code is short");
        self.code[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// Fills up to a multiple of so many bytes with instructions that do nothing.
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

    /// The ModRM byte, what follows of the operand, and the immediate. Short displacements count in `unit` bytes.
    fn operand(&mut self, reg: u8, rm: Rm, unit: i32, immediate: &[u8]) {
        let reg = (reg & 7) << 3;
        match rm {
            Rm::Register(r) => self.code.push(0xc0 | reg | r & 7),
            Rm::Memory(Address { base: Base::Pool, disp, .. }) => {
                self.code.push(reg | 5);
                let at = self.code.len();
                self.code.extend([0; 4]);
                self.fixups.push((at, at + 4 + immediate.len(), Target::Pool(disp)));
            }
            Rm::Memory(Address { base: Base::Register(base), index, disp }) => {
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

    /// The high bits of the registers in an operand: of the base or register, of the index, and the fifth of a register.
    fn high_bits(rm: Rm) -> (u8, u8) {
        match rm {
            Rm::Register(r) => (r >> 3 & 1, r >> 4 & 1),
            Rm::Memory(Address { base, index, .. }) => {
                let base = match base {
                    Base::Register(r) => r >> 3 & 1,
                    Base::Pool => 0,
                };
                (base, index.map_or(0, |(r, _)| r >> 3 & 1))
            }
        }
    }

    /// A vector instruction.
    pub fn vector(&mut self, op: Opcode, o: Operands) {
        let Opcode { map, prefix, opcode, wide, evex } = op;
        let Operands { reg, vvvv, rm, width, unit, extra, immediate } = o;
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
        // Elsewhere VEX leaves the bit to other uses.
        let w = w & u8::from(
            map == 2 && opcode >= 0x90 || map == 3 && opcode == 1 || map == 1 && matches!(opcode, 0x2a | 0x6e),
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

    /// An instruction on 64-bit integers, or on 32-bit ones where not `wide`.
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

    /// Leaves the flags as they are.
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

    pub fn load(&mut self, to: u8, from: Address) {
        self.integer(&[0x8b], to, Rm::Memory(from), true, &[]);
    }

    pub fn store(&mut self, to: Address, from: u8) {
        self.integer(&[0x89], from, Rm::Memory(to), true, &[]);
    }

    pub fn lea(&mut self, to: u8, from: Address) {
        self.integer(&[0x8d], to, Rm::Memory(from), true, &[]);
    }

    /// `add`, `or`, `and`, `sub`, `xor` and `cmp` with a constant have these numbers: 0, 1, 4, 5, 6, 7.
    pub fn with_constant(&mut self, number: u8, r: u8, value: i32) {
        match i8::try_from(value) {
            Ok(short) => self.integer(&[0x83], number, Rm::Register(r), true, &[short as u8]),
            Err(_) => self.integer(&[0x81], number, Rm::Register(r), true, &value.to_le_bytes()),
        }
    }

    pub fn jump(&mut self, to: Label) {
        self.code.push(0xe9);
        self.field(Target::Label(to));
    }

    pub fn jump_if(&mut self, condition: Condition, to: Label) {
        if let Some(place) = self.labels[to]
            && let Ok(short) = i8::try_from(place as i64 - self.code.len() as i64 - 2)
        {
            self.code.extend([0x70 | condition as u8, short as u8]);
            return;
        }
        self.code.extend([0x0f, 0x80 | condition as u8]);
        self.field(Target::Label(to));
    }

    pub fn call(&mut self, function: usize) {
        self.code.push(0xe8);
        self.field(Target::Function(function));
    }

    pub fn address_of(&mut self, to: u8, function: usize) {
        self.code.extend([0x48 | (to >> 3) << 2, 0x8d, (to & 7) << 3 | 5]);
        self.field(Target::Function(function));
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

    fn field(&mut self, target: Target) {
        let at = self.code.len();
        self.code.extend([0; 4]);
        self.fixups.push((at, at + 4, target));
    }
}
