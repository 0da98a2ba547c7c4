"""Writes the pages of this folder that are made from the program: settings.md, arms.md, cli.md, notebook.md.

    python docs/generate.py

`tests/test_generated_pages.py` fails where a page and the program differ.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import typer

from gated_srp.cli import app
from gated_srp.config.schema import fields, json_schema, meanings
from gated_srp.models import ARMS, Sizes
from gated_srp.tasks import every_task

DOCS = Path(__file__).resolve().parent
COSTS = DOCS.parent / "benchmarks" / "results" / "arms.json"
_MADE = "*This page is made by `docs/generate.py`{}; do not edit it.*"


def settings_page() -> str:
    """Every key of a cohort's YAML."""
    lines = [
        "# Every setting of the YAML",
        _MADE.format(" from the schema and `config/settings.yaml`"),
        "All keys are optional; a cohort of your own needs `features` (or `images`), `table` and what is to be predicted. A key that is not "
        "listed is an error. `--set train.epochs=5` changes one for a single command, `gated-srp schema > cohort.schema.json` writes the same "
        "for editors: with `# yaml-language-server: $schema=cohort.schema.json` as the first line of the YAML, they complete and check it; "
        "`gated-srp init` writes both.",
    ]
    for subject, keys in meanings().items():
        rows = [(f"`{key}`", _values(key), _default(key), words) for key, words in keys.items()]
        lines += [f"## {subject}", _table(("key", "values", "default", "meaning"), rows)]
    recipes = [(f"`{kind.name}`", *(f"{value:g}" for value in _recipe(kind).values())) for kind in every_task()]
    lines += ["## Recipes", "Defaults of `train`, by task; those of the paper's cohorts are in `config/presets.yaml`."]
    lines += [_table(("task", *(f"`{key}`" for key in _recipe(every_task()[0]))), recipes)]
    return "\n\n".join(lines) + "\n"


def _recipe(kind: Any) -> dict[str, float]:
    return {key: getattr(kind.recipe, key) for key in ("epochs", "lr", "weight_decay", "accumulation")}


def _values(key: str) -> str:
    section, _, name = key.rpartition(".")
    top = json_schema()["properties"]
    inside = next((one["properties"] for one in top[section]["anyOf"] if "properties" in one), {}) if section else top
    found = [_in_words(option) for option in inside[name]["anyOf"]]
    return " or ".join(dict.fromkeys(word for word in found if word))


def _in_words(option: dict[str, Any]) -> str:
    if "anyOf" in option:
        return " or ".join(dict.fromkeys(word for one in option["anyOf"] if (word := _in_words(one))))
    if "enum" in option:
        return ", ".join(f"`{value}`" for value in option["enum"] if isinstance(value, str))
    if "const" in option:
        return f"`{option['const']}`"
    if "properties" in option:
        return "settings"
    if "additionalProperties" in option:
        return "`{name: value}`"
    if option["type"] == "array":
        return "list"
    bounds = [f"{sign} {option[name]:g}" for name, sign in _BOUNDS.items() if name in option]
    kind = "text" if isinstance(option["type"], list) else _KINDS[option["type"]]
    return f"{kind} {', '.join(bounds)}".strip()


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_KINDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true, false", "null": ""}


def _default(key: str) -> str:
    field = fields()[key]
    value = None if field.is_required() else field.default
    if value is None or value == () or hasattr(value, "model_dump") or key == "out":
        return ""
    return f"`{', '.join(map(str, value)) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else value}`"


