"""Applying, removing, configurations, meshes and plans. Each check runs on every rank."""

import inspect
from functools import partial
from unittest import mock

import diffusers
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelInput as DiffusersInput
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers_cases import MODES, degrees, flux, ltx_2, normal, padding, qwen
from diffusers_models import ANYTHING, build, close, fingerprint, forward, refused, relative, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from cp_runtime import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    ParallelConfig,
    apply_context_parallel,
    remove_context_parallel,
)
from cp_runtime.engine.attention import kernels
from cp_runtime.errors import ConfigError, PlanError


def applied_removed_applied(rank: int, world: int) -> None:
    model, inputs = build("flux"), flux(batch=2)
    before, expected = fingerprint(model), forward(model, inputs)
    for config in (dict(ulysses_degree=world), dict(ring_degree=world), dict(ulysses_degree=world)):
        same(model, ContextParallelConfig(**config, **ANYTHING), inputs, expected)
        assert torch.equal(forward(model, inputs)[0], expected[0])
    assert fingerprint(model) == before


def applied_twice(rank: int, world: int) -> None:
    """A second application over a first one would split what is split already."""
    model, inputs = build("flux"), flux()
    expected = forward(model, inputs)
    config = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    apply_context_parallel(model, config)
    refused(lambda: apply_context_parallel(model, config), kind=PlanError)
    close(relative(forward(model, inputs), expected))


def configs(rank: int, world: int) -> None:
    """Our configuration and diffusers', bare and wrapped, set up before or not, over the plan of either."""
    model, inputs = build("qwen"), qwen(text=8, encoder_hidden_states_mask=padding(5, length=8))
    expected, plan = forward(model, inputs), model._cp_plan
    ours = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    prepared = ContextParallelConfig(ring_degree=world, **ANYTHING)
    prepared.setup(rank, world, torch.device("cpu"))
    theirs = diffusers.ContextParallelConfig(ulysses_degree=world, ulysses_anything=True)
    ring = diffusers.ContextParallelConfig(ring_degree=world, ring_anything=True)
    wrapped = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=world, **ANYTHING))
    theirs_wrapped = diffusers.ParallelConfig(context_parallel_config=theirs)
    for config in (ours, wrapped, prepared, theirs, ring, theirs_wrapped, diffusers.ParallelConfig()):
        same(model, config, inputs, expected, config, plan)


def meshes(rank: int, world: int) -> None:
    """A mesh with a third axis: each of its rows has inputs of its own, as data parallelism has, and shards them alone."""
    model = build("flux")
    shapes = [(1, world, 1), (world, 1, 1), *([(1, 2, 2), (2, 1, 2)] if world == 4 else [])]
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses", "fsdp"))
        inputs = flux(text=5 + mesh["fsdp"].get_local_rank())
        for cls in (ContextParallelConfig, diffusers.ContextParallelConfig):
            anything = ANYTHING if cls is ContextParallelConfig else {f"{'ring' if shape[0] > 1 else 'ulysses'}_anything": True}
            config = cls(ring_degree=shape[0], ulysses_degree=shape[1], mesh=mesh, **anything)
            same(model, config, inputs, forward(model, inputs), config, model._cp_plan)
        alone = ContextParallelConfig(mesh=mesh, **ANYTHING)  # its degrees are the mesh's
        same(model, alone, inputs, forward(model, inputs), alone, model._cp_plan)
        assert alone.mesh_shape == shape[:2]


def degrees_that_do_not_fit(rank: int, world: int) -> None:
    model = build("flux")
    before = fingerprint(model)
    refused(lambda: apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world + 1)), kind=ConfigError)
    assert fingerprint(model) == before


def anything_off(rank: int, world: int) -> None:
    """Without `*_anything`, what divides works and the rest is refused."""
    model = build("flux")
    even, odd = flux(height=4, width=6, text=12), flux(height=5, width=7, text=5)
    expected = forward(model, even)
    for name in ("ulysses", "ring"):
        apply_context_parallel(model, ContextParallelConfig(**{f"{name}_degree": world}))
        refused(lambda: forward(model, odd), kind=PlanError)
        if name == "ring" or world != 3:  # there are 4 heads
            close(relative(forward(model, even), expected))
        else:
            refused(lambda: forward(model, even), kind=PlanError)
        remove_context_parallel(model)
    # Nobody chooses the number of audio tokens, which every rank has whole.
    model, mask = build("ltx 2"), torch.ones(1, 12)
    inputs = ltx_2(audio=5, isolate_modalities=False, encoder_hidden_states=normal(1, 12, 24), encoder_attention_mask=mask)
    expected = forward(model, inputs)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    close(relative(forward(model, inputs), expected))


