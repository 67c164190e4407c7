"""The variables of launchers: pure functions that find rank, world size and meeting place in an environment.

These are the launchers and the variables that identify them, in the order in which this module tries them. If the
variables of several launchers are set, the earlier launcher counts. It runs inside the later one, as torchrun or mpirun
does in a job of Slurm, or the user has set its variables::

    torchrun, `python -m torch_ucx_rpc run`, by hand   RANK and WORLD_SIZE
    Open MPI's mpirun                                   OMPI_COMM_WORLD_RANK
    MPICH's mpirun, and others with hydra               PMI_RANK with MPI_LOCALNRANKS
    Slurm's srun                                        SLURM_PROCID with SLURM_STEP_ID
    another with PMI                                    PMI_RANK

MASTER_ADDR and MASTER_PORT, if set, apply under all launchers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

# Ports for Stores: below the ports that Linux hands out (32768 and up), above the ports of services. A job has several,
# in case the first is in use.
_FIRST_PORT, _PORTS = 16_384, 16_384
_PORTS_OF_A_JOB = 4

# Slurm counts the steps of srun from 0. Other steps, such as batch scripts and shells of salloc, count down from the
# largest number.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0

# torchrun's names for the role of a worker without a role.
NO_ROLES = ("", "default", "default_role")

Environ = Mapping[str, str]


class Launch(NamedTuple):
    """A worker's place in its job, from its launcher.

    ``hosts`` are hosts where rank 0 may be, the likeliest first; empty if unknown. ``job`` is a text that all workers
    of this job have, and no worker of another job; None if unknown.
    """

    launcher: str
    rank: int
    world_size: int
    name: str
    hosts: tuple[str, ...] = ()
    job: str | None = None
    # True if MPI started the worker: MPI then knows more than the variables say.
    speaks_mpi: bool = False


def find_launch(environ: Environ) -> Launch | None:
    """The launch according to the first launcher whose variables are set; None if there is none.

    Raises ValueError for variables that are incomplete, not numbers, or contradict each other.
    """
    for read in (_read_plain, _read_open_mpi, _read_hydra, _read_slurm, _read_pmi):
        launch = read(environ)
        if launch is not None:
            _check_agreement(environ, launch)
            return launch
    for given, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if environ.get(given):
            raise ValueError(f"{given}={environ[given]} is set and {missing} is not: set both, for every worker.")
    return None


def nothing_found(environ: Environ) -> str:
    """The error text, with the cure, for an environment without a launch."""
    cure = "Start the program with a launcher, such as `python -m torch_ucx_rpc run -n 2 <script>`,"
    if environ.get("SLURM_JOB_ID"):
        cure = f"This process is within job {environ['SLURM_JOB_ID']} of Slurm but no task of it: start it with srun,"
    return (
        "init_rpc() finds no source of this worker's rank and the number of workers. It has looked for RANK and "
        "WORLD_SIZE (torchrun, python -m torch_ucx_rpc run, Kubernetes, or by hand), OMPI_COMM_WORLD_RANK (Open MPI's "
        "mpirun), PMI_RANK (MPICH's mpirun), SLURM_PROCID with SLURM_STEP_ID (srun), and an initialized process group "
        f"of torch.distributed. {cure} or pass rank and world_size."
    )


def default_name(rank: int) -> str:
    return f"worker{rank}"


def ports_of(job: str) -> tuple[int, ...]:
    """Return the ports where the Store of a job may be. All its workers get the same ports, and other jobs most likely
    get others."""
    digests = (hashlib.sha256(f"{job} {attempt}".encode()).digest() for attempt in range(_PORTS_OF_A_JOB))
    return tuple(_FIRST_PORT + int.from_bytes(digest[:4], "big") % _PORTS for digest in digests)


def first_host(node_list: str) -> str:
    """The first host of a list that Slurm has compressed: "a07b" of ``"a[07-09,12]b,c"``."""
    # The text before the first comma outside of brackets, with the first number of each pair of brackets.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _read_plain(environ: Environ) -> Launch | None:
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        return None
    rank = _number(environ, "RANK")
    role = environ.get("ROLE_NAME", "")
    name = default_name(rank) if role in NO_ROLES else f"{role}{_number(environ, 'ROLE_RANK')}"
    launcher = "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "RANK and WORLD_SIZE"
    return Launch(launcher, rank, _number(environ, "WORLD_SIZE"), name)


def _read_open_mpi(environ: Environ) -> Launch | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    # Open MPI 4 and 5 set the first variable; Open MPI 4 without PMIx sets the second.
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    # Add the address of mpirun: another host may have a job of the same number.
    server = environ.get("OMPI_MCA_orte_hnp_uri", "")
    variables = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _read_mpi(environ, "Open MPI", *variables, job=job and f"Open MPI {job} {server}")


def _read_hydra(environ: Environ) -> Launch | None:
    if "PMI_RANK" not in environ or "MPI_LOCALNRANKS" not in environ:
        return None
    return _read_mpi(environ, "MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", job=None)


def _read_pmi(environ: Environ) -> Launch | None:
    if "PMI_RANK" not in environ:
        return None
    return _read_mpi(environ, "PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_SIZE", job=None)


def _read_mpi(environ: Environ, launcher: str, rank: str, size: str, local_size: str, job: str | None) -> Launch:
    number, world_size = _number(environ, rank), _number(environ, size)
    on_one_host = local_size in environ and _number(environ, local_size) == world_size
    return Launch(
        launcher,
        number,
        world_size,
        default_name(number),
        hosts=("127.0.0.1",) if on_one_host else (),
        job=job,
        speaks_mpi=True,
    )


def _read_slurm(environ: Environ) -> Launch | None:
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return None
    step = _number(environ, "SLURM_STEP_ID")
    if step >= _FIRST_SPECIAL_STEP:
        return None
    rank = _number(environ, "SLURM_PROCID")
    # SLURM_NTASKS may be the size of the whole job, of which this step is a part.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    job = " ".join(environ.get(f"SLURM_{part}", "") for part in ("CLUSTER_NAME", "JOB_ID", "STEP_ID", "RESTART_COUNT"))
    # Slurm lists the nodes of a step in the order of their tasks. But it sorts nodes of heterogeneous steps by name,
    # and rank 0 is the first task of one of the groups.
    lists = [environ.get("SLURM_STEP_NODELIST", "")]
    for group in ("HET_GROUP", "PACK_GROUP"):
        pattern = re.compile(rf"SLURM_JOB_NODELIST_{group}_\d+")
        lists += [environ[variable] for variable in sorted(environ) if pattern.fullmatch(variable)]
    hosts = dict.fromkeys(first_host(nodes) for nodes in lists if nodes)
    return Launch("Slurm", rank, _number(environ, size), default_name(rank), tuple(hosts), f"Slurm {job}")


def _check_agreement(environ: Environ, launch: Launch) -> None:
    """Raise ValueError if RANK or WORLD_SIZE, set alone, contradicts the launcher's variables."""
    for variable, number in {"RANK": launch.rank, "WORLD_SIZE": launch.world_size}.items():
        if environ.get(variable) and _number(environ, variable) != number:
            other = "WORLD_SIZE" if variable == "RANK" else "RANK"
            raise ValueError(
                f"{variable}={environ[variable]} contradicts {launch.launcher}, by which it is {number}: unset "
                f"{variable}, or set {other} as well."
            )


def _number(environ: Environ, variable: str) -> int:
    text = environ.get(variable, "")
    if not text.isdecimal():
        raise ValueError(f"{variable}={text} is not a number from 0 on.")
    return int(text)
