"""Runs the program of its arguments where no process may read or write another's memory, as under Docker's seccomp.

What Docker allows depends on its version and on the kernel's; older ones forbid process_vm_readv and process_vm_writev
without CAP_SYS_PTRACE.
"""

import ctypes
import os
import platform
import runpy
import struct
import sys

READ, WRITE = {"x86_64": (310, 311), "aarch64": (270, 271)}[platform.machine()]

# <linux/prctl.h>, <linux/seccomp.h>, <linux/bpf_common.h>
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECCOMP_MODE_FILTER = 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL_WITH_EPERM = 0x7FFF0000, 0x00050001

# struct sock_filter: code, jump if true, jump if false, operand. The number of the call is the first word.
steps = [
    (LOAD_WORD, 0, 0, 0),
    (JUMP_IF_EQUAL, 2, 0, READ),
    (JUMP_IF_EQUAL, 1, 0, WRITE),
    (RETURN, 0, 0, ALLOW),
    (RETURN, 0, 0, FAIL_WITH_EPERM),
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)):
    if libc.prctl(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
assert libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0) == -1

sys.argv[:1] = []
runpy.run_path(sys.argv[0], run_name="__main__")
