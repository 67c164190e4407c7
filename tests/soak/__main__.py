"""``python -m tests.soak --minutes 1``: see the package's docstring."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from pathlib import Path

from ._chaos import MISFORTUNES, Chaos
from ._run import Kind, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="of bad luck (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of all choices (default: any)")
    parser.add_argument("--report", type=Path, required=True, help="folder for report.json and report.md")
    arguments = parser.parse_args()
    print(f"soak: {arguments.minutes:g} minutes, seed {arguments.seed}", flush=True)
    # Drop the files of an earlier run.
    shutil.rmtree(arguments.report, ignore_errors=True)
    journals = arguments.report.resolve() / "journals"
    journals.mkdir(parents=True)
    report = run(Kind(Chaos, MISFORTUNES), arguments.minutes, arguments.seed, journals)
    page = report.write(arguments.report)
    print(f"{page.read_text()}\nwritten to {page}")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
