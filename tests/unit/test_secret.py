"""The secret of a job: its sources, its seals, and the refused workers."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from torch_ucx_rpc._bootstrap.members import gather_members
from torch_ucx_rpc._bootstrap.secret import FILE_VARIABLE, VARIABLE, Entry, Secret, load_secret, read_entry, write_entry

from .test_members import no_farewell, outcome, record  # noqa: F401 - a fixture

VALUE = "8f1d0c7a" * 8
SECRET, OTHER = Secret(VALUE.encode()), Secret(b"another" * 8)


@pytest.fixture(autouse=True)
def _no_secret_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.secret"
    path.touch(mode=0o600)
    path.write_text(VALUE + "\n")
    return path


def is_loaded(secret_file: Path | None = None) -> bool:
    secret = load_secret(None if secret_file is None else str(secret_file))
    return secret is not None and secret.tag("text") == SECRET.tag("text")


# ---- Where a secret comes from ---------------------------------------------------------------------------------------


def test_without_option_and_variable_there_is_no_secret() -> None:
    assert load_secret(None) is None


def test_secret_comes_from_option_variable_or_named_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_loaded(file)
    with monkeypatch.context() as context:
        context.setenv(FILE_VARIABLE, str(file))
        assert is_loaded()
    monkeypatch.setenv(VARIABLE, VALUE)
    assert is_loaded()


def test_the_option_counts_more_than_the_variables(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "something else altogether")
    assert is_loaded(file)


def test_both_variables_are_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, VALUE)
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    with pytest.raises(ValueError, match=f"{FILE_VARIABLE} and {VARIABLE} are both set"):
        load_secret(None)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o601])
def test_a_file_that_others_can_open_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(
        ValueError, match=rf"secret_file '.*' is open to other users \(mode 0{mode & 0o77:02o} .*chmod 600"
    ):
        load_secret(str(file))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 12345, -1)
    with pytest.raises(ValueError, match="belongs to user 12345, who can change it"):
        load_secret(str(file))


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="is not a regular file"):
        load_secret(str(tmp_path / "pipe"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="absent"):
        load_secret(None)


@pytest.mark.parametrize("value", ["", "\n", "too short", "fifteen bytes!!", "x" * 5000])
def test_an_unfit_secret_is_refused_and_not_repeated(value: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(value)
    monkeypatch.setenv(VARIABLE, value)
    for secret_file, name in ((None, VARIABLE), (str(file), "secret_file")):
        with pytest.raises(ValueError, match=f"^{name} .*a secret has 16 to 4096, random ones: make one") as error:
            load_secret(secret_file)
        assert not value.strip() or value.strip() not in str(error.value)


def test_any_bytes_can_be_a_secret(file: Path) -> None:
    file.write_bytes(bytes(range(256)))
    assert load_secret(str(file)) is not None


# ---- Derived keys ----------------------------------------------------------------------------------------------------


def hkdf(secret: bytes, info: bytes) -> bytes:
    """RFC 5869, word by word."""
    pseudorandom_key = hmac.new(b"torch_ucx_rpc", secret, hashlib.sha256).digest()
    return hmac.new(pseudorandom_key, info + b"\x01", hashlib.sha256).digest()


def test_keys_follow_hkdf() -> None:
    info = b"frames" + (7).to_bytes(8, "little") + (2**64 - 1).to_bytes(8, "little")
    assert SECRET.key("frames", 7, 2**64 - 1) == hkdf(VALUE.encode(), info)


def test_only_a_worker_with_the_secret_opens_a_seal() -> None:
    here, there = SECRET.frame_keys(1, 2), SECRET.frame_keys(2, 1)
    assert here["send_key"] == there["receive_key"]
    assert here["receive_key"] == there["send_key"]
    assert here["join_key"] == SECRET.join_key(2)
    keys = [
        *(secret.key("frames", *pair) for secret in (SECRET, OTHER) for pair in ((1, 2), (2, 1), (1, 3), (3, 2))),
        *(secret.join_key(session) for secret in (SECRET, OTHER) for session in (1, 2)),
    ]
    assert len(set(keys)) == len(keys)


def test_an_entry_is_believed_if_it_has_the_same_secret() -> None:
    values = {"rank": 1, "name": "é"}
    for secret in (SECRET, None):
        assert read_entry(write_entry(values, secret).encode(), secret) == Entry(values)


@pytest.mark.parametrize(
    ("written", "read", "doubt"),
    [
        (None, SECRET, "{own} has a secret and {who} has none"),
        (SECRET, None, "{own} has no secret and {who} has one"),
        (SECRET, OTHER, "{own} has another secret than {who}"),
    ],
)
def test_entry_of_another_secret_is_doubted_and_names_its_worker(
    written: Secret | None, read: Secret | None, doubt: str
) -> None:
    entry = read_entry(write_entry({"rank": 1}, written).encode(), read)
    assert entry.values == {"rank": 1}
    assert entry.doubt.startswith(doubt)


def test_a_changed_entry_is_doubted() -> None:
    text = write_entry({"rank": 1}, SECRET)
    changed = text.replace("1", "2", 1)
    assert changed != text
    assert read_entry(changed.encode(), SECRET).doubt


@pytest.mark.parametrize("text", ["", "[]", "no JSON", '{"sealed": 1, "hmac": 2}', "[" * 100_000, '{"sealed": "[]"}'])
@pytest.mark.parametrize("secret", [SECRET, None])
def test_a_malformed_entry_is_never_believed(text: str, secret: Secret | None) -> None:
    entry = read_entry(text.encode(), secret)
    assert entry.doubt or "rank" not in entry.values


def test_a_verdict_that_rank_0_has_not_written_is_not_believed() -> None:
    store = HashStore()
    own, ghost = record(1, 2), record(0, 2)
    verdict: dict[str, Any] = {
        "members": [ghost.to_values(), own.to_values()],
        "by": ghost.session,
        "judge": str(ghost),
        "sessions": [ghost.session, own.session],
    }
    for forged in (json.dumps(verdict), write_entry(verdict, OTHER)):
        PrefixStore("torch_ucx_rpc", store).set("verdict", forged)
        assert "the workers do not share one secret" in outcome(gather_members, store, own, 10, SECRET)


@pytest.mark.usefixtures("no_farewell")
def test_leftover_entries_of_others_do_not_count() -> None:
    store = HashStore()
    for left_over in ("no JSON", write_entry({"error": "RuntimeError", "text": "?", "sessions": [1]}, OTHER)):
        PrefixStore("torch_ucx_rpc", store).set("verdict", left_over)
        assert "these ranks have not come: 1" in outcome(gather_members, store, record(0, 2), 0.1, SECRET)
