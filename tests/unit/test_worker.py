"""How a rank takes a message, whose tensors lie in memory that it shares with the controller, and what it reports of a call."""

import os
import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from support.devices import SlowDevice

from cp_runtime.controller.run_stats import time_by_rank
from cp_runtime.engine.ranks.collectives import CommStats
from cp_runtime.errors import ProtocolError
from cp_runtime.pool.blocks import SharedBlock
from cp_runtime.pool.cancel import CancelPoints
from cp_runtime.pool.frames import Frame
from cp_runtime.pool.messages import CallOutcome, Echo, Shutdown, Value, pack, unpack
from cp_runtime.pool.progress import Watch
from cp_runtime.pool.tensor_cache import CallEncoder, TensorCache, owned
from cp_runtime.pool.worker import Worker, left_memory
from cp_runtime.system.processes import host_bytes

OUTCOME = CallOutcome(degrees={}, at_work=1, room=None)


@pytest.fixture
def block():
    block = SharedBlock()
    yield block
    block.close()


def rank_with(block, *messages, nbytes=0):
    """A rank to which these messages come."""
    worker = Worker.__new__(Worker)
    worker.rank, worker.cache, worker._result = 1, TensorCache(torch.device("cpu")), None
    worker._blocks, worker._relay, worker._is_relay = (SharedBlock(os.dup(block.fd)), SharedBlock()), None, False
    worker.device, worker.stats, worker.cancel_points = torch.device("cpu"), CommStats(), CancelPoints()
    worker.notes, worker._watch = SimpleNamespace(begin=lambda *_: None), Watch()
    frames = iter([Frame(pack(message, number, nbytes)) for number, message in enumerate([*messages, Shutdown()], 1)])
    sent = []
    worker.inbox = SimpleNamespace(get=lambda timeout=None: next(frames), send=lambda frame: sent.append(unpack(frame.header)))
    return worker, sent


def test_residuals_are_neither_sent_nor_copied(block):
    residual = torch.randn(2, 1000, 64)
    arguments = {"x": torch.randn(1, 4), "control": {"input": [residual, residual, None], "output": [residual + 1]}}
    tree, drop, packer = CallEncoder().encode(arguments, {"x", "control"})
    assert packer.nbytes < 2.1 * residual.nbytes  # each once
    packer.write(block.view(packer.nbytes))

    message, taken = Echo(value=tree, drop=drop), []
    assert len(pack(message)) < 1000
    worker, _ = rank_with(block, message, nbytes=packer.nbytes)
    worker._handlers = {Echo: lambda request, payload: taken.append(worker.cache.unpack(request, payload))}
    worker.serve()
    (value,) = taken
    first, second, third = value["control"]["input"]
    assert first is second
    assert third is None
    assert torch.equal(first, residual)
    assert torch.equal(value["control"]["output"][0], residual + 1)
    x = owned(value["x"], torch.device("cpu"))
    block.view(packer.nbytes).zero_()
    assert not first.any()  # it lies in the memory of the message
    assert x.any()
    assert worker.cache._kept == {}


class SlowMessage:
    """A collective that keeps the device waiting, and not the host."""

    def __init__(self, device, seconds):
        self.device, self.seconds = device, seconds

    def wait(self):
        self.device.work(self.seconds)


def test_a_call_takes_no_less_time_than_its_communication(monkeypatch):
    """Also where the device is still at work when the forward has returned, as on every rank that returns no result."""
    device, worker = SlowDevice(), Worker.__new__(Worker)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    worker.rank, worker.device, worker.stats, worker.notes = 0, torch.device("cuda"), CommStats(), SimpleNamespace(modules=0)
    began = time.perf_counter()
    for _ in range(3):
        worker.stats.started("all_to_all", 8)
        worker.stats.wait([SlowMessage(device, 0.01)], worker.device, on_host=False)
        device.work(0.005)
    report = worker.report(Value(), OUTCOME, began)
    assert report.communication.seconds == pytest.approx(0.03, abs=1e-3)
    (times,) = time_by_rank([report])
    assert times["compute"] >= 0.015
    assert times["communication"] + times["compute"] == pytest.approx(report.seconds)


@pytest.fixture
def timed_device(monkeypatch):
    """A device, and an entry for each event that was made of it."""
    device, made = SlowDevice(), []
    make = device.Event
    monkeypatch.setattr(device, "Event", lambda enable_timing: made.append(0) or make(enable_timing))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return device, made


