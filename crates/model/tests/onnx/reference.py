"""Compares quantized models with an evaluation in integers that shares nothing with Tilewright.

usage: reference.py TILEWRIGHT MODEL.onnx … [--inputs 100]

Convolutions and products between DequantizeLinear and QuantizeLinear accumulate in integers and are scaled
once in f32; everything else is computed in f32 as the operators are written. For each model the script prints
the largest difference between the answers in steps of the output's scale, the number of elements that differ,
and the number of inputs with the same largest element. Inputs are seeded normal numbers of three scales.
Needs numpy and onnx.
"""
import argparse
import pathlib
import subprocess
import tempfile

import numpy as np
import onnx
from onnx import helper, numpy_helper

f32 = np.float32


class Quantized:
    """Integers `q`, of which `(q - zero) * scale` is meant, with a scale for each element along an axis."""

    def __init__(self, q, scale, zero, axis):
        self.q, self.scale, self.zero, self.axis = q, scale, zero, axis

    def along(self, x):
        shape = [-1 if d == self.axis else 1 for d in range(self.q.ndim)]
        return x.reshape(shape if x.size > 1 else ())

    def centred(self):
        return self.q.astype(np.int64) - self.along(self.zero).astype(np.int64)

    def numbers(self):
        return self.centred().astype(f32) * self.along(self.scale)


def numbers(x):
    return x.numbers() if isinstance(x, Quantized) else x


def windows(x, attributes, outside):
    """Windows `[n, c, p, q, r, s]` of an image."""
    pads, strides = attributes.get("pads", [0] * 4), attributes.get("strides", [1, 1])
    x = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])), constant_values=outside)
    every = np.lib.stride_tricks.sliding_window_view(x, attributes["kernel_shape"], axis=(2, 3))
    return every[:, :, ::strides[0], ::strides[1]]


def sums(x, w, attributes):
    """Integer convolution of one image, tap by tap. Sums are below 2^53, so f64 holds them."""
    pads, (down, across) = attributes.get("pads", [0] * 4), attributes.get("strides", [1, 1])
    (k, c, r, s), group = w.shape, attributes.get("group", 1)
    x = np.pad(x[0].astype(np.float64), ((0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    p, q = (x.shape[1] - r) // down + 1, (x.shape[2] - s) // across + 1
    out = np.zeros((k, p * q))
    for i, j in np.ndindex(r, s):
        seen = x[:, i : i + (p - 1) * down + 1 : down, j : j + (q - 1) * across + 1 : across]
        seen, tap = np.ascontiguousarray(seen).reshape(len(x), -1), w[:, :, i, j].astype(np.float64)
        for g in range(1 if c == 1 and k == group else group):
            inputs, outputs = slice(g * c, (g + 1) * c), slice(g * k // group, (g + 1) * k // group)
            if c == 1 and k == group:
                out += tap * seen
            else:
                out[outputs] += np.ascontiguousarray(tap[outputs]) @ seen[inputs]
    return out.reshape(1, k, p, q).astype(np.int64)


def product(x, attributes, is_convolution):
    """A convolution or `Gemm` of quantized factors, and perhaps a bias in 32-bit integers."""
    if is_convolution:
        total, shape = sums(x[0].centred(), x[1].centred(), attributes), (1, -1, 1, 1)
    else:
        w = x[1].centred().astype(np.float64)
        w = w.T if attributes.get("transB") else w
        total, shape = (x[0].centred().astype(np.float64) @ w).astype(np.int64), (1, -1)
    scale = (x[0].scale * x[1].scale).astype(f32).reshape(shape)
    if len(x) > 2:
        assert x[2].q.dtype == np.int32 and np.allclose(x[2].scale.reshape(shape), scale, rtol=1e-6)
        total = total + x[2].q.astype(np.int64).reshape(shape)
    return total.astype(f32) * scale


def softmax(x):
    x = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return (x / x.sum(-1, keepdims=True)).astype(f32)


def value(op, x, attributes):
    """The output of a node."""
    if op == "QuantizeLinear":
        ends, multiple = np.iinfo(x[2].dtype), np.rint(numbers(x[0]) / x[1])
        return np.clip(multiple.astype(np.float64) + int(x[2]), ends.min, ends.max).astype(x[2].dtype)
    if op == "DequantizeLinear":
        zero = x[2] if len(x) > 2 else np.zeros_like(x[1], x[0].dtype)
        return Quantized(x[0], x[1], zero, attributes.get("axis", 1) % max(1, x[0].ndim))
    if op in ("Conv", "Gemm"):
        assert all(isinstance(x, Quantized) for x in x), "a product of numbers"
        return product(x, attributes, op == "Conv")
    x = [numbers(x) for x in x]
    if op in ("Add", "Sum"):
        return sum(x[1:], x[0])
    if op == "MaxPool":
        return windows(x[0], attributes, f32(-np.inf)).max((-2, -1))
    if op == "AveragePool":
        return windows(x[0], attributes, 0).astype(np.float64).mean((-2, -1)).astype(f32)
    others = {
        "Relu": lambda: np.maximum(x[0], f32(0)),
        "Clip": lambda: np.clip(x[0], x[1], x[2]),
        "Mul": lambda: x[0] * x[1],
        "Sigmoid": lambda: (1 / (1 + np.exp(-x[0].astype(np.float64)))).astype(f32),
        "GlobalAveragePool": lambda: x[0].astype(np.float64).mean((2, 3), keepdims=True).astype(f32),
        "Flatten": lambda: x[0].reshape(len(x[0]), -1),
        "Reshape": lambda: x[0].reshape([int(d) for d in x[1]]),
        "Softmax": lambda: softmax(x[0]),
    }
    return others[op]()


def evaluated(model, feeds):
    """The first output of a model, as numbers."""
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer} | feeds
    for node in model.graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        values[node.output[0]] = value(node.op_type, [values[i] for i in node.input if i], attributes)
    return numbers(values[model.graph.output[0].name])


def compare(tilewright, path, n_inputs):
    model, random = onnx.load(path), np.random.default_rng(77)
    [x], name = [i for i in model.graph.input], model.graph.output[0].name
    shape = [d.dim_value for d in x.type.tensor_type.shape.dim]
    [last] = [n for n in model.graph.node if name in n.output]
    scale = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == last.input[1])
    most = n_apart = n_elements = n_equal = 0
    with tempfile.TemporaryDirectory() as folder:
        for at in range(n_inputs):
            given = random.normal(size=shape).astype(f32) * f32(0.5 + at % 3 * 0.5)
            np.save(f"{folder}/x.npy", given)
            files = ["--input", f"{folder}/x.npy", "-o", f"{folder}/out"]
            subprocess.run([tilewright, "run", path, *files, "--runs", "1"], check=True, capture_output=True)
            [answer] = pathlib.Path(folder, "out").rglob("*.npy")
            ours, expected = np.load(answer).ravel(), evaluated(model, {x.name: given}).ravel()
            apart = np.abs(np.rint((ours - expected) / scale))
            most = max(most, int(apart.max()))
            n_apart, n_elements = n_apart + int((apart > 0).sum()), n_elements + apart.size
            n_equal += int(ours.argmax() == expected.argmax())
    print(f"{path}: {n_inputs} inputs, at most {most} steps apart, {n_apart} of {n_elements} elements, "
          f"the largest element is the same for {n_equal}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tilewright")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--inputs", type=int, default=100)
    given = parser.parse_args()
    for path in given.models:
        compare(given.tilewright, path, given.inputs)


if __name__ == "__main__":
    main()
