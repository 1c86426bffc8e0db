"""Parts of weights that are kept in the host's memory for a device, in a process with a fake CUDA device: torch stays changed."""

import pytest

PROGRAM = """
from cp_runtime.engine.ranks.collectives import RankGroup
from cp_runtime.engine.weights.sharded import ShardedWeights
from cp_runtime.pinned import PinnableMemory, pinned_zeros

CARD, stats = torch.device("cuda", 0), torch.cuda.host_memory_stats
model, x = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3))).to(CARD), torch.ones(2, 300, device=CARD)
expected, nbytes = model(x).cpu(), sum(weight.nbytes for weight in model.parameters())

weights = ShardedWeights(model, RankGroup(None), CARD, on_host=True)
for name in weights.blocks:
    weights.keep(name)
kept = [shared.shard for shared in weights._sharded.values()]
assert all(shard.is_pinned() for shard in kept)
assert nbytes <= stats()["registered_bytes"] == sum(shard.nbytes for shard in kept) < 1.01 * nbytes, stats()
assert not stats()["allocated_bytes.current"]  # what torch would keep
with torch.inference_mode(), weights.call():
    assert torch.equal(model(x).cpu(), expected)
del kept
weights.remove()
assert not stats()["registered_bytes"], stats()

memory = PinnableMemory(-1, 1 << 16)
assert memory.pin() == 0 and stats()["registered_bytes"] == 1 << 16
code = torch.cuda.cudart().cudaHostRegister(memory._address, 1 << 16, 0)
assert code
refused(RuntimeError, str(code), lambda: torch.ones(1, device=CARD))  # the last error
torch.cuda.cudart().cudaHostUnregister(memory._address)
memory.error = None
torch.cuda.cudart().cudaHostRegister(memory._address, 4096, 0)
assert memory.pin() and (torch.ones(1, device=CARD) + 1).item() == 2  # goes on without
torch.cuda.cudart().cudaHostUnregister(memory._address)

torch.cuda.cudart = lambda: type("Refusing", (), {"cudaHostRegister": lambda *_: 2})
refused(RuntimeError, "CUDA error 2: 1 MB of host memory cannot be pinned", lambda: pinned_zeros(1 << 20, CARD))
"""


@pytest.mark.bits("the same products, of weights whose bytes came back")
def test_exactly_what_a_rank_keeps_is_pinned_and_all_of_it_given_back(run_on_cards):
    run_on_cards(PROGRAM)
