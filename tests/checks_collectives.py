"""Checks of the collectives, run on every replica; values are compared with NumPy's."""

from __future__ import annotations

import threading
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import torch
import torch_xla.core.functions as xf
import torch_xla.core.xla_model as xm

import pjrt_compat
from pjrt_compat.collectives import host

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def device() -> torch.device:
    return xm.xla_device()


def me() -> int:
    return xm.get_ordinal()


def world() -> int:
    return xm.xrt_world_size()


def halves() -> List[List[int]]:
    """Two groups, even and odd ordinals; one group of both in a world of two."""
    if world() < 4:
        return [list(range(world()))]
    return [list(range(0, world(), 2)), list(range(1, world(), 2))]


def own_group(groups: Sequence[Sequence[int]]) -> List[int]:
    return next(list(group) for group in groups if me() in group)


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, also dtype and shape."""
    result = result.cpu()
    assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
    assert result.shape == expected.shape, (result.shape, expected.shape)
    assert bits(result) == bits(expected), (result, expected)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


# -- all_reduce ------------------------------------------------------------------------------------


def check_contract_9_a_tensor_is_reduced_into_a_new_one() -> None:
    x = torch.full((2, 3), float(me()), device=device())
    result = xm.all_reduce(xm.REDUCE_SUM, x)
    same(result, torch.full((2, 3), float(sum(range(world())))))
    same(x, torch.full((2, 3), float(me())))


def check_contract_9_a_list_is_reduced_in_place_and_returned() -> None:
    """Mixed dtypes and shapes, used by return value too."""
    a = torch.full((3,), float(me() + 1), device=device())
    b = torch.tensor([[me()]], dtype=torch.int32, device=device())
    inputs = [a, b]
    assert xm.all_reduce("sum", inputs) is inputs
    total = sum(range(world()))
    same(a, torch.full((3,), float(total + world())))
    same(b, torch.tensor([[total]], dtype=torch.int32))


def check_a_list_of_parameters_is_reduced_in_place_under_autograd() -> None:
    p = torch.nn.Parameter(torch.full((2,), float(me()), device=device()))
    xm.all_reduce("max", [p])
    same(p.detach(), torch.full((2,), float(world() - 1)))
    (p * 2).sum().backward()
    same(p.grad, torch.full((2,), 2.0))


def check_contract_10_every_reduce_type_is_a_string() -> None:
    """Reduce types are strings."""
    values = [torch.tensor([1, 6, 3 + o], dtype=torch.int32) for o in range(world())]
    x = values[me()].to(device())
    stacked = np.stack([v.numpy() for v in values])
    expected: Dict[str, Any] = {
        xm.REDUCE_SUM: np.add,
        xm.REDUCE_MUL: np.multiply,
        xm.REDUCE_AND: np.bitwise_and,
        xm.REDUCE_OR: np.bitwise_or,
        xm.REDUCE_MIN: np.minimum,
        xm.REDUCE_MAX: np.maximum,
    }
    for name, function in expected.items():
        same(xm.all_reduce(name, x), torch.from_numpy(function.reduce(stacked)).to(torch.int32))


def check_scale_multiplies_after_the_reduction() -> None:
    x = torch.full((4,), 3.0, device=device())
    same(xm.all_reduce("sum", x, scale=1.0 / world()), torch.full((4,), 3.0))
    same(xm.all_reduce("sum", x, 0.5), torch.full((4,), 1.5 * world()))


def check_groups_reduce_among_themselves() -> None:
    groups = halves()
    x = torch.tensor([float(me())], device=device())
    same(xm.all_reduce("sum", x, groups=groups), torch.tensor([float(sum(own_group(groups)))]))
    inputs = [x]
    xm.all_reduce("max", inputs, 1.0, groups)
    same(x, torch.tensor([float(max(own_group(groups)))]))


def check_the_context_argument_of_xrt_is_accepted() -> None:
    x = torch.ones(1, device=device())
    cctx = xm.CollectiveContext()
    assert (cctx.world_size, cctx.ordinal) == (world(), me())
    same(xm.all_reduce("sum", x, cctx=cctx, pin_layout=False), torch.tensor([float(world())]))
    same(xm.all_reduce("sum", x, 1.0, None, cctx, True), torch.tensor([float(world())]))
    # From 2.1 on the fifth argument is pin_layout.
    same(xm.all_reduce("sum", x, 1.0, None, False), torch.tensor([float(world())]))


def check_every_dtype_is_summed_in_its_own() -> None:
    for dtype in DTYPES:
        values = [(torch.arange(5) + o).to(dtype) for o in range(world())]
        expected = values[0].clone()
        for value in values[1:]:
            expected = expected | value if dtype == torch.bool else expected + value
        same(xm.all_reduce("sum", values[me()].to(device())), expected)


def check_odd_shapes_are_reduced() -> None:
    for shape in [(), (0,), (1,), (3, 0, 2), (7, 5)]:
        x = torch.ones(shape, device=device())
        same(xm.all_reduce("sum", x), torch.full(shape, float(world())))
    base = torch.arange(12.0, device=device()).reshape(3, 4)
    same(xm.all_reduce("sum", base.t()), torch.arange(12.0).reshape(3, 4).t() * world())


def check_large_tensors_are_reduced_in_ordinal_order() -> None:
    """Longer than what travels whole, with a length that no number of replicas divides."""
    length = 100_003
    values = []
    for ordinal in range(world()):
        generator = torch.Generator().manual_seed(ordinal)
        values.append(torch.randn(length, generator=generator))
    expected = values[0].clone()
    for value in values[1:]:
        expected += value
    x = values[me()].to(device())
    for _ in range(3):
        same(xm.all_reduce("sum", x), expected)
    same(x, values[me()])
    groups = halves()
    members = own_group(groups)
    expected = values[members[0]].clone()
    for ordinal in members[1:]:
        expected = torch.maximum(expected, values[ordinal])
    same(xm.all_reduce("max", values[me()].to(device()), groups=groups), expected)


def check_lists_longer_than_a_bucket_are_reduced() -> None:
    host.BUCKET_BYTES, former = 1 << 16, host.BUCKET_BYTES
    try:
        inputs = [torch.full((5000,), float(me() + i), device=device()) for i in range(12)]
        inputs.insert(5, torch.full((3,), me(), device=device()))
        xm.all_reduce("sum", inputs)
        total = sum(range(world()))
        same(inputs.pop(5), torch.full((3,), total))
        for i, x in enumerate(inputs):
            same(x, torch.full((5000,), float(total + i * world())))
    finally:
        host.BUCKET_BYTES = former


# -- gather, scatter, exchange ---------------------------------------------------------------------


def check_contract_12_all_gather_concatenates_in_ordinal_order() -> None:
    values = [torch.arange(6.0).reshape(2, 3) + 10 * o for o in range(world())]
    x = values[me()].to(device())
    for dim in (0, 1, -1, -2):
        for pin_layout in (True, False):
            same(xm.all_gather(x, dim, pin_layout=pin_layout), torch.cat(values, dim))
    same(xm.all_gather(x), torch.cat(values))


def check_all_gather_in_groups_follows_the_groups_order() -> None:
    groups = [list(reversed(group)) for group in halves()]
    x = torch.tensor([me()], device=device())
    same(xm.all_gather(x, groups=groups), torch.tensor(own_group(groups)))


def check_all_gather_fills_the_output() -> None:
    x = torch.tensor([float(me())], device=device())
    out = torch.zeros(world(), device=device())
    assert xm.all_gather(x, output=out) is out
    same(out, torch.arange(float(world())))


def check_all_gather_takes_lists() -> None:
    inputs = [torch.tensor([me()], device=device()), torch.full((1, 2), me(), device=device())]
    a, b = xm.all_gather(inputs)
    same(a, torch.arange(world()))
    same(b, torch.arange(world()).reshape(-1, 1).repeat(1, 2))


def check_reduce_scatter_keeps_ones_slice() -> None:
    values = [torch.arange(4.0 * world()).reshape(2, -1) * (o + 1) for o in range(world())]
    total = sum(values[1:], values[0].clone())
    x = values[me()].to(device())
    for dim in (1, -1):
        result = xm.reduce_scatter("sum", x, 1.0, dim, world())
        same(result, total.chunk(world(), 1)[me()].contiguous())
    result = xm.reduce_scatter(xm.REDUCE_MAX, x, 0.5, 1, world(), pin_layout=False)
    same(result, (values[-1] * 0.5).chunk(world(), 1)[me()].contiguous())


def check_reduce_scatter_in_groups_with_output_and_lists() -> None:
    groups = halves()
    size = len(groups[0])
    position = own_group(groups).index(me())
    x = torch.arange(float(size), device=device()) + me()
    expected = torch.tensor([float(position * size + sum(own_group(groups)))])
    out = torch.zeros(1, device=device())
    assert xm.reduce_scatter("sum", x, 1.0, 0, size, groups, output=out) is out
    same(out, expected)
    results = xm.reduce_scatter("sum", [x, x * 2], 1.0, 0, size, groups=groups)
    same(results[0], expected)
    same(results[1], expected * 2)


def check_all_to_all_exchanges_parts() -> None:
    n = world()
    x = (torch.arange(n * 2) + 100 * me()).reshape(n, 2).to(device())
    result = xm.all_to_all(x, split_dimension=0, concat_dimension=1, split_count=n)
    rows = [(torch.arange(n * 2) + 100 * o).reshape(n, 2)[me() : me() + 1] for o in range(n)]
    same(result, torch.cat(rows, 1))
    groups = halves()
    size = len(groups[0])
    x = torch.arange(size, device=device()) + 100 * me()
    members = own_group(groups)
    expected = torch.tensor([members.index(me()) + 100 * o for o in members])
    same(xm.all_to_all(x, 0, 0, size, groups=groups), expected)


def check_collective_permute_sends_around_a_ring() -> None:
    pairs = [[o, (o + 1) % world()] for o in range(world())]
    x = torch.tensor([me() + 1.0], device=device())
    same(xm.collective_permute(x, pairs), torch.tensor([(me() - 1) % world() + 1.0]))
    # A replica that receives nothing gets zeros.
    result = xm.collective_permute(x, [[0, world() - 1]])
    same(result, torch.tensor([1.0 if me() == world() - 1 else 0.0]))


# -- broadcast -------------------------------------------------------------------------------------


def check_broadcast_of_a_tensor_gives_a_new_one() -> None:
    for root in (0, world() - 1):
        x = torch.tensor([float(me()), -1.0], device=device())
        same(xm.broadcast(x, root), torch.tensor([float(root), -1.0]))
        same(x, torch.tensor([float(me()), -1.0]))
    same(pjrt_compat.broadcast(x), torch.tensor([0.0, -1.0]))


def check_contract_11_broadcast_of_a_list_is_in_place() -> None:
    """Parameters and buffers, integers among them."""
    inputs = [torch.tensor([me()], device=device()), torch.full((2, 2), me() + 0.5).to(device())]
    assert xm.broadcast(inputs, root_ordinal=1) is inputs
    same(inputs[0], torch.tensor([1]))
    same(inputs[1], torch.full((2, 2), 1.5))


def check_broadcast_keeps_every_bit_of_the_root_and_none_of_the_receivers() -> None:
    payload = torch.tensor([0x7FC12345, -0x3EDCBB], dtype=torch.int32).view(torch.float32)
    special = torch.cat([torch.tensor([-0.0, 0.0, float("inf"), float("-inf")]), payload])
    x = special.clone() if me() == 0 else torch.full((6,), float("nan"))
    same(xm.broadcast(x.to(device())), special)
    x = torch.zeros(3) if me() == 0 else torch.tensor([float("inf"), float("nan"), -1.0])
    inputs = [x.to(device())]
    xm.collective_broadcast(inputs)
    same(inputs[0], torch.zeros(3))


def check_broadcast_of_every_dtype_and_shape() -> None:
    for dtype in [*DTYPES, torch.complex64, torch.int16, torch.int8]:
        values = (torch.arange(6) + 3 * me()).to(dtype)
        same(xm.broadcast(values.to(device()), 1), (torch.arange(6) + 3).to(dtype))
    for shape in [(), (0,), (3, 0)]:
        same(xm.broadcast(torch.full(shape, float(me()), device=device())), torch.zeros(shape))
    base = torch.arange(12.0).reshape(3, 4) + me()
    same(xm.broadcast(base.to(device()).t()), torch.arange(12.0).reshape(3, 4).t())


def check_broadcast_in_groups_has_a_root_in_each() -> None:
    groups = halves()
    root = own_group(groups)[-1]
    x = torch.tensor([me()], device=device())
    same(xm.broadcast(x, root, groups), torch.tensor([root]))


def check_broadcast_of_many_tensors_goes_in_buckets() -> None:
    host.BUCKET_BYTES, former = 1 << 14, host.BUCKET_BYTES
    try:
        inputs = [torch.full((1000,), me() * 100 + i).to(device()) for i in range(30)]
        xm.broadcast(inputs, 1)
        for i, x in enumerate(inputs):
            same(x, torch.full((1000,), 100 + i))
    finally:
        host.BUCKET_BYTES = former


def check_broadcast_master_param_copies_parameters_and_buffers() -> None:
    torch.manual_seed(me())
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).to(device())
    model[1].num_batches_tracked.fill_(me() + 5)
    xm.broadcast_master_param(model)
    states = xm.mesh_reduce("state", model.state_dict(), list)
    for state in states[1:]:
        for name, value in state.items():
            assert bits(value) == bits(states[0][name]), name
    assert int(states[0]["1.num_batches_tracked"]) == 5


# -- what stands on them ---------------------------------------------------------------------------


def check_contract_14_optimizer_step_averages_gradients() -> None:
    p = torch.nn.Parameter(torch.zeros(2, device=device()))
    optimizer = torch.optim.SGD([p], lr=1.0)
    (p * float(me() + 1)).sum().backward()
    xm.optimizer_step(optimizer, barrier=True)
    mean = sum(range(1, world() + 1)) / world()
    same(p.detach(), torch.full((2,), -mean))
    optimizer.zero_grad()
    (p * float(me())).sum().backward()
    xm.reduce_gradients(optimizer)
    assert float(p.grad[0]) == sum(range(world())) / world()  # type: ignore[index]


class GatherInBackward(torch.autograd.Function):
    """Contract 13, after the pattern of self-supervised training codes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return xm.all_gather(x, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        summed = xm.all_reduce("sum", gradient)
        size = summed.shape[0] // xm.xrt_world_size()
        return summed[xm.get_ordinal() * size : (xm.get_ordinal() + 1) * size]


def check_contract_13_collectives_work_inside_backward() -> None:
    x = torch.full((2,), float(me()), device=device(), requires_grad=True)
    gathered = GatherInBackward.apply(x)
    weights = torch.arange(2.0 * world(), device=device()) * (me() + 1)
    (gathered * weights).sum().backward()
    factor = sum(range(1, world() + 1))
    same(x.grad, torch.arange(2.0 * world())[2 * me() : 2 * me() + 2] * factor)


def check_torch_xlas_differentiable_collectives_work() -> None:
    x = torch.full((2,), float(me()), device=device(), requires_grad=True)
    xf.all_reduce("sum", x * 2).sum().backward()
    # XRT passes the gradient of a sum through unreduced (v1.12.0 torch_xla/core/functions.py).
    same(x.grad, torch.full((2,), 2.0))
    y = torch.full((1,), float(me()), device=device(), requires_grad=True)
    gathered = xf.all_gather(y)
    same(gathered.detach(), torch.arange(float(world())))


def check_a_helper_thread_may_call_a_collective() -> None:
    found: List[Optional[float]] = []

    def body() -> None:
        found.append(float(xm.all_reduce("sum", torch.ones(1, device=xm.xla_device()))))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert found == [float(world())]


def check_contract_15_replicas_may_run_different_programs_around_a_collective() -> None:
    """XRT replicas were processes of their own; only the collectives must match."""
    x = torch.ones(3, device=device())
    for _ in range(me()):
        x = torch.sin(x) + me()
        if me() % 2:
            xm.mark_step()
    y = xm.all_reduce("max", torch.full((1,), float(me()), device=device()))
    same(y, torch.tensor([world() - 1.0]))
