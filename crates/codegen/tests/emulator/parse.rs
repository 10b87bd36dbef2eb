//! Parser of PTX in LLVM's format: one instruction per line, with doubly indented continuation lines.

use std::collections::HashMap;

use super::bulk::Barriers;
use super::{Code, Compute, Entry, Factor, Group, Instruction, LOCAL, Operand, Relation, Rounding, Space, Special, Ty};

/// Parses the kernels of a module.
///
/// # Errors
/// The text that cannot be parsed or is not a supported instruction.
pub fn read(text: &str) -> Result<Vec<Entry>, String> {
    // Joins continuation lines.
    let text = text.replace("\n\t\t", " ");
    let lines: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim()).collect();
    let shared: HashMap<&str, usize> = lines.iter().filter_map(|line| memory(line, ".shared")).collect();
    let mut entries = Vec::new();
    let mut at = 0;
    while let Some(first) = (at..lines.len()).find(|at| lines[*at].contains(".entry ")) {
        let end = (first..lines.len()).find(|at| lines[*at] == "}").ok_or("an entry does not end")?;
        entries.push(Reader::new(&shared).entry(&lines[first..end])?);
        at = end;
    }
    Ok(entries)
}

/// Name and size in bytes of an array in an address space.
fn memory<'l>(line: &'l str, kind: &str) -> Option<(&'l str, usize)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    words.iter().find(|word| **word == kind)?;
    let (name, rest) = words.last()?.split_once('[')?;
    Some((name, rest.split(']').next()?.parse().unwrap_or(0)))
}

struct Reader<'l> {
    /// Shared arrays of the module, with their sizes in bytes.
    shared: &'l HashMap<&'l str, usize>,
    /// Offsets of shared variables that this kernel uses.
    places: HashMap<&'l str, u64>,
    shared_bytes: usize,
    local: HashMap<&'l str, u64>,
    local_bytes: usize,
    registers: HashMap<&'l str, usize>,
    parameters: HashMap<&'l str, usize>,
    labels: HashMap<&'l str, usize>,
}

