"""What others measured, replayed by the cost model: one row of a table says how fast a device is, the others must follow.

    python benchmarks/published.py

Effective operations per second are fitted from the first row of each table alone; the link comes from the machine's name. Times
are copied from the sources that stand beside them; nobody measured anything here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from forecast import LINKS, MODELS, Link, Model, operations, pool_of, work_of

from cp_runtime.engine.policy import CallSplit, Run, predict


class Row(NamedTuple):
    """A split and what it took, in the unit of the table."""

    split: CallSplit
    time: float


@dataclass(frozen=True)
class Table:
    """Times of one model on one machine.

    Args:
        times: "batch (CFG) x ring x ulysses, and what it took", with commas between them.
        unit: seconds that one unit of the times stands for, per call of the model.
        rotate_method: how the ring of that implementation works.
        missing: what the model does not know of, where it is off by more than BOUND: in a few words, a colon, and in a sentence.
    """

    name: str
    source: str
    model: Model
    link: Link
    times: str
    unit: float = 1.0
    rotate_method: str = "alltoall"
    missing: str = ""

    @property
    def rows(self) -> list[Row]:
        found = []
        for split, time in (each.split() for each in self.times.split(",")):
            batch, ring, ulysses = map(int, split.split("x"))
            found.append(Row(CallSplit(tuple(range(batch * ring * ulysses)), batch, ring, ulysses), float(time)))
        return found


BOUND = 0.15  # of the median of a table; a row beyond it says what the model lacks
STEP = Model("StepVideo 30B", 30e9, 48, 48, 128, 75888)
WAN, FLUX, HUNYUAN, MINIMAX = (MODELS[name] for name in ("wan14b", "flux", "hunyuan", "minimax"))
WAN_480 = replace(WAN, tokens=32760)
# That page gives no size. At this one the device does as many operations per second as in the Flux row of the same page.
WAN_SHORT = replace(WAN, tokens=14040)
# 832 x 480; its VAE decodes in seven chunks there, which are 124 frames.
MINIMAX_480 = replace(MINIMAX, tokens=14430 + 414 + 512)
NVLINK, NVLINK5, PCIE5, PCIE4, PCIE4X8 = (LINKS[name] for name in ("nvlink", "nvlink5", "pcie5", "pcie4", "pcie4x8"))
HOST = "the host: Flux at 1024 x 1024 in eager mode waits for kernels to be launched, which more devices do not lessen"
COMPILED = "the host: less of it than in eager mode; and text encoder and VAE, if its seconds hold them"
MERGING = "the host: as in eager mode on such GPUs, and in its ring the merging of parts in Python"
REST = "the rest of the run: its seconds are those of whole runs, with text encoder and VAE, which more devices do not shorten"
ROOT = "contention: eight GPUs share the PCIe root and the host's memory, and the link counts as that of a few"

GB200 = "1x1x1 348.4, 2x1x1 174.0, 2x1x2 95.9, 2x1x4 48.1, 2x1x8 25.6, 2x1x12 18.5, 2x1x16 14.1, 2x1x32 8.48"
EAGER_H100 = "1x1x1 6.71, 1x1x2 4.38, 1x2x1 5.31, 1x1x4 4.24, 1x4x1 5.11, 1x2x2 5.19"
COMPILED_H100 = "1x1x1 4.30, 1x1x2 2.68, 1x2x1 2.60, 1x1x4 1.63, 1x4x1 1.98, 1x2x2 1.80"
CACHE_DIT = "1x1x1 23.56, 1x1x2 13.80, 1x1x4 8.28, 1x2x1 14.01, 1x4x1 9.82"
GUIDE, XDIT, LIGHT = "diffusers' guide", "xDiT", "LightX2V"
FIFTY, GATHER = 1 / 50, "allgather"
TABLES = (
    Table("Wan 2.2 14B, 40 steps, GB200", "TensorRT-LLM #13821", WAN, NVLINK5, GB200, 1 / 40),
    Table(
        "HunyuanVideo 720p, 50 steps, H100", XDIT, HUNYUAN, NVLINK, "1x1x1 1904, 1x1x2 925, 1x1x4 514, 1x1x8 338", FIFTY,
        missing=REST,
    ),
    Table("HunyuanVideo 720p, 50 steps, H20", XDIT, HUNYUAN, NVLINK, "1x1x1 6639, 1x1x2 3401, 1x1x4 1763, 1x1x8 941", FIFTY),
    Table(
        "HunyuanVideo 720p, 50 steps, L20", "diffusers, xDiT's page", HUNYUAN, PCIE4, "1x1x1 6044, 1x1x2 3271, 1x1x4 2080", FIFTY,
        missing=REST,
    ),
    Table("Flux 1, 28 steps, eager, H100", XDIT, FLUX, NVLINK, EAGER_H100, 1 / 28, missing=HOST),
    Table("Flux 1, 28 steps, compiled, H100", XDIT, FLUX, NVLINK, COMPILED_H100, 1 / 28, missing=COMPILED),
    Table("Flux 1, 50 steps on 4, H100", GUIDE, FLUX, NVLINK, "1x1x4 6671, 1x4x1 13077, 1x2x2 11069", 1e-3 / 50, GATHER, MERGING),
    Table("Flux 1, a step on 4, L20", GUIDE, FLUX, PCIE4, "1x1x4 281, 1x4x1 351, 1x2x2 324", 1e-3, GATHER),
    Table("Flux 1, a step on 4, 4090 48G", GUIDE, FLUX, PCIE4, "1x1x4 259, 1x4x1 339, 1x2x2 322", 1e-3, GATHER),
    Table("Flux 1, 28 steps, L20", "cache-dit", FLUX, PCIE4, CACHE_DIT, 1 / 28),
    Table("Wan 14B 480p, a step, H100", LIGHT, WAN_480, NVLINK, "1x1x1 5.18, 1x1x8 0.75"),
    Table("Wan 14B 480p, a step, 4090D", LIGHT, WAN_480, PCIE4, "1x1x1 20.26, 1x1x8 4.75", missing=ROOT),
    Table("Flux 1, a step, RTX 2000 Ada", "raylight", FLUX, PCIE4X8, "1x1x1 2.22, 1x1x2 1.26"),
    Table("Wan 14B fp8, a step, RTX 2000 Ada", "raylight", WAN_SHORT, PCIE4X8, "1x1x1 9.23, 1x1x2 5.18"),
    Table("MiniMax-H3 480p fp8, 20 steps, RTX PRO 5000", "buqi", MINIMAX_480, PCIE5, "1x1x1 78.3, 1x1x2 41.0", 1 / 20),
    Table(
        "MiniMax-H3 243 frames, a step, RTX PRO 4000", "H3-MultiStream", replace(MINIMAX, tokens=75794), PCIE5,
        "1x1x1 65.0, 1x1x3 25.1",
    ),
    Table("StepVideo 30B, H20", XDIT, STEP, NVLINK, "1x1x1 213.6, 1x1x2 108.1, 1x1x4 57.0, 1x1x8 30.1"),
)  # fmt: skip


@dataclass(frozen=True)
class Replay:
    """A row, and what the model makes of it."""

    row: Row
    predicted: float

    @property
    def error(self) -> float:
        """Relative, positive where the model is too slow."""
        return self.predicted / self.row.time - 1


def replay(table: Table) -> list[Replay]:
    """Every row but the first, from the first."""
    work, (first, *others) = work_of(table.model), table.rows
    # Operations per second with which the model gives the first row: halving the interval finds it.
    low, high = operations(work) / (first.time * table.unit * first.split.at_work) / 4, 1e18
    for _ in range(100):
        flops = (low * high) ** 0.5
        slow = seconds(table, first, flops) > first.time * table.unit
        low, high = (flops, high) if slow else (low, flops)
    return [Replay(row, seconds(table, row, high) / table.unit) for row in others]


def seconds(table: Table, row: Row, flops: float) -> float:
    """Of a call on a split, for devices of that speed."""
    work = work_of(table.model)
    pool, one = pool_of(row.split.at_work, table.link, flops, table.rotate_method, rounds=1), CallSplit((0,), 1, 1, 1)
    alone = operations(work) / flops
    return predict(work, pool, row.split, one, Run(alone, alone, 0.0))


def errors(table: Table) -> tuple[float, float]:
    """(median, worst) of the errors of a table, without their signs."""
    found = [abs(each.error) for each in replay(table)]
    return median(found), max(found)


def lacks(table: Table, error: float) -> str:
    """What the model does not know of, in a few words; empty for a row that it meets."""
    return table.missing.partition(":")[0] if abs(error) > BOUND else ""


def main() -> None:
    print(f"{'table':<42}{'devices':>8}{'split':>10}{'published':>11}{'predicted':>11}{'error':>8}")
    for table in TABLES:
        for each in replay(table):
            split, time = each.row
            degrees = f"{split.batch}x{split.ring}x{split.ulysses}"
            print(f"{table.name:<42}{split.at_work:>8}{degrees:>10}{time:>11g}{each.predicted:>11.4g}{each.error:>8.1%}")
        middle, worst = errors(table)
        print(f"{table.name:<42}  median {middle:.1%}, worst {worst:.1%}  {table.missing}")


if __name__ == "__main__":
    main()
