"""What to say when memory runs out: where, and what to set."""

import math
import re
from collections.abc import Sequence

from gated_srp.config.cohort import TrainConfig
from gated_srp.data.loader import SlideBag
from gated_srp.errors import UserError
from gated_srp.training.ranks import accelerator, choose_precision


def memory_error(error: Exception) -> Exception:
    """The same error; running out of memory elsewhere than at a bag, as while a state is saved, as one that a user can mend."""
    if not is_memory(error):
        return error
    what = f"out of memory ({' '.join(str(error).split())[:160] or type(error).__name__}). The last saved state is kept"
    cure = "Free some memory, or set fewer train.workers; then start the same command again."
    return UserError(what, cure=cure, kind="memory").with_traceback(error.__traceback__)


def is_memory(error: Exception) -> bool:
    """PyTorch has one class of error for everything, so its words are all there is to tell by."""
    said = re.search("out of memory|llocate memory|enough memory|Unable to allocate", str(error))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and said is not None)


def out_of_memory(bags: Sequence[SlideBag], settings: TrainConfig | None) -> UserError:
    bag = bags[0]
    patches = len(bag.features)
    cures = []
    if settings is not None and settings.pack and len(bags) > 1:
        together = sum(len(one.features) for one in bags)
        cures.append(f"train.pack: {max(1, together // 2)} in a new run, the same updates but for rounding")
    elif settings is not None and len(bags) > 1:
        size, times = math.ceil(settings.batch_size / 2), 2 * settings.accumulation
        cures.append(f"train.batch_size: {size} and train.accumulation: {times} in a new run, the same updates")
    if settings is not None and not settings.checkpointing:
        cures.append("train.checkpointing: true, which goes on in the same run with the same numbers")
    kind = accelerator()
    wanted = "auto" if kind == "cuda" else "bf16"  # what the machine can do: an old GPU would emulate it
    if settings and (choose_precision(settings.precision, kind), choose_precision(wanted, kind)) == ("32", "bf16"):
        cures.append("train.precision: bf16 in a new run")
    if len(bags) == 1:
        cures.append(f"a cap of {max(1, patches // 2):,} or less in a new run")
    more = f" and {len(bags) - 1} more at once, each" if len(bags) > 1 else ""
    return UserError(
        f"out of memory at slide {bag.slide!r}{more} with {patches:,} patches of {bag.features.shape[1]} channels. "
        "The state before it is kept",
        cure=f"Set {'; or '.join(cures)}.",
        kind="memory",
    )
