//! Numbers within nodes that depend on the open size, such as the divisor of a mean, or the index of the last
//! element.

use tilewright_graph::{DType, Tensor};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, Cond};
use tilewright_ir::op::{Structure, WorkloadError};
use tilewright_runtime::{OpenDimension, RunSize};

use super::{is_corner, through};
use crate::fuse::{Fused, Kernel, Step, nest};
use crate::net::{Kind, Net, Node, ValueId};
use crate::scalar::{input, number};

/// A number at the sizes that are compared, the largest last.
type AtSizes = [f64; 3];

/// Form of a number that depends on the size.
#[derive(Clone, Copy)]
enum Form {
    /// An integer.
    Whole,
    /// Inverse of an integer.
    Inverse,
}

/// Makes nodes that differ between sizes only in numbers read these numbers from separate values, which are
/// known once a run has set its size; `nets` are those of the sizes `at` and of the largest.
///
/// # Errors
/// If a nest of such nodes cannot be built.
pub(super) fn read_numbers(dim: &OpenDimension, at: [i64; 2], nets: &mut [Fused; 3]) -> Result<(), WorkloadError> {
    let count = |of: &dyn Fn(&Fused) -> usize| nets.iter().all(|fused| of(fused) == of(&nets[2]));
    if !count(&|fused| fused.net.nodes.len()) || !count(&|fused| fused.net.values.len()) {
        return Ok(());
    }
    let windows = of_windows(dim, at, nets);
    let mut changed = of_constants(dim, at, nets);
    for node in 0..nets[2].net.nodes.len() {
        let is_changed = match nets.each_ref().map(|fused| &fused.net.nodes[node].kind) {
            [Kind::Map(_), Kind::Map(_), Kind::Map(_)] => of_map(dim, at, nets, node),
            [Kind::Slice(_), Kind::Slice(_), Kind::Slice(_)] => of_slice(dim, at, nets, node),
            _ => false,
        };
        changed.extend(is_changed.then_some(node));
    }
    if changed.is_empty() && windows.is_empty() {
        return Ok(());
    }
    for fused in nets {
        let mut steps = Vec::with_capacity(fused.steps.len());
        let mut n_loops = 0;
        for step in std::mem::take(&mut fused.steps) {
            match &step {
                Step::While(_) => n_loops += 1,
                Step::Again(_) => n_loops -= 1,
                // Members of kernels within a loop are nodes of its own net.
                _ if n_loops > 0 => {}
                Step::Kernel(kernel)
                    if matches!(kernel.workload.structure(), Structure::Nest(_))
                        && (kernel.members.iter().any(|member| changed.contains(member))
                            || windows.iter().any(|(id, _)| kernel.inputs.contains(id))) =>
                {
                    let own = windows.iter().filter(|(id, _)| kernel.inputs.contains(id)).map(|(_, node)| *node);
                    let members: Vec<usize> = own.chain(kernel.members.iter().copied()).collect();
                    steps.extend(nests(&fused.net, &members, &changed)?.into_iter().map(Step::Kernel));
                    continue;
                }
                Step::Part { part, .. } => {
                    let maker = changed.iter().find(|&&node| fused.net.nodes[node].outputs.contains(part));
                    // Results of loops may be parts, too, and a loop is no nest.
                    let is_view = |node: &Node| matches!(node.kind, Kind::View | Kind::Slice(_) | Kind::Gather { .. });
                    if let Some(&node) = maker.filter(|&&node| is_view(&fused.net.nodes[node])) {
                        steps.push(Step::Kernel(nest(&fused.net, &[node], &|_| 1)?));
                        continue;
                    }
                }
                _ => {}
            }
            steps.push(step);
        }
        fused.steps = steps;
    }
    Ok(())
}

/// Nests of nodes, in order: a gather reads from memory, so the nodes that compute what a `changed` one reads
/// are a nest of their own.
fn nests(net: &Net, members: &[usize], changed: &[usize]) -> Result<Vec<Kernel>, WorkloadError> {
    let makes = |at: usize, id: ValueId| net.nodes[at].outputs.contains(&id);
    let gathers = members
        .iter()
        .filter(|at| changed.contains(at) && matches!(net.nodes[**at].kind, Kind::Gather { by_element: false, .. }));
    let mut tables = gathers.map(|&at| net.nodes[at].input(0));
    let Some(maker) = tables.find_map(|table| members.iter().copied().find(|at| makes(*at, table))) else {
        return Ok(vec![nest(net, members, &|_| 1)?]);
    };
    // Members that compute the result of the last one, without those that only compute the table.
    let of = |last: usize, without: Option<usize>| {
        let mut wanted: Vec<ValueId> = net.nodes[last].outputs.clone();
        let mut own: Vec<usize> = Vec::new();
        for &at in members.iter().rev() {
            if Some(at) != without && wanted.iter().any(|id| makes(at, *id)) {
                wanted.extend(net.nodes[at].inputs.iter().flatten());
                own.push(at);
            }
        }
        own.reverse();
        own
    };
    let last = *members.last().expect("a nest has a node");
    let mut made = nests(net, &of(maker, None), changed)?;
    made.extend(nests(net, &of(last, Some(maker)), changed)?);
    Ok(made)
}

