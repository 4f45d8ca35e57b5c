"""What a process has to itself under XRT, given to each replica that shares one."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any, Callable, Dict, Iterator, Optional, Sequence

from pjrt_compat.replicas import identity, runtime
from pjrt_compat.replicas.identity import Replica

AS_TPU_VARIABLE = "PJRT_COMPAT_AS_TPU"
PRIVATE_VARIABLES = (
    identity.ORDINAL_VARIABLE,
    identity.LOCAL_ORDINAL_VARIABLE,
    identity.WORLD_SIZE_VARIABLE,
    "XRT_MULTI_PROCESSING_DEVICE",
    "XRT_LOCAL_WORKER",
    "XRT_HOST_ORDINAL",
    "XRT_HOST_WORLD_SIZE",
)


def answers_as_tpu() -> bool:
    """Whether hardware queries answer TPU, so that TPU-only branches run on CPU."""
    return os.environ.get(AS_TPU_VARIABLE, "") == "1"


def shown_kind(kind: str) -> str:
    """The hardware name XRT would have given a PJRT device kind."""
    if kind == "CPU" and answers_as_tpu():
        return "TPU"
    return "GPU" if kind in ("CUDA", "ROCM") else kind


def device_name(replica: Replica) -> str:
    """XRT's name of the device, as in ``Exception in device=TPU:3``."""
    return "{}:{}".format(shown_kind(replica.device_kind), replica.ordinal)


def replica_environment(replica: Replica) -> Dict[str, str]:
    """The variables XRT set in a worker (v1.12.0 ``_prepare_env_for_index``)."""
    values = (
        replica.ordinal,
        replica.local_ordinal,
        replica.world_size,
        device_name(replica),
        "localservice:{}".format(replica.host),
        replica.host,
        replica.hosts,
    )
    return dict(zip(PRIVATE_VARIABLES, map(str, values)))


def set_environment(replica: Replica) -> None:
    """Sets XRT's variables in a process that holds one replica."""
    os.environ.update(replica_environment(replica))


# -- threads ---------------------------------------------------------------------------------------


def isolate_threads(replicas: Sequence[Replica]) -> None:
    """Prepares a process whose replicas are threads: environment and helper threads."""
    _give_environments(replicas)
    inherit_identity()


class ReplicaEnvironment(type(os.environ)):  # type: ignore[misc]
    """``os.environ`` in which XRT's variables are those of the replica that asks.

    What a replica writes to one of them is its own too. All other variables are shared.
    """

    private: Dict[int, Dict[str, str]] = {}

    def _own(self, key: Any) -> Optional[Dict[str, str]]:
        replica = identity.current_replica()
        if replica is None or key not in PRIVATE_VARIABLES:
            return None
        return self.private.get(replica.ordinal)

    def __getitem__(self, key: str) -> str:
        own = self._own(key)
        return own[key] if own is not None else super().__getitem__(key)

    def __setitem__(self, key: str, value: str) -> None:
        own = self._own(key)
        if own is None:
            super().__setitem__(key, value)
        else:
            own[key] = value

    def __delitem__(self, key: str) -> None:
        own = self._own(key)
        if own is None:
            super().__delitem__(key)
        else:
            del own[key]

    def __iter__(self) -> Iterator[str]:
        own = self._own(identity.ORDINAL_VARIABLE) or {}
        yield from own
        for key in super().__iter__():
            if key not in PRIVATE_VARIABLES:
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _give_environments(replicas: Sequence[Replica]) -> None:
    for replica in replicas:
        ReplicaEnvironment.private[replica.ordinal] = replica_environment(replica)
    for key in PRIVATE_VARIABLES:
        os.environ.pop(key, None)
    os.environ.__class__ = ReplicaEnvironment


def inherit_identity() -> None:
    """Threads started by a replica belong to it, and so does work it gives to a thread pool."""
    native_start = threading.Thread.start
    if getattr(native_start, "_pjrt_compat", False):
        return

    @functools.wraps(native_start)
    def start(self: threading.Thread) -> None:
        replica = identity.current_replica()
        if replica is not None:
            self.run = functools.partial(_run_as, replica, self.run)  # type: ignore[method-assign]
        native_start(self)

    start._pjrt_compat = True  # type: ignore[attr-defined]
    threading.Thread.start = start  # type: ignore[method-assign]

    from concurrent.futures import ThreadPoolExecutor

    native_submit: Any = ThreadPoolExecutor.submit

    @functools.wraps(native_submit)
    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        replica = identity.current_replica()
        if replica is not None:
            fn = functools.partial(_run_as, replica, fn)
        return native_submit(self, fn, *args, **kwargs)

    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _run_as(replica: Replica, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with identity.running_as(replica):
        runtime.set_default_device(replica.device_index)
        return run(*args, **kwargs)
