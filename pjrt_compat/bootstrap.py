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
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Iterable, Optional, Sequence

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
    """Meta path finder that wraps the loader of torch_xla, to notice when it is imported.

    Nothing happens before: libraries look with ``importlib.util.find_spec`` whether torch_xla is
    there and never import it, and a program may set its XRT variables after they have.
    """

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]] = None,
        target: Optional[ModuleType] = None,
    ) -> Optional[ModuleSpec]:
        if fullname != "torch_xla":
            return None
        spec = find_behind_us(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = EngagingLoader(spec.loader)  # type: ignore[assignment]
        return spec


class EngagingLoader:
    """Loader of torch_xla that loads the engine first, then gives way to the real loader."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> Optional[ModuleType]:
        if remove_finder():
            engage_before_import()
        # Searched for again, because engage() has added an import hook for torch_xla.
        found = find_behind_us(spec.name)
        spec.loader = self.loader if found is None or found.loader is None else found.loader
        return spec.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # importlib looks for this name before create_module() puts the real loader in place.
        self.loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)


def find_behind_us(
    fullname: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
) -> Optional[ModuleSpec]:
    """What ``import`` would find without our finder."""
    for finder in list(sys.meta_path):
        if isinstance(finder, TorchXlaFinder) or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(fullname, path, target)
        if spec is not None:
            return spec
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
        ``pth``, ``run``, ``activate``, or ``environment`` in a child of an active process.
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


def engage_before_import() -> None:
    """Loads the engine; unless ``strict``, a failure leaves torch_xla unpatched but importable."""
    try:
        engage()
    # Broad on purpose: `import torch_xla` must not fail because of us. The error is reported.
    except Exception as error:
        if STATE.strict:
            raise
        from pjrt_compat.errors import warn_once

        STATE.notes.append("torch_xla is not patched: {!r}".format(error))
        warn_once(
            "engine",
            "pjrt_compat could not start ({!r}), so torch_xla is used without it. "
            "PJRT_COMPAT=strict shows where.".format(error),
        )


def remove_finder() -> bool:
    """Stops waiting for torch_xla. Returns whether we were."""
    kept = [f for f in sys.meta_path if not isinstance(f, TorchXlaFinder)]
    waited = len(kept) < len(sys.meta_path)
    sys.meta_path[:] = kept
    return waited


def travel_to_children() -> None:
    """Makes every Python process started from here active too, by environment alone."""
    if not is_asked_for():
        os.environ["PJRT_COMPAT"] = "strict" if STATE.strict else "1"
    # An empty entry means the current directory and is kept.
    former = os.environ.get("PYTHONPATH")
    entries = former.split(os.pathsep) if former else []
    if AUTOLOAD_DIRECTORY not in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join([AUTOLOAD_DIRECTORY] + entries)


def stop_travelling() -> None:
    """Takes back what ``travel_to_children`` did."""
    os.environ.pop("PJRT_COMPAT", None)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [e for e in entries if e != AUTOLOAD_DIRECTORY]
    if any(kept):
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        os.environ.pop("PYTHONPATH", None)


def split_list(value: Optional[str]) -> Optional[Iterable[str]]:
    """The entries of a comma-separated variable, or None when it is unset."""
    if value is None:
        return None
    return [entry.strip() for entry in value.split(",") if entry.strip()]
