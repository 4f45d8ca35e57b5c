"""Replicas that are late, early, in several places at once, or inside autograd."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met


def me() -> int:
    return xm.get_ordinal()


def world() -> int:
    return xm.xrt_world_size()


def full(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, float(value), device=xm.xla_device())


def total() -> int:
    return sum(range(world()))


def together(functions: List[Callable[[], Any]]) -> List[Any]:
    """Results of functions that run on threads of this replica at the same time."""
    found: Dict[int, Any] = {}

    def body(index: int) -> None:
        found[index] = functions[index]()

    threads = [threading.Thread(target=body, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(len(functions))), "some threads failed or are stuck"
    return [found[i] for i in range(len(functions))]


# -- rendezvous ------------------------------------------------------------------------------------


def check_contract_1_a_tag_is_used_hundreds_of_times() -> None:
    """Each round is a meeting of its own: no payload is from the round before or after."""
    chance = random.Random(me())
    for number in range(300):
        if chance.random() < 0.02:
            time.sleep(0.005)
        found = xm.rendezvous("again", b"%d %d" % (number, me()))
        assert list(found) == [b"%d %d" % (number, o) for o in range(world())]


def check_contract_1_the_tag_is_matched_and_not_the_order_of_arrival() -> None:
    """Threads of the replicas meet under two tags in opposite orders."""

    def first() -> Any:
        return list(xm.rendezvous("tag a", b"a%d" % me()))

    def second() -> Any:
        time.sleep(0.1)
        return list(xm.rendezvous("tag b", b"b%d" % me()))

    a, b = together([first, second] if me() % 2 else [second, first])[:: 1 if me() % 2 else -1]
    assert a == [b"a%d" % o for o in range(world())]
    assert b == [b"b%d" % o for o in range(world())]


def check_contract_1_nobody_passes_before_the_last_has_come() -> None:
    for last in range(world()):
        started = time.monotonic()
        if me() == last:
            time.sleep(0.3)
        came = time.time()
        times = xm.rendezvous("barrier", repr(came).encode())
        assert time.time() >= max(float(t) for t in times)
        assert time.monotonic() - started >= 0.25


def check_contract_3_subsets_that_overlap_meet_one_after_the_other() -> None:
    """A chain of pairs, each pair under a tag of its own, then all under one of these tags."""
    for left in range(world() - 1):
        pair = [left, left + 1]
        if me() in pair:
            found = xm.rendezvous("pair {}".format(left), b"%d" % me(), replicas=pair)
            assert list(found) == [b"%d" % o for o in pair]
    assert len(xm.rendezvous("pair 0")) == world()
    alone = xm.rendezvous("alone", b"x", replicas=[me()])
    assert list(alone) == [b"x"]


def check_contract_3_a_subset_may_meet_while_the_others_reduce_later() -> None:
    """The members of a subset meet many times; the others wait for them in a collective."""
    half = list(range((world() + 1) // 2))
    if me() in half:
        for _ in range(20):
            xm.rendezvous("busy half", b"", half)
    result = xm.all_reduce("sum", full(me(), 3))
    assert result.tolist() == [total()] * 3


def check_payloads_of_20_megabytes() -> None:
    payload = np.random.RandomState(me()).bytes(20 << 20)
    found = xm.rendezvous("20 MB", payload)
    for ordinal, received in enumerate(found):
        assert received == np.random.RandomState(ordinal).bytes(20 << 20)


def check_contract_1_no_graph_is_cut_by_any_meeting() -> None:
    """rendezvous, mesh_reduce of host values and xm.save of host values leave device work alone."""
    path = Path(tempfile.gettempdir()) / "pjrt_compat_no_device_work_{}".format(os.getppid())
    counters = ("MarkStep", "ExecuteComputation", "SyncTensorsGraph")

    def work_done() -> List[Any]:
        return [met.metric_data("ExecuteTime"), *(met.counter_value(name) for name in counters)]

    pending = full(me(), 4) * 2
    # Replicas that are threads share these counters: none may still be at its last check.
    xm.rendezvous("quiet")
    before = work_done()
    xm.rendezvous("no work", "text")
    xm.mesh_reduce("no work", 3.5, max)
    xm.do_on_ordinals(lambda: None)
    xm.save({"epoch": 1}, path)
    after = work_done()
    xm.rendezvous("looked")
    assert after == before
    assert pending.tolist() == [2.0 * me()] * 4
    if me() == 0:
        path.unlink()


def check_contract_2_text_and_bytes_may_meet() -> None:
    payload: Any = "é" if me() % 2 else b"\xff\x00"
    found = xm.rendezvous("kinds", payload)
    assert list(found) == ["é".encode() if o % 2 else b"\xff\x00" for o in range(world())]


def check_helper_threads_meet_while_the_replica_reduces() -> None:
    """Loader and checkpoint threads meet under their own tags; the main thread trains."""
    done = threading.Event()
    rounds: List[int] = []

    def helper() -> None:
        for number in range(50):
            found = xm.rendezvous("helper", b"%d" % number)
            assert list(found) == [b"%d" % number] * world()
            rounds.append(number)
        done.set()

    thread = threading.Thread(target=helper)
    thread.start()
    for step in range(30):
        result = xm.all_reduce("sum", full(me() + step, 20))
        assert result.tolist() == [total() + step * world()] * 20
    thread.join(60)
    assert done.is_set() and len(rounds) == 50


def check_contract_6_reduce_functions_may_be_local_and_see_the_replica() -> None:
    """Never pickled; run on every replica, and its error is that replica's own."""
    offset = 100 * me()
    assert xm.mesh_reduce("local", me(), lambda found: sum(found) + offset) == total() + offset
    nested = {"a": [np.arange(me() + 1), (full(me(), 1), "text")], "b": None}
    found = xm.mesh_reduce("nested", nested, list)
    assert [len(item["a"][0]) for item in found] == [o + 1 for o in range(world())]
    assert [float(item["a"][1][0]) for item in found] == [float(o) for o in range(world())]

    def fails(values: List[int]) -> int:
        if me() == 0:
            raise KeyError("only here")
        return len(values)

    try:
        assert xm.mesh_reduce("fails", 1, fails) == world()
    except KeyError:
        assert me() == 0
    assert xm.mesh_reduce("after", 1, sum) == world()


