"""`load`: every worker reads its own part of the files, into the tensors that it has."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from torch_ucx_rpc._arguments import check_type
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
    restore_keys,
    run_everywhere,
    under,
)
from torch_ucx_rpc.checkpoint.saving import await_saves_into

__all__ = ["load"]

# `load` reads tensors with at least this many elements one at a time.
_LARGE = 1 << 18

_planned = Planned[tuple[StorageReader, LoadPlanner, dict[str, Any], Sequence[tuple[Path, Part]]]]()


def load(
    state: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    timeout: float | None = None,
) -> None:
    """Read the checkpoint of `save` at ``path`` into ``state``. The number of workers and of stages may differ.

    `load` compares names, shapes and numbers of parameter groups on all workers before it changes anything. It waits
    for an unfinished save into the folder. It writes into the tensors of ``state``, and replaces the other values of
    dicts.

    Args:
        state (Mapping): as in `save`.
        path (str or Path): the folder (default: None, only with ``storage_reader``).
        storage_reader (StorageReader): DCP's, such as ``FsspecReader("s3://...")`` (default: None, files in a folder).
            Each worker gets a pickled copy. ``path``, if given, resets it.
        planner (LoadPlanner): DCP's (default: a ``DefaultLoadPlanner``). Each worker gets a pickled copy.
        timeout (float): seconds for planning, and again for reading, as in `save` (default: None, no limit).

    Raises CheckpointError, which names the worker and any missing entries. Raises FileNotFoundError if there is no
    checkpoint.
    """
    check_type("state", Mapping, "a dict", state)
    check_wishes(path, storage_reader=(storage_reader, StorageReader), planner=(planner, LoadPlanner), timeout=timeout)
    if storage_reader is not None:
        if path is not None:
            storage_reader.reset(path)
        turn: Any = contextlib.nullcontext()
    else:
        assert path is not None
        path = str(pathlib.Path(path).absolute())
        await_saves_into(path)
        turn, storage_reader = _turn_in(path), storage.Reader(path)
        if not pathlib.Path(path).is_dir():
            # This raises the error for a folder without a checkpoint.
            _check_metadata(storage_reader)
    planner = DefaultLoadPlanner() if planner is None else planner
    session = uuid.uuid4().hex[:12]
    mine = by_worker(parts_of(state))
    try:
        with turn:
            _check_metadata(storage_reader)
            plans = run_everywhere(
                "reading a checkpoint",
                _plan,
                {worker: (session, storage_reader, planner, some, worker is None) for worker, some in mine.items()},
                timeout,
            )
            central = storage_reader.prepare_global_plan(planner.create_global_plan(list(plans.values())))
            arguments = {worker: (session, plan) for worker, plan in zip(plans, central, strict=True)}
            run_everywhere("reading a checkpoint", _read, arguments, timeout)
    except BaseException:
        drop_everywhere(_forget, (session,), mine)
        raise


def _check_metadata(reader: StorageReader) -> None:
    """Raise FileNotFoundError without metadata, and CheckpointError if they cannot be read."""
    try:
        reader.read_metadata()
    except FileNotFoundError:
        raise
    except Exception as error:
        where = str(getattr(reader, "path", reader))
        raise CheckpointError(
            f"the metadata of the checkpoint at {where!r} cannot be read: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _turn_in(path: str) -> Iterator[None]:
    with contextlib.ExitStack() as turn:
        try:
            turn.enter_context(storage.turn_in(path, to_save=False))
        except OSError as error:
            raise CheckpointError(f"reading a checkpoint failed: {error}") from error
        yield


def _plan(
    session: str, reader: StorageReader, planner: LoadPlanner, parts: Sequence[tuple[Path, Part]], is_caller: bool
) -> LoadPlan:
    """Plan the parts of the files that this worker wants. Raises an error if the files lack one of them."""
    metadata = reader.read_metadata()
    where = f"the checkpoint at {str(getattr(reader, 'path', reader))!r}"
    paths: Mapping[str, Path] = metadata.planner_data or {name: (name,) for name in metadata.state_dict_metadata}
    state: dict[str, Any] = {}
    for place, part in parts:
        key = tuple(map(str, place))
        saved = {
            full[len(key) :]: metadata.state_dict_metadata[name]
            for name, full in paths.items()
            if tuple(map(str, full[: len(key)])) == key and len(full) > len(key)
        }
        if not saved and part.optional:
            continue
        if not saved and _has_values(part.collect(*part.args)):
            raise CheckpointError(
                f"{where} has nothing under {'.'.join(key)!r}; it has "
                f"{', '.join(sorted({str(full[0]) for full in paths.values()}))}"
            )
        try:
            under(place, part.template(*part.args, saved), state)
        except ValueError as error:
            raise CheckpointError(f"{'.'.join(key)!r} of {where} does not fit: {error}") from error
    try:
        planner.set_up_planner(state, metadata, is_caller)
        reader.set_up_storage_reader(metadata, is_caller)
        plan = reader.prepare_local_plan(planner.create_local_plan())
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{where} is of another model: {error}") from error
    _planned.add(session, (reader, planner, state, parts))
    return plan


def _has_values(state: Any) -> bool:
    """Whether a state has an entry in a checkpoint. The states of nn.Identity and a disabled GradScaler have none."""
    return any(map(_has_values, state.values())) if isinstance(state, Mapping) else True


def _read(session: str, plan: LoadPlan) -> None:
    reader, planner, state, parts = _planned.take(session)
    plan = planner.finish_plan(plan)
    with torch.no_grad():
        for bite in _bites(plan) if isinstance(reader, FileSystemReader) else (plan,):
            reader.read_data(bite, planner).wait()
    restore_keys(state)
    for place, part in parts:
        found = state
        for key in place:
            found = found.get(str(key), {})
        if found or not part.optional:
            part.apply(*part.args, found)


def _bites(plan: LoadPlan) -> Iterator[LoadPlan]:
    """Divide a plan so that the reader reads large tensors one at a time: torch's reader would keep one while it reads
    the next."""
    small = []
    for item in plan.items:
        if math.prod(item.lengths) < _LARGE:
            small.append(item)
        else:
            yield dataclasses.replace(plan, items=[item])
    yield dataclasses.replace(plan, items=small)


def _forget(session: str) -> None:
    _planned.drop(session)
