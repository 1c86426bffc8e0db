"""How pictures lie in the memory of a message."""

import pytest
import torch

from cp_runtime.comfy.shared.pictures import memory_order

PICTURES = {
    "channels last": torch.zeros(2, 8, 9, 3).movedim(-1, 1),
    "one channel last": torch.zeros(2, 8, 9, 1).movedim(-1, 1),
    "channels first": torch.zeros(2, 3, 8, 9),
    "one channel first": torch.zeros(2, 1, 8, 9),
    "a column": torch.zeros(2, 8, 1, 3).movedim(-1, 1),
    "a video": torch.zeros(1, 3, 5, 8, 9),
}


@pytest.mark.parametrize("name", PICTURES)
def test_ranks_get_a_picture_with_the_same_strides(name):
    """Kernels are chosen by strides."""
    picture = PICTURES[name]
    order = memory_order(picture)
    sent = picture.permute(order).contiguous()
    assert sent.permute([order.index(dim) for dim in range(sent.ndim)]).stride() == picture.stride()
