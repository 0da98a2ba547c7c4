"""Commands on slide images: features out of them, and pictures onto them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gated_srp.cli.screen import LOG, progress_console, say
from gated_srp.errors import UserError

if TYPE_CHECKING:
    from gated_srp.slides.encoders import Encoder
    from gated_srp.slides.extract import Outcome, Watch
    from gated_srp.slides.tiles import Tiling


def extract(
    slides: Annotated[Path, typer.Argument(help="A slide, or a folder of slides.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the feature files.")],
    encoder: Annotated[
        str, typer.Option("--encoder", "-e", help="Its name, or package.module:function for one of your own.")
    ] = "efficientnet_lite0",
    weights: Annotated[
        Path | None, typer.Option("--weights", help="File or folder of the encoder's weights, without internet.")
    ] = None,
    size: Annotated[int | None, typer.Option("--size", min=8, help="Pixels of a patch; the encoder's own.")] = None,
    magnification: Annotated[float, typer.Option("--magnification", "-m", help="Of the patches.")] = 20.0,
    overlap: Annotated[int, typer.Option("--overlap", min=0, help="Pixels that neighbouring patches share.")] = 0,
    tissue: Annotated[float, typer.Option("--tissue", help="Least share of tissue in a patch that is kept.")] = 0.25,
    mpp: Annotated[
        str | None, typer.Option("--mpp", help="Microns a pixel of every slide, or a CSV with the columns wsi, mpp.")
    ] = None,
    layout: Annotated[
        Literal["trident", "atlaspatch"], typer.Option("--layout", help="Whose files to write.")
    ] = "trident",
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, help="Patches the encoder gets at once; 32, or 64 on an accelerator."),
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=0, help="Processes that read patches.")] = None,
) -> None:
    """Find the tissue of slides and write the features of its patches, with a preview of each. Finished slides are kept."""
    from gated_srp.machine import keep_freed_memory
    from gated_srp.slides.extract import Extraction, best_batch, best_workers, extract_slides, read_mpp
    from gated_srp.slides.reader import find_slides
    from gated_srp.slides.store import LAYOUTS
    from gated_srp.slides.tiles import Tiling

    found = find_slides(slides)
    spec = encoder_named(encoder)
    say(f"{spec.name}: {spec.width} features a patch. Licence: {spec.licence}.")
    every, each = read_mpp(mpp)
    settings = Extraction(
        encoder=spec,
        tiling=Tiling(size=size or spec.tile, magnification=magnification, overlap=overlap, tissue=tissue),
        layout=LAYOUTS[layout](output),
        weights=weights,
        mpp=each,
        every_mpp=every,
        batch=batch or best_batch(),
        workers=best_workers() if workers is None else workers,
    )
    keep_freed_memory()
    with _watching(len(found)) as watch:
        outcome = extract_slides(found, settings, watch)
    _summary(outcome, settings.layout.path(settings.job(found[0])).parent)
    if len(outcome.failed) == len(found):
        raise typer.Exit(1)


def heatmap(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN... FEATURES",
            help="Runs (folders or model files), then a slide's feature file or a folder of them, for a picture each.",
        ),
    ],
    wsi: Annotated[
        Path | None, typer.Option("--wsi", help="The slide image; the one that the feature file names, if it is there.")
    ] = None,
    value: Annotated[
        str,
        typer.Option("--value", "-v", help="attention, beta, homogeneity, correction, change, or a CSV of scores."),
    ] = "attention",
    layer: Annotated[int | None, typer.Option("--layer", min=1, help="Which layer, from 1.")] = None,
    head: Annotated[int | None, typer.Option("--head", min=1, help="Which head, from 1; the mean of all.")] = None,
    percentile: Annotated[
        bool, typer.Option("--percentile", help="Colours linear from percentile 1 to 99, instead of by rank.")
    ] = False,
    export: Annotated[
        list[str] | None, typer.Option("--export", help="Also write geojson (QuPath), csv, parquet or h5; repeatable.")
    ] = None,
    stride: Annotated[float | None, typer.Option(help="Distance of patches, where the file's is wrong.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the pictures.")] = Path("heatmap"),
) -> None:
    """Show where a model looks on a slide and what its gates change: PNG, contact sheet, files for QuPath."""
    from gated_srp.reports.show import Request, show_slide

    request = Request(
        value=value,
        layer=layer,
        head=head,
        percentile=percentile,
        image=wsi,
        exports=tuple(export or ()),
        stride=stride,
    )
    *runs, where = paths
    files = _feature_files(where, runs)
    if len(files) > 1 and wsi is not None:
        raise UserError(f"--wsi {wsi}: one image for the {len(files)} slides of {where}. Name one feature file.")
    left_out = 0
    for file in files:
        try:
            written = show_slide(runs, file, request, output)
        except UserError as error:
            if len(files) == 1:
                raise
            LOG.warning("left out: %s", error)
            left_out += 1
        else:
            for path in written:
                say(f"written: {path}")
    if left_out == len(files):
        raise typer.Exit(1)


def _feature_files(where: Path, runs: Sequence[Path]) -> list[Path]:
    """Of a folder all that come from the first run's encoder, else the file itself; what is neither is told what to do."""
    from gated_srp.data.files.siblings import find_bags
    from gated_srp.slides.reader import ENDINGS

    if where.suffix.lower() in ENDINGS:
        raise UserError(
            f"{where}: a slide image, expected its feature file. Make one with `gated-srp extract {where} -o FOLDER --encoder NAME`, or "
            f"have everything at once: `gated-srp explain RUN {where}`."
        )
    if where.suffix == ".safetensors" or (where / "model.safetensors").is_file():
        features = next((path for path in runs if not (path / "model.safetensors").is_file()), "FEATURES")
        raise UserError(f"{where}: a run; the features come last: `gated-srp heatmap {where} {features}`.")
    if not where.is_dir() or where.suffix == ".zarr":
        return [where]
    encoder = _card(runs[0]).get("encoder") if runs else None
    found = find_bags(where, encoder=encoder)
    if not found:
        of = f" of {encoder}" if encoder else ""
        raise UserError(
            f"{where}: no feature files{of} below this folder. Expected RUN... FEATURES: runs, then a slide's feature file (or a "
            "folder of them) as `gated-srp extract` writes it."
        )
    return found


