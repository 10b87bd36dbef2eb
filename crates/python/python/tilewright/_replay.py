"""Replays: searches run on recorded spaces, without measuring anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ._tilewright import Recorded, open_recorded


@dataclass(frozen=True)
class AtBudget:
    """Result of a search at a budget."""

    budget: int
    """Configurations tried, failures included."""
    mean: float
    """The optimum's time over the best one's, the mean over the runs."""
    std: float
    """The standard deviation over the runs."""
    runs: list[float]
    """By run."""


@dataclass(frozen=True)
class Replay:
    """Result of a search on a recorded space."""

    search: str
    """The search with its options."""
    budgets: list[AtBudget]
    """By budget."""
    overhead_ms: float
    """Milliseconds that the search took for each configuration tried."""


def recorded(
    file: str | os.PathLike[str],
    *,
    task: str | int | None = None,
    description: str | os.PathLike[str] | None = None,
) -> Recorded:
    """Reads the recorded space of a file: a cache of Kernel Tuner, T4 results, a log of AutoTVM, or another format
    that `tilewright formats` lists, gzipped or not."""
    return open_recorded(file, task=None if task is None else str(task), description=description)


def replay(
    file: str | os.PathLike[str] | Recorded,
    search: str = "auto",
    budget: int | Sequence[int] = 100,
    *,
    repeats: int = 20,
    seed: int = 0,
    batch: int = 1,
    threads: int = 1,
    task: str | int | None = None,
    description: str | os.PathLike[str] | None = None,
) -> Replay:
    """Runs a search on a recorded space `repeats` times and compares the results with the optimum."""
    space = file if isinstance(file, Recorded) else recorded(file, task=task, description=description)
    budgets = list(budget) if isinstance(budget, Iterable) else [budget]
    found = space.replay(search, budgets, repeats, seed, batch, threads)
    return Replay(search, [AtBudget(**at) for at in found["budgets"]], found["overhead_ms"])
