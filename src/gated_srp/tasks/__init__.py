"""Tasks: what a model's logits mean, and everything else that differs between the kinds of tasks.

A new kind is a subclass of `Task` and one line: ``TASKS["fraction"] = Fraction`` in your own code, or an entry point of the group
``gated_srp.tasks`` in an installed package, which every command then knows by its name.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from gated_srp.errors import UserError
from gated_srp.tasks.classes import Classification, Multilabel
from gated_srp.tasks.metrics import fit_temperature
from gated_srp.tasks.survival import Survival
from gated_srp.tasks.task import Recipe, Task, selection_score

__all__ = [
    "TASKS",
    "Classification",
    "Multilabel",
    "Recipe",
    "Survival",
    "Task",
    "every_task",
    "find_task",
    "fit_temperature",
    "named_task",
    "refuse_pretrained",
    "selection_score",
    "task_from_card",
    "task_names",
]

_GROUP = "gated_srp.tasks"  # of entry points
PRETRAINING = (
    "pretraining"  # in the card of a model that was trained without labels (`tasks.pretraining`); no cohort's task
)
TASKS: dict[str, type[Task]] = {kind.name: kind for kind in (Classification, Survival, Multilabel)}
# Ours that are chosen by name alone, loaded when they are: no column says of itself that it is one of them.
_BY_NAME = (
    EntryPoint("regression", "gated_srp.tasks.regression:Regression", _GROUP),
    EntryPoint("cox", "gated_srp.tasks.cox:Cox", _GROUP),
)
_OURS = (*TASKS, *(point.name for point in _BY_NAME))  # in one order, whichever was loaded first


def task_names() -> tuple[str, ...]:
    """Every task that can be named: ours, those of `TASKS` and of installed packages."""
    return tuple(dict.fromkeys([*_OURS, *TASKS, *(point.name for point in entry_points(group=_GROUP))]))


def every_task() -> tuple[type[Task], ...]:
    """Our tasks, and those that were added to `TASKS`."""
    return tuple(map(find_task, dict.fromkeys([*_OURS, *TASKS])))


def find_task(name: str | None) -> type[Task]:
    """The kind of task of this name; None: classification, which a cohort is unless it says otherwise.

    >>> find_task("survival").selects
    ('c_index',)
    """
    name = name or Classification.name
    if name not in TASKS:
        own = [point for point in _BY_NAME if point.name == name]
        for point in own or entry_points(group=_GROUP, name=name):
            TASKS[name] = point.load()
    if name not in TASKS:
        raise UserError(f"no task is called {name!r}; expected one of {', '.join(task_names())}")
    return TASKS[name]


def named_task(settings: Mapping[str, Any]) -> type[Task] | None:
    """The kind of task that the column settings of a YAML mean (``target``, ``time``, ...), if they leave no doubt.

    >>> named_task({"target": "grade"}).name, named_task({"target": ("oedema", "fibrosis")}).name
    ('classification', 'multilabel')
    """
    found = [kind for kind in TASKS.values() if kind.named_by(settings)]
    return found[0] if len(found) == 1 else None


def refuse_pretrained(card: Mapping[str, Any]) -> None:
    """For whoever uses finished models: one that was only pretrained says nothing of a slide."""
    if card.get("task") == PRETRAINING:
        what = "this model was pretrained without labels: it predicts features of masked patches, and no label"
        raise UserError(what, cure="Train one from it: `gated-srp train COHORT --init RUN`.", kind="pretrained")


def task_from_card(card: Mapping[str, Any]) -> Task:
    """The task that a model's card describes."""
    if not card.get("task"):
        what = "this model's card names no task: it was not trained by `gated-srp train`, so its outputs have no names"
        raise UserError(what, cure="A converted model gets them from `gated-srp convert --classes A,B,C`.")
    refuse_pretrained(card)
    return find_task(card["task"]).from_card(card)
