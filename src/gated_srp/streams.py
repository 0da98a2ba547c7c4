"""Named random streams: what is drawn depends on a seed and a name, never on what was drawn before."""

import hashlib

import torch


def stream(seed: int, name: str) -> torch.Generator:
    """A random stream of its own for a name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
