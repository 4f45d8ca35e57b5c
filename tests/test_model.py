"""Random collectives against a NumPy model, and the same bits in every layout.

COLLECTIVE_CASES is the number of cases per layout (200); 10000 takes some minutes per layout.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List

import pytest

from tests import jobs
from tests.jobs import Layout, check_names

MODULE = "tests.checks_model"
CASES = int(os.environ.get("COLLECTIVE_CASES", "200"))
TIMEOUT = 120 + CASES * 0.2
FOUR = [Layout(4), Layout(4, "cpu:2x2"), Layout(4, "cpu:1x4")]
LAYOUTS = [Layout(3), *FOUR, Layout(8, "v3-8")]

pytestmark = pytest.mark.timeout(TIMEOUT + 60)


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Dict[Layout, Path]:
    """Where the replicas of each layout leave the digests of their results."""
    return {layout: tmp_path_factory.mktemp("digests") for layout in LAYOUTS}


def run(layout: Layout, digests: Dict[Layout, Path]) -> Dict[str, Dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTIVE_DIGESTS", str(digests[layout]))
        found = jobs.outcomes(MODULE, layout, "spawn", TIMEOUT)
    if isinstance(found, AssertionError):
        raise found
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", check_names(MODULE))
def test_on_every_replica(name: str, layout: Layout, digests: Dict[Layout, Path]) -> None:
    failed = [text for text in run(layout, digests)[name].values() if text]
    assert not failed, failed[0]


def results_of(layout: Layout, digests: Dict[Layout, Path]) -> List[List[str]]:
    run(layout, digests)
    found = [(digests[layout] / str(o)).read_text().split() for o in range(layout.replicas)]
    assert [len(lines) for lines in found] == [CASES] * layout.replicas
    return found


@pytest.mark.parametrize("layout", FOUR[1:], ids=str)
def test_replicas_that_are_threads_get_the_bits_that_processes_get(
    layout: Layout, digests: Dict[Layout, Path]
) -> None:
    assert results_of(layout, digests) == results_of(FOUR[0], digests)
