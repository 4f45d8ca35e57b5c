"""What the shim has done in this process, as data and as text."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple

from pjrt_compat import patching
from pjrt_compat.patching import probe
from pjrt_compat.patching.registry import EarlyBinding
from pjrt_compat.state import STATE


class PatchStatus(NamedTuple):
    id: str
    target: str
    state: str
    reason: str


class Status(NamedTuple):
    """Answer of ``pjrt_compat.status()``."""

    active: bool
    routes: List[str]
    late: bool
    versions: Dict[str, str]
    notes: List[str]
    patches: List[PatchStatus]
    early_bindings: List[EarlyBinding]

    def counts(self) -> Dict[str, int]:
        """Number of patches by state."""
        counted: Dict[str, int] = {}
        for patch in self.patches:
            counted[patch.state] = counted.get(patch.state, 0) + 1
        return counted

    def to_dict(self) -> Dict[str, Any]:
        data = self._asdict()
        data["patches"] = [dict(p._asdict()) for p in self.patches]
        data["early_bindings"] = [dict(b._asdict()) for b in self.early_bindings]
        return dict(data)

    def __str__(self) -> str:
        lines = [
            "pjrt_compat is {} (by {})".format(
                "active" if self.active else "not active", ", ".join(self.routes) or "nothing"
            ),
            ", ".join("{} {}".format(name, version) for name, version in self.versions.items()),
        ]
        lines += self.notes
        lines += [
            "{:<12}{}{}".format(p.state, p.id, "  ({})".format(p.reason) if p.reason else "")
            for p in self.patches
        ]
        lines += [
            "{} in {} is still the native {}".format(b.name, b.file, b.patch_id)
            for b in self.early_bindings
        ]
        return "\n".join(lines)


def collect_status() -> Status:
    """Re-checks every patch by identity and reports."""
    registry = patching.registry()
    registry.recheck()
    return Status(
        active=STATE.active,
        routes=list(STATE.routes),
        late=STATE.late,
        versions=probe.versions(),
        notes=list(STATE.notes),
        patches=[
            PatchStatus(r.patch.id, r.patch.target, r.state, r.reason)
            for r in registry.records.values()
        ],
        early_bindings=list(registry.early_bindings),
    )
