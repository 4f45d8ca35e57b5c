"""Which replica is this: answered from memory, never by starting the XLA runtime."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Iterator, NamedTuple, Optional

from pjrt_compat.replicas import runtime
from pjrt_compat.state import STATE

# What XRT set in a replica's environment (v1.12.0 torch_xla/core/xla_env_vars.py).
ORDINAL_VARIABLE = "XRT_SHARD_ORDINAL"
LOCAL_ORDINAL_VARIABLE = "XRT_SHARD_LOCAL_ORDINAL"
WORLD_SIZE_VARIABLE = "XRT_SHARD_WORLD_SIZE"


class Replica(NamedTuple):
    """One XRT ordinal: a process of its own, or a thread of a process that hosts several.

    Attributes:
      ordinal: index in the job.
      world_size: number of replicas in the job.
      local_ordinal: index on its host.
      local_world_size: number of replicas on its host.
      host: index of the host; hosts: number of hosts.
      process: index, on its host, of the process that holds it; processes: their number.
      device_index: which device of that process is its own (``xla:<device_index>``).
      device_kind: ``CPU``, ``TPU``, ``CUDA`` or another PJRT device kind.
    """

    ordinal: int
    world_size: int
    local_ordinal: int
    local_world_size: int
    host: int
    hosts: int
    process: int
    processes: int
    device_index: int
    device_kind: str

    @property
    def shares_process(self) -> bool:
        """Whether other replicas are threads of the same process."""
        return self.local_world_size > self.processes

    def __str__(self) -> str:
        return "replica {} of {}".format(self.ordinal, self.world_size)


_thread_local = threading.local()
STATE.thread_local = _thread_local


def current_replica() -> Optional[Replica]:
    """The replica this thread belongs to, or None outside a job.

    A thread without a replica of its own (autograd's, or one made by C++) in a process that hosts
    several is told apart by the runtime's current device, which XLA keeps per thread.
    """
    replica = STATE.process_replica
    if replica is not None:
        return replica
    replica = getattr(_thread_local, "replica", None)
    if replica is not None or not STATE.local_replicas:
        return replica
    return STATE.local_replicas[runtime.default_device_index()]


@contextlib.contextmanager
def running_as(replica: Replica) -> Iterator[None]:
    """Makes ``replica`` the identity of the current thread."""
    former = getattr(_thread_local, "replica", None)
    _thread_local.replica = replica
    try:
        yield
    finally:
        _thread_local.replica = former


def ordinal(default: int = 0) -> int:
    """The ordinal, or outside a job what the environment or the running runtime says."""
    replica = current_replica()
    if replica is not None:
        return replica.ordinal
    if ORDINAL_VARIABLE in os.environ:
        return int(os.environ[ORDINAL_VARIABLE])
    native = runtime.native_identity()
    return default if native is None else native.ordinal


def world_size(default: int = 1) -> int:
    """The number of replicas, or outside a job what the environment or the runtime says."""
    replica = current_replica()
    if replica is not None:
        return replica.world_size
    if WORLD_SIZE_VARIABLE in os.environ:
        return int(os.environ[WORLD_SIZE_VARIABLE])
    native = runtime.native_identity()
    return default if native is None else native.world_size


def local_ordinal(default: int = 0) -> int:
    """The index on this host, or outside a job what the environment or the runtime says."""
    replica = current_replica()
    if replica is not None:
        return replica.local_ordinal
    if LOCAL_ORDINAL_VARIABLE in os.environ:
        return int(os.environ[LOCAL_ORDINAL_VARIABLE])
    native = runtime.native_identity()
    return default if native is None else native.local_ordinal
