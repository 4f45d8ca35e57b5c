"""XRT's variables become PJRT's settings: what is chosen, what is said, what is left alone."""

from __future__ import annotations

from typing import Dict, List, Tuple

import pytest

from pjrt_compat import environ
from pjrt_compat.errors import PjrtCompatError


def translated(
    variables: Dict[str, str], chips: int = 0, version: str = "2.9.0"
) -> Tuple[Dict[str, str], List[str]]:
    result = dict(variables)
    notes = environ.translate(result, tpu_chips=chips, torch_xla_version=version)
    return result, notes


@pytest.mark.parametrize(
    "variables",
    [
        {"XRT_TPU_CONFIG": "localservice;0;localhost:51011"},
        {"COLAB_TPU_ADDR": "10.0.0.2:8470"},
        {"TPU_NAME": "my-tpu"},
        {"TPU_NUM_DEVICES": "8"},
        {"TPUVM_MODE": "1"},
        {"XRT_DEVICE_MAP": "TPU:0;/job:tpu_worker/replica:0/task:0/device:TPU:0"},
        {"XRT_WORKERS": "tpu_worker:0;grpc://10.0.0.2:8470"},
    ],
)
def test_a_tpu_variable_chooses_the_tpu_where_there_is_one(variables: Dict[str, str]) -> None:
    result, notes = translated(variables, chips=4)
    assert result["PJRT_DEVICE"] == "TPU"
    assert len(notes) == 1
    assert "PJRT_DEVICE=TPU" in notes[0]


def test_a_tpu_variable_without_a_tpu_simulates_on_cpu_and_says_so() -> None:
    result, notes = translated({"XRT_TPU_CONFIG": "localservice;0;localhost:51011"})
    assert result["PJRT_DEVICE"] == "CPU"
    assert "no TPU is attached" in notes[0]
    assert "simulated" in notes[0]


def test_a_device_chosen_by_the_user_always_wins() -> None:
    result, notes = translated({"PJRT_DEVICE": "CPU", "XRT_TPU_CONFIG": "x"}, chips=4)
    assert result["PJRT_DEVICE"] == "CPU"
    assert notes == []


def test_no_xrt_variable_means_no_choice() -> None:
    assert translated({"PATH": "/bin"}, chips=4) == ({"PATH": "/bin"}, [])


def test_gpu_variables_choose_cuda_where_torch_xla_has_it() -> None:
    assert translated({"GPU_NUM_DEVICES": "2"}, version="2.8.1")[0]["PJRT_DEVICE"] == "CUDA"
    result, notes = translated({"GPU_NUM_DEVICES": "2"}, version="2.9.0")
    assert result["PJRT_DEVICE"] == "CPU"
    assert "no CUDA support" in notes[0]


@pytest.mark.parametrize(
    "variables",
    [
        {"CPU_NUM_DEVICES": "4"},
        {"XRT_DEVICE_MAP": "CPU:0;/job:localservice/replica:0/task:0/device:XLA_CPU:0"},
    ],
)
def test_cpu_variables_choose_the_cpu(variables: Dict[str, str]) -> None:
    assert translated(variables)[0]["PJRT_DEVICE"] == "CPU"


def test_a_device_map_without_devices_is_ignored_with_a_sentence() -> None:
    result, notes = translated({"XRT_DEVICE_MAP": "nonsense"})
    assert "PJRT_DEVICE" not in result
    assert "names no device" in notes[0]


def test_a_task_id_left_by_an_xrt_launcher_is_removed() -> None:
    result, notes = translated(
        {
            "PJRT_DEVICE": "TPU",
            "CLOUD_TPU_TASK_ID": "1",
            "XRT_SHARD_ORDINAL": "1",
            "TPU_MESH_CONTROLLER_ADDRESS": "10.0.0.1:8476",
            "TPU_MESH_CONTROLLER_PORT": "8476",
        },
        chips=4,
    )
    assert "CLOUD_TPU_TASK_ID" not in result
    assert "TPU_MESH_CONTROLLER_PORT" not in result
    assert "host index" in notes[0]


@pytest.mark.parametrize(
    "variables",
    [
        {"CLOUD_TPU_TASK_ID": "3"},
        {"CLOUD_TPU_TASK_ID": "3", "XRT_SHARD_ORDINAL": "6", "PJRT_LOCAL_PROCESS_RANK": "3"},
    ],
)
def test_a_task_id_of_pjrt_stays(variables: Dict[str, str]) -> None:
    result, notes = translated({**variables, "PJRT_DEVICE": "TPU"}, chips=4)
    assert result["CLOUD_TPU_TASK_ID"] == "3"
    assert notes == []


def test_addresses_left_in_the_kaggle_image_are_removed() -> None:
    result, notes = translated(
        {"PJRT_DEVICE": "TPU", "KAGGLE_KERNEL_RUN_TYPE": "Batch", "TPU_PROCESS_ADDRESSES": "local"}
    )
    assert "TPU_PROCESS_ADDRESSES" not in result
    assert "Kaggle" in notes[0]


def test_xlas_forced_host_device_count_becomes_pjrts_variable() -> None:
    flags = "--xla_force_host_platform_device_count=4"
    result, notes = translated({"PJRT_DEVICE": "CPU", "XLA_FLAGS": flags})
    assert result["CPU_NUM_DEVICES"] == "4"
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"XRT_TPU_CONFIG": "x"}, 8),
        ({"XRT_TPU_CONFIG": "x", "TPU_NUM_DEVICES": "4"}, 4),
        ({"TPU_NUM_DEVICES": "4", "CPU_NUM_DEVICES": "2"}, 4),
        ({"GPU_NUM_DEVICES": "2", "CPU_NUM_DEVICES": "3"}, 2),
        ({"CPU_NUM_DEVICES": "3"}, 3),
    ],
)
def test_the_number_of_replicas_is_what_xrt_would_have_started(
    variables: Dict[str, str], expected: int
) -> None:
    assert environ.requested_replicas(variables) == expected


@pytest.mark.parametrize("text", ["", "many", "0", "-1"])
def test_a_number_of_devices_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(PjrtCompatError, match="CPU_NUM_DEVICES"):
        environ.requested_replicas({"CPU_NUM_DEVICES": text})
