"""Process groups of the ranks, and the few collectives that sharded attention is built from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class CommStats:
    """What one rank sent, in how many collectives, and how long they took: on the device's clock where it has one."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.collectives, self.bytes_sent = 0, 0
        self._host_seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @property
    def seconds(self) -> float:
        """Time spent in collectives. Waits for the last of them."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._host_seconds + sum(float(start.elapsed_time(end)) for start, end in self._events) / 1e3

    def start(self, device: torch.device, on_host: bool) -> Any:
        """Begin to time one collective."""
        if on_host or device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(device).Event(enable_timing=True)
        event.record()
        return event

    def stop(self, started: Any, device: torch.device, sent: int) -> None:
        """End what `start` began, having sent `sent` bytes."""
        self.collectives += 1
        self.bytes_sent += sent
        if isinstance(started, float):
            self._host_seconds += time.perf_counter() - started
        else:
            event = torch.get_device_module(device).Event(enable_timing=True)
            event.record()
            self._events.append((started, event))


class SequenceGroup:
    """The ranks that share one sequence.

    Collectives take sizes that every rank derives on its own: none of them carries a size.

    Args:
        group: process group, or None for a single process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.stats = CommStats()
        # gloo moves host memory only: accelerator tensors are staged through the host.
        self._via_host = group is not None and dist.get_backend(group) == "gloo"

    def all_to_all(self, send: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        """Send `send_sizes[r]` elements of the flat tensor to each rank r; return what all ranks sent here, flat."""
        device = send.device
        started = self.stats.start(device, self._via_host)
        source = send.cpu() if self._via_host else send
        received = source.new_empty(sum(recv_sizes))
        dist.all_to_all_single(received, source, list(recv_sizes), list(send_sizes), group=self.group)
        received = received.to(device)
        self.stats.stop(started, device, (send.numel() - send_sizes[self.rank]) * send.element_size())
        return received

    def all_gather(self, local: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        """Concatenate the shards of all ranks along `dim`; `lengths[r]` is rank r's size there."""
        device, longest = local.device, max(lengths)
        started = self.stats.start(device, self._via_host)
        # Equal sizes are the one form that every backend can gather, so short shards are padded and trimmed again.
        moved = (local.cpu() if self._via_host else local).movedim(dim, 0)
        padded = moved.new_zeros((longest, *moved.shape[1:]))
        padded[: moved.shape[0]] = moved
        gathered = padded.new_empty((self.size * longest, *padded.shape[1:]))
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        parts = [gathered[r * longest : r * longest + length] for r, length in enumerate(lengths)]
        out = torch.cat(parts).movedim(0, dim).to(device)
        self.stats.stop(started, device, padded.numel() * padded.element_size() * (self.size - 1))
        return out
