"""Times models in ONNX Runtime with its own provider and with ours, in turns: python3 compare.py [-t N] MODEL…

Prints the time of a session's start, the median time of a run, and the median of the ratios of rounds. Sizes
that a model leaves open are 1; inputs are random.
"""

import argparse
import os
import statistics
import time

import numpy as np
import onnxruntime

import tilewright_ort

NAME = tilewright_ort.get_ep_name()
ROUNDS, RUNS = 9, 5


def seconds(call):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def session(path, threads, ours):
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    # Threads that spin after a run would take cores from the other session.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    if ours:
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == NAME]
        settings.add_provider_for_devices(devices, {"threads": str(threads)})
        return onnxruntime.InferenceSession(path, settings)
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def array(port):
    shape = [size if isinstance(size, int) else 1 for size in port.shape]
    kind = port.type.removeprefix("tensor(").removesuffix(")")
    dtype = np.dtype({"float": "float32", "double": "float64"}.get(kind, kind))
    random = np.random.default_rng(0)
    return random.standard_normal(shape).astype(dtype) if dtype.kind == "f" else random.integers(0, 2, shape).astype(dtype)


def compare(path, threads):
    sessions, starts = [], []
    for ours in (False, True):
        start, made = seconds(lambda: session(path, threads, ours))
        sessions.append(made)
        starts.append(start)
    feeds = {port.name: array(port) for port in sessions[0].get_inputs()}
    for made in sessions:
        made.run(None, feeds)
    rounds = [[statistics.median(seconds(lambda: made.run(None, feeds))[0] for _ in range(RUNS)) for made in sessions]
              for _ in range(ROUNDS)]
    theirs, ours = (1e3 * statistics.median(side) for side in zip(*rounds))
    ratio = statistics.median(one / other for one, other in rounds)
    name = os.path.basename(path)
    print(f"{name:28} start {starts[0]:6.2f} s {starts[1]:6.2f} s   run {theirs:8.2f} ms {ours:8.2f} ms   {ratio:.2f}")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("-t", "--threads", type=int, default=1)
    arguments.add_argument("models", nargs="+")
    given = arguments.parse_args()
    onnxruntime.set_default_logger_severity(3)
    onnxruntime.register_execution_provider_library(NAME, tilewright_ort.get_library_path())
    for model in given.models:
        compare(model, given.threads)
