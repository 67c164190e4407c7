"""The command line: ``torch-ucx-rpc COMMAND``, and the same as ``python -m torch_ucx_rpc COMMAND``.

This module has the arguments, the help and the exit codes of all commands. It is beside the package and imports nothing
of it before a command runs. The package imports torch, and ``--help`` should not wait for that.

Each command is a module of the same name in ``torch_ucx_rpc._cli``. Its ``main(arguments) -> int`` returns the exit
code. ``arguments.error(text)`` ends it as argparse does for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import enum
import importlib
import importlib.metadata
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from _torch_ucx_rpc_autoload import VARIABLE as REPLACE_TENSORPIPE

# The words that `run --nproc` takes besides numbers; torch.distributed.run explains them.
DEVICES = ("auto", "cpu", "gpu")


class ExitCode(enum.IntEnum):
    """Exit codes, one for each outcome of any command. ``run`` also returns its workers' codes."""

    OK = 0
    # Python's own code after an exception, such as a failed import.
    BROKEN = 1
    # argparse's own code.
    WRONG_ARGUMENTS = 2
    UNREACHABLE = 3
    WARNINGS = 4
    NO_JOB = 5
    NOT_STARTED = 6


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names (default: this process's arguments), and return its exit code."""
    _open_closed_streams()
    arguments = _parser().parse_args(argv)
    command = importlib.import_module(f"torch_ucx_rpc._cli.{arguments.command}")
    try:
        with _stdout_of_python_alone() if getattr(arguments, "json", False) else contextlib.nullcontext():
            code: int = command.main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout has ended (`| head`). Python would fail once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN
    return code


def _open_closed_streams() -> None:
    """Send to nowhere what this process writes to a stream that it was started without, as by ``>&-``.

    Otherwise Python has None there, and the next files that are opened get the numbers of the streams.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _parser() -> argparse.ArgumentParser:
    is_module = Path(sys.argv[0]).name == "__main__.py"
    parser = argparse.ArgumentParser(
        prog="python -m torch_ucx_rpc" if is_module else "torch-ucx-rpc", description="UCX for torch.distributed.rpc"
    )
    parser.add_argument("--version", action="version", version=f"torch_ucx_rpc {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add_arguments, line in COMMANDS.items():
        name = add_arguments.__name__.removeprefix("_")
        command = commands.add_parser(
            name,
            help=line,
            description=inspect.getdoc(add_arguments),
            formatter_class=_Help,
            # A program's own --n is not a short form of --nnodes.
            allow_abbrev=False,
        )
        add_arguments(command)
        command.set_defaults(error=command.error)
    return parser


class _Help(argparse.RawDescriptionHelpFormatter):
    """Paragraphs fill the terminal's width; indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(part if part.startswith(" ") else textwrap.fill(part, width) for part in paragraphs)


def _version() -> str:
    try:
        return importlib.metadata.version("torch_ucx_rpc")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@contextlib.contextmanager
def _stdout_of_python_alone() -> Iterator[None]:
    """Keep stdout for the JSON that Python prints: output of C code, such as UCX's log, goes to stderr.

    So does the output of processes that are started in the block.
    """
    before = sys.stdout
    if before is not sys.__stdout__ or before is None:
        # The caller, such as a test, captures Python's output in memory: there is no file to redirect.
        yield
        return
    before.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
        os.dup2(2, 1)
        sys.stdout = stdout
        try:
            yield
        finally:
            sys.stdout = before
            ctypes.CDLL(None).fflush(None)
            os.dup2(stdout.fileno(), 1)


# ---- The commands ----------------------------------------------------------------------------------------------------


def _run(parser: argparse.ArgumentParser) -> None:
    """Start the workers of a job, or this machine's part of a job on several machines, and wait until they end.

    Each worker runs the program in a Python of its own, where torch_ucx_rpc.init_rpc() needs no arguments. Its output
    appears with its name in front. If a worker fails, this command ends the others, and shows the worker's traceback
    last. The exit code is then that of the worker, or 128 plus the number of the signal that killed it. Ctrl-C and
    SIGTERM end the workers of all machines. The exit code is 6 if the job could not start, or if its machines lost each
    other.

        torch-ucx-rpc run -n 4 train.py --epochs 3
        torch-ucx-rpc run --role ps=2 --role trainer=8 train.py
        torch-ucx-rpc run -n gpu --max-restarts 3 --log-dir logs train.py
        torch-ucx-rpc run -n 4 --nnodes 2 --node-rank 0 --rdzv host0:29500 train.py
    """
    parser.usage = f"{parser.prog} [options] (<script> | -m <module> | -c <code>) [its arguments]"
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "-n",
        "--nproc",
        type=_number_or_devices,
        metavar="N",
        help="workers on this machine: a number; gpu or cpu, one for each; or auto, which is gpu where there is one, "
        "else cpu",
    )
    workers.add_argument(
        "--role",
        dest="roles",
        action="append",
        default=[],
        type=_role,
        metavar="NAME=COUNT",
        help="a role, and its number of workers in the whole job; repeat it in the order of ranks. A worker finds "
        "its role in ROLE_NAME, ROLE_RANK and ROLE_WORLD_SIZE, and init_rpc() names it NAME0, NAME1, ...",
    )
    workers.add_argument(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="N",
        help="how often to restart all workers after one has failed (default: 0). TORCHELASTIC_RESTART_COUNT has the "
        "number of restarts so far",
    )
    workers.add_argument(
        "--start",
        choices=("fork", "exec"),
        help="fork: from a process that has imported torch; exec: each worker imports torch itself (default: fork, "
        "unless a worker could notice it)",
    )
    workers.add_argument(
        "--preload",
        type=_modules,
        default=[],
        metavar="MODULE,...",
        help="modules to import before the fork, besides torch",
    )
    workers.add_argument(
        "--replace-tensorpipe",
        action="store_true",
        help=f"let programs written for TensorPipe run on UCX unchanged ({REPLACE_TENSORPIPE}=1)",
    )
    workers.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="write the output of workers to files <name>.stdout and <name>.stderr in this folder, over those of an "
        "earlier run",
    )
    machines = parser.add_argument_group("several machines: the same command on each")
    machines.add_argument("--nnodes", type=_positive, default=1, metavar="N", help="machines of the job (default: 1)")
    machines.add_argument(
        "--node-rank",
        type=int,
        metavar="R",
        help="number of this machine, from 0 on; ranks follow the order of these numbers",
    )
    machines.add_argument(
        "--rdzv", type=_endpoint, metavar="HOST:PORT", help="where the machines meet: a free port of machine 0"
    )
    program = parser.add_argument_group("program")
    kinds = program.add_mutually_exclusive_group()
    kinds.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m")
    kinds.add_argument("-c", dest="code", nargs=argparse.REMAINDER, help="run this code, as python -c")
    program.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _info(parser: argparse.ArgumentParser) -> None:
    """Show what this installation and this machine offer, and the problems of both with their cures.

    This command also runs where the package itself cannot be imported. The exit code is 1 if the package cannot be
    used. With --strict it is 4 if there are other problems. Otherwise it is 0.
    """
    parser.add_argument("--strict", action="store_true", help="exit with 4 if there are warnings")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def _check(parser: argparse.ArgumentParser) -> None:
    """Start workers that call each other. Show for each pair UCX's transports, and how fast the calls are.

    Without a launcher it starts workers on this machine. Under a launcher (srun, mpirun, torchrun) each process is a
    worker, and rank 0 prints the result. It warns of each pair that is slower than it should be, and names the cure.
    The exit code of rank 0 is 0 if all is well, 4 after warnings, and 3 if workers could not call each other.
    """
    parser.add_argument(
        "-n",
        "--workers",
        type=int,
        metavar="N",
        help="how many workers to start here (default: 2; not under a launcher)",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for workers and calls (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print everything that was measured as JSON")


def _top(parser: argparse.ArgumentParser) -> None:
    """Watch all workers of a running job: calls, bytes, queues, memory and latencies, every second.

    This command finds this user's workers on this host without a setting in the job. These workers ask the workers on
    other hosts. Ctrl-C ends the command. The exit code is 5 if there is no job to watch, or several. The columns
    (a narrow terminal shows only some):

        calls, open   calls made by the worker, and those that wait for an answer
        p50, p99      durations of the calls that ended in the last interval
        sent, recv    bytes of messages
        run, wait     calls of others that a thread runs; those that wait
                      for one, and messages that wait at their senders
        window        how much of receive_window_bytes is in use
        pool          memory of receive buffers, in use and idle
        failed        calls made by the worker that failed, since its start

    With --services there is a line for each name of torch_ucx_rpc.services and each worker that offers it. The line has
    the number of replicas, the calls, the calls that are running, and the calls that have raised since the name was
    registered.
    """
    parser.add_argument(
        "--pid", type=int, help="a worker of the job to watch, if several jobs have workers on this host"
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two updates (default: 1)"
    )
    parser.add_argument("--peers", action="store_true", help="a line for each pair of workers, with its lanes")
    parser.add_argument("--services", action="store_true", help="a line for each name and each worker that offers it")
    parser.add_argument("--once", action="store_true", help="show the calls so far once, and end")
    parser.add_argument("--json", action="store_true", help="with --once: all statistics as JSON")


# In the order of --help, with their lines there.
COMMANDS: dict[Callable[[argparse.ArgumentParser], None], str] = {
    _run: "start workers",
    _info: "show versions, devices, limits and settings, and what is wrong with them",
    _check: "let all workers call each other, and show how fast they are",
    _top: "watch all workers of a running job",
}


# ---- Types of arguments ----------------------------------------------------------------------------------------------


def _number(text: str, least: int) -> int:
    # A ValueError here would put the name of the type, a function of this module, into argparse's message.
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a number from {least} on")
    return int(text)


def _count(text: str) -> int:
    return _number(text, 0)


def _positive(text: str) -> int:
    return _number(text, 1)


def _number_or_devices(text: str) -> int | str:
    if text in DEVICES:
        return text
    if text.isalpha():
        raise argparse.ArgumentTypeError(f"{text} is neither a number nor one of {', '.join(DEVICES)}")
    return _positive(text)


def _role(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or not count.isdecimal() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not like trainer=8")
    return name, int(count)


def _modules(text: str) -> list[str]:
    modules = text.split(",")
    if not all(part.isidentifier() for module in modules for part in module.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not like transformers,datasets")
    return modules


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not like host0:29500")
    return host.removeprefix("[").removesuffix("]"), int(port)
