"""``python -m pjrt_compat`` is ``pjrt-compat``."""

import sys

from pjrt_compat.tools.cli import main

sys.exit(main())
