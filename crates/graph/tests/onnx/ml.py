#!/usr/bin/env python3
"""Writes ml.cases.gz: models of `ai.onnx.ml`, with what ONNX Runtime computes of them. Texts are their places among the
labels. Models come from converters, with seeded data of our own, from operators by themselves, and from the official tests.

usage: pip install onnx==1.23.2 onnxruntime==1.31.1 numpy scikit-learn skl2onnx onnxmltools lightgbm xgboost &&
       python3 ml.py ml.cases.gz
"""
import sys
import warnings

warnings.simplefilter("ignore")

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from generate import write

RANDOM = np.random.default_rng(7)
ROWS = RANDOM.standard_normal((120, 6)).astype(np.float32)
CLASSES = (ROWS[:, 0] + 0.5 * ROWS[:, 1] * ROWS[:, 2] > 0.4).astype(int) + (ROWS[:, 3] > 0.2)
TARGETS = ROWS[:, 0] * 2 + np.sin(ROWS[:, 1]) - ROWS[:, 4] * ROWS[:, 5]
TWO, TEXTS = (CLASSES > 0).astype(int), np.array(["ant", "bee", "cat"])[CLASSES]
SPECIAL = np.array([[np.nan, 1, np.nan, 0, -1, np.nan], [np.inf, -np.inf, 0, np.nan, 3, 1], [-0.0, 0.0, 1e30, -1e30, 1e-40, 2]], np.float32)


def run(model, inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: x for i, x in zip(session.get_inputs(), inputs)})


