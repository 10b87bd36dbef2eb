"""Runs a model that is given as text of PyTorch's operators. One request a line on standard input, an answer
to each on standard output; tensors lie in files that are inherited by number."""

import json
import os
import sys
import time

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def answer(**what):
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def first_line(error):
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


try:
    import torch
    import torch.nn.functional as F
except ModuleNotFoundError as error:
    answer(missing=first_line(error))
    sys.exit()
except Exception as error:
    answer(error=first_line(error))
    sys.exit()

TYPES = {1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64}
TYPES |= {9: torch.bool, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
NUMBERS = {dtype: number for number, dtype in TYPES.items()}


def read(file, place):
    if place["dtype"] not in TYPES:
        raise TypeError(f"PyTorch computes nothing of elements that ONNX numbers {place['dtype']}")
    dtype, shape = TYPES[place["dtype"]], place["shape"]
    x = torch.empty(shape, dtype=dtype)
    if x.numel():
        raw = bytearray(os.pread(file, x.numel() * x.element_size(), place["at"]))
        while len(raw) < x.numel() * x.element_size():
            raw += os.pread(file, x.numel() * x.element_size() - len(raw), place["at"] + len(raw))
        x = torch.frombuffer(raw, dtype=dtype).reshape(shape)
    return x


def put(file, x, at):
    x = x.detach().cpu().contiguous()
    raw = memoryview(x.reshape(-1).view(torch.uint8).numpy()) if x.numel() else memoryview(b"")
    done = 0
    while done < len(raw):
        done += os.pwrite(file, raw[done:], at + done)
    place = {"name": "", "dtype": NUMBERS[x.dtype], "shape": list(x.shape), "at": at}
    return place, -(-(at + len(raw)) // 64) * 64


def max_pool(x, kernel, strides, begins, ends, dilations):
    pool = [None, F.max_pool1d, F.max_pool2d, F.max_pool3d][len(kernel)]
    if begins == ends and all(2 * b <= k for b, k in zip(begins, kernel)):
        return pool(x, kernel, strides, begins, dilations)
    return pool(F.pad(x, around(begins, ends), value=float("-inf")), kernel, strides, 0, dilations)


def mean_pool(x, kernel, strides, begins, ends, counts_borders):
    pool = [None, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d][len(kernel)]
    if begins == ends and all(2 * b <= k for b, k in zip(begins, kernel)):
        return pool(x, kernel, strides, begins, False, counts_borders)
    padded = pool(F.pad(x, around(begins, ends)), kernel, strides)
    if counts_borders:
        return padded
    ones = torch.ones([1, 1, *x.shape[2:]], dtype=x.dtype, device=x.device)
    return padded / pool(F.pad(ones, around(begins, ends)), kernel, strides)


def around(begins, ends):
    """Borders as PyTorch's pad takes them: of the last dimension first."""
    return [n for pair in reversed(list(zip(begins, ends))) for n in pair]


def recurrent(kind, order, x, w, r, b, states, directions, batch_first):
    """One layer; ONNX's gates in PyTorch's order. Outputs [steps, directions, batch, hidden], last states."""
    if batch_first:
        x = x.transpose(0, 1)
    if directions == [True]:
        x = x.flip(0)
    key, hidden = id(w), r.shape[2]
    if key not in prepared:
        parts = lambda a: torch.cat([a.reshape(-1, hidden, *a.shape[1:])[g] for g in order])
        gates = r.shape[1]
        both = [b[d] if b is not None else torch.zeros(2 * gates, device=w.device) for d in range(len(directions))]
        lists = [[parts(w[d]), parts(r[d]), parts(c[:gates]), parts(c[gates:])] for d, c in enumerate(both)]
        prepared[key] = [a for each in lists for a in each]
    n = len(directions)
    zeros = lambda: torch.zeros(n, x.shape[1], hidden, dtype=x.dtype, device=x.device)
    states = [s.transpose(0, 1).contiguous() if s is not None and batch_first else s for s in states]
    states = [zeros() if s is None else s for s in states]
    call = {"lstm": torch.lstm, "gru": torch.gru, "rnn": torch.rnn_tanh}[kind]
    given = states if kind == "lstm" else states[0]
    y, *last = call(x, given, prepared[key], True, 1, 0.0, False, n == 2, False)
    y = y.reshape(y.shape[0], y.shape[1], n, hidden)
    if directions == [True]:
        y = y.flip(0)
    if batch_first:
        return (y.permute(1, 0, 2, 3), *(s.transpose(0, 1) for s in last))
    return (y.permute(0, 2, 1, 3), *last)


prepared = {}


class Model(torch.nn.Module):
    """The text's function with its constants."""

    def __init__(self, code, constants):
        super().__init__()
        names = {}
        exec(code, globals(), names)
        self.function = names["model"]
        for at, constant in enumerate(constants):
            self.register_buffer(f"c{at}", constant)

    def forward(self, *inputs):
        return self.function(self, *inputs)


class Runner:
    def __init__(self, wanted):
        self.file, self.device = wanted["data_fd"], torch.device(wanted["device"])
        self.on_gpu = self.device.type != "cpu"
        torch.set_num_threads(wanted["threads"])
        # All digits of single precision, as elsewhere, and the fastest of cuDNN's algorithms.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.benchmark = True
        constants = [read(wanted["constants_fd"], place).to(self.device) for place in wanted["constants"]]
        self.model = Model(wanted["code"], constants).eval()
        if wanted["compiled"]:
            from torch._inductor import config

            config.freezing = True
            self.model = torch.compile(self.model, mode="reduce-overhead" if self.on_gpu else None)
        self.inputs, self.outputs = [], []

    def give(self, places):
        by_name = {place["name"]: place for place in places}
        self.inputs = [read(self.file, by_name[name]) for name in wanted["inputs"]]

    def run(self):
        outputs = self.model(*(x.to(self.device) for x in self.inputs))
        self.outputs = [y.cpu() for y in outputs] if self.on_gpu else outputs

    def timed(self, n_runs):
        start = time.perf_counter_ns()
        for _ in range(n_runs):
            self.run()
        return (time.perf_counter_ns() - start) / n_runs

    def round(self, min_time_ns, min_samples, sample_ns):
        n_runs = max(1, -int(-sample_ns // max(1.0, self.timed(1))))
        start, samples = time.perf_counter_ns(), []
        while len(samples) < max(1, min_samples) or time.perf_counter_ns() - start < min_time_ns:
            samples.append(self.timed(n_runs))
        return samples

    def results(self, at):
        places = []
        for y in self.outputs:
            place, at = put(self.file, y, at)
            places.append(place)
        return places


wanted, runner = json.loads(sys.stdin.readline()), None
with torch.inference_mode():
    try:
        runner = Runner(wanted)
        answer(version=torch.__version__)
    except Exception as error:
        answer(error=first_line(error))
        sys.exit()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "give" in request:
                runner.give(request["give"])
                answer(done=True)
            elif "run" in request:
                runner.run()
                answer(done=True)
            elif "round" in request:
                answer(times_ns=runner.round(*request["round"]))
            else:
                answer(outputs=runner.results(request["outputs"]))
        except Exception as error:
            answer(error=first_line(error))
