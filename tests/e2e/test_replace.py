"""UCX replaces TensorPipe: by a function, or by a variable in programs that do not import this package."""

from __future__ import annotations

import subprocess
import textwrap

import pytest
from torch.distributed.rpc import TensorPipeRpcBackendOptions

import _torch_ucx_rpc_autoload as autoload
from tests.support import workers
from tests.support.fresh import PRELUDE, run_fresh
from torch_ucx_rpc import UcxRpcBackendOptions
from torch_ucx_rpc._torch import replace

VARIABLE = "TORCH_UCX_RPC_REPLACE_TENSORPIPE"
ON = {VARIABLE: "1"}
SAID = f"{VARIABLE}: torch.distributed.rpc uses UCX instead of TensorPipe in this process\n"


def passes(script: str) -> None:
    """Run a script after `replace_tensorpipe`, in a process where torch has been imported."""
    __tracebackhide__ = True
    replace = "import torch_ucx_rpc\ntorch_ucx_rpc.replace_tensorpipe()\n"
    run_fresh(PRELUDE + replace + textwrap.dedent(script))


def program(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the variables ``env``, in a process where nothing has been imported."""
    [ended] = workers.run_program(PRELUDE + textwrap.dedent(script), env=env)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_ucx_replaces_the_default_and_each_tensorpipe_member() -> None:
    passes("""
        runs("UcxRpcAgent")
        runs("UcxRpcAgent", backend=BackendType.TENSORPIPE)
        runs("UcxRpcAgent", backend=rpc.BackendType.TENSORPIPE)
        runs("UcxRpcAgent", backend=backend_registry.BackendType["TENSORPIPE"])
        runs("UcxRpcAgent", backend=BackendType.TENSORPIPE, rpc_backend_options=TensorPipeRpcBackendOptions())
        runs("UcxRpcAgent", backend="UCX")
    """)


def test_the_backend_is_inferred_from_options_for_tensorpipe() -> None:
    passes("""
        options = TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:0", _transports=["uv"])
        runs("UcxRpcAgent", rpc_backend_options=options)
    """)


def test_options_for_tensorpipe_hold_for_ucx() -> None:
    passes("""
        given = TensorPipeRpcBackendOptions(
            num_worker_threads=3,
            rpc_timeout=7.5,
            init_method="tcp://127.0.0.1:0",
            _transports=["uv"],
            _channels=["basic"],
        )
        assert runs("UcxRpcAgent", rpc_backend_options=given) == torch_ucx_rpc.UcxRpcBackendOptions(
            num_worker_threads=3, rpc_timeout=7.5, init_method="tcp://127.0.0.1:0"
        )
        assert runs("UcxRpcAgent") == torch_ucx_rpc.UcxRpcBackendOptions()
    """)


def test_device_maps_and_devices_for_tensorpipe_hold_for_ucx() -> None:
    given = TensorPipeRpcBackendOptions(device_maps={"ps": {"cuda:0": "cuda:1"}}, devices=["cuda:0", "cuda:2"])
    given.set_device_map("ps", {"cuda:2": "cuda:0"})
    assert replace.equivalent(given) == UcxRpcBackendOptions(
        device_maps={"ps": {"cuda:0": "cuda:1", "cuda:2": "cuda:0"}}, devices=["cuda:0", "cuda:2"]
    )


def test_options_not_for_tensorpipe_are_refused_as_by_torch() -> None:
    passes("""
        tensorpipe = {"backend": BackendType.TENSORPIPE}
        foreign = "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"
        refused(TypeError, foreign, rpc_backend_options=torch_ucx_rpc.UcxRpcBackendOptions(), **tensorpipe)
        refused(TypeError, foreign, rpc_backend_options=rpc.RpcBackendOptions(), **tensorpipe)
        refused(TypeError, "must be an instance of RpcBackendOptions", rpc_backend_options={}, **tensorpipe)
        refused(TypeError, "must be an instance of RpcBackendOptions", rpc_backend_options={})
        refused(TypeError, "Argument backend must be a member of BackendType", backend="TENSORPIPE")
    """)


def test_other_backends_stay_as_they_are() -> None:
    passes("""
        from torch.distributed.rpc._testing import faulty_agent_backend_registry

        faulty = backend_registry.BackendType["FAULTY_TENSORPIPE"]
        options = backend_registry.construct_rpc_backend_options(
            faulty, num_worker_threads=4, num_fail_sends=0, messages_to_fail=[], messages_to_delay={}
        )
        runs("FaultyTensorPipeAgent", backend=faulty, rpc_backend_options=options)
        runs("UcxRpcAgent", rpc_backend_options=torch_ucx_rpc.UcxRpcBackendOptions())
    """)


def test_variable_replaces_tensorpipe_and_says_so_once() -> None:
    ended = program(
        """
        assert "torch_ucx_rpc" not in sys.modules and init_rpc is rpc.init_rpc
        member = BackendType.TENSORPIPE
        runs("UcxRpcAgent")
        runs("UcxRpcAgent", backend=member)
        runs("UcxRpcAgent", rpc_backend_options=TensorPipeRpcBackendOptions(num_worker_threads=2))
        """,
        **ON,
    )
    assert ended.stderr == SAID


def test_the_warning_names_the_function_that_was_called() -> None:
    script = """
        import torch_ucx_rpc

        torch_ucx_rpc.replace_tensorpipe()
        runs("UcxRpcAgent")
    """
    assert program(script).stderr == SAID.replace(VARIABLE, "torch_ucx_rpc.replace_tensorpipe()")
    assert program(script, **ON).stderr == SAID


def test_variable_works_beside_an_import_and_without_autoload() -> None:
    script = """
        import torch_ucx_rpc

        runs("UcxRpcAgent")
        runs("UcxRpcAgent", backend="UCX")
    """
    assert program(script, **ON).stderr == SAID
    assert program(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **ON).stderr == SAID


def test_init_rpc_keeps_its_signature_and_docstring() -> None:
    program(
        """
        import inspect

        parameters = inspect.signature(init_rpc).parameters
        assert list(parameters) == ["name", "backend", "rank", "world_size", "rpc_backend_options"]
        assert "Initializes RPC primitives" in init_rpc.__doc__
        assert (init_rpc.__module__, init_rpc.__name__) == ("torch.distributed.rpc", "init_rpc")
        """,
        **ON,
    )


@pytest.mark.parametrize("env", [{}, {VARIABLE: ""}, {VARIABLE: "0"}], ids=["unset", "empty", "0"])
def test_without_the_variable_nothing_is_loaded_or_changed(env: dict[str, str]) -> None:
    ended = program(
        """
        assert not hasattr(init_rpc, "__wrapped__")
        assert init_rpc.__code__.co_filename == rpc.__file__
        assert {name for name in sys.modules if name.startswith(("torch_ucx_rpc", "libucx"))} == set()
        assert "libucp" not in open("/proc/self/maps").read()
        runs("TensorPipeAgent")
        assert "libucp" not in open("/proc/self/maps").read()
        """,
        **env,
    )
    assert VARIABLE not in ended.stderr


def test_autoload_module_and_package_read_one_variable() -> None:
    assert (autoload.VARIABLE, autoload.OFF) == (replace.VARIABLE, replace.OFF)


def test_ucx_is_loaded_by_init_rpc_and_not_before() -> None:
    program(
        """
        assert "libucp" not in open("/proc/self/maps").read()
        runs("UcxRpcAgent")
        assert "libucp" in open("/proc/self/maps").read()
        """,
        **ON,
    )


@pytest.mark.parametrize("value", ["yes", "true", "2"])
def test_another_value_is_refused_by_init_rpc(value: str) -> None:
    program(
        f"""
        for _ in range(2):
            refused(ImportError, "{VARIABLE}={value} means nothing: set it to 1")
        """,
        **{VARIABLE: value},
    )


def test_unloadable_package_fails_init_rpc_instead_of_tensorpipe() -> None:
    ended = program(
        f"""
        for _ in range(2):
            refused(ImportError, "{VARIABLE}=1: torch_ucx_rpc cannot take the place of TensorPipe", "TORCH_UCX_RPC_UCX")
        """,
        TORCH_UCX_RPC_UCX="nonsense",
        **ON,
    )
    assert not ended.stderr


STARTS_PROCESSES = """
import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def worker(rank):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    agent = type(rpc.api._get_current_rpc_agent()).__name__
    assert rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), rank)).tolist() == [1 + rank] * 2
    rpc.shutdown()
    assert agent == "UcxRpcAgent", agent


if __name__ == "__main__":
    mp.start_processes(worker, nprocs=2, start_method=os.environ["START_METHOD"])
"""


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_variable_holds_for_child_processes(start_method: str, tmp_path) -> None:
    file = tmp_path / "starts_processes.py"
    file.write_text(STARTS_PROCESSES)
    with workers.reserved_port() as port:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "START_METHOD": start_method, **ON}
        [ended] = workers.run_program(file, env=env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == 2 * SAID
