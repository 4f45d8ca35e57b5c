"""The one object that holds what pjrt_compat remembers between calls.

Only the standard library's built-ins are used: this module is imported at interpreter start.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from typing import Any, Dict, FrozenSet, List, Optional, Set

    from pjrt_compat.patching.registry import Registry
    from pjrt_compat.replicas.identity import Replica
    from pjrt_compat.replicas.launch import Job
    from pjrt_compat.replicas.rendezvous import MeetingPlace


class State:
    """Everything that outlives a call, one instance per process.

    Attributes:
      active: whether the shim was asked for and not taken back.
      strict: whether a patch that cannot be applied raises.
      only, skip: patch ids or prefixes chosen by the user; None means no choice was made.
      routes: how activation was asked for, in the order it happened.
      late: whether torch_xla had been imported before activation.
      notes: what the translation of XRT variables did, one sentence each.
      registry: the applied patches; None until torch_xla is imported.
      originals: native objects by ``module:attribute``, as they were before patching.
      thread_local: holds the replica of the current thread.
      process_replica: the replica of every thread, where a process has just one.
      local_replicas: the replicas that are threads of this process, by device index.
      meeting_place: where the replicas of this process meet each other and those of other
        processes; None outside a job.
      jobs: launched jobs whose processes may still run.
      said: warning topics already spoken about.
    """

    def __init__(self) -> None:
        self.active: bool = False
        self.strict: bool = False
        self.only: Optional[FrozenSet[str]] = None
        self.skip: Optional[FrozenSet[str]] = None
        self.routes: List[str] = []
        self.late: bool = False
        self.notes: List[str] = []
        self.registry: Optional[Registry] = None
        self.originals: Dict[str, Any] = {}
        self.thread_local: Optional[threading.local] = None
        self.process_replica: Optional[Replica] = None
        self.local_replicas: List[Replica] = []
        self.meeting_place: Optional[MeetingPlace] = None
        self.jobs: List[Job] = []
        self.said: Set[str] = set()


STATE = State()
