"""ACE-Step 1: linear attention over all tokens, and convolutions over three."""

from ..engine.plan import ModulePlan
from ..engine.transforms import WithNeighbours, WithoutNeighbours
from .family import FamilyPlan, gathered, side, tokens

AUDIO = tokens("audio")

ACE_STEP = FamilyPlan(
    family="ACE-Step",
    model_class="comfy.ldm.ace.model.ACEStepTransformer2DModel",
    modules={
        "transformer_blocks.*": ModulePlan(inputs={"hidden_states": AUDIO}),
        # Its sums over tokens are out of reach, and cheap: every rank makes them of all tokens.
        "transformer_blocks.*.attn": ModulePlan(inputs={"hidden_states": WithNeighbours(stream="audio")}, outputs={0: AUDIO}),
        "transformer_blocks.*.cross_attn": ModulePlan(
            inputs={"cross_attention_kwargs.rotary_freqs_cis": side("audio", dim=0, dims=2)}
        ),
        "transformer_blocks.*.ff": ModulePlan(
            inputs={"x": WithNeighbours(stream="audio", reach=1)}, outputs={0: WithoutNeighbours(stream="audio", reach=1)}
        ),
    },
    outputs={"transformer_blocks.-1": gathered("audio")},
)
