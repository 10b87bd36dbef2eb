//! Models whose sequences have any length, or whose calls of C functions take any number of rows: at each
//! size the answers of the model of that size.

use crate::blocks::graph_at;
use crate::open::{check, check_graph, check_items, check_library, dim};

#[test]
fn sequences_of_any_length_are_convolved() {
    let n = dim("n", 1, 40, 1);
    let stack = "
        w1 = weights[16 3 5]
        b1 = weights[16]
        w2 = weights[16 1 7]
        w3 = weights[16 8 3]
        w4 = weights[16 5 4]
        b4 = weights[5]
        c1 = Conv[kernel_shape=5, pads=2 2](x, w1, b1)
        r1 = Relu(c1)
        c2 = Conv[kernel_shape=7, pads=3 3, group=16](r1, w2)
        c3 = Conv[kernel_shape=3, pads=2 2, dilations=2, group=2](r1, w3)
        s = Add(c2, c3)
        t = Tanh(s)
        y = ConvTranspose[kernel_shape=4, strides=2, pads=1 1](t, w4, b4)";
    check(&n, ["x[1 3 n]", "y[1 5 m]"], stack);
    check_library(&n, ["x[1 3 n]", "y[1 5 m]"], stack);
    // Frequency bands of speech, in and out.
    let bands = "
        w1 = weights[16 80 3]
        w2 = weights[16 80 4]
        c = Conv[kernel_shape=3, strides=2, pads=1 1](x, w1)
        r = Relu(c)
        y = ConvTranspose[kernel_shape=4, strides=2, pads=1 1](r, w2)";
    check(&dim("n", 2, 48, 2), ["x[1 80 n]", "y[1 80 n]"], bands);
    let causal = "
        w = weights[6 6 3]
        pads = numbers[0 0 4 0 0 0]
        p = Pad(x, pads)
        c = Conv[kernel_shape=3, dilations=2](p, w)
        y = Add(c, x)";
    check(&n, ["x[1 6 n]", "y[1 6 n]"], causal);
    let strided = "
        w1 = weights[8 2 3]
        w2 = weights[8 8 2]
        w3 = weights[8 4 8]
        c1 = Conv[kernel_shape=3, pads=1 1, strides=2](x, w1)
        c2 = Conv[kernel_shape=2, strides=2](c1, w2)
        t = Transpose[perm=0 2 1](c2)
        l = Softmax[axis=-1](t)
        u = Transpose[perm=0 2 1](l)
        y = ConvTranspose[kernel_shape=8, strides=4, pads=2 2](u, w3)";
    check(&dim("n", 4, 64, 4), ["x[1 2 n]", "y[1 4 n]"], strided);
}

#[test]
fn means_of_windows_end_where_a_run_does() {
    let n = dim("n", 1, 24, 1);
    let of_lines = |attributes: &str| format!("y = AveragePool[{attributes}](x)");
    let ports = ["x[1 3 n]", "y[1 3 m]"];
    check(&n, ports, &of_lines("kernel_shape=3, pads=1 1"));
    check(&n, ports, &of_lines("kernel_shape=5, pads=2 2, count_include_pad=1"));
    check(&dim("n", 2, 24, 2), ports, &of_lines("kernel_shape=3, strides=2, ceil_mode=1"));
    check(&dim("n", 2, 24, 2), ports, &of_lines("kernel_shape=3, strides=2, pads=1 1"));
    let images = "
        w = weights[8 3 3 3]
        c = Conv[kernel_shape=3 3, pads=1 1 1 1](x, w)
        a = AveragePool[kernel_shape=3 3, pads=1 1 1 1](c)
        y = AveragePool[kernel_shape=3 2, strides=2 2, pads=1 0 1 1](a)";
    check(&dim("h", 2, 16, 2), ["x[1 3 h 9]", "y[1 8 m 5]"], images);
}

#[test]
fn windows_and_borders_of_a_single_channel_see_neighbouring_rows() {
    let h = dim("h", 2, 16, 1);
    for statement in [
        "y = MaxPool[kernel_shape=3 3, pads=1 1 1 1](x)",
        "pads = numbers[0 0 0 1 0 0 0 2]\n y = Pad(x, pads)",
        "pads = numbers[0 0 1 0 0 0 1 0]\n p = Pad(x, pads)\n y = AveragePool[kernel_shape=3 1](p)",
    ] {
        check(&h, ["x[1 1 h 5]", "y[1 1 h m]"], statement);
    }
}

