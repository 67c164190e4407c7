"""mpi4py: Send and Recv of the array's memory, Isend and Irecv of many, or their lower-case versions, which pickle.

mpirun starts it twice: rank 1 echoes what rank 0 measures.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from benchmarks.peers.measuring import ARRAYS, Figures, measured, schedule

LEAVES_THREADS = False

WORLD = MPI.COMM_WORLD


def measure(name: str) -> Figures | None:
    answer, echo_at_once = (
        (answer_pickled, pickled_at_once) if name == "mpi4py pickled" else (answer_memory, memory_at_once)
    )
    if WORLD.rank == 1:
        for array, echoes in schedule():
            answer(array, echoes)
        return None
    figures = measured(lambda array: echo_at_once(array, 1)[0], echo_at_once)
    return {**figures, "lanes": MPI.Get_library_version().split(",")[0]}


# Memory for received arrays: an efficient program reuses it.
BUFFERS = {array.nbytes: [np.empty_like(array)] for array, _ in ARRAYS.values()}


def buffers(array: np.ndarray, count: int) -> list[np.ndarray]:
    there = BUFFERS[array.nbytes]
    there += [np.empty_like(array) for _ in range(count - len(there))]
    return there[:count]


def memory_at_once(array: np.ndarray, echoes: int) -> list[np.ndarray]:
    answers = buffers(array, echoes)
    if echoes == 1:
        WORLD.Send(array, 1)
        WORLD.Recv(answers[0], 1)
        return answers
    receives = [WORLD.Irecv(answer, 1) for answer in answers]
    sends = [WORLD.Isend(array, 1) for _ in range(echoes)]
    MPI.Request.Waitall(receives + sends)
    return answers


def answer_memory(array: np.ndarray, echoes: int) -> None:
    received = buffers(array, echoes)
    if echoes == 1:
        WORLD.Recv(received[0], 0)
        WORLD.Send(received[0], 0)
        return
    sends = []
    receives = [WORLD.Irecv(buffer, 0) for buffer in received]
    for receive, buffer in zip(receives, received, strict=True):
        receive.Wait()
        sends.append(WORLD.Isend(buffer, 0))
    MPI.Request.Waitall(sends)


def pickled_at_once(array: np.ndarray, echoes: int) -> list[np.ndarray]:
    if echoes == 1:
        WORLD.send(array, 1)
        return [WORLD.recv(source=1)]
    sends = [WORLD.isend(array, 1) for _ in range(echoes)]
    answers = [WORLD.recv(source=1) for _ in range(echoes)]
    MPI.Request.waitall(sends)
    return answers


def answer_pickled(array: np.ndarray, echoes: int) -> None:
    if echoes == 1:
        WORLD.send(WORLD.recv(source=0), 0)
        return
    MPI.Request.waitall([WORLD.isend(WORLD.recv(source=0), 0) for _ in range(echoes)])
