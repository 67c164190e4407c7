"""The version of the installed package, such as "0.2.0+torch2.13"; "unknown" for a folder that is not installed.

It takes longer to find than a module to load, so that only those who ask for it do. Workers compare
``_build_info.VERSION``.
"""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("torch_ucx_rpc")
except importlib.metadata.PackageNotFoundError:
    __version__ = "unknown"
