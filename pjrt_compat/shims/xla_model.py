"""``torch_xla.core.xla_model`` as XRT had it: identity, devices and meetings of replicas.

Its collectives are in ``xla_collectives``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from typing import Any, Callable, List, Optional, Sequence, TextIO, Tuple, Union

import torch

from pjrt_compat.replicas import identity, isolation, runtime
from pjrt_compat.state import STATE

Device = Union[str, torch.device]

# -- who am I --------------------------------------------------------------------------------------


def get_ordinal(defval: int = 0) -> int:
    """Ordinal of this replica; ``defval`` outside a job. Never starts the runtime.

    XRT read XRT_SHARD_ORDINAL (v1.12.0 ``torch_xla/core/xla_model.py`` ``get_ordinal``); here each
    replica thread has its own.
    """
    # Asked in loops: a process that is one replica answers without a further call.
    replica = STATE.process_replica
    return replica.ordinal if replica is not None else identity.ordinal(defval)


def xrt_world_size(defval: int = 1) -> int:
    """Number of replicas; ``defval`` outside a job. Never starts the runtime.

    XRT read XRT_SHARD_WORLD_SIZE (v1.12.0 ``xrt_world_size``).
    """
    return identity.world_size(defval)


def get_local_ordinal(defval: int = 0) -> int:
    """Index of this replica on its host; ``defval`` outside a job. Never starts the runtime.

    XRT read XRT_SHARD_LOCAL_ORDINAL (v1.12.0 ``get_local_ordinal``).
    """
    return identity.local_ordinal(defval)


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is ordinal 0, of the host (``local``) or of the job.

    True outside a job, as in XRT (v1.12.0 ``is_master_ordinal``).
    """
    return (get_local_ordinal() if local else get_ordinal()) == 0


def master_print(
    *args: Any, fd: Optional[TextIO] = None, local: bool = False, flush: bool = False
) -> None:
    """``print`` on the master ordinal only (v1.12.0 ``master_print``); ``fd`` None is stdout."""
    if is_master_ordinal(local=local):
        print(*args, file=fd if fd is not None else sys.stdout, flush=flush)


# -- devices ---------------------------------------------------------------------------------------


def xla_device(n: Optional[int] = None, devkind: Optional[str] = None) -> torch.device:
    """The device of this replica, or ``xla:<n>`` of this process.

    Without ``n`` the runtime is not started, so a later ``xmp.spawn`` still works.

    Args:
      n: index of a device of this process; it becomes the default of this thread.
      devkind: ``TPU``, ``GPU`` or ``CPU``.

    Raises:
      AssertionError: there are no devices of that kind, as in XRT (v1.12.0 ``xla_device``).
      ValueError: the device belongs to another replica of this process.
    """
    assert devkind is None or devkind in _own_kinds(), (
        "No devices of {} kind (this process has {})".format(devkind, _own_kinds()[0])
    )
    replica = identity.current_replica()
    if n is None:
        if replica is not None:
            return torch.device("xla", replica.device_index)
        return torch.device("xla", runtime.known_default_device_index())
    if replica is not None and n != replica.device_index:
        raise ValueError(
            "xm.xla_device({}) on {}: its own device in this process is xla:{}; call "
            "xm.xla_device() without arguments".format(n, replica, replica.device_index)
        )
    runtime.set_default_device(n)
    return torch.device("xla", n)


def _own_kinds() -> Tuple[str, ...]:
    kind = runtime.device_kind()
    return isolation.shown_kind(kind), kind


def get_xla_supported_devices(
    devkind: Union[str, int, None] = None, max_devices: Optional[int] = None
) -> Optional[List[str]]:
    """Devices of this process, or None when there are none of ``devkind``.

    Inside a replica its own device only: an XRT process had no other (v1.12.0
    ``get_xla_supported_devices``). The runtime is not started.

    Args:
      devkind: ``TPU``, ``GPU`` or ``CPU``; an int is taken as ``max_devices``, which is the first
        parameter from 2.8 on.
      max_devices: upper bound of the length.
    """
    if isinstance(devkind, int):
        devkind, max_devices = None, devkind
    if devkind is not None and devkind not in _own_kinds():
        return None
    replica = identity.current_replica()
    if replica is not None:
        indices = [replica.device_index]
    else:
        indices = list(range(runtime.device_count()))
    return ["xla:{}".format(index) for index in indices][: max_devices or None]


