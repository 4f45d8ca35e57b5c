"""What a collective accepts: checked once, before either path runs.

The signatures and rules are those of torch_xla 1.12/1.13, with the keywords that later releases
added.
"""

from __future__ import annotations

import operator
import os
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from pjrt_compat.errors import PjrtCompatError
from pjrt_compat.replicas import identity, runtime
from pjrt_compat.replicas.identity import Replica
from pjrt_compat.state import STATE

VARIABLE = "PJRT_COMPAT_COLLECTIVES"
ALONE = "alone"
HOST = "host"
NATIVE = "native"

REDUCE_TYPES = ("sum", "mul", "and", "or", "min", "max")

Groups = Optional[Sequence[Sequence[int]]]
Tensors = Union[torch.Tensor, List[torch.Tensor]]


class Call(NamedTuple):
    """One collective as one replica calls it.

    Attributes:
      name: of the function, for messages.
      replica: the caller; None for a program that runs alone.
      path: ``alone``, ``host`` or ``native``.
      group: ordinals of the caller's group, in the order given.
      groups: all groups, or None for one group of all replicas.
    """

    name: str
    replica: Optional[Replica]
    path: str
    group: Tuple[int, ...]
    groups: Optional[List[List[int]]]

    @property
    def ordinal(self) -> int:
        return self.replica.ordinal if self.replica is not None else identity.ordinal()

    @property
    def position(self) -> int:
        """Index of the caller in its group."""
        return self.group.index(self.ordinal)

    def who(self) -> str:
        return "xm.{} on {}".format(self.name, self.replica or "a program that runs alone")


def begin(name: str, groups: Groups) -> Call:
    """Finds out who calls and which path serves it, and checks the groups.

    Raises:
      ValueError: groups overlap, name ordinals that do not exist or do not hold the caller.
      TypeError: groups is not a list of lists of int.
      PjrtCompatError: the caller is a process that only launches replicas.
    """
    replica = identity.current_replica()
    world_size = replica.world_size if replica is not None else identity.world_size()
    if replica is None and world_size == 1 and any(job.is_running() for job in STATE.jobs):
        raise PjrtCompatError(
            "xm.{} was called outside a replica, in the process that launched {} replica(s) which "
            "are still running: a collective must be called by the function given to "
            "xmp.spawn".format(name, STATE.jobs[-1].topology.world_size)
        )
    call = Call(name, replica, _path(replica, world_size), tuple(range(world_size)), None)
    if not groups:
        return call
    checked = _check_groups(call, groups, world_size)
    own = [group for group in checked if call.ordinal in group]
    if not own:
        raise ValueError(
            "{}: no group of groups={} holds ordinal {}".format(call.who(), checked, call.ordinal)
        )
    return call._replace(group=tuple(own[0]), groups=checked)


def _path(replica: Optional[Replica], world_size: int) -> str:
    if world_size == 1:
        return ALONE
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in ("auto", HOST, NATIVE):
        raise PjrtCompatError(
            "{}={!r} is unknown; use auto, host or native".format(VARIABLE, choice)
        )
    if choice != "auto":
        return choice
    return HOST if replica is not None and replica.device_kind == "CPU" else NATIVE


def _check_groups(call: Call, groups: Sequence[Sequence[int]], world_size: int) -> List[List[int]]:
    try:
        checked = [[operator.index(ordinal) for ordinal in group] for group in groups]
    except (TypeError, ValueError):
        raise TypeError(
            "{}: groups must be a list of lists of int, such as [[0, 1], [2, 3]], not {!r}".format(
                call.who(), groups
            )
        ) from None
    members = [ordinal for group in checked for ordinal in group]
    unknown = sorted({o for o in members if not 0 <= o < world_size})
    if unknown:
        raise ValueError(
            "{}: groups={} names ordinals {} but the world has {} replica(s)".format(
                call.who(), checked, unknown, world_size
            )
        )
    twice = sorted({o for o in members if members.count(o) > 1})
    if twice:
        raise ValueError("{}: groups={} overlap in {}".format(call.who(), checked, twice))
    return checked


