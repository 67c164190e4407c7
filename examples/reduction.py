"""Train a network in four processes, kill one of them in the middle, and see that the others go on.

Each process has a copy of the network and its own batches. `reduction.DataParallel` averages their gradients, through a
server whose work the four share. There is no process group: the three survivors go on with the next step.

The data are the 1,797 handwritten digits, 8x8 pixels each, that come with scikit-learn. Nothing is downloaded. The
picture shows the loss of this run beside that of one without a death.

    python examples/reduction.py                        both runs; writes reduction.png
    python examples/reduction.py --backend tensorpipe   the undisturbed one: TensorPipe does not report a death
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812 - its usual name
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from tqdm import tqdm

from torch_ucx_rpc import reduction

TRAINERS = 4
STEPS = 150
BATCH = 32
KILLED, KILLED_AT = 2, 60
REQUIRED_ACCURACY = 0.9


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    return (torch.tensor(x).float(), torch.tensor(y), torch.tensor(x_test).float(), torch.tensor(y_test))


def train(rank: int, reports: Any) -> None:
    """The program of each of the four."""
    x, y, x_test, y_test = digits()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    # Only these two lines, and the name of the model below, differ from training in one process.
    server = reduction.serve()
    model = reduction.DataParallel(network, server)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    draw = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        batch = torch.randint(len(x), (BATCH,), generator=draw)
        optimizer.zero_grad()
        started = time.perf_counter()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        duration = time.perf_counter() - started
        optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(network(x), y).item() if rank == 0 else 0.0
        reports.put((rank, step, loss, duration))
    with torch.no_grad():
        reports.put((rank, "accuracy", (network(x_test).argmax(1) == y_test).double().mean().item(), 0.0))


def work(rank: int, backend: str, store: str, reports: Any, may_leave: Any) -> None:
    torch.set_num_threads(1)
    logging.captureWarnings(True)
    if backend == "UCX":
        from torch_ucx_rpc import UcxRpcBackendOptions

        options = UcxRpcBackendOptions(init_method=store)
    else:
        options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    rpc.init_rpc(
        f"trainer{rank}",
        backend=rpc.BackendType[backend],
        rank=rank,
        world_size=TRAINERS,
        rpc_backend_options=options,
    )
    train(rank, reports)
    # The last answers of this trainer may still be on their way to others, so do not leave yet.
    may_leave.wait()
    # A graceful shutdown would end with an error that names the dead trainer.
    rpc.shutdown(graceful=False)


class Run:
    """A training by worker processes. This process follows it."""

    def __init__(self, backend: str, is_disturbed: bool) -> None:
        self.is_disturbed = is_disturbed
        self.losses: list[float] = []
        self.steps_of: dict[int, int] = {}
        self.accuracy: dict[int, float] = {}
        self.slowest_after_kill = 0.0
        # The server from which all workers are forked does the slow imports once.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch_ucx_rpc.reduction", "sklearn.datasets", "sklearn.model_selection"])
        reports, may_leave = context.Queue(), context.Event()
        queues = [reports] * TRAINERS
        if is_disturbed:
            queues[KILLED] = context.Queue()  # the killed process may hold the lock of its queue
        with tempfile.TemporaryDirectory() as directory:
            store = Path(directory, "store").as_uri()
            processes = [
                # Daemons end with this process, also after Ctrl-C.
                context.Process(target=work, args=(rank, backend, store, queues[rank], may_leave), daemon=True)
                for rank in range(TRAINERS)
            ]
            for process in processes:
                process.start()
            self._follow(processes, reports)
            may_leave.set()
            for process in processes:
                process.join(30)

    def _follow(self, processes: list[Any], reports: Any) -> None:
        title = "one is killed" if self.is_disturbed else "undisturbed"
        survivors = TRAINERS - self.is_disturbed
        is_killed = False
        with tqdm(total=STEPS, desc=f"{title:14}", unit="step") as progress:
            while len(self.accuracy) < survivors:
                rank, step, value, duration = self._next_report(processes, reports)
                if step == "accuracy":
                    self.accuracy[rank] = value
                    continue
                self.steps_of[rank] = step + 1
                if is_killed:
                    self.slowest_after_kill = max(self.slowest_after_kill, duration)
                if rank == 0:
                    self.losses.append(value)
                    progress.update()
                    progress.set_postfix(loss=f"{value:.3f}", refresh=False)
                if self.is_disturbed and not is_killed and step == KILLED_AT:
                    os.kill(processes[KILLED].pid, signal.SIGKILL)
                    is_killed = True
                    progress.write(f"{'':14}: trainer{KILLED} is killed in step {KILLED_AT}")

    def _next_report(self, processes: list[Any], reports: Any) -> tuple[int, Any, float, float]:
        """Wait for a report, without a limit as long as no worker dies unexpectedly."""
        while True:
            with contextlib.suppress(queue.Empty):
                return reports.get(timeout=2)
            for rank, process in enumerate(processes):
                is_to_die = self.is_disturbed and rank == KILLED
                if process.exitcode is not None and not is_to_die:
                    raise RuntimeError(f"trainer{rank} has ended by itself, with exit code {process.exitcode}")


def draw(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for run in runs:
        label = f"trainer{KILLED} of {TRAINERS} killed" if run.is_disturbed else f"{TRAINERS} trainers"
        axes.plot(run.losses, label=label, linewidth=1.5)
    axes.axvline(KILLED_AT, color="grey", linestyle=":", label="kill -9")
    axes.set(xlabel="step", ylabel="loss, all training data", yscale="log", title="Four processes train; one dies")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network in four processes, of which one is killed.")
    parser.add_argument("--backend", choices=("ucx", "tensorpipe"), default="ucx")
    parser.add_argument("--picture", type=Path, default=Path("reduction.png"), help="default: reduction.png")
    arguments = parser.parse_args()

    # TensorPipe does not notice that a worker has died. Trainers would wait for its gradients for ever.
    disturbances = (False, True) if arguments.backend == "ucx" else (False,)
    runs = [Run(arguments.backend.upper(), is_disturbed) for is_disturbed in disturbances]
    draw(runs, arguments.picture)

    problems = []
    for run in runs:
        what = f"with trainer{KILLED} killed" if run.is_disturbed else "undisturbed"
        survivors = [rank for rank in range(TRAINERS) if not (run.is_disturbed and rank == KILLED)]
        print(f"{what:22} loss {run.losses[-1]:.4f}, test accuracy {run.accuracy[0]:.1%}", end="")
        print(f", slowest step after the kill {1e3 * run.slowest_after_kill:.0f} ms" if run.is_disturbed else "")
        if any(run.steps_of[rank] != STEPS for rank in survivors):
            problems.append(f"A surviving trainer has lost steps: {run.steps_of}.")
        if len(set(run.accuracy.values())) != 1:
            problems.append(f"The copies of the network differ: {run.accuracy}.")
        if run.accuracy[0] < REQUIRED_ACCURACY:
            problems.append(f"The accuracy {what} is {run.accuracy[0]:.1%}; {REQUIRED_ACCURACY:.0%} is required.")
    print(f"The loss curves are in {arguments.picture}.")
    sys.exit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
