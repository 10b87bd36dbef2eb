"""Runs of functions, commands and workloads; records, replays and kernels."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

import tilewright as tw

try:
    import numpy
except ImportError:
    numpy = None


def bowl(config):
    return (1 + abs(config["x"] - 8)) * (1 + 0.1 * (config["y"] - 6) ** 2)


def space():
    return tw.Space({"x": list(range(1, 21)), "y": list(range(1, 11))})


class Races(unittest.TestCase):
    def test_the_faster_one_wins_and_equal_ones_tie(self):
        n_calls = {"short": 0, "long": 0}

        def spin(name, n):
            n_calls[name] += 1
            sum(range(n))

        functions = {"long": lambda: spin("long", 200_000), "short": lambda: spin("short", 1000)}
        raced = tw.race(functions, rounds=200, seed=1)
        self.assertEqual((raced["winner"], raced["choice"], raced["seed"]), ("short", "short", 1))
        self.assertGreater(raced["contestants"][0]["ratio"], 2)
        self.assertGreater(n_calls["short"], n_calls["long"])
        gate = tw.race(functions, rounds=200, allow=0.05)
        self.assertEqual((gate["slower"], gate["choice"]), ([], "long"))
        self.assertEqual(tw.race(dict(reversed(functions.items())), rounds=200, allow=0.05)["slower"], ["long"])

    def test_what_is_raised_ends_it(self):
        calls = []

        def fails():
            calls.append(1)
            if len(calls) > 5:
                raise OSError("no such thing")
            time.sleep(0.002)

        with self.assertRaisesRegex(OSError, "no such thing"):
            tw.race({"a": fails, "b": lambda: None})
        self.assertEqual(len(calls), 6)
        for arguments, text in [({"rounds": 3}, "give 9 or more"), ({"time": -1}, "seconds"), ({"allow": -1}, "share")]:
            with self.assertRaisesRegex(ValueError, text):
                tw.race({"a": fails, "b": fails}, **arguments)
        with self.assertRaisesRegex(ValueError, "two contestants"):
            tw.race({"a": fails})


class Functions(unittest.TestCase):
    def test_twenty_trials_find_what_two_hundred_configurations_have(self):
        found = []
        for seed in range(10):
            run = tw.tune(space(), bowl, trials=20, seed=seed).wait(progress=False)
            self.assertEqual(len(run.trials), 20)
            found.append(1 / run.best.time)
        self.assertGreater(sum(found) / len(found), 0.85)

    def test_events_come_one_by_one_and_failures_are_data(self):
        def function(config):
            if config["x"] == 3:
                raise tw.Failure("wrong_answer", "it is odd")
            if config["x"] == 4:
                raise OSError("no such thing")
            return bowl(config)

        run = tw.tune(space(), function, trials=200, search="random", catch=OSError)
        for event in run:
            self.assertEqual(event.kind, "trial")
        self.assertEqual(len(run.trials), 200)
        kinds = {trial.config["x"]: trial.error for trial in run.trials}
        self.assertEqual((kinds[3], kinds[4], kinds[5]), ("wrong_answer", "runtime_error", None))
        self.assertEqual((run.best.config, run.best.time), ({"x": 8, "y": 6}, 1.0))
        self.assertEqual([t.best for t in run.trials][-1], 1.0)
        self.assertIn("<svg", run._repr_html_())
        self.assertIn("200 trials", repr(run))
        with self.assertRaises(ZeroDivisionError):
            tw.tune(space(), lambda config: 1 / 0, trials=3).wait(progress=False)
        with self.assertRaisesRegex(TypeError, "trials= or time="):
            tw.tune(space(), bowl)
        for given in [{"trials": 0}, {"trials": -1}, {"trials": 1.5}, {"trials": "a"}]:
            with self.assertRaisesRegex(ValueError, "trials takes a whole number of 1 or above, not "):
                tw.tune(space(), bowl, **given)
        for seconds in [0, -1, float("nan"), float("inf"), "a"]:
            with self.assertRaisesRegex(ValueError, "time takes a number of seconds above 0, not "):
                tw.tune(space(), bowl, time=seconds)

    def test_the_time_ends_a_run(self):
        def slow(config):
            time.sleep(0.02)
            return 1.0

        start = time.perf_counter()
        run = tw.tune(space(), slow, time=0.2).wait(progress=False)
        self.assertLess(time.perf_counter() - start, 2)
        self.assertGreater(len(run.trials), 0)


class Commands(unittest.TestCase):
    def test_a_command_is_tuned_and_recorded(self):
        with tempfile.TemporaryDirectory() as folder:
            db = os.path.join(folder, "records.db")
            arguments = ("echo m {x}", {"x": [3, 1, 2]})
            options = dict(metric="m (.*)", trials=3, race=False, db=db)
            run = tw.tune_command(*arguments, ["x < 3"], **options).wait(progress=False)
            self.assertEqual((run.best.config, run.best.time), ({"x": 1}, 1.0))
            self.assertEqual(run.summary["trials"], 2)
            # It resumes.
            again = tw.tune_command(*arguments, ["x < 3"], **options).wait(progress=False)
            self.assertEqual((again.trials, again.best.config), ([], {"x": 1}))
            records = tw.Records(db)
            [task] = records.tasks()
            self.assertEqual(len(records.trials(task["workload"])), 2)
            self.assertEqual(records.best(task["workload"])["config"], {"x": 1})
            self.assertIsNone(tw.Records(os.path.join(folder, "none.db")).best("matmul-256"))
            with self.assertRaisesRegex(ValueError, "is not a parameter"):
                tw.tune_command("echo {y}", {"x": [1, 2]}, db=db).wait(progress=False)
            several = dict(options, metric={"m": "m ([0-9]+)", "n": "n (.*)"}, maximize=["n"], trials=4)
            both = tw.tune_command("echo m {x} n {x}", {"x": [1, 2, 3, 4]}, ["x < 4"], **several).wait(progress=False)
            self.assertEqual([point["values"] for point in both.pareto], [{"m": n, "n": n} for n in (1, 2, 3)])
            self.assertEqual((both.best.config, run.pareto), ({"x": 1}, []))
            with self.assertRaisesRegex(ValueError, "names none of the metrics"):
                tw.tune_command("echo {x}", {"x": [1]}, db=db, metric={"a": "a", "b": "b"}, maximize="c")
            with self.assertRaisesRegex(ValueError, "unknown field"):
                tw.tune_command("echo {x}", {"x": [1, 2]}, db=db, colour="red")
            for values in [5, "ab"]:
                with self.assertRaisesRegex(ValueError, "parameter x: give a list of values"):
                    tw.tune_command("echo {x}", {"x": values}, db=db)
            with self.assertRaisesRegex(ValueError, "samples: .* expected usize"):
                tw.tune_command("echo {x}", {"x": [1, 2]}, db=db, samples=-1)
            for samples in [0, 1001]:
                with self.assertRaisesRegex(ValueError, f"a trial has 1 to 1000 samples, not {samples}"):
                    tw.tune_command("echo {x}", {"x": [1, 2]}, db=db, samples=samples).wait(progress=False)
            with self.assertRaisesRegex(ValueError, "timeout takes a number of seconds above 0, not 0"):
                tw.tune_command("echo {x}", {"x": [1, 2]}, db=db, timeout=0)
            one = tw.tune_command(*arguments, "x < 2", **options).wait(progress=False)
            self.assertEqual(one.summary["best"]["config"], {"x": 1})


# What a script begins with that is interrupted: it knows when Python took notice, and how many trials of
# `seen` there were then.
WATCHED = """
import signal, time
import tilewright as tw
seen, noticed = [], []
default = signal.getsignal(signal.SIGINT)
def notice(*arguments):
    noticed.append((time.time(), len(seen)))
    default(*arguments)
