"""The native path: what reaches torch_xla's own functions, without a device that has collectives.

The runtime of a TPU is replaced by its answers here; the graphs themselves need one.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any, Dict, List, Tuple

import pytest
import torch

from pjrt_compat.errors import PjrtCompatWarning
from pjrt_compat.replicas import launch, runtime
from pjrt_compat.replicas.identity import Replica
from pjrt_compat.replicas.launch import Plan
from pjrt_compat.replicas.layouts import parse_topology
from pjrt_compat.replicas.store import StoreAddress
from pjrt_compat.shims import xla_collectives as collectives
from pjrt_compat.state import STATE

Call = Tuple[str, Tuple[Any, ...], Dict[str, Any]]


@pytest.fixture()
def tpu_replica(monkeypatch: pytest.MonkeyPatch) -> List[Call]:
    """This process as replica 1 of 2 on TPU; returns the calls that reach torch_xla."""
    calls: List[Call] = []

    def recorder(name: str, result: Any) -> Any:
        def record(*args: Any, **keywords: Any) -> Any:
            calls.append((name, args, keywords))
            return result

        return record

    monkeypatch.setattr(STATE, "process_replica", Replica(1, 2, 1, 2, 0, 1, 1, 2, 0, "TPU"))
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"):
        target = "torch_xla.core.xla_model:" + name
        monkeypatch.setitem(STATE.originals, target, recorder(name, "result of " + name))
    # Tensors of the test live on the CPU.
    monkeypatch.setattr("pjrt_compat.collectives.contract._check_device", lambda *a: None)
    return calls


def test_all_reduce_hands_over_without_the_context_argument(tpu_replica: List[Call]) -> None:
    x = torch.ones(2)
    assert collectives.all_reduce("sum", x, 0.5, [[0, 1]], None, False) == "result of all_reduce"
    keywords = {"scale": 0.5, "groups": [[0, 1]], "pin_layout": False}
    assert tpu_replica == [("all_reduce", ("sum", x), keywords)]


def test_keywords_of_later_releases_are_passed_only_when_given(tpu_replica: List[Call]) -> None:
    x = torch.ones(2, 2)
    collectives.all_gather(x, -1)
    assert tpu_replica[0][2] == {"dim": 1, "groups": None, "output": None, "pin_layout": True}
    collectives.all_gather(x, channel_id=3)
    assert tpu_replica[1][2]["channel_id"] == 3
    collectives.reduce_scatter("sum", x, 1.0, -1, 2, use_global_device_ids=True)
    assert tpu_replica[2][1] == ("sum", x, 1.0, 1, 2)
    assert tpu_replica[2][2]["use_global_device_ids"] is True


def test_other_collectives_hand_over_what_they_were_given(tpu_replica: List[Call]) -> None:
    x = torch.ones(2, 2)
    collectives.all_to_all(x, 0, -1, 2)
    assert tpu_replica[0][1] == (x, 0, 1, 2)
    collectives.collective_permute(x, [(0, 1), (1, 0)])
    assert tpu_replica[1][1] == (x, [[0, 1], [1, 0]])


def test_broadcast_contributes_nothing_but_neutral_elements_off_the_root(
    tpu_replica: List[Call],
) -> None:
    values = [torch.tensor([float("nan"), 1.0]), torch.tensor([True]), torch.tensor([7])]
    collectives.broadcast(values, root_ordinal=0)
    name, (reduce_type, contributions), keywords = tpu_replica[0]
    assert (name, reduce_type, keywords["pin_layout"]) == ("all_reduce", "sum", True)
    # x + -0.0 is x for every x, also for -0.0.
    assert torch.signbit(contributions[0]).tolist() == [True, True]
    assert contributions[0].tolist() == [0.0, 0.0]
    assert contributions[1].tolist() == [0]
    assert contributions[2].tolist() == [0]


def test_broadcast_contributes_the_value_itself_on_the_root(tpu_replica: List[Call]) -> None:
    x = torch.tensor([-0.0, 3.5])
    collectives.broadcast(x, root_ordinal=1)
    contribution = tpu_replica[0][1][1][0]
    assert contribution.tolist() == [0.0, 3.5]
    assert torch.signbit(contribution).tolist() == [True, False]


def test_the_path_can_be_chosen(tpu_replica: List[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = STATE.process_replica._replace(device_kind="CPU")  # type: ignore[union-attr]
    monkeypatch.setattr(STATE, "process_replica", cpu)
    monkeypatch.setenv("PJRT_COMPAT_COLLECTIVES", "native")
    assert collectives.all_reduce("sum", torch.ones(1)) == "result of all_reduce"


def plan(topology: str) -> Plan:
    return Plan(parse_topology(topology), "TPU", StoreAddress("127.0.0.1", 1), "", False)


@pytest.fixture()
def tpu_runtime(monkeypatch: pytest.MonkeyPatch) -> Dict[Tuple[int, int], int]:
    """Answers of a TPU runtime; the mapping gives ids that differ from the rule."""
    ids: Dict[Tuple[int, int], int] = {}
    task = threading.local()
    monkeypatch.setattr(runtime, "global_device_count", lambda: 8)

    def task_id(process: int) -> int:
        task.value = process
        return process

    monkeypatch.setattr(runtime, "process_task_id", task_id)
    monkeypatch.setattr(
        runtime, "replica_id", lambda index: ids.get((task.value, index), task.value * 2 + index)
    )
    return ids


def test_on_v3_the_ordinal_is_twice_the_task_id_plus_the_index(
    tpu_runtime: Dict[Tuple[int, int], int],
) -> None:
    replicas = [r for process in range(4) for r in launch.make_replicas(process, plan("v3-8"))]
    assert [r.ordinal for r in replicas] == list(range(8))
    assert [r.local_ordinal for r in replicas] == list(range(8))
    assert [r.device_index for r in replicas] == [0, 1] * 4
    assert {r.world_size for r in replicas} == {8}
    assert all(r.shares_process for r in replicas)


def test_the_runtimes_own_number_wins_and_the_difference_is_reported(
    tpu_runtime: Dict[Tuple[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("_PJRT_COMPAT_SAID", raising=False)
    STATE.said.discard("ordinal")
    tpu_runtime[(1, 0)] = 6
    with pytest.warns(PjrtCompatWarning, match="gives ordinal 2 .* the runtime says 6"):
        replicas = launch.make_replicas(1, plan("v3-8"))
    assert [r.ordinal for r in replicas] == [6, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch.make_replicas(1, plan("v3-8"))


def test_the_task_id_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUD_TPU_TASK_ID", "5")
    assert runtime.process_task_id(1) == 5
    monkeypatch.delenv("CLOUD_TPU_TASK_ID")
    assert runtime.process_task_id(1) == 1
