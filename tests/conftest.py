"""Fixtures for every tier.

Run with `--import-mode=importlib`. The checkout must not be on `sys.path` where ComfyUI is imported, because its
`nodes` folder would shadow ComfyUI's `nodes.py`. Tests import what they need all the same: `from support.server import
ComfyServer`, because this folder is on the path, and `import cp_runtime`, which is loaded from its place in the
checkout. Nothing here imports ComfyUI.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

TESTS = Path(__file__).resolve().parent
CHECKOUT = TESTS.parent

# `python -m pytest` puts the working directory first.
sys.path[:] = [str(TESTS), *(entry for entry in sys.path if Path(entry).resolve() not in (CHECKOUT, TESTS))]

from support import preloaded  # noqa: E402

for name, value in preloaded.ENVIRONMENT.items():  # before torch is imported: OpenMP reads it when it is loaded
    os.environ.setdefault(name, value)
preloaded.fork_ranks()

from support import checkpoints, durations, exercised, shared_models, stand_in  # noqa: E402
from support.faults import SOAK, Faults  # noqa: E402
from support.package import load_package  # noqa: E402

if TYPE_CHECKING:  # machines that only run tests/gpu may lack what a server's client needs
    from support.server import ComfyServer

load_package()


class _CheckoutIsNoPackage:
    """Keeps pytest from importing the checkout's `__init__.py`, which is ComfyUI's entry point and needs ComfyUI."""

    @staticmethod
    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == CHECKOUT else None


def pytest_configure(config: pytest.Config) -> None:
    # `nohup`, and `&` in a script, make children ignore them, and tests send them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.pluginmanager.register(_CheckoutIsNoPackage(), "checkout-is-no-package")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on the shared server come last, in the order of their ranks: another number of them restarts them all. What only
    `make soak` runs is left out elsewhere."""
    if not SOAK:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]

    def ranks(item: pytest.Item) -> int:
        mark = item.get_closest_marker("ranks")
        return (mark.args[0] if mark else 2) if "server" in getattr(item, "fixturenames", ()) else 0

    items.sort(key=ranks)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a passed test has shown for `make coverage`; fixtures have their prompts counted with the test they ran for."""
    if report.when != "setup":
        exercised.settle(report.nodeid, passed=report.when == "call" and report.passed)
    durations.note(report.nodeid, report.duration)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End with the time per folder, file and test."""
    for line in durations.finish():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def comfyui_path() -> Path:
    """ComfyUI's root folder."""
    value = os.environ.get("COMFYUI_PATH", "")
    if not value or not (Path(value) / "main.py").is_file():
        pytest.fail(
            f"COMFYUI_PATH: got {value!r}; allowed: the root folder of ComfyUI, the one with main.py. "
            "`make test` fetches ComfyUI and sets it.",
            pytrace=False,
        )
    return Path(value).resolve()


@pytest.fixture(scope="session")
def checkpoints_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ComfyUI `models` folder that holds every tiny checkpoint and LoRA file (220 MB, written in two seconds of a core)."""
    models = tmp_path_factory.mktemp("models")
    names = [*checkpoints.CHECKPOINTS, *checkpoints.LORAS]
    shared_models.provide(models, partial(checkpoints.write_all, names))
    for folder in ("vae", "vae_approx"):  # a server that has looked for one in vain does not look again
        (models / folder).mkdir(exist_ok=True)
    return models


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """Faults for the workers of a server, or of a process, that gets their environment."""
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def vae_files(checkpoints_dir: Path) -> None:
    """Writes the files of `support.vaes`."""
    preloaded.write_models("support.vaes", checkpoints_dir)


@pytest.fixture(scope="session")
def upscalers(checkpoints_dir: Path) -> None:
    """Writes the tiny models of `support.upscalers`."""
    preloaded.write_models("support.upscalers", checkpoints_dir, "esrgan", "compact", "swinir", "dat", "gray")


@pytest.fixture(scope="session")
def family_errors(checkpoints_dir: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """Writes the checkpoints of the entries of `support.families` that the selected tests ask for, as parameter `served`.

    Returns the errors of those that could not be built, by name.
    """
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = sorted({value["served"] for value in params if "served" in value})
    return json.loads(preloaded.write_models("support.models", checkpoints_dir / "diffusion_models", *names).splitlines()[-1])


@pytest.fixture
def family_checkpoints(family_errors: dict[str, str], request: pytest.FixtureRequest) -> None:
    """The checkpoint that a test asks for, as parameter `served`, if it asks for one."""
    served = request.node.callspec.params.get("served") if hasattr(request.node, "callspec") else None
    assert served not in family_errors, family_errors[served]


@pytest.fixture(scope="session")
def server(comfyui_path: Path, checkpoints_dir: Path) -> Iterator[ComfyServer]:
    """A real server, shared by all tests that neither end it nor need options of their own; with cards if the caller has some."""
    from support.server import CUSTOM_NODES, GGUF_NODES, WAN_NODES, ComfyServer

    cards, options = stand_in.wanted(), {}
    if cards is not None:
        ledger = checkpoints_dir / "cards"
        options = {"cpu": False, "args": stand_in.FLOAT32, "env": stand_in.environment(replace(cards, ledger=ledger))}
    nodes = CUSTOM_NODES | GGUF_NODES | WAN_NODES | {"digits": CHECKOUT / "benchmarks" / "digits"}
    with ComfyServer(comfyui_path, models=checkpoints_dir, custom_nodes=nodes, **options) as running:
        yield running
