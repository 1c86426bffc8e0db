"""A real server that sees one CUDA device: node, status and log say that there is nothing to share, and why."""

import time

from support import stand_in
from support.graphs import flux_prompt
from support.server import ComfyServer


def test_one_visible_device_is_said_where_the_user_looks(comfyui_path, checkpoints_dir, tmp_path):
    cards = stand_in.Cards(count=1, gigabytes=8, ledger=tmp_path / "ledger")
    env = {**stand_in.environment(cards), "CUDA_VISIBLE_DEVICES": "0"}
    with ComfyServer(comfyui_path, models=checkpoints_dir, cpu=False, args=["--fp32-unet"], env=env) as server:
        since, prompt = time.monotonic(), flux_prompt(cp={})
        (node,) = (name for name, each in prompt.items() if each["class_type"] == "ApplyContextParallel")
        server.run(prompt).check()
        words = "1 GPU visible, nothing to share. CUDA_VISIBLE_DEVICES is 0: "
        shown = words[:40]  # in the node, which has little room
        server.wait_event(lambda e: e.type == "text" and e.data[0] == node and e.data[1].startswith(shown), since=since)
        status = server.status()
        assert (status["state"], status["ranks"], status["alone"]["case"]) == ("off", [], "hidden")
        assert status["activity"].startswith(words)
        assert f"the model passes through: {words}" in server.log_text()
