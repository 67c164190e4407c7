"""Asynchronous saves: several saves into one folder, changes during a save, and processes that share a folder."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.support.workers import Steps, run_program
from torch_ucx_rpc import checkpoint
from torch_ucx_rpc.checkpoint import loading, saving, storage


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make writes wait for the returned event."""
    may_write = threading.Event()
    write = storage.Writer.write_data

    def write_when_it_may(self: Any, plan: Any, planner: Any) -> Any:
        assert may_write.wait(60)
        return write(self, plan, planner)

    monkeypatch.setattr(storage.Writer, "write_data", write_when_it_may)
    return may_write


def holds(path: Path) -> float:
    """Return the value in a whole checkpoint, after a check that only its files are there."""
    state = {"x": torch.zeros(())}
    checkpoint.load(state, path)
    assert len(list(path.iterdir())) == 2, "the metadata and one file"
    return state["x"].item()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_waits_for_the_one_before_it_into_the_same_folder(tmp_path, disk, asynchronous):
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    checkpoint.save({"x": torch.tensor(1.0)}, tmp_path / "ckpt", asynchronous=True)
    if not asynchronous:
        timer = threading.Timer(0.2, disk.set)
        timer.start()
    second = checkpoint.save({"x": torch.tensor(2.0)}, tmp_path / "link", asynchronous=asynchronous)
    if second is not None:
        assert not second.done()
        disk.set()
        second.wait()
    assert holds(tmp_path / "ckpt") == 2.0


def test_saves_into_one_folder_end_in_their_order(tmp_path, disk):
    futures = [checkpoint.save({"x": torch.tensor(float(one))}, tmp_path, asynchronous=True) for one in range(5)]
    # Another folder does not wait.
    other = checkpoint.save({"x": torch.tensor(7.0)}, tmp_path / "other", asynchronous=True)
    disk.set()
    other.wait()
    futures[-1].wait()
    assert all(future.done() for future in futures)
    (tmp_path / "other").rename(tmp_path.with_name("other"))
    assert holds(tmp_path) == 4.0


def test_a_program_ends_after_its_last_save(tmp_path):
    [ended] = run_program(f"""
        import threading, torch
        from torch_ucx_rpc import checkpoint
        from torch_ucx_rpc.checkpoint import storage

        write = storage.Writer.write_data
        storage.Writer.write_data = lambda *args: threading.main_thread().join() or write(*args)
        checkpoint.save({{"x": torch.tensor(3.0)}}, {str(tmp_path)!r}, asynchronous=True)
    """)
    assert ended.returncode == 0, ended.stderr
    assert holds(tmp_path) == 3.0


def test_a_failed_save_delays_no_later_save(tmp_path, disk, monkeypatch):
    def fail(self: Any, *args: Any) -> None:
        monkeypatch.undo()
        raise OSError("the disk is full")

    monkeypatch.setattr(storage.Writer, "finish", fail)
    first = checkpoint.save({"x": torch.tensor(1.0)}, tmp_path, asynchronous=True)
    second = checkpoint.save({"x": torch.tensor(2.0)}, tmp_path, asynchronous=True)
    disk.set()
    second.wait()
    with pytest.raises(checkpoint.CheckpointError, match="the disk is full"):
        first.wait()
    assert holds(tmp_path) == 2.0


@pytest.mark.parametrize("first", ["save", "load"])
def test_processes_take_turns_in_a_folder(run_on_ucx, tmp_path, first):
    steps, folder = Steps(tmp_path), tmp_path / "ckpt"
    checkpoint.save({"x": torch.tensor(1.0)}, folder)
    run_on_ucx(2, use_one_folder, steps, folder, first, init=False, shutdown=False)
    assert holds(folder) == 3.0


def test_a_load_waits_for_saves_of_its_process(tmp_path, disk):
    checkpoint.save({"x": torch.tensor(1.0)}, tmp_path / "ckpt", asynchronous=True)
    timer = threading.Timer(0.2, disk.set)
    timer.start()
    assert holds(tmp_path / "ckpt") == 1.0
    checkpoint.save({"x": torch.tensor(2.0)}, tmp_path / "ckpt", asynchronous=True)
    assert holds(tmp_path / "ckpt") == 2.0


