"""TripoSplat: the latent and the image are refined each on its own, then together with the camera."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan


def refined(stream: str) -> tuple[ModulePlan, ModulePlan]:
    """Plans of a block, and of the layer that makes rotary positions of the hidden states."""
    tokens = ContextParallelInput(split_dim=1, expected_dims=3, streams=(stream,))
    return ModulePlan(inputs={"x": tokens}, attention=(stream,)), ModulePlan(inputs={"hidden_states": tokens})


LATENT, LATENT_POSITIONS = refined("latent")
IMAGE, IMAGE_POSITIONS = refined("image")
JOINT, JOINT_POSITIONS = refined("joint")
TRIPOSPLAT = FamilyPlan(
    family="TripoSplat",
    model_class="comfy.ldm.triposplat.model.LatentSeqMMFlowModel",
    modules={
        "noise_repo_layers.*": LATENT_POSITIONS,
        "noise_refiner.*": LATENT,
        "context_repo_layers.*": IMAGE_POSITIONS,
        "context_refiner.*": IMAGE,
        "repo_layers.*": JOINT_POSITIONS,
        "blocks.*": JOINT,
    },
    outputs={
        "noise_refiner.-1": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="latent"),
        "context_refiner.-1": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="image"),
        "blocks.-1": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="joint"),
    },
)
