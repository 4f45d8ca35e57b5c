"""Checks of meetings on the host and what stands on them, run on every replica."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import tempfile
import threading
import time
from typing import Any, List

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.utils.serialization as xser


def me() -> int:
    return xm.get_ordinal()


def world() -> int:
    return xm.xrt_world_size()


def everyones_directory(name: str) -> str:
    """A directory made by the master, known to all."""
    made = tempfile.mkdtemp() if me() == 0 else ""
    return xm.rendezvous("directory " + name, made.encode())[0].decode()


def check_contract_1_a_rendezvous_is_a_barrier_for_its_tag() -> None:
    directory = everyones_directory("barrier")
    for round_number in range(3):
        time.sleep(0.02 * me())
        open(os.path.join(directory, "{}-{}".format(round_number, me())), "w").close()
        xm.rendezvous("sync-workers")
        seen = [f for f in os.listdir(directory) if f.startswith(str(round_number))]
        assert len(seen) == world(), seen
        xm.rendezvous("read")


def check_contract_1_no_device_work_is_done() -> None:
    x = torch.ones(2, device=xm.xla_device()) * (me() + 7)
    before = met.metric_data("ExecuteTime"), met.counter_value("MarkStep")
    xm.rendezvous("no device work", b"x")
    assert (met.metric_data("ExecuteTime"), met.counter_value("MarkStep")) == before
    assert float(x[0]) == me() + 7


def check_contract_2_payloads_arrive_in_ordinal_order() -> None:
    expected = [b"ORD=%d" % o for o in range(world())]
    assert list(xm.rendezvous("payload", b"ORD=%d" % me())) == expected
    assert list(xm.rendezvous("payload", "ORD={}".format(me()))) == expected
    assert list(xm.rendezvous("payload", bytearray(b"ORD=%d" % me()))) == expected
    assert list(xm.rendezvous("nothing")) == [b""] * world()
    some = [b"" if o else b"only the first" for o in range(world())]
    assert list(xm.rendezvous("some", some[me()])) == some


def check_contract_3_disjoint_subsets_meet_at_the_same_time() -> None:
    half = world() // 2
    mine = list(range(half)) if me() < half else list(range(half, world()))
    found = xm.rendezvous("half {}".format(mine[0]), b"%d" % me(), replicas=mine)
    assert list(found) == [b"%d" % o for o in mine]
    found = xm.rendezvous("backwards {}".format(mine[0]), b"%d" % me(), list(reversed(mine)))
    assert list(found) == [b"%d" % o for o in mine]


def check_contract_4_call_sites_may_differ() -> None:
    """Others wait first, the master does its work and joins at another line."""
    order: List[str] = []
    if me() != 0:
        xm.rendezvous("main process first")
        order.append("after")
    time.sleep(0.1)
    if me() == 0:
        order.append("work")
        xm.rendezvous("main process first")
    assert order == (["work"] if me() == 0 else ["after"])


def check_payloads_of_any_length_are_exchanged() -> None:
    for length in (1, 16 << 10, (16 << 10) + 1, 9 << 20):
        payload = bytes([me() + 1]) * (length + me())
        found = xm.rendezvous("long", payload)
        for ordinal, received in enumerate(found):
            assert received == bytes([ordinal + 1]) * (length + ordinal)


def check_threads_of_a_replica_meet_under_different_tags() -> None:
    found: List[Any] = [None] * 4

    def meet(index: int) -> None:
        time.sleep(0.01 * ((me() + index) % 4))
        found[index] = xm.rendezvous("thread {}".format(index), b"%d %d" % (me(), index))

    threads = [threading.Thread(target=meet, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index in range(4):
        assert list(found[index]) == [b"%d %d" % (o, index) for o in range(world())]


def check_a_tag_is_any_text() -> None:
    for tag in ("", "a b\n", "ü€\N{SNOWMAN}", "x" * 5000, "\udc80"):
        assert len(xm.rendezvous(tag)) == world()


def check_contract_6_mesh_reduce_takes_anything_that_pickles() -> None:
    n = world()
    assert xm.mesh_reduce("int", me(), sum) == sum(range(n))
    assert xm.mesh_reduce("float", float(me()), np.mean) == (n - 1) / 2
    assert xm.mesh_reduce("numpy scalar", np.float64(me()), max) == n - 1
    arrays = xm.mesh_reduce("numpy", np.arange(me() + 1), np.concatenate)
    assert len(arrays) == n * (n + 1) // 2
    spaces = xm.mesh_reduce("object", argparse.Namespace(rank=me()), lambda found: found)
    assert [space.rank for space in spaces] == list(range(n))
    data = {"loss": torch.full((2,), float(me()), device=xm.xla_device()), "n": [me()]}
    found = xm.mesh_reduce("dict", data, lambda dicts: dicts)
    assert [d["loss"].device.type for d in found] == ["cpu"] * n
    assert [float(d["loss"][1]) for d in found] == [float(o) for o in range(n)]
    tensor = torch.arange(me() + 1, device=xm.xla_device())
    assert len(xm.mesh_reduce("unequal", tensor, torch.cat)) == n * (n + 1) // 2


def check_do_on_ordinals_runs_where_it_is_told() -> None:
    x = torch.full((2,), float(me()), device=xm.xla_device())

    def target(value: torch.Tensor) -> float:
        assert value.device.type == "cpu"
        return float(value.sum())

    result = xm.do_on_ordinals(target, (x,), ordinals=(1,))
    assert result == (2.0 if me() == 1 else None)
    assert xm.do_on_ordinals(lambda: "ran") == ("ran" if me() == 0 else None)


def check_contract_7_save_writes_on_the_master_and_then_all_meet() -> None:
    path = os.path.join(everyones_directory("save"), "model.pt")
    data = {"w": torch.full((3,), float(me()), device=xm.xla_device()), "epoch": 3}
    xm.save(data, path)
    loaded = torch.load(path)
    assert loaded["w"].device.type == "cpu"
    assert loaded["w"].tolist() == [0.0] * 3
    xm.rendezvous("loaded")
    assert os.listdir(os.path.dirname(path)) == ["model.pt"]


def check_contract_7_save_on_every_replica() -> None:
    directory = everyones_directory("save all")
    path = os.path.join(directory, "rank{}.pt".format(me()))
    xm.save(torch.tensor([me()], device=xm.xla_device()), path, master_only=False)
    assert torch.load(path).tolist() == [me()]
    assert len(os.listdir(directory)) == world()
    buffer = io.BytesIO()
    xm.save(torch.tensor([me()]), buffer, global_master=True)
    assert (buffer.tell() > 0) == (me() == 0)


def check_an_interrupted_save_leaves_the_old_file() -> None:
    path = os.path.join(everyones_directory("interrupted"), "model.pt")
    xm.save({"version": 1}, path)
    os.chmod(path, 0o640)
    xm.rendezvous("changed")
    failed = False
    try:
        xm.save([torch.zeros(1000), lambda: "does not pickle"], path)
    except (AttributeError, pickle.PicklingError):
        # The others wait in the barrier of save, as they do when the master is late.
        failed = True
        xm.rendezvous("torch_xla.core.xla_model.save")
    assert failed == (me() == 0)
    assert torch.load(path) == {"version": 1}
    xm.rendezvous("checked")
    xm.save({"version": 2}, path)
    assert torch.load(path) == {"version": 2}
    assert os.stat(path).st_mode & 0o777 == 0o640
    assert os.listdir(os.path.dirname(path)) == ["model.pt"]


def check_serialization_save_and_load_meet_too() -> None:
    path = os.path.join(everyones_directory("xser"), "model.pt")
    data = {"w": torch.full((3,), float(me() + 1), device=xm.xla_device()), "b": [1, 2]}
    xser.save(data, path)
    loaded = xser.load(path)
    assert loaded["w"].tolist() == [1.0] * 3 and loaded["b"] == [1, 2]
    xm.rendezvous("loaded")
