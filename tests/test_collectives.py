"""The collectives on CPU replicas, in layouts of processes, threads and both."""

from __future__ import annotations

import pytest

from tests.jobs import Layout, assert_passed, check_names

MODULE = "tests.checks_collectives"
LAYOUTS = [Layout(2), Layout(4), Layout(4, "cpu:2x2"), Layout(4, "cpu:1x4")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", check_names(MODULE))
def test_on_every_replica(name: str, layout: Layout) -> None:
    assert_passed(MODULE, name, layout)
