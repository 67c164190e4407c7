"""Makes dist/index, a package index of static pages (PEP 503), of the wheels and the source distribution in dist/.

    tools/release.sh index                                                   links are relative: serve dist/ as it is
    tools/release.sh index --packages-url https://example.org/download/v1    the files are served elsewhere

    pip install torch_ucx_rpc 'torch==2.13.*' --extra-index-url <address of dist/index>

One package needs only two pages, so no program for indexes is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import sys
from pathlib import Path
from urllib.parse import quote

import build_environment

PAGE = """<!DOCTYPE html>
<html>
<head><meta charset="utf-8"><meta name="pypi:repository-version" content="1.0"><title>{title}</title></head>
<body>
{links}
</body>
</html>
"""
# The name of torch_ucx_rpc in the form of PEP 503.
PROJECT = "torch-ucx-rpc"


def page(title: str, links: list[str]) -> str:
    return PAGE.format(title=title, links="\n".join(links))


def link(file: Path, packages_url: str, requires_python: str) -> str:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    address = f"{packages_url.rstrip('/')}/{quote(file.name)}#sha256={digest}"
    return f'<a href="{html.escape(address)}" data-requires-python="{html.escape(requires_python)}">{file.name}</a><br>'


def make_index(dist: Path, packages_url: str) -> Path:
    """Make the index, and return its folder."""
    files = sorted([*dist.glob("torch_ucx_rpc-*.whl"), *dist.glob("torch_ucx_rpc-*.tar.gz")])
    if not files:
        raise build_environment.Missing(
            f"there is no package in {dist}: run `tools/release.sh wheels` or `tools/release.sh wheel` first."
        )
    requires_python = build_environment.setup_cfg()["options"]["python_requires"]
    index = dist / "index"
    (index / PROJECT).mkdir(parents=True, exist_ok=True)
    links = [link(file, packages_url, requires_python) for file in files]
    (index / PROJECT / "index.html").write_text(page(f"Links for {PROJECT}", links), encoding="utf-8")
    listed = [f'<a href="{PROJECT}/">{PROJECT}</a>']
    (index / "index.html").write_text(page("Simple index", listed), encoding="utf-8")
    return index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=build_environment.ROOT / "dist", help="the folder of the files")
    # From the page index/torch-ucx-rpc/.
    parser.add_argument("--packages-url", default="../..", help="address of the files (relative: beside the index)")
    arguments = parser.parse_args()
    try:
        print(make_index(arguments.dist.resolve(), arguments.packages_url))
    except build_environment.Missing as missing:
        sys.exit(f"torch_ucx_rpc: {missing}")


if __name__ == "__main__":
    main()
