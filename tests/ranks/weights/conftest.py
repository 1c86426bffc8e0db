"""Files that several tests load."""

import pytest


@pytest.fixture(scope="session")
def flux(checkpoints_dir):
    """A model and a LoRA for it."""
    return [str(checkpoints_dir / name) for name in ("diffusion_models/flux.safetensors", "loras/flux_lora.safetensors")]
