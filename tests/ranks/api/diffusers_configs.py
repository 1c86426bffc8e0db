"""Constructor arguments of tiny models of every diffusers class that has a sharding plan. Imports nothing."""

from typing import Any

FLUX = dict(
    in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=24,
    pooled_projection_dim=12, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
)  # fmt: skip
FLUX_2 = dict(
    in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=24,
    timestep_guidance_channels=32, mlp_ratio=2.0, axes_dims_rope=(4, 4, 4, 4),
)  # fmt: skip
QWEN = dict(
    in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=24,
    axes_dims_rope=(4, 6, 6),
)  # fmt: skip
WAN = dict(
    in_channels=8, out_channels=8, num_layers=2, num_attention_heads=4, attention_head_dim=12, text_dim=24, freq_dim=32,
    ffn_dim=64, rope_max_seq_len=64,
)  # fmt: skip
WAN_I2V = dict(WAN, in_channels=20, image_dim=20, added_kv_proj_dim=48)
LTX = dict(
    in_channels=16, out_channels=16, num_layers=2, num_attention_heads=4, attention_head_dim=12, cross_attention_dim=48,
    caption_channels=24,
)  # fmt: skip
LTX_2 = dict(
    in_channels=16, out_channels=16, num_layers=2, num_attention_heads=4, attention_head_dim=12, cross_attention_dim=48,
    audio_in_channels=12, audio_out_channels=12, audio_num_attention_heads=4, audio_attention_head_dim=8,
    audio_cross_attention_dim=32, caption_channels=24,
)  # fmt: skip
LTX_2_3 = dict(
    LTX_2, rope_type="split", gated_attn=True, cross_attn_mod=True, audio_gated_attn=True, audio_cross_attn_mod=True,
    use_prompt_embeddings=False, perturbed_attn=True,
)  # fmt: skip
HELIOS = dict(
    in_channels=8, out_channels=8, num_layers=2, num_attention_heads=4, attention_head_dim=12, text_dim=24, freq_dim=32,
    ffn_dim=64, rope_dim=(4, 4, 4), has_multi_term_memory_patch=True,
)  # fmt: skip
MINIMAX = dict(
    num_attention_heads=4, attention_head_dim=16, hidden_size=48, num_layers=2, num_refiner_layers=1, ffn_dim=64, in_channels=4,
    audio_in_channels=6, text_dim=24, freq_dim=32, time_embed_hidden_dim=32, time_embed_dim=24, rope_freq_dim=2,
)  # fmt: skip

