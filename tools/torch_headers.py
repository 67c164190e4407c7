"""Lists the headers of torch that the extension is compiled with, in the format of sha256sum.

    python tools/torch_headers.py LISTING INCLUDE_DIRECTORY...

It lists the headers that the C++ sources include, directly or through other headers. The names are relative to the
first include directory. If the torch at import is another patch release than the build's, `torch_ucx_rpc._native`
compares its headers with the listing.

The list leaves out the declarations of torch's operators, nine tenths of the headers, and what only they include. An
operator whose arguments change has another symbol, so loading the extension fails.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "torch_ucx_rpc" / "csrc"

INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
OPERATORS = "ATen/ops/"


def included_in(file: Path) -> list[str]:
    return [name.decode() for name in INCLUDE.findall(file.read_bytes())]


def headers_of(sources: Iterable[Path], directories: list[Path]) -> list[Path]:
    """Return the headers in `directories` that `sources` include, directly or not, in any branch of the
    preprocessor."""
    found: set[Path] = set()
    to_read = list(sources)
    while to_read:
        file = to_read.pop()
        for name in included_in(file):
            if name.startswith(OPERATORS):
                continue
            beside = [file.parent] if file in found else []
            for directory in [*beside, *directories]:
                header = (directory / name).resolve()
                if header.is_file():
                    if header not in found:
                        found.add(header)
                        to_read.append(header)
                    break
    return sorted(found)


def listing_of(headers: Iterable[Path], root: Path) -> str:
    """Return lines of sha256sum for the headers below `root`, torch's folder."""
    lines = []
    for header in headers:
        if header.is_relative_to(root):
            digest = hashlib.sha256(header.read_bytes()).hexdigest()
            lines.append(f"{digest}  {header.relative_to(root).as_posix()}\n")
    return "".join(lines)


def main() -> None:
    listing, *names = map(Path, sys.argv[1:])
    directories = [name.resolve() for name in names]
    sources = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp"})
    listing.write_text(listing_of(headers_of(sources, directories), directories[0]), encoding="utf-8")


if __name__ == "__main__":
    main()
