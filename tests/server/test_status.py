"""What users and the frontend can ask about the workers, and the restart, on ComfyUI's own server and under its rules."""

import json
import os
import re
import signal
import time
from functools import partial
from urllib.error import HTTPError

import pytest
from support.faults import SLACK, SOAK, Stopwatch
from support.graphs import cp_config, flux_prompt
from support.node_graphs import assert_right

from cp_runtime.version import VERSION
from cp_runtime.words import words_in

CP = {"world_size": 2}
STATUS, RESTART, MEASURE, SETTINGS, HOSTS = (
    f"/context_parallel/{name}" for name in ("status", "restart", "measure", "settings", "hosts")
)
BYPASSED, WAITING = "without Context Parallel in this run", "waiting for this run"
RUN = re.compile("2 ranks|^about .* as fast as")  # what a node says of a run on two ranks
LONG = {"width": 512, "height": 512, "steps": 60}
SHOWN = ("PreviewImage", {"images": ["big", 0]})


@pytest.fixture(scope="module")
def expected(pool_server):
    """The stock latent. What other tests have left on the workers is gone."""
    pool_server.answer(RESTART, "POST")
    return pool_server.sample(flux_prompt())


def test_a_machine_without_accelerators_has_cpu_ranks_to_choose_and_says_why(off_server):
    code, found = off_server.answer("/context_parallel/devices", "GET")
    assert (code, found["reason"]["case"], found["indirect"]) == (200, "flag", None)
    assert found["devices"] == [{"name": f"cpu:{i}", "title": "", "memory": 0} for i in range(2)]


def test_what_the_panel_chooses_holds_for_graphs_without_a_config_and_starts_nothing(off_server):
    assert off_server.status()["settings"] == {"devices": "", "measure": True}
    off_server.post(SETTINGS, {"devices": "cpu:1", "measure": False})
    assert off_server.status()["settings"] == {"devices": "cpu:1", "measure": False}
    prompt = flux_prompt(cp={})
    del prompt["cp_config"], prompt["cp_apply"]["inputs"]["cp_config"]
    off_server.run(prompt).check()  # one device: the model passes through
    for wrong in ({"devices": "cuda:9"}, {"devices": 1}, {"measure": "no"}, {"other": 1}, ["devices"]):
        with pytest.raises(HTTPError, match="400"):
            off_server.post(SETTINGS, wrong)
    off_server.post(SETTINGS, {"devices": "", "measure": True})
    assert off_server.worker_pids() == []


@pytest.mark.parametrize("path", [SETTINGS, HOSTS])
def test_a_body_that_is_no_object_is_refused(off_server, path):
    for wrong in (b"", b"{", b"\xff", b"[" * 100_000, b"null", b"1", b'"add"', b'["devices"]'):
        code, answer = off_server.answer(path, "POST", data=wrong, headers={"Content-Type": "application/json; charset=none"})
        assert code == 400
        assert answer["error"].startswith("body: Send a JSON object. Got ")
        assert answer["error"].endswith("allowed: a JSON object.")


def test_no_worker_yet(off_server):
    off = off_server.status()
    empty = {
        "activity": "",
        "fallback": "",
        "translations": {},
        "world_size": 0,
        "models": [],
        "weights": {},
        "memory": {},
        "ranks": [],
        "compiling": False,
    }
    unknown = ("alone", "backend", "peer_to_peer", "pace", "last_call", "last_vae_call", "last_upscale_call", "starting", "loading")
    # By other tests, on one device.
    left = ("last_error", "errors", "speed", "no_speed", "node", "settings", "hosts", "last_prompt")
    others = {name: off[name] for name in left}
    assert off == {"state": "off", "version": VERSION, **empty, **dict.fromkeys(unknown), **others}
    assert off_server.answer(RESTART, "POST") == (200, {"restarted": False, "error": None, "status": off})


