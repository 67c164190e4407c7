"""The outcomes of tests, from pytest's results. If pytest was ended before it wrote any, they come from its output."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

# The line of a test in the output of `pytest -v`: "NAME HOW", or under pytest-xdist "[gw0] [ 50%] HOW NAME".
_HOW = "(PASSED|FAILED|ERROR|SKIPPED)"
_ENDING = re.compile(rf"^(?:\[gw\d+\] \[ *\d+%\] )?(?:{_HOW} (\S+)|(\S+::\S+) {_HOW})", re.MULTILINE)

# The line at the beginning of a test has its name. Without pytest-xdist the outcome follows on the same line.
_BEGINNING = re.compile(r"^(\S+\.py::\S+)(?: |$)", re.MULTILINE)

# A failure's text is cut to its last part.
_MOST_TEXT = 4000


def outcome(results: Path, printed: str) -> dict[str, Any]:
    """Return how many tests passed, and which were skipped or failed, and why. Without results, read pytest's
    output."""
    failed: dict[str, str] = {}
    skipped: list[str] = []
    passed = 0
    lines = _ENDING.findall(printed)
    endings = {(second_name or name): (how or second_how) for how, name, second_name, second_how in lines}
    # The tests that have begun and not ended: if pytest was ended, one of these may hang.
    unfinished = {"unfinished": sorted(begun)} if (begun := set(_BEGINNING.findall(printed)) - set(endings)) else {}
    try:
        cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError):
        failed = {name: "see the log" for name, how in endings.items() if how in {"FAILED", "ERROR"}}
        skipped = [name for name, how in endings.items() if how == "SKIPPED"]
        passed = sum(how == "PASSED" for how in endings.values())
        found = {"passed": passed, "failed": failed, "skipped": skipped, **unfinished}
        return {**found, "incomplete": "pytest has written no results"}
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}"
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        if fault is not None:
            failed[name] = f"{fault.get('message')}\n{(fault.text or '')[-_MOST_TEXT:]}"
        elif (skip := case.find("skipped")) is not None:
            skipped.append(f"{name}: {skip.get('message')}")
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped, **unfinished}
