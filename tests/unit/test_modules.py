"""Names of modules, the same on every computer: ComfyUI's own, those of its nodes, and of packs, which it names by their path."""

import importlib.util
import os
import sys

import pytest

from cp_runtime.comfy.shared.modules import module_name, modules_named, take_module
from cp_runtime.comfy.shared.objects import write
from cp_runtime.errors import MirrorError

NAMES = {
    "comfy.ldm.wan.model": "comfy.ldm.wan.model",
    "/home/me/ComfyUI/comfy_extras/nodes_slg": "comfy_extras.nodes_slg",
    "/home/me/ComfyUI/custom_nodes/a-pack.nodes.more": "custom_nodes/a-pack.nodes.more",
    "/disk/comfy_extras/ComfyUI/custom_nodes/a-pack": "custom_nodes/a-pack",
    "/disk/comfy_x_extras/packs/a pack_x_1": "custom_nodes/a pack_x_1",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_without_the_folder(name):
    assert module_name(name.replace("/", os.sep)) == NAMES[name]


@pytest.fixture
def install(tmp_path):
    """Import a pack as ComfyUI does; returns its module."""
    installed = []

    def make(folder):
        pack = tmp_path / folder / "cp_test_pack"
        pack.mkdir(parents=True)
        (pack / "__init__.py").write_text(f"PLACE = {folder!r}\nclass Thing: pass\n")
        (pack / "late.py").write_text(f"PLACE = {folder!r}")
        name = str(pack).replace(".", "_x_")
        spec = importlib.util.spec_from_file_location(name, pack / "__init__.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        installed.append(name)
        spec.loader.exec_module(module)
        return module

    yield make
    for name in [key for key in sys.modules if key.startswith(tuple(installed))]:
        del sys.modules[name]


def test_a_module_that_a_pack_imports_later_is_imported(install):
    pack = install("one")
    assert take_module("custom_nodes/cp_test_pack") is pack
    assert take_module("custom_nodes/cp_test_pack.late").PLACE == "one"
    with pytest.raises(ImportError):
        take_module("custom_nodes/cp_test_pack.none")


def test_packs_of_one_name_are_both_found(install):
    assert modules_named("custom_nodes/cp_test_pack") == []
    packs = [install(folder) for folder in ("one", "two")]
    assert modules_named("custom_nodes/cp_test_pack") == packs


def test_code_of_two_packs_of_one_name_is_refused(install):
    """Ranks would find the first."""
    one = install("one")
    assert write(one.Thing()).names == {"custom_nodes/cp_test_pack:Thing"}
    install("two")
    with pytest.raises(MirrorError, match="two node packs have the module custom_nodes/cp_test_pack"):
        write(one.Thing())


def test_another_module_in_its_place_is_found(install):
    before = install("one")
    assert modules_named("custom_nodes/cp_test_pack") == [before]
    del sys.modules[before.__name__]
    after = install("two")
    assert modules_named("custom_nodes/cp_test_pack") == [after]