def test_a_run_that_is_refused_is_an_error_of_the_node_that_refuses(off_server):
    for place, node in (("model_nodes", ("cp_apply", "ApplyContextParallel")), ("after_apply", ("sampler", "KSampler"))):
        error = off_server.fails(flux_prompt(cp=CP, **{place: [("TestPatch", {"kind": "attn1_output_patch"})]}))
        shown = off_server.status()["last_error"]
        assert shown["message"] == error.exception_message.strip()
        assert shown["message"].startswith("Apply Context Parallel: ")
        assert (shown["rank"], shown["device"], shown["node"]) == (None, None, dict(zip(("id", "type"), node, strict=True)))


@pytest.mark.parametrize(
    ("node", "failing"),
    [
        ("ApplyContextParallel", {"model_nodes": [("TestPatch", {"kind": "multigpu"})]}),
        ("CPPipeFusion", {"pipefusion": {"stages": 9, "patches": 8, "warmup_calls": 1}}),
        ("CPReport", {"others": {"shown": ("CPReport", {"report": "no report"})}}),
        ("CPUpscaleImage", {"others": {"big": ("CPUpscaleImage", {"upscale_model": 1, "image": 1}), "shown": SHOWN}}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_error_outside_of_sampling_is_told_once_in_place_of_the_speed_before(node, failing, off_server):
    off_server.run(flux_prompt(cp={"world_size": 1})).check()
    before = off_server.status()
    assert before["speed"] is not None
    assert before["last_error"] is None
    error = off_server.fails(flux_prompt(cp=CP, **failing))
    now = off_server.status()
    assert (now["speed"], now["no_speed"]) == (None, "failed")
    assert now["errors"] == [now["last_error"], *before["errors"]][:10]
    assert (now["last_error"]["message"], now["last_error"]["node"]["type"]) == (error.exception_message.strip(), node)


def test_a_run_on_one_device_needs_no_workers_and_is_told(off_server):
    """By a plain KSampler: whoever compares has the figure from then on."""
    since = time.monotonic()
    off_server.run(flux_prompt(cp={"world_size": 1}, steps=4)).check()

    def ended(event):  # one may come in the middle of a run
        speed = event.data["speed"] or {} if event.type == "context_parallel.status" else {}
        return bool(speed) and speed["words"].startswith("4 steps in ")

    status = off_server.wait_event(ended, since=since).data
    assert (status["state"], status["last_call"]) == ("off", None)
    assert re.fullmatch(r"4 steps in \S+ s: on one process", status["speed"]["words"])
    assert 0 < status["speed"]["seconds_per_call"] == status["speed"]["seconds_per_call_on_one_device"]
    assert off_server.status()["last_error"] is None  # that of a run before


@pytest.mark.parametrize(
    ("node", "cp", "first"),
    [("KSampler", None, BYPASSED), ("CPSampler", None, BYPASSED), ("KSampler", {"world_size": 1}, WAITING)],
    ids=["bypassed", "report", "one device"],
)
def test_a_run_takes_the_place_of_the_one_before(node, cp, first, pool_server, expected):
    """On node and panel, from its beginning on: on one device, or without the pack, as after Ctrl-B on Apply Context Parallel."""
    since = time.monotonic()
    pool_server.run(flux_prompt(cp=CP, steps=4, node=node)).check()
    pool_server.wait_event(lambda event: event.type == "text" and RUN.search(event.data[1]), since=since)
    assert pool_server.status()["last_call"]["at_work"] == 2
    since, texts, prompt = time.monotonic(), [], flux_prompt(cp=cp, steps=4, seed=7)
    prompt["sampler"]["class_type"] = node
    pool_server.run(prompt).check()

    def told(event):
        texts.extend([event.data[1]] if event.type == "text" and event.data[0] == "sampler" and event.time >= since else [])
        return bool(texts) and (texts[-1] == BYPASSED or "on one process" in texts[-1])

    pool_server.wait_event(told, since=since)
    begun = texts.index(first)  # one of the run before may still have been on its way
    assert not any(map(RUN.search, texts[begun:]))
    if first == BYPASSED and node == "KSampler":
        assert pool_server.status()["no_speed"] == "bypassed"
    if node == "KSampler":  # the report of CP Sampler measures its run
        status = pool_server.wait_status(lambda status: status["last_call"] is None)
        assert (status["speed"] is None) == (cp is None)


def test_the_node_the_panel_and_the_speed_are_of_the_same_calls(pool_server, expected):
    """Of new, short calls the first runs on all ranks, and the second on one, as a try."""
    pool_server.run(flux_prompt(cp={**CP, "ranks_per_call": "auto"}, width=96, height=160, steps=2)).check()
    status = pool_server.wait_status(lambda status: status["state"] == "idle")
    assert status["speed"]["parts"]["ranks"] == status["last_call"]["at_work"] == 2
    assert " · 2 ranks (" in status["activity"]


def test_a_second_config_says_that_it_counts(off_server):
    """Under its node, until it is the only one, and in the log; CP Sampler, whose text is of its run, in the log alone."""

    def text(**first):
        prompt = flux_prompt(cp=first, after_apply=[("ApplyContextParallel", {"cp_config": ["second", 0]})], steps=1)
        prompt["second"] = {"class_type": "CPConfig", "inputs": cp_config(world_size=1)}
        since, node = time.monotonic(), prompt["sampler"]["inputs"]["model"][0]
        off_server.run(prompt).check()
        return off_server.wait_event(lambda event: event.type == "text" and event.data[0] == node, since=since).data[1]

    def said():
        return off_server.log_text().count("those of the last node count")

    before = said()
    assert text(world_size=2) == words_in("en").say("node.overrules")
    assert said() == before + 1
    assert text(world_size=1).strip() == ""
    prompt = flux_prompt(cp={"world_size": 2}, node="CPSampler", steps=1)
    prompt["second"] = {"class_type": "CPConfig", "inputs": cp_config(world_size=1)}
    prompt["sampler"]["inputs"]["cp_config"] = ["second", 0]
    off_server.run(prompt).check()
    assert said() == before + 2


def texts_after(server, since, node="sampler"):
    """Waits for a text under a node, later than `since`."""
    return lambda text: server.wait_event(lambda event: event.type == "text" and event.data == (node, text), since=since)


def test_a_node_that_its_prompt_does_not_run_says_so(pool_server, expected):
    """One that is cached, one that another program ran, one that passes its model by while another does not."""
    graph = partial(flux_prompt, cp=CP, steps=4, nonce=7701)
    pool_server.run(graph()).check()
    wait_text = texts_after(pool_server, time.monotonic())
    pool_server.run(graph()).check()
    wait_text(WAITING)
    wait_text("not run: nothing has changed")
    wait_text = texts_after(pool_server, time.monotonic())
    queued = pool_server.post("/prompt", {"prompt": graph(nonce=7702)})
    wait_text("the last run came from another program")
    pool_server.wait_status(lambda status: (status["last_prompt"] or {}).get("id") == queued["prompt_id"])
    both, wait_text = graph(nonce=7703), texts_after(pool_server, time.monotonic())
    model = both["cp_apply"]["inputs"]["model"]
    both["other"] = {**both["sampler"], "inputs": {**both["sampler"]["inputs"], "seed": 5}}
    both["sampler"]["inputs"]["model"] = model
    pool_server.queue(both)
    wait_text(BYPASSED)


def test_a_sampler_in_a_subgraph_speaks_under_the_subgraph(pool_server, expected):
    """ComfyUI names its node by all that it is in; a browser that shows the outermost graph has only the first of them."""
    since = time.monotonic()
    prompt = json.loads(json.dumps(flux_prompt(cp=CP, steps=4)).replace('"sampler"', '"12:5:3"'))
    pool_server.run(prompt).check()
    for node in ("12", "12:5", "12:5:3"):
        pool_server.wait_event(
            lambda event, node=node: event.type == "text" and event.data[0] == node and RUN.search(event.data[1]), since=since
        )
    assert pool_server.status()["node"] == {"id": "12:5:3", "type": "KSampler"}


def test_a_start_that_is_cancelled_has_not_failed(pool_server, expected, faults):
    os.kill(assert_right(pool_server, expected)[0], signal.SIGKILL)
    pool_server.run(flux_prompt(cp=CP))  # notices it
    assert pool_server.status()["no_speed"] == "failed"
    faults.arm(1, "slow", at="start", seconds=3)
    wait_text = texts_after(pool_server, time.monotonic())
    prompt_id = pool_server.queue(flux_prompt(cp=CP, **LONG))
    pool_server.wait_status(lambda status: status["state"] == "starting" and not faults.waiting)
    pool_server.interrupt()
    assert pool_server.wait(prompt_id, 60).status == "interrupted"
    wait_text("cancelled")
    assert pool_server.status()["state"] == "off"
    assert_right(pool_server, expected)


def test_idle(pool_server, expected):
    pids = assert_right(pool_server, expected)
    status = pool_server.wait_status(lambda status: status["state"] == "idle")
    assert (status["world_size"], status["backend"], status["models"]) == (2, "gloo", ["flux.safetensors"])
    assert [*status["weights"]] == [*status["memory"]] == status["models"]
    assert status["weights"]["flux.safetensors"].startswith("whole: 0.0289 GB of weights")
    shown = [(rank["rank"], rank["device"], rank["pid"], rank["state"], rank["culprit"]) for rank in status["ranks"]]
    assert shown == [(rank, "cpu", pid, "idle", False) for rank, pid in enumerate(pids)]
    assert max(rank["seconds_since_heartbeat"] for rank in status["ranks"]) <= 1 * SLACK
    assert min(rank["memory"]["host"] for rank in status["ranks"]) > 50e6
    assert pool_server.get(f"/api{STATUS}")["ranks"][0]["pid"] == pids[0]


def test_answers_while_the_ranks_start_and_compute(pool_server, expected, faults):
    assert_right(pool_server, expected)
    assert pool_server.answer(RESTART, "POST")[0] == 200
    os.kill(pool_server.worker_pids()[0], signal.SIGKILL)
    pool_server.run(flux_prompt(cp=CP))  # notices it
    faults.arm(1, "slow", at="start", seconds=1)  # rank 0 waits for it
    prompt_id = pool_server.queue(flux_prompt(cp=CP, **LONG))
    starting = pool_server.wait_status(
        lambda status: status["state"] == "starting" and len(status["ranks"]) == 2 and not faults.waiting
    )
    assert {rank["state"] for rank in starting["ranks"]} == {"starting"}
    begun = starting["starting"]
    assert abs(begun["since"] - time.time()) < 60
    assert begun["stage"] in ("importing", "connecting")
    assert begun["last_took"] > 0
    assert starting["activity"] == f"starting 2 workers: {begun['stage']} (took {begun['last_took']:.0f} s last time)…"
    busy = pool_server.wait_status(lambda status: status["state"] == "computing" and status["ranks"][1]["modules"] > 0)
    assert {rank["state"] for rank in busy["ranks"]} <= {"computing", "idle"}
    pool_server.interrupt()
    assert pool_server.wait(prompt_id, 60).status == "interrupted"
    pool_server.wait_status(lambda status: status["state"] == "idle")


def test_ranks_and_state_agree(pool_server, expected):
    """Between two calls as well; and nothing lasts longer than the prompt."""
    assert_right(pool_server, expected)
    prompt_id = pool_server.queue(flux_prompt(cp=CP, **{**LONG, "steps": 20 if SOAK else 6}))
    while prompt_id not in (history := pool_server.get(f"/history/{prompt_id}")):
        status = pool_server.status()
        assert status["state"] in {rank["state"] for rank in status["ranks"]}, status
    assert history[prompt_id]["status"]["status_str"] == "success"
    status = pool_server.status()
    assert {status["state"], *(rank["state"] for rank in status["ranks"])} == {"idle"}


@pytest.mark.parametrize(
    ("way", "text"), [("cancel", "cancelled"), ("kill", "failed"), pytest.param("restart", "failed", marks=pytest.mark.soak)]
)
def test_the_text_in_a_node_that_did_not_end_says_so(pool_server, expected, way, text):
    """The browser would show what was said before for ever."""
    pids, since = assert_right(pool_server, expected), time.monotonic()
    ring = {**CP, "ulysses_degree": 1, "ring_degree": 2}  # what is said of it was not said of the prompt before
    prompt_id = pool_server.queue(flux_prompt(cp=ring, width=1024, height=1024, steps=20))  # seconds per step
    # Of the node of this prompt: what was said of the one before may come late.
    mine = {"prompt_id": prompt_id, "node": "sampler"}
    since = pool_server.wait_event(lambda event: event.type == "executing" and mine.items() <= event.data.items(), since=since).time
    pool_server.wait_event(lambda event: event.type == "text" and "· 2 ranks (ring 2)" in event.data[1], since=since)
    pool_server.wait_status(lambda status: status["ranks"][0]["modules"] > 0)
    if way == "cancel":
        pool_server.interrupt()
    elif way == "kill":
        os.kill(pids[1], signal.SIGKILL)
    else:
        pool_server.answer(RESTART, "POST")
    assert pool_server.wait(prompt_id).status == ("interrupted" if way == "cancel" else "error")
    pool_server.wait_event(lambda event: event.type == "text" and event.data == ("sampler", text), since=since)


def test_a_stopped_rank_is_silent_and_a_dead_one_gone(pool_server, expected):
    """Nothing uses them meanwhile."""
    pids = assert_right(pool_server, expected)
    watch = Stopwatch("health: SIGSTOP of an idle rank")
    os.kill(pids[1], signal.SIGSTOP)
    status = pool_server.wait_status(lambda status: status["ranks"][1]["state"] == "silent")
    watch.within(3, "status says silent")
    assert status["state"] == "failed"
    assert status["ranks"][1]["process"] == "stopped"
    assert status["ranks"][0]["state"] == "idle"
    os.kill(pids[1], signal.SIGCONT)
    pool_server.wait_status(lambda status: status["state"] == "idle")

    watch, since = Stopwatch("health: SIGKILL of an idle rank"), time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    status = pool_server.wait_status(lambda status: status["ranks"][1]["state"] == "gone")
    watch.within(1, "status says gone")
    assert status["state"] == "failed"
    pool_server.wait_event(
        lambda event: event.type == "context_parallel.status" and event.data["state"] == "failed", 3 * SLACK, since=since
    )
    pool_server.fails(flux_prompt(cp=CP), f"rank 1 (pid {pids[1]}) failed: SIGKILL")
    status = pool_server.status()
    assert status["state"] == "failed"
    failure = status["last_error"]
    assert (failure["rank"], failure["device"], failure["node"]) == (1, "cpu", {"id": "sampler", "type": "KSampler"})
    assert [(rank["state"], rank["culprit"]) for rank in status["ranks"]] == [("ended", False), ("failed", True)]
    assert "SIGKILL" in failure["message"]
    assert "INFO|" not in failure["message"]
    assert abs(failure["time"] - time.time()) < 60
    assert pool_server.answer(RESTART, "POST")[1]["status"]["last_error"] is None
    assert_right(pool_server, expected)
    pool_server.wait_status(lambda status: status["state"] == "idle")


@pytest.mark.parametrize("stopped", [False, True], ids=["computing", "hanging"])
def test_restart_in_the_middle_of_a_step(pool_server, expected, faults, stopped):
    """Between two steps the prompt would simply go on with the new workers."""
    pids = assert_right(pool_server, expected)
    assert [rank["modules"] for rank in pool_server.status()["ranks"]] == [0, 0]
    faults.arm(0, "slow", module=2, seconds=1.0)  # and all later ones
    prompt_id = pool_server.queue(flux_prompt(cp=CP))
    pool_server.wait_status(lambda status: status["ranks"][0]["modules"] > 0)
    if stopped:
        os.kill(pids[1], signal.SIGSTOP)
        pool_server.wait_status(lambda status: [rank["state"] for rank in status["ranks"]] == ["computing", "silent"])
    watch = Stopwatch(f"health: restart while {'a rank hangs' if stopped else 'computing'}")
    code, answer = pool_server.answer(RESTART, "POST")
    assert (code, answer["restarted"], answer["error"]) == (200, True, None)
    at, message = pool_server.failed_at(prompt_id)
    watch.within(1, "the prompt fails", at - watch.began)
    assert "the workers were restarted on request" in message
    assert not set(pids) & {rank["pid"] for rank in answer["status"]["ranks"]}
    assert assert_right(pool_server, expected) == [rank["pid"] for rank in answer["status"]["ranks"]]


@pytest.mark.parametrize(("way", "speed"), [("cancel", None), ("stop", "cancelled"), ("out of memory", "it has too little memory")])
def test_a_repetition_on_one_device_ends_like_any_call(pool_server, expected, faults, way, speed):
    """Cancel leaves it to the next run, unless the measurement alone is cancelled; what has no room on one device runs on all the
    same. It is one call, not the first."""
    pids = assert_right(pool_server, expected)
    before = pool_server.answer(MEASURE, "POST")[1]["status"]["last_call"]
    if way == "out of memory":
        faults.arm(1, "slow", module=1, seconds=0.3, times=2)  # two calls: the status is some tenths of a second old
    prompt_id = pool_server.queue(flux_prompt(cp=CP, width=640, height=512, steps=3))
    if way == "cancel":
        pool_server.wait_status(lambda status: status["activity"] == "measuring a call on one device…")
        pool_server.interrupt()
        assert pool_server.wait(prompt_id).status == "interrupted"
        assert pool_server.status()["speed"]["measuring"]
    elif way == "stop":
        pool_server.wait_status(lambda status: status["activity"] == "measuring a call on one device…")
        assert not pool_server.answer(MEASURE, "DELETE")[1]["status"]["speed"]["measuring"]
        pool_server.wait(prompt_id).check()
        assert pool_server.status()["speed"]["words"].endswith("not compared with one process: cancelled")
    else:
        pool_server.wait_status(
            lambda now: now["last_call"] not in (None, before) and now["ranks"][0]["modules"] > 0
        )  # the second call
        faults.arm(0, "oom", module=4)
        pool_server.wait(prompt_id).check()
        assert faults.waiting == []
        status = pool_server.status()
        assert status["speed"]["words"].endswith(speed)
        assert (status["speed"]["measuring"], status["last_error"]) == (False, None)
    assert assert_right(pool_server, expected) == pids


@pytest.mark.parametrize("path", [STATUS, RESTART, MEASURE, f"/api{STATUS}", f"/api{RESTART}", f"/api{MEASURE}", SETTINGS, HOSTS])
@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}], ids=["origin", "fetch"])
def test_other_sites_are_refused(pool_server, expected, path, headers):
    pids = assert_right(pool_server, expected)
    assert pool_server.answer(path, "GET" if path.endswith(STATUS) else "POST", headers=headers) == (403, None)
    assert pool_server.worker_pids() == pids


