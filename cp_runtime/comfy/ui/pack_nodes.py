"""The node behind an object in a model: found by its code's module, and by the running graph, with the user's title."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context

from ..shared.assigned import names_in
from ..shared.fingerprint import content_of
from ..shared.modules import full_name
from ..shared.patches import name_of

# Nodes of objects not made by functions of a node: name of the object, of ComfyUI.
WRAPPED = ("__func__", "__wrapped__", "func")  # attributes with a wrapped function
_MADE_BY = {
    "KV_Attn_Input": "FluxKVCache",
    "SUPIRPatch": "SUPIRApply",
    "load_hypernetwork_patch": "HypernetworkLoader",
    "make_attention_override": "BlockSparseAttention",
    "make_h3_block_patch": "BlockSparseAttention",
}


def node_of(thing: Any) -> str | None:
    """Return the id of the node that made a patch, or None if that is not certain."""
    kinds = {kind for kind, _ in _in_graph(thing)} or set(_makers(thing))
    return kinds.pop() if len(kinds) == 1 else None


def made_by(thing: Any, node: str | None = None) -> str:
    """Return the user's name for the node that made an object in the model. `node`: its id, where the code does not tell."""
    kind, titles = node or node_of(thing), [title for each, title in _in_graph(thing, node)]
    if kind is None:
        module = name_of(thing).partition(":")[0]
        return "a node" if module == "builtins" else f"a node of {_pack(thing) or module}"
    name = display_name(kind)
    return f"{titles[0]} ({name})" if len(titles) == 1 and titles[0] not in ("", name) else name


def _in_graph(thing: Any, node: str | None = None) -> list[tuple[str, str]]:
    """Return kind and title of the nodes upstream of the running one that may have made a patch."""
    makers, upstream = [node] if node else _makers(thing), list(_upstream())
    if not makers and (pack := _pack(thing)):  # then any node of that pack that returns a model
        nodes = {kind: _nodes()[kind] for kind, _ in upstream if _pack_of_node(kind) == pack}
        makers = [kind for kind, cls in nodes.items() if "MODEL" in getattr(cls, "RETURN_TYPES", ())]
    return [(kind, title) for kind, title in upstream if kind in makers]


def _makers(thing: Any) -> list[str]:
    """Return the ids of nodes that may make a patch: those whose class has its code, else those that name it."""
    module, _, path = name_of(thing).partition(":")
    head = path.split(".")[0]
    if head in _MADE_BY and module.startswith("comfy"):
        return [_MADE_BY[head]]
    near = {id: cls for id, cls in _nodes().items() if full_name(cls).partition(":")[0] == module}
    own = [id for id, cls in near.items() if cls.__qualname__ == head]
    return own or [id for id, cls in near.items() if head in _used_by(cls)]


def _used_by(cls: Any) -> frozenset[str]:
    methods = functions_in(getattr(cls, getattr(cls, "FUNCTION", ""), None)) + functions_in(vars(cls).get("execute"))
    return frozenset().union(*(names_in(method.__code__) for method in methods))


def functions_in(value: Any) -> list[FunctionType]:
    """Return a function and all functions that its decorators have wrapped around each other."""
    found, seen, left = list[FunctionType](), set[int](), [value]
    while left:
        each = left.pop(0)
        if id(each) in seen or each is None or isinstance(each, type | ModuleType):
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            found.append(each)
            left += [content for cell in each.__closure__ or () if callable(content := content_of(cell))]
        left += [inner for name in WRAPPED if callable(inner := getattr(each, name, None))]
    return found


def _upstream() -> Iterator[tuple[str, str]]:
    """Yield kind and title of every node upstream of the one that runs in this thread."""
    context = get_executing_context()
    if context is None:
        return
    graph: Any = get_progress_state().dynprompt
    left, seen = [context.node_id], set[str]()
    while left:
        id = left.pop()
        if id in seen or not graph.has_node(id):
            continue
        seen.add(id)
        node = graph.get_node(id)
        if id != context.node_id and node["class_type"] in _nodes():
            yield node["class_type"], str((node.get("_meta") or {}).get("title") or "")
        left += [str(link[0]) for link in node["inputs"].values() if isinstance(link, list) and len(link) == 2]


def _nodes() -> dict[str, Any]:
    return getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})


def _pack_of_node(kind: str) -> str:
    parent, _, name = getattr(_nodes()[kind], "RELATIVE_PYTHON_MODULE", "").partition(".")
    return name if parent == "custom_nodes" else ""


def _pack(thing: Any) -> str:
    """Return the folder of the node pack with an object's code; "" for other code."""
    module = name_of(thing).partition(":")[0].partition("custom_nodes")[2].strip("/.")
    return module.replace(".", "/").split("/")[0].replace("_x_", ".")


def display_name(node: str) -> str:
    """Return the display name of a kind of node."""
    names = getattr(sys.modules.get("nodes"), "NODE_DISPLAY_NAME_MAPPINGS", {})
    return str(names.get(node) or node)


def name_in_pack(thing: Any) -> str:
    """Return `module:qualified.name` without the pack's folder, which ComfyUI puts in front of module names."""
    module = getattr(thing, "__module__", None) or ""
    if os.path.isabs(module):
        module = module.rpartition(os.sep)[2].partition(".")[2]
    return f"{module}:{getattr(thing, '__qualname__', '')}"
