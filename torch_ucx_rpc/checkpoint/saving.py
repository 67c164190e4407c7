"""`save`: every worker plans and writes its own part; the caller merges the plans and writes the metadata.

A save has two rounds of calls. The first round makes plans and, in an asynchronous save, copies of all values. The
second round writes. Tensors go only from their worker to the file. Planner and writer are DCP's. Each worker gets a
pickled copy of both.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import os
import pathlib
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from torch_ucx_rpc._arguments import check_flag, check_type
from torch_ucx_rpc._threads import Thread
from torch_ucx_rpc.checkpoint import storage
from torch_ucx_rpc.checkpoint.parts import (
    CheckpointError,
    Part,
    Path,
    Planned,
    by_worker,
    check_wishes,
    drop_everywhere,
    parts_of,
    run_everywhere,
    under,
)

__all__ = ["SaveFuture", "async_save", "save"]


class SaveFuture(concurrent.futures.Future[None]):
    """A save that is being written. ``result()`` raises CheckpointError if the save failed; ``wait()`` is torch's name
    for ``result()``."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is written, for ``timeout`` seconds (default: None, no limit).

        Raises CheckpointError if the save failed, and ``concurrent.futures.TimeoutError`` after ``timeout``.
        """
        self.result(timeout)


# Planner, writer, and the copies of an asynchronous save.
_planned = Planned[tuple[SavePlanner, StorageWriter, list[torch.Tensor]]]()
# Copies of the last asynchronous save, for the next one: fresh memory costs more than the copying.
_spare_memory: list[torch.Tensor] = []
_staging = threading.Lock()
# The last unfinished save into each folder.
_last_into: dict[str, SaveFuture] = {}
_turns = threading.Lock()


def async_save(state: Mapping[str, Any], path: str | os.PathLike[str] | None = None, **wishes: Any) -> SaveFuture:
    """Do `save` with ``asynchronous=True``: return its future once all workers have copied their parts. ``wishes`` are
    the other arguments of `save`."""
    future = save(state, path, asynchronous=True, **wishes)
    assert future is not None
    return future


def save(
    state: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    asynchronous: bool = False,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    timeout: float | None = None,
) -> SaveFuture | None:
    """Write ``state`` into the folder ``path``.

    Args:
        state (Mapping): a dict, which may be nested, of pipelines and their optimizers, RemoteModules, RRefs to
            modules, modules, optimizers and other objects with ``state_dict``, tensors, and anything that can be
            pickled.
        path (str or Path): the same folder for all workers (default: None, only with ``storage_writer``). A relative
            path counts from this process's directory. `save` removes the files of an earlier checkpoint in the folder
            once the new one is whole.
        asynchronous (bool): return as soon as each worker has copied its part, and write in the background (default:
            False). The process does not end before the checkpoint is written. Saves into one folder take turns, those
            of one process in the order of their calls.
        storage_writer (StorageWriter): DCP's, such as ``FsspecWriter("s3://...")`` (default: None, files in a folder).
            Each worker gets a pickled copy. ``path``, if given, resets it. The writer's own rules decide what a save
            does to an earlier checkpoint. Saves do not take turns.
        planner (SavePlanner): DCP's (default: a ``DefaultSavePlanner``). Each worker gets a pickled copy.
        timeout (float): seconds that a worker may take to plan its part, and again to write it (default: None, no
            limit). A worker that answers no question for ``rpc_timeout`` has failed in any case.

    Returns None, or the future of an asynchronous save.

    Raises CheckpointError, which names the worker. The folder then keeps its earlier contents.
    """
    check_type("state", Mapping, "a dict", state)
    check_wishes(path, storage_writer=(storage_writer, StorageWriter), planner=(planner, SavePlanner), timeout=timeout)
    check_flag("asynchronous", asynchronous)
    session = uuid.uuid4().hex[:12]
    folder = None
    if storage_writer is None:
        assert path is not None
        folder = str(pathlib.Path(path).absolute())
        storage_writer = storage.Writer(folder, session)
    elif path is not None:
        storage_writer.reset(path)
    writer, planner = storage_writer, DefaultSavePlanner() if planner is None else planner
    mine = by_worker(parts_of(state))
    workers = [None, *sorted(worker for worker in mine if worker is not None)]
    try:
        plans = run_everywhere(
            "planning a checkpoint",
            _plan,
            {worker: (session, writer, planner, mine[worker], worker is None, asynchronous) for worker in workers},
            timeout,
        )
        central, metadata = planner.create_global_plan([plans[worker] for worker in workers])
        central = writer.prepare_global_plan(central)
    except BaseException:
        drop_everywhere(_drop, (session, folder), workers)
        raise

    # Saves with a writer that the caller has given do not wait for each other.
    future, place = SaveFuture(), session if folder is None else os.path.realpath(folder)
    with _turns:
        before, _last_into[place] = _last_into.get(place), future

    def finish() -> None:
        try:
            # Two saves at a time would remove each other's files.
            if before is not None:
                concurrent.futures.wait([before])
            with contextlib.nullcontext() if folder is None else storage.turn_in(folder, to_save=True):
                plans = {worker: (session, plan) for worker, plan in zip(workers, central, strict=True)}
                results = run_everywhere("writing a checkpoint", _write, plans, timeout)
                if isinstance(writer, storage.Writer):
                    _check_files(writer, results)
                writer.finish(metadata, [results[worker] for worker in workers])
        except BaseException as error:
            # Ctrl-C, or the end of the process, may come when the files are the checkpoint already.
            if not (isinstance(writer, storage.Writer) and writer.may_be_whole):
                drop_everywhere(_drop, (session, folder), workers)
            if isinstance(error, OSError):
                raise CheckpointError(f"writing a checkpoint failed: {error}") from error
            raise

    arguments = (future, place, finish)
    if asynchronous:
        try:
            thread = Thread(_finish_into, arguments, name=f"checkpoint {session}")
            # The end of a program waits for its last checkpoint.
            thread.daemon = False
            thread.start()
        except RuntimeError:  # this process can start no thread
            _finish_into(*arguments)
        return future
    _finish_into(*arguments)
    future.result()
    return None


def await_saves_into(path: str) -> None:
    """Return when this process's saves into the folder are written, or have failed."""
    with _turns:
        last = _last_into.get(os.path.realpath(path))
    if last is not None:
        concurrent.futures.wait([last])


