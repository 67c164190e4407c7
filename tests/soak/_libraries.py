"""The names that each worker offers, and `Pushes` to the worker's own server."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

from torch_ucx_rpc import reduction, services

# The elements of a push to each host.
_ELEMENTS = 20_000
_LIFE = "life "


# ---- Names -----------------------------------------------------------------------------------------------------------


def offer(life: str) -> None:
    """Offer a service, of which every worker is a replica, and the name of this life."""
    services.register("negative", torch.neg, idempotent=True)
    services.pair(f"{_LIFE}{life}", life)


def lives_seen() -> list[str]:
    """Return the lives that offer their names, as this worker knows them."""
    return [service.name.removeprefix(_LIFE) for service in services.names() if service.name.startswith(_LIFE)]


# ---- Pushes ----------------------------------------------------------------------------------------------------------


class Pushes:
    """Pushes to a server with two hosts and one trainer, so each answer equals the push."""

    def __init__(self, name: str, hosts: Sequence[str]) -> None:
        self._name, self._hosts = name, hosts
        self.began = time.monotonic()

    def push(self, number: int) -> str:
        """Push once. Return the fault of the answer, or an empty text."""
        pushed = [torch.full((_ELEMENTS,), float(number + host)) for host, _ in enumerate(self._hosts)]
        pulled = reduction.push_pull(self._server, pushed)
        if all(torch.equal(*pair) for pair in zip(pushed, pulled, strict=True)):
            return ""
        return f"push {number} was answered with {[tensor[0].item() for tensor in pulled]}"

    def leave(self) -> None:
        self._server.leave()

    @functools.cached_property
    def _server(self) -> reduction.Server:
        return reduction.serve(*self._hosts, name=self._name, trainers=1)
