"""The output of ``run``'s workers: passed on line by line with the worker's name in front, or into files."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import selectors
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import BinaryIO

_TRACEBACK = b"Traceback (most recent call last):"

# The beginning of log lines of torch's C++ code.
_LOG_LINE = re.compile(r"\[[IWE]\d{4} ")

# Numbers of a worker's last lines on stderr: those kept for the report of its end, and those shown without a traceback.
_KEPT_LINES = 200
_SHOWN_LINES = 20

# A longer line is divided, in bytes.
_LONGEST_LINE = 1 << 20

# The capacity of a pipe.
_READ_BYTES = 65_536
# The longest wait in `catch_up`: a slow reader of the launcher's output delays the thread.
_CATCHING_UP_S = 5.0


class Stream:
    """One of the two outputs of a worker."""

    def __init__(self, target: BinaryIO, prefix: bytes) -> None:
        self._target = target
        self._prefix = prefix
        self._unfinished = b""
        self._is_lost = False
        self.last_lines: collections.deque[bytes] = collections.deque(maxlen=_KEPT_LINES)
        # When the last traceback began to arrive, by time.monotonic.
        self.last_traceback = float("-inf")

    def take(self, data: bytes) -> None:
        # Progress bars end their lines with a carriage return.
        lines = (self._unfinished + data).splitlines(keepends=True)
        self._unfinished = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        if len(self._unfinished) > _LONGEST_LINE:
            lines.append(self._unfinished + b"\n")
            self._unfinished = b""
        self._pass_on(lines)

    def forget(self) -> None:
        self.last_lines.clear()
        self.last_traceback = float("-inf")

    def finish(self) -> None:
        if self._unfinished:
            self._pass_on([self._unfinished + b"\n"])
            self._unfinished = b""

    def _pass_on(self, lines: list[bytes]) -> None:
        for line in lines:
            if line.startswith(_TRACEBACK):
                self.last_traceback = time.monotonic()
            self.last_lines.append(line.rstrip(b"\r\n"))
        if self._is_lost:
            return
        try:
            for line in lines:
                # One write for the whole line, since the main thread may write to the same target.
                self._target.write(self._prefix + line)
            self._target.flush()
        except OSError as error:
            # The reader has gone (`| head`), or a disk is full. The workers go on.
            self._is_lost = True
            if not isinstance(error, BrokenPipeError):
                print(f"torch_ucx_rpc run: the output of a worker is lost from now on: {error}", file=sys.stderr)


class WorkerOutput:
    """Reads the output of workers from named pipes, on a thread of its own, from ``start()`` to ``finish()``.

    Pipes, unlike files, do not keep the output of a long job if the user does not ask for it. A worker cannot write
    faster than this thread reads.

    Args:
        directory: folder for files of every worker's stdout and stderr; None to write to this process's own stdout and
            stderr, with prefixes.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._resources = contextlib.ExitStack()
        self._pipes = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="torch_ucx_rpc-run-")))
        self._selector = self._resources.enter_context(selectors.DefaultSelector())
        self._streams: dict[tuple[str, str], Stream] = {}
        # Each call that waits for the thread rings this bell once, which wakes the thread.
        self._bell = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self._resources.callback(os.close, self._bell)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        # How often callers have rung the bell, and after how many rings the thread has looked at all pipes.
        self._rung = self._answered = 0
        self._answers = threading.Condition()

    def path(self, worker: str, kind: str) -> str:
        """The pipe for a worker's ``"stdout"`` or ``"stderr"``. Call this for all workers before `start`.

        A restarted worker gets the same pipe. This object forgets the last words of the worker's earlier life.
        """
        pipe = self._pipes / f"{worker}.{kind}"
        if (worker, kind) in self._streams:
            self._streams[worker, kind].forget()
            return str(pipe)
        os.mkfifo(pipe, 0o600)
        if self._directory is None:
            target: BinaryIO = getattr(sys, kind).buffer
            prefix = f"[{worker}] ".encode()
        else:
            target = self._resources.enter_context((self._directory / f"{worker}.{kind}").open("wb"))
            prefix = b""
        stream = self._streams[worker, kind] = Stream(target, prefix)
        # Open the pipe for writing too: otherwise it would end before the first writer, and between two writers.
        end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._resources.callback(os.close, end)
        self._selector.register(end, selectors.EVENT_READ, stream)
        return str(pipe)

    def error_file(self, worker: str) -> str:
        """The file for a report of ``torch.distributed.elastic.multiprocessing.errors.record``, if any."""
        file = self._pipes / f"{worker}.error.json"
        # Remove the report of the worker's earlier life.
        file.unlink(missing_ok=True)
        return str(file)

    def start(self) -> None:
        """Pass output on as it comes, until `finish`."""
        self._is_over.clear()
        self._thread = threading.Thread(target=self._follow, name="torch_ucx_rpc-output", daemon=True)
        self._thread.start()

    def catch_up(self) -> None:
        """Wait until the thread has read all output that the workers have written by now."""
        self._ring()
        with self._answers:
            self._answers.wait_for(lambda: self._answered == self._rung, _CATCHING_UP_S)

    def finish(self) -> None:
        """Pass on the rest of the output, after all workers have ended. For new workers, call `start` again."""
        if self._thread is not None:
            self._is_over.set()
            self._ring()
            self._thread.join()
            self._thread = None
        for stream in self._streams.values():
            stream.finish()

    def close(self) -> None:
        """Pass on the rest of the output, and release all files. Call this after all workers have ended."""
        self.finish()
        self._resources.close()

    def last_traceback(self, worker: str) -> float:
        """When the worker's last traceback began to arrive, by time.monotonic; minus infinity without one."""
        return self._streams[worker, "stderr"].last_traceback

    def last_words(self, worker: str) -> str:
        """The end of the worker's stderr, from a traceback on if there is one."""
        # Copy the lines at once, since more may be arriving.
        kept = list(self._streams[worker, "stderr"].last_lines)
        lines = [line.decode(errors="replace") for line in kept]
        # C++ code may have logged lines at the end of the process.
        while lines and _LOG_LINE.match(lines[-1]):
            lines.pop()
        tracebacks = [index for index, line in enumerate(lines) if line.encode().startswith(_TRACEBACK)]
        # From the first traceback on: chained exceptions have one each, in a row.
        return "\n".join(lines[tracebacks[0] :] if tracebacks else lines[-_SHOWN_LINES:])

    def _ring(self) -> None:
        self._rung += 1
        os.eventfd_write(self._bell, 1)

    def _follow(self) -> None:
        while not self._is_over.is_set():
            self._pass_on(timeout=None)
        while self._pass_on(timeout=0):
            pass

    def _pass_on(self, timeout: float | None) -> bool:
        """Read each readable pipe once, which empties it."""
        ready = self._selector.select(timeout)
        has_rung = False
        for key, _ in ready:
            if key.fd == self._bell:
                has_rung = True
            else:
                key.data.take(os.read(key.fd, _READ_BYTES))
        if has_rung:
            # This round has read all output that was written before the ring.
            os.eventfd_read(self._bell)
            with self._answers:
                self._answered += 1
                self._answers.notify_all()
        return bool(ready)
