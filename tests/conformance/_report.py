"""How each suite fared, as data: for the page that sets the backends side by side."""

from __future__ import annotations

import collections
import json
import os
import platform
import time
from pathlib import Path

import pytest
import torch


class Report:
    """A pytest plugin that writes a JSON file when the run is over."""

    def __init__(self, file: Path, backend: str) -> None:
        self._file = file
        self._backend = backend
        self._started = time.time()
        self._collected: collections.Counter[str] = collections.Counter()
        self._outcomes: dict[str, dict[str, str]] = collections.defaultdict(dict)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(self._names(item.nodeid)[0] for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Setting up and clearing away count when they are what went wrong.
        if report.when == "call" or not report.passed:
            suite, test = self._names(report.nodeid)
            if self._outcomes[suite].get(test) != "failed":
                self._outcomes[suite][test] = report.outcome

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._content(), indent=2) + "\n")

    def _names(self, nodeid: str) -> tuple[str, str]:
        """Of the suite, as torch calls it, and of the test."""
        *_, suite, test = nodeid.split("::")
        return suite.removeprefix(self._backend), test

    def _content(self) -> dict[str, object]:
        suites = {}
        for suite, collected in self._collected.items():
            counts = collections.Counter(self._outcomes[suite].values())
            suites[suite] = {
                "collected": collected,
                **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
                "not passed": {test: o for test, o in sorted(self._outcomes[suite].items()) if o != "passed"},
            }
        return {
            "backend": self._backend,
            "versions": {"torch": torch.__version__, "python": platform.python_version(), **self._ucx_version()},
            "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")},
            "cpus": len(os.sched_getaffinity(0)),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            "seconds": round(time.time() - self._started, 1),
            "suites": suites,
        }

    def _ucx_version(self) -> dict[str, str]:
        if self._backend != "UCX":
            return {}
        import torch_ucx_rpc

        return {"torch_ucx_rpc": torch_ucx_rpc.__version__, "ucx": torch_ucx_rpc._C.ucx_library()["version"]}
