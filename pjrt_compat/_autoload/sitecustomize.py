"""Found by child processes through PYTHONPATH; makes them active and stands aside.

The directory of this file is put on PYTHONPATH by activation, so that a process started with
any method (``subprocess``, ``multiprocessing`` with spawn or forkserver, a shell script) has the
shim too. Nothing here may stop the interpreter from starting.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE_PARENT = os.path.dirname(os.path.dirname(_HERE))


def _start():
    try:
        import pjrt_compat.bootstrap
    except ImportError:
        # The parent found the package by a path of its own; use the same copy.
        sys.path.append(_PACKAGE_PARENT)
        import pjrt_compat.bootstrap
    pjrt_compat.bootstrap.start("environment")
    pjrt_compat.bootstrap.chain_sitecustomize(_HERE)


try:
    _start()
except Exception as error:  # a broken sitecustomize must not break every Python process
    sys.stderr.write("pjrt_compat: sitecustomize failed, continuing without it: %r\n" % (error,))
