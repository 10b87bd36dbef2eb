#!/usr/bin/env python3
"""Writes node.cases.gz, suite.cases.gz and light.cases.gz from the official tests in the package `onnx` (1.23.2, Apache-2.0).

usage: pip install onnx==1.23.2 numpy && python3 generate.py FOLDER

A file is a list of records: a length in four bytes and as many bytes. Records are first the tensors, each once (element
type as ONNX numbers it, rank, dimensions in four bytes each, elements), then an empty one, then three for each case:
its name, its model, and the numbers of its tensors (sets of inputs and outputs: how many inputs, these, how many
outputs, these, in four bytes each).
"""
import glob
import gzip
import os
import struct
import sys
import warnings

import numpy as np
import onnx
from onnx import numpy_helper

warnings.simplefilter("ignore")
TYPES = {1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16, 21, 22, 25, 26}
LARGEST = 40_000


class Unfit(Exception):
    pass


def tensor_record(array):
    if isinstance(array, onnx.TensorProto):
        proto = array
    elif isinstance(array, (np.ndarray, np.generic)):
        proto = numpy_helper.from_array(np.asarray(array))
    else:
        raise Unfit("no tensor")
    if proto.data_type not in TYPES:
        raise Unfit("element type")
    array = numpy_helper.to_array(proto)
    # Those of few bits take a byte each, with its sign.
    raw = (array.astype(np.int8) if proto.data_type in (22, 26) else array).tobytes()
    dims = list(proto.dims)
    return struct.pack("<BB", proto.data_type, len(dims)) + b"".join(struct.pack("<I", d) for d in dims) + raw


def write(path, cases, largest=LARGEST):
    tensors, table, records = {}, [], []
    n_left_out = 0
    for name, model, sets in cases:
        try:
            found = [[[tensor_record(t) for t in side] for side in one] for one in sets]
        except Unfit:
            n_left_out += 1
            continue
        size = sum(len(record) for one in found for side in one for record in side)
        if size > largest or model.ByteSize() > largest:
            n_left_out += 1
            continue
        numbers = []
        for side in (side for one in found for side in one):
            numbers.append(len(side))
            numbers += [tensors.setdefault(record, len(tensors)) for record in side]
        model.ClearField("doc_string")
        model.graph.ClearField("doc_string")
        table.append((name, model.SerializeToString(), struct.pack(f"<{len(numbers)}I", *numbers)))
    records = list(tensors) + [b""] + [part for case in table for part in (case[0].encode(), case[1], case[2])]
    data = b"".join(struct.pack("<I", len(r)) + r for r in records)
    with open(path, "wb") as out:
        out.write(gzip.compress(data, 9, mtime=0))
    print(path, len(table), "cases,", n_left_out, "left out,", len(data), "bytes,", os.path.getsize(path), "packed")


def node_cases():
    from onnx.backend.test.case.node import collect_testcases

    for case in sorted(collect_testcases(None), key=lambda case: case.name):
        if any(o.domain not in ("", "ai.onnx") for o in case.model.opset_import):
            continue
        if not case.data_sets:
            continue
        yield case.name, case.model, case.data_sets


def suite_cases():
    root = os.path.join(os.path.dirname(onnx.backend.test.__file__), "data")
    for suite in ("simple", "pytorch-converted", "pytorch-operator"):
        for folder in sorted(glob.glob(os.path.join(root, suite, "*"))):
            model = onnx.load(os.path.join(folder, "model.onnx"))
            sets = []
            for data in sorted(glob.glob(os.path.join(folder, "test_data_set_*"))):
                sides = []
                for side in ("input", "output"):
                    files = glob.glob(os.path.join(data, side + "_*.pb"))
                    protos = []
                    for at in range(len(files)):
                        with open(os.path.join(data, f"{side}_{at}.pb"), "rb") as file:
                            protos.append(onnx.TensorProto.FromString(file.read()))
                    sides.append(protos)
                sets.append(sides)
            yield f"{suite}/{os.path.basename(folder)}", model, sets


def light_cases():
    """Topologies of real networks; their weights are constants, and what they give says nothing."""
    root = os.path.join(os.path.dirname(onnx.backend.test.__file__), "data", "light")
    for path in sorted(glob.glob(os.path.join(root, "*.onnx"))):
        yield os.path.basename(path)[len("light_") : -len(".onnx")], onnx.load(path), []


if __name__ == "__main__":
    folder = sys.argv[1]
    write(os.path.join(folder, "node.cases.gz"), node_cases())
    write(os.path.join(folder, "suite.cases.gz"), suite_cases(), 16_000)
    write(os.path.join(folder, "light.cases.gz"), light_cases(), 1 << 20)
