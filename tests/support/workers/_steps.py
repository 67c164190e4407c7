"""Processes that wait for one another by files: `Steps`."""

from __future__ import annotations

from pathlib import Path

from ._eventually import eventually


class Steps:
    """Orders the steps of a test's processes, without RPC."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def done(self, step: str) -> None:
        (self.directory / step).touch()

    def is_done(self, step: str) -> bool:
        return (self.directory / step).exists()

    def wait_for(self, *steps: str, timeout: float = 40.0) -> None:
        eventually(lambda: all(map(self.is_done, steps)), f"waiting for {steps}", timeout)

    def meet(self, step: str, rank: int, of: int) -> None:
        """Note that this rank has done ``step``, and return when all ``of`` ranks have."""
        self.done(f"{step} {rank}")
        self.wait_for(*(f"{step} {peer}" for peer in range(of)), timeout=120)
