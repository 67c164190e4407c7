"""Writes UCX's findings on this machine to stdout, as JSON, and its log to stderr: a script for ``info``.

The script runs in a process of its own, since UCX may abort if it cannot work on this machine. The script imports
nothing of this package, which may not be importable. Its argument is the value of TORCH_UCX_RPC_UCX, as for
``_native``.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

SONAME = "libucp.so.0"
# From <ucp/api/ucp_def.h>. The features are those of the agent: active messages and wake-up.
UCP_PARAM_FIELD_FEATURES = 1
UCP_FEATURES = 1 << 4 | 1 << 6


def load(choice: str) -> ctypes.CDLL | None:
    if choice != "system":
        try:
            importlib.import_module("libucx").load_library()
            return ctypes.CDLL(SONAME)
        except (ImportError, AttributeError, OSError):
            pass
    if choice != "wheel":
        for library in (str(Path(sys.prefix) / "lib" / SONAME), SONAME):
            try:
                return ctypes.CDLL(library)
            except OSError:
                continue
    return None


def resources(ucp: ctypes.CDLL, version: tuple[int, ...]) -> list[str] | None:
    """Resources such as "tcp/eth0"; None if UCX does not start, which it has explained on stderr."""
    # ucp_params_t begins with the mask of the fields that count, and the features.
    parameters = (ctypes.c_uint64 * 64)(UCP_PARAM_FIELD_FEATURES, UCP_FEATURES)
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    ucp.ucp_config_read(None, None, ctypes.byref(config))
    if ucp.ucp_init_version(version[0], version[1], ctypes.byref(parameters), config, ctypes.byref(context)) != 0:
        return None
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    ucp.ucp_context_print_info(context, stream)
    libc.fclose(stream)
    # Create a worker: then UCX reads all of its variables, and warns of unknown ones.
    worker = ctypes.c_void_p()
    if ucp.ucp_worker_create(context, (ctypes.c_uint64 * 64)(), ctypes.byref(worker)) == 0:
        ucp.ucp_worker_destroy(worker)
    ucp.ucp_cleanup(context)
    return re.findall(r"resource \d+ .* (\S+/\S+)$", (text.value or b"").decode(), re.MULTILINE)


def main() -> None:
    # UCX writes its log to stdout, and the C library may hold it back until the process ends.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        json.dump(ask(sys.argv[1]), answer)


def ask(choice: str) -> dict[str, Any] | None:
    ucp = load(choice)
    if ucp is None:
        return None
    numbers = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, numbers))
    version = tuple(number.value for number in numbers)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    path = re.search(r"^(?:\S+\s+){5}(/.*/libucp\.so[.\d]*)", maps, re.MULTILINE)
    found = resources(ucp, version)
    return {"version": version, "path": path[1] if path else SONAME, "resources": found}


if __name__ == "__main__":
    main()
