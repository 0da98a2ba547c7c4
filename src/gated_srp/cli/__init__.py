"""The command line. A command parses its options, calls one function of `gated_srp`, and prints what it returns.

Nothing heavy is imported at the top of this package: ``gated-srp --help`` must answer at once.
"""

import logging
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gated_srp import __version__
from gated_srp.cli import cohorts, runs, screen, slides, studies
from gated_srp.cli.screen import LOG
from gated_srp.errors import Interrupted, UserError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: "out" if name == "output" else name},  # its name in 0.2
    help="Gated Spatial Redundancy Projection for whole-slide pathology.",
)

# Which extra installs a package that may be missing; `train` installs the others.
_EXTRAS = {
    **dict.fromkeys(("openslide", "tiffslide", "pydicom"), "slides"),
    **dict.fromkeys(("transformers", "huggingface_hub", "efficientnet_lite_pytorch"), "encoders"),
    "ray": "cluster",
}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gated-srp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print more: settings, files, versions.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
    log: Annotated[
        Path | None, typer.Option("--log", help="Also write everything, with details, to this file.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options that stand before the command."""
    screen.begin(verbose=verbose, quiet=quiet, debug=debug, log=log)
    LOG.debug("gated-srp %s, Python %s: %s", __version__, sys.version.split()[0], shlex.join(sys.argv))


# One line per command, in the order in which a user needs them.
app.command("demo")(cohorts.demo)
app.command("init")(cohorts.init)
app.command("extract", context_settings={"token_normalize_func": slides.option_of_others})(slides.extract)
app.command("check")(cohorts.check)
app.command("splits")(cohorts.splits)
app.command("schema")(cohorts.schema)
app.command("redundancy")(cohorts.redundancy)
app.command("pretrain")(runs.pretrain)
app.command("train")(runs.train)
app.command("predict")(runs.predict)
app.command("embed")(runs.embed)
app.command("evaluate")(runs.evaluate)
app.command("arms")(studies.arms)
app.command("compare", context_settings={"token_normalize_func": str})(studies.compare)  # whose --output is --tables
app.command("crossval")(studies.crossval)
app.command("tune")(studies.tune)
app.command("reproduce")(studies.reproduce)
app.command("stats")(studies.stats)
app.command("simulate")(studies.simulate)
app.command("heatmap")(slides.heatmap)
app.command("explain")(slides.explain)
app.command("view")(slides.view)
app.command("localize")(slides.localize)
app.command("readers")(slides.readers)
app.command("report")(slides.report)
app.command("convert")(runs.convert)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Ours against the textbook implementation: time and memory of prepare, predict and train, as ratios of one run."""
    if find_spec("gated_srp_bench") is None:
        raise UserError(
            "this installation has no benchmark (the package gated_srp_bench is missing)",
            cure="Run it from a checkout of the repository: PYTHONPATH=benchmarks gated-srp bench.",
        )
    from gated_srp_bench.cli import app

    if status := app(context.args, prog_name=context.command_path, standalone_mode=False):
        raise typer.Exit(status)


def main() -> None:
    """Entry point: a user's mistake ends with one message and exit status 2, never a traceback; stopped work with 130."""
    logging.captureWarnings(True)
    screen.begin()  # until the options are read
    try:
        app()
    except UserError as error:
        _refuse(error, str(error))
    except Interrupted as stopped:
        LOG.warning("%s", stopped)
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gated_srp"):
            raise
        extra = _EXTRAS.get((error.name or "").partition(".")[0], "train")
        cure = f"Install it in the repository of gated-srp: pip install '.[{extra}]'"
        _refuse(error, f"this command needs the package {error.name!r}. {cure}")
    except Exception:
        LOG.critical("unexpected error. Please report it, with the command and the lines below.", exc_info=True)
        raise


def _refuse(error: Exception, why: str) -> NoReturn:
    """The log file has the traceback too; the screen only where --debug asks for it."""
    LOG.error("error: %s", why, exc_info=True)
    if screen.SCREEN.debug:
        raise error
    raise SystemExit(2) from None
