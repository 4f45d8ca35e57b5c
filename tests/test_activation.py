"""Activation: what starts it, what it costs, what it may never break."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Optional

import coverage
import pytest

from tests import programs
from tests.programs import ROOT, Outcome

AUTOLOAD = str(ROOT / "pjrt_compat" / "_autoload")
# Dear to import, so none of them may be in a process that never imports torch_xla.
DEAR = {
    "argparse",
    "asyncio",
    "dataclasses",
    "importlib.metadata",
    "inspect",
    "logging",
    "torch",
    "typing",
    "wrapt",
}
REPORT = """
    import json, sys
    from pjrt_compat import bootstrap
    from pjrt_compat.state import STATE
    waiting = [f for f in sys.meta_path if isinstance(f, bootstrap.TorchXlaFinder)]
    print(json.dumps({"routes": STATE.routes, "active": STATE.active, "waiting": len(waiting)}))
"""


def modules_of(**variables: Optional[str]) -> set:
    """What a process that does nothing has imported at its end."""
    outcome = programs.run([sys.executable, "-c", "import sys; print(*sys.modules)"], **variables)
    assert (outcome.code, outcome.err) == (0, "")
    return set(outcome.out.split())


def environment_of(source: str, **variables: Optional[str]) -> Dict[str, str]:
    source += "\nimport json, os; print(json.dumps(dict(os.environ)))"
    outcome = programs.run([sys.executable, "-c", source], **variables)
    assert outcome.code == 0, outcome.err
    return dict(json.loads(outcome.out))


def last_json(outcome: Outcome) -> Any:
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out.splitlines()[-1])


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


def path_of(*entries: object) -> str:
    return ":".join(str(entry) for entry in entries)


@pytest.fixture()
def example(tmp_path: Path) -> Path:
    """A directory with the example file, copied as its text says."""
    directory = tmp_path / "example"
    directory.mkdir()
    shutil.copy(str(ROOT / "sitecustomize_example.py"), str(directory / "sitecustomize.py"))
    return directory


@pytest.fixture()
def fake_torch_xla(tmp_path: Path) -> Path:
    """A directory with a torch_xla that imports at once, for tests of the finder alone."""
    write(
        tmp_path / "fake" / "torch_xla" / "__init__.py",
        """
        import os, sys
        _XLAC = None
        device_at_import = os.environ.get("PJRT_DEVICE")
        engine_at_import = "pjrt_compat.patching" in sys.modules
        """,
    )
    return tmp_path / "fake"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python in which neither pjrt_compat nor torch_xla nor wrapt is installed."""
    directory = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    return directory / "bin" / "python"


