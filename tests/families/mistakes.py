"""Tables with a mistake: what the tracer must find in them."""

from dataclasses import replace

from cp_runtime.families.family import gathered, side, tokens

SWAPPED = side(("txt", "img"), dim=1, dims=6)


def module(pattern, **changes):
    """A change of what the table says about some modules; an input that becomes None is left out."""

    def change(plan):
        before = plan.modules[pattern]
        inputs = {**before.inputs, **changes.get("inputs", {})}
        kept = {name: transform for name, transform in inputs.items() if transform is not None}
        return replace(plan, modules={**plan.modules, pattern: replace(before, **{**changes, "inputs": kept})})

    return change


def swapped_rope(plan):
    for pattern in ("double_stream_blocks.*", "single_stream_blocks.*"):
        plan = module(pattern, inputs={"rope": SWAPPED})(plan)
    return plan


# What is wrong -> family, case, change of its table, and what the tracer says.
MISTAKES = {
    "positions are not split": (
        "hydit", "hydit", module("blocks.*", inputs={"freq_cis_img": None}),
        "blocks.*(freq_cis_img) (36, 48): dimension 0 is as long as img, and is not split",
    ),
    "positions are split along another dimension": (
        "flux", "flux", module("double_blocks.*", inputs={"pe": SWAPPED}),
        "(pe) (1, 1, 43, 32, 2, 2): dimension 2 is as long as txt + img",
    ),
    "number of dimensions": (
        "hydit", "hydit", module("blocks.*", inputs={"freq_cis_img": side("img", dim=0, dims=3)}),
        "blocks.0(freq_cis_img): expected 3 dimensions, got 2",
    ),
    "streams stand for each other": (
        "flux", "flux", module("double_blocks.*", inputs={"txt": tokens("img"), "img": tokens("txt")}),
        "double_blocks.0: what this rank has, (1, 2, 21, 64), is not its part",
    ),
    "joint order": ("hidream", "hidream", swapped_rope, "double_stream_blocks.0.block.attn1: what this rank has"),
    "attention_names is missing": (
        "hydit", "hydit", lambda plan: replace(plan, attention_names=()),
        "comfy.ldm.hydit.attn_layers.optimized_attention is called without transformer_options",
    ),
    "local is missing": (
        "hydit", "hydit", module("blocks.*", local=()), "blocks.0.attn2: rank 1 has 17 keys in attention; its layout says 18",
    ),
    "attention is not shared": (
        "wan", "wan t2v", module("blocks.*", attention=()), "head: what this rank has, (1, 30, 64), is not its part",
    ),
    "residuals are not split": (
        "hydit", "hydit control", lambda plan: replace(plan, control={"output": None}),
        "control has residuals of kind 'output'; the table does not say to which tokens they are added",
    ),
    "tokens are gathered too early": (
        "hydit", "hydit", lambda plan: replace(plan, outputs={"blocks.0": gathered("img")}),
        "blocks.*(skip) (1, 36, 96): dimension 1 is as long as img, and is not split",
    ),
    "a mask is not split": (
        "qwen_image", "qwen text mask", module("transformer_blocks.*", inputs={"encoder_hidden_states_mask": None}),
        "(encoder_hidden_states_mask) (1, 9): dimension 1 is as long as txt, and is not split",
    ),
    "an index of tokens is not planned": (
        "qwen_image", "qwen edit timestep zero", module("transformer_blocks.*", inputs={"timestep_zero_index": None}),
        "(timestep_zero_index) is 30: if that counts tokens, the table must say so",
    ),
}  # fmt: skip
