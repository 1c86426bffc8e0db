import json

import pytest
import torch

from cp_runtime.errors import ProtocolError, UnsupportedError
from cp_runtime.pool.protocol import TensorPacker, flatten, read_tensor, unflatten


def round_trip(value):
    packer = TensorPacker()
    tree = json.loads(json.dumps(flatten(value, packer.add), allow_nan=False))
    block = torch.zeros(packer.nbytes, dtype=torch.uint8)
    packer.write(block)
    return unflatten(tree, lambda leaf: read_tensor(block, leaf).clone()), packer


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and (a == b or a != a)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -1.5, "text", float("inf"), [], (), {}, [1, (2, None)], {"a": {1: "x", ("k", 2): [3.0]}},
        torch.float8_e4m3fn, torch.device("cpu"), {"$tensor": 1}, {"$dict": [["a", "b"]]},
    ],
)  # fmt: skip
def test_plain_values(value):
    assert same(round_trip(value)[0], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_tensors(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    assert same(round_trip([tensor, {"x": (tensor,)}])[0], [tensor, {"x": (tensor,)}])


def test_strided_and_repeated_tensors():
    tensor = torch.randn(4, 6).T[::2]
    value, packer = round_trip([tensor, tensor])
    assert torch.equal(value[1], tensor)
    assert len(packer.tensors) == 1


@pytest.mark.parametrize("value", [object(), {"f": [lambda: 0]}, {"t": {1, 2}}, torch.zeros(2, device="meta")])
def test_what_cannot_travel_is_named(value):
    with pytest.raises(UnsupportedError, match="cannot be sent"):
        round_trip(value)
    with pytest.raises(UnsupportedError, match=r"\['a'\]\[0\]"):
        round_trip({"a": [object()]})


@pytest.mark.parametrize(
    "leaf",
    [
        {"$tensor": ["float32", [4], 8]}, {"$tensor": ["float32", [1000], 0]}, {"$tensor": ["float32", [-1], 0]},
        {"$tensor": ["float32", [2], -64]}, {"$tensor": ["nonsense", [1], 0]}, {"$tensor": []}, {"$other": 1},
        {"$dtype": "nonsense"}, {"$dict": [[1]]}, {"$dict": 3}, {"a": 1, "b": 2}, {"$float": "x"}, {"$device": "nonsense:x"},
    ],
)  # fmt: skip
def test_malformed_trees_raise(leaf):
    block = torch.zeros(256, dtype=torch.uint8)
    with pytest.raises(ProtocolError):
        unflatten(leaf, lambda tree: read_tensor(block, tree))
