"""Which argument of a call is stacked along dimension 0, and who computes which items."""

import ast
import os
from pathlib import Path

import pytest
import torch
from support.package import load_package

load_package()
from cp_runtime.comfy.rank.batch import STACKED, UNSTACKED, share_out, take_items  # noqa: E402
from cp_runtime.comfy.shared.forward import CONDITIONINGS  # noqa: E402
from cp_runtime.families.trellis2 import TRELLIS_2  # noqa: E402

LEADING = ["x", "timesteps"]


def call(items=4, **extra):
    return {"x": torch.arange(items * 2.0).view(items, 2), "timesteps": torch.zeros(items), **extra}


def shares(arguments, ranks, degree=0, sequence=True):
    return share_out(arguments, LEADING, ranks, degree, sequence)


@pytest.mark.parametrize(
    ("items", "ranks", "degree", "groups"),
    [
        (2, 2, 0, 2),
        (1, 4, 0, 1),
        (2, 4, 0, 2),
        (3, 2, 0, 1),
        (3, 3, 0, 3),
        (4, 6, 0, 2),
        (6, 4, 0, 2),
        (4, 4, 2, 2),
        (2, 4, 4, 2),
        (3, 4, 2, 1),
    ],
)
def test_groups_divide_the_batch_and_the_ranks(items, ranks, degree, groups):
    assert shares(call(items), ranks, degree).groups == groups


@pytest.mark.parametrize(
    ("items", "ranks", "owned"), [(3, 2, [(0, 2), (2, 3)]), (1, 2, [(0, 1), (1, 1)]), (2, 3, [(0, 1), (1, 2), (2, 2)])]
)
def test_without_a_sequence_groups_are_uneven(items, ranks, owned):
    made = shares(call(items), ranks, sequence=False)
    assert [made.owned(group) for group in range(made.groups)] == owned
    assert all(stop > start for start, stop in map(made.held, range(made.groups)))


def test_a_batch_that_is_not_shared_is_told_once(caplog):
    for said in (False, True, True):
        share_out(call(told_once=torch.zeros(3, 1)), LEADING, 2, 0, True, says=said)
        assert len(caplog.records) == int(said), caplog.text
    share_out(call(another=torch.zeros(3, 1)), LEADING, 2, 0, True)
    assert len(caplog.records) == 2


def test_every_argument_by_its_own_rule():
    """Sizes that equal the batch by chance decide nothing."""
    residual = torch.arange(4.0)
    arguments = call(
        context=torch.ones(4, 3, 5),
        ref_latents=[torch.arange(4), torch.arange(4) + 4],
        vace_strength=[0.1, 0.2, 0.3, 0.4],
        guide_attention_entries=[torch.zeros(4)],
        y=None,
        control={"input": [residual, None, residual], "output": []},
        transformer_options={"sigmas": torch.zeros(4), "cond_or_uncond": [1, 0]},
    )
    part = take_items(shares(arguments, 4), arguments, 3)
    assert part["x"].tolist() == [[6.0, 7.0]]
    assert part["context"].shape == (1, 3, 5)
    assert [t.tolist() for t in part["ref_latents"]] == [[3], [7]]
    assert part["vace_strength"] == [0.1, 0.2, 0.3, 0.4]
    assert part["guide_attention_entries"][0].shape == (4,)
    assert part["y"] is None
    assert [None if t is None else t.tolist() for t in part["control"]["input"]] == [[3.0], None, [3.0]]
    assert part["transformer_options"]["cond_or_uncond"] == [0]
    assert part["transformer_options"]["sigmas"].shape == (4,)


def test_kinds_of_conditions_follow_the_items():
    arguments = call(6, transformer_options={"cond_or_uncond": [0, 1]})
    made = shares(arguments, 4, sequence=False)  # 2, 2, 1 and 1 items of three each
    kinds = [take_items(made, arguments, group)["transformer_options"]["cond_or_uncond"] for group in range(4)]
    assert kinds == [[0], [0, 1], [1], [1]]


def test_names_of_conditionings_follow_the_items_twice():
    """Over groups of ranks, and again over what a group computes one behind the other."""
    arguments = call(4, transformer_options={"cond_or_uncond": [0, 1], CONDITIONINGS: ["1 a", "1 b"]})
    half = take_items(shares(arguments, 2), arguments, 1)
    assert half["transformer_options"][CONDITIONINGS] == ["1 b 0", "1 b 1"]
    single = take_items(shares(half, 2), half, 1)
    assert single["transformer_options"][CONDITIONINGS] == ["1 b 1 0"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [({"mystery": 1}, "no rule says whether mystery"), ({"guidance": torch.ones(1)}, "guidance has 1 items, the latent 4")],
)
def test_what_no_rule_fits_is_not_shared(extra, words, caplog):
    assert shares(call(**extra), 2).groups == 1
    assert words in caplog.text


