"""The example trains to its target, and ends with the same weights in every layout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Dict, Optional

import pytest
import torch

from tests import programs
from tests.programs import ROOT

SCRIPT = "docs/examples/train_digits_xrt.py"


def train(
    path: Path, replicas: int, topology: Optional[str], *arguments: str
) -> Dict[str, torch.Tensor]:
    command = [sys.executable, "-m", "pjrt_compat", "run"]
    if topology:
        command += ["--topology", topology]
    command += [SCRIPT, "--num_cores", str(replicas), "--save", str(path), *arguments]
    outcome = programs.run(command, timeout=200, PYTHONPATH=str(ROOT))
    assert outcome.code == 0, outcome.err
    assert "accuracy" in outcome.out
    return torch.load(path)


def test_four_replicas_reach_the_target_accuracy(tmp_path: Path) -> None:
    """The script exits with 21 below 95 %."""
    train(tmp_path / "model.pt", 4, None)


@pytest.mark.parametrize(
    ("replicas", "topologies"),
    [(1, [None]), (2, [None, "cpu:1x2"]), (4, [None, "cpu:2x2", "cpu:1x4"]), (8, [None, "v3-8"])],
)
def test_layouts_of_one_world_size_end_with_the_same_bits(
    tmp_path: Path, replicas: int, topologies: list[Optional[str]]
) -> None:
    """The script itself checks that all replicas agree with the saved file."""
    short = ("--num_epochs", "2", "--target_accuracy", "0")
    states = [
        train(tmp_path / str(i), replicas, topology, *short)
        for i, topology in enumerate(topologies)
    ]
    for state in states[1:]:
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())


def test_loader_workers_do_not_change_the_result(tmp_path: Path) -> None:
    short = ("--num_epochs", "1", "--target_accuracy", "0")
    without = train(tmp_path / "without", 2, None, *short)
    with_workers = train(tmp_path / "with", 2, None, *short, "--num_workers", "1")
    assert all(torch.equal(value, without[name]) for name, value in with_workers.items())
