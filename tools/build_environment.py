"""Find what the build needs on this machine, or fail with one sentence that says what to install.

Every entry to the build uses this file, so all of them give the same answer:

    make          build_environment.py toolchain     before anything is downloaded
    setup.py      build_directory(), facts()         before CMake starts
    CMake         build_environment.py cmake         versions and paths of torch and UCX, as CMake code

This file reads the numbers (oldest Python, oldest torch) from setup.cfg, as pip does. It must run on Python 3.8 without
packages, since it also tells the user that their Python is too old.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# From this version on, ucp_ep_query can name an endpoint's transports. get_debug_info() reports them.
OLDEST_UCX = (1, 14)

CPP20_PROGRAM = """
#include <concepts>
#include <semaphore>
#include <span>
#include <stop_token>
static_assert(__cplusplus >= 202002L, "this is not C++20");
template <std::integral T> T twice(std::span<const T> values) { return values[0] + values[0]; }
int main() { const int values[] = {0}; return twice<int>(values); }
"""


class Missing(Exception):
    """Something to install or to choose. The text is one sentence for the user."""


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def requirements(group: str) -> list[str]:
    """Return the requirement strings of `build`, of `install`, or of an extra, from the file that owns them."""
    if group == "build":
        # A list of strings reads the same in TOML as in Python, and Python 3.10 has no TOML parser except pip's. A
        # process that has imported pip can no longer import setuptools, or parts of torch that import setuptools.
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        found = re.search(r"^requires = (\[[^\]]*\])", text, re.MULTILINE)
        assert found, "pyproject.toml has lost its requires"
        return list(ast.literal_eval(found[1]))
    options = setup_cfg()
    owner = options["options"] if group == "install" else options["options.extras_require"]
    lines = owner["install_requires" if group == "install" else group]
    return [line.strip() for line in lines.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def version_numbers(version: str) -> tuple[int, ...]:
    """Return (2, 13) for "2.13.0+cpu", ">=2.13" and "torch>=2.13": enough for comparisons."""
    found = re.search(r"(\d+)\.(\d+)", version)
    if found is None:
        raise Missing(f"{version!r} is not a version: say one like 2.13.0.")
    return tuple(int(number) for number in found.groups())


def dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)


def oldest_torch() -> tuple[int, ...]:
    return next(version_numbers(line) for line in requirements("install") if line.startswith("torch"))


def check_torch_version(version: str) -> None:
    if version_numbers(version) < oldest_torch():
        raise Missing(
            f"torch {version} is too old, {dotted(oldest_torch())} is the oldest that works: "
            f"pip install 'torch>={dotted(oldest_torch())}' (with make: TORCH=<version>)."
        )


def check_python() -> None:
    oldest = version_numbers(setup_cfg()["options"]["python_requires"])
    if sys.version_info[:2] < oldest:
        raise Missing(
            f"{sys.executable} is Python {dotted(sys.version_info[:2])}, {dotted(oldest)} is the oldest that works: "
            f"install a newer one and name it (make PYTHON=python{dotted(oldest)})."
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise Missing(
            f"the C headers of {sys.executable} are missing ({header}): install them (Debian, Ubuntu: "
            f"apt install python{dotted(sys.version_info[:2])}-dev; Fedora: dnf install python3-devel)."
        )


def package_folder(name: str) -> Path | None:
    """Return a package's folder, without importing it. Return None if the package is missing, or if only its folder is
    left."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def check_venv() -> None:
    if package_folder("venv") is None or package_folder("ensurepip") is None:
        raise Missing(
            f"{sys.executable} cannot make virtual environments: install its venv module "
            f"(Debian, Ubuntu: apt install python{dotted(sys.version_info[:2])}-venv)."
        )


