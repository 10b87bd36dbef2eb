"""Greedy decoding: `generate N ID...` prints the N tokens that follow those that are given."""

import sys

import decoder
import numpy as np

n_new, *prompt = map(int, sys.argv[1:])
context = decoder.Context()
most = decoder.build["dims"][1]["most"]
at, token = 0, 0
# As much of the prompt at once as one run takes, then one token after the other.
while at < len(prompt) + n_new - 1:
    ids = prompt[at : at + most] or [token]
    [scores] = context.run(np.array([ids]))
    at += len(ids)
    token = int(scores[0, -1].argmax())
    if at >= len(prompt):
        print(token)
