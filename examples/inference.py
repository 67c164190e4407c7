"""Batch inference: clients send one input in each call, and the server runs its model on many inputs at once.

    worker1, worker2, ... ---- one input ----> worker0: a batch of all waiting inputs, one forward pass
                          <--- one class ---

`async_execution` lets a handler answer later: it queues its input with a future, and one thread completes the futures
of a batch. While the thread computes a batch, inputs for the next batch arrive.
"""

import argparse
import queue
import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn

import torch_ucx_rpc

FEATURES, CLASSES = 64, 10


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES)).eval()


class Server:
    """The state of worker0. Its handlers find it in `server`."""

    def __init__(self, most):
        self.model = make_model()
        self.most = most
        self.sizes = []
        self.requests = queue.SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def take_batch(self):
        requests = [self.requests.get()]
        while len(requests) < self.most and not self.requests.empty():
            requests.append(self.requests.get())
        return requests

    @torch.inference_mode()
    def run(self):
        while True:
            inputs, futures = zip(*self.take_batch(), strict=True)
            classes = self.model(torch.stack(inputs)).argmax(dim=1).tolist()
            self.sizes.append(len(futures))
            for future, found in zip(futures, classes, strict=True):
                future.set_result(found)


server = None


@rpc.functions.async_execution
def classify(x):
    future = torch.futures.Future()
    server.requests.put((x, future))
    return future


def ask(name, requests):
    torch.manual_seed(rpc.get_worker_info().id)
    inputs = torch.randn(requests, FEATURES)
    found = torch.futures.wait_all([rpc.rpc_async("worker0", classify, (x,)) for x in inputs])
    with torch.inference_mode():
        expected = make_model()(inputs).argmax(dim=1).tolist()
    agreeing = sum(a == b for a, b in zip(found, expected, strict=True))
    print(f"{name}: {agreeing} of {requests} answers are those of the model by itself", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Worker 0 answers the requests of all others in batches.")
    parser.add_argument("--requests", type=int, default=500, help="requests of each client")
    parser.add_argument("--most", type=int, default=32, help="inputs in a batch")
    arguments = parser.parse_args()

    global server
    server = Server(arguments.most)
    torch_ucx_rpc.init_rpc()
    me = rpc.get_worker_info()
    if me.id != 0:
        ask(me.name, arguments.requests)
    # The server waits here, and answers, until all clients have also called shutdown().
    rpc.shutdown()
    if me.id == 0:
        sizes = server.sizes
        print(f"{sum(sizes)} requests in {len(sizes)} batches, the largest of {max(sizes)}", flush=True)


if __name__ == "__main__":
    main()
