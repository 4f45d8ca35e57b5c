"""Collectives on the host, for devices whose runtime has none (PJRT's CPU).

Tensors are brought to host memory, exchanged and brought back. Replicas of one process read each
other's memory; those of different processes exchange messages through gloo. Every collective
begins with an agreement of all replicas on what they are about to do: a mismatch is an error
and not a hang, and nothing is sent before everybody is there.

Results do not depend on the layout: reductions run element by element in ascending order of
ordinal.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch

from pjrt_compat.collectives.contract import Call
from pjrt_compat.collectives.transport import Transport, TransportMaker, wait_all
from pjrt_compat.errors import PjrtCompatError
from pjrt_compat.replicas import runtime
from pjrt_compat.replicas.rendezvous import MeetingPlace
from pjrt_compat.state import STATE

# Below this size every replica sends all it has and reduces for itself; above it each replica
# reduces one part for everybody.
_WHOLE_BYTES = 32 << 10
# Lists are exchanged in pieces of about this size, so that memory stays bounded.
BUCKET_BYTES = 64 << 20

_transports = TransportMaker()
_scratch = threading.local()


class Exchange:
    """One collective of one replica, after agreement."""

    def __init__(self, call: Call, place: MeetingPlace, number: int, deposits: Dict[int, Any]):
        self.call = call
        self.place = place
        self.number = number
        self.deposits = deposits
        self.ordinal = call.ordinal
        self.members = sorted(call.group)
        self.local = [o for o in self.members if o in place.replicas]
        self._phase = 0

    @property
    def is_remote(self) -> bool:
        return len(self.local) < len(self.members)

    def transport(self) -> Transport:
        return _transports.get(self.place)

    def process_of(self, ordinal: int) -> int:
        return self.place.processes_of[ordinal]

    def other_processes(self) -> List[int]:
        own = self.place.process
        return sorted({self.process_of(o) for o in self.members} - {own})

    def receiver_of(self, ordinal: int) -> int:
        """Which member here receives what ``ordinal`` sends to the whole process."""
        return self.local[self.members.index(ordinal) % len(self.local)]

    def share(self, payload: Any) -> Dict[int, Any]:
        """Payloads of this phase from the members in this process."""
        self._phase += 1
        name = "{}/{}/{}".format(self.number, self._phase, self.members)
        return self.place.share(self.ordinal, name, tuple(self.members), payload)

    def agree_in_group(self, description: str) -> None:
        """The members of the group confirm what other groups may do differently."""
        name = "{} in group {}".format(self.number, self.members)
        self.place.agree(self.ordinal, name, description, None, tuple(self.members))

    def tag(self, phase: int, source: int, target: int) -> int:
        """Tag of a message; unique among those that can be under way between two processes."""
        source_index = self.place.index_in_process(source)
        target_index = self.place.index_in_process(target) if target >= 0 else 1023
        return ((self.number * 2 + phase) % 2048) << 20 | source_index << 10 | target_index


def begin(call: Call, description: str, deposit: Any) -> Exchange:
    """Agrees with all other replicas on the collective; the process sees every ``deposit``."""
    place = STATE.meeting_place
    if place is None:
        raise PjrtCompatError(
            "{}: the host path needs a job launched by xmp.spawn; this process is not one of "
            "its replicas. Unset PJRT_COMPAT_COLLECTIVES to use XLA's own collectives.".format(
                call.who()
            )
        )
    number = place.next_collective(call.ordinal)
    deposits = place.agree(call.ordinal, str(number), description, deposit)
    return Exchange(call, place, number, deposits)


# -- tensors between device and host ---------------------------------------------------------------


def to_host(tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """Contiguous CPU copies, materialised by one execution for all tensors."""
    if not tensors:
        return []
    detached = [tensor.detach() for tensor in tensors]
    return [t.contiguous() for t in runtime.bindings()._xla_get_cpu_tensors(detached)]


def to_device(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    assert call.replica is not None
    return tensor.to(torch.device("xla", call.replica.device_index))


def write_back(targets: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Replaces the values of device tensors, unseen by autograd, as XRT's in-place ops were."""
    with torch.no_grad():
        for target, result in zip(targets, results):
            target.data.copy_(result)