@pytest.fixture(scope="module")
def python_with_pth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python whose .pth file was installed by the command line."""
    directory = tmp_path_factory.mktemp("pth")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    python = directory / "bin" / "python"
    installed = programs.run(
        [str(python), "-m", "pjrt_compat", "pth", "install"], PYTHONPATH=str(ROOT)
    )
    assert installed.code == 0, installed.err
    return python


# -- what it costs ------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [None, "", "0", "off", "False"])
def test_with_the_gate_off_nothing_of_ours_is_imported(example: Path, gate: Optional[str]) -> None:
    path = path_of(example, AUTOLOAD, ROOT)
    assert modules_of(PYTHONPATH=path, PJRT_COMPAT=gate) == modules_of(PYTHONPATH=path)
    assert "pjrt_compat" not in modules_of(PYTHONPATH=path, PJRT_COMPAT=gate)


@pytest.mark.parametrize("directory", ["example", "autoload"])
def test_with_the_gate_on_and_no_torch_xla_nothing_dear_is_imported(
    example: Path, directory: str
) -> None:
    path = path_of(example if directory == "example" else AUTOLOAD, ROOT)
    added = modules_of(PYTHONPATH=path, PJRT_COMPAT="1") - modules_of(PYTHONPATH=path)
    assert "pjrt_compat.bootstrap" in added
    assert not added & DEAR
    assert not {name for name in added if name.startswith("pjrt_compat.patching")}


def test_importing_the_package_imports_nothing_dear() -> None:
    source = "import sys; before = set(sys.modules); import pjrt_compat; "
    outcome = programs.run(
        [sys.executable, "-c", source + "print(*set(sys.modules) - before)"], PYTHONPATH=str(ROOT)
    )
    assert not set(outcome.out.split()) & DEAR


def test_switched_off_the_environment_stays_as_it_was(example: Path) -> None:
    path = path_of(example, ROOT)
    expected = environment_of("", PYTHONPATH=path, PJRT_COMPAT="0")
    assert environment_of("import pjrt_compat", PYTHONPATH=path, PJRT_COMPAT="0") == expected


def test_deactivation_gives_the_environment_back() -> None:
    # An empty entry of PYTHONPATH means the current directory and must survive.
    path = path_of("", ROOT)
    program = programs.run(
        [
            sys.executable,
            "-c",
            "import os; before = dict(os.environ)\n"
            "import pjrt_compat; during = dict(os.environ); pjrt_compat.deactivate()\n"
            "print(before == dict(os.environ), during == before, pjrt_compat.is_active())",
        ],
        PYTHONPATH=path,
    )
    assert program.out.split() == ["True", "False", "False"], program.err


# -- routes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "remembered"),
    [
        (["import"], ["import"]),
        (["sitecustomize"], ["sitecustomize"]),
        (["pth"], ["pth"]),
        (["run"], ["run"]),
        (["import", "sitecustomize"], ["sitecustomize"]),
        (["import", "pth"], ["pth"]),
        (["import", "run"], ["run"]),
        (["sitecustomize", "pth"], ["pth", "sitecustomize"]),
        (["sitecustomize", "run"], ["run", "sitecustomize"]),
        (["pth", "run"], ["pth", "run"]),
    ],
    ids="+".join,
)
def test_any_two_routes_together_activate_once(
    asked: List[str],
    remembered: List[str],
    example: Path,
    bare_python: Path,
    python_with_pth: Path,
    tmp_path: Path,
) -> None:
    first_line = "import pjrt_compat\n" if "import" in asked else ""
    program = write(tmp_path / "program.py", first_line + textwrap.dedent(REPORT))
    python = python_with_pth if "pth" in asked else bare_python
    report = last_json(
        programs.run(
            [str(python), *(["-m", "pjrt_compat", "run"] if "run" in asked else []), str(program)],
            PYTHONPATH=path_of(*([example] if "sitecustomize" in asked else []), ROOT),
            PJRT_COMPAT="1" if {"pth", "sitecustomize"} & set(asked) else None,
        )
    )
    assert report == {"routes": remembered, "active": True, "waiting": 1}


def test_activating_again_is_the_same_as_once() -> None:
    source = "import pjrt_compat; pjrt_compat.activate(); pjrt_compat.activate()\n"
    outcome = programs.run(
        [sys.executable, "-c", source + textwrap.dedent(REPORT)], PYTHONPATH=str(ROOT)
    )
    assert last_json(outcome) == {"routes": ["import"], "active": True, "waiting": 1}


def test_a_pth_file_is_silent_when_the_package_is_gone(python_with_pth: Path) -> None:
    source = "import sys; print('pjrt_compat' in sys.modules)"
    for gate in ("0", "1"):
        outcome = programs.run([str(python_with_pth), "-c", source], PJRT_COMPAT=gate)
        assert outcome == Outcome(0, "False\n", "")


def test_a_pth_file_reports_a_broken_package_and_lets_the_program_run(
    python_with_pth: Path, tmp_path: Path
) -> None:
    write(tmp_path / "pjrt_compat" / "__init__.py", "1 / 0")
    outcome = programs.run(
        [str(python_with_pth), "-c", "print('program')"],
        PYTHONPATH=str(tmp_path),
        PJRT_COMPAT="1",
    )
    assert (outcome.code, outcome.out) == (0, "program\n")
    assert "ZeroDivisionError" in outcome.err


@pytest.mark.parametrize("route", ["pth", "sitecustomize"])
def test_coverage_started_by_its_own_pth_file_measures_an_active_program(
    python_with_pth: Path, bare_python: Path, example: Path, tmp_path: Path, route: str
) -> None:
    python = python_with_pth if route == "pth" else bare_python
    packages = next(python.parent.parent.glob("lib/python*/site-packages"))
    # The line of coverage 7.10 and later; pytest-cov's has the same form.
    pth = packages / "a1_coverage.pth"
    pth.write_text("import sys; exec('import coverage; coverage.process_startup()')\n")
    settings = write(tmp_path / "coveragerc", "[run]\ndata_file = {}\n".format(tmp_path / "data"))
    program = write(tmp_path / "program.py", REPORT)
    try:
        outcome = programs.run(
            [str(python), str(program)],
            PYTHONPATH=path_of(example, ROOT, Path(coverage.__file__).parent.parent)
            if route == "sitecustomize"
            else path_of(ROOT, Path(coverage.__file__).parent.parent),
            PJRT_COMPAT="1",
            COVERAGE_PROCESS_START=str(settings),
        )
    finally:
        pth.unlink()
    assert last_json(outcome) == {"routes": [route], "active": True, "waiting": 1}
    data = coverage.CoverageData(str(tmp_path / "data"))
    data.read()
    assert str(program) in data.measured_files()


# -- standing aside for other sitecustomize files -----------------------------------------------


@pytest.mark.parametrize("gate", ["0", "1"])
@pytest.mark.parametrize("ours", ["example", "autoload", "both"])
def test_a_hidden_sitecustomize_runs_once_and_takes_its_name_back(
    example: Path, tmp_path: Path, ours: str, gate: str
) -> None:
    write(
        tmp_path / "theirs" / "sitecustomize.py",
        """
        import builtins, sys
        builtins.ran = getattr(builtins, "ran", 0) + 1
        sys.path.insert(0, "/first")
        """,
    )
    before = {"example": [example], "autoload": [AUTOLOAD], "both": [AUTOLOAD, example]}[ours]
    source = "import sitecustomize, sys; print(ran, sitecustomize.__file__, sys.path[1])"
    outcome = programs.run(
        [sys.executable, "-c", source],
        PYTHONPATH=path_of(*before, tmp_path / "theirs", ROOT),
        PJRT_COMPAT=gate,
    )
    assert outcome.out.split() == ["1", str(tmp_path / "theirs" / "sitecustomize.py"), "/first"]
    assert outcome.err == ""


@pytest.mark.parametrize("ours", ["example", "autoload"])
def test_a_broken_sitecustomize_behind_ours_is_reported_and_the_program_runs(
    example: Path, tmp_path: Path, ours: str
) -> None:
    write(tmp_path / "theirs" / "sitecustomize.py", "raise OSError('their mistake')")
    outcome = programs.run(
        [sys.executable, "-c", "import pjrt_compat; print(pjrt_compat.is_active())"],
        PYTHONPATH=path_of(example if ours == "example" else AUTOLOAD, tmp_path / "theirs", ROOT),
        PJRT_COMPAT="1",
    )
    assert (outcome.code, outcome.out) == (0, "True\n")
    assert "their mistake" in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_the_example_works_where_the_package_is_not_installed(
    example: Path, tmp_path: Path, bare_python: Path
) -> None:
    write(tmp_path / "theirs" / "sitecustomize.py", "print('theirs')")
    outcome = programs.run(
        [str(bare_python), "-c", "print('program')"],
        PYTHONPATH=path_of(example, tmp_path / "theirs"),
        PJRT_COMPAT="1",
    )
    assert (outcome.code, outcome.out.split()) == (0, ["theirs", "program"])
    assert "not activated" in outcome.err


def test_a_broken_package_does_not_break_the_interpreter(example: Path, tmp_path: Path) -> None:
    write(tmp_path / "broken" / "pjrt_compat" / "__init__.py", "1 / 0")
    for directory in (example, AUTOLOAD):
        outcome = programs.run(
            [sys.executable, "-c", "print('program')"],
            PYTHONPATH=path_of(directory, tmp_path / "broken"),
            PJRT_COMPAT="1",
        )
        assert (outcome.code, outcome.out) == (0, "program\n")
        assert "ZeroDivisionError" in outcome.err


# -- the wait for torch_xla ---------------------------------------------------------------------


def test_the_engine_loads_and_variables_are_translated_before_torch_xla_is_imported(
    fake_torch_xla: Path, tmp_path: Path
) -> None:
    outcome = programs.run_source(
        """
        import json, os, sys
        import pjrt_compat
        os.environ["XRT_TPU_CONFIG"] = "localservice;0;localhost:51011"
        import torch_xla
        loader = type(torch_xla.__spec__.loader).__name__, type(torch_xla.__loader__).__name__
        print(json.dumps([torch_xla.engine_at_import, torch_xla.device_at_import, *loader]))
        """,
        tmp_path,
        PYTHONPATH=path_of(ROOT, fake_torch_xla),
        PJRT_DEVICE="",
        PJRT_COMPAT_ONLY="xla_model",
    )
    assert last_json(outcome) == [True, "CPU", "SourceFileLoader", "SourceFileLoader"]
    assert outcome.err.count("XRT_TPU_CONFIG is set") == 1


def test_looking_whether_torch_xla_is_there_loads_nothing(
    fake_torch_xla: Path, tmp_path: Path
) -> None:
    outcome = programs.run_source(
        """
        import importlib.util, json, os, sys
        import pjrt_compat
        found = importlib.util.find_spec("torch_xla")
        looked = "wrapt" in sys.modules, os.path.basename(os.path.dirname(found.origin))
        os.environ["XRT_TPU_CONFIG"] = "localservice;0;localhost:51011"
        import torch_xla
        print(json.dumps([*looked, torch_xla.device_at_import]))
        """,
        tmp_path,
        PYTHONPATH=path_of(ROOT, fake_torch_xla),
        PJRT_DEVICE="",
    )
    assert last_json(outcome) == [False, "torch_xla", "CPU"]


def test_without_torch_xla_the_package_imports_and_python_says_what_is_missing(
    bare_python: Path, tmp_path: Path
) -> None:
    program = write(
        tmp_path / "program.py",
        """
        import importlib.util, sys
        import pjrt_compat
        assert pjrt_compat.is_active()
        assert importlib.util.find_spec("torch_xla") is None
        assert "pjrt_compat.patching" not in sys.modules
        import torch_xla
        """,
    )
    outcome = programs.run(
        [str(bare_python), str(program)], PYTHONPATH=str(ROOT), XRT_TPU_CONFIG="x"
    )
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch_xla'"
    assert "XRT_TPU_CONFIG is set" not in outcome.err


@pytest.mark.parametrize("strict", [False, True])
def test_an_engine_that_cannot_start_fails_the_import_only_when_strict(
    bare_python: Path, fake_torch_xla: Path, strict: bool
) -> None:
    """Here wrapt is missing."""
    outcome = programs.run(
        [str(bare_python), "-c", "import pjrt_compat, torch_xla; print(torch_xla.__name__)"],
        PYTHONPATH=path_of(ROOT, fake_torch_xla),
        PJRT_COMPAT="strict" if strict else "1",
    )
    assert outcome.code == (1 if strict else 0), outcome.err
    assert "wrapt" in outcome.err
    assert ("PjrtCompatWarning" in outcome.err) is not strict


@pytest.mark.parametrize("options", [[], ["-W", "error"]])
def test_a_local_file_named_torch_xla_is_left_alone_with_one_warning(
    tmp_path: Path, options: List[str]
) -> None:
    write(tmp_path / "torch_xla.py", "value = 41 + 1")
    program = write(
        tmp_path / "program.py",
        """
        import pjrt_compat
        import torch_xla
        import torch_xla as again
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "import torch_xla"], check=True)
        print(torch_xla.value, torch_xla.__file__, sorted(vars(torch_xla)) == sorted(vars(again)))
        """,
    )
    outcome = programs.run(
        [sys.executable, *options, str(program)], cwd=tmp_path, PYTHONPATH=str(ROOT)
    )
    assert outcome.out.split() == ["42", str(tmp_path / "torch_xla.py"), "True"], outcome.err
    assert outcome.err.count("leaves it alone") == 1


def test_warnings_turned_into_errors_do_not_disturb_activation(
    example: Path, fake_torch_xla: Path, tmp_path: Path
) -> None:
    program = write(
        tmp_path / "program.py", "import torch_xla, pjrt_compat; print(pjrt_compat.is_active())"
    )
    outcome = programs.run(
        [sys.executable, "-W", "error", str(program)],
        PYTHONPATH=path_of(example, ROOT, fake_torch_xla),
        PJRT_COMPAT="1",
    )
    assert (outcome.code, outcome.out) == (0, "True\n"), outcome.err


def test_a_program_without_a_file_is_active_as_in_a_notebook() -> None:
    source = textwrap.dedent(REPORT)
    process = subprocess.run(
        [sys.executable, "-i", "-q"],
        input="import pjrt_compat\n" + source,
        env=programs.clean_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(process.stdout)["active"], process.stderr


# -- children -----------------------------------------------------------------------------------


def test_children_of_every_start_method_are_active_without_importing_us(tmp_path: Path) -> None:
    # The main module imports pjrt_compat only in the parent, so that a child that imports the main
    # module again does not become active by that.
    outcome = programs.run_source(
        """
        import json, multiprocessing, subprocess, sys

        def state():
            module = sys.modules.get("pjrt_compat.state")
            return module and [module.STATE.active, module.STATE.routes]

        def put_state(queue):
            queue.put(state())

        if __name__ == "__main__":
            import pjrt_compat
            found = {}
            for method in ("spawn", "forkserver", "fork"):
                context = multiprocessing.get_context(method)
                queue = context.SimpleQueue()
                child = context.Process(target=put_state, args=(queue,))
                child.start()
                found[method] = queue.get()
                child.join()
            source = "import json, sys; s = sys.modules['pjrt_compat.state'].STATE\\n"
            source += "print(json.dumps([s.active, s.routes]))"
            answer = subprocess.check_output([sys.executable, "-c", source])
            found["subprocess"] = json.loads(answer)
            print(json.dumps(found))
        """,
        tmp_path,
    )
    inherited = [True, ["environment"]]
    assert last_json(outcome) == {
        "spawn": inherited,
        "forkserver": inherited,
        "fork": [True, ["import"]],
        "subprocess": inherited,
    }


def test_a_child_uses_the_copy_of_its_parent_and_no_other_package_beside_it(
    tmp_path: Path,
) -> None:
    """The parent found the package in the directory of its script."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pjrt_compat").symlink_to(ROOT / "pjrt_compat")
    write(tmp_path / "app" / "neighbour.py", "")
    outcome = programs.run_source(
        """
        import subprocess, sys
        import pjrt_compat
        source = "import sys, pjrt_compat; print(pjrt_compat.is_active(), sys.path)"
        print(subprocess.check_output([sys.executable, "-S", "-c", "1"]).decode(), end="")
        print(subprocess.check_output([sys.executable, "-c", source]).decode(), end="")
        """,
        tmp_path / "app",
        PYTHONPATH=None,
    )
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("True")
    assert repr(str(tmp_path / "app")) not in outcome.out


