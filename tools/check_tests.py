"""Whether a run of tests came to what CI expects: no test fewer, no skip that is not listed.

    python tools/check_tests.py NAME REPORT

REPORT is the JUnit file of pytest or ctest. ``.ci/tests.ini`` has, for each NAME, how many tests pass at least, and
which may be skipped for which reasons. Ends with 1, naming what is wrong.
"""

from __future__ import annotations

import argparse
import configparser
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

EXPECTED = Path(__file__).resolve().parent.parent / ".ci" / "tests.ini"

# Where a log is cut, its end is kept: how a test failed is said there once more. Of a long text, its beginning and its
# end: where several processes have failed, the first of them often names the cause, and the others what came of it.
_FIRST_LINES, _LAST_LINES = 50, 30


def read_expectations(file: Path = EXPECTED) -> configparser.ConfigParser:
    # Names of tests have colons.
    expected = configparser.ConfigParser(delimiters=("=",), interpolation=None, inline_comment_prefixes=None)
    expected.optionxform = str  # type: ignore[assignment, method-assign]
    with file.open(encoding="utf-8") as lines:
        expected.read_file(lines)
    return expected


def problems(report: ElementTree.Element, floor: int, may_skip: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with a run, in sentences.

    Args:
        report: the root of a JUnit file.
        floor: how many tests pass at least.
        may_skip: patterns of names, and for each one of the reasons.
    """
    passed = 0
    for case in report.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        skipped = case.find("skipped")
        if skipped is not None:
            reason = " ".join((skipped.get("message") or "").split())
            allowed = (reasons for names, reasons in may_skip.items() if re.fullmatch(names, name))
            if not any(re.fullmatch(reasons, reason) for reasons in allowed):
                yield f"{name} was skipped, which {EXPECTED.name} does not list: {reason or 'no reason given'}"
        elif failures := [*case.iter("failure"), *case.iter("error")]:
            # pytest's text ends with the error, which its message repeats. Of ctest there is what the test has written.
            texts = [failure.text or "" for failure in failures]
            texts = texts if any(map(str.strip, texts)) else [case.findtext("system-out", "")]
            yield "\n    ".join([f"{name} failed", *how(texts)])
        else:
            passed += 1
    if passed < floor:
        yield f"{passed} tests passed, fewer than the {floor} of {EXPECTED.name}: some are no longer collected or built"


def how(texts: Sequence[str]) -> list[str]:
    """What to show of the texts of a failure: of pytest's the error and its place, and of many lines a part."""
    lines = []
    for text in texts:
        of_text = text.rstrip().splitlines()
        errors = [number for number, line in enumerate(of_text) if re.match(r"E(\s|$)", line)]
        # The last line has the place: "tests/test_calls.py:7: AssertionError".
        lines += [of_text[number] for number in sorted({*errors, len(of_text) - 1})] if errors else of_text
    left_out = len(lines) - _FIRST_LINES - _LAST_LINES
    return lines if left_out <= 0 else [*lines[:_FIRST_LINES], f"[{left_out} lines]", *lines[-_LAST_LINES:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the run, in .ci/tests.ini")
    parser.add_argument("report", type=Path, help="the JUnit file that pytest or ctest has written")
    arguments = parser.parse_args()
    expected = read_expectations()
    section = f"skipped {arguments.name}"
    may_skip = dict(expected[section]) if expected.has_section(section) else {}
    try:
        report = ElementTree.parse(arguments.report).getroot()
    except (OSError, ElementTree.ParseError) as error:
        print(f"{arguments.name}: there is no report of it: {error}")
        return 1
    found = list(problems(report, int(expected["floors"][arguments.name]), may_skip))
    for problem in found:
        print(f"{arguments.name}: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