def _xla_real_device(device: Device) -> str:
    """XRT's name of a device, such as ``TPU:3`` for the device of replica 3.

    Raises:
      RuntimeError: it is no XLA device (v1.12.0 ``_xla_real_device``).
    """
    match = re.match(r"xla(?::(\d+))?$", str(device))
    if not match:
        raise RuntimeError("Invalid device format: {}".format(device))
    replica = identity.current_replica()
    index = int(match.group(1) or 0)
    if replica is not None and index == replica.device_index:
        return isolation.device_name(replica)
    return "{}:{}".format(isolation.shown_kind(runtime.device_kind()), index)


def xla_real_devices(devices: Optional[Sequence[Device]] = None) -> List[str]:
    """XRT's names of devices (v1.12.0 ``xla_real_devices``); None means all of this process."""
    chosen = devices if devices is not None else get_xla_supported_devices()
    return [_xla_real_device(device) for device in chosen or []]


def xla_device_hw(device: Device) -> str:
    """``TPU``, ``GPU`` or ``CPU`` (v1.12.0 ``xla_device_hw``)."""
    return _xla_real_device(device).split(":")[0]


def set_replication(device: Device, devices: Sequence[Device]) -> None:
    """Makes ``device`` the default and replicates over ``devices`` (v1.12.0 ``set_replication``).

    Inside a replica the launcher has set up replication already, so only the default is set: XRT
    programs pass their one device, where PJRT demands all devices of the process.
    """
    if identity.current_replica() is None:
        runtime.native("torch_xla.core.xla_model:set_replication")(device, devices)
    else:
        runtime.set_default_device(torch.device(device).index or 0)


# -- meeting on the host ---------------------------------------------------------------------------


def rendezvous(
    tag: str, payload: Union[bytes, str] = b"", replicas: Sequence[int] = ()
) -> List[bytes]:
    """Waits until all ``replicas`` have reached ``tag``, and exchanges payloads.

    Args:
      tag: any text; each tag is a meeting of its own.
      payload: bytes (or text, encoded as UTF-8) of any length.
      replicas: ordinals taking part; empty means all.

    Returns:
      The payloads in ascending order of ordinal; [] in a world of one, as in XRT.

    Raises:
      TypeError: a payload or tag of another type.
      ValueError: ``replicas`` holds unknown ordinals or not the caller's.
      ReplicaMismatchError: replicas met the tag with different ``replicas``.
      ReplicaLostError: a participant has ended, or PJRT_COMPAT_TIMEOUT has passed.

    XRT: v1.12.0 ``rendezvous``, served by the mesh service. No device work is done: the graph is
    not cut.
    """
    replica = identity.current_replica()
    who = "xm.rendezvous({!r}) on {}".format(tag, replica or "a program that runs alone")
    data = _payload_bytes(payload, who)
    if not isinstance(tag, str):
        raise TypeError("{}: tag must be str, not {}".format(who, type(tag).__name__))
    ordinal, world_size = identity.ordinal(), identity.world_size()
    participants = _participants(replicas, ordinal, world_size, who)
    if world_size == 1:
        return []
    if replica is None or STATE.meeting_place is None:
        return list(
            runtime.native("torch_xla.core.xla_model:rendezvous")(tag, data, list(replicas))
        )
    payloads = STATE.meeting_place.rendezvous(ordinal, tag, data, participants)
    return [payloads[o] for o in participants]