def check_compiler() -> None:
    """Compile a program to check that the compiler knows C++20. CMake takes the same compiler: $CXX, else the first on
    the path."""
    install = "install GCC 12 or newer (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
        if shutil.which(command[0]) is None:
            raise Missing(
                f"there is no compiler {command[0]!r}, which the variable CXX names: unset CXX, or {install}."
            )
    else:
        found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
        if found is None:
            raise Missing(f"there is no C++ compiler: {install}.")
        command = [found]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.cpp").write_text(CPP20_PROGRAM, encoding="utf-8")
        result = subprocess.run(
            [*command, "-std=c++20", "program.cpp", "-o", "program"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if result.returncode != 0:
        errors = [line for line in result.stdout.splitlines() if "error" in line]
        error = errors[0] if errors else f"exit status {result.returncode}"
        raise Missing(
            f"{shlex.join(command)} cannot compile a C++20 program ({error.strip()}), which torch's headers need: "
            f"{install}, or name another compiler in the variable CXX."
        )


def check_setuptools() -> None:
    """Check the version: pip --no-build-isolation uses the installed setuptools, which is old in a new virtual
    environment."""
    wanted = next(line for line in requirements("build") if line.startswith("setuptools"))
    found = importlib.metadata.version("setuptools")
    if int(found.split(".")[0]) < int(wanted.split(">=")[1]):
        everything = " ".join(f"'{line}'" for line in requirements("build"))
        raise Missing(f"setuptools {found} is too old to build this, {wanted} is needed: pip install {everything}.")


def program(name: str) -> str:
    """Find cmake or ninja: in this Python's environment, activated or not, else on the path."""
    beside_python = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join([beside_python, os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise Missing(f"the build needs {name}: pip install {name}.")
    return found


def no_torch() -> Missing:
    return Missing(
        f"there is no torch for {sys.executable} to build against: pip install torch; if it is installed, pip has "
        f"hidden it from the build: pip install --no-build-isolation <the same arguments>."
    )


def build_directory() -> Path:
    """Return the build folder of this environment and torch. Each torch has its own, so objects never mix."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise no_torch() from None
    check_torch_version(version)
    environment = Path(sys.prefix).name.lstrip(".")
    return ROOT / "build" / f"{environment}-{sys.implementation.cache_tag}-torch-{version}"


def pins() -> tuple[str, list[str]]:
    """Return the local version of a wheel for release and its requirements, for the torch it is built with.

    The wheel is for one minor release of torch. At import it accepts patch releases that have the same headers. It uses
    UCX from the libucx wheel for torch's version of CUDA, unless it is built with conda's or the system's UCX.
    """
    facts = torch_facts()
    minor = dotted(version_numbers(facts["TORCH_VERSION"]))
    others = [line for line in requirements("install") if not line.startswith("torch")]
    ucx = ucx_facts(os.environ.get("TORCH_UCX_RPC_UCX", ""))
    wheel = ucx_of_wheel()
    if wheel is not None and str(wheel[1]) == ucx["UCX_LIBRARY_DIR"]:
        others.append(f"{libucx(facts['TORCH_CUDA'])}>={ucx['UCX_VERSION']}")
    return f"torch{minor}", [f"torch=={minor}.*", *others]


def libucx(cuda: str) -> str:
    """Return the libucx wheel for a torch that was built with this version of CUDA. Without CUDA it is the first, as
    for make."""
    wheels = sorted(line for group in ("cu12", "cu13") for line in requirements(group))
    return next((wheel for wheel in wheels if cuda and wheel.endswith(f"cu{cuda.split('.')[0]}")), wheels[0])


def torch_facts() -> dict[str, str]:
    try:
        import torch
        from torch.utils import cpp_extension
    except (ImportError, OSError) as error:
        if getattr(error, "name", None) == "torch":
            raise no_torch() from None
        raise Missing(f"the torch of {sys.executable} cannot be imported: {error}.") from error
    check_torch_version(torch.__version__)
    if not torch.distributed.rpc.is_available():
        raise Missing(
            f"torch {torch.__version__} in {Path(torch.__file__).parent} was built without RPC: "
            f"install a build with torch.distributed.rpc (pip install torch has it)."
        )
    return {
        "TORCH_VERSION": torch.__version__,
        "TORCH_CUDA": torch.version.cuda or "",
        "TORCH_INCLUDE_DIRS": ";".join(cpp_extension.include_paths()),
        "TORCH_LIBRARY_DIRS": ";".join(cpp_extension.library_paths()),
        "TORCH_CXX11_ABI": str(int(torch.compiled_with_cxx11_abi())),
    }


def ucx_facts(choice: str) -> dict[str, str]:
    """Return the facts of the libucx wheel's UCX. Take conda's or the system's UCX if it is chosen or there is no
    wheel."""
    if choice not in ("", "wheel", "system"):
        raise Missing(f"TORCH_UCX_RPC_UCX={choice} means nothing: set it to wheel or system, or leave it unset.")
    found = None
    if choice != "system":
        found = ucx_of_wheel()
    if choice != "wheel":
        found = found or ucx_of_conda() or ucx_of_system()
    if found is None:
        wanted = {"": "UCX", "wheel": "UCX of a libucx wheel", "system": "UCX of conda or the system"}[choice]
        raise Missing(
            f"there is no {wanted} to build against: pip install libucx-cu12 (libucx-cu13 beside a CUDA 13 torch), or "
            f"conda install -c conda-forge ucx, or the system's (Debian 13, Ubuntu 24.04: apt install libucx-dev "
            f"pkg-config)."
        )
    include, library = found
    header = (include / "ucp" / "api" / "ucp_version.h").read_text(encoding="utf-8")
    parts = [re.search(rf"define\s+UCP_API_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR")]
    numbers = tuple(int(part[1]) for part in parts if part is not None)
    if len(numbers) < len(parts):
        raise Missing(f"{include}/ucp/api/ucp_version.h defines no UCP_API_MAJOR, or no UCP_API_MINOR: reinstall UCX.")
    if numbers < OLDEST_UCX:
        raise Missing(
            f"UCX {dotted(numbers)} in {include} is too old, {dotted(OLDEST_UCX)} is the oldest that works: "
            f"pip install libucx-cu12 and leave TORCH_UCX_RPC_UCX unset."
        )
    return {"UCX_VERSION": dotted(numbers), "UCX_INCLUDE_DIR": str(include), "UCX_LIBRARY_DIR": str(library)}


def ucx_of_wheel() -> tuple[Path, Path] | None:
    folder = package_folder("libucx")
    return None if folder is None else (folder / "include", folder / "lib")


def ucx_of_conda() -> tuple[Path, Path] | None:
    prefix = Path(os.environ.get("CONDA_PREFIX") or sys.prefix)
    # Ask for both folders: Debian has the headers in /usr/include too, but the library in a folder of the architecture.
    needed = (prefix / "include" / "ucp" / "api" / "ucp.h", prefix / "lib" / "libucp.so")
    return (prefix / "include", prefix / "lib") if all(path.exists() for path in needed) else None


def ucx_of_system() -> tuple[Path, Path] | None:
    if shutil.which("pkg-config") is None:
        return None
    folders = []
    for variable in ("includedir", "libdir"):
        asked = subprocess.run(
            ["pkg-config", f"--variable={variable}", "ucx"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        if asked.returncode != 0:
            return None
        folders.append(Path(asked.stdout.strip()))
    return folders[0], folders[1]


def facts(ucx: str) -> dict[str, str]:
    """Return everything that CMake needs to know. Raise Missing for the first thing that is missing.

    `ucx` is the value of TORCH_UCX_RPC_UCX: "wheel", "system", or "" for the first UCX that is found.
    """
    check_python()
    check_compiler()
    return {"PACKAGE_VERSION": setup_cfg()["metadata"]["version"], **torch_facts(), **ucx_facts(ucx)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    toolchain = commands.add_parser("toolchain", help="check Python, its headers and venv module, and the compiler")
    toolchain.add_argument("torch", help="the version of torch that is going to be installed")
    wanted = commands.add_parser("requirements", help="print what pip has to install")
    wanted.add_argument("group", nargs="+", help="build, install, or an extra of setup.cfg")
    commands.add_parser("directory", help="print the build folder")
    commands.add_parser("libucx", help="print the libucx wheel that is for the CUDA of this torch")
    cmake = commands.add_parser("cmake", help="check everything and print what CMake needs to know")
    cmake.add_argument("ucx", help="the choice of UCX: wheel, system, or empty")
    arguments = parser.parse_args()
    try:
        if arguments.command == "toolchain":
            check_python()
            check_venv()
            check_compiler()
            check_torch_version(arguments.torch)
        elif arguments.command == "requirements":
            print(*(line for group in arguments.group for line in requirements(group)), sep="\n")
        elif arguments.command == "directory":
            print(build_directory())
        elif arguments.command == "libucx":
            print(libucx(torch_facts()["TORCH_CUDA"]))
        else:
            for name, value in facts(arguments.ucx).items():
                print(f"set({name} [==[{value}]==])")
    except Missing as missing:
        sys.exit(f"torch_ucx_rpc: {missing}")


if __name__ == "__main__":
    main()
