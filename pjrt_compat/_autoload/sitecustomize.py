"""Makes a child process active, found through PYTHONPATH, and stands aside.

Activation puts the directory of this file on PYTHONPATH, so that a process started in any way has
the shim too. Nothing here may stop the interpreter from starting.
"""

import os
import sys


def _start(here):
    try:
        import pjrt_compat.bootstrap
    except ImportError:
        # The parent found the package by a path of its own; use the same copy.
        sys.path.append(os.path.dirname(os.path.dirname(here)))
        import pjrt_compat.bootstrap
    pjrt_compat.bootstrap.start("environment")


def _import_hidden_sitecustomize(here):
    # Python imports the first sitecustomize on the path only; this one hides the user's.
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


def _guarded(action, here):
    try:
        action(here)
    except Exception as error:  # whatever fails must not break every Python process
        sys.stderr.write("pjrt_compat: sitecustomize: %s: %r\n" % (action.__name__, error))


_HERE = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("PJRT_COMPAT", "").strip().lower() not in ("", "0", "off", "false", "no"):
    _guarded(_start, _HERE)
_guarded(_import_hidden_sitecustomize, _HERE)
