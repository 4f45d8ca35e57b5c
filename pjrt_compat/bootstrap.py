"""Activation: the gate read at interpreter start, and the finder that waits for torch_xla.

Importing this module must stay cheap (it runs in every Python process of a user who set
``PJRT_COMPAT=1`` machine-wide), so nothing but ``os`` and ``sys`` is imported before torch_xla is.
"""

from __future__ import annotations

import os
import sys

from pjrt_compat.state import STATE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Iterable, Optional, Sequence

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
AUTOLOAD_DIRECTORY = os.path.join(PACKAGE_PARENT, "pjrt_compat", "_autoload")

_OFF = ("0", "off", "false", "no")


def is_switched_off() -> bool:
    """Whether ``PJRT_COMPAT`` forbids activation, even by an explicit import."""
    return os.environ.get("PJRT_COMPAT", "").strip().lower() in _OFF


def is_asked_for() -> bool:
    """Whether ``PJRT_COMPAT`` asks for activation."""
    return os.environ.get("PJRT_COMPAT", "").strip() != "" and not is_switched_off()


class TorchXlaFinder:
    """Meta path finder that notices when torch_xla is about to be imported, then steps aside."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]] = None,
        target: Optional[ModuleType] = None,
    ) -> Optional[ModuleSpec]:
        if fullname == "torch_xla":
            remove_finder()
            engage()
            # The search under way has passed the place of the hook that engage() added.
            import importlib.util

            return importlib.util.find_spec(fullname)
        return None


def start(route: str) -> bool:
    """Activates if ``PJRT_COMPAT`` asks for it. Returns whether the shim is active.

    To call this, a sitecustomize or .pth has just imported the package, which activates by itself;
    the route worth remembering is the caller's.
    """
    if is_asked_for():
        if STATE.routes == ["import"]:
            STATE.routes.clear()
        install(route)
    return STATE.active


def install(route: str) -> None:
    """Activates unless ``PJRT_COMPAT=0``. Further calls only record their route.

    Args:
      route: what asked for activation, as shown by ``status()``: ``import``, ``sitecustomize``,
        ``pth``, ``run`` or ``activate``.
    """
    if is_switched_off():
        return
    if route not in STATE.routes:
        STATE.routes.append(route)
    if STATE.active:
        return
    STATE.active = True
    STATE.strict = STATE.strict or os.environ.get("PJRT_COMPAT", "").strip() == "strict"
    travel_to_children()
    module = sys.modules.get("torch_xla")
    if module is None:
        sys.meta_path.insert(0, TorchXlaFinder())  # type: ignore[arg-type]
    else:
        # torch_xla may be half way through its own import: then nothing is late yet.
        STATE.late = not is_being_imported(module)
        engage()


def is_being_imported(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def engage() -> None:
    """Loads the engine; called once, when torch_xla is about to be imported or already is."""
    from pjrt_compat import environ

    if not STATE.late:
        environ.translate_process_environment()
    from pjrt_compat import patching

    patching.engage()


def remove_finder() -> None:
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, TorchXlaFinder)]


def travel_to_children() -> None:
    """Makes every Python process started from here active too, by environment alone."""
    if not is_asked_for():
        os.environ["PJRT_COMPAT"] = "strict" if STATE.strict else "1"
    entries = [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e]
    if AUTOLOAD_DIRECTORY not in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join([AUTOLOAD_DIRECTORY] + entries)


def stop_travelling() -> None:
    """Takes back what ``travel_to_children`` did."""
    os.environ.pop("PJRT_COMPAT", None)
    entries = [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e]
    kept = [e for e in entries if e != AUTOLOAD_DIRECTORY]
    if kept:
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        os.environ.pop("PYTHONPATH", None)


def split_list(value: Optional[str]) -> Optional[Iterable[str]]:
    """The entries of a comma-separated variable, or None when it is unset."""
    if value is None:
        return None
    return [entry.strip() for entry in value.split(",") if entry.strip()]
