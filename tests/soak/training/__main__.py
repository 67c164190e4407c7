"""``python -m tests.soak.training``: see the package's docstring. Its processes import the package, and not this
file."""

from __future__ import annotations

import sys

from tests.soak.training import main

sys.exit(main())
