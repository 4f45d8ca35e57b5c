"""XRT's environment variables, turned into PJRT's settings before torch_xla is imported.

PJRT reads none of XRT's variables. A PJRT_DEVICE set by the user always wins.
"""

from __future__ import annotations

import glob
import os
import re
import sys

from pjrt_compat.state import STATE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Mapping, MutableMapping, Optional, Tuple

# Any of these meant a TPU under XRT or in the set-up scripts of its time.
_TPU_VARIABLES = (
    "XRT_TPU_CONFIG",
    "COLAB_TPU_ADDR",
    "TPU_NAME",
    "TPU_IP_ADDRESS",
    "TPU_NUM_DEVICES",
    "TPUVM_MODE",
)
# Set by XRT's launcher (v1.12.0 torch_xla/distributed/xla_dist.py), never by PJRT.
_XRT_LAUNCHER_VARIABLES = (
    "XRT_SHARD_ORDINAL",
    "XRT_SHARD_WORLD_SIZE",
    "XRT_MESH_SERVICE_ADDRESS",
    "XRT_LOCAL_WORKER",
    "TPU_MESH_CONTROLLER_ADDRESS",
)
# Set where PJRT itself, or this package, has numbered the processes.
_PJRT_PROCESS_VARIABLES = (
    "PJRT_LOCAL_PROCESS_RANK",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_BOUNDS",
)
_GOOGLE_PCI_VENDOR = "0x1ae0"
_FORCED_HOST_DEVICES = "xla_force_host_platform_device_count"
_SAID_VARIABLE = "_PJRT_COMPAT_TRANSLATED"


def translate_process_environment() -> None:
    """Translates ``os.environ`` and says once per job, on stderr, what was done."""
    notes = translate(
        os.environ, tpu_chips=count_tpu_chips(), torch_xla_version=installed_torch_xla()
    )
    STATE.notes.extend(notes)
    if notes and _SAID_VARIABLE not in os.environ:
        os.environ[_SAID_VARIABLE] = "1"
        sys.stderr.write("pjrt_compat: {}\n".format("; ".join(notes)))


def translate(
    environ: MutableMapping[str, str], *, tpu_chips: int, torch_xla_version: Optional[str]
) -> List[str]:
    """Changes ``environ`` and returns one sentence for each thing done.

    Args:
      environ: the variables, changed in place.
      tpu_chips: number of TPU chips attached to this machine.
      torch_xla_version: version of the torch_xla that will be imported, None when unknown.
    """
    notes: List[str] = []
    _drop_stale_task_id(environ, notes)
    _drop_kaggle_addresses(environ, notes)
    if not environ.get("PJRT_DEVICE"):
        _choose_device(environ, tpu_chips, torch_xla_version, notes)
    _map_forced_host_devices(environ, notes)
    return notes


def requested_replicas(environ: Mapping[str, str]) -> Optional[int]:
    """Replicas per host that XRT would have started, or None when nothing says so.

    The order is that of v1.12.0 ``xla_multiprocessing._get_devices_per_worker``.

    Raises:
      PjrtCompatError: a number of devices is no number.
    """
    if "XRT_TPU_CONFIG" in environ or "TPU_NUM_DEVICES" in environ:
        return _number(environ, "TPU_NUM_DEVICES", 8)
    for variable in ("GPU_NUM_DEVICES", "CPU_NUM_DEVICES", "NEURON_NUM_DEVICES"):
        if variable in environ:
            return _number(environ, variable, 1)
    return None


def count_tpu_chips() -> int:
    """TPU chips on the PCI bus, as ``torch_xla._internal.tpu`` counts them."""
    count = 0
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        try:
            with open(path) as file:
                count += file.read().strip() == _GOOGLE_PCI_VENDOR
        except OSError:  # the device went away
            continue
    return count


def installed_torch_xla() -> Optional[str]:
    """Version of the installed torch_xla, without importing it."""
    from importlib import metadata

    try:
        return metadata.version("torch_xla")
    except metadata.PackageNotFoundError:
        return None


