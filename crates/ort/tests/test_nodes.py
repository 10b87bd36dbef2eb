"""ONNX's own tests of operators: through the provider they give what ONNX Runtime's own provider gives.

A part of the cases runs; TILEWRIGHT_EVERY=1 takes all.
"""

import os
import unittest
import warnings

import numpy as np

from test_provider import claimed, log_of, session

# One of so many cases runs.
STEP = 1 if os.environ.get("TILEWRIGHT_EVERY") else 9


def cases():
    """ONNX's cases: their names, models, inputs, and outputs."""
    from onnx.backend.test.case.node import collect_testcases

    # Numbers that are no numbers are among them.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sorted(collect_testcases(None), key=lambda case: case.name)
    for case in found[::STEP]:
        feeds = dict(zip([port.name for port in case.model.graph.input], case.data_sets[0][0]))
        if all(isinstance(array, np.ndarray) for array in feeds.values()):
            yield case.name, case.model, feeds, case.data_sets[0][1]


def answers(model, feeds, **options):
    """Outputs of a session, or why it refuses, and the provider's lines."""
    with log_of() as lines:
        try:
            outputs = session(model, log="all", **options).run(None, feeds)
        except Exception as error:
            outputs = str(error)
    return outputs, lines


def compare(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape), f"{one.dtype}{one.shape}"
    if other.dtype.kind == "f":
        relative, absolute = (1e-2, 1e-3) if other.dtype.itemsize == 2 else (1e-4, 1e-5)
        # Sums have errors of the size of what is summed.
        finite = np.abs(other[np.isfinite(other)]).max(initial=1)
        np.testing.assert_allclose(one, other, rtol=relative, atol=absolute * finite)
    else:
        np.testing.assert_array_equal(one, other)


class Nodes(unittest.TestCase):
    def test_operators_give_the_answers_of_onnx_runtime(self):
        n_here = 0
        for name, model, feeds, documented in cases():
            expected, _ = answers(model, feeds, ours=False)
            if isinstance(expected, str) or not all(isinstance(output, np.ndarray) for output in expected):
                continue
            with self.subTest(name):
                found, lines = answers(model, feeds)
                self.assertNotIsInstance(found, str, f"{found} {lines}")
                n_here += bool(claimed(lines))
                for one, other, stated in zip(found, expected, documented):
                    try:
                        compare(one, other)
                    except AssertionError:
                        # Releases of ONNX Runtime differ in what operators mean.
                        compare(one, np.asarray(stated))
        print(f"{n_here} cases ran here")
        self.assertGreater(n_here, 300 // STEP)


if __name__ == "__main__":
    unittest.main()
