"""gRPC: the array is pickled, as a user would do, and sent over a Unix socket or TCP. gRPC has no shared memory."""

from __future__ import annotations

import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from benchmarks.peers.measuring import Figures, measured, server, serving_at, wait_for_the_end

LEAVES_THREADS = False

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def serve(name: str) -> None:
    handler = grpc.method_handlers_generic_handler(
        "Echo",
        {"echo": grpc.unary_unary_rpc_method_handler(lambda request, _: request, pickle.loads, pickle.dumps)},
    )
    grpc_server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    grpc_server.add_generic_rpc_handlers((handler,))
    with tempfile.TemporaryDirectory() as folder:
        if name == "gRPC unix":
            address = f"unix:{folder}/echo"
            grpc_server.add_insecure_port(address)
        else:
            address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
        grpc_server.start()
        serving_at(address)
        wait_for_the_end()


def measure(name: str) -> Figures:
    with server(name) as address, grpc.insecure_channel(address, options=OPTIONS) as channel:
        echo = channel.unary_unary("/Echo/echo", pickle.dumps, pickle.loads)

        def echo_at_once(array: np.ndarray, echoes: int) -> list[np.ndarray]:
            return [answer.result() for answer in [echo.future(array) for _ in range(echoes)]]

        return {**measured(echo, echo_at_once), "lanes": "unix" if address.startswith("unix") else "tcp"}