def buckets(tensors: Sequence[torch.Tensor]) -> Iterator[List[int]]:
    """Indices of neighbouring tensors of one dtype, about BUCKET_BYTES together."""
    chosen: List[int] = []
    size = 0
    for index, tensor in enumerate(tensors):
        length = tensor.numel() * tensor.element_size()
        if chosen and (tensor.dtype != tensors[chosen[0]].dtype or size + length > BUCKET_BYTES):
            yield chosen
            chosen, size = [], 0
        chosen.append(index)
        size += length
    if chosen:
        yield chosen


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like)]


# -- reductions ------------------------------------------------------------------------------------


def _combine(reduce_type: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    if dtype == torch.bool:
        either = reduce_type in ("sum", "or", "max")
        return torch.logical_or if either else torch.logical_and
    functions: Dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "mul": torch.mul,
        "and": torch.bitwise_and,
        "or": torch.bitwise_or,
        "min": torch.minimum,
        "max": torch.maximum,
    }
    return functions[reduce_type]


def reduce_in_order(
    reduce_type: str, values: Sequence[torch.Tensor], scale: float, out: torch.Tensor
) -> None:
    """``out = scale * (values[0] op values[1] op ...)``, from left to right."""
    combine = _combine(reduce_type, out.dtype)
    if len(values) == 1:
        out.copy_(values[0])
    else:
        combine(values[0], values[1], out=out)
    for value in values[2:]:
        combine(out, value, out=out)
    if scale != 1.0:
        # XLA multiplies by a constant of the tensor's dtype: for integers it is cut to one.
        out.mul_(torch.tensor(scale, dtype=torch.float64).to(out.dtype))


def all_reduce_flat(
    exchange: Exchange, own: torch.Tensor, reduce_type: str, scale: float
) -> torch.Tensor:
    """The reduction of a 1-D host tensor of every member.

    The members of this process have deposited theirs. The result is shared by them and must not be
    written to; ``own`` may be overwritten.
    """
    members = exchange.members
    if own.numel() * own.element_size() <= _WHOLE_BYTES:
        gathered = gather_flat(exchange, own)
        out = torch.empty_like(own)
        reduce_in_order(reduce_type, [gathered[o] for o in members], scale, out)
        return out
    bounds = _bounds(own.numel(), len(members))
    position = members.index(exchange.ordinal)
    part = slice(*bounds[position])
    alone_here = len(exchange.local) == 1
    # Without readers in this process the caller's own copy takes the result: the pages of a new
    # tensor cost as much as the exchange.
    out = own if alone_here else exchange.share(torch.empty_like(own))[exchange.local[0]]
    parts = _scatter_parts(exchange, own, bounds)
    values = [parts[o] for o in members]
    if alone_here and position > 1:
        # Writing to the caller's part would destroy a value that is still to come.
        reduce_in_order(reduce_type, values, scale, values[0])
        out[part].copy_(values[0])
    else:
        reduce_in_order(reduce_type, values, scale, out[part])
    if exchange.is_remote:
        _spread_parts(exchange, out, bounds)
    exchange.share(None)
    return out


