import pytest
import torch

from cp_runtime.comfy.model.wire_samples import same_weight

QuantizedTensor = pytest.importorskip("comfy_kitchen.tensor").QuantizedTensor


def weight():
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def test_plain_weights_are_compared_bit_by_bit():
    changed = weight()
    changed[0, 0] = torch.nan
    assert same_weight(weight(), weight())
    assert not same_weight(weight(), changed)
    assert same_weight(changed, changed.clone())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (4, 4)])
def test_weights_of_every_dtype_and_shape(dtype, shape):
    assert same_weight(torch.ones(shape).to(dtype), torch.ones(shape).to(dtype))
    assert not same_weight(torch.ones(shape).to(dtype), torch.zeros(shape).to(dtype))


@pytest.mark.parametrize(
    "layout", ["TensorCoreFP8Layout", "TensorCoreMXFP8Layout", "TensorCoreNVFP4Layout", "TensorWiseINT8Layout"]
)
def test_quantised_weights_are_compared_by_data_and_scales(layout):
    def quantised():
        return QuantizedTensor.from_float(weight(), layout)

    changed_data, changed_scale = quantised(), quantised()
    changed_data._qdata.view(torch.uint8)[5, 5] ^= 1
    changed_scale._params.scale.view(-1).view(torch.uint8)[0] ^= 1
    assert same_weight(quantised(), torch.nn.Parameter(quantised(), requires_grad=False))
    assert not same_weight(quantised(), changed_data)
    assert not same_weight(quantised(), changed_scale)
    assert not same_weight(quantised(), quantised().dequantize())