#[test]
fn functions_in_c_take_any_number_of_rows() {
    let n = dim("n", 1, 20, 1);
    // Experts of each row.
    let chosen = "
        g = weights[8 6]
        w = weights[6 8]
        two = numbers[2]
        zero = number[0.0]
        p0 = MatMul(x, g)
        p = Softmax[axis=-1](p0)
        v, i = TopK[axis=-1](p, two)
        none = Mul(p, zero)
        m = ScatterElements[axis=1](none, i, v)
        y = MatMul(m, w)";
    check(&n, ["x[n 8]", "y[n 8]"], chosen);
    check_library(&n, ["x[n 8]", "y[n 8]"], chosen);
    // Rows added up where edges end.
    let edges = "
        zero = number[0.0]
        last = numbers[1]
        none = Mul(nodes, zero)
        to = Unsqueeze(ids, last)
        m = Relu(x)
        y = ScatterND[reduction=add](none, to, m)";
    check(&n, ["nodes[7 4], x[n 4], ids[n]", "y[7 4]"], edges);
    // Rows of which each has a place among as many others.
    let places = "
        axis = integer[0]
        last = numbers[1]
        at = Unsqueeze(ids, last)
        r = Relu(x)
        y = GatherND(r, at)
        z = CumSum(r, axis)";
    check(&dim("n", 7, 30, 1), ["x[n 4], ids[5]", "y[5 4], z[n 4]"], places);
    let sorted = "
        k = numbers[3]
        r = Relu(x)
        y, i = TopK[axis=0](r, k)";
    check(&dim("n", 3, 30, 1), ["x[n 4]", "y[3 4]"], sorted);
}

#[test]
fn a_fixed_number_of_texts_takes_any_number_of_words() {
    let statements = "
        f = weights[8 16 3]
        w = weights[16 48]
        c = weights[48]
        o = weights[16 16]
        g = weights[16]
        b = weights[16]
        of_heads = numbers[2 -1 2 8]
        of_rows = numbers[2 -1 16]
        n0 = LayerNormalization[axis=-1](x, g, b)
        p0 = MatMul(n0, w)
        p = Add(p0, c)
        q0, k0, v0 = Split[axis=-1](p)
        q1 = Reshape(q0, of_heads)
        q = Transpose[perm=0 2 1 3](q1)
        k1 = Reshape(k0, of_heads)
        k = Transpose[perm=0 2 3 1](k1)
        v1 = Reshape(v0, of_heads)
        v = Transpose[perm=0 2 1 3](v1)
        s0 = MatMul(q, k)
        s = Softmax[axis=-1](s0)
        a0 = MatMul(s, v)
        a1 = Transpose[perm=0 2 1 3](a0)
        a2 = Reshape(a1, of_rows)
        a3 = MatMul(a2, o)
        a = Add(a3, x)
        t = Transpose[perm=0 2 1](a)
        u = Conv[kernel_shape=3, pads=1 1](t, f)
        y = Relu(u)";
    check(&dim("n", 1, 24, 1), ["x[2 n 16]", "y[2 8 n]"], statements);
    check_library(&dim("n", 3, 39, 4), ["x[2 n 16]", "y[2 8 n]"], statements);
}

/// Recurrent network on sequences of lengths that the input says.
const OF_LENGTHS: &str = "
    w = weights[2 6 5]
    r = weights[2 6 6]
    lengths = Cast[to=6](ids)
    y, h = RNN[hidden_size=6, direction=bidirectional](x, w, r, , lengths)
    z = Relu(h)";

#[test]
fn recurrent_networks_take_any_number_of_steps() {
    let n = dim("n", 1, 20, 1);
    let both = "
        shape = numbers[1 -1 12]
        w = weights[2 24 5]
        r = weights[2 24 6]
        b = weights[2 48]
        o = weights[12 3]
        t = Transpose[perm=1 0 2](x)
        s, h, c = LSTM[hidden_size=6, direction=bidirectional](t, w, r, b)
        u = Transpose[perm=2 0 1 3](s)
        v = Reshape(u, shape)
        y = MatMul(v, o)
        z = Add(h, c)";
    check(&n, ["x[1 n 5]", "y[1 n 3], z[2 1 6]"], both);
    check_library(&n, ["x[1 n 5]", "y[1 n 3]"], both.rsplit_once('\n').unwrap().0);
    let gates = "
        w = weights[1 18 5]
        r = weights[1 18 6]
        b = weights[1 36]
        s, h = GRU[hidden_size=6, linear_before_reset=1, direction=reverse](x, w, r, b, , first)
        y = Relu(s)
        z = Identity(h)";
    check(&n, ["x[n 2 5], first[1 2 6]", "y[n 1 2 6], z[1 2 6]"], gates);
    // Behind the end of a sequence that is shorter than others.
    check(&dim("n", 7, 20, 1), ["x[n 3 5], ids[3]", "y[n 2 3 6], z[2 3 6]"], OF_LENGTHS);
    let last = "
        w = weights[1 6 5]
        r = weights[1 6 6]
        s, h = RNN[hidden_size=6](x, w, r)
        y = Relu(h)";
    check(&n, ["x[n 1 5]", "y[1 1 6]"], last);
}

