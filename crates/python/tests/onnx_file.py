"""ONNX models as files, written without the package `onnx`: small networks of products."""

import struct

import numpy

# ONNX's numbers of element types.
TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "float64": 11,
         "bfloat16": 16}


def number(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(at, value):
    """A field of a message: a whole number, a text, or bytes."""
    if isinstance(value, int):
        return number(at << 3) + number(value)
    value = value.encode() if isinstance(value, str) else value
    return number(at << 3 | 2) + number(len(value)) + value


def port(name, dtype, dims):
    """An input or output, whose dimensions are sizes or names."""
    dims = b"".join(field(1, field(1 if isinstance(dim, int) else 2, dim)) for dim in dims)
    return field(1, name) + field(2, field(1, field(1, TYPES[dtype]) + field(2, dims)))


def node(operator, inputs, outputs):
    names = b"".join(field(1, name) for name in inputs) + b"".join(field(2, name) for name in outputs)
    return names + field(4, operator)


def tensor(name, array):
    dims = b"".join(field(1, size) for size in array.shape)
    return dims + field(2, TYPES[str(array.dtype)]) + field(8, name) + field(9, array.tobytes())


def write(path, nodes, constants, inputs, outputs):
    graph = b"".join(field(1, node(*one)) for one in nodes) + field(2, "graph")
    graph += b"".join(field(5, tensor(name, array)) for name, array in constants.items())
    graph += b"".join(field(11, port(*one)) for one in inputs) + b"".join(field(12, port(*one)) for one in outputs)
    with open(path, "wb") as file:
        file.write(field(1, 8) + field(7, graph) + field(8, field(2, 17)))


def weights():
    rng = numpy.random.default_rng(7)
    shapes = {"w1": (64, 96), "b1": (96,), "w2": (96, 10), "b2": (10,)}
    return {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}


def write_network(path):
    """Two layers of `batch` lines of 64 numbers, and the double of three whole numbers."""
    nodes = [
        ("MatMul", ["x", "w1"], ["a"]), ("Add", ["a", "b1"], ["b"]), ("Relu", ["b"], ["c"]),
        ("MatMul", ["c", "w2"], ["d"]), ("Add", ["d", "b2"], ["y"]), ("Add", ["k", "k"], ["z"]),
    ]
    inputs = [("x", "float32", ["batch", 64]), ("k", "int64", [3])]
    write(path, nodes, weights(), inputs, [("y", "float32", ["batch", 10]), ("z", "int64", [3])])


def answer(x):
    """The first output of the network, in double precision."""
    of = {name: array.astype("float64") for name, array in weights().items()}
    return numpy.maximum(x.astype("float64") @ of["w1"] + of["b1"], 0) @ of["w2"] + of["b2"]
