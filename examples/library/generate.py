"""Greedy decoding: `generate N ID...` prints the N tokens that follow those that are given."""

import sys

import decoder
import numpy as np

n_new, *prompt = map(int, sys.argv[1:])
context = decoder.Context()
token = 0
for at in range(len(prompt) + n_new - 1):
    if at < len(prompt):
        token = prompt[at]
    [scores] = context.run(np.array([[token]]))
    token = int(scores.argmax())
    if at + 1 >= len(prompt):
        print(token)
