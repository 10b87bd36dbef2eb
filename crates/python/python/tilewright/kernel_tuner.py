"""Strategy for Kernel Tuner that uses the searches of Tilewright.

    from tilewright.kernel_tuner import Strategy

    kernel_tuner.tune_kernel(…, strategy=Strategy(), strategy_options={"max_fevals": 100})

It replaces one of Kernel Tuner's own; kernels, caches, observers and simulation work as before.
"""

from __future__ import annotations

import sys
from typing import Any

from . import Failure, Search, Space

__all__ = ["Strategy"]


class Strategy:
    """Runs a search on the configurations that Kernel Tuner lists as legal.

    `search` and `seed` are those of `tilewright.Search` and may be given in `strategy_options` as well. `batch`
    configurations are proposed at a time; more than one serves runners that measure in parallel.
    """

    def __init__(self, search: str = "auto", seed: int = 0, batch: int = 1) -> None:
        self.search = search
        self.seed = seed
        self.batch = batch

    def tune(self, searchspace: Any, runner: Any, tuning_options: Any) -> list[dict[str, Any]]:
        """Runs the search until the budget is spent; Kernel Tuner calls this."""
        from kernel_tuner.strategies.common import CostFunc
        from kernel_tuner.util import StopCriterionReached

        options = tuning_options.strategy_options
        search = options.get("search", self.search)
        seed = options.get("seed", self.seed)
        batch = options.get("batch", self.batch)
        if not hasattr(batch, "__index__") or batch < 1:
            raise ValueError(f"batch takes a whole number of 1 or above, not {batch!r}")
        if len(_list(tuning_options.objective)) > 1:
            raise ValueError("Strategy takes one objective: several have no best configuration")
        is_reversed = _list(tuning_options.objective_higher_is_better)[0]
        space = Space(searchspace.tune_params, configurations=searchspace.list)
        searching = Search(search, space, seed, maximize=is_reversed)
        cost = CostFunc(searchspace, tuning_options, runner, scaling=False, snap=False)
        try:
            while configs := searching.ask(batch):
                values = cost.eval_all([tuple(config.values()) for config in configs], check_restrictions=False)
                for config, value in zip(configs, values):
                    searching.tell(config, _outcome(value, is_reversed))
        except StopCriterionReached as reason:
            if tuning_options.verbose:
                print(reason)
        return cost.results


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _outcome(value: float, is_reversed: bool) -> float | Failure:
    """Converts a cost to the objective. If that is maximised, Kernel Tuner's cost is its negative."""
    if value >= sys.float_info.max or value != value:
        return Failure("runtime_error", "no valid time")
    value = -value if is_reversed else value
    return value if value >= 0 else Failure("unknown", f"the objective is {value}, below 0")
