"""The table of texts, the pages and the reader of the small model that draws digits (benchmarks/digits)."""

import sys

import pytest
import torch
from support.package import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from digits import page, quality, reader


def test_a_prompt_is_a_digit_per_row():
    assert page.classes("3141 27?8").tolist() == [3, 1, 4, 1, 2, 7, page.ANY, 8]
    assert page.classes(" 5").tolist() == [5] + 7 * [page.ANY]
    assert page.classes("").tolist() == 8 * [page.ANY]


@pytest.mark.parametrize(("prompt", "words"), [("fox", "got f o x"), ("123456789", "got 9 digits")])
def test_what_is_no_prompt(prompt, words):
    with pytest.raises(ValueError, match=words):
        page.classes(prompt)


def test_a_text_token_differs_by_digit_and_place():
    text = page.encode(torch.tensor([8 * [3], 8 * [4]]))
    assert text.shape == (2, 64, 64)
    assert len({tuple(token) for token in text[0].tolist()}) == 64
    changed = (text[0] != text[1]).any(1)
    assert changed[:32].all()
    assert not changed[32:].any()


def pages_of(images, rows):
    """A page whose digits are images [8, 8, 32, 32], as a sampler returns it."""
    pixels = images.transpose(1, 2).reshape(1, 1, 256, 256)
    return torch.nn.functional.pixel_unshuffle(pixels * 2 - 1, page.SQUARE) / page.SCALE + page.SHIFT


def test_the_reader_reads_a_page_in_rows():
    known, _ = reader.loaded()
    labels = reader.read(known)
    rows = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    images = torch.stack([known[labels == digit][:8] for digit in rows[0].tolist()])
    pictures = page.from_latent(pages_of(page.enlarge(images.view(64, 8, 8)).view(8, 8, 32, 32), rows))
    assert reader.legible(pictures, rows).float().mean() > 0.98
    assert reader.legible(pictures.transpose(1, 2), rows).float().mean() < 0.3


def test_prompts_ask_for_every_digit_equally_often():
    counts = torch.bincount(torch.cat([page.classes(text) for text in quality.prompts(16)]), minlength=10)
    assert counts.max() - counts.min() <= 1


def test_the_interval_of_a_part():
    low, high = quality.interval(950, 1000)
    assert (round(low, 3), round(high, 3)) == (0.935, 0.962)
