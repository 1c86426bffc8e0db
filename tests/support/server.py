"""A real ComfyUI server in a process of its own, and a client for it.

    with ComfyServer(comfyui_path, models=checkpoints_dir) as server:
        result = server.run(flux_prompt())
        latent = server.latent(result)

The server has a base directory of its own (models, output, input, user, custom_nodes), so nothing is written into the
ComfyUI checkout, and loads two custom node packs only: this checkout, by a link whose name holds hyphens as a user's
clone does, and the test nodes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import safetensors.torch
from torch import Tensor

from . import exercised, preloaded, processes, shared_models
from .faults import SLACK
from .server_events import Event, Listener, NodeError, PromptRejected, Result, ServerError, result_of

CHECKOUT = Path(__file__).resolve().parents[2]
PACK = "comfyui-context-parallel"
CUSTOM_NODES = {PACK: CHECKOUT, "context-parallel-test-nodes": Path(__file__).parent / "comfy_nodes"}
GGUF_NODES = {"ComfyUI-GGUF": Path(__file__).parent / "gguf_pack"}
"""A pack of the tests' own under the name of one that loads GGUF files."""
WAN_NODES = {"comfyui-kjnodes": Path(__file__).parent / "kj_pack"}
"""A pack of the tests' own under the name of one that replaces forwards inside of Wan."""

_RANDOM = random.SystemRandom()  # runs of pytest are copies of one process, with one seed
_WITHOUT_MODELS = {
    "latent": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
    "out": {"class_type": "SaveLatent", "inputs": {"samples": ["latent", 0], "filename_prefix": "nothing"}},
}

DETECTION = Path(__file__).parent / "detection"
"""Import path of server and workers, for the tiny models of `families`; its docstring says more."""

MARKER = "CONTEXT_PARALLEL_TEST_SERVER"
"""Environment variable that every process of one server inherits, by which leftovers are found."""

# Linux ends the server when the thread that started it ends, however that happened; elsewhere stop() has to do.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

_TELL_AGAIN = 1.0
"""Seconds after which the server is told again to free what it has."""
_LOOK_AGAIN = 0.25
"""Seconds after which the history is asked for a prompt whose end was not heard of, as of one from before a restart."""


