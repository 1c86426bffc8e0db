"""ComfyUI in this network namespace, another computer in the other one: results, faults, times and bytes."""

import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from functools import partial
from threading import Thread

import pytest
import torch
from safetensors.torch import save_file
from support import checkpoints, preloaded
from support.faults import Faults, Stopwatch, note, wait_for
from support.graphs import flux_prompt
from support.joined import Joining
from support.latents import TOLERANCE, assert_close, distance
from support.node_graphs import SERVED, GraphCase, completed
from support.processes import OtherPrograms
from support.server import ComfyServer
from support.vae_graphs import vae_prompt

THERE = os.environ.get("CP_TEST_MACHINES", "")
ADDRESS = "10.77.0.1:8289"
WIDE, SLOW, SLOWEST = "flux_wide", "50mbit", "10mbit"  # a model with heads of 128 whose products take the time, and links
TWO, FOUR = "cpu,pc2/cpu", "cpu,cpu,pc2/cpu,pc2/cpu"
AXES = {
    "ulysses 4": {"ulysses_degree": 4},
    "ring 4": {"ring_degree": 4},
    "ring 2 x ulysses 2": {"ring_degree": 2, "ulysses_degree": 2},
    "batch 2 x ulysses 2": {"batch_degree": 2, "ulysses_degree": 2},
}
FAMILIES = list({module: name for name, (module, *_) in reversed(SERVED.items()) if module in (
    "flux", "wan", "qwen_image", "hydit", "cosmos", "chroma", "lumina", "aura", "mochi",
)}.values())[:6]  # fmt: skip


class Two:
    """The server, and the computer that has joined it."""

    def __init__(self, server, base, log, faults):
        self.server, self.base, self._log, self.faults = server, base, log, faults
        self.code = re.search(r"join\.py (\S+)", server.log_text())[1]
        self.other = None

    def join(self, code="", **options):
        options = {"options": ("--base-directory", str(self.base)), "env": self.faults.environment, **options}
        return Joining(code or self.code, self._log, cwd=self.server.comfyui_path, prefix=("ip", "netns", "exec", THERE), **options)

    def state(self):
        found = self.server.get("/context_parallel/machines")["machines"]
        return found[0]["state"] if found else ""

    def sent(self):
        return self.server.get("/context_parallel/machines")["machines"][0]["sent"]

    def restart(self):
        """Ask for it. The answer comes with the new workers, which measure the link."""
        Thread(target=self.server.post, args=("/context_parallel/restart",)).start()

    def run(self, steps=2, devices=TWO, **settings):
        return self.server.run(flux_prompt(cp={"devices": devices, "ranks_per_call": "all"}, steps=steps, **settings), timeout=120)


@pytest.fixture(scope="session")
def two(comfyui_path, checkpoints_dir, family_errors, tmp_path_factory):
    preloaded.write_models("support.vaes", checkpoints_dir)
    checkpoints.write_flux(WIDE, checkpoints_dir, hidden=1024, double_blocks=2, single_blocks=4)
    base, faults = tmp_path_factory.mktemp("other"), Faults(tmp_path_factory.mktemp("faults"))
    (base / "custom_nodes").mkdir()
    shutil.copytree(checkpoints_dir, base / "models")
    env = {"CP_MACHINES": ADDRESS, "OMP_NUM_THREADS": "1", **faults.environment}
    with ComfyServer(comfyui_path, models=checkpoints_dir, args=["--use-pytorch-cross-attention"], env=env) as server:
        made = Two(server, base, tmp_path_factory.mktemp("log") / "log", faults)
        watch = Stopwatch("join")
        made.other = made.join()
        try:
            wait_for(lambda: made.state() == "ready", 20)
            watch.within(20, "join.py started to ready")
            yield made
        finally:
            made.other.close()


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


def test_a_vae_that_is_missing_there_is_named(two):
    file = two.base / "models" / "vae" / "kl_vae.safetensors"
    file.rename(file.with_suffix(".away"))
    try:
        two.server.free_first()
        words = f"pc2 has no model file kl_vae.safetensors. Copy it there, into {file}"
        two.server.fails(vae_prompt("kl", "decode", "exact", devices=TWO), words)
    finally:
        file.with_suffix(".away").rename(file)
    two.server.run(vae_prompt("kl", "decode", "exact", devices=TWO)).check()


