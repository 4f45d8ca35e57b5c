"""Meetings on the host: contracts 1 to 7 of XRT codebases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs
from tests.jobs import Layout, assert_passed, check_names

MODULE = "tests.checks_rendezvous"
LAYOUTS = [Layout(2), Layout(4, "cpu:2x2"), Layout(4, "cpu:1x4")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", check_names(MODULE))
def test_on_every_replica(name: str, layout: Layout) -> None:
    assert_passed(MODULE, name, layout)


def test_contract_5_a_program_that_runs_alone_passes_at_once(tmp_path: Path) -> None:
    outcome = programs.run_source(
        """
        import pjrt_compat
        import numpy as np, torch
        import torch_xla.core.xla_model as xm

        assert xm.rendezvous("t") == xm.rendezvous("t", b"x", [0]) == []
        assert xm.mesh_reduce("m", np.arange(2), "not called").tolist() == [0, 1]
        assert xm.do_on_ordinals(lambda: 5) == 5
        xm.save({"a": 1}, "file.pt")
        assert torch.load("file.pt") == {"a": 1}
        x = torch.full((2,), 3.0, device=xm.xla_device())
        # As in XRT without replication: copies, and no scale in all_reduce.
        assert xm.all_reduce("sum", x, scale=0.5).tolist() == [3.0, 3.0]
        assert xm.all_reduce("sum", [x], scale=0.5)[0] is x
        assert xm.all_gather(x).tolist() == [3.0, 3.0]
        assert xm.reduce_scatter("sum", x, 0.5, 0, 1).tolist() == [1.5, 1.5]
        assert xm.all_to_all(x, 0, 0, 1).tolist() == [3.0, 3.0]
        assert xm.collective_permute(x, [[0, 0]]).tolist() == [3.0, 3.0]
        assert xm.collective_permute(x, []).tolist() == [0.0, 0.0]
        assert xm.broadcast(x).tolist() == [3.0, 3.0]
        try:
            xm.rendezvous("t", b"", [0, 1])
            raise SystemExit("unknown ordinals were accepted")
        except ValueError as error:
            assert "world has 1" in str(error), error
        """,
        tmp_path,
    )
    assert outcome.code == 0, outcome.err
