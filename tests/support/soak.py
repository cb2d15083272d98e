"""Whether this is a soak run: the randomised tests then take far more examples (`make soak`)."""

from __future__ import annotations

import os
from typing import Final

SOAK: Final = bool(os.environ.get("FOREBAY_SOAK"))
