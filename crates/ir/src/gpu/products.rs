//! Checks of tensor core products, for a single loop and for all loops of a kernel.

use super::tensor::warp;
use super::{GpuKernel, GroupProduct, TileProduct, store};
use crate::dot;
use crate::expr::{Cond, TreePart};
use crate::index::Ranges;
use crate::program::{Loop, LoopId, LoopKind, Program, Stmt, TensorProduct};

/// Checks that a loop is a product of kind `how`.
///
/// # Errors
/// The reason why the loop is not such a product.
pub fn check(program: &Program, l: &Loop, how: TensorProduct, ranges: &Ranges) -> Result<(), &'static str> {
    match how {
        TensorProduct::Dot4 | TensorProduct::Dot2 => dot::check(program, l, how, &mut ranges.clone()),
        TensorProduct::Tf32 | TensorProduct::Tf32x3 | TensorProduct::Halves => {
            TileProduct::of(program, l, how).map(drop)
        }
        TensorProduct::Wgmma | TensorProduct::Wgmmax3 => GroupProduct::of(program, l, how).map(drop),
        TensorProduct::Tma => store::check(program, l),
    }
}

/// Checks that whole warps compute the tile products of a kernel.
///
/// # Errors
/// The loop of a product that they cannot compute, and the reason.
pub(super) fn require_warps(program: &Program, kernel: &GpuKernel) -> Result<(), (LoopId, &'static str)> {
    in_block(program, kernel, &kernel.body, [true; 2], &mut kernel.ranges())
}

/// Checks the products of a block of statements; `together` says whether all threads of a warp, and all of a
/// warpgroup, reach it.
fn in_block(
    program: &Program,
    kernel: &GpuKernel,
    block: &[Stmt],
    together: [bool; 2],
    ranges: &mut Ranges,
) -> Result<(), (LoopId, &'static str)> {
    let axes = kernel.threads.map(|axis| axis.map(|(var, _)| var));
    let parts = |uses: &dyn Fn(LoopId) -> bool| {
        let [x, y, z] = axes.map(|var| var.is_some_and(uses));
        [x || y, x || y || z]
    };
    for stmt in block {
        let mut together = together;
        if let Stmt::For(l) = stmt {
            if let LoopKind::Tensor(how) = l.kind
                && how.dot_steps().is_none()
            {
                let fail = |why| (l.var, why);
                let [of_warp, of_group] = together;
                if !if how.is_of_groups() { of_group } else { of_warp } {
                    return Err(fail(
                        "it stands under a condition that divides a warp, or warps that multiply together",
                    ));
                }
                let [x, y] =
                    warp(&kernel.threads).ok_or(fail("a warp has 4 threads along thread.x and 8 along thread.y"))?;
                let require = |ranges: &mut Ranges| match how {
                    TensorProduct::Wgmma | TensorProduct::Wgmmax3 => {
                        GroupProduct::of(program, l, how)?.require_group(program, kernel, ranges)
                    }
                    TensorProduct::Tma => store::BoxStore::of(program, l, [x, y], ranges).map(drop),
                    TensorProduct::Tf32
                    | TensorProduct::Tf32x3
                    | TensorProduct::Halves
                    | TensorProduct::Dot4
                    | TensorProduct::Dot2 => TileProduct::of(program, l, how)?.require_warp(x, y, program, ranges),
                };
                ranges.inside(l.var, &l.extent, require).map_err(fail)?;
                continue;
            }
            let parted = parts(&|var| l.extent.uses(var));
            together = [0, 1].map(|of| together[of] && !parted[of]);
        }
        if let Stmt::If { cond, .. } = stmt {
            let mut on_values = false;
            TreePart::Cond(cond).walk(&mut |node| on_values |= matches!(node, TreePart::Cond(Cond::Less(..))));
            let parted = parts(&|var| cond.uses(var));
            together = [0, 1].map(|of| together[of] && !on_values && !parted[of]);
        }
        let mut done = Ok(());
        stmt.each_block(ranges, |block, ranges| {
            if done.is_ok() {
                done = in_block(program, kernel, block, together, ranges);
            }
        });
        done?;
    }
    Ok(())
}
