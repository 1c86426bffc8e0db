"""The models on a worker rank: loaded from the recipe of the UI's model, patched with its weight patches.

Imported in worker processes only; the import brings up ComfyUI.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import comfy.options

comfy.options.enable_args_parsing()
import torch  # noqa: E402
from comfy import cli_args  # noqa: E402  (parses the UI process's arguments)
from torch import Tensor, nn  # noqa: E402

from ...engine.cost import DegreePlanner  # noqa: E402
from ...engine.hooks import AppliedPlan  # noqa: E402
from ...engine.mesh import BatchMesh  # noqa: E402
from ...errors import MirrorError  # noqa: E402
from ...families import plan_for  # noqa: E402
from ...families.family import FamilyPlan  # noqa: E402
from ...nested import tensors  # noqa: E402
from ...pool.protocol import read_tensor, unflatten  # noqa: E402
from ..wire.loading import LoadedModel, load_recipe  # noqa: E402
from ..wire.recipe import Recipe  # noqa: E402
from ..wire.weight_patches import decode_weight_patches, weight_patches_digest  # noqa: E402
from ..wire.weight_samples import sample_weights  # noqa: E402
from .batch import share_out, take_items  # noqa: E402
from .node_patches import ATTACHED, attach_network  # noqa: E402
from .quantised import shared_scales  # noqa: E402
from .sharded import run_sharded  # noqa: E402

log = logging.getLogger("context_parallel.worker")


METHODS = ("forward", "_forward")


@dataclass
class Mirror:
    """One model on this rank. `samples`: of its weights as they were loaded, without patches."""

    patcher: Any
    samples: dict[str, str]
    applied: AppliedPlan[FamilyPlan] | None = None

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.patcher.model.diffusion_model
        return model


class Mirrors:
    """All models on this rank, by the key of their recipe."""

    def __init__(self, device: torch.device, folders: list[str]) -> None:
        if device.type == "cpu":
            cli_args.args.cpu = True
        import comfy.sd  # noqa: F401  (slow: now, and not at the first load)
        from comfy import model_management  # picks the device when imported

        self.management = model_management
        self.device = device
        self.folders = [Path(folder) for folder in folders]
        self.entries: dict[str, Mirror] = {}

    def load(self, header: dict[str, Any], block: Tensor) -> dict[str, Any]:
        """Make the model of `header` resident: load it if it is new, take its weight patches. The next call puts both to work."""
        began = time.perf_counter()
        key = header["key"]
        for gone in header["forget"]:
            self._drop(gone)
        entry = self.entries.get(key)
        if entry is None:
            patcher, missing = self._load_file(Recipe(**header["recipe"]))
            # What the file does not have is not initialised, and differs from process to process.
            entry = Mirror(patcher, sample_weights(patcher.model.diffusion_model, without=missing))
        self._patch(entry.patcher, header, block)
        self.entries[key] = entry
        model = entry.patcher.model
        return {
            "digest": weight_patches_digest(header["patches"], block),
            "patches_uuid": str(entry.patcher.patches_uuid),
            "dtype": str(model.get_dtype()),
            "cast_dtype": str(model.manual_cast_dtype),
            "samples": entry.samples,
            "bytes": entry.patcher.model_size(),
            "seconds": time.perf_counter() - began,
        }

    def call(
        self,
        header: dict[str, Any],
        arguments: dict[str, Any],
        mesh: BatchMesh,
        planner_for: Callable[[int], DegreePlanner],
        on_module: Callable[[], None],
    ) -> tuple[Any, dict[str, Any]]:
        """Run the model's own forward with `arguments` (by name) on all ranks.

        Args:
            planner_for: number of ranks that share a sequence -> who decides how.

        Returns:
            the output, and what the call did, for the report.
        """
        entry = self.entries.get(header["key"])
        if entry is None:
            raise MirrorError("the model of this call is not loaded on the workers")
        if header["method"] not in METHODS:
            raise MirrorError(f"a call of {header['method']!r}, which is no forward")
        if entry.applied is None:
            entry.applied = AppliedPlan(entry.model, plan_for(entry.model), mesh.sequence())
        plan = entry.applied.plan
        degree = header["batch_degree"] if plan.batch_is_shared(arguments) else 1
        shares = share_out(arguments, header["leading"], mesh.size, degree, plan.shares_sequence)
        sequence = mesh.sequence(shares.groups)
        planner = planner_for(sequence.size)
        part = take_items(shares, arguments, mesh.whole.rank // sequence.size)
        shape = next(tensor.shape for name in header["leading"] for tensor in tensors(part[name]))
        self._to_device(entry, entry.patcher.memory_required(list(shape)) / sequence.size)
        entry.applied.mesh, entry.applied.config_for = sequence, planner
        with torch.inference_mode(), shared_scales(mesh.whole):
            out, state = run_sharded(entry.applied, getattr(entry.model, header["method"]), part, on_module)
            out = shares.gather(out, mesh)
        ring, ulysses = planner.chosen or (1, 1)
        return out, {
            "degrees": {"ulysses": ulysses, "ring": ring, "batch": shares.groups},
            "tokens": {name: state.layout((name,)).local_lengths[state.rank] for name in state.lengths},
            "predicted": {"seconds": planner.seconds, "bytes": planner.bytes_sent},
        }

    def attach_network(self, header: dict[str, Any], block: Tensor) -> None:
        """Take a network that patches of other nodes refer to. The next call puts it on the device."""
        tree = unflatten(header["network"], lambda leaf: read_tensor(block, leaf).clone())
        attach_network(header["key"], tree, self.device)

    def detach_networks(self, keys: list[str]) -> None:
        """Drop networks of patches that are gone."""
        for key in keys:
            self._drop_network(key)

    def unload(self, key: str) -> None:
        """Drop a model and all networks of patches: host and device memory is given back, the file stays in the page cache."""
        self._drop(key)
        for network in list(ATTACHED):
            self._drop_network(network)
        gc.collect()
        self.management.soft_empty_cache()

    def _drop(self, key: str) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.management.unload_model_and_clones(entry.patcher)

    def _drop_network(self, key: str) -> None:
        patcher = ATTACHED.pop(key, None)
        if patcher is not None:
            self.management.unload_model_and_clones(patcher)

    def _load_file(self, recipe: Recipe) -> LoadedModel:
        # Links inside the model folders may lead anywhere: the user made them.
        path = Path(os.path.abspath(recipe.path))
        inside = any(path.is_relative_to(f) or path.resolve().is_relative_to(f.resolve()) for f in self.folders)
        if self.folders and not inside:
            raise MirrorError(
                f"{path} is outside of ComfyUI's model folders. Move the file into one, or add its folder to ComfyUI's."
            )
        log.info("loading %s", path.name)
        return load_recipe(replace(recipe, path=str(path)))  # what was checked: behind a link, `..` leads elsewhere

    def _patch(self, patcher: Any, header: dict[str, Any], block: Tensor) -> None:
        patches = decode_weight_patches(unflatten(header["patches"], lambda leaf: read_tensor(block, leaf).clone()))
        unknown = patches.keys() - patcher.model.state_dict().keys()
        if unknown:
            raise MirrorError(f"{len(unknown)} patched weights do not exist on the workers, the first is {min(unknown)}")
        patcher.patches, patcher.patches_uuid = patches, header["patches_uuid"]

    def _to_device(self, entry: Mirror, activations: float) -> None:
        """Load weights and patches, leaving `activations` bytes of device memory for the call."""
        current = entry.patcher.model.current_weight_patches_uuid
        wanted = [entry.patcher, *ATTACHED.values()]
        loaded = {id(loaded.model) for loaded in self.management.current_loaded_models}
        if current != entry.patcher.patches_uuid or any(id(patcher) not in loaded for patcher in wanted):
            self.management.load_models_gpu(wanted, memory_required=activations)
