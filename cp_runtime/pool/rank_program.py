"""The program of a rank's process: imports what ranks need, then waits for its rank's description.

Run by file name, as `python rank_program.py`, by `processes.LocalProcess`; with `there`, on another computer, by ssh. Standard
input and output are for frames; what a library prints goes to standard error. The folder of this file leaves `sys.path` at once:
its modules would shadow others.
"""

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import sys
import traceback
from types import ModuleType
from typing import Any, NoReturn

RANK_NAME = "cp-rank-"
"""What the kernel calls a rank's process, and `top` with it; its number follows."""
PACKAGE = "cp_runtime"
SILENCE_LIMIT = 10.0  # seconds without a frame after which a rank on another computer ends: the network is cut
WORKER = f"{PACKAGE}.pool.worker"


def set_search_path(path: list[str]) -> None:
    """Put folders in front of `sys.path`, in place of this file's; with `-I` or `-P` that is not there."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [*path, *(folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here)]


def load_package(folder: str) -> None:
    """Import the package from its folder without putting the folder above it, which has a `nodes/`, on sys.path."""
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(PACKAGE, init, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {init}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[PACKAGE]
        raise


def import_by_name(name: str) -> ModuleType:
    """Import a module, which may be one of this package: no folder of `sys.path` leads to that."""
    if name.startswith(f"{PACKAGE}.") and PACKAGE not in sys.modules:
        load_package(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return importlib.import_module(name)


def preload(modules: list[str]) -> None:
    """Import modules, and what ranks run. Each may fail: the rank finds out for itself, and says so."""
    gc.disable()  # imports make no garbage, and looking for it takes an eighth of their time
    for name in [*modules, WORKER]:
        with contextlib.suppress(Exception):
            import_by_name(name)
    gc.freeze()  # nor does the collector find any there later
    gc.enable()


def run(there: bool) -> None:
    """Be a rank. The first frame says what to import, the second one which rank, or what to run in place of one.

    `there`: this computer is another one than ComfyUI's. The rank says first what is installed here.
    """
    if there:
        import_by_name(f"{PACKAGE}.pool.ssh_guard").fork_guarded()
    system = import_by_name(f"{PACKAGE}.system").system
    frames = import_by_name(f"{PACKAGE}.pool.frames")
    inbox = frames.Inbox(ended=lambda: system.exit_now(0), urgent=lambda frame: None, arrived=watch_start)
    if there:
        inbox.end_on_silence(SILENCE_LIMIT)
    for stream in (sys.stdout, sys.stderr):  # pipes: elsewhere than in a terminal, not every system writes all letters
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    site = json.loads(inbox.get().header)
    system.die_with_parent(os.getppid() if there else site["parent"])
    own = import_by_name(f"{PACKAGE}.pool.remote").prepare(inbox, site) if there else {}
    system.name_process("cp-waiting")
    set_search_path(site["path"])
    sys.argv = site["argv"]
    preload(site["preload"])
    spec = json.loads(inbox.get().header)
    system.name_process(f"{RANK_NAME}{spec['rank']}")
    system.allow_open_files()
    import_by_name(f"{PACKAGE}.system.environment").replace_environment(spec.pop("environment") | own)
    import_by_name(spec.get("program", WORKER)).run(spec, inbox)


def watch_start(frame: Any) -> None:
    """Have the stacks written if this process is not ready for a command in time: an import may hang."""
    if seconds := json.loads(frame.header).get("seconds"):
        faulthandler.dump_traceback_later(seconds, file=2)


def main() -> NoReturn:
    code = 1
    try:
        run(there=sys.argv[1:] == ["there"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  (the controller shows what a rank wrote last)
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):  # of a package that cannot be imported
            import_by_name(f"{PACKAGE}.system").system.exit_now(code)  # groups may be poisoned: their destructors could hang
        os._exit(code)


if __name__ == "__main__":
    main()
