"""ComfyUI in this network namespace, another computer in the other one: results, faults, times and bytes."""

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from machines.conftest import FOUR, THERE, TWO, WIDE
from safetensors.torch import save_file
from support.faults import Stopwatch, note, wait_for
from support.graphs import flux_prompt
from support.latents import TOLERANCE, assert_close, distance
from support.node_graphs import SERVED, GraphCase, completed
from support.processes import OtherPrograms
from support.sshd import PORT
from support.vae_graphs import vae_prompt

SLOW, SLOWEST = "50mbit", "10mbit"  # links
AXES = {
    "ulysses 4": {"ulysses_degree": 4},
    "ring 4": {"ring_degree": 4},
    "ring 2 x ulysses 2": {"ring_degree": 2, "ulysses_degree": 2},
    "batch 2 x ulysses 2": {"batch_degree": 2, "ulysses_degree": 2},
}
FAMILIES = list({module: name for name, (module, *_) in reversed(SERVED.items()) if module in (
    "flux", "wan", "qwen_image", "hydit", "cosmos", "chroma", "lumina", "aura", "mochi",
)}.values())[:6]  # fmt: skip


@pytest.mark.parametrize("weights", ["whole", "sharded"])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("served", FAMILIES)
def test_parity(served, axes, weights, two, family_checkpoints):
    server, case = two.server, GraphCase(served, settings={"cfg": 4.0, "steps": 2, "batch": 1}, matters=False)
    expected = server.latents_once(completed(case.build(), server))
    cp = {"devices": FOUR, "weights": weights, "ranks_per_call": "all", **AXES[axes]}
    ran = server.run(completed(case.build(cp=cp), server), timeout=120).check()
    assert [rank["device"] for rank in ran.report["ranks"]] == FOUR.split(",")
    assert ran.report["weights"]["placement"] == weights
    found = server.latents(ran)
    off = max(distance(found[name], stock) for name, stock in expected.items())
    note(f"{served}, {axes}, {weights} weights", "difference from the stock graph, in standard deviations", TOLERANCE, off)
    assert off <= TOLERANCE


STOCK = {"exact": None, "tiles": "tiled"}
VAES = [("wan", {}), ("kl", {"batch": 2}), ("ltxv", {}), ("taehv", {})]


@pytest.mark.bits("in mode tiles the same tiles, on the same processor")
@pytest.mark.parametrize("devices", [TWO, FOUR])
@pytest.mark.parametrize(
    ("name", "method", "mode", "size"),
    [
        (name, method, mode, size)
        for name, size in VAES
        for method in ("decode", "encode")
        for mode in STOCK
        if (name, method) != ("kl", "encode") and (name, mode) != ("taehv", "exact")
    ],
)
def test_parity_of_vaes(name, method, mode, size, devices, two):
    stock = two.server.sample(vae_prompt(name, method, STOCK[mode], **size))
    world = len(devices.split(","))
    ran = two.server.run(vae_prompt(name, method, mode, world=world, devices=devices, **size)).check()
    assert [rank["device"] for rank in two.server.status()["ranks"]] == devices.split(",")
    off = ((two.server.latent(ran) - stock).abs().max() / stock.abs().max()).item()
    note(f"VAE {name}, {method}, {mode}, {world} ranks", "relative difference from ComfyUI's own node", 1e-5, off)
    assert off <= (1e-5 if mode == "exact" else 0)


@pytest.mark.parametrize("weights", ["whole", "sharded"])
def test_no_model_file_is_needed_there(weights, two):
    """Weights go over the network, and the log says so."""
    prompt, expected = flux(FOUR, weights=weights), two.server.sample(flux_prompt())
    folder = two.host.models / "diffusion_models"
    folder.rename(folder.with_suffix(".away"))
    try:
        two.server.free_first()
        assert_close(two.server.sample(prompt(), timeout=120), expected)
        assert re.search(r"flux\.safetensors: (0\.\d+) of \1 GB of weights go over the network to pc2", two.server.log_text())
    finally:
        folder.with_suffix(".away").rename(folder)


