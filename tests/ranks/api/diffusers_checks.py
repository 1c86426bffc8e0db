"""What else must hold for a model outside of ComfyUI. Run by diffusers_ranks.py on every rank."""

from copy import deepcopy
from functools import partial
from typing import Any

import diffusers_pipelines as pipelines
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_flux2 import Flux2KVCache
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers_cases import MODES, degrees, flux, flux_2, glm_image, ltx_2_3, normal, padding, qwen, sd3
from diffusers_models import ANYTHING, build, close, forward, plan_of, refused, relative, same

from cp_runtime import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from cp_runtime.engine.exchange.segment import KEPT


def one_rank_alone(rank: int, world: int) -> None:
    """What only one rank does wrong in a first call is said on all."""
    model = build("flux")
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
    model.train(rank == world - 1)
    refused(lambda: forward(model, flux()), "is in training mode")


def more_messages_than_are_kept(rank: int, world: int) -> None:
    """A call of a long model: its inputs are still being compared while the ranks exchange more than the last 240 messages."""
    model, inputs = build("flux"), flux()
    block = model.single_transformer_blocks[-1]
    model.single_transformer_blocks.extend(deepcopy(block) for _ in range(KEPT // 2))
    expected = forward(model, inputs)
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
    for _ in range(3):
        close(relative(forward(model, inputs), expected))
    handle = model.transformer_blocks[0].register_forward_pre_hook(partial(fails, True))  # before anything is exchanged
    for _ in range(KEPT + 20):
        refused(partial(forward, model, inputs), "of one rank", kind=RuntimeError)
    handle.remove()
    close(relative(forward(model, inputs), expected))


def fails(does: bool, *_: Any) -> None:
    if does:
        raise RuntimeError("of one rank")


def errors_of_one_rank(rank: int, world: int) -> None:
    """An error inside of the forward of one rank is raised on all, and the next call is right."""
    model, inputs = build("flux"), flux()
    expected = forward(model, inputs)
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
    for i, block in enumerate((model.transformer_blocks[0], model.single_transformer_blocks[-1])):
        handle = block.register_forward_pre_hook(partial(fails, rank == world - 1))
        refused(partial(forward, model, flux(text=3 + i)), "of one rank", kind=Exception)
        handle.remove()
        close(relative(forward(model, inputs), expected))
    short = {"hidden_states": inputs["hidden_states"][:, :-1]}
    for wrong in (short, {"img_ids": inputs["img_ids"][:-1]}, {"txt_ids": inputs["txt_ids"][None, :-1]}):
        refused(partial(forward, model, {**inputs, **wrong}), "ids", "expected")
        close(relative(forward(model, inputs), expected))
    remove_context_parallel(model)
    different = ContextParallelConfig(**{("ring_degree", "ulysses_degree")[rank % 2]: world}, **ANYTHING)
    refused(lambda: apply_context_parallel(model, different), "ring_degree, ulysses_degree on rank 1")
    refused(lambda: apply_context_parallel(model, different, shard_weights=rank == 0), "shard_weights on rank 1")
    wrong = dict(verify="second") if rank else {}
    refused(partial(apply_context_parallel, model, ContextParallelConfig(ulysses_degree=world), **wrong), "verify: ")
    staged = dict(pipefusion_degree=world) if rank == 0 else dict(ulysses_degree=world, **ANYTHING)
    refused(lambda: apply_context_parallel(model, ContextParallelConfig(**staged)), "pipefusion_degree")
    close(relative(forward(model, inputs), expected))


def errors_of_one_rank_between_blocks(rank: int, world: int) -> None:
    """The same where ranks fetch each other's weights, all of them or by groups, and before the first block of a later form."""
    inputs, last = flux(2), rank == world - 1
    expected = forward(build("flux"), inputs)
    for shape in (dict(ulysses_degree=world), dict(batch_degree=world)):
        model = build("flux")
        apply_context_parallel(model, ContextParallelConfig(**shape, **ANYTHING), shard_weights=True)
        close(relative(forward(model, inputs), expected))
        places = (model.x_embedder, model.transformer_blocks[0], model.transformer_blocks[0].ff, model.norm_out)
        for text, place in enumerate(places, 3):
            handle = place.register_forward_pre_hook(partial(fails, last))
            refused(partial(forward, model, flux(2, text=text)), "of one rank", kind=Exception)
            handle.remove()
            close(relative(forward(model, inputs), expected))
        model.train(last)
        refused(partial(forward, model, flux(2, text=8)), "is in training mode")
        model.eval()
        close(relative(forward(model, inputs), expected))


def other_inputs(rank: int, world: int) -> None:
    """Inputs that are not the same on all ranks are named in the first call, and with check_inputs before each."""
    model, differ = build("flux"), f"hidden_states on rank {world - 1}: not what rank 0 was given"
    mine = flux(hidden_states=normal(1, 30, 16, seed=rank == world - 1))
    config = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    apply_context_parallel(model, config)
    refused(lambda: forward(model, mine), differ)
    refused(lambda: forward(model, flux(guidance=torch.full((1,), 3.5 + (rank == 0)))), "guidance on rank 1")
    forward(model, flux())
    remove_context_parallel(model)
    apply_context_parallel(model, config, check_inputs=True)
    forward(model, flux())
    refused(lambda: forward(model, mine), differ)
    for more in (dict(check_inputs=rank == 0), {}):
        remove_context_parallel(model)
        shares = (1 + (rank == 0 and not more),) + (1,) * (world - 1)
        other = ContextParallelConfig(ulysses_degree=world, **ANYTHING, shares=shares)
        words = ("check_inputs" if more else "shares", "same arguments on all ranks")
        refused(partial(apply_context_parallel, model, other, **more), *words)


@torch.inference_mode(False)
@torch.no_grad()
def what_is_remembered(rank: int, world: int) -> None:
    """Inputs and weights that a collective has written to: torch counts that only on the rank that they come from. And tensors that
    have no numbers in memory, or others than they show."""
    model, latent = build("flux"), normal(1, 30, 16).clone()
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
    written = [latent, *model.parameters()]
    inputs = flux(hidden_states=latent)
    for _ in range(2):
        before = forward(model, inputs)
    for tensor in written if rank == 0 else ():
        tensor.mul_(1.1)
    for tensor in written:
        dist.broadcast(tensor, 0)
    model(**inputs)
    assert relative((model(**inputs)[0],), before) > 1e-3
    mine = flux(hidden_states=normal(1, 30, 16, seed=rank))
    refused(lambda: model(**mine), "hidden_states on rank 1: not what rank 0 was given")
    numbers = torch.randn(4, dtype=torch.cfloat)
    for other in (
        numbers.conj(),
        numbers.conj().imag,
        numbers.to_sparse(),
        torch.quantize_per_tensor(numbers.real, 0.1, 0, torch.quint8),
    ):
        for _ in range(2):
            model(**flux(joint_attention_kwargs={"unused": other}))


def keys_and_values_kept(rank: int, world: int) -> None:
    """For later calls they are of some tokens only, on every rank."""
    for name, call in (("flux 2", flux_2() | dict(kv_cache_mode="extract", num_ref_tokens=10)), ("glm image", glm_image())):
        model = build(name)
        apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
        kept = {"kv_cache": Flux2KVCache(2, 2)} if name == "flux 2" else {"kv_caches": GlmImageKVCache(2)}
        refused(partial(model, **call, **kept), f"keep keys and values in {next(iter(kept))}", "Leave it out")


def batch_axis(rank: int, world: int) -> None:
    """Items of a batch on groups of ranks: more of them than groups, as many, and fewer, which all ranks share by tokens."""
    groups = 3 if world == 3 else 2
    shapes = [dict(ulysses_degree=world // groups), dict(ring_degree=world // groups, rotate_method="alltoall")]
    for name, make in [("flux", flux), ("qwen", masked_qwen)]:
        model = build(name)
        expected = {items: forward(model, make(batch=items)) for items in (1, groups, groups + 1)}
        for shape in shapes:
            apply_context_parallel(model, ContextParallelConfig(**shape, **ANYTHING, batch_degree=groups), verify="first")
            for items, outputs in expected.items():
                close(relative(forward(model, make(batch=items)), outputs), f"{items} {name} {shape}")
            remove_context_parallel(model)
    config = ContextParallelConfig(1, world // groups, **ANYTHING, batch_degree=groups)
    model = build("flux")  # positions have a row for each token
    for inputs in (flux(batch=groups, text=groups), flux(batch=groups, height=1, width=groups)):
        same(model, config, inputs, forward(model, inputs), "as many tokens as items")


def layers_skipped_for_some_items(rank: int, world: int) -> None:
    """Guidance by skipped layers, on which groups of ranks attend a different number of times; numbers of layers are no items."""
    config = ContextParallelConfig(batch_degree=world, **ANYTHING)
    some = dict(spatio_temporal_guidance_blocks=[0, 1], perturbation_mask=torch.arange(2.0))
    for name, inputs in (("ltx 2.3", ltx_2_3(2, **some)), ("sd3", sd3(2) | dict(skip_layers=[0, 1]))):
        model = build(name)
        same(model, config, inputs, forward(model, inputs), name)


def batch_axis_alone(rank: int, world: int) -> None:
    """Where a group is one rank nothing but outputs is sent; they keep their class."""
    groups, model = 3 if world == 3 else 2, build("qwen")
    config = ContextParallelConfig(1, world // groups, **ANYTHING, batch_degree=groups)
    applied = apply_context_parallel(model, config)
    assert type(model(**masked_qwen(batch=groups))).__name__ == "Transformer2DModelOutput"
    forward(model, masked_qwen(batch=groups))  # the first of its form
    applied.mesh.stats.reset()
    forward(model, masked_qwen(batch=groups))
    assert applied.mesh.stats.counts["all_gather"] == 1 or world != groups
    assert applied.mesh.stats.counts["checks"] == 1


def masked_qwen(batch: int) -> dict[str, Any]:
    return qwen(batch=batch, text=8, encoder_hidden_states_mask=padding(*range(5, 5 + batch), length=8))


def pipeline(rank: int, world: int) -> None:
    """Pipelines of diffusers, with one line more than without ranks: one whose CFG is a batch of two, and those with a plan."""
    pipe, groups = pipelines.load("sd3"), 3 if world == 3 else 2
    expected = pipelines.run("sd3", pipe)
    batches = ContextParallelConfig(ulysses_degree=world // groups, **ANYTHING, batch_degree=groups)
    apply_context_parallel(pipe.transformer, batches, plan_of(pipe.transformer))
    close(relative((pipelines.run("sd3", pipe),), (expected,)), "sd3")
    others = [name for name in pipelines.PIPELINES if name != "sd3"]
    for i, name in enumerate(others if world < 4 else ()):
        pipe = pipelines.load(name)
        expected = pipelines.run(name, pipe)
        config = ContextParallelConfig(**degrees(MODES[(i + world) % len(MODES)], world), **ANYTHING)
        models = [model for model in (pipe.transformer, getattr(pipe, "transformer_2", None)) if model is not None]
        applied = [apply_context_parallel(model, config) for model in models]
        close(relative((pipelines.run(name, pipe),), (expected,)), name)
        assert all(each.mesh.stats.collectives > 2 for each in applied)


def pipeline_itself(rank: int, world: int) -> None:
    """It is refused with what to pass."""
    config = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    refused(lambda: apply_context_parallel(pipelines.load("sd3"), config), "pipe.transformer")
