"""Scripts that run in an interpreter of their own, to its very end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ._processes import native_stacks


def run_program(
    source: str | Path, *, ranks: Sequence[int] = (0,), env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``source``, a text or a file, once per rank, all at once, and return each one's end and output.

    Unlike the workers of `run_workers`, which are forked and leave by ``os._exit``, these interpreters start and end
    like a user's. The script finds its rank in ``sys.argv[1]``. A script that starts processes by spawn must be a file,
    since these processes import it.

    After ``timeout`` seconds, raises AssertionError with the stacks of the programs that have not ended.
    """
    script = [str(source)] if isinstance(source, Path) else ["-c", textwrap.dedent(source)]
    command = [sys.executable, "-X", "faulthandler", *script]
    # Programs find the package where this process does, installed or beside the tests.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})}
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as running:
        programs = []
        for rank in ranks:
            program = running.enter_context(
                subprocess.Popen(
                    [*command, str(rank)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    # A shell's background programs ignore Ctrl-C, and their children inherit that.
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )
            )
            running.callback(program.kill)
            programs.append(program)
        ended = []
        try:
            for program in programs:
                out, err = program.communicate(timeout=max(0.0, deadline - time.monotonic()))
                ended.append(subprocess.CompletedProcess(command, program.returncode, out, err))
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"not ended after {timeout:.0f} s:\n" + "\n".join(map(_last_words, programs))
            ) from None
        return ended


def _last_words(program: subprocess.Popen[str]) -> str:
    stacks = ""
    if program.poll() is None:
        stacks = native_stacks(program.pid)
        # faulthandler answers with the Python stacks.
        program.send_signal(signal.SIGABRT)
    out, err = program.communicate()
    return f"process {program.pid} ended with {program.returncode}\n{out}{err}{stacks}"
