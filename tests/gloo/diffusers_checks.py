"""What else must hold for a model outside of ComfyUI. Run by diffusers_ranks.py on every rank; what they return is reported."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from diffusers.models._modeling_parallel import ContextParallelInput as DiffusersInput
from diffusers_cases import MODES, degrees, flux, hunyuan, ltx_2, normal, padding, qwen
from diffusers_models import build, fill, forward, plan_of, relative
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from cp_runtime import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    ModulePlan,
    ParallelConfig,
    apply_context_parallel,
    remove_context_parallel,
)
from cp_runtime.engine.attention import kernels
from cp_runtime.errors import ContextParallelError

ANYTHING = dict(ulysses_anything=True, ring_anything=True)


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything that sharding could leave behind: attributes and hooks of every module, torch's attention function."""
    state: list[Any] = [F.scaled_dot_product_attention]
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks") and value is not None]
        state.append((name, sorted(vars(module)), hooks, type(module), type(module).forward))
    return state


def error_of(run: Any) -> str | None:
    try:
        run()
    except ContextParallelError as error:
        return type(error).__name__
    return None


def message_of(run: Any) -> str | None:
    try:
        run()
    except ContextParallelError as error:
        return str(error)
    return None


def applied_removed_applied(rank: int, world: int) -> dict[str, Any]:
    model, inputs = build("flux"), flux(batch=2)
    before, expected = fingerprint(model), forward(model, inputs)
    differences, identical = [], []
    for config in (dict(ulysses_degree=world), dict(ring_degree=world), dict(ulysses_degree=world)):
        apply_context_parallel(model, ContextParallelConfig(**config, **ANYTHING))
        differences.append(relative(forward(model, inputs), expected))
        remove_context_parallel(model)
        identical.append(torch.equal(forward(model, inputs)[0], expected[0]))
    return dict(difference=max(differences), identical=all(identical), clean=fingerprint(model) == before)


def applied_twice(rank: int, world: int) -> dict[str, Any]:
    """A second application over a first one would split what is split already."""
    model, inputs = build("flux"), flux()
    expected = forward(model, inputs)
    config = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    apply_context_parallel(model, config)
    error = error_of(lambda: apply_context_parallel(model, config))
    return dict(error=error, difference=relative(forward(model, inputs), expected))


def configs(rank: int, world: int) -> dict[str, Any]:
    """Our configuration and diffusers', bare and wrapped, set up before or not, over the plan of either."""
    model, inputs = build("qwen"), qwen(text=8, encoder_hidden_states_mask=padding(5, length=8))
    expected, plan = forward(model, inputs), model._cp_plan
    ours = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    prepared = ContextParallelConfig(ring_degree=world, **ANYTHING)
    prepared.setup(rank, world, torch.device("cpu"))
    theirs = diffusers.ContextParallelConfig(ulysses_degree=world, ulysses_anything=True)
    ring = diffusers.ContextParallelConfig(ring_degree=world, ring_anything=True)
    return {
        f"difference of {name}": _once(model, config, plan, inputs, expected)
        for name, config in [
            ("ours", ours),
            ("ours wrapped", ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=world, **ANYTHING))),
            ("ours set up", prepared),
            ("theirs", theirs),
            ("theirs ring", ring),
            ("theirs wrapped", diffusers.ParallelConfig(context_parallel_config=theirs)),
        ]
    }


def _once(model: nn.Module, config: Any, plan: Any, inputs: dict[str, Any], expected: tuple[Tensor, ...]) -> float:
    apply_context_parallel(model, config, plan)
    difference = relative(forward(model, inputs), expected)
    remove_context_parallel(model, plan)
    return difference


def meshes(rank: int, world: int) -> dict[str, Any]:
    """A mesh with a third axis: each of its rows has inputs of its own, as data parallelism has, and shards them alone."""
    model, results = build("flux"), {}
    shapes = [(1, world, 1), (world, 1, 1), *([(1, 2, 2), (2, 1, 2)] if world == 4 else [])]
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses", "fsdp"))
        inputs = flux(text=5 + mesh["fsdp"].get_local_rank())
        for cls in (ContextParallelConfig, diffusers.ContextParallelConfig):
            anything = ANYTHING if cls is ContextParallelConfig else {f"{'ring' if shape[0] > 1 else 'ulysses'}_anything": True}
            config = cls(ring_degree=shape[0], ulysses_degree=shape[1], mesh=mesh, **anything)
            name = f"difference on {shape} {cls.__module__.partition('.')[0]}"
            results[name] = _once(model, config, model._cp_plan, inputs, forward(model, inputs))
        alone = ContextParallelConfig(mesh=mesh, **ANYTHING)  # its degrees are the mesh's
        results[f"difference on {shape} by mesh"] = _once(model, alone, model._cp_plan, inputs, forward(model, inputs))
        results["clean"] = results.get("clean", True) and alone.mesh_shape == shape[:2]
    return results


