"""PyTorch's models on Tilewright's kernels: a backend of `torch.compile`, and `optimize` for whole modules.

    import torch

    fast = torch.compile(model.eval(), backend="tilewright")
    with torch.no_grad():
        y = fast(x)

A graph is exported by `torch.onnx` when it is called first, its weights become constants, and its kernels are the
best that are recorded, or first guesses. Its first answer is compared with PyTorch's own. Graphs that do not
become kernels run in PyTorch, as they would have; a warning says why, once for each reason.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ._arrays import memory
from ._model import Model, load

__all__ = ["Optimized", "backend", "optimize"]

# So many sizes of inputs, or states of the weights, a graph is compiled for.
_MOST_COMPILED = 8

# So many bytes of weights and more are in files beside the model, which one file of ONNX cannot hold.
_LARGE_BYTES = 3 << 29

_OPTIONS = ("threads", "db", "exact", "time")

_said: set[str] = set()


class _Refused(Exception):
    """Reason why a graph stays with PyTorch."""


def _say(reason: str) -> None:
    """Says once that a graph stays with PyTorch."""
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"tilewright leaves a graph to PyTorch: {reason}", stacklevel=3)


def _one_line(error: BaseException) -> str:
    """Returns the first line of the first cause of an error, without colours."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()]
    return f"{type(error).__name__}: {next(filter(None, lines), '')[:200]}"


