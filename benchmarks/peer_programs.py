"""The echo of a NumPy array with other libraries, in a Python that has them: prints a JSON object of durations.

    python peer_programs.py UCXX|UCXX plain|gRPC unix|gRPC tcp|mpi4py|mpi4py pickled

Run by others.py. By itself, without torch, because ucxx-cu12 wants an older UCX than torch_ucx_rpc is built with here.
gRPC pickles, as a user would, over a Unix socket or TCP: it has no shared memory. UCXX, and mpi4py's Send and Recv,
move the array's memory, and nothing says what to do with it. UCXX is told to use shared memory; without that, plain,
its connections go over TCP. With the durations comes "lanes", by which the bytes went.
"""

import asyncio
import ctypes
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def start_server(name: str) -> tuple["subprocess.Popen[str]", str]:
    """Another process, and where it serves."""
    server = subprocess.Popen(
        [sys.executable, __file__, name, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    # UCX speaks there too.
    return server, next(line for line in server.stdout if line.startswith("at ")).split()[1]


def serve_grpc(name: str) -> None:
    import grpc

    handler = grpc.method_handlers_generic_handler(
        "Echo",
        {"echo": grpc.unary_unary_rpc_method_handler(lambda request, _: request, pickle.loads, pickle.dumps)},
    )
    server = grpc.server(ThreadPoolExecutor(4), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    with tempfile.TemporaryDirectory() as folder:
        if name == "gRPC unix":
            address = f"unix:{folder}/echo"
            server.add_insecure_port(address)
        else:
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        print(f"at {address}", flush=True)
        sys.stdin.read()


def measure_grpc(address: str) -> dict[str, object]:
    import grpc

    with grpc.insecure_channel(address, options=GRPC_OPTIONS) as channel:
        figures = measured(channel.unary_unary("/Echo/echo", pickle.dumps, pickle.loads))
    return {**figures, "lanes": address.partition(":")[0] if address.startswith("unix") else "tcp"}


def serve_ucxx() -> None:
    import ucxx

    async def main() -> None:
        async def echo(endpoint: "ucxx.Endpoint") -> None:
            while True:
                await endpoint.am_send(np.asarray(await endpoint.am_recv()))

        listener = ucxx.create_listener(echo)
        print(f"at {listener.port}", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        os._exit(0)

    asyncio.run(main())


def measure_ucxx(port: str) -> dict[str, object]:
    import ucxx

    async def main() -> dict[str, object]:
        endpoint = await ucxx.create_endpoint("127.0.0.1", int(port))
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
        return {**figures, "lanes": ucx_lanes()}

    return asyncio.run(main())


def ucx_lanes() -> str:
    """Those of active messages, of the last connection that UCX speaks of in its log."""
    # What UCX has written lies in a buffer of the C library.
    ctypes.CDLL(None).fflush(None)
    said = Path(os.environ["UCX_LOG_FILE"]).read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"cfg#\d+.*\bam\(([^)]*)\)", said)
    return found[-1] if found else "unknown lanes"


def measure_mpi4py(name: str) -> dict[str, object] | None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    is_pickled = name == "mpi4py pickled"
    buffers = {array.nbytes: np.empty_like(array) for array, _ in ARRAYS.values()}
    if world.rank == 1:
        if is_pickled:
            while (array := world.recv()) is not None:
                world.send(array, 0)
            return None
        status = MPI.Status()
        while True:
            world.Probe(0, status=status)
            size = status.Get_count(MPI.BYTE)
            if size == 0:
                return None
            world.Recv([buffers[size], MPI.BYTE], 0)
            world.Send([buffers[size], MPI.BYTE], 0)

    def echo(array: np.ndarray) -> np.ndarray:
        if is_pickled:
            world.send(array, 1)
            return world.recv()
        answer = buffers[array.nbytes]
        world.Send([array, MPI.BYTE], 1)
        world.Recv([answer, MPI.BYTE], 1)
        return answer

    figures = measured(echo)
    if is_pickled:
        world.send(None, 1)
    else:
        world.Send([np.empty(0, dtype=np.uint8), MPI.BYTE], 1)
    return {**figures, "lanes": MPI.Get_library_version().split(",")[0]}


def main() -> None:
    name = sys.argv[1]
    if name == "UCXX":
        os.environ["UCX_MM_ERROR_HANDLING"] = "y"
    if name.startswith("mpi4py"):
        figures = measure_mpi4py(name)
    elif "--serve" in sys.argv:
        serve_ucxx() if name.startswith("UCXX") else serve_grpc(name)
        return
    else:
        server, address = start_server(name)
        try:
            figures = measure_ucxx(address) if name.startswith("UCXX") else measure_grpc(address)
        finally:
            assert server.stdin is not None
            server.stdin.close()
            server.wait()
    if figures is not None:
        print(json.dumps(figures), flush=True)
    if name.startswith("UCXX"):
        os._exit(0)  # its threads may outlive the interpreter otherwise


if __name__ == "__main__":
    main()
