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


def pack(library, folder, project=HERE, name="_tilewright.abi3.so", python="cp310-abi3"):
    """Packs the Python package of a project with a library, which has this name in it."""
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    version = tomllib.loads((HERE / "../../Cargo.toml").read_text())["workspace"]["package"]["version"]
    package = described["name"].replace("-", "_")
    tag = f"{python}-linux_{platform.machine()}"
    info = f"{package}-{version}.dist-info"
    sources = sorted((project / "python" / package).glob("*.py*"))
    files = {f"{package}/{path.name}": path.read_bytes() for path in sources if path.is_file()}
    files[f"{package}/py.typed"] = b""
    files[f"{package}/{name}"] = stripped(library)
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {described['name']}\nVersion: {version}\nSummary: {described['description']}\n"
        f"License: {described['license']['text']}\nRequires-Python: {described['requires-python']}\n"
        f"Description-Content-Type: text/markdown\n\n{(project / 'README.md').read_text()}"
    ).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = f"{info}/RECORD"
    lines = [f"{file},sha256={digest(data)},{len(data)}" for file, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    path = pathlib.Path(folder) / f"{package}-{version}-{tag}.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, data in files.items():
            wheel.writestr(file, data)
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
