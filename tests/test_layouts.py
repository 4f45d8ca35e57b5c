"""Topologies by name, and which one a spawn gets."""

from __future__ import annotations

from typing import Optional, Tuple

import pytest

from pjrt_compat.errors import TopologyError
from pjrt_compat.replicas import runtime, topology
from pjrt_compat.replicas.layouts import parse_topology


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("v2-8", (1, 4, 2)),
        ("v3-8", (1, 4, 2)),
        ("v3-32", (4, 4, 2)),
        ("v4-8", (1, 4, 1)),
        ("v4-16", (2, 4, 1)),
        ("v5p-8", (1, 4, 1)),
        ("v5litepod-1", (1, 1, 1)),
        ("v5litepod-4", (1, 4, 1)),
        ("v5litepod-8", (1, 8, 1)),
        ("v5litepod-16", (4, 4, 1)),
        ("v6e-8", (1, 8, 1)),
        ("cpu:2x3", (1, 2, 3)),
        (" CPU:4x1 ", (1, 4, 1)),
    ],
)
def test_a_name_says_hosts_processes_and_replicas(name: str, layout: Tuple[int, int, int]) -> None:
    assert parse_topology(name)[1:] == layout


@pytest.mark.parametrize("name", ["", "v3", "v3-7", "v9-8", "cpu:0x4", "cpu:4", "tpu", "v4-14"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(TopologyError, match="cpu:PxT.*v3-8"):
        parse_topology(name)


@pytest.fixture(autouse=True)
def no_choice_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (topology.VARIABLE, "CPU_NUM_DEVICES", "TPU_NUM_DEVICES", "XRT_TPU_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")


@pytest.mark.parametrize(("nprocs", "replicas"), [(None, 1), (1, 1), (2, 2), (3, 3), (8, 8)])
def test_on_cpu_any_number_of_replicas_is_a_process_each(
    nprocs: Optional[int], replicas: int
) -> None:
    plan = topology.plan_job(nprocs)
    assert (plan.hosts, plan.processes, plan.replicas_per_process) == (1, replicas, 1)


def test_without_nprocs_the_number_is_what_xrt_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM_DEVICES", "3")
    assert topology.plan_job(None).world_size == 3


def test_a_topology_asked_for_fixes_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "v3-8")
    assert topology.plan_job(None)[1:] == (1, 4, 2)
    assert topology.plan_job(8)[1:] == (1, 4, 2)
    assert topology.plan_job(1).world_size == 1
    with pytest.raises(TopologyError, match="nprocs=4.*1 or 8 or None"):
        topology.plan_job(4)


@pytest.mark.parametrize("nprocs", [0, -2])
def test_a_number_below_one_is_refused(nprocs: int) -> None:
    with pytest.raises(TopologyError, match="at least 1"):
        topology.plan_job(nprocs)


@pytest.mark.parametrize("nprocs", ["8", 2.0, True])
def test_a_number_that_is_no_int_is_refused(nprocs: object) -> None:
    with pytest.raises(TypeError, match="nprocs must be an int"):
        topology.plan_job(nprocs)  # type: ignore[arg-type]


def test_several_hosts_are_refused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "v3-32")
    with pytest.raises(TopologyError, match="several hosts"):
        topology.plan_job(None)


def test_on_a_tpu_the_machine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(runtime, "tpu_layout", lambda: (4, 2))
    assert topology.plan_job(None)[1:] == (1, 4, 2)
    assert topology.plan_job(8).local_world_size == 8
    with pytest.raises(TopologyError, match="1 or 8"):
        topology.plan_job(4)
    monkeypatch.setenv(topology.VARIABLE, "v4-8")
    with pytest.raises(TopologyError, match="does not fit this machine"):
        topology.plan_job(None)