def _payload_bytes(payload: Any, who: str) -> bytes:
    if isinstance(payload, str):
        return payload.encode()
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return bytes(payload)
    raise TypeError(
        "{}: payload must be bytes or str, not {}; xm.mesh_reduce exchanges any object".format(
            who, type(payload).__name__
        )
    )


def _participants(
    replicas: Optional[Sequence[int]], ordinal: int, world_size: int, who: str
) -> Tuple[int, ...]:
    if not replicas:
        return tuple(range(world_size))
    participants = tuple(sorted({int(o) for o in replicas}))
    unknown = [o for o in participants if not 0 <= o < world_size]
    if unknown:
        raise ValueError(
            "{}: replicas={} names {}, but the world has {} replica(s)".format(
                who, list(replicas), unknown, world_size
            )
        )
    if ordinal not in participants:
        raise ValueError(
            "{}: replicas={} does not hold the caller's ordinal {}".format(
                who, list(replicas), ordinal
            )
        )
    return participants


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[List[Any]], Any]) -> Any:
    """``reduce_fn`` of the list of every replica's ``data``, in ascending order of ordinal.

    Anything that pickles can be data; tensors arrive on the CPU. ``reduce_fn`` runs on every
    replica and is not pickled. In a world of one the data is returned and ``reduce_fn`` is not
    called, as in XRT (v1.12.0 ``mesh_reduce``).
    """
    cpu_data = _to_cpu(data)
    buffer = io.BytesIO()
    torch.save(cpu_data, buffer)
    received = rendezvous(tag, buffer.getvalue())
    if not received:
        return cpu_data
    return reduce_fn([_load(payload) for payload in received])


def _load(payload: bytes) -> Any:
    # Only what this job's replicas have sent: any object, as XRT's torch.load gave.
    return torch.load(io.BytesIO(payload), weights_only=False)


def _to_cpu(data: Any, convert: bool = True) -> Any:
    return runtime.native("torch_xla.core.xla_model:_maybe_convert_to_cpu")(data, convert=convert)


def do_on_ordinals(
    target: Callable[..., Any], data: Sequence[Any] = (), ordinals: Sequence[int] = (0,)
) -> Any:
    """Runs ``target(*data)``, with tensors on the CPU, on some replicas; then all meet.

    Returns its value there and None elsewhere (v1.12.0 ``do_on_ordinals``).
    """
    running = get_ordinal() in ordinals
    cpu_data = _to_cpu(data, convert=running)
    result = target(*cpu_data) if running else None
    rendezvous("torch_xla.core.xla_model.do_on_ordinals")
    return result


def save(
    data: Any,
    file_or_path: Any,
    master_only: bool = True,
    global_master: bool = False,
) -> None:
    """Saves ``data`` with its tensors on the CPU, then waits for all replicas.

    Args:
      data: anything ``torch.save`` takes.
      file_or_path: a path or a binary file. A path is replaced only when the new file is complete.
      master_only: write on the master of each host only.
      global_master: with ``master_only``, write on ordinal 0 only.

    XRT: v1.12.0 ``save``, which ended with a rendezvous under the tag
    ``torch_xla.core.xla_model.save``; PJRT releases dropped it.
    """
    writes = not master_only or is_master_ordinal(local=not global_master)
    cpu_data = _to_cpu(data, convert=writes)
    if writes:
        if isinstance(file_or_path, (str, os.PathLike)):
            _save_whole(cpu_data, os.fspath(file_or_path))
        else:
            torch.save(cpu_data, file_or_path)
    rendezvous("torch_xla.core.xla_model.save")


def _save_whole(data: Any, path: str) -> None:
    """Writes beside ``path`` and renames, so an interruption leaves the former file in place."""
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        # A device or a pipe is written to, never replaced.
        torch.save(data, target)
        return
    mode = os.stat(target).st_mode & 0o777 if os.path.exists(target) else 0o666 & ~_umask()
    handle, temporary = tempfile.mkstemp(
        prefix="." + os.path.basename(target) + ".", dir=os.path.dirname(target)
    )
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(data, file)
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
