"""The patch engine on a small fake torch_xla, and the installed functions on the real one."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from pjrt_compat.patching import table
from tests import programs

FAKE = {
    "__init__.py": "_XLAC = type('X', (), {})()\n__version__ = '0.fake'\nimport torch_xla.utils\n",
    "core/__init__.py": "",
    "core/xla_env_vars.py": "WORLD_SIZE = 'native'\n",
    "core/xla_model.py": (
        "def save(*a): return 'native save'\n"
        "def get_ordinal(): return 'native'\n"
        "def broadcast(): return 'a broadcast of a later release'\n"
    ),
    "runtime.py": "def world_size(): return 5\n",
    "utils/__init__.py": "from torch_xla.core.xla_model import save as saver\n",
    "utils/serialization.py": "def save(*a): return 'native'\n",
    "distributed/__init__.py": "",
    "distributed/xla_multiprocessing.py": (
        "def spawn(): return 'native'\nclass MpModelWrapper:\n  def to(self, d): return 'native'\n"
    ),
}


@pytest.fixture()
def fake(tmp_path: Path) -> Path:
    """A directory with a torch_xla in which everything is native and nothing is heavy."""
    for name, text in FAKE.items():
        path = tmp_path / "torch_xla" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run_fake(fake: Path, source: str, **variables: str) -> programs.Outcome:
    path = "{}:{}".format(fake, programs.ROOT)
    return programs.run(
        [sys.executable, "-c", textwrap.dedent(source)], PYTHONPATH=path, **variables
    )


PRELUDE = """
import pjrt_compat
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
import torch_xla.utils
def state(name):
    return {p.id: p.state for p in pjrt_compat.status().patches}[name]
"""


def test_add_never_overwrites_and_correct_replaces(fake: Path) -> None:
    outcome = run_fake(
        fake,
        PRELUDE
        + """
assert xm.broadcast() == "a broadcast of a later release"
assert state("xla_model.broadcast") == "native"
assert xm.get_ordinal() == 0 and state("xla_model.get_ordinal") == "applied"
assert xm.xrt_world_size(defval=3) == 3
import torch_xla.core.xla_env_vars as xenv
assert xenv.WORLD_SIZE == "native" and xenv.ORDINAL == "XRT_SHARD_ORDINAL"
assert state("xla_env_vars.WORLD_SIZE") == "native"
assert pjrt_compat.get_original("torch_xla.core.xla_model:get_ordinal")() == "native"
""",
    )
    assert outcome.code == 0, outcome.err


def test_a_module_imported_later_is_pending_until_then(fake: Path) -> None:
    outcome = run_fake(
        fake,
        PRELUDE
        + """
assert state("serialization.save") == "pending"
import torch_xla.utils.serialization as xser
assert state("serialization.save") == "applied"
assert xser.save.__module__.startswith("pjrt_compat")
assert type(xser.__loader__).__name__ == type(xm.__loader__).__name__ == "SourceFileLoader"
""",
    )
    assert outcome.code == 0, outcome.err


def test_names_bound_early_inside_torch_xla_are_rebound_and_undone(fake: Path) -> None:
    outcome = run_fake(
        fake,
        PRELUDE
        + """
assert torch_xla.utils.saver is xm.save
ours = xm.save
pjrt_compat.deactivate()
assert torch_xla.utils.saver is xm.save and xm.save() == "native save"
assert not hasattr(xm, "xrt_world_size") and xr.world_size() == 5
assert state("xla_model.save") == "removed" and not pjrt_compat.is_active()
pjrt_compat.activate()
assert xm.save is ours and torch_xla.utils.saver is ours
assert pjrt_compat.is_patched("xla_model.save")
""",
    )
    assert outcome.code == 0, outcome.err


def test_what_someone_else_replaced_since_is_displaced_and_left_alone(fake: Path) -> None:
    outcome = run_fake(
        fake,
        PRELUDE
        + """
