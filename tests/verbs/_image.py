"""The disk of the machines: `Image`. Making it does not need emulation."""

from __future__ import annotations

import functools
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
GUEST = Path(__file__).resolve().parent / "guest"

# Debian 13: its UCX 1.18 has verbs. UCX 1.23 of Debian's testing was built without them.
_DEBIAN = "trixie"
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_PACKAGES = (
    *("linux-image-amd64", "kmod", "busybox-static", "iproute2", "procps", "xz-utils"),
    *("libucx-dev", "ucx-utils", "rdma-core", "ibverbs-utils", "ibverbs-providers"),
    *(_PYTHON, f"{_PYTHON}-dev", "g++", "cmake", "ninja-build", "pkgconf"),
)
# Packages beside torch: the command `check` needs rich. pip, setuptools and wheel install the project.
_WHEELS = ("numpy", "rich", "pip", "setuptools>=77", "wheel")
# The kernel needs these modules to find its root.
_EARLY_MODULES = ("virtio_blk", "virtio_pci", "ext4", "overlay")

# Workarounds for bugs of UCX, each with the first release that does not need it (docs/troubleshooting.md). Debian
# builds UCX with assertions, and one of these bugs fails an assertion.
_WORKAROUNDS = {
    "UCX_UD_ETH_DGID_CHECK=n": (1, 19),
    "UCX_IB_ASYNC_EVENTS=n": (1, 23),
}


class CannotBuild(Exception):
    """This machine lacks something. The text names it."""


class Image:
    """A disk with Debian, torch and this checkout, changes included. `folder` has the disk and its kernel.

    The folder keeps Debian's and PyPI's packages and the compiler's results, so the next time only changes are built.
    It takes some 6 GB.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._say = say
        self._root = folder / "root"

    def build(self) -> None:
        """Build what is missing or has changed. Raise `CannotBuild` if this machine cannot."""
        _check_this_machine()
        self.folder.mkdir(parents=True, exist_ok=True)
        packages = {"debian": _DEBIAN, "packages": _PACKAGES, "wheels": _WHEELS, "torch": _torch()}
        if not self._is_done("system", packages):
            self._say("Debian and torch, some minutes")
            self._install_debian()
            self._install_wheels()
            self._set_done("system", packages)
        inputs = [*_sources(), *sorted(GUEST.iterdir()), Path(__file__).resolve()]
        files = {str(path.relative_to(ROOT)): _digest(path.read_bytes()) for path in inputs}
        if not self._is_done("disk", files):
            self._say("this project")
            self._install_project()
            self._write_kernel()
            self._write_disk()
            self._set_done("disk", files)

    def versions(self) -> dict[str, str]:
        """Return the versions of the contents, by name."""
        packages = ("libucx0", "ibverbs-providers")
        found = self._inside("dpkg-query", "--show", "--showformat=${Package} ${Version}\n", *packages)
        version = dict(line.split() for line in found.splitlines())
        return {
            "Debian": _DEBIAN,
            "kernel": self._kernel(),
            "UCX": version["libucx0"],
            "provider": f"rxe of rdma-core {version['ibverbs-providers']}",
            "torch": _torch(),
            "Python": _PYTHON.removeprefix("python"),
        }

    def _is_done(self, step: str, of: Mapping[str, object]) -> bool:
        """Whether the step has been completed with these inputs. If not, mark it as incomplete."""
        stamp = self._stamp(step)
        is_done = stamp.exists() and stamp.read_text() == _digest(json.dumps(of, sort_keys=True).encode())
        if not is_done:
            stamp.unlink(missing_ok=True)
        return is_done

    def _set_done(self, step: str, of: Mapping[str, object]) -> None:
        self._stamp(step).write_text(_digest(json.dumps(of, sort_keys=True).encode()))

    def _stamp(self, step: str) -> Path:
        return self.folder / f"{step}.done"

    def _install_debian(self) -> None:
        self._stamp("disk").unlink(missing_ok=True)
        shutil.rmtree(self._root, ignore_errors=True)
        options = subprocess.run(
            ["apt-config", "dump", "--format", '%f "%v";%n', "Acquire"], capture_output=True, text=True, check=True
        ).stdout
        # Pass on proxies and similar options.
        acquire = re.findall(r'^Acquire::(?:https?::|Check-)[A-Za-z:-]* ".+"', options, re.MULTILINE)
        sources = self.folder / "sources.list"
        sources.write_text(debian_sources(_apt_lists(), _DEBIAN))
        _run(
            *("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--architectures=amd64"),
            *(f"--aptopt={option};" for option in acquire),
            '--aptopt=Apt::Install-Recommends "false"',
            *("--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*"),
            "--dpkgopt=force-unsafe-io",
            f"--include={','.join(_PACKAGES)}",
            *(_DEBIAN, self._root, sources),
        )

    def _install_wheels(self) -> None:
        """Install with this machine's pip and its configuration, for a Python of the same version."""
        target = self._root / "usr" / "local" / "lib" / _PYTHON / "dist-packages"
        _run(
            *(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-warn-conflicts"),
            *("--root-user-action", "ignore", "--only-binary", ":all:", "--target", target),
            *(f"torch=={_torch()}", *_WHEELS),
        )
        # Compile now, since the machines are slow. Ignore errors: some files are for newer versions of Python.
        self._inside("sh", "-c", f"{_PYTHON} -m compileall -q -j 2 {_inside_path(target, self._root)} > /dev/null || :")
        (self._root / "usr" / "local" / "bin" / "python3").symlink_to(f"/usr/bin/{_PYTHON}")

    def _install_project(self) -> None:
        copy_changes(_sources(), ROOT, self.folder / "src")
        pip = f"{_PYTHON} -m pip --quiet --disable-pip-version-check install --root-user-action ignore"
        self._inside(
            *("sh", "-euc"),
            f"cd /src; {pip} --break-system-packages --no-index --no-build-isolation --no-deps --force-reinstall .",
        )
        folder = self._root / "etc" / "ucx"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ucx.conf").write_text(workarounds(self.versions()["UCX"]))
        shutil.copy2(GUEST / "init", self._root / "guest-init")

    def _write_kernel(self) -> None:
        """Write the kernel, and the root in memory with which it begins. That root mounts the disk."""
        early = self.folder / "early"
        shutil.rmtree(early, ignore_errors=True)
        (early / "bin").mkdir(parents=True)
        (early / "modules").mkdir()
        shutil.copy2(self._root / "bin" / "busybox", early / "bin")
        shutil.copy2(GUEST / "early-init", early / "init")
        shown = "".join(
            self._inside("modprobe", "--set-version", self._kernel(), "--show-depends", module)
            for module in _EARLY_MODULES
        )
        for number, file in enumerate(dict.fromkeys(re.findall(r"^insmod (\S+)", shown, re.MULTILINE))):
            packed = (self._root / file.lstrip("/")).read_bytes()
            module = lzma.decompress(packed) if file.endswith(".xz") else packed
            (early / "modules" / f"{number:02}.ko").write_bytes(module)
        _run(
            "sh", "-euc", 'cd "$1"; find . | bin/busybox cpio -o -H newc 2> /dev/null | gzip -1 > ../initrd', "-", early
        )
        shutil.copy2(self._root / "boot" / f"vmlinuz-{self._kernel()}", self.folder / "vmlinuz")

    def _write_disk(self) -> None:
        disk = self.folder / "disk.img"
        disk.unlink(missing_ok=True)
        used = int(_run("du", "--summarize", "--block-size=1M", "--one-file-system", self._root).split()[0])
        # Leave room for ext4's own data.
        size = f"{used + used // 5 + 100}M"
        _run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", self._root, disk, size)

    def _kernel(self) -> str:
        (kernel,) = (self._root / "lib" / "modules").iterdir()
        return kernel.name

    def _inside(self, *command: str) -> str:
        """Run a command in the disk's root, and return its output. The command's mounts end with it."""
        (self.folder / "src").mkdir(exist_ok=True)
        (self._root / "src").mkdir(exist_ok=True)
        mount = 'mount --bind /dev "$0/dev"; mount -t proc proc "$0/proc"; mount --bind "$0/../src" "$0/src"'
        environment = "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TORCH_UCX_RPC_UCX=system"
        enter = f'set -e; {mount}; root=$0; exec chroot "$root" env -i {environment} "$@"'
        return _run("unshare", "--mount", "bash", "-c", enter, self._root, *command)


def copy_changes(files: Iterable[Path], source: Path, target: Path) -> None:
    """Make ``target`` hold these files of ``source``. Keep its folder ``build``, which has the compiler's results.

    Equal files stay untouched. A changed file gets the present time, so it is newer than all results of the compiler.
    """
    wanted = {target / path.relative_to(source): path for path in files}
    for path in list(target.rglob("*")):
        if path.is_file() and path not in wanted and path.relative_to(target).parts[0] != "build":
            path.unlink()
    for copy, path in wanted.items():
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)


