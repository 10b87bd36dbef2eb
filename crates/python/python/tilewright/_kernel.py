"""Kernels callable on NumPy arrays and DLPack tensors, without copies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from . import _tilewright
from ._arrays import Argument, arguments, has_type, laid_well, memory, new, received, refuse_overlaps, written


class Kernel:
    """Kernel compiled into this process: `kernel(a, b)` returns the output, `kernel(a, b, out=c)` writes it to `c`.

    Arrays have the dtype and shape that `inputs` and `outputs` list; they are NumPy's, or anything with
    `__dlpack__` in the host's memory, such as PyTorch's tensors. C-contiguous, aligned arrays are used without a
    copy; others are copied, with a warning. Any thread may call a kernel: concurrent calls use separate scratch
    memory.
    """

    def __init__(self, native: _tilewright.Kernel) -> None:
        self._native = native
        self._inputs = arguments(native.inputs)
        self._outputs = arguments(native.outputs)

    @property
    def workload(self) -> str:
        """Workload that the kernel computes, as text."""
        return self._native.workload

    @property
    def inputs(self) -> list[Argument]:
        """Name, type and shape of each input."""
        return list(self._inputs)

    @property
    def outputs(self) -> list[Argument]:
        """Name, type and shape of each output."""
        return list(self._outputs)

    @property
    def time(self) -> float | None:
        """Recorded seconds of a run; None if nothing is recorded."""
        return self._native.time

    def __repr__(self) -> str:
        return f"Kernel({self.workload})"

    def _read(self, what: Argument, array: Any) -> Any:
        array = received(what, array)
        if not hasattr(array, "dtype") or not has_type(what, array) or array.shape != what.shape:
            found = f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
            raise TypeError(f"{what.name} is an array {what}, not {found}")
        return memory(laid_well(what, array, warn=True))

    def __call__(self, *arrays: Any, out: Any = None) -> Any:
        if len(arrays) != len(self._inputs):
            names = ", ".join(what.name for what in self._inputs)
            raise TypeError(f"{self.workload} takes {len(self._inputs)} arrays ({names}), not {len(arrays)}")
        if out is None:
            made = [new(what) for what in self._outputs]
        else:
            made = [out] if len(self._outputs) == 1 else list(out)
        if len(made) != len(self._outputs):
            raise TypeError(f"out has {len(self._outputs)} arrays, not {len(made)}")
        inputs = [self._read(what, array) for what, array in zip(self._inputs, arrays)]
        outputs = [written(what, array) for what, array in zip(self._outputs, made)]
        refuse_overlaps([*zip(self._inputs, inputs)], [*zip(self._outputs, outputs)])
        self._native.run(inputs, outputs)
        return made[0] if len(made) == 1 else made


def kernel(
    workload: str,
    *,
    threads: int = 1,
    db: str | os.PathLike[str] | None = None,
    constants: Mapping[str, Any] | None = None,
    store: str | None = None,
) -> Kernel:
    """Compiles the best recorded kernel of a workload into this process, or if none is recorded, the first guess.

    `store` names a store of winners for what is not recorded, by default that of `TILEWRIGHT_STORE`.
    `constants` maps inputs that the workload declares constant (`const=w`) to their arrays.
    """
    held = [(name, array.tobytes()) for name, array in (constants or {}).items()]
    return Kernel(_tilewright.Kernel(workload, threads=threads, db=db, constants=held, store=store))
