"""`Starter`: the launcher's side of the process that starts workers. The package's docstring has the protocol."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torch_ucx_rpc._cli._signals import signal_name
from torch_ucx_rpc._cli._starter.reasons import difference
from torch_ucx_rpc._cli._starter.sitecustomize import VARIABLE

_PROCESS = Path(__file__).with_name("sitecustomize.py")
_PRELOADED = ("torch", "torch.distributed.rpc", "torch_ucx_rpc")

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# The pause between two checks whether a worker has ended.
_INTERVAL_S = 0.002


class Worker:
    """A started process, with the part of ``subprocess.Popen`` that elastic uses."""

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.args = command
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # Like subprocess if SIGCHLD is ignored: the kernel does not keep the exit code then.
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(_INTERVAL_S)
        return code


class Starter:
    """Starts workers by fork, or by exec; says on stderr, once, why it does not fork.

    The starter's process begins to import torch at once. This class is not thread-safe: only `start` may run outside of
    the main thread.

    Args:
        program: the arguments after ``python`` on the command line of a worker.
        method: ``"fork"``, ``"exec"``, or None to fork unless a worker could notice it.
        preload: modules that forked workers find imported, besides torch and this package.
    """

    def __init__(self, program: Sequence[str], method: str | None, preload: Sequence[str] = ()) -> None:
        self._command = [sys.executable, *program]
        self._preload = (*_PRELOADED, *preload)
        self._insists = method == "fork"
        self._forks = method != "exec"
        # The workers of the last batch.
        self.workers: list[Worker] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        if method is None and (reason := difference(program, os.environ)):
            self._go_over_to_exec(reason)
        else:
            self._launch()

    @contextlib.contextmanager
    def batch(self, begins: Callable[[], None]) -> Iterator[None]:
        """`start` starts workers inside this block. After the block, they are children of this process.

        Calls ``begins`` before the block, once the starter is ready. Raises OSError or RuntimeError if no worker can be
        started.
        """
        self.workers = []
        self._prepare()
        begins()
        self._set_subreaper(True)
        try:
            yield
        finally:
            # If the starter has died after all, its workers are children of this process now.
            with contextlib.suppress(RuntimeError):
                self._ask({"do": "end"})
            self._set_subreaper(False)

    def start(self, environ: Mapping[str, str], stdout: IO[Any], stderr: IO[Any]) -> Worker:
        """Start a worker in this environment. Raises OSError like ``subprocess``."""
        answer = self._ask({"environ": dict(environ)}, stdout.fileno(), stderr.fileno())
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        worker = Worker(answer["pid"], self._command)
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        if self._process is not None:
            for file in (self._answers, self._link, self._output):
                file.close()
            self._process.wait()
            self._process = None

    # ---- The process -------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        self._link, there = socket.socketpair()
        reader, writer = os.pipe()
        settings: dict[str, Any] = {"link": there.fileno(), "launcher": os.getpid()}
        environ = dict(os.environ)
        if self._forks:
            command = self._command
            pythonpath = environ.get("PYTHONPATH")
            settings |= {"preload": self._preload, "program": command[1], "pythonpath": pythonpath}
            environ[VARIABLE] = json.dumps(settings)
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_PROCESS.parent), pythonpath)))
        else:
            settings["command"] = self._command
            command = [sys.executable, "-IS", str(_PROCESS), json.dumps(settings)]
        self._output = os.fdopen(reader, "rb", buffering=0)
        with there, os.fdopen(writer, "wb") as output:
            # Python sets up stdout and stderr by the kind of file, and workers inherit them. So use a pipe, as workers
            # have.
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdout=output,
                stderr=output,
                pass_fds=[there.fileno()],
                # No signal from the terminal reaches it.
                start_new_session=True,
            )
        self._answers = self._link.makefile("rb")
        self._is_ready = False

    def _prepare(self) -> None:
        """Wait until the process can start workers; replace one that has ended or cannot fork."""
        if self._process is not None and self._is_ready and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._launch()
        while not self._is_ready:
            reason = self._await_ready()
            self._is_ready = True
            if reason is not None:
                if self._insists or not self._forks:
                    raise RuntimeError(reason)
                self.close()
                self._go_over_to_exec(reason)

    def _await_ready(self) -> str | None:
        """Pass on the output of the process until it is ready. Returns the reason if it is unusable."""
        with selectors.DefaultSelector() as selector:
            for source in (self._link, self._output):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._output in ready:
                    said = self._output.read(65_536)
                    if not said:
                        selector.unregister(self._output)
                    sys.stderr.buffer.write(said or b"")
                    sys.stderr.buffer.flush()
                elif self._link in ready:
                    # This loop has read all earlier output of the process.
                    line = self._answers.readline()
                    if line:
                        reason: str | None = json.loads(line)["reason"]
                        return reason
                    assert self._process is not None
                    code = self._process.wait()
                    end = signal_name(-code) if code < 0 else f"exit code {code}"
                    return f"the process that imports {', '.join(self._preload)} has ended with {end}"

    def _go_over_to_exec(self, reason: str) -> None:
        print(f"torch_ucx_rpc run: each worker imports torch itself (--start exec), since {reason}", file=sys.stderr)
        self._forks = False
        self._launch()

    @staticmethod
    def _set_subreaper(is_subreaper: bool) -> None:
        if _libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(is_subreaper)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")

    def _ask(self, request: object, *files: int) -> dict[str, Any]:
        line = b""
        # An answer may be there though the process has ended.
        with contextlib.suppress(OSError):
            text = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(self._link, [text], files)
            self._link.sendall(text[sent:])
            line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the process that starts workers has ended{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        os.set_blocking(self._output.fileno(), False)
        said = self._output.read(65_536) or b""
        return (said and f", having written:\n{said.decode(errors='replace')}") or ", without a word of output"
