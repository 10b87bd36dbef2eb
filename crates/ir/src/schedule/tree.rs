//! Finding and replacing loops in a program's statements.

use super::Illegal;
use crate::dtype::DType;
use crate::expr::Cond;
use crate::index::{Atom, Index, Ranges};
use crate::program::{Buffer, BufferId, Loop, LoopId, LoopKind, Part, Program, Role, Scope, Stmt};
use crate::text::is_name;

/// Finds the variable of a loop by name, if the program contains such a loop.
pub fn loop_id(program: &Program, name: &str) -> Result<LoopId, Illegal> {
    let present = |id: LoopId| count(program, id) > 0;
    program.find_loop(name).filter(|&id| present(id)).ok_or_else(|| {
        let known: Vec<&str> = (0..program.loops.len() as u32)
            .map(LoopId)
            .filter(|&id| present(id))
            .map(|id| program.loop_name(id))
            .collect();
        Illegal::NoLoop(name.to_owned(), known.join(", "))
    })
}

/// Finds a buffer by name.
pub fn buffer_id(program: &Program, name: &str) -> Result<BufferId, Illegal> {
    program.find_buffer(name).ok_or_else(|| {
        let known: Vec<&str> = program.buffers.iter().map(|b| b.name.as_str()).collect();
        Illegal::NoBuffer(name.to_owned(), known.join(", "))
    })
}

/// Creates a loop variable. Its name must be valid and unused.
pub fn new_loop(program: &mut Program, name: &str) -> Result<LoopId, Illegal> {
    require_free(name, program.find_loop(name).is_some())?;
    Ok(program.add_loop(name))
}

/// Creates a temporary or kept buffer, whose shape is set later. Its name must be valid and unused.
pub fn new_buffer(
    program: &mut Program,
    name: &str,
    dtype: DType,
    scope: Scope,
    role: Role,
) -> Result<BufferId, Illegal> {
    require_free(name, program.find_buffer(name).is_some())?;
    Ok(program.add_buffer(Buffer { name: name.to_owned(), dtype, shape: Vec::new(), scope, role }))
}

fn require_free(name: &str, taken: bool) -> Result<(), Illegal> {
    match (is_name(name), taken) {
        (false, _) => Err(Illegal::NotAName(name.to_owned())),
        (true, true) => Err(Illegal::NameTaken(name.to_owned())),
        (true, false) => Ok(()),
    }
}

/// Maximum size of a buffer in bytes.
const MOST_BYTES: u64 = 1 << 46;

/// Requires that a buffer does not exceed the maximum size.
pub fn require_fits(program: &Program, id: BufferId) -> Result<(), Illegal> {
    let buffer = program.buffer(id);
    match buffer.size_bytes() {
        Some(bytes) if bytes <= MOST_BYTES => Ok(()),
        _ => Err(Illegal::Buffer { buffer: buffer.name.clone(), why: "it does not fit into any memory".to_owned() }),
    }
}

/// Number of loops of the program with this variable.
pub fn count(program: &Program, var: LoopId) -> usize {
    program.parts().into_iter().map(|block| count_in(block, var)).sum()
}

/// Number of loops of a block with this variable.
pub fn count_in(block: &[Stmt], var: LoopId) -> usize {
    let mut n = 0;
    for s in block {
        s.walk(&mut |s| n += usize::from(matches!(s, Stmt::For(l) if l.var == var)));
    }
    n
}

/// Loops around the loops over this variable.
pub fn loops_around(program: &Program, var: LoopId) -> Vec<&Loop> {
    fn descend<'a>(block: &'a [Stmt], var: LoopId, around: &mut Vec<&'a Loop>, found: &mut Vec<&'a Loop>) {
        for s in block {
            if let Stmt::For(l) = s {
                if l.var == var {
                    found.extend(around.iter().copied());
                }
                around.push(l);
            }
            s.blocks().for_each(|b| descend(b, var, around, found));
            if let Stmt::For(_) = s {
                around.pop();
            }
        }
    }
    let mut found = Vec::new();
    for block in program.parts() {
        descend(block, var, &mut Vec::new(), &mut found);
    }
    found
}

/// Finds a loop by name that occurs exactly once.
pub fn single_loop(program: &Program, name: &str) -> Result<LoopId, Illegal> {
    let id = loop_id(program, name)?;
    match count(program, id) {
        1 => Ok(id),
        n => Err(Illegal::Cloned(name.to_owned(), n)),
    }
}

/// Function that rewrites a loop, given the program and the ranges of the enclosing loops.
type Edit<'a> = &'a mut dyn FnMut(&Program, Loop, &Ranges) -> Result<Vec<Stmt>, Illegal>;

