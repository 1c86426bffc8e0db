"""The subgraph blueprint in `subgraphs/`: the server offers it, it fits the nodes, and it runs when expanded into plain nodes."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from support.graphs import Link, Prompt, flux_prompt
from support.latents import assert_close
from support.server import CHECKOUT, PACK
from support.workflows import Json, node_inputs, outputs_of, slots_of

FOLDER = CHECKOUT / "subgraphs"
NAME = "GPUs of Your Choice"

INSIDE, OUTSIDE = -10, -20
"""Nodes that stand, inside a subgraph, for its inputs and for its outputs."""


@pytest.fixture(scope="module")
def blueprint() -> Json:
    return json.loads((FOLDER / f"{NAME}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def definition(blueprint) -> Json:
    (definition,) = blueprint["definitions"]["subgraphs"]
    return definition


def test_server_offers_it(server, blueprint):
    entries = {
        entry_id: entry
        for entry_id, entry in server.get("/global_subgraphs").items()
        if entry["info"]["node_pack"] == f"custom_nodes.{PACK}"
    }
    assert sorted(f"{entry['name']}.json" for entry in entries.values()) == sorted(file.name for file in FOLDER.iterdir())
    ((entry_id, entry),) = entries.items()
    assert (entry["name"], entry["source"]) == (NAME, "custom_node")
    assert json.loads(server.get(f"/global_subgraphs/{entry_id}")["data"]) == blueprint


def test_inner_nodes(definition, info):
    assert sorted(node["type"] for node in definition["nodes"]) == ["ApplyContextParallel", "CPConfig"]
    assert max(node["id"] for node in definition["nodes"]) <= definition["state"]["lastNodeId"]
    for node in definition["nodes"]:
        spec = info[node["type"]]
        assert node["mode"] == 0
        assert node["properties"] == {"cnr_id": PACK, "Node name for S&R": node["type"]}
        inputs = node_inputs(spec)
        slots = [(slot["name"], slot["type"], "widget" in slot) for slot in node["inputs"]]
        assert slots == [(item.name, item.type, item.is_widget) for item in inputs]
        assert slots_of(node["outputs"]) == outputs_of(spec)
        assert node["widgets_values"] == [item.settings["default"] for item in inputs if item.is_widget]


def expand(definition: Json, values: Mapping[str, Any], info: Json, node_id: int = 3) -> tuple[Prompt, Link]:
    """The subgraph as the browser queues it: its nodes, with ids of their own, and where its one output comes from.

    Args:
        node_id: of the node around it.
        values: of the subgraph's inputs, by name: a link, or the value of a promoted widget.
    """
    links = {link["id"]: link for link in definition["links"]}

    def origin(link: Json) -> Any:
        if link["origin_id"] == INSIDE:
            return values[definition["inputs"][link["origin_slot"]]["name"]]
        return [f"{node_id}:{link['origin_id']}", link["origin_slot"]]

    prompt = {}
    for node in definition["nodes"]:
        widgets = [item.name for item in node_inputs(info[node["type"]]) if item.is_widget]
        inputs = dict(zip(widgets, node["widgets_values"], strict=True))
        inputs |= {slot["name"]: origin(links[slot["link"]]) for slot in node["inputs"] if slot["link"] is not None}
        prompt[f"{node_id}:{node['id']}"] = {"class_type": node["type"], "inputs": inputs}
    (out,) = [link for link in links.values() if link["target_id"] == OUTSIDE]
    return prompt, origin(out)


@pytest.mark.parametrize("devices", ["", "cpu,cpu"])
def test_it_runs(devices, definition, info, server):
    """Between loader and sampler it gives the latent of the graph without it, from as many ranks as its widgets say."""
    expected = server.sample(flux_prompt(), timeout=120)
    prompt = flux_prompt()
    nodes, model = expand(definition, {"model": prompt["sampler"]["inputs"]["model"], "world_size": 2, "devices": devices}, info)
    prompt |= nodes
    prompt["sampler"]["inputs"]["model"] = model
    out = server.sample(prompt, timeout=120)
    assert len(server.worker_pids()) == 2
    assert_close(out, expected)
