"""What a model would take on a machine that one does not have yet, by the cost model: nothing is run.

    python benchmarks/forecast.py --model wan14b --tokens 75600 --devices 4 --link pcie4

in a clone. The speed of one device is a guess for its name, or what you say by `--seconds`; the link is that of `LINKS`. In
docs/generated/scaling.md the same formula meets what others measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import common
from prediction import CallWork, Ranks, Way, predict

from cp_runtime.engine.cost import AttentionShape, Rates, choose
from cp_runtime.engine.measuring import Measured
from cp_runtime.engine.ranks.config import SequenceSettings

UNITS = 128  # multiprocessors of a device: from 82 (3090) to 170 (5090)
PER_MACHINE = 8  # devices in one machine, where there are several


@dataclass(frozen=True)
class Model:
    """A transformer, as far as its speed goes.

    Args:
        name: for people.
        parameters: of the blocks.
        layers, heads, head_dim: of attention over all tokens.
        tokens: of the usual picture or video.
        single: of the layers, those of one stream: they launch half of the operations of one with two.
        items: of a batch in one step: 2 with CFG.
    """

    name: str
    parameters: float
    layers: int
    heads: int
    head_dim: int
    tokens: int
    items: int = 1
    single: int = 0


@dataclass(frozen=True)
class Link:
    """Between devices.

    Args:
        bandwidth: bytes per second that one device sends while all do.
        source: of that; without one, about two thirds of what the data sheet says.
        latency: seconds of a collective.
        between: of several machines: bytes per second that one device sends, when its machine's network is shared by all of its
            devices; None = one machine, however many devices.
        flops: operations per second that a model gets out of a device that is often found on it, in half precision, attention and
            all.
        memory: bytes per second that this device's memory reads and writes, by its data sheet.
        alone: devices that do not share their way, through the host's root and memory; None = none does.
        most: devices that it connects.
    """

    name: str
    bandwidth: float
    latency: float
    flops: float
    memory: float
    between: float | None = None
    source: str = ""
    alone: int | None = None
    most: int = PER_MACHINE

    def sent(self, devices: int) -> float:
        """Bytes per second that one of so many devices of a machine sends while all do."""
        return self.bandwidth if self.alone is None else self.bandwidth * min(1.0, self.alone / devices)


@dataclass(frozen=True)
class Host:
    """What the host takes to launch one layer's kernels, which more devices do not lessen: no step is faster.

    Args:
        layer: seconds.
        ring: more of them in a ring, whose parts are merged.
        single: of a layer of one stream; None = as of any other.
    """

    layer: float
    ring: float
    single: float | None = None

    def step(self, model: Model, ring: int) -> float:
        """Seconds of a step at least. `ring`: its degree."""
        own = self.layer if self.single is None else self.single
        return (model.layers - model.single) * self.layer + model.single * own + (model.layers * self.ring if ring > 1 else 0.0)


HOSTS = {"ComfyUI": Host(1.5e-3, 1e-4, 7e-4), "eager": Host(2.7e-3, 6e-4), "compiled": Host(1e-3, 1.5e-4)}
"""The first: a double block of Flux with hooks and exchanges, beside an H200 (docs/gpu.md), and a single one by its operations, 26
of 55. The others are fitted to published runs of Flux on H100, by diffusers, as a mean of both, and explain its other times."""

MODELS = {
    "flux": Model("Flux 1, 1024 x 1024", 12e9, 57, 24, 128, 4096 + 512, single=38),
    "qwen": Model("Qwen-Image, 1328 x 1328, CFG", 20e9, 60, 24, 128, 6889 + 128, 2),
    "wan14b": Model("Wan 14B, 720p, 81 frames, CFG", 14e9, 40, 40, 128, 75600, 2),
    # 1344 x 768; video, sound and text. What modulates by the timestep is not counted: it is computed once for all tokens.
    "minimax": Model("MiniMax-H3, 768p, 124 frames", 19.3e9, 50, 56, 128, 37296 + 414 + 512),
}
LINKS = {
    "nvlink": Link("NVLink 4 (H100, H200)", 300e9, 2e-5, 6.7e14, 3.35e12),
    "nvlink5": Link("NVLink 5 (GB200)", 600e9, 2e-5, 1e15, 8e12, most=72),
    "bridge": Link("NVLink bridge (3090)", 45e9, 2e-5, 5e13, 9.4e11, most=2),
    "pcie5": Link(
        "PCIe 5 x16 (5090)",
        40e9,
        2e-5,
        1.5e14,
        1.8e12,
        alone=3,
        source="54 between two behind a switch (voipmonitor/rtx6kpro), 35 with four and 28 with eight under "
        "two CPUs (NVIDIA/nccl#1639)",
    ),
    "pcie4p2p": Link(
        "PCIe 4 x16 with peer access (L20)",
        18e9,
        3e-5,
        1.2e14,
        1e12,
        alone=3,
        source="21 (tinygrad/open-gpu-kernel-modules#6)",
    ),
    "pcie4": Link(
        "PCIe 4 x16 (4090)",
        10e9,
        3e-5,
        1.2e14,
        1e12,
        alone=3,
        source="13 without peer access (tinygrad/open-gpu-kernel-modules#6)",
    ),
    "pcie4x8": Link("PCIe 4 x8", 9e9, 3e-5, 6e13, 2.2e11, alone=3),
    "pcie3x8": Link("PCIe 3 x8 (3090)", 4.5e9, 4e-5, 5e13, 9.4e11, alone=3),
    "100gbit": Link("100 Gbit/s (machines of 8 H100)", 300e9, 6e-5, 6.7e14, 3.35e12, 10e9 / PER_MACHINE, most=1024),
    "25gbit": Link("25 Gbit/s (machines of 8 H100)", 300e9, 6e-5, 6.7e14, 3.35e12, 2.5e9 / PER_MACHINE, most=1024),
}


@dataclass(frozen=True)
class Forecast:
    """Seconds of one step, and how it is shared."""

    seconds: float
    alone: float
    way: Way
    ring: int
    ulysses: int

    @property
    def speedup(self) -> float:
        """Over one device."""
        return self.alone / self.seconds

    @property
    def mode(self) -> str:
        """In words."""
        named = {"CFG": self.way.groups, "ulysses": self.ulysses, "ring": self.ring}
        return " x ".join(f"{name} {degree}" for name, degree in named.items() if degree > 1) or "one device"


def work_of(model: Model, tokens: int | None = None) -> CallWork:
    """One step of a model in half precision."""
    count = tokens or model.tokens
    shape = AttentionShape(1, count, count, model.heads, model.heads, model.head_dim, 2)
    return CallWork(model.items, ((shape, model.layers),), 2 * model.parameters * count)


def ranks_on(devices: int, link: Link, flops: float, **settings: object) -> Ranks:
    """Equal devices on a link, in as many machines as it takes. `settings`: of the sequence."""
    several = link.between is not None and devices > PER_MACHINE
    rates = Rates(
        latency=link.latency,
        bandwidth=link.between if several and link.between is not None else link.sent(min(devices, PER_MACHINE)),
        flops=flops,
        memory=link.memory,
        overlap=1.0,
        linear=flops,
        units=UNITS,
    )
    machines = tuple(f"{rank // PER_MACHINE}" for rank in range(devices)) if several else ()
    inside = ((link.latency, link.bandwidth),) * devices if several else ()
    measured = Measured((rates,) * devices, (0,) * devices, machines, inside)
    return Ranks(measured, SequenceSettings(**settings))  # type: ignore[arg-type]


def operations(work: CallWork) -> float:
    """Of a step: matrix products and attention."""
    attention = sum(n * 4 * s.batch * s.queries * s.keys * s.heads * s.head_dim for s, n in work.attentions)
    return work.items * (work.operations + attention)


def forecast(
    model: Model, work: CallWork, devices: int, link: Link, alone: float, host: Host = HOSTS["ComfyUI"]
) -> Iterator[Forecast]:
    """What CP Config chooses from: one device, those of one machine, and all of them.

    Args:
        alone: seconds of a step on one device.
    """
    ranks = ranks_on(devices, link, operations(work) / alone)
    for count in sorted({1, devices, min(devices, PER_MACHINE) if link.between is not None else devices}):
        way = ranks.way(work, count)
        rates = ranks.measured.of(*ranks.groups(way))
        ring, ulysses = choose(work.attentions[0][0], count // way.groups, ranks.settings, rates)
        seconds = predict(work, ranks, way, alone)
        least = min(alone, host.step(model, ring))
        yield Forecast(max(seconds, least), alone, way, ring, ulysses)


def best(model: Model, devices: int, link: Link, alone: float) -> Forecast:
    """The fastest of them."""
    return min(forecast(model, work_of(model), devices, link, alone), key=lambda each: each.seconds)


def main() -> None:
    """Print a forecast."""
    options = common.options(
        __doc__,
        model={"choices": MODELS, "default": "flux"},
        tokens={"type": common.positive(int), "help": "of the whole sequence; the usual size without it"},
        devices={"type": common.positive(int), "default": 2},
        link={"choices": LINKS, "default": "pcie4"},
        seconds={"type": common.positive(float), "help": "of a step on one of your devices; else a guess"},
        no_cfg={"default": False, "help": "one item in a step"},
        compiled={"default": False, "help": "blocks are compiled, which spares the host"},
    )
    model, link = MODELS[options.model], LINKS[options.link]
    model = replace(model, items=1) if options.no_cfg else model
    if options.devices > link.most:
        sys.exit(
            f"--devices: got {options.devices}; {link.name} connects up to {link.most}. Take --link 100gbit for several machines."
        )
    work = work_of(model, options.tokens)
    alone, tokens = options.seconds or operations(work) / link.flops, options.tokens or model.tokens
    found = list(forecast(model, work, options.devices, link, alone, HOSTS["compiled" if options.compiled else "ComfyUI"]))
    chosen = min(found, key=lambda each: each.seconds)
    lines = [
        f"{model.name}: {tokens} tokens, {options.devices} devices, {link.name}. Predicted, not measured.",
        f"{'devices at work':<17}{'split':<28}{'s per step':>11}{'speed-up':>10}",
        *(f"{each.way.ranks:<17}{each.mode:<28}{each.seconds:>11.3g}{each.speedup:>9.2f}x" for each in found),
        f"The fastest is {chosen.mode}: {chosen.speedup:.2f} times as fast as one device.",
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
