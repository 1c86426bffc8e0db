"""Rank script: what users do to a module besides calling it. Every check runs on all ranks; rank 0 reports the worst."""

import copy
import dataclasses
import gc
import inspect
import io
import sys
import threading
import weakref
from collections import namedtuple
from functools import partial

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support.ranks import finish, report, start, worst
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from cp_runtime import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    ModulePlan,
    ParallelConfig,
    apply_context_parallel,
    remove_context_parallel,
)
from cp_runtime.compat import timeout_of
from cp_runtime.diffusers import agreement
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.errors import ConfigError, PlanError

rank, world, _ = start()

Sample = namedtuple("Sample", ["sample", "extra"])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (2, 8, 3)).transpose(1, 2).unbind(-1)  # the last dimension is not the innermost
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = Attention(), Attention(), nn.Linear(16, 16)

    def forward(self, x, mask=None):
        x = self.first(x, mask)
        if mask is not None:
            mask[:, ::2] = -torch.inf  # in place, between two attentions
        return Sample(self.out(self.second(x, mask)), "text")


def new(cls=Model):
    torch.manual_seed(0)
    return cls().eval()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Sequential(nn.Linear(16, 256), nn.SiLU(), nn.Linear(256, 16))

    def forward(self, x):
        x = self.attention(x)
        return x + self.mlp(x)


class Mean(nn.Module):
    """Returns tokens and their mean."""

    def __init__(self):
        super().__init__()
        self.out = nn.Identity()

    def forward(self, x):
        return self.out(x), x.mean()


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.scale


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = Attention(), nn.Linear(16, 16)

    def forward(self, xs):
        return self.out(self.attention(xs[0]))


