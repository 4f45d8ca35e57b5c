"""XRT's variables become PJRT's settings: what is chosen, what is said, what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Tuple

import pytest

from pjrt_compat import environ
from pjrt_compat.errors import PjrtCompatError
from tests import programs


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
        {"XRT_WORKERS": "tpu_worker:0;grpc://10.0.0.2:8470|tpu_worker:1;grpc://10.0.0.3:8470"},
        {"TPU_IP_ADDRESS": "10.0.0.2"},
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


@pytest.mark.parametrize(
    ("variables", "device"),
    [
        ({"TPU_NUM_DEVICES": "8", "CPU_NUM_DEVICES": "4"}, "TPU"),
        ({"GPU_NUM_DEVICES": "2", "CPU_NUM_DEVICES": "4"}, "CUDA"),
        # What XRT never read decides nothing where something it did read is set.
        ({"TPU_NAME": "my-tpu", "CPU_NUM_DEVICES": "4"}, "CPU"),
        ({"TPUVM_MODE": "0", "CPU_NUM_DEVICES": "4"}, "CPU"),
        (
            {
                "XRT_DEVICE_MAP": "CPU:0;/job:tpu_worker/replica:0/task:0/device:XLA_CPU:0"
                "|TPU:0;/job:tpu_worker/replica:0/task:0/device:TPU:0"
            },
            "TPU",
        ),
    ],
)
def test_several_variables_are_weighed_in_xrts_order(
    variables: Dict[str, str], device: str
) -> None:
    assert translated(variables, chips=4, version="2.8.1")[0]["PJRT_DEVICE"] == device


def test_no_xrt_variable_means_no_choice() -> None:
    assert translated({"PATH": "/bin"}, chips=4) == ({"PATH": "/bin"}, [])


def test_gpu_variables_choose_cuda_where_torch_xla_has_it() -> None:
    assert translated({"GPU_NUM_DEVICES": "2"}, version="2.8.1")[0]["PJRT_DEVICE"] == "CUDA"
    # The name before 2.2.
    assert translated({"GPU_NUM_DEVICES": "2"}, version="2.1.0")[0]["PJRT_DEVICE"] == "GPU"
    device_map = {"XRT_DEVICE_MAP": "GPU:0;/job:localservice/replica:0/task:0/device:XLA_GPU:0"}
    assert translated(device_map, version="2.8.1")[0]["PJRT_DEVICE"] == "CUDA"
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


@pytest.mark.parametrize("variable", ["XRT_DEVICE_MAP", "XRT_WORKERS"])
@pytest.mark.parametrize("value", ["nonsense", "TPU:", "TPU:0;|", ";;|"])
def test_a_malformed_map_is_ignored_with_a_sentence(variable: str, value: str) -> None:
    result, notes = translated({variable: value})
    assert result == {variable: value}
    assert len(notes) == 1
    assert notes[0] == "{}={!r} is malformed; ignored".format(variable, value)


def test_workers_without_a_tpu_say_nothing_about_the_device() -> None:
    assert translated({"XRT_WORKERS": "localservice:0;grpc://localhost:40934"})[1] == []


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
        {"CLOUD_TPU_TASK_ID": "3", "XRT_SHARD_ORDINAL": "6", "TPU_PROCESS_BOUNDS": "2,2,1"},
    ],
)
def test_a_task_id_of_pjrt_stays(variables: Dict[str, str]) -> None:
    result, notes = translated({**variables, "PJRT_DEVICE": "TPU"}, chips=4)
    assert result["CLOUD_TPU_TASK_ID"] == "3"
    assert notes == []


def test_addresses_left_in_the_kaggle_image_are_removed() -> None:
    variables = {
        "PJRT_DEVICE": "TPU",
        "KAGGLE_KERNEL_RUN_TYPE": "Batch",
        "TPU_PROCESS_ADDRESSES": "local",
        "CLOUD_TPU_TASK_ID": "0",
    }
    result, notes = translated(variables)
    assert not {"TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID"} & set(result)
    assert all("Kaggle" in note for note in notes)
    # In a process of a job the same variables are PJRT's own.
    variables["PJRT_LOCAL_PROCESS_RANK"] = "0"
    assert translated(variables) == (variables, [])


def test_xlas_forced_host_device_count_becomes_pjrts_variable() -> None:
    flags = "--xla_force_host_platform_device_count=4"
    result, notes = translated({"PJRT_DEVICE": "CPU", "XLA_FLAGS": flags})
    assert result["CPU_NUM_DEVICES"] == "4"
    assert len(notes) == 1


@pytest.mark.parametrize(
    "variables",
    [
        {"PJRT_DEVICE": "TPU"},
        {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"},
        {"PJRT_DEVICE": "CPU", "PJRT_LOCAL_PROCESS_RANK": "0"},
        {},
    ],
)
def test_the_forced_count_changes_nothing_elsewhere(variables: Dict[str, str]) -> None:
    variables = {**variables, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    assert translated(variables, chips=4) == (variables, [])


def test_tpu_chips_are_told_from_other_devices_of_the_same_vendor(tmp_path: Path) -> None:
    def add_device(name: str, vendor: str, device: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "device").write_text(device + "\n")

    add_device("0000:00:03.0", "0x1ae0", "0x0042")  # a network card of Google's
    add_device("0000:00:04.0", "0x8086", "0x0027")
    (tmp_path / "0000:00:05.0").mkdir()
    assert environ.count_tpu_chips(str(tmp_path)) == 0
    add_device("0000:00:06.0", "0x1ae0", "0x0027")
    add_device("0000:00:07.0", "0x1ae0", "0x005e")
    assert environ.count_tpu_chips(str(tmp_path)) == 2


def test_the_sentences_are_printed_on_one_line_and_once_per_job(tmp_path: Path) -> None:
    outcome = programs.run_source(
        """
        import subprocess, sys
        from pjrt_compat import environ
        from pjrt_compat.state import STATE
        environ.translate_process_environment()
        print(STATE.notes)
        if len(sys.argv) == 1:
            subprocess.run([sys.executable, __file__, "child"], check=True)
        """,
        tmp_path,
        PJRT_DEVICE=None,
        XRT_TPU_CONFIG="localservice;0;localhost:51011",
        XRT_SHARD_ORDINAL="0",
        CLOUD_TPU_TASK_ID="0",
    )
    assert outcome.code == 0, outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert "CLOUD_TPU_TASK_ID" in outcome.err
    assert "PJRT_DEVICE=CPU" in outcome.err


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"XRT_TPU_CONFIG": "x"}, 8),
        ({"XRT_TPU_CONFIG": "x", "TPU_NUM_DEVICES": "4"}, 4),
        ({"XRT_TPU_CONFIG": "x", "TPU_NUM_DEVICES": ""}, 8),
        ({"TPU_NAME": "x"}, None),
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
