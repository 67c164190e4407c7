"""Modules that importing the package does not load."""

from __future__ import annotations

from tests.support.fresh import run_fresh


def test_statistics_are_imported_on_first_use() -> None:
    run_fresh(
        """
        import sys, torch_ucx_rpc
        assert "torch_ucx_rpc._observe.statistics" not in sys.modules
        assert torch_ucx_rpc.Statistics is torch_ucx_rpc._observe.statistics.Statistics
        try:
            torch_ucx_rpc.no_such_name
        except AttributeError as error:
            assert "'torch_ucx_rpc' has no attribute 'no_such_name'" in str(error)
        else:
            raise AssertionError("there is no such name")
        """
    )


def test_import_runs_without_garbage_collections() -> None:
    run_fresh(
        """
        import gc, sys
        walks = []

        def note(*_):
            # The first and the last thing that the package imports. A walk before or after them is short.
            if "torch_ucx_rpc._native" in sys.modules and not hasattr(sys.modules["torch_ucx_rpc"], "on_lost"):
                walks.append(_)

        gc.callbacks.append(note)
        import torch_ucx_rpc
        assert not walks
        assert gc.isenabled()
        """
    )
