"""The few things pjrt_compat asks of the XLA runtime itself.

torch_xla is imported inside the functions: this package is part of the start of every replica,
and some of its callers must not touch the runtime at all.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple, Optional

from pjrt_compat.errors import PjrtCompatError
from pjrt_compat.state import STATE


class NativeIdentity(NamedTuple):
    ordinal: int
    world_size: int
    local_ordinal: int


def bindings() -> Any:
    import torch_xla

    return torch_xla._XLAC


def native(target: str) -> Any:
    """The native object behind ``module:attribute``, patched or not."""
    original = STATE.originals.get(target)
    if original is not None:
        return original
    module, _, attribute = target.partition(":")
    __import__(module)
    return getattr(sys.modules[module], attribute)


def device_kind() -> str:
    """The PJRT device kind of this process: ``CPU``, ``TPU``, ``CUDA``, ...

    Answered from PJRT_DEVICE, which torch_xla sets itself while it is imported when the user has
    not.
    """
    chosen = os.environ.get("PJRT_DEVICE", "CPU")
    return "CUDA" if chosen == "GPU" else chosen.split("_")[0]


def is_up() -> bool:
    """Whether the runtime has been started in this process (False where it cannot be asked)."""
    if "torch_xla" not in sys.modules:
        return False
    # The question exists from 2.3 on.
    ask = getattr(bindings(), "_xla_runtime_is_initialized", None)
    return bool(ask()) if ask is not None else False


def native_identity() -> Optional[NativeIdentity]:
    """What the runtime says of this thread, if it is up and replicating; never starts it.

    This is how a program answers that was launched by torch_xla's own means (``torchrun``,
    ``torch_xla.launch``) instead of ``xmp.spawn``.
    """
    if not is_up() or bindings()._xla_get_replication_devices_count() == 0:
        return None
    return NativeIdentity(
        native("torch_xla.runtime:global_ordinal")(),
        native("torch_xla.runtime:world_size")(),
        native("torch_xla.runtime:local_ordinal")(),
    )


def default_device_index() -> int:
    """Index, in this process, of the device XLA works with on this thread."""
    return int(str(bindings()._xla_get_default_device()).rpartition(":")[2])


def known_default_device_index() -> int:
    """``default_device_index`` without starting the runtime: 0 before it is up."""
    chosen = getattr(STATE.thread_local, "device_index", None)
    if chosen is not None:
        return int(chosen)
    return default_device_index() if is_up() else 0


def set_default_device(index: int) -> None:
    """Makes ``xla:<index>`` the device of this thread. Starts the runtime.

    Raises:
      IndexError: this process has no such device.
    """
    count = int(bindings()._xla_num_devices())
    if not 0 <= index < count:
        raise IndexError(
            "xla:{} does not exist: this process has {} device(s)".format(index, count)
        )
    bindings()._xla_set_default_device("xla:{}".format(index))
    # Until 2.3 the runtime cannot be asked whether it is up, so remember.
    STATE.thread_local.device_index = index  # type: ignore[union-attr]


def device_count() -> int:
    """Devices this process has or will have, without starting the runtime."""
    if is_up():
        return int(bindings()._xla_num_devices())
    if device_kind() == "TPU":
        _, devices = tpu_layout()
        return int(devices)
    return int(os.environ.get("CPU_NUM_DEVICES", "1")) if device_kind() == "CPU" else 1


def mark_step() -> None:
    """Executes the pending graph of this thread's device and runs its step closures."""
    import torch_xla

    if hasattr(torch_xla, "sync"):
        torch_xla.sync()
    else:
        native("torch_xla.core.xla_model:mark_step")()


def configure_process(process: int, processes: int, devices: int, kind: str) -> None:
    """Prepares this process, before its runtime starts, to be one of ``processes`` on its host."""
    os.environ["PJRT_LOCAL_PROCESS_RANK"] = str(process)
    os.environ["PJRT_LOCAL_PROCESS_COUNT"] = str(processes)
    if kind == "CPU":
        # Each process is a client of its own; the host path joins them.
        os.environ["CPU_NUM_DEVICES"] = str(devices)
        return
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess(process, processes)


def process_task_id(process: int) -> int:
    """Index of this process among those of all hosts (``CLOUD_TPU_TASK_ID`` under PJRT)."""
    return int(os.environ.get("CLOUD_TPU_TASK_ID", process))


def global_device_count() -> int:
    return len(bindings()._xla_get_all_devices())


def replica_id(device_index: int) -> int:
    """The number by which XLA's collectives know the device. Starts the runtime."""
    return int(bindings()._xla_get_device_ordinal("xla:{}".format(device_index)))


def tpu_layout() -> Any:
    """Processes on this host and devices per process of the attached TPU, without starting it."""
    from torch_xla._internal import tpu

    processes = tpu.num_local_processes()
    if not processes:
        raise PjrtCompatError(
            "PJRT_DEVICE=TPU but no TPU chip is attached to this machine. On a machine without a "
            "TPU set PJRT_DEVICE=CPU; PJRT_COMPAT_TOPOLOGY=v3-8 gives a TPU's layout there."
        )
    return processes, tpu.num_logical_cores_per_chip()
