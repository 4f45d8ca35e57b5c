"""Applying, checking and undoing the patches of the table.

Three rules: ``add`` never overwrites what exists; a patch is undone by identity, in reverse order;
and a patch that fails is recorded, never raised, unless ``strict`` was asked for.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import threading
from types import ModuleType
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import wrapt

from pjrt_compat.errors import PatchTargetError, PjrtCompatError
from pjrt_compat.patching import probe
from pjrt_compat.patching.table import ADD, Patch
from pjrt_compat.state import STATE

PENDING = "pending"
APPLIED = "applied"
NATIVE = "native"
DISABLED = "disabled"
UNSUPPORTED = "unsupported"
FAILED = "failed"
DISPLACED = "displaced"
REMOVED = "removed"


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = _Missing()


class Handle(NamedTuple):
    """One attribute we set: enough to check it and to put the former value back."""

    patch_id: str
    owner: Any
    attribute: str
    original: Any
    installed: Any


class Record:
    """State of one patch."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.state = PENDING
        self.reason = ""
        self.error: Optional[BaseException] = None


class EarlyBinding(NamedTuple):
    """A name in a user's module that still refers to the native object."""

    patch_id: str
    module: str
    name: str
    file: str


def split_target(target: str) -> Tuple[str, str]:
    module, _, path = target.partition(":")
    return module, path


