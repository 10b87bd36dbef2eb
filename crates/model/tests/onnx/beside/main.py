"""Prints what `main.c` prints."""

import decoder
import numpy as np

context = decoder.Context()
for length in [5, 40, 1]:
    i = np.arange(8 * length)
    keys = (((7 * i + length) % 11) / 8 - 0.5).astype(np.float32).reshape(1, 2, length, 4)
    states = (((5 * i + length) % 13) / 8 - 0.5).astype(np.float32).reshape(1, length, 8)
    seen = (i[:length] % 4 != 3).astype(np.float32)[None]
    context.rewind(0)
    at = 0
    for n in [3, 1, 1]:
        ids = (3 * np.arange(at, at + n) + length) % 37
        [y] = context.run(ids[None], keys, states, seen)
        assert y.shape == (1, n, 8)
        print(*np.rint(1000 * y.reshape(-1)).astype(int), sep="\n")
        at += n
try:
    context.run(ids[None], keys, np.zeros((1, 2, 8), np.float32), seen)
    raise SystemExit("inputs of two lengths ran")
except decoder.Error:
    pass
