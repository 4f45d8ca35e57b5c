"""Extremes of the collectives: special bits, lengths around thresholds, more than one bucket."""

from __future__ import annotations

import copy
import functools
from typing import Any, Dict, List

import torch
import torch_xla.core.xla_model as xm

from pjrt_compat.collectives import host

# One quiet NaN with a payload, a negative one, an infinity, the smallest subnormal, -0.0.
SPECIAL_BITS: Dict[torch.dtype, Any] = {
    torch.float32: (torch.int32, [0x7FC12345, -0x3EDCBB, 0x7F800000, 1, -0x80000000]),
    torch.float64: (torch.int64, [0x7FF8000123456789, -0x7EDCBA, 0x7FF << 52, 1, -(1 << 63)]),
    # Uploading to a device gives the NaNs of float16 one payload.
    torch.float16: (torch.int16, [0x7E00, -0x200, 0x7C00, 1, -0x8000]),
    torch.bfloat16: (torch.int16, [0x7FC5, -0x3B, 0x7F80, 1, -0x8000]),
}


def me() -> int:
    return xm.get_ordinal()


def world() -> int:
    return xm.xrt_world_size()


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def special(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.complex64:
        return torch.view_as_complex(special(torch.float32)[[0, 1, 2, 3, 4, 0]].reshape(3, 2))
    integer, values = SPECIAL_BITS[dtype]
    return torch.tensor(values, dtype=integer).view(dtype)


def every_dtype() -> List[torch.dtype]:
    return [*SPECIAL_BITS, torch.complex64]


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(xm.xla_device())


# -- bits ------------------------------------------------------------------------------------------


def check_what_is_only_moved_keeps_every_bit() -> None:
    """NaN payloads, infinities, subnormals and -0.0 arrive as they were sent."""
    ring = [[o, (o + 1) % world()] for o in range(world())]
    for dtype in every_dtype():
        sent = special(dtype)
        x = on_device(sent.roll(me()))
        rolled = [sent.roll(o) for o in range(world())]
        assert bits(xm.all_gather(x)) == b"".join(bits(r) for r in rolled), dtype
        previous = rolled[(me() - 1) % world()]
        assert bits(xm.collective_permute(x, ring)) == bits(previous), dtype
        wide = on_device(sent.roll(me()).repeat(world(), 1))
        received = xm.all_to_all(wide, 0, 1, world())
        assert bits(received) == b"".join(bits(r) for r in rolled), dtype


def check_no_receivers_value_survives_a_broadcast() -> None:
    """Neither NaN nor infinity of a receiver reaches the result, for every dtype that has them."""
    for dtype in every_dtype():
        plain = torch.tensor([1.5, -0.0, 0.0, -2.0, 3.0])[: len(special(dtype))].to(dtype)
        for root in range(world()):
            own = plain if me() == root else special(dtype)
            assert bits(xm.broadcast(on_device(own), root)) == bits(plain), (dtype, root)
            inputs = [on_device(own), on_device(own[:1])]
            xm.broadcast(inputs, root)
            assert [bits(x) for x in inputs] == [bits(plain), bits(plain[:1])], (dtype, root)


def check_the_roots_special_bits_reach_every_receiver() -> None:
    for dtype in every_dtype():
        root = world() - 1
        own = special(dtype) if me() == root else torch.zeros_like(special(dtype))
        assert bits(xm.broadcast(on_device(own), root)) == bits(special(dtype)), dtype


def check_sums_run_from_the_first_ordinal_to_the_last() -> None:
    """(1e8 + -1e8) + 1 + ...: any other order of addition would round differently."""
    values = ([1e8, -1e8] + [1.0] * world())[: world()]
    x = on_device(torch.tensor([values[me()]]))
    expected = torch.tensor([values[0]])
    for value in values[1:]:
        expected = expected + torch.tensor([value])
    assert bits(xm.all_reduce("sum", x)) == bits(expected)
    backwards = [list(reversed(range(world())))]
    assert bits(xm.all_reduce("sum", x, groups=backwards)) == bits(expected)
    wide = on_device(torch.full((world(),), values[me()]))
    assert bits(xm.reduce_scatter("sum", wide, 1.0, 0, world())) == bits(expected)


# -- lengths ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def pattern(length: int) -> torch.Tensor:
    """No part of it repeats where a misplaced part would hide."""
    return (torch.arange(length, dtype=torch.float32) * 1.25).sin()


def values_of(ordinal: int, length: int) -> torch.Tensor:
    return pattern(length) * (0.7 + ordinal)


def left_to_right(length: int, members: List[int]) -> torch.Tensor:
    total = values_of(members[0], length)
    for ordinal in members[1:]:
        total += values_of(ordinal, length)
    return total


def check_lengths_around_the_threshold_of_shared_work() -> None:
    """32 KiB is 8192 floats: shorter tensors travel whole, longer ones in one part per replica."""
    edge = host._WHOLE_BYTES // 4
    for length in (edge - 1, edge, edge + 1, edge + world() - 1, 2 * edge + 1):
        result = xm.all_reduce("sum", on_device(values_of(me(), length)))
        assert bits(result) == bits(left_to_right(length, list(range(world())))), length


def check_long_tensors_are_reduced_in_groups_of_unequal_size() -> None:
    groups = [[0], list(range(1, world()))]
    own = groups[0] if me() == 0 else groups[1]
    length = 50_021
    result = xm.all_reduce("sum", on_device(values_of(me(), length)), groups=groups)
    assert bits(result) == bits(left_to_right(length, own))


def check_one_tensor_of_many_megabytes() -> None:
    length = 3_000_017
    result = xm.all_reduce("sum", on_device(values_of(me(), length)))
    assert torch.equal(result.cpu(), left_to_right(length, list(range(world()))))
    root = world() - 1
    received = xm.broadcast(on_device(values_of(me(), length)), root)
    assert torch.equal(received.cpu(), values_of(root, length))


def check_a_list_of_more_than_a_bucket() -> None:
    """72 MB in tensors of odd lengths and two dtypes, as a model's parameters and buffers."""
    lengths = [6_000_011, 5, 6_000_011, 6_000_011]
    inputs = [on_device(values_of(me(), length)) for length in lengths]
    inputs.insert(2, on_device(torch.tensor([me()])))
    assert sum(x.numel() * x.element_size() for x in inputs) > host.BUCKET_BYTES
    xm.broadcast(inputs, 1)
    assert int(inputs.pop(2)) == 1
    for x, length in zip(inputs, lengths):
        assert torch.equal(x.cpu(), values_of(1, length)), length
    inputs[0] = on_device(values_of(me(), lengths[0]))
    xm.all_reduce("sum", inputs)
    assert torch.equal(inputs[0].cpu(), left_to_right(lengths[0], list(range(world()))))
    for x, length in zip(inputs[1:], lengths[1:]):
        expected = values_of(1, length)
        for _ in range(world() - 1):
            expected = expected + values_of(1, length)
        assert torch.equal(x.cpu(), expected), length


def check_long_parts_are_scattered_and_exchanged() -> None:
    length = 30_011
    whole = torch.stack([values_of(me() * world() + o, length) for o in range(world())])
    result = xm.reduce_scatter("sum", on_device(whole), 1.0, 0, world())
    total = values_of(me(), length)
    for ordinal in range(1, world()):
        total += values_of(ordinal * world() + me(), length)
    assert bits(result) == bits(total)
    result = xm.all_to_all(on_device(whole), 0, 0, world())
    parts = [values_of(o * world() + me(), length) for o in range(world())]
    assert bits(result) == bits(torch.stack(parts))
    gathered = xm.all_gather(on_device(values_of(me(), length)), 0)
    assert bits(gathered) == b"".join(bits(values_of(o, length)) for o in range(world()))


def check_results_belong_to_the_replica_that_got_them() -> None:
    """A result may be changed in place; neither other replicas nor later calls see that."""
    for length in (3, 40_000):
        x = on_device(torch.ones(length))
        first = xm.all_reduce("sum", x)
        xm.rendezvous("changed now")
        first.mul_(0.0).add_(float(me()))
        xm.mark_step()
        xm.rendezvous("changed")
        assert bits(first) == bits(torch.full((length,), float(me())))
        again = xm.broadcast(x)
        again.add_(float(me()))
        assert bits(again) == bits(torch.full((length,), 1.0 + me()))
        assert bits(x) == bits(torch.ones(length))


# -- programs --------------------------------------------------------------------------------------


def trained(seed: int) -> Dict[str, torch.Tensor]:
    """A few steps of a small network; replicas start from different weights and are broadcast."""
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 70), torch.nn.BatchNorm1d(70), torch.nn.ReLU(), torch.nn.Linear(70, 3)
    )
    with torch.no_grad():
        # Not by torch.manual_seed: replicas that are threads share torch's generator.
        for p in model.parameters():
            p.copy_(values_of(seed + me(), p.numel()).view_as(p))
    model.to(xm.xla_device())
    xm.broadcast_master_param(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x = on_device(values_of(step * world() + me(), 40).reshape(8, 5))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        xm.optimizer_step(optimizer, barrier=True)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def check_training_gives_equal_weights_on_all_replicas_each_time() -> None:
    first, second = trained(1), trained(1)
    parameters = [name for name in first if "running" not in name]
    states = xm.mesh_reduce("weights", copy.deepcopy(first), list)
    for name in parameters:
        assert bits(first[name]) == bits(second[name]), name
        for state in states:
            assert bits(state[name]) == bits(first[name]), name
