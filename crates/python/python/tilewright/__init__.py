"""Finds the fastest kernel, or the best parameters of anything, by measuring.

A `Space` has parameters with exact restrictions. A `Search` is asked what to measure and told what became of
it; `tune` does both, for a function, or for a workload such as `"matmul-1024"`, whose kernels are compiled,
checked and timed here. `replay` runs a search on what was recorded, `Records` is the database. `kernel` gives
the best kernel that is recorded, and `load` an ONNX model, to be called on NumPy's arrays.

    import tilewright as tw

    space = tw.Space({"tile": [8, 16, 32], "threads": [1, 2, 4]}, ["tile * threads <= 64"])
    run = tw.tune(space, lambda config: measure(**config), trials=50).wait()
    print(run.best)

`tilewright.optuna` has a sampler for Optuna, `tilewright.kernel_tuner` a strategy for Kernel Tuner.
"""

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
    "race",
    "recorded",
    "replay",
    "searches",
    "tune",
    "tune_command",
    "tune_kernel",
    "workload_space",
]
