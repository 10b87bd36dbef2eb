//! Units, which are statements outlined as functions that all programs containing them share.
//!
//! Candidates of a search differ only in a few parameters. The code that packs an operand, fills a register
//! tile or writes it back is the same in many of them, and its compilation is the most expensive step for a
//! candidate.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use tilewright_ir::index::Ranges;
use tilewright_ir::lower::leaves;
use tilewright_ir::text::{index_to_string, stmt_to_string};
use tilewright_ir::{BufferId, LoopId, LoopKind, Program, Scope, Stmt};

use super::plan::{self, KnownIndices, TemporaryMemory};
use super::{Generator, Storage};
use crate::CompileError;
use crate::loader::LoadedCode;
use crate::ssa::{Id, Linkage, Type};

/// Minimum number of (vector) operations of a unit's execution; the call costs about a hundredth of them.
const LEAST_WORK: f64 = 1000.0;
/// Minimum number of leaf statements of a unit after unrolling.
const LEAST_CODE: usize = 8;
/// Number of lanes of a vector, to estimate work.
const LANES: f64 = 8.0;
/// Assumed number of iterations of a loop of unknown extent.
const UNKNOWN_EXTENT: f64 = 8.0;
/// Maximum number of objects with units kept for later programs, each in two mappings of whole pages.
const MOST_CODES: usize = 256;

/// Consecutive statements of a block.
#[derive(Clone, Debug, PartialEq)]
pub enum CodeSegment {
    /// Statements outlined as a unit.
    Unit(Range<usize>),
    /// Statements generated in place; they may contain units.
    Plain(Range<usize>),
}

/// Partitions a block into units, as deeply nested as their work allows, and the statements around them.
pub fn segments(program: &Program, block: &[Stmt], ranges: &mut Ranges) -> Vec<CodeSegment> {
    let mut out = Vec::new();
    let mut start = 0;
    for (at, stmt) in block.iter().enumerate() {
        if let Stmt::Alloc(buffer) = stmt
            && program.buffer(*buffer).scope == Scope::Register
        {
            // Uses of register buffers stay in one function.
            break;
        }
        let is_parallel = stmt.has_parallel_loop();
        if is_parallel || work(stmt, ranges) >= LEAST_WORK {
            run(block, start..at, &mut out);
            let is_unit = !is_parallel && has_enough_code(stmt) && !has_large_part(stmt, ranges);
            out.push(if is_unit { CodeSegment::Unit(at..at + 1) } else { CodeSegment::Plain(at..at + 1) });
            start = at + 1;
        }
    }
    run(block, start..block.len(), &mut out);
    out
}

/// Adds statements that are too small for units.
fn run(block: &[Stmt], range: Range<usize>, out: &mut Vec<CodeSegment>) {
    if range.is_empty() {
        return;
    }
    let is_unit = leaves(&block[range.clone()]) >= LEAST_CODE;
    out.push(if is_unit { CodeSegment::Unit(range) } else { CodeSegment::Plain(range) });
}

/// Approximate number of operations of a statement's execution.
fn work(stmt: &Stmt, ranges: &mut Ranges) -> f64 {
    match stmt {
        Stmt::For(l) => {
            let extent = ranges.upper(&l.extent).map_or(UNKNOWN_EXTENT, |n| n.max(0) as f64);
            ranges.push(l.var, l.extent.clone());
            let body: f64 = l.body.iter().map(|s| work(s, ranges)).sum();
            ranges.pop();
            body * if l.kind == LoopKind::Vectorized { (extent / LANES).ceil() } else { extent }
        }
        Stmt::If { then, otherwise, .. } => {
            let [then, otherwise] = [then, otherwise].map(|block| block.iter().map(|s| work(s, ranges)).sum::<f64>());
            then.max(otherwise)
        }
        Stmt::Alloc(_) | Stmt::Barrier | Stmt::Wait(_) => 0.0,
        Stmt::Store { .. } | Stmt::Update { .. } | Stmt::Prefetch { .. } => 1.0,
    }
}

/// Whether a part of a statement can be a unit.
fn has_large_part(stmt: &Stmt, ranges: &mut Ranges) -> bool {
    if let Stmt::For(l) = stmt {
        ranges.push(l.var, l.extent.clone());
    }
    let found = stmt.blocks().flatten().any(|s| work(s, ranges) >= LEAST_WORK && has_enough_code(s));
    if let Stmt::For(_) = stmt {
        ranges.pop();
    }
    found && !matches!(stmt, Stmt::For(l) if l.kind == LoopKind::Vectorized)
}

