"""The two workers of a trial, one on each machine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

from ._machines import Ended, Machines

# Emulated machines are slow, and the host may be busy.
_TRIAL_S = 600.0

# Such lines in the output are a fault, whatever the exit code.
_FAULT = re.compile(r"^.*(?:Assertion .* failed|Caught signal|Fatal|terminate called|UCX +WARN).*$", re.MULTILINE)


class Failed(Exception):
    """A trial has failed. The text says why."""


class Stuck(Failed):
    """The workers of a trial have not ended."""


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def expect_within(limit_s: float, seconds: float, what: str) -> None:
    expect(seconds < limit_s, f"{what} after {seconds:.1f} s, wanted within {limit_s:g} s")


def faults(output: str) -> list[str]:
    """Return the lines that no worker may write in any trial: lines of aborts, and UCX's warnings."""
    return _FAULT.findall(output)


class Workers:
    """Runs a program of the folder ``programs`` on each machine. Rank 0 is on the first machine.

    Args:
        machines: the machines, which must be up.
        program: the file's name.
        environment: variables of both workers.
    """

    def __init__(self, machines: Machines, program: str, **environment: str) -> None:
        self._machines = machines
        self._facts = [machines.shared / f"facts-{rank}" for rank in (0, 1)]
        for file in self._facts:
            file.unlink(missing_ok=True)
        # On the machines, the folder is /lab.
        self._jobs = [
            machine.begin_program(
                program, {**environment, "RANK": str(rank), "FACTS": f"/lab/{self._facts[rank].name}"}
            )
            for rank, machine in enumerate((machines.first, machines.second))
        ]

    def facts(self, rank: int) -> dict[str, Any]:
        """Return the facts of the worker so far. Later facts replace earlier ones."""
        file = self._facts[rank]
        lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
        return {name: value for line in lines for name, value in json.loads(line).items()}

    def await_ready(self) -> None:
        """Wait until rank 0 says that it is ready."""
        deadline = time.monotonic() + _TRIAL_S
        while "ready" not in self.facts(0):
            for machine in (self._machines.first, self._machines.second):
                machine.expect_on()
            if time.monotonic() > deadline:
                raise Stuck(f"not ready after {_TRIAL_S:.0f} s\n{self.output}")
            time.sleep(0.1)
        # Misfortunes must strike while calls are in flight.
        time.sleep(1)

    @property
    def output(self) -> str:
        return "".join(f"== w{rank}\n{job.output}" for rank, job in enumerate(self._jobs))

    def second_process(self) -> int:
        return self._jobs[1].process

    def end(self, second: Sequence[int | None] = (0,), known: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
        """Wait for both workers, and return their facts.

        Raises `Stuck` if a worker does not end. Raises `Failed` if one ends with a fault (`faults`) or another exit
        code.

        Args:
            second: exit codes that the second worker may have. None means that its machine was switched off.
            known: a pattern of faults of UCX itself, which are expected.
        """
        ended: list[Ended] = []
        try:
            for job in self._jobs:
                ended.append(job.wait(_TRIAL_S))
        except TimeoutError as error:
            raise Stuck(f"w{len(ended)} does not end: {error}") from None
        for rank, (one, allowed) in enumerate(zip(ended, ((0,), second), strict=True)):
            for fault in faults(one.output):
                expect(bool(known) and re.search(known, fault) is not None, f"w{rank} says: {fault}")
            expect(one.status in allowed, f"w{rank} ended by {one.status}\n{one.output}")
        return self.facts(0), self.facts(1)
