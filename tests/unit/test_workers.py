"""The owner of the ranks, without ranks: what a call is worth that cannot be timed."""

from types import SimpleNamespace

import pytest
import torch
from support.reports import call_report

from cp_runtime.controller.calls import ModelCall
from cp_runtime.controller.placement import Choice, Demand, Shortages
from cp_runtime.controller.run_stats import CallRecord, RunStats
from cp_runtime.controller.workers import Workers
from cp_runtime.engine.weights.blocks import Sizes
from cp_runtime.pool.config import DeviceInventory, RuntimeConfig, WorkerSite
from cp_runtime.timing.choice import Chooser
from cp_runtime.timing.times import Times

CONFIG = RuntimeConfig.resolve(inventory=DeviceInventory(type="cuda", count=4))
TARGET = SimpleNamespace(key="k", kind="k", demand=Demand(Sizes(24 << 30, 1 << 28, 0), 0.0, 57))
CALL = ModelCall(
    method="forward", arguments={"x": torch.zeros(1, 16, 128, 128, dtype=torch.half)}, leading=("x",), device=torch.device("cpu"),
    in_place=(), encode_network=lambda network: network,
)  # fmt: skip


class Ran(Workers):
    """Workers whose calls take as long as they are told."""

    def __init__(self, times):
        super().__init__(CONFIG, WorkerSite(), lambda: None, Shortages(), times)
        self._chooser, self.counts, self.seconds = Chooser(times, "", "", 4), [], 1.0
        self.models.resident = {"k": SimpleNamespace(choice=Choice("whole", ""), casts=False)}

    def _run(self, config, key, call, kind, ranks, cancelled):
        self.counts.append(ranks)
        report = call_report(1.0, 0.1, at_work=ranks)
        return "a result", CallRecord(seconds=self.seconds, reports=[report] * 4, pids=[1, 2, 3, 4])


@pytest.fixture
def workers(tmp_path):
    return Ran(Times(tmp_path / "times.json"))


def called(workers):
    return workers.call(CONFIG, TARGET, CALL, None, RunStats("k"), lambda: False)


def test_a_call_is_noted_and_its_choice_is_told(workers):
    out, record = called(workers)
    assert (out, workers.counts, record.choice["ranks"]) == ("a result", [4], 4)
    kind = CALL.kind("k")
    ranks = workers._ranks(CONFIG, "k")
    assert workers._times.of(kind, workers._chooser.who(ranks, 4)) == (1.0,)


def test_the_first_call_of_a_run_counts_twice_at_most(workers):
    """So a time from before the ranks started is not alone for ever. It may include warm-up, so no more of them count."""
    for _ in range(4):
        called(workers)
    assert len(workers._times.of(CALL.kind("k"), workers._chooser.who(workers._ranks(CONFIG, "k"), 4))) == 2


def test_ranks_without_the_memory_for_a_model_are_left_out(workers):
    """Whatever was measured, and in the first call as well."""
    workers.models.resident = {"k": SimpleNamespace(choice=Choice("whole", "", 2), casts=False)}
    for _ in range(6):
        called(workers)
    assert set(workers.counts) <= {1, 2}
    assert 2 in workers.counts


def test_a_device_that_multiplies_otherwise_alone_has_whole_runs(workers):
    workers.models.resident["k"].casts, workers.seconds = True, 0.5  # short: tried on one
    for _ in range(2):
        run = RunStats("k")
        for _ in range(3):
            workers.call(CONFIG, TARGET, CALL, None, run, lambda: False)
    assert workers.counts == [4, 4, 4, 1, 1, 1]


@pytest.mark.parametrize("broken", ["choose", "note", "described", "who"])
def test_what_cannot_be_timed_ends_no_prompt(broken, workers, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError(broken)

    monkeypatch.setattr(workers._chooser, broken, fail)
    out, record = called(workers)
    assert (out, workers.counts) == ("a result", [4])
    assert record.choice is None or broken == "choose"
    assert broken in caplog.text
