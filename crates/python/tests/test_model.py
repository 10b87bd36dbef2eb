"""ONNX models that are called."""

import gc
import os
import pathlib
import signal
import tempfile
import threading
import unittest
import warnings

import tilewright as tw

try:
    import numpy
except ImportError:
    raise unittest.SkipTest("there is no NumPy on this machine")

import onnx_file

K = numpy.array([1, -2, 2**53 + 1])


class Models(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = pathlib.Path(cls.folder.name) / "network.onnx"
        onnx_file.write_network(cls.path)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def load(self, batch=16, **options):
        options.setdefault("dims", {"batch": batch})
        return tw.load(self.path, db=os.path.join(self.folder.name, "none.db"), **options)

    def inputs(self, n, batch=16):
        rng = numpy.random.default_rng(3)
        return [rng.standard_normal((batch, 64)).astype("float32") for _ in range(n)]

    def test_arrays_come_in_a_dict_in_order_or_by_name(self):
        model = self.load()
        self.assertEqual([tuple(what) for what in model.inputs], [("x", "float32", (16, 64)), ("k", "int64", (3,))])
        self.assertEqual([tuple(what) for what in model.outputs], [("y", "float32", (16, 10)), ("z", "int64", (3,))])
        self.assertGreater(model.n_untuned, 0)
        self.assertIn("x: float32[16, 64], k: int64[3] -> y: float32[16, 10]", repr(model))
        [x] = self.inputs(1)
        for outputs in [model({"x": x, "k": K}), model(x, K), model(k=K, x=x), model(x, k=K), model({"k": K}, x=x)]:
            self.assertEqual(list(outputs), ["y", "z"])
            numpy.testing.assert_allclose(outputs["y"], onnx_file.answer(x), rtol=1e-4, atol=1e-4)
            numpy.testing.assert_array_equal(outputs["z"], [2, -4, 2**54 + 2])

    def test_arrays_are_copied_where_they_do_not_lie_well(self):
        model = self.load()
        [x] = self.inputs(1)
        expected = model(x, K)["y"]
        memory = numpy.zeros(x.nbytes + 1, "u1")
        views = [
            memory[1:].view("f4").reshape(16, 64), numpy.zeros((64, 16), "f4").T, numpy.zeros((16, 128), "f4")[:, ::2],
            numpy.zeros((16, 64), "f4")[::-1, ::-1], numpy.zeros((16, 64), ">f4"),
        ]
        for view in views:
            view[...] = x
            numpy.testing.assert_array_equal(model(view, K)["y"], expected)
        x.flags.writeable = False
        numpy.testing.assert_array_equal(model(x, K.tolist())["y"], expected)

    def test_what_does_not_fit_is_said_on_one_line(self):
        model = self.load()
        [x] = self.inputs(1)
        for error, words, call in [
            (ValueError, "there is no input 'v' (there are 'x', 'k')", lambda: model({"x": x, "v": K})),
            (ValueError, "the input 'k' is missing", lambda: model(x)),
            (TypeError, "'x' is given twice", lambda: model(x, K, x=x)),
            (TypeError, "has 2 inputs ('x', 'k'), and 3 arrays", lambda: model(x, K, x)),
            (TypeError, "takes float32, not float64 (convert it with .astype('float32'))", lambda: model(x.astype("f8"), K)),
            (TypeError, "'x' takes float32, not <U1", lambda: model("a", K)),
            (ValueError, "'x' takes the shape (16, 64), not (64, 16)", lambda: model(x.T, K)),
            (ValueError, "sizes of inputs are missing: batch (give all, such as dims={\"batch\": 1})", lambda: self.load(dims={})),
            (ValueError, "no input has a dimension `n`", lambda: self.load(dims={"n": 3, "batch": 1})),
            (ValueError, "cannot read", lambda: tw.load(self.path.parent / "none.onnx")),
            (ValueError, "not an ONNX model", lambda: tw.load(__file__)),
            (ValueError, "values: k is an array of shape", lambda: self.load(values={"k": numpy.reshape(K, (1, 1, -1))})),
            (ValueError, "threads", lambda: self.load(threads=0)),
        ]:
            with self.assertRaises(error) as raised:
                call()
            self.assertIn(words, str(raised.exception))
            self.assertNotIn("\n", str(raised.exception))
        # An error leaves the model as it was.
        numpy.testing.assert_allclose(model(x, K)["y"], onnx_file.answer(x), rtol=1e-4, atol=1e-4)

    def test_dimensions_shapes_and_values_are_bound(self):
        for batch in [1, 5]:
            for options in [{"dims": {"batch": batch}}, {"shapes": {"x": (batch, 64)}}]:
                [x] = self.inputs(1, batch)
                y = self.load(**options)(x, K)["y"]
                numpy.testing.assert_allclose(y, onnx_file.answer(x), rtol=1e-4, atol=1e-4)
        model = self.load(values={"k": K}, exact=True)
        self.assertEqual([what.name for what in model.inputs], ["x"])
        [x] = self.inputs(1)
        numpy.testing.assert_array_equal(model(x)["z"], 2 * K)

    def test_factors_are_rounded_to_bf16_where_that_is_wished(self):
        [x] = self.inputs(1)
        with warnings.catch_warnings():
            # A CPU without products of bf16 has a note of it.
            warnings.simplefilter("ignore")
            y = self.load(bf16=True)(x, K)["y"]
        expected = onnx_file.answer(x)
        numpy.testing.assert_allclose(y, expected, rtol=0, atol=0.02 * abs(expected).max())
        with self.assertRaisesRegex(ValueError, "exact=True and bf16=True exclude each other"):
            self.load(exact=True, bf16=True)

    def test_what_the_back_end_has_no_code_for_is_computed_too(self):
        path, table = os.path.join(self.folder.name, "mixed.onnx"), numpy.arange(30, dtype="f4").reshape(10, 3) / 10
        nodes = [
            ("Gather", ["table", "ids"], ["g"]), ("Pow", ["x", "g"], ["p"]), ("Less", ["p", "g"], ["l"]),
            ("Mul", ["ids", "ids"], ["i"]),
        ]
        outputs = [("p", "float32", [4, 3]), ("l", "bool", [4, 3]), ("i", "int64", [4])]
        inputs = [("x", "float32", [4, 3]), ("ids", "int64", [4])]
        onnx_file.write(path, nodes, {"table": table}, inputs, outputs)
        x, ids = numpy.linspace(0.5, 3, 12, dtype="f4").reshape(4, 3), numpy.array([7, -1, 0, 3])
        found = tw.load(path, db=os.path.join(self.folder.name, "none.db"))(x, ids)
        p = x.astype("f8") ** table[ids]
        numpy.testing.assert_allclose(found["p"], p, rtol=1e-5)
        numpy.testing.assert_array_equal(found["l"], p < table[ids])
        numpy.testing.assert_array_equal(found["i"], ids * ids)

    def test_any_thread_may_call(self):
        for n_threads in range(1, 1 + min(2, os.cpu_count())):
            model = self.load(threads=n_threads)
            inputs = self.inputs(4)
            expected = [model(x, K)["y"].tobytes() for x in inputs]
            self.check_threads(lambda at: [model(inputs[at], K)["y"].tobytes() for _ in range(200)], expected, 200)

    def test_any_thread_may_call_a_kernel(self):
        kernel = tw.kernel("matmul:m=16,n=96,k=64,epilogue=relu", db=os.path.join(self.folder.name, "none.db"))
        inputs, w = self.inputs(4), onnx_file.weights()["w1"]
        expected = [kernel(x, w).tobytes() for x in inputs]
        self.check_threads(lambda at: [kernel(inputs[at], w).tobytes() for _ in range(200)], expected, 200)
        unaligned = numpy.zeros(w.nbytes + 1, "u1")[1:].view("f4").reshape(w.shape)
        unaligned[...] = w
        with self.assertWarnsRegex(UserWarning, "it is copied"):
            self.assertEqual(kernel(inputs[0], unaligned).tobytes(), expected[0])

    def check_threads(self, work, expected, n_runs):
        """Work in four threads, all of whose answers are the one that is expected of the thread."""
        got = [[] for _ in expected]
        threads = [threading.Thread(target=lambda at=at: got[at].extend(work(at))) for at in range(len(expected))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for found, right in zip(got, expected):
            self.assertEqual((len(found), set(found)), (n_runs, {right}))

    def test_models_come_and_go_in_many_threads(self):
        [x] = self.inputs(1)
        expected = [self.load()(x, K)["y"].tobytes()] * 4
        self.check_threads(lambda at: [self.load()(x, K)["y"].tobytes() for _ in range(5)], expected, 5)

    def test_outputs_outlive_the_model(self):
        model = self.load()
        [x] = self.inputs(1)
        first, second = model(x, K), model(-x, K)
        kept = {name: array.copy() for name, array in first.items()}
        self.assertTrue(all(array.flags.owndata for array in first.values()))
        del model, second
        gc.collect()
        self.load()(2 * x, K)
        for name, array in first.items():
            numpy.testing.assert_array_equal(array, kept[name])

    @unittest.skipUnless(hasattr(os, "fork"), "there is no fork")
    def test_children_of_fork_call_it(self):
        model = self.load(threads=min(2, os.cpu_count()))
        [x] = self.inputs(1)
        expected = model(x, K)["y"].tobytes()
        is_over = False

        def work():
            while not is_over:
                model(x, K)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                child = os.fork()
                if child == 0:
                    signal.alarm(20)
                    is_right = model(x, K)["y"].tobytes() == expected
                    del model
                    gc.collect()
                    os._exit(not is_right)
                self.assertEqual(os.waitpid(child, 0)[1], 0)
        finally:
            is_over = True
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    unittest.main()
