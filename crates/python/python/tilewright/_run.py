"""Runs of a search: for a function, a workload, a command or a kernel in source."""

from __future__ import annotations

import math
import os
import sys
import time as clock
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _tilewright
from ._tilewright import Search, Space

Config = dict[str, Any]

# So long Python waits for what a run says, at most, before it looks for an interrupt.
_WAIT_S = 0.05

# How a worker process is started: Python with the library of this package, and nothing else.
_WORKER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from _tilewright import serve; sys.exit(not serve(sys.argv[2:]))"
)


def _worker() -> list[str]:
    folder = os.path.dirname(os.path.abspath(_tilewright.__file__))
    return [sys.executable, "-I", "-S", "-c", _WORKER, folder]


class Failure(Exception):
    """Failure of a configuration: raised by a function that is tuned, or told to a search.

    `kind` is one of `instantiation_error`, `compile_error_host`, `compile_error_device`, `runtime_error`,
    `wrong_answer`, `build_timeout`, `run_timeout` and `unknown`.
    """

    def __init__(self, kind: str = "runtime_error", message: str = "") -> None:
        super().__init__(message or kind)
        self.kind = kind


@dataclass(frozen=True)
class Trial:
    """Configuration with its result."""

    number: int
    """Its number in the run, or in all that is recorded."""
    config: Config
    """The configuration."""
    time: float | None
    """Its time: in seconds, or in what a function that is tuned returns; None of a failure."""
    error: str | None = None
    """The kind of its failure."""
    message: str = ""
    """Why it failed."""
    best: float | None = None
    """The best time so far, this trial included."""


@dataclass(frozen=True)
class Event:
    """Progress report of a run."""

    kind: str
    """`trial`, `message`, `start`, `begin`, `plan`, `race` or `leader_failed`."""
    text: str = ""
    """It in words."""
    trial: Trial | None = None
    """The trial that has come to its end."""


class Run:
    """Run of a search. Iterate over it to follow its events, or `wait` for its end.

    An interrupt ends it: measurements so far stay in `trials`, and in the database if the run has one.
    """

    def __init__(self, title: str, unit: str, trials: int | None) -> None:
        self.title = title
        self.trials: list[Trial] = []
        """The trials of this run so far."""
        self.messages: list[str] = []
        """What the run had to say besides."""
        self.summary: dict[str, Any] | None = None
        """What a run that is recorded came to, as `tilewright tune --json` prints it; None before its end."""
        self._unit = unit
        self._most = trials
        self._events: Iterator[Event] = iter(())
        self._is_over = False

    @property
    def best(self) -> Trial | None:
        """Best trial so far; after a race, its winner."""
        best = (self.summary or {}).get("best")
        if best is not None:
            number = next((t.number for t in self.trials if t.config == best["config"]), -1)
            time = best["ms_median"] / 1e3 if self._unit else best["value"]
            return Trial(number, best["config"], time, best=time)
        timed = [(trial.time, trial) for trial in self.trials if trial.time is not None]
        return min(timed, key=lambda pair: pair[0], default=(None, None))[1]

    @property
    def pareto(self) -> list[dict[str, Any]]:
        """Pareto set of a command with several metrics, after the end: `values` by metric, `config` and `commands`
        of each member."""
        return ((self.summary or {}).get("best") or {}).get("pareto", [])

    def __iter__(self) -> Iterator[Event]:
        for event in self._events:
            if event.trial is not None:
                self.trials.append(event.trial)
            elif event.kind == "message":
                self.messages.append(event.text)
            yield event
        self._is_over = True

    def wait(self, progress: bool = True) -> Run:
        """Waits for the end, with a progress bar if tqdm is installed, and returns the run."""
        bar = _bar(self._most) if progress and not self._is_over else None
        try:
            for event in self:
                if bar is not None and event.trial is not None:
                    bar.update(1)
                    if event.trial.best is not None:
                        bar.set_postfix_str(f"best {event.trial.best:.4g} {self._unit}".rstrip(), refresh=False)
        finally:
            if bar is not None:
                bar.close()
        return self

    def __repr__(self) -> str:
        best = self.best
        found = "nothing valid yet" if best is None else f"best {best.time:.4g} {self._unit}".rstrip()
        end = "" if self._is_over else ", not at its end"
        return f"Run({self.title}: {len(self.trials)} trials, {found}{end})"

    def _repr_html_(self) -> str:
        words = repr(self).replace("&", "&amp;").replace("<", "&lt;")
        return f'<div style="max-width:560px">{_curve(self.trials, self._unit)}<div>{words}</div></div>'


