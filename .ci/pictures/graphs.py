"""Take the pictures of graphs that help pages and the README show.

make pictures
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, ViewportSize, sync_playwright

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "tests"))

from browser.canvas import box_of, show_node
from browser.conftest import ARGUMENTS, SETTINGS, STILL, put_models, save
from support.chromium import CHROMIUM
from support.graphs import flux_prompt
from support.server import CUSTOM_NODES, GGUF_NODES, ComfyServer

WINDOW: ViewportSize = {"width": 2400, "height": 1300}
STEP = 330  # pixels from one node of a picture to the next
PLACED = """([kinds, step]) => kinds.forEach((column, x) => column.reduce((y, kind) => {
    const node = app.graph.nodes.find(node => node.type === kind);
    node.pos = [x * step, y];
    node.setSize([step - 60, node.computeSize()[1]]);
    return y + node.size[1] + 60;
}, 0))"""
KEPT = "kinds => { for (const node of [...app.graph.nodes]) if (!kinds.includes(node.type)) app.graph.remove(node); }"
SAMPLED = flux_prompt(cp={}) | {
    "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "ae.safetensors"}},
    "decoded": {"class_type": "CPVAEDecode", "inputs": {"samples": ["sampler", 0], "vae": ["vae", 0]}},
    "shown": {"class_type": "PreviewImage", "inputs": {"images": ["decoded", 0]}},
    "photo": {"class_type": "LoadImage", "inputs": {"image": "example.png"}},
    "encoded": {"class_type": "CPVAEEncode", "inputs": {"pixels": ["photo", 0], "vae": ["vae", 0]}},
    "upscaler": {"class_type": "UpscaleModelLoader", "inputs": {"model_name": "RealESRGAN_x4plus.safetensors"}},
    "upscaled": {"class_type": "CPUpscaleImage", "inputs": {"upscale_model": ["upscaler", 0], "image": ["photo", 0]}},
    "enlarged": {"class_type": "SaveImage", "inputs": {"images": ["upscaled", 0], "filename_prefix": "upscaled"}},
}
PICTURES = {
    "config": [["UNETLoader", "CPConfig"], ["ApplyContextParallel"], ["KSampler"]],
    "decode": [["KSampler", "VAELoader"], ["CPVAEDecode"], ["PreviewImage"]],
    "encode": [["VAELoader", "LoadImage"], ["CPVAEEncode"], ["KSampler"]],
    "upscale": [["UpscaleModelLoader", "LoadImage"], ["CPUpscaleImage"], ["SaveImage"]],
}
"""Of help pages: columns of nodes."""


def take(page: Page, name: str, shown: str, kinds: Sequence[str], margin: int) -> None:
    """Save the part of the canvas that nodes of these types cover, with one of them in the middle."""
    show_node(page, shown)
    page.wait_for_timeout(1500)  # images come
    clip: Any = box_of(page, kinds, margin)
    save(page.screenshot(clip=clip), f"web/docs/images/{name}.jpg", 1000)


def take_all(page: Page) -> None:
    page.evaluate("app.extensionManager.toggleFocusMode()")
    graph = json.loads((CHECKOUT / "workflows" / "Flux on all GPUs.json").read_text())
    page.evaluate("graph => app.loadGraphData(graph)", graph)
    page.wait_for_timeout(500)
    take(page, "graph", "ApplyContextParallel", ["UNETLoader", "ApplyContextParallel", "KSampler"], 30)
    for name, columns in PICTURES.items():
        prompt = {key: {**node, "inputs": dict(node["inputs"])} for key, node in SAMPLED.items()}
        if name == "encode":
            prompt["sampler"]["inputs"]["latent_image"] = ["encoded", 0]
        kinds = [kind for column in columns for kind in column]
        page.evaluate("prompt => app.loadApiJson(prompt, 'help')", prompt)
        page.evaluate(KEPT, kinds)
        page.evaluate(PLACED, [columns, STEP])
        take(page, name, columns[1][0], kinds, 20)


def main() -> None:
    comfyui = Path(os.environ["COMFYUI_PATH"])
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        put_models(models)
        (models / "diffusion_models" / "flux.safetensors").touch()
        with ComfyServer(comfyui, models=models, custom_nodes=CUSTOM_NODES | GGUF_NODES) as server, sync_playwright() as playwright:
            shutil.copy(comfyui / "input" / "example.png", server.base / "input")
            (server.base / "user" / "default").mkdir(exist_ok=True)
            (server.base / "user" / "default" / "comfy.settings.json").write_text(json.dumps(SETTINGS))
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            page = browser.new_page(viewport=WINDOW)
            page.add_init_script(STILL)
            page.goto(f"http://127.0.0.1:{server.port}/")
            page.wait_for_function("window.app?.extensionManager && window.app.canvas && window.app.graph", timeout=60_000)
            page.locator(".context-parallel-tab-button").wait_for()
            take_all(page)
            browser.close()


if __name__ == "__main__":
    main()
