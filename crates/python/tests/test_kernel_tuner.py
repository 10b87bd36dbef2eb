"""The strategy for Kernel Tuner, in its simulation mode."""

import json
import os
import sys
import tempfile
import unittest

import tilewright as tw

try:
    import kernel_tuner
except ImportError:
    raise unittest.SkipTest("there is no Kernel Tuner on this machine")

from tilewright.kernel_tuner import Strategy, _outcome


def bowl(x, y):
    return (1 + abs(x - 8)) * (1 + 0.1 * (y - 6) ** 2)


class KernelTuner(unittest.TestCase):
    def tune(self, **options):
        params = {"x": list(range(1, 21)), "y": list(range(1, 11))}
        cache = {}
        for x in params["x"]:
            for y in params["y"]:
                if x * y <= 100:
                    row = {"x": x, "y": y, "time": bowl(x, y)}
                    if x == 7:
                        row = {"x": x, "y": y, "time": "RuntimeFailedConfig", "__error__": "RuntimeFailedConfig"}
                    cache[f"{x},{y}"] = row
        document = {
            "device_name": "none", "kernel_name": "bowl", "problem_size": 1, "tune_params_keys": list(params),
            "tune_params": params, "objective": ["time"], "cache": cache,
        }
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "cache.json")
            with open(file, "w") as out:
                json.dump(document, out)
            results, _ = kernel_tuner.tune_kernel(
                "bowl", "", 1, [], params, restrictions=["x * y <= 100"], simulation_mode=True, cache=file, quiet=True,
                lang="C", objective="time", objective_higher_is_better=False, **options,
            )
        return results

    def test_the_budget_is_spent_on_different_configurations(self):
        results = self.tune(strategy=Strategy(), strategy_options={"max_fevals": 40})
        self.assertEqual(len({(row["x"], row["y"]) for row in results}), 40)
        self.assertTrue(all(row["x"] * row["y"] <= 100 for row in results))
        best = min(row["time"] for row in results if isinstance(row["time"], float))
        self.assertLess(best, 1.5)

    def test_an_objective_may_be_0(self):
        self.assertEqual([_outcome(0.0, False), _outcome(2.0, False), _outcome(0.0, True)], [0.0, 2.0, 0.0])
        self.assertEqual(_outcome(-3.0, True), 3.0)
        for value, is_reversed in [(-3.0, False), (3.0, True), (float("nan"), False), (sys.float_info.max, True)]:
            self.assertIsInstance(_outcome(value, is_reversed), tw.Failure)

    def test_options_that_do_not_fit_are_refused(self):
        for given, words in [
            ({"batch": 0}, "batch takes a whole number of 1 or above, not 0"),
            ({"batch": 1.5}, "batch takes a whole number of 1 or above, not 1.5"),
            ({"seed": -1}, "give a whole number from 0 to .*, not -1"),
            ({"search": "magic"}, "unknown search magic"),
        ]:
            with self.assertRaisesRegex(ValueError, words):
                self.tune(strategy=Strategy(), strategy_options=given)

    def test_the_whole_space_is_found_in_batches(self):
        results = self.tune(strategy=Strategy("genetic", seed=1, batch=4), strategy_options={"seed": 2})
        self.assertEqual(len(results), len({(row["x"], row["y"]) for row in results}))
        self.assertIn((8, 6), {(row["x"], row["y"]) for row in results})


if __name__ == "__main__":
    unittest.main()
