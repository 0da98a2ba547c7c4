"""The slide model: features of patches and their graph in, logits out.

Shapes: B batch, N patches, S side of the square, L = 1 + S * S rows (CLS first), C channels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gated_srp.errors import UserError, counted
from gated_srp.models.block import PPEG, Block, LastBlock, OwnStart, refuse_wrapped
from gated_srp.models.fast import one_pass, plain
from gated_srp.models.fast.inference import Scratch, embedded
from gated_srp.srp import Coefficient, PatchGraph, SignedGate
from gated_srp.streams import stream

Device = torch.device | str
Loss = Callable[[Tensor, Tensor], Tensor]  # logits (B, K), targets -> a number


class SlideModel(nn.Module):
    """What training and prediction ask of any model of slides: features (B, N, in_dim) and their graph -> logits (B, K).

    ``refuses``: kind of task -> why this model is not made for it. ``images``: it is a model of images instead, whose bags have one
    length and go through it together; their features are pixels. ``keep`` are the random numbers of a forward, drawn
    beforehand by `draw_keep`, so that no hidden stream takes part. `training_loss` is what training minimises.
    """

    refuses: ClassVar[Mapping[str, str]] = {}
    images: ClassVar[bool] = False
    scales: ClassVar[int] = 1  # magnifications whose patches a bag has
    torch_start: ClassVar[frozenset[str]] = frozenset()  # names of linear layers that keep PyTorch's start values
    settings: dict[str, Any]  # how `build_model` made it: what a model file needs to make it again
    card: dict[str, Any]  # of a model that was read from a file: what the file says about it
    drop_path: float
    checkpointing: bool
    packs: bool = False  # bags of any lengths may go through it together: `fast.packed.packed_logits`
    head: nn.Module  # vectors of slides (B, C) -> logits (B, K)

    def __init__(self) -> None:
        super().__init__()
        self.covariates: nn.Linear | None = None  # the head's weights of covariates, where `build_model` was asked for

    def logits(self, slide: Tensor, graph: PatchGraph) -> Tensor:
        """The head's answer to vectors of slides (B, C): W z + b, or W z + V c + b, which is one layer over [z, c]."""
        found: Tensor = self.head(slide)
        if self.covariates is None:
            return found
        wanted, given = (len(slide), self.covariates.in_features), graph.covariates
        if given is None or tuple(given.shape) != wanted:
            what = f"{'none' if given is None else tuple(given.shape)}, but the model's head needs {wanted}"
            cure = (
                "Open slides with `open_slide(run, file, covariates={...})`, or add them with `graph.with_covariates`."
            )
            raise UserError(what, where="covariates", cure=cure, kind="covariates")
        beside: Tensor = self.covariates(given.to(self.covariates.weight.dtype))
        return found + beside

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def draw_keep(self, batch: int, *, device: Device = "cpu", generator: torch.Generator | None = None) -> Tensor:
        raise NotImplementedError

    def training_loss(
        self, features: Tensor, graph: PatchGraph, target: Tensor, *, loss: Loss, keep: Tensor | None = None
    ) -> Tensor:
        return loss(self(features, graph, keep), target)

    # As `huggingface_hub.PyTorchModelHubMixin` has it. A folder needs no such package.

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        card: Mapping[str, Any] | None = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> str | None:
        """Write config.json, model.safetensors and README.md; with ``push_to_hub`` also upload them.

        ``card``: what is true of the model (task, classes, encoder, stride, temperature, ...); that of the file it was read from.
        """
        from gated_srp.models.hub import save_folder

        save_folder(self, Path(save_directory), card)
        if not push_to_hub:
            return None
        return self.push_to_hub(repo_id or Path(save_directory).name, card=card, **options)

    def push_to_hub(self, repo_id: str, *, card: Mapping[str, Any] | None = None, **options: Any) -> str:
        """Upload what `save_pretrained` writes to a repository of the hub, which is made where it is missing.

        ``options``: private, token, commit_message, revision, create_pr and others of `huggingface_hub.HfApi.upload_folder`.
        """
        from gated_srp.models.hub import upload

        return upload(self, repo_id, card, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> "SlideModel":
        """The model of a folder or of a repository of the hub, in evaluation mode; its ``card`` says what it expects.

        ``options``: revision, token, cache_dir, local_files_only, force_download.
        """
        from gated_srp.models.hub import open_pretrained

        return open_pretrained(pretrained_model_name_or_path, **options)


class SlideTransformer(SlideModel):
    """Linear to C channels, CLS in front, blocks, LayerNorm, CLS, linear.

    With a ``position`` (TransMIL style) the rows are filled up to a square by repeating the first ones, and the position module
    runs after the first block; without one (`vit4`) there is no square, and bags of several lengths may share a batch.
    The last block must be a `LastBlock`. ``checkpointing = True`` recomputes each block in backward.
    """

    masks: ClassVar[bool] = False  # it predicts the features of masked patches: `masked.MaskedTransformer`
    no_pretraining: ClassVar[str] = ""  # why it cannot be pretrained so

    def __init__(
        self,
        in_dim: int,
        num_outputs: int,
        *,
        blocks: Sequence[Block],
        position: PPEG | None = None,
        drop_path: float = 0.1,
    ) -> None:
        super().__init__()
        dim = blocks[0].norm1.normalized_shape[0]
        self.in_proj = nn.Linear(in_dim, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks = nn.ModuleList(blocks)
        self.ppeg = position
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_outputs)
        self.drop_path = drop_path
        self.checkpointing = False
        self.packs = type(self) is SlideTransformer  # others change what enters a block, or how

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        """``features`` (B, N, in_dim), ``graph`` of the patches alone, ``keep`` from `draw_keep` (drawn here in training) -> (B, outputs)."""
        check_bags(features, graph, self.in_proj.in_features, scales=self.scales)
        return self.logits(self.norm(self.encode(features, graph, keep)[:, 0]), graph)

    def encode(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        """What leaves the last block: CLS alone, (B, 1, C), unless it updates patches too."""
        refuse_wrapped(self.blocks, self.ppeg)
        if keep is None and self.training and self.drop_path > 0:
            keep = self.draw_keep(len(features), device=features.device)
        scratch = Scratch() if one_pass(self.ppeg, *self.blocks) else None
        x, rows = self.tokens(features, graph, scratch)
        for number, block in enumerate(self.blocks):
            x, rows = self.before_block(number, x, rows)
            scale = None if keep is None else keep[number]
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rows, scale, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rows, scale, scratch=scratch)
            if number == 0 and self.ppeg is not None and x.shape[1] > 1:  # after a last block CLS is alone
                x = self.positions(x, rows, overwrite=scratch is not None)
        return x

    @staticmethod
    def block_kind(number: int, depth: int) -> type[Block]:
        return LastBlock if number == depth - 1 else Block

    def before_block(self, number: int, x: Tensor, rows: PatchGraph) -> tuple[Tensor, PatchGraph]:
        """What enters a block, and its graph: models that merge or drop rows do it here."""
        return x, rows

    def positions(self, x: Tensor, rows: PatchGraph, *, overwrite: bool = False) -> Tensor:
        """What the rows know of their places, added after the first block."""
        assert self.ppeg is not None
        placed: Tensor = self.ppeg(x, overwrite=overwrite)
        return placed

    def tokens(self, features: Tensor, graph: PatchGraph, scratch: Scratch | None = None) -> tuple[Tensor, PatchGraph]:
        """What enters the first block, (B, L, C): CLS, the embedded patches, what fills the square; and the graph of these rows."""
        patches = features.shape[1]
        missing = 0 if self.ppeg is None else math.ceil(math.sqrt(patches)) ** 2 - patches
        features = self.entering(features, graph)
        graph = graph.with_isolated(before=1, after=missing)
        if one_pass(self.in_proj) and plain(self.in_proj):
            return embedded(features, self.in_proj, self.cls_token, missing, scratch), graph
        x = self.in_proj(features.to(self.in_proj.weight.dtype))  # (B, N, C)
        first, rest = torch.split(x, [missing, patches - missing], dim=1)
        return torch.cat([self.cls_token.to(x.dtype).expand(len(x), -1, -1), first, rest, first], dim=1), graph

    def entering(self, features: Tensor, graph: PatchGraph) -> Tensor:
        """What the first layer sees of the patches, (B, N, in_dim)."""
        return features

    def draw_keep(self, batch: int, *, device: Device = "cpu", generator: torch.Generator | None = None) -> Tensor:
        """Drop-path factors (depth, 2, batch): 0 with a probability that rises linearly over depth, else 1 / (1 - it)."""
        rates = torch.linspace(0, self.drop_path, len(self.blocks), device=device).view(-1, 1, 1)
        draws = torch.rand(len(self.blocks), 2, batch, device=device, generator=generator)
        return (draws >= rates) / (1 - rates)


class CorrectedFeatures(SlideTransformer):
    """x_i <- x_i - beta_i <x_i, r_i> r_i, with r_i the unit mean of the neighbours' features, in one head; then the slide model on x.

    Behind attention the residual sum carries what features have in common past the correction; in front of the first layer nothing does.
    To `trace` and gates.csv the features are layer 1, which has no attention, and the blocks follow.
    """

    no_pretraining: ClassVar[str] = "its features are corrected by those of neighbours that would be masked"

    def __init__(self, in_dim: int, num_outputs: int, **parts: Any) -> None:
        super().__init__(in_dim, num_outputs, **parts)
        self.correction: nn.Module | None = None
        self.packs = True

    def entering(self, features: Tensor, graph: PatchGraph) -> Tensor:
        if self.correction is None:
            return features
        x: Tensor = self.correction(features[:, None], features[:, None], graph)  # (B, 1, N, C)
        return x[:, 0]

    def cls_attention(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> None:
        return None


def check_bags(features: Tensor, graph: PatchGraph, in_dim: int, *, scales: int = 1) -> None:
    """Refuse features that are not (B, N, in_dim), or a graph of other rows than theirs or of more or fewer magnifications than ``scales``."""
    shape = tuple(features.shape)
    if features.ndim != 3 or shape[-1] != in_dim or shape[1] == 0:
        what = f"shape {shape}, expected (B, N, {in_dim}) with at least one patch"
        cure = "One bag needs a batch axis (features[None]); another last size means features of another encoder."
        raise UserError(what, where="features", cure=cure)
    if graph.num_bags != shape[0] or graph.num_rows != shape[0] * shape[1] or graph.before:
        what = f"{graph.num_bags} bags and {graph.num_rows} rows for features {shape}"
        cure = "Build the graph from the coordinates of these patches alone (PatchGraph.from_coords); the model adds CLS and padding itself."
        raise UserError(what, where="graph", cure=cure)
    if graph.scales != scales:
        what = f"patches of {counted(graph.scales, 'magnification')}, but the model takes {scales}"
        cure = "Make bags with `features_low` (Python: TwoScaleGraph.of) for arms of two magnifications, without it for all others."
        raise UserError(what, where="graph", cure=cure, kind="scales")


def initialise(model: nn.Module, seed: int) -> None:
    """Start values that depend on the seed and a parameter's name alone, so that paired arms share every weight of the same name.

    Weights truncated normal (std 0.02), biases 0, norms 1 and 0; a gate or an adapter draws its own from a stream of its name, and
    layers that a model lists as ``torch_start`` are uniform as PyTorch makes them.
    """
    kept = model.torch_start if isinstance(model, SlideModel) else frozenset()
    gates = [f"{name}." for name, module in model.named_modules() if isinstance(module, Coefficient | OwnStart)]
    for name, module in model.named_modules():
        if isinstance(module, SignedGate | OwnStart):
            module.reset_parameters(stream(seed, name))
        if any(f"{name}.".startswith(gate) for gate in gates):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{leaf}".lstrip(".")
            if name in kept:
                limit = 1 / math.sqrt(module.in_features)  # PyTorch's default for weight and bias alike
                nn.init.uniform_(parameter, -limit, limit, generator=stream(seed, full))
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                nn.init.constant_(parameter, 1.0 if leaf == "weight" else 0.0)
            elif leaf == "bias":
                nn.init.zeros_(parameter)
            elif leaf.startswith("lambda_"):
                nn.init.normal_(parameter, std=0.1, generator=stream(seed, full))
            else:
                nn.init.trunc_normal_(parameter, std=0.02, generator=stream(seed, full))