def labels_of(model):
    """The texts of a model's labels, in their order."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name in ("classlabels_strings", "values_strings") and attribute.strings:
                default = [a.s for a in node.attribute if a.name == "default_string"] or [b"_Unused"]
                return [s.decode() for s in attribute.strings] + [default[0].decode()] * (node.op_type == "LabelEncoder")
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.STRING:
            return [s.decode() for s in tensor.string_data]
    return []


def plain(model, output):
    if isinstance(output, list):
        return np.array([[x for _, x in sorted(row.items())] for row in output], np.float32)
    if output.dtype.kind in "OU":
        texts = labels_of(model)
        return np.array([texts.index(x) for x in output.reshape(-1)], np.int64).reshape(output.shape)
    return output


def case(name, model, *inputs):
    """A case, or none where ONNX Runtime does not take the model."""
    del model.metadata_props[:]
    try:
        outputs = [plain(model, y) for y in run(model, inputs)]
    except Exception as why:
        print(name, str(why)[:150], file=sys.stderr)
        return None
    return name, model, [[list(map(np.ascontiguousarray, inputs)), outputs]]


def sklearn_cases():
    from skl2onnx import to_onnx
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA
    from sklearn.ensemble import (AdaBoostClassifier, BaggingClassifier, ExtraTreesClassifier, GradientBoostingClassifier,
                                  GradientBoostingRegressor, RandomForestClassifier, RandomForestRegressor, StackingClassifier)
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeClassifier
    from sklearn.naive_bayes import GaussianNB
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Binarizer, KBinsDiscretizer, MaxAbsScaler, Normalizer, StandardScaler
    from sklearn.svm import SVC, SVR, LinearSVC, OneClassSVM
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    many = [ROWS[:20] + np.float32(0.1)]
    both = np.stack([TARGETS, -TARGETS * ROWS[:, 2]], 1)
    models = dict(
        tree=(DecisionTreeClassifier(max_depth=4, random_state=0), CLASSES),
        deep_tree=(DecisionTreeClassifier(random_state=0), TEXTS),
        tree_regressor=(DecisionTreeRegressor(max_depth=5, random_state=0), both),
        forest=(RandomForestClassifier(7, max_depth=4, random_state=0), TEXTS),
        forest_of_two=(RandomForestClassifier(7, max_depth=4, random_state=0), TWO),
        forest_regressor=(RandomForestRegressor(5, max_depth=5, random_state=0), TARGETS),
        extra_trees=(ExtraTreesClassifier(4, max_depth=5, random_state=0), CLASSES),
        boosting=(GradientBoostingClassifier(n_estimators=5, random_state=0), CLASSES),
        boosting_of_two=(GradientBoostingClassifier(n_estimators=6, random_state=0), TWO),
        boosting_regressor=(GradientBoostingRegressor(n_estimators=8, random_state=0), TARGETS),
        ada_boost=(AdaBoostClassifier(n_estimators=3, random_state=0), CLASSES),
        bagging=(BaggingClassifier(DecisionTreeClassifier(max_depth=3), n_estimators=2, random_state=0), CLASSES),
        logistic=(LogisticRegression(), TEXTS), logistic_of_two=(LogisticRegression(), TWO), linear=(LinearRegression(), both),
        ridge=(RidgeClassifier(), CLASSES), svc=(SVC(), CLASSES), svc_of_two=(SVC(), TWO), svc_poly=(SVC(kernel="poly"), CLASSES),
        svc_sigmoid=(SVC(kernel="sigmoid"), TEXTS), svc_shares=(SVC(probability=True, random_state=0), CLASSES),
        svc_shares_of_two=(SVC(probability=True, random_state=0), TWO), linear_svc=(LinearSVC(), CLASSES),
        svr=(SVR(), TARGETS), svr_linear=(SVR(kernel="linear"), TARGETS), one_class=(OneClassSVM(), None),
        standard=(StandardScaler(), None), max_abs=(MaxAbsScaler(), None), l1=(Normalizer("l1"), None), l2=(Normalizer("l2"), None),
        largest=(Normalizer("max"), None), binary=(Binarizer(threshold=0.2), None), bins=(KBinsDiscretizer(4, encode="ordinal"), None),
        perceptron=(MLPClassifier((8,), max_iter=20, random_state=0), TEXTS), bayes=(GaussianNB(), CLASSES),
        k_means=(KMeans(3, random_state=0), None), components=(PCA(3), None),
        pipeline=(make_pipeline(SimpleImputer(), StandardScaler(), LogisticRegression()), TEXTS),
        stacking=(StackingClassifier([("a", LogisticRegression()), ("b", DecisionTreeClassifier(max_depth=3, random_state=0))], cv=2), TEXTS),
    )
    for name, (model, wanted) in models.items():
        model.fit(ROWS, wanted) if wanted is not None else model.fit(ROWS)
        yield case(f"sklearn/{name}", to_onnx(model, ROWS[:1]), *many)
        if name in ("pipeline", "forest_of_two"):
            array = to_onnx(model, ROWS[:1], options={id(model): {"zipmap": False}})
            yield case(f"sklearn/{name}_with_missing", array, np.concatenate([ROWS[:3], SPECIAL[:1] if name == "pipeline" else ROWS[:1]]))


def boosting_cases():
    import lightgbm
    import xgboost
    from onnxmltools import convert_lightgbm, convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType

    kinds = [("types", FloatTensorType([None, 6]))]
    with_missing = ROWS.copy()
    with_missing[RANDOM.random(ROWS.shape) < 0.2] = np.nan
    given = np.concatenate([with_missing[:16], SPECIAL])
    for name, wanted in (("three", CLASSES), ("two", TWO), ("regressor", TARGETS)):
        of = (lightgbm.LGBMRegressor, xgboost.XGBRegressor) if name == "regressor" else (lightgbm.LGBMClassifier, xgboost.XGBClassifier)
        light = of[0](n_estimators=4, num_leaves=7, min_child_samples=5, verbose=-1).fit(with_missing, wanted)
        extreme = of[1](n_estimators=4, max_depth=3).fit(with_missing, wanted)
        for library, model, convert in (("lightgbm", light, convert_lightgbm), ("xgboost", extreme, convert_xgboost)):
            kind = [("input", FloatTensorType([None, 6]))]
            try:
                converted = convert(model, initial_types=kind, target_opset=15)
            except Exception as why:
                print(library, name, why, file=sys.stderr)
                continue
            yield case(f"{library}/{name}", converted, given)


def single(op, inputs, outputs, version=1, kinds=None, **attributes):
    kinds = kinds or [TensorProto.FLOAT] * len(inputs)
    node = helper.make_node(op, inputs, outputs, domain="ai.onnx.ml", **attributes)
    given = [helper.make_tensor_value_info(x, kind, None) for x, kind in zip(inputs, kinds)]
    text = attributes.get("classlabels_strings") or attributes.get("values_strings")
    of = lambda y: TensorProto.STRING if text and y == "l" else TensorProto.INT64 if y == "l" else TensorProto.DOUBLE if y == "d" else TensorProto.FLOAT
    graph = helper.make_graph([node], "g", given, [helper.make_tensor_value_info(y, of(y), None) for y in outputs])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def trees(n_trees, depth, ids, what, modes, positive=False, tensors=False):
    """Random trees over six features, whose leaves have a weight of each of some targets."""
    nodes, weights = {k: [] for k in "treeids nodeids featureids values modes truenodeids falsenodeids missing_value_tracks_true".split()}, []
    for tree in range(n_trees):
        for at in range(2 ** (depth + 1) - 1):
            is_leaf = at >= 2**depth - 1
            for key, value in dict(treeids=tree, nodeids=at, featureids=int(RANDOM.integers(6)), values=float(np.float32(RANDOM.normal())),
                                   modes="LEAF" if is_leaf else modes[int(RANDOM.integers(len(modes)))], truenodeids=0 if is_leaf else 2 * at + 1,
                                   falsenodeids=0 if is_leaf else 2 * at + 2, missing_value_tracks_true=int(RANDOM.integers(2))).items():
                nodes[key].append(value)
            if is_leaf:
                own = ids if what == "class" or len(ids) == 1 else [ids[tree % len(ids)]]
                weights += [(tree, at, i, abs(x) if positive else x) for i in own for x in [float(np.float32(RANDOM.normal()))]]
    lists = {f"nodes_{k}": v for k, v in nodes.items()}
    lists |= {f"{what}_{k}": [w[at] for w in weights] for at, k in enumerate(("treeids", "nodeids", "ids", "weights"))}
    if tensors:
        for key in ("nodes_values", f"{what}_weights"):
            lists[f"{key}_as_tensor"] = helper.make_tensor(key, TensorProto.DOUBLE, [len(lists[key])], lists.pop(key))
    return lists


def operator_cases():
    rows = np.concatenate([ROWS[:7], SPECIAL])
    every = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]
    for mode in every:
        lists = trees(3, 3, [0], "target", [mode])
        lists["nodes_values"] = [float(np.float32(x)) for x in RANDOM.choice([0.0, 1.0, -1.0, 0.5], len(lists["nodes_values"]))]
        few = RANDOM.choice(np.array([0, 1, -1, 0.5, np.nan], np.float32), (30, 6))
        yield case(f"trees/{mode}", single("TreeEnsembleRegressor", ["x"], ["y"], n_targets=1, **lists), few)
    for aggregate in ("SUM", "AVERAGE", "MIN", "MAX"):
        for n in (1, 3):
            lists = trees(4, 3, list(range(n)), "target", every[:4])
            base = [0.5, -1.5, 2.0][:n]
            model = single("TreeEnsembleRegressor", ["x"], ["y"], n_targets=n, aggregate_function=aggregate, base_values=base, **lists)
            yield case(f"trees/{aggregate}_{n}", model, rows)
    yield case("trees/double", single("TreeEnsembleRegressor", ["x"], ["y"], 3, [TensorProto.DOUBLE], n_targets=1,
                                      **trees(3, 3, [0], "target", every[:1], tensors=True)), rows.astype(np.float64))
    yield case("trees/int64", single("TreeEnsembleClassifier", ["x"], ["l", "p"], 1, [TensorProto.INT64], classlabels_int64s=[5, 3, 9],
                                     **trees(3, 3, [0, 1, 2], "class", every[:1])), RANDOM.integers(-2, 3, (9, 6)))
    for post in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"):
        share = post == "PROBIT"
        lists = trees(2, 2, [0, 1, 2], "class", every[:1], positive=share)
        if share:
            lists["class_weights"] = [x / 10 for x in lists["class_weights"]]
        yield case(f"trees/three_{post}", single("TreeEnsembleClassifier", ["x"], ["l", "p"], classlabels_strings=["ant", "bee", "cat"],
                                                 base_values=[0.1, 0.2, 0.05], post_transform=post, **lists), rows)
        for ids, base, positive in (([0], [], True), ([0], [0.25], False), ([0], [0.1, 0.2], True), ([1], [], True), ([1], [], False), ([0, 1], [], False), ([0, 1], [0.3], True)):
            if post == "PROBIT":
                continue
            lists = trees(3, 2, ids, "class", every[:1], positive)
            lists |= {"base_values": base} if base else {}
            name = f"trees/two_{post}_{''.join(map(str, ids))}_{len(base)}_{int(positive)}"
            yield case(name, single("TreeEnsembleClassifier", ["x"], ["l", "p"], classlabels_int64s=[0, 1], post_transform=post, **lists), rows)
        kept = RANDOM.standard_normal((4, 6))
        for n in (1, 2, 3):
            scale = 0.02 if share else 1.0
            attributes = dict(coefficients=[float(x) * scale for x in kept[:n].reshape(-1)], intercepts=[0.3, 0.4, 0.5][:n], post_transform=post)
            yield case(f"linear/regressor_{post}_{n}", single("LinearRegressor", ["x"], ["y"], targets=n, **attributes), ROWS[:6])
            if n > 1 or not share:
                yield case(f"linear/classifier_{post}_{n}", single("LinearClassifier", ["x"], ["l", "p"], classlabels_ints=[4, 2, 7][: max(n, 2)], **attributes), ROWS[:6])
    sparse = trees(3, 2, [0], "class", every[:1])
    sparse["class_ids"] = [int(x) for x in RANDOM.integers(0, 3, len(sparse["class_ids"]))]
    sparse["class_weights"] = [-abs(x) for x in sparse["class_weights"]]
    yield case("trees/sparse", single("TreeEnsembleClassifier", ["x"], ["l", "p"], classlabels_int64s=[4, 2, 7], **sparse), rows)
    for n in (2, 3):
        attributes = dict(kernel_type="LINEAR", kernel_params=[0.0, 0.0, 0.0], rho=[0.25], classlabels_ints=list(range(n)))
        yield case(f"svm/linear_{n}", single("SVMClassifier", ["x"], ["l", "p"], coefficients=[float(x) for x in RANDOM.standard_normal(6 * n)], **attributes), ROWS[:9])
    yield case("svm/regressor_linear", single("SVMRegressor", ["x"], ["y"], coefficients=[0.5, -1.0, 2.0, 0.0, 1.0, 1.0], kernel_type="LINEAR", kernel_params=[0.0, 0.0, 0.0],
                                              n_supports=0, rho=[0.125], one_class=1), ROWS[:9])
    whole = RANDOM.integers(-1, 5, (4, 3))
    ints, floats = [TensorProto.INT64], whole.astype(np.float32)
    floats[0, 0] = np.nan
    for name, model, x in (
        ("one_hot", single("OneHotEncoder", ["x"], ["y"], kinds=ints, cats_int64s=[0, 3, 2], zeros=1), whole),
        ("to_floats", single("LabelEncoder", ["x"], ["y"], 2, ints, keys_int64s=[0, 3, 2], values_floats=[0.5, -1.0, 4.0], default_float=9.0), whole),
        ("to_ints", single("LabelEncoder", ["x"], ["l"], 2, keys_floats=[0.0, 3.0, float("nan")], values_int64s=[7, 8, 9]), floats),
        ("to_texts", single("LabelEncoder", ["x"], ["l"], 2, ints, keys_int64s=[0, 3, 2], values_strings=["ant", "bee", "cat"], default_string="none"), whole),
        ("imputer", single("Imputer", ["x"], ["y"], imputed_value_floats=[1.0, 2.0, 3.0], replaced_value_float=float("nan")), floats),
        ("imputer_of_one", single("Imputer", ["x"], ["y"], imputed_value_floats=[1.5], replaced_value_float=2.0), floats),
        ("imputer_of_ints", single("Imputer", ["x"], ["l"], kinds=ints, imputed_value_int64s=[70], replaced_value_int64=2), whole),
        ("scaler_of_ints", single("Scaler", ["x"], ["y"], kinds=ints, offset=[1.0, 2.0, 3.0], scale=[0.5, 2.0, 1.0]), whole),
        ("normalizer_of_zeros", single("Normalizer", ["x"], ["y"], norm="L2"), np.zeros((2, 3), np.float32)),
    ):
        yield case(f"ml/{name}", model, x)
    yield case("ml/joined", single("FeatureVectorizer", ["a", "b"], ["y"], inputdimensions=[3, 6]), floats[1:], ROWS[:3])
    x = RANDOM.standard_normal((2, 3, 5)).astype(np.float32)
    yield case("ml/picked", single("ArrayFeatureExtractor", ["x", "i"], ["y"], kinds=[TensorProto.FLOAT, TensorProto.INT64]), x, np.array([[4, 0, 4]]))
    yield case("ml/picked_of_one", single("ArrayFeatureExtractor", ["x", "i"], ["y"], kinds=[TensorProto.FLOAT, TensorProto.INT64]), x[0, 0], np.array([1, 3]))


def official_cases():
    from onnx.backend.test.case.node import collect_testcases

    for one in sorted(collect_testcases(None), key=lambda one: one.name):
        if one.data_sets and any(o.domain == "ai.onnx.ml" for o in one.model.opset_import):
            yield one.name, one.model, one.data_sets


if __name__ == "__main__":
    groups = (sklearn_cases, boosting_cases, operator_cases, official_cases)
    write(sys.argv[1], [case for group in groups for case in group() if case], 30_000)