def test_events_of_a_call_serve_the_next_one(timed_device):
    (device, made), stats = timed_device, CommStats()
    for call in range(1, 4):
        stats.reset()
        for _ in range(call % 3 + 1):
            stats.wait([SlowMessage(device, 0.01)], torch.device("cuda", 0), on_host=False)
            device.work(0.002)
        assert stats.seconds == pytest.approx(0.01 * (call % 3 + 1), abs=1e-3)
        assert stats.seconds == pytest.approx(0.01 * (call % 3 + 1), abs=1e-3)  # each is added up once
    assert len(made) == 2 * 3  # as many as the call with most of them needs
    stats.wait([SlowMessage(device, 0.01)], torch.device("cuda", 1), on_host=False)
    assert len(made) == 2 * 4  # an event belongs to a device


def test_of_many_waits_a_sample_is_timed(timed_device):
    (device, made), stats = timed_device, CommStats()
    for _ in range(16 + 64):
        stats.wait([SlowMessage(device, 0.01)], torch.device("cuda", 0), on_host=False)
    assert stats.seconds == pytest.approx(0.8, abs=1e-3)
    assert len(made) == 2 * (16 + 4)


def test_a_call_reports_its_own_peak_of_memory(monkeypatch):
    device, worker = SlowDevice(), Worker.__new__(Worker)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    worker.rank, worker.device, worker.stats, worker.notes = 0, torch.device("cuda"), CommStats(), SimpleNamespace(modules=0)
    device.held, device.peak = 3 << 30, 20 << 30  # weights, and a large video before
    worker.stats.started("all_to_all", 8)
    worker.begin_figures()
    report = worker.report(Value(), OUTCOME, time.perf_counter())
    assert report.memory.device == 3 << 30
    assert report.communication.collectives == 0


def test_a_device_that_does_not_answer_is_no_second_error(monkeypatch):
    def raises(device, details):
        raise RuntimeError("CUDA error: device-side assert triggered")

    assert left_memory(torch.device("cpu")).host > 0
    monkeypatch.setattr("cp_runtime.pool.worker.memory_of", raises)
    assert left_memory(torch.device("cpu")) is None


def test_the_report_on_a_failed_kernel_goes_out_although_the_device_is_lost(block, monkeypatch):
    class OnDevice:
        """To free memory of a device that is lost ends the process."""

        def __del__(self):
            before.append(len(sent))

    def fails(*_, **__):
        tensor = OnDevice()  # noqa: F841  (it lives as long as the error)
        raise RuntimeError("CUDA error: device-side assert triggered")

    before = []
    worker, sent = rank_with(block, Echo(value=None, drop=()))
    worker._handlers = {Echo: fails}
    monkeypatch.setattr("cp_runtime.pool.worker.left_memory", lambda device: None)
    worker.serve()
    assert before == [1]
    (frame,) = sent
    report = frame.message
    assert (frame.seq, report.kind, report.device_lost) == (1, "RuntimeError", True)
    assert "device-side assert" in report.message


def test_a_rank_that_is_idle_gives_free_memory_back(block, monkeypatch):
    """Also below a piece that is in use, where glibc keeps it."""
    monkeypatch.setattr("cp_runtime.pool.worker.IDLE", 0.05)
    worker, _ = rank_with(block)
    frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    worker.inbox = SimpleNamespace(get=lambda timeout=None: frames.get(timeout=timeout))
    pieces = [torch.zeros(1000) for _ in range(20_000)]
    in_use, pieces = pieces[-1], None
    before = host_bytes(os.getpid())
    timer = threading.Timer(0.3, frames.put, [Frame(pack(Shutdown()))])
    timer.start()
    worker.serve()
    timer.join()
    assert before - host_bytes(os.getpid()) > 10_000 * in_use.nbytes


def test_memory_that_is_kept_is_the_controllers_and_what_a_rank_writes_there_its_own(block):
    block.view(8).fill_(3)
    worker, _ = rank_with(block)
    kept = worker.keep((os.getpid(), block.fd), torch.empty(0))
    kept[0] = 5
    assert block.view(8).tolist() == [3] * 8
    number = block.fd
    block.close()
    assert kept[:8].tolist() == [5, *[3] * 7]
    with pytest.raises(ProtocolError, match="no memory of process"):
        worker.keep((os.getpid(), number), torch.empty(0))
    worker._blocks = None
    with_message = torch.ones(3)
    assert worker.keep((0, 0), with_message) is with_message
