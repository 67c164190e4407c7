"""The echo of a NumPy array with other libraries, in a Python that has them: prints a JSON object of durations.

    python peer_programs.py UCXX|gRPC|mpi4py

Run by others.py. By itself, without torch, because ucxx-cu12 wants an older UCX than torch_ucx_rpc is built with here.
gRPC and mpi4py pickle, as a user would; UCXX sends the array's memory, and nothing says what to do with it.
"""

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

ARRAYS = {"1 KB": (np.random.default_rng(0).random(128), 1000), "64 MiB": (np.ones(2**26, dtype=np.uint8), 7)}
GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def median(durations: list[float]) -> float:
    return sorted(durations)[len(durations) // 2]


def measured(echo: Callable[[np.ndarray], np.ndarray]) -> dict[str, float]:
    """Median duration of the echo of each array, in microseconds."""
    figures = {}
    for name, (array, calls) in ARRAYS.items():
        assert np.array_equal(echo(array), array)
        durations = []
        for _ in range(calls):
            started = time.perf_counter()
            echo(array)
            durations.append(1e6 * (time.perf_counter() - started))
        figures[name] = median(durations)
    return figures


def start_server(name: str) -> tuple["subprocess.Popen[str]", int]:
    server = subprocess.Popen(
        [sys.executable, __file__, name, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    return server, int(next(line for line in server.stdout if line.strip().isdecimal()))  # UCX warns there too


def serve_grpc() -> None:
    import grpc

    handler = grpc.method_handlers_generic_handler(
        "Echo",
        {"echo": grpc.unary_unary_rpc_method_handler(lambda request, _: request, pickle.loads, pickle.dumps)},
    )
    server = grpc.server(ThreadPoolExecutor(4), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()


def measure_grpc(port: int) -> dict[str, float]:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}", options=GRPC_OPTIONS) as channel:
        return measured(channel.unary_unary("/Echo/echo", pickle.dumps, pickle.loads))


def serve_ucxx() -> None:
    import ucxx

    async def main() -> None:
        async def echo(endpoint: "ucxx.Endpoint") -> None:
            while True:
                await endpoint.am_send(np.asarray(await endpoint.am_recv()))

        listener = ucxx.create_listener(echo)
        print(listener.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        os._exit(0)

    asyncio.run(main())


def measure_ucxx(port: int) -> dict[str, float]:
    import ucxx

    async def main() -> dict[str, float]:
        endpoint = await ucxx.create_endpoint("127.0.0.1", port)
        figures = {}
        for name, (array, calls) in ARRAYS.items():
            durations = []
            for _ in range(calls + 1):
                started = time.perf_counter()
                await endpoint.am_send(array)
                answer = np.asarray(await endpoint.am_recv())
                durations.append(1e6 * (time.perf_counter() - started))
            assert np.array_equal(answer.view(array.dtype), array)
            figures[name] = median(durations[1:])
        return figures

    return asyncio.run(main())


def measure_mpi4py() -> dict[str, float] | None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.rank == 1:
        while (array := world.recv()) is not None:
            world.send(array, 0)
        return None

    def echo(array: np.ndarray) -> np.ndarray:
        world.send(array, 1)
        return world.recv()

    figures = measured(echo)
    world.send(None, 1)
    return figures


def main() -> None:
    name = sys.argv[1]
    if name == "mpi4py":
        figures = measure_mpi4py()
    elif "--serve" in sys.argv:
        {"UCXX": serve_ucxx, "gRPC": serve_grpc}[name]()
        return
    else:
        server, port = start_server(name)
        try:
            figures = {"UCXX": measure_ucxx, "gRPC": measure_grpc}[name](port)
        finally:
            server.kill()
    if figures is not None:
        print(json.dumps(figures), flush=True)
    if name == "UCXX":
        os._exit(0)  # its threads may outlive the interpreter otherwise


if __name__ == "__main__":
    main()
