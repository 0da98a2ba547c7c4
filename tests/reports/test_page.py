"""The page of `gated-srp report`: words first, everything inside, nothing of the user's runs as code."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from reports.page_folders import HOSTILE, compared, draw
from study.study_cells import cells, finish
from typer.testing import CliRunner

from gated_srp.errors import UserError
from gated_srp.reports.gates import draw_regimes, draw_signed_gate
from gated_srp.reports.page import LARGEST, build_page, report
from gated_srp.reports.page.contents import StudyFolder, inline_svg, read_contents, read_name, small_png, within
from gated_srp.reports.page.tables import forests, run_metrics, slides


class Reader(HTMLParser):
    """Collects what a browser would load or run, ids, and the words in their order."""

    def __init__(self, text):
        super().__init__()
        self.links, self.tags, self.ids, self.handlers, self.words = [], [], [], [], []
        self.silent = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.silent = tag if tag in ("style", "script") else None
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_endtag(self, tag):
        self.silent = None

    def handle_data(self, data):
        if self.silent is None:
            self.words.append(data)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def page(home):
    return build_page(home)


@pytest.fixture(scope="module")
def read(page):
    return Reader(page)


def test_no_inlined_figure_refers_to_what_is_not_there(tmp_path):
    """Hatched regimes are patterns: a page without them shows blank bars."""
    (cell,) = cells(tmp_path, seeds=(42,), arms=("gated_srp",))
    finish(cell, gates=(0.1, 0.7))
    drawn = [*draw_regimes({"toy": [cell.run]}, tmp_path / "regimes", title="x"), *draw_signed_gate(tmp_path / "gate")]
    for place, path in enumerate(path for path in drawn if path.suffix == ".svg"):
        text = inline_svg(path, f"p{place}-")
        named = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
        assert named and named <= set(re.findall(r'\bid="([^"]+)"', text)), path
        assert ("pattern" in text) == (path.stem == "regimes")


def test_every_reference_of_the_page_is_resolved(page, read):
    named = re.findall(r"url\(#([^)]+)\)", page)
    assert named and set(named) <= set(read.ids)


def test_the_page_loads_nothing_and_runs_its_own_script_alone(read, page):
    assert all(link.startswith(("#", "data:")) for link in read.links)
    assert read.tags.count("script") == 1 and read.handlers == []
    assert "default-src &#39;none&#39;" in page and len(page.encode()) < LARGEST


def test_no_id_stands_twice(read):
    assert len(read.ids) == len(set(read.ids))


def test_the_verdict_comes_before_the_numbers_it_speaks_of(read):
    words = " ".join(" ".join(read.words).split())
    verdict = words.index("Gated SRP against NA, toy, F1")
    assert words[verdict:].startswith("Gated SRP against NA, toy, F1 better (+0.1100, 95 % interval")
    assert verdict < words.index("Differences")
    assert "XSA against NA, toy, F1 not distinguishable from zero with three seeds" in words


def test_only_what_holds_after_correction_is_coloured(page):
    assert page.count('<li class="better">') == 1 and page.count('<li class="open">') == 1


def test_the_users_words_stay_words(page, read):
    assert HOSTILE not in page and "<b>generated</b>" not in page
    assert sum(HOSTILE in word for word in read.words) >= 4  # a slide, a label, a finding, a platform


def test_every_part_of_the_folder_is_on_the_page(page):
    for wanted in ("Forest plot, toy, F1", "Gates over the epochs", "ROC and precision-recall", "Calibration on test"):
        assert wanted in page
    assert "Heatmap: beta, layer 2, slide s00" in page and "13 usable, 0 broken; 2.0 MB" in page
    assert "gated-srp compare cohort.yaml --arms gated_srp,na,xsa --seeds 42,43,44" in page
    assert page.count("Research use only") == 2


def test_a_slide_shows_the_probability_of_its_true_class_over_seeds(home):
    table = next(iter(slides(read_contents(home).runs)))
    assert table.heads == ("Slide", "Case", "Label", "Gated SRP", "NA", "XSA")
    rows = {row[0][0]: row for row in table.rows}
    assert rows["s00"][3][0] == "0.572 (3 seeds)"  # 0.5 + 0.72 / 10
    assert rows["s01"][3][0] == "0.428 (3 seeds)"  # its class is the other


def test_places_on_the_forest_follow_the_numbers():
    row = {"cohort": "c", "metric": "m", "arm": "x", "claimed": True}
    row["corrected"] = {"difference": 0.5, "interval": [0.0, 1.0]}
    forest = next(forests(StudyFolder(Path(), {"reference": "na", "cohorts": [row]}, (), ())))
    assert (forest.low, forest.high) == pytest.approx((-0.06, 1.06))
    line = forest.lines[0]
    assert (line["from"], line["at"], line["to"]) == pytest.approx((5.36, 50.0, 94.64))
    assert forest.zero == line["from"] and line["tone"] == "better"


def test_one_run_gets_a_page_that_claims_nothing(home):
    text = build_page(home / "runs" / "toy" / "gated_srp" / "seed42")
    assert "F1 0.7100 on the test set. One run: it says how this model does" in text
    assert "Gates over the epochs" in text and "ROC" in text and 'id="comparison"' not in text
    assert "gated-srp train cohort.yaml --arm gated_srp --seed 42" in text


def test_a_comparison_finds_its_runs_beside_it(home, tmp_path):
    from shutil import copytree

    copytree(home / "runs", tmp_path / "out")
    copytree(home / "comparison", tmp_path / "out" / "toy" / "comparison")
    assert len(read_contents(tmp_path / "out" / "toy" / "comparison").runs) == 9


def test_a_reproduction_is_shown_beside_the_published(tmp_path):
    (tmp_path / "survival").mkdir()
    (tmp_path / "survival" / "reproduction.csv").write_text(
        "row,cohort,metric,mean,std,seeds,published,published_std,difference,low,high,verdict\n"
        "NA,KIRC,c_index,0.71234,0.02,5,0.7,0.05,0.01234,-0.04,0.06,compatible\n"
        "XSA,KIRC,c_index,0.5,0.01,5,0.7,0.05,-0.2,-0.25,-0.15,not compatible\n"
        "NA,LUAD,c_index,,,0,0.6,0.05,,,,not run\n"
    )
    text = build_page(tmp_path)
    assert "<h1>KIRC</h1>" in text and "Beside the published numbers" in text
    assert "0.7123 ± 0.0200" in text and "−0.2500 to −0.1500" in text and "Not run: 1 more number of the table" in text
    assert "1 of 2 numbers that were run are compatible with the published ones, 1 are not; 1 were not run" in text
    assert "gated-srp reproduce survival --features FOLDER" in text


def test_a_runtime_is_shown_and_not_judged(tmp_path):
    (tmp_path / "reproduction.csv").write_text(
        "row,cohort,metric,mean,std,seeds,published,published_std,difference,low,high,verdict,times_base\n"
        "NA,KIRC,test_wsi_per_second,3.5,,1,70,,,,,not judged,1.0\n"
    )
    text = build_page(tmp_path)
    assert "Times base" in text and "Nothing was compared." in text


def test_runs_of_one_arm_with_other_settings_are_told_apart(home, tmp_path):
    from shutil import copytree

    copytree(home / "runs" / "toy" / "gated_srp", tmp_path / "toy" / "gated_srp")
    copytree(
        home / "runs" / "toy" / "gated_srp", tmp_path / "variants" / "model.delta=1.0,window=5" / "toy" / "gated_srp"
    )
    names = {row[1][0] for row in run_metrics(read_contents(tmp_path).runs).rows}
    assert names == {"Gated SRP", "Gated SRP (delta=1.0, window=5)"}


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing to report"):
        build_page(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        build_page(tmp_path / "absent")


def test_a_torn_file_is_named(tmp_path):
    (tmp_path / "comparison.json").write_text('{"cohorts": [')
    with pytest.raises(UserError, match=r"comparison\.json: cannot be read"):
        build_page(tmp_path)


def test_a_drawing_is_rid_of_all_that_runs_or_loads(tmp_path):
    path = tmp_path / "x.svg"
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" onload="alert(1)" viewBox="0 0 1 1">'
        '<script>alert(1)</script><style>@import "http://x"</style><foreignObject><p/></foreignObject>'
        '<g id="a" style="fill: url(http://x/y)"><path d="M0 0" clip-path="url(#c)"/></g>'
        '<use xlink:href="#a"/><use xlink:href="http://x/#a"/><a href="javascript:alert(1)"><text>t</text></a></svg>'
    )
    text = inline_svg(path, "p-")
    for gone in ("script", "import", "foreignObject", "onload", "http://x", "javascript", "<a"):
        assert gone not in text
    assert 'id="p-a"' in text and 'href="#p-a"' in text and "url(#p-c)" in text
    path.write_text("no drawing")
    assert inline_svg(path, "p-") is None


def test_pictures_that_do_not_fit_are_left_out_by_name(tmp_path):
    paths = [tmp_path / "s" / f"{name}.png" for name in "abc"]
    draw(paths[0], (3000, 20))
    draw(paths[1], (3000, 20))
    paths[2].write_bytes(b"no picture")
    kept, left_out = within(paths, int(1.4 * len(small_png(paths[0])) + 100))
    assert [one.value for one in kept] == ["a"] and left_out == ["s/b"]
    assert small_png(paths[2]) is None


def test_names_of_maps_tell_slide_value_and_layer():
    assert read_name("h/TCGA-01_x_attention_layer4") == ("TCGA-01_x", "attention", "4")
    assert read_name("h/s1_attention_layer4_positive") == ("s1", "attention positive", "4")
    assert read_name("s1/homogeneity") == ("s1", "homogeneity", "")


def test_maps_are_chosen_by_slide_value_and_layer_in_order_of_number(home, tmp_path):
    from shutil import copytree

    copytree(home / "runs" / "toy" / "gated_srp" / "seed42", tmp_path / "run")
    for name in ("s1_beta_layer10", "s1_beta_layer2", "s2_change_layer2", "s2_true_focus"):
        draw(tmp_path / "h" / f"{name}.png")
    page = build_page(tmp_path)
    assert "<option>s2</option><option>s1</option>" in page  # the demo's truth comes first
    for name, wanted in {"value": ["true focus", "beta", "change"], "layer": ["2", "10"]}.items():
        assert re.findall(f'name="{name}" value="([^"]+)"', page) == wanted


def test_the_page_is_written_whole(home, tmp_path):
    written = report(str(home), out=tmp_path / "out" / "report.html")
    assert Path(written) == tmp_path / "out" / "report.html" and "report.html" in written._repr_html_()
    assert written.size == Path(written).stat().st_size and len(list((tmp_path / "out").iterdir())) == 1


def test_the_settings_on_the_page_are_those_of_the_run(home, page):
    import html

    text = (home / "runs" / "toy" / "na" / "seed42" / "config.yaml").read_text()
    assert yaml.safe_load(text)["name"] == "toy" and html.escape(text, quote=False)[:80] in page.replace("&#39;", "'")


def test_the_command_says_where_the_page_is(home, tmp_path):
    import typer

    from gated_srp.cli import slides

    app = typer.Typer()
    app.command()(slides.report)
    said = CliRunner().invoke(app, [str(home), "-o", str(tmp_path / "r.html")])
    assert said.exit_code == 0 and f"written: {tmp_path / 'r.html'}" in said.output


def row(difference, low, high, *, claimed=False, n=5, metric="macro_f1", arm="gated_srp"):
    test = {"difference": difference, "interval": [low, high]}
    return {"cohort": "toy", "arm": arm, "metric": metric, "n": n, "claimed": claimed, "corrected": test}


def test_the_page_opens_with_the_answer_in_one_sentence():
    from gated_srp.reports.page.tables import headline

    helped = headline(row(0.1, 0.05, 0.15, claimed=True), "F1", "NA")
    assert (
        helped
        == "On toy, Gated SRP measurably helped compared with NA: F1 +0.1000, 95 % interval +0.0500 to +0.1500, 5 seeds."
    )
    assert "measurably hurt" in headline(row(-0.1, -0.15, -0.05, claimed=True), "F1", "NA")
    assert "measurably helped" in headline(row(-0.1, -0.15, -0.05, claimed=True, metric="brier"), "Brier", "NA")
    open_ = headline(row(-0.02, -0.05, 0.01, n=2), "F1", "NA")
    assert "did not measurably help or hurt" in open_ and "it is 0.050 lower. With so few seeds" in open_
    assert "it is 0.010 higher" in headline(row(-0.02, -0.05, 0.01, metric="brier"), "Brier", "NA")
    assert "too little for an answer" in headline(row(0.1, None, None, n=1), "F1", "NA")


def test_gated_arms_come_first_and_the_headline_is_on_the_page(tmp_path):
    home = compared(tmp_path)
    text = build_page(home)
    assert text.index("On toy, Gated SRP") < text.index("Gated SRP against NA") < text.index("XSA against NA")
    assert "What the words mean" in text
