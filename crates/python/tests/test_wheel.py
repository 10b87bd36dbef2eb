"""The wheel has all that it needs: the command, the searches, the back end, and the licences of what is inside."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import unittest

import tilewright as tw

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import wheel  # noqa: E402

COMMAND = pathlib.Path(sysconfig.get_path("scripts")) / "tilewright"


@unittest.skipUnless(COMMAND.is_file(), "the package is not installed from its wheel")
class Wheel(unittest.TestCase):
    def run_alone(self, *arguments):
        """Runs the command where there is no other program."""
        with tempfile.TemporaryDirectory() as folder:
            alone = {"PATH": folder, "HOME": folder}
            return subprocess.run([COMMAND, *arguments], env=alone, cwd=folder, capture_output=True, text=True)

    def test_the_command_tunes_without_another_program(self):
        run = self.run_alone("tune", "matmul:m=64,n=64,k=64", "--trials", "5", "--db", "records.db", "--json")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertGreater(json.loads(run.stdout)["best"]["gflops"], 0)
        self.assertEqual(self.run_alone("--version").stdout.split()[1], tw.build)
        searches = json.loads(self.run_alone("searches", "--json").stdout)
        self.assertIn("auto", json.dumps(searches))

    @unittest.skipIf(importlib.util.find_spec("numpy") is None, "there is no NumPy to call kernels with")
    def test_winners_of_a_store_are_used(self):
        with tempfile.TemporaryDirectory() as folder:
            db, store, none = (os.path.join(folder, name) for name in ("records.db", "store", "none.db"))
            run = tw.tune("matmul:m=33,n=48,k=32", trials=8, db=db).wait(progress=False)
            subprocess.run([COMMAND, "store", "push", store, "--db", db], check=True, capture_output=True)
            kernel = tw.kernel("matmul:m=33,n=48,k=32", db=none, store=store)
            self.assertAlmostEqual(kernel.time, run.best.time)
            self.assertIsNone(tw.kernel("matmul:m=33,n=48,k=32", db=none).time)

    def test_the_command_says_that_it_is_without_llvm(self):
        self.assertIn("built without it", self.run_alone("doctor").stdout)
        refused = self.run_alone("show", "matmul:m=64,n=64,k=64", "--guess", "--emit", "object", "-o", "x.o")
        self.assertEqual((refused.returncode, refused.stderr.count("\n")), (2, 1), refused.stderr)
        self.assertIn("needs LLVM, which this build is without", refused.stderr)

    def test_licences_of_what_is_inside_travel_along(self):
        texts = {file.name: file.read_text() for file in importlib.metadata.files("tilewright") if "licenses" in file.parts}
        self.assertEqual(sorted(texts), ["LICENSE-APACHE", "LICENSE-MIT", "THIRD-PARTY.txt"])
        third = texts["THIRD-PARTY.txt"]
        for name in ["pyo3 ", "rusqlite ", "ring ", "SQLite", "standard library of Rust"]:
            self.assertIn(name, third)
        self.assertNotIn("\ntilewright", third)

    def test_the_backend_of_pytorch_is_announced(self):
        points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="tilewright")
        self.assertEqual([point.value for point in points], ["tilewright.torch:backend"])

    def test_the_tag_is_that_of_the_newest_symbol(self):
        programs = [COMMAND.read_bytes(), pathlib.Path(tw._tilewright.__file__).read_bytes()]
        tag = wheel.platform_tag(programs)
        [line] = [line for line in importlib.metadata.distribution("tilewright").read_text("WHEEL").splitlines() if "Tag" in line]
        self.assertEqual(line, f"Tag: cp310-abi3-{tag}")
        libraries, versions = wheel.needs(programs[0])
        self.assertIn("libc.so.6", libraries)
        oldest = tuple(map(int, tag.split("_")[1:3]))
        asked = [tuple(map(int, version[6:].split("."))) for version in versions if version.startswith("GLIBC_2")]
        self.assertTrue(asked and all(version <= oldest for version in asked), (tag, versions))


if __name__ == "__main__":
    unittest.main()
