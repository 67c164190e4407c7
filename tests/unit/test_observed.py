"""Answers to observers, from sockets that are no workers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from unittest import mock

import pytest

from torch_ucx_rpc._observe import socket as observation
from torch_ucx_rpc._observe.socket import Found


@contextlib.contextmanager
def worker_that_answers(answer: bytes) -> Iterator[Found]:
    name = f"{os.getpid()}/{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0torch_ucx_rpc/{name}")
        listening.listen()

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Found(os.getpid(), name)
        thread.join()


# Words of this package, of json, of int() and of bytes.decode().
MALFORMED = "not the answer|not the statistics|invalid literal|can't decode"


@pytest.mark.parametrize("answer", [b"[]", b"1", b"\xff", b'{"a": "gone"}', b'{"0": {}}', b'{"0": []}', b"0" * 1000])
def test_answers_of_other_programs_are_refused(answer: bytes) -> None:
    with (
        mock.patch.object(observation, "_LONGEST_ANSWER", 500),
        worker_that_answers(answer) as found,
        pytest.raises(ValueError, match=MALFORMED),
    ):
        found.ask()


def test_only_root_asks_the_workers_of_another_user() -> None:
    with (
        mock.patch.object(os, "geteuid", return_value=os.getuid() + 1),
        worker_that_answers(b"{}") as found,
        pytest.raises(OSError, match="it belongs to another user"),
    ):
        found.ask()
    refused = contextlib.nullcontext() if os.getuid() == 0 else pytest.raises(OSError, match="another user")
    with (
        mock.patch.object(observation, "_uid", return_value=os.getuid() + 1),
        worker_that_answers(b"{}") as found,
        refused,
    ):
        assert found.ask() == {}