# -- with the real torch_xla --------------------------------------------------------------------


def test_late_activation_patches_rebinds_inside_torch_xla_names_the_others_and_can_be_undone(
    tmp_path: Path,
) -> None:
    write(
        tmp_path / "holder.py",
        "from torch_xla.core.xla_model import all_reduce as reduce_it\n",
    )
    outcome = programs.run_source(
        """
        import json, sys
        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.xla_multiprocessing as xmp
        import holder
        native = {"all_reduce": xm.all_reduce, "spawn": xmp.spawn}
        names = set(vars(xm))

        import pjrt_compat
        status = pjrt_compat.status()
        found = {
            "late": status.late,
            "patched": xm.all_reduce is not native["all_reduce"],
            "original": pjrt_compat.get_original("torch_xla.core.xla_model:all_reduce")
            is native["all_reduce"],
            "holders": sorted({b.module for b in status.early_bindings}),
            "inside": sorted(
                name
                for name, module in sys.modules.items()
                if name.startswith("torch_xla")
                and getattr(module, "__dict__", {}).get("all_reduce") is native["all_reduce"]
            ),
        }
        pjrt_compat.deactivate()
        found["restored"] = (
            xm.all_reduce is native["all_reduce"]
            and xmp.spawn is native["spawn"]
            and set(vars(xm)) == names
        )
        pjrt_compat.activate()
        found["again"] = xm.all_reduce is not native["all_reduce"]
        print(json.dumps(found))
        """,
        tmp_path,
    )
    assert last_json(outcome) == {
        "late": True,
        "patched": True,
        "original": True,
        "holders": ["holder"],
        "inside": [],
        "restored": True,
        "again": True,
    }
    assert outcome.err.count("pjrt_compat was activated after torch_xla") == 1
    assert "holder ({})".format(tmp_path / "holder.py") in outcome.err
    assert "reduce_it" in outcome.err
    # The warning points at the line to move.
    assert "program.py:9: PjrtCompatWarning" in outcome.err
