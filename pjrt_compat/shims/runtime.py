"""``torch_xla.runtime``: torch_xla's own code (FSDP, the xla backend) asks here who it is."""

from __future__ import annotations

from pjrt_compat.replicas import identity, runtime


def world_size() -> int:
    """Number of replicas of the job; outside a replica what the runtime says.

    Natively (v2.9.0 ``torch_xla/runtime.py``) a process of a CPU job sees its own devices only.
    """
    replica = identity.current_replica()
    if replica is not None:
        return replica.world_size
    return int(runtime.native("torch_xla.runtime:world_size")())


def global_ordinal() -> int:
    """Ordinal of this replica; outside a replica what the runtime says (v2.9.0)."""
    replica = identity.current_replica()
    if replica is not None:
        return replica.ordinal
    return int(runtime.native("torch_xla.runtime:global_ordinal")())


def local_ordinal() -> int:
    """Index of this replica on its host; outside a replica what the runtime says (v2.9.0)."""
    replica = identity.current_replica()
    if replica is not None:
        return replica.local_ordinal
    return int(runtime.native("torch_xla.runtime:local_ordinal")())