def check_equal_groups(call: Call) -> None:
    """Raises ValueError when the groups have different sizes."""
    if call.groups and len({len(group) for group in call.groups}) > 1:
        raise ValueError(
            "{}: all groups must have the same number of replicas, got groups={}".format(
                call.who(), call.groups
            )
        )


def check_reduce_type(call: Call, reduce_type: Any, tensors: Sequence[torch.Tensor]) -> str:
    """Raises ValueError for an unknown type, TypeError for one that the dtype does not have."""
    if reduce_type not in REDUCE_TYPES:
        raise ValueError(
            "{}: unknown reduce type {!r}; use one of {}".format(
                call.who(), reduce_type, ", ".join(repr(t) for t in REDUCE_TYPES)
            )
        )
    for tensor in tensors:
        fractional = tensor.is_floating_point() or tensor.is_complex()
        if reduce_type in ("and", "or") and fractional:
            raise TypeError(
                "{}: {!r} needs an integer or bool tensor, got {}".format(
                    call.who(), reduce_type, tensor.dtype
                )
            )
        if reduce_type in ("min", "max") and tensor.is_complex():
            raise TypeError(
                "{}: {!r} of complex numbers is not defined".format(call.who(), reduce_type)
            )
    return str(reduce_type)


def check_tensors(call: Call, value: Any, argument: str = "value") -> List[torch.Tensor]:
    """The tensors of ``value`` as a list.

    Raises:
      TypeError: it is neither a tensor nor a list or tuple of tensors.
      ValueError: a tensor is not on the caller's device.
    """
    tensors = [value] if isinstance(value, torch.Tensor) else value
    if not isinstance(tensors, (list, tuple)) or not all(
        isinstance(t, torch.Tensor) for t in tensors
    ):
        raise TypeError(
            "{}: `{}` must be a tensor or a list of tensors, not {}".format(
                call.who(), argument, _type_name(value)
            )
        )
    for tensor in tensors:
        _check_device(call, tensor, argument)
    return list(tensors)


def _check_device(call: Call, tensor: torch.Tensor, argument: str) -> None:
    device = tensor.device
    if device.type != "xla":
        raise ValueError(
            "{}: `{}` is on device {}; move it to xm.xla_device() first".format(
                call.who(), argument, device
            )
        )
    if call.replica is not None and device.index not in (None, call.replica.device_index):
        raise ValueError(
            "{}: `{}` is on {}, which is another replica's device; the caller's own is xla:{} "
            "(use xm.xla_device() without arguments)".format(
                call.who(), argument, device, call.replica.device_index
            )
        )


def check_dim(call: Call, dim: Any, tensor: torch.Tensor, argument: str = "dim") -> int:
    """``dim`` counted from the front.

    Raises:
      ValueError: the tensor has no dimensions or not that one.
    """
    if tensor.dim() == 0:
        raise ValueError(
            "{}: a 0-dimensional tensor has no dimension to work along; use "
            "tensor.reshape(1)".format(call.who())
        )
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            "{}: {}={} is out of range for shape {}".format(
                call.who(), argument, dim, tuple(tensor.shape)
            )
        )
    return int(dim) % tensor.dim()


def check_divisible(call: Call, dim: int, parts: int, tensor: torch.Tensor) -> None:
    """Raises ValueError when dimension ``dim`` does not split into ``parts`` equal ones."""
    if tensor.size(dim) % parts:
        raise ValueError(
            "{}: dimension {} of shape {} does not divide by {}".format(
                call.who(), dim, tuple(tensor.shape), parts
            )
        )


