"""What XGBoost takes for the trees of `cost_of_thinking`: the same function of random columns, the same options, one thread.

`pip install xgboost scipy`, then `python3 crates/tune/examples/xgboost_beside.py`.
"""

import time

import numpy as np
import xgboost
from scipy.stats import kendalltau

OPTIONS = dict(
    max_depth=6, eta=0.1, min_child_weight=1, reg_lambda=1, gamma=1e-4, tree_method="hist", max_bin=64, nthread=1
)
OBJECTIVES = {
    "squared error": dict(objective="reg:squarederror"),
    "pairs": dict(objective="rank:pairwise", lambdarank_pair_method="mean", lambdarank_num_pair_per_sample=8),
}


def target(rows):
    return rows[:, 0] * rows[:, 1] + np.sin(4 * rows[:, 2]) + 0.1 * rows[:, 3]


def least(work):
    """Processor seconds of the fastest of five."""
    times = []
    for _ in range(5):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


rng = np.random.default_rng(1)
for n_columns in (200, 20):
    known, asked = (rng.random((n, n_columns), dtype=np.float32) for n in (1000, 100_000))
    for name, objective in OBJECTIVES.items():
        labels = target(known)
        if name == "pairs":
            # Relevance is a whole number of at most 31 by default: the order is given as it is.
            objective = objective | dict(ndcg_exp_gain=False)
            labels = labels.argsort().argsort()

        def fit():
            data = xgboost.DMatrix(known, labels, group=[len(known)] if name == "pairs" else None)
            return xgboost.train(OPTIONS | objective, data, num_boost_round=100)

        model = fit()
        predict = least(lambda: model.inplace_predict(asked))
        tau = kendalltau(model.inplace_predict(asked[:2000]), target(asked[:2000])).statistic
        print(
            f"XGBoost {xgboost.__version__}, 1000 × {n_columns}, {name}: {1e3 * least(fit):.1f} ms a fit, "
            f"{len(asked) / predict:.0f} rows/s predicted, Kendall's τ {tau:.3f} on others"
        )
