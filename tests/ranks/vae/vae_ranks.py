"""Rank script: VAEs on a part of the rows against the same VAEs on one process."""

from functools import partial

import torch
import torch.distributed as dist
from support.faults import SOAK
from support.live_bytes import LiveBytes
from support.ranks import finish, report, start
from support.vaes import TINY_VAES, build

from cp_runtime import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.rows.plan import run_on_rows
from cp_runtime.errors import ContextParallelError
from cp_runtime.vaes import row_plan_for

rank, world, _ = start()
torch.set_grad_enabled(False)
mesh = SequenceMesh(dist.group.WORLD)
# Rows and columns of the latent: odd; fewer than ranks x halo; fewer than ranks; more columns than rows.
SIZES = {
    2: {"odd": (1, 7, 6), "batch": (2, 5, 4)},
    3: {"low": (1, 3, 2), "wide": (1, 2, 7)},
    4: {"lower": (2, 2, 2), **({"odd": (1, 9, 4)} if SOAK else {})},
}


def difference(model, plan, method, x, ratio, *, mesh=mesh, first_only=False):
    """Of the result on rank 0 from the stock VAE's. With `first_only`, no other rank gets one."""
    run = getattr(model, method)
    ours = run_on_rows(model, plan, run, x.clone(), mesh=mesh, ratio=ratio, first_only=first_only)
    assert (ours is None) == (first_only and rank > 0)
    if rank:
        return 0.0
    stock = run(x)  # with everything taken off the model again
    assert ours.shape == stock.shape
    return float((ours - stock).abs().max() / stock.abs().max())


def peak(model, call, x):
    """Bytes that a call holds at most, beyond weights and input."""
    with LiveBytes([x, *model.parameters(), *model.buffers()]) as meter:
        out = call()
    del out
    return float(mesh.whole.largest(torch.tensor([float(meter.peak)])))


for name, vae in TINY_VAES.items():
    model = build(vae)
    plan = row_plan_for(model)
    for size, (batch, rows, columns) in SIZES[world].items():
        generator = torch.Generator().manual_seed(5)
        for frames in vae.frames or (0,):
            latent = torch.randn((batch, vae.channels, *((frames,) if frames else ()), rows, columns), generator=generator)
            length = (1 + (frames - 1) * vae.compression,) if frames else ()
            picture = torch.randn((batch, 3, *length, rows * vae.ratio, columns * vae.ratio), generator=generator)
            report(
                vae=name, size=size, frames=frames,
                decode=difference(model, plan, "decode", latent, 1, first_only=size in ("odd", "low")),
                encode=difference(model, plan, "encode", picture, vae.ratio),
            )  # fmt: skip

for name in ("SD", "Flux"):  # as nodes for seamless pictures have them
    vae = TINY_VAES[name]
    model = build(vae)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.padding_mode = "circular"
    for size, (batch, rows, columns) in SIZES[world].items():
        generator = torch.Generator().manual_seed(7)
        latent = torch.randn((batch, vae.channels, rows, columns), generator=generator)
        picture = torch.randn((batch, 3, rows * vae.ratio, columns * vae.ratio), generator=generator)
        report(
            vae=name, size=f"seamless {size}", frames=0,
            decode=difference(model, row_plan_for(model), "decode", latent, 1),
            encode=difference(model, row_plan_for(model), "encode", picture, vae.ratio),
        )  # fmt: skip

if world == 3:  # of which one takes three times as many rows, as far as there are as many
    unequal = SequenceMesh(dist.group.WORLD, shares=(3, 1, 1))
    for name, rows in (("Flux", 9), ("Flux", 4), ("Wan 2.1", 9)):
        vae = TINY_VAES[name]
        model = build(vae)
        latent = torch.randn(1, vae.channels, *((2,) if vae.frames else ()), rows, 4, generator=torch.Generator().manual_seed(6))
        out = difference(model, row_plan_for(model), "decode", latent, 1, mesh=unequal, first_only=True)
        report(vae=name, size=f"unequal {rows}", frames=latent.ndim - 4, decode=out, encode=0.0)

MEASURED = {"Flux": (1, 4, 32, 16), "Wan 2.1": (1, 4, 4, 32, 16)}
if world in (2, 4):
    for name, shape in MEASURED.items():
        model, x = build(TINY_VAES[name]), torch.randn(shape)
        stock = peak(model, partial(model.decode, x), x)
        ours = peak(model, partial(run_on_rows, model, row_plan_for(model), model.decode, x, mesh=mesh, first_only=True), x)
        report(memory=name, ratio=ours / stock)


def diffusers_vaes():
    """VAEs of diffusers, and what they decode and encode."""
    from diffusers import AutoencoderKL, AutoencoderKLWan

    channels = {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1}
    torch.manual_seed(2)
    yield AutoencoderKL(**channels, up_block_types=("UpDecoderBlock2D",) * 2), (1, 4, 7, 6), (1, 3, 14, 12)
    yield AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, True],
                           latents_mean=[0.0] * 4, latents_std=[1.0] * 4), (1, 4, 3, 5, 4), (1, 3, 9, 20, 16)  # fmt: skip


def both(model, z, x):
    return model.decode(z).sample, model.encode(x).latent_dist.mean


def compiled_parts(model):
    """Compile the decoder, and the method that calls it."""
    model.decoder, model.decode = torch.compile(model.decoder, backend="eager"), torch.compile(model.decode, backend="eager")
    return model


if world == 2:
    for model, latent, picture in diffusers_vaes():
        decoder = model.eval().decoder
        z, x = torch.randn(latent), torch.randn(picture)
        stock = both(model, z, x)
        applied = apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
        ours = both(model, z, x)
        sent = applied.mesh.stats.bytes["halo"]
        remove_context_parallel(model)
        other = torch.zeros_like(z) if rank else z
        refusals = []
        for asked, decoded in ((True, z), (False, other)):  # the first call is compared without being asked to
            trial = apply_context_parallel(model, ContextParallelConfig(ring_degree=world), check_inputs=asked)
            try:
                model.decode(decoded)
                model.decode(other)
            except ContextParallelError as error:
                refusals.append(str(error))
            trial.remove()
        applied = apply_context_parallel(compiled_parts(model), ContextParallelConfig(ring_degree=world))
        compiled = float((model.decode(z).sample - stock[0]).abs().max() / stock[0].abs().max())
        applied.remove()
        del model.decode, model.decoder
        model.decoder = decoder
        restored = all(torch.equal(*pair) for pair in zip(stock, both(model, z, x), strict=True))
        for _ in range(2):
            apply_context_parallel(model, ContextParallelConfig(ring_degree=world)).remove()
        worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, stock, strict=True))
        report(diffusers=type(model).__name__, difference=worst, compiled=compiled, sent=sent, restored=restored, refusals=refusals)
finish()