/// Replaces constants that are parts of the largest size's, from a start that depends on the size, by gathers
/// from that one: encodings of relative positions, for example. Only nests may read them. Returns the values,
/// each with its gather.
fn of_windows(dim: &OpenDimension, at: [i64; 2], nets: &mut [Fused; 3]) -> Vec<(ValueId, usize)> {
    let mut found = Vec::new();
    for id in (0..nets[2].net.values.len()).map(ValueId) {
        let constants = nets.each_ref().map(|fused| fused.net.values[id.0].constant.clone());
        let [Some(first), Some(second), Some(whole)] = &constants else { continue };
        if [first, second].into_iter().all(|part| is_corner(part, whole)) {
            continue;
        }
        let starts = [first, second].map(|part| start_in(part, whole));
        let [Some((axis, start)), Some((other, second_start))] = starts else { continue };
        let starts = [start, second_start, 0].map(|start| start as f64);
        let is_affine = matches!(form_of(dim, at, starts), Some((_, Form::Whole)));
        if axis != other || !is_affine || !nets.iter().all(|fused| is_read_by_nests(fused, id)) {
            continue;
        }
        for ((fused, own), start) in nets.iter_mut().zip(&constants).zip(starts) {
            let n = own.as_ref().map_or(0, |own| own.shape()[axis]);
            let net = &mut fused.net;
            let (name, shape) =
                (net.value(id).name.clone(), whole.shape().iter().map(|n| *n as i64).collect::<Vec<_>>());
            let of_most = net.add_value(&format!("{name}.whole"), whole.dtype(), &shape);
            net.values[of_most.0].constant = Some(whole.clone());
            net.values[id.0].constant = None;
            let kind = Kind::Gather { axis, by_element: false };
            net.nodes.push(Node { kind, inputs: vec![Some(of_most)], outputs: vec![id], origin: name });
            let node = net.nodes.len() - 1;
            add_input(fused, node, DType::I64, &(0..n).map(|place| start + place as f64).collect::<Vec<_>>());
        }
        found.push((id, nets[2].net.nodes.len() - 1));
    }
    found
}

/// Dimension along which a tensor is a part of another one, and where it starts.
fn start_in(part: &Tensor, whole: &Tensor) -> Option<(usize, usize)> {
    let (own, all) = (part.shape(), whole.shape());
    if own.len() != all.len() || part.dtype() != whole.dtype() || part.bytes().is_empty() {
        return None;
    }
    let mut differ = (0..own.len()).filter(|axis| own[*axis] != all[*axis]);
    let (axis, None) = (differ.next()?, differ.next()) else { return None };
    let n_outer: usize = own[..axis].iter().product();
    let row = part.bytes().len() / (n_outer * own[axis]);
    if row == 0 || own[axis] > all[axis] {
        return None;
    }
    let is_at = |start: &usize| {
        (0..n_outer).all(|at| {
            let of_whole = &whole.bytes()[(at * all[axis] + start) * row..][..own[axis] * row];
            *of_whole == part.bytes()[at * own[axis] * row..][..own[axis] * row]
        })
    };
    (0..=all[axis] - own[axis]).find(is_at).map(|start| (axis, start))
}

/// Whether only nests read a value.
fn is_read_by_nests(fused: &Fused, id: ValueId) -> bool {
    let is_nest =
        |kernel: &Kernel| matches!(kernel.workload.structure(), Structure::Nest(_)) && !kernel.members.is_empty();
    !fused.net.outputs.contains(&id)
        && fused.steps.iter().all(|step| match step {
            Step::Kernel(kernel) => !kernel.inputs.contains(&id) || is_nest(kernel),
            Step::Host(node) => !node.inputs.contains(&Some(id)),
            Step::Part { of, .. } => *of != id,
            Step::Join { parts, .. } => !parts.contains(&id),
            Step::Append { from, .. } | Step::Set { from, .. } => *from != id,
            Step::Sequence(_) | Step::While(_) | Step::Again(_) => false,
        })
}

