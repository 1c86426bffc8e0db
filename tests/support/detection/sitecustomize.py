"""Lets a tiny checkpoint say what it is, since ComfyUI's detection knows the published sizes of most families only.

Python imports this module in every process that has its folder on PYTHONPATH: the server under test and, because they inherit the
environment, its worker ranks. A file with the metadata entry `test_model`, written by `support.models`, is taken at its word; any
other goes through ComfyUI's own detection. Nothing is imported before ComfyUI does.

Where the environment says so, torch has fake CUDA devices (`support/stand_in`). Ranks look for faults (`support/faulty_worker.py`).
"""

import ast
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parents[1]


class PatchOnImport(importlib.abc.MetaPathFinder):
    """Finds a module as everybody else would, and patches it once it has been executed.

    Args:
        module: its name, or the end of it where that begins with a dot: a pack's name depends on its folder.
    """

    def __init__(self, module: str, patch: Callable[[Any], None]) -> None:
        self._module, self._patch = module, patch

    def find_spec(self, name: Any, path: Any = None, target: Any = None) -> Any:
        found = name.endswith(self._module) if self._module.startswith(".") else name == self._module
        if not found or self not in sys.meta_path:
            return None
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(place, self)  # who looks for it does not always import it
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            sys.meta_path.remove(self)
            execute(module)
            self._patch(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def take_at_its_word(detection: Any) -> None:
    """Make `model_config_from_unet` read the metadata entry."""
    detect = detection.model_config_from_unet

    def model_config_from_unet(
        state_dict: Any, unet_key_prefix: Any, use_base_if_no_match: Any = False, metadata: Any = None
    ) -> Any:
        entry = (metadata or {}).get("test_model")
        if entry is None:
            return detect(state_dict, unet_key_prefix, use_base_if_no_match, metadata)
        entry = ast.literal_eval(entry)
        if entry["sizes"]:
            imported("test_sizes", SUPPORT / "sizes.py").resize(entry["sizes"])
        config = getattr(detection.comfy.supported_models, entry["config"])(entry["unet_config"])
        config.unet_config.update(entry["unet_config"])  # over sizes that the class has for good
        # The file has the names of the module itself, not of a published checkpoint, and what stands around it.
        config.process_unet_state_dict = lambda sd: {name: t for name, t in sd.items() if not name.startswith("conditioner.")}
        return config

    detection.model_config_from_unet = model_config_from_unet


def imported(name: str, file: Path) -> Any:
    """A module from its file, which is in no folder of `sys.path`."""
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise ImportError(file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resize(module: Any) -> None:
    """Have sizes in the code of a module alike in all processes."""
    sizes = imported("test_sizes", SUPPORT / "sizes.py")
    sizes.resize({module.__name__: sizes.AT_IMPORT[module.__name__]})


def put_cards_in(_: Any) -> None:
    """Have the cards that the environment names."""
    stand_in = imported("stand_in", SUPPORT / "stand_in" / "__init__.py")
    stand_in.use(stand_in.wanted())


def measure_little(measuring: Any) -> None:
    """Have ranks measure cards in as little time as CPUs: what they find says nothing about a card."""
    measuring.CLOCK_SECONDS, measuring.SIZES["accelerator"] = 0.0, measuring.SIZES["cpu"]


def look_for_faults(worker: Any) -> None:
    """Have ranks look for faults where the environment names a folder."""
    imported("faulty_worker", SUPPORT / "faulty_worker.py").make_faulty(worker)


def hide_cards(posix: Any) -> None:
    """Have ComfyUI's process know of cards that it does not see, as it does under Windows."""
    cards = imported("stand_in", SUPPORT / "stand_in" / "__init__.py").wanted("CP_TEST_HIDDEN_CARDS")
    found = [(kind.name, int(kind.gigabytes * 2**30), kind.capability) for kind in cards.each()]
    posix.hidden_gpus = lambda: found


def show_cards(launcher: Any) -> None:
    """Have its ranks see them."""
    environment = launcher.child_environment
    shown = {"CP_TEST_CARDS": os.environ["CP_TEST_HIDDEN_CARDS"]}
    launcher.child_environment = lambda *given: environment(*given) | shown


def follow_no_cards(origin: Any) -> None:
    """Have the pack take fake cards for a library, as torch is one: each process has its own."""
    origin.COMPUTING += ("stand_in",)


AT_IMPORT = {
    "comfy.model_detection": take_at_its_word,
    "cp_runtime.pool.worker": look_for_faults,
    "comfy.ldm.wan.model_animate": resize,
    "comfy.ldm.ace.lyric_encoder": resize,
    "comfy.ldm.minimax_music.dit": resize,
}
for module, patch in AT_IMPORT.items():
    if module in sys.modules:  # of the process that this one was forked from
        patch(sys.modules[module])
    else:
        sys.meta_path.insert(0, PatchOnImport(module, patch))
if os.environ.get("CP_TEST_CARDS"):  # as in stand_in, which is not to be imported where there are none
    sys.meta_path.insert(0, PatchOnImport("cp_runtime.engine.measuring", measure_little))
    sys.meta_path.insert(0, PatchOnImport(".comfy.shared.origin", follow_no_cards))
    if "torch" in sys.modules:
        put_cards_in(None)
    else:
        sys.meta_path.insert(0, PatchOnImport("torch", put_cards_in))
    if os.environ.get("CP_TEST_HIDDEN_CARDS"):
        sys.meta_path.insert(0, PatchOnImport(".system.posix", hide_cards))
        sys.meta_path.insert(0, PatchOnImport(".pool.launcher", show_cards))
    if "comfy_kitchen" not in sys.modules:  # imported without a card, it has no kernels for one
        sys.meta_path.insert(0, PatchOnImport("comfy_kitchen", lambda kitchen: kitchen.registry.disable("cuda")))