def arms_page() -> str:
    """Every arm with its size."""
    rows_of_costs = json.loads(COSTS.read_text(encoding="utf-8")) if COSTS.is_file() else []
    costs = {row["arm"]: row for row in rows_of_costs}
    phases = ("predict", "train") if costs else ()
    groups = {
        "nystrom": ("Slides, Nystrom attention", 1536),
        "vit4": ("Slides, dense attention (`vit4`)", 1536),
        "vit_s16": ("Images (ViT-S/16)", 768),
        "peer": ("Other methods of multiple-instance learning", 1536),
    }
    lines = [
        "# Every arm",
        _MADE.format(" from the table `ARMS` of `models/arms.py`"),
        "An arm is a model by name: `train --arm NAME`, `compare --arms NAME,NAME`, `arms: [NAME, NAME]` in the YAML, "
        '`build_model("NAME", ...)` in Python; `gated-srp arms` prints this list. All run through the same loop, splits and statistics. '
        'Parameters are counted with four outputs, features of width 1536 and the default sizes. An arm that "starts as" another gives the '
        "same logits before training, bit for bit; all arms of a study share every start weight of the same name and shape. "
        + _costs_in_words(costs),
    ]
    checked: dict[str, list[str]] = {}  # what was checked -> arms; the classes say it beside their formulas
    for trunk, (title, width) in groups.items():
        rows = []
        for name, arm in ARMS.items():
            if arm.trunk == trunk:
                with torch.random.fork_rng(devices=[]):
                    model = arm.build(width, 4, Sizes(**arm.defaults))
                size = f"{sum(one.numel() for one in model.parameters()):,}"
                assert arm.refuses == model.refuses
                for said in {part.checked for part in model.modules() if hasattr(part, "checked")}:
                    checked.setdefault(said, []).append(f"`{name}`")
                start = f"`{arm.starts_as}`" if arm.starts_as else ""
                cost = [f"{costs[name][phase][1]:.2f}" if name in costs else "" for phase in phases]
                rows.append((f"`{name}`", arm.title, size, *cost, start, arm.about, ", ".join(arm.refuses)))
        header = ("arm", "in tables", "parameters", *phases, "starts as", "what it does", "not for")
        lines += [f"## {title}", _table(header, rows)]
    reasons = [f"- `{name}`, {task}: {why}" for name, arm in ARMS.items() for task, why in arm.refuses.items()]
    whys: dict[str, list[str]] = {}
    for name, arm in ARMS.items():
        if arm.no_pretraining:
            whys.setdefault(arm.no_pretraining, []).append(f"`{name}`")
    unpretrained = [f"- {', '.join(names)}, [pretraining](pretraining.md): {why}" for why, names in whys.items()]
    lines += [
        "## What was checked",
        "Models of other publications are written from their texts. Each is held by `tests/models` to a plain loop over the formula in its "
        "docstring; none was compared with numbers of its authors' programs.",
        "\n".join(f"- {', '.join(names)}: {said}" for said, names in checked.items()),
        "## Why not",
        "\n".join([*reasons, *unpretrained]),
    ]
    return "\n\n".join(lines) + "\n"


def _costs_in_words(costs: dict[str, Any]) -> str:
    """What the columns of `gated-srp bench --arms` say, and where they were measured."""
    if not costs:
        return "What a patch costs depends on the machine: `gated-srp bench --arms all` measures it beside NA."
    sizes = {row["against"]: row["patches"] for row in costs.values()}
    where = ", ".join(dict.fromkeys(row["machine"] for row in costs.values()))
    return (
        f"`predict` and `train`: what a patch costs in a prediction and in a training step, as multiples of NA's ({sizes.get('na', 0):,} "
        f"patches; images: of `vit_s16`'s, {sizes.get('vit_s16', 0)}); medians of turns that both took one after the other, of `gated-srp bench "
        f"--arms all` ({where}). Dense attention grows with the square of the patches; the others grow with their number."
    )


def commands_page() -> str:
    """Every command with its arguments and options."""
    group: Any = typer.main.get_command(app)
    lines = [
        "# Every command",
        _MADE.format(" from the commands"),
        "`gated-srp COMMAND --help` says the same; `gated-srp --install-completion` lets your shell complete commands and options. "
        "Options of `gated-srp` itself stand before the command:",
        _options(group),
    ]
    for name, command in group.commands.items():
        positional = [one for one in command.params if one.param_type_name == "argument"]
        usage = " ".join([f"gated-srp {name}", *(_argument(one) for one in positional), "[OPTIONS]"])
        lines += [f"## {name}", command.help.strip(), f"```bash\n{usage}\n```"]
        if positional:
            lines.append(
                _table(("argument", "meaning"), [(f"`{_argument(one)}`", one.help or "") for one in positional])
            )
        if options := _options(command):
            lines.append(options)
    return "\n\n".join(lines) + "\n"


def _argument(one: Any) -> str:
    name = (one.metavar or one.name or "").upper() + ("..." if one.nargs == -1 and not one.metavar else "")
    return name if one.required else f"[{name}]"


def _options(command: Any) -> str:
    rows = []
    for one in command.params:
        if one.param_type_name != "option" or one.hidden or one.name == "help":
            continue
        default = "" if one.default is None or one.is_flag or callable(one.default) else f"`{one.default}`"
        default = "needed" if one.required else default
        rows.append((", ".join(f"`{name}`" for name in one.opts), default, one.help or ""))
    return _table(("option", "default", "meaning"), rows) if rows else ""


def notebook_page() -> str:
    """The notebook's cells, without their outputs."""
    cells = json.loads((DOCS.parent / "examples" / "demo.ipynb").read_text(encoding="utf-8"))["cells"]
    made = _MADE.format(" from `examples/demo.ipynb`")
    texts = []
    for cell in cells:
        text = "".join(cell["source"]).strip()
        texts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join([texts[0], made, *texts[1:]]) + "\n"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in cells) + " |"

    header = list(header)
    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "arms.md": arms_page,
    "cli.md": commands_page,
    "notebook.md": notebook_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"written: {DOCS / name}")
