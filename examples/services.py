"""Workers find each other by names: two serve a model, one of them is killed, and no call fails.

    caller ----- "score" -----> evaluator0, evaluator1      replicas: the one with fewer open calls is taken
                 "threshold"    a value, kept by evaluator1

The four processes know only each other's names. The two evaluators register a method of a model that both have. Each
caller calls this method 400 times. After 150 calls caller0 kills evaluator0. Open calls are repeated with evaluator1,
since the service is registered as idempotent. The watch shows which worker is left.

    python examples/services.py                         on UCX
    python examples/services.py --backend tensorpipe    likewise; there the first call that fails shows the death
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn

from torch_ucx_rpc import services

WORKERS = ("caller0", "caller1", "evaluator0", "evaluator1")
CALLS = 400
KILLED_AT = 150


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    @torch.no_grad()
    def score(self, x: torch.Tensor) -> float:
        return self.layers(x).mean().item()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def evaluate(name: str, is_over: Any) -> None:
    model = Model()
    # "threshold" comes first, since the callers begin when both evaluators offer "score".
    if name == "evaluator1":
        services.pair("threshold", torch.tensor(0.1))
    services.register("score", model.score, idempotent=True)
    is_over.acquire()


def call(name: str, both_callers: Any, results: Any) -> None:
    both, one_left = threading.Event(), threading.Event()

    def on_change(service: services.Service) -> None:
        print(f"{name}: score is offered by {', '.join(service.workers) or 'nobody'}", flush=True)
        if len(service.workers) == 2:
            both.set()
        elif both.is_set():
            one_left.set()

    services.watch("score", on_change)
    both.wait(60)
    both_callers.wait(60)
    threshold = services.get("threshold").to_here()
    model = Model()
    above = 0
    for number in range(CALLS):
        if number == KILLED_AT:
            # So both callers still have calls to make when the evaluator dies.
            both_callers.wait(60)
            if name == "caller0":
                rpc.rpc_async("evaluator0", die)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
        score = services.call("score", x)
        assert score == model.score(x)
        above += score > threshold
    # The calls may be over before the death is known.
    one_left.wait(60)
    members = ", ".join(f"{member.name} ({member.role})" for member in services.members())
    results.put(f"{name}: {CALLS} calls answered, {above} above the threshold; living are {members}")


def work(rank: int, backend: str, store: str, both_callers: Any, is_over: Any, results: Any) -> None:
    torch.set_num_threads(1)
    logging.captureWarnings(True)
    if backend == "UCX":
        from torch_ucx_rpc import UcxRpcBackendOptions

        options = UcxRpcBackendOptions(init_method=store)
    else:
        options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    name = WORKERS[rank]
    rpc.init_rpc(
        name, backend=rpc.BackendType[backend], rank=rank, world_size=len(WORKERS), rpc_backend_options=options
    )
    if name.startswith("evaluator"):
        evaluate(name, is_over)
    else:
        call(name, both_callers, results)
        is_over.acquire()
    # A graceful shutdown would end with an error that names the dead worker.
    rpc.shutdown(graceful=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Call services by their names while one of their workers is killed.")
    parser.add_argument("--backend", choices=("ucx", "tensorpipe"), default="ucx")
    backend = parser.parse_args().backend.upper()
    # The server from which all workers are forked does the slow imports once.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch_ucx_rpc.services"])
    both_callers, results = context.Barrier(2), context.Queue()
    # Not an Event: its set() waits for each waiting process, also for the killed one.
    is_over = context.Semaphore(0)
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory, "store").as_uri()
        processes = [
            # Daemons end with this process, also after Ctrl-C.
            context.Process(target=work, args=(rank, backend, store, both_callers, is_over, results), daemon=True)
            for rank in range(len(WORKERS))
        ]
        for process in processes:
            process.start()
        for _ in range(2):
            print(results.get(timeout=120))
        for _ in processes:
            is_over.release()
        for process in processes:
            process.join(30)
    assert processes[WORKERS.index("evaluator0")].exitcode == -signal.SIGKILL


if __name__ == "__main__":
    main()
