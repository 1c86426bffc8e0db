"""What others measured, replayed by the cost model: one row of a table says how fast a device is, the others must follow.

    python benchmarks/published.py

Effective operations per second are fitted from the first row of each table alone; the link comes from the machine's name. Times
are copied from the sources that stand beside them; nobody measured anything here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median

from forecast import LINKS, MODELS, Link, Model, operations, pool_of, work_of

from cp_runtime.engine.policy import CallSplit, Run, predict


@dataclass(frozen=True)
class Row:
    """A split and what it took: batch (CFG) x ring x ulysses, in the unit of the table."""

    batch: int
    ring: int
    ulysses: int
    time: float

    @property
    def devices(self) -> int:
        return self.batch * self.ring * self.ulysses

    @property
    def split(self) -> CallSplit:
        return CallSplit(tuple(range(self.devices)), self.batch, self.ring, self.ulysses)


@dataclass(frozen=True)
class Table:
    """Times of one model on one machine.

    Args:
        unit: seconds that one unit of the times stands for, per call of the model.
        rotate_method: how the ring of that implementation works.
        missing: what the model does not know of, where it is off by more than BOUND: in a few words, a colon, and in a sentence.
    """

    name: str
    source: str
    model: Model
    link: Link
    rows: tuple[Row, ...]
    unit: float = 1.0
    rotate_method: str = "alltoall"
    missing: str = field(default="")


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
REST = "the rest of the run: its seconds are those of whole runs, with text encoder and VAE, which more devices do not shorten"


def ulysses(*times: float) -> tuple[Row, ...]:
    """On 1, 2, 4, ... devices."""
    return tuple(Row(1, 1, 2**i, time) for i, time in enumerate(times))


TABLES = (
    Table(
        "Wan 2.2 14B, 40 steps, GB200",
        "TensorRT-LLM #13821",
        WAN,
        NVLINK5,
        (
            Row(1, 1, 1, 348.4),
            Row(2, 1, 1, 174.0),
            Row(2, 1, 2, 95.9),
            Row(2, 1, 4, 48.1),
            Row(2, 1, 8, 25.6),
            Row(2, 1, 12, 18.5),
            Row(2, 1, 16, 14.1),
            Row(2, 1, 32, 8.48),
        ),
        1 / 40,
    ),
    Table("HunyuanVideo 720p, 50 steps, H100", "xDiT", HUNYUAN, NVLINK, ulysses(1904, 925, 514, 338), 1 / 50, missing=REST),
    Table("HunyuanVideo 720p, 50 steps, H20", "xDiT", HUNYUAN, NVLINK, ulysses(6639, 3401, 1763, 941), 1 / 50),
    Table(
        "HunyuanVideo 720p, 50 steps, L20",
        "diffusers, xDiT's page",
        HUNYUAN,
        PCIE4,
        ulysses(6044, 3271, 2080),
        1 / 50,
        missing=REST,
    ),
    Table(
        "Flux 1, 28 steps, eager, H100",
        "xDiT",
        FLUX,
        NVLINK,
        (Row(1, 1, 1, 6.71), Row(1, 1, 2, 4.38), Row(1, 2, 1, 5.31), Row(1, 1, 4, 4.24), Row(1, 4, 1, 5.11), Row(1, 2, 2, 5.19)),
        1 / 28,
        missing=HOST,
    ),
    Table(
        "Flux 1, 28 steps, compiled, H100",
        "xDiT",
        FLUX,
        NVLINK,
        (Row(1, 1, 1, 4.30), Row(1, 1, 2, 2.68), Row(1, 2, 1, 2.60), Row(1, 1, 4, 1.63), Row(1, 4, 1, 1.98), Row(1, 2, 2, 1.80)),
        1 / 28,
        missing="the host: less of it than in eager mode; and text encoder and VAE, if its seconds hold them",
    ),
    Table(
        "Flux 1, 50 steps on 4, H100",
        "diffusers' guide",
        FLUX,
        NVLINK,
        (Row(1, 1, 4, 6671), Row(1, 4, 1, 13077), Row(1, 2, 2, 11069)),
        1e-3 / 50,
        "allgather",
        missing="the host: as in eager mode on such GPUs, and in its ring the merging of parts in Python",
    ),
    Table(
        "Flux 1, a step on 4, L20",
        "diffusers' guide",
        FLUX,
        PCIE4,
        (Row(1, 1, 4, 281), Row(1, 4, 1, 351), Row(1, 2, 2, 324)),
        1e-3,
        "allgather",
    ),
    Table(
        "Flux 1, a step on 4, 4090 48G",
        "diffusers' guide",
        FLUX,
        PCIE4,
        (Row(1, 1, 4, 259), Row(1, 4, 1, 339), Row(1, 2, 2, 322)),
        1e-3,
        "allgather",
    ),
    Table(
        "Flux 1, 28 steps, L20",
        "cache-dit",
        FLUX,
        PCIE4,
        (Row(1, 1, 1, 23.56), Row(1, 1, 2, 13.80), Row(1, 1, 4, 8.28), Row(1, 2, 1, 14.01), Row(1, 4, 1, 9.82)),
        1 / 28,
    ),
    Table("Wan 14B 480p, a step, H100", "LightX2V", WAN_480, NVLINK, (Row(1, 1, 1, 5.18), Row(1, 1, 8, 0.75))),
    Table(
        "Wan 14B 480p, a step, 4090D",
        "LightX2V",
        WAN_480,
        PCIE4,
        (Row(1, 1, 1, 20.26), Row(1, 1, 8, 4.75)),
        missing="contention: eight GPUs share the PCIe root and the host's memory, and the link counts as that of a few",
    ),
    Table("Flux 1, a step, RTX 2000 Ada", "raylight", FLUX, PCIE4X8, (Row(1, 1, 1, 2.22), Row(1, 1, 2, 1.26))),
    Table("Wan 14B fp8, a step, RTX 2000 Ada", "raylight", WAN_SHORT, PCIE4X8, (Row(1, 1, 1, 9.23), Row(1, 1, 2, 5.18))),
    Table(
        "MiniMax-H3 480p fp8, 20 steps, RTX PRO 5000",
        "buqi",
        MINIMAX_480,
        PCIE5,
        ulysses(78.3, 41.0),
        1 / 20,
    ),
    Table(
        "MiniMax-H3 243 frames, a step, RTX PRO 4000",
        "H3-MultiStream",
        replace(MINIMAX, tokens=75794),
        PCIE5,
        (Row(1, 1, 1, 65.0), Row(1, 1, 3, 25.1)),
    ),
    Table("StepVideo 30B, H20", "xDiT", STEP, NVLINK, ulysses(213.6, 108.1, 57.0, 30.1)),
)


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
    work, first = work_of(table.model), table.rows[0]
    # Operations per second with which the model gives the first row: halving the interval finds it.
    low, high = operations(work) / (first.time * table.unit * first.devices) / 4, 1e18
    for _ in range(100):
        flops = (low * high) ** 0.5
        slow = seconds(table, first, flops) > first.time * table.unit
        low, high = (flops, high) if slow else (low, flops)
    return [Replay(row, seconds(table, row, high) / table.unit) for row in table.rows[1:]]


def seconds(table: Table, row: Row, flops: float) -> float:
    """Of a call on a split, for devices of that speed."""
    work = work_of(table.model)
    pool, one = pool_of(row.devices, table.link, flops, table.rotate_method), CallSplit((0,), 1, 1, 1)
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
            row = each.row
            split = f"{row.batch}x{row.ring}x{row.ulysses}"
            print(f"{table.name:<42}{row.devices:>8}{split:>10}{row.time:>11g}{each.predicted:>11.4g}{each.error:>8.1%}")
        middle, worst = errors(table)
        print(f"{table.name:<42}  median {middle:.1%}, worst {worst:.1%}  {table.missing}")


if __name__ == "__main__":
    main()