def degrees_that_do_not_fit(rank: int, world: int) -> dict[str, Any]:
    model = build("flux")
    before = fingerprint(model)
    error = error_of(lambda: apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world + 1)))
    return dict(error=error, clean=fingerprint(model) == before)


def anything_off(rank: int, world: int) -> dict[str, Any]:
    """Without `*_anything`, what divides works and the rest is refused."""
    model = build("flux")
    even, odd = flux(height=4, width=6, text=12), flux(height=5, width=7, text=5)
    expected, results = forward(model, even), {}
    for name in ("ulysses", "ring"):
        heads = name == "ring" or world != 3  # there are 4 of them
        apply_context_parallel(model, ContextParallelConfig(**{f"{name}_degree": world}))
        results[f"{name} error"] = error_of(lambda: forward(model, odd))
        if heads:
            results[f"{name} difference"] = relative(forward(model, even), expected)
        else:
            results[f"{name} heads error"] = error_of(lambda: forward(model, even))
        remove_context_parallel(model)
    return results


def wrong_plans(rank: int, world: int) -> dict[str, Any]:
    """A plan that does not fit is an error before anything is computed, and never skipped."""
    model, inputs, computed = build("flux"), flux(), []
    expected = forward(model, inputs)
    model.x_embedder.register_forward_hook(lambda *_: computed.append(True))
    before, results = fingerprint(model), {}
    for name, path, entry in [
        ("input dims", "", {**model._cp_plan[""], "hidden_states": ContextParallelInput(split_dim=1, expected_dims=4)}),
        ("their input dims", "", {**model._cp_plan[""], "img_ids": DiffusersInput(split_dim=0, expected_dims=3)}),
        ("output dims", "proj_out", ContextParallelOutput(gather_dim=1, expected_dims=4)),
        ("argument", "", {**model._cp_plan[""], "hidden_state": ContextParallelInput(split_dim=1, expected_dims=3)}),
        ("module", "projection", ContextParallelOutput(gather_dim=1, expected_dims=3)),
        ("entry", "proj_out", "gather"),
    ]:
        plan = {**model._cp_plan, path: entry}
        computed.clear()

        def run(plan: Any = plan) -> None:
            apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), plan)
            try:
                forward(model, inputs)
            finally:
                remove_context_parallel(model, plan)

        results[name] = [error_of(run), bool(computed), fingerprint(model) == before]
    return dict(results=results, difference=relative(forward(model, inputs), expected))


def gradients(rank: int, world: int) -> dict[str, Any]:
    """There is no backward: a call that would record one is refused, not answered with a wrong gradient."""
    with torch.inference_mode(False):
        model, inputs = build("flux"), flux()
        apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
        with torch.enable_grad():
            error = error_of(lambda: forward(model, inputs))
        with torch.no_grad():
            sharded = forward(model, inputs)
            remove_context_parallel(model)
            return dict(error=error, difference=relative(sharded, forward(model, inputs)))


