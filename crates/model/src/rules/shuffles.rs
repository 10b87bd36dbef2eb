//! Rules for channel shuffles after grouped convolutions.

use tilewright_graph::DType;

use super::Links;
use crate::net::{Kind, Net, ValueId};

/// Turns a shuffle of a grouped convolution's channels into the order in which the convolution stores them.
/// The weights stay as they are; per-channel operands of maps in between are shuffled.
pub(super) fn interleave_groups(net: &mut Net) -> usize {
    // The rewrites replace constants of maps and turn transposes into views, which do not affect the links.
    let links = Links::of(net);
    (0..net.nodes.len()).filter(|&at| shuffled_in_place(net, &links, at).is_some()).count()
}

/// Rewrites a transposition that is such a shuffle.
fn shuffled_in_place(net: &mut Net, links: &Links, at: usize) -> Option<()> {
    let Kind::Transpose(order) = &net.nodes[at].kind else { return None };
    let producer = |id: ValueId| links.producers[id.0].filter(|_| links.n_uses[id.0] == 1);
    // Shape of one image: groups, channels of a group, and pixels.
    let mut from = net.nodes[at].input(0);
    let sizes: Vec<(usize, i64)> = net.shape(from).iter().copied().enumerate().filter(|(_, n)| *n > 1).collect();
    let [(first, groups), (second, of_group), rest @ ..] = &sizes[..] else { return None };
    let place = |axis: usize| order.iter().position(|from| *from == axis);
    let in_order: Vec<usize> = [*second, *first].into_iter().chain(rest.iter().map(|(axis, _)| *axis)).collect();
    if !in_order.is_sorted_by_key(|axis| place(*axis)) {
        return None;
    }
    let n = groups * of_group;
    let mut maps = Vec::new();
    let anchor = loop {
        let before = producer(from)?;
        match &net.nodes[before].kind {
            Kind::View => from = net.nodes[before].input(0),
            Kind::Map(_) => {
                let mut varying = net.nodes[before].inputs.iter().flatten();
                from = *varying.find(|id| net.value(**id).constant.is_none())?;
                maps.push(before);
            }
            Kind::Conv(_) => break before,
            _ => return None,
        }
    };
    let out = net.shape(net.nodes[anchor].output()).to_vec();
    let Kind::Conv(conv) = &net.nodes[anchor].kind else { return None };
    let is_single = net.value(net.nodes[anchor].input(0)).dtype == DType::F32;
    let fits = is_single && !conv.transposed && !conv.interleaved && conv.groups == *groups && out[..2] == [1, n];
    if !fits || conv.groups == net.shape(net.nodes[anchor].input(0))[1] {
        return None;
    }
    // Either all of the maps are shuffled, or none.
    let mut shuffled = Vec::new();
    for &map in &maps {
        if net.shape(net.nodes[map].output()) != out {
            return None;
        }
        let mut n_varying = 0;
        for (slot, id) in net.nodes[map].inputs.iter().enumerate() {
            let id = (*id)?;
            match &net.value(id).constant {
                None => n_varying += 1,
                Some(_) if net.value(id).n_elements() == 1 => {}
                Some(_) => {
                    let shape = net.shape(id).to_vec();
                    let by_channel = shape.len() >= 3 && shape[shape.len() - 3] == n && net.value(id).n_elements() == n;
                    let numbers = net.numbers(id).filter(|_| by_channel)?;
                    let source = |to: i64| (to % groups) * of_group + to / groups;
                    let numbers: Vec<f32> = (0..n).map(|to| numbers[source(to) as usize]).collect();
                    shuffled.push((map, slot, shape, numbers));
                }
            }
        }
        if n_varying != 1 {
            return None;
        }
    }
    for (map, slot, shape, numbers) in shuffled {
        let name = format!("{}.shuffled", net.nodes[map].origin);
        net.nodes[map].inputs[slot] = Some(net.add_constant(&name, &shape, &numbers));
    }
    let Kind::Conv(conv) = &mut net.nodes[anchor].kind else { return None };
    conv.interleaved = true;
    net.nodes[at].kind = Kind::View;
    Some(())
}
