"""What ranks hold of models and of their patches; and checkpoints: nothing that is in a file is run."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from support.evil import Evil
from support.graphs import flux_prompt

CP = {"world_size": 2}
PATCH_BYTES = 64 << 20
FOLDERS = ("diffusion_models", "checkpoints")


def anonymous(server):
    """Bytes that no file has, of all ranks together."""
    status = [line for pid in server.worker_pids() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon:"))


def mapped(server, least):
    """Pieces of shared memory of at least so many bytes that ranks map."""
    found = set()
    for line in (line for pid in server.worker_pids() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()):
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if "memfd:" in line and last - first >= least:
            found.add(line.split()[4])
    return found


def test_tensors_of_a_lora_are_there_once_for_all_ranks(graph_server, shelf):
    rank = PATCH_BYTES // 4 // 1024
    module = "diffusion_model.double_blocks.0.img_attn.qkv"
    tensors = {f"{module}.lora_A.weight": torch.zeros(rank, 256), f"{module}.lora_B.weight": torch.zeros(768, rank)}
    save_file(tensors, shelf / "models" / "loras" / "large.safetensors")

    def held(*strengths):
        for strength in strengths:
            graph_server.run(flux_prompt(cp=CP, loras=[("large", strength)] if strength else []), timeout=120).check()
        return anonymous(graph_server), len(mapped(graph_server, PATCH_BYTES))

    before, blocks = held(0.0, 0.0)
    after, with_lora = held(1.0, 0.5)
    assert after - before < 0.3 * PATCH_BYTES
    assert with_lora == blocks + 1
    assert held(0.0)[1] == blocks


def test_ranks_drop_a_model_that_failed_to_load(graph_server, shelf):
    """Nothing else would ever free it: the controller has no record of it."""
    least = (shelf / "models" / "diffusion_models" / "flux.safetensors").stat().st_size // 2
    graph_server.run(flux_prompt(cp=CP), timeout=120).check()
    pids, one = graph_server.worker_pids(), mapped(graph_server, least)
    graph_server.free_first()
    before = mapped(graph_server, least)
    assert len(before) == len(one) - 1
    changed = {"model_nodes": [("TestChangedModel", {"kind": "silu"})]}
    try:
        graph_server.fails(flux_prompt(cp=CP, **changed), "replaced torch.nn.functional.silu")
    finally:
        graph_server.run({"undo": {"class_type": "TestUnchanged", "inputs": {}}}).check()
    assert mapped(graph_server, least) == before
    assert graph_server.worker_pids() == pids


def write_evil(folder, marker):
    """Checkpoints that would run a command when they are unpickled, in torch's file format and its old one."""
    for name, new in (("evil.ckpt", True), ("evil_old.ckpt", False), ("evil.pt", True)):
        torch.save({"state_dict": {"x": Evil(marker)}}, folder / name, _use_new_zipfile_serialization=new)
        yield folder / name


def test_a_checkpoint_in_a_graph_runs_nothing(graph_server, shelf, tmp_path):
    marker, ranks = tmp_path / "marker", graph_server.worker_pids()
    for path in [path for folder in FOLDERS for path in write_evil(shelf / "models" / folder, marker)]:
        prompt = flux_prompt(cp=CP)
        if path.parent.name == "checkpoints":
            prompt["loader"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": path.name}}
        else:
            prompt["loader"]["inputs"]["unet_name"] = path.name
        error = graph_server.fails(prompt)
        assert error.node_id == "loader"
        assert "weights_only" in error.exception_message.lower()
        assert not marker.exists()
        torch.load(path, weights_only=False)  # and it would have
        assert marker.exists()
        marker.unlink()
    assert graph_server.worker_pids() == ranks
    assert "loading evil" not in graph_server.log_text()