HUNYUAN = dict(
    in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=12, num_layers=2, num_single_layers=1,
    num_refiner_layers=1, text_embed_dim=24, rope_axes_dim=(4, 4, 4),
)  # fmt: skip
HUNYUAN_15 = dict(
    in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=12, num_layers=2, num_refiner_layers=1,
    text_embed_dim=24, text_embed_2_dim=20, image_embed_dim=16, rope_axes_dim=(4, 4, 4),
)  # fmt: skip
SD3 = dict(
    sample_size=16, in_channels=4, num_layers=2, attention_head_dim=12, num_attention_heads=4, joint_attention_dim=24,
    caption_projection_dim=48, pooled_projection_dim=12, out_channels=4, pos_embed_max_size=16,
)  # fmt: skip
COGVIDEOX = dict(
    num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=24, num_layers=2,
    sample_width=10, sample_height=8, sample_frames=9, max_text_seq_length=7,
)  # fmt: skip
PIXART = dict(
    num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2, cross_attention_dim=48,
    sample_size=16, caption_channels=24, use_additional_conditions=False,
)  # fmt: skip
HUNYUAN_DIT = dict(
    num_attention_heads=4, attention_head_dim=12, in_channels=4, patch_size=2, sample_size=12, hidden_size=48, num_layers=4,
    cross_attention_dim=24, cross_attention_dim_t5=16, pooled_projection_dim=16, text_len=5, text_len_t5=6,
)  # fmt: skip
LUMINA_2 = dict(
    in_channels=4, hidden_size=48, num_layers=2, num_refiner_layers=1, num_attention_heads=4, num_kv_heads=2, multiple_of=8,
    axes_dim_rope=(4, 4, 4), axes_lens=(16, 16, 16), cap_feat_dim=24,
)  # fmt: skip
CHROMA = dict(
    in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=24,
    axes_dims_rope=(4, 6, 6), approximator_num_channels=16, approximator_hidden_dim=32, approximator_layers=1,
)  # fmt: skip
BRIA = dict(
    in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=24,
    axes_dims_rope=[4, 6, 6],
)  # fmt: skip
COGVIEW_3 = dict(
    in_channels=4, out_channels=4, num_layers=2, attention_head_dim=12, num_attention_heads=4, text_embed_dim=24, time_embed_dim=16,
    condition_dim=4, pos_embed_max_size=16, sample_size=16,
)  # fmt: skip
COGVIEW_4 = dict(COGVIEW_3, rope_axes_dim=(16, 16))
GLM = dict(
    in_channels=4, out_channels=4, num_layers=2, attention_head_dim=12, num_attention_heads=4, text_embed_dim=24, time_embed_dim=16,
    condition_dim=4, prior_vq_quantizer_codebook_size=32,
)  # fmt: skip
AURA = dict(
    sample_size=16, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=2, attention_head_dim=12, num_attention_heads=4,
    joint_attention_dim=24, caption_projection_dim=48, pos_embed_max_size=64,
)  # fmt: skip
CONSIS_ID = dict(
    num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=24, num_layers=2,
    sample_width=10, sample_height=8, sample_frames=9, max_text_seq_length=7, is_train_face=True, cross_attn_interval=1,
    cross_attn_dim_head=12, cross_attn_num_heads=2, LFE_id_dim=8, LFE_vit_dim=8, LFE_depth=5, LFE_dim_head=8, LFE_num_heads=2,
    LFE_num_id_token=2, LFE_num_querie=3, LFE_output_dim=32,
)  # fmt: skip
FRAMEPACK = dict(HUNYUAN, pooled_projection_dim=12, has_image_proj=True, image_proj_dim=16, has_clean_x_embedder=True)
HIDREAM = dict(
    patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
    caption_channels=[24, 20], text_emb_dim=12, num_routed_experts=2, num_activated_experts=1, axes_dims_rope=(4, 6, 6),
    max_resolution=(16, 16), llama_layers=[0, 1, 1, 2], force_inference_output=True,
)  # fmt: skip
KREA_2 = dict(
    in_channels=16, num_layers=2, attention_head_dim=12, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
    timestep_embed_dim=16, text_hidden_dim=24, num_text_layers=3, text_num_attention_heads=2, text_num_key_value_heads=2,
    text_intermediate_size=32, num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 4, 4),
)  # fmt: skip
Z_IMAGE = dict(
    in_channels=4, dim=48, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=24, axes_dims=[4, 4, 4],
    axes_lens=[256, 32, 32],
)  # fmt: skip
COSMOS = dict(
    in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=12, num_layers=2, mlp_ratio=2.0, text_embed_dim=24,
    adaln_lora_dim=4, max_size=(4, 16, 16), patch_size=(1, 2, 2), rope_scale=(2.0, 1.0, 1.0),
)  # fmt: skip
MOCHI = dict(
    patch_size=2, num_attention_heads=4, attention_head_dim=12, num_layers=2, pooled_projection_dim=16, in_channels=4,
    text_embed_dim=24, time_embed_dim=8, max_sequence_length=7,
)  # fmt: skip
ALLEGRO = dict(
    num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2, cross_attention_dim=48,
    caption_channels=24, sample_height=8, sample_width=10, sample_frames=3,
)  # fmt: skip
ANIMATE = dict(
    WAN_I2V, latent_channels=8, motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8}, motion_encoder_size=16,
    motion_style_dim=8, motion_dim=4, motion_encoder_dim=8, face_encoder_hidden_dim=8, face_encoder_num_heads=2,
    inject_face_latents_blocks=1,
)  # fmt: skip
VACE = dict(WAN, vace_in_channels=12, vace_layers=[0, 1])

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": ("FluxTransformer2DModel", FLUX),
    "flux 3 heads": ("FluxTransformer2DModel", dict(FLUX, num_attention_heads=3)),
    "flux 1 head": ("FluxTransformer2DModel", dict(FLUX, num_attention_heads=1)),
    "flux schnell": ("FluxTransformer2DModel", dict(FLUX, guidance_embeds=False)),
    "flux 2 klein": ("Flux2Transformer2DModel", dict(FLUX_2, guidance_embeds=False)),
    "flux 2": ("Flux2Transformer2DModel", FLUX_2),
    "qwen": ("QwenImageTransformer2DModel", QWEN),
    "qwen 3 heads": ("QwenImageTransformer2DModel", dict(QWEN, num_attention_heads=3)),
    "qwen edit": ("QwenImageTransformer2DModel", dict(QWEN, zero_cond_t=True)),
    "qwen layered": ("QwenImageTransformer2DModel", dict(QWEN, use_additional_t_cond=True, use_layer3d_rope=True)),
    "wan t2v": ("WanTransformer3DModel", WAN),
    "wan 3 heads": ("WanTransformer3DModel", dict(WAN, num_attention_heads=3)),
    "wan i2v": ("WanTransformer3DModel", WAN_I2V),
    "wan flf2v": ("WanTransformer3DModel", dict(WAN_I2V, pos_embed_seq_len=12)),
    "ltx": ("LTXVideoTransformer3DModel", LTX),
    "ltx 3 heads": ("LTXVideoTransformer3DModel", dict(LTX, num_attention_heads=3, cross_attention_dim=36)),
    "ltx 2 interleaved": ("LTX2VideoTransformer3DModel", LTX_2),
    # As converted: see diffusers' convert_ltx2_to_diffusers.py.
    "ltx 2": ("LTX2VideoTransformer3DModel", dict(LTX_2, rope_type="split")),
    "ltx 2.3": ("LTX2VideoTransformer3DModel", LTX_2_3),
    "ltx 2.5": (
        "LTX2VideoTransformer3DModel",
        dict(LTX_2_3, ff_bias=False, audio_ff_bias=False, use_prompt_adaln_single=False, use_keyframes_abs_pos_embedding=True),
    ),
    "chronoedit": ("ChronoEditTransformer3DModel", WAN_I2V),
    "helios": ("HeliosTransformer3DModel", HELIOS),
    "minimax h3": ("MiniMaxH3Transformer3DModel", MINIMAX),
    # Without a plan of diffusers: see cp_runtime/diffusers/known.py.
    "flux ip adapter": ("FluxTransformer2DModel", FLUX),
    "hunyuan video": ("HunyuanVideoTransformer3DModel", dict(HUNYUAN, pooled_projection_dim=12)),
    "hunyuan video from an image": (
        "HunyuanVideoTransformer3DModel",
        dict(HUNYUAN, pooled_projection_dim=12, image_condition_type="token_replace"),
    ),
    "hunyuan video distilled": ("HunyuanVideoTransformer3DModel", dict(HUNYUAN, pooled_projection_dim=12, guidance_embeds=False)),
    "hunyuan image distilled": (
        "HunyuanImageTransformer2DModel",
        dict(HUNYUAN, patch_size=(1, 1), rope_axes_dim=(6, 6), guidance_embeds=True, use_meanflow=True, text_embed_2_dim=20),
    ),
    "hunyuan image": ("HunyuanImageTransformer2DModel", dict(HUNYUAN, patch_size=(1, 1), rope_axes_dim=(6, 6))),
    "hunyuan video 1.5": ("HunyuanVideo15Transformer3DModel", HUNYUAN_15),
    "hunyuan video 1.5 meanflow": ("HunyuanVideo15Transformer3DModel", dict(HUNYUAN_15, use_meanflow=True)),
    "sd3.5 medium": ("SD3Transformer2DModel", dict(SD3, qk_norm="rms_norm", dual_attention_layers=(0,))),
    "sd3": ("SD3Transformer2DModel", SD3),
    "cogvideox": ("CogVideoXTransformer3DModel", COGVIDEOX),
    "cogvideox rope": (
        "CogVideoXTransformer3DModel",
        dict(COGVIDEOX, attention_head_dim=16, use_rotary_positional_embeddings=True),
    ),
    "cogvideox from an image": (
        "CogVideoXTransformer3DModel",
        dict(
            COGVIDEOX,
            attention_head_dim=16,
            use_rotary_positional_embeddings=True,
            use_learned_positional_embeddings=True,
        ),
    ),
    "cogvideox 1.5": (
        "CogVideoXTransformer3DModel",
        dict(
            COGVIDEOX,
            attention_head_dim=16,
            use_rotary_positional_embeddings=True,
            patch_size_t=2,
            patch_bias=False,
            ofs_embed_dim=8,
        ),
    ),
    "pixart alpha": ("PixArtTransformer2DModel", dict(PIXART, use_additional_conditions=True)),
    "pixart": ("PixArtTransformer2DModel", PIXART),
    "wan vace": ("WanVACETransformer3DModel", VACE),
    "wan animate": ("WanAnimateTransformer3DModel", ANIMATE),
    "mochi": ("MochiTransformer3DModel", MOCHI),
    "allegro": ("AllegroTransformer3DModel", ALLEGRO),
    "skyreels": ("SkyReelsV2Transformer3DModel", WAN),
    "skyreels forcing": ("SkyReelsV2Transformer3DModel", dict(WAN, num_frame_per_block=2)),
    "skyreels from an image": ("SkyReelsV2Transformer3DModel", dict(WAN_I2V, inject_sample_info=True)),
    "hunyuan dit": ("HunyuanDiT2DModel", dict(HUNYUAN_DIT, use_style_cond_and_image_meta_size=True)),
    "lumina 2": ("Lumina2Transformer2DModel", LUMINA_2),
    "chroma": ("ChromaTransformer2DModel", CHROMA),
    "bria": ("BriaTransformer2DModel", BRIA),
    "bria fibo": ("BriaFiboTransformer2DModel", dict(BRIA, text_encoder_dim=20)),
    "longcat": ("LongCatImageTransformer2DModel", dict(BRIA, pooled_projection_dim=24)),
    "ovis": ("OvisImageTransformer2DModel", dict(BRIA, out_channels=16, axes_dims_rope=(4, 6, 6))),
    "cogview 3": ("CogView3PlusTransformer2DModel", COGVIEW_3),
    "cogview 4": ("CogView4Transformer2DModel", COGVIEW_4),
    "easyanimate": (
        "EasyAnimateTransformer3DModel",
        dict(
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            patch_size=2,
            num_layers=2,
            mmdit_layers=1,
            time_embed_dim=16,
            text_embed_dim=24,
            text_embed_dim_t5=20,
        ),
    ),
    "glm image": ("GlmImageTransformer2DModel", GLM),
    "auraflow": ("AuraFlowTransformer2DModel", AURA),
    "consisid": ("ConsisIDTransformer3DModel", CONSIS_ID),
    "framepack": ("HunyuanVideoFramepackTransformer3DModel", FRAMEPACK),
    "hidream": ("HiDreamImageTransformer2DModel", HIDREAM),
    "krea 2": ("Krea2Transformer2DModel", KREA_2),
    "z image": ("ZImageTransformer2DModel", Z_IMAGE),
    "z image omni": ("ZImageTransformer2DModel", dict(Z_IMAGE, siglip_feat_dim=12)),
    "cosmos": ("CosmosTransformer3DModel", COSMOS),
    "cosmos 2": ("CosmosTransformer3DModel", dict(COSMOS, in_channels=5, extra_pos_embed_type=None, controlnet_block_every_n=1)),
}
