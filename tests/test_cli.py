"""The edges of the command line: what is shown, what is written to a log, how commands end."""

import ast
import io
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gated_srp import __version__, cli
from gated_srp.cli import app, main, screen
from gated_srp.errors import Interrupted, UserError

RESULTS = "cohort,arm,seed,metric,value\n" + "".join(
    f"A,{arm},{seed},auc,{value + seed / 1000}\n" for arm, value in (("na", 0.7), ("xsa", 0.8)) for seed in (42, 43)
)


@pytest.fixture(autouse=True)
def _as_it_was():
    root, own = logging.getLogger(), logging.getLogger("gated_srp")
    handlers, level = list(root.handlers), own.level
    yield
    screen.SCREEN.quiet = screen.SCREEN.debug = False
    for handler in [one for one in root.handlers if one not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.handlers[:] = handlers
    own.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text(RESULTS)
    return path


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def ended(monkeypatch, *arguments):
    """`main` as the shell calls it: its status, and what stood on the error stream of a terminal."""
    seen = Terminal()
    monkeypatch.setattr(sys, "argv", ["gated-srp", *map(str, arguments)])
    monkeypatch.setattr(sys, "stderr", seen)
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, seen.getvalue()


def test_quiet_leaves_out_all_but_warnings_and_errors(results, monkeypatch):
    assert "xsa, A auc: 0.8425" in run("stats", results).stdout
    silent = run("--quiet", "stats", results)
    assert (silent.exit_code, silent.output) == (0, "")
    code, said = ended(monkeypatch, "-q", "stats", results.with_name("no.csv"))
    assert code == 2 and "no.csv" in said


def test_verbose_adds_details_on_the_error_stream_and_nothing_to_the_output(results):
    plain, more = run("stats", results), run("--verbose", "stats", results)
    assert plain.stdout == more.stdout and plain.stderr == ""
    assert f"gated-srp {__version__}, Python 3." in more.stderr


def test_the_log_holds_details_results_and_the_traceback_of_a_mistake(results, tmp_path, monkeypatch):
    log = tmp_path / "new" / "log.txt"
    run("--quiet", "--log", log, "stats", results)
    first = log.read_text()
    assert f"DEBUG gated_srp: gated-srp {__version__}" in first and "INFO gated_srp:   xsa, A auc: 0.8425" in first
    code, said = ended(monkeypatch, "--log", log, "stats", results, "--reference", "nobody")
    later = log.read_text().removeprefix(first)
    assert code == 2 and "Traceback" not in said and later.count("Traceback (most recent call last)") == 1
    assert "ERROR gated_srp: error: " in later and "nobody" in later


def test_a_log_that_cannot_be_written_is_said_before_any_work(results, monkeypatch):
    code, said = ended(monkeypatch, "--log", results / "log.txt", "stats", results)
    assert code == 2 and f"--log {results / 'log.txt'}: cannot be written" in said


def test_verbose_and_quiet_together_are_refused(results):
    assert isinstance(run("-v", "-q", "stats", results).exception, UserError)


@pytest.mark.parametrize(("setting", "escapes"), [(None, True), ("", True), ("1", False)])
def test_no_color_takes_the_colour_out_of_every_message(setting, escapes, results, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if setting is not None:
        monkeypatch.setenv("NO_COLOR", setting)
    _, said = ended(monkeypatch, "stats", results.with_name("no.csv"))
    assert ("\x1b[31m" in said) == escapes
    seen = Terminal()
    monkeypatch.setattr(sys, "stdout", seen)
    screen.say("a step", bold=True)
    assert seen.getvalue() == ("\x1b[1ma step\x1b[0m\n" if escapes else "a step\n")


def test_no_message_goes_around_the_screen():
    """`typer.secho` and a bare `Console` would not know of NO_COLOR, --quiet and --log."""
    folder = (screen.__file__ or "").removesuffix("screen.py")
    found = subprocess.run(
        ["grep", "-rnE", r"typer\.(echo|secho)\(|[^_]Console\(", folder, "--include=*.py"],
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert [
        line for line in found if "screen.py" not in line and "_version" not in line and "__version__" not in line
    ] == []


def test_a_mistake_ends_with_status_2_and_debug_shows_where(results, monkeypatch, capsys):
    code, said = ended(monkeypatch, "stats", results.with_name("no.csv"))
    assert code == 2 and "Traceback" not in said
    monkeypatch.setattr(sys, "argv", ["gated-srp", "--debug", "stats", "no.csv"])
    with pytest.raises(UserError):
        main()


def test_a_missing_package_names_the_extra_that_brings_it(monkeypatch):
    def missing(name):
        def command():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return command

    for module, extra in (("PIL.Image", "train"), ("h5py", "train"), ("openslide", "slides"), ("ray", "cluster")):
        monkeypatch.setattr(cli, "app", missing(module))
        code, said = ended(monkeypatch, "anything")
        assert code == 2 and f"in the repository of gated-srp: pip install '.[{extra}]'" in said


def test_every_option_that_a_message_names_exists():
    commands = typer.main.get_command(app)
    known = {name for one in (commands, *commands.commands.values()) for option in one.params for name in option.opts}
    others = {"--help", "--shm-size", "--compression", "--tile", "--pyramid"}  # every command's own; Docker's; libvips'
    for path in Path(cli.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "#SBATCH" not in node.value:
                named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", node.value))
                assert named <= known | others, f"{path}:{node.lineno}: {named - known - others}"


def test_an_unexpected_error_keeps_its_traceback(monkeypatch):
    def broken():
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(cli, "app", broken)
    seen = Terminal()
    monkeypatch.setattr(sys, "stderr", seen)
    with pytest.raises(ZeroDivisionError):
        main()
    assert "unexpected error" in seen.getvalue()


def test_work_that_was_stopped_ends_with_status_130(monkeypatch):
    def stopped():
        raise Interrupted("saved. Start the same command again to go on.")

    monkeypatch.setattr(cli, "app", stopped)
    assert ended(monkeypatch, "train") == (130, "\x1b[33msaved. Start the same command again to go on.\x1b[0m\n")


def test_a_python_warning_reaches_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "app", lambda: None)
    main()
    screen.begin(log=tmp_path / "log.txt")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)  # pytest's own capture stands between
        warnings.warn("take care", stacklevel=1)
    assert "WARNING py.warnings" in (tmp_path / "log.txt").read_text()


def test_help_answers_in_half_a_second():
    """By the processor's time: what else the machine does at the moment is not ours."""
    code = "import sys; sys.argv = ['gated-srp', '--help']; from gated_srp.cli import main; main()"
    took = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        after = os.times()
        took.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert done.returncode == 0 and "--quiet" in done.stdout
    assert min(took) < 0.5


# Options ---------------------------------------------------------------------------------------------------------------


def test_what_a_command_writes_is_named_out_everywhere_and_the_old_name_still_works(tmp_path):
    from training.toy_cohorts import write_cohort
    from typer.main import get_command

    for name, command in get_command(app).commands.items():
        shown = {option for one in command.params if not one.hidden for option in one.opts}
        assert "--output" not in shown and ("-o" not in shown or "--out" in shown), name
    cohort = write_cohort(tmp_path, slides=12)
    for option in ("--out", "-o", "--output"):
        assert run("splits", cohort, option, tmp_path / f"{option}.csv").exit_code == 0
    assert len({(tmp_path / f"{option}.csv").read_text() for option in ("--out", "-o", "--output")}) == 1


def test_splits_writes_the_split_that_a_run_of_ones_own_cohort_uses(tmp_path):
    from training.toy_cohorts import open_config, write_cohort

    from gated_srp.config.cohort import open_cohort

    cohort = write_cohort(tmp_path, slides=20, folds=3, seeds=[7, 8])
    said = run("splits", cohort, "--fold", 2, "-o", tmp_path / "split.csv").stdout
    split = open_cohort(open_config(cohort)).split(7, 2)
    assert (tmp_path / "split.csv").read_text() == "case_id,split\n" + "".join(
        f"{case},{part}\n" for case, part in sorted(split.parts.items())
    )
    assert (
        f"fold 2 of 3 by patient, seed 7, hash {split.hash[:12]}" in said
        and "6 by case_id       6 slides  benign 3, tumour 3" in said
    )
    assert run("splits", cohort, "--seed", 8, "-o", tmp_path / "other.csv").exit_code == 0
    assert (tmp_path / "other.csv").read_text() != (tmp_path / "split.csv").read_text()


def test_splits_of_a_published_cohort_without_labels_says_what_to_give(monkeypatch):
    status, said = ended(monkeypatch, "splits", "KGH")
    assert status == 2 and "KGH: the split is drawn from the labels" in said and "name its YAML" in said


@pytest.mark.parametrize(
    ("words", "said"), [("tr", "train"), ("extract --la", "--layout"), ("extract --layout t", "trident")]
)
def test_the_shell_completes_commands_and_options_without_heavy_imports(words, said):
    code = (
        "import atexit, sys; from gated_srp.cli import main\n"
        "atexit.register(lambda: print('heavy:', [m for m in ('torch', 'numpy', 'pandas', 'yaml') if m in sys.modules]))\n"
        "sys.argv = ['gated-srp']; main()"
    )
    asked = {
        "_GATED_SRP_COMPLETE": "complete_bash",
        "COMP_WORDS": f"gated-srp {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True)
    assert done.stdout.split("\n")[:-1] == [said, "heavy: []"]
