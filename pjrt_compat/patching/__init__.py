"""Turning the table into installed functions, and back."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any, Iterable, Optional

import wrapt

from pjrt_compat import bootstrap
from pjrt_compat.errors import PjrtCompatError, warn_once
from pjrt_compat.patching import probe
from pjrt_compat.patching.registry import APPLIED, MISSING, Registry, split_target
from pjrt_compat.patching.table import TABLE
from pjrt_compat.state import STATE


def engage() -> None:
    """Registers the hooks that apply the patches as torch_xla's modules appear.

    The first hook waits for ``torch_xla`` itself to be complete: its submodules import each other
    while the package is loading, and what they bind early is found by the sweep afterwards.
    """
    set_log_level()
    registry()
    choose_from_environment()
    wrapt.register_post_import_hook(on_torch_xla_imported, "torch_xla")


def registry() -> Registry:
    if STATE.registry is None:
        STATE.registry = Registry(TABLE)
    return STATE.registry


def on_torch_xla_imported(torch_xla: ModuleType) -> None:
    """Applies the patches of all loaded modules and waits for the others."""
    undo_loader_chaining(torch_xla)
    if not STATE.active:
        return
    if not probe.is_torch_xla():
        warn_once(
            "shadowed",
            "the module torch_xla at {} is not PyTorch/XLA, so pjrt_compat leaves it alone. If you "
            "meant PyTorch/XLA, rename that file.".format(getattr(torch_xla, "__file__", "?")),
        )
        return
    for name in registry().modules():
        if name == "torch_xla" or name in sys.modules or not name.startswith("torch_xla"):
            on_module_imported(sys.modules.get(name) or __import__(name, fromlist=["_"]))
        else:
            wrapt.register_post_import_hook(on_module_imported, name)
    report_early_bindings()


def on_module_imported(module: ModuleType) -> None:
    undo_loader_chaining(module)
    if STATE.active:
        registry().apply_module(module)


def undo_loader_chaining(module: ModuleType) -> None:
    """Gives a hooked module its own loader back, so that ``importlib.resources`` works.

    wrapt's import hook leaves its chained loader behind in some versions
    (https://github.com/GrahamDumpleton/wrapt/issues/221).
    """
    spec: Any = getattr(module, "__spec__", None)
    loader: Any = getattr(spec, "loader", None)
    if spec is not None and type(loader).__name__ == "_ImportHookChainedLoader":
        loader = loader.loader
        spec.loader = loader
    if type(getattr(module, "__loader__", None)).__name__ == "_ImportHookChainedLoader":
        module.__loader__ = loader


def report_early_bindings() -> None:
    found = registry().early_bindings
    if not STATE.late or not found:
        return
    places = sorted({"{} ({})".format(b.module, b.file) for b in found})
    names = sorted({b.name for b in found})
    warn_once(
        "late",
        "pjrt_compat was activated after torch_xla; {} still hold(s) the native {}. Move "
        "`import pjrt_compat` to the first line of the program, or set PJRT_COMPAT_REBIND=1 to "
        "rebind them.".format(", ".join(places), ", ".join(names)),
    )


def choose_from_environment() -> None:
    """Reads PJRT_COMPAT_ONLY and PJRT_COMPAT_SKIP, unless ``activate`` has chosen already."""
    for variable, attribute in (("PJRT_COMPAT_ONLY", "only"), ("PJRT_COMPAT_SKIP", "skip")):
        entries = bootstrap.split_list(os.environ.get(variable))
        if entries is None or getattr(STATE, attribute) is not None:
            continue
        try:
            registry().check_known(entries, variable)
        except PjrtCompatError as error:
            if STATE.strict:
                raise
            warn_once("unknown-" + variable, str(error))
        setattr(STATE, attribute, frozenset(entries))


def set_log_level() -> None:
    """Shows the package's log on stderr from the level named by PJRT_COMPAT_LOG."""
    import logging

    logger = logging.getLogger("pjrt_compat")
    level = os.environ.get("PJRT_COMPAT_LOG", "").strip().upper()
    if not level:
        logger.addHandler(logging.NullHandler())
    elif not isinstance(logging.getLevelName(level), int):
        warn_once(
            "log", "PJRT_COMPAT_LOG={} is no log level; use debug, info or warning".format(level)
        )
    elif not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("pjrt_compat: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False


def activate(
    *,
    only: Optional[Iterable[str]] = None,
    skip: Optional[Iterable[str]] = None,
    strict: bool = False,
) -> None:
    """See :func:`pjrt_compat.activate`."""
    if bootstrap.is_switched_off():
        raise PjrtCompatError(
            "PJRT_COMPAT={} switches pjrt_compat off; unset it to call activate().".format(
                os.environ["PJRT_COMPAT"]
            )
        )
    chosen = {"only": only, "skip": skip}
    for name, entries in chosen.items():
        if entries is not None:
            entries = [entries] if isinstance(entries, str) else list(entries)
            registry().check_known(entries, "activate({}=...)".format(name))
            former = getattr(STATE, name) or frozenset()
            if former and former != frozenset(entries):
                warn_once(
                    "again-" + name,
                    "activate() was called again with another {}; both choices hold now".format(
                        name
                    ),
                )
            setattr(STATE, name, former | frozenset(entries))
    STATE.strict = STATE.strict or strict
    if STATE.active and (only is not None or skip is not None) and STATE.originals:
        registry().undo_all()
        STATE.active = False
    if not STATE.active:
        bootstrap.install("activate")


def deactivate() -> None:
    """See :func:`pjrt_compat.deactivate`."""
    bootstrap.remove_finder()
    bootstrap.stop_travelling()
    STATE.active = False
    STATE.only = STATE.skip = None
    STATE.strict = False
    STATE.routes.clear()
    if STATE.registry is not None:
        STATE.registry.undo_all()


def is_patched(patch_id: str) -> bool:
    """See :func:`pjrt_compat.is_patched`."""
    registry().check_known([patch_id], "is_patched()")
    if patch_id not in registry().records:
        raise PjrtCompatError("{!r} is a prefix, not a patch id".format(patch_id))
    registry().recheck()
    return registry().records[patch_id].state == APPLIED


def get_original(target: str) -> Any:
    """See :func:`pjrt_compat.get_original`."""
    original = STATE.originals.get(target, MISSING)
    if original is MISSING:
        module, path = split_target(target)
        raise PjrtCompatError(
            "nothing of pjrt_compat replaced {} in {}: the name is native, was added because it "
            "did not exist, or torch_xla is not imported yet".format(path or "(no name)", module)
        )
    return original
