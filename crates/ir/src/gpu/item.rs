//! Kernel bodies during thread mapping: loops and conditions shared by all threads of a block, and the
//! regions between barriers.

use crate::expr::{Cond, Expr};
use crate::index::{Index, Ranges};
use crate::program::{BufferId, Loop, Stmt};

/// Statements that a thread runs between two synchronization points.
pub(super) struct ThreadRegion {
    /// Thread axes over which the region is distributed; along other axes, only the first thread runs it.
    pub axes: [bool; 3],
    /// Conditions under which a thread runs the region.
    pub guards: Vec<Cond>,
    /// Entry of the thread loop to which the region belongs.
    pub region: usize,
    /// The statements.
    pub stmts: Vec<Stmt>,
}

/// Part of a kernel's body: a construct common to all threads of a block, or a region that each thread runs.
pub(super) enum Item {
    Loop { head: Loop, body: Vec<Item> },
    If { cond: Cond, then: Vec<Item>, otherwise: Vec<Item> },
    Alloc(BufferId, [bool; 3]),
    Region(ThreadRegion),
    Barrier,
    Wait(u8),
}

/// Calls `visit` for every region, with its enclosing loops.
pub(super) fn each_region(items: &mut [Item], visit: &mut dyn FnMut(&mut ThreadRegion, &Ranges)) {
    fn walk(items: &mut [Item], ranges: &mut Ranges, visit: &mut dyn FnMut(&mut ThreadRegion, &Ranges)) {
        for item in items {
            match item {
                Item::Loop { head, body } => ranges.inside(head.var, &head.extent, |ranges| walk(body, ranges, visit)),
                Item::If { then, otherwise, .. } => {
                    walk(then, ranges, visit);
                    walk(otherwise, ranges, visit);
                }
                Item::Region(region) => visit(region, ranges),
                Item::Alloc(..) | Item::Barrier | Item::Wait(_) => {}
            }
        }
    }
    walk(items, &mut Ranges::default(), visit);
}

/// Rewrites every access to a buffer, and its allocation, to another buffer and other subscripts.
pub(crate) fn relocate(
    stmt: Stmt,
    from: BufferId,
    to: BufferId,
    place: &mut dyn FnMut(&[Index]) -> Vec<Index>,
) -> Stmt {
    let mut stmt = match stmt {
        Stmt::Alloc(b) if b == from => Stmt::Alloc(to),
        other => other.map_own_loads(&mut |b, index| (b == from).then(|| Expr::Load(to, place(index)))),
    };
    if let Stmt::Store { buffer, index, .. } | Stmt::Update { buffer, index, .. } | Stmt::Prefetch { buffer, index, .. } =
        &mut stmt
        && *buffer == from
    {
        (*buffer, *index) = (to, place(index));
    }
    for block in stmt.blocks_mut() {
        *block = std::mem::take(block).into_iter().map(|s| relocate(s, from, to, place)).collect();
    }
    stmt
}
