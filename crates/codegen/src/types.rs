//! Which element types code is generated for.

use crate::CompileError;
use tilewright_ir::expr::Node;
use tilewright_ir::{DType, Expr, Program, Stmt};

/// Whether code is generated for all element types of a program and of casts in some statements of it.
pub(crate) fn check<'s>(program: &Program, stmts: impl IntoIterator<Item = &'s Stmt>) -> Result<(), CompileError> {
    let refused = |dtype: DType, what: &str| CompileError::ElementType { dtype: dtype.name(), what: what.to_owned() };
    if let Some(buffer) = program.buffers.iter().find(|buffer| !buffer.dtype.is_generated()) {
        return Err(refused(buffer.dtype, &format!("buffer `{}`", buffer.name)));
    }
    let mut cast = None;
    for stmt in stmts {
        stmt.walk(&mut |stmt| {
            stmt.own_nodes().for_each(|node| {
                node.walk(&mut |node| match node {
                    Node::Expr(Expr::Cast(dtype, _)) if !dtype.is_generated() => cast = Some(*dtype),
                    Node::Expr(_) | Node::Cond(_) => {}
                });
            });
        });
    }
    cast.map_or(Ok(()), |dtype| Err(refused(dtype, "a cast")))
}
