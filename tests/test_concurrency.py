"""Meetings and collectives of replicas that are late, threaded, or inside autograd."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs
from tests.jobs import Layout, assert_passed, check_names

MODULE = "tests.checks_concurrency"
LAYOUTS = [Layout(2), Layout(4, "cpu:2x2"), Layout(4, "cpu:1x4")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", check_names(MODULE))
def test_on_every_replica(name: str, layout: Layout) -> None:
    assert_passed(MODULE, name, layout)


ALONE_IN_SPAWN = """
    import pjrt_compat
    import time
    import torch
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.xla_multiprocessing as xmp

    def never(values):
        raise AssertionError("called in a world of one")

    def f(index):
        started = time.monotonic()
        assert (index, xm.get_ordinal(), xm.xrt_world_size()) == (0, 0, 1)
        assert list(xm.rendezvous("alone", b"x")) == []
        assert xm.mesh_reduce("alone", {"n": 3}, never) == {"n": 3}
        x = torch.ones(2, device=xm.xla_device())
        assert xm.all_gather(x, 0).tolist() == [1.0, 1.0]
        assert xm.broadcast([x])[0] is x
        optimizer = torch.optim.SGD([torch.nn.Parameter(x)], lr=1.0)
        xm.optimizer_step(optimizer, barrier=True)
        xm.save([x], "alone.pt")
        assert torch.load("alone.pt")[0].tolist() == [1.0, 1.0]
        assert time.monotonic() - started < 30
        print("done alone")

    if __name__ == "__main__":
        xmp.spawn(f, nprocs=1)
"""


def test_contract_5_a_spawned_world_of_one_never_waits(tmp_path: Path) -> None:
    outcome = programs.run_source(ALONE_IN_SPAWN, tmp_path, timeout=90)
    assert outcome.code == 0, outcome.err
    assert "done alone" in outcome.out
