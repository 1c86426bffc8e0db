"""Rows of a picture by rank, and what is refused where ranks share them."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.rows.exchange import needed, row_layout
from cp_runtime.engine.rows.plan import COLUMNS, ROWS, split_dim
from cp_runtime.engine.rows.split import SplitRows, Window, mean_and_variance
from cp_runtime.errors import PlanError


def test_every_row_has_one_owner_and_every_rank_has_enough():
    for total, world, least in itertools.product(range(1, 14), range(1, 7), (1, 2, 3)):
        layout = row_layout(total, world, least)
        owned = [layout.contributed(rank) for rank in range(world)]
        assert [row for start, stop in owned for row in range(start, stop)] == list(range(total))
        for start, stop in (layout.window(rank) for rank in range(world)):
            assert stop - start >= min(least, total)
        tokens = row_layout(total, world, least, unit=3)
        assert sum(tokens.owned_lengths) == 3 * total
        assert min(tokens.local_lengths) > 0


def test_neighbours_may_be_several_ranks_away():
    layout = row_layout(4, 4)
    assert needed(layout, 2, 1, 2, 2) == ((0, 2), (3, 4))
    assert needed(layout, 0, 2, 1, 1) == ((0, 0), (2, 3))


def test_columns_are_split_where_rows_are_too_few():
    assert split_dim(8, 16, 4) == ROWS
    assert split_dim(2, 16, 4) == COLUMNS
    assert split_dim(7, 16, 4, least=2) == COLUMNS
    assert split_dim(2, 2, 4) == ROWS


def test_a_convolution_that_does_not_keep_rows_together_is_refused():
    assert Window(10, 4, 3, 1, 0).given == 1  # padded before on either side
    assert Window(9, 4, 3, 2, 0).given == 0  # padded below only, as encoders do
    with pytest.raises(PlanError, match="cannot be split"):
        Window(8, 4, 3, 1, 0)


ACROSS = {
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "size": lambda x: F.interpolate(x, size=(8, 8)),
    "same": lambda x: F.conv2d(x, torch.ones(1, 1, 3, 3), padding="same"),
    "masked": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", ACROSS)
def test_what_looks_across_rows_and_is_not_shared_is_refused(name):
    with SplitRows(row_layout(4, 1), SequenceMesh(None)), pytest.raises(PlanError):
        ACROSS[name](torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_and_variance_are_those_of_float32(dtype):
    x = (torch.randn(2, 6, 500) + 10).to(dtype)
    x[:, 3] = 4.0  # a group of one value
    variance, mean = torch.var_mean(x.double(), -1, correction=0)
    for got, expected in zip(mean_and_variance(x), (mean, variance), strict=True):
        torch.testing.assert_close(got, expected.float())
