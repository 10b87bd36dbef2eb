"""Tensors of other libraries as NumPy's arrays over the same memory, by DLPack."""

from __future__ import annotations

import ctypes
from typing import Any

# DLPack's numbers of devices whose memory the host reads: CPUs, and what CUDA's and ROCm's drivers pin for them.
_HOSTS = (1, 3, 11)
_DEVICES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda", 14: "oneapi"}
_BFLOAT = 4
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int


class _Memory:
    """Elements of a tensor as NumPy takes them; holds the capsule, which holds the tensor."""

    def __init__(self, capsule: Any, tensor: _Tensor, is_read_only: bool) -> None:
        self._capsule = capsule
        strides = [tensor.strides[i] * 2 for i in range(tensor.rank)] if tensor.strides else None
        self.__array_interface__ = {
            "version": 3,
            "typestr": "<u2",
            "data": ((tensor.data or 0) + tensor.byte_offset, is_read_only),
            "shape": tuple(tensor.shape[i] for i in range(tensor.rank)),
            "strides": strides and tuple(strides),
        }


def _bits_of_bfloat16(value: Any) -> Any:
    """Returns the elements of a tensor of bfloat16, a type that NumPy lacks, as uint16; None of another type."""
    import numpy

    try:
        capsule = value.__dlpack__(max_version=(1, 0))
    except TypeError:
        # A producer from before version 1.
        capsule = value.__dlpack__()
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            return None
        tensor, is_read_only = managed.tensor, bool(managed.flags & _READ_ONLY)
    else:
        tensor, is_read_only = _Tensor.from_address(_pointer(capsule, b"dltensor")), False
    if (tensor.code, tensor.bits, tensor.lanes) != (_BFLOAT, 16, 1):
        return None
    return numpy.asarray(_Memory(capsule, tensor, is_read_only))


def view(value: Any, is_bfloat16: bool) -> Any:
    """Returns an array over the memory of a tensor that DLPack describes; bfloat16 as its bits, where asked for.

    Raises `BufferError` if the tensor is on a device, or NumPy has no array for it.
    """
    import numpy

    try:
        device, number = value.__dlpack_device__()
        if device not in _HOSTS:
            where = f"{_DEVICES[device]}:{number}" if device in _DEVICES else f"device {device}:{number} of DLPack"
            raise BufferError(f"it is on {where}, not in the host's memory")
        bits = _bits_of_bfloat16(value) if is_bfloat16 else None
        return numpy.from_dlpack(value) if bits is None else bits
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise BufferError(f"the tensor cannot be passed: {error}") from None
