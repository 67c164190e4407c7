"""The agent with faults: its options choose it, and its module is imported on demand."""

from __future__ import annotations

from tests.support.workers import run_program


def test_the_options_choose_the_agent() -> None:
    [ended] = run_program("""
        import os, time, torch
        import torch.distributed.rpc as rpc
        from torch_ucx_rpc.testing import FaultyUcxRpcBackendOptions

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        options = FaultyUcxRpcBackendOptions(
            messages_to_fail=["PYTHON_CALL"], num_fail_sends=1, messages_to_delay={"SCRIPT_CALL": 0.3}
        )
        for backend in (None, "UCX", rpc.backend_registry.BackendType["FAULTY_UCX"]):
            rpc.init_rpc("w0", backend=backend, rank=0, world_size=1, rpc_backend_options=options)
            try:
                rpc.rpc_sync("w0", os.getpid)
            except RuntimeError as error:
                assert "fails on demand" in str(error)
            else:
                raise AssertionError("that send was to fail")
            # The same message again.
            assert rpc.rpc_sync("w0", os.getpid) == os.getpid()
            start = time.monotonic()
            assert rpc.rpc_sync("w0", torch.add, args=(torch.ones(1), 1)).item() == 2
            assert time.monotonic() - start >= 0.3
            rpc.shutdown()
        print("done")
    """)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_testing_is_not_imported_unasked() -> None:
    [ended] = run_program("""
        import sys, torch_ucx_rpc
        import torch.distributed.rpc as rpc

        assert "torch_ucx_rpc.testing" not in sys.modules
        assert "FAULTY_UCX" not in rpc.backend_registry.BackendType.__members__
    """)
    assert ended.returncode == 0, ended.stderr
