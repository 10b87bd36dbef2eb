"""The provider in ONNX Runtime: its answers are those of ONNX Runtime's own provider."""

import concurrent.futures
import contextlib
import io
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import unittest

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime
from onnx import TensorProto, helper

import tilewright_ort

NAME = tilewright_ort.get_ep_name()
onnxruntime.register_execution_provider_library(NAME, tilewright_ort.get_library_path())
COMMAND = pathlib.Path(sysconfig.get_path("scripts")) / "tilewright"
# Until then `providers` ignores the names of libraries.
TAKES_NAMES = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) >= (1, 26)


def session(model, ours=True, threads=1, free=None, names=TAKES_NAMES, entries=None, **options):
    """A session of a model, with all that there are kernels for run by them, unless options say otherwise."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    for name, value in (entries or {}).items():
        settings.add_session_config_entry(name, value)
    for name, size in (free or {}).items():
        settings.add_free_dimension_override_by_name(name, size)
    data = model if isinstance(model, (bytes, str)) else model.SerializeToString()
    if not ours:
        return onnxruntime.InferenceSession(data, settings, providers=["CPUExecutionProvider"])
    made = made_session(data, settings, names, {"claim": "all", "threads": str(threads), **options})
    # A run that fails would be tried again without the provider.
    made.disable_fallback()
    return made


def made_session(data, settings, names, options):
    """A session with the provider, by its name or by its devices."""
    if names:
        return onnxruntime.InferenceSession(data, settings, providers=[(NAME, options), "CPUExecutionProvider"])
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == NAME]
    settings.add_provider_for_devices(devices, options)
    return onnxruntime.InferenceSession(data, settings)


@contextlib.contextmanager
def log_of():
    """Takes what is written to the standard error: a list with the provider's lines is complete at the end."""
    lines = []
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            words = file.read().decode(errors="replace").splitlines()
            lines += [line.split("] tilewright: ")[1] for line in words if "] tilewright: " in line]


@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield pathlib.Path(name)


def claimed(lines):
    """Nodes that run here, part by part."""
    return [int(line.split()[0]) for line in lines if "nodes run here" in line]


