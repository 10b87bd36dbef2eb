//! Numbers within nodes that depend on the open size, such as the divisor of a mean, or the index of the last
//! element.

use tilewright_graph::{DType, Tensor};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, Cond};
use tilewright_ir::op::{Structure, WorkloadError};

use super::comparison::{Probes, is_corner};
use crate::fuse::{Fused, Kernel, Step, nest};
use crate::net::{Kind, Net, Node, ValueId};
use crate::scalar::{input, number};

/// A number at the sizes that are compared, in the order of [`Probes::sizes`].
type AtSizes = Vec<f64>;

/// Form of a number that depends on the size.
#[derive(Clone, Copy)]
enum Form {
    /// An integer.
    Whole,
    /// Inverse of an integer.
    Inverse,
}

/// Makes nodes that differ between sizes only in numbers read these numbers from separate values, which are
/// known once a run has set its size; `nets` are those of the probes' sizes.
///
/// # Errors
/// If a nest of such nodes cannot be built.
pub(super) fn read_numbers(probes: &Probes, nets: &mut [Fused]) -> Result<(), WorkloadError> {
    let count = |of: &dyn Fn(&Fused) -> usize| nets.iter().all(|fused| of(fused) == of(&nets[0]));
    if !count(&|fused| fused.net.nodes.len()) || !count(&|fused| fused.net.values.len()) {
        return Ok(());
    }
    let windows = of_windows(probes, nets);
    let mut changed = of_constants(probes, nets);
    for node in 0..nets[0].net.nodes.len() {
        let is_changed = match nets[0].net.nodes[node].kind {
            Kind::Map(_) => of_map(probes, nets, node),
            Kind::Slice(_) => of_slice(probes, nets, node),
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
fn of_windows(probes: &Probes, nets: &mut [Fused]) -> Vec<(ValueId, usize)> {
    let mut found = Vec::new();
    for id in (0..nets[0].net.values.len()).map(ValueId) {
        let Some(constants) = constants_of(nets, id.0) else { continue };
        let whole = constants.last().expect("there is the largest");
        if constants.iter().all(|part| is_corner(part, whole)) {
            continue;
        }
        let own = constants.iter().filter(|part| *part != whole);
        let Some(starts) = own.map(|part| start_in(part, whole)).collect::<Option<Vec<_>>>() else { continue };
        let axis = starts[0].0;
        let are_along = starts.iter().all(|(own, _)| *own == axis);
        let mut next = starts.iter().map(|(_, start)| *start as f64);
        let starts: Vec<f64> = constants
            .iter()
            .map(|part| if part == whole { 0.0 } else { next.next().expect("each has its start") })
            .collect();
        let is_affine = matches!(form_of(probes, &starts), Some((_, Form::Whole)));
        if !are_along || !is_affine || !nets.iter().all(|fused| is_read_by_nests(fused, id)) {
            continue;
        }
        for ((fused, own), start) in nets.iter_mut().zip(&constants).zip(starts) {
            let n = own.shape()[axis];
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
        found.push((id, nets[0].net.nodes.len() - 1));
    }
    found
}

/// Constants of a value in all nets; `None` if it is not constant.
fn constants_of(nets: &[Fused], id: usize) -> Option<Vec<Tensor>> {
    nets.iter().map(|fused| fused.net.values[id].constant.clone()).collect()
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
fn of_constants(probes: &Probes, nets: &mut [Fused]) -> Vec<usize> {
    let mut found = Vec::new();
    for id in 0..nets[0].net.values.len() {
        let Some(constants) = constants_of(nets, id) else { continue };
        let most = constants.last().expect("there is the largest");
        let is_alike = constants.iter().all(|other| other.ty() == most.ty());
        let is_number = matches!(most.dtype(), DType::I32 | DType::I64 | DType::F32 | DType::F64);
        let is_same = constants.iter().all(|other| other == most);
        if !is_alike || !is_number || most.n_elements() > MOST_NUMBERS || is_same {
            continue;
        }
        let numbers: Vec<Vec<f64>> = constants.iter().map(Tensor::floats).collect();
        let at_sizes = |element: usize| numbers.iter().map(|own| own[element]).collect::<AtSizes>();
        if (0..most.n_elements()).all(|at| matches!(form_of(probes, &at_sizes(at)), Some((_, Form::Whole)))) {
            for (fused, constant) in nets.iter_mut().zip(constants) {
                fused.net.values[id].constant = None;
                fused.net.varying.push((ValueId(id), constant));
            }
            found.push(ValueId(id));
        }
    }
    let reads = |node: &Node| node.inputs.iter().flatten().any(|id| found.contains(id));
    (0..nets[0].net.nodes.len()).filter(|node| reads(&nets[0].net.nodes[*node])).collect()
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

/// Matches a number that is affine in a size, or the inverse of such a number.
fn form_of(probes: &Probes, number: &[f64]) -> Option<(AtSizes, Form)> {
    let is_linear = |number: &[f64]| {
        let is_whole = number.iter().all(|x| x.fract() == 0.0 && x.abs() < 1e9);
        is_whole && probes.fit(&number.iter().map(|x| *x as i64).collect::<Vec<_>>()).is_some()
    };
    let inverse: AtSizes = number.iter().map(|x| (1.0 / x).round()).collect();
    let is_inverse = number.iter().zip(&inverse).all(|(x, n)| 1.0 / n == *x);
    if is_linear(number) {
        return Some((number.to_vec(), Form::Whole));
    }
    (is_inverse && is_linear(&inverse)).then_some((inverse, Form::Inverse))
}

/// Makes a map read its differing numbers.
fn of_map(probes: &Probes, nets: &mut [Fused], node: usize) -> bool {
    let mut numbers: Vec<Vec<f64>> = vec![Vec::new(); nets.len()];
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
    if forms.iter().any(|form| *form != forms[0]) {
        return false;
    }
    let mut found: Vec<Option<(AtSizes, Form)>> = Vec::with_capacity(numbers[0].len());
    for at in 0..numbers[0].len() {
        let own: AtSizes = numbers.iter().map(|numbers| numbers[at]).collect();
        if own.iter().all(|x| *x == own[0]) {
            found.push(None);
            continue;
        }
        match form_of(probes, &own) {
            Some(form) => found.push(Some(form)),
            None => return false,
        }
    }
    let dtype = nets[0].net.value(nets[0].net.nodes[node].output()).dtype;
    let numbers: Vec<&(AtSizes, Form)> = found.iter().flatten().collect();
    let is_fit = match dtype {
        DType::F32 | DType::F64 => true,
        DType::I32 | DType::I64 => numbers.iter().all(|(_, form)| matches!(form, Form::Whole)),
        _ => false,
    };
    if numbers.is_empty() || !is_fit {
        return false;
    }
    let before = nets[0].net.nodes[node].inputs.len();
    for (number, _) in numbers {
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
fn of_slice(probes: &Probes, nets: &mut [Fused], node: usize) -> bool {
    if nets.iter().any(|fused| !matches!(fused.net.nodes[node].kind, Kind::Slice(_))) {
        return false;
    }
    let parts = nets.iter().map(|fused| match &fused.net.nodes[node].kind {
        Kind::Slice(parts) => parts.clone(),
        _ => Vec::new(),
    });
    let parts: Vec<Vec<(i64, i64)>> = parts.collect();
    let most = parts.last().expect("there is the largest");
    let differs = |axis: &usize| parts.iter().any(|own| own.get(*axis) != most.get(*axis));
    let differ: Vec<usize> = (0..most.len()).filter(differs).collect();
    let &[axis] = &differ[..] else { return false };
    let step = most[axis].1;
    let shapes = |fused: &Fused| {
        let node = &fused.net.nodes[node];
        [fused.net.shape(node.input(0)).to_vec(), fused.net.shape(node.output()).to_vec()]
    };
    let lengths: Vec<i64> = nets.iter().map(|fused| shapes(fused)[1][axis]).collect();
    // Positions of any number are those of a range.
    let is_as_long = |fused: &Fused| {
        let [from, to] = shapes(fused);
        (Some(&to[axis]) == lengths.last() || step == 1)
            && from.iter().zip(&to).enumerate().all(|(own, (from, to))| own == axis || from == to)
    };
    let is_whole = |parts: &Vec<(i64, i64)>| {
        parts[axis].1 == step && parts.iter().enumerate().all(|(own, part)| own == axis || *part == (0, 1))
    };
    if !nets.iter().all(is_as_long) || !parts.iter().all(is_whole) {
        return false;
    }
    let firsts: AtSizes = parts.iter().map(|parts| parts[axis].0 as f64).collect();
    if !matches!(form_of(probes, &firsts), Some((_, Form::Whole))) {
        return false;
    }
    for ((fused, first), n) in nets.iter_mut().zip(firsts).zip(lengths) {
        let places: Vec<f64> = (0..n).map(|place| first + (place * step) as f64).collect();
        add_input(fused, node, DType::I64, &places);
        fused.net.nodes[node].kind = Kind::Gather { axis, by_element: false };
    }
    true
}
