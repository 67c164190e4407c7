"""The version of the installed package.

Importing this module raises `importlib.metadata.PackageNotFoundError` where the package is not installed.
"""

from importlib.metadata import version as _version_of

__version__ = _version_of("torch_ucx_rpc")
