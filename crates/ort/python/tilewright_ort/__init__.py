"""Execution provider of ONNX Runtime that runs parts of a model as Tilewright's kernels.

    import onnxruntime
    import tilewright_ort

    name = tilewright_ort.get_ep_name()
    onnxruntime.register_execution_provider_library(name, tilewright_ort.get_library_path())
    session = onnxruntime.InferenceSession("model.onnx", providers=[name, "CPUExecutionProvider"])

Before ONNX Runtime 1.26, `providers` does not take such names: give the devices of
`onnxruntime.get_ep_devices()` that have this `ep_name` to `SessionOptions.add_provider_for_devices`.

This package holds a library that ONNX Runtime loads, and depends on none of its releases: 1.23 and later have
the interface.
"""

import pathlib

__all__ = ["get_ep_name", "get_ep_names", "get_library_path"]

_NAME = "TilewrightExecutionProvider"


def get_library_path():
    """Gives the file for `onnxruntime.register_execution_provider_library`."""
    return str(pathlib.Path(__file__).resolve().parent / "libtilewright_ort.so")


def get_ep_name():
    """Gives the name of the provider, as sessions ask for it."""
    return _NAME


def get_ep_names():
    """Gives the names of all providers in the library."""
    return [_NAME]
