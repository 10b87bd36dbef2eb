//! Rules for channels that move: shuffles after grouped convolutions, and channels that become pixels.

use tilewright_graph::DType;

use super::{Links, only_user};
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

/// Order of a transposition from phases of rows and columns, channels, rows and columns to pixels.
const TO_PIXELS: [usize; 6] = [0, 3, 4, 1, 5, 2];

/// Joins the views and the transposition by which channels of bytes become blocks of pixels, and a crop
/// behind them, to one operation, whose kernel moves blocks of channels.
pub(super) fn join_pixels(net: &mut Net) -> usize {
    if net.open_size.is_some() {
        return 0;
    }
    let (producers, users) = (net.producers(), net.readers());
    let mut is_left_out = vec![false; net.nodes.len()];
    let mut n_joined = 0;
    for at in 0..net.nodes.len() {
        n_joined += usize::from(pixels_in_place(net, &producers, &users, &mut is_left_out, at).is_some());
    }
    if n_joined > 0 {
        let mut is_left_out = is_left_out.into_iter();
        net.nodes.retain(|_| is_left_out.next() == Some(false));
        net.prune();
    }
    n_joined
}

/// Rewrites a transposition that makes pixels of channels.
fn pixels_in_place(
    net: &mut Net,
    producers: &[Option<usize>],
    users: &[Vec<usize>],
    is_left_out: &mut [bool],
    at: usize,
) -> Option<()> {
    let Kind::Transpose(order) = &net.nodes[at].kind else { return None };
    let (divided, turned) = (net.nodes[at].input(0), net.nodes[at].output());
    let is_of_bytes = matches!(net.value(turned).dtype, DType::U8 | DType::I8);
    (is_of_bytes && order[..] == TO_PIXELS).then_some(())?;
    let &[n, rows, columns, channels, height, width] = net.shape(divided) else { return None };
    let before = &net.nodes[producers[divided.0]?];
    let x = matches!(before.kind, Kind::View).then(|| before.input(0))?;
    (net.shape(x) == [n, rows * columns * channels, height, width]).then_some(())?;
    let view = only_user(net, users, turned).filter(|view| matches!(net.nodes[*view].kind, Kind::View))?;
    let image = net.nodes[view].output();
    let whole = [n, channels, height * rows, width * columns];
    let mut kind = Kind::Pixels { block: [rows, columns], before: [0, 0] };
    if net.shape(image) != whole {
        // The view has other dimensions than those of an image.
        let (name, dtype) = (net.value(image).name.clone(), net.value(image).dtype);
        let pixels = net.add_value(&name, dtype, &whole);
        let node = &mut net.nodes[at];
        (node.kind, node.inputs, node.outputs) = (kind, vec![Some(x)], vec![pixels]);
        net.nodes[view].inputs = vec![Some(pixels)];
        return Some(());
    }
    is_left_out[view] = true;
    let mut to = image;
    if let Some(crop) = only_user(net, users, image)
        && let Kind::Slice(parts) = &net.nodes[crop].kind
        && let [(0, 1), (0, 1), (top, 1), (left, 1)] = parts[..]
        && net.shape(net.nodes[crop].output())[..2] == whole[..2]
    {
        is_left_out[crop] = true;
        to = net.nodes[crop].output();
        kind = Kind::Pixels { block: [rows, columns], before: [top, left] };
    }
    let node = &mut net.nodes[at];
    (node.kind, node.inputs, node.outputs) = (kind, vec![Some(x)], vec![to]);
    Some(())
}
