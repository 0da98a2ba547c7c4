"""The one YAML: what is said, what is filled in, what is refused and with which words."""

from pathlib import Path

import pytest
import yaml
from factories import make_slide, write_trident
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gated_srp.config import COHORTS, load_config, open_cohort
from gated_srp.config.load import read_settings, with_changes
from gated_srp.data import write_split
from gated_srp.errors import UserError

TABLE = "slide_id,case_id,label\n" + "".join(f"s{i},p{i // 2},{'ab'[i // 2 % 2]}\n" for i in range(24))


@pytest.fixture
def write(tmp_path):
    def _write(text, table=TABLE):
        (tmp_path / "slides.csv").write_text(table)
        (tmp_path / "cohort.yaml").write_text(text)
        return tmp_path / "cohort.yaml"

    return _write


def refusal(path, overrides=None) -> str:
    with pytest.raises(UserError) as error:
        load_config(path, overrides)
    return str(error.value)


def test_paths_are_relative_to_the_file(write, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    config = load_config(write("table: slides.csv\nfeatures: [feats, ../more]\ncache: warm\nsplit: s.csv\n"))
    assert config.table == tmp_path / "slides.csv"
    assert config.features == (tmp_path / "feats", tmp_path / ".." / "more")
    assert (config.cache.folder, config.split, config.out) == (tmp_path / "warm", tmp_path / "s.csv", tmp_path / "runs")


def test_paths_of_overrides_are_relative_to_the_current_folder(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    config = load_config(write("table: slides.csv\nout: here\n"), {"out": "there", "cache": {"folder": Path("warm")}})
    assert (config.out, config.cache.folder) == (tmp_path.parent / "there", tmp_path.parent / "warm")


def test_an_override_changes_one_value_of_a_section(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    path = write("table: slides.csv\ncache: warm\nfolds: 5\ntrain: {lr: 1, clip: 2}\n")
    config = load_config(path, {"cache.dtype": "float16", "folds": {"by": "site"}, "train.lr": 3, "train.epochs": 4})
    assert (config.cache.folder, config.cache.dtype) == (tmp_path / "warm", "float16")
    assert (config.folds.number, config.folds.by) == (5, "site")
    assert (config.train.lr, config.train.clip, config.train.epochs) == (3, 2, 4)
    assert load_config(path, {"cache.folder": "x"}).cache.folder == tmp_path.parent / "x"
    assert load_config(path, {"cache": None, "folds": None}).folds is None
    assert "no such setting" in refusal(path, {"trian.lr": 3})


def test_a_cohort_of_ones_own_gets_the_recipe_of_its_task(write):
    classes = load_config(write("table: slides.csv\n"))
    assert (classes.name, classes.task, classes.metric, classes.score) == (
        "cohort",
        "classification",
        "macro_f1",
        "slide",
    )
    train = classes.train
    assert (train.epochs, train.lr, train.weight_decay, train.accumulation, train.batch_size) == (15, 2e-4, 0.05, 16, 1)
    assert (train.clip, train.warmup, train.precision, train.only) == (1.0, 0.05, "auto", None)
    assert train.gate_lr == 1.0
    assert (classes.gate().delta, classes.gate().hidden_dim, classes.cap) == (1.0, 64, None)
    survival = load_config(write("table: slides.csv\ntime: t\nevent: e\n"))
    assert (survival.task, survival.metric, survival.score) == ("survival", "c_index", "case")
    train = survival.train
    assert (train.epochs, train.lr, train.weight_decay, train.accumulation) == (20, 1e-4, 1e-5, 1)


def test_the_task_is_found_in_the_table_when_nothing_names_it(write):
    config = load_config(write("table: slides.csv\n", table="slide_id,time,event\na,1,0\nb,2,1\n"))
    assert (config.task, config.train.epochs) == ("survival", 20)
    assert load_config(write("table: slides.csv\ntarget: [a, b]\n")).task == "multilabel"


@pytest.mark.parametrize("name", COHORTS)
def test_a_preset_gets_the_papers_settings_without_an_option(write, name):
    preset = COHORTS[name]
    config = load_config(write(f"cohort: {name.lower()}\nlabels: labels\n"))
    assert (config.name, config.cohort, config.task) == (name, name, preset.task)
    assert (config.metric, config.score, config.cap, config.seeds) == (
        preset.metric,
        preset.score,
        preset.cap,
        (42, 43, 44, 45, 46),
    )
    assert {key: getattr(config.train, key) for key in vars(preset.recipe)} == vars(preset.recipe)
    gate = next(iter(preset.gates.values()))
    assert (config.sizes()["delta"], config.sizes()["hidden_dim"]) == (gate.delta, gate.hidden_dim)


def test_gate_widths_follow_encoder_and_trunk(write):
    path = write("cohort: BRACS\nlabels: labels\nencoder: ViT-B/16\n")
    assert load_config(path).gate().delta == 2.0
    panda = load_config(write("cohort: PANDA\nlabels: labels\nencoder: UNI2-h\n"))
    assert panda.encoder == "uni_v2"
    assert (panda.sizes("gated_srp")["delta"], panda.sizes("vit4_gated_srp")["delta"]) == (0.5, 2.0)
    assert panda.resolved("vit4_gated_srp")["model"]["hidden_dim"] == 32
    assert "no gate for CAMELYON16" in load_config(write("cohort: CAMELYON16\nencoder: vit_b16\n")).gate().note


def test_the_users_settings_win_over_the_preset(write):
    path = write("cohort: KIRC\nlabels: l\ncap: null\nseeds: 7\nmodel: {delta: 0.25}\ntrain:\n  lr: 1e-3\n")
    config = load_config(path, {"train.epochs": 3})
    assert (config.cap, config.seeds, config.train.lr, config.train.epochs) == (None, (7,), 1e-3, 3)
    assert config.train.weight_decay == 1e-5
    assert (config.gate().delta, config.gate().hidden_dim) == (0.25, 128)


def test_words_that_yaml_takes_for_something_else_stay_words(write):
    config = load_config(
        write("table: slides.csv\nclasses: [no, yes, null, 007, 1.50, 2020-01-01]\narms: [na, null]\nname: 12\n")
    )
    assert config.classes == ("no", "yes", "null", "007", "1.50", "2020-01-01")
    assert config.arms == ("na", "null")
    assert config.name == "12"


def test_folds_and_cache_have_a_short_and_a_long_form(write):
    config = load_config(write("table: slides.csv\nfolds: 5\ncache: {folder: warm, dtype: float16}\n"))
    assert (config.folds.number, config.folds.by, config.cache.dtype) == (5, "patient", "float16")
    assert load_config(write("table: slides.csv\nfolds: {number: 3, by: site}\n")).folds.by == "site"


@pytest.mark.parametrize("text", ["cohort: PANDA\nlabels: l\n", "table: slides.csv\nclasses: [no, 'null']\nfolds: 2\n"])
def test_resolved_settings_read_back_as_the_same_settings(write, tmp_path, text):
    config = load_config(write(text))
    plain = config.resolved("gated_srp")
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(plain))
    again = load_config(tmp_path / "again.yaml")
    assert again.resolved() == plain
    assert again.sizes("gated_srp") == config.sizes("gated_srp")
    assert None not in plain["model"].values()


@pytest.mark.parametrize(
    ("name", "ours"), [("bf16-mixed", "bf16"), ("32-true", "32"), ("'32'", "32"), ("32", "32"), ("bf16", "bf16")]
)
def test_precision_may_be_said_as_in_lightning(write, name, ours):
    assert load_config(write(f"table: slides.csv\nfeatures: f\ntrain: {{precision: {name}}}\n")).train.precision == ours


@pytest.mark.parametrize("name", ["16-mixed", "bf16-true", "16", "64-true"])
def test_a_precision_of_lightning_that_means_something_else_is_refused(write, name):
    said = refusal(write(f"table: slides.csv\nfeatures: f\ntrain: {{precision: {name}}}\n"))
    assert "this precision of Lightning does not exist here: weights and sums stay in float32" in said
    assert said.endswith(f"found '{name}'.")


def test_a_config_cannot_be_changed(write):
    config = load_config(write("table: slides.csv\n"))
    with pytest.raises(ValidationError, match="frozen"):
        config.cap = 3


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("table: slides.csv\nfeature: f\n", 2, "Did you mean features?"),
        ("table: slides.csv\nlr: 1\n", 2, "Did you mean train.lr?"),
        ("table: slides.csv\ntrain:\n  epoch: 3\n", 3, "Did you mean train.epochs?"),
        ("table: slides.csv\n\ntrain:\n  epochs: many\n", 4, "train.epochs: input should be a valid integer"),
        ("table: slides.csv\ntrain: {lr: -1}\n", 2, "greater than 0"),
        ("table: slides.csv\ntrain: {lr: .nan}\n", 2, "train.lr"),
        ("table: slides.csv\ntrain: fast\n", 2, "train: "),
        ("table: slides.csv\nlattice: exakt\n", 2, "'floor' or 'exact'"),
        ("table: slides.csv\nseeds: [42, x]\n", 2, "seeds.1"),
        ("table: slides.csv\ntable: b.csv\n", 2, "table is set twice, first on line 1"),
        ("table: slides.csv\ntrain: {lr: 1, lr: 2}\n", 2, "train.lr is set twice"),
        ("cohort: CAMELYON18\n", 1, "Did you mean CAMELYON17?"),
        ("table: slides.csv\ncache: ~/warm\n", 2, "~ and $NAME are not expanded"),
        ("table: slides.csv\nfeatures: $DATA/feats\n", 2, "not expanded"),
        ("table: slides.csv\nname: ../up\n", 2, "name: "),
        ("table: slides.csv\nout: !!python/object/apply:os.system [ls]\n", 2, "is not allowed"),
        ("table: [slides.csv\n", 2, "not valid YAML"),
        ("table: slides.csv\n\tfeatures: f\n", 2, "not valid YAML"),
        ("table: slides.csv\nmodel: &m {dim: *m}\n", 2, "not valid YAML|nested too deeply"),
    ],
)
def test_a_mistake_is_named_with_its_line(write, text, line, words):
    said = refusal(write(text))
    assert f"cohort.yaml, line {line}: " in said
    assert any(word in said for word in words.split("|")), said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dim": "32"}, "dim: no such setting. Did you mean model.dim?"),
        ({"train.epoch": "3"}, "train.epoch: no such setting"),
        ({"train": {"epochs": "many"}}, "train.epochs: input should be a valid integer"),
        ({"features": "~/feats"}, "features: '~/feats' is taken as it stands"),
    ],
)
def test_a_mistake_beside_the_file_is_not_charged_to_the_file(write, given, words):
    path = write("table: slides.csv\ntrain: {epochs: 3}\n")
    with pytest.raises(UserError) as caught:
        load_config(path, given)
    assert str(caught.value).startswith(f"a setting given beside {path} (--set): {words}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("table: slides.csv\ntime: t\nevent: e\ncensorship: c\n", "opposite"),
        ("labels: l\n", "name the preset with cohort"),
        ("cohort: PANDA\nlabels: l\ntable: slides.csv\n", "keep one"),
        ("table: slides.csv\nwindow: 4\n", "odd"),
        ("table: slides.csv\narms: []\n", "at least one"),
        ("table: slides.csv\nseeds: [1, 1]\n", "each once"),
        ("- a\n- b\n", "key: value"),
        ("table: missing.csv\n", "no such table"),
        ("? [a, b]\n: c\n", "a key must be a word"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(write, text, words):
    assert words in refusal(write(text))


def test_all_mistakes_are_told_at_once(write):
    said = refusal(write("table: slides.csv\nfeature: f\ncap: 0\n"))
    assert "line 2: feature" in said
    assert "line 3: cap" in said


def test_files_that_are_no_settings_are_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "none.yaml")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    assert "not UTF-8" in refusal(tmp_path / "latin.yaml")
    (tmp_path / "deep.yaml").write_text("[" * 5000)
    assert "not valid YAML" in refusal(tmp_path / "deep.yaml")


@given(
    st.dictionaries(
        st.text("abcxyz", min_size=1), st.none() | st.text() | st.lists(st.text(), max_size=3), min_size=1, max_size=4
    )
)
def test_every_text_survives_the_file(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("yaml") / "x.yaml"
    path.write_text(yaml.safe_dump(values, allow_unicode=False))
    assert read_settings(path).values == values


@pytest.fixture
def cohort(write, tmp_path):
    for i in range(23):  # s23 has none
        write_trident(tmp_path / "job", f"s{i}", make_slide(i))
    return write


def test_a_config_opens_as_slides_with_files_and_parts(cohort, tmp_path):
    data = open_cohort(load_config(cohort("table: slides.csv\nfeatures: job\n")))
    assert data.table.classes == ("a", "b")
    assert data.matches.missing == ("s23",)
    assert any("s23: no file" in note.what for note in data.notes)
    slides = data.slides(42)
    assert list(slides["slide"]) == [f"s{i}" for i in range(23)]
    assert slides["file"][3].name == "s3.h5"
    assert slides.groupby("case")["part"].nunique().max() == 1
    assert data.split(42).hash == open_cohort(data.config).split(42).hash != data.split(43).hash


def test_a_split_may_be_imported_by_seed(cohort, tmp_path):
    data = open_cohort(load_config(cohort("table: slides.csv\nfeatures: job\n")))
    write_split(data.split(7), tmp_path / "own7.csv")
    imported = open_cohort(load_config(tmp_path / "cohort.yaml", {"split": str(tmp_path / "own{seed}.csv")}))
    assert imported.split(7).parts == data.split(7).parts
    with pytest.raises(UserError, match=r"own8\.csv: no such split"):
        imported.split(8)


def test_every_patient_tests_once_over_the_folds(cohort):
    data = open_cohort(load_config(cohort("table: slides.csv\nfeatures: job\nfolds: 4\n")))
    tested = [unit for fold in range(4) for unit, part in data.split(42, fold).parts.items() if part == "test"]
    assert sorted(tested) == sorted(f"p{i}" for i in range(12))
    with pytest.raises(UserError, match="has 4 folds, counted from 0"):
        data.split(42, 4)


def test_what_is_missing_is_named(cohort, tmp_path):
    def opened(text):
        with pytest.raises(UserError) as error:
            open_cohort(load_config(cohort(text)))
        return str(error.value)

    assert "`features` is not set" in opened("table: slides.csv\n")
    assert "no such folder" in opened("table: slides.csv\nfeatures: nowhere\n")
    assert "no feature file of gigapath" in opened("table: slides.csv\nfeatures: job\nencoder: gigapath\n")
    assert "`table`" in opened("features: job\n")
    assert "`labels`" in opened("cohort: KGH\nfeatures: job\n")
    (tmp_path / "other.csv").write_text("slide_id,label\nx,a\ny,b\n")
    assert "none of 2 slides has a file" in opened("table: other.csv\nfeatures: job\n")


def test_a_preset_reads_its_public_files_and_its_published_split(cohort, tmp_path):
    kgh = "slide_id,label\n" + "".join(f"s{i},{COHORTS['KGH'].classes[i % 4]}\n" for i in range(23))
    (tmp_path / "kgh.csv").write_text(kgh)
    data = open_cohort(load_config(cohort("cohort: KGH\nlabels: kgh.csv\nfeatures: job\n")))
    assert data.split(42) == COHORTS["KGH"].read_split(tmp_path / "kgh.csv", 42)
    assert len(data.slides(42)) == 23


def test_the_task_is_found_with_the_columns_that_were_named(tmp_path):
    rows = "".join(f"s{i},c{i},P{i // 2},{'ab'[i % 2]}\n" for i in range(6))
    (tmp_path / "t.csv").write_text("slide_id,case_id,patient_id,label\n" + rows)
    (tmp_path / "c.yaml").write_text("table: t.csv\nfeatures: .\ncase: patient_id\n")
    assert load_config(tmp_path / "c.yaml").task == "classification"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train": {"epochs": 2}},
        {"train.epochs": 2, "train": {"lr": 1}},
        {"bag": "patient"},
        {"task": "regression", "target": "num"},
        {"task": "survival", "target": None, "time": "num", "event": "label"},
        {"target": None, "time": "num", "event": "label"},
        {"target": ["label", "other"]},
        {"cache": "kept"},
        {"cache.dtype": "float16", "folds": 5},
        {"encoder": "UNI2-h"},
        {"cohort": "BRACS", "task": None},
        {"images": "pictures", "features": [], "cache": {"folder": None}},
        {"model": {"dim": 48}, "exclude": ["s1"], "cap": 7, "seeds": 1, "features": "elsewhere"},
        {"metric": "accuracy", "score": "case", "missing": []},
        {"covariates": {"numeric": ["num"]}, "regions": {"annotations": "drawn", "only": "tumour"}, "out": "runs2"},
    ],
)
@pytest.mark.parametrize(
    "more", ["", "\ntrain: {lr: 0.5, epochs: 16}\nseeds: [1, 2]\nmetric: auc\ncache: {folder: c, dtype: float32}"]
)
def test_changes_mean_the_same_to_a_config_as_to_its_file(tmp_path, monkeypatch, changes, more):
    (tmp_path / "t.csv").write_text(
        "slide,case,label,other,num\n" + "".join(f"s{i},p{i},{i % 2},1,{i}.5\n" for i in range(9))
    )
    (tmp_path / "c.yaml").write_text(f"table: t.csv\nfeatures: .\ntarget: label{more}\n")
    monkeypatch.chdir(tmp_path / "..")
    if (more and {"task", "time"} & changes.keys()) or (more and isinstance(changes.get("target"), list)):
        changes = {**changes, "metric": "x"}  # the file's own is of classes alone
    before = load_config(tmp_path / "c.yaml")
    assert with_changes(before, changes) == with_changes(tmp_path / "c.yaml", changes)
