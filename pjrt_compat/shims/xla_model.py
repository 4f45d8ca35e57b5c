"""``torch_xla.core.xla_model`` as XRT had it: thin functions with the historic signatures."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys
import tempfile
from typing import Any, Callable, List, Optional, Sequence, TextIO, Tuple, Union

import torch

from pjrt_compat.collectives import alone, contract, host, native
from pjrt_compat.collectives.contract import ALONE, HOST, NATIVE, Call, Groups, Tensors
from pjrt_compat.replicas import identity, isolation, runtime
from pjrt_compat.state import STATE

Device = Union[str, torch.device]

# -- who am I --------------------------------------------------------------------------------------


def get_ordinal(defval: int = 0) -> int:
    """Ordinal of this replica; ``defval`` outside a job. Never starts the runtime.

    XRT read XRT_SHARD_ORDINAL (v1.12.0 ``torch_xla/core/xla_model.py`` ``get_ordinal``); here each
    replica thread has its own.
    """
    return identity.ordinal(defval)


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
    assert devkind is None or devkind in _own_kinds(), "No devices of {} kind (this process has {})".format(
        devkind, _own_kinds()[0]
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

    XRT: v1.12.0 ``rendezvous``, served by the mesh service. No device work is done, so the graph is
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

    Anything that pickles can be data; tensors arrive on the CPU. ``reduce_fn`` runs on every replica
    and is not pickled. In a world of one the data is returned and ``reduce_fn`` is not called, as in
    XRT (v1.12.0 ``mesh_reduce``).
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


# -- collectives -----------------------------------------------------------------------------------


class CollectiveContext:
    """What XRT's reductions asked about the layout (v1.12.0 ``CollectiveContext``).

    There is one tier now: no reduction between hosts happens outside the graph or the host path.
    """

    def __init__(self, groups: Groups = None) -> None:
        self.replica_devcount = xrt_world_size()
        self.world_size = xrt_world_size()
        self.ordinal = get_ordinal()
        self.requires_intercore_reduce = self.world_size > 1
        self.requires_interhost_reduce = False
        self.intercore_group = groups or []
        self.interhost_group = None
        self.is_reduce_host = False


def all_reduce(
    reduce_type: str,
    inputs: Tensors,
    scale: float = 1.0,
    groups: Groups = None,
    cctx: Any = None,
    pin_layout: bool = True,
) -> Tensors:
    """Reduces over the replicas of each group.

    Args:
      reduce_type: ``sum``, ``mul``, ``and``, ``or``, ``min`` or ``max``.
      inputs: a tensor, or a list of tensors that are replaced in place.
      scale: multiplies the result; for integers it is cut to one.
      groups: lists of ordinals; None is one group of all.
      cctx: accepted and not used. A bool is taken as ``pin_layout``, whose place it has had
        since 2.1.
      pin_layout: native path only, passed on to XLA.

    Returns:
      A new tensor, or the list itself. In a world of one a copy, not scaled.

    Raises:
      ValueError: unknown reduce type, bad groups, a tensor on a wrong device.
      TypeError: not tensors, or a dtype the reduce type does not have.
      ReplicaMismatchError: replicas called with different shapes, dtypes or arguments.

    XRT: v1.12.0 ``all_reduce``.
    """
    if isinstance(cctx, bool):
        pin_layout = cctx
    call = contract.begin("all_reduce", groups)
    tensors = contract.check_tensors(call, inputs, "inputs")
    contract.check_reduce_type(call, reduce_type, tensors)
    if call.path == ALONE:
        return alone.same(tensors)[0] if isinstance(inputs, torch.Tensor) else inputs
    if call.path == NATIVE:
        return native.all_reduce(reduce_type, inputs, scale, call.groups, pin_layout)
    description = contract.describe(call, tensors, reduce_type=reduce_type, scale=scale)
    results = host.all_reduce(call, tensors, reduce_type, scale, description)
    if isinstance(inputs, torch.Tensor):
        return host.to_device(call, results[0])
    host.write_back(tensors, results)
    return inputs


def all_gather(
    value: Tensors,
    dim: int = 0,
    groups: Groups = None,
    output: Optional[Tensors] = None,
    pin_layout: bool = True,
    channel_id: Optional[int] = None,
    use_global_device_ids: Optional[bool] = None,
) -> Tensors:
    """Concatenates the values of a group's replicas along ``dim``, in the group's order.

    Args:
      value: a tensor or a list of tensors.
      dim: counted from the end when negative.
      groups: lists of ordinals, all of one length; None is one group of all.
      output: filled and returned instead of new tensors.
      pin_layout, channel_id, use_global_device_ids: native path only, passed on to XLA.

    Raises:
      ValueError: a 0-dimensional value, ``dim`` out of range, bad groups or output.
      TypeError: not tensors.
      ReplicaMismatchError: replicas called with different shapes, dtypes or arguments.

    XRT: v1.12.0 ``all_gather``.
    """
    call = contract.begin("all_gather", groups)
    contract.check_equal_groups(call)
    tensors = contract.check_tensors(call, value)
    dims = [contract.check_dim(call, dim, tensor) for tensor in tensors]
    shapes = [_resized(t, d, t.size(d) * len(call.group)) for t, d in zip(tensors, dims)]
    outputs = _outputs(call, output, tensors, shapes)
    if call.path == NATIVE:
        results = [
            native.all_gather(
                t, d, call.groups, out, pin_layout, channel_id, use_global_device_ids
            )
            for t, d, out in zip(tensors, dims, outputs)
        ]
        return contract.unwrap(value, results)
    if call.path == ALONE:
        results = alone.same(tensors)
    else:
        results = [
            host.all_gather(call, t, d, contract.describe(call, [t], dim=d))
            for t, d in zip(tensors, dims)
        ]
    return contract.unwrap(value, _deliver(call, results, outputs))


def reduce_scatter(
    reduce_type: str,
    input: Tensors,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Optional[Tensors] = None,
    pin_layout: bool = True,
    channel_id: Optional[int] = None,
    use_global_device_ids: Optional[bool] = None,
) -> Tensors:
    """Reduces over a group; each replica keeps its slice of ``scatter_dim``.

    Args:
      reduce_type: as for ``all_reduce``.
      input: a tensor or a list of tensors.
      scale: multiplies the result, also in a world of one.
      scatter_dim: counted from the end when negative.
      shard_count: size of the group.
      groups: lists of ordinals, all of one length; None is one group of all.
      output: filled and returned instead of new tensors.
      pin_layout, channel_id, use_global_device_ids: native path only, passed on to XLA.

    Raises:
      ValueError: ``scatter_dim`` does not divide by ``shard_count``, bad groups, count or output.
      TypeError: not tensors, or a dtype the reduce type does not have.
      ReplicaMismatchError: replicas called with different shapes, dtypes or arguments.

    XRT: v1.12.0 ``reduce_scatter``.
    """
    call = contract.begin("reduce_scatter", groups)
    contract.check_equal_groups(call)
    tensors = contract.check_tensors(call, input, "input")
    contract.check_reduce_type(call, reduce_type, tensors)
    contract.check_shard_count(call, shard_count, "shard_count")
    dims = [contract.check_dim(call, scatter_dim, t, "scatter_dim") for t in tensors]
    for tensor, dim in zip(tensors, dims):
        contract.check_divisible(call, dim, shard_count, tensor)
    shapes = [_resized(t, d, t.size(d) // shard_count) for t, d in zip(tensors, dims)]
    outputs = _outputs(call, output, tensors, shapes)
    if call.path == NATIVE:
        results = [
            native.reduce_scatter(
                reduce_type,
                t,
                scale,
                d,
                shard_count,
                call.groups,
                out,
                pin_layout,
                channel_id,
                use_global_device_ids,
            )
            for t, d, out in zip(tensors, dims, outputs)
        ]
        return contract.unwrap(input, results)
    if call.path == ALONE:
        results = alone.scaled(tensors, scale)
    else:
        results = []
        for tensor, dim in zip(tensors, dims):
            description = contract.describe(
                call, [tensor], reduce_type=reduce_type, scale=scale, scatter_dim=dim
            )
            results.append(
                host.reduce_scatter(call, tensor, reduce_type, scale, dim, description)
            )
    return contract.unwrap(input, _deliver(call, results, outputs))


def _resized(tensor: torch.Tensor, dim: int, size: int) -> List[int]:
    shape = list(tensor.shape)
    shape[dim] = size
    return shape


def _outputs(
    call: Call,
    output: Optional[Tensors],
    tensors: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
) -> List[Optional[torch.Tensor]]:
    if output is None:
        return [None] * len(tensors)
    return list(contract.check_output(call, output, tensors, shapes))


def _deliver(
    call: Call, results: Sequence[torch.Tensor], outputs: Sequence[Optional[torch.Tensor]]
) -> List[torch.Tensor]:
    """Results on the device, in the output tensors where those were given."""
    delivered = []
    for result, output in zip(results, outputs):
        if output is not None:
            host.write_back([output], [result])
            delivered.append(output)
        else:
            delivered.append(host.to_device(call, result) if call.path == HOST else result)
    return delivered


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Splits ``value`` over the group and concatenates what the others sent to this replica.

    Args:
      value: split along ``split_dimension`` into ``split_count`` equal parts; part i goes to the
        i-th replica of the group.
      split_dimension, concat_dimension: counted from the end when negative.
      split_count: size of the group.
      groups: lists of ordinals, all of one length; None is one group of all.
      pin_layout: native path only.

    Raises:
      ValueError: a dimension out of range or not divisible, bad groups or count.
      ReplicaMismatchError: replicas called with different shapes, dtypes or arguments.

    XRT: v1.12.0 ``all_to_all``.
    """
    call = contract.begin("all_to_all", groups)
    contract.check_equal_groups(call)
    tensor = contract.check_tensors(call, [value])[0]
    split = contract.check_dim(call, split_dimension, tensor, "split_dimension")
    concat = contract.check_dim(call, concat_dimension, tensor, "concat_dimension")
    contract.check_shard_count(call, split_count, "split_count")
    contract.check_divisible(call, split, split_count, tensor)
    if call.path == ALONE:
        return alone.same([tensor])[0]
    if call.path == NATIVE:
        return native.all_to_all(tensor, split, concat, split_count, call.groups, pin_layout)
    description = contract.describe(call, [tensor], split_dimension=split, concat_dimension=concat)
    return host.to_device(call, host.all_to_all(call, tensor, split, concat, description))


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Sends ``value`` along (source, target) pairs; replicas that receive nothing get zeros.

    Raises:
      ValueError: an ordinal is unknown, or sends or receives twice.
      ReplicaMismatchError: replicas called with different shapes, dtypes or pairs.

    XRT: v1.12.0 ``collective_permute``.
    """
    call = contract.begin("collective_permute", None)
    tensor = contract.check_tensors(call, [value])[0]
    checked = contract.check_pairs(call, pairs)
    if call.path == ALONE:
        return alone.permuted(tensor, checked)
    if call.path == NATIVE:
        return native.collective_permute(tensor, checked)
    description = contract.describe(call, [tensor], pairs=checked)
    return host.to_device(call, host.collective_permute(call, tensor, checked, description))


def broadcast(
    tensor_or_list: Tensors,
    root_ordinal: int = 0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Tensors:
    """Copies the root replica's values to the other replicas of its group, bit for bit.

    Args:
      tensor_or_list: a tensor, or a list of tensors that are replaced in place.
      root_ordinal: global ordinal of the root; with groups, each group's own.
      groups: lists of ordinals; None is one group of all.
      pin_layout: native path only.

    Returns:
      A new tensor, or the list itself.

    Raises:
      ValueError: the root is not in the caller's group, bad groups, a tensor on a wrong device.
      ReplicaMismatchError: replicas called with different shapes, dtypes or roots.

    XRT had no such function; programs multiplied by zero and summed, which keeps a receiver's NaN.
    """
    return _broadcast("broadcast", tensor_or_list, root_ordinal, groups, pin_layout)


def _broadcast(
    name: str, value: Tensors, root_ordinal: int, groups: Groups, pin_layout: bool
) -> Tensors:
    call = contract.begin(name, groups)
    tensors = contract.check_tensors(call, value, "tensor_or_list")
    root = contract.check_root(call, root_ordinal)
    single = isinstance(value, torch.Tensor)
    if call.path == ALONE:
        return alone.same(tensors)[0] if single else value
    if call.path == NATIVE:
        sent = native.broadcast(call, tensors, root, call.groups, pin_layout)
        if single:
            return sent[0]
        host.write_back(tensors, sent)
        return value
    details = {} if call.groups else {"root_ordinal": root}
    description = contract.describe(call, tensors, **details)
    results = alone.same(tensors) if single else tensors
    for index, received in host.broadcast(call, tensors, root, description):
        host.write_back([results[index]], [received])
    return results[0] if single else value


def collective_broadcast(
    tensors: List[torch.Tensor],
    root_ordinal: int = 0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> None:
    """``broadcast`` of a list in place (v1.13.0 ``collective_broadcast``)."""
    _broadcast("collective_broadcast", list(tensors), root_ordinal, groups, pin_layout)


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Copies parameters and buffers of ordinal 0 to all replicas, then marks a step.

    v1.13.0 ``torch_xla/experimental/pjrt.py`` ``broadcast_master_param``.
    """
    tensors = [t.detach() for t in itertools.chain(model.parameters(), model.buffers())]
    _broadcast("broadcast_master_param", tensors, 0, None, True)
    runtime.mark_step()
