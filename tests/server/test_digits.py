"""Pages of digits from a model that has learned them: what ranks get wrong can be read, not only measured."""

import sys

import pytest
import torch
from support.latents import assert_close
from support.package import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from digits import graphs, page, reader

TEXTS = ("31412718", "05691234")
STEPS = 8
ROWS = torch.stack([page.classes(text) for text in TEXTS])
LEAST = 0.9
"""Of the digits of one rank that must be legible."""


@pytest.fixture(scope="module")
def draw(server, checkpoints_dir):
    """Draws the pages; returns their latents."""
    graphs.put_weights(checkpoints_dir)
    return lambda **settings: server.sample(graphs.pages(*TEXTS, steps=STEPS, **settings), 120)


@pytest.fixture(scope="module")
def alone(draw):
    return draw()


def legible(latent, rows=ROWS):
    return reader.legible(page.from_latent(latent), rows).float().mean().item()


def test_one_rank_draws_what_the_prompt_says(alone):
    assert legible(alone) >= LEAST
    assert legible(alone, ROWS.flip(1)) < 0.4


@pytest.mark.parametrize("degree", ["ulysses_degree", "ring_degree"])
def test_two_ranks_draw_the_same_page(draw, alone, degree):
    latent = draw(cp={"world_size": 2, degree: 2})
    assert legible(latent) >= 0.95 * legible(alone)
    assert_close(latent, alone, 2e-4)


def test_two_ranks_draw_a_legible_page_in_patches(draw, alone):
    latent = draw(cp={"world_size": 2}, pipefusion={"stages": 2, "patches": 4, "warmup_calls": 2})
    assert legible(latent) >= 0.95 * legible(alone)
    assert (latent - alone).abs().max() > 1e-3
