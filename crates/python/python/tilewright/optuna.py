"""A sampler for Optuna that uses our searches, on a space with exact restrictions.

    import optuna, tilewright as tw
    from tilewright.optuna import Sampler

    space = tw.Space({"tile": [8, 16, 32], "threads": [1, 2, 4]}, ["tile * threads <= 64"])
    study = optuna.create_study(sampler=Sampler(space))
    study.optimize(objective, n_trials=50)

No trial has a configuration that is not legal, or that another one had: trials that are running, failed or
were pruned count as well. The study ends by itself when the space is exhausted.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from . import Failure, Search, Space

__all__ = ["Sampler"]


class Sampler(BaseSampler):
    """Proposes what a search of ours does.

    `space` has all parameters that the objective suggests, by their names; of each the values that the space
    lists have to be possible for the distribution that is suggested. `search` and `seed` are as for
    `tilewright.Search`.

    Searches make times small, which are numbers above 0. Where values of the objective are no such numbers,
    `cost` makes one of a value; without it a study that maximizes uses the reciprocal.
    """

    def __init__(
        self, space: Space, search: str = "auto", seed: int = 0, *, cost: Callable[[float], float] | None = None
    ) -> None:
        self._space = space
        self._search = Search(search, space, seed)
        self._cost = cost
        self._lock = threading.Lock()
        # By number of a trial: the configuration that it was given.
        self._given: dict[int, dict[str, Any]] = {}
        self._n_seen = 0
        self._study: Study | None = None

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        # Which distributions an objective suggests is known only when it does.
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Asks for the whole configuration of a trial."""
        with self._lock:
            if self._study is None:
                self._begin(study)
            if "fixed_params" in trial.system_attrs:
                return
            configs = self._search.ask(1)
            if not configs:
                raise RuntimeError(f"the space has no more than {self._space.size} configurations, and all were tried")
            self._given[trial.number] = configs[0]
            self._n_seen += 1
            is_last = self._n_seen >= self._space.size
        if is_last:
            try:
                study.stop()
            except RuntimeError:
                # Whoever asks by hand sees when there is nothing left.
                pass

    def _begin(self, study: Study) -> None:
        if len(study.directions) > 1:
            raise ValueError("a study of several objectives has no best trial: this sampler takes one objective")
        self._study = study
        for trial in study.get_trials(deepcopy=False):
            if trial.state.is_finished():
                self._tell(study, trial.params, trial.state, trial.values)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        config = self._given.get(trial.number)
        if config is None:
            raise ValueError(f"a trial that is enqueued has to say all parameters, and this one lacks {param_name}")
        if param_name not in config:
            known = ", ".join(self._space.names)
            raise ValueError(f"the space of the sampler has no parameter {param_name}; there are {known}")
        value = config[param_name]
        try:
            is_possible = param_distribution._contains(param_distribution.to_internal_repr(value))
        except (ValueError, TypeError):
            is_possible = False
        if not is_possible:
            raise ValueError(
                f"the space of the sampler has {param_name}={value!r}, which {param_distribution} does not allow"
            )
        return value

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Tells what became of a trial."""
        with self._lock:
            config = self._given.pop(trial.number, None)
            self._tell(study, trial.params if config is None else config, state, values)

    def _tell(
        self, study: Study, config: dict[str, Any], state: TrialState, values: Sequence[float] | None
    ) -> None:
        if config not in self._space:
            return
        if state != TrialState.COMPLETE or not values:
            kind = "run_timeout" if state == TrialState.PRUNED else "runtime_error"
            self._search.tell(config, Failure(kind, state.name.lower()))
            return
        value = values[0]
        if self._cost is not None:
            cost = self._cost(value)
        elif study.direction == StudyDirection.MAXIMIZE:
            cost = 1 / value if value > 0 else math.nan
        else:
            cost = value
        if not (0 < cost < math.inf):
            raise ValueError(
                f"the objective came to {value}, and searches need a number above 0 to make small: "
                "give Sampler(…, cost=lambda value: …) that makes one of it, such as math.exp"
            )
        self._search.tell(config, cost)
