//! Layout transformations of buffers, which permute dimensions and tile some of them.

use super::dependence::require_all_still_independent;
use super::region::map_loads_of;
use super::tree::{buffer_id, require_fits};
use super::{Illegal, LayoutAxis};
use crate::expr::Expr;
use crate::index::{Index, Ranges};
use crate::program::{BufferId, Part, Program, Role, Stmt};

/// Largest tile of a layout.
const MOST_TILE: i64 = 1 << 40;

/// Applies [`Step::Layout`](super::Step::Layout).
pub fn layout(program: &mut Program, buffer: &str, axes: &[LayoutAxis]) -> Result<(), Illegal> {
    let id = buffer_id(program, buffer)?;
    match program.buffer(id).role {
        Role::Temporary | Role::Kept => {}
        Role::Input | Role::ConstInput | Role::Output => {
            let why = "its layout is the caller's; stage a copy and lay that out".to_owned();
            return Err(Illegal::Buffer { buffer: buffer.to_owned(), why });
        }
    }
    require_layout(program, id, axes)?;
    lay_out(program, id, axes);
    require_fits(program, id)?;
    require_all_still_independent(program)
}

/// Rewrites a buffer and all accesses to it for another layout.
pub fn lay_out(program: &mut Program, id: BufferId, axes: &[LayoutAxis]) {
    program.buffers[id.0 as usize].shape = shape_of(axes, &program.buffer(id).shape);
    let mut ranges = program.ranges();
    for (part, _) in Part::ALL {
        let part = program.part_mut(part);
        *part = relocate(std::mem::take(part), id, axes, &mut ranges);
    }
}

/// Rewrites every access to a buffer for its layout.
fn relocate(block: Vec<Stmt>, id: BufferId, axes: &[LayoutAxis], ranges: &mut Ranges) -> Vec<Stmt> {
    let each = |mut s: Stmt| {
        s.each_block_mut(ranges, |inner, ranges| *inner = relocate(std::mem::take(inner), id, axes, ranges));
        if let Stmt::Store { buffer, index, .. }
        | Stmt::Update { buffer, index, .. }
        | Stmt::Prefetch { buffer, index, .. } = &mut s
            && *buffer == id
        {
            *index = place_of(axes, index, ranges);
        }
        map_loads_of(s, id, &mut |index| Expr::Load(id, place_of(axes, index, ranges)))
    };
    block.into_iter().map(each).collect()
}

/// Maps an element's subscripts to those in a layout.
pub fn place_of(layout: &[LayoutAxis], index: &[Index], ranges: &Ranges) -> Vec<Index> {
    let along = |axis: &LayoutAxis| match *axis {
        LayoutAxis::Whole(d) => index[d].clone(),
        LayoutAxis::Outer(d, t) => index[d].floor_div(t),
        LayoutAxis::Inner(d, t) => index[d].modulo(t),
    };
    layout.iter().map(|axis| ranges.simplify(&along(axis))).collect()
}

/// Shape of a buffer of `extents` in a layout; partial tiles are rounded up.
pub fn shape_of(layout: &[LayoutAxis], extents: &[i64]) -> Vec<i64> {
    let extent = |axis: &LayoutAxis| match *axis {
        LayoutAxis::Whole(d) => extents[d],
        LayoutAxis::Outer(d, t) => (extents[d] + t - 1) / t,
        LayoutAxis::Inner(_, t) => t,
    };
    layout.iter().map(extent).collect()
}

/// Requires that a layout has every dimension once, whole or as the quotient followed by the remainder by the
/// same tile size.
pub fn require_layout(program: &Program, source: BufferId, layout: &[LayoutAxis]) -> Result<(), Illegal> {
    let buffer = program.buffer(source);
    let fail = |why: String| Err(Illegal::Buffer { buffer: buffer.name.clone(), why });
    let tiles = layout.iter().filter_map(|a| match a {
        LayoutAxis::Outer(_, t) | LayoutAxis::Inner(_, t) => Some(*t),
        LayoutAxis::Whole(_) => None,
    });
    if let Some(value) = tiles.into_iter().find(|t| !(1..=MOST_TILE).contains(t)) {
        let (target, what) = (buffer.name.clone(), "tile size");
        return Err(Illegal::OutOfRange { target, what, least: 1, most: MOST_TILE, value });
    }
    for d in 0..buffer.shape.len() {
        let of_d: Vec<LayoutAxis> = layout
            .iter()
            .copied()
            .filter(
                |a| matches!(a, LayoutAxis::Whole(x) | LayoutAxis::Outer(x, _) | LayoutAxis::Inner(x, _) if *x == d),
            )
            .collect();
        match of_d.as_slice() {
            [LayoutAxis::Whole(_)] => {}
            [LayoutAxis::Outer(_, a), LayoutAxis::Inner(_, b)] if a == b => {}
            _ => {
                return fail(format!(
                    "the layout must hold dimension {d} whole, or divided by a tile size and, after that, its remainder"
                ));
            }
        }
    }
    let most = layout.iter().map(|a| match a {
        LayoutAxis::Whole(d) | LayoutAxis::Outer(d, _) | LayoutAxis::Inner(d, _) => *d,
    });
    match most.max() {
        Some(d) if d >= buffer.shape.len() => fail(format!("it has no dimension {d}")),
        _ => Ok(()),
    }
}
