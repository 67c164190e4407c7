"""``python -m tests.soak --minutes 1``: see the package's docstring."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from ._chaos import Chaos
from ._run import Kind, run_and_report


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="length of the soak (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of all choices (default: random)")
    parser.add_argument("--report", type=Path, required=True, help="folder for report.json and report.md")
    arguments = parser.parse_args()
    print(f"soak: {arguments.minutes:g} minutes, seed {arguments.seed}", flush=True)
    return run_and_report(Kind(Chaos), arguments.minutes, arguments.seed, arguments.report)


if __name__ == "__main__":
    sys.exit(main())
