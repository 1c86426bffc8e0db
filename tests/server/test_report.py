"""What a run tells about itself: the report of CP Sampler, CP Report, and the events of the status panel."""

import json
import re
import time
from urllib.error import HTTPError

import pytest
from support import families
from support.faults import SLACK
from support.graphs import family_prompt, flux_prompt
from support.server import ComfyServer
from websocket import ABNF, create_connection

from cp_runtime.words import words_in

CP = {"world_size": 2, "ulysses_degree": 2}
STATUS = "context_parallel.status"


def sampled(server, **cp):
    """The report of a CP Sampler, as JSON text and read."""
    result = server.run(flux_prompt(node="CPSampler", width=128, height=128, steps=4, cp=cp)).check()
    text = result.outputs["report"]["text"][0]
    return text, json.loads(text)


def picture(server, report):
    """What CP Report makes of a report: its text, and the picture it shows."""
    prompt = {
        "shown": {"class_type": "CPReport", "inputs": {"report": report}},
        "text": {"class_type": "PreviewAny", "inputs": {"source": ["shown", 0]}},
        "saved": {"class_type": "SaveImage", "inputs": {"images": ["shown", 1], "filename_prefix": "report"}},
    }
    result = server.run(prompt).check()
    return result.outputs["text"]["text"][0], result.outputs["shown"]


@pytest.mark.parametrize("served", ["sd3", "ace_step"])
def test_speedup_is_known_for_families_without_a_wrapper_of_the_transformer(served, server, family_checkpoints):
    """Half of them never ask ComfyUI for wrappers of DIFFUSION_MODEL; ACE-Step shares tokens and no attention. Other sizes are not
    compared."""
    _, entry, _ = families.served()[served]

    def report(world_size, **changes):
        prompt = family_prompt(entry, node="CPSampler", steps=3, cp={"world_size": world_size}, **changes)
        return server.run(prompt).check().report

    assert report(1)["calls"] == 3
    compared = report(2)
    assert (compared["speedup"] or 0) > 0 or "the comparison was disturbed" in compared["speed"]  # others use the cores
    assert report(2, batch=2)["speedup"] is None


def test_a_run_that_is_measured_on_one_device_has_it_for_itself(server):
    server.free_workers()  # a model of the test before may live until Python collects it
    sampled(server, **CP)
    assert server.status()["models"] == ["flux.safetensors"]
    assert server.status()["speed"]["seconds_per_call"] > 0
    _, report = sampled(server, world_size=1)
    status = server.status()
    assert status["models"] == []
    assert status["last_call"] is None  # what the ranks did before is no news of a run on one device
    assert [rank["tokens"] for rank in status["ranks"]] == [{}, {}]
    assert status["speed"]["words"] == report["speed"]
    assert re.fullmatch(r"4 steps in \S+ s: on one process", report["speed"])
    assert status["speed"]["seconds_per_call"] == pytest.approx(report["seconds_per_call"], abs=1e-4)


def test_single_device_runs_are_measured(server):
    """The model goes through Apply, and something in the graph keeps it from the workers."""
    cp = {"world_size": 2, "on_unsupported": "single device"}
    prompt = flux_prompt(node="CPSampler", steps=3, after_apply=[("TestPatch", {"kind": "attn1_output_patch"})], cp=cp)
    report = server.run(prompt).check().report
    assert (report["world_size"], report["calls"]) == (1, 3)
    assert report["seconds_per_call"] > 0


REPORT = {
    "speed_parts": {"cases": ["compared"], "times": "1.8", "unit": "device", "obstacle": ""},
    "world_size": 2, "at_work": 2, "weights": None, "choice": None, "degrees": {"ulysses": 2, "ring": 1, "batch": 1},
    "family": "Flux", "seconds_per_step": 1.25, "seconds_per_call": 1.2, "seconds_per_call_on_one_device": 2.16,
    "communication_share": 0.25,
    "ranks": [
        {"rank": 0, "device": "cpu", "tokens": {"img": 8}, "host_memory": 3 << 29, "device_memory": 0,
         "seconds": {"compute": 0.75, "communication": 0.25, "wait": 0.0}},
        {"rank": 1, "device": "cpu", "tokens": {"img": 8}, "host_memory": 3 << 29, "device_memory": 1 << 30,
         "seconds": {"compute": 0.25, "communication": 0.25, "wait": 0.5}},
    ],
}  # fmt: skip


