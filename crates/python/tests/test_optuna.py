"""The sampler for Optuna."""

import math
import unittest

import tilewright as tw

try:
    import optuna
except ImportError:
    raise unittest.SkipTest("there is no Optuna on this machine")

from tilewright.optuna import Sampler

optuna.logging.set_verbosity(optuna.logging.ERROR)


def space():
    return tw.Space({"x": list(range(1, 21)), "y": list(range(1, 11)), "kind": ["a", "b"]}, ["x * y <= 100"])


def objective(trial):
    x, y = trial.suggest_int("x", 1, 20), trial.suggest_int("y", 1, 10)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    if x * y > 100:
        raise AssertionError("it is not legal")
    if x == 7:
        raise optuna.TrialPruned()
    return (1 + abs(x - 8)) * (1 + 0.1 * (y - 6) ** 2) + (kind == "a")


class Optuna(unittest.TestCase):
    def test_a_study_repeats_nothing_and_ends_with_the_space(self):
        legal = space()
        study = optuna.create_study(sampler=Sampler(legal))
        study.optimize(objective, n_trials=10_000)
        configs = [tuple(sorted(trial.params.items())) for trial in study.trials]
        self.assertEqual((len(configs), len(set(configs))), (len(legal), len(legal)))
        self.assertEqual(study.best_params, {"x": 8, "y": 6, "kind": "b"})

    def test_few_trials_come_near(self):
        values = []
        for seed in range(5):
            study = optuna.create_study(sampler=Sampler(space(), seed=seed))
            study.optimize(objective, n_trials=40)
            values.append(1 / study.best_value)
        self.assertGreater(sum(values) / len(values), 0.7)

    def test_a_study_goes_on_and_maximizes_and_is_asked_by_hand(self):
        legal = tw.Space({"x": [0.5, 1.0, 2.0, 4.0]})
        first = optuna.create_study(sampler=Sampler(legal), direction="maximize")
        first.enqueue_trial({"x": 2.0})
        first.optimize(lambda trial: trial.suggest_float("x", 0.1, 4), n_trials=2)
        second = optuna.create_study(sampler=Sampler(legal), direction="maximize")
        second.add_trials(first.trials)
        for _ in range(2):
            trial = second.ask()
            second.tell(trial, trial.suggest_float("x", 0.1, 4))
        self.assertEqual(sorted(trial.params["x"] for trial in second.trials), [0.5, 1.0, 2.0, 4.0])
        with self.assertRaisesRegex(RuntimeError, "all were tried"):
            second.ask()

    def test_a_study_that_is_resumed_ends_by_itself(self):
        legal = tw.Space({"x": [1, 2, 3, 4, 5]})
        value = lambda trial: trial.suggest_int("x", 1, 5)
        xs = lambda study: sorted(trial.params["x"] for trial in study.trials if trial.params)
        for n_before in [2, 5]:
            first = optuna.create_study(sampler=Sampler(legal))
            first.optimize(value, n_trials=n_before)
            second = optuna.create_study(sampler=Sampler(legal))
            second.add_trials(first.trials)
            second.optimize(value, n_trials=100)
            self.assertEqual(xs(second), [1, 2, 3, 4, 5])
            # Where nothing is left at all, the trial that finds out has no parameters and is pruned.
            states = [trial.state for trial in second.trials if not trial.params]
            self.assertEqual(states, [optuna.trial.TrialState.PRUNED] if n_before == 5 else [])
            n_trials = len(second.trials)
            second.optimize(value, n_trials=100)
            self.assertEqual((xs(second), len(second.trials)), ([1, 2, 3, 4, 5], n_trials + 1))

    def test_enqueued_trials_count(self):
        legal = tw.Space({"x": [1, 2, 3, 4, 5]})
        for n_jobs in [1, 4]:
            study = optuna.create_study(sampler=Sampler(legal))
            # One that is not of the space is measured as well.
            for x in [3, 5, 7]:
                study.enqueue_trial({"x": x})
            study.optimize(lambda trial: trial.suggest_int("x", 1, 9), n_trials=100, n_jobs=n_jobs)
            self.assertEqual(sorted(trial.params["x"] for trial in study.trials if trial.params), [1, 2, 3, 4, 5, 7])
        study = optuna.create_study(sampler=Sampler(legal))
        for x in [1, 2, 3, 4, 5, 5]:
            study.enqueue_trial({"x": x})
        study.optimize(lambda trial: trial.suggest_int("x", 1, 5), n_trials=100)
        self.assertEqual([trial.params["x"] for trial in study.trials], [1, 2, 3, 4, 5, 5])

    def test_a_trial_that_never_ended_is_made_up_for(self):
        legal = tw.Space({"x": [1, 2, 3]})
        storage = optuna.storages.InMemoryStorage()
        study = optuna.create_study(sampler=Sampler(legal), storage=storage, study_name="study")
        # As of a process that was killed.
        died = study.ask()
        died.suggest_int("x", 1, 3)
        study = optuna.load_study(sampler=Sampler(legal), storage=storage, study_name="study")
        study.optimize(lambda trial: trial.suggest_int("x", 1, 3), n_trials=100)
        ended = [trial.params["x"] for trial in study.trials if trial.state.is_finished()]
        self.assertEqual((sorted(ended), ended[-1]), ([1, 2, 3], died.params["x"]))

    def test_each_study_has_a_search_of_its_own(self):
        sampler = Sampler(tw.Space({"x": [1, 2, 3, 4, 5]}))
        for _ in range(3):
            study = optuna.create_study(sampler=sampler)
            study.optimize(lambda trial: trial.suggest_int("x", 1, 5), n_trials=100)
            self.assertEqual(sorted(trial.params["x"] for trial in study.trials), [1, 2, 3, 4, 5])

    def test_an_objective_may_be_0(self):
        legal = tw.Space({"x": list(range(20)), "y": list(range(20))})
        for direction, best in [("minimize", (13, 4)), ("maximize", (19, 19))]:
            distance = lambda x, y: abs(x - 13) + abs(y - 4) if direction == "minimize" else x * y
            study = optuna.create_study(sampler=Sampler(legal), direction=direction)
            study.optimize(lambda trial: distance(trial.suggest_int("x", 0, 19), trial.suggest_int("y", 0, 19)), n_trials=60)
            self.assertEqual(study.best_params, dict(zip("xy", best)))

    def test_what_does_not_fit_is_said(self):
        legal = tw.Space({"x": [1, 2, 64]})
        for suggest, words in [
            (lambda trial: trial.suggest_int("z", 1, 2), "has no parameter z; there are x"),
            (lambda trial: trial.suggest_int("x", 100, 200), "does not allow"),
        ]:
            with self.assertRaisesRegex(ValueError, words):
                optuna.create_study(sampler=Sampler(legal)).optimize(suggest, n_trials=1)
        negative = lambda trial: -trial.suggest_int("x", 1, 64)
        with self.assertRaisesRegex(ValueError, "a number of 0 or above"):
            optuna.create_study(sampler=Sampler(legal)).optimize(negative, n_trials=1)
        study = optuna.create_study(sampler=Sampler(legal, cost=lambda value: math.exp(value / 64)))
        study.optimize(negative, n_trials=9)
        self.assertEqual((len(study.trials), study.best_value), (3, -64))
        for cost, text in [(math.nan, "nan"), (-1, "-1"), (None, "None"), ("a", "'a'")]:
            with self.assertRaisesRegex(ValueError, f"the cost of -[0-9.]+ came to {text}: return a number of 0"):
                sampler = Sampler(legal, cost=lambda value: cost)
                optuna.create_study(sampler=sampler).optimize(negative, n_trials=1)


if __name__ == "__main__":
    unittest.main()
