//! Changing how the iterations of a loop are carried out.

use super::Illegal;
use super::tree::{allocated_in, edit_loops, loop_id, require_serial};
use crate::index::{Index, Ranges};
use crate::program::{BufferId, Loop, LoopId, LoopKind, Program, Stmt};
use crate::text::index_to_string;
use crate::verify::writes_are_disjoint;

/// More lanes than this make no sense on any machine and only bloat the code.
const MOST_LANES: i64 = 1024;
/// More copies of a body than this are refused.
const MOST_UNROLLED: i64 = 4096;

/// See [`super::Step::Vectorize`].
pub fn vectorize(program: &mut Program, target: &str) -> Result<(), Illegal> {
    set_kind(program, target, LoopKind::Vectorized, &|names, l, ranges| {
        let innermost =
            l.body.iter().all(|s| matches!(s, Stmt::Store { .. } | Stmt::Update { .. } | Stmt::Prefetch { .. }));
        if !innermost {
            return Err(Illegal::Body {
                target: target.to_owned(),
                why: "only an innermost loop of plain assignments can be vectorized".to_owned(),
            });
        }
        bounded(names, l, ranges, MOST_LANES)?;
        require_independent(names, l, ranges)
    })
}

/// See [`super::Step::Unroll`].
pub fn unroll(program: &mut Program, target: &str) -> Result<(), Illegal> {
    set_kind(program, target, LoopKind::Unrolled, &|names, l, ranges| bounded(names, l, ranges, MOST_UNROLLED))
}

/// See [`super::Step::Parallel`].
pub fn parallel(program: &mut Program, target: &str) -> Result<(), Illegal> {
    set_kind(program, target, LoopKind::Parallel, &|names, l, ranges| {
        let mut nested = None;
        for s in &l.body {
            s.walk(&mut |s| {
                if let Stmt::For(inner) = s
                    && inner.kind == LoopKind::Parallel
                {
                    nested = Some(inner.var);
                }
            });
        }
        if let Some(inner) = nested {
            return Err(Illegal::NotSerial {
                target: names.loop_name(inner).to_owned(),
                kind: LoopKind::Parallel.name(),
            });
        }
        require_independent(names, l, ranges)
    })
}

/// See [`super::Step::Bind`].
pub fn bind(program: &mut Program, target: &str, axis: LoopKind) -> Result<(), Illegal> {
    if !matches!(axis, LoopKind::Block(0..=2) | LoopKind::Thread(0..=2)) {
        return Err(Illegal::Body { target: target.to_owned(), why: format!("`{}` is not a GPU axis", axis.name()) });
    }
    set_kind(program, target, axis, &|names, l, ranges| require_independent(names, l, ranges))
}

type Check<'a> = &'a dyn Fn(&Program, &Loop, &Ranges) -> Result<(), Illegal>;

/// Sets the kind of every loop of this name, each of which must be serial and pass the check.
fn set_kind(program: &mut Program, target: &str, kind: LoopKind, check: Check) -> Result<(), Illegal> {
    let var = loop_id(program, target)?;
    let names = program.clone();
    edit_loops(program, var, &mut |mut l, ranges| {
        require_serial(&names, &l)?;
        check(&names, &l, ranges)?;
        l.kind = kind;
        Ok(vec![Stmt::For(l)])
    })
}

fn bounded(names: &Program, l: &Loop, ranges: &Ranges, most: i64) -> Result<(), Illegal> {
    match ranges.upper(&l.extent) {
        Some(n) if n <= most => Ok(()),
        _ => Err(Illegal::TooLong {
            target: names.loop_name(l.var).to_owned(),
            extent: index_to_string(names, &l.extent),
            most,
        }),
    }
}

/// Every iteration must write places of its own and read none that another one writes.
fn require_independent(names: &Program, l: &Loop, ranges: &Ranges) -> Result<(), Illegal> {
    let target = names.loop_name(l.var);
    let private = allocated_in(&l.body);
    let mut ranges = ranges.clone();
    ranges.push(l.var, l.extent.clone());
    check_writes(names, &l.body, l.var, &private, &mut ranges)?;
    require_no_carried_reads(names, target, &l.body, false)
}

fn check_writes(
    names: &Program,
    block: &[Stmt],
    var: LoopId,
    private: &[BufferId],
    ranges: &mut Ranges,
) -> Result<(), Illegal> {
    for s in block {
        if let Some((buffer, index)) = s.own_write()
            && !private.contains(&buffer)
            && !writes_are_disjoint(index, var, ranges)
        {
            return Err(Illegal::Dependent {
                target: names.loop_name(var).to_owned(),
                why: format!("several of them may write the same element {}", element(names, buffer, index)),
            });
        }
        if let Stmt::For(l) = s {
            ranges.push(l.var, l.extent.clone());
        }
        for b in s.blocks() {
            check_writes(names, b, var, private, ranges)?;
        }
        if let Stmt::For(_) = s {
            ranges.pop();
        }
    }
    Ok(())
}

/// A buffer that lives outside the block and is written in it may be read there only where it is written.
///
/// With `updates_commute`, the old value that an update combines with is not counted as read.
pub fn require_no_carried_reads(
    names: &Program,
    target: &str,
    block: &[Stmt],
    updates_commute: bool,
) -> Result<(), Illegal> {
    let private = allocated_in(block);
    let mut writes: Vec<(BufferId, &[Index])> = Vec::new();
    for s in block {
        s.walk(&mut |s| {
            if let Some(w) = s.own_write() {
                writes.push(w);
            }
        });
    }
    let mut carried = None;
    for s in block {
        s.walk(&mut |s| {
            let own_old = match s {
                Stmt::Update { buffer, index, .. } if updates_commute => Some((*buffer, index.as_slice())),
                _ => None,
            };
            s.for_each_own_read(&mut |buffer, index| {
                if own_old == Some((buffer, index)) || private.contains(&buffer) {
                    return;
                }
                if writes.iter().any(|(b, i)| *b == buffer && *i != index) {
                    carried = Some(element(names, buffer, index));
                }
            });
        });
    }
    match carried {
        None => Ok(()),
        Some(read) => Err(Illegal::Dependent {
            target: target.to_owned(),
            why: format!("{read} is read while other elements of the buffer are written"),
        }),
    }
}

fn element(names: &Program, buffer: BufferId, index: &[Index]) -> String {
    let subscripts: Vec<String> = index.iter().map(|i| index_to_string(names, i)).collect();
    format!("{}[{}]", names.buffer(buffer).name, subscripts.join(", "))
}
