//! Rules that fold per-channel scales and offsets after products and convolutions into weights.

use tilewright_graph::{DType, Tensor};
use tilewright_ir::Expr;
use tilewright_ir::expr::BinaryOp;

use super::{by_channel, drop_unread};
use crate::net::{Kind, Net, Node, ValueId};
use crate::scalar::{self, add, input, substitute};

/// Folds per-channel factors and terms after a convolution or product with constant weights into the weights
/// and one bias.
pub(super) fn fold_affine(net: &mut Net) -> usize {
    let mut n_folded = 0;
    let n_uses = net.n_uses();
    let mut users: Vec<Option<usize>> = vec![None; net.values.len()];
    for (at, node) in net.nodes.iter().enumerate() {
        node.inputs.iter().flatten().for_each(|id| users[id.0] = Some(at));
    }
    for at in 0..net.nodes.len() {
        // Only constants are folded, so the readers of the anchors' results stay the same.
        let only = net.nodes[at].outputs.first().filter(|id| n_uses[id.0] == 1).and_then(|id| users[id.0]);
        if let Some(user) = only {
            n_folded += usize::from(fold_affine_into(net, at, user).is_some());
        }
    }
    n_folded
}

/// Folds the affine map of a node's only reader into the node.
fn fold_affine_into(net: &mut Net, at: usize, user: usize) -> Option<()> {
    let anchor = net.nodes[at].clone();
    let out = net.shape(anchor.output()).to_vec();
    let axis = match &anchor.kind {
        Kind::Conv(_) => 1,
        Kind::Product { .. } if out.len() == 2 => 1,
        _ => return None,
    };
    let weights = anchor.input(1);
    net.value(weights).constant.as_ref()?;
    let x = anchor.output();
    let node = net.nodes[user].clone();
    let Kind::Map(value) = &node.kind else { return None };
    if net.shape(node.output()) != out || net.value(node.output()).dtype != net.value(x).dtype {
        return None;
    }
    let slot = node.inputs.iter().position(|id| *id == Some(x))?;
    let mut value = value.clone();
    let n = out[axis] as usize;
    let (mut factor, mut term, mut n_folded) = (vec![1.0; n], vec![0.0; n], 0);
    while let Some((op, by, rest)) = innermost(&value, slot) {
        let Some(numbers) = by_channel(net, &node, &by, &out, axis) else { break };
        match op {
            BinaryOp::Mul => {
                factor.iter_mut().zip(&numbers).for_each(|(f, x)| *f *= x);
                term.iter_mut().zip(&numbers).for_each(|(t, x)| *t *= x);
            }
            BinaryOp::Add => term.iter_mut().zip(&numbers).for_each(|(t, x)| *t += x),
            _ => term.iter_mut().zip(&numbers).for_each(|(t, x)| *t -= x),
        }
        value = rest;
        n_folded += 1;
    }
    let has_factor = factor.iter().any(|&f| f != 1.0);
    if n_folded == 0 || n_folded == 1 && !has_factor {
        return None;
    }
    let mut new = node.clone();
    if has_factor {
        let scaled = scaled_weights(net, &anchor, weights, &factor)?;
        net.nodes[at].inputs[1] = Some(scaled);
    }
    if term.iter().any(|&t| t != 0.0) {
        let shape: Vec<i64> = std::iter::once(n as i64).chain(out[axis + 1..].iter().map(|_| 1)).collect();
        let numbers: Vec<f32> = term.iter().map(|&t| t as f32).collect();
        let bias = net.add_constant(&format!("{}.bias", anchor.origin), &shape, &numbers);
        new.inputs.push(Some(bias));
        let bias = new.inputs.len() - 1;
        value = substitute(&value, &|at| if at == slot { add(input(slot), input(bias)) } else { input(at) });
    }
    new.kind = Kind::Map(value);
    drop_unread(&mut new);
    if matches!(&new.kind, Kind::Map(Expr::Load(..))) {
        // Only the value itself is left.
        new.kind = Kind::View;
    }
    net.nodes[user] = new;
    Some(())
}

/// Finds a binary operation that is applied, with the same other operand, to every read of an input: the
/// operation, the operand, and the expression without it.
fn innermost(value: &Expr, slot: usize) -> Option<(BinaryOp, Expr, Expr)> {
    let is_x = |e: &Expr| matches!(e, Expr::Load(b, _) if b.0 as usize == slot);
    let mut parents: Vec<&Expr> = Vec::new();
    fn collect<'a>(e: &'a Expr, is_x: &dyn Fn(&Expr) -> bool, parents: &mut Vec<&'a Expr>) -> Option<()> {
        match e {
            Expr::Binary(_, a, b) => {
                if is_x(a) || is_x(b) {
                    parents.push(e);
                }
                for side in [a, b] {
                    if !is_x(side) {
                        collect(side, is_x, parents)?;
                    }
                }
                Some(())
            }
            Expr::Unary(_, x) => {
                if is_x(x) {
                    return None;
                }
                collect(x, is_x, parents)
            }
            Expr::Const(_) => Some(()),
            // A read without such an operation.
            Expr::Load(..) if is_x(e) => None,
            Expr::Load(..) => Some(()),
            _ => None,
        }
    }
    collect(value, &is_x, &mut parents)?;
    let first = (*parents.first()?).clone();
    if parents.iter().any(|other| **other != first) {
        return None;
    }
    let Expr::Binary(op, a, b) = &first else { return None };
    let by = match (op, is_x(a), is_x(b)) {
        (BinaryOp::Add | BinaryOp::Mul | BinaryOp::Sub, true, false) => (**b).clone(),
        (BinaryOp::Add | BinaryOp::Mul, false, true) => (**a).clone(),
        _ => return None,
    };
    Some((*op, by, scalar::replaced(value, &first, &input(slot))))
}

/// Weights with each channel of the output scaled.
fn scaled_weights(net: &mut Net, anchor: &Node, weights: ValueId, factor: &[f64]) -> Option<ValueId> {
    let shape = net.shape(weights).to_vec();
    let axis = match &anchor.kind {
        Kind::Conv(conv) if conv.transposed => 1,
        Kind::Conv(_) => 0,
        Kind::Product { turned, .. } => usize::from(!turned),
        _ => return None,
    };
    let inside: usize = shape[axis + 1..].iter().product::<i64>() as usize;
    let tensor = net.value(weights).constant.clone().filter(|tensor| tensor.dtype() == DType::F32)?;
    // Works on bytes, without a copy as numbers: weights are most of a model's data.
    let mut bytes = vec![0; tensor.bytes().len()];
    let (from, to) = (tensor.bytes().as_chunks::<4>().0, bytes.as_chunks_mut::<4>().0);
    for ((from, to), factor) in from.chunks(inside).zip(to.chunks_mut(inside)).zip(factor.iter().cycle()) {
        for (from, to) in from.iter().zip(to) {
            *to = ((f64::from(f32::from_le_bytes(*from)) * factor) as f32).to_le_bytes();
        }
    }
    let id = net.add_value(&format!("{}.scaled", net.value(weights).name), DType::F32, &shape);
    net.values[id.0].constant = Tensor::new(tensor.ty().clone(), bytes.into());
    Some(id)
}
