//! Workloads of fused products and convolutions.

use tilewright_ir::DType;
use tilewright_ir::op::{
    BATCH_MATMUL, CONV2D, CONV2D_TRANSPOSE, DENSE, DEPTHWISE_CONV2D, Epilogue, EpilogueFunction, HEADS_MATMUL, MATMUL,
    PACKED_MATMUL, Window, Workload, WorkloadError,
};

use super::Kernel;
use crate::epilogue::Operations;
use crate::net::{AsHeads, Convolution, Net, Node, Packing, ValueId};
use crate::quantized::epilogue::{padding, types_of};

/// Makes the kernel of an anchor: its workload, whose operands have these names, with prologue and epilogue,
/// and its inputs in the program's order.
fn anchored(
    net: &Net,
    node: &Node,
    plain: Workload,
    names: &[&str],
    operations: [&Operations; 2],
) -> Result<Kernel, WorkloadError> {
    let [prologue, epilogue] =
        operations.map(|list| list.iter().map(|(operation, _)| *operation).collect::<Vec<Epilogue>>());
    let mut inputs: Vec<ValueId> = (0..names.len()).map(|at| node.input(at)).collect();
    let padding = padding(net, node);
    let mut constants = Vec::new();
    let is_constant = |id: ValueId| net.value(id).constant.is_some();
    constants.extend(names.iter().zip(&inputs).filter(|(_, id)| is_constant(**id)).map(|(name, _)| (*name).to_owned()));
    inputs.extend(padding);
    constants.extend(padding.map(|_| Window::ZERO.to_owned()));
    let operands = [Epilogue::prologue_operands(&prologue), Epilogue::operands(&epilogue)];
    for (operands, operations) in operands.into_iter().zip(operations) {
        for (at, name, _) in operands {
            let id = ValueId(operations[at].1.expect("an operation with an operand has an input"));
            inputs.push(id);
            constants.extend(is_constant(id).then(|| name.to_lowercase()));
        }
    }
    let workload = plain.with_prologue(prologue)?.with_epilogue(epilogue)?;
    // For some operators, the constant is not the first input.
    let known = workload.operator().constants;
    constants.retain(|name| !names.contains(&name.as_str()) || known.contains(&name.as_str()));
    let workload = workload.with_constants(constants)?;
    let (output, origin, members) = (node.output(), node.origin.clone(), Vec::new());
    Ok(Kernel { workload, inputs, output, origin, members, block: 1, in_blocks: 1, open: None })
}

/// Makes the kernel of a convolution.
pub(super) fn convolution(
    net: &Net,
    node: &Node,
    conv: &Convolution,
    operations: [&Operations; 2],
) -> Result<Kernel, WorkloadError> {
    let [x, w] = [0, 1].map(|slot| net.shape(node.input(slot)));
    let (n_channels, has_zero) = (net.shape(node.output())[1], padding(net, node).is_some());
    let plain = convolution_of(conv, x, w, n_channels, types_of(net, node), has_zero)?;
    anchored(net, node, plain, &["x", "w"], operations)
}

/// Makes the workload of a convolution for the given shapes of images and weights; integer, if two integer
/// types are given, possibly with a zero point of the images.
///
/// # Errors
/// If an operand is larger than any memory.
pub(crate) fn convolution_of(
    conv: &Convolution,
    x: &[i64],
    w: &[i64],
    n_channels: i64,
    factors: Option<[DType; 2]>,
    has_zero: bool,
) -> Result<Workload, WorkloadError> {
    let is_depthwise = conv.groups == x[1] && conv.groups > 1 && !conv.transposed;
    let Convolution { strides: [sh, sw], dilations: [dh, dw], before: [bh, bw], after: [ah, aw], .. } = *conv;
    let mut sizes = vec![("n", x[0]), ("c", x[1]), ("h", x[2]), ("w", x[3]), ("r", w[2]), ("s", w[3])];
    sizes.extend([("stride_h", sh), ("stride_w", sw), ("dilation_h", dh), ("dilation_w", dw)]);
    sizes.extend([("pad_top", bh), ("pad_left", bw), ("pad_bottom", ah), ("pad_right", aw)]);
    let operator = match (is_depthwise, conv.transposed) {
        (true, _) => {
            sizes.push(("multiplier", n_channels / x[1]));
            &DEPTHWISE_CONV2D
        }
        (false, true) => {
            sizes.push(("k", n_channels));
            &CONV2D_TRANSPOSE
        }
        (false, false) => {
            let interleave = i64::from(conv.interleaved);
            sizes.extend([("k", n_channels), ("groups", conv.groups), ("interleave", interleave)]);
            &CONV2D
        }
    };
    sizes.extend(has_zero.then_some((Window::ZERO, 1)));
    Workload::of_factors(operator, factors, &sizes)
}

