"""What a run tells about itself: the report of CP Sampler, CP Report, and the events of the status panel."""

from __future__ import annotations

import io
import json
import os
import signal
import time

import pytest
from PIL import Image
from support.faults import SLACK
from support.graphs import flux_prompt
from support.server import ComfyServer

CP = {"world_size": 2, "ulysses_degree": 2}
STATUS = "context_parallel.status"


def sampled(server, **cp):
    """The report of a CP Sampler, as JSON text and read."""
    result = server.run(flux_prompt(node="CPSampler", width=128, height=128, steps=4, cp=cp)).check()
    text = result.outputs["report"]["text"][0]
    return text, json.loads(text)


def picture(server, report):
    """What CP Report makes of a report: its text and picture, and the picture it shows."""
    prompt = {
        "shown": {"class_type": "CPReport", "inputs": {"report": report}},
        "text": {"class_type": "PreviewAny", "inputs": {"source": ["shown", 0]}},
        "saved": {"class_type": "SaveImage", "inputs": {"images": ["shown", 1], "filename_prefix": "report"}},
    }
    result = server.run(prompt).check()
    file = server.base / "output" / result.outputs["saved"]["images"][0]["filename"]
    return result.outputs["text"]["text"][0], Image.open(io.BytesIO(file.read_bytes())).convert("RGB"), result.outputs["shown"]


def columns(image, colour):
    """How many pixels of a colour each row has, rows without any left out."""
    rows = [[image.getpixel((x, y)) for x in range(image.width)].count(colour) for y in range(image.height)]
    return [row for row in rows if row]


def test_time_of_every_rank_adds_up(server):
    _, report = sampled(server, **CP)
    times = [rank["seconds"] for rank in report["ranks"]]
    assert all(set(time) == {"compute", "communication", "wait"} and min(time.values()) >= 0 for time in times)
    assert all(time["compute"] > 0 for time in times)
    assert times[0]["communication"] == times[1]["communication"] > 0
    totals = [sum(time.values()) for time in times]
    assert totals[0] == pytest.approx(totals[1], rel=0.2)  # medians of each part over three calls
    assert max(totals) <= 1.2 * report["seconds_per_call"]


def test_speedup_is_known_after_a_run_on_one_device(comfyui_path, checkpoints_dir):
    with ComfyServer(comfyui_path, models=checkpoints_dir) as server:
        _, report = sampled(server, **CP)
        assert report["seconds_per_call_on_one_device"] is None
        assert report["speedup"] is None
        _, alone = sampled(server, world_size=1)
        assert (alone["world_size"], alone["calls"]) == (1, 4)
        assert 0 < alone["seconds_per_call"] <= alone["seconds"]
        text, report = sampled(server, **CP)
        assert report["seconds_per_call_on_one_device"] == alone["seconds_per_call"]
        assert report["speedup"] == pytest.approx(alone["seconds_per_call"] / report["seconds_per_call"], abs=0.02)
        summary, _, _ = picture(server, text)
        assert f"{report['speedup']:.2f} times as fast" in summary
        status = server.get("/context_parallel/status")["last_call"]
        assert status["seconds_on_one_device"] == pytest.approx(alone["seconds_per_call"], abs=1e-4)
        assert status["degrees"] == {"ulysses": 2, "ring": 1, "batch": 1}
        assert 0 < status["communication_share"] < 1


