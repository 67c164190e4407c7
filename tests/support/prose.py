"""How prose is judged, in pages and in comments: its width, and sentences without a subject."""

from __future__ import annotations

import re

LONGEST_LINE = 120

URL = re.compile(r"https?://[^\s)>]+")
# The subject of a sentence names the thing, so none begins with these. Questions may.
HEADLESS = re.compile(
    r"(?:^[ #/|*-]*|[.:|] )((?:Who|What|That of|Those of|There is nobody) "
    r"(?:is|was|has|had|does|waits|calls|sends|leaves|dies|comes|receives|goes|asks|cannot)\b[^.|?\n]*)(\??)",
    re.MULTILINE,
)


def is_too_wide(line: str) -> bool:
    """URLs do not count: they cannot be broken."""
    return len(URL.sub("", line)) > LONGEST_LINE


def joined(text: str) -> str:
    """One paragraph, row or item a line, so that sentences are whole."""
    return re.sub(r"(?<=[^\n])\n(?=[^\n|#>*-])[ ]*", " ", text)


def headless(text: str) -> list[str]:
    """The sentences of `text` that have no subject."""
    return [sentence for sentence, mark in HEADLESS.findall(joined(text)) if not mark]
