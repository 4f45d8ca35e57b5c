"""What a process started by a replica must know before its own code runs.

multiprocessing sends a child its preparation data first: before the main module is imported and
before the target is unpickled. A passport among that data restores, as it is unpickled, the
environment (a fork server's children have that of the server) and the identity of the replica.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Optional, Tuple

from pjrt_compat.replicas import identity
from pjrt_compat.replicas.identity import Replica
from pjrt_compat.state import STATE

_NATIVE = "multiprocessing.spawn:get_preparation_data"


class Passport:
    """Unpickling it is what it does."""

    def __init__(self, environment: Dict[str, str], replica: Optional[Replica]) -> None:
        self.environment = environment
        self.replica = replica

    def __reduce__(self) -> Tuple[Any, ...]:
        return admit, (self.environment, self.replica)


def admit(environment: Dict[str, str], replica: Optional[Replica]) -> None:
    """Makes this process what the passport says. Runs in the child."""
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    STATE.process_replica = replica


def get_preparation_data(name: str) -> Dict[str, Any]:
    """``multiprocessing.spawn.get_preparation_data`` with a passport added when it is needed.

    Source: CPython ``Lib/multiprocessing/spawn.py``. Raises what the native function raises.
    """
    data: Dict[str, Any] = STATE.originals[_NATIVE](name)
    replica = identity.current_replica()
    if replica is not None or STATE.jobs:
        data["pjrt_compat"] = Passport(dict(os.environ), replica)
    return data
