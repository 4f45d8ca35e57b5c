"""The patch table: what pjrt_compat changes, and nothing else.

Each row names one public (or widely used private) name, what became of it since XRT, and the
function that takes its place. Status, documentation and tests are driven by these rows.
"""

from __future__ import annotations

from typing import Callable, List, NamedTuple

from pjrt_compat.patching import probe

ADD = "add"
CORRECT = "correct"


class Patch(NamedTuple):
    """One row.

    Attributes:
      id: stable name used in PJRT_COMPAT_ONLY/SKIP and in reports.
      target: ``module:attribute`` that is set.
      kind: ``add`` fills in a name that is gone and never overwrites one that exists; ``correct``
        gives a name XRT's behaviour whether or not it still exists.
      replacement: ``module:attribute`` of the object installed.
      needs: probe deciding, on what is really installed, whether the patch applies.
      changed: the release in which the name or its behaviour changed; documentation only.
      why: what an XRT program meets without the patch.
      ref: where it can be read (a torch_xla tag and place, or an upstream thread).
    """

    id: str
    target: str
    kind: str
    replacement: str
    needs: Callable[[], bool]
    changed: str
    why: str
    ref: str


_ISSUE = "https://github.com/pytorch/xla/issues/"
_MODEL = "torch_xla.core.xla_model"
_RUNTIME = "torch_xla.runtime"
_MULTIPROCESSING = "torch_xla.distributed.xla_multiprocessing"


def _model(
    name: str, changed: str, why: str, ref: str, kind: str = CORRECT, shims: str = "xla_model"
) -> Patch:
    return Patch(
        "xla_model." + name,
        _MODEL + ":" + name,
        kind,
        "pjrt_compat.shims.{}:{}".format(shims, name),
        probe.lacks_xrt,
        changed,
        why,
        ref,
    )


def _collective(name: str, changed: str, why: str, ref: str, kind: str = CORRECT) -> Patch:
    return _model(name, changed, why, ref, kind, "xla_collectives")


def _runtime(name: str, why: str) -> Patch:
    return Patch(
        "runtime." + name,
        _RUNTIME + ":" + name,
        CORRECT,
        "pjrt_compat.shims.runtime:" + name,
        probe.lacks_xrt,
        "2.1",
        why,
        "v2.1.0 torch_xla/runtime.py",
    )


def _variable(name: str) -> Patch:
    return Patch(
        "xla_env_vars." + name,
        "torch_xla.core.xla_env_vars:" + name,
        ADD,
        "pjrt_compat.shims.xla_env_vars:" + name,
        probe.lacks_xrt,
        "2.1",
        "the constant was removed with XRT; programs index os.environ with it",
        "v1.12.0 torch_xla/core/xla_env_vars.py",
    )