#[test]
fn recurrent_networks_take_a_batch_of_any_size() {
    let n = dim("n", 1, 20, 1);
    let both = "
        w = weights[2 24 5]
        r = weights[2 24 6]
        b = weights[2 48]
        o = weights[6 3]
        t = Transpose[perm=1 0 2](x)
        s, h, c = LSTM[hidden_size=6, direction=bidirectional](t, w, r, b)
        u = MatMul(s, o)
        y = Transpose[perm=2 0 1 3](u)
        z = Add(h, c)";
    check(&n, ["x[n 4 5]", "y[n 4 2 3], z[2 n 6]"], both);
    check_library(&n, ["x[n 4 5]", "y[n 4 2 3]"], both.rsplit_once('\n').unwrap().0);
    let gates = "
        w = weights[1 18 5]
        r = weights[1 18 6]
        b = weights[1 36]
        s, h = GRU[hidden_size=6, linear_before_reset=RESETS, direction=reverse](x, w, r, b, , first)
        y = Relu(s)
        z = Identity(h)";
    for resets in ["0", "1"] {
        check(&n, ["x[5 n 5], first[1 n 6]", "y[5 1 n 6], z[1 n 6]"], &gates.replace("RESETS", resets));
    }
    check(&n, ["x[7 n 5], ids[n]", "y[7 2 n 6], z[2 n 6]"], OF_LENGTHS);
    for steps in ["1", "2"] {
        let last = "
            w = weights[1 24 5]
            r = weights[1 24 6]
            s, h = LSTM[hidden_size=6](x, w, r)
            y = Relu(h)";
        check(&n, [&format!("x[{steps} n 5]"), "y[1 n 6]"], last);
    }
}

#[test]
fn recurrent_networks_take_any_number_of_texts_and_words() {
    let statements = "
        w = weights[2 24 5]
        r = weights[2 24 6]
        b = weights[2 48]
        o = weights[12 3]
        shape = numbers[0 0 12]
        t = Transpose[perm=1 0 2](x)
        s, h, c = LSTM[hidden_size=6, direction=bidirectional](t, w, r, b)
        u = Transpose[perm=2 0 1 3](s)
        v = Reshape(u, shape)
        y = MatMul(v, o)";
    check_items(&dim("n", 1, 5, 1), &dim("t", 1, 20, 1), ["x[n t 5]", "y[n t 3]"], statements);
}

#[test]
fn lines_of_text_have_any_width() {
    // Convolutions, pools and a recurrent network, as in recognisers of text.
    let recogniser = "
        w1 = weights[8 3 3 3]
        b1 = weights[8]
        w2 = weights[16 8 3 3]
        w3 = weights[16 1 5 5]
        w4 = weights[16 16 1 1]
        g = weights[2 24 16]
        r = weights[2 24 6]
        o = weights[12 7]
        axes = numbers[2]
        shape = numbers[0 0 12]
        c1 = Conv[kernel_shape=3 3, pads=1 1 1 1, strides=2 2](x, w1, b1)
        r0 = Identity(c1)
        r1 = HardSwish(r0)
        p1 = MaxPool[kernel_shape=2 2, strides=2 2](r1)
        c2 = Conv[kernel_shape=3 3, pads=1 1 1 1](p1, w2)
        r2 = Relu(c2)
        c3 = Conv[kernel_shape=5 5, pads=2 2 2 2, group=16, strides=2 1](r2, w3)
        m = GlobalAveragePool(c3)
        s0 = Conv[kernel_shape=1 1](m, w4)
        s = Sigmoid(s0)
        e = Mul(c3, s)
        a = AveragePool[kernel_shape=2 1, strides=2 1](e)
        q = Squeeze(a, axes)
        t = Transpose[perm=2 0 1](q)
        y0 = LSTM[hidden_size=6, direction=bidirectional](t, g, r)
        u = Transpose[perm=0 2 1 3](y0)
        v = Reshape(u, shape)
        z = MatMul(v, o)
        y = Softmax[axis=-1](z)";
    check(&dim("w", 4, 80, 4), ["x[1 3 16 w]", "y[m 1 7]"], recogniser);
    check_library(&dim("w", 4, 80, 4), ["x[1 3 16 w]", "y[m 1 7]"], recogniser);
    // As many rows as the most columns.
    let unet = "
        w1 = weights[8 3 3 3]
        w2 = weights[8 8 2 2]
        w3 = weights[4 16 3 3]
        c1 = Conv[kernel_shape=3 3, pads=1 1 1 1](x, w1)
        p = MaxPool[kernel_shape=2 2, strides=2 2](c1)
        d = ConvTranspose[kernel_shape=2 2, strides=2 2](p, w2)
        j = Concat[axis=1](c1, d)
        y = Conv[kernel_shape=3 3, pads=1 1 1 1](j, w3)";
    check(&dim("w", 2, 24, 2), ["x[1 3 24 w]", "y[1 4 24 m]"], unet);
}

