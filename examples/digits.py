"""Train a network that is split over two processes, on UCX, and once more on TensorPipe to compare.

    driver ---- images ----> features ---- activations ----> classifier ---- logits ----> driver
                (convolutions)                  (dense layers)                            (loss)

Three processes form one RPC job. Two workers each hold half of the network and only serve calls. The driver has the
data and the loss. In each step it sends a batch of images through the stages. Distributed autograd sends the gradients
back the same way, and the distributed optimizer updates the parameters where they are.

The data are the 1,797 handwritten digits, 8x8 pixels each, that come with scikit-learn. Nothing is downloaded.

    python examples/digits.py                       both backends, and the comparison
    python examples/digits.py --backend ucx         one of them
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812 - its usual name
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from tqdm import tqdm

WORKERS = ("driver", "features", "classifier")
EPOCHS = 15
BATCH = 64
REQUIRED_ACCURACY = 0.95


# ---- The two halves of the network, each on its worker ---------------------------------------------------------------


class Stage(nn.Module):
    """A part of the network. It fetches its input from the worker that has it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = self.build()

    def forward(self, rref: rpc.RRef) -> torch.Tensor:
        # to_here() fetches the value from its owner, which need not be the caller.
        return self.layers(rref.to_here())

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """Return references to the parameters, which never leave this worker."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Features(Stage):
    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )


class Classifier(Stage):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


# ---- The driver ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """The outcome of one training."""

    losses: list[float]
    accuracy: float
    step_s: float  # the median
    debug_info: dict[str, dict[str, str]]


def train(backend: str) -> Result:
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    x, x_test, y, y_test = train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=0)

    # The workers build the stages. The driver has only references to them.
    features = rpc.remote("features", Features, args=(1,))
    classifier = rpc.remote("classifier", Classifier, args=(2,))
    parameters = features.rpc_sync().parameter_rrefs() + classifier.rpc_sync().parameter_rrefs()
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05, momentum=0.9)

    def predict(batch: torch.Tensor) -> torch.Tensor:
        # The activations go from one worker to the other. The driver passes on only a reference.
        activations = features.remote().forward(rpc.RRef(batch))
        return classifier.rpc_sync().forward(activations)

    losses: list[float] = []
    seconds: list[float] = []
    shuffle = torch.Generator().manual_seed(0)
    with tqdm(total=EPOCHS * -(-len(x) // BATCH), desc=f"{backend:10}", unit="step") as progress:
        for _ in range(EPOCHS):
            for indices in torch.randperm(len(x), generator=shuffle).split(BATCH):
                began = time.perf_counter()
                # The context of a step holds its gradients on every worker, and frees them at its end.
                with dist_autograd.context() as context:
                    loss = F.cross_entropy(predict(x[indices]), y[indices])
                    dist_autograd.backward(context, [loss])
                    optimizer.step(context)
                losses.append(loss.item())
                seconds.append(time.perf_counter() - began)
                progress.update()
                progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)

    accuracy = (predict(x_test).argmax(dim=1) == y_test).double().mean().item()
    # The report below shows the bytes and the lanes from the agents' metrics.
    debug_info = {worker: rpc.rpc_sync(worker, rpc._get_debug_info) for worker in WORKERS}
    return Result(losses, accuracy, statistics.median(seconds), debug_info)


# ---- The job ---------------------------------------------------------------------------------------------------------


def work(rank: int, backend: str, store: str, results: mp.SimpleQueue) -> None:
    """The program of each of the three processes."""
    # torch warns about its own internals here: how TensorPipe finds workers, and TorchScript in optimizers.
    logging.captureWarnings(True)
    if backend == "UCX":
        # For UCX, a program changes only this import and the name of the backend.
        from torch_ucx_rpc import UcxRpcBackendOptions

        options = UcxRpcBackendOptions(init_method=store)
    else:
        options = rpc.TensorPipeRpcBackendOptions(init_method=store)

    rpc.init_rpc(
        WORKERS[rank],
        backend=rpc.BackendType[backend],
        rank=rank,
        world_size=len(WORKERS),
        rpc_backend_options=options,
    )
    if WORKERS[rank] == "driver":
        results.put(train(backend))
    # The workers wait here, and serve calls, until the driver has also called shutdown().
    rpc.shutdown()


def run(backend: str) -> Result:
    # Each thread computes alone, the agent's threads too: torch.set_num_threads() would affect only the main thread.
    # Sums by several threads round differently from run to run, and training magnifies that.
    os.environ["OMP_NUM_THREADS"] = "1"
    # The server from which all workers are forked does the slow imports once.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch_ucx_rpc", "sklearn.datasets", "sklearn.model_selection"])
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        # The processes find each other through a file; on several hosts this would be tcp://host:port or env://.
        store = Path(directory, "store").as_uri()
        mp.start_processes(work, args=(backend, store, results), nprocs=len(WORKERS), start_method="forkserver")
    return results.get()


# ---- The report ------------------------------------------------------------------------------------------------------


def report(results: dict[str, Result]) -> None:
    rows = {
        "test accuracy": [f"{result.accuracy:.1%}" for result in results.values()],
        "median step": [f"{1e3 * result.step_s:.1f} ms" for result in results.values()],
        "bytes moved": [bytes_moved(result) for result in results.values()],
    }
    print("\n" + " " * 18 + "".join(f"{backend:>16}" for backend in results))
    for name, values in rows.items():
        print(f"{name:18}" + "".join(f"{value:>16}" for value in values))
    if "UCX" in results:
        print("\nlanes that UCX chose:")
        for worker, info in results["UCX"].debug_info.items():
            for peer in (name for name in WORKERS if f"lanes.{name}" in info):
                print(f"  {worker:>10} -> {peer:10} {info[f'lanes.{peer}']}")
    if len(results) == 2:
        ratio = results["UCX"].step_s / results["TENSORPIPE"].step_s
        print(f"\nA step on UCX takes {ratio:.2f} of its time on TensorPipe.")
        print(f"The losses differ by at most {largest_difference(results):.1e}.")


def bytes_moved(result: Result) -> str:
    counts = [info.get("agent.bytes_sent") for info in result.debug_info.values()]
    return "not counted" if None in counts else f"{sum(map(int, counts)) / 1e6:.0f} MB"


def largest_difference(results: dict[str, Result]) -> float:
    first, second = (torch.tensor(result.losses) for result in results.values())
    return (first - second).abs().max().item()


def problems(results: dict[str, Result]) -> list[str]:
    """Return the reasons why this run is not a success."""
    found = [
        f"The accuracy on {backend} is {result.accuracy:.1%}; {REQUIRED_ACCURACY:.0%} is required."
        for backend, result in results.items()
        if result.accuracy < REQUIRED_ACCURACY
    ]
    # Both runs have the same seed and arithmetic: only the transport of the numbers differs.
    if len(results) == 2 and not torch.allclose(*(torch.tensor(result.losses) for result in results.values())):
        found.append(
            f"The losses of the two backends differ by up to {largest_difference(results):.1e}, beyond rounding."
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network that is split over two processes.")
    parser.add_argument("--backend", choices=("ucx", "tensorpipe", "both"), default="both")
    backend = parser.parse_args().backend
    backends = ("UCX", "TENSORPIPE") if backend == "both" else (backend.upper(),)

    results = {backend: run(backend) for backend in backends}
    report(results)
    sys.exit("\n".join(problems(results)) or None)


if __name__ == "__main__":
    main()