def unknown_tokens(rank: int, world: int) -> dict[str, Any]:
    """The audio of LTX 2 is not in its plan: without a mark, nobody can tell that it is whole on every rank."""
    model = build("ltx 2")
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
    return dict(error=error_of(lambda: forward(model, ltx_2())))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, context_dim: int | None = None, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal
        kv_dim = dim // heads * kv_heads
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(context_dim or dim, 2 * kv_dim), nn.Linear(dim, dim)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        positions: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        k, v = self.kv(x if context is None else context).chunk(2, -1)
        q, k, v = (
            t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in ((self.q(x), self.heads), (k, self.kv_heads), (v, self.kv_heads))
        )
        if positions is not None:
            q, k = (t * positions[0][:, None, :, None] + positions[1][:, None, :, None] for t in (q, k))
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, scale=0.3, enable_gqa=grouped)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, context_dim: int, **attention: Any) -> None:
        super().__init__()
        self.attn = Attention(dim, **attention)
        self.cross = Attention(dim, **{**attention, "causal": False}, context_dim=context_dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, context: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.attn(x, positions=positions, mask=mask)
        x = x + self.cross(x, context)
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Somebody's own model: no diffusers, no plan, attention through torch."""

    def __init__(self, heads: int = 3, kv_heads: int = 3, causal: bool = False) -> None:
        super().__init__()
        dim = 16 * heads
        attention = dict(heads=heads, kv_heads=kv_heads, causal=causal)
        self.embed, self.out = nn.Linear(8, dim), nn.Linear(dim, 8)
        self.blocks = nn.ModuleList([Block(dim, 20, **attention) for _ in range(2)])

    def forward(self, hidden_states: Tensor, context: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        x = self.embed(hidden_states)
        positions = torch.linspace(0.5, 1.5, x.shape[1]).expand(x.shape[0], -1)
        for block in self.blocks:
            x = block(x, context, (positions, positions.sin()), mask)
        return (self.out(x),)


TOKENS = ContextParallelInput(split_dim=1, expected_dims=3)
POSITION = ContextParallelInput(split_dim=1, expected_dims=2)
OWN_PLAN = {
    "blocks.0": {"x": TOKENS},
    "blocks.*.attn": {"positions": [POSITION, POSITION]},
    "out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}


def _own_model(
    world: int, marks: dict[str, ModulePlan], arguments: dict[str, Any], tokens: int, context: int, mask: str | None = None
) -> dict[str, float]:
    """Differences of one model by mode. Masks are for all tokens: a plan need not split them."""
    model, plan = fill(Transformer(**arguments)), {**OWN_PLAN, **marks}
    inputs = dict(hidden_states=normal(2, tokens, 8), context=normal(2, context, 20))
    if mask == "full":
        inputs["mask"] = torch.rand(2, 1, tokens, tokens, generator=torch.Generator().manual_seed(5)) > 0.4
        inputs["mask"][..., 0] = True
    elif mask == "keys":
        inputs["mask"] = normal(2, 1, 1, tokens)
    elif mask == "heads":
        inputs["mask"] = normal(2, arguments.get("heads", 3), tokens, tokens)
    before, expected, results = fingerprint(model), model(**inputs), {}
    for mode in MODES:
        applied = apply_context_parallel(model, ContextParallelConfig(**degrees(mode, world), **ANYTHING), plan)
        results[mode] = relative(model(**inputs), expected)
        if applied.mesh.stats.collectives < 3:  # in two blocks and at the end
            results[mode] = float("inf")
        remove_context_parallel(model, plan)
    return results if fingerprint(model) == before else dict.fromkeys(MODES, float("inf"))


def own_model(rank: int, world: int) -> dict[str, Any]:
    """Cross-attention to a context that every rank has is marked at its path."""
    marks, grouped = {"blocks.*.cross": ModulePlan(attention=())}, dict(heads=4, kv_heads=2)
    runs = {
        "": ({}, 17, 5),
        "fewer tokens than ranks": ({}, 2, 3),
        "context as long as a shard": ({}, 12, 12 // world),
        "grouped": (grouped, 17, 5),
        "causal": (dict(causal=True), 17, 5),
        "full mask": ({}, 17, 5, "full"),
        "key mask": ({}, 17, 5, "keys"),
        "head mask": ({}, 17, 5, "heads"),
        "grouped head mask": (grouped, 3, 5, "heads"),
    }
    return {
        f"difference {name} {mode}": difference
        for name, run in runs.items()
        for mode, difference in _own_model(world, marks, *run).items()
    }


def own_model_marked_at_the_block(rank: int, world: int) -> dict[str, Any]:
    """The same, said where the block is described: the other attention of the block is shared all the same."""
    differences = _own_model(world, {"blocks.*": ModulePlan(local=("cross",))}, {}, 17, 5)
    return {f"difference {mode}": difference for mode, difference in differences.items()}


class OwnAttention(nn.Module):
    """Attention out of matrix products: torch's function is not called."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class TorchAttention(nn.Module):
    """Attention inside of a function of torch that is more than attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


def out_of_reach(rank: int, world: int) -> dict[str, Any]:
    """Attention that does not come by is right or refused. Over the own shard only it would be wrong without a word."""
    results = {}
    inner = [OwnAttention(32), TorchAttention(32), nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)]
    for module in inner:
        model = fill(nn.Sequential(nn.Linear(8, 32), module, nn.Linear(32, 8)))
        plan = {"0": {"input": TOKENS}, "2": ContextParallelOutput(gather_dim=1, expected_dims=3)}
        hidden = normal(2, 17, 8)
        expected, found = model(hidden), []
        apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), plan)
        error = error_of(lambda model=model, hidden=hidden, found=found: found.append(model(hidden)))
        results[type(module).__name__] = error or relative(tuple(found), (expected,))
    return results


def refusal(model: nn.Module, world: int, plan: Any, inputs: dict[str, Any], **more: Any) -> str:
    """What a sharded call is refused with; the difference where it is not."""
    expected = forward(model, inputs)
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), plan, **more)
    try:
        return f"difference {relative(forward(model, inputs), expected)}"
    except ContextParallelError as error:
        return str(error)
    finally:
        remove_context_parallel(model)


