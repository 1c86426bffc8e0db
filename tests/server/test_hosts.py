"""The route that looks at another computer; ssh is a stand-in here, the real one is in tests/machines."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from support.faults import SLACK, wait_for
from support.graphs import flux_prompt, wan_prompt
from support.latents import assert_close
from support.modes import by_turns
from support.node_graphs import completed
from support.processes import descendants
from support.ssh import started

from cp_runtime.words import translations

HOSTS = "/context_parallel/hosts"
ENHANCED = {"latent": ["latent", 0], "weight": 4.0}
READY = {
    "host": "gpubox",
    "state": "ready",
    "reason": "",
    "translations": {"zh": "", "ja": ""},
    "devices": [{"name": "gpubox/cpu", "title": "", "memory": 0}],
}


def look(server, host):
    return server.answer(HOSTS, "POST", data=json.dumps({"host": host}).encode())


def test_a_computer_is_looked_at_once_without_ranks_while_the_server_goes_on(off_server, ssh):
    before = {process.pid for process in descendants(off_server.pid)}
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(look, off_server, "gpubox") for _ in range(3)]
        off_server.wait_status(lambda status: {**READY, "state": "checking", "devices": []} in status["hosts"])
        began = time.monotonic()
        off_server.status()
        assert time.monotonic() - began < 1.0 * SLACK
        answers = [each.result() for each in asked]
    for code, answer in answers:
        assert (code, answer["error"]) == (200, None)
        assert READY in answer["status"]["hosts"]
        assert {name: answer[name] for name in READY} == READY
    assert started(ssh).count("gpubox") == 1
    assert off_server.worker_pids() == []
    wait_for(lambda: {process.pid for process in descendants(off_server.pid)} <= before, 10)


WEIGHTS = {"gpubox": (1.0, 1.0), "filled": (0.001, 0.2)}  # least and most of a model's bytes that are sent


@pytest.mark.parametrize("host", by_turns(WEIGHTS, 2))
def test_weights_that_are_in_files_there_are_not_sent(pool_server, host):
    """Each is compared by its content: a file of the same name may have others."""
    expected = pool_server.sample_once(flux_prompt())
    prompt = flux_prompt(cp={"devices": f"cpu,{host}/cpu", "ranks_per_call": "all"})
    assert_close(pool_server.sample(prompt, timeout=120), expected)
    words = rf"flux\.safetensors: (\S+) of (\S+) GB of weights go over the network to {host}, "
    sent, of = map(float, re.findall(words, pool_server.log_text())[-1])
    least, most = WEIGHTS[host]
    assert least <= sent / of <= most


@pytest.mark.soak
def test_a_file_there_that_is_written_to_is_left(pool_server, ssh):
    """Between two prompts: what its pages show now is another model."""
    prompt = partial(flux_prompt, cp={"devices": "cpu,filled/cpu", "ranks_per_call": "all"})
    expected = pool_server.sample_once(flux_prompt(seed=7))  # before the ranks have the model: this process takes it from them
    pool_server.sample(prompt(seed=8), timeout=120)
    file = ssh / "models" / "diffusion_models" / "flux.safetensors"
    content = file.read_bytes()
    try:
        with file.open("r+b") as written:
            written.seek(len(content) // 2)
            written.write(b"\0" * (len(content) // 2))
        assert_close(pool_server.sample(prompt(seed=7), timeout=120), expected)
        assert "was written to after the workers had mapped it; the model is loaded again" in pool_server.log_text()
    finally:
        file.write_bytes(content)


def test_a_pack_in_another_folder_there(pool_server):
    """Its patches go by value, and its code by name."""
    nodes = [("WanChunkFeedForward", {"chunks": 2, "dim_threshold": 8}), ("WanVideoEnhanceAVideoKJ", ENHANCED)]
    graph = partial(wan_prompt, width=72, height=56, model_nodes=nodes)
    expected = pool_server.sample(completed(graph(), pool_server), node_id="save")
    cp = {"devices": "cpu,filled/cpu", "ranks_per_call": "all"}
    assert_close(pool_server.sample(completed(graph(cp=cp), pool_server), timeout=120, node_id="save"), expected)


WRONG = {
    "older": ("differs", r"the computer older cannot work .* yet:\n  ComfyUI: [\d.]+ here, 0\.0\.1 there\. Update the older one\."),
    "nowhere": ("not reached", r"It may sleep.* No route to host\nSee what this says: ssh -o BatchMode=yes nowhere true"),
}


@pytest.mark.parametrize("host", WRONG)
def test_what_is_wrong_is_said(off_server, host):
    state, reason = WRONG[host]
    code, answer = look(off_server, host)
    assert (code, answer["state"], answer["devices"]) == (200, state, [])
    assert re.search(reason, answer["reason"], re.DOTALL)
    assert answer["translations"] == translations(answer["reason"])
    assert {name: answer[name] for name in READY} in off_server.status()["hosts"]


NO_NAME = ("-oProxyCommand=touch x", "me@gpubox", "", "a b", "a/b", "ä", "x" * 300, 1, None, ["gpubox"])


@pytest.mark.parametrize("host", NO_NAME)
def test_what_is_no_name_starts_nothing(off_server, ssh, host):
    before = started(ssh)
    code, answer = look(off_server, host)
    assert code == 400
    assert answer["error"].startswith("host: Give the name after Host in your ssh configuration: ")
    assert answer["translations"] == translations(answer["error"])
    assert started(ssh) == before


def test_nothing_but_a_host_is_asked_for(off_server):
    code, answer = off_server.answer(HOSTS, "POST", data=b'{"host": "gpubox", "user": "me"}')
    assert (code, answer["error"].partition(" Got ")[0]) == (400, "body: Send the name of one host.")
