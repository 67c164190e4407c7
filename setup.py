"""Drives the one CMake build of the extension; setup.cfg has the metadata."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import build_environment  # noqa: E402  (found through the line above)

try:
    build_environment.check_setuptools()
except build_environment.Missing as missing:
    sys.exit(f"torch_ucx_rpc: {missing}")


class CMakeBuild(build_ext):
    """Configure, compile and install with CMake, in a build folder that outlives this process."""

    def run(self) -> None:
        in_place = self.inplace or self.editable_mode
        destination = ROOT if in_place else Path(self.build_lib).resolve()
        try:
            folder = build_environment.build_directory()
            cmake = build_environment.program("cmake")
            self.configure(cmake, folder)
        except build_environment.Missing as missing:
            sys.exit(f"torch_ucx_rpc: {missing}")
        # Build one target: this command leaves out C++ tests that are configured too.
        self.call(cmake, "--build", str(folder), "--target", "_C")
        self.call(cmake, "--install", str(folder), "--component", "python", "--prefix", str(destination))

    def configure(self, cmake: str, folder: Path) -> None:
        """Configure once for the same arguments; ninja notices when CMake's files change."""
        arguments = [
            f"-DCMAKE_MAKE_PROGRAM={build_environment.program('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTORCH_UCX_RPC_UCX={os.environ.get('TORCH_UCX_RPC_UCX', '')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        record = folder / "configured_with.txt"
        if record.exists() and record.read_text(encoding="utf-8") == shlex.join(arguments):
            return
        # CMake makes the same checks, but hides a missing part in a long report.
        build_environment.facts(os.environ.get("TORCH_UCX_RPC_UCX", ""))
        self.call(cmake, "--fresh", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), *arguments)
        record.write_text(shlex.join(arguments), encoding="utf-8")

    def call(self, *command: str) -> None:
        if subprocess.run(command, check=False).returncode != 0:
            # CMake or the compiler has printed the cause above.
            sys.exit(f"torch_ucx_rpc: this command failed: {shlex.join(command)}")


class PinnedEggInfo(egg_info):
    """Write the metadata. With TORCH_UCX_RPC_PIN=1, for wheels that others install, it requires the build's torch.

    TORCH_UCX_RPC_HOME_PAGE is the address of the repository that makes a release.
    """

    def finalize_options(self) -> None:
        # Set it here, since the setup.cfg of a source distribution empties tag_build.
        home_page = os.environ.get("TORCH_UCX_RPC_HOME_PAGE")
        if home_page:
            pages = {"Source": "", "Documentation": "/tree/HEAD/docs", "Changelog": "/blob/HEAD/CHANGELOG.md"}
            pages["Issues"] = "/issues"
            self.distribution.metadata.project_urls = {name: f"{home_page}{path}" for name, path in pages.items()}
        if os.environ.get("TORCH_UCX_RPC_PIN") == "1":
            try:
                local_version, required = build_environment.pins()
            except build_environment.Missing as missing:
                sys.exit(f"torch_ucx_rpc: {missing}")
            self.tag_build = f"+{local_version}"
            # setuptools has already copied one attribute to the other, and writes both.
            self.distribution.install_requires = self.distribution.metadata.install_requires = required
        super().finalize_options()


setup(
    # The extension lists no sources. It makes setuptools run build_ext, and makes the wheel specific to this platform.
    ext_modules=[Extension("torch_ucx_rpc._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "egg_info": PinnedEggInfo},
)