/// Maximum number of elements of a constant that is treated as dependent on the size.
const MOST_NUMBERS: usize = 8;

/// Replaces small constants that depend on the size by values; returns the nodes that read them.
fn of_constants(dim: &OpenDimension, at: [i64; 2], nets: &mut [Fused; 3]) -> Vec<usize> {
    let mut found = Vec::new();
    for id in 0..nets[2].net.values.len() {
        let constants = nets.each_ref().map(|fused| fused.net.values[id].constant.clone());
        let [Some(first), Some(second), Some(most)] = &constants else { continue };
        let is_alike = [first, second].iter().all(|other| other.ty() == most.ty());
        let is_number = matches!(most.dtype(), DType::I32 | DType::I64 | DType::F32 | DType::F64);
        if !is_alike || !is_number || most.n_elements() > MOST_NUMBERS || first == most && second == most {
            continue;
        }
        let [first, second, most] = [first, second, most].map(Tensor::floats);
        let mut numbers = first.iter().zip(&second).zip(&most).map(|((first, second), most)| [*first, *second, *most]);
        if numbers.all(|number| matches!(form_of(dim, at, number), Some((_, Form::Whole)))) {
            for (fused, constant) in nets.iter_mut().zip(constants) {
                fused.net.values[id].constant = None;
                fused.net.varying.extend(constant.map(|constant| (ValueId(id), constant)));
            }
            found.push(ValueId(id));
        }
    }
    let reads = |node: &Node| node.inputs.iter().flatten().any(|id| found.contains(id));
    (0..nets[2].net.nodes.len()).filter(|node| reads(&nets[2].net.nodes[*node])).collect()
}

/// Adds a value of numbers that depend on the size to a net, as another input of a node.
fn add_input(fused: &mut Fused, node: usize, dtype: DType, numbers: &[f64]) {
    let net = &mut fused.net;
    let name = format!("{}.sizes{}", net.nodes[node].origin, net.nodes[node].inputs.len());
    let shape = [numbers.len()];
    let tensor = match dtype.is_float() {
        true => Tensor::from_floats(dtype, shape, numbers),
        false => Tensor::from_integers(dtype, shape, &numbers.iter().map(|x| *x as i128).collect::<Vec<_>>()),
    };
    let id = net.add_value(&name, dtype, &[numbers.len() as i64]);
    net.varying.push((id, tensor));
    net.nodes[node].inputs.push(Some(id));
}

/// Matches a number that is affine in the size, or the inverse of such a number.
fn form_of(dim: &OpenDimension, at: [i64; 2], number: AtSizes) -> Option<(AtSizes, Form)> {
    let is_linear = |number: &AtSizes| {
        let [first, second, most] = number.map(|x| x as i64);
        let is_whole = number.iter().all(|x| x.fract() == 0.0 && x.abs() < 1e9);
        is_whole && through(dim, at, [first, second]).is_some_and(|size: RunSize| size.at(dim.most) == most)
    };
    let inverse = number.map(|x| (1.0 / x).round());
    let is_inverse = number.iter().zip(inverse).all(|(x, n)| 1.0 / n == *x);
    if is_linear(&number) {
        return Some((number, Form::Whole));
    }
    (is_inverse && is_linear(&inverse)).then_some((inverse, Form::Inverse))
}

