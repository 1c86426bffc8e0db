"""Names the text encoder when its embeddings do not fit. torch's own error names two shapes and no node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...errors import UnsupportedError

_PRODUCT = re.compile(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(?P<given>\d+) and (?P<taken>\d+)x\d+\)")
_NORM = re.compile(r"normalized_shape=\[(?P<taken>\d+)\].* got input of size\s?\[.*?(?P<given>\d+)\]")
_TEXTS = {"context": "text embedding", "y": "pooled embedding"}  # by argument of a model's forward


@contextmanager
def texts_that_fit(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Name the text encoder where a forward fails at texts of another width. Raises UnsupportedError there."""
    try:
        yield
    except RuntimeError as error:
        found = _PRODUCT.search(str(error)) or _NORM.search(str(error))
        for name, what in _TEXTS.items():
            texts = arguments.get(name)
            if found and isinstance(texts, Tensor) and texts.shape[-1] == int(found["given"]):
                raise UnsupportedError(
                    f"The text encoder does not fit the model: its {what} has width {found['given']}, the model takes "
                    f"{found['taken']}. Load the text encoder, and choose its type, that belong to this model."
                ) from error
        raise