def test_report_as_text_and_picture(server):
    text, shown = picture(server, json.dumps(REPORT))
    assert text.splitlines() == [
        "1.8 × as fast as one device",
        "1.25 s per step, 1.2 s per call (one device: 2.16 s)",
        "Flux on 2 ranks (ulysses 2)",
        "25% of a call waiting for other devices and for the link",
        "0.2 s of a call in ComfyUI, outside of the ranks",
        "rank 0 on cpu: tokens 8 img, host 1.50 GiB",
        "rank 1 on cpu: tokens 8 img, host 1.50 GiB, device 1.00 GiB",
    ]
    assert len(shown["images"]) == 1
    # The node shows the picture in the place of the text, which some pages write into one line.
    assert [event for event in server.events if event.type == "text" and event.data[0] == "shown"] == []


def test_texts_are_in_the_language_of_the_browser(server):
    """The text under a sampler, and CP Report; another browser's are not."""
    client, words = server.client_id, words_in("zh")
    server.post("/context_parallel/language", {"client": client, "language": "zh-TW"})
    try:
        since = time.monotonic()
        text, report = sampled(server, **CP)
        own = f"{words.say('ranks', count=2)} (ulysses 2)"
        server.wait_event(lambda event: event.type == "text" and event.data[1].endswith(own), since=since)
        lines = picture(server, text)[0].splitlines()
        assert lines[0] == words.speed(report["speed_parts"])
        assert words.say("report.on", family="Flux", ranks=own) in lines
    finally:
        server.post("/context_parallel/language", {"client": client, "language": "en"})
    server.post("/context_parallel/language", {"client": "another", "language": "zh"})
    assert picture(server, text)[0].splitlines()[0] == report["speed"]  # not what ComfyUI keeps of the text
    for wrong in ({"client": client}, {"client": client, "language": 7}, {"client": client, "language": "x" * 1000}, []):
        with pytest.raises(HTTPError, match="400"):
            server.post("/context_parallel/language", wrong)


def test_a_run_without_a_step(server):
    """KSampler returns the latent as it is; what a run before needed is not told."""
    sampled(server, **CP)
    prompt = flux_prompt(node="CPSampler", steps=4, cp=CP)
    prompt["sampler"]["inputs"]["denoise"] = 0.0
    report = server.run(prompt).check().report
    assert (report["calls"], report["seconds_per_call"]) == (0, None)
    picture(server, json.dumps(report))


def changed(**changes):
    return json.dumps(REPORT | changes)


NO_REPORTS = {
    "empty": "",
    "no JSON": "no json",
    "a list": "[]",
    "deep": "[" * 100_000,
    "large": " " * 2**21,
    "incomplete": '{"world_size": 2}',
    "a text for a number": changed(seconds_per_step="1"),
    "a rank of another kind": changed(ranks=[1]),
}


@pytest.mark.parametrize("text", NO_REPORTS.values(), ids=NO_REPORTS)
def test_something_else_than_a_report(text, server):
    error = server.fails({"shown": {"class_type": "CPReport", "inputs": {"report": text}}}, "the JSON report of a CP Sampler")
    assert error.exception_message.startswith("report: Connect its report output. Got ")
    assert len(error.exception_message) < 500


# --- events -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh_server(comfyui_path, checkpoints_dir):
    """A server that the first of these tests finds as it started."""
    with ComfyServer(comfyui_path, models=checkpoints_dir) as running:
        yield running


def statuses(server, since=0.0):
    return [event.data for event in server.events if event.type == STATUS and event.time >= since]