fn has_enough_code(stmt: &Stmt) -> bool {
    leaves(std::slice::from_ref(stmt)) >= LEAST_CODE
}

/// Prefix of the names of units, followed by a hash of everything that determines the unit.
const PREFIX: &str = "unit.";

/// Cache of recently used units, for one target.
#[derive(Default)]
pub struct Units {
    /// Code of the units, by their functions' names.
    known: HashMap<String, Arc<LoadedCode>>,
    /// Code of all units, most recently used last.
    codes: VecDeque<Arc<LoadedCode>>,
}

/// Units that a program uses or defines.
#[derive(Default)]
pub struct ProgramUnits {
    /// Code of earlier programs that the program shares.
    pub shared: Vec<Arc<LoadedCode>>,
    /// Names of the units that the program's own object defines.
    pub made: BTreeSet<String>,
}

impl Units {
    /// Adds the units of an object, and marks those that it shares with earlier ones as used. Beyond
    /// [`MOST_CODES`] objects, the least recently used one is dropped.
    pub fn keep(&mut self, code: &Arc<LoadedCode>, shared: &[Arc<LoadedCode>]) {
        for used in shared {
            if let Some(at) = self.codes.iter().position(|known| Arc::ptr_eq(known, used)) {
                let used = self.codes.remove(at).expect("it was found there");
                self.codes.push_back(used);
            }
        }
        if units_of(code).next().is_none() {
            return;
        }
        self.known.extend(units_of(code).map(|unit| (unit.to_owned(), Arc::clone(code))));
        self.codes.push_back(Arc::clone(code));
        while self.codes.len() > MOST_CODES {
            let oldest = self.codes.pop_front().expect("there are more than none");
            // Another worker may have compiled the same unit.
            self.known.retain(|_, code| !Arc::ptr_eq(code, &oldest));
        }
    }

    /// Address of a unit's function by name, if known.
    pub fn address(&self, symbol: &str) -> Option<usize> {
        self.known.get(symbol)?.symbol(symbol).map(|address| address as usize)
    }
}

/// Names of the units that an object defines.
fn units_of(code: &LoadedCode) -> impl Iterator<Item = &str> {
    code.symbols().filter(|symbol| symbol.starts_with(PREFIX))
}

/// Name of a unit's function.
fn symbol(key: &str) -> String {
    // With 128 bits, collisions do not occur in practice, even across processes.
    let [high, low] = [0u8, 1].map(|salt| {
        let mut hasher = DefaultHasher::new();
        (salt, key).hash(&mut hasher);
        hasher.finish()
    });
    format!("{PREFIX}{high:016x}{low:016x}")
}

