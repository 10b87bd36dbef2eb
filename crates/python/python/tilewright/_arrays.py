"""Arrays as arguments of kernels and models: NumPy's, and tensors with `__dlpack__`."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from . import _dlpack

# NumPy's names of our element types.
_TYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "i8": "int8", "u8": "uint8", "i16": "int16",
          "u16": "uint16", "i32": "int32", "u32": "uint32", "i64": "int64", "u64": "uint64", "bool": "bool"}

# Key of the metadata of uint16 where it has the bits of bfloat16, a type that NumPy lacks.
_BITS_OF = "bits of"


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

    bits = numpy.dtype("uint16", metadata={_BITS_OF: "bfloat16"})
    types = {**{name: numpy.dtype(known) for name, known in _TYPES.items()}, "bf16": bits}
    return [Argument(name, types[dtype], tuple(shape)) for name, dtype, shape in native]


def is_bfloat16(what: Argument) -> bool:
    """Returns whether an argument has elements of bfloat16."""
    return _BITS_OF in (what.dtype.metadata or {})


def type_name(what: Argument) -> str:
    """Returns the type of an argument's elements, for messages."""
    return "bfloat16, or its bits as uint16" if is_bfloat16(what) else str(what.dtype)


def received(what: Argument, value: Any) -> Any:
    """Returns what a caller gives for an argument as an array over the same memory, if it has `__dlpack__`.

    Raises `TypeError` if the tensor is on a device, or NumPy has no array for it.
    """
    import numpy

    if isinstance(value, numpy.ndarray):
        # The type of the package ml_dtypes, which JAX's arrays have in NumPy.
        return value.view("uint16") if is_bfloat16(what) and value.dtype.name == "bfloat16" else value
    if not hasattr(value, "__dlpack__"):
        return value
    try:
        return _dlpack.view(value, is_bfloat16(what))
    except BufferError as error:
        raise TypeError(f"{what.name}: {error}") from None


def written(what: Argument, array: Any) -> Any:
    """Returns the memory of an array that is an output.

    Raises `TypeError` or `ValueError` if nothing of this argument can be written there.
    """
    array = received(what, array)
    if not hasattr(array, "dtype") or not has_type(what, array) or array.shape != what.shape:
        found = f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
        raise TypeError(f"{what.name} is an array {what}, not {found}")
    if not lies_well(what, array):
        reason = "contiguous in C's order, aligned and of this machine's order of bytes"
        raise ValueError(f"{what.name} is not {reason}, so that nothing can be written there")
    if not array.flags.writeable:
        raise ValueError(f"{what.name} is read-only, so that nothing can be written there")
    return memory(array)


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

    # Where there are no elements, others may have no address.
    return array.reshape(-1).view(numpy.uint8) if array.size else numpy.empty(0, numpy.uint8)


def refuse_overlaps(inputs: list[tuple[Argument, Any]], outputs: list[tuple[Argument, Any]]) -> None:
    """Raises `ValueError` if the memory of an output is also that of an input or of another output."""
    import numpy

    for at, (what, written) in enumerate(outputs):
        for other, read in inputs + outputs[:at]:
            if numpy.may_share_memory(written, read):
                raise ValueError(f"{what.name} shares memory with {other.name} (give an array of its own)")
