"""``python -m torch_ucx_rpc COMMAND``; the commands are in ``_cli``."""

import sys

from torch_ucx_rpc._cli import main

if __name__ == "__main__":
    sys.exit(main())
