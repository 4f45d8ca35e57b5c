"""Collectives move every bit, add in ascending order of ordinal, and take tensors of any length."""

from __future__ import annotations

import pytest

from tests.jobs import Layout, assert_passed, check_names

MODULE = "tests.checks_extremes"
LAYOUTS = [Layout(4, "cpu:2x2"), Layout(3, "cpu:1x3")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", check_names(MODULE))
def test_on_every_replica(name: str, layout: Layout) -> None:
    assert_passed(MODULE, name, layout)