@pytest.mark.parametrize("weights", ["whole", "sharded"])
def test_weights_of_files_that_are_there_do_not_cross(weights, two):
    prompt = partial(flux_prompt, ckpt=WIDE, width=64, height=64, steps=1)
    size = (two.host.models / "diffusion_models" / f"{WIDE}.safetensors").stat().st_size
    expected = two.server.sample(prompt(), timeout=120)
    two.server.sample(flux(TWO)(), timeout=120)  # the ranks are there
    two.server.free_first()
    before = two.sent()
    found = two.server.sample(prompt(cp={"devices": TWO, "ranks_per_call": "all", "weights": weights}), timeout=120)
    share = (two.sent() - before) / size
    note(f"a model of {size / 1e6:.0f} MB, {weights}", "bytes over the network, over those of the file", 0.1, share)
    assert_close(found, expected)
    assert share < (0.1 if weights == "whole" else 2)


def flux(devices, cfg=1.0, **cp):
    return partial(flux_prompt, cfg=cfg, cp={"devices": devices, "ranks_per_call": "all", **cp})


def decode(mode):
    return partial(vae_prompt, "kl", "decode", mode, devices=TWO, again=True)


# Graph; what makes its size a new one; seconds of every module on one rank.
CANCELS = {
    "2 ranks": (flux(TWO), {"width": 80}, 0.5),
    "batch 2 x ulysses 2": (flux(FOUR, cfg=4.0, batch_degree=2, ulysses_degree=2), {"width": 80}, 0.5),
    "sharded weights": (flux(FOUR, weights="sharded"), {"width": 80}, 0.5),
    "VAE, exact": (decode("exact"), {"rows": 12}, 0.4),
    "VAE, tiles": (decode("tiles"), {"rows": 12}, 0.4),
}


@pytest.mark.parametrize("case", CANCELS)
@pytest.mark.parametrize("rank", ["here", "there"])
def test_cancel_in_the_middle_of_a_call(case, rank, two):
    """All ranks leave it, on both computers, and stay."""
    prompt, size, seconds = CANCELS[case]
    server = two.server
    expected = server.sample(prompt(), timeout=120)
    ranks = [rank["pid"] for rank in server.status()["ranks"]]
    two.faults.arm(0 if rank == "here" else len(ranks) - 1, "slow", module=1, seconds=seconds)
    prompt_id = server.queue(prompt(**size))
    two.faults.wait_taken()
    time.sleep(0.7)
    watch = Stopwatch(f"Cancel inside a call, {case}, the slow rank is {rank}")
    server.interrupt()
    assert server.wait(prompt_id, 30).status == "interrupted"
    watch.within(2, "the prompt ends")
    assert_close(server.sample(prompt(), timeout=120), expected)
    # A group that has ended its half leaves no more, on one computer as on two: the workers are restarted.
    if case != "batch 2 x ulysses 2":
        assert [rank["pid"] for rank in server.status()["ranks"]] == ranks


@pytest.mark.bits("the repeated call is thrown away")
@pytest.mark.parametrize("weights", ["whole", "sharded"])
@pytest.mark.parametrize("devices", [TWO, FOUR])
def test_measure(devices, weights, two):
    """A call is repeated on ComfyUI's computer; it changes no bit."""
    prompt = partial(flux(devices, cfg=4.0, weights=weights), node="CPSampler", steps=3, width=128, height=128)
    expected = two.server.sample(prompt(), timeout=120)
    assert two.server.post("/context_parallel/measure")["status"]["speed"]["measuring"]
    ran = two.server.run(prompt(), timeout=120).check()
    assert (two.server.latent(ran) == expected).all()
    assert ran.report["seconds_per_call_on_one_device"] > 0
    assert not two.server.status()["speed"]["measuring"]


def test_memory_that_runs_out_there_is_made(two):
    expected = two.server.sample(flux(TWO)(), timeout=120)
    two.faults.arm(1, "oom", module=3)
    assert_close(two.server.sample(flux(TWO)(), timeout=60), expected)
    assert "rank 1 ran out of memory; making room" in two.server.log_text()