impl<'l> Reader<'l> {
    fn new(shared: &'l HashMap<&'l str, usize>) -> Reader<'l> {
        Reader {
            shared,
            places: HashMap::new(),
            shared_bytes: 0,
            local: HashMap::new(),
            local_bytes: 0,
            registers: HashMap::new(),
            parameters: HashMap::new(),
            labels: HashMap::new(),
        }
    }

    fn entry(mut self, lines: &[&'l str]) -> Result<Entry, String> {
        let name = lines[0].split_once(".entry ").expect("it is an entry").1.trim_end_matches(['(', ')']).to_owned();
        let (mut threads, mut maps, mut cluster) = ([1; 3], Vec::new(), 1);
        let mut statements = Vec::new();
        for line in &lines[1..] {
            if line.starts_with(".param") {
                let name = line.trim_end_matches(',').rsplit(' ').next().expect("a parameter has a name");
                let (name, is_map) = name.split_once('[').map_or((name, false), |(name, _)| (name, true));
                self.parameters.insert(name, self.parameters.len());
                maps.push(is_map);
            } else if let Some(list) = line.strip_prefix(".reqntid").or_else(|| line.strip_prefix(".maxntid")) {
                for (axis, n) in list.split(',').enumerate() {
                    threads[axis] = n.trim().parse().map_err(|_| format!("threads: {line}"))?;
                }
            } else if let Some(list) = line.strip_prefix(".reqnctapercluster") {
                let along = list.trim().strip_suffix(", 1, 1").and_then(|n| n.parse().ok());
                cluster = along.ok_or_else(|| format!("a cluster not along x: {line}"))?;
            } else if let Some((name, bytes)) = memory(line, ".local") {
                self.local.insert(name, LOCAL + self.local_bytes as u64);
                self.local_bytes += bytes.next_multiple_of(64);
            } else if let Some(label) = line.strip_suffix(':') {
                self.labels.insert(label, statements.len());
            } else if line.starts_with('.') || matches!(*line, "" | "(" | ")" | "{") {
                continue;
            } else {
                let statement = line.strip_suffix(';').or_else(|| line.strip_suffix("; }"));
                statements.push(statement.ok_or_else(|| format!("no end: {line}"))?);
            }
        }
        let code = statements.into_iter().map(|line| self.instruction(line)).collect::<Result<_, _>>()?;
        let Reader { shared_bytes, local_bytes, registers, .. } = self;
        let n_registers = registers.len();
        Ok(Entry { name, threads, cluster, shared_bytes, local_bytes, n_registers, parameters: maps, code })
    }

    fn instruction(&mut self, line: &'l str) -> Result<Instruction, String> {
        let (guard, rest) = match line.strip_prefix('@') {
            None => (None, line),
            Some(guarded) => {
                let (predicate, rest) = guarded.split_once(char::is_whitespace).ok_or("a guard of nothing")?;
                let (name, value) = match predicate.strip_prefix('!') {
                    Some(name) => (name, false),
                    None => (predicate, true),
                };
                (Some((self.register(name), value)), rest.trim())
            }
        };
        // Half of a register, in the form for GPUs without a sink register.
        if let Some(halves) = rest.strip_prefix("{ .reg .b16 tmp; mov.b32 {") {
            let parts = halves.split_once("}, ").and_then(|(to, from)| Some((to.split_once(", ")?, from)));
            let ((lower, upper), from) = parts.ok_or_else(|| format!("no half: {line}"))?;
            let (to, shift) = if lower == "tmp" { (upper, 16) } else { (lower, 0) };
            let operands = vec![self.operand(to)?, self.operand(from)?, Operand::Number(shift)];
            let code = code("shr.u32").expect("an instruction of ours");
            return Ok(Instruction { guard, code, operands, text: line.replace('\t', " ") });
        }
        let (opcode, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let operands = parts(operands).into_iter().map(|text| self.operand(text)).collect::<Result<_, _>>()?;
        let code = code(opcode).ok_or_else(|| format!("an instruction that is none of ours: {line}"))?;
        Ok(Instruction { guard, code, operands, text: line.replace('\t', " ") })
    }

    fn register(&mut self, name: &'l str) -> usize {
        let next = self.registers.len();
        *self.registers.entry(name).or_insert(next)
    }

    fn operand(&mut self, text: &'l str) -> Result<Operand, String> {
        let inside = |open, close| text.strip_prefix(open).and_then(|rest: &str| rest.strip_suffix(close));
        if let Some(list) = inside('{', '}') {
            return Ok(Operand::List(parts(list).into_iter().map(|x| self.operand(x)).collect::<Result<_, _>>()?));
        }
        if let Some((base, coordinates)) = inside('[', ']').and_then(|place| place.split_once(", {")) {
            let list = coordinates.strip_suffix('}').ok_or("coordinates do not end")?;
            let list = parts(list).into_iter().map(|x| self.operand(x)).collect::<Result<_, _>>()?;
            return Ok(Operand::In(Box::new(self.operand(base.trim())?), list));
        }
        if let Some(place) = inside('[', ']') {
            let (base, offset) = match place.split_once('+') {
                Some((base, offset)) => (base, offset.parse().map_err(|_| format!("an offset: {text}"))?),
                None => (place, 0),
            };
            return Ok(Operand::At(Box::new(self.operand(base.trim())?), offset));
        }
        if text == "_" {
            return Ok(Operand::Sink);
        }
        if let Some(special) = special(text) {
            return Ok(Operand::Special(special));
        }
        if text.starts_with('%') {
            return Ok(Operand::Register(self.register(text)));
        }
        if let Some(number) = number(text) {
            return Ok(Operand::Number(number));
        }
        if let Some(at) = self.parameters.get(text) {
            return Ok(Operand::Parameter(*at));
        }
        if let Some(at) = self.labels.get(text) {
            return Ok(Operand::Label(*at));
        }
        if let Some(at) = self.local.get(text) {
            return Ok(Operand::Number(*at));
        }
        let Some((name, bytes)) = self.shared.get_key_value(text) else { return Err(format!("what is {text}?")) };
        let next = self.shared_bytes.next_multiple_of(16);
        if let Some(at) = self.places.get(name) {
            return Ok(Operand::Shared(*at));
        }
        self.shared_bytes = next + bytes;
        self.places.insert(name, next as u64);
        Ok(Operand::Shared(next as u64))
    }
}

/// Splits at commas outside of brackets.
fn parts(text: &str) -> Vec<&str> {
    let (mut out, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                out.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    let last = text[start..].trim();
    out.extend((!last.is_empty()).then_some(last));
    out
}

fn special(text: &str) -> Option<Special> {
    if text == "%globaltimer" {
        return Some(Special::Time);
    }
    let (name, axis) = text.split_once('.')?;
    let axis = ["x", "y", "z"].iter().position(|a| *a == axis)?;
    Some(match name {
        "%tid" => Special::Thread(axis),
        "%ctaid" => Special::Block(axis),
        "%ntid" => Special::Threads(axis),
        "%nctaid" => Special::Blocks(axis),
        _ => return None,
    })
}

fn number(text: &str) -> Option<u64> {
    let bits = |digits: &str| u64::from_str_radix(digits, 16).ok();
    match text.get(..2) {
        Some("0f" | "0d") => bits(&text[2..]),
        Some("0x") => bits(text[2..].trim_end_matches('U')),
        _ => text.parse::<i64>().map(|n| n as u64).ok().or_else(|| text.parse().ok()),
    }
}

fn ty(word: &str) -> Option<Ty> {
    let kind = word.chars().next()?;
    match (word, kind) {
        ("pred", _) => Some(Ty { kind: 'p', bits: 1 }),
        ("bf16", _) => Some(Ty { kind: 'h', bits: 16 }),
        ("f32x2", _) => Some(Ty { kind: 'v', bits: 64 }),
        (_, 'u' | 's' | 'b' | 'f') => Some(Ty { kind, bits: word[1..].parse().ok()? }),
        _ => None,
    }
}

fn relation(word: &str) -> Option<Relation> {
    Some(match word {
        "eq" => Relation::Equal,
        "ne" => Relation::NotEqual,
        "lt" | "lo" => Relation::Less,
        "le" | "ls" => Relation::LessEqual,
        "gt" | "hi" => Relation::Greater,
        "ge" | "hs" => Relation::GreaterEqual,
        "nan" => Relation::Unordered,
        "equ" => Relation::OrUnordered(&Relation::Equal),
        "neu" => Relation::OrUnordered(&Relation::NotEqual),
        "ltu" => Relation::OrUnordered(&Relation::Less),
        "leu" => Relation::OrUnordered(&Relation::LessEqual),
        "gtu" => Relation::OrUnordered(&Relation::Greater),
        "geu" => Relation::OrUnordered(&Relation::GreaterEqual),
        _ => return None,
    })
}

/// Parses an opcode; `None` if unknown.
fn code(opcode: &str) -> Option<Code> {
    let words: Vec<&str> = opcode.split('.').collect();
    let has = |word: &str| words[1..].contains(&word);
    let types: Vec<Ty> = words[1..].iter().filter_map(|word| ty(word)).collect();
    let last = types.last().copied();
    // Only these rounding and saturation modifiers are emulated exactly.
    let is_exact = |known: &[&str]| words[1..].iter().all(|word| ty(word).is_some() || known.contains(word));
    let space = || {
        let spaces = [
            ("param", Space::Parameter),
            ("global", Space::Global),
            ("shared", Space::Shared),
            ("local", Space::Local),
        ];
        spaces.into_iter().find(|(name, _)| has(name)).map_or(Space::Any, |(_, space)| space)
    };
    let compute = |what: Compute| {
        let ty = last.filter(|_| is_exact(&["rn", "NaN"]))?;
        Some(if types.len() == 1 { Code::Compute(what, ty) } else { Code::Mixed(what, ty) })
    };
    match words[0] {
        "ld" => Some(Code::Load(space(), last?)),
        "st" => Some(Code::Store(space(), last?)),
        "mov" => Some(Code::Move(last?)),
        "cvta" => Some(Code::Move(last?)),
        "add" => compute(Compute::Add),
        "sub" => compute(Compute::Sub),
        "fma" => compute(Compute::MulAdd),
        "mul" | "mad" if has("wide") => Some(Code::Wide(last?)),
        "mul" if has("hi") => Some(Code::High(last?)),
        "mad" if has("lo") => Some(Code::Compute(Compute::MulAdd, last?)),
        "mul" if has("lo") => Some(Code::Compute(Compute::Mul, last?)),
        "mul" => compute(Compute::Mul),
        "div" => compute(Compute::Div),
        "rem" => compute(Compute::Rem),
        "min" if has("NaN") => compute(Compute::MinOrNan),
        "max" if has("NaN") => compute(Compute::MaxOrNan),
        "min" => compute(Compute::Min),
        "max" => compute(Compute::Max),
        "neg" => compute(Compute::Neg),
        "abs" => compute(Compute::Abs),
        "sqrt" => compute(Compute::Sqrt),
        "rcp" => compute(Compute::Reciprocal),
        "and" => compute(Compute::And),
        "or" => compute(Compute::Or),
        "xor" => compute(Compute::Xor),
        "not" => compute(Compute::Not),
        "shl" => compute(Compute::ShiftLeft),
        "shr" => compute(Compute::ShiftRight),
        "copysign" => compute(Compute::CopySign),
        "setp" => Some(Code::Compare(relation(words[1])?, last?)).filter(|_| words.len() == 3),
        "selp" => Some(Code::Choose(last?)),
        "cvt" if opcode == "cvt.rna.tf32.f32" => Some(Code::Tf32),
        "cvt" if words[2..words.len() - 1] == ["bf16x2"] || words[2..words.len() - 1] == ["f16x2"] => {
            let to = ty(words[2].strip_suffix("x2")?)?;
            (words[1] == "rn").then_some(Code::Pair { to, from: last? })
        }
        "mma" => {
            let kind = match opcode.strip_prefix("mma.sync.aligned.")? {
                "m16n8k8.row.col.f32.tf32.tf32.f32" => Factor::Tf32,
                "m16n8k16.row.col.f32.bf16.bf16.f32" => Factor::Bf16,
                "m16n8k16.row.col.f32.f16.f16.f32" => Factor::F16,
                _ => return None,
            };
            Some(Code::TileProduct(kind))
        }
        "wgmma" => {
            let what = match words[1] {
                "fence" => Group::Fence,
                "commit_group" => Group::End,
                "wait_group" => Group::Wait,
                "mma_async" => {
                    let shape = opcode.strip_prefix("wgmma.mma_async.sync.aligned.m64n")?;
                    let (n, kind) = shape.split_once('k')?;
                    let factor = match kind {
                        "8.f32.tf32.tf32" => Factor::Tf32,
                        "16.f32.bf16.bf16" => Factor::Bf16,
                        "16.f32.f16.f16" => Factor::F16,
                        _ => return None,
                    };
                    Group::Product { n_columns: n.parse().ok().filter(|n| n % 8 == 0)?, factor }
                }
                _ => return None,
            };
            opcode.contains(".sync.aligned").then_some(Code::Group(what))
        }
        "mbarrier" => Some(Code::Barriers(match opcode {
            "mbarrier.init.shared::cta.b64" => Barriers::Init,
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64" => Barriers::Expect,
            "mbarrier.arrive.shared::cta.b64" => Barriers::Arrive,
            "mbarrier.arrive.shared::cluster.b64" => Barriers::ArriveThere,
            "mbarrier.try_wait.parity.shared::cta.b64" => Barriers::Try,
            _ => return None,
        })),
        "fence" if opcode == "fence.proxy.async.shared::cta" => Some(Code::ProxyFence),
        "fence" if opcode == "fence.mbarrier_init.release.cluster" => Some(Code::BarrierFence),
        "barrier" if opcode == "barrier.cluster.arrive" => Some(Code::ArriveInCluster),
        "barrier" if opcode == "barrier.cluster.wait" => Some(Code::WaitForCluster),
        "mapa" if opcode == "mapa.shared::cluster.u32" => Some(Code::PlaceThere),
        "shfl" if opcode == "shfl.sync.bfly.b32" => Some(Code::Exchange),
        "ldmatrix" => {
            let n = match opcode.strip_prefix("ldmatrix.sync.aligned.m8n8.")?.split_once('.')?.0 {
                "x1" => 1,
                "x2" => 2,
                "x4" => 4,
                _ => return None,
            };
            Some(Code::LoadTiles { n, transposed: has("trans") })
        }
        "cp" => match opcode {
            "cp.async.ca.shared.global" | "cp.async.cg.shared.global" => Some(Code::Copy),
            "cp.async.commit_group" => Some(Code::EndCopies),
            "cp.async.bulk.commit_group" => Some(Code::EndStores),
            "cp.async.bulk.wait_group.read" => Some(Code::WaitForStores),
            _ if opcode.ends_with("d.global.shared::cta.tile.bulk_group") => {
                let n = opcode.strip_prefix("cp.async.bulk.tensor.")?.split_once("d.")?.0;
                Some(Code::BoxStore(n.parse().ok()?))
            }
            _ if opcode.starts_with("cp.async.bulk.tensor.") => {
                let (n, kind) = opcode.strip_prefix("cp.async.bulk.tensor.")?.split_once("d.")?;
                let rest = kind.strip_prefix("shared::cluster.global.tile.mbarrier::complete_tx::bytes")?;
                let is_multicast = rest == ".multicast::cluster";
                (rest.is_empty() || is_multicast).then_some(Code::BoxCopy(n.parse().ok()?, is_multicast))
            }
            "cp.async.wait_group" => Some(Code::WaitForCopies),
            _ => None,
        },
        "cvt" => {
            let [to, from] = types[..] else { return None };
            let rounding =
                [("rni", Rounding::Nearest), ("rmi", Rounding::Down), ("rpi", Rounding::Up), ("rzi", Rounding::Zero)];
            let rounding = rounding.into_iter().find(|(name, _)| has(name)).map_or(Rounding::None, |(_, how)| how);
            is_exact(&["rn", "rni", "rmi", "rpi", "rzi"]).then_some(Code::Convert { to, from, rounding })
        }
        "shf" if has("wrap") => Some(Code::Funnel { left: has("l") }),
        "prmt" if words.len() == 2 => Some(Code::Permute),
        "bfe" => Some(Code::Field(last?)),
        "bra" => Some(Code::Branch),
        "bar" if opcode == "bar.warp.sync" => Some(Code::WarpBarrier),
        "bar" | "barrier" if has("sync") => Some(Code::Barrier),
        "stmatrix" if opcode == "stmatrix.sync.aligned.m8n8.x4.shared.b16" => Some(Code::StoreTiles(4)),
        "ret" | "exit" => Some(Code::Return),
        "trap" => Some(Code::Trap),
        _ => None,
    }
}
