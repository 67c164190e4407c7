"""``python -m soak.training``: see the package's docstring. Its processes import that, and not this file."""

from __future__ import annotations

import sys

from soak.training import main

sys.exit(main())
