"""TripoSplat: the latent and the image are refined each on its own, then together with the camera."""

from collections.abc import Mapping

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, tokens


def _layers(blocks: str, positions: str, stream: str) -> Mapping[str, ModulePlan]:
    """Plan blocks, and the layers that make their rotary positions from the hidden states."""
    return {
        positions: ModulePlan(inputs={"hidden_states": tokens(stream)}),
        blocks: ModulePlan(inputs={"x": tokens(stream)}, attention=(stream,)),
    }


TRIPOSPLAT = FamilyPlan(
    family="TripoSplat",
    model_class="comfy.ldm.triposplat.model.LatentSeqMMFlowModel",
    modules={
        **_layers("noise_refiner.*", "noise_repo_layers.*", "latent"),
        **_layers("context_refiner.*", "context_repo_layers.*", "image"),
        **_layers("blocks.*", "repo_layers.*", "joint"),
    },
    outputs={
        "noise_refiner.-1": gathered("latent"),
        "context_refiner.-1": gathered("image"),
        "blocks.-1": gathered("joint"),
    },
)