def explain(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its model file.")],
    slide: Annotated[Path, typer.Argument(help="The slide image, or a feature file of it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the page.")] = Path("explained"),
    encoder: Annotated[str | None, typer.Option("--encoder", "-e", help="Where the run's card names none.")] = None,
    weights: Annotated[Path | None, typer.Option("--weights", help="The encoder's, without internet.")] = None,
    size: Annotated[int | None, typer.Option("--size", min=8, help="Pixels of a patch; the encoder's own.")] = None,
    magnification: Annotated[float, typer.Option("--magnification", "-m", help="Of the patches.")] = 20.0,
    mpp: Annotated[float | None, typer.Option("--mpp", help="Microns a pixel, where the slide does not say.")] = None,
) -> None:
    """From a slide to one page: features if needed, prediction, maps, patches, and how far to trust it."""
    from gated_srp.data.files.containers import CONTAINERS
    from gated_srp.reports.explain import explain_slide
    from gated_srp.slides.tiles import Tiling

    file, image = slide, None
    if slide.suffix.lower() not in CONTAINERS:
        spec = encoder_named(encoder or _encoder_of(run))
        tiling = Tiling(size=size or spec.tile, magnification=magnification)
        file, image = _features_of(slide, output / "features", spec, tiling, weights=weights, mpp=mpp), slide
    for path in explain_slide(run, file, output, image=image):
        say(f"written: {path}")


def _encoder_of(run: Path) -> str:
    name = _card(run).get("encoder")
    if name is None:
        raise UserError(f"{run}: its card does not name the encoder of its features. Name it with --encoder.")
    return str(name)


def _card(run: Path) -> dict[str, Any]:
    from gated_srp.models import load_card, model_file

    return load_card(model_file(run))


def _features_of(
    slide: Path, out: Path, spec: "Encoder", tiling: "Tiling", *, weights: Path | None, mpp: float | None
) -> Path:
    """The slide's feature file, extracted if it is not there."""
    from gated_srp.machine import keep_freed_memory
    from gated_srp.slides.extract import Extraction, extract_slides
    from gated_srp.slides.store import Trident

    settings = Extraction(encoder=spec, tiling=tiling, layout=Trident(out), weights=weights, every_mpp=mpp)
    keep_freed_memory()
    with _watching(1, results=False) as watch:  # what goes wrong is raised below
        outcome = extract_slides([slide], settings, watch)
    if outcome.failed:
        raise outcome.failed[0]
    if outcome.empty:
        raise UserError(
            f"{slide}: no tissue was found. Look at the preview: {settings.layout.picture(settings.job(slide))}"
        )
    return settings.layout.path(settings.job(slide))


def encoder_named(name: str) -> "Encoder":
    """By any tool's spelling of its name."""
    from gated_srp.data.files.encoders import canonical
    from gated_srp.slides.encoders import ENCODERS, find_encoder

    return find_encoder(canonical(name) if canonical(name) in ENCODERS else name)


def _summary(outcome: "Outcome", folder: Path) -> None:
    for error in outcome.failed:
        LOG.warning("left out: %s", error)
    for slide in outcome.empty:
        LOG.warning("no tissue: %s: its file has no patches. Look at its preview; lower --tissue if wrong.", slide)
    parts = {"extracted": outcome.done, "there already": outcome.there, "without tissue": outcome.empty}
    said = [f"{len(slides)} {name}" for name, slides in parts.items() if slides]
    said += [f"{len(outcome.failed)} left out"] if outcome.failed else []
    say(f"{folder}: {', '.join(said)}")


@contextmanager
def _watching(slides: int, *, results: bool = True) -> Iterator["Watch"]:
    """Bars in a terminal, and with ``results`` a line a slide; on the error stream."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = progress_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        everything, current = bar.add_task("slides", total=slides), bar.add_task("patches", total=None)

        class Bars:
            def slide(self, path: Path, patches: int) -> None:
                bar.reset(current, total=patches, description=path.name)

            def patches(self, number: int) -> None:
                bar.advance(current, number)

            def finished(self, path: Path, how: str) -> None:
                bar.advance(everything)
                if results:
                    console.print(f"{path.name}: {how}", markup=False)

        yield Bars()