def random(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def model(nodes, inputs, outputs, weights=(), opset=17):
    """A model of nodes `(operator, inputs, outputs, attributes)`; inputs and outputs are `(name, shape)`."""
    info = lambda ports: [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in ports]
    made = [helper.make_node(op, takes, gives, **attributes) for op, takes, gives, attributes in nodes]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in weights]
    graph = helper.make_graph(made, "graph", info(inputs), info(outputs), constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def residual_network(n_blocks=3, n=16):
    """Convolutions with residual connections, a mean over the image, and a product."""
    nodes, weights, last = [], [], "x"
    for at in range(n_blocks):
        weights += [(f"w{at}{i}", random(n, n, 3, 3, seed=at) / n) for i in "ab"]
        weights += [(f"b{at}{i}", random(n, seed=at)) for i in "ab"]
        conv = dict(pads=[1, 1, 1, 1])
        nodes += [
            ("Conv", [last, f"w{at}a", f"b{at}a"], [f"c{at}"], conv),
            ("Relu", [f"c{at}"], [f"r{at}"], {}),
            ("Conv", [f"r{at}", f"w{at}b", f"b{at}b"], [f"d{at}"], conv),
            ("Add", [f"d{at}", last], [f"s{at}"], {}),
            ("Relu", [f"s{at}"], [f"y{at}"], {}),
        ]
        last = f"y{at}"
    weights.append(("w", random(n, 10)))
    nodes += [
        ("GlobalAveragePool", [last], ["mean"], {}),
        ("Flatten", ["mean"], ["flat"], {}),
        ("MatMul", ["flat", "w"], ["y"], {}),
    ]
    return model(nodes, [("x", [1, n, 32, 32])], [("y", [1, 10])], weights)


def products(rows, unknown=None):
    """Two products, with an operator that is unknown here between them where one is given."""
    between = unknown or ("Relu", ["a"], ["b"], {})
    nodes = [("MatMul", ["x", "v"], ["a"], {}), between, ("MatMul", ["b", "w"], ["y"], {})]
    weights = [("v", random(64, 256)), ("w", random(256, 32))]
    return model(nodes, [("x", [rows, 64])], [("y", [rows, 32])], weights)


class Provider(unittest.TestCase):
    def check(self, of, feeds, expected_parts, **options):
        """Compares answers with those of ONNX Runtime's provider; the session."""
        with log_of() as lines:
            ours = session(of, log="all", **options)
        self.assertEqual(claimed(lines), expected_parts, lines)
        self.compare(ours, session(of, ours=False), feeds)
        return ours

    def compare(self, ours, theirs, feeds):
        for found, expected in zip(ours.run(None, feeds), theirs.run(None, feeds)):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

    def test_a_network_runs_as_a_whole(self):
        for threads in (1, 2):
            self.check(residual_network(), {"x": random(1, 16, 32, 32)}, [18], threads=threads)

    def test_what_is_not_known_is_left(self):
        # Sorts along the rows, by an operator whose output has a size that depends on the data.
        network = products(8, unknown=("Unique", ["a"], ["u"], {"sorted": 1}))
        network.graph.node[2].input[0] = "b"
        reshape = helper.make_node("Reshape", ["u", "shape"], ["b"])
        network.graph.node.insert(2, reshape)
        network.graph.initializer.append(onnx.numpy_helper.from_array(np.array([8, 256]), "shape"))
        self.check(network, {"x": random(8, 64)}, [1, 1])

    def test_graphs_within_nodes_read_what_is_computed_here(self):
        info = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 32])
        branch = lambda op: helper.make_graph([helper.make_node(op, ["y"], [f"of_{op}"])], op, [], [info(f"of_{op}")])
        network = products(4)
        node = helper.make_node("If", ["c"], ["z"], then_branch=branch("Neg"), else_branch=branch("Exp"))
        network.graph.node.append(node)
        network.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
        network.graph.output[0].name = "z"
        for value in (True, False):
            self.check(network, {"x": random(4, 64), "c": np.array(value)}, [3])

    def test_little_work_is_left(self):
        with log_of() as lines:
            session(model([("Relu", ["x"], ["y"], {})], [("x", [4])], [("y", [4])]), log="all", claim="fast")
        self.assertEqual(claimed(lines), [])

    def test_long_steps_of_recurrences_of_integers_are_left_to_several_threads(self):
        try:
            from onnxruntime.quantization import quantize_dynamic
        except ImportError as why:
            self.skipTest(str(why))

        nodes = [
            ("LSTM", ["x", "w", "r"], ["", "h"], {"hidden_size": 64}),
            ("Reshape", ["h", "flat"], ["a"], {}),
            ("MatMul", ["a", "v"], ["y"], {}),
        ]
        weights = [("w", random(1, 256, 64)), ("r", random(1, 256, 64) / 8), ("v", random(64, 512))]
        weights.append(("flat", np.array([40, 64])))
        network = model(nodes, [("x", [20, 40, 64])], [("y", [40, 512])], weights)
        with folder() as at:
            onnx.save(network, at / "lstm.onnx")
            quantize_dynamic(at / "lstm.onnx", at / "quantized.onnx", op_types_to_quantize=["LSTM"])
            file = str(at / "quantized.onnx")
            whole = [len(onnx.load(file).graph.node)]
            for options, parts in ((dict(threads=2), [2]), (dict(threads=1), whole), (dict(threads=2, claim="all"), whole)):
                with log_of() as lines:
                    session(file, log="all", **{"claim": "fast", **options})
                self.assertEqual(claimed(lines), parts, options)
            self.compare(session(file), session(file, ours=False), {"x": random(20, 40, 64)})

    def test_sizes_may_be_free(self):
        network = products("rows")
        ours = self.check(network, {"x": random(3, 64)}, [3])
        theirs = session(network, ours=False)
        self.check(network, {"x": random(5, 64)}, [3], free={"rows": 5})
        self.check(network, {"x": random(5, 64)}, [], free_sizes="leave")
        # The second size makes code for a range of them, and one beyond it for a longer range.
        with log_of() as lines:
            for rows in [*range(1, 17), 1, 11, 3, 33, 5, 64, 40]:
                self.compare(ours, theirs, {"x": random(rows, 64)})
        made = [line.split(" in ")[0] for line in lines]
        expected = ["[16, 64] and rows=1..16", "[64, 64] and rows=1..64"]
        self.assertEqual(made, [f"3 nodes compiled for {sizes}" for sizes in expected])

    def test_sessions_share_parts(self):
        network, others = products(96), products(96)
        others.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(random(64, 256, seed=1), "v"))
        with log_of() as lines:
            first, second, other = [session(made, log="all") for made in (network, network, others)]
        how = [word for line in lines for word in ("compiled", "shared") if f"nodes {word}" in line]
        self.assertEqual(how, ["compiled", "shared", "compiled"], lines)
        self.compare(first, session(network, ours=False), {"x": random(96, 64)})
        del first
        self.compare(second, session(network, ours=False), {"x": random(96, 64)})
        self.compare(other, session(others, ours=False), {"x": random(96, 64)})

    def test_free_sizes_without_names_are_compiled_one_by_one(self):
        network = products(None)
        ours, theirs = session(network, log="all"), session(network, ours=False)
        # More sizes than are kept, then some of them again.
        with log_of() as lines:
            for rows in [*range(1, 12), 1, 11, 5]:
                self.compare(ours, theirs, {"x": random(rows, 64)})
        made = [line for line in lines if "nodes compiled" in line]
        self.assertEqual(len(made), 12, lines)
        self.assertEqual(len(lines) - len(made), 3, lines)

    def test_sizes_that_come_back_stay_compiled(self):
        network = products(None)
        ours, theirs = session(network, log="all"), session(network, ours=False)
        with log_of() as lines:
            for rows in [*range(1, 13)] * 4:
                self.compare(ours, theirs, {"x": random(rows, 64)})
        made = [line for line in lines if "nodes compiled" in line]
        self.assertEqual(len(made), 16, lines)
        with log_of() as lines:
            for rows in range(1, 13):
                self.compare(ours, theirs, {"x": random(rows, 64)})
        self.assertEqual(lines, [])

    def test_tokens_of_several_texts_are_compiled_once(self):
        nodes = [("MatMul", ["x", "v"], ["a"], {}), ("Transpose", ["a"], ["t"], {"perm": [0, 2, 1]})]
        nodes += [("MatMul", ["a", "t"], ["s"], {}), ("Softmax", ["s"], ["p"], {"axis": -1}), ("MatMul", ["p", "x"], ["y"], {})]
        shape = ["batch", "tokens", 64]
        network = model(nodes, [("x", shape)], [("y", shape)], [("v", random(64, 64) / 8)])
        ours, theirs = session(network, log="all"), session(network, ours=False)
        with log_of() as lines:
            for texts, tokens in ((8, 100), (8, 103), (4, 60), (1, 1), (16, 128), (3, 100), (8, 100), (9, 5), (40, 3)):
                self.compare(ours, theirs, {"x": random(texts, tokens, 64)})
        made = [line.split(" in ")[0] for line in lines]
        sizes = ["[8, 100, 64]", "[256, 128, 64] and tokens=1..128 and batch=1..256"]
        self.assertEqual(made, [f"5 nodes compiled for {each}" for each in sizes])

    def test_sizes_that_code_has_to_know_are_compiled_one_by_one(self):
        # Joins along the dimension, for which there is no code of any size.
        nodes = [("MatMul", ["x", "v"], ["a"], {}), ("Concat", ["a", "a"], ["b"], {"axis": 0}), ("Exp", ["b"], ["y"], {})]
        network = model(nodes, [("x", ["rows", 64])], [("y", ["twice", 32])], [("v", random(64, 32))])
        ours, theirs = session(network, log="all"), session(network, ours=False)
        with log_of() as lines:
            for rows in (20, 30, 31, 20, 40, 90, 91, 92):
                self.compare(ours, theirs, {"x": random(rows, 64)})
        refused = [line for line in lines if "there is no code for" in line]
        self.assertEqual(len(refused), 3, lines)
        self.assertIn("joins tensors along the open dimension", refused[0])

    def test_two_sizes_may_be_free(self):
        # Images of any number and size, as rows of a sequence whose length is free as well.
        nodes = [("MatMul", ["x", "v"], ["a"], {}), ("Softmax", ["a"], ["b"], {"axis": -1}), ("Add", ["b", "z"], ["y"], {})]
        ports = [("x", ["batch", "tokens", 64]), ("z", ["batch", "tokens", 32])]
        network = model(nodes, ports, [("y", ["batch", "tokens", 32])], [("v", random(64, 32))])
        ours, theirs = session(network, threads=2), session(network, ours=False)

        def run(sizes):
            batch, tokens = sizes
            feeds = {"x": random(batch, tokens, 64), "z": random(batch, tokens, 32)}
            self.compare(ours, theirs, feeds)

        sizes = [(1, 5), (1, 7), (1, 16), (2, 5), (2, 9), (3, 9), (1, 70), (4, 70), (0, 5), (1, 0), (5, 9), (1, 300)]
        with concurrent.futures.ThreadPoolExecutor(4) as executor:
            list(executor.map(run, sizes * 2))
        bad = {"x": random(1, 5, 64), "z": random(1, 6, 32)}
        with self.assertRaises(Exception):
            ours.run(None, bad)
        run((1, 6))

    def test_sessions_run_in_many_threads(self):
        network, x = residual_network(1), random(1, 16, 32, 32)
        all_ours = [session(network, threads=threads) for threads in (1, 2, 2)]
        expected = [ours.run(None, {"x": x})[0] for ours in all_ours]
        free, rows = session(products("rows"), threads=2), range(1, 6)
        of_rows = {n: session(products("rows"), ours=False).run(None, {"x": random(n, 64)})[0] for n in rows}

        def work(at):
            for _ in range(20):
                found = all_ours[at % 3].run(None, {"x": x})[0]
                np.testing.assert_array_equal(found, expected[at % 3])
                n = 1 + at % 5
                np.testing.assert_allclose(free.run(None, {"x": random(n, 64)})[0], of_rows[n], rtol=1e-4, atol=1e-4)

        with concurrent.futures.ThreadPoolExecutor(8) as executor:
            list(executor.map(work, range(16)))

    def test_kernels_have_no_threads_of_their_own(self):
        count = lambda: len(os.listdir("/proc/self/task"))
        for threads in (1, 2):
            before = count()
            ours = session(residual_network(1), threads=threads)
            ours.run(None, {"x": random(1, 16, 32, 32)})
            self.assertLessEqual(count() - before, threads - 1)
            del ours

    def test_a_bad_option_is_an_error(self):
        for options, said in [
            ({"no_such": "1"}, "tilewright has no option `no_such`"),
            ({"exact": "maybe"}, "option `exact` of tilewright is `maybe` (give 0 or 1)"),
        ]:
            # Python prints the error and goes on with ONNX Runtime's own provider, or raises it.
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                try:
                    made = session(products(4), names=False, **options)
                    self.assertNotIn(NAME, made.get_providers())
                except Exception as error:
                    printed.write(str(error))
            self.assertIn(said, printed.getvalue())

    def test_damaged_records_are_not_used(self):
        with tempfile.TemporaryDirectory() as folder:
            database = pathlib.Path(folder) / "records.db"
            database.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 20)
            with log_of() as lines:
                ours = session(products(4), database=str(database))
            self.assertEqual(len(lines), 1, lines)
            self.assertIn("records are not used", lines[0])
            self.compare(ours, session(products(4), ours=False), {"x": random(4, 64)})

    def test_a_cache_that_cannot_be_leaves_all_to_onnx_runtime(self):
        with log_of() as lines:
            ours = session(products(4), cache="/dev/null/cache")
        self.assertEqual(len(lines), 1, lines)
        self.assertIn("all is left to ONNX Runtime", lines[0])
        self.compare(ours, session(products(4), ours=False), {"x": random(4, 64)})

    def test_a_cache_that_cannot_be_written_is_one_line(self):
        network = products("rows")
        with folder() as place:
            ours = session(network, cache=str(place / "cache"))
            shutil.rmtree(place / "cache")
            with log_of() as lines:
                for rows in (4, 9, 300):
                    self.compare(ours, session(network, ours=False), {"x": random(rows, 64)})
            self.assertEqual(len(lines), 1, lines)
            self.assertIn(f"compiled kernels could not be kept in {place}/cache: No such file", lines[0])

    def test_what_is_damaged_in_the_cache_is_made_anew(self):
        network, x = residual_network(1), random(1, 16, 32, 32)
        expected = session(network, ours=False).run(None, {"x": x})[0]
        with folder() as cache:
            session(network, cache=str(cache))
            entries = sorted(cache.iterdir())
            self.assertTrue(any(entry.name.startswith("quick-") for entry in entries), entries)
            for damage in (
                lambda entry, bytes_: entry.write_bytes(bytes_[: len(bytes_) // 2]),
                lambda entry, bytes_: entry.write_bytes(bytes_[:-9] + bytes(9)),
                lambda entry, bytes_: entry.write_bytes(b""),
                lambda entry, bytes_: entry.chmod(0o666),
                lambda entry, bytes_: entry.unlink(),
            ):
                for entry in entries:
                    damage(entry, entry.read_bytes())
                with log_of() as lines:
                    ours = session(network, cache=str(cache))
                self.assertLessEqual(len(lines), 1, lines)
                self.assertTrue(all("compiled kernels in" in line for line in lines), lines)
                np.testing.assert_allclose(ours.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)
                # The next session would share the part, and read and write no entries.
                del ours
                for entry in entries:
                    entry.chmod(0o600)

    def test_processes_that_are_killed_leave_the_cache_whole(self):
        with folder() as place:
            path = str(place / "model.onnx")
            onnx.save(residual_network(1), path)
            cache = str(place / "cache")
            code = "import sys, test_provider as t; t.session(sys.argv[1], cache=sys.argv[2])"
            seconds = 0.0
            for at in range(6):
                started = time.time()
                process = subprocess.Popen([sys.executable, "-c", code, path, cache], cwd=os.path.dirname(__file__))
                if at == 0:
                    # The first one ends by itself, and says how long that takes.
                    self.assertEqual(process.wait(), 0)
                    seconds = time.time() - started
                    shutil.rmtree(cache)
                else:
                    time.sleep(seconds * (0.4 + 0.1 * at))
                    process.kill()
                    process.wait()
            with log_of() as lines:
                ours = session(path, cache=cache)
            self.assertEqual(lines, [])
            self.compare(ours, session(path, ours=False), {"x": random(1, 16, 32, 32)})

    def compiled(self, network, place, **entries):
        """Path of a model with compiled parts that is made of a model."""
        path = place / "model.onnx"
        onnx.save(network, path)
        entries = {"ep.context_enable": "1", **{f"ep.context_{name}": value for name, value in entries.items()}}
        session(str(path), entries=entries, cache=str(place / "cache"))
        return place / "model_ctx.onnx"

    def test_compiled_parts_are_written_and_read(self):
        x = random(1, 16, 32, 32)
        expected = session(residual_network(1), ours=False).run(None, {"x": x})[0]
        for mode in ("0", "1"):
            with folder() as place:
                path = self.compiled(residual_network(1), place, embed_mode=mode)
                (node,) = onnx.load(path).graph.node
                attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
                self.assertEqual((node.op_type, attributes["source"]), ("EPContext", NAME.encode()))
                content = attributes["ep_cache_context"]
                self.assertEqual(content.startswith(b"tilewright context 1"), mode == "1")
                beside = [file for file in place.iterdir() if file.suffix == ".tilewright"]
                self.assertEqual(len(beside), int(mode == "0"))
                # With its code, and with code that is made here.
                for options in ({"context_code": "1", "cache": str(place / "none")}, {"cache": str(place / "other")}):
                    with log_of() as lines:
                        ours = session(str(path), log="all", **options)
                    self.assertEqual(claimed(lines), [1], lines)
                    np.testing.assert_allclose(ours.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)
                made = {entry.name.split("-")[0] for entry in (place / "none").iterdir()}
                self.assertNotIn("quick", made, "its code came with the model")

    def test_compiled_parts_may_be_several_and_of_free_sizes(self):
        network = products("rows", unknown=("Unique", ["a"], ["u"], {"sorted": 1}))
        network.graph.node[2].input[0] = "b"
        network.graph.node.insert(2, helper.make_node("Reshape", ["u", "shape"], ["b"]))
        network.graph.initializer.append(onnx.numpy_helper.from_array(np.array([8, 256]), "shape"))
        free = products("rows")
        for network, sizes, parts in ((network, [8], [1, 1]), (free, [1, 8, 5, 3], [1])):
            with folder() as place:
                path = self.compiled(network, place, embed_mode="1")
                with log_of() as lines:
                    ours = session(str(path), log="all")
                self.assertEqual(claimed(lines), parts, lines)
                for rows in sizes:
                    self.compare(ours, session(network, ours=False), {"x": random(rows, 64)})

    def test_a_context_that_cannot_be_used_is_one_clear_error_or_compiled_anew(self):
        with folder() as place:
            path = self.compiled(residual_network(1), place, embed_mode="1")
            whole = onnx.load(path)
            (attribute,) = [a for a in whole.graph.node[0].attribute if a.name == "ep_cache_context"]
            content, x = attribute.s, {"x": random(1, 16, 32, 32)}
            again = "make it again from the original model"
            for damaged, said in (
                (content[:100], f"the context is damaged or cut off ({again})"),
                (content[:60] + b"?" + content[61:], f"the context is damaged or cut off ({again})"),
                (content.replace(b"context 1", b"context 2"), f"of another version of tilewright ({again})"),
                (b"something else", f"none of tilewright's ({again})"),
            ):
                attribute.s = damaged
                with self.assertRaises(Exception) as refused:
                    session(whole)
                self.assertIn(said, str(refused.exception))
            # Code that is cut off, or for another machine.
            theirs = session(residual_network(1), ours=False)
            for damaged in (content[:-20], content[:-1] + b"?"):
                attribute.s = damaged
                with log_of() as lines:
                    ours = session(whole, context_code="1")
                self.assertEqual(len(lines), 1, lines)
                self.assertIn("a context's code is damaged or cut off; its part is compiled anew", lines[0])
                self.compare(ours, theirs, x)
            attribute.s = content
            self.compare(session(whole, context_code="1", cpu="znver1"), theirs, x)
            # A context beside the model that is gone, or would be elsewhere.
            (mode,) = [a for a in whole.graph.node[0].attribute if a.name == "embed_mode"]
            mode.i = 0
            for name, said in ((b"gone.tilewright", "gone.tilewright"), (b"../x", "is no file beside the model")):
                attribute.s = name
                onnx.save(whole, path)
                with self.assertRaises(Exception) as refused:
                    session(str(path))
                self.assertIn(said, str(refused.exception))

    def untuned(self, lines):
        """Number of kernels without records, as lines of the log say."""
        (line,) = [line for line in lines if "kernels untuned" in line]
        return int(line.split(" kernels untuned")[0].split()[-1])

    def test_kernels_are_tuned_when_a_session_starts(self):
        network = products(96)
        with folder() as place:
            options = {"database": str(place / "records.db"), "cache": str(place / "cache"), "tune_seconds": "3"}
            # On a machine that is busy, one start may not get to all kernels.
            starts = []
            while not starts or any("kernels tuned in" in line for line in starts[-1]):
                self.assertLess(len(starts), 6, starts)
                started = time.time()
                with log_of() as lines:
                    ours = session(network, log="all", **options)
                self.assertLess(time.time() - started, 30)
                starts.append(lines)
                self.compare(ours, session(network, ours=False), {"x": random(96, 64)})
            self.assertGreater(len(starts), 1, starts)
            self.assertEqual(self.untuned(starts[-1]), 0)
            if not COMMAND.is_file():
                self.skipTest("the command is not installed, which writes stores")
            store = str(place / "store")
            push = [COMMAND, "store", "push", store, "--db", options["database"]]
            subprocess.run(push, capture_output=True)
            elsewhere = {"database": str(place / "none.db"), "cache": str(place / "none")}
            # The store has winners of races, of which there may be none on a machine that is busy.
            entries = list(pathlib.Path(store).rglob("*.jsonl"))
            untuned = []
            for with_store in ({"store": store}, {}):
                with log_of() as lines:
                    ours = session(network, log="all", **elsewhere, **with_store)
                untuned.append(self.untuned(lines))
                self.compare(ours, session(network, ours=False), {"x": random(96, 64)})
            self.assertEqual(untuned[1] - untuned[0], min(len(entries), 2))
            # An entry that is no longer whole is one line of the log.
            for entry in entries:
                entry.write_bytes(entry.read_bytes()[:-40])
            with log_of() as lines:
                ours = session(network, store=store, **elsewhere)
            self.assertTrue(all("cut off" in line for line in lines), lines)
            self.assertEqual(bool(lines), bool(entries))
            self.compare(ours, session(network, ours=False), {"x": random(96, 64)})

    def test_inputs_may_begin_anywhere(self):
        memory = np.zeros(4 * 64 * 4 + 1, np.uint8)
        x = memory[1:].view(np.float32).reshape(4, 64)
        x[:] = random(4, 64)
        self.check(products(4), {"x": x}, [3])

    def test_wrong_inputs_are_refused(self):
        for network in (products(4), products("rows")):
            ours = session(network)
            for x in (random(4, 65), random(4, 64).astype(np.float64), random(4)):
                with self.assertRaises(Exception):
                    ours.run(None, {"x": x})
            self.compare(ours, session(network, ours=False), {"x": random(4, 64)})

    def test_a_run_that_is_cancelled_leaves_the_session_whole(self):
        ours = session(residual_network(1))
        options = onnxruntime.RunOptions()
        options.terminate = True
        with self.assertRaises(Exception):
            ours.run(None, {"x": random(1, 16, 32, 32)}, options)
        self.compare(ours, session(residual_network(1), ours=False), {"x": random(1, 16, 32, 32)})

    def test_nothing_leaks(self):
        network, x = residual_network(1), random(1, 16, 32, 32)
        pages = lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        ours = session(network, threads=2)

        def runs(n):
            with concurrent.futures.ThreadPoolExecutor(4) as executor:
                list(executor.map(lambda _: ours.run(None, {"x": x}), range(n)))

        def sessions(n):
            for _ in range(n):
                session(network, threads=2).run(None, {"x": x})

        runs(200)
        sessions(5)
        before = pages()
        runs(2000)
        sessions(10)
        # A run that leaked a tensor, or a session its code, would leave tens of MiB.
        self.assertLess((pages() - before) * os.sysconf("SC_PAGE_SIZE"), 8 << 20)


if __name__ == "__main__":
    unittest.main()