def test_a_turn_that_takes_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_LONGEST_TURN_S", 0.1)
    checkpoint.save({"x": torch.tensor(1.0)}, tmp_path)
    before = sorted(tmp_path.iterdir())
    with storage.turn_in(str(tmp_path), to_save=True):
        for use in (checkpoint.save, checkpoint.load):
            with pytest.raises(checkpoint.CheckpointError, match="another process has been saving into"):
                use({"x": torch.zeros(())}, tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    assert holds(tmp_path) == 1.0


def test_a_save_counts_if_the_former_one_cannot_be_removed(tmp_path, monkeypatch):
    def refuse(*args: Any) -> None:
        raise PermissionError("not yours")

    checkpoint.save({"x": torch.tensor(1.0)}, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "remove_others", refuse)
        checkpoint.save({"x": torch.tensor(2.0)}, tmp_path)
    state = {"x": torch.zeros(())}
    checkpoint.load(state, tmp_path)
    assert state["x"].item() == 2.0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupted_save_leaves_a_whole_checkpoint(tmp_path, monkeypatch, asynchronous):
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    def save(value: float) -> None:
        future = checkpoint.save({"x": torch.tensor(value)}, tmp_path, asynchronous=asynchronous)
        if future is not None:
            future.result()

    save(1.0)
    with monkeypatch.context() as patched:
        # The metadata is in place; the former files are still there.
        patched.setattr(storage, "remove_others", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(2.0)
    state = {"x": torch.zeros(())}
    checkpoint.load(state, tmp_path)
    assert state["x"].item() == 2.0


def test_a_save_is_written_at_once_if_there_is_no_thread(tmp_path, monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(saving.Thread, "start", refuse)
        assert checkpoint.save({"x": torch.tensor(1.0)}, tmp_path, asynchronous=True).done()
    assert holds(tmp_path) == 1.0


def use_one_folder(rank: int, steps: Steps, folder: Path, first: str) -> None:
    """Let rank 1 save the value 2, or load the present value 1. While it does, rank 0 saves 3."""
    if rank == 0:
        steps.wait_for("in the middle")
        second = threading.Thread(target=checkpoint.save, args=({"x": torch.tensor(3.0)}, folder))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        steps.done("go on")
        second.join()
    elif first == "save":
        stop_before(storage.Writer, "finish", steps)
        checkpoint.save({"x": torch.tensor(2.0)}, folder)
    else:
        stop_before(loading.FileSystemReader, "read_data", steps)
        state = {"x": torch.zeros(())}
        checkpoint.load(state, folder)
        assert state["x"].item() == 1.0


def stop_before(owner: type, method: str, steps: Steps) -> None:
    """Make each call of this method of torch wait until it may go on."""
    original = getattr(owner, method)

    def wait_and_do(*args: Any) -> Any:
        steps.done("in the middle")
        steps.wait_for("go on")
        return original(*args)

    setattr(owner, method, wait_and_do)


class Counter:
    """A value that is not a tensor, has no ``state_dict``, and changes in place."""

    def __init__(self) -> None:
        self.count = 1
        self.total = torch.ones(3)


def test_plain_objects_are_saved_unchanged(tmp_path, disk):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state: dict[str, Any] = {
        "scheduler": scheduler,
        "counter": Counter(),
        "seen": {1, 2},
        "history": [0.5, [1]],
        "pair": (torch.ones(2), "x"),
        "file": io.BytesIO(b"abc"),
    }
    future = checkpoint.save(state, tmp_path, asynchronous=True)
    optimizer.step()
    scheduler.step()
    state["counter"].count += 1
    state["counter"].total.add_(1)
    state["seen"].add(3)
    state["history"].append(1.5)
    state["history"][1].append(2)
    state["pair"][0].add_(1)
    disk.set()
    future.wait()
    found: dict[str, Any] = dict.fromkeys(state)
    found["scheduler"] = scheduler
    checkpoint.load(found, tmp_path)
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (0, [1.0])
    assert found["counter"].count == 1
    assert found["counter"].total.tolist() == [1, 1, 1]
    assert found["seen"] == {1, 2}
    assert found["history"] == [0.5, [1]]
    assert found["pair"][0].tolist() == [1, 1]
    assert found["file"].getvalue() == b"abc"


def test_values_under_keys_other_than_strings_are_loaded(tmp_path):
    def scheduler() -> Any:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    checkpoint.save({"best": {1: 0.5, 2: torch.ones(2)}, (3, "x"): "y", "scheduler": scheduler()}, tmp_path)
    found: dict[Any, Any] = {"best": {1: 0.0, 2: torch.zeros(2)}, (3, "x"): "", "scheduler": scheduler()}
    # A save after a load works as before.
    for _ in range(2):
        checkpoint.load(found, tmp_path)
        assert list(found["best"]) == [1, 2]
        assert found["best"][1] == 0.5
        assert found["best"][2].tolist() == [1, 1]
        assert found[3, "x"] == "y"
        assert sorted(found["scheduler"].milestones.elements()) == [2, 4]
        checkpoint.save(found, tmp_path)


def test_metadata_that_cannot_be_read_are_a_checkpoint_error(tmp_path):
    state = {"x": torch.zeros(())}
    checkpoint.save(state, tmp_path)
    for damaged in (b"", b"\x80"):
        (tmp_path / ".metadata").write_bytes(damaged)
        with pytest.raises(checkpoint.CheckpointError, match="metadata"):
            checkpoint.load(state, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(checkpoint.CheckpointError, match="NotADirectoryError"):
        checkpoint.load(state, tmp_path / "file")


class FullDisk(io.FileIO):
    """A file for which the disk has a few bytes left."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_a_save_onto_a_full_disk_says_so(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def open_on_a_full_disk(self: Any, path: Any, mode: str) -> Iterator[FullDisk]:
        with FullDisk(path, mode) as file:
            yield file

    monkeypatch.setattr(FileSystem, "create_stream", open_on_a_full_disk)
    with pytest.raises(checkpoint.CheckpointError, match="No space left"):
        checkpoint.save({"x": torch.zeros(1 << 20)}, tmp_path)


def test_objects_with_an_empty_state_are_loaded(tmp_path):
    state: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu", enabled=False), "model": nn.Identity(), "epoch": 3}
    checkpoint.save(state, tmp_path)
    state["epoch"] = 0
    checkpoint.load(state, tmp_path)
    assert state["epoch"] == 3
    state["scaler"] = torch.amp.GradScaler("cpu")
    with pytest.raises(checkpoint.CheckpointError, match="nothing under 'scaler'"):
        checkpoint.load(state, tmp_path)


def test_an_unpicklable_state_fails_at_once(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="planning a checkpoint failed"):
        checkpoint.save({"x": lambda: 0}, tmp_path, asynchronous=True)
