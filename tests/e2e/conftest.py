"""Virtual hosts that the tests of a module share, and their fate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.labs import Fate, VirtualHosts, needs_virtual_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    needs_virtual_hosts()
    with VirtualHosts(["a", "b", "c"]) as made:
        yield made


@pytest.fixture
def fate(hosts: VirtualHosts) -> Iterator[Fate]:
    with Fate(hosts) as desk:
        yield desk
