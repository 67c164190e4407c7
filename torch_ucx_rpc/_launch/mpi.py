"""The host of rank 0, broadcast over MPI: for workers under mpirun, where no variable has it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import socket
import time
import uuid
from typing import Any

from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._launch.environment import Launch
from torch_ucx_rpc.errors import JoinFailed, JoinTimedOut

# Room for a host name, of 64 letters at most, and a number.
_LETTER_BYTES = 256

_CHOOSE = (
    "let mpi4py use the MPI of this mpirun (with mpi4py's wheels: MPI4PY_MPIABI=mpich or openmpi, and its library as "
    "libmpi.so.12 or libmpi.so.40 in LD_LIBRARY_PATH)"
)
_SET_ADDRESS = "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"


def is_installed() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


def ask_for_rank_0(launch: Launch, timeout: float) -> tuple[str, str]:
    """The host of rank 0 and a name for this job, broadcast by rank 0. All workers that mpirun started must call this.

    Imports mpi4py, which initializes MPI unless the program has done so. UCX is loaded by then, and Open MPI uses that
    UCX instead of an older one of its own. If Open MPI has loaded an older UCX before, ``_native`` refuses it.

    Raises JoinFailed if mpi4py belongs to another MPI than mpirun, or if MPI cannot start. Raises JoinTimedOut if the
    other workers have not come within ``timeout`` seconds (0: no limit).
    """
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise JoinFailed(
            f"mpi4py is installed and cannot be used to find rank 0: {error}. Either {_CHOOSE}, or {_SET_ADDRESS}."
        ) from None
    world = mpi.COMM_WORLD
    if (world.rank, world.size) != (launch.rank, launch.world_size):
        library = mpi.Get_library_version().split(",")[0].strip()
        raise JoinFailed(
            f"mpi4py uses {library}, which takes this worker for rank {world.rank} of {world.size}, and "
            f"{launch.launcher} started it as rank {launch.rank} of {launch.world_size}: the two belong to different "
            f"MPIs. Start with the mpirun of that library; or {_CHOOSE}; or {_SET_ADDRESS}."
        )
    letter = bytearray(_LETTER_BYTES)
    if world.rank == 0:
        text = json.dumps([socket.gethostname(), uuid.uuid4().hex])
        letter[:] = text.encode().ljust(_LETTER_BYTES)
    deadline = Deadline(timeout)
    _await(world.Ibcast([letter, mpi.BYTE], 0), world.rank, deadline)
    # Without these barriers, MPICH 4.0 over UCX would hang in MPI_Finalize, at the end of the process. It hangs if all
    # messages of a connection went in one direction.
    for _ in range(2):
        _await(world.Ibarrier(), world.rank, deadline)
    host, job = json.loads(letter)
    return host, job


def _await(request: Any, rank: int, deadline: Deadline) -> None:
    # Polled, since Ctrl-C does not interrupt MPI's own wait.
    while not request.Test():
        if deadline.passed():
            raise JoinTimedOut(
                f"rank {rank} has waited {deadline.timeout:g} s (init_timeout) for the others, over MPI, to learn "
                f"where rank 0 is: check that all workers get as far as init_rpc().",
                timeout=deadline.timeout,
            )
        time.sleep(0.001)
