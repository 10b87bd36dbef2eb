"""Kernels and models on tensors that are not NumPy's, by DLPack and without a copy."""

import os
import pathlib
import sys
import tempfile
import unittest
import warnings

import tilewright as tw

try:
    import numpy
except ImportError:
    raise unittest.SkipTest("there is no NumPy on this machine")

import onnx_file
from tensors import Tensor, bfloat16, numbers


class Tensors(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.db = os.path.join(cls.folder.name, "none.db")
        cls.kernel = tw.kernel("matmul:m=16,n=24,k=8", db=cls.db)
        path = pathlib.Path(cls.folder.name) / "double.onnx"
        ports = [[(name, "bfloat16", [4, 3])] for name in "xy"]
        onnx_file.write(path, [("Add", ["x", "x"], ["y"])], {}, *ports)
        cls.model = tw.load(path, db=cls.db)
        path = pathlib.Path(cls.folder.name) / "network.onnx"
        onnx_file.write_network(path)
        cls.network = tw.load(path, db=cls.db, dims={"batch": 16})

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def arrays(self):
        rng = numpy.random.default_rng(5)
        a, b = (rng.standard_normal(shape).astype("float32") for shape in [(16, 8), (8, 24)])
        return a, b, numpy.zeros((16, 24), "float32")

    def test_a_kernel_reads_and_writes_where_tensors_lie(self):
        for options in [{}, {"is_versioned": False}, {"byte_offset": 4}, {"device": (3, 1)}, {"device": (11, 0)}]:
            a, b, c = self.arrays()
            out = Tensor(c, **{**options, "is_versioned": True})
            with warnings.catch_warnings(action="error") if sys.version_info >= (3, 11) else warnings.catch_warnings():
                self.assertIs(self.kernel(Tensor(a, **options), b, out=out), out)
            numpy.testing.assert_allclose(c, a.astype("f8") @ b, rtol=1e-4, atol=1e-5)
        # What is given back is a tensor as well.
        made = numpy.from_dlpack(self.kernel(Tensor(a), Tensor(b)))
        numpy.testing.assert_array_equal(made, c)

    def test_a_kernel_refuses_what_is_no_such_tensor(self):
        a, b, c = self.arrays()
        wide = numpy.zeros((16, 48), "float32")
        for error, words, call in [
            (TypeError, "A: the tensor cannot be passed: it is on cuda:1", lambda: self.kernel(Tensor(a, device=(2, 1)), b)),
            (TypeError, "A: the tensor cannot be passed: it is on device 99:0", lambda: self.kernel(Tensor(a, device=(99, 0)), b)),
            (TypeError, "A is an array float32[16, 8], not int32[16, 8]", lambda: self.kernel(Tensor(a.view("i4")), b)),
            (TypeError, "A: the tensor cannot be passed", lambda: self.kernel(bfloat16(a), b)),
            (TypeError, "B is an array float32[8, 24], not float32[16, 8]", lambda: self.kernel(a, Tensor(a))),
            (ValueError, "C is not contiguous", lambda: self.kernel(a, b, out=Tensor(wide[:, ::2]))),
            (TypeError, "C is an array", lambda: self.kernel(a, b, out=Tensor(wide))),
            (ValueError, "C is read-only", lambda: self.kernel(a, b, out=Tensor(c, is_read_only=True))),
            (TypeError, "C is an array float32[16, 24], not list", lambda: self.kernel(a, b, out=[c, c])),
            # Tensors over the same memory are different arrays to NumPy.
            (ValueError, "C shares memory with A", lambda: self.kernel(Tensor(c.reshape(-1)[:128].reshape(16, 8)), b, out=Tensor(c))),
        ]:
            with self.assertRaises(error) as raised:
                call()
            self.assertIn(words, str(raised.exception))
            self.assertNotIn("\n", str(raised.exception))
        self.assertFalse(c.any() or wide.any())

    def test_a_tensor_that_is_strided_or_not_aligned_is_copied_with_a_warning(self):
        a, b, c = self.arrays()
        memory = numpy.zeros(a.nbytes + 1, "u1")
        for view in [numpy.zeros((8, 16), "f4").T, numpy.zeros((16, 16), "f4")[:, ::2], memory[1:].view("f4").reshape(16, 8)]:
            view[...] = a
            with self.assertWarnsRegex(UserWarning, "A is not contiguous"):
                self.kernel(Tensor(view), b, out=c)
            numpy.testing.assert_allclose(c, a.astype("f8") @ b, rtol=1e-4, atol=1e-5)

    def test_bfloat16_comes_as_such_or_as_bits(self):
        x = numpy.array([[1, -2, 0.5], [3, 0, -0.0], [1e30, -1e-30, 7], [numpy.inf, -numpy.inf, 2]], "float32")
        expected = numbers(bfloat16(x)) * 2
        for options in [{}, {"is_versioned": False}, {"byte_offset": 2}]:
            given, out = bfloat16(x, **options), bfloat16(numpy.zeros_like(x))
            before = sys.getrefcount(given)
            for _ in range(20):
                outputs = self.model.run({"x": given}, {"y": out})
            self.assertEqual(sys.getrefcount(given), before)
            self.assertIs(outputs["y"], out)
            numpy.testing.assert_array_equal(numbers(out), expected)
        bits = self.model(given.array)["y"]
        numpy.testing.assert_array_equal(bits, out.array)
        with self.assertRaisesRegex(TypeError, "'x' takes bfloat16, or its bits as uint16, not float32"):
            self.model(Tensor(x))
        with self.assertRaisesRegex(ValueError, "y is read-only"):
            self.model.run({"x": given}, {"y": bfloat16(x, is_read_only=True)})

    def test_a_tensor_of_no_elements_needs_no_address(self):
        path = pathlib.Path(self.folder.name) / "empty.onnx"
        onnx_file.write(path, [("Add", ["x", "x"], ["y"])], {}, *[[(name, "float32", ["n", 3])] for name in "xy"])
        given = Tensor(numpy.zeros((0, 3), "float32"), address=0)
        self.assertEqual(tw.load(path, dims={"n": 0}, db=self.db)(given)["y"].shape, (0, 3))

    def test_a_model_writes_to_some_outputs_or_to_all(self):
        x, k = numpy.ones((16, 64), "float32"), numpy.array([1, 2, 3])
        y, z = numpy.zeros((16, 10), "float32"), numpy.zeros(3, "int64")
        given = Tensor(y)
        outputs = self.network.run({"x": Tensor(x), "k": k}, {"y": given})
        self.assertIs(outputs["y"], given)
        numpy.testing.assert_allclose(y, onnx_file.answer(x), rtol=1e-4, atol=1e-4)
        self.assertIs(self.network.run({"x": x, "k": k}, {"z": z})["z"], z)
        numpy.testing.assert_array_equal(z, 2 * k)
        with self.assertRaisesRegex(ValueError, "there is no output 'w' \\(there are 'y', 'z'\\)"):
            self.network.run({"x": x, "k": k}, {"w": z})
        with self.assertRaisesRegex(TypeError, "z is an array int64\\[3\\], not float32"):
            self.network.run({"x": x, "k": k}, {"z": y})
        with self.assertRaisesRegex(TypeError, "x: the tensor cannot be passed: it is on rocm:0"):
            self.network(Tensor(x, device=(10, 0)), k)


if __name__ == "__main__":
    unittest.main()
