"""The opt-in .pth file: activation by PJRT_COMPAT=1 without a sitecustomize."""

from __future__ import annotations

import os
import sys
import sysconfig

NAME = "pjrt_compat_autoload.pth"
# One line, as .pth files demand: the gate first, and silent once the package is gone.
LINE = (
    "import os, sys; exec(\"try:\\n import pjrt_compat.bootstrap as b\\n b.start('pth')\\n"
    "except ModuleNotFoundError: pass\\n"
    "except Exception as e: sys.stderr.write('pjrt_compat: pth: %r\\\\n' % (e,))\") "
    "if os.environ.get('PJRT_COMPAT', '').strip().lower() not in "
    "('', '0', 'off', 'false', 'no') else None\n"
)


def path() -> str:
    """Where the file belongs in this Python environment."""
    return os.path.join(sysconfig.get_path("purelib"), NAME)


def perform(action: str) -> int:
    """``install``, ``remove`` or report ``status``.

    Returns the exit code: 1 when it is not installed, or could not be installed or removed.
    """
    try:
        return _perform(action)
    except OSError as error:
        print("pjrt-compat: {}".format(error), file=sys.stderr)
        return 1


def _perform(action: str) -> int:
    installed = os.path.exists(path())
    if action == "install":
        with open(path(), "w", encoding="ascii") as file:
            file.write(LINE)
        print("installed {}".format(path()), file=sys.stderr)
        return 0
    if action == "remove":
        if installed:
            os.remove(path())
        print("{} {}".format("removed" if installed else "not there:", path()), file=sys.stderr)
        return 0
    print("{} {}".format("installed:" if installed else "not installed:", path()))
    return 0 if installed else 1
