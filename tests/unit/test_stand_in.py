"""Fake CUDA devices (`support/stand_in`) refuse and note what cards do. Each in a process, because torch stays changed."""

import textwrap

import pytest

START = """
import sys
import torch
from support import stand_in
from support.stand_in import memory, tensors

MB = 1 << 20
stand_in.use(stand_in.Cards(count=2, gigabytes=0.56, ledger=stand_in.Path(sys.argv[1])))


def refused(kind, words, act):
    try:
        act()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{words}: not refused")

"""
CARD = 'card = torch.arange(6.0, device="cuda").view(2, 3)\n'
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
    "views and numbers": """
        view = card[1]
        view += 1
        assert card.cpu().tolist() == [[0, 1, 2], [4, 5, 6]]
        assert card.dtype == torch.float32 and type(card) == torch.Tensor and isinstance(card, torch.Tensor)
        refused(TypeError, "numpy", lambda: card.numpy())
        copy = torch.ones(2, 3).to("cuda")
        copy.zero_()
        assert copy.to("cuda:1").sum().item() == 0
        refused(NotImplementedError, "in place", lambda: copy.unsqueeze_(0))
    """,
    "inference mode": """
        with torch.inference_mode():
            view = card[0]
            out = torch.nn.functional.linear(card, torch.ones(4, 3, device="cuda"))
        assert out.device.type == view.device.type == "cuda" and not view.is_inference()
    """,
    "a module and its parameters": """
        module = torch.nn.Linear(3, 2)
        weight = module.weight
        module.to("cuda")
        assert module.weight is weight and weight.is_cuda and module(card).shape == (2, 2)

        class Blocks(torch.Tensor):  # with attributes and no operators, as loaders of GGUF files have one
            def __new__(cls, data, kind):
                return torch.Tensor._make_subclass(cls, data)

            def __init__(self, data, kind):
                self.kind = kind

            def to(self, *args):
                new = super().to(*args)
                new.kind = self.kind
                return new

            def detach(self):
                return self

        host = Blocks(torch.arange(6.0), "Q8")
        module.weight = weight = torch.nn.Parameter(host, requires_grad=False)
        held, copy = memory.LEDGER.tensors(0), weight.to("cuda")
        assert memory.LEDGER.tensors(0) > held and str(copy.device) == "cuda:0" and copy.kind == "Q8"
        bare = copy.as_subclass(torch.Tensor)
        assert type(copy) == Blocks != type(bare) == torch.Tensor and isinstance(copy, Blocks) and not isinstance(bare, Blocks)
        assert type(copy)(bare, "Q4").is_cuda and type(copy * 2) == Blocks and type(copy.cpu()) is Blocks
        refused(RuntimeError, "cpu, cuda:0", lambda: copy + host)
        copy.data.add_(1)
        assert copy.tolist() == bare.tolist() == [1, 2, 3, 4, 5, 6] and host.tolist() == [0, 1, 2, 3, 4, 5]
        module.to("cuda")
        assert module.weight is weight and weight.is_cuda and weight.kind == "Q8"
    """,
    "DynamicVRAM": """
        import os, tempfile
        from support.stand_in import dynamic_vram
        dynamic_vram.install()
        from comfy_aimdo import control, torch as aimdo
        assert control.init() and control.init_devices([0, 1])
        from comfy_aimdo import host_buffer, model_mmap, model_vbar, vram_buffer
        mapped, held, page = memory.LEDGER.mapped, lambda: memory.LEDGER.tensors(0), 32 * MB
        before = held()

        first, second = (model_vbar.ModelVBAR(48 * MB, 0) for _ in range(2))  # beside a context, a card of 0.56 GB holds one page
        ours = first.alloc(4 * MB)
        signature = model_vbar.vbar_fault(ours)
        assert mapped(0) == page == first.loaded_size() and not held() - before
        weight = aimdo.aimdo_to_tensor(ours, torch.device("cuda:0")).view(torch.float32).fill_(2)
        assert weight.is_cuda and weight.sum().item() == 2 * MB and not held() - before
        assert model_vbar.vbar_signature_compare(signature, model_vbar.vbar_fault(ours))
        theirs = second.alloc(4 * MB)
        assert model_vbar.vbar_fault(theirs) is None  # what is used stays
        model_vbar.vbar_unpin(ours)
        second.prioritize()
        assert model_vbar.vbar_fault(theirs) and mapped(0) == page == second.loaded_size() and weight.sum().item() == 0
        assert model_vbar.vbar_fault(ours) is None  # above the watermark
        model_vbar.vbar_unpin(theirs)
        first.prioritize()
        assert not model_vbar.vbar_signature_compare(signature, model_vbar.vbar_fault(ours))
        model_vbar.vbar_unpin(ours)
        assert torch.ones(40 * MB, dtype=torch.uint8, device="cuda").is_cuda and not mapped(0)  # tensors come first
        torch.cuda.empty_cache()
        first.prioritize()
        assert model_vbar.vbar_fault(ours) and first.free_memory(page) == 0
        model_vbar.vbar_unpin(ours)
        assert not mapped(0)

        buffer = vram_buffer.VRAMBuffer(1 << 30, 1)
        there = aimdo.aimdo_to_tensor(buffer.get(5, 3), torch.device("cuda:1"))
        assert mapped(1) == 16 * MB
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(range(20)))
            file.flush()
            host_buffer.read_file_to_device(file, 4, 5, 0, there.data_ptr(), 1)
            assert there.tolist() == [4, 5, 6, 7, 8]
            host = host_buffer.HostBuffer(0, 0, 4 * MB)
            host.extend(MB, register=False)
            host.read_file_slice(file, 2, 5, offset=100, device_ptr=there.data_ptr(), device=1)
            assert there.tolist() == aimdo.hostbuf_to_tensor(host)[100:105].tolist() == [2, 3, 4, 5, 6]
            mapping = model_mmap.ModelMMAP(file.name)
            assert os.pread(mapping.get_file_handle(), 3, 1) == bytes([1, 2, 3])
        host.truncate(0, do_unregister=False)
        assert host.extend(10, register=False) == host.get_raw_address() and not aimdo.hostbuf_to_tensor(host).any()
        del there, buffer, first, second, ours, theirs
        assert not mapped(0) and not mapped(1)
    """,
    "waits of the host": """
        def waited(act):
            tensors.waits.clear()
            act()
            return sum(tensors.waits.values())

        host, pinned = torch.ones(3), torch.ones(3).pin_memory()
        mask = card > 1
        assert [waited(act) for act in (
            lambda: host.to("cuda"), lambda: host.to("cuda", non_blocking=True), lambda: card.cpu(), lambda: card.sum().item(),
            lambda: card[mask], lambda: card[:, torch.tensor([0, 2])], lambda: torch.tensor([1, 2], device="cuda"),
        )] == [1] * 7
        assert [waited(act) for act in (
            lambda: pinned.to("cuda", non_blocking=True), lambda: card @ card.T, lambda: torch.arange(3, device="cuda"),
            lambda: card[:, torch.arange(2, device="cuda")], lambda: card.new_full((1,), 3),
        )] == [0] * 5
        torch.cuda.set_sync_debug_mode("error")
        refused(RuntimeError, "synchronizing", lambda: card.sum().item())
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(1) as threads:
            refused(RuntimeError, "synchronizing", lambda: threads.submit(lambda: card.sum().item()).result())
    """,
    "pinned memory": """
        import ctypes, mmap, os

        def resident():
            ctypes.CDLL(None).malloc_trim(0)
            return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE

        before = resident()
        blocks = [torch.zeros(5 * MB, dtype=torch.uint8, pin_memory=True), torch.ones(2 * MB, 2).T[1].pin_memory()]
        assert torch.cuda.host_memory_stats() == {
            "allocated_bytes.current": 24 * MB, "active_bytes.current": 24 * MB, "registered_bytes": 0
        }  # 8 for 5, 16 for what lies between the first and the last of 2 * 2 numbers
        assert 24 * MB <= resident() - before < 30 * MB
        assert blocks[1].sum().item() == 2 * MB and all(block[3:].is_pinned() for block in blocks)
        del blocks
        assert resident() - before >= 24 * MB  # /free of a model gives nothing back
        reused = torch.zeros(6 * MB, dtype=torch.uint8).pin_memory()
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 24 * MB
        del reused
        torch._C._host_emptyCache()
        assert resident() - before < 6 * MB and not torch.cuda.host_memory_stats()["allocated_bytes.current"]

        before, runtime = resident(), torch.cuda.cudart()
        exact = torch.frombuffer(mmap.mmap(-1, 5 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
        assert runtime.cudaHostRegister(exact.data_ptr(), exact.nbytes, 0) == 0 and exact.is_pinned()
        assert torch.cuda.host_memory_stats()["registered_bytes"] == 5 * MB <= resident() - before < 6 * MB
        assert runtime.cudaHostRegister(exact.data_ptr() + MB, MB, 0) == 712
        assert runtime.cudaHostUnregister(exact.data_ptr() + MB) == 713
        assert runtime.cudaHostUnregister(exact.data_ptr()) == 0 and not exact.is_pinned()
        (page := mmap.mmap(-1, mmap.PAGESIZE)).write(b"x")
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ)
        assert runtime.cudaHostRegister(address, mmap.PAGESIZE, 0) == 1
    """,
    "memory": """
        before = torch.cuda.mem_get_info(1)[0]
        block = torch.zeros(MB, dtype=torch.uint8, device="cuda:1")
        part = block[5:]
        assert (before - torch.cuda.mem_get_info(1)[0], torch.cuda.memory_allocated(1)) == (MB, MB)
        refused(torch.OutOfMemoryError, "out of memory", lambda: torch.empty(1 << 50, device="cuda"))
        refused(torch.OutOfMemoryError, "GPU 1", lambda: torch.cat([block] * 80))
        del block
        assert torch.cuda.memory_allocated(1) == MB
        del part
        assert torch.cuda.memory_allocated(1) == 0 and torch.cuda.max_memory_allocated(1) == MB
        assert (torch.cuda.memory_reserved(1), before - torch.cuda.mem_get_info(1)[0]) == (MB, MB)  # kept for the next tensor
        block = torch.zeros(MB, dtype=torch.uint8, device="cuda:1")
        assert before - torch.cuda.mem_get_info(1)[0] == MB
        del block
        torch.cuda.empty_cache()
        assert (torch.cuda.memory_reserved(1), before - torch.cuda.mem_get_info(1)[0]) == (0, 0)
        torch.empty(61 * MB, dtype=torch.uint8, device="cuda:1")  # and gives it back for what does not fit
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved(1) == 0
        import torch.distributed as dist
        before = torch.cuda.mem_get_info()[0]
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        assert before - torch.cuda.mem_get_info()[0] == 16 * MB
        full = torch.empty(40 * MB, dtype=torch.uint8, device="cuda")
        refused(dist.DistBackendError, "out of memory", dist.new_group)
    """,
    "memory of other processes": """
        import os, signal, time
        ready, told = os.pipe()
        pid = os.fork()
        if not pid:
            held = torch.zeros(MB, dtype=torch.uint8, device="cuda")
            os.write(told, b".")
            time.sleep(60)
        os.read(ready, 1)
        ledger = memory.LEDGER
        taken = ledger.free(0)
        assert (ledger.contexts(), ledger.tensors(0)) == ({os.getpid(): [], pid: [0]}, MB)
        assert ledger.capacities[0] - taken == ledger.capacities[1] - ledger.free(1) + MB + (512 << 20)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert ledger.free(0) - taken == MB + (512 << 20)
    """,
    "a fork of a process that has a device open": """
        import os
        torch.cuda.device_count(), torch.cuda.is_available(), torch.cuda.get_device_capability(1)  # open none
        assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
        torch.cuda.synchronize()
        assert memory.LEDGER.contexts() == {os.getpid(): [0]}
        pid = os.fork()
        if not pid:
            assert torch.cuda._is_in_bad_fork()
            for act in (lambda: torch.ones(2, device="cuda"), torch.cuda.synchronize, lambda: torch.cuda.set_device(1)):
                refused(RuntimeError, "Cannot re-initialize CUDA in forked subprocess", act)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    """,
    "a failed kernel": """
        other, number = torch.ones(2, device="cuda:1"), torch.tensor([7], device="cuda")
        refused(IndexError, "dimension", lambda: card[5])  # the host knows this one
        assert card.sum().item() == 15
        refused(RuntimeError, "device-side assert", lambda: card[number])
        for act in (lambda: card + 1, lambda: card.cpu(), torch.cuda.synchronize, torch.cuda.mem_get_info,
                    lambda: torch.ones(1, device="cuda"), lambda: torch.cuda.current_stream().synchronize()):
            refused(RuntimeError, "device-side assert", act)
        assert (other + 1).sum().item() == 4
    """,
    "threads": """
        import threading
        made = []

        def make():
            made.append(torch.zeros(2, device="cuda:1") + torch.tensor([1, 2], device="cuda:1"))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        assert str(made[0].device) == "cuda:1"
    """,
    "groups": """
        import torch.distributed as dist
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        control = dist.new_group(backend="gloo")
        assert (dist.get_backend(), dist.get_backend(control)) == ("nccl", "gloo")
        dist.all_reduce(card)
        refused(RuntimeError, "no tensors of the CPU", lambda: dist.all_reduce(torch.ones(2)))
        refused(ValueError, "contiguous", lambda: dist.all_reduce(card.T))
        refused(RuntimeError, "NCCL of cuda:0", lambda: dist.all_reduce(card.to("cuda:1")))
        refused(RuntimeError, "no tensors on a card", lambda: dist.all_reduce(card, group=control))
        dist.all_reduce(torch.ones(2), group=control)
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
    "kernels": """
        from support.package import load_package
        load_package()
        from cp_runtime.engine.attention.kernels import attend_with_lse, select
        q = torch.randn(1, 2, 33, 64, device="cuda")
        mask = torch.randn(1, 1, 33, 40, device="cuda")[..., 3:36]
        for half, given, name in ((True, None, "cudnn"), (True, mask, "cudnn"), (False, mask, "efficient")):
            one = q.to(torch.bfloat16 if half else torch.float32)
            assert select(one, one, given).name == name
            exact, exact_lse = attend_with_lse(one.float(), one.float(), one.float(), given, None, "math")
            out, lse = attend_with_lse(one, one, one, given)
            assert (out.float() - exact).abs().max() < 2e-2 and (lse - exact_lse).abs().max() < 2e-2
        q, mask = q.cpu(), mask.cpu()

        def use(*kinds):
            stand_in.use(stand_in.Cards(kinds=kinds))

        use("Tesla T4", "RTX 4090")
        assert [torch.cuda.get_device_properties(card).total_memory >> 30 for card in (0, 1)] == [16, 24]
        assert (torch.cuda.get_device_name(0), torch.cuda.get_device_capability(1)) == ("Tesla T4", (8, 9))
        old, new = (q.half().to(f"cuda:{card}") for card in (0, 1))
        assert (select(old, old, None).name, select(new, new, None).name) == ("efficient", "flash")
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        refused(RuntimeError, "Ampere GPUs or newer", lambda: flash(old, old, old))
        assert flash(new, new, new)[0].shape == new.shape
        eights = [torch.ones(16, 16).to(torch.float8_e4m3fn).to(f"cuda:{card}") for card in (0, 1)]
        one = [torch.ones((), device=f"cuda:{card}") for card in (0, 1)]
        product = lambda card: torch._scaled_mm(eights[card], eights[card].t(), one[card], one[card], out_dtype=torch.bfloat16)
        refused(RuntimeError, "compute capability", lambda: product(0))
        assert product(1)[0, 0].item() == 16
        use("H100")
        q, mask = q.cuda(), mask.cuda()
        refused(RuntimeError, "aligned", lambda: torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, mask, True))
    """,
}


UNOPENED = {"memory of other processes", "a fork of a process that has a device open"}


@pytest.mark.parametrize("case", CASES)
def test_a_fake_device(case, run_program, tmp_path):
    run_program(START + ("" if case in UNOPENED else CARD) + textwrap.dedent(CASES[case]), str(tmp_path / "ledger"))


def test_a_comparison_needs_no_float64_on_the_device(run_on_cards):
    program = """
from cp_runtime.nested import difference
a, b = torch.ones(8, device="xpu"), torch.arange(8.0, device="xpu")
try:
    a.double()
except RuntimeError as error:
    assert "fp64" in str(error)
else:
    raise AssertionError("not refused")
assert difference(a, b) == difference(a.cpu(), b.cpu()) > 0.1
"""
    run_on_cards(program, 'type="xpu"')
