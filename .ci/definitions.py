"""What saved workflows depend on in the nodes' definitions, and what a change of them breaks.

    make definitions

Starts ComfyUI, reads the definitions of the nodes from /object_info and writes them to
`tests/server/node_definitions/<version of pyproject.toml>.json`. Part of a release; the file of a version that users have stays as
it is. Nothing is written when workflows of the newest other version would break. `tests/server/test_node_definitions.py` compares
with the newest file.

A saved workflow stores values of widgets and links to outputs by position, links to inputs by name. A prompt in API format is
refused where a required input is missing or a value is not allowed. Texts, categories, defaults and steps of a number may change:
what is saved holds its own values.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.server import ComfyServer
from support.workflows import Input, Json, declared_inputs

FOLDER = ROOT / "tests" / "server" / "node_definitions"
PACK = "custom_nodes.comfyui-context-parallel"  # what the server of the tests calls this checkout
COMMAND = "make definitions"

BORROWED = ("sampler_name", "scheduler")  # inputs of KSampler whose options are ComfyUI's to change


# --- what is stored ---------------------------------------------------------------------------------------------------


def definitions(object_info: Mapping[str, Json]) -> dict[str, Json]:
    """The stored form of this pack's nodes, from the server's answer about all nodes."""
    borrowed = [item.options for item in declared_inputs(object_info["KSampler"]) if item.name in BORROWED]
    return {
        name: {
            "deprecated": bool(info.get("deprecated")),
            "inputs": [_stored(item, borrowed) for item in declared_inputs(info)],
            "outputs": [
                {"type": kind, "list": bool(is_list)} for kind, is_list in zip(info["output"], info["output_is_list"], strict=True)
            ],
        }
        for name, info in sorted(object_info.items())
        if info.get("python_module") == PACK
    }


def _stored(item: Input, borrowed: list[list[Any]]) -> Json:
    entry: Json = {"name": item.name, "type": item.type, "optional": item.optional, "widget": item.is_widget}
    if item.is_widget:
        entry["control_after_generate"] = item.has_control
        entry |= {key: item.settings[key] for key in ("default", "min", "max") if key in item.settings}
    if item.type == "COMBO" and item.options not in borrowed:
        entry["options"] = item.options
    return entry


# --- what breaks ------------------------------------------------------------------------------------------------------


def broken(released: Mapping[str, Json], current: Mapping[str, Json], replacements: Mapping[str, list[Json]]) -> list[str]:
    """What workflows saved with the released definitions would lose, a sentence each; empty = they load as before.

    Args:
        replacements: what the server answers to /node_replacements, without the replacements whose new node it does not have.
    """
    found: list[str] = []
    for name, old in released.items():
        new = current.get(name)
        if new is not None:
            found += [f"{name}: {problem}" for problem in _broken_node(old, new)]
        elif not replacements.get(name):
            found.append(f"{name}: the node is gone, and no replacement is registered")
        elif (ids := replacements[name][0].get("old_widget_ids") or []) != widgets(old):  # ComfyUI takes the first one
            found.append(f"{name}: its replacement has old_widget_ids {ids}; the released node has {widgets(old)}")
    return found


def _broken_node(old: Json, new: Json) -> list[str]:
    before, now = ({entry["name"]: entry for entry in node["inputs"]} for node in (old, new))
    found = [
        f"input {name!r} {problem}"
        for name, entry in before.items()
        for problem in (_broken_input(entry, now[name]) if name in now else ["is gone"])
    ]
    found += [
        f"new input {name!r} is required: prompts in API format do not have it. Make it optional"
        for name, entry in now.items()
        if name not in before and not entry["optional"]
    ]
    order, after = widgets(old), widgets(new)
    if not set(order) - set(after) and after[: len(order)] != order:
        found.append(f"widgets were in the order {order}, now {after}: saved values are taken by position. New ones go to the end")
    return found + [
        f"output {i} was {output}, now {other}: links are taken by position"
        for i, (output, other) in enumerate(zip_longest(old["outputs"], new["outputs"][: len(old["outputs"])]))
        if output != other
    ]


def _broken_input(old: Json, new: Json) -> list[str]:
    found = [f"was {key} {old[key]!r}, now {new[key]!r}" for key in ("type", "widget") if new[key] != old[key]]
    if found:
        return found
    if old["optional"] and not new["optional"]:
        found.append("was optional, now it is required")
    if old.get("control_after_generate") != new.get("control_after_generate"):
        found.append("gained or lost control_after_generate, a widget: the values behind it move")
    if "options" in old:
        left = new["options"] if "options" in new else old["options"]
        found += [f"no longer has the option {option!r}" for option in old["options"] if option not in left]
    low, high = new.get("min", float("-inf")), new.get("max", float("inf"))
    if low > old.get("min", float("-inf")) or high < old.get("max", float("inf")):
        found.append(f"allowed {old.get('min')} to {old.get('max')}, now {low} to {high}")
    return found


def widgets(node: Json) -> list[str]:
    """Whose values a workflow stores, in order: inputs, and the browser's own widget behind some."""
    names = ((entry["name"], entry.get("control_after_generate")) for entry in node["inputs"] if entry["widget"])
    return [widget for name, control in names for widget in ([name, "control_after_generate"] if control else [name])]


