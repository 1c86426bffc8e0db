"""Tests that need no server are collected where the packages of its client are missing, as on a machine lent for its GPU."""

from support import preloaded
from support.package import ROOT

CODE = """
import sys
sys.modules["websocket"] = sys.modules["psutil"] = None  # importing them fails
sys.path[:] = filter(None, sys.path)
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "tests/gpu/test_gpu.py"]))
"""


def test_gpu_tests_import_nothing_of_the_server(tmp_path):
    program = tmp_path / "collect.py"
    program.write_text(CODE)
    done = preloaded.run([str(program)], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_attention_matrix" in done.stdout
