"""ONNX models callable on NumPy arrays and DLPack tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from . import _tilewright
from ._arrays import (
    Argument, arguments, has_type, is_bfloat16, laid_well, memory, new, received, refuse_overlaps, type_name,
    written,
)


class Model:
    """Model compiled into this process: `model({"x": x})`, `model(x)` and `model(x=x)` return a dict of outputs.

    Arrays have the dtype and shape that `inputs` lists; they are NumPy's, or anything with `__dlpack__` in the
    host's memory. Those that are not C-contiguous and aligned are copied. Outputs are new arrays, or those that
    `run` is given. Any thread may call a model: concurrent calls use separate scratch memory, which
    later calls reuse, and share the threads given to `load`.
    """

    def __init__(self, native: _tilewright.Model) -> None:
        self._native = native
        self._inputs = arguments(native.inputs)
        self._outputs = arguments(native.outputs)

    @property
    def inputs(self) -> list[Argument]:
        """Name, type and shape of each input."""
        return list(self._inputs)

    @property
    def outputs(self) -> list[Argument]:
        """Name, type and shape of each output."""
        return list(self._outputs)

    @property
    def n_untuned(self) -> int:
        """Number of distinct kernels without a record, which use a first guess."""
        return self._native.n_untuned

    def __repr__(self) -> str:
        listed = lambda all: ", ".join(f"{what.name}: {what}" for what in all)
        return f"Model({self._native.file}: {listed(self._inputs)} -> {listed(self._outputs)})"

    def _named(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the arrays of a call by input name."""
        names = [what.name for what in self._inputs]
        if len(arrays) == 1 and isinstance(arrays[0], Mapping):
            arrays, first = (), arrays[0]
        else:
            first = dict(zip(names, arrays))
        known = ", ".join(map(repr, names)) or "none"
        if len(arrays) > len(names):
            raise TypeError(f"the model has {len(names)} inputs ({known}), and {len(arrays)} arrays were given")
        for name in [*first, *named]:
            if name not in names:
                raise ValueError(f"there is no input {name!r} (there are {known})")
            if name in first and name in named:
                raise TypeError(f"the input {name!r} is given twice")
        given = {**first, **named}
        for name in names:
            if name not in given:
                raise ValueError(f"the input {name!r} is missing (the model takes {known})")
        return given

    def _input(self, what: Argument, value: Any) -> Any:
        import numpy

        array = numpy.asarray(received(what, value))
        if not has_type(what, array):
            advice = "" if is_bfloat16(what) else f" (convert it with .astype({str(what.dtype)!r}))"
            raise TypeError(f"the input {what.name!r} takes {type_name(what)}, not {array.dtype}{advice}")
        if array.shape != what.shape:
            advice = "load the model with shapes= or dims= for another one"
            raise ValueError(f"the input {what.name!r} takes the shape {what.shape}, not {array.shape} ({advice})")
        return laid_well(what, array)

    def __call__(self, /, *arrays: Any, **named: Any) -> dict[str, Any]:
        """Runs the model on a dict of arrays, arrays in the order of `inputs`, or arrays by name.

        Ctrl-C takes effect at the end of the run.
        """
        return self.run(self._named(arrays, named))

    def run(self, inputs: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Runs the model on a dict of arrays, and writes outputs to those of `out`: to all of them, or to some.

        Returns a dict of all outputs, in which arrays of `out` are the objects that were given.
        """
        given, out = self._named([inputs], {}), out or {}
        for name in out:
            if name not in [what.name for what in self._outputs]:
                known = ", ".join(repr(what.name) for what in self._outputs) or "none"
                raise ValueError(f"there is no output {name!r} (there are {known})")
        read = [memory(self._input(what, given[what.name])) for what in self._inputs]
        outputs = {what.name: out[what.name] if what.name in out else new(what) for what in self._outputs}
        made = [written(what, outputs[what.name]) for what in self._outputs]
        refuse_overlaps([*zip(self._inputs, read)], [*zip(self._outputs, made)])
        self._native.run(read, made)
        return outputs


def load(
    file: str | os.PathLike[str],
    *,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[str, Any] | None = None,
    threads: int = 1,
    exact: bool = False,
    bf16: bool = False,
    db: str | os.PathLike[str] | None = None,
    store: str | None = None,
) -> Model:
    """Compiles an ONNX model into this process, with the kernels recorded in `db`.

    `db` defaults to the database of the command `tilewright`; kernels that are not recorded are those of
    a `store` of winners, by default that of `TILEWRIGHT_STORE`, or first guesses.
    `dims` maps named dimensions to sizes, `shapes` inputs to shapes, `values` inputs to constants. A call uses
    `threads` threads. `exact` excludes algorithms that round more than the operators as written; `bf16` rounds the
    factors of products to bf16, on CPUs that multiply these faster than f32.

    Raises `ValueError` if the file is no supported model, or an argument does not fit it.
    """
    import numpy

    numbers = lambda value: ",".join(repr(number) for number in numpy.asarray(value).ravel().tolist())
    # A single number fills an input of any shape.
    shape_of = lambda value: None if numpy.size(value) == 1 else numpy.shape(value)
    native = _tilewright.Model(
        file,
        dims=list((dims or {}).items()),
        shapes=[(name, list(shape)) for name, shape in (shapes or {}).items()],
        values=[(name, numbers(value), shape_of(value)) for name, value in (values or {}).items()],
        threads=threads,
        exact=exact,
        bf16=bf16,
        db=db,
        store=store,
    )
    return Model(native)
