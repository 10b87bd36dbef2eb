"""Models of PyTorch: with a stub in its place that costs nothing, and with PyTorch where it is installed."""

import importlib.util
import os
import pathlib
import sys
import tempfile
import unittest
import warnings

try:
    import numpy
except ImportError:
    raise unittest.SkipTest("there is no NumPy on this machine")

import onnx_file

HAS_TORCH = importlib.util.find_spec("torch") is not None
if not HAS_TORCH:
    sys.path.append(str(pathlib.Path(__file__).resolve().parent / "stub"))

import torch  # noqa: E402

import tilewright as tw  # noqa: E402
import tilewright.torch as backend  # noqa: E402


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.options = {"db": os.path.join(self.folder.name, "none.db"), "threads": 1}
        backend._said.clear()

    def check_said(self, words, call):
        """Calls, and checks the warnings that came meanwhile."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = call()
        said = [str(warning.message) for warning in said if "tilewright" in str(warning.message)]
        self.assertEqual(len(said), len(words), said)
        for text, expected in zip(said, words):
            self.assertIn(expected, text)
            self.assertNotIn("\n", text)
        return result


@unittest.skipIf(HAS_TORCH, "PyTorch is here, and needs no stub")
class Stub(Case):
    """A graph of the stub's: x @ w + 1, with a weight that becomes a constant."""

    def setUp(self):
        super().setUp()
        torch.export.NETWORKS.clear()
        torch._state.grad = False
        self.n_eager = 0
        self.w = torch.nn.Parameter(numpy.arange(64, dtype="f4").reshape(8, 8))
        self.graph = backend.backend(self.eager, [], options=self.options)

    def eager(self, w, x):
        self.n_eager += 1
        return (torch.Tensor(x.array @ w.array + 1),)

    def network(self, rows=4, plus=1, writes_to_inputs=False):
        def write(path, constants):
            held = {"w": constants["constant_0"].array, "one": numpy.array(plus, "f4")}
            ports = [[("x", "float32", [rows, 8])], [("y", "float32", [rows, 8])]]
            onnx_file.write(path, [("MatMul", ["x", "w"], ["p"]), ("Add", ["p", "one"], ["y"])], held, *ports)

        torch.export.NETWORKS.append((write, writes_to_inputs))

    def x(self, rows=4):
        return torch.Tensor(numpy.linspace(-1, 1, rows * 8, dtype="f4").reshape(rows, 8))

    def check(self, x, n_eager):
        [y] = self.graph(self.w, x)
        numpy.testing.assert_allclose(y.array, x.array @ self.w.array + 1, rtol=1e-5)
        self.assertEqual(self.n_eager, n_eager)

    def test_a_graph_runs_on_kernels_after_its_first_answer(self):
        self.network()
        for _ in range(3):
            self.check(self.x(), 1)
        strided = torch.Tensor(numpy.ones((8, 4), "f4").T)
        self.check(strided, 1)

    def test_weights_that_change_are_constants_anew(self):
        for _ in range(3):
            self.network()
        self.check(self.x(), 1)
        self.w.write(self.w.array * 2)
        self.check(self.x(), 2)
        self.check(self.x(), 2)
        # Other memory does not count as a write.
        self.w.array = self.w.array * 2
        self.check(self.x(), 3)

    def test_each_size_is_compiled_up_to_eight(self):
        for rows in range(1, 9):
            self.network(rows)
            self.check(self.x(rows), rows)
            self.check(self.x(rows), rows)
        self.check_said(["a 9th kind"], lambda: self.check(self.x(9), 9))
        self.check_said([], lambda: self.check(self.x(9), 10))
        # The eight stay as they are.
        for rows in range(1, 9):
            self.check(self.x(rows), 10)

    def test_what_does_not_become_kernels_stays_with_pytorch_and_is_said_once(self):
        for prepare, words in [
            (lambda: torch.export.NETWORKS.append((None, False)), "cannot be exported (RuntimeError: no words for it)"),
            (lambda: self.network(writes_to_inputs=True), "writes to its inputs"),
            (lambda: self.network(plus=1.5), "output 0 is 0.5 away from PyTorch's"),
            (lambda: self.network(rows=5), "input 0 is float32 [4, 8] in PyTorch, and float32[5, 8] as ONNX"),
        ]:
            self.setUp()
            prepare()
            self.check_said([words], lambda: self.check(self.x(), 1))
            self.check_said([], lambda: self.check(self.x(), 2))

    def test_gradients_devices_and_views_stay_with_pytorch(self):
        torch._state.grad = True
        x = torch.Tensor(self.x().array, requires_grad=True)
        self.check_said(["call it under torch.no_grad()"], lambda: self.check(x, 1))
        torch._state.grad = False
        x = torch.Tensor(self.x().array, device="cuda")
        self.check_said(["models run on the CPU"], lambda: self.check(x, 2))
        self.setUp()
        self.network()
        same = backend.backend(lambda w, x: (torch.Tensor(x.array.reshape(-1)),), [], options=self.options)
        self.check_said(["a view of an input"], lambda: same(self.w, self.x()))

    def test_a_module_is_optimized_or_refused(self):
        module = torch.nn.Module()
        module.constant_0 = self.w
        module.buffers = {"constant_0": self.w}
        module.forward = lambda x: self.eager(self.w, x)[0]
        self.network()
        run = tw.optimize(module, self.x(), **self.options)
        numpy.testing.assert_allclose(run(self.x()).array, self.x().array @ self.w.array + 1, rtol=1e-5)
        self.assertEqual(self.n_eager, 1)
        with self.assertRaisesRegex(ValueError, "optimized for .*4, 8.*, not for .*5, 8"):
            run(self.x(5))
        torch.export.NETWORKS.append((None, False))
        with self.assertRaisesRegex(ValueError, "Module does not become kernels: it cannot be exported"):
            tw.optimize(module, self.x(), **self.options)

    def test_options_are_checked(self):
        with self.assertRaisesRegex(ValueError, "no option 'thread' \\(there are 'threads', 'db', 'exact', 'time'\\)"):
            backend.backend(self.eager, [], options={"thread": 1})