@pytest.mark.parametrize("weights", ["whole", "sharded"])
def test_a_model_file_that_is_overwritten_there(weights, two):
    """While its ranks use it, and with its time put back. Then it is another one than here, until it is copied again."""
    prompt = flux(TWO, weights=weights)
    file, expected = two.base / "models" / "diffusion_models" / "flux.safetensors", two.server.sample(prompt(), timeout=120)
    before, content = file.stat(), file.read_bytes()
    with file.open("r+b") as opened:
        opened.seek(-4096, os.SEEK_END)
        opened.write(bytes(4096))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    error = two.server.fails(prompt(), f"{file} changed on disk after ComfyUI had loaded it", timeout=60).exception_message
    assert "(on the computer pc2 (10.77.0.2))" in error
    error = two.server.fails(prompt(), "pc2 has another model file flux.safetensors than ComfyUI's", timeout=60).exception_message
    copy = re.search(r"Copy it again: scp (\S+) pc2:(\S+\.new) && ssh pc2 'mv (\S+) (\S+)'", error)
    assert copy.groups()[1:] == (f"{file}.new", f"{file}.new", str(file))
    file.with_suffix(".new").write_bytes(content)
    file.with_suffix(".new").rename(file)
    assert_close(two.server.sample(prompt(), timeout=120), expected)


def test_a_model_file_that_is_gone_here_is_named(two, checkpoints_dir):
    """Between queueing and loading: ComfyUI has the model by then."""
    file = checkpoints_dir / "diffusion_models" / "flux.safetensors"
    two.server.run(flux_prompt(ckpt=WIDE, cp={"devices": TWO}, width=64, height=64, steps=1), timeout=120).check()
    first = two.server.queue(flux_prompt(cp={"world_size": 1}, steps=900, width=256, height=256))
    two.server.wait_for_step(first)
    second = two.server.queue(flux_prompt(cp={"devices": TWO, "ranks_per_call": "all"}))
    file.rename(file.with_suffix(".away"))
    try:
        two.server.interrupt()
        error = two.server.wait(second, 60).error
        assert error is not None
        assert "flux.safetensors cannot be read" in error.exception_message
    finally:
        file.with_suffix(".away").rename(file)
    two.server.free_first()  # it has another time now
    two.run().check()


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
    # The group of rank 0 that has ended its half leaves no more, on one computer as on two: the workers are restarted.
    if (case, rank) != ("batch 2 x ulysses 2", "there"):
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


RANK_FAULTS = {
    "error": "rank 1 (pid {pid}) failed: RuntimeError: injected: error (on the computer pc2 (10.77.0.2))",
    "kill": "rank 1 (pid {pid}) failed: SIGKILL: on the computer pc2 (10.77.0.2): the process ended with SIGKILL. The",
    "uncaught": "raise error\nBaseException: injected: uncaught",  # what it wrote last
    "sleep": "rank 1 (pid {pid}) is furthest behind",
    "stop": "rank 1 (pid {pid}) is furthest behind",
}


@pytest.mark.parametrize("kind", RANK_FAULTS)
def test_a_rank_there_that_fails_is_named(kind, two):
    """As one here would be. Its computer stays."""
    prompt = flux(TWO, step_timeout=3.0 if kind in ("sleep", "stop") else 60.0)
    expected = two.server.sample(prompt(), timeout=120)
    pid = two.server.status()["ranks"][1]["pid"]
    two.faults.arm(1, kind, module=3)
    message = two.server.fails(prompt(), RANK_FAULTS[kind].format(pid=pid)).exception_message
    if kind in ("sleep", "stop"):
        assert ("faulty_worker.py" in message) == (kind == "sleep")  # one that is stopped writes no stack
    assert two.state() == "ready"
    assert_close(two.server.sample(prompt(), timeout=60), expected)


def test_memory_that_runs_out_there_is_made(two):
    expected = two.server.sample(flux(TWO)(), timeout=120)
    two.faults.arm(1, "oom", module=3)
    assert_close(two.server.sample(flux(TWO)(), timeout=60), expected)
    assert "rank 1 ran out of memory; making room" in two.server.log_text()


