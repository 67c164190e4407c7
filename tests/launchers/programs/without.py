"""``without.py CALLS PROGRAM ARGUMENTS`` runs a program without these system calls, as under Docker's seccomp.

Docker's profile depends on its version and on the kernel's. Without CAP_SYS_PTRACE, older profiles forbid
process_vm_readv and process_vm_writev. They also forbid calls newer than themselves, such as pidfd_open. These calls
fail with EPERM.
"""

import ctypes
import errno
import os
import platform
import runpy
import struct
import sys

X86_64 = {"process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434}
ARM_64 = {"process_vm_readv": 270, "process_vm_writev": 271, "pidfd_open": 434}
NUMBERS = {"x86_64": X86_64, "aarch64": ARM_64}[platform.machine()]

# <linux/prctl.h>, <linux/seccomp.h>, <linux/bpf_common.h>
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECCOMP_MODE_FILTER = 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL_WITH_EPERM = 0x7FFF0000, 0x00050001

forbidden = [NUMBERS[name] for name in sys.argv[1].split(",")]
# struct sock_filter: code, jump if true, jump if false, operand. The number of the call is the first word.
steps = [
    (LOAD_WORD, 0, 0, 0),
    *((JUMP_IF_EQUAL, len(forbidden) - i, 0, number) for i, number in enumerate(forbidden)),
    (RETURN, 0, 0, ALLOW),
    (RETURN, 0, 0, FAIL_WITH_EPERM),
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)):
    if libc.prctl(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
for number in forbidden:
    assert libc.syscall(number, os.getpid(), 0, 0, 0, 0, 0) == -1
    assert ctypes.get_errno() == errno.EPERM

sys.argv[:2] = []
runpy.run_path(sys.argv[0], run_name="__main__")
