"""Packs the provider's wheel: python3 wheel_of_library.py LIBRARY FOLDER

`pip install ./crates/ort` has this file build the library first, which takes cargo and nothing else.
"""

import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

from wheel import pack  # noqa: E402


def pack_provider(library, folder):
    return pack(library, folder, project=HERE, name="libtilewright_ort.so", python="py3-none")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds the library and the wheel, as pip asks for it."""
    target = os.environ.get("CARGO_TARGET_DIR", HERE.parents[1] / "target") / pathlib.Path("python")
    command = ["cargo", "build", "--release", "--target-dir", str(target)]
    command += ["--message-format", "json-render-diagnostics"]
    features = (config_settings or {}).get("features")
    command += ["--features", features] if features else []
    built = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, text=True, check=True)
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    files = [file for message in messages for file in message.get("filenames", [])]
    library = next(file for file in files if os.path.basename(file) == "libtilewright_ort.so")
    return pack_provider(library, wheel_directory).name


if __name__ == "__main__":
    print(pack_provider(*sys.argv[1:]))
