"""The picture of the README, from the folder that `gated-srp demo` leaves: python docs/images/demo.py gated-srp-demo"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

from gated_srp.demo import NAME, heatmap_slide
from gated_srp.files import whole
from gated_srp.reports.maps import maps_of, read_scores, view_slide
from gated_srp.reports.pictures import draw_maps


def draw(home: Path, output: Path) -> None:
    """The slide of the demo's heatmaps: what is true, what is measured, what is learned."""
    run = home / "runs" / NAME / "gated_srp" / "seed42"
    slide = heatmap_slide(run)
    view = view_slide(run, next(home.rglob(f"{slide}.h5")))
    panels = {
        "true foci": read_scores(home / "truth" / f"{slide}.csv", view.patches),
        "homogeneity: how alike a patch is to its neighbours": maps_of(view, "homogeneity")[0],
        "beta: what the gates of layer 1 have learned": maps_of(view, "beta", layer=1)[0],
    }
    title = f"A generated slide of `gated-srp demo` ({slide}), no tissue: each square is a patch"
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "demo.png"
        draw_maps([(words, view.patches, one) for words, one in panels.items()], large, title=title)
        with Image.open(large) as picture, whole(output) as draft:
            picture.convert("RGB").reduce(2).save(draft, "PNG", optimize=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(__file__).with_suffix(".png"))