#[test]
fn groups_of_channels_of_any_height_are_normalised() {
    let h = dim("h", 1, 18, 1);
    let ports = ["x[1 8 h 5]", "y[1 8 h 5]"];
    // As exporters write groups.
    let joined = "
        of_groups = numbers[0 4 -1]
        ones = weights[4]
        none = weights[4]
        g = weights[8 1 1]
        r = Relu(x)
        n = Shape(r)
        v = Reshape(r, of_groups)
        i = InstanceNormalization(v, ones, none)
        b = Reshape(i, n)
        y = Mul(b, g)";
    check(&h, ports, joined);
    check(&dim("w", 1, 18, 1), ["x[1 8 5 w]", "y[1 8 5 w]"], joined);
    let (before, behind) = ("k = Conv[kernel_shape=3 3, pads=1 1 1 1](x, c)", "z = Conv[kernel_shape=3 3](y, c)");
    let between = ["c = weights[8 8 3 3]", before, &joined.replace("Relu(x)", "Relu(k)"), behind].join("\n");
    check(&dim("w", 3, 18, 1), ["x[1 8 5 w]", "z[1 8 3 m]"], &between);
    let by_groups = "
        g = weights[8]
        b = weights[8]
        r = Relu(x)
        y = GroupNormalization[num_groups=2](r, g, b)";
    check_graph(&h, &graph_at(21, ports[0], ports[1], by_groups));
}

#[test]
fn images_are_resized_to_and_from_any_height() {
    let h = dim("h", 1, 14, 1);
    let of_scales = |attributes: &str| {
        format!("n = numbers[1 1 2 2]\n s = Cast[to=1](n)\n r = Relu(x)\n y = Resize[{attributes}](r, , s)")
    };
    for attributes in [
        "mode=linear, coordinate_transformation_mode=align_corners",
        "mode=cubic, coordinate_transformation_mode=align_corners",
        "mode=nearest, coordinate_transformation_mode=align_corners, nearest_mode=ceil",
        "mode=cubic, coordinate_transformation_mode=pytorch_half_pixel",
    ] {
        check(&h, ["x[1 2 h 5]", "y[1 2 m 10]"], &of_scales(attributes));
    }
    check_library(
        &h,
        ["x[1 2 h 5]", "y[1 2 m 10]"],
        &of_scales("mode=linear, coordinate_transformation_mode=align_corners"),
    );
    // Tables of positions, which have the size of an image at one height.
    for rows in ["7", "14"] {
        for mode in ["cubic", "linear", "nearest"] {
            let table = format!(
                "
                table = weights[1 2 {rows} 5]
                n = Shape[start=2, end=4](x)
                first = numbers[1 2]
                all = Concat[axis=0](first, n)
                p = Resize[mode={mode}](table, , , all)
                y = Add(x, p)"
            );
            check(&h, ["x[1 2 h 5]", "y[1 2 h 5]"], &table);
        }
    }
}

#[test]
fn images_of_any_height_are_resized_smoothly() {
    let h = dim("h", 1, 14, 1);
    let of_scales = |mode: &str, scales: &str| {
        format!("n = numbers[{scales}]\n s = Cast[to=1](n)\n r = Relu(x)\n y = Resize[mode={mode}](r, , s)")
    };
    check(&h, ["x[1 2 h 5]", "y[1 2 m 10]"], &of_scales("linear", "1 1 2 2"));
    check(&h, ["x[1 2 h 5]", "y[1 2 m 15]"], &of_scales("cubic", "1 1 3 3"));
    check(
        &h,
        ["x[1 2 h 5]", "y[1 2 m 20]"],
        &of_scales("linear", "1 1 4 4")
            .replace("mode=linear", "mode=linear, coordinate_transformation_mode=asymmetric"),
    );
    let pooled = "
        n = Shape[start=2, end=4](x)
        first = numbers[1 2]
        all = Concat[axis=0](first, n)
        g = GlobalAveragePool(x)
        r = Resize[mode=linear](g, , , all)
        y = Add(r, x)";
    check(&h, ["x[1 2 h 5]", "y[1 2 h 5]"], pooled);
}
