"""`attach`: one call that puts Gated SRP into somebody else's model."""

from typing import NoReturn

from torch import nn

from gated_srp.errors import UserError


def attach(model: nn.Module, **settings: object) -> NoReturn:
    """Not part of this version: it says so instead of doing nothing."""
    raise UserError(
        f"attach({type(model).__name__}): attaching to foreign models is not part of this version yet. "
        "Until then call GatedSRP(num_heads)(y, v, graph) between attention and output projection, as examples/drop_in.py shows."
    )
