"""What the model draws and how it is told: pages of handwritten digits, each row of which shows one digit.

A page has 8 × 8 digits of 32 × 32 pixels. Its latent has one channel per pixel of a 4 × 4 square, so that a digit is 4 × 4 tokens.
The "text encoder" is a table: a token per row of tokens says which digit to draw there, and one per column only where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROWS = COLUMNS = 8
PIXELS = 32  # of a digit's side
SQUARE = 4  # pixels of a latent's element
TOKENS = PIXELS // (2 * SQUARE)  # of a digit's side
SIDE = ROWS * TOKENS  # tokens of a page's side
WIDTH = 64  # of a text token
ANY = 10  # where a prompt has no digit, any are drawn

SCALE, SHIFT = 0.3611, 0.1159
"""What ComfyUI multiplies a Flux latent by after it took `SHIFT` off, before the model sees it."""

FREQUENCIES = 10
"""Of the sines that tell a text token's place: the highest of Flux' rotary embedding, as that of image tokens."""
ROW_WAVES = ANY + 1
COLUMN_WAVES = ROW_WAVES + 2 * FREQUENCIES
"""Where a text token has the cosines of its row or column, before the sines."""


def classes(prompt: str) -> Tensor:
    """The digit of each row, [8]. Blanks are skipped; rows without a digit, or with `?`, get `ANY`."""
    typed = "".join(prompt.split())
    if wrong := sorted(set(typed) - set("0123456789?")):
        raise ValueError(f"prompt: got {' '.join(wrong)}; allowed: digits, ? for any, and blanks")
    if len(typed) > ROWS:
        raise ValueError(f"prompt: got {len(typed)} digits; allowed: at most {ROWS}, one per row")
    return torch.tensor([ANY if sign == "?" else int(sign) for sign in typed.ljust(ROWS, "?")])


def encode(rows: Tensor) -> Tensor:
    """The text of pages: digits per row, [B, 8], as tokens [B, 64, 64]: one per row of image tokens, then one per column."""
    place = torch.arange(SIDE)[:, None] / 10000 ** (torch.arange(FREQUENCIES) * 2 / 56)
    waves = torch.cat((place.cos(), place.sin()), 1)
    text = torch.zeros(len(rows), 2 * SIDE, WIDTH)
    text[:, :SIDE, : ANY + 1] = 3 * functional.one_hot(rows.repeat_interleave(TOKENS, 1), ANY + 1)
    text[:, :SIDE, ROW_WAVES:COLUMN_WAVES] = waves
    text[:, SIDE:, COLUMN_WAVES : COLUMN_WAVES + 2 * FREQUENCIES] = waves
    text[:, SIDE:, -1] = 3
    return text


def from_latent(latent: Tensor) -> Tensor:
    """Pictures [B, 256, 256] with values from 0 to 1, of latents [B, 16, 64, 64] as ComfyUI's samplers return them."""
    pixels: Tensor = functional.pixel_shuffle((latent.float() - SHIFT) * SCALE, SQUARE)[:, 0]
    return ((pixels + 1) / 2).clamp(0, 1)


def digits(pictures: Tensor) -> Tensor:
    """The digits of pictures [B, 256, 256] in the size of the data, [B, 8, 8, 64], values from 0 to 1."""
    small = functional.avg_pool2d(pictures[:, None], PIXELS // 8)
    return small.view(-1, ROWS, 8, COLUMNS, 8).transpose(2, 3).flatten(3)


def enlarge(images: Tensor) -> Tensor:
    """Images of digits [N, 8, 8], values from 0 to 1, as a page shows them: [N, 32, 32]."""
    large: Tensor = functional.interpolate(images[:, None], (PIXELS, PIXELS), mode="bicubic", align_corners=False)
    return large[:, 0].clamp(0, 1)
