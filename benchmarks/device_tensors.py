"""How fast do tensors on a GPU travel?

The echo of CUDA tensors between two workers that share one GPU, with device maps and default options. It is compared
with UCX's own ucx_perftest with device memory, over the lanes that UCX chooses. The messages of ucx_perftest wait for
each other, like those of an echo, except the messages of 1 GiB.
"""

from __future__ import annotations

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure
from benchmarks.large_tensors import echo, ucx_perftest

KIB, MIB, GIB = 2**10, 2**20, 2**30
# The limit of a round, and of the start. Where the machine's time is short, a hanging contender must leave time for the
# others.
LIMIT_S = 40.0
SIZES = {"4 KiB": (4 * KIB, 500), "1 MiB": (MIB, 200), "64 MiB": (64 * MIB, 20), "1 GiB": (GIB, 5)}
DEVICE_MAPS = {"device_maps": {"worker0": {0: 0}, "worker1": {0: 0}}}

UCX = jobs.Transport("UCX", "UCX", options=DEVICE_MAPS)
UCX_RMM = jobs.Transport("UCX, rmm", "UCX", options={**DEVICE_MAPS, "device_pool": "rmm"})
TENSORPIPE = jobs.Transport("TensorPipe", "TENSORPIPE", options=DEVICE_MAPS)


def measure() -> harness.Figures:
    figures = {}
    for name, (size, calls) in SIZES.items():
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        assert torch.equal(rpc.rpc_sync("worker1", echo, (tensor,)), tensor)  # this also warms up

        def call(tensor: torch.Tensor = tensor) -> None:
            rpc.rpc_sync("worker1", echo, (tensor,))
            torch.cuda.current_stream().synchronize()

        duration = harness.p50(harness.durations_us(call, calls))
        if size < MIB:
            figures[f"echo of {name}, p50"] = duration
        else:
            figures[f"echo of {name}, both ways"] = 2 * size / GIB / (1e-6 * duration)
    return figures


def measure_ucx_perftest() -> harness.Figures:
    return {
        f"echo of {name}, both ways": ucx_perftest(
            size, 20, "ucp_am_lat" if size < GIB else "ucp_am_bw", lanes="all", memory="cuda"
        )
        for name, (size, _) in SIZES.items()
        if size >= MIB
    }


def has_rmm() -> bool:
    try:
        import rmm  # noqa: F401
    except ImportError:
        return False
    return True


BENCHMARK = harness.Benchmark(
    question="How fast do tensors on a GPU travel?",
    figures=(
        Figure("echo of 4 KiB, p50", "us", (Bound(1, 0.5),)),
        *(
            Figure(
                f"echo of {name}, both ways",
                "GiB/s",
                (Bound(1, 2), Bound(None, 0.8, reference="ucx_perftest")),
                more_is_better=True,
            )
            for name in ("1 MiB", "64 MiB", "1 GiB")
        ),
    ),
    contenders=lambda: [
        jobs.RpcJob(UCX, measure, limit_s=LIMIT_S),
        jobs.RpcJob(TENSORPIPE, measure, limit_s=LIMIT_S),
        *([jobs.RpcJob(UCX_RMM, measure, limit_s=LIMIT_S)] if has_rmm() else []),
        jobs.Baseline("ucx_perftest", measure_ucx_perftest),
    ],
    in_short_set=False,
    needs_gpu=True,
)