signal.signal(signal.SIGINT, notice)
def interrupted():
    at, n_seen = noticed[0]
    print("interrupted", at, time.time() - at, len(seen) - n_seen)
"""


class Interrupts(unittest.TestCase):
    def check(self, script):
        """Runs a script and interrupts it when it says so. How long that takes depends on the machine, and is
        told; that it ends at all, and goes on with nothing, does not."""
        process = subprocess.Popen(
            [sys.executable, "-c", WATCHED + textwrap.dedent(script)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        if process.stdout.readline() != "now\n":
            self.fail(process.communicate()[1])
        time.sleep(0.1)
        sent = time.time()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        self.assertTrue(out.startswith("interrupted "), err)
        noticed, left, n_more = map(float, out.split()[1:4])
        print(
            f"{self.id().split('.')[-1]}: noticed after {noticed - sent:.3f} s, given up {left:.3f} s later, "
            f"gone after {time.time() - sent:.3f} s"
        )
        self.assertEqual(n_more, 0)

    def test_runs_of_functions_end(self):
        self.check(
            """
            space = tw.Space({name: list(range(20)) for name in "abcdef"})
            def function(config):
                seen.append(config)
                if len(seen) == 50:
                    print("now", flush=True)
                return 1.0 + config["a"]
            try:
                tw.tune(space, function, trials=10**6).wait(progress=False)
            except KeyboardInterrupt:
                interrupted()
            """
        )

    def test_runs_in_worker_processes_end(self):
        with tempfile.TemporaryDirectory() as folder:
            db = os.path.join(folder, "records.db")
            self.check(
                f"""
                try:
                    for event in tw.tune("matmul-256", time=3600, db={db!r}):
                        seen.append(event)
                        if event.kind == "trial" and event.trial.number == 5:
                            print("now", flush=True)
                except KeyboardInterrupt:
                    interrupted()
                """
            )
            self.assertGreater(len(tw.Records(db).trials()), 4)

    def test_replays_end(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "cache.json")
            write_cache(file)
            self.check(
                f"""
                recorded = tw.recorded({file!r})
                print("now", flush=True)
                try:
                    tw.replay(recorded, "auto", 400, repeats=10**6)
                except KeyboardInterrupt:
                    interrupted()
                """
            )


def write_cache(file):
    """A cache as Kernel Tuner writes it, of the bowl."""
    cache = {}
    for config in space():
        key = ",".join(str(value) for value in config.values())
        cache[key] = {**config, "time": bowl(config)}
    params = space().params
    document = {
        "device_name": "none", "kernel_name": "bowl", "problem_size": 1, "tune_params_keys": list(params),
        "tune_params": params, "objective": "time", "cache": cache,
    }
    with open(file, "w") as out:
        json.dump(document, out)


class Replays(unittest.TestCase):
    def test_a_search_is_replayed(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "cache.json")
            write_cache(file)
            recorded = tw.recorded(file)
            self.assertEqual((len(recorded), recorded.n_valid), (200, 200))
            self.assertAlmostEqual(recorded.optimum, 1e-3)
            self.assertAlmostEqual(recorded.outcome({"x": 8, "y": 6}), 1e-3)
            replay = tw.replay(file, "auto", [10, 200], repeats=5)
            self.assertEqual([at.budget for at in replay.budgets], [10, 200])
            self.assertEqual(replay.budgets[1].mean, 1.0)
            self.assertLess(replay.budgets[0].mean, 1.0)
            self.assertEqual(tw.replay(recorded, "auto", 10, repeats=5).budgets[0], replay.budgets[0])
            added = tw.Records(os.path.join(folder, "records.db")).add(file)
            self.assertEqual((added["new"], added["format"]), (200, "kernel-tuner"))
            with self.assertRaisesRegex(ValueError, "unknown search"):
                tw.replay(recorded, "magic")
            for given in [{"budget": 0}, {"budget": [5, 1.5]}, {"budget": 1.5}, {"repeats": 0}, {"batch": 0}]:
                with self.assertRaisesRegex((ValueError, TypeError), "give a whole number from 1 to "):
                    tw.replay(recorded, "random", **{"budget": 5, **given})
            with self.assertRaises(ValueError):
                tw.recorded(os.path.join(folder, "none.json"))


class Workloads(unittest.TestCase):
    def test_a_product_is_tuned_and_called(self):
        with tempfile.TemporaryDirectory() as folder:
            db = os.path.join(folder, "records.db")
            run = tw.tune("matmul:m=33,n=48,k=32", trials=8, db=db).wait(progress=False)
            self.assertEqual(run.summary["trials"], 8)
            self.assertTrue(run.summary["verified"], run.summary)
            self.assertIn(run.best.config, tw.workload_space("matmul:m=33,n=48,k=32"))
            best = tw.Records(db).best("matmul:m=33,n=48,k=32")
            self.assertEqual(best["config"], run.best.config)
            if numpy is None:
                self.skipTest("there is no NumPy to call the kernel with")
            kernel = tw.kernel("matmul:m=33,n=48,k=32", db=db)
            self.assertAlmostEqual(kernel.time, run.best.time)
            self.check_product(kernel)

    def test_a_function_takes_no_settings_of_workloads(self):
        space, calls = tw.Space({"x": [1, 2]}), []
        for settings in [{"db": "records.db"}, {"threads": 2}, {"template": "matmul"}, {"race": False}]:
            with self.assertRaisesRegex(TypeError, f"{next(iter(settings))}= is for workloads"):
                tw.tune(space, calls.append, trials=2, **settings)
        self.assertEqual((calls, os.path.exists("records.db")), ([], False))

    def test_settings_are_taken_whole_or_refused(self):
        for settings, words in [
            ({"trials": -1}, "trials takes a whole number of 1 or above, not -1"),
            ({"trials": True}, "trials takes a whole number of 1 or above, not true"),
            ({"seed": 1.5}, "seed takes a whole number of 0 or above, not 1.5"),
            ({"threads": "two"}, 'threads takes a whole number of 1 or above, not "two"'),
            ({"threads": 0}, "threads takes a whole number of 1 or above, not 0"),
            ({"time": 0}, "time takes a number of seconds above 0, not 0"),
            ({"time": float("nan")}, "time: NaN is not a finite number"),
            ({"time": float("inf")}, "time: inf is not a finite number"),
            ({"race": 1}, "race takes True or False, not 1"),
            ({"search": None}, "search takes a text, not null"),
        ]:
            with self.assertRaisesRegex(ValueError, words):
                tw.tune("matmul-256", **settings)
        with tempfile.TemporaryDirectory() as folder:
            db = os.path.join(folder, "records.db")
            run = tw.tune("matmul:m=8,n=8,k=8", trials=2, seed=2**64 - 1, race=False, db=db).wait(progress=False)
            self.assertEqual((run.summary["seed"], run.summary["trials"]), (2**64 - 1, 2))

    @unittest.skipIf(numpy is None, "there is no NumPy to call kernels with")
    def test_guesses_and_constants_are_called_too(self):
        with tempfile.TemporaryDirectory() as folder:
            db = os.path.join(folder, "none.db")
            kernel = tw.kernel("matmul:m=33,n=48,k=32", db=db)
            self.assertIsNone(kernel.time)
            self.check_product(kernel)
            rng = numpy.random.default_rng(1)
            x, w = rng.random((8, 32), numpy.float32), rng.random((16, 32), numpy.float32)
            dense = tw.kernel("dense:m=8,n=16,k=32,const=w", db=db, constants={"w": w})
            [(name, dtype, shape)] = dense.inputs
            self.assertEqual((dtype, shape), (numpy.float32, (8, 32)))
            numpy.testing.assert_allclose(dense(x), x @ w.T, rtol=1e-4)
            for constants, words in [
                ({}, "W is constant"),
                ({"w": w[:1]}, "2048 bytes of f32, not 128"),
                ({"w": w, "v": w}, "v is no constant"),
            ]:
                with self.assertRaisesRegex(ValueError, words):
                    tw.kernel("dense:m=8,n=16,k=32,const=w", db=db, constants=constants)

    def check_product(self, kernel):
        rng = numpy.random.default_rng(0)
        a, b = rng.random((33, 32), numpy.float32), rng.random((32, 48), numpy.float32)
        c = numpy.empty((33, 48), numpy.float32)
        self.assertIs(kernel(a, b, out=c), c)
        numpy.testing.assert_allclose(c, a @ b, rtol=1e-4)
        numpy.testing.assert_array_equal(kernel(a, b), c)
        with self.assertWarnsRegex(UserWarning, "it is copied"):
            numpy.testing.assert_array_equal(kernel(numpy.asfortranarray(a), b), c)
        for arrays, words in [((a,), "takes 2 arrays"), ((a, b.T), r"is an array float32\[32, 48\]"), ((a, [1]), "not list")]:
            with self.assertRaisesRegex(TypeError, words):
                kernel(*arrays)
        with self.assertRaisesRegex(ValueError, "nothing can be written"):
            kernel(a, b, out=numpy.empty((48, 33), numpy.float32).T)


if __name__ == "__main__":
    unittest.main()
