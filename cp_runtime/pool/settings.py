"""Settings of the pool that come from environment variables, read when they are needed: a bad one must not stop an import."""

from __future__ import annotations

import math
import os

from ..errors import bad_value
from .config import MAX_STEP_TIMEOUT


def startup_timeout() -> float:
    """Seconds that ranks may take to start."""
    return _seconds("CP_STARTUP_TIMEOUT", 300.0)


def connect_timeout() -> float:
    """Seconds that ranks may take to meet over NCCL and to exchange something, before they try without what may have broken it."""
    return _seconds("CP_CONNECT_TIMEOUT", 20.0)


def load_timeout() -> float:
    """Seconds that ranks may take to load a model, and for its first call."""
    return _seconds("CP_LOAD_TIMEOUT", 1800.0)


def _seconds(name: str, default: float) -> float:
    """An environment variable as a number of seconds; empty counts as not set.

    Raises:
        ConfigError: it is no number, or out of range.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_STEP_TIMEOUT:
        raise bad_value(
            f"environment variable {name}",
            text,
            f"seconds above 0 and up to {MAX_STEP_TIMEOUT:.0f}, such as {default:g}",
            f"Correct or unset it and restart ComfyUI; without it {default:g} holds.",
        )
    return value
