"""Runs the wheel `layer`: reads its inputs from files of bare elements, and writes its outputs to files.

    tilewright compile dense:m=32,n=48,k=64,const=w,epilogue=bias+gelu --name layer --constant w=w.bin \
        --as python -o .
    pip install ./layer-*.whl
    python main.py x.bin bias.bin y.bin
"""

import array
import sys

import layer


def read(path, tensor):
    """A file's elements, as numpy's where there is numpy."""
    with open(path, "rb") as file:
        values = array.array("f", file.read())
    if layer.numpy is not None:
        return layer.numpy.array(values, "f4").reshape(tensor["shape"])
    return values


def main():
    inputs, outputs = layer.build["inputs"], layer.build["outputs"]
    files = sys.argv[1:]
    if len(files) != len(inputs) + len(outputs):
        sys.exit("give a file for each input and output")
    results = layer.Context().run(*[read(path, tensor) for path, tensor in zip(files, inputs)])
    for path, result in zip(files[len(inputs) :], results):
        with open(path, "wb") as file:
            file.write(result.tobytes())


if __name__ == "__main__":
    main()
