"""Messages that docs/troubleshooting.md quotes are messages of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

# A code span with … in it, or a whole message. Other code spans are commands, options and names.
QUOTES = [
    quote for quote in re.findall(r"`([^`\n]+)`", TEXT) if "…" in quote or re.match(r"[a-z]\w+( [\w()]+){3}", quote)
]
COMMANDS = re.compile(r"(python|pip|make|ulimit|kubectl|docker) ")
# Messages of torch and UCX, or composed at run time.
FOREIGN = (
    "RPC ran for more than set timeout ",
    "UCX: Destination is unreachable",
    "starting UCX failed",
    "creating a UCX worker failed",
)


def sources() -> str:
    """All source text, with adjacent literals joined, and with one kind of quotes."""
    files = [path for path in (ROOT / "torch_ucx_rpc").rglob("*") if path.suffix in {".py", ".cpp", ".h"}]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    return re.sub(r'"\s*\+?\s*f?"', "", text)


@pytest.fixture(scope="module")
def literals() -> str:
    return sources()


def test_there_are_quotes() -> None:
    assert len(QUOTES) > 25


@pytest.mark.parametrize("quote", [quote for quote in QUOTES if not COMMANDS.match(quote)])
def test_the_message_is_in_the_code(quote: str, literals: str) -> None:
    # The parts at a … vary; the names of workers are in quotes in C++ and in messages.
    fragments = [fragment.strip(" '();:,") for fragment in quote.split("…")]
    missing = [
        f for f in fragments if len(f) > 3 and f not in literals and not any(f in foreign for foreign in FOREIGN)
    ]
    assert missing == []
