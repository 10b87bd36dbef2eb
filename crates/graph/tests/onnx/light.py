#!/usr/bin/env python3
"""Writes what ONNX Runtime computes for the nine `light` networks with weights of our own: name, place of the largest
output before the softmax, the sum of squares, and every 31st output. `tests/light.rs` gives them the same weights."""
import glob
import math
import os

import numpy as np
import onnx
import onnx.backend.test
import onnxruntime
from onnx import numpy_helper

MASK = (1 << 64) - 1


def seed_of(name):
    """FNV-1a."""
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


def uniform(name, n, low, high):
    """Numbers of splitmix64 with 24 bits each."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed_of(name)) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (low + (z >> np.uint64(40)).astype(np.float64) / (1 << 24) * (high - low)).astype(np.float32)


def span(users, shape):
    """Between which numbers a weight lies, by what first reads it."""
    for op, at in users:
        if op in ("Conv", "Gemm") and at == 1:
            fan_in = math.prod(shape[1:])
            # Networks without normalisation would drift otherwise.
            bound = math.sqrt(6.0 / fan_in)
            return -bound, bound
        if op == "BatchNormalization" and at in (1, 4) or op == "Mul":
            return 0.5, 1.5
        return -0.1, 0.1
    return -0.1, 0.1


def main():
    root = os.path.join(os.path.dirname(onnx.backend.test.__file__), "data", "light")
    for path in sorted(glob.glob(os.path.join(root, "*.onnx"))):
        name = os.path.basename(path)[len("light_") : -len(".onnx")]
        model = onnx.load(path)
        graph = model.graph
        known = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        users = {}
        for node in graph.node:
            for at, tensor in enumerate(node.input):
                users.setdefault(tensor, []).append((node.op_type, at))
        # A weight that is only reshaped before it is used counts as what it is used for.
        for node in reversed(graph.node):
            if node.op_type in ("Unsqueeze", "Reshape") and node.input[0] in users:
                users[node.input[0]] = [u for o in node.output for u in users.get(o, [])]
        nodes = []
        for node in graph.node:
            if node.op_type != "ConstantOfShape":
                nodes.append(node)
                continue
            shape = [int(d) for d in known[node.input[0]]]
            low, high = span(users.get(node.output[0], []), shape)
            numbers = uniform(node.output[0], math.prod(shape), low, high).reshape(shape)
            graph.initializer.append(numpy_helper.from_array(numbers, node.output[0]))
        del graph.node[:]
        graph.node.extend(nodes)
        # Without the last softmax, which leaves nothing but the largest number.
        if graph.node[-1].op_type == "Softmax":
            graph.output[0].name = graph.node[-1].input[0]
            graph.output[0].type.tensor_type.ClearField("shape")
            del graph.node[-1]
        given = [i for i in graph.input if i.name not in known]
        assert len(given) == 1, [i.name for i in given]
        shape = [d.dim_value for d in given[0].type.tensor_type.shape.dim]
        x = uniform("input", math.prod(shape), -1.0, 1.0).reshape(shape)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        y = session.run(None, {given[0].name: x})[0].reshape(-1)
        shown = " ".join(repr(float(v)) for v in y[::31])
        print(name, int(y.argmax()), repr(float((y.astype(np.float64) ** 2).sum())), shown, flush=True)


main()
