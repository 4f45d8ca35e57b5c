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


def _run_hidden_sitecustomize():
    # Python imports the first sitecustomize of the path only. The search begins behind this one,
    # so that it ends also where another one does the same.
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    path = [os.path.abspath(entry) for entry in sys.path]
    behind = path[path.index(here) + 1 :] if here in path else path
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in behind if entry != here])
    if spec is None or spec.origin is None:
        return
    from importlib.util import module_from_spec

    ours, hidden = sys.modules["sitecustomize"], module_from_spec(spec)
    sys.modules["sitecustomize"] = hidden
    try:
        spec.loader.exec_module(hidden)
    except BaseException:
        sys.modules["sitecustomize"] = ours
        raise


if os.environ.get("PJRT_COMPAT", "").strip().lower() not in ("", "0", "off", "false", "no"):
    try:
        _start_pjrt_compat()
    except Exception as error:  # a missing or broken package must not break every Python process
        sys.stderr.write("sitecustomize: pjrt_compat was not activated: %r\n" % (error,))
if __name__ == "sitecustomize":
    try:
        _run_hidden_sitecustomize()
    except Exception as error:
        sys.stderr.write("sitecustomize: the next sitecustomize failed: %r\n" % (error,))
