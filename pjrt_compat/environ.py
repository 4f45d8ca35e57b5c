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
    from typing import List, Mapping, MutableMapping, Optional, Set, Tuple

# What XRT itself read, in its order: the first that is set decides.
_DEVICE_VARIABLES = (
    ("XRT_TPU_CONFIG", "TPU"),
    ("TPU_NUM_DEVICES", "TPU"),
    ("TPUVM_MODE", "TPU"),
    ("GPU_NUM_DEVICES", "GPU"),
    ("CPU_NUM_DEVICES", "CPU"),
)
# Set around TPUs by notebooks and set-up scripts of XRT's time; asked last.
_TPU_HINTS = ("COLAB_TPU_ADDR", "TPU_NAME", "TPU_IP_ADDRESS")
_DEVICE_MAP_ENTRY = re.compile(r"(TPU|GPU|CPU):\d+;/job:")
_WORKER_ENTRY = re.compile(r"(\w+):\d+;(grpc://)?[\w.\-]+:\d+")
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
# TPU v2 and v3, v4, v5e, v6e, 7x, and two for testing. Google's network cards and disks have the
# same vendor, so the vendor alone would find a TPU on any of its virtual machines.
_TPU_PCI_DEVICES = ("0x0027", "0x005e", "0x0063", "0x006f", "0x0076", "0x0056", "0x0062")
_PCI_DIRECTORY = "/sys/bus/pci/devices"
_FORCED_HOST_DEVICES = "xla_force_host_platform_device_count"
_SAID_VARIABLE = "_PJRT_COMPAT_TRANSLATED"


def translate_process_environment() -> None:
    """Translates ``os.environ`` and says once per job, on stderr, what was done."""
    # Looking for the version costs more than all the rest.
    names_gpu = "GPU" in os.environ.get("XRT_DEVICE_MAP", "") or "GPU_NUM_DEVICES" in os.environ
    version = installed_torch_xla() if names_gpu else None
    notes = translate(os.environ, tpu_chips=count_tpu_chips(), torch_xla_version=version)
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
    if "PJRT_LOCAL_PROCESS_RANK" in environ:  # a process of a job: PJRT's variables are its own
        return notes
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
        return _number(environ, "TPU_NUM_DEVICES") if environ.get("TPU_NUM_DEVICES") else 8
    for variable in ("GPU_NUM_DEVICES", "CPU_NUM_DEVICES", "NEURON_NUM_DEVICES"):
        if variable in environ:
            return _number(environ, variable)
    return None


def count_tpu_chips(directory: str = _PCI_DIRECTORY) -> int:
    """TPU chips on the PCI bus, as ``torch_xla._internal.tpu`` counts them."""
    return sum(
        _read_pci_id(device, "vendor") == _GOOGLE_PCI_VENDOR
        and _read_pci_id(device, "device") in _TPU_PCI_DEVICES
        for device in glob.glob(os.path.join(directory, "*"))
    )


