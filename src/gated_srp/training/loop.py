"""The training loop: the only one. One bag per step (of images: a mini-batch), exact windows of accumulated gradients, the best epoch
on validation.

Randomness comes from named streams alone (order of bags, or which are drawn: seed and epoch; drop path and augmentation: seed, epoch and slide), so a
training can be left at the end of any window and taken up again without a difference. N ranks share the bags of each window and sum their
gradients once, so that they compute what one rank computes.

Shapes: B bags of a forward, K outputs, G gates, L rows, H heads, N patches.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gated_srp.config.cohort import TrainConfig
from gated_srp.data.loader import BagLoader, SlideBag, together
from gated_srp.errors import UserError
from gated_srp.models.slide import Loss, SlideModel
from gated_srp.srp import PatchGraph, SignedGate, range_free, regimes
from gated_srp.streams import stream
from gated_srp.tasks import Task, selection_score
from gated_srp.training.optim import flat_gradients, learning_rate, make_optimiser
from gated_srp.training.ranks import Ranks
from gated_srp.training.state import Checkpoint, TrainingProgress


class Callbacks(Protocol):
    """Called by the loop: shows progress, saves, and may end the training by raising."""

    def bag(self, bag: SlideBag) -> None:
        """A bag was computed."""

    def window(self, training: "Training") -> None:
        """An optimiser step was made."""

    def epoch(self, training: "Training") -> None:
        """An epoch was validated and its results are in ``training.progress``."""


@dataclass(eq=False)
class Training:
    """A training in memory. The model is on its device; what is frozen is frozen."""

    ranks: Ranks
    model: SlideModel
    task: Task
    loader: BagLoader
    settings: TrainConfig
    seed: int
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    best: dict[str, Tensor] | None = None
    ties: str = "first"  # which of equally good epochs is kept: the first, or the one of the lowest validation ``loss``
    sampling: Tensor | None = None  # how likely each training row is drawn, (rows,); None: each is seen once
    stepping: bool = False  # weights and progress do not agree just now

    def __post_init__(self) -> None:
        settings = {name: getattr(self.settings, name) for name in ("lr", "weight_decay", "gate_lr")}
        self.optimiser = make_optimiser(self.model, **settings)
        self.gradient = flat_gradients(self.model)  # (trained parameters,)
        self.gates = GateRecorder(self.model)
        if not len(self.progress.gates):
            self.progress.gates = self.gates.take().double()

    @property
    def batch(self) -> int:
        """Bags that go through the model at once. Slides differ in length, and Nystrom's pinv wants one at a time."""
        return self.settings.batch_size if self.model.images else 1

    @property
    def pack(self) -> int | None:
        """Patches of several bags that go through the model at once; None: one bag does, as some models ask."""
        return self.settings.pack if self.model.packs else None

    @property
    def over(self) -> bool:
        """Whether all epochs are trained, or ``patience`` of them in a row were no better. It follows from `progress` alone."""
        progress, patience = self.progress, self.settings.patience
        waited = progress.epoch - max(progress.best_epoch, 0)
        return progress.epoch >= self.settings.epochs or (patience is not None and waited >= patience)

    def checkpoint(self) -> Checkpoint:
        """Everything needed to go on from the end of the last window."""
        return Checkpoint(self.progress, self.model.state_dict(), self.optimiser.state_dict(), self.best)

    def restore(self, saved: Checkpoint) -> None:
        """Go back to a saved moment."""
        self.progress, self.best = saved.progress, saved.best
        self.model.load_state_dict(saved.model)
        self.optimiser.load_state_dict(saved.optimiser)


def fit(
    training: Training,
    rows: Sequence[int],
    evaluate: Callable[[], tuple[dict[str, float], float]],
    callbacks: Callbacks,
) -> None:
    """Train on these bags from where the training stands until it is over.

    ``evaluate`` gives the validation metrics and the score of which more is better.
    """
    while not training.over:
        train_epoch(training, rows, callbacks)
        metrics, score = evaluate()
        finish_epoch(training, training.settings.epoch_bags(len(rows)), metrics, score)
        callbacks.epoch(training)


