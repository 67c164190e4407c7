"""Monarch: an endpoint of an actor, in a process of this host that Monarch starts."""

from __future__ import annotations

import numpy as np
from monarch.actor import Actor, endpoint, this_host

from benchmarks.peers.measuring import Figures, measured

LEAVES_THREADS = False


class Echo(Actor):
    @endpoint
    def echo(self, array: np.ndarray) -> np.ndarray:
        return array


def measure(_: str) -> Figures:
    processes = this_host().spawn_procs(per_host={"gpus": 1})
    try:
        actor = processes.spawn("echo", Echo)

        def echo_at_once(array: np.ndarray, echoes: int) -> list[np.ndarray]:
            return [answer.get() for answer in [actor.echo.call_one(array) for _ in range(echoes)]]

        figures = measured(lambda array: actor.echo.call_one(array).get(), echo_at_once)
        return {**figures, "lanes": "Monarch's channels"}
    finally:
        processes.stop().get()
