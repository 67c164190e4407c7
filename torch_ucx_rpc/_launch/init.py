"""`init_rpc` for workers that a launcher started: rank, world size and meeting place are in the environment."""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
import os

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from torch_ucx_rpc import _start
from torch_ucx_rpc._bootstrap.rendezvous import JobAddress, check_port, create_store, open_job_store
from torch_ucx_rpc._launch import hydra, mpi
from torch_ucx_rpc._launch.environment import Launch, default_name, find_launch, nothing_found, ports_of
from torch_ucx_rpc._options import UcxRpcBackendOptions, check_url
from torch_ucx_rpc.errors import JoinFailed

# The meeting place as a URL; mostly a file that all hosts see, under launchers that do not name rank 0's host.
_INIT_METHOD = "TORCH_UCX_RPC_INIT_METHOD"


def init_rpc(
    name: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rpc_backend_options: UcxRpcBackendOptions | None = None,
) -> None:
    """``torch.distributed.rpc.init_rpc`` on UCX. The launcher of the process supplies the arguments that are not given.

    The launcher is the first of these whose variables are set: RANK and WORLD_SIZE (``python -m torch_ucx_rpc run``,
    torchrun, or by hand), mpirun of Open MPI or MPICH, Slurm's srun, another launcher with PMI_RANK. Without a
    launcher, rank and size are those of an initialized process group of ``torch.distributed``.

    The meeting place of the workers is the first of these that is known:

    * an ``init_method`` other than ``env://`` in the options
    * the URL in TORCH_UCX_RPC_INIT_METHOD
    * MASTER_ADDR and MASTER_PORT
    * under Slurm, the first host of the step
    * under an mpirun that uses only this host, this host
    * under another mpirun, the host of rank 0, asked over MPI; this needs mpi4py
    * the Store of the process group

    If only a host is known, the port is MASTER_PORT, or one of four that follow from the job's identity.

    Args:
        name (str): name of this worker (default: its role and its number in it, such as ``"trainer3"``, or
            ``"worker3"``).
        rank (int): number of this worker, from 0 on (default: from the launcher).
        world_size (int): number of workers; 0 for a group that workers join and leave (default: from the launcher).
        rpc_backend_options (UcxRpcBackendOptions): as for ``torch.distributed.rpc.init_rpc`` (default:
            `UcxRpcBackendOptions` without arguments).

    Raises JoinFailed if rank or size is unknown, or under mpirun the host of rank 0. Raises ValueError for missing,
    impossible or contradictory environment variables. Raises JoinTimedOut if others have not come within
    ``init_timeout``. TypeError, ValueError and JoinFailed for arguments are those of
    ``torch.distributed.rpc.init_rpc(..., backend="UCX")``.

    Example::

        >>> torch_ucx_rpc.init_rpc()  # in train.py, started by: python -m torch_ucx_rpc run -n 4 train.py
    """
    options = UcxRpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    launch = find_launch(os.environ) or _process_group()
    if rank is None or world_size is None:
        if launch is None:
            raise JoinFailed(nothing_found(os.environ))
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
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT") or None
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
            job = hydra.job_on_this_host(launch)
        if hosts and job is not None:
            address = JobAddress(job, hosts, ports_of(job) if port is None else (check_port(port),))
            return open_job_store(address, rank, world_size, timeout)
    group = _process_group()
    if group is not None and (rank, world_size) == (group.rank, group.world_size):
        return PrefixStore("torch_ucx_rpc", _get_default_store())
    # This raises the error that names the missing variable: MASTER_ADDR or MASTER_PORT.
    return create_store(init_method, rank, world_size, timeout)


def _no_host(launch: Launch) -> JoinFailed:
    option = "-x" if launch.launcher == "Open MPI" else "-genv"
    return JoinFailed(
        f"{launch.launcher} has started the workers on several hosts and does not say where rank 0 is: set "
        f"MASTER_ADDR to its host and MASTER_PORT to a free port there (mpirun {option}). Or install mpi4py, "
        f"with which init_rpc asks MPI; or set {_INIT_METHOD} to file:///<path of a new file that all hosts see>."
    )
