"""The import of the package changes some of torch.distributed.rpc, and leaves the rest unchanged.

Each test runs in its own process, in which this import is the first.
"""

from __future__ import annotations

import textwrap

import pytest

from tests.support import workers
from tests.support.fresh import PRELUDE, run_fresh


def passes(script: str) -> None:
    __tracebackhide__ = True
    run_fresh(PRELUDE + textwrap.dedent(script))


def stderr_of_program(script: str) -> str:
    [ended] = workers.run_program(PRELUDE + textwrap.dedent(script))
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_tensorpipe_runs_however_a_program_asks_for_it() -> None:
    # This test needs a whole program: processes of the other tests have imported torch's suites, which register a
    # backend.
    stderr_of_program("""
        stale = BackendType.TENSORPIPE
        import torch_ucx_rpc

        runs("TensorPipeAgent")
        runs("TensorPipeAgent", backend=rpc.BackendType.TENSORPIPE)
        runs("TensorPipeAgent", backend=stale)
        runs("TensorPipeAgent", backend=BackendType.TENSORPIPE)
        runs("TensorPipeAgent", rpc_backend_options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=2))
    """)


def test_ucx_runs_by_name_by_member_and_by_options() -> None:
    # stderr stays empty. torch's own inference would warn about every backend except TensorPipe.
    assert not stderr_of_program("""
        import torch_ucx_rpc

        runs("UcxRpcAgent", backend="UCX")
        runs("UcxRpcAgent", backend=rpc.BackendType.UCX)
        runs("UcxRpcAgent", backend=backend_registry.BackendType["UCX"])
        runs("UcxRpcAgent", rpc_backend_options=torch_ucx_rpc.UcxRpcBackendOptions(num_worker_threads=2))
        runs("UcxRpcAgent", backend="UCX", rpc_backend_options=torch_ucx_rpc.UcxRpcBackendOptions())
    """)


def test_an_enum_imported_earlier_has_the_member_too() -> None:
    passes("""
        import torch_ucx_rpc

        assert BackendType is not rpc.BackendType
        assert BackendType.UCX is rpc.BackendType.UCX
        runs("UcxRpcAgent", backend=BackendType.UCX)
    """)


def test_the_backends_take_turns_in_one_process() -> None:
    passes("""
        import torch_ucx_rpc

        for _ in range(2):
            runs("UcxRpcAgent", backend="UCX")
            runs("TensorPipeAgent")
    """)


def test_backend_registered_later_makes_no_member_stale() -> None:
    passes("""
        import torch_ucx_rpc

        ucx, tensorpipe = rpc.BackendType.UCX, rpc.BackendType.TENSORPIPE
        later = backend_registry.register_backend("LATER", *tensorpipe.value)
        runs("UcxRpcAgent", backend="UCX")
        runs("UcxRpcAgent", backend=ucx)
        runs("UcxRpcAgent", rpc_backend_options=torch_ucx_rpc.UcxRpcBackendOptions())
        runs("TensorPipeAgent", backend=tensorpipe)
        runs("TensorPipeAgent", backend=later)
        runs("TensorPipeAgent")
    """)


def test_the_registry_starts_an_agent_on_a_store_that_is_given() -> None:
    passes("""
        import torch.distributed as dist
        import torch_ucx_rpc

        # The caller's part, as init_rpc's.
        dist.autograd._init(0)
        agent = backend_registry.init_backend(
            rpc.BackendType.UCX,
            store=dist.HashStore(),
            name="w0",
            rank=0,
            world_size=1,
            rpc_backend_options=torch_ucx_rpc.UcxRpcBackendOptions(),
        )
        assert agent is rpc.api._get_current_rpc_agent()
        assert rpc_sync("w0", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
        shutdown()

        # torch's own tests call this one.
        rpc._init_rpc_backend(
            rpc.BackendType.UCX, dist.HashStore(), "w0", 0, 1, torch_ucx_rpc.UcxRpcBackendOptions()
        )
        shutdown()
    """)


def test_importing_and_registering_again_changes_nothing() -> None:
    passes("""
        import importlib, sys
        import torch_ucx_rpc
        from torch_ucx_rpc._torch import patches

        before = (rpc.BackendType, rpc.init_rpc.__code__, rpc.api._invoke_rpc, rpc.api._wait_all_workers)
        patches.register()
        importlib.reload(torch_ucx_rpc)
        after = (rpc.BackendType, rpc.init_rpc.__code__, rpc.api._invoke_rpc, rpc.api._wait_all_workers)
        assert before == after
        runs("UcxRpcAgent", backend="UCX")
        runs("TensorPipeAgent")
    """)


def test_init_rpc_keeps_its_signature_and_docstring() -> None:
    passes("""
        import inspect

        before = inspect.signature(init_rpc), init_rpc.__doc__, init_rpc.__name__, init_rpc.__module__
        import torch_ucx_rpc

        assert init_rpc is rpc.init_rpc
        assert before == (inspect.signature(init_rpc), init_rpc.__doc__, init_rpc.__name__, init_rpc.__module__)
    """)


