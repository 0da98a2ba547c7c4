"""Commands on slides: features out of them, pictures and pages of them; and the page of everything."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from gated_srp.cli.options import Coords, Drawn, Force, Low, Magnification, Repeats, Run, Size, Stride, Whose
from gated_srp.cli.screen import LOG, say, say_written, show_progress
from gated_srp.errors import UserError

# TRIDENT's and AtlasPatch's names of the same options, accepted and not listed; - and _ are one.
_ALIASES = {
    **dict.fromkeys(("mag", "target-mag", "target-magnification"), "magnification"),
    **dict.fromkeys(("batch-size", "feat-batch-size"), "batch"),
    **dict.fromkeys(("output", "job-dir"), "out"),
    **dict.fromkeys(("patch-encoder", "feature-extractors"), "encoder"),
    "patch-size": "size",
    "patch-encoder-ckpt-path": "weights",
    "min-tissue-proportion": "tissue",
    "custom-list-of-wsis": "list",
    "max-workers": "workers",
    "dump-patches": "save-patches",
}


def option_of_others(name: str) -> str:
    """
    >>> option_of_others("patch_size"), option_of_others("skip_errors"), option_of_others("overlap")
    ('size', 'skip-errors', 'overlap')
    """
    plain = name.replace("_", "-")
    return _ALIASES.get(plain, plain)


def extract(
    slides: Annotated[Path | None, Argument(help="A slide, or a folder of slides.", show_default=False)] = None,
    *,
    output: Annotated[Path, Option("--out", "-o", help="Folder of the feature files.")],
    encoder: Annotated[
        str, Option("--encoder", "-e", help="Its name, or package.module:function for one of your own.")
    ] = "efficientnet_lite0",
    weights: Annotated[Path | None, Option(help="File or folder of the encoder's weights, without internet.")] = None,
    size: Size = None,
    magnification: Magnification = 20.0,
    overlap: Annotated[int, Option(min=0, help="Pixels that neighbouring patches share.")] = 0,
    tissue: Annotated[float, Option(help="Least share of tissue in a patch that is kept.")] = 0.25,
    exclude_pen: Annotated[
        bool, Option("--exclude-pen", help="Leave out patches with blue, green or black ink; for H&E.")
    ] = False,
    mpp: Annotated[
        str | None, Option(help="Microns per pixel of every slide, or a CSV with the columns wsi, mpp.")
    ] = None,
    annotations: Annotated[
        Path | None, Option(help="Folder with a file per slide of what was drawn on it; goes with --only or --exclude.")
    ] = None,
    inside: Annotated[
        list[str] | None,
        Option("--only", help="Keep patches that regions of this class cover (--cover); repeatable.", metavar="CLASS"),
    ] = None,
    outside: Annotated[
        list[str] | None,
        Option("--exclude", help="Leave out patches that regions of this class cover; repeatable.", metavar="CLASS"),
    ] = None,
    cover: Annotated[float, Option(help="Share of a patch's area from which on regions cover it.")] = 0.5,
    unannotated: Annotated[
        Literal["refuse", "whole"], Option(help="Slides without a file of annotations: left out, or used whole.")
    ] = "refuse",
    layout: Annotated[Literal["trident", "atlaspatch"], Option(help="Whose files to write.")] = "trident",
    batch: Annotated[
        int | None, Option(min=1, help="Patches the encoder gets at once; 32, or 64 on an accelerator.")
    ] = None,
    workers: Annotated[int | None, Option(min=0, help="Processes that read patches.")] = None,
    only: Annotated[
        Path | None,
        Option(
            "--list",
            help="Take these alone: a file with one slide per line, or a CSV with the columns wsi and, if needed, mpp.",
        ),
    ] = None,
    save_patches: Annotated[bool, Option("--save-patches", help="Also write every patch as an image.")] = False,
    devices: Annotated[int, Option(min=1, help="Processes that share the slides, each with a GPU of its own.")] = 1,
    skip_errors: Annotated[
        bool, Option("--skip-errors", help="Exit status 0 although slides were left out; it is 1 otherwise.")
    ] = False,
    wsi_dir: Annotated[Path | None, Option("--wsi-dir", hidden=True)] = None,
    task: Annotated[str, Option(hidden=True)] = "all",
) -> None:
    """Find the tissue of slides and write the features of its patches, with a preview of each. Finished slides are kept."""
    import gated_srp
    from gated_srp.slides.encoders import find_encoder

    slides = slides or wsi_dir
    if slides is None:
        raise UserError("no slide or folder of slides is named", cure="gated-srp extract SLIDES -o FEATURES")
    if task != "all":
        cure = "Leave --task out: tissue, patches and features are one step, and what is done is not done again."
        raise UserError(f"{task!r}: TRIDENT's tasks are not separate here", where="--task", cure=cure)
    regions = None
    if annotations is not None or inside or outside:
        named: dict[str, Any] = {"annotations": annotations, "only": inside or (), "exclude": outside or ()}
        regions = named | {"cover": cover, "unannotated": unannotated}
    say(str(find_encoder(encoder)))
    with show_progress() as progress:
        outcome = gated_srp.extract(
            slides,
            output,
            encoder=encoder,
            weights=weights,
            size=size,
            magnification=magnification,
            overlap=overlap,
            tissue=tissue,
            exclude_pen=exclude_pen,
            mpp=mpp,
            layout=layout,
            regions=regions,
            only=only,
            save_patches=save_patches,
            devices=devices,
            batch=batch,
            workers=workers,
            progress=progress,
        )
    for error in outcome.failed:
        LOG.warning("left out: %s", error)
    for note in outcome.notes:
        LOG.warning("%s", note)
    for slide in outcome.empty:
        LOG.warning("no tissue: %s: its file has no patches. Look at its preview; lower --tissue if wrong.", slide)
    say(str(outcome))
    if outcome.failed and not (skip_errors and (outcome.done or outcome.there or outcome.empty)):
        raise typer.Exit(1)


def heatmap(
    paths: Annotated[
        list[Path],
        Argument(
            metavar="RUN... FEATURES",
            help="Runs (folders or model files), then a slide's feature file, or a folder of them for one picture per slide.",
        ),
    ],
    wsi: Annotated[
        Path | None, Option(help="The slide image, or the folder with the images; nothing else is opened.")
    ] = None,
    value: Annotated[
        str, Option("--value", "-v", help="attention, beta, homogeneity, correction, change, or a CSV of scores.")
    ] = "attention",
    layer: Annotated[int | None, Option(min=1, help="Which layer, from 1.")] = None,
    head: Annotated[int | None, Option(min=1, help="Which head, from 1; the mean over heads if not set.")] = None,
    gates: Annotated[
        Literal["off", "projection", "reflection", "amplification"] | None,
        Option(help="What if: set every gate to this instead of what it learned."),
    ] = None,
    percentile: Annotated[
        bool,
        Option("--percentile", help="Stretch the colours to each slide, percentile 1 to 99, instead of a fixed scale."),
    ] = False,
    overlay: Annotated[
        Literal["grey", "stain", "contour"],
        Option(help="Colours over grey tissue, over its own colours, or outlines over the latter."),
    ] = "grey",
    grid: Annotated[bool, Option("--grid", help="Also all slides beside all runs in one picture.")] = False,
    annotations: Drawn = None,
    export: Annotated[
        list[str] | None, Option(help="Also write geojson (QuPath), csv, parquet or h5; repeatable.")
    ] = None,
    coords: Coords = None,
    table: Whose = None,
    features_low: Low = None,
    stride: Stride = None,
    force: Force = False,
    output: Annotated[Path, Option("--out", "-o", help="Folder of the pictures.")] = Path("heatmap"),
) -> None:
    """Show where a model looks on a slide and what its gates change: PNG, contact sheet, files for QuPath."""
    import gated_srp

    *runs, features = paths
    with show_progress() as progress:
        found = gated_srp.heatmap(
            runs,
            features,
            value=value,
            layer=layer,
            head=head,
            gates=gates,
            percentile=percentile,
            overlay=overlay,
            grid=grid,
            wsi=wsi,
            annotations=annotations,
            export=export or (),
            coords=coords,
            table=table,
            features_low=features_low,
            stride=stride,
            force=force,
            out=output,
            progress=progress,
        )
    for note in found.warnings:
        LOG.warning("%s", note)
    for note in found.left_out:
        LOG.warning("left out: %s", note)
    say_written(found.written)
    if not found.slides:
        raise typer.Exit(1)


def explain(
    run: Run,
    slide: Annotated[Path, Argument(help="The slide image, or a feature file of it.")],
    output: Annotated[Path, Option("--out", "-o", help="Folder of the page.")] = Path("explained"),
    encoder: Annotated[str | None, Option("--encoder", "-e", help="Where the run's card names none.")] = None,
    weights: Annotated[Path | None, Option(help="The encoder's, without internet.")] = None,
    size: Size = None,
    magnification: Magnification = 20.0,
    mpp: Annotated[float | None, Option(help="Microns per pixel, where the slide does not say.")] = None,
    table: Whose = None,
    annotations: Drawn = None,
    force: Force = False,
) -> None:
    """From a slide to one page: features if needed, prediction, maps, patches, and how far to trust it."""
    import gated_srp

    with show_progress() as progress:
        found = gated_srp.explain(
            run,
            slide,
            out=output,
            encoder=encoder,
            weights=weights,
            size=size,
            magnification=magnification,
            mpp=mpp,
            table=table,
            annotations=annotations,
            force=force,
            progress=progress,
        )
    for note in found.notes:
        LOG.warning("%s", note)
    say_written(found.written)


def view(
    slides: Annotated[
        list[Path], Argument(metavar="SLIDE_OR_FEATURES...", help="Feature files, folders of them, or slide images.")
    ],
    runs: Annotated[
        list[Path],
        Option("--runs", "-r", help="A run's folder or model file; repeat it to compare: the first is the base."),
    ],
    wsi: Annotated[Path | None, Option(help="The slide image, or the folder with the images.")] = None,
    export: Annotated[Path | None, Option(help="Write a folder that opens from the disk, instead of serving.")] = None,
    features: Annotated[Path, Option(help="Folder for the features of slide images.")] = Path("viewed"),
    size: Size = None,
    annotations: Drawn = None,
    port: Annotated[int, Option(min=0, max=65535, help="0: a free one.")] = 0,
    coords: Coords = None,
    table: Whose = None,
    stride: Stride = None,
    force: Force = False,
) -> None:
    """Zoom into slides with the maps of runs side by side, in a browser; what-ifs of the gates while it is served."""
    import gated_srp
    from gated_srp.reports.viewer import ExportedViewer
    from gated_srp.reports.viewer.server import serve

    with show_progress() as progress:
        found = gated_srp.view(
            slides,
            runs,
            wsi=wsi,
            export=export,
            features=features,
            annotations=annotations,
            size=size,
            coords=coords,
            table=table,
            stride=stride,
            force=force,
            progress=progress,
        )
    if isinstance(found, ExportedViewer):
        for note in found.notes:
            LOG.warning("note: %s", note)
        say(f"written: {found.page} ({found.size / 1e6:.1f} MB with its folder, opens in any browser, loads nothing)")
        return
    serve(found, port=port, ready=lambda at: say(f"open {at} in a browser on this machine; Ctrl-C ends it"))


def localize(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Run folders or model files, or a folder of runs.")],
    slides: Annotated[Path, Option(help="Folder of feature files, or one file.")],
    annotations: Annotated[Path, Option(help="Folder with a file of annotations per slide, or the file of one.")],
    classes: Annotated[
        list[str] | None,
        Option("--class", "-c", help="What is to be found; repeatable. All, where there is one class."),
    ] = None,
    cover: Annotated[float, Option(help="Share of a patch that regions must cover for it to count as positive.")] = 0.5,
    normal: Annotated[
        bool, Option("--normal", help="Slides without a file have nothing to find, instead of being left out.")
    ] = False,
    table: Annotated[Path | None, Option(help="Spreadsheet of slides and patients, where the runs do not say.")] = None,
    reference: Annotated[str | None, Option(help="The arm that others are compared with; na if it is there.")] = None,
    allow_overlap: Annotated[
        bool, Option("--allow-overlap", help="Score training slides too, which is no test.")
    ] = False,
    bootstrap: Repeats = 1000,
    coords: Coords = None,
    stride: Stride = None,
    force: Force = False,
    output: Annotated[Path, Option("--out", "-o", help="Folder of tables and figures.")] = Path("localized"),
) -> None:
    """Score maps against what was drawn on the slides: per arm, and arms paired on the same slides."""
    import gated_srp

    with show_progress() as progress:
        found = gated_srp.localize(
            runs,
            slides,
            annotations=annotations,
            classes=classes or (),
            cover=cover,
            normal=normal,
            table=table,
            reference=reference,
            allow_overlap=allow_overlap,
            repeats=bootstrap,
            coords=coords,
            stride=stride,
            force=force,
            progress=progress,
        )
    say(found.verdict)
    say_written(found.write(output))


def readers(
    paths: Annotated[
        list[Path], Argument(metavar="RUN_A RUN_B | ANSWERS...", help="Two runs; with --score, files of answers.")
    ],
    slides: Annotated[Path | None, Option(help="Feature files of the slides to show, a folder or one file.")] = None,
    value: Annotated[str, Option("--value", "-v", help="What the maps show.")] = "attention",
    wsi: Annotated[Path | None, Option(help="The slide image, or the folder with the images.")] = None,
    seed: Annotated[int, Option(min=0, help="Of the order of slides and sides.")] = 0,
    score: Annotated[bool, Option("--score", help="Score files of answers.")] = False,
    key: Annotated[Path, Option(help="With --score: the key beside the page.")] = Path("readers/key.json"),
    force: Force = False,
    output: Annotated[Path, Option("--out", "-o", help="Folder of the page and its key.")] = Path("readers"),
) -> None:
    """Ask people which of two runs' maps they prefer, without telling them which is which; and score their answers."""
    import gated_srp

    if score:
        found = gated_srp.score_readers(paths, key=key)
        say(found.table.to_string(float_format="{:.3g}".format))
        say(found.verdict)
        return
    if slides is None:
        raise UserError("which slides?", where="--slides", cure="Name a folder of feature files, or one of them.")
    with show_progress() as progress:
        made = gated_srp.readers(
            paths, slides, value=value, wsi=wsi, seed=seed, force=force, out=output, progress=progress
        )
    say(f"written: {made.page} ({made.pairs} {'pair' if made.pairs == 1 else 'pairs'}), for the readers")
    say(f"written: {made.key}, which says what was on which side: keep it to yourself")


def report(
    folder: Annotated[Path, Argument(help="A run, a comparison, a reproduction, or a folder above them.")],
    output: Annotated[Path, Option("--out", "-o", help="The page.")] = Path("report.html"),
    maps: Annotated[
        int | None, Option(min=0, help="Test slides whose maps are drawn; by default what half a minute allows.")
    ] = None,
    wsi: Annotated[Path | None, Option(help="The folder with the slide images, to draw the maps on tissue.")] = None,
    truth: Annotated[Path | None, Option(help="A folder with SLIDE.csv: which patches are true; FOLDER/truth.")] = None,
) -> None:
    """Write one self-contained page: the verdict in words, tables, figures, maps of test slides, how to reproduce."""
    import gated_srp

    written = gated_srp.report(folder, out=output, maps=maps, wsi=wsi, truth=truth)
    say(f"written: {output} ({written.size / 1e6:.1f} MB, opens in any browser, loads nothing)")
