"""A rank: messages of many sizes among all ranks, through the memory that they share. Prints "exact" at last."""

import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path[:] = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
from support.package import load_package

load_package()
import torch
import torch.distributed as dist

from cp_runtime.engine.ranks.collectives import RankGroup

rank, ranks = int(sys.argv[1]), int(sys.argv[2])
store = dist.FileStore(sys.argv[3], ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
group = RankGroup(dist.group.WORLD)
assert group.shared is not None, "gloo"
for count in (0, 1, 7, 4096, 1 << 20, 5 << 20):
    for turn in range(3):
        send = torch.full((count * ranks,), rank * 10 + turn, dtype=torch.int32)
        received = torch.empty_like(send)
        group.all_to_all(send, [count] * ranks, received, [count] * ranks).wait()
        assert torch.equal(received, torch.repeat_interleave(torch.arange(ranks, dtype=torch.int32) * 10 + turn, count))
shards = [torch.full((2, rank + 1), float(rank))]
(whole,) = group.all_gather(shards, [each + 1 for each in range(ranks)], 1)
assert whole[0].tolist() == [float(each) for each in range(ranks) for _ in range(each + 1)]
send, received = torch.zeros(1 << 20), torch.empty(1 << 20)
began = time.perf_counter()
for _ in range(20):
    group.exchange(send, received).wait()
print(f"{20 * send.nbytes / (time.perf_counter() - began) / 1e9:.2f} GB/s each way")
dist.barrier()
dist.destroy_process_group()
print("exact")
