"""NumPy's arrays on their way to kernels and models."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

# NumPy's names of our element types.
_TYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "i8": "int8", "u8": "uint8", "i16": "int16",
          "u16": "uint16", "i32": "int32", "u32": "uint32", "i64": "int64", "u64": "uint64", "bool": "bool",
          # NumPy has no such type: the bits.
          "bf16": "uint16"}


class Argument(NamedTuple):
    """An input or output."""

    name: str
    dtype: Any
    """NumPy's type of its elements."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def arguments(native: list[tuple[str, str, list[int]]]) -> list[Argument]:
    """What a kernel or model of the library takes or gives."""
    import numpy

    return [Argument(name, numpy.dtype(_TYPES[dtype]), tuple(shape)) for name, dtype, shape in native]


def new(what: Argument) -> Any:
    """An array for an output."""
    import numpy

    return numpy.empty(what.shape, what.dtype)


def lies_well(what: Argument, array: Any) -> bool:
    """Whether an array of the type and the shape can be used as it lies in memory."""
    return array.flags.c_contiguous and array.flags.aligned and array.dtype == what.dtype


def laid_well(what: Argument, array: Any, warn: bool = False) -> Any:
    """An array of the type and the shape, as it is where it lies well, else copied."""
    import numpy

    if lies_well(what, array):
        return array
    if warn:
        reason = "not contiguous in C's order, not aligned, or of another order of bytes"
        warnings.warn(f"{what.name} is {reason}: it is copied", stacklevel=4)
    return numpy.require(array, what.dtype, ["C_CONTIGUOUS", "ALIGNED"])


def has_type(what: Argument, array: Any) -> bool:
    """Whether an array has the type, in whatever order of bytes."""
    return array.dtype.newbyteorder("=") == what.dtype


def memory(array: Any) -> Any:
    """The bytes of an array that lies well."""
    import numpy

    return array.reshape(-1).view(numpy.uint8)