def test_events_follow_the_workers(fresh_server):
    server = fresh_server
    server.run(flux_prompt()).check()
    assert {status["state"] for status in statuses(server)} <= {"off"}  # it was without this pack

    prompt_id = server.queue(flux_prompt(width=384, height=384, steps=4, cp=CP))
    assert server.wait(prompt_id, 120).status == "success"
    server.wait_event(lambda event: event.type == STATUS and event.data["state"] == "idle", 10 * SLACK)
    order = [status["state"] for status in statuses(server) if status["state"] != "off"]
    changes = [state for i, state in enumerate(order) if i == 0 or order[i - 1] != state]
    assert changes in (["starting", "loading", "computing", "idle"], ["starting", "computing", "idle"])  # loading may take no time
    starts = [status["starting"] for status in statuses(server) if status["starting"]]
    assert {start["last_took"] for start in starts} == {None}  # this server has a cache folder of its own
    last = statuses(server)[-1]
    assert last["starting"] is None
    assert [rank["pid"] for rank in last["ranks"]] == server.worker_pids()
    assert all(rank["tokens"] for rank in last["ranks"])

    server.wait_event(lambda event: event.type == "text" and "2 ranks" in event.data[1], 10 * SLACK)
    texts = [event.data for event in server.events if event.type == "text"]
    assert {node for node, _ in texts} == {"sampler"}
    assert texts[0][1].startswith("starting 2 workers: ")
    assert texts[-1][1].endswith(" s per call · 2 ranks (ulysses 2)")
    assert max(len(text) for _, text in texts) <= 60

    # Another node must not show what this one did, while its own first call is under way.
    since = time.monotonic()
    prompt = flux_prompt(width=512, height=512, steps=1, cp=CP)
    prompt["other"] = prompt.pop("sampler")
    prompt["save"]["inputs"]["samples"] = ["other", 0]
    server.run(prompt, timeout=120).check()
    server.wait_event(lambda event: event.type == STATUS and event.data["state"] == "idle", 10 * SLACK, since=since)
    server.wait_event(lambda event: event.type == "text" and event.data[0] == "other", 10 * SLACK, since=since)  # sent after it
    seconds = server.status()["last_call"]["seconds"]
    shown = {event.data[1] for event in server.events if event.type == "text" and event.time >= since and event.data[0] == "other"}
    (text,) = shown
    assert text.endswith(f"{seconds:.3g} s per call · 2 ranks (ulysses 2)")

    quiet = time.monotonic()
    time.sleep(1.5)
    assert len(statuses(server, quiet)) <= 1  # memory may still change


def test_speedup_is_known_after_a_run_on_one_device(fresh_server):
    server = fresh_server
    _, report = sampled(server, **CP)
    assert report["seconds_per_call_on_one_device"] is None
    assert report["speedup"] is None
    tried = []
    while len(tried) < 4:  # a figure that cannot be, where others used the cores, is not shown
        _, alone = sampled(server, world_size=1)
        assert (alone["world_size"], alone["calls"]) == (1, 4)
        assert 0 < alone["seconds_per_call"] <= alone["seconds"]
        text, report = sampled(server, **CP)
        tried.append(report)
        if report["speedup"] is not None:
            break
        assert "the comparison was disturbed" in report["speed"]
    assert report["seconds_per_call_on_one_device"] == alone["seconds_per_call"] or len(tried) > 1
    # One result everywhere: `tests/unit/test_journal.py` has its words and figures.
    assert re.match(r"4 steps in \S+ s instead of about \S+ s: about \d+\.\d × as fast as one process", report["speed"])
    assert picture(server, text)[0].splitlines()[0] == report["speed"]
    status = server.status()
    speed, call = status["speed"], status["last_call"]
    assert (speed["words"], speed["parts"]) == (report["speed"], report["speed_parts"])
    assert (round(speed["times"], 2), round(speed["seconds_per_call"], 4)) == (report["speedup"], report["seconds_per_call"])
    assert (call["degrees"], round(call["waiting_share"], 4)) == (report["degrees"], report["communication_share"])
    times = re.search(r"about \d+\.\d × as fast as one process", speed["words"])
    shown = f"{times[0]} · {speed['seconds_per_call']:.3g} s per call"
    server.wait_event(lambda event: event.type == "text" and event.data == ("sampler", shown))


def test_text_goes_to_the_client_that_queued(fresh_server):
    other = create_connection(f"ws://127.0.0.1:{fresh_server.port}/ws?clientId=other", timeout=5, http_no_proxy=["127.0.0.1"])
    since = time.monotonic()
    try:
        fresh_server.run(flux_prompt(width=512, height=512, steps=6, cp=CP), timeout=120).check()
        fresh_server.wait_event(lambda event: event.type == "text", since=since)
        state = ""
        while state != "idle":
            code, frame = other.recv_data()
            assert code == ABNF.OPCODE_TEXT, frame  # no text for a node
            message = json.loads(frame)
            if message["type"] == STATUS:
                state = message["data"]["state"]
    finally:
        other.close()
