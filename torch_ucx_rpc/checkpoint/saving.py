"""`save`: every worker plans and writes its own part; the caller merges the plans and writes the metadata.

Two rounds of calls: the first returns plans (and, in an asynchronous save, leaves copies of everything behind), the
second writes. Tensors go only from their worker to the file.
"""

from __future__ import annotations

import concurrent.futures
import io
import os
import pathlib
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torch_ucx_rpc._arguments import check_flag, check_path, check_type
from torch_ucx_rpc.checkpoint import storage
from torch_ucx_rpc.checkpoint.parts import CheckpointError, Part, Path, by_worker, parts_of, run_everywhere, under

__all__ = ["SaveFuture", "save"]


class SaveFuture(concurrent.futures.Future[None]):
    """A save that is being written. ``result()`` and ``wait()``, torch's name for it, raise CheckpointError if it
    failed."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is written, for ``timeout`` seconds (default: None, no limit)."""
        self.result(timeout)


# Saves between their two rounds: planner, writer, and the copies of an asynchronous one.
_planned: dict[str, tuple[_Planner, storage.Writer, list[torch.Tensor]]] = {}
# Copies of the last asynchronous save, for the next one: fresh memory costs more than the copying.
_spare_memory: list[torch.Tensor] = []
_staging = threading.Lock()
# The last unfinished save into each folder.
_last_into: dict[str, SaveFuture] = {}
_turns = threading.Lock()


def save(state: Mapping[str, Any], path: str | os.PathLike[str], *, asynchronous: bool = False) -> SaveFuture | None:
    """Write ``state`` into the folder ``path``.

    Args:
        state: a dict, which may be nested, of pipelines and their optimizers, RemoteModules, RRefs to modules,
            modules, optimizers and other objects with ``state_dict``, tensors, and anything that can be pickled.
        path: the same folder for all workers; a relative path counts from this process's directory. Files of an earlier
            checkpoint there are removed once the new one is whole.
        asynchronous: return as soon as each worker has copied its part, and write in the background. Saves into one
            folder are written one after the other, those of one process in the order of their calls.

    Returns None, or the future of an asynchronous save.

    Raises CheckpointError, which names the worker. The folder then keeps its earlier contents.
    """
    check_type("state", Mapping, "a dict", state)
    check_path("path", path)
    check_flag("asynchronous", asynchronous)
    path = str(pathlib.Path(path).absolute())
    session = uuid.uuid4().hex[:12]
    mine = by_worker(parts_of(state))
    workers = [None, *sorted(worker for worker in mine if worker is not None)]
    try:
        plans = run_everywhere(
            "planning a checkpoint", _plan, {worker: (session, path, mine[worker], asynchronous) for worker in workers}
        )
        planner, writer, _ = _planned[session]
        central, metadata = planner.create_global_plan([plans[worker] for worker in workers])
        central = writer.prepare_global_plan(central)
    except BaseException:
        _give_up(session, path, workers)
        raise

    future, folder = SaveFuture(), os.path.realpath(path)
    with _turns:
        before, _last_into[folder] = _last_into.get(folder), future

    def finish() -> None:
        try:
            # Two saves at a time would remove each other's files.
            if before is not None:
                concurrent.futures.wait([before])
            with storage.turn_in(path, to_save=True):
                _write_everywhere(session, path, dict(zip(workers, central, strict=True)), writer, metadata)
        except BaseException as error:
            _give_up(session, path, workers)
            if isinstance(error, OSError):
                raise CheckpointError(f"writing a checkpoint failed: {error}") from error
            raise

    arguments = (future, folder, finish)
    if asynchronous:
        threading.Thread(target=_finish_into, args=arguments, name=f"checkpoint {session}", daemon=True).start()
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


def _write_everywhere(
    session: str, path: str, plans: Mapping[str | None, SavePlan], writer: storage.Writer, metadata: Metadata
) -> None:
    arguments = {worker: (session, plan) for worker, plan in plans.items()}
    results = run_everywhere("writing a checkpoint", _write, arguments)
    for worker in plans:
        if missing := writer.missing(results[worker]):
            raise CheckpointError(
                f"{worker!r} has written {missing}, which is not in {path!r} here: a checkpoint needs a folder that "
                f"all workers share"
            )
    writer.finish(metadata, [results[worker] for worker in plans])


def _finish_into(future: SaveFuture, folder: str, finish: Callable[[], None]) -> None:
    try:
        finish()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
    finally:
        with _turns:
            if _last_into.get(folder) is future:
                del _last_into[folder]


# ------------------------------------------------------------------------------------------------- on each worker


def _plan(session: str, path: str, parts: Sequence[tuple[Path, Part]], stage: bool) -> SavePlan:
    state: dict[str, Any] = {}
    for place, part in parts:
        under(place, part.collect(*part.args), state)
    planner, writer = _Planner(), storage.Writer(path, session)
    planner.set_up_planner(state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=False)
    writer.set_up_storage_writer(False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    _planned[session] = planner, writer, planner.stage() if stage else []
    return plan


def _write(session: str, plan: SavePlan) -> list[Any]:
    planner, writer, copies = _planned.pop(session)
    try:
        results: list[Any] = writer.write_data(planner.finish_plan(plan), planner).wait()
    finally:
        _give_back(copies)
    return results


def _drop(session: str, path: str) -> None:
    planned = _planned.pop(session, None)
    if planned is not None:
        _give_back(planned[2])
    storage.remove_files_of(path, session)


def _give_up(session: str, path: str, workers: Sequence[str | None]) -> None:
    """Forget a save on all workers that still live."""
    import torch.distributed.rpc as rpc

    _drop(session, path)
    for worker in workers:
        if worker is not None:
            try:
                rpc.rpc_async(worker, _drop, (session, path))
            except RuntimeError:
                continue


class _Pickled(io.BytesIO):
    """Return the bytes that DCP writes for a value other than a tensor."""


class _Planner(DefaultSavePlanner):
    """DCP's planner, which can drop the state itself, so that later changes do not reach the file."""

    def stage(self) -> list[torch.Tensor]:
        """Replace all tensors by copies in CPU memory, and other values by pickles. Return the copies."""
        with _staging:
            spare, _spare_memory[:] = list(_spare_memory), []
        copies: list[torch.Tensor] = []
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                copies.append(_copy_into(spare, value.detach()))
                self.state_dict[name] = copies[-1]
            else:
                self.state_dict[name] = _Pickled()
                torch.save(value, self.state_dict[name])
        return copies

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object if isinstance(object, _Pickled) else super().transform_object(write_item, object)


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