class ComfyServer:
    """Starts, watches, talks to and ends one ComfyUI server.

    Args:
        comfyui_path: ComfyUI's root folder.
        models: folder in the layout of ComfyUI's `models`; linked, not copied.
        custom_nodes: link name to folder; by default this checkout and the test nodes.
        args: more command line arguments, e.g. `("--preview-method", "latent2rgb")`.
        env: environment variables to set; None removes one. Thread counts are the caller's unless set here.
        cpu: run with `--cpu`.
        forked: where `support.preloaded` forks the server, its ranks are forked, too.
        startup_timeout: seconds until the server must answer.

    Start it from a thread that lives as long as the server is needed.
    """

    def __init__(
        self,
        comfyui_path: Path,
        *,
        models: Path,
        custom_nodes: Mapping[str, Path] = CUSTOM_NODES,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        cpu: bool = True,
        forked: bool = True,
        startup_timeout: float = 120.0,
    ) -> None:
        self.comfyui_path, self.startup_timeout = Path(comfyui_path), startup_timeout
        self.args = ["--cpu", *args] if cpu else list(args)
        self.forked = forked
        self.env = dict(env or {})
        self.port = 0
        self.leftovers: list[str] = []
        """Command lines of the processes that outlived the server and had to be killed by the last stop()."""
        self._marker = uuid.uuid4().hex
        self._prompts: dict[str, Mapping[str, Any]] = {}
        self._sampled: dict[str, dict[str, Tensor]] = {}
        self._process: preloaded.Process | None = None
        self._listener: Listener | None = None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.base = Path(tempfile.mkdtemp(prefix="comfy-server-"))
        self.log_file = self.base / "server.log"
        for name in ("input", "output", "temp", "user", "custom_nodes"):
            (self.base / name).mkdir()
        (self.base / "models").symlink_to(Path(models).resolve(), target_is_directory=True)
        for name, folder in custom_nodes.items():
            (self.base / "custom_nodes" / name).symlink_to(Path(folder).resolve(), target_is_directory=True)

    # --- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> ComfyServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._running.pid

    @property
    def _running(self) -> preloaded.Process:
        if self._process is None:
            raise ServerError("the server is not running: call start(), or use it in a with statement")
        return self._process

    def start(self) -> None:
        """Start the server and wait until it answers. A stopped server starts again with the same base directory."""
        if self._process is not None:
            raise ServerError("the server is running already")
        for attempt in range(3):
            try:
                self._start()
                return
            except ServerError:
                self.stop()
                # Another process may have taken the free port first. These are ComfyUI's words.
                if attempt == 2 or f"Port {self.port} is already in use" not in self.log_text():
                    raise

    def _start(self) -> None:
        self.port = free_port()
        command = [str(self.comfyui_path / "main.py")]
        database = self.base / "user" / "comfyui.db"
        # To migrate a new one is a sixth of a start: the others begin with that of the run's first server.
        migrated = shared_models.beside("comfyui.db")
        if migrated is not None and migrated.exists() and not database.exists():
            shutil.copy(migrated, database)
        command += ["--base-directory", str(self.base), "--database-url", f"sqlite:///{database}"]
        command += ["--listen", "127.0.0.1", "--port", str(self.port), "--disable-auto-launch", "--disable-api-nodes"]
        # Neither the caller's import path nor its working directory may reach the server: both could hold this
        # checkout, whose `nodes` folder shadows ComfyUI's `nodes.py`.
        own = str(self.base / "cache")  # for times of calls; what was compiled is good for all
        changes = {"PYTHONPATH": str(DETECTION), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": own, **self.env, MARKER: self._marker}
        env = {name: value for name, value in os.environ.items() if name not in changes}
        env |= {name: value for name, value in changes.items() if value is not None}
        command += self.args
        with self.log_file.open("ab") as log, open(os.devnull, "rb") as nothing:
            files = (nothing.fileno(), log.fileno(), log.fileno())
            self._process = self._launch(command, env, files)
        deadline = time.monotonic() + self.startup_timeout
        while True:
            try:
                self._call("/system_stats", timeout=5.0)
                break
            except (OSError, urllib.error.URLError):
                self._check_running("while it started")
                if time.monotonic() > deadline:
                    raise ServerError(self._with_log(f"the server did not answer within {self.startup_timeout} s")) from None
                time.sleep(0.1)
        if migrated is not None and not migrated.exists() and database.exists():
            shutil.copy(database, part := migrated.with_suffix(f".{self._marker}"))
            part.rename(migrated)
        self._listener = Listener(self.port)

    def _launch(self, command: list[str], env: dict[str, str], files: tuple[int, int, int]) -> preloaded.Process:
        """Start the server's process: `command` is for Python, `files` are its standard files."""
        forked = preloaded.fork(command, cwd=self.base, env=env, files=files, ranks=self.forked)
        return forked or self.launched([sys.executable, "-c", _LAUNCHER, "-u", *command], env, files)

    def launched(self, command: list[str], env: dict[str, str], files: tuple[int, int, int]) -> preloaded.Process:
        """Start a program in the server's folder."""
        nothing, out, err = files
        return subprocess.Popen(command, cwd=self.base, env=env, stdin=nothing, stdout=out, stderr=err, start_new_session=True)

    def exit_code(self, timeout: float) -> int:
        """Wait for the server's own end, however it comes; negative for a signal."""
        return self._running.wait(timeout)

    def stop(self, sig: signal.Signals = signal.SIGTERM, *, timeout: float = 10.0, grace: float = 5.0) -> list[str]:
        """End the server: `sig`, then SIGKILL after `timeout` seconds, then SIGKILL for whatever it left behind.

        Args:
            grace: seconds that the server's children have to end by themselves once it is gone.

        Returns:
            `leftovers`: command lines of the children that had not ended by then.
        """
        process, self._process = self._process, None
        listener, self._listener = self._listener, None
        if process is None:
            return self.leftovers
        family = {child.pid: child for child in processes.descendants(process.pid)}
        if process.poll() is None:
            process.send_signal(sig)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if listener is not None:
            listener.close()
        # One that was forked before its program was known has the environment of another, but this folder.
        found = [*processes.with_environment(MARKER, self._marker), *processes.inside(self.base)]
        family |= {child.pid: child for child in found}
        left = processes.wait_gone(family.values(), grace)
        self.leftovers = [f"{child.pid}: {processes.command_line(child)}" for child in left]
        processes.kill_all(left)
        processes.wait_gone(left, 5.0)
        return self.leftovers

    def close(self) -> None:
        """stop(), and remove the base directory with the log and all outputs."""
        self.stop()
        shutil.rmtree(self.base, ignore_errors=True)

    def log_text(self) -> str:
        """Everything that the server and its children printed."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    # --- client -------------------------------------------------------------------------------------------------------

    @property
    def client_id(self) -> str:
        """Of this client, as a browser has one."""
        return self._require_listener().client_id

    def queue(self, prompt: Mapping[str, Any]) -> str:
        """Queue a prompt in API format and return its id. Raises PromptRejected when it is invalid."""
        try:
            prompt_id = self._call("/prompt", {"prompt": prompt, "client_id": self.client_id})["prompt_id"]
            self._prompts[prompt_id] = prompt
            return prompt_id
        except urllib.error.HTTPError as error:
            if error.code == 400:
                raise PromptRejected(json.load(error)) from None
            raise

    def wait(self, prompt_id: str, timeout: float = 60.0) -> Result:
        """Wait until a prompt has ended. Raises TimeoutError, with the end of the log, when it has not by then."""
        deadline = time.monotonic() + timeout
        listener = self._require_listener()
        while True:
            try:
                history = self._call(f"/history/{prompt_id}")
            except (OSError, urllib.error.URLError):
                self._check_running(f"while prompt {prompt_id} ran")
                raise
            if prompt_id in history:
                result = result_of(prompt_id, history[prompt_id])
                self._note(result)
                return result
            self._check_running(f"while prompt {prompt_id} ran")
            if time.monotonic() > deadline:
                raise TimeoutError(self._with_log(f"prompt {prompt_id} did not end within {timeout} s"))
            # Asking costs both sides; the history has it a moment after the event.
            if listener.wait_end(prompt_id, _LOOK_AGAIN):
                time.sleep(0.005)

    def run(self, prompt: Mapping[str, Any], timeout: float = 60.0) -> Result:
        """Queue a prompt and wait for its end, whatever that is. `.check()` of the result insists on success."""
        return self.wait(self.queue(prompt), timeout)

    def sample(self, prompt: Mapping[str, Any], timeout: float = 60.0, node_id: str | None = None) -> Tensor:
        """The latent of a prompt that must succeed; see `latent`."""
        return self.latent(self.run(prompt, timeout), node_id)

    def sample_once(self, prompt: Mapping[str, Any], timeout: float = 120.0) -> Tensor:
        """The same of a prompt that has one, from `latents_once`."""
        (latent,) = self.latents_once(prompt, timeout).values()
        return latent

    def latents_once(self, prompt: Mapping[str, Any], timeout: float = 120.0) -> dict[str, Tensor]:
        """Every latent of a prompt, sampled for the first who asks for it: what several tests compare with."""
        key = json.dumps(_without_nonce(prompt), sort_keys=True)
        if key not in self._sampled:
            self._sampled[key] = self.latents(self.run(prompt, timeout))
        return self._sampled[key]

    def fails(self, prompt: Mapping[str, Any], *words: str, timeout: float = 60.0) -> NodeError:
        """The error of a prompt that must fail, with these words in its message."""
        error = self.run(prompt, timeout).error
        assert error is not None, f"no error; expected one with {words}"
        for each in words:
            assert each in error.exception_message, error.exception_message
        return error

    def failed_at(self, prompt_id: str) -> tuple[float, str]:
        """When ComfyUI reported the error of a prompt, and its message."""
        event = self.wait_event(lambda e: e.type == "execution_error" and e.data["prompt_id"] == prompt_id, 60)
        return event.time, event.data["exception_message"]

    def end_in_the_middle(self, prompt_id: str, way: str) -> None:
        """End a prompt that takes many steps after its first: `way` is "Cancel", or "SIGKILL of a rank", rank 1."""
        self.wait_for_step(prompt_id)
        workers = self.workers()
        if way == "Cancel":
            self.interrupt(prompt_id)
            assert self.wait(prompt_id).status == "interrupted"
        else:
            os.kill(workers[1].pid, signal.SIGKILL)
            assert self.wait(prompt_id).status == "error"
            processes.wait_gone(workers, 10)

    def interrupt(self, prompt_id: str | None = None) -> None:
        """Cancel the prompt that runs, or only if it is `prompt_id`."""
        self._call("/interrupt", {"prompt_id": prompt_id} if prompt_id else {})

    def free(self, *, unload_models: bool = True, free_memory: bool = True) -> None:
        """Ask for models and caches to be dropped. Takes effect after the call, maybe after a prompt that is queued next."""
        self._call("/free", {"unload_models": unload_models, "free_memory": free_memory})

    def free_first(self) -> None:
        """Have models and caches dropped before any prompt that is queued from now on: by this, or as no prompt uses them."""
        self.free()
        self.run(_WITHOUT_MODELS).check()  # the server looks at what it was asked before or after a prompt, never in the next

    def free_workers(self, timeout: float = 20.0) -> None:
        """Have the workers drop their models, and wait for it: a prompt that is queued at once may come first.

        ComfyUI's thread of prompts sleeps over what it is told between its last look at that and its wait for the next prompt.
        In between it collects garbage, if it has not for ten seconds. So it is told again.
        """
        self.free()
        began = told = time.monotonic()
        while models := self.status()["models"]:
            now = time.monotonic()
            if now > began + timeout:
                raise ServerError(f"the workers hold {models} {timeout} s after they were to drop them")
            if now > told + _TELL_AGAIN:
                self.free()
                told = now
            time.sleep(0.05)

    def object_info(self, node: str | None = None) -> dict[str, Any]:
        """What the server says about all its nodes, or about one."""
        return self._call(f"/object_info/{urllib.parse.quote(node)}" if node else "/object_info")

    def status(self) -> dict[str, Any]:
        """What the pack says about its workers."""
        return self.get("/context_parallel/status")

    def wait_for_step(self, prompt_id: str, timeout: float = 60.0) -> None:
        """Wait until a few steps of a prompt are done."""
        self.wait_event(lambda e: e.type == "progress" and e.data["prompt_id"] == prompt_id and e.data["value"] >= 2, timeout)

    def fetch(self, path: str, timeout: float = 30.0, **request: Any) -> bytes:
        """Body of an answer. `request`: other arguments of `urllib.request.Request`."""
        with self._open(path, timeout, **request) as answer:
            return answer.read()

    def answer(self, path: str, method: str, **request: Any) -> tuple[int, Any]:
        """HTTP status of a request that may be refused, and the answer where it is JSON, else None."""
        try:
            with self._open(path, 120.0, method=method, **request) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error) if error.headers.get_content_type() == "application/json" else None

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """Any other JSON answer of the server."""
        return self._call(path, timeout=timeout)

    def post(self, path: str, body: Any = None, timeout: float = 30.0) -> Any:
        """The JSON answer to a request."""
        return self._call(path, {} if body is None else body, timeout=timeout)

    def wait_status(self, condition: Callable[[dict[str, Any]], bool], timeout: float = 10.0 * SLACK) -> dict[str, Any]:
        """The first status of the workers that meets `condition`."""
        deadline = time.monotonic() + timeout
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, status
            time.sleep(0.05)
        return status

    @property
    def events(self) -> list[Event]:
        """What came in on the websocket since the server started, oldest first."""
        return self._require_listener().snapshot()

    def steps(self, prompt_id: str) -> list[Event]:
        """The ends of a prompt's sampling steps so far, without the percentages of a model that is loaded before them."""
        found = [e for e in self.events if e.type == "progress" and e.data["prompt_id"] == prompt_id and e.data["value"] > 0]
        return [event for event in found if event.data["max"] == found[-1].data["max"]]

    def step_seconds(self, result: Result) -> list[float]:
        """Seconds of every sampling step but the first, which loads and warms up."""
        times = [event.time for event in self.steps(result.prompt_id)]
        return [after - before for before, after in itertools.pairwise(times)]

    def previews(self, since: float = 0.0) -> list[Event]:
        """Preview images that came in after `since` on the clock of time.monotonic()."""
        return [event for event in self.events if event.type == "preview" and event.time >= since]

    def wait_event(self, condition: Callable[[Event], bool], timeout: float = 30.0, *, since: float = 0.0) -> Event:
        """The first event that came in after `since` and meets `condition`, waited for if need be."""
        return self._require_listener().wait(condition, timeout, since)

    def latent(self, result: Result, node_id: str | None = None) -> Tensor:
        """The latent that the stock SaveLatent node `node_id` saved; by default that of the only such node."""
        saved = self.latents(result)
        if node_id is None:
            if len(saved) != 1:
                raise ServerError(f"node_id: got None; allowed: one of {sorted(saved)}, because there is not exactly one")
            (node_id,) = saved
        return saved[node_id]

    def latents(self, result: Result) -> dict[str, Tensor]:
        """Every latent of a prompt that stock SaveLatent nodes saved, by their ids."""
        saved = {node: output["latents"][0] for node, output in result.check().outputs.items() if "latents" in output}
        files = {node: self.base / "output" / entry["subfolder"] / entry["filename"] for node, entry in saved.items()}
        return {node: safetensors.torch.load_file(file)["latent_tensor"] for node, file in files.items()}

    # --- processes ----------------------------------------------------------------------------------------------------

    def workers(self) -> list[psutil.Process]:
        """The ranks that live."""
        return processes.ranks(self.pid)

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, in ascending order."""
        return sorted(worker.pid for worker in self.workers())

    # --- inside -------------------------------------------------------------------------------------------------------

    def _open(self, path: str, timeout: float, **request: Any) -> Any:
        return self._opener.open(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", **request), timeout=timeout)

    def _call(self, path: str, body: Any = None, timeout: float = 30.0) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        text = self.fetch(path, timeout, data=data, headers=headers)
        return json.loads(text) if text else None

    def _note(self, result: Result) -> None:
        """Tell the coverage report what this prompt has shown."""
        refused = result.error is not None and result.error.exception_type.endswith("UnsupportedError")
        if result.status == "success" or refused:
            exercised.note(self._prompts[result.prompt_id], "refused" if refused else "ran", self.base / "models")

    def _require_listener(self) -> Listener:
        if self._listener is None:
            raise ServerError("the server is not running: call start(), or use it in a with statement")
        return self._listener

    def _check_running(self, when: str) -> None:
        code = self._process.poll() if self._process is not None else None
        if self._process is None or code is not None:
            raise ServerError(self._with_log(f"the server ended {when}, with exit code {code}"))

    def _with_log(self, message: str) -> str:
        tail = "\n".join(self.log_text().splitlines()[-60:])
        return f"{message}. The end of its log:\n{tail}"


def _without_nonce(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """What a prompt samples: a nonce only keeps ComfyUI from taking a result out of its cache."""
    kept = {id: {name: value for name, value in node["inputs"].items() if name != "nonce"} for id, node in prompt.items()}
    return {id: [node["class_type"], kept[id]] for id, node in prompt.items()}


def free_port() -> int:
    """A port for a server. None of those that the kernel gives away: the next connection may get it before the server binds it."""
    while True:
        port = _RANDOM.randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