impl Generator<'_> {
    /// Generates a call of a unit, and its function if there is none with this code yet.
    pub(super) fn unit(&mut self, block: &[Stmt]) -> Result<(), CompileError> {
        let (used, vars) = plan::captures(block);
        let mut own = BTreeSet::new();
        for stmt in block {
            stmt.walk(&mut |s| {
                if let Stmt::Alloc(buffer) = s {
                    own.insert(*buffer);
                }
            });
        }
        let mut buffers = Vec::new();
        for buffer in &used {
            if own.contains(buffer) && !matches!(self.plan.places.get(buffer), Some(TemporaryMemory::Scratch { .. })) {
                continue;
            }
            match self.f.storage.get(buffer) {
                Some(Storage::Pointer(pointer)) => buffers.push((*buffer, *pointer)),
                Some(Storage::Chunks(_)) => panic!("what is held in registers stays in one function"),
                None => return Err(self.never_allocated(*buffer)),
            }
        }
        // Sorted by name, as ids differ between programs.
        buffers.sort_by_key(|(buffer, _)| &self.program.buffer(*buffer).name);
        let (known, mut vars): (Vec<LoopId>, Vec<LoopId>) =
            vars.into_iter().partition(|v| self.f.known.contains_key(v));
        vars.sort_by_key(|v| self.program.loop_name(*v));
        let known: KnownIndices = known.into_iter().map(|v| (v, self.f.known[&v])).collect();
        let ranges = self.ranges_of(&vars);
        let key = self.unit_key(block, &buffers, &used, &vars, &known, &ranges);
        let (ptr, i64) = (Type::POINTER, Type::I64);
        let types: Vec<_> = buffers.iter().map(|_| ptr).chain(vars.iter().map(|_| i64)).collect();
        let arguments: Vec<Id> = buffers.iter().map(|(_, p)| *p).chain(vars.iter().map(|v| self.f.vars[v].0)).collect();
        let symbol = symbol(&key);
        let is_new = match self.units.known.get(&symbol) {
            Some(code) => {
                if !self.uses.shared.iter().any(|shared| Arc::ptr_eq(shared, code)) {
                    self.uses.shared.push(Arc::clone(code));
                }
                false
            }
            None => self.uses.made.insert(symbol.clone()),
        };
        let function = self.m.declare(&symbol, Linkage::Outside, None, &types);
        self.m.call(function, &arguments);
        for buffer in plan::written_buffers(block) {
            self.f.seen.loads.remove(&buffer);
        }
        if !is_new {
            return Ok(());
        }

        let after = self.m.current_block();
        let linkage = if self.prefix.is_some() { Linkage::Internal } else { Linkage::Exported };
        let outer = self.start_function(function, linkage);
        self.f.ranges = ranges;
        self.f.known = known;
        self.f.is_unit = true;
        for (at, (buffer, _)) in buffers.iter().enumerate() {
            self.buffer_parameter(at, *buffer);
        }
        for (at, var) in vars.iter().enumerate() {
            self.var_parameter(buffers.len() + at, *var);
        }
        self.block(block)?;
        self.leave_function();
        self.f = outer;
        self.go_to_end(after);
        Ok(())
    }

    /// Ranges of some variables, and of the variables in their extents.
    fn ranges_of(&self, vars: &[LoopId]) -> Ranges {
        let mut needed: BTreeSet<LoopId> = vars.iter().copied().collect();
        let mut loops = Vec::new();
        for (var, extent) in self.f.ranges.loops().iter().rev().filter(|(v, _)| !self.f.known.contains_key(v)) {
            if needed.contains(var) {
                extent.for_each_var(&mut |v| needed.extend([v]));
                loops.push((*var, extent.clone()));
            }
        }
        let mut ranges = Ranges::default();
        loops.into_iter().rev().for_each(|(var, extent)| ranges.push(var, extent));
        ranges
    }

    /// Key of a unit, which contains everything that its code depends on.
    fn unit_key(
        &self,
        block: &[Stmt],
        passed: &[(BufferId, Id)],
        used: &BTreeSet<BufferId>,
        vars: &[LoopId],
        known: &KnownIndices,
        ranges: &Ranges,
    ) -> String {
        let mut key = String::new();
        let text = |key: &mut String| -> std::fmt::Result {
            writeln!(key, "{:016x}", self.target_hash)?;
            for (buffer, _) in passed {
                let b = self.program.buffer(*buffer);
                writeln!(key, "{} {:?} {:?} {}", b.name, b.dtype, b.shape, self.is_constant(*buffer))?;
                if self.plan.pairs.contains(buffer) {
                    writeln!(key, "for pairs")?;
                }
            }
            let mut inside: Vec<BufferId> =
                used.iter().copied().filter(|b| !passed.iter().any(|(p, _)| p == b)).collect();
            inside.sort_by_key(|buffer| &self.program.buffer(*buffer).name);
            for buffer in inside {
                let b = self.program.buffer(buffer);
                writeln!(key, "{} {:?} {:?} {:?}", b.name, b.dtype, b.shape, self.plan.places.get(&buffer))?;
                if self.plan.pairs.contains(&buffer) {
                    writeln!(key, "for pairs")?;
                }
            }
            for var in vars {
                writeln!(key, "{}", self.program.loop_name(*var))?;
            }
            for (var, extent) in ranges.loops() {
                writeln!(key, "{} < {}", self.program.loop_name(*var), index_to_string(self.program, extent))?;
            }
            let mut known: Vec<(&str, i64)> = known.iter().map(|(v, i)| (self.program.loop_name(*v), *i)).collect();
            known.sort_unstable();
            for (var, value) in known {
                writeln!(key, "{var} = {value}")?;
            }
            block.iter().for_each(|stmt| key.push_str(&stmt_to_string(self.program, stmt)));
            Ok(())
        };
        text(&mut key).expect("writing to a string does not fail");
        key
    }
}
