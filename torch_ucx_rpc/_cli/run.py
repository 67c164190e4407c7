"""Start the workers of a job on this machine, or this machine's part of a job on several, and wait for their end.

Each worker runs the program in a Python of its own, where torch_ucx_rpc.init_rpc() needs no arguments. What it writes
appears with its name in front. When one fails, the others are ended, its traceback comes last, and its exit code is
that of this command. Ctrl-C and SIGTERM end all.

    python -m torch_ucx_rpc run -n 4 train.py --epochs 3
    python -m torch_ucx_rpc run --role ps=2 --role trainer=8 train.py
    python -m torch_ucx_rpc run -n 4 --nnodes 2 --node-rank 0 --rdzv host0:29500 train.py    # and 1 on the other
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_ucx_rpc._torch.replace import VARIABLE as REPLACE_TENSORPIPE

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

HELP = "start workers"

# For the launchers of all machines to meet.
_RENDEZVOUS_S = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [options] (<script> | -m <module> | -c <code>) [its arguments]"
    workers = parser.add_argument_group("workers")
    workers.add_argument("-n", "--nproc", type=_positive, metavar="N", help="workers on this machine")
    workers.add_argument(
        "--role",
        dest="roles",
        action="append",
        default=[],
        type=_role,
        metavar="NAME=COUNT",
        help="a role and how many workers of the whole job have it; repeated, in the order of ranks. A worker finds "
        "its own in ROLE_NAME, ROLE_RANK and ROLE_WORLD_SIZE, and init_rpc() names it NAME0, NAME1, ...",
    )
    workers.add_argument(
        "--replace-tensorpipe",
        action="store_true",
        help=f"have programs for TensorPipe run on UCX as they are ({REPLACE_TENSORPIPE}=1)",
    )
    workers.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="what workers write goes to the files <name>.stdout and <name>.stderr there",
    )
    machines = parser.add_argument_group("several machines: the same command on each")
    machines.add_argument("--nnodes", type=_positive, default=1, metavar="N", help="machines of the job (default: 1)")
    machines.add_argument(
        "--node-rank",
        type=int,
        metavar="R",
        help="number of this one, from 0 on; ranks follow it",
    )
    machines.add_argument(
        "--rdzv", type=_endpoint, metavar="HOST:PORT", help="where they meet: a free port of number 0"
    )
    program = parser.add_argument_group("program")
    kinds = program.add_mutually_exclusive_group()
    kinds.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m")
    kinds.add_argument("-c", dest="code", nargs=argparse.REMAINDER, help="run this code, as python -c")
    program.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 0, that of the first worker that failed, or 128 and the number of a signal."""
    program = _program(arguments)
    roles = dict(arguments.roles)
    _check(arguments, roles)
    # elastic would tell of every step on stderr.
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)
    # Until the workers run, when elastic takes over: C++ code that waits for other machines would not hear of it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // arguments.nproc)))
    if arguments.replace_tensorpipe:
        os.environ[REPLACE_TENSORPIPE] = "1"
    return _run(arguments, roles, program)


def _program(arguments: argparse.Namespace) -> list[str]:
    """What follows ``python`` on the command line of a worker."""
    for option, words in {"-m": arguments.module, "-c": arguments.code}.items():
        if words is not None:
            if not words:
                arguments.error(f"{option} needs a {'module' if option == '-m' else 'program'}")
            return [option, *words]
    script: list[str] = arguments.script
    if script[:1] == ["--"]:
        script = script[1:]
    if not script:
        arguments.error("no program: give a script, -m <module> or -c <code>, after the options")
    if not Path(script[0]).exists():
        arguments.error(f"there is no script {script[0]}")
    return script