def check_contract_7_save_is_the_barrier_for_a_slow_master() -> None:
    """Nobody returns before the file is whole, whatever path object names it."""
    directory = xm.rendezvous("dir", (tempfile.mkdtemp() if me() == 0 else "").encode())[0]
    path = Path(directory.decode()) / "w.pt"
    link = path.with_name("link.pt")
    if me() == 0:
        link.symlink_to(path)
        time.sleep(0.3)
    weights = {"w": full(me() + 1, 1000), "shared": [full(2, 3)] * 2}
    xm.save(weights, path, global_master=True)
    assert torch.load(path)["w"].tolist() == [1.0] * 1000
    xm.rendezvous("read")
    xm.save({"w": full(5, 2)}, str(link))
    assert link.is_symlink() and torch.load(path)["w"].tolist() == [5.0, 5.0]
    xm.rendezvous("read")


# -- collectives -----------------------------------------------------------------------------------


def check_contract_15_a_late_replica_holds_up_nobodys_python() -> None:
    """While one replica is late the others wait without holding the interpreter."""
    counted = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    if me() == world() - 1:
        time.sleep(0.5)
    xm.all_reduce("sum", full(1, 2))
    stop.set()
    thread.join(10)
    assert me() == world() - 1 or counted[0] > 50, counted


def check_work_before_a_collective_may_be_uneven() -> None:
    for step in range(4):
        x = full(1, 64, 64)
        for _ in range(5 * ((me() + step) % world())):
            x = (x @ x).clamp(-1, 1)
        result = xm.all_reduce("min", x.sum() * 0 + me())
        assert float(result) == 0.0