def test_frames_of_one_video_stay_together():
    arguments = call(6, num_video_frames=3)
    made = shares(arguments, 2, sequence=False)
    assert [made.owned(group) for group in range(2)] == [(0, 3), (3, 6)]
    alone = shares(call(3, num_video_frames=3), 2, sequence=False)
    assert [alone.owned(group) for group in range(2)] == [(0, 3), (3, 3)]
    assert alone.held(1) == (0, 3)


@pytest.mark.parametrize(
    ("shared", "items", "kinds", "described"),
    [
        (True, 4, [0, 1], {}),
        (True, 2, [0, 1], {"trellis2_coord_counts": torch.tensor([5])}),
        (True, 3, [0], {"trellis2_coord_counts": torch.tensor([5])}),
        (False, 4, [0, 1], {"trellis2_coord_counts": torch.tensor([5, 5])}),
        (True, 2, [0, 1], {"trellis2_proj_feats": torch.zeros(1, 8, 3)}),
        (False, 4, [0, 1], {"trellis2_proj_feats": torch.zeros(2, 8, 3)}),
        (True, 2, [0, 1], {"trellis2_coord_counts": torch.tensor([5]), "trellis2_proj_feats": torch.zeros(5, 3)}),
        # The model takes a kind's place for that of an item: it leaves the projection out of the first of them only.
        (False, 2, [1], {"trellis2_coord_counts": torch.tensor([5]), "trellis2_proj_feats": torch.zeros(5, 3)}),
        (False, 4, [0, 1, 0, 1], {"trellis2_coord_counts": torch.tensor([5]), "trellis2_proj_feats": torch.zeros(5, 3)}),
    ],
)
def test_objects_of_trellis_are_shared_where_each_takes_the_whole_description(shared, items, kinds, described):
    options = {"transformer_options": {"cond_or_uncond": kinds}}
    assert TRELLIS_2.batch_is_shared({"x": torch.zeros(items, 32, 5, 1), **described, **options}) == shared


# What came with ComfyUI 0.31 to 0.33, and what came later: stacked, whole.
NEWER = (
    {"clip_fea_pose", "conditioning_scale", "context_pose", "embeds"},
    {"generated_keyframes", "pose_strength", "reference_strength"}
    | {f"trellis2_{name}" for name in ("coord_counts", "coords", "generation_mode", "model_frame", "proj_feats", "shape_slat")},
)
NEWEST: tuple[set[str], set[str]] = set(), {"image_slots", "yue2_chunks"}


def names_of(tree):
    """Constants that a loop gives to its variable, by its assignments, where the names of conditions are not written there."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple)]
    return {
        inner: {item.value for item in loop.iter.elts if isinstance(item, ast.Constant)}
        for loop in loops
        for inner in ast.walk(loop)
        if isinstance(inner, ast.Assign)
    }


def test_the_tables_are_those_of_comfyui():
    """Add what is new in ComfyUI to STACKED (CONDRegular, CONDNoiseShape, CONDCrossAttn, CONDList) or UNSTACKED (CONDConstant)."""
    source = (Path(os.environ["COMFYUI_PATH"]) / "comfy" / "model_base.py").read_text()
    found: dict[str, set[str]] = {"stacked": set(), "whole": set()}
    tree = ast.parse(source)
    looped = names_of(tree)
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.Assign)
            or not isinstance(node.targets[0], ast.Subscript)
            or not isinstance(node.value, ast.Call)
        ):
            continue
        kind = ast.unparse(node.value.func).rpartition(".")[2]
        name = node.targets[0].slice
        if kind.startswith("COND"):
            names = {name.value} if isinstance(name, ast.Constant) else looped.get(node, set())
            found["whole" if kind == "CONDConstant" else "stacked"] |= names
    renamed = {"c_concat", "c_crossattn"}  # become part of the latent, and `context` or `cross_attn_cond`
    tables = STACKED - {"context", "control", "cross_attn_cond"}, UNSTACKED - {"transformer_options", "return_info"}
    for names, table, newer, newest in zip((found["stacked"] - renamed, found["whole"]), tables, NEWER, NEWEST, strict=True):
        assert names <= table
        assert table - names in (set(), newest, newer | newest), "all of a release, or none of it"