def _curve(trials: list[Trial], unit: str) -> str:
    """Draws the best value so far against the number of trials."""
    best = [(at, trial.best) for at, trial in enumerate(trials, 1) if trial.best is not None]
    if not best:
        return ""
    left, right, top, bottom = 60.0, 550.0, 10.0, 180.0
    highest = max(time for _, time in best)
    x = lambda at: left + (right - left) * (at - 1) / max(len(trials) - 1, 1)
    y = lambda time: bottom - (bottom - top) * time / highest
    steps = f"M{x(best[0][0]):.1f} {y(best[0][1]):.1f}"
    steps += "".join(f"H{x(at):.1f}V{y(time):.1f}" for at, time in best[1:])
    text = lambda at_x, at_y, anchor, words: (
        f'<text x="{at_x}" y="{at_y}" text-anchor="{anchor}" font-size="12" fill="currentColor">{words}</text>'
    )
    return (
        '<svg viewBox="0 0 560 205" role="img" aria-label="best so far">'
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="currentColor"/>'
        f'<path d="{steps}" fill="none" stroke="#4e79a7" stroke-width="2"/>'
        + text(left - 6, top + 8, "end", f"{highest:.3g} {unit}".rstrip())
        + text(left - 6, bottom, "end", "0")
        + text(right, bottom + 16, "end", f"{len(trials)} trials")
        + "</svg>"
    )


def _bar(total: int | None) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(total=total, unit="trial")


def tune(
    what: Space | str,
    function: Callable[[Config], float] | None = None,
    *,
    trials: int | None = None,
    time: float | None = None,
    search: str = "auto",
    seed: int = 0,
    catch: type[BaseException] | tuple[type[BaseException], ...] = (),
    threads: int = 1,
    template: str | None = None,
    race: bool = True,
    db: str | os.PathLike[str] | None = None,
) -> Run:
    """Minimises a function over a space, or tunes a workload on this machine.

    `tune(space, function)` calls the function with the configurations that the search proposes. The function
    returns a number of 0 or above to be minimised. If a configuration fails, it raises `Failure`; exceptions of the
    types in `catch` count as failures too, and all others end the run. Give `trials`, or `time` in seconds.
    Nothing is recorded: the results are in `trials` of the run.

    `tune("matmul-1024")` compiles, checks and times kernels in worker processes, and races the finalists at the
    end unless `race` is False. Everything is recorded in `db`, by default the database of the command
    `tilewright`, and a later run resumes from it. Without `trials` or `time` it takes a minute.
    """
    if isinstance(what, Space):
        if function is None:
            raise TypeError("tune(space, function) takes a function of a configuration")
        given = {"threads": threads != 1, "template": template is not None, "race": not race, "db": db is not None}
        if alien := next((name for name, is_given in given.items() if is_given), None):
            reason = "its trials are in the run's `trials`" if alien == "db" else "leave it out"
            raise TypeError(f"{alien}= is for workloads, not for a function of Python ({reason})")
        return _FunctionRun(what, function, trials, time, search, seed, catch)
    if not isinstance(what, str):
        found = type(what).__name__
        raise TypeError(f"tune() takes a Space or the text of a workload, not {found} (Space(parameters) makes one)")
    if function is not None:
        raise TypeError("a workload is measured by Tilewright: tune(workload) takes no function")
    settings = dict(search=search, trials=trials, time=time, seed=seed, threads=threads, race=race)
    running = _tilewright.start_workload(what, settings, template=template, worker=_worker(), db=db)
    return _RecordedRun(what, running, trials)


