//! Reordering the loops of a perfect nest.

use super::Illegal;
use super::dependence::{require_order_kept, require_still_independent};
use super::tree::{edit_loops, nest, require_serial, single_loop};
use crate::program::{Loop, LoopId, Program, Stmt};
use crate::text::index_to_string;

/// Applies [`Step::Reorder`](super::Step::Reorder).
pub fn reorder(program: &mut Program, order: &[String]) -> Result<(), Illegal> {
    let vars = order.iter().map(|name| single_loop(program, name)).collect::<Result<Vec<_>, _>>()?;
    for (at, var) in vars.iter().enumerate() {
        if vars[..at].contains(var) {
            return Err(Illegal::Body { target: order[at].clone(), why: "it is named twice".to_owned() });
        }
    }
    let Some(outermost) = outermost_of(program, &vars) else { return Ok(()) };
    let mut innermost = None;
    edit_loops(program, outermost, &mut |names, l, outside| {
        // Chain of perfectly nested loops down to the last one named.
        let (mut chain, mut missing, mut body) = (Vec::new(), vars.len(), vec![Stmt::For(l)]);
        while missing > 0 {
            let [Stmt::For(_)] = body.as_slice() else {
                let inner = vars.iter().find(|v| !chain.iter().any(|l: &Loop| l.var == **v)).expect("one is missing");
                return Err(Illegal::NotNested {
                    outer: names.loop_name(outermost).to_owned(),
                    inner: names.loop_name(*inner).to_owned(),
                });
            };
            let Some(Stmt::For(mut l)) = body.pop() else { unreachable!("the block is one loop") };
            body = std::mem::take(&mut l.body);
            if vars.contains(&l.var) {
                require_serial(names, &l)?;
                missing -= 1;
            }
            chain.push(l);
        }
        let mut wanted = vars.iter();
        let loops: Vec<Loop> = chain
            .iter()
            .map(|l| {
                let var = if vars.contains(&l.var) { *wanted.next().expect("as many places as loops") } else { l.var };
                chain.iter().find(|c| c.var == var).expect("every named loop is in the chain").clone()
            })
            .collect();
        for (at, l) in loops.iter().enumerate() {
            if let Some(on) = loops[at..].iter().find(|inner| l.extent.uses(inner.var)) {
                return Err(Illegal::ExtentDepends {
                    target: names.loop_name(l.var).to_owned(),
                    extent: index_to_string(names, &l.extent),
                    on: names.loop_name(on.var).to_owned(),
                });
            }
        }
        let after: Vec<LoopId> = loops.iter().map(|l| l.var).collect();
        require_order_kept(names, &chain, &after, &body, outside)?;
        innermost = after.last().copied();
        Ok(nest(loops.into_iter().map(|l| (l.var, l.extent, l.kind)), body))
    })?;
    innermost.map_or(Ok(()), |var| require_still_independent(program, var))
}

/// Finds the outermost of these loops.
fn outermost_of(program: &Program, vars: &[LoopId]) -> Option<LoopId> {
    let mut found = None;
    for s in program.parts().into_iter().flatten() {
        s.walk(&mut |s| {
            if let Stmt::For(l) = s
                && found.is_none()
                && vars.contains(&l.var)
            {
                found = Some(l.var);
            }
        });
    }
    found
}
