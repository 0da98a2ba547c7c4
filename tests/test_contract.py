"""The names that outside code relies on, in the founders' own words (contract.py is their file, unchanged)."""

from pathlib import Path

import pytest

import gated_srp

CONTRACT = (Path(__file__).parent / "contract.py").read_text()


def test_the_contract_runs_up_to_the_parts_that_wait_for_the_peers_and_attach():
    """`attach` and the peer arms are built later; everything before and between them must run."""
    core, rest = CONTRACT.split("# Foreign models: in place, a handle back.")
    core = core.replace(', "abmil", "dsmil", "transmil"', "")
    scope: dict[str, object] = {}
    exec(compile(core, "contract.py", "exec"), scope)
    assert tuple(scope["logits"].shape) == (1, 3)
    with pytest.raises(gated_srp.UserError, match="not part of this version"):
        exec(compile(rest.split("# Files and tables")[0], "contract.py", "exec"), scope)


def test_the_copy_is_the_founders_file(shared):
    assert (shared / "contract.py").read_text() == CONTRACT
