"""The pack loads where pools cannot run: macOS lacks much of what they use."""

import os
import re
import subprocess
import sys

from support.package import ROOT

import cp_runtime

MISSING = {
    "os": ("memfd_create", "MFD_CLOEXEC", "posix_fallocate", "waitid", "sched_getaffinity", "sched_setaffinity", "sched_yield"),
    "select": ("poll", "POLLIN"),
}
CODE = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
import comfy.options
comfy.options.enable_args_parsing()
sys.argv[1:] = ["--cpu"]
import comfy.model_management  # with what it and torch need of the system
from support.package import load_package
for name, attributes in {missing!r}.items():
    module = importlib.import_module(name)
    for attribute in attributes:
        vars(module).pop(attribute, None)
load_package()
import cp_runtime.comfy.ui.server, cp_runtime.comfy.ui.report
import cp_runtime.comfy.ui.stock_loads
"""


def test_import_without_what_only_linux_has(run_program, comfyui_path):
    run_program(CODE.format(missing=MISSING), str(comfyui_path))


LATER = r"torch\._dynamo$|cp_runtime\.(diffusers\.api|pool\.hosts)|torch\.distributed\.elastic"


def test_the_worker_imports_neither_the_compiler_nor_what_other_machines_need():
    """It takes a second, in every rank."""
    code = f"import re, sys, cp_runtime.pool.worker; assert not [name for name in sys.modules if re.match({LATER!r}, name)]"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_there_when_they_are_asked_for():
    assert {getattr(cp_runtime, name).__name__ for name in cp_runtime.__all__} == {*cp_runtime.__all__}
    assert {*cp_runtime.__all__} <= {*dir(cp_runtime)}
    assert not hasattr(cp_runtime, "no_such_name")


def test_pip_installs_the_package_and_leaves_nothing_in_the_clone():
    """For the Python API; setuptools would leave a build folder, and install from it what is gone since."""
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"^(?:build-backend|packages) = (.*)$", project, re.MULTILINE) == ['"hatchling.build"', '["cp_runtime"]']
