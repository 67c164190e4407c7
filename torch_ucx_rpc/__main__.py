"""``python -m torch_ucx_rpc COMMAND``, which is ``torch-ucx-rpc COMMAND`` too."""

import sys

from _torch_ucx_rpc_cli import main

if __name__ == "__main__":
    sys.exit(main())