/// Makes the kernel of a product of matrices, or of a batch.
pub(super) fn product(
    net: &Net,
    node: &Node,
    turned: bool,
    heads: Option<AsHeads>,
    operations: [&Operations; 2],
) -> Result<Kernel, WorkloadError> {
    let (a, out) = (net.shape(node.input(0)), net.shape(node.output()));
    let k = a[a.len() - 1];
    if let Some(heads) = heads {
        return anchored(net, node, heads_of(heads, turned, out, k)?, &["a", "b"], operations);
    }
    let types = types_of(net, node);
    let n_sums = |n: i64| n_sums(n, operations[1]);
    let (plain, names) = match (out, turned) {
        (&[m, n], true) => (Workload::of_factors(&DENSE, types, &[("m", m), ("n", n_sums(n)), ("k", k)])?, ["x", "w"]),
        (&[m, n], false) => {
            (Workload::of_factors(&MATMUL, types, &[("m", m), ("n", n_sums(n)), ("k", k)])?, ["a", "b"])
        }
        (_, turned) => {
            let sizes = [("b", out[0]), ("m", out[1]), ("n", out[2]), ("k", k), ("tb", i64::from(turned))];
            (Workload::new(&BATCH_MATMUL, &sizes)?, ["a", "b"])
        }
    };
    anchored(net, node, plain, &names, operations)
}

/// Number of columns that a product must compute for `n` results per row.
fn n_sums(n: i64, epilogue: &Operations) -> i64 {
    let is_paired = epilogue.iter().any(|(operation, _)| operation.function() == EpilogueFunction::Gated);
    if is_paired { 2 * n } else { n }
}

/// Makes the workload of a batch of products whose heads are parts of larger tensors.
fn heads_of(heads: AsHeads, turned: bool, out: &[i64], k: i64) -> Result<Workload, WorkloadError> {
    let AsHeads { b, of_a, of_b, beside } = heads;
    let (m, n) = (if beside { out[0] } else { out[1] }, out[2]);
    let mut sizes = vec![("b", b), ("m", m), ("n", n), ("k", k), ("tb", i64::from(turned))];
    sizes.extend([("ha", of_a.beside), ("hb", of_b.beside), ("hc", beside)].map(|(name, is)| (name, i64::from(is))));
    sizes.extend([("a_before", of_a.before), ("a_after", of_a.after)]);
    sizes.extend([("b_before", of_b.before), ("b_after", of_b.after)]);
    Workload::new(&HEADS_MATMUL, &sizes)
}

/// Makes the kernel of a product with packed weights.
pub(super) fn packed(net: &Net, node: &Node, packing: Packing, epilogue: &Operations) -> Result<Kernel, WorkloadError> {
    let (a, out) = (net.shape(node.input(0)), net.shape(node.output()));
    let Packing { bits, block, has_zeros, rounds } = packing;
    let [zeros, int8] = [has_zeros, rounds].map(i64::from);
    let mut sizes = vec![("m", out[0]), ("n", n_sums(out[1], epilogue)), ("k", a[1])];
    sizes.extend([("bits", bits), ("block", block), ("zeros", zeros), ("int8", int8)]);
    let names = &["a", "w", "s", "z"][..3 + usize::from(has_zeros)];
    anchored(net, node, Workload::new(&PACKED_MATMUL, &sizes)?, names, [&Vec::new(), epilogue])
}