def _bounds(length: int, parts: int) -> List[Tuple[int, int]]:
    edges = [length * index // parts for index in range(parts + 1)]
    return list(zip(edges[:-1], edges[1:]))


def _scatter_parts(
    exchange: Exchange,
    own: torch.Tensor,
    bounds: List[Tuple[int, int]],
) -> Dict[int, torch.Tensor]:
    """The caller's part of every member's tensor."""
    members = exchange.members
    low, high = bounds[members.index(exchange.ordinal)]
    values = {o: exchange.deposits[o][low:high] for o in exchange.local}
    remote = [o for o in members if o not in exchange.local]
    outgoing = {o: own[slice(*bounds[members.index(o)])] for o in remote}
    received = _scratch_like(own, high - low, len(remote))
    incoming = dict(zip(remote, received))
    _post(exchange, 0, outgoing, incoming)
    values.update(incoming)
    return values


def _spread_parts(exchange: Exchange, out: torch.Tensor, bounds: List[Tuple[int, int]]) -> None:
    """Sends the caller's reduced part to the other processes and receives its share of theirs."""
    members, ordinal = exchange.members, exchange.ordinal
    transport = exchange.transport()
    low, high = bounds[members.index(ordinal)]
    handles = []
    if high > low:
        tag = exchange.tag(1, ordinal, -1)
        handles += [transport.send(out[low:high], p, tag) for p in exchange.other_processes()]
    for other in members:
        low, high = bounds[members.index(other)]
        if other not in exchange.local and exchange.receiver_of(other) == ordinal and high > low:
            tag = exchange.tag(1, other, -1)
            handles.append(transport.receive(out[low:high], exchange.process_of(other), tag))
    wait_all(handles)


def _post(
    exchange: Exchange,
    phase: int,
    outgoing: Dict[int, torch.Tensor],
    incoming: Dict[int, torch.Tensor],
) -> None:
    """Sends each tensor to one member of another process and fills the expected ones."""
    if not outgoing and not incoming:
        return
    transport = exchange.transport()
    handles = []
    for source, tensor in incoming.items():
        if tensor.numel():
            tag = exchange.tag(phase, source, exchange.ordinal)
            handles.append(transport.receive(tensor, exchange.process_of(source), tag))
    for target, tensor in outgoing.items():
        if tensor.numel():
            tag = exchange.tag(phase, exchange.ordinal, target)
            handles.append(transport.send(tensor, exchange.process_of(target), tag))
    wait_all(handles)


def _scratch_like(like: torch.Tensor, length: int, count: int) -> List[torch.Tensor]:
    """Memory for received parts, kept per thread: fresh pages cost more than the copy."""
    size = length * count * like.element_size()
    kept = getattr(_scratch, "memory", None)
    if kept is None or kept.numel() < size:
        kept = _scratch.memory = torch.empty(size, dtype=torch.uint8)
    flat = kept[:size].view(like.dtype)
    return list(flat.view(count, length)) if count else []


# -- gathering and personal exchange ---------------------------------------------------------------


def gather_flat(exchange: Exchange, own: torch.Tensor) -> Dict[int, torch.Tensor]:
    """Every member's 1-D host tensor (all of one length), by ordinal; not to be written to."""
    values = {o: exchange.deposits[o] for o in exchange.local}
    if not exchange.is_remote:
        return values
    transport = exchange.transport()
    handles = []
    mine = {}
    if own.numel():
        tag = exchange.tag(1, exchange.ordinal, -1)
        handles += [transport.send(own, p, tag) for p in exchange.other_processes()]
    for other in exchange.members:
        if other in values or exchange.receiver_of(other) != exchange.ordinal:
            continue
        mine[other] = torch.empty_like(own)
        if own.numel():
            tag = exchange.tag(1, other, -1)
            handles.append(transport.receive(mine[other], exchange.process_of(other), tag))
    wait_all(handles)
    for received in exchange.share(mine).values():
        values.update(received)
    return values


def exchange_personal(
    exchange: Exchange, outgoing: Dict[int, torch.Tensor], incoming: Dict[int, torch.Tensor]
) -> None:
    """Delivers ``outgoing[o]`` to each member ``o``, and fills ``incoming[o]`` with what it sent.

    All tensors are contiguous and on the host.
    """
    shared = exchange.share(outgoing)
    for source, tensor in incoming.items():
        if source in shared:
            tensor.copy_(shared[source][exchange.ordinal])
    local = set(exchange.local)
    _post(
        exchange,
        0,
        {o: t for o, t in outgoing.items() if o not in local},
        {o: t for o, t in incoming.items() if o not in local},
    )


# -- the collectives -------------------------------------------------------------------------------


def all_reduce(
    call: Call, tensors: List[torch.Tensor], reduce_type: str, scale: float, description: str
) -> List[torch.Tensor]:
    """Reduced values as host tensors, in the order of ``tensors``."""
    results: List[torch.Tensor] = []
    for indices in buckets(tensors):
        chosen = to_host([tensors[i] for i in indices])
        flat = flatten(chosen)
        exchange = begin(call, description, flat)
        reduced = all_reduce_flat(exchange, flat, reduce_type, scale)
        results += unflatten(reduced, chosen)
    return results


def all_gather(call: Call, tensor: torch.Tensor, dim: int, description: str) -> torch.Tensor:
    own = to_host([tensor])[0]
    exchange = begin(call, description, own.reshape(-1))
    values = gather_flat(exchange, own.reshape(-1))
    return torch.cat([values[o].view(own.shape) for o in call.group], dim)


def exchange_parts(
    call: Call, tensor: torch.Tensor, dim: int, description: str
) -> Dict[int, torch.Tensor]:
    """The part of every member's tensor, split along ``dim``, that is meant for the caller."""
    own = to_host([tensor])[0]
    exchange = begin(call, description, None)
    parts = [part.contiguous() for part in own.chunk(len(call.group), dim)]
    incoming = {o: torch.empty_like(parts[0]) for o in exchange.members}
    exchange_personal(exchange, dict(zip(call.group, parts)), incoming)
    return incoming


def reduce_scatter(
    call: Call, tensor: torch.Tensor, reduce_type: str, scale: float, dim: int, description: str
) -> torch.Tensor:
    # Members come in ascending order of ordinal.
    values = list(exchange_parts(call, tensor, dim, description).values())
    out = torch.empty_like(values[0])
    reduce_in_order(reduce_type, values, scale, out)
    return out


def all_to_all(
    call: Call, tensor: torch.Tensor, split_dim: int, concat_dim: int, description: str
) -> torch.Tensor:
    received = exchange_parts(call, tensor, split_dim, description)
    return torch.cat([received[o] for o in call.group], concat_dim)


def collective_permute(
    call: Call, tensor: torch.Tensor, pairs: Sequence[Sequence[int]], description: str
) -> torch.Tensor:
    own = to_host([tensor])[0]
    exchange = begin(call, description, None)
    outgoing = {target: own for source, target in pairs if source == exchange.ordinal}
    result = torch.zeros_like(own)
    incoming = {source: result for source, target in pairs if target == exchange.ordinal}
    exchange_personal(exchange, outgoing, incoming)
    return result


def broadcast(
    call: Call, tensors: List[torch.Tensor], root: int, description: str, own_description: str
) -> Iterator[Tuple[int, torch.Tensor]]:
    """Index and host value of every tensor, on the replicas that are not the root.

    All replicas agree on ``description``, those of one group on ``own_description`` too.
    """
    for indices in buckets(tensors):
        chosen = [tensors[i] for i in indices]
        is_root = call.ordinal == root
        flat = flatten(to_host(chosen)) if is_root else None
        exchange = begin(call, description, flat)
        if call.groups:
            exchange.agree_in_group(own_description)
        received = _receive_broadcast(exchange, chosen, root, flat)
        if not is_root:
            yield from zip(indices, unflatten(received, chosen))


def _receive_broadcast(
    exchange: Exchange, like: List[torch.Tensor], root: int, flat: Any
) -> torch.Tensor:
    if root in exchange.local:
        values: torch.Tensor = exchange.deposits[root]
        if flat is not None and values.numel():
            tag = exchange.tag(1, root, -1)
            others = exchange.other_processes()
            wait_all([exchange.transport().send(values, p, tag) for p in others])
        return values
    received = None
    if exchange.receiver_of(root) == exchange.ordinal:
        received = torch.empty(sum(t.numel() for t in like), dtype=like[0].dtype)
        if received.numel():
            tag = exchange.tag(1, root, -1)
            process = exchange.process_of(root)
            wait_all([exchange.transport().receive(received, process, tag)])
    found: torch.Tensor = exchange.share(received)[exchange.receiver_of(root)]
    return found
