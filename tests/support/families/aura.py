"""AuraFlow."""

from typing import Any

from . import Case, Model, Served, denoise, normal

AURA = dict(cond_seq_dim=48, max_seq=16 * 16, n_double_layers=2, n_layers=4, dim=128, n_heads=2, global_conddim=128)
MODELS = {
    "aura": Model("comfy.ldm.aura.mmdit.MMDiT", AURA, "AuraFlow"),
    "aura 3 heads": Model("comfy.ldm.aura.mmdit.MMDiT", dict(AURA, dim=96, n_heads=3), "AuraFlow"),
}


def aura(batch: int = 1, height: int = 12, width: int = 12, text: int = 7, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (4, height, width), text) | extra


CASES = [
    Case("aura", "aura", aura),
    Case("aura batch 2 odd size", "aura", lambda: aura(batch=2, height=13, width=9, text=5)),
    Case("aura 3 heads", "aura 3 heads", aura),
    Case("aura 3 heads batch 2", "aura 3 heads", lambda: aura(batch=2, text=1)),
    # ComfyUI's wrappers pass residuals along to every layer, none of which uses them.
    Case("aura unused control", "aura", lambda: aura(control={"input": [], "middle": [], "output": [normal(1, 36, 128)]})),
]
SERVED = [Served("aura", "aura", (4, 12, 10), 7, 48)]
