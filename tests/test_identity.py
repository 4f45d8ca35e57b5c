"""Who am I: in replicas that are processes, and in replicas that are threads."""

from __future__ import annotations

import pytest

from tests.jobs import Layout, assert_passed, check_names

MODULE = "tests.checks_identity"
LAYOUTS = [Layout(2), Layout(4, "cpu:2x2")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", check_names(MODULE))
def test_in_a_replica(name: str, layout: Layout) -> None:
    assert_passed(MODULE, name, layout)


@pytest.mark.parametrize("name", check_names(MODULE))
def test_in_a_replica_that_was_forked(name: str) -> None:
    assert_passed(MODULE, name, Layout(2), "fork")
