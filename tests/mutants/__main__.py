"""Test the mutants that the arguments select, and report.

    python -m tests.mutants                        all
    python -m tests.mutants --python | --cpp       mutants in Python, which need no build; mutants in C++
    python -m tests.mutants NAME ...
    python -m tests.mutants --list

The tests of a mutant must pass without it, and each of them must fail with it. The mutant must compile. Its text may be
in any file. Text that is missing, or occurs twice, is an error: correct the list. The exit code is 1 if a test does not
notice its mutant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from . import _copy
from ._list import MUTANTS
from ._mutant import Mutant, Useless


def tests_that_fail(chosen: Sequence[Mutant]) -> dict[str, str]:
    """Return the tests of these mutants that fail without a mutant, each with its failure."""
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    if any(mutant.is_cpp for mutant in chosen):
        _copy.build_for(tests)
    failing = {}
    for test in tests:
        try:
            if not _copy.passes(test):
                failing[test] = "fails without it"
        except Useless as error:
            failing[test] = str(error)
    return failing


def fate(mutant: Mutant) -> str:
    """Return "caught", or "SURVIVED" with the tests that pass despite the mutant. All tests pass without the mutant."""
    file = mutant.place(_copy.COPY)
    text = file.read_text(encoding="utf-8")
    file.write_text(mutant.pattern.sub(lambda _: mutant.instead, text), encoding="utf-8")
    try:
        if mutant.is_cpp:
            _copy.build_for(mutant.tests)
        passing = [test for test in mutant.tests if _copy.passes(test)]
    finally:
        file.write_text(text, encoding="utf-8")
    return f"SURVIVED {', '.join(passing)}" if passing else "caught"


def try_all(chosen: Sequence[Mutant], tell: Callable[[str], None]) -> int:
    """Try all mutants, print the result of each, and return the number of caught mutants."""
    caught = 0
    failing = tests_that_fail(chosen)
    for mutant in chosen:
        broken = [f"{test} {failing[test]}" for test in mutant.tests if test in failing]
        try:
            outcome = f"useless: {'; '.join(broken)}" if broken else fate(mutant)
        except Useless as error:
            outcome = f"useless: {error}"
        caught += outcome == "caught"
        tell(f"{mutant.name}: {outcome}")
    return caught


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME", help="the mutants to try")
    language = parser.add_mutually_exclusive_group()
    language.add_argument("--python", action="store_true", help="only mutants in Python")
    language.add_argument("--cpp", action="store_true", help="only mutants in C++")
    parser.add_argument("--list", action="store_true", help="list them")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if (not arguments.names or mutant.name in arguments.names)
        and not (mutant.is_cpp and arguments.python)
        and not (not mutant.is_cpp and arguments.cpp)
    ]
    if arguments.list:
        print("\n".join(f"{mutant.name}: {', '.join(mutant.tests)}" for mutant in chosen))
        return 0
    _copy.refresh()
    # Mutants in Python come first: a C++ mutant leaves its extension behind.
    chosen.sort(key=lambda mutant: mutant.is_cpp)
    caught = try_all(chosen, lambda line: print(line, flush=True))
    print(f"{caught} of {len(chosen)} are caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
