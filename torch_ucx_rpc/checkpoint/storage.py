"""DCP's files, safe against an end in the middle of a save.

The files of a save have names that no other save uses. The metadata say which files count, and take their place in one
rename. So the folder holds the whole earlier checkpoint until the rename, and the new one after it.

A save removes the files of all other saves, so processes take turns in a folder, with `turn_in`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

__all__ = ["Reader", "Writer", "turn_in"]

_logger = logging.getLogger("torch_ucx_rpc.checkpoint")

_METADATA = ".metadata"

# Seconds within which a file of another host must appear here. Network file systems look at a folder again after some
# time.
_UNTIL_SEEN_S = 5.0

# While another process has its turn in a folder: seconds until a warning, until an error, and between two tries.
_LONG_TURN_S, _LONGEST_TURN_S, _POLL_S = 10.0, 600.0, 0.02


class Writer(FileSystemWriter):
    """Writes one worker's files; on the caller of `save`, also the metadata."""

    def __init__(self, path: str, session: str) -> None:
        super().__init__(path)
        self._session = session
        # True from the moment on in which the files of this save may be the checkpoint.
        self.may_be_whole = False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # Skip torch's warning of a present checkpoint, which stays until the new one is whole.
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            dataclasses.replace(plan, storage_data=_prefix(f"__{self._session}_{rank}_"))
            for rank, plan in enumerate(plans)
        ]

    def missing(self, results: list[Any]) -> str | None:
        """Return a file that another worker has written, but that does not appear here; None if all do."""
        give_up_at = time.monotonic() + _UNTIL_SEEN_S
        for name in {result.storage_data.relative_path for result in results}:
            while not Path(self.path, name).exists():
                if time.monotonic() > give_up_at:
                    return str(name)
                time.sleep(0.05)
        return None

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Make the files of ``results`` the checkpoint, and remove the files of the earlier one."""
        metadata.storage_data = {result.index: result.storage_data for some in results for result in some}
        metadata.storage_meta = self.storage_meta()
        metadata.version = _version()
        folder = Path(self.path)
        temporary = folder / f"__{self._session}{_METADATA}.tmp"
        with temporary.open("wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
        self.may_be_whole = True
        try:
            temporary.replace(folder / _METADATA)
        except OSError:
            self.may_be_whole = False
            raise
        # The checkpoint is the new one from here on, so nothing may fail any more.
        try:
            _sync_folder(folder)
            remove_others(folder, {info.relative_path for info in metadata.storage_data.values()})
        except OSError as error:
            _logger.warning("%s has a new checkpoint, and files of the earlier one remain there: %s", folder, error)


@contextlib.contextmanager
def turn_in(path: str, *, to_save: bool) -> Iterator[None]:
    """Wait until no other process saves into the folder, or loads from it if this process saves.

    The turn also ends once the process has ended, and so have the children that it forked during the turn. Over NFS
    only the processes of one host take turns, since NFS's client asks no server for the lock of a folder. On a file
    system without locks no process waits.

    Raises OSError if another turn takes too long: its process may be stopped, or wait for this one.
    """
    number = os.open(path, os.O_RDONLY)
    try:
        _lock(number, path, fcntl.LOCK_EX if to_save else fcntl.LOCK_SH)
        try:
            yield
        finally:
            # Unlock by name, since a child forked during the turn has the file open too.
            with contextlib.suppress(OSError):
                fcntl.flock(number, fcntl.LOCK_UN)
    finally:
        os.close(number)


def _lock(number: int, path: str, kind: int) -> None:
    began = time.monotonic()
    warn_at = began + _LONG_TURN_S
    while True:
        try:
            fcntl.flock(number, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            if now - began > _LONGEST_TURN_S:
                raise OSError(
                    f"another process has been saving into {path!r}, or loading from it, for {_LONGEST_TURN_S:.0f} s"
                ) from None
            if now > warn_at:
                warn_at = float("inf")
                _logger.warning("still waiting for another process that saves into %r or loads from it", path)
            time.sleep(_POLL_S)
        except OSError as error:
            _logger.debug("%r cannot be locked against other processes: %s", path, error)
            return
        else:
            return


def _prefix(text: str) -> Any:
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    return _StoragePrefix(text)


def _version() -> Any:
    from torch.distributed.checkpoint import filesystem

    return getattr(filesystem, "CURRENT_DCP_VERSION", None)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def remove_others(folder: Path, kept: set[str]) -> None:
    """Remove data files of other saves: of the earlier one, and of unfinished ones."""
    for file in folder.glob("__*.distcp"):
        if file.name not in kept:
            file.unlink(missing_ok=True)
    for file in folder.glob(f"__*{_METADATA}.tmp"):
        file.unlink(missing_ok=True)


def remove_files_of(path: str, session: str) -> None:
    """Remove the files of a failed save."""
    for file in Path(path).glob(f"__{session}*"):
        file.unlink(missing_ok=True)


class Reader(FileSystemReader):
    """Reads the files of a folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata. Raises FileNotFoundError, with the cure, if there is no checkpoint."""
        try:
            return super().read_metadata(*args, **kwargs)
        except FileNotFoundError:
            folder = Path(self.path)
            there = "there is no such folder" if not folder.is_dir() else f"{folder.resolve()} has no {_METADATA} file"
            raise FileNotFoundError(
                f"no checkpoint at {str(folder)!r}: {there}. A checkpoint is written by all workers and read by all, "
                f"so the path must lead to the same place on all hosts."
            ) from None