TABLE: List[Patch] = [
    # Who am I: answered without starting the runtime, per replica thread.
    _model(
        "get_ordinal",
        "2.1",
        "starts the runtime, ignores or refuses defval, and is gone from 2.7",
        _ISSUE + "3692",
    ),
    _model(
        "xrt_world_size",
        "2.1",
        "starts the runtime, ignores or refuses defval, and is gone from 2.7",
        _ISSUE + "7654",
    ),
    _model(
        "get_local_ordinal",
        "2.1",
        "starts the runtime; from 2.5 defval is a TypeError",
        _ISSUE + "7656",
    ),
    _model("is_master_ordinal", "2.1", "starts the runtime before spawn", _ISSUE + "9303"),
    _model("master_print", "2.1", "starts the runtime before spawn", _ISSUE + "9303"),
    # Devices.
    _model(
        "xla_device",
        "2.1",
        "starts the runtime before spawn, ignores devkind, warns from 2.8",
        _ISSUE + "9303",
    ),
    _model("xla_device_hw", "2.2", "GPU became CUDA", "v2.2.0 torch_xla/core/xla_model.py"),
    _model("_xla_real_device", "2.2", "GPU became CUDA", "v2.2.0 torch_xla/core/xla_model.py"),
    _model("xla_real_devices", "2.2", "GPU became CUDA", "v2.2.0 torch_xla/core/xla_model.py"),
    _model(
        "get_xla_supported_devices",
        "2.8",
        "devkind, once the first parameter, was dropped; in a replica only its own device counts",
        _ISSUE + "2141",
    ),
    _model(
        "set_replication",
        "2.3",
        "set_replication(device, [device]) per replica raises when a process has several devices",
        "v2.3.0 torch_xla/core/xla_model.py",
    ),
    # Meeting on the host.
    _model(
        "rendezvous",
        "2.1",
        "became a device collective: tag ignored, subsets refused, graph cut",
        _ISSUE + "3929",
    ),
    _model(
        "mesh_reduce",
        "2.1",
        "hangs on CPU replicas; numpy and other objects fail to load from torch 2.6",
        "v2.9.0 torch_xla/core/xla_model.py:1449",
    ),
    _model("do_on_ordinals", "2.1", "ends with a device collective", _ISSUE + "3929"),
    _model(
        "save",
        "2.1",
        "no barrier after the write, so loading on other replicas races",
        "v2.1.0 torch_xla/core/xla_model.py:947",
    ),
    Patch(
        "serialization.save",
        "torch_xla.utils.serialization:save",
        CORRECT,
        "pjrt_compat.shims.serialization:save",
        probe.lacks_xrt,
        "2.1",
        "no barrier after the write, so loading on other replicas races",
        "v1.12.0 torch_xla/utils/serialization.py:79",
    ),
    # Collectives.
    _collective(
        "CollectiveContext",
        "2.1",
        "removed with the host reduction tier",
        "v1.12.0 torch_xla/core/xla_model.py",
        ADD,
    ),
    _collective(
        "all_reduce",
        "2.1",
        "cctx was dropped; several replicas on CPU hang or abort",
        _ISSUE + "9089",
    ),
    _collective(
        "all_gather",
        "2.1",
        "pads by ordinal, a different graph on every replica; CPU hangs or aborts",
        _ISSUE + "9089",
    ),
    _collective("reduce_scatter", "2.1", "several replicas on CPU hang or abort", _ISSUE + "9089"),
    _collective("all_to_all", "2.1", "several replicas on CPU hang or abort", _ISSUE + "9089"),
    _collective(
        "collective_permute", "2.1", "several replicas on CPU hang or abort", _ISSUE + "9089"
    ),
    _collective(
        "collective_broadcast",
        "1.13",
        "multiplies by zero, so a receiver's NaN or inf survives",
        "v2.9.0 torch_xla/core/xla_model.py:795",
    ),
    _collective(
        "broadcast", "never existed", "every framework wrote its own", _ISSUE + "7770", ADD
    ),
    _collective(
        "broadcast_master_param",
        "2.1",
        "uses collective_broadcast, and so multiplies by zero",
        _ISSUE + "3836",
    ),
    # The modern names, which torch_xla's own code (FSDP, the xla backend) asks.
    _runtime("world_size", "does not know replicas that are processes of a CPU job"),
    _runtime("global_ordinal", "does not know replicas that are processes of a CPU job"),
    _runtime("local_ordinal", "does not know replicas that are processes of a CPU job"),
    # Launching.
    Patch(
        "xla_multiprocessing.spawn",
        _MULTIPROCESSING + ":spawn",
        CORRECT,
        "pjrt_compat.shims.xla_multiprocessing:spawn",
        probe.lacks_xrt,
        "2.1",
        "nprocs, join and daemon are ignored or refused; CPU replicas share one process; a failed "
        "replica leaves its peers hanging",
        _ISSUE + "7974",
    ),
    Patch(
        "xla_multiprocessing.MpModelWrapper.to",
        _MULTIPROCESSING + ":MpModelWrapper.to",
        CORRECT,
        "pjrt_compat.shims.xla_multiprocessing:move_wrapped_model",
        probe.lacks_xrt,
        "2.1",
        "replica threads share one module, so the last one to move it wins",
        "v2.9.0 torch_xla/distributed/xla_multiprocessing.py",
    ),
    Patch(
        "multiprocessing.get_preparation_data",
        "multiprocessing.spawn:get_preparation_data",
        CORRECT,
        "pjrt_compat.replicas.passport:get_preparation_data",
        probe.lacks_xrt,
        "2.1",
        "processes started by a replica (loader workers) would not know whose they are",
        "CPython Lib/multiprocessing/spawn.py",
    ),
    # Bindings that old programs call.
    Patch(
        "_XLAC._xla_set_use_full_mat_mul_precision",
        "torch_xla:_XLAC._xla_set_use_full_mat_mul_precision",
        ADD,
        "pjrt_compat.shims.bindings:_xla_set_use_full_mat_mul_precision",
        probe.lacks_xrt,
        "2.5",
        "removed in favour of torch_xla.backends.set_mat_mul_precision",
        "v2.5.0 torch_xla/csrc/init_python_bindings.cpp",
    ),
]
TABLE += [
    _variable(name)
    for name in (
        "DEVICE_MAP",
        "HOST_ORDINAL",
        "HOST_WORLD_SIZE",
        "LOCAL_ORDINAL",
        "LOCAL_WORKER",
        "MP_DEVICE",
        "ORDINAL",
        "SERVICE_ADDRESS",
        "TORCH_DIST_METHOD",
        "TORCH_DIST_ROOT",
        "TPU_CONFIG",
        "WORKERS",
        "WORLD_SIZE",
    )
]
