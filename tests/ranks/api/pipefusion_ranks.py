"""Rank script: diffusers' models in stages, by the Python API, against the stock model in one process; rank 0 reports the worst."""

import torch
from diffusers import HunyuanDiT2DModel
from diffusers_cases import CASES, flux, normal, pixart, sd3, wan
from diffusers_models import build, fill, relative
from support.ranks import answer, finish, report, start, worst

from cp_runtime import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from cp_runtime.errors import PlanError

rank, world, _ = start()


def hunyuan_dit():
    model = HunyuanDiT2DModel(
        num_attention_heads=4, attention_head_dim=12, in_channels=4, patch_size=2, sample_size=12, hidden_size=48, num_layers=4,
        cross_attention_dim=24, cross_attention_dim_t5=16, pooled_projection_dim=16, text_len=5, text_len_t5=6,
        use_style_cond_and_image_meta_size=False,
    )  # fmt: skip
    inputs = dict(
        hidden_states=normal(2, 4, 12, 10), timestep=torch.tensor([300.0, 300.0]), encoder_hidden_states=normal(2, 5, 24),
        text_embedding_mask=torch.ones(2, 5).long(), encoder_hidden_states_t5=normal(2, 6, 16),
        text_embedding_mask_t5=torch.ones(2, 6).long(), image_rotary_emb=(normal(30, 12), normal(30, 12, seed=1)),
    )  # fmt: skip
    return fill(model), inputs


def case_of(name):
    case = next(case for case in CASES if case.name == name)
    return build(case.model), case.make()


CASES_OF_TWO = {
    "flux": lambda: flux(batch=2), "sd3": lambda: sd3(2), "pixart": lambda: pixart(2, (4, 6)), "wan t2v": lambda: wan(batch=2),
}  # fmt: skip
MODELS = {"hunyuan dit": hunyuan_dit} | {name: lambda name=name: case_of(name) for name in ("flux", "sd3", "pixart", "wan t2v")}


def called(model, inputs, text):
    """`forward` copies tensors, and a pipeline passes the same text in every step."""
    inputs = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    return model(**{**inputs, "encoder_hidden_states": text}, return_dict=False)


def later(inputs, number):
    """The inputs of a later step: a little less noise."""
    return {**inputs, "hidden_states": inputs["hidden_states"] * 0.99**number, "timestep": inputs["timestep"] * 0.9999**number}


def step(model, inputs, text, number):
    return called(model, later(inputs, number), text)


with torch.inference_mode():
    for name, make in MODELS.items() if world == 2 else ():
        model, inputs = make()
        text = inputs["encoder_hidden_states"]
        expected = [step(model, inputs, text, number) for number in range(3)]
        other = torch.flip(text, (-1,))
        expected_of_other = step(model, inputs, other, 2)
        found = {}
        apply_context_parallel(model, ContextParallelConfig(pipefusion_degree=world, num_pipeline_patch=1))
        found["exact"] = relative(step(model, inputs, text, 0), expected[0])
        remove_context_parallel(model)
        config = ContextParallelConfig(pipefusion_degree=world, num_pipeline_patch=3, warmup_steps=2)
        stats = apply_context_parallel(model, config).mesh.stats
        found["warm_up"] = [relative(step(model, inputs, text, 0), expected[0]) for _ in range(2)]
        found["same_inputs"] = relative(step(model, inputs, text, 0), expected[0])
        found["next_step"] = relative(step(model, inputs, text, 1), expected[1])
        found["other_text"] = relative(step(model, inputs, other, 2), expected_of_other)
        found["next_run"] = relative(step(model, inputs, text, 0), expected[0])
        found["with_names"] = worst((model(**inputs).sample - expected[0][0]).abs().max())
        remove_context_parallel(model)
        found["removed"] = relative(step(model, inputs, text, 2), expected[2])
        report(model=name, **found)
    # Stages of several ranks, which share the sequence, or the items of the batch, of that.
    together = [
        dict(ulysses_degree=world // 2),
        dict(ring_degree=world // 2, rotate_method="alltoall"),
        dict(batch_degree=world // 2),
    ]
    for turn, name in enumerate(MODELS if world == 4 else ()):
        model, inputs = MODELS[name]()
        if inputs["hidden_states"].shape[0] == 1:
            inputs = CASES_OF_TWO[name]()
        text, degrees = inputs["encoder_hidden_states"], together[turn % len(together)]
        expected = [step(model, inputs, text, number) for number in range(2)]
        found = {}
        for patches in (1, 2):
            config = ContextParallelConfig(
                pipefusion_degree=2, num_pipeline_patch=patches, **degrees, ulysses_anything=True, ring_anything=True
            )
            apply_context_parallel(model, config)
            found[f"exact {patches}"] = relative(step(model, inputs, text, 0), expected[0])
            found[f"next {patches}"] = relative(step(model, inputs, text, 1), expected[1])
            remove_context_parallel(model)
        report(together=name, degrees=str(degrees), **found)
    model, inputs = case_of("flux 2")
    config = ContextParallelConfig(pipefusion_degree=world)
    report(model="refused", error=str(answer(PlanError, apply_context_parallel, model, config)))
finish()