class Joint(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = Attention(), nn.Linear(16, 16)

    def forward(self, x, text):
        return self.out(self.attention(torch.cat([text, x], 1)))[:, text.shape[1] :]


def compiled(model, name):
    """The whole model, or each of its blocks as `compile_repeated_blocks` does it."""
    if not name.startswith("blocks"):
        return torch.compile(model, backend="eager")
    for block in model.blocks:
        block.compile(backend="eager")
    return model


class Adapted(nn.Module):
    """A layer with a LoRA beside it, as peft adds one."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 48, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(model):
    torch.manual_seed(2)
    for block in model.blocks:
        block.attention.qkv = Adapted(block.attention.qkv)


new_blocks = partial(new, Blocks)
GATHERED = {"out": ContextParallelOutput(1, 3)}
BLOCKS_PLAN = {"blocks.0": {"x": ContextParallelInput(1, 3)}, **GATHERED}
PLAN = {"first": {"x": ContextParallelInput(1, 3)}, "out": ContextParallelOutput(1, 3)}
RING = ContextParallelConfig(ring_degree=world, rotate_method="alltoall", ring_anything=True)
x, mask = torch.randn(2, 13, 16, generator=torch.Generator().manual_seed(1)), torch.randn(13, 13)
dist.broadcast(mask, 0)


def refused(run, error, *words, given=None):
    try:
        run() if given is None else run(given)
    except error as caught:
        return all(word in str(caught) for word in words)
    return False


def check(name, held):
    report(name=name, held=worst(not held) == 0)


with torch.no_grad():
    model, expected, expected_masked = new(), new()(x), new()(x, mask.clone())
    apply_context_parallel(model, RING, PLAN)
    out = model(x)
    check("named tuple", type(out) is Sample and out.extra == "text" and (out.sample - expected.sample).abs().max() < 1e-5)
    out = model(x, mask.clone())
    check("mask changed in place", (out.sample - expected_masked.sample).abs().max() < 1e-5)
    check("no batch", model(x[:0]).sample.shape == (0, 13, 16))
    check("copy", refused(lambda: copy.deepcopy(model)(x), PlanError, "copy"))
    check("applied twice", refused(lambda: apply_context_parallel(model, RING, PLAN), PlanError, "already"))
    check("part of an applied one", refused(lambda: apply_context_parallel(model.first, RING, PLAN), PlanError, "already"))
    around = nn.Sequential(model)
    check("around an applied one", refused(lambda: apply_context_parallel(around, RING, {}), PlanError, "already"))
    model.train()
    check("training mode", refused(lambda: model(x), PlanError, "Call its method eval"))
    model.eval()
    with torch.enable_grad():
        check("gradients", refused(lambda: model(x), PlanError, "torch.no_grad()"))
    theirs = model.forward
    model.forward = lambda *args: theirs(*args)
    remove_context_parallel(model)
    check("another wrapper stays", "forward" in vars(model) and torch.equal(model(x).sample, expected.sample))

    model = new()
    apply_context_parallel(model, RING, PLAN).remove()
    check("removed by its handle", "forward" not in vars(model) and torch.equal(model(x).sample, expected.sample))
    apply_context_parallel(model, RING, PLAN)
    gone = weakref.ref(model)
    model = around = None
    gc.collect()
    check("freed without being removed", gone() is None)
    wrong = {**PLAN, "first": {"x": ContextParallelInput(-4, 3)}}
    apply_context_parallel(model := new(), RING, wrong)
    check("no such dimension", refused(model.forward, PlanError, "-4", given=x))

    # Every rank keeps a part of the weights.
    model, plain = new_blocks(), new_blocks()
    apply_context_parallel(plain, RING, BLOCKS_PLAN)
    expected = plain(x)
    shared = apply_context_parallel(model, RING, BLOCKS_PLAN, shard_weights=True)
    block, other = model.blocks[0], {name: weight + 1 for name, weight in new_blocks().state_dict().items()}
    name = "blocks.0.attention.qkv.weight"
    for moment in ("before a call", "after it"):
        check(f"names {moment}", model.state_dict().keys() == other.keys())
        for assign in (False, True):
            load = partial(model.load_state_dict, other, assign=assign)
            check(f"load_state_dict {assign} {moment}", refused(load, PlanError, "load_state_dict", "remove_context_parallel"))
        for use in (
            lambda: torch.save(model.state_dict(), io.BytesIO()),
            lambda: save_file(model.state_dict(), "/dev/null"),
            lambda: block.half(),
            lambda: model.half(),
            lambda: model.to("meta"),
            lambda: block.attention.qkv.weight.data.add_(1),  # a LoRA that is fused
        ):
            check(f"{inspect.getsource(use)} {moment}", refused(use, PlanError, name, "remove_context_parallel"))
        check(f"copy {moment}", refused(lambda: copy.deepcopy(model), PlanError, "before copying"))
        check(f"moved to where it is {moment}", model.to("cpu") is model)
        check(f"the same output {moment}", torch.equal(model(x), expected))
    adapt(model), adapt(plain)
    lora = {name: weight * 2 for name, weight in plain.state_dict().items() if name.endswith(("down.weight", "up.weight"))}
    for assign in (False, True):
        load = partial(model.load_state_dict, strict=False, assign=assign)
        check(f"its weights are loaded {assign}", not load(lora).unexpected_keys and plain.load_state_dict(lora, strict=False))
        named = {**lora, "blocks.0.mlp.0.weight": other["blocks.0.mlp.0.weight"]}
        check(f"others are not {assign}", refused(load, PlanError, "load_state_dict of ", given=named))
    check("a LoRA beside it", torch.equal(model(x), plain(x)) and not torch.equal(model(x), expected))
    shared.remove()
    remove_context_parallel(plain)
    check("weights are whole again", all(map(torch.equal, model.state_dict().values(), plain.state_dict().values())))
    check("they train", all(weight.requires_grad and not weight.is_inference() for weight in model.parameters()))
    check("they move", "_apply" not in vars(model) and model.double().float() is model)
    check("they load", model.load_state_dict(plain.state_dict()) and torch.equal(model(x), plain(x)))

    model = new_blocks()
    apply_context_parallel(model, RING, BLOCKS_PLAN, shard_weights=True)
    model.blocks[3].mlp[0].bias = own = nn.Parameter(torch.zeros(256))
    check("a weight that was replaced", refused(model, PlanError, "blocks.3.mlp.0.bias was replaced", given=x))
    remove_context_parallel(model)
    last, as_it_was = model.blocks[3].mlp, new_blocks().blocks[3].mlp
    check("it stays", last[0].bias is own and torch.equal(last[2].weight, as_it_was[2].weight))
    apply_context_parallel(model, RING, BLOCKS_PLAN, shard_weights=True)
    model(x)
    gone = weakref.ref(model)
    model = own = last = None
    gc.collect()
    check("shared weights freed without being removed", gone() is None)

    share = partial(apply_context_parallel, shard_weights=True)
    model = new_blocks()
    one = share(model, ContextParallelConfig(), BLOCKS_PLAN, device="meta")
    one.remove()
    check(
        "one rank",
        one.mesh.size == 1 and one.weights is None and all(weight.numel() and not weight.is_meta for weight in model.parameters()),
    )
    check("no blocks", refused(lambda: share(new(), RING, PLAN), PlanError, "has no blocks", "shard_weights=False"))
    check("no weights", refused(lambda: share(nn.Sequential(nn.SiLU()), RING, {}), PlanError, "has no blocks"))
    check("no numbers", refused(lambda: share(new_blocks().to("meta"), RING, BLOCKS_PLAN), PlanError, "blocks.0", "map_weights"))
    check(
        "a device alone",
        refused(lambda: apply_context_parallel(model, RING, BLOCKS_PLAN, device="cpu"), ConfigError, "module.to(device)"),
    )
    model.blocks[2].mlp[0].weight = UninitializedParameter()
    check("an unknown kind", refused(lambda: share(model, RING, BLOCKS_PLAN), PlanError, "blocks.2.mlp.0.weight is a Uninit"))
    check("nothing left behind", not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules()))
    if world == 4:
        turned = DeviceMesh("cpu", torch.arange(4).reshape(2, 2).T, mesh_dim_names=("ring", "ulysses"))
        config = ContextParallelConfig(ring_degree=2, ulysses_degree=2, mesh=turned)
        check("mesh turned around", refused(lambda: apply_context_parallel(new(), config, PLAN), ConfigError, "ascending"))
    # What one refuses all refuse.
    group = ContextParallelConfig(ulysses_degree=world)
    group.setup(rank, world, "cpu")
    agree = partial(agreement.agree, group=group.sequence.whole)
    check("one refuses", refused(lambda: agree(PlanError("é" * 600) if rank == 1 else None), PlanError, "é" * 512))

    axes = SequenceMesh(dist.group.WORLD).axes(2, world // 2)
    groups = [axis.group for axis in axes if axis.group is not None]
    check("groups have the user's timeout", {timeout_of(each) for each in groups} == {timeout_of(dist.group.WORLD)})
    one, two = new(), new()
    apply_context_parallel(one, RING, PLAN)
    apply_context_parallel(two, RING, PLAN)
    expected, errors = one(x).sample, []

    def from_another_thread(*_):
        thread = threading.Thread(target=lambda: errors.append(refused(two, PlanError, "in another thread", given=x)))
        thread.start()
        thread.join()

    hook = one.second.register_forward_hook(from_another_thread)
    check("two threads", (one(x).sample - expected).abs().max() < 1e-5 and errors == [True])
    hook.remove()
    check("and in turn", (two(x).sample - expected).abs().max() < 1e-5)
    for name, use in {
        "streams": lambda: ModulePlan(attention=(("a",),)),
        "a text for streams": lambda: ContextParallelInput(1, 3, streams="hidden"),
        "a text within which tokens are gathered": lambda: ContextParallelOutput(1, 3, stream="x", within="text"),
        "shard_weights": lambda: apply_context_parallel(new_blocks(), RING, BLOCKS_PLAN, shard_weights="fsdp"),
        "check_inputs": lambda: apply_context_parallel(new_blocks(), RING, BLOCKS_PLAN, check_inputs="yes"),
        "a scripted module": lambda: apply_context_parallel(torch.jit.script(nn.Linear(2, 2)), RING, {}),
    }.items():
        check(name, refused(use, ConfigError, "Got ", "allowed: "))
    scalar = nn.Sequential(Attention(), Mean()).eval()
    applied = apply_context_parallel(scalar, RING, {"0": {"x": ContextParallelInput(1, 3)}, "1.out": ContextParallelOutput(1, 3)})
    check("a number is compared by its size", (scalar(x)[1] - nn.Sequential(*scalar)(x)[1]).abs() < 1e-5)
    applied.remove()
    check("a config of nothing", apply_context_parallel(new(), ParallelConfig()).mesh.size == 1)

    # Forms that diffusers' users write.
    for name, model, argument, plan in [
        ("only an output is split", new_blocks(), x, {"blocks.0": {0: ContextParallelInput(1, 3, split_output=True)}, **GATHERED}),
        ("only a list is split", Listed().eval(), [x], {"": {"xs": [ContextParallelInput(1, 3)]}, **GATHERED}),
    ]:
        expected = model(argument)
        stats = apply_context_parallel(model, RING, plan).mesh.stats
        check(name, (model(argument) - expected).abs().max() < 1e-5 and stats.collectives > 2)
    # What this package adds to diffusers' classes holds in a table, too.
    torch.manual_seed(0)
    model, text = Joint().eval(), torch.randn(2, 6, 16)
    expected = model(x, text)
    out = ContextParallelOutput(1, 3, stream="x", within=("text", "x"))
    order = {"attention": ModulePlan(attention=("text", "x"))}
    for name, tokens in [
        ("one stream is gathered within two", {}),
        ("tokens are split inside of frames", dict(frames=lambda state: 2)),
        ("a stream is whole on every rank", dict(replicated=True)),
    ]:
        plan = {"": {"x": ContextParallelInput(1, 3), "text": ContextParallelInput(1, 3, **tokens)}, "out": out, **order}
        applied = apply_context_parallel(model, RING, plan)
        check(name, (model(x, text) - expected).abs().max() < 1e-5)
        applied.remove()
    listed = {
        "": {
            "x": ContextParallelInput(1, 3, streams=["x"]),
            "text": ContextParallelInput(1, 3, streams=["text"]),
        },
        "attention": ModulePlan(attention=["text", "x"], keys=["text", "x"]),
        "out": ContextParallelOutput(1, 3, stream="x", within=["text", "x"]),
    }
    applied = apply_context_parallel(model, RING, listed)
    check("names in lists", (model(x, text) - expected).abs().max() < 1e-5)
    applied.remove()
    alone = {"": {"x": ContextParallelInput(1, 3), "text": ContextParallelInput(1, 3, side=True)}, "out": out}
    check("side without streams", refused(lambda: apply_context_parallel(model, RING, alone), PlanError, "streams=("))
    apply_context_parallel(model := new_blocks(), RING, BLOCKS_PLAN)
    expected = new_blocks()(x)
    check("torch.save", refused(lambda: torch.save(model, io.BytesIO()), PlanError, "Save its state_dict()"))
    check("torch.save of the state dict", torch.save(model.state_dict(), io.BytesIO()) is None)
    around = DistributedDataParallel(model)
    check("DistributedDataParallel around it", (around(x) - expected).abs().max() < 1e-5)
    remove_context_parallel(model)
    check("in it", refused(lambda: apply_context_parallel(around, RING), PlanError, "DistributedDataParallel has no _cp_plan"))
    if world == 2:
        for name in ("compiled before", "compiled after", "blocks compiled before", "blocks compiled after"):
            outer = model = new_blocks()
            del model.blocks[1:3]
            expected = model(x)
            if "before" in name:
                outer = compiled(model, name)
            apply_context_parallel(outer, RING, BLOCKS_PLAN)
            if "after" in name:
                outer = compiled(model, name)
            check(name, max((outer(x) - expected).abs().max() for _ in range(3)) < 1e-5)
            check(f"{name}, removed", remove_context_parallel(outer) is None and "forward" not in vars(model))

    # Ranks of unequal speed.
    shares, expected = (3, 1) if world == 2 else (2, 2, 1, 1), new()(x).sample
    uneven = dict(shares=shares, ulysses_anything=True, ring_anything=True)
    configs = [ContextParallelConfig(ulysses_degree=world, **uneven), ContextParallelConfig(ring_degree=world, **uneven)]
    configs += [ContextParallelConfig(batch_degree=2, ulysses_degree=world // 2, **uneven)]
    for config in configs:
        applied = apply_context_parallel(model := new(), config, PLAN)
        name = f"shares {config.mesh_shape} x {config.batch_degree}"
        check(name, (model(x).sample - expected).abs().max() < 1e-5 and applied.mesh.shares == shares)
        applied.remove()
    apply_context_parallel(model := new(), dataclasses.replace(configs[0], ulysses_anything=False), PLAN)
    check("what shares do not divide", refused(model, PlanError, "with the shares", "do not divide", "13 tokens", given=x))

    row = DeviceMesh("cpu", torch.arange(world).reshape(1, world), mesh_dim_names=("ring", "ulysses"))
    of_mesh = ContextParallelConfig(mesh=row)
    check("degrees of the mesh", of_mesh.mesh_shape == (1, world))
    wrapped = ParallelConfig(ContextParallelConfig(1, world, ulysses_anything=True))
    wrapped.setup(rank, world, "cpu", cp_mesh=row)
    check("cp_mesh", wrapped.context_parallel_config.sequence.size == world)
    for name, make in {
        "other degrees than the mesh": lambda: ContextParallelConfig(ring_degree=world, mesh=row),
        "no mesh": lambda: ContextParallelConfig(mesh="cuda"),
        "a mesh of other axes": lambda: ContextParallelConfig(mesh=DeviceMesh("cpu", list(range(world)), mesh_dim_names=("cp",))),
    }.items():
        check(name, refused(make, ConfigError, "mesh: ", "Got ", "allowed"))

    # A config outlives a process group, a mesh does not.
    ulysses, expected = ContextParallelConfig(ulysses_degree=world, ulysses_anything=True), new()(x).sample
    apply_context_parallel(model := new(), ulysses, PLAN)
    apply_context_parallel(other := new(), of_mesh, PLAN)
    model(x)
    remove_context_parallel(other)
    dist.barrier()
    dist.destroy_process_group()
    check_alone = refused(lambda: ulysses.setup(rank, world, "cpu"), ConfigError, "init_process_group before setup")
    store = dist.FileStore(sys.argv[3] + " again", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    check("setup before init_process_group", check_alone)
    check("a process group that was destroyed", refused(model, PlanError, "apply_context_parallel again", given=x))
    remove_context_parallel(model)
    apply_context_parallel(model, ulysses, PLAN)
    check("a new process group", (model(x).sample - expected).abs().max() < 1e-5)
    check("its mesh is gone", refused(lambda: apply_context_parallel(other, of_mesh, PLAN), ConfigError, "mesh: got one without"))
    # One that is inside of torch when Python ends has the process aborted: docs/api.md, "Limits".
    check("no thread is left", threading.enumerate() == [threading.main_thread()])
finish()
