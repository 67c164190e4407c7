"""MPI and RPC in the same processes, at the same time. The argument names the library that starts first."""

import os
import sys
import threading

import numpy as np
import torch

ROUNDS = 10
NUMBERS = 300_000


def start_mpi():
    from mpi4py import MPI  # this import initializes MPI

    return MPI


def start_rpc():
    import torch_ucx_rpc

    torch_ucx_rpc.init_rpc()
    return torch.distributed.rpc


if sys.argv[1] == "mpi":
    MPI, rpc = start_mpi(), start_rpc()
else:
    rpc, MPI = start_rpc(), start_mpi()

world = MPI.COMM_WORLD
left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size


def exchange():
    for _ in range(ROUNDS):
        own = np.full(NUMBERS, world.rank)
        other = np.empty_like(own)
        world.Sendrecv(own, right, recvbuf=other, source=left)
        assert (other == left).all()
        assert world.allreduce(1) == world.size


def call():
    for number in range(ROUNDS):
        tensor = torch.full((NUMBERS,), float(number))
        assert (rpc.rpc_sync(f"worker{right}", torch.add, args=(tensor, 1)) == number + 1).all()


calls = threading.Thread(target=call)
calls.start()
exchange()
calls.join()
rpc.shutdown()
# MPI still works after RPC has ended.
exchange()
os.write(1, f"rank {world.rank} has exchanged and called {ROUNDS} times\n".encode())
