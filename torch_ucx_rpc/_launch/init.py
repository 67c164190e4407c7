"""`init_rpc` for workers that a launcher started: all that it needs is in their environment."""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from torch_ucx_rpc import _start
from torch_ucx_rpc._bootstrap.record import process_stat, start_time
from torch_ucx_rpc._bootstrap.rendezvous import JobAddress, check_port, create_store, open_job_store
from torch_ucx_rpc._launch import mpi
from torch_ucx_rpc._launch.environment import Launch, default_name, find_launch, nothing_found, ports_of
from torch_ucx_rpc._options import UcxRpcBackendOptions, check_url

# Where the workers meet, as a URL; above all for a file that all hosts see, where nothing else tells them.
_INIT_METHOD = "TORCH_UCX_RPC_INIT_METHOD"


def init_rpc(
    name: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rpc_backend_options: UcxRpcBackendOptions | None = None,
) -> None:
    """``torch.distributed.rpc.init_rpc`` on UCX; what is not given, the launcher of the process tells.

    The launcher is ``python -m torch_ucx_rpc run``, torchrun or whoever sets RANK and WORLD_SIZE; if none of them is,
    mpirun of Open MPI or MPICH; if it is not, Slurm's srun. Without any, an initialized process group of
    ``torch.distributed`` tells rank and size.

    Where the workers meet is decided by the first of these that is there: an ``init_method`` other than ``env://`` in
    the options; the URL in TORCH_UCX_RPC_INIT_METHOD; MASTER_ADDR and MASTER_PORT; the first host of the step, under
    Slurm; this host, under an mpirun that uses no other; what rank 0 says over MPI, with mpi4py, under an mpirun that
    does; the Store of the process group. Where only a host is known, one of four ports is taken that follow from the
    number of the job.

    Args:
        name (str): of this worker (default: its role and its number in that, as ``"trainer3"``, or ``"worker3"``).
        rank (int): number of this worker, from 0 on.
        world_size (int): how many workers there are; 0 for a group that workers join and leave.
        rpc_backend_options (UcxRpcBackendOptions): as for ``torch.distributed.rpc.init_rpc``.

    Raises RuntimeError when nothing tells rank, size or meeting place; ValueError for variables that cannot be true;
    and what ``torch.distributed.rpc.init_rpc`` raises.

    Example::

        >>> torch_ucx_rpc.init_rpc()  # in train.py, started by: python -m torch_ucx_rpc run -n 4 train.py
    """
    options = UcxRpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    launch = find_launch(os.environ) or _process_group()
    if rank is None or world_size is None:
        if launch is None:
            raise RuntimeError(nothing_found(os.environ))
        if name is None and rank is None:
            name = launch.name
        rank = launch.rank if rank is None else rank
        world_size = launch.world_size if world_size is None else world_size
    if name is None:
        name = default_name(rank)
    _start.init_rpc(name, rank, world_size, options, open_store=functools.partial(_open_store, launch))


def _process_group() -> Launch | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank = dist.get_rank()
    return Launch("process group", rank, dist.get_world_size(), default_name(rank))


def _open_store(launch: Launch | None, init_method: str, rank: int, world_size: int | None, timeout: float) -> Store:
    """The Store where the workers of this job meet; see `init_rpc`."""
    if init_method == "env://":
        init_method = check_url(_INIT_METHOD, os.environ.get(_INIT_METHOD) or init_method)
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if init_method != "env://" or (host and port):
        return create_store(init_method, rank, world_size, timeout)
    if launch is not None and rank == launch.rank and world_size in (None, launch.world_size):
        hosts, job = (host,) if host else launch.hosts, launch.job
        if launch.speaks_mpi and not hosts:
            if not mpi.is_installed():
                raise _no_host(launch)
            found, job = mpi.ask_for_rank_0(launch, timeout)
            hosts = (found,)
        elif launch.speaks_mpi and not host and job is None:
            # All are on this host, and have the same ancestor.
            job = f"{launch.launcher} {_starting_process('PMI_RANK')}"
        if hosts and job is not None:
            address = JobAddress(job, hosts, ports_of(job) if port is None else (check_port(port),))
            return open_job_store(address, rank, world_size, timeout)
    group = _process_group()
    if group is not None and (rank, world_size) == (group.rank, group.world_size):
        return PrefixStore("torch_ucx_rpc", _get_default_store())
    # Which says what of MASTER_ADDR and MASTER_PORT is missing.
    return create_store(init_method, rank, world_size, timeout)


def _no_host(launch: Launch) -> RuntimeError:
    option = "-x" if launch.launcher == "Open MPI" else "-genv"
    return RuntimeError(
        f"{launch.launcher} has started the workers on several hosts and tells none of them where rank 0 is: set "
        f"MASTER_ADDR to its host and MASTER_PORT to a free port there (mpirun {option}). Or install mpi4py, to "
        f"have MPI asked; or set {_INIT_METHOD} to file:///<path of a new file that all hosts see>."
    )


def _starting_process(variable: str) -> str:
    """Number and start time of the nearest ancestor that has not this variable: who set it for its children."""
    pid = os.getppid()
    try:
        while variable.encode() + b"=" in Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(process_stat(pid)[1])
    except OSError:
        # Another user's, which has not been started by mpirun.
        pass
    return f"{pid} {start_time(pid)}"
