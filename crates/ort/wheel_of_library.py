"""Packs the provider's wheel: python3 wheel_of_library.py LIBRARY FOLDER

`pip install ./crates/ort` has this file build the library first, which takes cargo and nothing else.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

from wheel import cargo_build, pack  # noqa: E402


def pack_provider(library, folder):
    return pack(library, folder, project=HERE, name="libtilewright_ort.so", python="py3-none")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds the library and the wheel, as pip asks for it."""
    features = (config_settings or {}).get("features")
    built = cargo_build(HERE, *(["--features", features] if features else []))
    return pack_provider(built["libtilewright_ort.so"], wheel_directory).name


if __name__ == "__main__":
    print(pack_provider(*sys.argv[1:]))
