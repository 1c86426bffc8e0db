"""A copy of ComfyUI with the call structure that later versions have where this extension meets it.

ComfyUI 0.38 gave layers an attention that the model file chooses (`ComfyAttention`), which it hides from overrides; 0.36 brought a
node for sparse attention; 0.40 linear layers that apply an activation to their input. All of it is written anew here, as small as
it can be; the kernels are stand-ins that choose blocks of tokens for each head, as the real ones do.
"""

import shutil
from pathlib import Path

OVERLAY = Path(__file__).parent / "overlay"  # files of the copy: untyped, as ComfyUI's are
PREFERRED = "preferred_attention=self.comfy_attention, transformer_options=transformer_options"
EDITS = {
    "comfy/ldm/modules/attention.py": [
        (
            "    def wrapper(*args, **kwargs):\n",
            '    def wrapper(*args, **kwargs):\n        preferred = kwargs.pop("preferred_attention", None)\n',
        ),
        (
            "            return func(*args, **kwargs)\n        finally:",
            "            if remove_attn_wrapper_key and preferred is not None and preferred.function is not None:\n"
            "                return preferred.function(*args, **kwargs)\n"
            "            return func(*args, **kwargs)\n        finally:",
        ),
        ("", "\nfrom .layer_attention import ComfyAttention, attention_comfy_kitchen_int8, attention_comfy_kitchen_sol\n"),
    ],
    "comfy/ldm/wan/model.py": [
        ("import optimized_attention\n", "import ComfyAttention, optimized_attention\n"),
        (
            "        super().__init__()\n        self.dim = dim\n        self.num_heads = num_heads\n        self.head_dim",
            "        super().__init__()\n        self.comfy_attention = ComfyAttention()\n        self.dim = dim\n"
            "        self.num_heads = num_heads\n        self.head_dim",
        ),
        ("heads=self.num_heads, transformer_options=transformer_options", f"heads=self.num_heads, {PREFERRED}"),
        (
            "            heads=self.num_heads,\n            transformer_options=transformer_options",
            f"            heads=self.num_heads,\n            {PREFERRED}",
        ),
        (
            "class WanAttentionBlock(",
            "class WanFeedForward(nn.Sequential):\n"
            "    def forward(self, x):\n"
            '        return self[2](self[0](x), input_act="gelu_tanh")\n\n\nclass WanAttentionBlock(',
        ),
        ("        self.ffn = nn.Sequential(", "        self.ffn = WanFeedForward("),
    ],
    "comfy/ldm/minimax/model.py": [
        ("import optimized_attention\n", "import ComfyAttention, optimized_attention\n"),
        (
            "    def __init__(self, hidden, heads, head_dim, eps, dtype=None, device=None, operations=None):\n"
            "        super().__init__()\n",
            "    def __init__(self, hidden, heads, head_dim, eps, gate=False, dtype=None, device=None, operations=None):\n"
            "        super().__init__()\n        self.comfy_attention = ComfyAttention()\n"
            "        self.to_gate_compress = None\n        if gate:\n"
            "            gates = operations.Linear(hidden, heads * head_dim, bias=False, dtype=dtype, device=device)\n"
            "            self.to_gate_compress = gates\n",
        ),
        (
            "    def forward(self, x, rope_freqs=None, transformer_options={}):\n        s = x.shape[0]\n",
            "    def heads_of(self, x, rope_freqs):\n        kept = []\n"
            "        def keep(func, q, k, v, heads, **kwargs):\n"
            "            kept.extend(t.transpose(1, 2) for t in (q, k, v))\n"
            "            return q.transpose(1, 2).flatten(2)\n"
            '        Attention.forward(self, x, rope_freqs, {"optimized_attention_override": keep})\n        return kept\n\n'
            "    def forward(self, x, rope_freqs=None, transformer_options={}):\n        s = x.shape[0]\n",
        ),
        ("mask=None, skip_reshape=True, transformer_options=transformer_options", f"mask=None, skip_reshape=True, {PREFERRED}"),
        (
            "self.attn = Attention(hidden, heads, head_dim, qk_eps, dtype=dtype, device=device, operations=operations)\n"
            "        self.mlp = MLP(hidden, ffn, dtype=dtype, device=device, operations=operations)\n        self.adaln",
            "self.attn = Attention(hidden, heads, head_dim, qk_eps, gate, dtype=dtype, device=device, operations=operations)\n"
            "        self.mlp = MLP(hidden, ffn, dtype=dtype, device=device, operations=operations)\n        self.adaln",
        ),
        ("apply_silu=True, adaln_dtype=None, dtype=None, device=None, operations=None):\n"
         "        super().__init__()\n        self.norm1",
         "apply_silu=True, adaln_dtype=None, gate=False, dtype=None, device=None, operations=None):\n"
         "        super().__init__()\n        self.norm1"),
        ("rope_freqs, transformer_options={}):\n        shift_msa",
         "rope_freqs, transformer_options={}, attention=None):\n        shift_msa"),
        ("_mod_gate(x, gate_msa, self.attn(h,", "_mod_gate(x, gate_msa, (attention or self.attn)(h,"),
        ("adaln_curve_grid=None,\n", "adaln_curve_grid=None, gate_compress=False,\n"),
        ("qk_norm_eps, **curve, dtype=dtype,", "qk_norm_eps, **curve, gate=gate_compress, dtype=dtype,"),
        (
            'transformer_options=args["transformer_options"])}',
            'transformer_options=args["transformer_options"], attention=args.get("attention"))}',
        ),
        (
            "        for i, block in enumerate(self.blocks):\n            comfy.model_prefetch",
            '        transformer_options["minimax_h3_layout"] = layout\n        for i, block in enumerate(self.blocks):\n'
            '            transformer_options["block_index"] = i\n            comfy.model_prefetch',
        ),
    ],
    "comfy/ops.py": [
        (
            "        def forward_comfy_cast_weights(self, input):\n"
            "            weight, bias, offload_stream = cast_bias_weight(self, input, offloadable=True)\n"
            "            x = torch.nn.functional.linear(",
            "        def forward_comfy_cast_weights(self, input, input_act=None):\n"
            '            input = torch.nn.functional.gelu(input, approximate="tanh") if input_act else input\n'
            "            weight, bias, offload_stream = cast_bias_weight(self, input, offloadable=True)\n"
            "            x = torch.nn.functional.linear(",
        ),
        (
            "                return self.forward_comfy_cast_weights(*args, **kwargs)\n            else:\n"
            "                return super().forward(*args, **kwargs)\n\n    class Conv1d",
            "                return self.forward_comfy_cast_weights(*args, **kwargs)\n            else:\n"
            "                return disable_weight_init.Linear.forward_comfy_cast_weights(self, *args, **kwargs)\n\n"
            "    class Conv1d",
        ),
        (
            "            def forward(self, input, *args, **kwargs):\n",
            "            def forward(self, input, *args, **kwargs):\n"
            '                if kwargs.pop("input_act", None):\n'
            '                    input = torch.nn.functional.gelu(input, approximate="tanh")\n',
        ),
    ],
    "nodes.py": [('        "nodes_model_patch.py",\n', '        "nodes_model_patch.py",\n        "nodes_sparse_attention.py",\n')],
}  # fmt: skip


def make_comfyui(source: Path, folder: Path) -> Path:
    """Write the copy into a folder, and return its root."""
    root = folder / "ComfyUI"
    skipped = {".git", "tests", "tests-unit", "models", "input", "output", "temp", "user", "custom_nodes"}
    shutil.copytree(source, root, ignore=lambda inside, names: skipped if Path(inside) == source else {"__pycache__"})
    (root / "custom_nodes").mkdir()
    for file, edits in EDITS.items():
        path = root / file
        text = path.read_text()
        for old, new in edits:
            if old not in text:
                raise ValueError(f"{file} of {source} has no {old!r}")
            text = text.replace(old, new) if old else text + new
        path.write_text(text)
    shutil.copy(OVERLAY / "layers.py", root / "comfy/ldm/modules/layer_attention.py")
    shutil.copy(OVERLAY / "nodes_sparse_attention.py", root / "comfy_extras")
    return root
