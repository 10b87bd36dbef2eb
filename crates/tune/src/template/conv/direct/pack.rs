//! Copies of the input into blocks of channels.

use super::super::super::TemplateSetting;
use super::super::super::step::{fuse, layout, peel, reorder, split, unroll, vectorize};
use super::super::{ReductionSizes, in_blocks};
use tilewright_ir::Step;
use tilewright_ir::op::Window;

/// Bytes of a vector that copies blocks of channels.
const VECTOR_BYTES: i64 = 64;

/// Packs the padded input into blocks of channels, with the borders in separate loops, so that the interior
/// needs no padding checks.
pub fn pack_padded(s: &TemplateSetting, shape: &ReductionSizes, c_block: i64) -> Vec<Step> {
    let lanes = s.target.lanes(s.workload.dtype);
    let mut steps = vec![
        layout(Window::PAD, &Window::channels_last(c_block)),
        split("pc", c_block, "pco", "pci"),
        reorder(&["pn", "pco", "ph", "pw", "pci"]),
    ];
    // The zeros that a transposed convolution inserts leave no interior without padding.
    if !shape.transposed {
        for (axis, n, last, border) in borders(shape) {
            if n > 0 {
                steps.push(peel(axis, n, last, border));
                let (row, other) = if c_block > 1 { ("pci", "pw") } else { ("pw", "pci") };
                let [other, row, vectors, lane] =
                    [(other, ""), (row, ""), (row, ".v"), (row, ".l")].map(|(l, end)| format!("{l}.{border}{end}"));
                steps.push(split(&row, lanes, &vectors, &lane));
                steps.extend([reorder(&[&other, &vectors, &lane]), vectorize(&lane)]);
            }
        }
    }
    if s.workload.layout().channels()[0] > 1 {
        // Channels are contiguous in both the source and the copy.
        steps.extend([split("pci", lanes, "pci.v", "pci.l"), vectorize("pci.l")]);
    } else {
        steps.extend(pack("pw", "pci", lanes));
    }
    steps
}

/// Copies the stage `pad`, which dot products read, into blocks of channels: whole rows of pixels if the
/// input has such blocks, with the borders separate.
pub(super) fn pad_blocks(s: &TemplateSetting, shape: &ReductionSizes, c_block: i64) -> Vec<Step> {
    if !has_whole_blocks(s, shape, c_block) {
        return pack_padded(s, shape, c_block);
    }
    let mut steps = vec![
        layout(Window::PAD, &Window::channels_last(c_block)),
        split("pc", c_block, "pco", "pci"),
        reorder(&["pn", "pco", "ph", "pw", "pci"]),
    ];
    for (axis, n, last, border) in borders(shape) {
        if n > 0 {
            steps.push(peel(axis, n, last, border));
            steps.extend(copy_blocks(s, &format!("pw.{border}"), &format!("pci.{border}"), border));
        }
    }
    steps.extend(copy_blocks(s, "pw", "pci", "all"));
    steps
}

/// Whether the input has channels in blocks, all of them full.
pub(super) fn has_whole_blocks(s: &TemplateSetting, shape: &ReductionSizes, c_block: i64) -> bool {
    in_blocks(s)[0] && c_block > 1 && shape.channels % c_block == 0
}

/// Copies the blocks of a row of pixels as one run of elements.
pub(super) fn copy_blocks(s: &TemplateSetting, column: &str, channel: &str, name: &str) -> [Step; 3] {
    let [run, vectors, lane] = ["run", "v", "l"].map(|end| format!("p.{name}.{end}"));
    let n = VECTOR_BYTES / s.workload.factors()[0].bytes() as i64;
    [fuse(column, channel, &run), split(&run, n, &vectors, &lane), vectorize(&lane)]
}

/// Borders of the stage `pad`: the axis, elements, whether they are its last ones, and a name.
fn borders(shape: &ReductionSizes) -> [(&'static str, i64, bool, &'static str); 4] {
    let [rows, columns] = &shape.axes;
    [
        ("ph", rows.before, false, "top"),
        ("ph", rows.after, true, "bottom"),
        ("pw", columns.before, false, "left"),
        ("pw", columns.after, true, "right"),
    ]
}

/// Packs a row of pixels into a block of channels, by vectors of pixels of several channels at a time.
pub fn pack(column: &str, channel: &str, lanes: i64) -> Vec<Step> {
    // As many channels as pixels, which are transposed at once: more would add code, not speed.
    let [vectors, lane] = ["v", "l"].map(|end| format!("{column}.{end}"));
    let [groups, of_group] = ["g", "c"].map(|end| format!("{channel}.{end}"));
    vec![
        split(column, lanes, &vectors, &lane),
        split(channel, lanes, &groups, &of_group),
        reorder(&[&vectors, &groups, &lane, &of_group]),
        unroll(&of_group),
        vectorize(&lane),
    ]
}
