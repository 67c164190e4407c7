"""What benchmarks take from the output of UCX's ucx_perftest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.large_tensors import perftest_bandwidth, perftest_environment, perftest_latency_us

# As UCX 1.22 prints it with -f -v.
OUTPUT = """\
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
1000,3.978,4.725,4.398,5.39,2048.00,1379,417
"""
# UCX's last words in a process that has mapped another one's GPU memory, on whatever stream.
LAST_WORDS = (
    "[1753.5] [host:42:0] cuda_ctx.c:24 UCX  ERROR cuDevicePrimaryCtxGetState(0, &flags, &active) failed: 4, 5, 6, 7\n"
)


@pytest.mark.parametrize("after", ["", LAST_WORDS, "\n" + LAST_WORDS * 3, "1, 2\n"])
def test_the_last_line_of_figures_counts(after: str) -> None:
    assert perftest_bandwidth(OUTPUT + after) == 2.0
    assert perftest_latency_us(OUTPUT + after) == 3.978


# A container may have the driver of its GPU nowhere else.
def test_the_loader_still_finds_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64:/opt/other")
    found = perftest_environment(Path("/ucx/lib"), "all")
    assert found["LD_LIBRARY_PATH"] == "/ucx/lib:/usr/local/nvidia/lib64:/opt/other"
    assert found["UCX_TLS"] == "all"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert perftest_environment(Path("/ucx/lib"), "all")["LD_LIBRARY_PATH"] == "/ucx/lib"


def test_output_without_figures_is_an_error_that_shows_it() -> None:
    with pytest.raises(RuntimeError, match="no figures: something else"):
        perftest_bandwidth("something else\n")
