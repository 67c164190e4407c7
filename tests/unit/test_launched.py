"""The sources of init_rpc() without arguments, in order. Tests with real launchers are in ``launchers/``."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, TCPStore

import torch_ucx_rpc
from tests.support.workers import reserved_port
from torch_ucx_rpc._bootstrap import rendezvous
from torch_ucx_rpc._bootstrap.rendezvous import JobAddress, open_job_store
from torch_ucx_rpc._launch import init, mpi
from torch_ucx_rpc._launch.environment import Launch
from torch_ucx_rpc.errors import JoinFailed

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "ROLE_", "TORCHELASTIC_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(variable)


# ---- Arguments -------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Record the names, ranks and sizes of the agents that init_rpc would start."""
    calls: list[tuple] = []
    monkeypatch.setattr(init._start, "init_rpc", lambda *arguments, open_store: calls.append(arguments[:3]))
    return calls


def test_the_error_without_a_launcher_names_the_variables() -> None:
    with pytest.raises(RuntimeError, match=r"RANK and WORLD_SIZE .* SLURM_PROCID .* torch_ucx_rpc run -n 2"):
        torch_ucx_rpc.init_rpc()


def test_explicit_arguments_win(started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    torch_ucx_rpc.init_rpc()
    torch_ucx_rpc.init_rpc("ps")
    torch_ucx_rpc.init_rpc(rank=2)
    torch_ucx_rpc.init_rpc(world_size=0)
    torch_ucx_rpc.init_rpc("x", rank=0, world_size=9)
    assert started == [("worker1", 1, 4), ("ps", 1, 4), ("worker2", 2, 4), ("worker1", 1, 0), ("x", 0, 9)]


def test_an_explicit_rank_ignores_the_role(started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"RANK": "5", "WORLD_SIZE": "8", "ROLE_NAME": "trainer", "ROLE_RANK": "3"}.items():
        monkeypatch.setenv(variable, value)
    torch_ucx_rpc.init_rpc()
    torch_ucx_rpc.init_rpc(rank=6)
    assert started == [("trainer3", 5, 8), ("worker6", 6, 8)]


# ---- Where the workers meet ------------------------------------------------------------------------------------------


def open_store(launch: Launch | None, init_method: str = "env://", timeout: float = 5) -> Any:
    rank, size = (0, 1) if launch is None else (launch.rank, launch.world_size)
    return init._open_store(launch, init_method, rank, size, timeout)


def test_options_beat_the_variable_which_beats_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert isinstance(open_store(None), TCPStore)
        monkeypatch.setenv("TORCH_UCX_RPC_INIT_METHOD", f"file://{tmp_path}/variable")
        assert open_store(None).path == f"{tmp_path}/variable"
        assert open_store(None, f"file://{tmp_path}/options").path == f"{tmp_path}/options"


def test_an_address_without_a_port_has_that_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    launch = Launch("Slurm", 0, 1, "worker0", hosts=("nowhere.invalid",), job="Slurm a 1")
    assert open_store(launch).port in init.ports_of("Slurm a 1")


def test_a_group_without_a_size_meets_at_the_jobs_ports() -> None:
    launch = Launch("Slurm", 0, 2, "worker0", hosts=("127.0.0.1",), job="Slurm a 3")
    assert init._open_store(launch, "env://", 0, None, 5).port in init.ports_of("Slurm a 3")


def test_port_without_an_address_is_used_on_the_jobs_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert open_store(Launch("Slurm", 0, 1, "worker0", hosts=("127.0.0.1",), job="Slurm a 2")).port == port


def test_a_meeting_place_must_be_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_UCX_RPC_INIT_METHOD", "/shared/store")
    with pytest.raises(ValueError, match=r"TORCH_UCX_RPC_INIT_METHOD must be a URL such as .* '/shared/store'"):
        open_store(None)


SEVERAL_HOSTS = Launch("Open MPI", 1, 3, "worker1", job="Open MPI 1", speaks_mpi=True)


def test_without_mpi4py_the_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "is_installed", lambda: False)
    with pytest.raises(JoinFailed, match=r"MASTER_ADDR .* TORCH_UCX_RPC_INIT_METHOD"):
        open_store(SEVERAL_HOSTS)


def test_a_shared_file_works_without_mpi4py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "is_installed", lambda: False)
    monkeypatch.setenv("TORCH_UCX_RPC_INIT_METHOD", f"file://{tmp_path}/store")
    assert isinstance(open_store(SEVERAL_HOSTS), FileStore)


# ---- The Store of a job ----------------------------------------------------------------------------------------------


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    with reserved_port() as first, reserved_port() as second:
        yield first, second


def meet(address: JobAddress) -> tuple[TCPStore, TCPStore]:
    """Return the Stores of rank 0 and of rank 1. Rank 1 looks for rank 0 before rank 0 starts."""
    found: list[TCPStore] = []
    looking = threading.Thread(target=lambda: found.append(open_job_store(address, 1, 2, 20)))
    looking.start()
    served = open_job_store(address, 0, 2, 20)
    looking.join()
    return served, found[0]


def test_the_workers_meet_at_the_first_free_port(monkeypatch: pytest.MonkeyPatch, ports: tuple[int, int]) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 1.0)
    with socket.create_server(("", 0)) as no_store:
        taken = no_store.getsockname()[1]
        served, found = meet(JobAddress("job", ("127.0.0.1",), (taken, *ports)))
    assert served.port == found.port == ports[0]
    served.set("key", "value")
    assert found.get("key") == b"value"


def test_two_jobs_with_the_same_ports_do_not_meet(ports: tuple[int, int]) -> None:
    # This Store is not multi-tenant: multi-tenant Stores of one process share a port.
    other = TCPStore("127.0.0.1", ports[0], is_master=True, wait_for_workers=False, multi_tenant=False)
    other.set("torch_ucx_rpc/job", "another")
    served, found = meet(JobAddress("job", ("127.0.0.1",), ports))
    assert served.port == found.port == ports[1]


def test_workers_look_for_rank_0_on_all_its_possible_hosts(ports: tuple[int, int]) -> None:
    served, found = meet(JobAddress("job", ("nowhere.invalid", "127.0.0.1"), ports))
    assert served.port == found.port


def test_rank_0_says_when_the_others_would_look_elsewhere(ports: tuple[int, int]) -> None:
    with pytest.raises(JoinFailed, match=r"nowhere.invalid.*MASTER_ADDR"):
        open_job_store(JobAddress("job", ("nowhere.invalid",), ports), 0, 2, 5)


def test_error_names_the_ports_and_their_answer(ports: tuple[int, int]) -> None:
    with pytest.raises(JoinFailed, match=rf"not at 127.0.0.1, port {ports[0]} or {ports[1]}, .*refused"):
        open_job_store(JobAddress("job", ("127.0.0.1",), ports), 1, 2, 0.2)


def test_the_error_says_that_all_ports_are_taken(ports: tuple[int, int]) -> None:
    with socket.create_server(("", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(JoinFailed, match=rf"the ports {taken} are all in use .* set MASTER_PORT"):
            open_job_store(JobAddress("job", ("127.0.0.1",), (taken,)), 0, 2, 5)
