"""Spaces, searches, and what they refuse."""

import itertools
import sys
import unittest

import tilewright as tw


def small():
    return tw.Space({"tile": [8, 16, 32], "threads": [1, 2, 4, 8], "mode": ["a", "b"]}, ["tile * threads <= 64"])


class Spaces(unittest.TestCase):
    def test_a_space_is_what_its_restrictions_leave(self):
        space = small()
        legal = [
            {"tile": tile, "threads": threads, "mode": mode}
            for tile, threads, mode in itertools.product([8, 16, 32], [1, 2, 4, 8], ["a", "b"])
            if tile * threads <= 64
        ]
        self.assertEqual((len(space), space.size), (len(legal), len(legal)))
        key = lambda config: tuple(config.values())
        self.assertEqual(sorted(space, key=key), sorted(legal, key=key))
        for config in legal:
            self.assertIn(config, space)
            self.assertEqual(space.config_at(space.index_of(config)), config)
        self.assertEqual(space.config_at(-1), space.config_at(len(space) - 1))
        self.assertTrue(all(config in space for config in space.sample(50, seed=3)))
        self.assertEqual(space.sample(5, seed=3), space.sample(5, seed=3))
        self.assertEqual(space.names, ["tile", "threads", "mode"])
        self.assertNotIn({"tile": 32, "threads": 4, "mode": "a"}, space)
        self.assertIn("tile * threads <= 64", space.violated({"tile": 32, "threads": 4, "mode": "a"}))
        self.assertIn("tile cannot be 7; allowed: 8, 16, 32", space.violated({"tile": 7, "threads": 1, "mode": "a"}))
        self.assertIsNone(space.violated((8, 1, "a")))
        around = space.neighbours({"tile": 16, "threads": 2, "mode": "a"})
        self.assertIn({"tile": 32, "threads": 2, "mode": "a"}, around)
        with self.assertRaises(IndexError):
            space.config_at(len(space))

    def test_values_are_of_any_kind(self):
        params = {"ratio": [1.5, 0.25, 1.0], "flag": [True, False], "shape": [(1, 2), (2, 4)], "none": [None, 3]}
        space = tw.Space(params, ["ratio < 1.2", "shape[0] * ratio <= 1 or flag"])
        configs = list(space)
        expected = [
            dict(zip(params, values))
            for values in itertools.product(*params.values())
            if values[0] < 1.2 and (values[2][0] * values[0] <= 1 or values[1])
        ]
        self.assertEqual(len(configs), len(expected))
        self.assertTrue(all(config in configs for config in expected))
        self.assertTrue(all(config in space for config in expected))
        # What came in comes out.
        self.assertIs(type(configs[0]["flag"]), bool)
        self.assertIs(type(configs[0]["shape"]), tuple)

    def test_configurations_may_be_listed(self):
        space = tw.Space({"x": [1, 2, 3], "y": [1, 2, 3]}, configurations=[(1, 1), (2, 3), {"x": 3, "y": 1}, (1, 1)])
        self.assertEqual([tuple(config.values()) for config in space], [(1, 1), (2, 3), (3, 1)])
        self.assertNotIn({"x": 1, "y": 2}, space)

    def test_what_is_refused_says_how_to_mend_it(self):
        for make, words in [
            (lambda: tw.Space({}), "there are no parameters"),
            (lambda: tw.Space({"x": []}), "x has no feasible value"),
            (lambda: tw.Space({"x": [1, 1]}), "lists 1 twice"),
            (lambda: tw.Space({"x": [1, True]}), "lists True twice: it equals 1"),
            (lambda: tw.Space({"x": [0.5, 2, 2.0]}), "lists 2.0 twice: it equals 2"),
            (lambda: tw.Space({"x": [1, object()]}), "cannot be the value of a parameter"),
            (lambda: tw.Space({"x": [1, 2]}, ["x > y"]), "unknown name y"),
            (lambda: tw.Space({"x": [1, 2]}, ["x > 1 && x"]), "write `and`"),
            (lambda: tw.Space({"x": [1, 2]}, ["x > 9"]), "no configuration satisfies"),
            (lambda: tw.Space({"x": [1, 2]}, [lambda p: True]), "write it as a text"),
            (lambda: tw.Space({"x": 5}), "parameter x: give a list of values, such as [8, 16, 32], not 5"),
            (lambda: tw.Space({"x": "ab"}), "parameter x: give a list of values, such as [8, 16, 32], not 'ab'"),
            (lambda: tw.Space({1: [1]}), "a parameter's name is a text, not 1"),
            (lambda: tw.Space({"x": [1, 2]}, 5), "give a restriction as a text"),
            (lambda: tw.Space({"x": [1, 2]}, configurations=5), "give a list of configurations"),
            (lambda: tw.Space({"x": [1, 2]}, ["x > 1"], configurations=[(1,)]), "restrictions or configurations"),
            (lambda: tw.Search("magic", small()), "unknown search magic; there are auto"),
            (lambda: tw.Search("genetic:population=x", small()), "population cannot be x"),
        ]:
            with self.assertRaises(ValueError) as raised:
                make()
            self.assertIn(words, str(raised.exception))
            self.assertNotIn("\n", str(raised.exception))

    def test_numbers_out_of_range_are_refused_in_one_line(self):
        space = small()
        for call in [
            lambda number: tw.Search("random", space).ask(number),
            lambda number: tw.Search("random", space, number),
            lambda number: space.sample(number),
            lambda number: space.sample(seed=number),
            lambda number: tw.race({"a": int, "b": int}, rounds=number),
            lambda number: tw.race({"a": int, "b": int}, seed=number),
        ]:
            for number, error in [(-1, ValueError), (2**64, ValueError), (1.5, TypeError), ("a", TypeError)]:
                with self.assertRaises(error) as raised:
                    call(number)
                self.assertEqual(f"give a whole number from 0 to {2**64 - 1}, not {number!r}", str(raised.exception))
                if sys.version_info >= (3, 11):
                    self.assertRegex(raised.exception.__notes__[0], "while processing '(n|seed|rounds)'")
        for threads in [-1, 0, 2**64, 1.5, "a"]:
            for call in [tw.kernel, tw.workload_space]:
                with self.assertRaisesRegex(ValueError, "threads takes a whole number of 1 or above, not "):
                    call("matmul-256", threads=threads)
        for index in [24, -25, 2**64, 2**130, -(2**130)]:
            with self.assertRaisesRegex(IndexError, f"there is no configuration {index} of"):
                space.config_at(index)
        with self.assertRaisesRegex(TypeError, "an index is a whole number, not 1.5"):
            space.config_at(1.5)

    def test_a_space_of_a_billion_is_built_and_numbered(self):
        params = {name: list(range(1, 9)) for name in "abcdefghij"}
        space = tw.Space(params, ["a * b <= 32", "c + d >= 4", "e <= f"])
        self.assertGreater(space.size, 10**8)
        self.assertIn(space.config_at(space.size // 3), space)

    def test_workloads_have_spaces(self):
        space = tw.workload_space("matmul:m=64,n=48,k=32")
        config = space.sample(seed=1)
        self.assertIn(config, space)
        self.assertEqual(space.config_at(space.index_of(config)), config)


class Searches(unittest.TestCase):
    def test_every_search_finds_all_and_repeats_nothing(self):
        for row in tw.searches():
            space = small()
            search = tw.Search(row["name"], space, seed=1)
            seen = []
            while configs := search.ask(3):
                for config in configs:
                    self.assertIn(config, space)
                    self.assertNotIn(config, seen)
                    seen.append(config)
                    failed = config["mode"] == "b" and config["tile"] == 8
                    search.tell(config, tw.Failure("run_timeout", "slow") if failed else config["tile"] / config["threads"])
            self.assertEqual(len(seen), len(space), row["name"])

    def test_a_search_goes_on_from_what_it_is_told(self):
        space = small()
        search = tw.Search("auto", space)
        known = space.sample(4, seed=9)
        for config in known:
            search.tell(config, 1.0)
        rest = []
        while configs := search.ask():
            rest += configs
            search.tell(configs[0], 2.0)
        self.assertTrue(all(config not in known for config in rest))
        for result, words in [(-1, "is no result"), (float("inf"), "is no result"), ("fast", "is no result")]:
            with self.assertRaisesRegex(ValueError, words):
                search.tell(known[0], result)
        with self.assertRaisesRegex(ValueError, "no failure of the kind .bad.;"):
            search.tell(known[0], tw.Failure("bad"))
        with self.assertRaisesRegex(ValueError, "does not hold"):
            search.tell({"tile": 32, "threads": 8, "mode": "a"}, 1.0)
        with self.assertRaisesRegex(ValueError, "mode is missing"):
            search.tell({"tile": 32, "threads": 1}, 1.0)

    def test_results_of_0_are_the_best_or_the_worst(self):
        space = tw.Space({"x": list(range(20)), "y": list(range(20))})
        for maximize, best in [(False, (13, 4)), (True, (19, 19))]:
            result = lambda x, y: x * y if maximize else abs(x - 13) + abs(y - 4)
            search, told = tw.Search("auto", space, maximize=maximize), []
            for _ in range(60):
                [config] = search.ask()
                told.append((result(**config), config["x"], config["y"]))
                search.tell(config, told[-1][0])
            self.assertEqual((max if maximize else min)(told)[1:], best)

    def test_seeds_decide(self):
        asked = lambda seed: [tw.Search("random", small(), seed).ask(5) for _ in range(2)]
        self.assertEqual(*asked(1))
        self.assertNotEqual(asked(1)[0], asked(2)[0])


if __name__ == "__main__":
    unittest.main()
