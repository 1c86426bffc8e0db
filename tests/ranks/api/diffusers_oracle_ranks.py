"""Rank script: the same weights and inputs through diffusers' own context parallelism, ours and one process; rank 0 reports."""

import torch
from diffusers_cases import padding, qwen
from diffusers_models import build, forward
from diffusers_oracle import enable, patch
from support.ranks import finish, report, start, worst

from cp_runtime import ContextParallelConfig, apply_context_parallel

rank, world, _ = start()

EVEN = dict(images=((8, 4),), text=8)
UNEVEN = dict(images=((1, 13),), text=5)  # on 4 ranks: 6, 4, 4 and 4 tokens
ULYSSES, RING, UNIFIED = (dict(ring_degree=r, ulysses_degree=u) for r, u in ((1, world), (world, 1), (2, world // 2)))
RUNS = [
    ("ulysses", EVEN, ULYSSES, None),
    ("ring", EVEN, RING, None),
    ("unified", EVEN, UNIFIED, None),
    ("ulysses anything", UNEVEN, dict(ULYSSES, ulysses_anything=True), None),
    ("ring anything", UNEVEN, dict(RING, ring_anything=True), None),
    ("ulysses mask", EVEN, ULYSSES, 3),
    ("ring mask", EVEN, RING, 3),
    ("ulysses anything mask", UNEVEN, dict(ULYSSES, ulysses_anything=True), 3),
    ("unified mask", EVEN, UNIFIED, 3),
]


patch()
with torch.inference_mode():
    for name, shape, config, valid in RUNS:
        inputs = qwen(**shape)
        if valid is not None:
            inputs["encoder_hidden_states_mask"] = padding(valid, length=shape["text"])
        model = build("qwen")
        (expected,) = forward(model, inputs)
        std = expected.std().item()
        apply_context_parallel(model, ContextParallelConfig(**config))
        (ours,) = forward(model, inputs)
        result = dict(run=name, std=std, ours=worst((ours - expected).abs().max()) / std, theirs=None, between=None, error=None)
        try:
            (theirs,) = forward(enable(build("qwen"), **config), inputs)
            result.update(theirs=worst((theirs - expected).abs().max()) / std, between=worst((theirs - ours).abs().max()) / std)
        except RuntimeError as error:  # on every rank alike: shapes do not fit
            result["error"] = str(error)
        report(**result)
finish()
