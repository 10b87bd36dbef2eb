//! Rules that turn products with one-hot rows into gathers.

use tilewright_ir::expr::Cond;
use tilewright_ir::{BufferId, Expr};

use crate::net::{Kind, Net, Node, ValueId};
use crate::scalar::{condition, input, number};

/// Turns products of a one-hot matrix, made from indices, with constant weights into gathers of the weights'
/// rows by these indices.
pub(super) fn look_up(net: &mut Net) -> usize {
    let mut n_found = 0;
    let producers = net.producers();
    for at in 0..net.nodes.len() {
        if let Some(index) = one_hot(net, &producers, at) {
            replace(net, at, index);
            n_found += 1;
        }
    }
    net.sort();
    n_found
}

/// Indices of the rows that a product with one-hot rows selects.
fn one_hot(net: &Net, producers: &[Option<usize>], at: usize) -> Option<ValueId> {
    let node = &net.nodes[at];
    let Kind::Product { turned: false, heads: None } = node.kind else { return None };
    let &[n_rows, n_places] = net.shape(node.input(0)) else { return None };
    net.value(node.input(1)).constant.as_ref()?;
    let mut made = &net.nodes[producers[node.input(0).0]?];
    while let Kind::View = made.kind {
        made = &net.nodes[producers[made.input(0).0]?];
    }
    let Kind::Map(value) = &made.kind else { return None };
    let Cond::And(a, b) = condition(value)? else { return None };
    let [first, second] = [&a, &b].map(|side| match &**side {
        Cond::Not(less) => match &**less {
            Cond::Less(a, b) => match (&**a, &**b) {
                (Expr::Load(a, _), Expr::Load(b, _)) => Some((*a, *b)),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    let (a, b) = first.filter(|(a, b)| second == Some((*b, *a)))?;
    let slot = |b: BufferId| made.input(b.0 as usize);
    let counts = |id: ValueId| {
        let tensor = net.value(id).constant.as_ref();
        let is_along = net.shape(id).last() == Some(&n_places) && net.value(id).n_elements() == n_places;
        is_along
            && tensor.is_some_and(|tensor| tensor.floats().iter().zip(0..).all(|(x, place)| *x == f64::from(place)))
    };
    let index = if counts(slot(a)) { slot(b) } else { slot(a) };
    let is_whole = net.element_type(index).is_some_and(|dtype| !dtype.is_float());
    let has_rows = net.shape(index).last() == Some(&1) && net.value(index).n_elements() == n_rows;
    ((counts(slot(a)) || counts(slot(b))) && is_whole && has_rows).then_some(index)
}

fn replace(net: &mut Net, at: usize, index: ValueId) {
    let node = net.nodes[at].clone();
    let (weights, to) = (node.input(1), node.output());
    let &[n_rows, n] = net.shape(to) else { unreachable!("it is a product of matrices") };
    let n_places = net.shape(weights)[0];
    let (of_index, of_rows) = (net.value(index).dtype, net.value(to).dtype);
    let origin = node.origin.clone();
    let step = |net: &mut Net, kind: Kind, inputs: &[ValueId], output: ValueId| {
        let inputs = inputs.iter().map(|&id| Some(id)).collect();
        net.nodes.push(Node { kind, inputs, outputs: vec![output], origin: origin.clone() });
    };
    let places = net.add_value(&format!("{origin}.places"), of_index, &[n_rows]);
    let column = net.add_value(&format!("{origin}.column"), of_index, &[n_rows, 1]);
    let rows = net.add_value(&format!("{origin}.rows"), of_rows, &[n_rows, n]);
    step(net, Kind::View, &[index], places);
    step(net, Kind::View, &[index], column);
    step(net, Kind::Gather { axis: 0, by_element: false }, &[weights, places], rows);
    // An index out of bounds has no 1 in its row.
    let less = |a: Expr, b: Expr| Cond::Less(Box::new(a), Box::new(b));
    let is_place = Cond::Not(Box::new(less(input(1), number(0.0)))).and(less(input(1), number(n_places as f64)));
    let row = Expr::Select(Box::new(is_place), Box::new(input(0)), Box::new(number(0.0)));
    net.nodes[at] =
        Node { kind: Kind::Map(row), inputs: vec![Some(rows), Some(column)], outputs: vec![to], origin: node.origin };
}
