"""Tests that need no server are collected where the packages of its client are missing, as on a machine lent for its GPU."""

from support.package import ROOT

CODE = """
import sys
sys.modules["websocket"] = sys.modules["psutil"] = None  # importing them fails
sys.path[:] = filter(None, sys.path)
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "tests/gpu/test_gpu.py"]))
"""


def test_gpu_tests_import_nothing_of_the_server(run_program):
    assert "test_attention_matrix" in run_program(CODE, cwd=ROOT).stdout
