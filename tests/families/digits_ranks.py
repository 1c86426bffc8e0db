"""Rank script, one process: the network for training and ComfyUI's with its file; reports how far apart their outputs are."""

import sys

import comfy.sd
import torch
from support.ranks import ROOT, finish, report, start

sys.path.append(str(ROOT / "benchmarks"))
from digits import data, network, page

start()
torch.manual_seed(0)
ours = network.Network()
with torch.inference_mode():
    for parameter in ours.parameters():  # nothing is zero, and all fits into the file
        parameter.add_(0.05 * torch.randn_like(parameter)).copy_(parameter.bfloat16())
    tensors = network.checkpoint(ours.state_dict())
    theirs = comfy.sd.load_diffusion_model_state_dict(tensors).model.diffusion_model.float()
    latent, times, text = torch.randn(2, 16, 64, 64), torch.tensor([0.3, 0.8]), page.encode(torch.randint(0, 10, (2, 8)))
    expected = theirs(latent, times, text, guidance=torch.tensor([3.5, 1.0]))
    turns = network.rope(network.places(0, 0, page.ROWS))
    out = ours(data.image_tokens(latent).flatten(1, 2), times, text, turns)
    off = (out - data.image_tokens(expected).flatten(1, 2)).abs().max()
report(difference=off.item(), spread=expected.std().item())
finish()