def train_epoch(training: Training, rows: Sequence[int], callbacks: Callbacks) -> None:
    """The windows of this epoch that are still to do."""
    ranks, progress, settings = training.ranks, training.progress, training.settings
    size = settings.accumulation * settings.batch_size
    kept = settings.epoch_bags(len(rows))
    total = settings.steps(len(rows))
    order = [rows[i] for i in bag_order(training.seed, progress.epoch, len(rows), training.sampling)][:kept]
    windows = [order[start : start + size] for start in range(progress.bags, len(order), size)]
    add_up, times = accumulate, 1
    if training.task.joint:
        from gated_srp.training.joint import accumulate_jointly  # not above: few tasks need it

        add_up, times = accumulate_jointly, 2
    mine = [row for window in windows for _ in range(times) for row in window[ranks.rank :: ranks.count]]
    bags = training.loader.epoch(mine, (training.seed, progress.epoch))
    training.model.train()
    for window in windows:
        losses = add_up(training, window, bags, callbacks)
        gates = training.gates.take(ranks.device)
        ranks.sum(training.gradient, losses, gates)
        values, betas = losses.tolist(), gates.double().cpu()
        clip_or_stop(training, window, values)
        rate = learning_rate(progress.step, total, lr=settings.lr, warmup=settings.warmup)
        for group in training.optimiser.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        training.stepping = True
        training.optimiser.step()
        training.gradient.zero_()
        progress.step += 1
        progress.bags += len(window)
        progress.loss += math.fsum(values)
        progress.gates = progress.gates + betas
        training.stepping = False
        callbacks.window(training)


def accumulate(training: Training, window: Sequence[int], bags: Iterator[SlideBag], callbacks: Callbacks) -> Tensor:
    """Add up the gradients of this rank's bags of a window; the losses (bags of the window,), those of other ranks zero."""
    losses = torch.zeros(len(window), device=training.ranks.device)
    for places, batch in batches(training.ranks, bags, len(window), size=training.batch, pack=training.pack):
        with error_context(batch, training.settings):
            loss = training_step(training, batch)
            mean = loss.mean() if loss.ndim else loss
            (mean / (len(window) / len(batch))).backward()
        losses[places] = loss.detach()
        for bag in batch:
            callbacks.bag(bag)
    return losses


def batches(
    ranks: Ranks, bags: Iterator[SlideBag], count: int, *, size: int = 1, pack: int | None = None
) -> Iterator[tuple[list[int], list[SlideBag]]]:
    """This rank's bags of ``count`` and their places, those together that go through a model at once: ``size`` of them, or with
    ``pack`` as many in a row as have that many patches together."""
    places: list[int] = []
    batch: list[SlideBag] = []
    for place in range(ranks.rank, count, ranks.count):
        bag = next(bags)
        if pack and batch and sum(len(one.features) for one in (*batch, bag)) > pack:
            yield places, batch
            places, batch = [], []
        places.append(place)
        batch.append(bag)
        if not pack and len(batch) == size:  # before the next one is in memory
            yield places, batch
            places, batch = [], []
    if batch:
        yield places, batch


def training_step(
    training: Training, batch: Sequence[SlideBag], *, loss: Loss | None = None, recorded: bool = True
) -> Tensor:
    """The mean loss of bags that go through the model together, of packed ones the loss of each; ``recorded``: what the gates do counts."""
    model, device = training.model, training.ranks.device
    keep = None
    if model.drop_path > 0:
        names = [f"drop path/{training.progress.epoch}/{bag.slide}" for bag in batch]
        keeps = [model.draw_keep(1, generator=stream(training.seed, name)) for name in names]
        keep = torch.cat(keeps, -1).to(device)
    if recorded:
        training.gates.next_bag()
    target = torch.stack([bag.target for bag in batch if bag.target is not None])
    if training.pack and len(batch) > 1:
        logits = packed(training.ranks, model, batch, keep)
        if loss is not None:
            return loss(logits, target.to(device))
        ones = zip(logits.split(1), target.to(device).split(1), strict=True)  # a task's mean over bags may weigh them
        return torch.stack([training.task.training_loss(*one) for one in ones])
    features, graph = together(batch)
    with training.ranks.autocast():
        return model.training_loss(
            features.to(device, non_blocking=True),
            graph.to(device),
            target.to(device),
            loss=loss or training.task.training_loss,
            keep=keep,
        )


