"""Writes down which of torch's headers the extension is compiled with, in the form of sha256sum.

    python tools/torch_headers.py LISTING INCLUDE_DIRECTORY...

It lists the headers that the C++ sources include, directly or through other headers. The names are relative to the
first include directory. At import, `torch_ucx_rpc._native` compares the listing with the headers of a torch with
another patch release than the build's.

The declarations of torch's operators, nine tenths of the headers, are left out, and what they alone include. An
operator with other arguments has another symbol, and its absence is an error at load time.
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
    """The headers in `directories` that `sources` include, also through others, in any branch of the preprocessor."""
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
    """Lines of sha256sum, without the headers that are not beneath `root`, which is torch's."""
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
