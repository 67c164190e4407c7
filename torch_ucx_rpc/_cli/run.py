"""``torch-ucx-rpc run``: checks the arguments, and runs this machine's part of the job by torch.distributed.elastic."""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import re
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from _torch_ucx_rpc_autoload import VARIABLE as REPLACE_TENSORPIPE
from _torch_ucx_rpc_cli import ExitCode
from torch_ucx_rpc._cli._signals import Signals
from torch_ucx_rpc._cli._starter.client import Starter
from torch_ucx_rpc._launch.environment import NO_ROLES

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

# Time for the launchers of all machines to meet.
_RENDEZVOUS_S = 600

# torch's pattern for a worker's name, without the index. A name has fewer than 128 letters.
_ROLE = re.compile(r"[A-Za-z0-9_:-]{1,100}")


def main(arguments: argparse.Namespace) -> int:
    """Run the job, and end this process with its exit code: `_torch_ucx_rpc_cli` explains the codes."""
    program = _program(arguments)
    roles = dict(arguments.roles)
    if isinstance(arguments.nproc, str):
        arguments.nproc = _count(arguments)
    _check(arguments, roles)
    # elastic would log every step to stderr.
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)
    signals = Signals()

    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // arguments.nproc)))
    if arguments.replace_tensorpipe:
        os.environ[REPLACE_TENSORPIPE] = "1"
    # The imported objects stay. `_run` turns collections on again.
    gc.disable()
    # The starter imports torch at the same time as this process.
    with contextlib.closing(Starter(program, arguments.start, arguments.preload)) as starter:
        code = _run(arguments, roles, signals, starter)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # Everything is closed. Python and torch would spend a quarter of a second on the remaining objects.
    os._exit(code)


def _program(arguments: argparse.Namespace) -> list[str]:
    """The arguments after ``python`` on the command line of a worker."""
    for option, words in {"-m": arguments.module, "-c": arguments.code}.items():
        if words is not None:
            if not words:
                arguments.error(f"{option} needs a {'module' if option == '-m' else 'program'}")
            # argparse gives the words after "--" to the script.
            return [option, *words, *arguments.script]
    script: list[str] = arguments.script
    if script[:1] == ["--"]:
        script = script[1:]
    if not script:
        arguments.error("no program: give a script, -m <module> or -c <code>, after the options")
    if not Path(script[0]).exists():
        arguments.error(f"there is no script {script[0]}")
    return script


def _count(arguments: argparse.Namespace) -> int:
    """The number of workers for ``--nproc auto``, ``cpu`` or ``gpu``, as torchrun counts them."""
    from torch.distributed.run import determine_local_world_size

    try:
        count: int = determine_local_world_size(arguments.nproc)
    except ValueError as error:
        arguments.error(f"--nproc {arguments.nproc}: {error}")
    return count


def _check(arguments: argparse.Namespace, roles: dict[str, int]) -> None:
    error, size = arguments.error, sum(roles.values())
    if len(roles) != len(arguments.roles):
        error("--role: each role once, with all of its workers")
    _check_names(arguments, roles)
    if arguments.preload and arguments.start == "exec":
        error("--preload is for workers by fork: leave out --start exec")
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
            f"--nnodes {arguments.nnodes} needs --rdzv HOST:PORT, the same on all machines, and --node-rank, a "
            f"different one on each"
        )
    if not 0 <= arguments.node_rank < arguments.nnodes:
        error(
            f"--node-rank {arguments.node_rank}: machines are counted from 0, so this is up to {arguments.nnodes - 1}"
        )


def _check_names(arguments: argparse.Namespace, roles: dict[str, int]) -> None:
    owners: dict[str, str] = {}
    for role, count in roles.items():
        if not _ROLE.fullmatch(role):
            arguments.error(
                f"--role {role}: a worker cannot have that name, only letters, digits, _, - and :, at most 100 of them"
            )
        if role in NO_ROLES:
            arguments.error(f"--role {role}: torchrun uses this name for workers without a role; choose another name")
        for index in range(count):
            name = f"{role}{index}"
            owner = owners.setdefault(name, role)
            if owner != role:
                arguments.error(
                    f"--role: workers of {owner} and of {role} would both be {name}: rename one of the roles"
                )


def _run(arguments: argparse.Namespace, roles: dict[str, int], signals: Signals, starter: Starter) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException

    from torch_ucx_rpc._cli._job import MONITOR_INTERVAL_S, Failure, JobAgent, WorkerNames
    from torch_ucx_rpc._cli._output import WorkerOutput

    gc.freeze()
    gc.enable()
    if arguments.log_dir is not None:
        try:
            arguments.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            arguments.error(f"--log-dir: {error}")
    try:
        output = WorkerOutput(arguments.log_dir)
    except OSError as error:
        print(f"torch_ucx_rpc run: there is no place for the pipes of workers' output: {error}", file=sys.stderr)
        return ExitCode.NOT_STARTED
    with contextlib.closing(output):
        names = WorkerNames(roles, output)
        host, port = arguments.rdzv or (None, None)
        try:
            spec = WorkerSpec(
                role="worker",
                local_world_size=arguments.nproc,
                entrypoint=sys.executable,
                rdzv_handler=_rendezvous(arguments),
                max_restarts=arguments.max_restarts,
                monitor_interval=MONITOR_INTERVAL_S,
                master_addr=host,
                master_port=port,
                local_addr="127.0.0.1" if arguments.nnodes == 1 else None,
            )
            JobAgent(spec, names, output, signals, starter).run()
            return ExitCode.OK
        except Failure as failure:
            output.close()
            words = failure.last_words and f", having written:\n{failure.last_words}"
            print(f"torch_ucx_rpc run: {failure}{words}", file=sys.stderr)
            return failure.exit_code
        except SignalException as received:
            output.close()
            print(f"torch_ucx_rpc run: {received}, all workers have been ended", file=sys.stderr)
            return 128 + received.sigval
        except DistError as error:
            what = f"no meeting at {host}:{port}, is the port in use?" if host else "the Store cannot be opened:"
            # The lines after the first are the frames of C++.
            print(f"torch_ucx_rpc run: {what} {str(error).partition(chr(10))[0]}", file=sys.stderr)
            return ExitCode.NOT_STARTED
        except (OSError, RuntimeError, ValueError) as error:
            print(f"torch_ucx_rpc run: {error}", file=sys.stderr)
            return ExitCode.NOT_STARTED


def _rendezvous(arguments: argparse.Namespace) -> RendezvousHandler:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    from torch_ucx_rpc._bootstrap.deadline import Deadline
    from torch_ucx_rpc._bootstrap.listener import await_listener, is_this_host

    # If the extension cannot be loaded, the workers say why.
    with contextlib.suppress(ImportError):
        from torch_ucx_rpc._native import _C

        _C.spare_name_lookups()
    if arguments.nnodes == 1:
        # At a free port. (torch's rendezvous "c10d" finds one too, but may pause for a second at each meeting.)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        handler = StaticTCPRendezvous("127.0.0.1", store.port, 0, 1, uuid.uuid4().hex, _RENDEZVOUS_S)
        handler._store = store
        return handler
    host, port = arguments.rdzv
    endpoint = f"{host}:{port}"
    if arguments.node_rank != 0:
        await_listener(host, port, "the launcher with --node-rank 0", Deadline(_RENDEZVOUS_S), "")
    elif not is_this_host(host):
        raise ValueError(f"--rdzv {endpoint} must be an address of this machine, since it has --node-rank 0")
    return StaticTCPRendezvous(host, port, arguments.node_rank, arguments.nnodes, endpoint, _RENDEZVOUS_S)