def debian_sources(lists: str, release: str) -> str:
    """Return lines for apt. `lists` has a line "SITE RELEASE LABEL" for each list of this machine.

    The lines include this machine's release, which may have the Python that `release` lacks.
    """
    found = [line.split() for line in lists.splitlines() if line.endswith(" Debian")]
    if not found:
        raise CannotBuild("apt has no lists of Debian's packages: tools/verbs.sh needs Debian, and apt-get update")
    site, own = found[0][0], found[0][1]
    return "".join(f"deb {site} {one} main\n" for one in dict.fromkeys((release, own)))


def workarounds(ucx: str) -> str:
    """Return a ucx.conf for the machines, with the workarounds that this version of UCX needs."""
    version = tuple(int(part) for part in re.findall(r"\d+", ucx)[:2])
    return "".join(f"{setting}\n" for setting, mended in _WORKAROUNDS.items() if version < mended)


def _apt_lists() -> str:
    layout = "$(SITE) $(RELEASE) $(LABEL)"
    return _run("apt-get", "indextargets", "--format", layout, "Created-By: Packages", "Origin: Debian")


def _check_this_machine() -> None:
    if os.geteuid() != 0:
        raise CannotBuild("only root can make the machines' disk: sudo tools/verbs.sh")
    programs = {
        "mmdebstrap": "mmdebstrap",
        "qemu-system-x86_64": "qemu-system-x86",
        "mke2fs": "e2fsprogs",
        "setpriv": "util-linux",
        "apt-get": "apt",
    }
    missing = [package for program, package in programs.items() if shutil.which(program) is None]
    if missing:
        raise CannotBuild(f"not installed: apt install --no-install-recommends {' '.join(missing)}")


@functools.cache
def _sources() -> list[Path]:
    """Return the sources of the package in the checkout, changes included."""
    listed = _run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    elsewhere = ("tests/", "docs/", "benchmarks/", "examples/", "recipe/")
    return [ROOT / name for name in listed if name and not name.startswith(elsewhere) and (ROOT / name).is_file()]


def _torch() -> str:
    """Return the version of torch here, such as 2.13.0+cpu."""
    import torch

    return torch.__version__


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _inside_path(path: Path, root: Path) -> str:
    return f"/{path.relative_to(root)}"


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-3000:]
        raise CannotBuild(f"{' '.join(map(str, command))} ended by {done.returncode}:\n{said}")
    return done.stdout
