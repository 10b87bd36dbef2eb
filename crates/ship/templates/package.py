@ORIGIN@

import ctypes
import json
@MEMBER@import math
import os
import threading
import weakref

try:
    import numpy
except ImportError:
    numpy = None

__all__ = ["Context", "Error", "build"]


class _Options(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("spin_us", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("arena", ctypes.c_void_p),
        ("arena_bytes", ctypes.c_size_t),
@GPU@        ("device", ctypes.c_uint32),
@GPU@        ("reserved", ctypes.c_uint32),
@GPU@        ("device_context", ctypes.c_void_p),
    ]


_library = ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib@NAME@.so"))
_library.net_build.restype = ctypes.c_char_p
_library.net_message.restype = ctypes.c_char_p
_library.net_create.argtypes = [ctypes.POINTER(_Options), ctypes.POINTER(ctypes.c_void_p)]
_library.net_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p)]
@GPU@_library.net_enqueue.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *_library.net_run.argtypes[1:]]
@STATE@_library.net_past.argtypes = [ctypes.c_void_p]
@STATE@_library.net_past.restype = ctypes.c_int64
@STATE@_library.net_rewind.argtypes = [ctypes.c_void_p, ctypes.c_int64]
@DIMS@_library.net_set_dim.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_library.net_destroy.argtypes = [ctypes.c_void_p]
_library.net_destroy.restype = None

build = json.loads(_library.net_build().decode())
"""All about the library: inputs and outputs with their names, types and shapes."""

# Names of element types, and the format characters of the struct module.
_FORMATS = {"f32": "f", "f64": "d", "f16": "e", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I",
            "i64": "q", "u64": "Q", "bool": "?"}
_NUMPY = {"f32": "f4", "f64": "f8", "f16": "f2", "i8": "i1", "u8": "u1", "i16": "i2", "u16": "u2", "i32": "i4",
          "u32": "u4", "i64": "i8", "u64": "u8", "bool": "?"}
_BYTES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4,
          "i64": 8, "u64": 8, "bool": 1}


class Error(Exception):
    """What the library refuses."""


def _check(code):
    if code:
        raise Error(_library.net_message(code).decode())


def _input(tensor, value):
    """The address of an input, and what holds it."""
    name, dtype, size = tensor["name"], tensor["dtype"], tensor["bytes"]
    if numpy is not None and dtype in _NUMPY:
        value, expected = numpy.asarray(value), numpy.dtype(_NUMPY[dtype])
        if value.dtype.newbyteorder("=") != expected:
            raise Error(f"`{name}` takes {dtype}, not {value.dtype}")
        if list(value.shape) != tensor["shape"]:
            raise Error(f"`{name}` takes the shape {tensor['shape']}, not {list(value.shape)}")
        # Copied where it is strided, not aligned, or in another order of bytes.
        value = numpy.require(value, expected, ["C_CONTIGUOUS", "ALIGNED"])
        return value.ctypes.data, value
    view = memoryview(value)
    if not view.c_contiguous or view.nbytes != size:
        raise Error(f"`{name}` takes {size} bytes next to each other, not {view.nbytes}")
    if view.format not in (_FORMATS.get(dtype), "B"):
        raise Error(f"`{name}` takes {dtype}, not elements of the format `{view.format}`")
    held = (ctypes.c_char * size).from_buffer_copy(view) if view.readonly else (ctypes.c_char * size).from_buffer(view)
    if ctypes.addressof(held) % _BYTES[dtype]:
        held = (ctypes.c_char * size).from_buffer_copy(view)
    return ctypes.addressof(held), held


def _output(tensor):
    """The address of a new output, what holds it, and what the caller gets."""
    if numpy is not None and tensor["dtype"] in _NUMPY:
        value = numpy.empty(tensor["shape"], _NUMPY[tensor["dtype"]])
        return value.ctypes.data, value, value
    held = (ctypes.c_char * tensor["bytes"])()
    value = memoryview(held).cast("B")
    if tensor["dtype"] in _FORMATS:
        value = value.cast(_FORMATS[tensor["dtype"]], tensor["shape"])
    return ctypes.addressof(held), held, value