SCAN = """
import selectors, socket, sys
for first in range(1, 65536, 500):
    with selectors.DefaultSelector() as selector:
        for port in range(first, min(first + 500, 65536)):
            probe = socket.socket()
            probe.setblocking(False)
            probe.connect_ex((sys.argv[1], port))
            selector.register(probe, selectors.EVENT_WRITE, port)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    print(key.data)
                selector.unregister(key.fileobj)
                key.fileobj.close()
"""


def listening(prefix):
    """Return the programs to which the other computer can connect, by their ports."""
    lines = subprocess.run([*prefix, "ss", "-Hltnp"], check=True, capture_output=True, text=True).stdout.splitlines()
    places = [(line.split()[3].rpartition(":"), re.search(r'\(\("([^"]+)"', line)) for line in lines]
    return {int(port): found[1] for (address, _, port), found in places if address not in ("127.0.0.1", "[::1]")}


def test_only_gloo_and_sshd_can_be_talked_to(two):
    """From one computer to the other, during a prompt."""
    running = two.server.queue(flux_prompt(ckpt=WIDE, cp={"devices": FOUR, "ranks_per_call": "all"}, steps=500))
    two.server.wait_for_step(running)
    there = ("ip", "netns", "exec", THERE)
    for address, own, other in (("10.77.0.1", (), there), ("10.77.0.2", there, ())):
        scanned = subprocess.run([*other, sys.executable, "-c", SCAN, address], check=True, capture_output=True, text=True)
        programs = listening(own)
        assert {*map(int, scanned.stdout.split())} == programs.keys()
        assert {name for port, name in programs.items() if port != PORT and not name.startswith("cp-rank")} == set()
    two.server.interrupt()
    assert two.server.wait(running).status == "interrupted"


LORA_BYTES = 2 * 3072 * 1024 * 4