def packed(ranks: Ranks, model: SlideModel, batch: Sequence[SlideBag], keep: Tensor | None = None) -> Tensor:
    """Logits (B, K) of bags of any lengths that go through the model together."""
    from gated_srp.models.fast.packed import packed_logits  # not above: few runs need it

    bags = [(bag.features.to(ranks.device, non_blocking=True), bag.graph.to(ranks.device)) for bag in batch]
    with ranks.autocast():
        return packed_logits(model, bags, keep)


def clip_or_stop(training: Training, window: Sequence[int], losses: Sequence[float]) -> None:
    """Clip the gradient's norm; a loss or a norm that is not a number ends the training before it spoils the weights."""
    bad = [row for row, loss in zip(window, losses, strict=True) if not math.isfinite(loss)]
    norm = float(torch.linalg.vector_norm(training.gradient))  # waits for the device, once per window
    if bad or not math.isfinite(norm):
        slides = training.loader.dataset.slides["slide"]
        names = ", ".join(repr(slides[row]) for row in (bad or window)[:5])
        what = "the loss" if bad else "the gradient"
        raise UserError(
            f"{what} is not a finite number in epoch {training.progress.epoch + 1}, slide {names}. The state before it is kept",
            cure="Look at the slide with `gated-srp check --deep`; lower train.lr, or set train.precision: 32, in a new run.",
            kind="not_finite",
        )
    if training.settings.clip is not None and norm > training.settings.clip:
        training.gradient.mul_(training.settings.clip / norm)


def finish_epoch(training: Training, bags: int, metrics: dict[str, float], score: float) -> None:
    """Write down what the epoch gave, keep its weights if no earlier epoch was as good (or by ``ties``), and go to the next."""
    progress = training.progress
    better = score > progress.best_score
    if training.ties == "loss" and score == progress.best_score:
        better = metrics["loss"] < dict(_validation(training))[progress.best_epoch]["loss"]
    number = progress.epoch + 1
    progress.history.append([number, "train", "loss", progress.loss / bags])
    progress.history += [[number, "val", name, value] for name, value in metrics.items()]
    progress.gate_history += training.gates.rows(number, progress.gates, bags)
    if better:
        progress.best_score, progress.best_epoch = score, number
        training.best = {name: value.detach().clone() for name, value in training.model.state_dict().items()}
    progress.epoch, progress.bags, progress.loss = number, 0, 0.0
    progress.gates = torch.zeros_like(progress.gates)


def tied_epochs(training: Training) -> int:
    """How many epochs have the score of the kept one, itself among them."""
    scores = [selection_score(training.task, metrics, metrics["loss"]) for _, metrics in _validation(training)]
    return scores.count(training.progress.best_score)


def _validation(training: Training) -> Iterator[tuple[int, dict[str, float]]]:
    """Each epoch so far with its validation metrics."""
    rows = [row for row in training.progress.history if row[1] == "val"]
    for epoch, own in groupby(rows, key=lambda row: row[0]):
        yield epoch, {name: value for _, _, name, value in own}


@torch.no_grad()
def predict_logits(
    ranks: Ranks,
    model: SlideModel,
    loader: BagLoader,
    rows: Sequence[int],
    seen: Callable[[SlideBag], None] = lambda bag: None,
    *,
    batch: int = 1,
    pack: int | None = None,
) -> Tensor:
    """Logits of these bags, (B, K) in float32 on the CPU, at once as `batches` says; ranks share the bags, all get the answer."""
    model.eval()
    logits = torch.zeros(len(rows), model.settings["num_outputs"], device=ranks.device)
    bags = loader.epoch([rows[place] for place in range(ranks.rank, len(rows), ranks.count)])
    for places, found in batches(ranks, bags, len(rows), size=batch, pack=pack):
        with error_context(found), ranks.autocast():
            if pack and len(found) > 1:
                logits[places] = packed(ranks, model, found).float()
            else:
                features, graph = together(found)
                logits[places] = model(features.to(ranks.device, non_blocking=True), graph.to(ranks.device)).float()
        for bag in found:
            seen(bag)
    ranks.sum(logits)
    return logits.cpu()


