"""`join.py <code>`: this computer works for the ComfyUI of another one, once that is there and takes it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import ContextParallelError, ProtocolError
from ..pool.config import WorkerSite
from .facts import check_system, devices_of, facts_of
from .meeting import being_met
from .relay import Place, Relay
from .wire import Code, Refused, Wire

_NO_MODELS = ("custom_nodes", "datasets", "configs")
_MOST = 1 << 40  # bytes of a packet from ComfyUI, such as patches of weights


def run(argv: Sequence[str]) -> NoReturn:
    """Work for a ComfyUI whenever it is there, until Ctrl-C. Exit with 1, and a remedy, where another try would
    not help. `argv`: of `join.py`."""
    parser = argparse.ArgumentParser(prog="join.py", description=__doc__)
    parser.add_argument(
        "code", help="what ComfyUI shows on the other computer; - reads it, and nobody sees it in a list of processes"
    )
    parser.add_argument(
        "--name", default=re.sub("[^a-z0-9-]", "-", socket.gethostname().lower())[:30], help="of this computer there"
    )
    given, options = parser.parse_known_args(argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s|%(message)s")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        invitation = Code.parse(sys.stdin.readline() if given.code == "-" else given.code)
        check_system()
        comfyui = _comfyui_folder(argv[0])
    except ContextParallelError as error:
        sys.exit(str(error))
    kind = "cpu" if "--cpu" in options or not torch.accelerator.is_available() else _kind()
    folders = _model_folders(comfyui, options)
    place = Place(given.name, kind, devices_of(kind), folders, WorkerSite(path=(comfyui,)))
    facts, said = facts_of(comfyui, kind), ""
    _say(f"{place.name}: {', '.join(place.devices)}, torch {facts['torch']}, ComfyUI {facts['comfyui']}. Ctrl-C ends it.")
    while True:
        try:
            news = _work(invitation, place, facts)
        except Refused as error:
            sys.exit(str(error))
        except TimeoutError:
            news = f"{invitation.address}:{invitation.port} does not answer: let the firewall there pass this port. Trying again."
        except (OSError, ProtocolError) as error:
            news = f"ComfyUI is not there ({getattr(error, 'strerror', None) or error}). Trying again."
        if news != said:
            _say(news)
        said = news
        time.sleep(1)


def _work(invitation: Code, place: Place, facts: dict[str, Any]) -> str:
    """Work for ComfyUI until the connection ends; return why it ended, or did not begin. Raises OSError: ComfyUI is not there;
    Refused: it will not have us."""
    with contextlib.closing(Wire.connect(invitation, most=_MOST)) as wire:
        wire.send({"hello": place.name, "facts": facts, "devices": place.devices})
        answer, _ = wire.receive()
        if differ := answer.get("differ"):
            if answer["again"]:
                return str(differ[0])
            sys.exit("This computer cannot work for that ComfyUI yet:\n  " + "\n  ".join(differ))
        _say(f"joining the ComfyUI on {invitation.address}…")
        with being_met(wire.own, invitation.token) as listener:
            wire.send({"listening": listener.port})
            while "met" not in answer:
                answer, _ = wire.receive()
        if answer["met"]:
            return f"{answer['met']} Trying again."
        _say(f"ready: works for the ComfyUI on {invitation.address}")
        return f"the work for ComfyUI is over, or was interrupted ({Relay(wire, place, invitation.token).serve()}). Trying again."


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
    """Return ComfyUI's model folders by kind, as `main.py` with these options would have them. No model is read from the others."""
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
        known = {kind: folders for kind, (folders, _) in paths.folder_names_and_paths.items() if kind not in _NO_MODELS}
        return {kind: [os.path.abspath(folder) for folder in folders] for kind, folders in known.items()}
    finally:
        sys.argv = program
        sys.path.remove(comfyui)
