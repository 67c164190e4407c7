"""The command line: each command is a module of this package, of the same name, which has

* a docstring, shown above its options, and ``HELP``, its line in the list of commands;
* ``add_arguments(parser)``;
* ``main(arguments) -> int``, the exit code. ``arguments.error(text)`` ends it as argparse does for wrong arguments.

What it needs beyond argparse it imports when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import torch_ucx_rpc

# The commands, in the order of --help.
COMMANDS: tuple[str, ...] = ("run", "info", "check", "top")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv``, by default the process's own, names; return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # The list of commands needs all modules, and running a command needs one.
    names = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    parser = argparse.ArgumentParser(prog="python -m torch_ucx_rpc", description="UCX for torch.distributed.rpc")
    parser.add_argument("--version", action="version", version=f"torch_ucx_rpc {torch_ucx_rpc.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in names:
        command = importlib.import_module(f"torch_ucx_rpc._cli.{name}")
        command_parser = commands.add_parser(
            name,
            help=command.HELP,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(command_parser)
        command_parser.set_defaults(main=command.main, error=command_parser.error)
    arguments = parser.parse_args(argv)
    code: int = arguments.main(arguments)
    return code
