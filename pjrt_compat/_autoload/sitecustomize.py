"""Makes a child process active, found through PYTHONPATH, and stands aside.

Activation puts the directory of this file on PYTHONPATH, so that a process started in any way has
the shim too. Nothing here may stop the interpreter from starting.
"""

import os
import sys


def _start_pjrt_compat():
    # `pjrt-compat run` leaves word for the program it becomes, not for its children.
    route = os.environ.pop("_PJRT_COMPAT_ROUTE", "environment")
    try:
        import pjrt_compat.bootstrap
    except ImportError:
        # The parent found the package by a path of its own. Use the same copy, and keep the other
        # packages beside it out of this process: it may be another Python.
        package_parent = os.path.abspath(os.path.join(__file__, "..", "..", ".."))
        sys.path.append(package_parent)
        try:
            import pjrt_compat.bootstrap
        finally:
            sys.path.remove(package_parent)
    pjrt_compat.bootstrap.start(route)


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


def _guarded(action):
    try:
        action()
    except Exception as error:  # whatever fails must not break every Python process
        sys.stderr.write("pjrt_compat: sitecustomize: %s: %r\n" % (action.__name__, error))


# A job may start programs of an older Python, which finds this file as well.
if sys.version_info >= (3, 8) and os.environ.get("PJRT_COMPAT", "").strip().lower() not in (
    "",
    "0",
    "off",
    "false",
    "no",
):
    _guarded(_start_pjrt_compat)
if __name__ == "sitecustomize":
    _guarded(_run_hidden_sitecustomize)