/// Replaces every loop over this variable by the result of `edit`.
///
/// While `edit` runs, and after an error, the part being edited is missing from the program.
pub fn edit_loops(program: &mut Program, var: LoopId, edit: Edit) -> Result<(), Illegal> {
    let mut ranges = program.ranges();
    for (part, _) in Part::ALL {
        let mut block = std::mem::take(program.part_mut(part));
        edit_block(program, &mut block, var, &mut ranges, edit)?;
        *program.part_mut(part) = block;
    }
    Ok(())
}

/// Replaces the loops over this variable in a block, which lies inside loops of these ranges.
pub fn edit_block(
    program: &Program,
    block: &mut Vec<Stmt>,
    var: LoopId,
    ranges: &mut Ranges,
    edit: Edit,
) -> Result<(), Illegal> {
    let mut at = 0;
    while at < block.len() {
        let is_it = matches!(&block[at], Stmt::For(l) if l.var == var);
        if is_it && let Stmt::For(l) = block.remove(at) {
            let edited = edit(program, l, ranges)?;
            let n = edited.len();
            block.splice(at..at, edited);
            at += n;
            continue;
        }
        let mut done = Ok(());
        block[at].each_block_mut(ranges, |inner, ranges| {
            if done.is_ok() {
                done = edit_block(program, inner, var, ranges, edit);
            }
        });
        done?;
        at += 1;
    }
    Ok(())
}

/// Simplifies every index of a block by the ranges of the loops around and inside the block.
pub fn simplify_block(mut block: Vec<Stmt>, ranges: &mut Ranges) -> Vec<Stmt> {
    simplify(&mut block, ranges);
    block
}

fn simplify(block: &mut [Stmt], ranges: &mut Ranges) {
    for s in block {
        s.for_each_own_index_mut(&mut |i| {
            if i.terms().iter().any(|(atom, _)| !matches!(atom, Atom::Var(_))) {
                *i = ranges.simplify(i);
            }
        });
        s.each_block_mut(ranges, |inner, ranges| simplify(inner, ranges));
    }
}

/// Substitutes indices for loop variables, all at once.
pub fn substitute(block: &mut [Stmt], by: &[(LoopId, Index)]) {
    for s in block {
        s.for_each_own_index_mut(&mut |i| {
            if by.iter().any(|(v, _)| i.uses(*v)) {
                *i = substituted(i, by);
            }
        });
        s.blocks_mut().for_each(|inner| substitute(inner, by));
    }
}

/// Index with loop variables substituted, all at once.
pub fn substituted(index: &Index, by: &[(LoopId, Index)]) -> Index {
    index.rewrite(&mut |atom| match atom {
        Atom::Var(var) => by.iter().find(|(v, _)| v == var).map(|(_, new)| new.clone()),
        _ => None,
    })
}

/// Index in the first iteration of the given loops.
pub fn at_start(index: &Index, loops: impl IntoIterator<Item = LoopId>) -> Index {
    loops.into_iter().fold(index.clone(), |i, v| i.substitute(v, &Index::from(0)))
}

/// Drops trivial conjuncts `0 == 0` from a condition.
pub fn drop_decided(cond: &Cond) -> Cond {
    match cond {
        Cond::Eq(a, b) if a == b => Cond::True,
        Cond::And(a, b) => drop_decided(a).and(drop_decided(b)),
        other => other.clone(),
    }
}

/// Requires a serial loop.
pub fn require_serial(program: &Program, l: &Loop) -> Result<(), Illegal> {
    if l.kind == LoopKind::Serial {
        Ok(())
    } else {
        Err(Illegal::NotSerial { target: program.loop_name(l.var).to_owned(), kind: l.kind.name() })
    }
}

/// Requires that statements other than plain assignments may be put into a loop, as neither the loop nor an
/// enclosing one is vectorized.
pub fn require_open(program: &Program, var: LoopId) -> Result<(), Illegal> {
    let mut loops = loops_around(program, var);
    program.parts().into_iter().flatten().for_each(|s| {
        s.walk(&mut |s| {
            if let Stmt::For(l) = s
                && l.var == var
            {
                loops.push(l);
            }
        })
    });
    match loops.into_iter().find(|l| l.kind == LoopKind::Vectorized) {
        None => Ok(()),
        Some(l) => Err(Illegal::NotSerial { target: program.loop_name(l.var).to_owned(), kind: l.kind.name() }),
    }
}

/// Nests a block in loops, outermost first.
pub fn nest(loops: impl DoubleEndedIterator<Item = (LoopId, Index, LoopKind)>, body: Vec<Stmt>) -> Vec<Stmt> {
    loops.rev().fold(body, |body, (var, extent, kind)| vec![Stmt::For(Loop { var, extent, kind, body })])
}

/// Buffers allocated in the block, directly or nested.
pub fn allocated_in(block: &[Stmt]) -> Vec<BufferId> {
    let mut found = Vec::new();
    for s in block {
        s.walk(&mut |s| {
            if let Stmt::Alloc(b) = s {
                found.push(*b);
            }
        });
    }
    found
}
