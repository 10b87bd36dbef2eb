"""Calls the library `layer` by TVM-FFI on NumPy's arrays: inputs from files of bare elements, outputs to files.

    tilewright compile dense:m=32,n=48,k=64,const=w,epilogue=bias+gelu --name layer --constant w=w.bin --as so -o layer
    pip install apache-tvm-ffi numpy
    python ffi.py layer/liblayer.so x.bin bias.bin y.bin
"""

import json
import pathlib
import sys

import numpy
import tvm_ffi


def main():
    library, *files = map(pathlib.Path, sys.argv[1:])
    name = library.stem.removeprefix("lib")
    build = json.loads(library.with_name(f"{name}.json").read_text())
    inputs, outputs = build["inputs"], build["outputs"]
    if len(files) != len(inputs) + len(outputs):
        sys.exit("give a file for each input and output")
    shaped = lambda file, tensor: numpy.fromfile(file, "f4").reshape(tensor["shape"])
    given = [shaped(file, tensor) for file, tensor in zip(files, inputs)]
    made = [numpy.empty(tensor["shape"], "f4") for tensor in outputs]
    # PyTorch's tensors, JAX's and all others with DLPack are taken as NumPy's arrays are, where they lie.
    tvm_ffi.load_module(str(library))[name](*given, *made)
    for file, array in zip(files[len(inputs) :], made):
        array.tofile(file)


if __name__ == "__main__":
    main()
