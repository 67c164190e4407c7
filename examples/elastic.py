"""Workers that come and go: tasks go to present workers, while one leaves, one is killed and another joins.

    coordinator ---- task ----> worker1, worker2, worker3, ...       a group without a size
                <--- result ---

worker1 leaves after some tasks. worker2 is killed while it has a task, which another worker then gets. worker4 replaces
worker2. In the end all tasks are done.
"""

import argparse
import contextlib
import functools
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

from torch_ucx_rpc import UcxRpcBackendOptions, errors, on_lost

COORDINATOR = "worker0"
AT_FIRST = ("worker1", "worker2", "worker3")
LEAVES, LEAVES_AFTER = "worker1", 10
KILLED, KILLED_AT = "worker2", 40
NEWCOMER = "worker4"

# Other workers and callbacks put events here: (name, worker, details).
events = queue.Queue()
# Set when this worker should leave.
is_over = threading.Event()


def compute(number, is_last=False):
    """Do a task: compute the square of a number as a product of matrices."""
    if is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    a = torch.full((64, 64), number / 64)
    return (a @ a).trace().item()


def say_hello(name):
    events.put(("joined", name, None))


def leave():
    is_over.set()


class Coordinator:
    def __init__(self, tasks):
        self.waiting = list(range(tasks))
        self.results = {}
        self.done_by = Counter()
        self.members = set()
        self.idle = []

    def run(self, start):
        tasks = len(self.waiting)
        on_lost(lambda worker, reason: events.put(("lost", worker.name, reason)))
        for name in AT_FIRST:
            start(name)
        while not (self.members >= {*AT_FIRST}):
            self.joined(events.get(timeout=120)[1])
        self.hand_out()
        while len(self.results) < tasks or NEWCOMER not in self.members:
            what, name, details = events.get(timeout=120)
            if what == "joined":
                self.joined(name)
            elif what == "lost":
                print(f"{name} is lost: {details}", flush=True)
                self.members.discard(name)
                start(NEWCOMER)
            else:
                self.done(name, *details)
            self.hand_out()
        assert all(abs(result - number**2) < 0.5 for number, result in self.results.items())
        shares = ", ".join(f"{count} by {name}" for name, count in sorted(self.done_by.items()))
        print(f"{len(self.results)} tasks are done: {shares}", flush=True)
        torch.futures.wait_all([rpc.rpc_async(name, leave) for name in self.members])

    def joined(self, name):
        print(f"{name} has joined", flush=True)
        self.members.add(name)
        self.idle.append(name)

    def done(self, name, number, future):
        try:
            self.results[number] = future.wait()
        except errors.WorkerLost:
            print(f"task {number} was with {name}, and goes to another worker", flush=True)
            self.waiting.append(number)
            return
        self.done_by[name] += 1
        if name == LEAVES and self.done_by[name] == LEAVES_AFTER:
            print(f"{name} leaves after {LEAVES_AFTER} tasks", flush=True)
            self.members.discard(name)
            rpc.rpc_sync(name, leave)
        else:
            self.idle.append(name)

    def hand_out(self):
        while self.waiting and (ready := [name for name in self.idle if not self.is_ahead(name)]):
            name, number = ready[0], self.waiting.pop(0)
            self.idle.remove(name)
            future = rpc.rpc_async(name, compute, (number, name == KILLED and len(self.results) >= KILLED_AT))
            future.add_done_callback(functools.partial(tell_of_task, name, number))

    def is_ahead(self, name):
        """Return whether a fast worker must wait for slow ones, so that worker1 can leave and worker2 can be killed."""
        return KILLED in self.members and self.done_by[name] > min(self.done_by[member] for member in self.members) + 2


def tell_of_task(name, number, future):
    events.put(("done", name, (number, future)))


def main():
    parser = argparse.ArgumentParser(description="Hand out tasks to workers that join, leave and die.")
    parser.add_argument("--tasks", type=int, default=120)
    parser.add_argument("--name", default=COORDINATOR, help="join as this worker (default: the coordinator, worker0)")
    parser.add_argument("--store", help="URL of a file that all workers see (default: one in a new folder)")
    parser.add_argument("--launcher", default="", help="words before the command of a worker, such as 'srun --overlap'")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        store = arguments.store or Path(folder, "store").as_uri()
        options = UcxRpcBackendOptions(init_method=store)
        # Without a world_size, workers may join and leave.
        rpc.init_rpc(arguments.name, rank=int(arguments.name.removeprefix("worker")), rpc_backend_options=options)

        started = []

        def start(name):
            command = [sys.executable, __file__, "--name", name, "--store", store]
            started.append(processes.enter_context(subprocess.Popen([*shlex.split(arguments.launcher), *command])))

        if arguments.name == COORDINATOR:
            try:
                Coordinator(arguments.tasks).run(start)
            except BaseException:
                # End the workers: they would wait for tasks, and this process would wait for the workers.
                for process in started:
                    # terminate() sends SIGTERM, which srun passes on to the worker. It could not pass on SIGKILL.
                    process.terminate()
                # This worker writes to the store that it leaves, so it must leave before the folder is deleted.
                rpc.shutdown(graceful=False)
                raise
        else:
            rpc.rpc_sync(COORDINATOR, say_hello, (arguments.name,))
            is_over.wait()
        rpc.shutdown()


if __name__ == "__main__":
    main()
