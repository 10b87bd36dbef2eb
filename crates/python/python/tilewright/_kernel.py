"""Kernels that are called on NumPy's arrays, as they lie in memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from . import _tilewright

# NumPy's names of our element types.
_TYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "i8": "int8", "u8": "uint8", "i32": "int32",
          "i64": "int64", "bool": "bool",
          # NumPy has no such type: the bits.
          "bf16": "uint16"}


class Kernel:
    """A kernel in this process: `kernel(a, b)` gives the output of its inputs, `kernel(a, b, out=c)` writes it
    into an array that is there.

    Arrays are of the type and the shape that `inputs` and `outputs` say, contiguous and in C's order: then
    nothing is copied. One that is not contiguous is copied, with a warning.
    """

    def __init__(self, native: _tilewright.Kernel) -> None:
        import numpy

        self._numpy = numpy
        self._native = native
        self._inputs = [(name, numpy.dtype(_TYPES[dtype]), tuple(shape)) for name, dtype, shape in native.inputs]
        self._outputs = [(name, numpy.dtype(_TYPES[dtype]), tuple(shape)) for name, dtype, shape in native.outputs]

    @property
    def workload(self) -> str:
        """What it computes."""
        return self._native.workload

    @property
    def inputs(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        """Name, type and shape of each input."""
        return list(self._inputs)

    @property
    def outputs(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        """Name, type and shape of each output."""
        return list(self._outputs)

    @property
    def time(self) -> float | None:
        """Seconds that a run took when it was measured; None where nothing is recorded."""
        return self._native.time

    def __repr__(self) -> str:
        return f"Kernel({self.workload})"

    def _bytes(self, what: tuple[str, Any, tuple[int, ...]], array: Any, is_written: bool) -> Any:
        name, dtype, shape = what
        if getattr(array, "dtype", None) != dtype or array.shape != shape:
            found = f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
            raise TypeError(f"{name} is an array {dtype}{list(shape)}, not {found}")
        if not array.flags.c_contiguous or not array.flags.aligned:
            if is_written:
                raise ValueError(f"{name} is not contiguous in C's order, so that nothing can be written there")
            warnings.warn(f"{name} is not contiguous in C's order: it is copied", stacklevel=3)
            array = self._numpy.ascontiguousarray(array)
        return array.reshape(-1).view(self._numpy.uint8)

    def __call__(self, *arrays: Any, out: Any = None) -> Any:
        if len(arrays) != len(self._inputs):
            names = ", ".join(name for name, _, _ in self._inputs)
            raise TypeError(f"{self.workload} takes {len(self._inputs)} arrays ({names}), not {len(arrays)}")
        if out is None:
            made = [self._numpy.empty(shape, dtype) for _, dtype, shape in self._outputs]
        else:
            made = [out] if len(self._outputs) == 1 else list(out)
        inputs = [self._bytes(what, array, False) for what, array in zip(self._inputs, arrays)]
        outputs = [self._bytes(what, array, True) for what, array in zip(self._outputs, made)]
        self._native.run(inputs, outputs)
        return made[0] if len(made) == 1 else made


def kernel(
    workload: str,
    *,
    threads: int = 1,
    db: str | os.PathLike[str] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Kernel:
    """The best kernel that is recorded of a workload, or what the model of this machine guesses, compiled into
    this process. `constants` are arrays of inputs that the workload says stay the same (`const=w`)."""
    held = [(name, array.tobytes()) for name, array in (constants or {}).items()]
    return Kernel(_tilewright.Kernel(workload, threads=threads, db=db, constants=held))
