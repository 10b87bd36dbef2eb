"""Sampler for Optuna that uses the searches of Tilewright, on a space with exact constraints.

    import optuna, tilewright as tw
    from tilewright.optuna import Sampler

    space = tw.Space({"tile": [8, 16, 32], "threads": [1, 2, 4]}, ["tile * threads <= 64"])
    study = optuna.create_study(sampler=Sampler(space))
    study.optimize(objective, n_trials=50)

Every trial has a legal configuration that no other trial had; running, enqueued, failed and pruned trials count.
The study ends by itself when the space is exhausted.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from optuna import TrialPruned
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from . import Failure, Search, Space

__all__ = ["Sampler"]


class Sampler(BaseSampler):
    """Sampler whose trials a search proposes.

    `space` has every parameter that the objective suggests, by name; the values it lists must be possible for the
    suggested distribution. `search` and `seed` are those of `tilewright.Search`. A sampler keeps a separate search
    for each study.

    Searches compare ratios of numbers that are 0 or above. If the objective's values are not such numbers, `cost`
    converts them to some that are minimised.
    """

    def __init__(
        self, space: Space, search: str = "auto", seed: int = 0, *, cost: Callable[[float], float] | None = None
    ) -> None:
        self._space = space
        self._new_search = lambda maximize: Search(search, space, seed, maximize=maximize)
        self._cost = cost
        self._lock = threading.Lock()
        self._progress: weakref.WeakKeyDictionary[Study, _Progress] = weakref.WeakKeyDictionary()
        # What cannot be searched so is refused here.
        self._new_search(False)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        # Which distributions an objective suggests is known only when it does.
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Asks the search for the configuration of a trial."""
        with self._lock:
            progress = self._progress_of(study)
            progress.catch_up(study)
            is_over = not progress.begin(trial)
            is_last = is_over or progress.has_ended(study)
        if not is_last:
            return
        try:
            study.stop()
        except RuntimeError:
            # Nothing else than `optimize` can be stopped: whoever asks by hand is told when nothing is left.
            if is_over:
                size = self._space.size
                raise RuntimeError(f"the space has no more than {size} configurations, and all were tried") from None

    def _progress_of(self, study: Study) -> _Progress:
        progress = self._progress.get(study)
        if progress is None:
            if len(study.directions) > 1:
                reason = "a study of several objectives has no best trial: this sampler takes one objective"
                raise ValueError(reason)
            maximize = self._cost is None and study.direction == StudyDirection.MAXIMIZE
            progress = self._progress[study] = _Progress(self._space, self._new_search(maximize), self._cost)
        return progress

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        with self._lock:
            progress = self._progress_of(study)
            config = progress.given.get(trial.number)
            is_one_too_many = trial.number in progress.too_many
        if is_one_too_many:
            raise TrialPruned(f"all {self._space.size} configurations of the space were tried")
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
        """Tells the search the result of a trial."""
        with self._lock:
            self._progress_of(study).end(study, trial, state, values)


class _Progress:
    """State of a search within a study."""

    def __init__(self, space: Space, search: Search, cost: Callable[[float], float] | None) -> None:
        self._space = space
        self._search = search
        self._cost = cost
        # By number of a trial: the configuration that it was given.
        self.given: dict[int, dict[str, Any]] = {}
        # Numbers of trials that came after the last configuration.
        self.too_many: set[int] = set()
        # Numbers of trials that have ended, or that this process runs.
        self._known: set[int] = set()
        # Indices of configurations that these have, or that are enqueued.
        self._tried: set[int] = set()
        # Indices of those that trials of other processes have, which may have died.
        self._elsewhere: set[int] = set()
        # Configurations that the search proposed while such a trial had them.
        self._withheld: list[dict[str, Any]] = []

    def catch_up(self, study: Study) -> None:
        """Adds trials of the study that this search did not propose."""
        self._elsewhere.clear()
        for trial in study.get_trials(deepcopy=False):
            if trial.number in self._known:
                continue
            if trial.state.is_finished():
                self.end(study, trial, trial.state, trial.values)
            elif trial.state == TrialState.WAITING:
                self._note(trial.system_attrs.get("fixed_params", {}), self._tried)
            else:
                self._note({**trial.system_attrs.get("fixed_params", {}), **trial.params}, self._elsewhere)

    def _note(self, config: dict[str, Any], indices: set[int]) -> None:
        if config in self._space:
            indices.add(self._space.index_of(config))

    def begin(self, trial: FrozenTrial) -> bool:
        """Assigns a configuration to a trial unless it was enqueued with one; returns whether it has one."""
        self._known.add(trial.number)
        config = trial.system_attrs.get("fixed_params")
        if config is None:
            config = self._next()
            if config is None:
                self.too_many.add(trial.number)
                return False
            self.given[trial.number] = config
        self._note(config, self._tried)
        return True

    def _next(self) -> dict[str, Any] | None:
        """Returns a configuration that no trial has, else one that another process has not finished."""
        while configs := self._search.ask(1):
            index = self._space.index_of(configs[0])
            if index in self._elsewhere:
                self._withheld.append(configs[0])
            elif index not in self._tried:
                return configs[0]
        while self._withheld:
            config = self._withheld.pop(0)
            if self._space.index_of(config) not in self._tried:
                return config
        return None

    def has_ended(self, study: Study) -> bool:
        """Returns whether every configuration has a trial and none is enqueued."""
        if len(self._tried) < self._space.size:
            return False
        return not study.get_trials(deepcopy=False, states=(TrialState.WAITING,))

    def end(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Tells the search the result of a trial that ended."""
        self._known.add(trial.number)
        config = self.given.pop(trial.number, trial.params)
        if config not in self._space:
            return
        self._note(config, self._tried)
        if state != TrialState.COMPLETE or not values:
            kind = "run_timeout" if state == TrialState.PRUNED else "runtime_error"
            self._search.tell(config, Failure(kind, state.name.lower()))
            return
        value = values[0]
        result = value if self._cost is None else self._cost(value)
        if not (isinstance(result, Real) and 0 <= result < math.inf):
            if self._cost is not None:
                wanted = "return a number of 0 or above, which searches minimise"
                raise ValueError(f"the cost of {value} came to {result!r}: {wanted}")
            raise ValueError(
                f"the objective came to {value}, and searches need a number of 0 or above: "
                "give Sampler(…, cost=lambda value: …) that makes one of it to make small, such as math.exp"
            )
        self._search.tell(config, result)
