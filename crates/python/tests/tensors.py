"""Tensors of a library that is not NumPy: what they are is said by DLPack alone."""

import ctypes

import numpy

from tilewright._dlpack import _Tensor, _Versioned

CODES = {"i": 0, "u": 1, "f": 2, "b": 6}


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new = ctypes.pythonapi.PyCapsule_New
_new.argtypes, _new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object


class Tensor:
    """A tensor over an array's memory, with any type and device; of DLPack's version 1, or from before it."""

    def __init__(self, array, code=None, device=(1, 0), is_versioned=True, is_read_only=False, byte_offset=0,
                 address=None):
        self.array, self.device = array, device
        self.address = array.ctypes.data if address is None else address
        self.is_versioned, self.is_read_only = is_versioned, is_read_only
        self.code, self.byte_offset, self.n_taken = code, byte_offset, 0

    @property
    def dtype(self):
        return "a type of a library's own"

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if options and not self.is_versioned:
            raise TypeError("there are no options")
        self.n_taken += 1
        array = self.array
        self.shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
        self.strides = (ctypes.c_int64 * max(array.ndim, 1))(*(step // array.itemsize for step in array.strides))
        code = CODES[array.dtype.kind] if self.code is None else self.code
        tensor = _Tensor(
            self.address - self.byte_offset, *self.device, array.ndim, code, array.itemsize * 8, 1,
            self.shape, self.strides, self.byte_offset,
        )
        if self.is_versioned:
            self.managed = _Versioned(1, 0, None, None, int(self.is_read_only), tensor)
            return _new(ctypes.addressof(self.managed), b"dltensor_versioned", None)
        self.managed = _Managed(tensor, None, None)
        return _new(ctypes.addressof(self.managed), b"dltensor", None)


def bfloat16(values, **options):
    """A tensor of bfloat16 with these values, cut off behind their 16 bits."""
    bits = (numpy.ascontiguousarray(values, "float32").view("uint32") >> 16).astype("uint16")
    return Tensor(bits, code=4, **options)


def numbers(tensor):
    """The values of a tensor of bfloat16."""
    return (tensor.array.astype("uint32") << 16).view("float32")
