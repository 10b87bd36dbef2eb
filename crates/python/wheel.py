"""Packs a wheel of a library that cargo has built: python3 wheel.py LIBRARY FOLDER

maturin makes the same from the sources (`pip wheel crates/python`); this needs nothing but Python.
"""

import base64
import hashlib
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile

HERE = pathlib.Path(__file__).resolve().parent


def pack(library, folder):
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    version = tomllib.loads((HERE / "../../Cargo.toml").read_text())["workspace"]["package"]["version"]
    tag = f"cp310-abi3-linux_{platform.machine()}"
    info = f"tilewright-{version}.dist-info"
    files = {f"tilewright/{path.name}": path.read_bytes() for path in sorted((HERE / "python/tilewright").glob("*.py*"))}
    files["tilewright/py.typed"] = b""
    files["tilewright/_tilewright.abi3.so"] = stripped(library)
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: tilewright\nVersion: {version}\nSummary: {project['description']}\n"
        f"License: {project['license']['text']}\nRequires-Python: {project['requires-python']}\n"
        f"Description-Content-Type: text/markdown\n\n{(HERE / 'README.md').read_text()}"
    ).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = f"{info}/RECORD"
    lines = [f"{name},sha256={digest(data)},{len(data)}" for name, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    path = pathlib.Path(folder) / f"tilewright-{version}-{tag}.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return path


def stripped(library):
    """The bytes of a library without names that only debuggers read, where there is a program that can."""
    if shutil.which("strip") is None:
        return pathlib.Path(library).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "library"
        subprocess.run(["strip", "--strip-unneeded", "-o", out, library], check=True)
        return out.read_bytes()


def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    print(pack(*sys.argv[1:]))