@pytest.fixture(scope="session")
def lora(checkpoints_dir):
    """A LoRA of 24 MB."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"diffusion_model.double_blocks.{block}.img_attn.qkv.diff": 0.01 * torch.randn(3072, 1024, generator=generator)
        for block in range(2)
    }
    save_file(weights, checkpoints_dir / "loras" / "large.safetensors")
    return "large"


def test_bytes_of_a_message_cross_once_for_all_ranks_there(two, lora):
    """The first rank there hands them on by memory."""
    sent = {}
    for devices in (TWO, f"{TWO},pc2/cpu"):
        prompt = partial(flux_prompt, ckpt=WIDE, cp={"devices": devices, "ranks_per_call": "all"}, width=64, height=64, steps=1)
        two.server.run(prompt(), timeout=120).check()
        before = two.sent()
        found = two.server.sample(prompt(loras=[lora]), timeout=120)
        sent[devices] = two.sent() - before
        assert_close(found, two.server.sample(flux_prompt(ckpt=WIDE, width=64, height=64, steps=1, loras=[lora]), timeout=120))
    ratio = (sent[f"{TWO},pc2/cpu"] - sent[TWO]) / LORA_BYTES
    note("a LoRA of 24 MB, two ranks there", "bytes that one rank there does not need, over the LoRA's", 0.25, max(0.0, ratio))
    assert sent[TWO] > LORA_BYTES
    assert ratio < 0.25


def limit(rate):
    """Limit the link, in both directions."""
    for place in ((), ("ip", "netns", "exec", THERE)):
        device = "vb" if place else "va"
        change = ("tc", "qdisc", "change", "dev", device, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        subprocess.run([*place, *change], check=True)


LEAST = 1.8  # of 2


def test_the_batch_axis_wins_on_a_slow_link(two):
    """Halves of CFG exchange their result only, where Ulysses sends more than it saves. The model is wide: it waits for cores."""
    ways = {
        "one rank": {"world_size": 1},
        "batch 2": {"devices": TWO, "batch_degree": 2, "ranks_per_call": "all"},
        "ulysses 2": {"devices": TWO, "batch_degree": 1, "ulysses_degree": 2, "ranks_per_call": "all"},
    }
    two.server.post("/context_parallel/settings", {"measure": False})  # it would repeat a call on one rank
    took, others = {name: [] for name in ways}, OtherPrograms()
    limit(SLOW)
    try:
        for name in (*("one rank", "batch 2") * 3, "ulysses 2"):
            prompt = flux_prompt(ckpt=WIDE, cp=ways[name], width=512, height=512, cfg=4.0, steps=3)
            took[name] += two.server.step_seconds(two.server.run(prompt, timeout=300).check())
    finally:
        limit("1gbit")
    busy = others.cores()
    seconds = {name: statistics.median(times) for name, times in took.items()}
    for name, median in seconds.items():
        note(f"CFG 4 over {SLOW}", f"seconds of a step, {name}", 0, median, "s")
    gain = seconds["one rank"] / seconds["batch 2"]
    note(f"CFG 4 over {SLOW}", f"batch 2, times as fast as one rank; other programs used {busy:.1f} cores", LEAST, gain)
    assert seconds["batch 2"] < seconds["ulysses 2"]
    assert seconds["one rank"] < seconds["ulysses 2"]
    if busy < 0.2:  # two ranks on two cores need both
        assert gain >= LEAST


@pytest.mark.parametrize(("devices", "here"), [(TWO, 1), (FOUR, 2)])
def test_the_second_call_over_a_slow_link_stays_here(devices, here, two):
    """The first one took five times as long on both computers."""
    prompt = partial(flux_prompt, ckpt=WIDE, node="CPSampler", width=512, height=512, steps=2)
    two.server.post("/context_parallel/settings", {"measure": False})
    took, choices = {}, {}
    limit(SLOWEST)
    try:
        two.server.post("/context_parallel/restart", timeout=120)
        for ranks in ("auto", "all"):
            ran = two.server.run(prompt(cp={"devices": devices, "ranks_per_call": ranks}), timeout=300).check()
            took[ranks], choices[ranks] = ran.report["seconds_per_call"], ran.report["choice"]
    finally:
        limit("1gbit")
        two.server.post("/context_parallel/restart", timeout=120)
        two.server.post("/context_parallel/settings", {"measure": True})
    note(
        f"a first run over {SLOWEST}",
        "seconds of a call on both computers, over those of the choice",
        1,
        took["all"] / took["auto"],
    )
    assert (choices["auto"]["ranks"], choices["auto"]["of"]) == (here, len(devices.split(",")))
    assert took["auto"] < took["all"]


SENDING = {
    "Cancel": (lambda two, ranks: two.server.interrupt(), 1.25, "interrupted"),
    "a rank here is killed": (lambda two, ranks: os.kill(ranks[0]["pid"], signal.SIGKILL), 1.7, "error"),
    # The answer comes with the new workers, which measure the slow link.
    "Restart workers": (lambda two, ranks: two.restart(), 1.0, "error"),
    "ComfyUI ends": (lambda two, ranks: two.server.stop(signal.SIGINT), 1.0, ""),
}


@pytest.mark.parametrize("fault", SENDING)
def test_nothing_waits_for_what_is_on_its_way(fault, two, lora):
    """24 MB over 4 Mbit/s take 50 s, and would keep every signal waiting."""
    act, bound, status = SENDING[fault]
    cp = {"devices": TWO, "ranks_per_call": "all"}
    two.server.run(flux_prompt(ckpt=WIDE, cp=cp, width=64, height=64, steps=1), timeout=120).check()
    ranks, prompt = two.server.status()["ranks"], flux_prompt(ckpt=WIDE, cp=cp, width=64, height=64, steps=1, loras=[lora])
    limit("4mbit")
    try:
        before = two.sent()
        running = two.server.queue(prompt)
        wait_for(lambda: two.sent() > before + (1 << 20), 30)
        watch = Stopwatch(f"{fault} while 24 MB cross 4 Mbit/s")
        act(two, ranks)
        if status:
            assert two.server.wait(running, 60).status == status
        watch.within(bound, "to the end of the prompt" if status else "to its end")
        assert not status or two.sent() < before + (12 << 20)  # the rest does not follow
    finally:
        limit("1gbit")
    if not status:
        two.server.start()
    stock = two.server.sample(flux_prompt(ckpt=WIDE, width=64, height=64, steps=1, loras=[lora]), timeout=120)
    assert_close(two.server.latent(two.server.run(prompt, timeout=120).check()), stock)