def _check_files(writer: storage.Writer, results: Mapping[str | None, Any]) -> None:
    for worker, written in results.items():
        if missing := writer.missing(written):
            raise CheckpointError(
                f"{worker!r} has written {missing}, which is not in {str(writer.path)!r} here: a checkpoint needs a "
                f"folder that all workers share"
            )


def _finish_into(future: SaveFuture, place: str, finish: Callable[[], None]) -> None:
    try:
        finish()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
    finally:
        with _turns:
            if _last_into.get(place) is future:
                del _last_into[place]


# ------------------------------------------------------------------------------------------------- on each worker


def _plan(
    session: str,
    writer: StorageWriter,
    planner: SavePlanner,
    parts: Sequence[tuple[Path, Part]],
    is_caller: bool,
    stage: bool,
) -> SavePlan:
    state: dict[str, Any] = {}
    for place, part in parts:
        under(place, part.collect(*part.args), state)
    copies: list[torch.Tensor] = []
    if stage:
        with _staging:
            spare, _spare_memory[:] = list(_spare_memory), []
        state = _staged(state, spare, copies)
    planner.set_up_planner(state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=is_caller)
    writer.set_up_storage_writer(is_caller)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    if not _planned.add(session, (planner, writer, copies)):
        _give_back(copies)
    return plan


def _write(session: str, plan: SavePlan) -> list[Any]:
    planner, writer, copies = _planned.take(session)
    try:
        results: list[Any] = writer.write_data(planner.finish_plan(plan), planner).wait()
    except RuntimeError as error:
        # torch.save hides an error of the disk behind one of its own.
        if isinstance(error.__context__, OSError) and error.__cause__ is None:
            raise error.__context__ from None
        raise
    finally:
        _give_back(copies)
    return results


def _drop(session: str, folder: str | None) -> None:
    if (planned := _planned.drop(session)) is not None:
        _give_back(planned[2])
    if folder is not None:
        storage.remove_files_of(folder, session)


def _staged(value: Any, spare: list[torch.Tensor], copies: list[torch.Tensor]) -> Any:
    """Copy a state, so that later changes do not reach the file. Its tensors are then in CPU memory, and in
    ``copies``."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        copies.append(_copy_into(spare, value.detach()))
        return copies[-1]
    if isinstance(value, Mapping):
        return {key: _staged(one, spare, copies) for key, one in value.items()}
    if type(value) is list:
        return [_staged(one, spare, copies) for one in value]
    pickled = io.BytesIO()
    torch.save(value, pickled)
    pickled.seek(0)
    return torch.load(pickled, weights_only=False)


def _copy_into(spare: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    # Copies are in the order of the last save, so the first one fits nearly always.
    fitting = (one for one in spare if one.dtype == tensor.dtype and one.shape == tensor.shape)
    memory = next(fitting, None)
    if memory is None:
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    else:
        spare[:] = [one for one in spare if one is not memory]
    return memory.copy_(tensor)


def _give_back(copies: list[torch.Tensor]) -> None:
    """Keep the memory of copies for the next save."""
    if copies:
        with _staging:
            _spare_memory[:] = copies
