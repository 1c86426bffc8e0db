import pytest
import torch

from cp_runtime.pool import tensor_cache
from cp_runtime.pool.tensor_cache import CallEncoder, same_bits

BIG = (1, 64, 64)


def kinds(value):
    """Leaf kinds of an encoded dict of tensors, by name."""
    return {name: next(iter(leaf)) for name, leaf in value["$dict"]}


def encode(encoder, **tensors):
    value, drop, packer = encoder.encode(tensors, {"x", "timestep"})
    encoder.delivered()
    return kinds(value), drop, packer.nbytes


def test_equal_content_travels_once():
    encoder, context = CallEncoder(), torch.randn(BIG)
    x = torch.randn(BIG)
    assert encode(encoder, x=x, context=context)[0] == {"x": "$tensor", "context": "$store"}
    assert encode(encoder, x=x, context=context.clone())[0] == {"x": "$tensor", "context": "$cached"}
    changed = context.clone()
    changed[0, 0, 0] += 1
    assert encode(encoder, x=x, context=changed)[0] == {"x": "$tensor", "context": "$store"}
    assert encode(encoder, x=x, context=context)[0] == {"x": "$tensor", "context": "$cached"}


def test_same_content_under_another_name_or_dtype_is_another_tensor():
    encoder, context = CallEncoder(), torch.zeros(BIG)
    encode(encoder, context=context)
    assert encode(encoder, y=context)[0] == {"y": "$store"}
    assert encode(encoder, context=context.to(torch.int32))[0] == {"context": "$store"}


def test_small_tensors_always_travel():
    assert encode(CallEncoder(), y=torch.zeros(4))[0] == {"y": "$tensor"}


def test_an_undelivered_message_starts_over():
    encoder, context = CallEncoder(), torch.randn(BIG)
    encode(encoder, context=context)
    encoder.encode({"context": context}, set())  # not delivered
    kept, drop, _ = encode(encoder, context=context)
    assert kept == {"context": "$store"}
    assert drop is None
    assert encode(encoder, context=context)[:2] == ({"context": "$cached"}, ())


def test_eviction_drops_the_oldest_and_nothing_in_use(monkeypatch):
    encoder = CallEncoder()
    tensors = [torch.full(BIG, float(i)) for i in range(4)]
    monkeypatch.setattr(tensor_cache, "CACHE_LIMIT", 2 * tensors[0].nbytes)
    assert encode(encoder, context=tensors[0])[1] == ()
    assert encode(encoder, context=tensors[1])[1] == ()
    assert encode(encoder, context=tensors[0])[1] == ()  # used again: now the newer one
    assert encode(encoder, context=tensors[2])[1] == ("c1",)
    assert encode(encoder, a=tensors[1], b=tensors[2], c=tensors[3])[1] == ("c0", "c2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_same_bits(dtype, offset):
    values = torch.randint(0, 2, (40,)).to(dtype)
    kept, tensor = values[offset : offset + 9].clone(), values[offset : offset + 9]
    assert same_bits(kept, tensor)
    other = tensor.clone()
    other[-1] = 1 - other[-1].float()
    assert not same_bits(kept, other)


@pytest.mark.parametrize("tensor", [torch.ones(1).expand(2000), torch.randn(40, 50)[..., :1], torch.randn(6, 4).T])
def test_any_strides(tensor):
    assert same_bits(tensor.clone(memory_format=torch.contiguous_format), tensor)


def test_nan_equals_nan_and_strides_do_not_matter():
    tensor = torch.full((4, 6), float("nan"))
    assert same_bits(tensor, tensor.T.contiguous().T)


PROGRAM = """
from cp_runtime.engine.ranks.sharding import BatchShares
from cp_runtime.pool.messages import Echo
from cp_runtime.pool.tensor_cache import CallEncoder, TensorCache, owned

held = torch.cuda.memory_allocated
x, context = (torch.randn(8, size, device="cuda:0") for size in (3000, 5000))
encoder, taken = CallEncoder(), held(0)
tree, drop, packer = encoder.encode({"x": x, "context": context}, {"x"})
block = torch.empty(packer.nbytes, dtype=torch.uint8)
packer.write(block)
encoder.delivered()
del packer
assert held(0) == taken, "the encoder keeps conditioning on the card"
assert "$cached" in str(encoder.encode({"x": x, "context": context.clone()}, {"x"})[0])

card = torch.device("cuda:1")
value = TensorCache(card).unpack(Echo(value=tree, drop=drop), block)
own = owned(BatchShares(4, 8, 1, frozenset({"x", "context"})).take(value, 1), card)
assert held(1) == context.nbytes + (x.nbytes + context.nbytes) // 4, "items of other ranks are on the card"
block.zero_()
own["context"].zero_()
assert own["x"].device == card and torch.equal(own["x"].cpu(), x[2:4].cpu())
assert torch.equal(value["context"].cpu(), context.cpu())
"""


def test_a_card_holds_no_conditioning_of_the_encoder_and_only_its_own_items(run_on_cards):
    """Beside what every rank keeps whole for the calls to come."""
    run_on_cards(PROGRAM, cards="count=2, gigabytes=1")