class _Bound(torch.nn.Module):
    """A function of some of the arguments of a graph; all others are constants."""

    def __init__(self, graph: Callable[..., Any], arguments: Sequence[Any], inputs: Sequence[int]) -> None:
        super().__init__()
        self._graph, self._arguments, self._inputs = graph, list(arguments), list(inputs)
        for at, value in enumerate(arguments):
            if at not in inputs and isinstance(value, torch.Tensor):
                self.register_buffer(f"constant_{at}", value.detach())
                self._arguments[at] = None

    def forward(self, *given: Any) -> Any:
        arguments = list(self._arguments)
        for at in range(len(arguments)):
            if hasattr(self, f"constant_{at}"):
                arguments[at] = getattr(self, f"constant_{at}")
        for at, value in zip(self._inputs, given):
            arguments[at] = value
        return self._graph(*arguments)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keeps to itself what the exporter has to say of operators that nobody asked for."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def _encoder_layer(
    x: torch.Tensor, size: int, heads: int, qkv: Any, qkv_bias: Any, project: Any, project_bias: Any, gelu: bool,
    norm_first: bool, eps: float, scale_1: Any, shift_1: Any, scale_2: Any, shift_2: Any, up: Any, up_bias: Any,
    down: Any, down_bias: Any, mask: Any = None, mask_type: Any = None,
) -> torch.Tensor:
    """A layer of `torch.nn.TransformerEncoder` in eval mode, which PyTorch runs as one operator and does not export."""
    if mask is not None:
        return NotImplemented
    call = torch.nn.functional

    def attention(x: torch.Tensor) -> torch.Tensor:
        parts = call.linear(x, qkv, qkv_bias).unflatten(-1, (3, heads, size // heads)).permute(2, 0, 3, 1, 4)
        mixed = call.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return call.linear(mixed.transpose(1, 2).flatten(2), project, project_bias)

    norm_1 = lambda x: call.layer_norm(x, (size,), scale_1, shift_1, eps)
    norm_2 = lambda x: call.layer_norm(x, (size,), scale_2, shift_2, eps)
    wide = lambda x: call.gelu(call.linear(x, up, up_bias)) if gelu else call.relu(call.linear(x, up, up_bias))
    feed = lambda x: call.linear(wide(x), down, down_bias)
    if norm_first:
        x = x + attention(norm_1(x))
        return x + feed(norm_2(x))
    x = norm_1(x + attention(x))
    return norm_2(x + feed(x))


def _functional(program: Any) -> Any:
    """Returns a program without operators that write to their arguments, or that the exporter has no words for."""
    return program.run_decompositions({torch.ops.aten._transformer_encoder_layer_fwd.default: _encoder_layer})


def _export(module: Any, arguments: Sequence[Any], named: Mapping[str, Any] | None = None) -> Any:
    """Exports a module for arguments of these sizes.

    Raises `_Refused` if it cannot be exported, or changes what it is given.
    """
    try:
        with _quietly(), torch.no_grad():
            program = _functional(torch.export.export(module, tuple(arguments), dict(named or {}), strict=False))
    except Exception as error:
        raise _Refused(f"it cannot be exported ({_one_line(error)})") from error
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise _Refused("it writes to its inputs or to its module")
    return program


def _command() -> str:
    """Returns the path of the command that came with this package."""
    here = pathlib.Path(sysconfig.get_path("scripts")) / "tilewright"
    found = str(here) if here.is_file() else shutil.which("tilewright")
    if found is None:
        raise RuntimeError("the command `tilewright`, which tunes models, is not installed beside this package")
    return found


def _compile(program: Any, threads: int, db: Any, exact: bool, time: float | None) -> Model:
    """Makes a model of an exported program, with its kernels tuned for so many seconds before.

    Raises `_Refused` if the exporter or the importer refuses it.
    """
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        path = os.path.join(folder, "graph.onnx")
        n_bytes = sum(value.numel() * value.element_size() for value in program.state_dict.values())
        try:
            with _quietly():
                onnx = torch.onnx.export(program, dynamo=True, verbose=False)
                onnx.save(path, external_data=n_bytes >= _LARGE_BYTES)
        except Exception as error:
            raise _Refused(f"it cannot be written as ONNX ({_one_line(error)})") from error
        if time is not None:
            words = ["--db", os.fspath(db)] if db is not None else []
            words += ["--exact"] if exact else []
            command = [_command(), "tune", path, "--time", str(time), "--threads", str(threads), *words]
            tuned = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if tuned.returncode != 0:
                raise _Refused(f"its kernels cannot be tuned ({tuned.stderr.strip().splitlines()[-1:]})")
        try:
            return load(path, threads=threads, exact=exact, db=db)
        except (ValueError, RuntimeError) as error:
            raise _Refused(str(error).replace(f"{path}: ", "")) from error


def _bytes(tensor: torch.Tensor) -> Any:
    """Returns the memory of a tensor as an array of bytes, that of a copy if it is not contiguous."""
    return memory(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


class _Compiled:
    """A model that is called on tensors, and knows what its outputs are from an answer of PyTorch's."""

    def __init__(self, model: Model, inputs: Sequence[torch.Tensor], answer: Sequence[torch.Tensor]) -> None:
        self.model = model
        given = [("input", "inputs", inputs, model.inputs), ("output", "outputs", answer, model.outputs)]
        for one, many, tensors, ports in given:
            if len(tensors) != len(ports):
                raise _Refused(f"it has {len(tensors)} {many}, and {len(ports)} as ONNX")
            for at, (tensor, port) in enumerate(zip(tensors, ports)):
                if tuple(tensor.shape) != port.shape or tensor.element_size() != port.dtype.itemsize:
                    found = f"{tensor.dtype} {list(tensor.shape)}"
                    raise _Refused(f"{one} {at} is {found} in PyTorch, and {port} as ONNX")
        self._outputs = [(tuple(tensor.shape), tensor.dtype) for tensor in answer]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs = [torch.empty(shape, dtype=dtype) for shape, dtype in self._outputs]
        self.model._native.run([_bytes(tensor) for tensor in inputs], [_bytes(tensor) for tensor in outputs])
        return outputs


# Largest difference from PyTorch's answer, of the largest number in it.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def _check(found: Sequence[torch.Tensor], answer: Sequence[torch.Tensor]) -> None:
    """Compares outputs with PyTorch's own.

    Raises `_Refused` if they are not nearly the same.
    """
    for at, (ours, theirs) in enumerate(zip(found, answer)):
        ours, theirs = ours.detach().to(torch.float64), theirs.detach().to(torch.float64)
        finite = theirs[theirs.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        tolerance = _TOLERANCES.get(answer[at].dtype, 0.0) * max(scale, 1e-3)
        if not torch.allclose(ours, theirs, rtol=0, atol=tolerance, equal_nan=True):
            worst = float((ours - theirs).abs().max())
            raise _Refused(f"output {at} is {worst:.2g} away from PyTorch's, where the largest number is {scale:.2g}")


def _tensors(found: Any, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors that a graph returned in PyTorch.

    Raises `_Refused` if an output is no tensor, or lies where an input does.
    """
    tensors = list(found) if isinstance(found, (list, tuple)) else [found]
    taken = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor)}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise _Refused(f"an output is no tensor, but {type(tensor).__name__}")
        if tensor.numel() and tensor.untyped_storage().data_ptr() in taken:
            raise _Refused("an output is a view of an input")
    return tensors


def _is_weight(value: Any) -> bool:
    """Returns whether a graph's argument is a parameter or buffer of a module, which seldom changes."""
    is_static = getattr(value, "_dynamo_static_input_type", None) is not None
    return isinstance(value, torch.nn.Parameter) or (is_static and isinstance(value, torch.Tensor))


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns numbers one of which changes when a tensor is written to, or gets other memory by `tensor.data = …`."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _with_numbers(graph: Any) -> tuple[Any, frozenset[int]]:
    """Returns a graph that takes numbers as such, and the places of these among its arguments.

    With `dynamic=True` PyTorch passes a module's floating-point numbers as tensors of which the graph takes the item:
    to the exporter that is data, on which nothing may depend.
    """
    is_item = lambda node: node.op == "call_method" and node.target == "item"
    arguments = lambda of: [node for node in of.nodes if node.op == "placeholder"]
    given = arguments(graph.graph) if hasattr(graph, "graph") else []
    numbers = frozenset(at for at, node in enumerate(given) if node.users and all(map(is_item, node.users)))
    if not numbers:
        return graph, numbers
    own = copy.deepcopy(graph.graph)
    for at, number in enumerate(arguments(own)):
        for item in list(number.users) if at in numbers else []:
            item.replace_all_uses_with(number)
            own.erase_node(item)
    return torch.fx.GraphModule(graph, own), numbers


class _Graph:
    """A graph of `torch.compile`: compiled for the sizes that it is called with, or left to PyTorch."""

    def __init__(self, graph: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._graph = graph
        self._exportable, self._numbers = _with_numbers(graph)
        self._options = options
        self._compiled: dict[Any, _Compiled] = {}
        self._weights: list[tuple[int, Any, tuple[int, int]]] | None = None
        self._inputs: list[int] = []
        self._n_compiled = 0
        self._is_refused = False
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        if self._is_refused:
            return self._graph(*arguments)
        if torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in arguments):
            _say("it may be asked for gradients (call it under torch.no_grad() or torch.inference_mode())")
            return self._graph(*arguments)
        if self._weights is not None and self._are_known(arguments):
            compiled = self._compiled.get(self._key(arguments))
            if compiled is not None:
                return compiled([arguments[at] for at in self._inputs])
        if self._n_compiled >= _MOST_COMPILED:
            _say(f"its sizes or weights are of a {_MOST_COMPILED + 1}th kind (the others stay compiled)")
            return self._graph(*arguments)
        with self._lock:
            return self._first(arguments)

    def _are_known(self, arguments: Sequence[Any]) -> bool:
        """Returns whether all weights are those that became constants, and have not been written to."""
        return all(arguments[at] is known and _version(known) == version for at, known, version in self._weights or [])

    def _key(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what a model is compiled for: the sizes of the inputs, and arguments that are no tensors."""
        weights = {at for at, _, _ in self._weights or []}
        tensor = lambda value: (tuple(value.shape), value.dtype)
        rest = [value for at, value in enumerate(self._valued(arguments)) if at not in weights]
        return tuple(tensor(value) if isinstance(value, torch.Tensor) else value for value in rest)

    def _valued(self, arguments: Sequence[Any]) -> list[Any]:
        """Returns arguments with numbers in the places of tensors that stand for them."""
        return [value.item() if at in self._numbers else value for at, value in enumerate(arguments)]

    def _first(self, arguments: Sequence[Any]) -> Any:
        """Compiles for these arguments, and returns PyTorch's answer, which ours is compared with."""
        # A graph runs once a call: it may draw random numbers.
        found = None
        try:
            program, inputs = self._exported(arguments)
            found = self._graph(*arguments)
            answer = _tensors(found, arguments)
            compiled = _Compiled(_compile(program, **self._options), inputs, answer)
            _check(compiled(inputs), answer)
            self._compiled[self._key(arguments)] = compiled
        except _Refused as reason:
            self._is_refused = True
            self._compiled.clear()
            _say(str(reason))
        return self._graph(*arguments) if found is None else found

    def _exported(self, arguments: Sequence[Any]) -> tuple[Any, list[torch.Tensor]]:
        """Exports the graph for these arguments; returns it with those of them that are its inputs."""
        for value in arguments:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                raise _Refused(f"a tensor is on {value.device}, and models run on the CPU")
        if self._weights is None or not self._are_known(arguments):
            self._compiled.clear()
            is_one = lambda at, value: at not in self._numbers and _is_weight(value)
            self._weights = [(at, value, _version(value)) for at, value in enumerate(arguments) if is_one(at, value)]
        self._n_compiled += 1
        arguments = self._valued(arguments)
        weights = {at for at, _, _ in self._weights}
        is_input = lambda at, value: at not in weights and isinstance(value, torch.Tensor)
        self._inputs = [at for at, value in enumerate(arguments) if is_input(at, value)]
        inputs = [arguments[at] for at in self._inputs]
        return _export(_Bound(self._exportable, arguments, self._inputs), inputs), inputs


def _settings(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the settings of a compilation, those that are not given by default."""
    for name in options or {}:
        if name not in _OPTIONS:
            raise ValueError(f"tilewright has no option {name!r} (there are {', '.join(map(repr, _OPTIONS))})")
    chosen = {"threads": None, "db": None, "exact": False, "time": None, **(options or {})}
    chosen["threads"] = torch.get_num_threads() if chosen["threads"] is None else chosen["threads"]
    return chosen


def backend(
    graph: Callable[..., Any], example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend of `torch.compile`, by the name `tilewright`.

    Options are `threads`, by default PyTorch's number; `db`, the database of records; `exact`, which excludes
    algorithms that round more than the operators as written; `time`, the seconds for which the kernels of a
    graph are tuned when it is called first, by default none.
    """
    return _Graph(graph, _settings(options))


class Optimized:
    """Module as a function on kernels: takes and returns what the module does, for inputs of the same sizes."""

    def __init__(self, model: Model, program: Any, compiled: _Compiled, inputs: Sequence[torch.Tensor]) -> None:
        self._model, self._compiled = model, compiled
        self._spec = program.call_spec.out_spec
        self._in_spec = program.call_spec.in_spec
        self._sizes = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]

    @property
    def model(self) -> Model:
        """Model that computes it."""
        return self._model

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the module; tensors have the types and the sizes of the example."""
        leaves, spec = torch.utils._pytree.tree_flatten((arguments, named))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if spec != self._in_spec or found != self._sizes:
            raise ValueError(f"the module was optimized for {self._sizes}, not for {found}")
        return torch.utils._pytree.tree_unflatten(self._compiled(tensors), self._spec)

    def __repr__(self) -> str:
        return f"Optimized({self._model!r})"


def optimize(
    module: torch.nn.Module,
    example_inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    time: float | None = None,
    threads: int | None = None,
    db: str | os.PathLike[str] | None = None,
    exact: bool = False,
) -> Optimized:
    """Makes a function of a module, for inputs of the sizes of the example, on kernels tuned for `time` seconds.

    `example_inputs` is a tensor or a tuple of the arguments, `kwargs` those by name. The module is in the mode in
    which it is to run (`module.eval()`), and computes no gradients. Its answer to the example is compared with
    PyTorch's. Without `time` the kernels are the best that are recorded, or first guesses. The other options are
    those of `load`; `threads` is by default PyTorch's number.

    Raises `ValueError` if the module does not become kernels.
    """
    arguments = tuple(example_inputs) if isinstance(example_inputs, (list, tuple)) else (example_inputs,)
    settings = _settings({"time": time, "threads": threads, "db": db, "exact": exact})
    leaves, _ = torch.utils._pytree.tree_flatten((arguments, dict(kwargs or {})))
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    try:
        program = _export(module, arguments, kwargs)
        with torch.no_grad():
            answer = _tensors(torch.utils._pytree.tree_leaves(module(*arguments, **(kwargs or {}))), [])
        model = _compile(program, **settings)
        compiled = _Compiled(model, inputs, answer)
        _check(compiled(inputs), answer)
    except _Refused as reason:
        raise ValueError(f"{type(module).__name__} does not become kernels: {reason}") from reason.__cause__
    return Optimized(model, program, compiled, inputs)
