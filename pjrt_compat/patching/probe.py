"""Questions about the installed torch_xla. Each answers True or False and never raises.

A patch is applied because of what a probe finds, not because of a version number.
"""

from __future__ import annotations

import sys
from typing import Any


def module_named(name: str) -> Any:
    return sys.modules.get(name)


def is_torch_xla() -> bool:
    """Whether the imported ``torch_xla`` is PyTorch/XLA and not a local file of that name."""
    return hasattr(module_named("torch_xla"), "_XLAC")


def lacks_xrt() -> bool:
    """Whether the XRT runtime is gone: its mesh service was bound as ``_xla_rendezvous``."""
    return not hasattr(getattr(module_named("torch_xla"), "_XLAC", None), "_xla_rendezvous")


def versions() -> dict:
    """Versions of what matters, without importing anything that is not loaded yet."""
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "torch_xla", "wrapt"):
        found[name] = str(getattr(module_named(name), "__version__", "not imported"))
    return found