def text_left_out(rank: int, world: int) -> dict[str, Any]:
    """A table that splits the image and not the text that attends with it, and one that keeps the text whole as a stream."""
    model, inputs = build("hunyuan video"), hunyuan(2, valid=(7, 2))
    rope, proj_out = plan_of(model)["rope"], ContextParallelOutput(1, 3)
    one, results = {"rope": rope, "transformer_blocks.0": {"hidden_states": TOKENS}, "proj_out": proj_out}, {}
    results["refusal"] = refusal(model, world, one, inputs)
    text = ContextParallelInput(1, 3, streams=("encoder_hidden_states",), replicated=True)
    both = {**one, "transformer_blocks.0": {"hidden_states": TOKENS, "encoder_hidden_states": text}}
    for mode in MODES:
        apply_context_parallel(model, ContextParallelConfig(**degrees(mode, world), **ANYTHING), both)
        expected = forward(build("hunyuan video"), inputs)
        results[f"difference {mode}"] = max(relative(forward(model, inputs), expected) for _ in range(2))
        remove_context_parallel(model)
    return results


def not_gathered(rank: int, world: int) -> dict[str, Any]:
    model = build("flux")
    plan = {path: entry for path, entry in model._cp_plan.items() if path != "proj_out"}
    return dict(refusal=refusal(model, world, plan, flux()))


def backends(rank: int, world: int) -> dict[str, Any]:
    """The backend that was chosen computes each part of a ring, too; one that is out of reach is refused by its name."""
    model, inputs, used = build("flux"), flux(), []
    expected = forward(model, inputs)
    for kernel in kernels.KERNELS:
        run = kernel.run
        object.__setattr__(kernel, "run", lambda *args, run=run, name=kernel.name: (used.append(name), run(*args))[1])
    results: dict[str, Any] = {}
    apply_context_parallel(model, ContextParallelConfig(**degrees("ring alltoall", world), **ANYTHING))
    for backend in ("native", "_native_math"):
        used.clear()
        for module in model.modules():
            if hasattr(module, "processor"):
                module.processor._attention_backend = backend
        results[f"difference {backend}"] = relative(forward(model, inputs), expected)
        results[backend] = sorted(set(used))
    remove_context_parallel(model)
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor._attention_backend = "flex"
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING))
    results["refusal"] = message_of(lambda: forward(model, inputs))
    return results


class Windows(nn.Module):
    """Attention over windows, which the table takes for one over all tokens where a rank holds just one of them."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.qkv = tokens, nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (-1, self.tokens)).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v).flatten(1, 2)


class Both(nn.Module):
    """One attention in reach, one by matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.own = Attention(32, 2, 2), OwnAttention(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x + self.attention(x))


class Reshaped(nn.Module):
    """Matrix products behind a reshape in which tokens are only followed where there are as many of them as items."""

    def __init__(self) -> None:
        super().__init__()
        self.own = OwnAttention(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x.flatten(1).unflatten(1, (-1, 32)))


