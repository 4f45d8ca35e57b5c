"""``torch_xla.distributed.xla_multiprocessing`` as XRT had it."""

from __future__ import annotations

import copy
from typing import Any, Callable, Optional, Tuple

import torch

from pjrt_compat.replicas import identity, launch
from pjrt_compat.replicas.launch import ReplicaContext


def spawn(
    fn: Callable[..., Any],
    args: Tuple[Any, ...] = (),
    nprocs: Optional[int] = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Optional[ReplicaContext]:
    """Runs ``fn(ordinal, *args)`` on every replica.

    Args:
      fn: called with the global ordinal first.
      args: its further arguments.
      nprocs: replicas on this host. None is all there are, 1 runs ``fn`` in this process; on CPU
        any number works, on other devices only these two and their count.
      join: wait for the end; otherwise return at once.
      daemon: start daemonic processes.
      start_method: ``spawn`` (through a fork server that has imported torch_xla), ``forkserver``,
        or ``fork``, which pickles nothing.

    Returns:
      None, or with ``join=False`` a context with ``join(timeout=None)`` and ``processes``.

    Raises:
      TopologyError: ``nprocs`` cannot be had here.
      torch.multiprocessing.ProcessExitedException: a replica failed; ``exit_code`` is 17 after an
        exception, otherwise that of its ``sys.exit``, and the text holds its traceback.

    XRT: v1.12.0 ``torch_xla/distributed/xla_multiprocessing.py`` ``spawn``.
    """
    return launch.spawn(fn, args, nprocs, join, daemon, start_method)


def move_wrapped_model(self: Any, device: Any) -> torch.nn.Module:
    """``MpModelWrapper.to``: the wrapped model on ``device``, one replica at a time.

    Replicas that share a process each get a copy of their own, as each XRT process did.
    XRT: v1.12.0 ``torch_xla/distributed/xla_multiprocessing.py`` ``MpModelWrapper.to``.
    """
    replica = identity.current_replica()
    with self._lock:
        if replica is None or not replica.shares_process:
            self._model.to(device)
            return self._model  # type: ignore[no-any-return]
        moved = self.__dict__.setdefault("_pjrt_compat_moved", {})
        if replica.ordinal not in moved:
            moved[replica.ordinal] = copy.deepcopy(self._model)
        return moved[replica.ordinal].to(device)  # type: ignore[no-any-return]
