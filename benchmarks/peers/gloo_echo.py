"""torch.distributed on Gloo: send and recv of a tensor, isend and irecv of many. It has TCP only."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.peers.measuring import Figures, measured, schedule, server, serving_at

LEAVES_THREADS = False


def meet(store: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def serve(_: str) -> None:
    store = Path(tempfile.mkdtemp(), "store")
    serving_at(str(store))
    meet(str(store), 1)
    for array, echoes in schedule():
        tensors = [torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype) for _ in range(echoes)]
        receives = [dist.irecv(tensor, 0) for tensor in tensors]
        sends = []
        for receive, tensor in zip(receives, tensors, strict=True):
            assert receive is not None  # torch returns None only outside of the group
            receive.wait()
            sends.append(dist.isend(tensor, 0))
        for send in sends:
            assert send is not None
            send.wait()


def measure(name: str) -> Figures:
    with server(name) as store:
        meet(store, 0)
        return {**measured(lambda array: echo_at_once(array, 1)[0], echo_at_once), "lanes": "tcp"}


def echo_at_once(array: np.ndarray, echoes: int) -> list[np.ndarray]:
    tensor = torch.from_numpy(array)
    answers = [torch.empty_like(tensor) for _ in range(echoes)]
    if echoes == 1:
        dist.send(tensor, 1)
        dist.recv(answers[0], 1)
    else:
        works = [dist.irecv(answer, 1) for answer in answers] + [dist.isend(tensor, 1) for _ in range(echoes)]
        for work in works:
            assert work is not None
            work.wait()
    return [answer.numpy() for answer in answers]
