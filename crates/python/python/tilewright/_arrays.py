"""NumPy arrays as arguments of kernels and models."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

# NumPy's names of our element types.
_TYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "i8": "int8", "u8": "uint8", "i16": "int16",
          "u16": "uint16", "i32": "int32", "u32": "uint32", "i64": "int64", "u64": "uint64", "bool": "bool",
          # NumPy has no such type: the bits.
          "bf16": "uint16"}


class Argument(NamedTuple):
    """Input or output of a kernel or model."""

    name: str
    dtype: Any
    """NumPy's type of its elements."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def arguments(native: list[tuple[str, str, list[int]]]) -> list[Argument]:
    """Returns the arguments that the library lists."""
    import numpy

    return [Argument(name, numpy.dtype(_TYPES[dtype]), tuple(shape)) for name, dtype, shape in native]


def new(what: Argument) -> Any:
    """Allocates an array for an output."""
    import numpy

    return numpy.empty(what.shape, what.dtype)


def lies_well(what: Argument, array: Any) -> bool:
    """Returns whether an array of this dtype and shape can be passed without a copy."""
    return array.flags.c_contiguous and array.flags.aligned and array.dtype == what.dtype


def laid_well(what: Argument, array: Any, warn: bool = False) -> Any:
    """Returns the array itself if it can be passed without a copy, else a copy of this dtype and shape."""
    import numpy

    if lies_well(what, array):
        return array
    if warn:
        reason = "not contiguous in C's order, not aligned, or of another order of bytes"
        warnings.warn(f"{what.name} is {reason}: it is copied", stacklevel=4)
    return numpy.require(array, what.dtype, ["C_CONTIGUOUS", "ALIGNED"])


def has_type(what: Argument, array: Any) -> bool:
    """Returns whether an array has this dtype, in either byte order."""
    return array.dtype.newbyteorder("=") == what.dtype


def memory(array: Any) -> Any:
    """Returns the memory of an array that can be passed without a copy."""
    import numpy

    return array.reshape(-1).view(numpy.uint8)
