"""The secret of a job: only workers that have it can be members, and members refuse frames of others.

The secret has two uses. Texts in the Store carry an HMAC-SHA256, which distinguishes texts of workers from texts of
strangers. And every ordered pair of workers has a key for the frames between them (``wire/seal.h``). HKDF (RFC 5869)
derives that key from the secret and both sessions. A session is a random number for one life of a worker's agent; the
worker publishes it in its record. Frames recorded in an earlier life do not fit the new key. So workers need no
challenge and response, which UCX could not bind to the frames that follow.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any, NamedTuple

from torch_ucx_rpc.errors import JoinFailed

FILE_VARIABLE = "TORCH_UCX_RPC_SECRET_FILE"
VARIABLE = "TORCH_UCX_RPC_SECRET"

# An observer of one frame can try secrets offline. 16 random bytes cannot be guessed.
_LEAST_BYTES = 16
# The longest secret. `_from_file` does not read a larger file to its end.
_MOST_BYTES = 4096

# The keys in a job without a secret; see `Secret.frame_keys`.
NO_FRAME_KEYS = {"send_key": b"", "receive_key": b"", "join_key": b""}

_HOW_TO_MAKE = "make one with `(umask 077; openssl rand -hex 32 > job.secret)`"


class Secret:
    """Keys derived from the secret. This object does not keep the secret itself."""

    def __init__(self, value: bytes) -> None:
        # HKDF-Extract.
        self._key = _hmac(b"torch_ucx_rpc", value)

    def key(self, purpose: str, *sessions: int) -> bytes:
        """A key of 32 bytes for one purpose: one block of HKDF-Expand."""
        info = b"".join([purpose.encode(), *(session.to_bytes(8, "little") for session in sessions)])
        return _hmac(self._key, info + b"\x01")

    def frame_keys(self, own: int, other: int) -> dict[str, bytes]:
        """Keys of the frames between this worker and another, by session; fields of ``_C.Member``."""
        return {
            "send_key": self.key("frames", own, other),
            "receive_key": self.key("frames", other, own),
            "join_key": self.join_key(other),
        }

    def join_key(self, session: int) -> bytes:
        """Key of the announcements that joining workers send to the worker of this session."""
        return self.key("join", session)

    def tag(self, text: str) -> str:
        """HMAC of a text in the Store, as hexadecimal digits."""
        return _hmac(self.key("store"), text.encode()).hex()

    def has_made(self, tag: str, text: str) -> bool:
        """Tell whether this is the secret's tag of the text."""
        from hmac import compare_digest

        # JSON may have brought anything into the tag.
        return compare_digest(self.tag(text).encode(), tag.encode(errors="surrogatepass"))


class Entry(NamedTuple):
    """An entry of the Store: its values, and any doubt about them. The placeholders {own} and {who} in the doubt stand
    for workers."""

    values: dict[str, Any]
    doubt: str = ""


def _hmac(key: bytes, text: bytes) -> bytes:
    # Imported here, since most jobs have no secret and start faster without it.
    import hmac

    return hmac.digest(key, text, "sha256")


def write_entry(values: dict[str, Any], secret: Secret | None) -> str:
    """The text for the Store, authenticated if there is a secret."""
    text = json.dumps(values)
    return text if secret is None else json.dumps({"sealed": text, "hmac": secret.tag(text)})


def read_entry(text: bytes, secret: Secret | None) -> Entry:
    """Read a text of `write_entry`. The values of a doubtful entry serve only to raise the right error."""
    outer = _to_values(text)
    sealed, tag = outer.get("sealed"), outer.get("hmac")
    if not isinstance(sealed, str) or not isinstance(tag, str):
        return Entry(outer, "" if secret is None else "{own} has a secret and {who} has none")
    values = _to_values(sealed)
    if secret is None:
        return Entry(values, "{own} has no secret and {who} has one")
    if not secret.has_made(tag, sealed):
        return Entry(values, "{own} has another secret than {who}, unless a stranger has written that in the Store")
    return Entry(values)


def refusal(entry: Entry, own: object, who: object) -> JoinFailed:
    """The error for a doubtful entry: ``own`` has found it, and ``who`` has written it."""
    return JoinFailed(
        f"the workers do not share one secret: {entry.doubt.format(own=own, who=who)}; give every worker of "
        f"the job the same secret, by secret_file, {FILE_VARIABLE} or {VARIABLE}, or no secret."
    )


def _to_values(text: bytes | str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    # RecursionError: [[[[...
    except (ValueError, RecursionError):
        values = None
    return values if isinstance(values, dict) else {}


def load_secret(secret_file: str | None) -> Secret | None:
    """Return the secret in the file, or else the secret in the environment; None if there is neither.

    Raises ValueError for a secret that is too short or too long, and for a file that other users can read. Raises
    OSError for a file that this process cannot read.
    """
    if secret_file is not None:
        return _from_file(secret_file, "secret_file")
    path, value = os.environ.get(FILE_VARIABLE), os.environ.get(VARIABLE)
    if path is not None and value is not None:
        raise ValueError(f"{FILE_VARIABLE} and {VARIABLE} are both set: unset one of them.")
    if path is not None:
        return _from_file(path, FILE_VARIABLE)
    return None if value is None else Secret(_checked(os.fsencode(value), VARIABLE))


def _from_file(path: str, named_by: str) -> Secret:
    what = f"{named_by} {path!r}"
    # NONBLOCK: opening a pipe would wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError(f"{what} is not a regular file: {_HOW_TO_MAKE}.")
        if facts.st_uid not in (0, os.geteuid()):
            raise ValueError(
                f"{what} belongs to user {facts.st_uid}, who can change it: give it to user {os.geteuid()} or root."
            )
        if mode := stat.S_IMODE(facts.st_mode) & 0o077:
            raise ValueError(f"{what} is open to other users (mode {mode:03o} for group and others): chmod 600 it.")
        return Secret(_checked(file.read(_MOST_BYTES + 1), what))


def _checked(value: bytes, what: str) -> bytes:
    # Editors and shells end a file with a newline.
    value = value.rstrip(b"\r\n")
    if not _LEAST_BYTES <= len(value) <= _MOST_BYTES:
        raise ValueError(
            f"{what} holds {len(value)} bytes; a secret has {_LEAST_BYTES} to {_MOST_BYTES}, random ones: "
            f"{_HOW_TO_MAKE}."
        )
    return value