def check_output(
    call: Call, output: Any, like: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
) -> List[torch.Tensor]:
    """The tensors of ``output``; each must have the result's dtype and shape.

    Raises:
      TypeError: not a tensor, or not a list where the input is one.
      ValueError: another number of tensors, dtype or shape.
    """
    outputs = check_tensors(call, output, "output")
    if len(outputs) != len(like):
        raise ValueError(
            "{}: `output` has {} tensor(s), the input {}".format(
                call.who(), len(outputs), len(like)
            )
        )
    for out, value, shape in zip(outputs, like, shapes):
        if tuple(out.shape) != tuple(shape) or out.dtype != value.dtype:
            raise ValueError(
                "{}: `output` must be {}{}, got {}{}".format(
                    call.who(), value.dtype, tuple(shape), out.dtype, tuple(out.shape)
                )
            )
    return outputs


def check_shard_count(call: Call, count: Any, argument: str) -> None:
    if count != len(call.group):
        raise ValueError(
            "{}: {}={} must be the size of the group, {}".format(
                call.who(), argument, count, len(call.group)
            )
        )


def check_root(call: Call, root_ordinal: Any) -> int:
    """The root of the caller's group.

    It is a global ordinal, so with groups the replicas of each group pass their own (v1.13.0
    ``xm.collective_broadcast`` fills the groups that lack the root with zeros).

    Raises:
      TypeError: it is no int.
      ValueError: it is not in the caller's group.
    """
    if isinstance(root_ordinal, bool) or not isinstance(root_ordinal, int):
        raise TypeError(
            "{}: root_ordinal must be an int, not {}".format(call.who(), _type_name(root_ordinal))
        )
    if root_ordinal in call.group:
        return root_ordinal
    for group in call.groups or []:
        if root_ordinal in group:
            raise ValueError(
                "{}: root_ordinal={} is not in the caller's group {}; pass each group's "
                "own root".format(call.who(), root_ordinal, list(call.group))
            )
    raise ValueError(
        "{}: root_ordinal={} is not one of the replicas {}".format(
            call.who(), root_ordinal, list(call.group)
        )
    )


def check_pairs(call: Call, pairs: Any) -> List[List[int]]:
    """The (source, target) pairs of a permutation.

    Raises:
      ValueError: an ordinal is unknown, or sends or receives twice.
    """
    checked = [[int(source), int(target)] for source, target in pairs]
    for side, name in ((0, "source"), (1, "target")):
        ordinals = [pair[side] for pair in checked]
        unknown = sorted({o for o in ordinals if o not in call.group})
        twice = sorted({o for o in ordinals if ordinals.count(o) > 1})
        if unknown or twice:
            raise ValueError(
                "{}: pairs={}: {} ordinal(s) {} {}".format(
                    call.who(),
                    checked,
                    name,
                    unknown or twice,
                    "do not exist" if unknown else "appear more than once",
                )
            )
    return checked


def describe(call: Call, tensors: Sequence[torch.Tensor], **details: Any) -> str:
    """What all replicas must agree on, as one line."""
    parts = ["[{}]".format(", ".join(describe_tensor(t) for t in tensors))]
    parts += ["{}={!r}".format(name, value) for name, value in sorted(details.items())]
    if call.groups:
        parts.append("groups={}".format(call.groups))
    return "xm.{}({})".format(call.name, ", ".join(parts))


def describe_tensor(tensor: torch.Tensor) -> str:
    return "{}{}".format(str(tensor.dtype)[6:], tuple(tensor.shape))


def _type_name(value: Any) -> str:
    if isinstance(value, (list, tuple)) and value:
        return "{} of {}".format(type(value).__name__, type(value[0]).__name__)
    return type(value).__name__


def unwrap(value: Any, results: List[torch.Tensor]) -> Tensors:
    """One tensor for one tensor, a list for a list."""
    return results[0] if isinstance(value, torch.Tensor) else results


def native(name: str) -> Any:
    """torch_xla's own implementation of ``xm.<name>``."""
    return runtime.native("torch_xla.core.xla_model:" + name)
