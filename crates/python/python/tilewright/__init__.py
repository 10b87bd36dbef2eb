"""Autotuning: the fastest kernel, or the best parameters of any function, found by measuring.

A `Space` has parameters and exact constraints. A `Search` proposes configurations and is told their results;
`tune` drives one, for a Python function, or for a workload such as `"matmul-1024"`, whose kernels it compiles,
checks and times on this machine. `replay` runs a search on recorded measurements, `Records` reads the database.
`kernel` returns the best recorded kernel of a workload and `load` an ONNX model, both callable on NumPy arrays.

    import tilewright as tw

    space = tw.Space({"tile": [8, 16, 32], "threads": [1, 2, 4]}, ["tile * threads <= 64"])
    run = tw.tune(space, lambda config: measure(**config), trials=50).wait()
    print(run.best)

`tilewright.optuna` has a sampler for Optuna, `tilewright.kernel_tuner` a strategy for Kernel Tuner, and
`tilewright.torch` a backend of `torch.compile`.
"""

from typing import Any as _Any

from ._arrays import Argument
from ._kernel import Kernel, kernel
from ._model import Model, load
from ._replay import AtBudget, Replay, recorded, replay
from ._run import Event, Failure, Run, Trial, tune, tune_command, tune_kernel
from ._tilewright import Recorded, Records, Search, Space, __version__, build, race, searches, workload_space

__all__ = [
    "Argument",
    "AtBudget",
    "Event",
    "Failure",
    "Kernel",
    "Model",
    "Recorded",
    "Records",
    "Replay",
    "Run",
    "Search",
    "Space",
    "Trial",
    "__version__",
    "build",
    "kernel",
    "load",
    "optimize",
    "race",
    "recorded",
    "replay",
    "searches",
    "tune",
    "tune_command",
    "tune_kernel",
    "workload_space",
]


def optimize(module: _Any, example_inputs: _Any, **options: _Any) -> _Any:
    """Makes a function of a PyTorch module on kernels that are tuned for `time` seconds.

    See `tilewright.torch.optimize`, which this is.
    """
    from .torch import optimize

    return optimize(module, example_inputs, **options)