def _read_pci_id(device: str, name: str) -> str:
    try:
        with open(os.path.join(device, name), encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # the device went away
        return ""


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
    elif kind == "GPU":
        device = _gpu_device(torch_xla_version)
        environ["PJRT_DEVICE"] = device
        notes.append(
            "{} is set -> PJRT_DEVICE={}".format(because, device)
            if device != "CPU"
            else "{} is set but torch_xla {} has no CUDA support -> PJRT_DEVICE=CPU (for GPUs "
            "install torch_xla 2.8 or older)".format(because, torch_xla_version)
        )
    elif kind == "CPU":
        environ["PJRT_DEVICE"] = "CPU"
        notes.append("{} is set -> PJRT_DEVICE=CPU".format(because))


def _xrt_device_kind(environ: Mapping[str, str], notes: List[str]) -> Tuple[str, str]:
    """The device kind an XRT program would have had, and the variable that says so."""
    for variable, kind in _DEVICE_VARIABLES:
        if _is_set(environ, variable):
            return kind, variable
    for variable, kinds_of in (
        ("XRT_DEVICE_MAP", _device_map_kinds),
        ("XRT_WORKERS", _worker_kinds),
    ):
        if not _is_set(environ, variable):
            continue
        kinds = kinds_of(environ[variable])
        if kinds is None:
            notes.append("{}={!r} is malformed; ignored".format(variable, environ[variable]))
            continue
        for kind in ("TPU", "GPU", "CPU"):
            if kind in kinds:
                return kind, variable
    for variable in _TPU_HINTS:
        if _is_set(environ, variable):
            return "TPU", variable
    return "", ""


def _is_set(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable, "").strip()
    return value.lower() not in ("", "0", "false") if variable == "TPUVM_MODE" else value != ""


def _device_map_kinds(value: str) -> Optional[Set[str]]:
    """Kinds in ``CPU:0;/job:localservice/replica:0/task:0/device:XLA_CPU:0|...``."""
    matches = [_DEVICE_MAP_ENTRY.match(entry) for entry in value.split("|")]
    found = {match.group(1) for match in matches if match}
    return found if all(matches) else None


def _worker_kinds(value: str) -> Optional[Set[str]]:
    """Kinds in ``tpu_worker:0;grpc://10.0.0.2:8470|...``; only a TPU's workers are named so."""
    matches = [_WORKER_ENTRY.match(entry) for entry in value.split("|")]
    names = {match.group(1).lower() for match in matches if match}
    if not all(matches):
        return None
    return {"TPU"} if any("tpu" in name for name in names) else set()


def _gpu_device(torch_xla_version: Optional[str]) -> str:
    """PJRT's name of a GPU: 2.1 knows ``GPU`` only, 2.9 knows none."""
    match = re.match(r"(\d+)\.(\d+)", torch_xla_version or "")
    version = (int(match.group(1)), int(match.group(2))) if match else (2, 8)
    if version >= (2, 9):
        return "CPU"
    return "CUDA" if version >= (2, 2) else "GPU"


def _drop_stale_task_id(environ: MutableMapping[str, str], notes: List[str]) -> None:
    """XRT's launcher puts a host index where PJRT reads the index of a process."""
    if not any(name in environ for name in _XRT_LAUNCHER_VARIABLES):
        return
    if any(name in environ for name in _PJRT_PROCESS_VARIABLES):
        return
    value = environ.pop("CLOUD_TPU_TASK_ID", None)
    if value is not None:
        notes.append(
            "CLOUD_TPU_TASK_ID={} is a host index left by an XRT launcher; removed, because PJRT "
            "reads it as a process index".format(value)
        )
    for name in ("TPU_MESH_CONTROLLER_ADDRESS", "TPU_MESH_CONTROLLER_PORT"):
        if environ.pop(name, None) is not None:
            notes.append("{} left by an XRT launcher is removed".format(name))


def _drop_kaggle_addresses(environ: MutableMapping[str, str], notes: List[str]) -> None:
    """Kaggle's image sets one worker address where libtpu expects one per process."""
    if "KAGGLE_KERNEL_RUN_TYPE" not in environ:
        return
    for name in ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID"):
        if environ.pop(name, None) is not None:
            notes.append("{} of the Kaggle image is removed".format(name))


def _map_forced_host_devices(environ: MutableMapping[str, str], notes: List[str]) -> None:
    """PJRT's CPU client reads CPU_NUM_DEVICES and ignores XLA's own flag.

    See https://github.com/pytorch/xla/issues/8063.
    """
    match = re.search(_FORCED_HOST_DEVICES + r"=(\d+)\b", environ.get("XLA_FLAGS", ""))
    if match and environ.get("PJRT_DEVICE") == "CPU" and "CPU_NUM_DEVICES" not in environ:
        environ["CPU_NUM_DEVICES"] = match.group(1)
        notes.append(
            "XLA_FLAGS --{0}={1} -> CPU_NUM_DEVICES={1}".format(
                _FORCED_HOST_DEVICES, match.group(1)
            )
        )


def _number(environ: Mapping[str, str], variable: str) -> int:
    from pjrt_compat.errors import PjrtCompatError

    text = environ[variable]
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
