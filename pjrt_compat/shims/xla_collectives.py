"""The collectives of ``torch_xla.core.xla_model`` as XRT had them.

Each function checks its arguments once and hands over to the path that serves the caller.
"""

from __future__ import annotations

import itertools
from typing import Any, List, Optional, Sequence

import torch

from pjrt_compat.collectives import alone, contract, host, native
from pjrt_compat.collectives.contract import ALONE, HOST, NATIVE, Call, Groups, Tensors
from pjrt_compat.replicas import identity, runtime


class CollectiveContext:
    """What XRT's reductions asked about the layout (v1.12.0 ``CollectiveContext``).

    There is one tier now: no reduction between hosts happens outside the graph or the host path.
    """

    def __init__(self, groups: Groups = None) -> None:
        self.replica_devcount = identity.world_size()
        self.world_size = identity.world_size()
        self.ordinal = identity.ordinal()
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
    description = contract.describe(call, tensors, reduce_type=reduce_type, scale=float(scale))
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
            native.all_gather(t, d, call.groups, out, pin_layout, channel_id, use_global_device_ids)
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
                call, [tensor], reduce_type=reduce_type, scale=float(scale), scatter_dim=dim
            )
            results.append(host.reduce_scatter(call, tensor, reduce_type, scale, dim, description))
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
    own_description = contract.describe(call, tensors, root_ordinal=root)
    # Each group has a root of its own.
    description = contract.describe(call, tensors) if call.groups else own_description
    results = alone.same(tensors) if single else tensors
    for index, received in host.broadcast(call, tensors, root, description, own_description):
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
