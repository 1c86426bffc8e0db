"""Entries of `transformer_options` that only ranks get."""

ATTENTION = "cp_attention"  # name of a function, for `optimized_attention_override`
SPARSE = "cp_sparse"  # settings of ComfyUI's Model Sparse Attention
LAYERS = "cp_layers"  # names of the attention functions that the model file chose for layers
PATCHES = "cp_patches"  # for `patches` and `patches_replace`, and object patches
OWN = ("model_sampling", "latent_format")  # of the model around the transformer, for patches that hold it
CONTROLNETS = "cp_controlnets"  # an argument of a call: ControlNets in the order of their chain
CONDITIONINGS = "cp_conditionings"  # for each of the batch's equal parts, a name of its conditioning