def test_report_as_text_and_picture(server):
    report = {
        "world_size": 2, "devices": ["cpu", "cpu"], "degrees": {"ulysses": 2, "ring": 1, "batch": 1}, "family": "Flux",
        "steps": 4, "calls": 4, "seconds": 5.0, "seconds_per_step": 1.25, "seconds_per_call": 1.2,
        "seconds_per_call_on_one_device": 2.16, "speedup": 1.8, "communication_share": 0.25,
        "ranks": [
            {"rank": 0, "pid": 1, "device": "cpu", "tokens": {"img": 8}, "host_memory": 3 << 29, "device_memory": 0,
             "seconds": {"compute": 0.75, "communication": 0.25, "wait": 0.0}},
            {"rank": 1, "pid": 2, "device": "cpu", "tokens": {"img": 8}, "host_memory": 3 << 29, "device_memory": 1 << 30,
             "seconds": {"compute": 0.25, "communication": 0.25, "wait": 0.5}},
        ],
    }  # fmt: skip
    began = time.monotonic()
    text, image, shown = picture(server, json.dumps(report))
    assert text.splitlines() == [
        "Flux on 2 ranks (ulysses 2)",
        "1.25 s per step, 1.2 s per call, 25% of it waiting for communication",
        "one device: 2.16 s per call, so 1.80 times as fast with all",
        "rank 0 on cpu: tokens 8 img; host 1.50 GiB",
        "rank 1 on cpu: tokens 8 img; host 1.50 GiB, device 1.00 GiB",
    ]
    assert len(shown["images"]) == 1
    event = server.wait_event(lambda event: event.type == "text" and event.data[0] == "shown", since=began)
    assert event.data == ("shown", text)
    # The bars: rank 0 computes three times as long as rank 1, which waits half of the time.
    blue, grey = columns(image, (59, 130, 246)), columns(image, (156, 163, 175))
    whole = max(blue) / 0.75
    assert min(row for row in blue if row > 100) >= 0.2 * whole
    assert 0.45 * whole <= max(grey) <= 0.55 * whole


def test_report_of_one_device(server):
    text, image, _ = picture(server, json.dumps({"world_size": 1, "steps": 4, "seconds": 5.0, "seconds_per_step": 1.25}))
    assert text.splitlines() == ["one device", "1.25 s per step"]
    assert image.width > 100


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", '{"world_size": 2}'])
def test_something_else_than_a_report(server, text):
    error = server.run({"shown": {"class_type": "CPReport", "inputs": {"report": text}}}).error
    assert "report: got" in error.exception_message
    assert "the JSON report of a CP Sampler" in error.exception_message


# --- events -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_server(comfyui_path, checkpoints_dir):
    with ComfyServer(comfyui_path, models=checkpoints_dir) as running:
        yield running


def statuses(server, since=0.0):
    return [event.data for event in server.events if event.type == STATUS and event.time >= since]


def test_events_follow_the_workers(fresh_server):
    server = fresh_server
    server.run(flux_prompt()).check()
    assert statuses(server) == []  # nothing is said where there are no workers

    prompt_id = server.queue(flux_prompt(width=512, height=512, steps=20, cp=CP))
    assert server.wait(prompt_id, 120).status == "success"
    server.wait_event(lambda event: event.type == STATUS and event.data["state"] == "idle", 10 * SLACK)
    order = [status["state"] for status in statuses(server)]
    changes = [state for i, state in enumerate(order) if i == 0 or order[i - 1] != state]
    assert changes == ["starting", "loading", "computing", "idle"]
    last = statuses(server)[-1]
    assert [rank["pid"] for rank in last["ranks"]] == server.worker_pids()
    assert all(rank["tokens"] for rank in last["ranks"])

    texts = [event.data for event in server.events if event.type == "text"]
    assert {node for node, _ in texts} == {"sampler"}
    assert texts[0][1] == "starting 2 ranks…"
    assert texts[-1][1].startswith("2 ranks (ulysses 2), ")

    quiet = time.monotonic()
    time.sleep(3)
    assert len(statuses(server, quiet)) <= 1  # memory may still change


def test_a_rank_that_dies_unused_is_an_event(fresh_server):
    fresh_server.run(flux_prompt(cp=CP)).check()
    pids = fresh_server.worker_pids()
    since = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    event = fresh_server.wait_event(lambda event: event.type == STATUS and event.data["state"] == "failed", 3 * SLACK, since=since)
    assert [rank["state"] for rank in event.data["ranks"]] == ["idle", "gone"]