def test_torchs_errors_for_other_backends_are_torchs() -> None:
    passes("""
        import torch_ucx_rpc

        tensorpipe = rpc.BackendType.TENSORPIPE
        # PyTorch's own tests ask for this one.
        refused(TypeError, "Argument backend must be a member of BackendType", backend="TENSORPIPE")
        refused(TypeError, "Argument backend must be a member of BackendType", backend=17)
        refused(TypeError, "must be an instance of RpcBackendOptions", backend=tensorpipe, rpc_backend_options={})
        refused(TypeError, "must be a `TensorPipeRpcBackendOptions`", backend=tensorpipe,
                rpc_backend_options=torch_ucx_rpc.UcxRpcBackendOptions())

        class OtherOptions(rpc.RpcBackendOptions):
            pass

        refused(TypeError, "Could not infer backend for options", rpc_backend_options=OtherOptions())
    """)


def test_unknown_backend_is_refused_with_the_known_ones() -> None:
    passes("""
        import torch_ucx_rpc

        refused(TypeError, "'ucx'", "members are ", "TENSORPIPE, UCX", backend="ucx")
    """)


def test_wrong_arguments_are_refused_before_anything_begins() -> None:
    passes("""
        import torch_ucx_rpc

        del os.environ["MASTER_ADDR"]
        ucx = {"backend": "UCX"}
        refused(TypeError, "must be an instance of RpcBackendOptions", rpc_backend_options={}, **ucx)
        refused(TypeError, "must be a `UcxRpcBackendOptions`",
                rpc_backend_options=rpc.TensorPipeRpcBackendOptions(), **ucx)
        refused(TypeError, "name must be a str", args=(b"w0",), **ucx)
        refused(TypeError, "rank must be an int", rank="0", **ucx)
        refused(TypeError, "world_size must be an int", world_size=1.0, **ucx)
        refused(ValueError, "rank must be between 0 and world_size - 1, which is 0; it is -1", rank=-1, **ucx)
        refused(ValueError, "it is 1", rank=1, **ucx)
        refused(ValueError, "world_size must be the number of workers, or None", world_size=-1, **ucx)
        refused(ValueError, "rank must be at most 32767", rank=40000, world_size=50000, **ucx)
        refused(ValueError, "environment variable RANK expected", rank=-1, world_size=None, **ucx)
        refused(RuntimeError, "Worker name must match", args=("not a name",), **ucx)
        refused(ValueError, "environment variable MASTER_ADDR expected, but not set", **ucx)
    """)


def test_a_second_init_rpc_is_refused_and_the_first_goes_on() -> None:
    passes("""
        import torch_ucx_rpc

        init_rpc("w0", backend="UCX", rank=0, world_size=1)
        for backend in ("UCX", rpc.BackendType.TENSORPIPE):
            try:
                init_rpc("w0", backend=backend, rank=0, world_size=1)
            except RuntimeError as raised:
                assert str(raised).startswith("RPC is already initialized"), raised
            else:
                raise AssertionError("not refused")
        assert rpc_sync("w0", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
        shutdown()
    """)


@pytest.mark.parametrize("how", ["rpc.shutdown()", "rpc.shutdown(graceful=False)"])
def test_nothing_keeps_the_agent_after_shutdown(how: str) -> None:
    passes(f"""
        import gc, weakref
        import torch_ucx_rpc

        init_rpc("w0", backend="UCX", rank=0, world_size=1)
        rpc_sync("w0", torch.add, args=(torch.ones(2), 1))
        running = weakref.ref(rpc.api._get_current_rpc_agent())
        gc.collect()
        assert running() is rpc.api._get_current_rpc_agent()
        {how}
        gc.collect()
        assert running() is None
    """)


def test_agent_has_the_attributes_torch_expects() -> None:
    passes("""
        import torch_ucx_rpc

        options = torch_ucx_rpc.UcxRpcBackendOptions(num_worker_threads=2)
        init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
        agent = rpc.api._get_current_rpc_agent()
        assert agent.is_static_group
        assert agent._get_backend_options() == options
        options.num_worker_threads = 7
        assert agent._get_backend_options() != options
        agent.store.set("key", "value")
        assert agent.store.get("key") == b"value"
        shutdown()
    """)


def test_failed_init_can_be_retried_with_either_backend() -> None:
    passes("""
        import torch_ucx_rpc

        soon = torch_ucx_rpc.UcxRpcBackendOptions(init_timeout=0.1)
        refused(RuntimeError, "these ranks have not come: 1", world_size=2, rpc_backend_options=soon)
        runs("UcxRpcAgent", backend="UCX")
        refused(RuntimeError, "these ranks have not come: 1", world_size=2, rpc_backend_options=soon)
        runs("TensorPipeAgent")
    """)
