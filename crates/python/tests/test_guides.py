"""The pages of the guide that are about Python can be followed."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

GUIDE = pathlib.Path(__file__).resolve().parents[3] / "docs/guide"


def has(package):
    return importlib.util.find_spec(package) is not None


def follow(page, prepare=lambda folder: None):
    """Runs what a page shows: its files are written, and its commands run by a shell."""
    script = "set -e\n"
    with tempfile.TemporaryDirectory() as folder:
        prepare(pathlib.Path(folder))
        for block in (GUIDE / page).read_text().split("\n```")[1::2]:
            head, body = block.split("\n", 1)
            if " " in head:
                (pathlib.Path(folder) / head.split(" ")[1]).write_text(body + "\n")
            else:
                assert head == "sh", f"a block of neither a file nor commands: {head}"
                script += body + "\n"
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        run = subprocess.run(
            ["sh", "-c", script], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        assert run.returncode == 0, f"{script}\n{run.stderr}"


class Guides(unittest.TestCase):
    @unittest.skipUnless(has("numpy"), "there is no NumPy on this machine")
    def test_the_page_on_python_can_be_followed(self):
        follow("python.md")

    @unittest.skipUnless(has("numpy"), "there is no NumPy on this machine")
    def test_the_page_on_models_can_be_followed(self):
        from onnx_file import write_network

        follow("python-model.md", lambda folder: write_network(folder / "model.onnx"))

    @unittest.skipUnless(has("torch"), "there is no PyTorch on this machine")
    def test_the_page_on_pytorch_can_be_followed(self):
        follow("pytorch.md")

    @unittest.skipUnless(has("optuna"), "there is no Optuna on this machine")
    def test_the_page_from_optuna_can_be_followed(self):
        follow("from-optuna.md")


if __name__ == "__main__":
    unittest.main()
