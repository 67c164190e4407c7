"""The parts of ``make verbs`` that need no machines: the image's sources, and the judges of its trials."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verbs._image import CannotBuild, Image, copy_changes, debian_sources, workarounds
from verbs._machines import ABORTED, KILLED, Ended, MachineEnded
from verbs._trials import TRIALS, _lost, _unharmed
from verbs._workers import Failed, Workers, expect_within, faults

LISTS = """http://mirror/debian bookworm Debian
http://mirror/debian bookworm-updates Debian
http://mirror/debian-security bookworm-security Debian-Security
"""

LOST = {
    "calls": 9,
    "told_after_s": 11.0,
    "error": "lost worker 'w1' (rank 1, pid 7 on n2): it has died or cannot be reached any more (why)",
    "open_call": "failed",
    "open_call_s": 0.1,
    "shutdown_error": "... lost worker 'w1' ...",
    "shutdown_s": 0.5,
}
WELL = {"calls": 9, "slowest_s": 4.1, "lanes": ["rc_verbs/rxe0:1"], "open_call": "answered", "shutdown_s": 0.5}


class FakeMachine:
    """Programs end there at once: with a status, an output, and what they told."""

    def __init__(self, shared: Path, *, status: int | None = 0, output: str = "", **facts: Any) -> None:
        self._shared = shared
        self._ended = Ended(status, output)
        self._facts = {"ready": True, **facts}

    def expect_on(self) -> None:
        pass

    def begin_program(self, program: str, environment: dict[str, str]) -> Any:
        text = "".join(json.dumps({name: value}) + "\n" for name, value in self._facts.items())
        (self._shared / Path(environment["FACTS"]).name).write_text(text)
        return SimpleNamespace(wait=lambda timeout: self._ended, output=self._ended.output)


def machines(shared: Path, first: dict[str, Any], second: dict[str, Any] | None = None) -> Any:
    both = [FakeMachine(shared, **values) for values in (first, {"shutdown_s": 1.0, **(second or {})})]
    return SimpleNamespace(shared=shared, first=both[0], second=both[1])


def lost(shared: Path, second: dict[str, Any] | None = None, status: int | None = 0, **first: Any) -> str:
    workers = Workers(machines(shared, {**LOST, **first}, {"status": status, **(second or {})}), "watch.py")
    return _lost(workers, (10.0, 12.0), second=(status,))


def test_packages_come_from_this_machines_site_and_python_from_its_release() -> None:
    assert debian_sources(LISTS, "trixie") == (
        "deb http://mirror/debian trixie main\ndeb http://mirror/debian bookworm main\n"
    )
    assert debian_sources(LISTS, "bookworm") == "deb http://mirror/debian bookworm main\n"
    with pytest.raises(CannotBuild, match="apt-get update"):
        debian_sources("", "trixie")


def test_ucx_gets_no_setting_that_its_version_does_not_need() -> None:
    assert workarounds("1.18.1+ds-2") == "UCX_UD_ETH_DGID_CHECK=n\nUCX_IB_ASYNC_EVENTS=n\n"
    assert workarounds("1.22.0-1") == "UCX_IB_ASYNC_EVENTS=n\n"
    assert workarounds("1.23.0~rc1-1") == ""


def test_a_step_is_done_again_after_a_change_and_after_a_run_that_did_not_come_to_its_end(tmp_path: Path) -> None:
    image = Image(tmp_path, print)
    assert not image._is_done("disk", {"a": "1"})
    image._set_done("disk", {"a": "1"})
    assert image._is_done("disk", {"a": "1"})
    assert not image._is_done("disk", {"a": "2"})
    assert not image._is_done("disk", {"a": "1"})


def test_a_change_is_newer_than_what_was_compiled_before_it_was_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    files = [source / name for name in ("same", "changed", "removed")]
    source.mkdir()
    for file in files:
        file.write_text(file.name)
    copy_changes(files, source, target)
    (target / "build").mkdir()
    compiled = target / "build" / "object"
    compiled.write_text("")
    for file in target.iterdir():
        os.utime(file, (1000, 1000))
    os.utime(compiled, (3000, 3000))
    (source / "changed").write_text("edited")
    os.utime(source / "changed", (2000, 2000))  # while the compiler was running
    copy_changes(files[:2], source, target)
    assert {file.name for file in target.iterdir()} == {"same", "changed", "build"}
    assert compiled.exists()
    assert (target / "changed").read_text() == "edited"
    assert (target / "changed").stat().st_mtime > compiled.stat().st_mtime > (target / "same").stat().st_mtime


def test_trials_have_names_and_say_what_they_are_about() -> None:
    names = [trial.name for trial in TRIALS]
    assert len(set(names)) == len(names) >= 10
    assert all(trial.about.endswith(".") for trial in TRIALS)
    # Its machine stays off, and booting takes a while.
    assert names[-1] == "powered_off"


@pytest.mark.parametrize(
    "line",
    [
        "[n1:12:0] ucp_ep.c:497 Assertion `ucs_hlist_is_empty(&ep->ext->proto_reqs)' failed",
        "[1.2] [n1:12:0] parser.c:2 UCX  WARN  unused environment variable: UCX_X",
        "==== backtrace ====\n[n1:12:0:12] Caught signal 11 (Segmentation fault)",
    ],
)
def test_a_fault_is_found_in_what_a_worker_says(line: str, tmp_path: Path) -> None:
    assert len(faults(f"before\n{line}\nafter\n")) == 1
    with pytest.raises(Failed, match="w1 says"):
        lost(tmp_path, {"output": line})


def test_a_known_fault_of_ucx_passes_and_no_other(tmp_path: Path) -> None:
    fatal = "[n2:16:0] ud_verbs.c:414  Fatal: receive completion[0] with error on rxe0: Work Request Flushed Error"
    both = machines(tmp_path, LOST, {"output": fatal, "status": ABORTED})
    _lost(Workers(both, "watch.py"), (10, 12), second=(0, ABORTED), known="Fatal: receive completion")
    with pytest.raises(Failed, match="w1 says"):
        _lost(Workers(both, "watch.py"), (10, 12), second=(0, ABORTED), known="Fatal: send completion")


def test_other_output_is_none() -> None:
    assert faults("[ 1.00 s, w0] {'ready': True}\n[1.2] [n1:12:0] ib_mlx5.c:9 UCX  DIAG  what\n") == []


def test_a_lost_worker_that_is_told_in_time_passes(tmp_path: Path) -> None:
    assert lost(tmp_path) == "told after 11.0 s, shutdown 0.5 s, of the other one 1.0 s"
    assert lost(tmp_path, {"shutdown_s": 2.0}, KILLED) == "told after 11.0 s, shutdown 0.5 s, of the other one 2.0 s"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"told_after_s": 12.5}, "told after 12.5 s, wanted within 12 s"),
        ({"told_after_s": 3.0}, "before 10 s"),
        ({"error": "a timeout"}, "the error is another: a timeout"),
        ({"open_call": "answered"}, "the open call"),
        ({"open_call_s": 2.0}, "the open call"),
        ({"shutdown_error": "a timeout"}, "shutdown: a timeout"),
        ({"shutdown_s": 30.0}, "shutdown after 30.0 s"),
    ],
)
def test_a_lost_worker_that_is_not_told_as_wanted_fails(tmp_path: Path, facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(Failed, match=reason):
        lost(tmp_path, **facts)


def test_a_worker_that_nothing_happened_to_is_not_lost(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="no call failed"):
        _lost(Workers(machines(tmp_path, WELL), "watch.py"), (0, 2))


def test_a_worker_that_leaves_late_because_the_other_one_is_lost_fails(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"shutdown of the other one after 74\.7 s, wanted within 30 s"):
        lost(tmp_path, {"shutdown_s": 74.7})


def test_only_the_second_one_may_be_killed(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="w0 ended by 137"):
        _lost(Workers(machines(tmp_path, {**LOST, "status": KILLED}), "watch.py"), (10, 12), second=(KILLED,))
    with pytest.raises(Failed, match="w1 ended by 1"):
        _lost(Workers(machines(tmp_path, LOST, {"status": 1}), "watch.py"), (10, 12), second=(KILLED,))


def test_calls_that_are_all_answered_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verbs._workers.time.sleep", lambda _: None)
    assert _unharmed(machines(tmp_path, WELL), lambda _: None) == "all 9 calls were answered, the slowest after 4.1 s"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (LOST, "a call failed after 11.0 s"),
        ({**WELL, "open_call": "failed"}, "the open call failed"),
        ({**WELL, "slowest_s": 0.2}, "the slowest call took 0.20 s only"),
        ({**WELL, "shutdown_error": "a timeout"}, "shutdown: a timeout"),
    ],
)
def test_a_call_that_is_not_answered_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr("verbs._workers.time.sleep", lambda _: None)
    with pytest.raises(Failed, match=reason):
        _unharmed(machines(tmp_path, facts), lambda _: None)


def test_a_machine_that_ends_by_itself_is_no_failed_trial() -> None:
    assert not issubclass(MachineEnded, Failed)


def test_a_time_beyond_its_limit_fails() -> None:
    expect_within(2, 1.9, "told")
    with pytest.raises(Failed, match=r"told after 11\.6 s, wanted within 2 s"):
        expect_within(2, 11.6, "told")
