"""Builds the wheel: python3 wheel.py FOLDER

It takes cargo, a C compiler and nothing else; `pip install ./crates/python` has this file do the same.
`python3 wheel.py LIBRARY COMMAND FOLDER` packs a wheel of a library and a command that cargo has built.
"""

import base64
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import tomllib
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds library, command and wheel, as pip asks for it."""
    built = cargo_build(HERE, "--package", "tilewright-python")
    return pack(built["libtilewright_python.so"], wheel_directory, command=built["tilewright"]).name


def cargo_build(project, *arguments):
    """Builds a project of this workspace for release; returns its libraries and programs by their names."""
    target = os.environ.get("CARGO_TARGET_DIR", ROOT / "target") / pathlib.Path("python")
    command = ["cargo", "build", "--release", "--target-dir", str(target), *arguments]
    command += ["--message-format", "json-render-diagnostics"]
    built = subprocess.run(command, cwd=project, stdout=subprocess.PIPE, text=True, check=True)
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    return {os.path.basename(file): file for message in messages for file in message.get("filenames", [])}


def pack(library, folder, project=HERE, name="_tilewright.abi3.so", python="cp310-abi3", command=None):
    """Packs the Python package of a project with a library, which has this name in it, and with a command."""
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    package = described["name"].replace("-", "_")
    info = f"{package}-{version}.dist-info"
    sources = sorted((project / "python" / package).glob("*.py*"))
    files = {f"{package}/{path.name}": path.read_bytes() for path in sources if path.is_file()}
    files[f"{package}/py.typed"] = b""
    files[f"{package}/{name}"] = stripped(library)
    programs = [files[f"{package}/{name}"]]
    if command is not None:
        programs.append(stripped(command))
        files[f"{package}-{version}.data/scripts/{os.path.basename(command)}"] = programs[1]
    texts = licences(project)
    files.update({f"{info}/licenses/{file}": text for file, text in texts.items()})
    tag = f"{python}-{platform_tag(programs)}"
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: {described['name']}\nVersion: {version}\nSummary: {described['description']}\n"
        f"License-Expression: {described['license']['text']}\n"
        + "".join(f"License-File: {file}\n" for file in texts)
        + f"Requires-Python: {described['requires-python']}\n"
        f"Description-Content-Type: text/markdown\n\n{(project / 'README.md').read_text()}"
    ).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    groups = described.get("entry-points", {}).items()
    points = [f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items()) for group, names in groups]
    if points:
        files[f"{info}/entry_points.txt"] = "\n".join(points).encode()
    record = f"{info}/RECORD"
    lines = [f"{file},sha256={digest(data)},{len(data)}" for file, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    path = pathlib.Path(folder) / f"{package}-{version}-{tag}.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for file, data in files.items():
            # The same files make the same wheel, whenever it is packed.
            entry = zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if "/scripts/" in file else 0o100644) << 16
            wheel.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
    return path


def stripped(library):
    """The bytes of a library without names that only debuggers read, where there is a program that can."""
    if shutil.which("strip") is None:
        return pathlib.Path(library).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "library"
        subprocess.run(["strip", "--strip-unneeded", "-o", out, library], check=True)
        return out.read_bytes()


# Libraries that are on every system with a tag of manylinux (PEP 600).
EVERYWHERE = re.compile(r"(ld-linux-[\w-]+|lib(gcc_s|c|m|dl|rt|pthread|util))\.so\.\d+")


def platform_tag(programs):
    """Tag of the oldest systems that programs run on, by the newest symbols of glibc that they ask for."""
    machine, newest = platform.machine(), (2, 17)
    for program in programs:
        libraries, versions = needs(program)
        others = [library for library in libraries if not EVERYWHERE.fullmatch(library)]
        if others or not any(version.startswith("GLIBC_") for version in versions):
            print(f"for this system alone: a program needs {', '.join(others) or 'another C library'}", file=sys.stderr)
            return f"linux_{machine}"
        found = [re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version) for version in versions]
        newest = max([newest, *((int(at[1]), int(at[2])) for at in found if at)])
    return f"manylinux_{newest[0]}_{newest[1]}_{machine}"


def needs(program):
    """The libraries that a program of 64 bits needs, and the versions of symbols that it asks them for."""
    starts, = struct.unpack_from("<Q", program, 0x28)
    size, count = struct.unpack_from("<HH", program, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", program, starts + size * at) for at in range(count)]
    libraries, versions = set(), set()
    for _, kind, _, _, offset, length, link, _, _, _ in sections:
        names = sections[link][4] if link < count else 0
        name = lambda at: program[names + at : program.index(b"\0", names + at)].decode()
        if kind == 6:  # What the loader reads: the key 1 names a library.
            keys = [struct.unpack_from("<QQ", program, at) for at in range(offset, offset + length, 16)]
            libraries.update(name(value) for key, value in keys if key == 1)
        if kind == 0x6FFFFFFE:  # Versions, library by library.
            at, follows = offset, 1
            while follows:
                n, first, follows = struct.unpack_from("<2xH4xII", program, at)
                own = at + first
                for _ in range(n):
                    text, step = struct.unpack_from("<8xII", program, own)
                    versions.add(name(text))
                    own += step
                at += follows
    return libraries, versions


# The names of files that a crate has licences in.
LICENCES = re.compile(r"(LICEN[CS]E|COPYING|COPYRIGHT|NOTICE|UNLICENSE)[\w.-]*", re.IGNORECASE)

OTHERS = """
SQLite, in libsqlite3-sys, is in the public domain.
The standard library of Rust is under "MIT OR Apache-2.0"; it contains parts of other projects, which
https://github.com/rust-lang/rust/blob/main/COPYRIGHT lists.
"""


def licences(project):
    """Our licences, and a text with those of all crates that are compiled into a project's library."""
    ours = {path.name: path.read_bytes() for path in sorted(ROOT.glob("LICENSE*"))}
    command = ["cargo", "metadata", "--format-version", "1", "--filter-platform", f"{platform.machine()}-unknown-linux-gnu"]
    crates = json.loads(subprocess.run(command, cwd=project, stdout=subprocess.PIPE, check=True).stdout)
    packages = {package["id"]: package for package in crates["packages"]}
    nodes = {node["id"]: node for node in crates["resolve"]["nodes"]}
    is_macro = lambda of: any("proc-macro" in target["kind"] for target in packages[of]["targets"])
    reached, left = set(), [crates["resolve"]["root"]]
    while left:
        of = left.pop()
        if of not in reached and not is_macro(of):
            reached.add(of)
            kinds = [(dep["pkg"], {kind["kind"] for kind in dep["dep_kinds"]}) for dep in nodes[of]["deps"]]
            left.extend(dep for dep, kind in kinds if None in kind)
    # Packages from a registry; the others are ours.
    others = sorted((packages[of] for of in reached if packages[of]["source"]), key=lambda of: (of["name"], of["version"]))
    named = lambda of: f"{of['name']} {of['version']}"
    texts = {}
    for package in others:
        folder = pathlib.Path(package["manifest_path"]).parent
        for path in sorted(path for path in folder.iterdir() if path.is_file() and LICENCES.fullmatch(path.name)):
            texts.setdefault(path.read_text(errors="replace").strip(), []).append(named(package))
    out = ["Crates that are compiled into this package, with their licences; the texts are below.\n"]
    out += [f"{named(of)}: {of['license'] or of['license_file']} ({of['repository'] or of['name']})" for of in others]
    out.append(OTHERS)
    for text, users in texts.items():
        out.append(f"{'=' * 80}\n{', '.join(dict.fromkeys(users))}\n{'-' * 80}\n{text}\n")
    return {**ours, "THIRD-PARTY.txt": "\n".join(out).encode()}


def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(build_wheel(sys.argv[1]))
    else:
        library, command, folder = sys.argv[1:]
        print(pack(library, folder, command=command))
