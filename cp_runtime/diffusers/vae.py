"""VAEs of diffusers on ranks that share the rows of a picture: see `engine.rows`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import not_compiled, uncompiled
from ..engine.ranks.mesh import SequenceMesh
from ..engine.rows.plan import RowPlan, run_on_rows
from ..errors import PlanError
from .calls import Turn
from .checksums import Checksums

_MODULE = "diffusers.models.autoencoders."


VAES: Mapping[str, Callable[[Any], int]] = {
    _MODULE + "autoencoder_kl.AutoencoderKL": lambda vae: 2 ** (len(vae.config.block_out_channels) - 1),
    _MODULE + "autoencoder_kl_wan.AutoencoderKLWan": lambda vae: 2 ** (len(vae.config.dim_mult) - 1),
}
"""Classes of VAEs with an `encoder` and a `decoder` that run on rows -> rows of a picture for each of the latent, given the VAE."""


def is_vae(module: nn.Module) -> bool:
    return _class_name(module) in VAES


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


class SplitVAE:
    """A VAE whose encoder and decoder run on all ranks until `remove`. Their forwards keep this object alive."""

    def __init__(self, module: nn.Module, mesh: SequenceMesh, *, check_inputs: bool) -> None:
        self._undo: list[Callable[[], object]] = []
        checksums = Checksums(module, mesh.whole, always=check_inputs)
        self._undo.append(checksums.stop)
        plan = RowPlan(family=type(module).__name__, model_class=_class_name(module))
        for name, ratio in (("encoder", VAES[plan.model_class](module)), ("decoder", 1)):
            part = uncompiled(getattr(module, name))
            if "forward" in vars(part):
                raise PlanError(f"the forward of the {name} was replaced. Apply context parallelism before whatever replaces it.")
            part.forward = MethodType(self._shared(plan, mesh, checksums, ratio, type(part).forward), part)
            self._undo.append(partial(delattr, part, "forward"))

    def on_remove(self, undo: Callable[[], object]) -> None:
        self._undo.append(undo)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _shared(
        self, plan: RowPlan, mesh: SequenceMesh, checksums: Checksums, ratio: int, stock: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        @not_compiled  # rows are exchanged inside of convolutions
        @wraps(stock)
        def forward(part: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not self._undo:
                raise PlanError("context parallelism was removed from the VAE that this is a part, or a copy, of")
            if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in part.parameters()):
                raise PlanError("this VAE would record gradients. Call it under torch.inference_mode() or torch.no_grad().")
            posted = checksums.begin(stock, (part, x), {})  # only `x`: a video VAE's cache of earlier frames differs between ranks
            with Turn(part):
                out = run_on_rows(part, plan, lambda rows: stock(part, rows, *args, **kwargs), x, mesh=mesh, ratio=ratio)
            checksums.end(posted, stock, (part, x), {})
            if out is None:
                raise PlanError(f"rank {mesh.rank} returned no rows; this is a bug, please report it")
            return out

        return forward
