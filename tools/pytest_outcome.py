"""How tests fared: from pytest's results, or from what it has printed where it was ended before it wrote any."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

# Of a test in what `pytest -v` prints: "NAME HOW", or under pytest-xdist "[gw0] [ 50%] HOW NAME".
_HOW = "(PASSED|FAILED|ERROR|SKIPPED)"
_ENDING = re.compile(rf"^(?:\[gw\d+\] \[ *\d+%\] )?(?:{_HOW} (\S+)|(\S+::\S+) {_HOW})", re.MULTILINE)

# What it prints when a test begins: the name, and on the same line how it ends if it is no pytest-xdist.
_BEGINNING = re.compile(r"^(\S+\.py::\S+)(?: |$)", re.MULTILINE)

# Of the text of a failure, the end is kept.
_MOST_TEXT = 4000


def outcome(results: Path, printed: str) -> dict[str, Any]:
    """How many tests passed, which were skipped or failed, and why; from what pytest printed if it wrote no results."""
    failed: dict[str, str] = {}
    skipped: list[str] = []
    passed = 0
    lines = _ENDING.findall(printed)
    endings = {(second_name or name): (how or second_how) for how, name, second_name, second_how in lines}
    # Of those that pytest has named when they began; where it was ended, they are the ones to look at.
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
