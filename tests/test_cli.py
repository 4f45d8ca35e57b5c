"""The command line: the program runs as if Python had been given it, and the shim is there."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest

from tests import programs
from tests.programs import ROOT, Outcome

AUTOLOAD = str(ROOT / "pjrt_compat" / "_autoload")
SHOW = """
    import json, os, sys
    state = sys.modules["pjrt_compat.state"].STATE
    print(json.dumps({
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "flags": [sys.flags.optimize, sys.flags.utf8_mode, sys.warnoptions],
        "main": sys.modules["__main__"].__spec__ and sys.modules["__main__"].__spec__.name,
        "path": sys.path[0],
        "pid": os.getpid(),
        "active": state.active,
        "routes": state.routes,
    }))
"""


@pytest.fixture()
def script(tmp_path: Path) -> Path:
    path = tmp_path / "show.py"
    path.write_text(textwrap.dedent(SHOW))
    return path


def pjrt_compat(
    *arguments: object,
    cwd: Optional[Path] = None,
    python: Optional[List[str]] = None,
    **variables: Optional[str],
) -> Outcome:
    variables.setdefault("PYTHONPATH", str(ROOT))
    command = [*(python or [sys.executable]), "-m", "pjrt_compat", *map(str, arguments)]
    return programs.run(command, cwd=cwd or ROOT, **variables)


def shown(outcome: Outcome) -> Dict[str, Any]:
    assert (outcome.code, outcome.err) == (0, "")
    return dict(json.loads(outcome.out))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["-m", "--topology", "v3-8", "--log=x"],
        ["--", "--x"],
        ["a", "--", "b"],
        ["-", ""],
        ["run", "pth"],
    ],
    ids=str,
)
def test_everything_behind_the_script_is_the_programs(script: Path, arguments: List[str]) -> None:
    assert shown(pjrt_compat("run", script, *arguments))["arguments"] == arguments
    options = ["--as-tpu", "--log", "info", "--topology=cpu:2x2"]
    assert shown(pjrt_compat("run", *options, script, *arguments))["arguments"] == arguments


def test_a_module_is_run_by_name_from_the_current_directory(script: Path) -> None:
    found = shown(pjrt_compat("run", "-m", "show", "--help", cwd=script.parent))
    assert (found["main"], found["arguments"]) == ("show", ["--help"])
    assert found["path"] == str(script.parent)


def test_a_script_finds_its_own_directory_first_as_under_python(script: Path) -> None:
    assert shown(pjrt_compat("run", script))["path"] == str(script.parent)


def test_a_program_may_come_from_standard_input() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pjrt_compat", "run", "-", "a"],
        input="import sys, pjrt_compat; print(pjrt_compat.is_active(), sys.argv)",
        env=programs.clean_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.stdout == "True ['-', 'a']\n", process.stderr


def test_options_reach_the_program_by_environment(script: Path) -> None:
    options = ["--topology", "v3-8", "--as-tpu", "--log", "debug"]
    environment = shown(pjrt_compat("run", *options, script))["environment"]
    assert environment["PJRT_COMPAT_TOPOLOGY"] == "v3-8"
    assert environment["PJRT_COMPAT_AS_TPU"] == "1"
    assert environment["PJRT_COMPAT_LOG"] == "debug"


def test_without_options_nothing_is_chosen(script: Path) -> None:
    environment = shown(pjrt_compat("run", script))["environment"]
    assert {name for name in environment if name.startswith("PJRT_COMPAT")} == {"PJRT_COMPAT"}


@pytest.mark.parametrize(
    ("gate", "expected"), [(None, "1"), ("1", "1"), ("strict", "strict"), ("0", "1"), ("no", "1")]
)
def test_the_newest_wish_wins(script: Path, gate: Optional[str], expected: str) -> None:
    found = shown(pjrt_compat("run", script, PJRT_COMPAT=gate))
    assert found["environment"]["PJRT_COMPAT"] == expected
    assert (found["active"], found["routes"]) == (True, ["run"])


def test_our_directory_comes_first_on_the_path_and_what_was_there_stays(script: Path) -> None:
    former = ":".join([str(ROOT), "", AUTOLOAD, "/elsewhere"])
    environment = shown(pjrt_compat("run", script, PYTHONPATH=former))["environment"]
    assert environment["PYTHONPATH"] == ":".join([AUTOLOAD, str(ROOT), "", "/elsewhere"])


def test_the_program_replaces_our_process_and_keeps_pythons_flags(script: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-O", "-X", "utf8", "-W", "ignore::UserWarning"]
        + ["-m", "pjrt_compat", "run", str(script)],
        env=programs.clean_environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
    )
    found = json.loads(process.communicate(timeout=60)[0])
    assert found["pid"] == process.pid
    assert found["flags"] == [1, 1, ["ignore::UserWarning"]]


@pytest.mark.parametrize("code", [0, 1, 2, 17, 127])
def test_the_exit_code_is_the_programs_own(tmp_path: Path, code: int) -> None:
    script = tmp_path / "leave.py"
    script.write_text("import sys; sys.exit({})".format(code))
    assert pjrt_compat("run", script) == Outcome(code, "", "")


def test_a_traceback_shows_the_program_only(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("print('out')\n1 / 0\n")
    outcome = pjrt_compat("run", script)
    assert (outcome.code, outcome.out) == (1, "out\n")
    assert outcome.err.startswith("Traceback")
    assert "pjrt_compat" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run"], 2, "SCRIPT"),
        (["run", "--topology"], 2, "expected one argument"),
        (["run", "--topology", "v99-8", "{script}"], 2, "v99-8"),
        (["run", "--topo", "v3-8", "{script}"], 2, "--topo"),
        (["run", "--no-such-option", "{script}"], 2, "--no-such-option"),
        (["no-such-command"], 2, "no-such-command"),
        ([], 2, "COMMAND"),
        (["pth"], 2, "action"),
        (["run", "no_such_file.py"], 127, "no_such_file.py"),
    ],
    ids=str,
)
def test_mistakes_are_told_on_stderr_with_their_own_codes(
    script: Path, arguments: List[str], code: int, message: str
) -> None:
    outcome = pjrt_compat(*[a.format(script=script) for a in arguments])
    assert (outcome.code, outcome.out) == (code, "")
    assert message in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("flag", ["-E", "-I", "-S"])
def test_flags_of_python_that_keep_the_shim_out_are_refused(script: Path, flag: str) -> None:
    # With -E and -I the package has to be found without PYTHONPATH.
    source = "import sys; sys.path.insert(0, {!r}); from pjrt_compat.tools.cli import main; "
    source += "sys.exit(main(['run', {!r}]))"
    outcome = programs.run([sys.executable, flag, "-c", source.format(str(ROOT), str(script))])
    assert (outcome.code, outcome.out) == (2, "")
    assert flag in outcome.err


def test_help_and_version_are_answers_not_errors() -> None:
    for arguments in (["--help"], ["run", "--help"], ["--version"]):
        outcome = pjrt_compat(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out


def test_the_pth_file_is_installed_shown_and_removed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    python = [str(tmp_path / "bin" / "python")]

    def pth_files() -> List[Path]:
        return list(tmp_path.glob("lib/python*/site-packages/pjrt*.pth"))

    def is_active(gate: str) -> str:
        source = "import sys; print('pjrt_compat' in sys.modules)"
        outcome = programs.run([*python, "-c", source], PYTHONPATH=str(ROOT), PJRT_COMPAT=gate)
        assert outcome.err == ""
        return outcome.out.strip()

    assert pjrt_compat("pth", "status", python=python).code == 1
    for _ in range(2):
        assert pjrt_compat("pth", "install", python=python).code == 0
        assert len(pth_files()) == 1
    assert len(pth_files()[0].read_text().splitlines()) == 1
    assert pjrt_compat("pth", "status", python=python).code == 0
    assert (is_active("1"), is_active("0")) == ("True", "False")
    for _ in range(2):
        assert pjrt_compat("pth", "remove", python=python).code == 0
        assert pth_files() == []
    assert is_active("1") == "False"


def test_a_pth_file_that_cannot_be_written_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    packages = next(tmp_path.glob("lib/python*/site-packages"))
    packages.rmdir()
    packages.write_text("")  # a file in place of the directory stops even root
    outcome = pjrt_compat("pth", "install", python=[str(tmp_path / "bin" / "python")])
    assert (outcome.code, outcome.out) == (1, "")
    assert "Traceback" not in outcome.err
    assert str(packages) in outcome.err
