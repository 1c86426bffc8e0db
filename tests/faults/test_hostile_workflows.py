"""Case 38: a workflow cannot start anything by what it puts into a setting."""

import json
import re

import pytest
import torch
from support.faults import Stopwatch, note
from support.graphs import flux_prompt
from support.node_graphs import assert_right
from support.processes import descendants
from support.server import ComfyServer
from support.server_events import PromptRejected

CP = {"world_size": 2}

NAN, INF = float("nan"), float("inf")
COMMANDS = [
    "cpu; touch {m}",
    "cpu\ntouch {m}",
    "$(touch {m})",
    "`touch {m}`",
    "cpu|touch {m}",
    "cpu && touch {m}",
    "cpu' 'touch {m}",
]
SETTINGS: dict[str, list[object]] = {
    "world_size": [-1, -(2**63), 1025, 10**6, 10**30, NAN, INF, "many", "2; reboot", "0x2", None, {"a": 1}, [1, 2, 3], []],
    "ulysses_degree": [1024, 3, 10**6, 2**64, -3, 1e308, NAN, "2 3"],
    "ring_degree": [1024, 3, 10**6, -1, INF, None],
    "batch_degree": [1024, 3, 10**6, -1, -INF, {}],
    "step_timeout": [NAN, INF, -INF, "nan", "inf", "1e999", 0, -5, 1e300, 10**400, "soon", None, [1.0]],
    "devices": [
        *COMMANDS, "cuda:0", "cpu,,cpu", "cpu:", "CPU", "cpu\x00", "cpu\u200b", "../../dev/null", "meta", "cpu" + ",cpu" * 50_000,
        {"a": "cpu"},
    ],
    "backend": ["mpi", "nccl", "gloo; true", "", None, 5, ["gloo"]],
    "rotate_method": ["none", "__import__('os')", None],
    "on_unsupported": ["ignore", "Error", {}],
}  # fmt: skip


def refusal(server: ComfyServer, prompt: dict) -> tuple[str, str]:
    """(who refused, what it says), "" for a prompt that ran."""
    try:
        result = server.run(prompt, timeout=30)
    except PromptRejected as rejected:
        (errors,) = (entry["errors"] for entry in rejected.node_errors.values())
        error = errors[0]
        named = error["extra_info"]
        return "queue", json.dumps([error["message"], error["details"], named.get("input_name"), named.get("received_value")])
    return (result.error.node_type, result.error.exception_message) if result.error else ("", "it ran")


def test_hostile_settings_are_refused_before_anything_starts(graph_server, tmp_path):
    marker, wrong, tried = tmp_path / "marker", {}, 0
    before = {process.pid for process in descendants(graph_server.pid)}
    watch = Stopwatch("38 hostile workflows")
    for field, values in SETTINGS.items():
        for value in values:
            prompt = flux_prompt(cp={})
            prompt["cp_config"]["inputs"][field] = value.format(m=marker) if value in COMMANDS else value
            tried += 1
            who, said = refusal(graph_server, prompt)
            named = (
                rf"[^:]*\b{field}\)?( x \w+)*: .+\. Got .*; allowed: .+\."
                if not field.endswith("degree")
                else r"\w+_degree.*: .+\. Got .*; allowed: .+\."
            )
            ok = field in said if who == "queue" else who == "CPConfig" and re.match(named, said, re.DOTALL)
            if not ok or len(said) > 4000:
                wrong[f"{field}={value!r:.60}"] = f"{who}: {said:.200} ({len(said)} characters)"
    note("38 hostile workflows", "settings not refused by name", 0, len(wrong))
    watch.within(0.2 * tried, f"{tried} settings are refused")
    assert wrong == {}
    assert {process.pid for process in descendants(graph_server.pid)} == before
    assert "starting" not in graph_server.log_text().partition("Starting server")[2]
    assert not marker.exists()


@pytest.mark.parametrize(
    ("node", "config"),
    [(node, config) for node in ("cp_apply", "sampler") for config in ({"devices": ["cpu", "cpu"]}, "cpu,cpu", 5)],
)
def test_a_config_that_is_no_config_is_refused(node, config, graph_server):
    """ComfyUI lets a workflow put any JSON in the place of a link."""
    prompt = flux_prompt(cp={}, node="CPSampler")
    prompt[node]["inputs"]["cp_config"] = config
    who, said = refusal(graph_server, prompt)
    assert who in ("ApplyContextParallel", "CPSampler", "queue")
    assert "cp_config" in said
    assert graph_server.worker_pids() == []


@pytest.mark.parametrize("node", ["cp_apply", "sampler"])
@pytest.mark.parametrize("model", ["flux.safetensors", 5, {"model": 1}])
def test_a_model_that_is_no_model_is_refused(node, model, graph_server):
    prompt = flux_prompt(cp={}, node="CPSampler")
    prompt[node]["inputs"]["model"] = model
    who, said = refusal(graph_server, prompt)
    assert who in ("ApplyContextParallel", "CPSampler")
    assert said.startswith(f"model: Connect Load Diffusion Model or Load Checkpoint. Got {model!r}; allowed: a MODEL.")


@pytest.mark.bits("the stock path")
def test_unknown_settings_have_no_effect(graph_server):
    """ComfyUI hands a node the inputs that it declares, and no others."""
    prompt = flux_prompt(cp={"world_size": 1})
    prompt["cp_config"]["inputs"] |= {
        "comfyui": "/tmp",
        "model_folders": ["/"],
        "__class__": 1,
        "inventory": {"type": "cpu", "count": 9},
    }
    prompt["cp_apply"]["inputs"]["config"] = {"devices": ["cpu", "cpu"]}
    stock = graph_server.sample(flux_prompt())
    assert torch.equal(graph_server.sample(prompt), stock)
    assert graph_server.worker_pids() == []


def test_the_next_good_prompt_runs(graph_server):
    stock = graph_server.sample(flux_prompt())
    assert graph_server.worker_pids() == []
    assert len(assert_right(graph_server, stock, CP)) == 2