@RANGED@def _size(inputs, dim):
@RANGED@    """The size of an open dimension that arrays have; the largest where none of them has it."""
@RANGED@    found = None
@RANGED@    for tensor, value in zip(build["inputs"], inputs):
@RANGED@        if "open" not in tensor or tensor["open"]["dim"] != dim["name"]:
@RANGED@            continue
@RANGED@        axis, factor, term = (tensor["open"][key] for key in ("axis", "factor", "term"))
@RANGED@        shape = getattr(value, "shape", None)
@RANGED@        if shape is None and numpy is not None:
@RANGED@            shape = numpy.shape(value)
@RANGED@        if shape is None or len(shape) != len(tensor["shape"]):
@RANGED@            raise Error(f"`{tensor['name']}` takes an array of {len(tensor['shape'])} dimensions")
@RANGED@        size, rest = divmod(shape[axis] - term, factor)
@RANGED@        if rest or found not in (None, size):
@RANGED@            raise Error(f"`{tensor['name']}` has another {dim['name']} than the inputs before it")
@RANGED@        found = size
@RANGED@    size = dim["most"] if found is None else found
@RANGED@    if not dim["least"] <= size <= dim["most"] or (size - dim["least"]) % dim["step"]:
@RANGED@        raise Error(f"{dim['name']}={size} is none of {dim['least']} to {dim['most']} in steps of {dim['step']}")
@RANGED@    return size
@RANGED@
@RANGED@
@ITEMS@def _items(inputs):
@ITEMS@    """The number of items that arrays have."""
@ITEMS@    dim = build["dims"][-1]
@ITEMS@    found = {numpy.shape(value)[:1] for tensor, value in zip(build["inputs"], inputs) if "items" in tensor}
@ITEMS@    (n_items,) = found.pop() if len(found) == 1 else (0,)
@ITEMS@    if not dim["least"] <= n_items <= dim["most"] or (n_items - dim["least"]) % dim["step"]:
@ITEMS@        raise Error(f"the inputs have no {dim['name']} of {dim['least']} to {dim['most']} in steps of {dim['step']}")
@ITEMS@    return n_items
@ITEMS@
@ITEMS@
@ITEMS@def _of(tensor, n_items):
@ITEMS@    """A tensor of so many items."""
@ITEMS@    if "items" not in tensor:
@ITEMS@        return tensor
@ITEMS@    shape = [n_items, *tensor["shape"][1:]]
@ITEMS@    return {**tensor, "shape": shape, "bytes": tensor["bytes"] // tensor["shape"][0] * n_items}
@ITEMS@
@ITEMS@
@RANGED@def _at(tensor, sizes):
@RANGED@    """A tensor at sizes of open dimensions, by their names."""
@RANGED@    if "open" not in tensor:
@RANGED@        return tensor
@RANGED@    axis, factor, term = (tensor["open"][key] for key in ("axis", "factor", "term"))
@RANGED@    shape = list(tensor["shape"])
@RANGED@    n_bytes = tensor["bytes"] // max(shape[axis], 1)
@RANGED@    shape[axis] = factor * sizes[tensor["open"]["dim"]] + term
@RANGED@    return {**tensor, "shape": shape, "bytes": n_bytes * shape[axis]}
@RANGED@
@RANGED@
@MEMBER@def _member(inputs):
@MEMBER@    """The sizes that arrays have, with the shapes of inputs and outputs; what has no shape fits any."""
@MEMBER@    shapes = [list(getattr(value, "shape", ()) if numpy is None else numpy.shape(value)) for value in inputs]
@MEMBER@    for member in build["members"]:
@MEMBER@        if all(not own or own == wanted for own, wanted in zip(shapes, member["inputs"])):
@MEMBER@            return member
@MEMBER@    sizes = ", ".join(f"{d['name']}={d['least']}..{d['most']}/{d['step']}" for d in build["dims"])
@MEMBER@    raise Error(f"arrays of the shapes {shapes} have none of the sizes {sizes}")
@MEMBER@
@MEMBER@
@MEMBER@def _of(member, ports):
@MEMBER@    """The tensors of a member."""
@MEMBER@    return [
@MEMBER@        {**tensor, "shape": shape, "bytes": math.prod(shape) * _BYTES[tensor["dtype"]]}
@MEMBER@        for tensor, shape in zip(build[ports], member[ports])
@MEMBER@    ]
@MEMBER@
@MEMBER@
def _addresses(all):
    return (ctypes.c_void_p * len(all))(*all)


_contexts = weakref.WeakSet()


def _renew_locks():
    """A child of fork has the thread that forked alone: what other threads held is free."""
    for context in list(_contexts):
        context._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


class Context:
@CPU@    """Memory and threads to run the model with.
@GPU@    """Code and memory on a device.

    Any thread may call it. Threads that share a context take turns; those that have one each run at the same time.
    """

@CPU@    def __init__(self, threads=0):
@CPU@        """A context with so many threads; 0 takes as many as the library is made for."""
@CPU@        options = _Options(struct_size=ctypes.sizeof(_Options), threads=threads)
@GPU@    def __init__(self, threads=0, device=0, device_context=None):
@GPU@        """A context on a device, by its number; in a `cl_context` or `CUcontext`, as a number, where one is given.
@GPU@
@GPU@        Threads are for libraries that run on CPUs, and say nothing here.
@GPU@        """
@GPU@        options = _Options(struct_size=ctypes.sizeof(_Options), device=device, device_context=device_context)
        self._context = ctypes.c_void_p()
        self._lock = threading.Lock()
        _contexts.add(self)
        _check(_library.net_create(ctypes.byref(options), ctypes.byref(self._context)))

    def run(self, *inputs):
        """The outputs of inputs, as a list: numpy arrays where there is numpy, else memoryviews."""
        if len(inputs) != len(build["inputs"]):
            raise Error(f"there are {len(build['inputs'])} inputs, {len(inputs)} were given")
@FIXED@        given = [_input(tensor, value) for tensor, value in zip(build["inputs"], inputs)]
@FIXED@        made = [_output(tensor) for tensor in build["outputs"]]
@RANGE@        size = _size(inputs, build["dims"][0])
@ALONE@        size = self.past
@ROWS@        size = _size(inputs, build["dims"][1])
@RANGED@        sizes = {build["dims"][@DIM_AT@]["name"]: size}
@SECOND@        second = _size(inputs, build["dims"][@SECOND_AT@])
@SECOND@        sizes[build["dims"][@SECOND_AT@]["name"]] = second
@ITEMS@        n_items = _items(inputs)
@MEMBER@        member = _member(inputs)
@MEMBER@        given = [_input(tensor, value) for tensor, value in zip(_of(member, "inputs"), inputs)]
@MEMBER@        made = [_output(tensor) for tensor in _of(member, "outputs")]
@RANGED@        at_size = lambda tensor: @AT_SIZE@
@RANGED@        given = [_input(at_size(tensor), value) for tensor, value in zip(build["inputs"], inputs)]
@RANGED@        made = [_output(at_size(tensor)) for tensor in build["outputs"]]
        addresses = lambda all: _addresses([entry[0] for entry in all])
        with self._lock:
@RANGE@            _check(_library.net_set_dim(self._context, 0, size))
@MEMBER@            for at, size in enumerate(member["sizes"]):
@MEMBER@                _check(_library.net_set_dim(self._context, at, size))
@ROWS@            _check(_library.net_set_dim(self._context, 1, size))
@SECOND@            _check(_library.net_set_dim(self._context, @SECOND_AT@, second))
@PAIR@            _check(_library.net_set_dim(self._context, @ITEMS_AT@, n_items))
@SOLE@            _check(_library.net_set_dim(self._context, 0, n_items))
            _check(_library.net_run(self._context, addresses(given), addresses(made)))
        return [entry[2] for entry in made]

@STATE@    @property
@STATE@    def past(self):
@STATE@        """How much states have: what runs have added since the last rewind."""
@STATE@        return _library.net_past(self._context)
@STATE@
@STATE@    def rewind(self, length=0):
@STATE@        """Forgets what states have beyond a length."""
@STATE@        with self._lock:
@STATE@            _check(_library.net_rewind(self._context, length))
@STATE@
@GPU@    def enqueue(self, queue, inputs, outputs):
@GPU@        """Has the device make outputs of inputs that lie there, and does not wait.
@GPU@
@GPU@        All are numbers: addresses (a tensor's `data_ptr()`) and a stream (`torch.cuda.current_stream().cuda_stream`),
@GPU@        or buffers and a queue of PyOpenCL (`int_ptr`). Tensors are contiguous and of the sizes of `build`.
@GPU@        """
@GPU@        for name, given in [("inputs", inputs), ("outputs", outputs)]:
@GPU@            if len(given) != len(build[name]):
@GPU@                raise Error(f"there are {len(build[name])} {name}, {len(given)} were given")
@GPU@        with self._lock:
@GPU@            _check(_library.net_enqueue(self._context, queue, _addresses(inputs), _addresses(outputs)))
@GPU@

    def __del__(self):
        if getattr(self, "_context", None):
            _library.net_destroy(self._context)
            self._context = None