def wrong_plans(rank: int, world: int) -> None:
    """A plan that does not fit is an error before anything is computed, and never skipped."""
    model, inputs, computed = build("flux"), flux(), []
    expected = forward(model, inputs)
    model.x_embedder.register_forward_hook(lambda *_: computed.append(True))
    before = fingerprint(model)
    for name, path, entry in [
        ("input dims", "", {**model._cp_plan[""], "hidden_states": ContextParallelInput(split_dim=1, expected_dims=4)}),
        ("their input dims", "", {**model._cp_plan[""], "img_ids": DiffusersInput(split_dim=0, expected_dims=3)}),
        ("output dims", "proj_out", ContextParallelOutput(gather_dim=1, expected_dims=4)),
        ("argument", "", {**model._cp_plan[""], "hidden_state": ContextParallelInput(split_dim=1, expected_dims=3)}),
        ("module", "projection", ContextParallelOutput(gather_dim=1, expected_dims=3)),
        ("entry", "proj_out", "gather"),
    ]:
        computed.clear()
        plan, config = {**model._cp_plan, path: entry}, ContextParallelConfig(ulysses_degree=world, **ANYTHING)
        refused(partial(same, model, config, inputs, expected, plan=plan, verify="never"), kind=PlanError)
        assert bool(computed) == (name == "output dims")  # what a module puts out is known once it has run
        assert fingerprint(model) == before
    assert relative(forward(model, inputs), expected) == 0


def gradients(rank: int, world: int) -> None:
    """There is no backward: a call that would record one is refused, not answered with a wrong gradient."""
    with torch.inference_mode(False):
        model, inputs = build("flux"), flux()
        apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
        with torch.enable_grad():
            refused(lambda: forward(model, inputs), kind=PlanError)
        with torch.no_grad():
            sharded = forward(model, inputs)
            remove_context_parallel(model)
            close(relative(sharded, forward(model, inputs)))


def backends(rank: int, world: int) -> None:
    """The backend that was chosen computes each part of a ring, too."""
    model, inputs, used = build("flux"), flux(), []
    expected = forward(model, inputs)
    for kernel in kernels.KERNELS:
        run = kernel.run
        object.__setattr__(kernel, "run", lambda *args, run=run, name=kernel.name: (used.append(name), run(*args))[1])
    apply_context_parallel(model, ContextParallelConfig(**degrees("ring alltoall", world), **ANYTHING))
    for backend, runs in (("native", "cpu"), ("_native_math", "math")):
        used.clear()
        for module in model.modules():
            if hasattr(module, "processor"):
                module.processor._attention_backend = backend
        close(relative(forward(model, inputs), expected))
        assert set(used) == {runs}


def other_backends(rank: int, world: int) -> None:
    """Backends that are not torch's get what Ulysses, or a ring at once, gathered, in blocks compiled or not; their functions are
    stand-ins."""
    model, inputs, ran = build("flux"), flux(), []
    expected = forward(model, inputs)

    def attend(query, key, value, attn_mask=None, scale=None, is_causal=False, enable_gqa=False, _parallel_config=None):
        assert attn_mask is None
        ran.append((query.shape[2], key.shape[1]))
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)

    registry = attention_dispatch._AttentionBackendRegistry
    names = (
        AttentionBackendName.FLASH,
        AttentionBackendName._FLASH_3_HUB,
        AttentionBackendName.SAGE,
        AttentionBackendName.XFORMERS,
    )
    for name in names:
        taken = set(inspect.signature(attend).parameters)
        with (
            mock.patch.dict(registry._backends, {name: attend}),
            mock.patch.dict(registry._supported_arg_names, {name: taken}),
        ):
            for module in model.modules():
                if hasattr(module, "processor"):
                    module.processor._attention_backend = name
            for mode in MODES:
                ran.clear()
                same(model, ContextParallelConfig(**degrees(mode, world), **ANYTHING), inputs, expected, (name, mode))
                heads = 4 if mode == "ring allgather" else 4 // world
                assert ran == ([] if mode == "ring alltoall" else [(heads, 37)] * 4), (name, mode, ran)
            assert registry._backends[name] is attend
    with mock.patch.dict(registry._backends, {name: attend}), mock.patch.dict(registry._supported_arg_names, {name: taken}):
        torch._dynamo.reset()
        ran.clear()
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        same(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), inputs, expected)
        assert ran == [(4 // world, 37)] * 4, ran


def fsdp(rank: int, world: int) -> None:
    """FSDP2 on an axis of the mesh whose rows have inputs of their own; before applying and after, with weights on the host."""
    shape = (2, 1, 2) if world == 4 else (world, 1, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses", "fsdp"))
    inputs, policy = flux(text=5 + mesh["fsdp"].get_local_rank()), CPUOffloadPolicy(pin_memory=False)
    with torch.inference_mode(False), torch.no_grad():
        for order in ("before", "after"):
            model = build("flux").requires_grad_(False)
            expected = forward(model, inputs)
            config = ContextParallelConfig(mesh=mesh, ring_anything=True)
            if order == "after":
                apply_context_parallel(model, config)
            for block in [*model.transformer_blocks, *model.single_transformer_blocks, model]:
                fully_shard(block, mesh=mesh["fsdp"], offload_policy=policy)
            if order == "before":
                apply_context_parallel(model, config)
            close(max(relative(forward(model, inputs), expected) for _ in range(2)))
