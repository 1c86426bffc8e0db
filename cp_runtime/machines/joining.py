"""`join.py <code>`: this computer works for the ComfyUI of another one, once that is there and takes it."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ContextParallelError
from . import elastic
from .facts import devices_of, facts_of
from .wire import Code, Refused, Wire

NO_MODELS = ("custom_nodes", "datasets", "configs")


def run(asked: dict[str, Any]) -> None:
    """Try until ComfyUI takes this computer, and be its agent. Exits with 1, and says what to do, where trying would not help.
    `asked`: `argv` of `join.py`; `typed`, the code where it is none of the arguments."""
    parser = argparse.ArgumentParser(prog="join.py", description=__doc__)
    parser.add_argument(
        "code", help="what ComfyUI shows on the other computer; - reads it, and nobody sees it in a list of processes"
    )
    parser.add_argument(
        "--name", default=re.sub("[^a-z0-9-]", "-", socket.gethostname().lower())[:30], help="of this computer there"
    )
    given, options = parser.parse_known_args(asked["argv"][1:])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        invitation = Code.parse(asked["typed"] if given.code == "-" else given.code)
        comfyui = _comfyui_folder(asked["argv"][0])
    except ContextParallelError as error:
        sys.exit(str(error))
    kind = "cpu" if "--cpu" in options or not torch.accelerator.is_available() else _kind()
    folders = _model_folders(comfyui, options)
    nodes = folders.pop("custom_nodes", [])
    models = sorted({folder for name, kept in folders.items() if name not in NO_MODELS for folder in kept})
    spec: dict[str, Any] = {
        "host": False,
        "code": vars(invitation),
        "name": given.name,
        "device_type": kind,
        "devices": devices_of(kind),
        "folders": folders,
        "site": {
            "arguments": {"model_folders": models, "node_folders": nodes},
            "path": [comfyui],
        },
    }
    facts, said = facts_of(comfyui, kind), ""
    _say(f"{given.name}: {', '.join(spec['devices'])}, torch {facts['torch']}, ComfyUI {facts['comfyui']}. Ctrl-C ends it.")
    while True:
        try:
            news = _try(invitation, spec, facts)
        except Refused as error:
            sys.exit(str(error))
        except TimeoutError:
            news = f"{invitation.address}:{invitation.port} does not answer: let the firewall there pass this port. Trying again."
        except OSError as error:
            news = f"ComfyUI is not there ({error.strerror or error}). Trying again."
        if news != said:
            _say(news)
        said = news
        time.sleep(1)


def _try(invitation: Code, spec: dict[str, Any], facts: dict[str, Any]) -> str:
    """Be the agent of this computer, and end with that. Return why where that has to wait. Raises OSError: ComfyUI is not there;
    Refused: it will not have us."""
    wire = Wire.connect(invitation)
    try:
        wire.send({"hello": spec["name"], "facts": facts, "devices": spec["devices"]})
        answer: dict[str, Any] = {"wait": True}
        while "wait" in answer:
            answer, _ = wire.receive()
    finally:
        wire.close()
    if "differ" not in answer:
        _say(f"joining the ComfyUI on {invitation.address}…")
        elastic.run(spec | {"address": wire.own, "store": answer["store"], "run_id": answer["run_id"]})
    if any(text.startswith("name: another computer") for text in answer["differ"]):
        return str(answer["differ"][0])  # this one, perhaps, as it was before: ComfyUI notices in a few seconds
    sys.exit("This computer cannot work for that ComfyUI yet:\n  " + "\n  ".join(answer["differ"]))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _kind() -> str:
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type


def _comfyui_folder(program: str) -> str:
    """Return ComfyUI's folder: the current one, or the one that this pack is installed in. Raises ContextParallelError."""
    for folder in (Path.cwd(), *Path(os.path.abspath(program)).parents):
        if (folder / "comfy").is_dir() and (folder / "folder_paths.py").is_file():
            return str(folder)
    raise ContextParallelError("no ComfyUI here: change to its folder, the one with main.py, and run this again")


def _model_folders(comfyui: str, options: Sequence[str]) -> dict[str, list[str]]:
    """Return ComfyUI's model folders by kind, as `main.py` with these options would have them."""
    sys.path.insert(0, comfyui)
    program, sys.argv = sys.argv, ["main.py", *options]
    try:
        options_module = importlib.import_module("comfy.options")
        options_module.enable_args_parsing()
        args = importlib.import_module("comfy.cli_args").args
        paths = importlib.import_module("folder_paths")
        load = importlib.import_module("utils.extra_config").load_extra_path_config
        files = [
            os.path.join(comfyui, "extra_model_paths.yaml"),
            *(file for given in args.extra_model_paths_config or [] for file in given),
        ]
        for file in filter(os.path.isfile, files):
            load(file)
        return {kind: [os.path.abspath(f) for f in folders] for kind, (folders, _) in paths.folder_names_and_paths.items()}
    finally:
        sys.argv = program
        sys.path.remove(comfyui)
