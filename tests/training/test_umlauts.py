"""Names with umlauts: macOS stores them as two characters, a keyboard types one. Each path that a user gives opens either way."""

import shutil
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from factories import make_slide, write_clam, write_clam_pt, write_trident
from toy_cohorts import SMALL, planted

from gated_srp import check, evaluate, heatmap, init, load_model, predict, report
from gated_srp.config import load_config, open_cohort
from gated_srp.data import find_bags, read_bag
from gated_srp.data.matching import files_of_cases
from gated_srp.files import as_stored
from gated_srp.reports.draw import find_image
from gated_srp.reports.maps import Patches

Spelling = Callable[[str], str]


def form(name: str) -> Spelling:
    return lambda text: unicodedata.normalize(name, text)


BOTH = pytest.mark.parametrize(
    ("stored", "typed"), [(form("NFD"), form("NFC")), (form("NFC"), form("NFD"))], ids=["macOS", "Linux"]
)


@BOTH
def test_a_path_is_found_as_the_disk_spells_it(tmp_path: Path, stored: Spelling, typed: Spelling) -> None:
    place = tmp_path / stored("Fälle") / "a" / stored("Größe.csv")
    place.parent.mkdir(parents=True)
    place.write_text("x")
    wanted = tmp_path / typed("Fälle") / "a" / typed("Größe.csv")
    assert not wanted.exists() and as_stored(wanted) == place
    absent = wanted.with_name(typed("fehlt_ü.csv"))
    assert as_stored(absent) == absent and as_stored(wanted / typed("ü")) == wanted / typed("ü")
    wanted.parent.mkdir(parents=True)  # now two folders have the name: nothing is guessed
    assert as_stored(wanted) == wanted


@BOTH
def test_every_path_of_a_user_opens(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, stored: Spelling, typed: Spelling
) -> None:
    monkeypatch.chdir(tmp_path)
    home, names = tmp_path / stored("Fälle"), [f"Müller_{i}" for i in range(8)]
    for i, name in enumerate(names):
        write_trident(home / stored("Schnitte_ä"), stored(name), planted(100 + i, 2.0 * (-1) ** i))
    rows = [f"{name},P{i},{('benign', 'tumour')[i % 2]}" for i, name in enumerate(names)]
    (home / stored("Übersicht.csv")).write_text("\n".join(["slide,case,label", *rows]))
    (home / stored("ohne_ö.txt")).write_text(typed("Müller_7"))
    settings = {"features": "Schnitte_ä", "table": "Übersicht.csv", "exclude": "ohne_ö.txt", "target": "label"}
    text = yaml.safe_dump({"name": "toy", "model": SMALL, **settings}, allow_unicode=True)
    (home / stored("Köln.yaml")).write_text(typed(text))

    cohort = Path(typed("Fälle/Köln.yaml"))
    data = open_cohort(load_config(cohort))
    assert len(data.matches.found) == 7 and data.matches.excluded == ("Müller_7",)
    assert check(cohort).facts["slides"]["found"] == 7
    assert check(cohort.parent / typed("Schnitte_ä")).facts["files"]["usable"] == 8
    draft = init(cohort.parent / typed("Schnitte_ä"), cohort.parent / typed("Übersicht.csv"), out="new.yaml")
    assert not draft.choices and "8 of 8 name a file" in draft.text

    run = Path(typed("Läufe"))
    shutil.copytree(finished, stored("Läufe"))
    assert load_model(run).settings == load_model(finished).settings
    folder = cohort.parent / typed("Schnitte_ä")
    all_of_them = predict(run, folder).table
    assert list(all_of_them["slide"]) == [unicodedata.normalize("NFC", name) for name in names]
    file = find_bags(folder)[2]
    alone = predict(run, typed(str(file))).table
    pd.testing.assert_frame_equal(
        alone.drop(columns="file"), all_of_them.iloc[[2]].drop(columns="file").reset_index(drop=True)
    )
    assert len(evaluate(run, cohort, repeats=2).slides) == 7
    assert heatmap(run, typed(str(file)), out="maps").written[0].is_file()
    assert Path(report(run, out="r.html")).is_file()


@BOTH
def test_positions_and_slide_images_are_found_beside_features(
    tmp_path: Path, stored: Spelling, typed: Spelling
) -> None:
    slide = make_slide(5)
    path = write_clam_pt(tmp_path / "a", typed("Jürgen"), slide)
    (beside,) = (tmp_path / "a" / "patches").iterdir()
    beside.rename(beside.with_name(stored("Jürgen.h5")))
    assert read_bag(path).coords.tolist() == (slide.cells * 512).tolist()
    image = tmp_path / "slides" / stored("Ångström.svs")
    image.parent.mkdir()
    image.write_text("")
    header = read_bag(write_clam(tmp_path / "b", typed("Ångström"), slide))
    assert find_image(Patches.of(replace(header, wsi_path=None)), tmp_path / "slides") == image
    assert find_image(Patches.of(replace(header, wsi_path=None)), tmp_path / "slides" / typed("Ångström.svs")) == image


def test_an_umlaut_ends_no_patients_id() -> None:
    files = [Path("Mü_1.h5"), Path("M_1.h5")]
    assert files_of_cases(["M", "Mü"], files) == {"M": (files[1],), "Mü": (files[0],)}
    assert files_of_cases(["M"], files) == {"M": (files[1],)}
