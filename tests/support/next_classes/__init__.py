"""Stand-ins for transformers of a newer ComfyUI than the one at hand: what a table of cp_runtime/families says about them is real.

Module names, arguments, shapes, the order of calls and what is kept between them are those of the class; what a layer computes
is as little as makes every token depend on what it attends to. A file stands in for the module of ComfyUI in FILES.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

FILES = {
    "comfy.ldm.qwen_image21.model": "qwen_image21.py",
    "comfy.ldm.kandinsky6.model": "kandinsky6.py",
    "comfy.ldm.sensenova.model": "sensenova.py",
    "comfy.ldm.yue2.model": "yue2.py",
}


def has(cls: str) -> bool:
    """Whether there is a stand-in for a class, by its full name."""
    return cls.rpartition(".")[0] in FILES


def put_in_place(name: str) -> None:
    """Make ComfyUI's module `name` importable, by the stand-in where ComfyUI has none."""
    if name not in FILES or name in sys.modules:
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(FILES[name]))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