/// Makes a map read its differing numbers.
fn of_map(dim: &OpenDimension, at: [i64; 2], nets: &mut [Fused; 3], node: usize) -> bool {
    let mut numbers: [Vec<f64>; 3] = Default::default();
    let mut forms: Vec<String> = Vec::new();
    for (fused, numbers) in nets.iter().zip(&mut numbers) {
        let Kind::Map(expr) = &fused.net.nodes[node].kind else { return false };
        let mut bare = expr.clone();
        each_number(&mut bare, &mut |x| {
            numbers.push(x);
            Some(number(0.0))
        });
        forms.push(format!("{bare:?}"));
    }
    let [first, second, most] = &numbers;
    if forms.iter().any(|form| *form != forms[2]) {
        return false;
    }
    let mut found: Vec<Option<(AtSizes, Form)>> = Vec::with_capacity(most.len());
    for ((first, second), most) in first.iter().zip(second).zip(most) {
        if first == most && second == most {
            found.push(None);
            continue;
        }
        match form_of(dim, at, [*first, *second, *most]) {
            Some(form) => found.push(Some(form)),
            None => return false,
        }
    }
    let dtype = nets[2].net.value(nets[2].net.nodes[node].output()).dtype;
    let numbers: Vec<(AtSizes, Form)> = found.iter().flatten().copied().collect();
    let is_fit = match dtype {
        DType::F32 | DType::F64 => true,
        DType::I32 | DType::I64 => numbers.iter().all(|(_, form)| matches!(form, Form::Whole)),
        _ => false,
    };
    if numbers.is_empty() || !is_fit {
        return false;
    }
    let before = nets[2].net.nodes[node].inputs.len();
    for (number, _) in &numbers {
        nets.iter_mut().zip(number).for_each(|(fused, number)| add_input(fused, node, dtype, &[*number]));
    }
    for fused in nets {
        let Kind::Map(expr) = &mut fused.net.nodes[node].kind else { return false };
        let (mut place, mut next) = (found.iter(), before);
        each_number(expr, &mut |_| {
            let (_, form) = place.next()?.as_ref()?;
            next += 1;
            let read = input(next - 1);
            Some(match form {
                Form::Whole => read,
                Form::Inverse => Expr::binary(BinaryOp::Div, number(1.0), read),
            })
        });
    }
    true
}

/// Replaces each number of an expression for which `change` returns a replacement.
fn each_number(expr: &mut Expr, change: &mut dyn FnMut(f64) -> Option<Expr>) {
    fn of_cond(cond: &mut Cond, change: &mut dyn FnMut(f64) -> Option<Expr>) {
        match cond {
            Cond::True | Cond::Lt(..) | Cond::Eq(..) => {}
            Cond::Less(a, b) => [a, b].into_iter().for_each(|x| each_number(x, change)),
            Cond::And(a, b) => [a, b].into_iter().for_each(|x| of_cond(x, change)),
            Cond::Not(a) => of_cond(a, change),
        }
    }
    match expr {
        Expr::Const(x) => {
            if let Some(new) = change(*x) {
                *expr = new;
            }
        }
        Expr::Load(..) | Expr::Gather(..) | Expr::FromIndex(_) => {}
        Expr::Unary(_, x) | Expr::Cast(_, x) => each_number(x, change),
        Expr::Binary(_, a, b) => [a, b].into_iter().for_each(|x| each_number(x, change)),
        Expr::Select(cond, a, b) => {
            of_cond(cond, change);
            [a, b].into_iter().for_each(|x| each_number(x, change));
        }
    }
}

/// Replaces a slice whose start depends on the size, and perhaps its length, by a gather of its positions.
fn of_slice(dim: &OpenDimension, at: [i64; 2], nets: &mut [Fused; 3], node: usize) -> bool {
    let parts = nets.each_ref().map(|fused| match &fused.net.nodes[node].kind {
        Kind::Slice(parts) => parts.clone(),
        _ => Vec::new(),
    });
    let [first, second, most] = &parts;
    let differ: Vec<usize> = (0..most.len())
        .filter(|&axis| first.get(axis) != most.get(axis) || second.get(axis) != most.get(axis))
        .collect();
    let &[axis] = &differ[..] else { return false };
    let step = most[axis].1;
    let shapes = |fused: &Fused| {
        let node = &fused.net.nodes[node];
        [fused.net.shape(node.input(0)).to_vec(), fused.net.shape(node.output()).to_vec()]
    };
    let lengths = nets.each_ref().map(|fused| shapes(fused)[1][axis]);
    // Positions of any number are those of a range.
    let is_as_long = |fused: &Fused| {
        let [from, to] = shapes(fused);
        (to[axis] == lengths[2] || step == 1)
            && from.iter().zip(&to).enumerate().all(|(own, (from, to))| own == axis || from == to)
    };
    let is_whole = |parts: &Vec<(i64, i64)>| {
        parts[axis].1 == step && parts.iter().enumerate().all(|(own, part)| own == axis || *part == (0, 1))
    };
    let firsts = [first, second, most].map(|parts| parts[axis].0 as f64);
    let is_fit = nets.iter().all(is_as_long) && parts.iter().all(is_whole);
    if !is_fit || !matches!(form_of(dim, at, firsts), Some((_, Form::Whole))) {
        return false;
    }
    for ((fused, first), n) in nets.iter_mut().zip(firsts).zip(lengths) {
        let places: Vec<f64> = (0..n).map(|place| first + (place * step) as f64).collect();
        add_input(fused, node, DType::I64, &places);
        fused.net.nodes[node].kind = Kind::Gather { axis, by_element: false };
    }
    true
}
