//! Loop peeling.

use super::Illegal;
use super::tree::{edit_loops, new_loop, require_serial, simplify_block, single_loop, substitute};
use crate::index::Index;
use crate::program::{Loop, LoopId, Program, Stmt};

/// Applies [`Step::Peel`](super::Step::Peel).
pub fn peel(program: &mut Program, target: &str, n: i64, last: bool, suffix: &str) -> Result<(), Illegal> {
    let var = single_loop(program, target)?;
    let mut inside = vec![var];
    for block in program.parts() {
        for s in block {
            s.walk(&mut |s| {
                if let Stmt::For(l) = s
                    && l.var == var
                {
                    l.body.iter().for_each(|s| loops_of(s, &mut inside));
                }
            });
        }
    }
    let renamed: Vec<(LoopId, LoopId)> = inside
        .into_iter()
        .map(|old| Ok((old, new_loop(program, &format!("{}.{suffix}", program.loop_name(old)))?)))
        .collect::<Result<_, _>>()?;
    let own = renamed[0].1;
    edit_loops(program, var, &mut |names, l, ranges| {
        require_serial(names, &l)?;
        // Smallest extent, for an open (dynamic) one.
        let Some(least) = ranges.lower(&l.extent) else {
            let why = "only a loop with a known least extent can be peeled".to_owned();
            return Err(Illegal::Body { target: target.to_owned(), why });
        };
        if !(1..least).contains(&n) {
            let (target, what) = (target.to_owned(), "number of peeled iterations");
            return Err(Illegal::OutOfRange { target, what, least: 1, most: least - 1, value: n });
        }
        let rest = l.extent.offset(-n);
        let (peeled_at, rest_at) = if last { (rest.clone(), 0) } else { (0.into(), n) };
        let mut peeled = Loop { var: own, extent: n.into(), ..l.clone() };
        rename(&mut peeled.body, &renamed);
        let index = |old, new: LoopId| if old == var { Index::from(new).add(&peeled_at) } else { new.into() };
        let by: Vec<(LoopId, Index)> = renamed.iter().map(|&(old, new)| (old, index(old, new))).collect();
        substitute(&mut peeled.body, &by);
        let mut rest = Loop { extent: rest, ..l };
        substitute(&mut rest.body, &[(var, Index::from(var).offset(rest_at))]);
        let mut both = vec![Stmt::For(rest)];
        both.insert(if last { 1 } else { 0 }, Stmt::For(peeled));
        Ok(simplify_block(both, &mut ranges.clone()))
    })
}

fn loops_of(s: &Stmt, found: &mut Vec<LoopId>) {
    s.walk(&mut |s| {
        if let Stmt::For(l) = s
            && !found.contains(&l.var)
        {
            found.push(l.var);
        }
    });
}

/// Gives loops new variables, without renaming their uses.
fn rename(block: &mut [Stmt], by: &[(LoopId, LoopId)]) {
    for s in block {
        if let Stmt::For(l) = s
            && let Some((_, new)) = by.iter().find(|(old, _)| *old == l.var)
        {
            l.var = *new;
        }
        s.blocks_mut().for_each(|inner| rename(inner, by));
    }
}