theirs = lambda: "theirs"
ours, xm.save = xm.save, theirs
assert state("xla_model.save") == "displaced" and not pjrt_compat.is_patched("xla_model.save")
xm.save = ours
assert state("xla_model.save") == "applied"
xm.save = theirs
pjrt_compat.deactivate()
assert xm.save is theirs and state("xla_model.save") == "displaced"
""",
    )
    assert outcome.code == 0, outcome.err


def test_patches_are_chosen_by_id_or_prefix(fake: Path) -> None:
    source = (
        PRELUDE
        + "print(sorted(p.id for p in pjrt_compat.status().patches if p.state == 'applied'))"
    )
    outcome = run_fake(fake, source, PJRT_COMPAT_ONLY="runtime,xla_model.save")
    assert outcome.out.strip() == "['runtime.world_size', 'xla_model.save']" or (
        "runtime.world_size" in outcome.out and "xla_model.get_ordinal" not in outcome.out
    )
    outcome = run_fake(fake, source, PJRT_COMPAT_SKIP="xla_model")
    assert "xla_model." not in outcome.out
    assert "runtime.world_size" in outcome.out


def test_an_unknown_id_is_warned_about_with_a_close_one_and_is_an_error_when_strict(
    fake: Path,
) -> None:
    outcome = run_fake(fake, PRELUDE, PJRT_COMPAT_SKIP="xla_model.savee")
    assert outcome.code == 0
    assert "'xla_model.savee'" in outcome.err
    assert "xla_model.save" in outcome.err
    outcome = run_fake(fake, PRELUDE, PJRT_COMPAT_SKIP="nonsense", PJRT_COMPAT="strict")
    assert outcome.code == 1
    assert "PjrtCompatError" in outcome.err
    outcome = run_fake(fake, PRELUDE + "pjrt_compat.activate(only=['nonsense'])")
    assert outcome.code == 1
    assert "activate(only=...) names 'nonsense'" in outcome.err


def test_a_patch_that_fails_is_recorded_and_raises_only_when_strict(fake: Path) -> None:
    """Here the class to patch is missing."""
    module = fake / "torch_xla" / "distributed" / "xla_multiprocessing.py"
    module.write_text("def spawn(): return 'native'\n")
    source = (
        PRELUDE
        + "import torch_xla.distributed.xla_multiprocessing\n"
        + "print(state('xla_multiprocessing.MpModelWrapper.to'), state('xla_model.save'))"
    )
    outcome = run_fake(fake, source)
    assert outcome.out.split() == ["failed", "applied"], outcome.err
    outcome = run_fake(fake, source, PJRT_COMPAT="strict")
    assert outcome.code == 1
    assert "xla_multiprocessing.MpModelWrapper.to" in outcome.err
    assert "PJRT_COMPAT_SKIP=" in outcome.err


def test_a_torch_xla_with_xrt_is_native(fake: Path) -> None:
    """The probe, not a version, says that nothing is needed."""
    (fake / "torch_xla" / "__init__.py").write_text(
        "_XLAC = type('X', (), {'_xla_rendezvous': 1})()\n"
    )
    outcome = run_fake(fake, PRELUDE + "print(pjrt_compat.status().counts())")
    assert "applied" not in outcome.out
    assert "native" in outcome.out


def test_every_row_of_the_table_is_complete_and_unique() -> None:
    ids = [patch.id for patch in table.TABLE]
    assert len(set(ids)) == len(ids)
    assert len({patch.target for patch in table.TABLE}) == len(ids)
    for patch in table.TABLE:
        assert patch.kind in (table.ADD, table.CORRECT)
        assert patch.why and patch.ref and patch.changed, patch.id
        module, _, path = patch.target.partition(":")
        assert patch.id.split(".")[0] in (
            module.split(".")[-1],
            path.split(".")[0],
            "multiprocessing",
        )


REAL = """
import pjrt_compat
import copy, inspect, pickle, subprocess, sys, types, warnings
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.utils.serialization as xser
import pjrt_compat.patching as patching
from pjrt_compat.patching.registry import load, resolve, split_target
import importlib

status = pjrt_compat.status()
assert set(status.counts()) <= {"applied", "native"}, str(status)
assert status.active and not status.late and not status.early_bindings
assert status.to_dict()["versions"]["torch_xla"] == torch_xla.__version__
assert "xla_model.save" in str(status)

for patch in patching.registry().records.values():
    patch = patch.patch
    module, path = split_target(patch.target)
    found = resolve(importlib.import_module(module), path)[2]
    if isinstance(found, types.FunctionType):
        if patch.id != "multiprocessing.get_preparation_data":
            assert pickle.loads(pickle.dumps(found)) is found, patch.id
            assert copy.deepcopy(found) is found

signatures = {
    "get_ordinal": "defval",
    "xrt_world_size": "defval",
    "get_local_ordinal": "defval",
    "xla_device": "n devkind",
    "rendezvous": "tag payload replicas",
    "mesh_reduce": "tag data reduce_fn",
    "save": "data file_or_path master_only global_master",
    "all_reduce": "reduce_type inputs scale groups cctx pin_layout",
    "all_gather": "value dim groups output pin_layout",
    "reduce_scatter": "reduce_type input scale scatter_dim shard_count groups output pin_layout",
    "all_to_all": "value split_dimension concat_dimension split_count groups pin_layout",
    "collective_permute": "value pairs",
    "broadcast": "tensor_or_list root_ordinal groups pin_layout",
    "get_xla_supported_devices": "devkind max_devices",
}
for name, parameters in signatures.items():
    actual = list(inspect.signature(getattr(xm, name)).parameters)
    assert actual[: len(parameters.split())] == parameters.split(), (name, actual)
spawn = list(inspect.signature(xmp.spawn).parameters)
assert spawn == "fn args nprocs join daemon start_method".split()

# Under torch.compile the value is ours.
def scaled(x):
    return x * (xm.get_ordinal(defval=3) + 2) + xm.xrt_world_size()
def reduced(x):
    return xm.all_reduce("sum", x) * 2
x = torch.ones(3)
assert torch.compile(scaled, backend="eager")(x).tolist() == [6.0] * 3
y = torch.ones(3, device=xm.xla_device())
assert torch.compile(reduced, backend="eager")(y).tolist() == [2.0] * 3
def f(index):
    assert torch.compile(scaled, backend="eager")(x).tolist() == [3.0] * 3
xmp.spawn(f, nprocs=1)

# Resources of torch_xla can be read, so the loaders are its own.
import importlib.resources
assert importlib.resources.read_text("torch_xla", "__init__.py")
print("fine")
"""


def test_installed_objects_are_plain_functions_that_pickle_copy_and_compile(tmp_path: Path) -> None:
    outcome = programs.run_source(REAL, tmp_path, timeout=120)
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip() == "fine"
