"""Activates pjrt_compat in every Python process whose environment has PJRT_COMPAT=1.

Copy this file as ``sitecustomize.py`` into a directory of PYTHONPATH, or append it to the
``sitecustomize.py`` you have. Without PJRT_COMPAT it does nothing. It hands over to the
sitecustomize that it hides, works when pjrt_compat is not installed, and never stops the
interpreter from starting.
"""

import os
import sys


def _start_pjrt_compat():
    import pjrt_compat.bootstrap

    pjrt_compat.bootstrap.start("sitecustomize")


def _import_hidden_sitecustomize():
    here = os.path.dirname(os.path.abspath(__file__))
    ours, path = sys.modules.pop("sitecustomize", None), sys.path[:]
    sys.path[:] = [entry for entry in path if os.path.abspath(entry or ".") != here]
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours
    finally:
        sys.path[:] = path + [entry for entry in sys.path if entry not in path]


if os.environ.get("PJRT_COMPAT", "").strip().lower() not in ("", "0", "off", "false", "no"):
    try:
        _start_pjrt_compat()
    except Exception as error:  # a missing or broken package must not break every Python process
        sys.stderr.write("sitecustomize: pjrt_compat was not activated: %r\n" % (error,))
try:
    _import_hidden_sitecustomize()
except Exception as error:
    sys.stderr.write("sitecustomize: the next sitecustomize failed: %r\n" % (error,))
