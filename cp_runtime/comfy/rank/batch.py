"""A rank's part of a call: its mesh, and its items of the batch.

A call has everything to be computed at once (CFG halves, batch items, areas) stacked along dimension 0. The name of an argument
tells whether it is stacked, by ComfyUI's conditioning class (`CONDRegular`, `CONDConstant`, ...). `tests/unit/test_batch.py`
compares the tables below with ComfyUI.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from ...engine.ranks.collectives import RankGroup
from ...engine.ranks.mesh import BatchMesh, SequenceMesh, Stage
from ...engine.ranks.sharding import BatchShares, Shares, batch_groups
from ...families.family import FamilyPlan
from ...nested import tensors
from ...pool.messages import Call
from ..shared.forward import CONDITIONINGS, CONTROLNETS

log = logging.getLogger("context_parallel.worker")

_STACKED = """
    attention_mask audio_codes audio_denoise_mask audio_embed c_ar c_size camera_conditions clip clip_fea clip_fea_pose
    clip_fea_ref clip_img clip_text clip_text_pooled condition conditioning_scale context context_latents context_pose
    control control_video cross_attn_cond crossattn_controlnet crp degrade_sigma denoise_mask effnet embeds
    encoder_hidden_states_llama3 encoder_hidden_states_t5 face_pixel_values global_embed guidance guiding_frame_index
    image_cond image_meta_size keyframe_idxs local_add_cond lq_latent lyric_embed lyric_token_idx ofs pose_latents
    ref_contexts ref_latent ref_latents ref_mask_latents refer_audio reference_latent reference_motion sam_latents sca
    siglip_feats speaker_embeds t5xxl_ids t5xxl_weights text_embedding_mask text_embedding_mask_t5 time_context
    time_dim_concat time_dim_replace txt_byt5 vace_context y
"""
_UNSTACKED = """
    audio_inject_scale disable_time_r fps frame_rate generated_keyframes guide_attention_entries image_slots is_covers latent_shapes
    lyrics_strength minimax_payload num_tokens num_video_frames pose_strength ref_audio ref_latents_method ref_mask_flag
    reference_strength replace_with_null_embeds return_info transformer_options trellis2_coord_counts trellis2_coords
    trellis2_generation_mode trellis2_model_frame trellis2_proj_feats trellis2_shape_slat vace_strength yue2_chunks
"""
STACKED, UNSTACKED = frozenset(_STACKED.split()), frozenset(_UNSTACKED.split())
# Names that model_base does not have, or of classes of its own: HiDream-O1's conditioning, LTX-2's second timestep, SenseNova's.
_ELSEWHERE = """
    a_timestep input_ids position_ids prefix_indexes prefix_keys prefix_mask prefix_time prefix_values ref_image_grid_thw
    ref_patches ref_pixel_values reference_images text_input_ids token_types vinput_mask
"""
STACKED_ELSEWHERE, UNSTACKED_ELSEWHERE = frozenset((*_ELSEWHERE.split(), CONTROLNETS)), frozenset({"ar_len"})
COND_KINDS = "cond_or_uncond"  # in transformer_options: the kind of each of the batch's equal parts


@dataclass(frozen=True)
class CallPart:
    """This rank's part of a call.

    Args:
        mesh: the ranks that take part; those of this rank's stage.
        everyone: all ranks of the call.
        stage: this rank's, where the call runs in stages.
        shares: of the items of the batch.
        by_items: these may be computed apart.
    """

    mesh: BatchMesh
    everyone: RankGroup
    stage: Stage | None
    shares: BatchShares
    by_items: bool

    @cached_property
    def sequence(self) -> SequenceMesh:
        return self.mesh.sequence(self.shares.groups)


class Given(NamedTuple):
    """A rank's part of a call's arguments, which may lie in memory of the message; the forward may read those `in_place` there."""

    arguments: dict[str, Any]
    in_place: dict[str, Any]


def part_of(plan: FamilyPlan, request: Call, arguments: dict[str, Any], mesh: BatchMesh, alone: bool) -> CallPart | None:
    """Return this rank's part of a call; None = it idles. `alone`: all ranks compute the work of one, with sharded weights."""
    everyone, stage = mesh.whole, None
    if request.pipeline is not None:
        stage = mesh.stage(request.pipeline.stages)
    taking_part = stage.ranks if stage is not None else mesh.alone if alone else mesh.first(request.ranks)
    if taking_part is None:
        return None
    by_items, ranks = plan.batch_is_shared(arguments) and request.batch_degree != 1, taking_part.size
    degree, group_shares = request.batch_degree if by_items else 1, taking_part.group_shares
    kinds = len((arguments.get("transformer_options") or {}).get(COND_KINDS) or [0]) if request.by_conditioning else 0
    says = everyone.rank == 0
    shares = share_out(arguments, request.leading, ranks, degree, plan.shares_sequence, group_shares, says, kinds)
    return CallPart(taking_part, everyone, stage, shares, by_items)