@unittest.skipUnless(HAS_TORCH, "there is no PyTorch on this machine")
class PyTorch(Case):
    def compiled(self, module):
        torch._dynamo.reset()
        return torch.compile(module.eval(), backend="tilewright", options=self.options)

    def check(self, module, *all_inputs, tolerance=1e-4, said=()):
        """Calls a compiled module twice on each of the inputs, beside PyTorch."""
        run = self.compiled(module)
        with torch.no_grad():
            for inputs in all_inputs:
                self.check_said(said, lambda: run(*inputs))
                said = ()
                difference = (run(*inputs).double() - module(*inputs).double()).abs().max()
                self.assertLessEqual(float(difference), tolerance)

    def test_networks_run_on_kernels(self):
        nn = torch.nn
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10), nn.Softmax(-1))
        self.check(mlp, *[(torch.randn(n, 64),) for n in (4, 5, 6)])
        convolutions = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5))
        self.check(convolutions, (torch.randn(1, 3, 16, 16),))
        layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True)
        self.check(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(2, 7, 32),))
        self.check(nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 4)), (torch.randint(0, 50, (3, 7)),))
        self.check(mlp.bfloat16(), (torch.randn(4, 64).bfloat16(),), tolerance=2e-2)

    def test_numbers_of_modules_may_be_dynamic(self):
        # Such as the epsilon of a normalization, which PyTorch then passes as a tensor.
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32, eps=0.5), torch.nn.ReLU()).eval()
        fast = torch.compile(model, backend="tilewright", options=self.options, dynamic=True)

        def run():
            with torch.no_grad():
                for rows in (2, 3, 2, 3):
                    x = torch.randn(rows, 16)
                    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)

        self.check_said([], run)
        torch._dynamo.reset()

    def test_what_does_not_become_kernels_stays_with_pytorch(self):
        class Adds(torch.nn.Module):
            def forward(self, x):
                x.add_(1)
                return x * 2

        run, x = self.compiled(Adds()), torch.zeros(3)
        with torch.no_grad():
            self.check_said(["writes to its inputs"], lambda: run(x))
            self.assertEqual(float(run(x)[0]), 4)
        linear = torch.nn.Linear(4, 4)
        run, x = self.compiled(linear), torch.ones(2, 4)
        y = self.check_said(["call it under torch.no_grad()"], lambda: run(x))
        y.sum().backward()
        self.assertIsNotNone(linear.weight.grad)

    def test_weights_may_change(self):
        linear = torch.nn.Linear(4, 4)
        run, x = self.compiled(linear), torch.ones(2, 4)
        with torch.no_grad():
            for _ in range(2):
                for _ in range(2):
                    torch.testing.assert_close(run(x), linear(x))
                linear.weight.mul_(2)
            run(x)
            # Other memory does not count as a write.
            linear.weight.data = torch.full((4, 4), 3.0)
            torch.testing.assert_close(run(x), linear(x))

    def test_a_module_is_tuned(self):
        linear, x = torch.nn.Linear(32, 32).eval(), torch.randn(4, 32)
        run = tw.optimize(linear, (x,), time=1, **self.options)
        self.assertEqual(run.model.n_untuned, 0)
        with torch.no_grad():
            torch.testing.assert_close(run(x), linear(x), rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    unittest.main()
