"""Fake CUDA devices (`support/stand_in`) refuse and note what cards do. Each in a process, because torch stays changed."""

import textwrap

import pytest

START = """
card = torch.arange(6.0, device="cuda").view(2, 3)
"""
CASES = {
    "operands on two devices": """
        refused(RuntimeError, "cpu, cuda:0", lambda: card + torch.ones(2, 3))
        refused(RuntimeError, "cuda:0, cuda:1", lambda: card + card.to("cuda:1"))
        refused(RuntimeError, "cpu, cuda:0", lambda: torch.ones(3) * card.sum())
        refused(RuntimeError, "cpu, cuda:0", lambda: torch.ones(3).add_(card.sum()))
        refused(RuntimeError, "cpu, cuda:0", lambda: torch.ones(3)[torch.arange(2, device="cuda")])
        refused(RuntimeError, "cuda:0, cuda:1", lambda: card[torch.arange(2, device="cuda:1")])
        refused(RuntimeError, "invalid device ordinal", lambda: torch.ones(3, device="cuda:2"))
        assert (card + torch.tensor(1.0)).device.index == 0
    """,
    "messages under way": """
        import torch.distributed as dist
        from support.stand_in import messages
        from support.stand_in.races import Race

        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        other = dist.new_group()
        started = lambda: dist.all_to_all_single(received, sent, async_op=True)  # noqa: E731
        sent, received = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        whole = torch.zeros(3, dtype=torch.int32, device="cuda")
        work, whole_work = started(), dist.all_reduce(whole, async_op=True)
        assert received.numbers.isnan().all() and (whole.numbers == -1).all()  # somebody who reads it too early finds it out
        refused(Race, "NCCL's alltoall_base_", lambda: received + 1)
        for each in (work, whole_work):
            each.wait()
        assert (received + whole).tolist() == [1, 1, 1]
        for written, words in ((sent, "was being sent"), (received, "was to arrive")):
            work = started()
            written.numbers[1] = 5
            refused(Race, words, work.wait)
        work = started()
        refused(Race, "NCCL's alltoall_base_", lambda: sent.add_(1))
        del work

        launches = [(launch.group, launch.operation, launch.nbytes) for launch in messages.log]
        assert launches == [("0", "alltoall_base_", 12), ("0", "allreduce_", 12), *[("0", "alltoall_base_", 12)] * 3]
        a, b = (messages.Launch(name, (0, 1), "allreduce_", 8) for name in "ab")
        agrees = messages.disagreement
        assert not agrees([[a, b, a], [a, b, a]])
        assert "wait for each other" in agrees([[a, b], [b, a]])
        assert "wait for each other" in agrees([[a, b], [b, (c := a._replace(group="c"))], [c, a]])
        assert "launch 1 of group a" in agrees([[a, a], [a, a._replace(nbytes=16)]])
        assert "launch 0 of group a" in agrees([[a], [a._replace(operation="batch")]])
        to, of = (lambda peer, what=what: messages.Launch("a", (0, 1), what, 8, peer) for what in messages.PAIR)
        assert not agrees([[to(1), of(1)], [of(0), to(0)]])
        assert not agrees([[to(1), of(2)], [of(0), to(2)], [of(1), to(0)]])
        assert "from 0 to 1" in agrees([[of(1), to(1)], [of(0), to(0)]])
        assert "message 1 of group a from 0 to 1: on one" in agrees([[to(1), to(1)], [of(0)]])
    """,
    "races between streams": """
        import threading

        from support.stand_in.races import Race

        main, side = torch.cuda.current_stream(), torch.cuda.Stream()

        def beside(act):
            with torch.cuda.stream(side):
                return act()

        def both(first, second):
            side.wait_stream(main)
            beside(first)
            second()

        def fresh():
            side.wait_stream(main)
            main.wait_stream(side)
            return card + 1

        one = fresh()
        refused(Race, "one = fresh()", lambda: beside(lambda: one * 2))  # it may not be there yet: names the other place
        one, host = fresh(), torch.zeros(card.shape).pin_memory()
        refused(Race, "aten.copy_.default", lambda: both(lambda: host.copy_(one, non_blocking=True), lambda: one.add_(1)))
        one = fresh()
        refused(Race, "aten.copy_.default", lambda: both(lambda: one.copy_(host, non_blocking=True), lambda: one * 2))
        one = fresh()
        both(lambda: one[0] * 2, lambda: one[1].add_(1))  # other bytes of the same memory
        refused(Race, "aten.mul.Tensor", lambda: both(lambda: one[0] * 2, lambda: one.add_(1)))
        one = fresh()
        refused(Race, "aten.add_.Tensor", lambda: both(lambda: one.add_(1), lambda: one * 2))

        for order in (
            lambda: main.wait_stream(side), side.synchronize, torch.cuda.synchronize, lambda: side.record_event().wait(main),
            lambda: side.record_event().synchronize(), lambda: beside(lambda: one.sum().item()),
        ):
            one = fresh()
            both(lambda: one.add_(1), order)
            one * 2

        one = fresh()
        side.wait_stream(main)
        waiter = threading.Thread(target=beside(lambda: (one.add_(1), side.record_event())[1]).synchronize)
        waiter.start()  # nothing tells the program that it is done
        waiter.join()
        refused(Race, "aten.add_.Tensor", lambda: one * 2)

        one = fresh()
        side.wait_stream(main)
        beside(lambda: one * 2)
        del one
        refused(Race, "what gets the freed memory", lambda: card + 1)
        one = fresh()
        side.wait_stream(main)
        beside(lambda: (one * 2, one.record_stream(side)))
        del one
        card + 1
        (fresh().to("cuda:1", non_blocking=True) + 1).to("cuda:0") + 1  # a copy waits for both
    """,
}


@pytest.mark.parametrize("case", CASES)
def test_a_fake_device(case, run_on_cards):
    run_on_cards(START + textwrap.dedent(CASES[case]), "count=2")


def test_a_comparison_needs_no_float64_on_the_device(run_on_cards):
    program = """
from types import SimpleNamespace

from cp_runtime.diffusers.agreement import _error
from cp_runtime.diffusers.torch_function import SharedAttention
from cp_runtime.nested import difference
a, b = torch.ones(8, device="xpu"), torch.arange(8.0, device="xpu")
refused(RuntimeError, "fp64", a.double)
assert difference(a, b) == difference(a.cpu(), b.cpu()) > 0.1
assert _error(a, b) == _error(a.cpu(), b.cpu()) > 0.1
alone = SimpleNamespace(size=1, all_gather=lambda parts, *_: parts)
assert SharedAttention(SimpleNamespace(owned=lambda values: values), alone)._mean(b).item() == 3.5
"""
    run_on_cards(program, 'type="xpu"')
