"""Optuna's GPSampler and TPESampler and SMAC3 on recorded spaces, in the way of `tilewright replay`.

    python tuners_beside.py gp|tpe|smac BUDGET FIRST_SEED-LAST_SEED FILE.json.gz...

A file is a cache of Kernel Tuner or has T4 results. An evaluation is of a configuration that is recorded, the
first time that it is asked for; a failed one counts. What is not recorded is none: the tuner is told the worst
time so far, and Optuna that a constraint is violated. Tuners see the logarithm of the time, and parameters as
places in the ascending order of their values. Needs `optuna`, `torch`, `smac`. Lines are the search, the file,
the seed, and after each number of evaluations the optimum's time over the best one found.
"""

import gzip
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings

os.environ.update({name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")})
warnings.filterwarnings("ignore")
BUDGETS = (25, 50, 100, 200, 400)
# Proposals for each evaluation, at most: most may be of what is not recorded.
MOST_ASKED = 20


def read(path):
    """Reads (names, values by name in ascending order, time by configuration; None of a failure)."""
    with gzip.open(path) as file:
        space = json.load(file)
    if "cache" in space:
        names = space["tune_params_keys"]
        rows = [([row[name] for name in names], row["time"]) for row in space["cache"].values()]
    else:
        names = list(space["results"][0]["configuration"])
        value = lambda row: row["measurements"][0]["value"] if row["invalidity"] == "correct" else None
        rows = [([row["configuration"][name] for name in names], value(row)) for row in space["results"]]
    is_time = lambda t: isinstance(t, (int, float)) and 0 < t < 1e20
    table = {tuple(row): t if is_time(t) else None for row, t in rows}
    return names, [sorted({row[at] for row in table}) for at in range(len(names))], table


class Run:
    """Evaluations of one run."""

    def __init__(self, table, budget):
        self.table, self.budget, self.n_asked = table, budget, 0
        self.optimum = min(t for t in table.values() if t)
        self.best, self.worst, self.seen, self.curve = math.inf, 0.0, set(), []

    def is_over(self):
        return len(self.curve) >= self.budget or self.n_asked >= MOST_ASKED * self.budget

    def evaluate(self, config):
        """Returns the number that the tuner is told, and whether the configuration is recorded."""
        self.n_asked += 1
        if config not in self.table:
            return self.worst, False
        found = self.table[config]
        if config not in self.seen:
            self.seen.add(config)
            if found:
                self.worst = max(self.worst, math.log(found)) if self.best < math.inf else math.log(found)
                self.best = min(self.best, found)
            self.curve.append(self.optimum / self.best)
        return math.log(found) if found else self.worst, True

    def after(self, budget):
        return self.curve[min(budget, len(self.curve)) - 1] if self.curve else 0.0


def optuna(which, names, values, run, seed):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = {"gp": optuna.samplers.GPSampler, "tpe": optuna.samplers.TPESampler}[which]
    study = optuna.create_study(
        sampler=sampler(seed=seed, constraints_func=lambda trial: (trial.user_attrs["missing"],))
    )
    while not run.is_over():
        trial = study.ask()
        place = lambda name, of: trial.suggest_int(name, 0, len(of) - 1) if len(of) > 1 else 0
        told, is_recorded = run.evaluate(tuple(of[place(name, of)] for name, of in zip(names, values)))
        trial.set_user_attr("missing", 0.0 if is_recorded else 1.0)
        study.tell(trial, told)


def smac(names, values, run, seed):
    logging.disable(logging.CRITICAL)
    from ConfigSpace import ConfigurationSpace, OrdinalHyperparameter
    from smac import HyperparameterOptimizationFacade, Scenario
    from smac.runhistory.dataclasses import TrialValue

    space = ConfigurationSpace(seed=seed)
    varied = [(name, of) for name, of in zip(names, values) if len(of) > 1]
    space.add([OrdinalHyperparameter(name, of) for name, of in varied])
    with tempfile.TemporaryDirectory() as folder:
        scenario = Scenario(
            space, deterministic=True, n_trials=MOST_ASKED * run.budget, seed=seed, output_directory=folder
        )
        # Of a size for this many evaluations, not for all that may be asked.
        n_first = max(5, min(10 * len(varied), run.budget // 4))
        first = HyperparameterOptimizationFacade.get_initial_design(scenario, n_configs=n_first)
        tuner = HyperparameterOptimizationFacade(
            scenario, lambda config, seed=0: 0.0, initial_design=first, overwrite=True, logging_level=False
        )
        while not run.is_over():
            asked = tuner.ask()
            found = dict(asked.config)
            config = tuple(type(of[0])(found[name]) if len(of) > 1 else of[0] for name, of in zip(names, values))
            tuner.tell(asked, TrialValue(cost=run.evaluate(config)[0]))


def main():
    which, budget, seeds, *files = sys.argv[1:]
    first, last = map(int, seeds.split("-"))
    for path in files:
        names, values, table = read(path)
        for seed in range(first, last + 1):
            run, start = Run(table, int(budget)), time.process_time()
            smac(names, values, run, seed) if which == "smac" else optuna(which, names, values, run, seed)
            found = " ".join(f"{at}:{run.after(at):.5f}" for at in BUDGETS if at <= int(budget))
            print(which, path, seed, found, f"asked={run.n_asked} cpu_s={time.process_time() - start:.1f}", flush=True)


if __name__ == "__main__":
    main()
