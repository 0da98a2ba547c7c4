"""The names that outside code relies on, in the founders' own words (contract.py is their file, unchanged)."""

from pathlib import Path

CONTRACT = (Path(__file__).parent / "contract.py").read_text()


def test_the_contract_runs_whole():
    scope: dict[str, object] = {}
    exec(compile(CONTRACT, "contract.py", "exec"), scope)
    assert tuple(scope["logits"].shape) == (1, 3)
    assert not hasattr(scope["encoder"], "_gated_srp")  # detached


def test_the_copy_is_the_founders_file(shared):
    assert (shared / "contract.py").read_text() == CONTRACT
