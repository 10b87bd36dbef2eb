"""As much of PyTorch as `tilewright.torch` uses, over NumPy: tensors, and an exporter of one network.

`torch.export.export` runs nothing: `torch.export.NETWORKS` says by the module what its file and its signature are.
"""

import contextlib
import types

import numpy

uint8, int64, float32, float64, float16, bfloat16 = "uint8", "int64", "float32", "float64", "float16", "bfloat16"
_state = types.SimpleNamespace(grad=False)


class Tensor:
    def __init__(self, array, requires_grad=False, device="cpu"):
        self.array, self.requires_grad = numpy.asarray(array), requires_grad
        self.device, self._version = types.SimpleNamespace(type=device), 0

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: str(self.array.dtype))
    detach = lambda self: Tensor(self.array)
    is_inference = lambda self: False
    data_ptr = lambda self: self.array.ctypes.data
    numel = lambda self: self.array.size
    element_size = lambda self: self.array.itemsize
    numpy = lambda self: self.array
    contiguous = lambda self: Tensor(numpy.ascontiguousarray(self.array))
    reshape = lambda self, *shape: Tensor(self.array.reshape(*shape))
    view = lambda self, dtype: Tensor(self.array.view(dtype))
    to = lambda self, dtype: Tensor(self.array.astype(dtype))
    isfinite = lambda self: numpy.isfinite(self.array)
    abs = lambda self: Tensor(abs(self.array))
    max = lambda self: self.array.max()
    __getitem__ = lambda self, at: Tensor(self.array[at])
    __sub__ = lambda self, other: Tensor(self.array - other.array)

    def untyped_storage(self):
        base = self.array if self.array.base is None else self.array.base
        return types.SimpleNamespace(data_ptr=lambda: base.ctypes.data)

    def write(self, array):
        self.array[...] = array
        self._version += 1


class _Parameter(Tensor):
    pass


class _Module:
    training = False

    def __init__(self):
        self.buffers = {}

    def register_buffer(self, name, value):
        self.buffers[name] = value
        setattr(self, name, value)

    def __call__(self, *arguments, **named):
        return self.forward(*arguments, **named)


nn = types.SimpleNamespace(Module=_Module, Parameter=_Parameter)
empty = lambda shape, dtype: Tensor(numpy.empty(shape, dtype))
allclose = lambda a, b, rtol, atol, equal_nan: numpy.allclose(a.array, b.array, rtol, atol, equal_nan)
get_num_threads = lambda: 1
is_grad_enabled = lambda: _state.grad


@contextlib.contextmanager
def no_grad():
    before, _state.grad = _state.grad, False
    try:
        yield
    finally:
        _state.grad = before


class _Program:
    """An exported network: `write(path, constants)` writes its file."""

    def __init__(self, write, writes_to_inputs, constants):
        self.state_dict, self._write = constants, write
        mutated = {"x": "x"} if writes_to_inputs else {}
        self.graph_signature = types.SimpleNamespace(buffers_to_mutate={}, user_inputs_to_mutate=mutated)
        self.call_spec = types.SimpleNamespace(in_spec=1, out_spec=None)

    def run_decompositions(self, table):
        return self

    def save(self, path, external_data):
        self._write(path, self.state_dict)


def _exported(module, arguments, named, strict):
    write, writes_to_inputs = export.NETWORKS.pop(0)
    if write is None:
        raise RuntimeError("\x1b[31mno words\x1b[0m for it\nand more lines")
    return _Program(write, writes_to_inputs, {name: value for name, value in module.buffers.items()})


export = types.SimpleNamespace(export=_exported, NETWORKS=[])
onnx = types.SimpleNamespace(export=lambda program, dynamo, verbose: program)
_layer = types.SimpleNamespace(default="layer")
ops = types.SimpleNamespace(aten=types.SimpleNamespace(_transformer_encoder_layer_fwd=_layer))


def _flatten(tree):
    (arguments, named) = tree
    return [*arguments, *named.values()], len(arguments)


_pytree = types.SimpleNamespace(
    tree_flatten=_flatten, tree_leaves=lambda tree: [tree], tree_unflatten=lambda leaves, spec: leaves[0]
)
utils = types.SimpleNamespace(_pytree=_pytree)