def share_out(
    arguments: Mapping[str, Any],
    leading: Collection[str],
    ranks: int,
    degree: int,
    sequence: bool,
    group_shares: Callable[[int], Shares] = lambda groups: (),
    says: bool = True,
    kinds: int = 0,
) -> BatchShares:
    """Decide how a call is shared out. All ranks decide alike.

    Args:
        arguments: arguments of the innermost forward, by name.
        leading: names of the first two, latent and timestep.
        ranks: number of ranks of the pool.
        degree: number of groups, by the user; 0 = choose.
        sequence, group_shares: see `batch_groups`. A group without items computes a copy of the first item.
        says: this rank logs why a batch is not shared.
        kinds: number of conditionings, where the items of each stay together.
    """
    stacked = STACKED | STACKED_ELSEWHERE | frozenset(leading)
    items = next((t.shape[0] for name in leading for t in tensors(arguments[name])), 1)
    unit = items // kinds if kinds else int(arguments.get("num_video_frames") or 1)
    most = degree or ranks
    problem = next(_unshareable(arguments, stacked, items, unit), None)
    if problem is not None:
        if items > unit and most > 1 and says:
            _warn_once(problem)
        return BatchShares(1, items, items, stacked)
    groups = batch_groups(items // unit, ranks, degree, sequence, group_shares)
    return BatchShares(groups, items, unit, stacked, group_shares(groups))


@lru_cache(maxsize=64)
def _warn_once(problem: str) -> None:
    log.warning("the batch axis is not used: %s", problem)


def _unshareable(arguments: Mapping[str, Any], stacked: frozenset[str], items: int, unit: int) -> Iterator[str]:
    for name, value in arguments.items():
        if name not in stacked | UNSTACKED | UNSTACKED_ELSEWHERE and value is not None:
            yield f"no rule says whether {name} is stacked"
        if name in stacked and (sizes := {t.shape[0] if t.ndim else 0 for t in tensors(value)} - {items}):
            yield f"{name} has {sizes.pop()} items, the latent {items}"
    if items % unit:
        yield f"{items} items are not videos of {unit} frames"


def take_items(shares: BatchShares, arguments: Mapping[str, Any], group: int) -> dict[str, Any]:
    """Return a group's part of a call's arguments, and of the lists of the kinds and conditionings of items, as views."""
    part = shares.take(arguments, group)
    options, held = dict(part.get("transformer_options") or {}), range(*shares.held(group))
    if shares.groups > 1 and options.get(COND_KINDS):
        each = shares.items // len(options[COND_KINDS])
        kinds = [options[COND_KINDS][item // each] for item in held]
        options[COND_KINDS] = kinds[:1] if len(set(kinds)) == 1 else kinds
        if CONDITIONINGS in options:
            each = shares.items // len(options[CONDITIONINGS])
            options[CONDITIONINGS] = [f"{options[CONDITIONINGS][item // each]} {item % each}" for item in held]
        part["transformer_options"] = options
    return part
