"""Object patches of node packs that ranks compute, as `module in its pack:qualified name` of the patch."""

_OPTIMIZATION = "nodes.model_optimization_nodes:"
NAG = _OPTIMIZATION + "WanCrossAttentionPatch.__get__.<locals>.wrapped_attention"
ENHANCE = _OPTIMIZATION + "WanAttentionPatch.__get__.<locals>.wrapped_attention"
CHUNKS = _OPTIMIZATION + "WanffnChunkPatch.__get__.<locals>.wrapped_forward"
RIFLEX = "nodes.nodes:EmbedND_RifleX"
