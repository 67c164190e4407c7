"""Ray: a method of an actor. Small arrays travel in the call, over TCP; large ones by the shared object store."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

from benchmarks.peers.measuring import Figures, measured

LEAVES_THREADS = False


@ray.remote
class Echo:
    def echo(self, array: np.ndarray) -> np.ndarray:
        return array


def measure(_: str) -> Figures:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        # The decorator has added methods that a type checker does not know.
        actors: Any = Echo
        actor = actors.remote()

        def echo_at_once(array: np.ndarray, echoes: int) -> list[np.ndarray]:
            answers: list[np.ndarray] = ray.get([actor.echo.remote(array) for _ in range(echoes)])
            return answers

        figures = measured(lambda array: ray.get(actor.echo.remote(array)), echo_at_once)
        return {**figures, "lanes": "tcp and the object store"}
    finally:
        ray.shutdown()