def advice(problems: list[str], version: str, released: Mapping[str, Json]) -> str:
    """What to do about `problems`."""
    nodes = dict.fromkeys(problem.partition(":")[0] for problem in problems)
    lines = [f"Workflows saved with {version} would no longer load:", *(f"  - {problem}" for problem in problems), ""]
    lines += [
        "Put it back. If it must change, give the node a new id and let the extension register the old one in on_load, so that",
        "ComfyUI turns old nodes into new ones (`await ComfyAPI().node_replacement.register(...)` of comfy_api.latest):",
        "",
    ]
    lines += [
        f'    io.NodeReplace(new_node_id="...", old_node_id="{name}", old_widget_ids={json.dumps(widgets(released[name]))},\n'
        '        input_mapping=[{"new_id": "...", "old_id": "..."}, ...], output_mapping=[{"new_idx": 0, "old_idx": 0}, ...])'
        for name in nodes
        if name in released
    ]
    lines += ["", f"The next release stores its definitions with `{COMMAND}`."]
    return "\n".join(lines)


# --- files ------------------------------------------------------------------------------------------------------------


def stored(without: str | None = None) -> tuple[str, dict[str, Json]] | None:
    """Newest version that is stored, and its definitions; `without` leaves one out."""
    versions = [file.stem for file in FOLDER.glob("*.json") if file.stem != without]
    if not versions:
        return None
    newest = max(versions, key=lambda version: tuple(map(int, version.split("."))))
    return newest, json.loads((FOLDER / f"{newest}.json").read_text())


def usable(replacements: Mapping[str, list[Json]], object_info: Mapping[str, Json]) -> dict[str, list[Json]]:
    """Replacements whose new node exists; ComfyUI skips the others."""
    return {name: [entry for entry in entries if entry["new_node_id"] in object_info] for name, entries in replacements.items()}


def main() -> int:
    with tempfile.TemporaryDirectory() as models, ComfyServer(Path(os.environ["COMFYUI_PATH"]), models=Path(models)) as server:
        object_info = server.object_info()
        replacements = usable(server.get("/node_replacements"), object_info)
    version: str = runpy.run_path(str(ROOT / "cp_runtime" / "version.py"))["VERSION"]
    current = definitions(object_info)
    before = stored(without=version)
    problems = broken(before[1], current, replacements) if before else []
    if before and problems:
        sys.stderr.write(advice(problems, before[0], before[1]) + "\n")
        return 1
    FOLDER.mkdir(exist_ok=True)
    target = FOLDER / f"{version}.json"
    target.write_text(json.dumps(current, indent=2) + "\n")
    sys.stdout.write(f"{target.relative_to(ROOT)}: {', '.join(current)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