class OwnMask(nn.Module):
    """Makes its mask for the tokens that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        mask = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)


def what_is_wrong_is_seen(rank: int, world: int) -> dict[str, Any]:
    """In the first call: matrix products by following tokens, windows by comparison with one process."""
    results = {}
    for name, module, tokens, more in [
        ("products", Both(), 6 * world, {}),
        ("products that one rank sees", Reshaped(), 3 * world - 1, {}),
        ("a mask where a rank has one token", OwnMask(), world + 1, {}),
        ("windows", Windows(6), 6 * world, dict(verify="first")),
        ("right", TorchFunction(), 6 * world, dict(verify="first")),
    ]:
        model = fill(nn.Sequential(nn.Linear(8, 32), module, nn.Linear(32, 8)))
        plan = {"0": {"input": TOKENS}, "2": ContextParallelOutput(gather_dim=1, expected_dims=3)}
        hidden = normal(2, tokens, 8)
        expected = model(hidden)
        apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world, **ANYTHING), plan, **more)
        try:
            results[name] = relative((model(hidden),), (expected,))
        except ContextParallelError as error:
            results[name] = str(error)
    return results


class TorchFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(32, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


def other_inputs(rank: int, world: int) -> dict[str, Any]:
    """Inputs that are not the same on all ranks are named in the first call, and with check_inputs in each."""
    model, results = build("flux"), dict[str, Any](world=world)
    mine = flux(hidden_states=normal(1, 30, 16, seed=rank == world - 1))
    config = ContextParallelConfig(ulysses_degree=world, **ANYTHING)
    apply_context_parallel(model, config)
    results["first"] = message_of(lambda: forward(model, mine))
    results["guidance"] = message_of(lambda: forward(model, flux(guidance=torch.full((1,), 3.5 + (rank == 0)))))
    forward(model, flux())
    results["second"] = message_of(lambda: forward(model, mine))
    remove_context_parallel(model)
    apply_context_parallel(model, config, check_inputs=True)
    forward(model, flux())
    results["second, checked"] = message_of(lambda: forward(model, mine))
    return results


def batch_axis(rank: int, world: int) -> dict[str, Any]:
    """Items of a batch on groups of ranks: more of them than groups, as many, and fewer, which all ranks share by tokens."""
    groups, results = 3 if world == 3 else 2, {}
    shapes = [dict(ulysses_degree=world // groups), dict(ring_degree=world // groups, rotate_method="alltoall")]
    for name, make in [("flux", flux), ("qwen", masked_qwen)]:
        model = build(name)
        expected = {items: forward(model, make(batch=items)) for items in (1, groups, groups + 1)}
        for shape in shapes:
            applied = apply_context_parallel(model, ContextParallelConfig(**shape, **ANYTHING, batch_degree=groups), verify="first")
            for items, outputs in expected.items():
                applied.mesh.stats.reset()
                found = forward(model, make(batch=items))
                results[f"difference of {items} {name} {shape}"] = relative(found, outputs)
                if world == groups <= items:  # each group is one rank
                    results["only outputs"] = applied.mesh.stats.collectives == 1
            remove_context_parallel(model)
    apply_context_parallel(model, ContextParallelConfig(1, world // groups, **ANYTHING, batch_degree=groups), verify="first")
    results["output class"] = type(model(**masked_qwen(batch=groups))).__name__
    return results


def masked_qwen(batch: int) -> dict[str, Any]:
    return qwen(batch=batch, text=8, encoder_hidden_states_mask=padding(*range(5, 5 + batch), length=8))


def pipeline(rank: int, world: int) -> dict[str, Any]:
    """A pipeline of diffusers whose CFG is a batch of two: one line more than without ranks."""
    model = build("sd3")
    pipe = diffusers.StableDiffusion3Pipeline(
        model, diffusers.FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, None, None
    )
    pipe.set_progress_bar_config(disable=True)

    def run() -> Tensor:
        return pipe(
            prompt_embeds=normal(1, 7, 24), pooled_prompt_embeds=normal(1, 12), negative_prompt_embeds=normal(1, 7, 24, seed=1),
            negative_pooled_prompt_embeds=normal(1, 12, seed=1), height=96, width=80, num_inference_steps=2, guidance_scale=4.0,
            generator=torch.Generator().manual_seed(0), output_type="latent",
        ).images  # fmt: skip

    expected, groups = run(), 3 if world == 3 else 2
    config = ContextParallelConfig(ulysses_degree=world // groups, **ANYTHING, batch_degree=groups)
    stats = apply_context_parallel(model, config, plan_of(model)).mesh.stats
    return dict(difference=relative((run(),), (expected,)), collectives=stats.collectives)


def fsdp(rank: int, world: int) -> dict[str, Any]:
    """FSDP2 on an axis of the mesh whose rows have inputs of their own; before applying and after, with weights on the host."""
    shape = (2, 1, 2) if world == 4 else (world, 1, 1)
    mesh, results = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses", "fsdp")), {}
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
            results[f"difference {order}"] = max(relative(forward(model, inputs), expected) for _ in range(2))
    return results


CHECKS = (
    applied_removed_applied, applied_twice, configs, meshes, degrees_that_do_not_fit, anything_off, wrong_plans, gradients,
    unknown_tokens, own_model, own_model_marked_at_the_block, out_of_reach, text_left_out, not_gathered, backends,
    what_is_wrong_is_seen, other_inputs, batch_axis, pipeline, fsdp,
)  # fmt: skip