class Registry:
    """The patches of a table and what became of each."""

    def __init__(self, table: Iterable[Patch]) -> None:
        self.records: Dict[str, Record] = {patch.id: Record(patch) for patch in table}
        self.handles: List[Handle] = []
        self.early_bindings: List[EarlyBinding] = []
        self.lock = threading.RLock()

    # -- choosing ---------------------------------------------------------------------------

    def matching(self, entry: str) -> List[str]:
        """Ids equal to ``entry`` or below it (``xla_model`` covers ``xla_model.save``)."""
        return [i for i in self.records if i == entry or i.startswith(entry.rstrip(".") + ".")]

    def check_known(self, entries: Iterable[str], where: str) -> None:
        """Raises PjrtCompatError for an entry that names no patch."""
        for entry in entries:
            if not self.matching(entry):
                close = difflib.get_close_matches(entry, self.records, n=3, cutoff=0.5)
                hint = " Did you mean {}?".format(" or ".join(close)) if close else ""
                raise PjrtCompatError(
                    "{} names {!r}, which is no patch id or prefix.{} "
                    "pjrt_compat.status() lists all of them.".format(where, entry, hint)
                )

    def is_chosen(self, patch_id: str) -> bool:
        def covers(entries: Optional[Iterable[str]]) -> bool:
            return any(patch_id in self.matching(entry) for entry in entries or ())

        if STATE.only is not None and not covers(STATE.only):
            return False
        return not covers(STATE.skip)

    # -- applying ---------------------------------------------------------------------------

    def modules(self) -> List[str]:
        """Target modules in table order, each once."""
        return list(dict.fromkeys(split_target(r.patch.target)[0] for r in self.records.values()))

    def apply_module(self, module: ModuleType) -> None:
        """Applies every pending patch whose target lives in ``module``."""
        name = module.__name__
        with self.lock:
            first = len(self.handles)
            for record in self.records.values():
                if split_target(record.patch.target)[0] == name and record.state in (
                    PENDING,
                    REMOVED,
                ):
                    self._apply(record, module)
            self._sweep(self.handles[first:])

    def _apply(self, record: Record, module: ModuleType) -> None:
        patch = record.patch
        if not self.is_chosen(patch.id):
            record.state, record.reason = DISABLED, "not chosen by PJRT_COMPAT_ONLY/SKIP"
            return
        if not patch.needs():
            record.state, record.reason = (
                NATIVE,
                "the probe {} says it is right here".format(patch.needs.__name__),
            )
            return
        try:
            self._install(record, module)
        # Broad on purpose: whatever goes wrong, `import torch_xla` must succeed. The exception is
        # kept in the record and shown by status().
        except Exception as error:
            record.state, record.reason, record.error = FAILED, repr(error), error
            if STATE.strict:
                raise PatchTargetError(
                    "pjrt_compat could not apply {} to {} ({}). Versions: {}. Leave it out with "
                    "PJRT_COMPAT_SKIP={} or report it.".format(
                        patch.id, patch.target, error, probe.versions(), patch.id
                    )
                ) from error

    def _install(self, record: Record, module: ModuleType) -> None:
        patch = record.patch
        owner, attribute, original = resolve(module, split_target(patch.target)[1])
        if original is not MISSING and patch.kind == ADD:
            record.state, record.reason = NATIVE, "the name exists on this torch_xla"
            return
        replacement = load(patch.replacement)
        wrapt.apply_patch(owner, attribute, replacement)
        if original is not MISSING:
            STATE.originals[patch.target] = original
        self.handles.append(Handle(patch.id, owner, attribute, original, replacement))
        record.state, record.reason = APPLIED, ""

    # -- early bindings ---------------------------------------------------------------------

    def _sweep(self, fresh: List[Handle]) -> None:
        """Finds other modules that bound a replaced object under a name of their own.

        Inside torch_xla they are rebound; in user modules they are recorded, and rebound only when
        PJRT_COMPAT_REBIND=1 asks for it.
        """
        import os

        replaced = {
            id(h.original): h
            for h in fresh
            if h.original is not MISSING and isinstance(h.owner, ModuleType)
        }
        if not replaced:
            return
        rebind_users = os.environ.get("PJRT_COMPAT_REBIND", "") == "1"
        for module_name, module in list(sys.modules.items()):
            if module is None or module_name.partition(".")[0] in ("pjrt_compat", "wrapt"):
                continue
            for name, value in list(getattr(module, "__dict__", {}).items()):
                handle = replaced.get(id(value))
                if handle is None or (module is handle.owner and name == handle.attribute):
                    continue
                inside = module_name.partition(".")[0] in ("torch_xla", "torch")
                if inside or rebind_users:
                    wrapt.apply_patch(module, name, handle.installed)
                    self.handles.append(
                        Handle(handle.patch_id, module, name, value, handle.installed)
                    )
                else:
                    file = getattr(module, "__file__", None) or "<no file>"
                    self.early_bindings.append(
                        EarlyBinding(handle.patch_id, module_name, name, file)
                    )

    # -- checking and undoing ---------------------------------------------------------------

    def recheck(self) -> None:
        """Turns ``applied`` into ``displaced`` where someone replaced ours since, and back."""
        with self.lock:
            for handle in self.handles:
                record = self.records[handle.patch_id]
                if handle is not self.main_handle(handle.patch_id):
                    continue
                current = vars(handle.owner).get(handle.attribute, MISSING)
                ours = current is handle.installed
                record.state = APPLIED if ours else DISPLACED
                record.reason = "" if ours else "replaced since by {!r}".format(current)

    def main_handle(self, patch_id: str) -> Optional[Handle]:
        """The handle of the target itself, not of a rebound alias."""
        for handle in self.handles:
            if handle.patch_id == patch_id:
                return handle
        return None

    def undo_all(self) -> None:
        """Puts native objects back, newest first; what is not ours any more is left alone."""
        with self.lock:
            for handle in reversed(self.handles):
                record = self.records[handle.patch_id]
                if vars(handle.owner).get(handle.attribute, MISSING) is not handle.installed:
                    record.state, record.reason = DISPLACED, "someone else replaced it; left alone"
                    continue
                if handle.original is MISSING:
                    delattr(handle.owner, handle.attribute)
                else:
                    setattr(handle.owner, handle.attribute, handle.original)
                if record.state != DISPLACED:
                    record.state, record.reason = REMOVED, ""
            for record in self.records.values():
                if record.state in (PENDING, DISABLED):
                    record.state, record.reason = REMOVED, ""
            self.handles.clear()
            self.early_bindings.clear()
            STATE.originals.clear()


def resolve(module: ModuleType, path: str) -> Tuple[Any, str, Any]:
    """Owner, attribute name and present object (or MISSING) of a dotted path in ``module``."""
    parents, _, attribute = path.rpartition(".")
    owner: Any = module
    if parents:
        owner = wrapt.resolve_path(module, parents)[2]
    if attribute not in vars(owner):
        return owner, attribute, MISSING
    return owner, attribute, wrapt.resolve_path(module, path)[2]


def load(reference: str) -> Any:
    """The object behind ``module:attribute``."""
    module, path = split_target(reference)
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
