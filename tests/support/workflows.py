"""Nodes of saved workflows, as the browser makes them of what /object_info says."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

UPLOAD = "IMAGEUPLOAD"
"""The button of Load Image: a widget that the browser adds, saves, and leaves out of what it queues."""

NOTES = {"Note", "MarkdownNote"}
"""Nodes that exist in the browser only and are in no prompt."""

WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3", UPLOAD}

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input of a node, as /object_info describes it."""

    name: str
    type: str
    optional: bool
    settings: Mapping[str, Any]
    options: list[Any]

    @property
    def is_widget(self) -> bool:
        """Whether its value is in the node, unless it is linked."""
        return self.type in WIDGET_TYPES and not self.settings.get("forceInput")

    @property
    def has_control(self) -> bool:
        """Whether the browser adds a widget that says what becomes of the value after each run."""
        return bool(self.settings.get("control_after_generate"))

    @property
    def is_upload(self) -> bool:
        """Whether the value names a picture in ComfyUI's folder `input`."""
        return bool(self.settings.get("image_upload"))


def declared_inputs(spec: Json) -> Iterator[Input]:
    """Inputs in the order of the node: required ones first."""
    for group in ("required", "optional"):
        for name in spec["input_order"].get(group, []):
            kind, settings = (*spec["input"][group][name], {})[:2]
            listed = isinstance(kind, list)  # as older nodes give the options of a combo
            options = kind if listed else settings.get("options", [])
            yield Input(
                name=name, type="COMBO" if listed else kind, optional=group == "optional", settings=settings, options=options
            )


def node_inputs(spec: Json) -> list[Input]:
    """Inputs of a node in the browser's order: first the sockets, then the widgets."""
    found = []
    for item in declared_inputs(spec):
        found.append(item)
        if item.is_upload:
            found.append(Input(name="upload", type=UPLOAD, optional=False, settings={}, options=[]))
    return sorted(found, key=lambda item: item.is_widget)


def outputs_of(spec: Json) -> list[tuple[str, str]]:
    """Name and type of the outputs of a node."""
    return list(zip(spec["output_name"], spec["output"], strict=True))


def slots_of(slots: Iterable[Json]) -> list[tuple[str, str]]:
    """The same of the sockets that a workflow has."""
    return [(slot["name"], slot["type"]) for slot in slots]


def widget_values(node: Json, spec: Json) -> Iterator[tuple[Input | None, Any]]:
    """Widgets of a node with their saved values. None stands for a control-after-generate widget."""
    widgets: list[Input | None] = []
    for item in node_inputs(spec):
        if item.is_widget:
            widgets += [item, None] if item.has_control else [item]
    assert len(node["widgets_values"]) == len(widgets), node["type"]
    return zip(widgets, node["widgets_values"], strict=True)


def to_prompt(workflow: Json, info: Json) -> dict[str, Json]:
    """A workflow in API format, as the browser sends it. Knows neither subgraphs nor muted and bypassed nodes."""
    origins = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in real_nodes(workflow):
        spec = info[node["type"]]
        inputs = {item.name: value for item, value in widget_values(node, spec) if item is not None and item.type != UPLOAD}
        inputs |= {slot["name"]: origins[slot["link"]] for slot in node["inputs"] if slot["link"] is not None}
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def real_nodes(workflow: Json) -> list[Json]:
    """Nodes of a workflow that its prompt has, too."""
    return [node for node in workflow["nodes"] if node["type"] not in NOTES]