def _choose_device(
    environ: MutableMapping[str, str],
    tpu_chips: int,
    torch_xla_version: Optional[str],
    notes: List[str],
) -> None:
    kind, because = _xrt_device_kind(environ, notes)
    if kind == "TPU" and tpu_chips:
        environ["PJRT_DEVICE"] = "TPU"
        notes.append("{} is set -> PJRT_DEVICE=TPU".format(because))
    elif kind == "TPU":
        environ["PJRT_DEVICE"] = "CPU"
        notes.append(
            "{} is set but no TPU is attached to this machine -> PJRT_DEVICE=CPU, the replicas are "
            "simulated (on a TPU VM set PJRT_DEVICE=TPU)".format(because)
        )
    elif kind == "GPU" and _has_cuda(torch_xla_version):
        environ["PJRT_DEVICE"] = "CUDA"
        notes.append("{} is set -> PJRT_DEVICE=CUDA".format(because))
    elif kind == "GPU":
        environ["PJRT_DEVICE"] = "CPU"
        notes.append(
            "{} is set but torch_xla {} has no CUDA support -> PJRT_DEVICE=CPU (for GPUs install "
            "torch_xla 2.8 or older)".format(because, torch_xla_version)
        )
    elif kind == "CPU":
        environ["PJRT_DEVICE"] = "CPU"
        notes.append("{} is set -> PJRT_DEVICE=CPU".format(because))


def _xrt_device_kind(environ: Mapping[str, str], notes: List[str]) -> Tuple[str, str]:
    """The device kind an XRT program would have had, and the variable that says so."""
    for variable in _TPU_VARIABLES:
        if environ.get(variable):
            return "TPU", variable
    for variable in ("GPU_NUM_DEVICES", "CPU_NUM_DEVICES"):
        if environ.get(variable):
            return variable[:3], variable
    for variable in ("XRT_DEVICE_MAP", "XRT_WORKERS"):
        value = environ.get(variable)
        if not value:
            continue
        kinds = set(re.findall(r"\b(TPU|GPU|CPU):\d+", value))
        kinds |= {name.upper() for name in re.findall(r"\b(tpu)_worker\b", value)}
        for kind in ("TPU", "GPU", "CPU"):
            if kind in kinds:
                return kind, variable
        if variable == "XRT_DEVICE_MAP":
            notes.append("XRT_DEVICE_MAP={!r} names no device; ignored".format(value))
    return "", ""


def _has_cuda(torch_xla_version: Optional[str]) -> bool:
    match = re.match(r"(\d+)\.(\d+)", torch_xla_version or "")
    return match is None or (int(match.group(1)), int(match.group(2))) < (2, 9)


def _drop_stale_task_id(environ: MutableMapping[str, str], notes: List[str]) -> None:
    """XRT's launcher puts a host index where PJRT reads the index of a process."""
    if "CLOUD_TPU_TASK_ID" not in environ:
        return
    if not any(name in environ for name in _XRT_LAUNCHER_VARIABLES):
        return
    if any(name in environ for name in _PJRT_PROCESS_VARIABLES):
        return
    value = environ.pop("CLOUD_TPU_TASK_ID")
    for name in ("TPU_MESH_CONTROLLER_ADDRESS", "TPU_MESH_CONTROLLER_PORT"):
        environ.pop(name, None)
    notes.append(
        "CLOUD_TPU_TASK_ID={} is a host index left by an XRT launcher; removed, because PJRT reads "
        "it as a process index".format(value)
    )


def _drop_kaggle_addresses(environ: MutableMapping[str, str], notes: List[str]) -> None:
    """Kaggle's image sets one worker address where libtpu expects one per process."""
    if "KAGGLE_KERNEL_RUN_TYPE" not in environ or "PJRT_LOCAL_PROCESS_RANK" in environ:
        return
    if "TPU_PROCESS_ADDRESSES" in environ:
        environ.pop("TPU_PROCESS_ADDRESSES")
        environ.pop("CLOUD_TPU_TASK_ID", None)
        notes.append("TPU_PROCESS_ADDRESSES and CLOUD_TPU_TASK_ID of the Kaggle image removed")


def _map_forced_host_devices(environ: MutableMapping[str, str], notes: List[str]) -> None:
    """PJRT's CPU client reads CPU_NUM_DEVICES and ignores XLA's own flag.

    See https://github.com/pytorch/xla/issues/8063.
    """
    match = re.search(_FORCED_HOST_DEVICES + r"=(\d+)", environ.get("XLA_FLAGS", ""))
    if match and environ.get("PJRT_DEVICE") == "CPU" and "CPU_NUM_DEVICES" not in environ:
        environ["CPU_NUM_DEVICES"] = match.group(1)
        notes.append(
            "XLA_FLAGS --{0}={1} -> CPU_NUM_DEVICES={1}".format(
                _FORCED_HOST_DEVICES, match.group(1)
            )
        )


def _number(environ: Mapping[str, str], variable: str, default: int) -> int:
    from pjrt_compat.errors import PjrtCompatError

    text = environ.get(variable)
    if text is None:
        return default
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise PjrtCompatError(
            "{}={!r} is not a number of devices; set it to 1 or more, or unset it".format(
                variable, text
            )
        )
    return number
