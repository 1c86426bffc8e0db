"""Weights that count as another dtype than the one that their memory has."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cp_runtime.comfy.shared.weights import sample_weights
from cp_runtime.engine.weights.cast import CastWeight, counting_as, settle

DTYPES = [torch.float16, torch.float32, torch.float8_e4m3fn]


@pytest.fixture(params=[False, True], ids=["", "inference mode"], autouse=True)
def mode(request):
    with torch.inference_mode(request.param):
        yield


@pytest.fixture
def pages():
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def cast(pages, dtype):
    return nn.Parameter(counting_as(pages, dtype), requires_grad=False)


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_readers_get_numbers_of_its_dtype_and_it_stays_where_it_is(pages, dtype):
    weight, expected = cast(pages, dtype), pages.to(dtype)
    read = [
        (weight.to(torch.float32, copy=True), expected.float()),  # two roundings, if the dtype is a smaller one
        (torch.empty_like(weight).copy_(weight), expected),
        (torch.empty_like(weight, dtype=torch.float32).copy_(weight), expected.float()),
    ]
    assert all(same(one, other) and type(one) is torch.Tensor for one, other in read)
    assert (weight.dtype, weight.shape, weight.nbytes) == (dtype, expected.shape, expected.nbytes)
    assert weight.to("cpu") is weight
    assert weight.held is pages


def test_a_module_that_moves_gets_a_plain_parameter(pages):
    layer = nn.Linear(32, 64)
    layer.weight = weight = cast(pages, torch.float16)
    layer.to("meta")
    assert type(layer.weight) is nn.Parameter
    assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.float16)
    assert weight.held is pages


@pytest.mark.parametrize("change", [lambda w: w.view(-1)[:1].fill_(7), lambda w: w.data[0].fill_(7), lambda w: w.mul_(7)])
def test_what_is_changed_in_place_is_changed_for_everybody_who_has_it(pages, change):
    weight, before = cast(pages, torch.float32), pages.clone()
    alias, expected = weight.detach(), pages.float()
    change(weight), change(expected)
    assert same(weight.clone(), expected)
    assert same(alias.clone(), expected)
    assert same(pages, before)


@pytest.mark.bits("the same product")
def test_on_the_host_it_computes_and_is_saved_like_a_plain_one(pages):
    weight, x = cast(pages, torch.float32), torch.randn(3, 32)
    assert torch.equal(F.linear(x, weight), F.linear(x, pages.float()))
    assert torch.equal(cast(pages, torch.float32) * 2, pages.float() * 2)
    assert (cast(pages, torch.float16).numpy() == pages.half().numpy()).all()
    assert cast(pages, torch.float16).tolist() == pages.half().tolist()
    assert same(pickle.loads(pickle.dumps(cast(pages, torch.float16))).clone(), pages.half())  # noqa: S301  (made here)
    assert cast(pages, torch.float16).data_ptr() != pages.data_ptr()
    copied = copy.deepcopy(cast(pages, torch.float16))
    assert type(copied) is CastWeight
    assert same(copied.clone(), pages.half())


def test_a_model_can_be_settled_and_compared(pages):
    layer, plain = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
    layer.weight, plain.weight = cast(pages, torch.float16), nn.Parameter(pages.half(), requires_grad=False)
    assert sample_weights(layer) == sample_weights(plain) != {}
    assert layer.weight.held is pages
    settle(layer)
    assert type(layer.weight) is nn.Parameter
    assert same(layer.weight.detach(), pages.half())


def test_whole_numbers_are_not_converted():
    numbers = torch.arange(4)
    assert counting_as(numbers, torch.float32) is numbers
