"""What the server tests show: the node classes, families and weights of every prompt that ran under context parallelism.

With CP_COVERAGE_REPORT=<file> in the environment, a line of JSON per prompt is appended to that file once its test has passed:

    {"test": …, "outcome": "ran" | "refused", "classes": […], "families": […], "weights": […]}

`make coverage` reads it. ComfyServer notes prompts, the hook in conftest.py writes them.
"""

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FAMILIES = {
    r"wan_vace": "Wan VACE",
    r"wan_camera": "Wan Camera",
    r"wan_s2v": "Wan S2V",
    r"wan_animate2": "Wan-Animate 2",
    r"wan_animate": "Wan Animate",
    r"wan_dancer": "Wan Dancer",
    r"wan_ar|causal_wan": "Wan AR",
    r"wan": "Wan",
    r"humo": "Wan HuMo",
    r"scail[_ ]2": "Wan SCAIL 2",
    r"scail": "Wan SCAIL",
    r"flux[_ ]2|klein": "Flux 2",
    r"ovis": "Ovis-Image",
    r"longcat": "LongCat-Image",
    r"chroma[_ ]radiance": "Chroma Radiance",
    r"qwen": "Qwen-Image",
    r"z-image-pixel": "Z-Image pixel",
    r"z-image": "Z-Image",
    r"mage-flow": "MageFlow",
    r"minimax_music": "MiniMax Music 3",
    r"minimax": "MiniMax-H3",
    r"cosmos predict2": "Cosmos-Predict2",
    r"hidream o1": "HiDream-O1",
    r"hidream": "HiDream-I1",
    r"ltx2\.5": "LTX-2.5",
    r"ltx2": "LTX-2",
    r"hunyuan[_ ]?video[_ ]?1": "HunyuanVideo 1.5",
    r"hunyuan[_ ]?video": "HunyuanVideo",
    r"hunyuan[_ ]?image": "HunyuanImage 2.1",
    r"hunyuan3d[_ ]?2[_ .]?1": "Hunyuan3D 2.1",
    r"hunyuan3d": "Hunyuan3D 2",
    r"ace[_ -]?step[_ ]?1[_ .]?5": "ACE-Step 1.5",
    r"ace[_ -]?step": "ACE-Step",
    r"stable[_ -]?audio": "Stable Audio",
    r"sdxl[_ -]refiner": "SDXL refiner",
    r"sd3": "SD3",
    r"unet": "SD1.5",
    r"aura": "AuraFlow",
    r"ernie": "ERNIE-Image",
    r"seed[_ -]?vr": "SeedVR2",
}
"""Family by how the name of a test checkpoint begins, where it is not the name's first word. Case, spaces and punctuation do not
count when the report is compared with the templates."""

FILE_INPUTS = ("unet_name", "ckpt_name", "model_name")
APPLY = ("ApplyContextParallel", "CPSampler")

Prompt = Mapping[str, Mapping[str, Any]]
_noted: list[dict[str, Any]] = []


def family_of(checkpoint: str) -> str | None:
    """Family of a test checkpoint, by its name without folder and suffix."""
    name = checkpoint.removeprefix("family-").lower()
    family = next((family for beginning, family in FAMILIES.items() if re.match(beginning, name)), None)
    word = re.match(r"[a-z0-9]+", name)
    return family or (word[0] if word else None)


def note(prompt: Prompt, outcome: str, models: Path) -> None:
    """Remember a prompt that ran, or was refused, until its test has passed.

    Args:
        models: the models folder of the server.
    """
    used = _applied(prompt)
    if not used or "CP_COVERAGE_REPORT" not in os.environ:
        return
    files = [(str(value), inputs) for _, inputs in used for name, value in inputs.items() if name in FILE_INPUTS]
    _noted.append(
        {
            "outcome": outcome,
            "classes": sorted({class_type for class_type, _ in used}),
            "families": sorted({family for file, _ in files if (family := family_of(Path(file).stem))}),
            "weights": sorted({_weights(models, file, str(inputs.get("weight_dtype", "default"))) for file, inputs in files}),
        }
    )


def settle(test: str, *, passed: bool) -> None:
    """Write what the test has shown, if it passed, and forget it."""
    if passed and _noted:
        with Path(os.environ["CP_COVERAGE_REPORT"]).open("a", encoding="utf-8") as report:
            report.writelines(json.dumps({"test": test, **entry}) + "\n" for entry in _noted)
    _noted.clear()


def _applied(prompt: Prompt) -> list[tuple[str, Mapping[str, Any]]]:
    """Class and inputs of the nodes that work together with several ranks; none where one device may have done it all.

    Those are the nodes that an output depends on which depends on Apply Context Parallel.
    """
    configs = [node["inputs"] for node in prompt.values() if node["class_type"] == "CPConfig"]
    if not configs or any(inputs.get("world_size", 0) < 2 or inputs.get("on_unsupported") != "error" for inputs in configs):
        return []
    fed = {source for node in prompt.values() for source in _sources(prompt, node)}
    used: set[str] = set()
    for output in prompt.keys() - fed:
        upstream = _upstream(prompt, output)
        if any(prompt[node]["class_type"] in APPLY for node in upstream):
            used |= upstream
    return [(prompt[node]["class_type"], prompt[node]["inputs"]) for node in sorted(used)]


def _upstream(prompt: Prompt, node: str) -> set[str]:
    found, queue = {node}, [node]
    for current in queue:
        new = [source for source in _sources(prompt, prompt[current]) if source not in found]
        found.update(new)
        queue += new
    return found


def _sources(prompt: Prompt, node: Mapping[str, Any]) -> Iterator[str]:
    links = (value for value in node["inputs"].values() if isinstance(value, list) and len(value) == 2)
    return (link[0] for link in links if link[0] in prompt)


def _weights(models: Path, file: str, weight_dtype: str) -> str:
    """Kind of weights, in the words of the coverage report."""
    if weight_dtype.startswith("fp8"):
        return "fp8"
    path = next(models.glob(f"*/{file}"), None)
    if path is None:  # removed by the test
        return "unnamed"
    with path.open("rb") as stream:
        header = json.loads(stream.read(*struct.unpack("<Q", stream.read(8))))
    types = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    if "I8" in types:
        return "int8 convrot"
    if "F8_E4M3" in types:
        return "fp8 scaled" if any(name.endswith(("weight_scale", "scale_weight")) for name in header) else "fp8"
    return next(iter(sorted(types)), "unnamed")