def check_a_thread_started_by_a_thread_still_belongs_to_its_replica() -> None:
    def inner() -> float:
        assert xm.xla_device() == device
        return float(xm.all_reduce("sum", full(me(), 1)))

    device = xm.xla_device()
    assert together([lambda: together([inner])[0]]) == [float(total())]


class GatherRows(torch.autograd.Function):
    """Contract 13: collectives in forward and backward, the ordinal asked for in backward."""

    seen: List[Any] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.rows = x.shape[0]
        return xm.all_gather(x, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ordinal = xm.get_ordinal()
        xm.all_reduce("sum", [gradient], scale=1.0 / xm.xrt_world_size())
        return gradient[ordinal * ctx.rows : (ordinal + 1) * ctx.rows]


def check_contract_13_collectives_in_forward_and_backward_of_several_layers() -> None:
    """A contrastive loss through two layers, against one process that holds all rows."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator) for size in ((4, 6), (6, 3))]
    rows = [torch.randn(2, 4, generator=generator) for _ in range(world())]

    own = [w.clone().to(xm.xla_device()).requires_grad_() for w in weights]
    hidden = torch.tanh(rows[me()].to(xm.xla_device()) @ own[0])
    gathered = GatherRows.apply(hidden)
    out = GatherRows.apply(gathered[me() * 2 : me() * 2 + 2] @ own[1])
    (out * out).sum().backward()
    xm.all_reduce("sum", [w.grad for w in own])

    whole = [w.clone().requires_grad_() for w in weights]
    expected = torch.tanh(torch.cat(rows) @ whole[0]) @ whole[1]
    (expected * expected).sum().backward()
    # Each replica's loss sees all rows, and backward averages over replicas twice.
    assert torch.allclose(out.detach().cpu(), expected.detach(), atol=1e-5)
    assert torch.allclose(own[1].grad.cpu(), whole[1].grad, rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]
    assert own[0].grad is not None and bool(torch.isfinite(own[0].grad.cpu()).all())


def check_contract_13_identity_holds_on_the_autograd_thread() -> None:
    found: Dict[str, Any] = {}

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        found.update(
            ordinal=xm.get_ordinal(),
            world=xm.xrt_world_size(),
            local=xm.get_local_ordinal(),
            device=gradient.device,
            own=xm.xla_device(),
            master=xm.is_master_ordinal(),
            payloads=list(xm.rendezvous("in backward", b"%d" % xm.get_ordinal())),
        )
        return gradient

    x = full(1, 3).requires_grad_()
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert found == {
        "ordinal": me(),
        "world": world(),
        "local": xm.get_local_ordinal(),
        "device": xm.xla_device(),
        "own": xm.xla_device(),
        "master": me() == 0,
        "payloads": [b"%d" % o for o in range(world())],
    }


def check_contract_14_optimizer_step_passes_its_arguments_and_barrier() -> None:
    calls: List[Any] = []

    class Recorder(torch.optim.SGD):
        def step(self, closure: Any = None, **keywords: Any) -> Any:
            calls.append(sorted(keywords))
            return super().step(closure)

    p = torch.nn.Parameter(full(0, 2))
    unused = torch.nn.Parameter(full(7, 2))
    optimizer = Recorder([p, unused], lr=1.0)
    (p * float(me())).sum().backward()
    loss = xm.optimizer_step(optimizer, barrier=True, optimizer_args={"extra": 1})
    assert calls == [["extra"]] and loss is None
    assert p.tolist() == [-total() / world()] * 2 and unused.tolist() == [7.0, 7.0]
    p.grad = None
    (p * float(me())).sum().backward()
    gradients = xm._fetch_gradients(optimizer)
    xm.all_reduce("sum", gradients, scale=0.5)
    assert p.grad.tolist() == [total() / 2] * 2  # type: ignore[union-attr]