@pytest.mark.parametrize("path", [RESTART, MEASURE, SETTINGS, HOSTS])
def test_what_changes_something_is_no_get(pool_server, expected, path):
    """A link or an image on a page must not do it."""
    pids = assert_right(pool_server, expected)
    assert pool_server.answer(path, "GET")[0] in (404, 405)
    assert pool_server.worker_pids() == pids


def parts_of(prompt):
    """Seconds, and those on all devices, by part."""
    return {each["part"]: (each["seconds"], each["on_all"]) for each in prompt["parts"]}


def test_where_the_time_of_a_prompt_went(pool_server):
    """Stock, shared out, and with nothing left to do."""
    graph = partial(flux_prompt, width=256, height=256, steps=4, nonce=9901)
    began = time.monotonic()
    pool_server.run(graph()).check()
    alone, limit = pool_server.status()["last_prompt"], time.monotonic() - began
    assert parts_of(alone)["denoising"][0] > 0
    assert parts_of(alone)["denoising"][1] == 0
    assert alone["seconds"] == pytest.approx(sum(seconds for seconds, _ in parts_of(alone).values()))
    assert alone["seconds"] <= limit
    result = pool_server.run(graph(cp=CP)).check()
    shared = pool_server.status()["last_prompt"]
    assert shared["id"] == result.prompt_id != alone["id"]
    assert parts_of(shared)["denoising"][0] == parts_of(shared)["denoising"][1] > 0
    assert shared["words"].startswith("Denoising took ")
    pool_server.run(graph(cp=CP)).check()
    cached = pool_server.status()["last_prompt"]
    assert cached["words"].startswith("Nothing ran. ")
    assert parts_of(cached).keys() <= {"other"}
