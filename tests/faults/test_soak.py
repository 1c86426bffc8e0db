"""Case 32: prompt after prompt, of several sizes and models, with a random fault now and then."""

import random
import time
from functools import partial

import pytest
from support.faults import SOAK, Stopwatch, note
from support.graphs import flux_prompt, wan_prompt
from support.latents import TOLERANCE, distance
from support.processes import held
from support.server import ComfyServer

DEADLINE = 4.0
PROMPTS, EVERY = (200, 20) if SOAK else (8, 4)
KINDS = ("oom", "error", "uncaught", "sysexit", "exit", "segv", "kill", "sleep", "spin", "stop", "lock")
WORK = {
    "flux": flux_prompt,
    "flux, odd size": partial(flux_prompt, width=72, height=104, tokens=13),
    "flux, batch 2, CFG": partial(flux_prompt, batch=2, cfg=4.0),
    "flux, LoRA": partial(flux_prompt, loras=["flux_lora"]),
    "flux, larger": partial(flux_prompt, width=256, height=192),
    "wan": wan_prompt,
    "wan, CFG": partial(wan_prompt, cfg=4.0),
}


@pytest.mark.soak
def test_soak(comfyui_path, checkpoints_dir, faults):
    """No prompt hangs, none is wrong, and what fails is a prompt with a fault. ComfyUI's memory stays where it is."""
    rng = random.Random(32)
    environment = {**faults.environment, "CP_LOAD_TIMEOUT": "25" if SOAK else "12"}
    with ComfyServer(comfyui_path, models=checkpoints_dir, env=environment) as server:
        expected = {name: server.sample(build()) for name, build in WORK.items()}
        memory, wrong, failed = [], 0, 0
        for number in range(1, PROMPTS + 1):
            name = rng.choice(list(WORK))
            world = rng.choice([2, 2, 2, 3])
            fault = None
            if number % EVERY == 0:
                fault = {"rank": rng.randrange(world), "kind": rng.choice(KINDS), "module": rng.randrange(1, 4)}
                fault["times"] = 2 if fault["kind"] == "oom" else 1  # the first one is made good
                faults.arm(**fault)
            began = time.monotonic()
            result = server.run(WORK[name](cp={"world_size": world, "step_timeout": DEADLINE}), timeout=120)
            seconds = time.monotonic() - began
            if fault is not None:
                struck = f"{fault['kind']} on rank {fault['rank']} of {world}"
                print(f"prompt {number}, {name}: {struck} -> {result.status}, {seconds:.1f} s")
                assert faults.waiting == []
                assert result.status == "error", fault
                assert f"rank {fault['rank']}" in result.error.exception_message
                failed += 1
                continue
            out = server.latent(result.check())
            wrong += distance(out, expected[name]) > TOLERANCE
            memory.append(held(server.pid))
        growth = max(memory[-len(memory) // 4 :]) / max(memory[len(memory) // 4 : len(memory) // 2])
        case = f"32 soak: {PROMPTS} prompts, {failed} faults"
        note(case, "wrong latents", 0, wrong)
        note(case, "memory of ComfyUI's process, last quarter to second", 1.1, growth, "x")
        print(f"{case}: 0 hangs, {wrong} wrong latents, memory x {growth:.3f}")
        assert wrong == 0
        assert growth <= 1.1
        watch = Stopwatch("32 soak: exit of the server afterwards")
        assert server.stop() == []
        watch.within(10, "no process left")