def test_bytes_of_a_call(two):
    """A call's latent and timestep cross once; conditioning does not again."""
    size = {"width": 1024, "height": 512, "cfg": 1.0}
    two.run(steps=2, **size).check()
    sent = []
    for steps in (1, 3):
        before = two.sent()
        two.run(steps=steps, **size).check()
        sent.append(two.sent() - before)
    formula = 16 * 128 * 64 * 4 + 64  # the latent in float32, and a timestep in a block of its own
    ratio = (sent[1] - sent[0]) / 2 / formula
    note("bytes between the computers", "per call, over latent and timestep", 1.02, ratio)
    assert 0.99 < ratio <= 1.02


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
def test_the_first_call_over_a_slow_link_stays_here(devices, here, two):
    """Nothing is known of it but the link, which the ranks measured. It took five times as long on both computers."""
    prompt = partial(flux_prompt, ckpt=WIDE, node="CPSampler", width=512, height=512, steps=2)
    two.server.post("/context_parallel/settings", {"measure": False})
    took, choices = {}, {}
    limit(SLOWEST)
    try:
        two.server.post("/context_parallel/restart")
        for ranks in ("auto", "all"):
            ran = two.server.run(prompt(cp={"devices": devices, "ranks_per_call": ranks}), timeout=300).check()
            took[ranks], choices[ranks] = ran.report["seconds_per_call"], ran.report["choice"]
    finally:
        limit("1gbit")
        two.server.post("/context_parallel/restart")
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
    "Restart workers": (lambda two, ranks: two.restart(), 1.7, "error"),
    "ComfyUI ends": (lambda two, ranks: two.server.stop(signal.SIGINT), 5, ""),
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
    wait_for(lambda: two.state() == "ready", 30)
    stock = two.server.sample(flux_prompt(ckpt=WIDE, width=64, height=64, steps=1, loras=[lora]), timeout=120)
    assert_close(two.server.latent(two.server.run(prompt, timeout=120).check()), stock)


def cable(up):
    subprocess.run(["ip", "netns", "exec", THERE, "ip", "link", "set", "vb", "up" if up else "down"], check=True)


FAULTS = {
    "SIGTERM": lambda two: two.other.signal(signal.SIGTERM),
    "SIGKILL": lambda two: two.other.signal(signal.SIGKILL),
    "SIGSTOP": lambda two: two.other.signal(signal.SIGSTOP),
    "cable pulled": lambda two: cable(False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_computer_that_goes_away_comes_back(fault, two):
    """In the middle of a prompt: an error with its name, then what is left, then all again."""
    expected = two.server.latent(two.run().check())
    running = two.server.queue(flux_prompt(cp={"devices": TWO, "ranks_per_call": "all"}, steps=900, width=256, height=256))
    two.server.wait_for_step(running)
    watch = Stopwatch(fault)
    FAULTS[fault](two)
    failed = two.server.wait(running, timeout=60)
    watch.within(10, "to the error")
    assert failed.error is not None
    assert "the computer pc2 (10.77.0.2)" in failed.error.exception_message
    left = two.server.run(flux_prompt(cp={}), timeout=60).check()
    assert_close(two.server.latent(left), expected)
    watch = Stopwatch(fault)
    if fault == "cable pulled":
        cable(True)
    else:
        two.other.close()
        two.other = two.join()
    wait_for(lambda: two.state() == "ready", 30)
    watch.within(30, "back to ready")
    assert_close(two.server.latent(two.run().check()), expected)
    watch.within(40, "back to a picture")


def test_a_wrong_code_is_refused(two, tmp_path):
    other = two.join(f"{ADDRESS}/wrong", name="pc9")
    assert other.process.wait(30) == 1
    assert "does not accept this code" in other.text


def test_comfyui_ends_and_comes_back(two):
    two.server.stop()
    two.server.start()
    seconds = wait_for(lambda: two.state() == "ready", 30)
    note("ComfyUI started again", "to ready", 30, seconds, "s")
    two.run().check()