def bag_order(seed: int, epoch: int, bags: int, sampling: Tensor | None = None) -> list[int]:
    """The order of the bags in an epoch (from 0): a stream of seed and epoch, the same for every arm.

    With ``sampling``, (bags,), as many are drawn with replacement, each as likely as it says, from a stream of its own.
    """
    if sampling is not None:
        drawn: list[int] = torch.multinomial(sampling, bags, True, generator=stream(seed, f"sampling/{epoch}")).tolist()
        return drawn
    order: list[int] = torch.randperm(bags, generator=stream(seed, f"order/{epoch}")).tolist()
    return order


@contextmanager
def error_context(bags: Sequence[SlideBag], settings: TrainConfig | None = None) -> Iterator[None]:
    """Errors inside name the slide, or the first of several; running out of memory says what to set."""
    try:
        yield
    except UserError as error:
        more = f" and {len(bags) - 1} with it" if len(bags) > 1 else ""
        place = f"slide {bags[0].slide!r} ({bags[0].path}){more}"
        raise error.changed(where=f"{place}: {error.where}" if error.where else place) from error
    except (MemoryError, RuntimeError) as error:
        from gated_srp.training.memory import is_memory, out_of_memory

        if not is_memory(error):
            raise
        raise out_of_memory(bags, settings) from error


# What the gates do --------------------------------------------------------------------------------------------------

STATISTICS = ("mean", "std", "share_anti", "share_identity", "share_projection", "share_reflection", "share_negative")
COLUMNS = ("epoch", "layer", *STATISTICS, "mean_over_delta")


def summary(beta: Tensor) -> Tensor:
    """The `STATISTICS` of each bag's coefficients, (..., H, N) -> (..., 7), on their device."""
    beta = beta.detach().float().flatten(-2)  # (..., H * N)
    shares = [part.float().mean(-1) for part in (*regimes(beta).values(), beta < 0)]
    return torch.stack([beta.mean(-1), beta.std(-1, correction=0), *shares], -1)


class GateRecorder:
    """Sums the summaries of every gate over training forwards, through hooks and without asking the device for a value.

    Call `next_bag` before each training forward: recomputation by activation checkpointing is not counted again.
    """

    def __init__(self, model: nn.Module) -> None:
        gates = [(number, gate) for number, gate in _coefficients(model) if isinstance(gate, SignedGate)]
        self.layers = [number for number, _ in gates]
        self.deltas = [2.0 if gate.bound is range_free else gate.delta for _, gate in gates]
        self._sums: list[Tensor | None] = [None] * len(gates)
        self._open: set[int] = set()
        self._handles = [gate.register_forward_hook(self._hook(i)) for i, (_, gate) in enumerate(gates)]

    def next_bag(self) -> None:
        """The next forward of each gate counts."""
        self._open = set(range(len(self.layers)))

    def take(self, device: torch.device | str = "cpu") -> Tensor:
        """The sums since the last call, (G, 7)."""
        self._open = set()
        none = torch.zeros(0, len(STATISTICS), device=device)
        sums = [none.new_zeros(1, len(STATISTICS)) if s is None else s.to(device)[None] for s in self._sums]
        self._sums = [None] * len(self._sums)
        return torch.cat([none, *sums])

    def rows(self, epoch: int, sums: Tensor, bags: int) -> list[list[float]]:
        """Rows of gates.csv (`COLUMNS`) for an epoch's sums over this many bags."""
        means = (sums / bags).tolist()
        return [
            [epoch, layer, *values, values[0] / delta]
            for layer, delta, values in zip(self.layers, self.deltas, means, strict=True)
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, place: int) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], beta: Tensor) -> None:
            if place not in self._open:
                return
            self._open.discard(place)
            graph: PatchGraph = args[2]
            if len(set(graph.lengths)) > 1:
                found = torch.stack([summary(beta[span].t()) for span in graph.spans]).sum(0)
            else:
                heads = beta.view(graph.num_bags, -1, beta.shape[-1]).transpose(1, 2)  # (B, H, L)
                found = summary(heads[..., graph.before : graph.before + graph.lengths[0]]).sum(0)
            before = self._sums[place]
            self._sums[place] = found if before is None else before + found

        return record


def _coefficients(model: nn.Module) -> list[tuple[int, Any]]:
    """Of the blocks that correct, by their numbers; or of the model itself, where it corrects features."""
    parts = [model] if getattr(model, "correction", None) else getattr(model, "blocks", ())
    return [(number, part.correction.coefficient) for number, part in enumerate(parts) if part.correction]
