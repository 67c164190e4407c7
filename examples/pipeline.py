"""A network in two stages on two workers, which train at the same time on different micro-batches.

    driver ---- batch ----> stage0 ---- activations ----> stage1 ---- loss ----> driver
                                   <---- gradients ------

Prints the layers of each stage, trains on scikit-learn's handwritten digits with a progress bar, saves a checkpoint,
and continues from it. `--trace` writes a Chrome trace of a step.

    python examples/pipeline.py                         on UCX
    python examples/pipeline.py --backend tensorpipe    on PyTorch's own backend
    python examples/pipeline.py --schedule zero-bubble --trace step.json
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812 - its usual name
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from tqdm import tqdm

from torch_ucx_rpc import UcxRpcBackendOptions, pipeline

WORKERS = ("driver", "stage0", "stage1")
BATCH = 64
REQUIRED_ACCURACY = 0.95


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    x, x_test, y, y_test = train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=0)

    pipe = pipeline.DistributedPipeline(
        network(),
        workers=["stage0", "stage1"],
        balance="profile",
        sample=x[:BATCH],
        schedule=arguments.schedule,
        chunks=4,
        loss=F.cross_entropy,
    )
    print(pipe)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)

    for epoch in range(arguments.epochs):
        with tqdm(torch.randperm(len(x)).split(BATCH), desc=f"epoch {epoch}", unit="step") as progress:
            for indices in progress:
                loss = pipe.step(x[indices], target=y[indices])
                optimizer.step()
                optimizer.zero_grad()
                progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        scheduler.step()

    if arguments.trace:
        pipe.trace(arguments.trace, x[:BATCH], target=y[:BATCH])
        optimizer.zero_grad()
        print(f"a trace of a step: {arguments.trace}")

    with tempfile.TemporaryDirectory() as folder:
        pipe.save(folder)
        # The checkpoint is complete: another pipeline, with its stages in the other order, continues from it.
        again = pipeline.DistributedPipeline(network(), ["stage1", "stage0"], balance=[3, 6], loss=F.cross_entropy)
        again.optimizer(torch.optim.AdamW, lr=1e-3)
        again.load(folder)
    again.eval()
    with torch.no_grad():
        accuracy = (again(x_test).argmax(dim=1) == y_test).double().mean().item()
    print(f"test accuracy: {accuracy:.1%}")
    assert accuracy > REQUIRED_ACCURACY, accuracy


def work(rank: int, arguments: argparse.Namespace, store: str) -> None:
    """The program of each of the three processes."""
    torch.set_num_threads(1)
    logging.captureWarnings(True)
    backend = rpc.BackendType[arguments.backend.upper()]
    options = (UcxRpcBackendOptions if arguments.backend == "ucx" else rpc.TensorPipeRpcBackendOptions)(
        init_method=store
    )
    rpc.init_rpc(WORKERS[rank], backend, rank, len(WORKERS), options)
    if WORKERS[rank] == "driver":
        train(arguments)
    # The stages wait here, and serve the driver, until it has also called shutdown().
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("ucx", "tensorpipe"), default="ucx")
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of a step into this file, such as step.json")
    arguments = parser.parse_args()
    # The server from which all workers are forked does the slow imports once.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch_ucx_rpc.pipeline", "sklearn.datasets", "sklearn.model_selection"])
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        mp.start_processes(work, args=(arguments, store), nprocs=len(WORKERS), start_method="forkserver")


if __name__ == "__main__":
    main()
