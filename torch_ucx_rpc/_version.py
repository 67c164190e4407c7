"""The version of the installed package, such as "0.2.0+torch2.13"; "unknown" for a folder that is not installed.

Finding it takes longer than loading a module, so the package loads this module on demand. Workers compare
``_build_info.VERSION``.
"""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("torch_ucx_rpc")
except importlib.metadata.PackageNotFoundError:
    __version__ = "unknown"