def tune_command(
    command: str,
    parameters: Mapping[str, Sequence[Any]],
    restrictions: str | Sequence[str] = (),
    *,
    db: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Run:
    """Tunes a command: any program, with `{name}` in place of a parameter's value and `{*name}` in place of the
    words of one.

    Options are `build`, `check`, `prepare`, `cleanup`, `metric`, `maximize`, `shell`, `timeout`,
    `build_timeout`, `memory_bytes`, `threads`, `samples`, `to_the_end`, `search`, `trials`, `time`, `seed` and
    `race`, as those of `tilewright tune --command`.

    Several metrics are a dict, `metric={"ms": "time: (.*) ms", "bytes": "size: (.*)"}`, and `maximize` lists the
    names of those that are to be great. The first leads, as `best` and `time`; `run.pareto` has the Pareto set.
    """
    metric = options.get("metric", "wall")
    if isinstance(metric, Mapping):
        great = options.pop("maximize", ())
        great = {great} if isinstance(great, str) else set(great or ())
        if unknown := great - metric.keys():
            raise ValueError(f"maximize names none of the metrics: {sorted(unknown)}")
        direction = lambda name: "maximize" if name in great else "minimize"
        options["objectives"] = [[name, text, direction(name)] for name, text in options.pop("metric").items()]
        metric = next(iter(metric.values()), "wall")
    if isinstance(restrictions, str):
        restrictions = [restrictions]
    # Values of NumPy's have texts of their own.
    plain = lambda values: repr([value.item() if hasattr(value, "item") else value for value in values])
    for name, values in parameters.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"parameter {name}: give a list of values, such as [8, 16, 32], not {values!r}")
    request = {
        **options,
        "command": command,
        "parameters": [[name, plain(values)] for name, values in parameters.items()],
        "constraints": list(restrictions),
    }
    running = _tilewright.start_command(request, worker=_worker(), db=db)
    unit = "s" if metric in ("wall", "cpu") else ""
    return _RecordedRun(command, running, options.get("trials"), unit)


def tune_kernel(
    file: str | os.PathLike[str],
    *,
    trials: int | None = None,
    time: float | None = None,
    search: str = "auto",
    seed: int = 0,
    threads: int = 1,
    race: bool = True,
    db: str | os.PathLike[str] | None = None,
) -> Run:
    """Tunes a kernel in C, C++, OpenCL C or CUDA that a file describes, as `tilewright tune --kernel` does."""
    settings = dict(search=search, trials=trials, time=time, seed=seed, threads=threads, race=race)
    running = _tilewright.start_kernel(file, settings, worker=_worker(), db=db)
    return _RecordedRun(os.fspath(file), running, trials)


class _FunctionRun(Run):
    """Run over a Python function, in this thread."""

    def __init__(
        self,
        space: Space,
        function: Callable[[Config], float],
        trials: int | None,
        time: float | None,
        search: str,
        seed: int,
        catch: type[BaseException] | tuple[type[BaseException], ...],
    ) -> None:
        if trials is None and time is None:
            raise TypeError("tune(space, function) takes trials= or time=, or it would go on for ever")
        if trials is not None and (not hasattr(trials, "__index__") or trials < 1):
            raise ValueError(f"trials takes a whole number of 1 or above, not {trials!r}")
        if time is not None and (not isinstance(time, (int, float)) or not 0 < time < math.inf):
            raise ValueError(f"time takes a number of seconds above 0, not {time!r}")
        most = space.size if trials is None else min(trials, space.size)
        super().__init__(getattr(function, "__name__", "function"), "", most)
        self.search = Search(search, space, seed)
        """The search, which may be told of more."""
        self._function = function
        self._catch = catch
        self._time = time
        self._events = self._measure(most)

    def _measure(self, most: int) -> Iterator[Event]:
        start, best = clock.perf_counter(), None
        for number in range(most):
            if self._time is not None and clock.perf_counter() - start >= self._time:
                return
            configs = self.search.ask(1)
            if not configs:
                return
            result: float | Failure
            try:
                result = self._function(dict(configs[0]))
            except Failure as failure:
                result = failure
            except self._catch as error:
                result = Failure("runtime_error", f"{type(error).__name__}: {error}")
            self.search.tell(configs[0], result)
            if isinstance(result, Failure):
                trial = Trial(number, configs[0], None, result.kind, str(result), best)
            else:
                best = float(result) if best is None else min(best, float(result))
                trial = Trial(number, configs[0], float(result), best=best)
            yield Event("trial", trial.message, trial)


class _RecordedRun(Run):
    """Run that the library measures in worker processes and records."""

    def __init__(self, title: str, running: _tilewright.Running, trials: int | None, unit: str = "s") -> None:
        super().__init__(title, unit, trials)
        # With this object, or with Python, the run ends, and what was measured is recorded.
        weakref.finalize(self, running.end)
        self._events = self._listen(running)

    def _listen(self, running: _tilewright.Running) -> Iterator[Event]:
        try:
            while True:
                said = running.next(_WAIT_S)
                if said is None:
                    continue
                kind = said.pop("kind")
                if kind == "end":
                    break
                text = said.pop("text")
                trial = None
                if kind == "trial":
                    trial = Trial(
                        said["number"], said["config"], said["time"], said["error"], text, said["best"]
                    )
                yield Event(kind, text, trial)
            self.summary = running.result()
        finally:
            running.stop()
