"""A parameter server whose updates need no GIL: `native_op` compiles them, and TorchScript calls them.

    worker1, worker2, ... ---- gradient ----> worker0: ps::apply(parameter, gradient), compiled by numba

To show this, the Python of worker0 keeps the GIL until all gradients are applied, as a long computation might. A
handler in Python would wait for the GIL, and so would its caller.
"""

import argparse
import sys
import threading
import time

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.rpc import RRef

import torch_ucx_rpc
from torch_ucx_rpc import services

SIZE = 1024


@torch_ucx_rpc.native_op("ps::apply(Tensor(a!) parameter, Tensor gradient, *, float lr=1) -> ()")
def apply(parameter, gradient, lr):
    if parameter.shape != gradient.shape:
        raise ValueError("shapes differ")  # numba does not check indices
    for i in range(parameter.shape[0]):
        parameter[i] -= lr * gradient[i]


@torch.jit.script
def update(parameter: RRef[Tensor], gradient: Tensor) -> None:
    torch.ops.ps.apply(parameter.local_value(), gradient)


class Client:
    """A worker that sends its updates once the server has sent it a reference to the parameter."""

    parameter: RRef
    may_begin = threading.Event()

    @classmethod
    def begin(cls, parameter):
        cls.parameter = parameter
        cls.may_begin.set()

    @classmethod
    def train(cls, updates):
        cls.may_begin.wait()
        gradient = torch.ones(SIZE)
        server = cls.parameter.owner()
        torch.futures.wait_all([rpc.rpc_async(server, update, (cls.parameter, gradient)) for _ in range(updates)])


def serve(clients, updates):
    parameter = torch.zeros(SIZE)
    apply(parameter, torch.zeros(SIZE))  # the first call compiles, and needs the GIL
    begun = [rpc.rpc_async(client, Client.begin, (rpc.RRef(parameter),)) for client in clients]
    values, expected = parameter.numpy(), len(clients) * updates
    keep_the_gil_until(lambda: -values[0] == expected)
    print(f"{-values[0]:.0f} of {expected} updates were applied while Python kept the GIL", flush=True)
    torch.futures.wait_all(begun)


def keep_the_gil_until(condition, at_most_s=60):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(at_most_s)
    until = time.monotonic() + at_most_s
    while not condition() and time.monotonic() < until:
        pass
    sys.setswitchinterval(interval)


def main():
    parser = argparse.ArgumentParser(description="Worker 0 applies the gradients of all others, without the GIL.")
    parser.add_argument("--updates", type=int, default=500, help="updates of each client")
    arguments = parser.parse_args()

    torch_ucx_rpc.init_rpc()
    if rpc.get_worker_info().id == 0:
        serve([member.name for member in services.members() if member.rank > 0], arguments.updates)
    else:
        Client.train(arguments.updates)
    rpc.shutdown()


if __name__ == "__main__":
    main()