def _check(arguments: argparse.Namespace, roles: dict[str, int]) -> None:
    error, size = arguments.error, sum(roles.values())
    if len(roles) != len(arguments.roles):
        error("--role: each role once, with all of its workers")
    if arguments.nproc is None:
        if not roles:
            error("how many workers? -n N, or --role NAME=COUNT for each role")
        if size % arguments.nnodes:
            error(f"{size} workers cannot be divided evenly among {arguments.nnodes} machines: give each its -n")
        arguments.nproc = size // arguments.nnodes
    if arguments.nnodes == 1:
        if roles and size != arguments.nproc:
            error(f"-n {arguments.nproc}, and the roles are for {size} workers: leave out -n")
        if arguments.rdzv is not None or arguments.node_rank is not None:
            error("--rdzv and --node-rank are for several machines: give --nnodes too")
        return
    if arguments.rdzv is None or arguments.node_rank is None:
        error(
            f"--nnodes {arguments.nnodes} needs --rdzv HOST:PORT, the same on all machines, and --node-rank, another "
            f"on each"
        )
    if not 0 <= arguments.node_rank < arguments.nnodes:
        error(
            f"--node-rank {arguments.node_rank}: machines are counted from 0, so this is up to {arguments.nnodes - 1}"
        )


def _run(arguments: argparse.Namespace, roles: dict[str, int], program: list[str]) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException

    from torch_ucx_rpc._cli._job import MONITOR_INTERVAL_S, Failure, JobAgent, WorkerNames
    from torch_ucx_rpc._cli._output import WorkerOutput

    if arguments.log_dir is not None:
        try:
            arguments.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            arguments.error(f"--log-dir: {error}")
    output = WorkerOutput(arguments.log_dir)
    with contextlib.closing(output):
        names = WorkerNames(roles, output)
        host, port = arguments.rdzv or (None, None)
        try:
            spec = WorkerSpec(
                role="worker",
                local_world_size=arguments.nproc,
                entrypoint=sys.executable,
                # elastic substitutes ${local_rank}.
                args=tuple(word.replace("$", "$$") for word in program),
                rdzv_handler=_rendezvous(arguments),
                max_restarts=0,
                monitor_interval=MONITOR_INTERVAL_S,
                master_addr=host,
                master_port=port,
                local_addr="127.0.0.1" if arguments.nnodes == 1 else None,
            )
            JobAgent(spec, names, output).run()
            return 0
        except Failure as failure:
            output.close()
            words = failure.last_words and f", having written:\n{failure.last_words}"
            print(f"torch_ucx_rpc run: {failure}{words}", file=sys.stderr)
            return failure.exit_code if failure.exit_code > 0 else 128 - failure.exit_code
        except SignalException as received:
            output.close()
            print(f"torch_ucx_rpc run: {received.sigval.name}, all workers have been ended", file=sys.stderr)
            return 128 + received.sigval
        except DistError as error:
            print(f"torch_ucx_rpc run: no meeting at {host}:{port}, is the port in use? {error}", file=sys.stderr)
            return 1
        except (RuntimeError, ValueError) as error:
            print(f"torch_ucx_rpc run: {error}", file=sys.stderr)
            return 1


def _rendezvous(arguments: argparse.Namespace) -> RendezvousHandler:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from torch_ucx_rpc._bootstrap.rendezvous import Deadline, await_listener, is_this_host

    options: dict[str, Any] = {"timeout": _RENDEZVOUS_S}
    if arguments.nnodes == 1:
        backend, endpoint, run_id = "c10d", "localhost:0", uuid.uuid4().hex
        options |= {"is_host": True, "local_addr": "127.0.0.1"}
    else:
        host, port = arguments.rdzv
        endpoint = run_id = f"{host}:{port}"
        backend = "static"
        options["rank"] = arguments.node_rank
        if arguments.node_rank == 0:
            if not is_this_host(host):
                raise ValueError(f"--rdzv {endpoint} is not on this machine, which is the one of --node-rank 0")
        else:
            await_listener(host, port, "the launcher with --node-rank 0", Deadline(_RENDEZVOUS_S), "")
    return get_rendezvous_handler(
        RendezvousParameters(
            backend=backend,
            endpoint=endpoint,
            run_id=run_id,
            min_nodes=arguments.nnodes,
            max_nodes=arguments.nnodes,
            **options,
        )
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return number


def _role(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or not count.isdecimal() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not like trainer=8")
    return name, int(count)


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not like host0:29500")
    return host, int(port)
