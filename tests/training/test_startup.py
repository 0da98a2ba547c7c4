"""A training starts fast: it loads what it uses, and `--help` loads nothing heavy."""

import subprocess
import sys

MOST = 60  # of our modules; fewer is better. 55 before bounded, records, columns, reach, seen, state, results and parts came

RUN = """
import sys, torch
torch.set_num_threads(1)
import gated_srp
gated_srp.train(sys.argv[1], arm="gated_srp", seed=42, out=sys.argv[2], settings={"train.epochs": 1})
ours = sorted(name for name in sys.modules if name.split(".")[0] == "gated_srp")
heavy = ("lightning", "torchmetrics", "torchsurv", "lifelines", "matplotlib", "torch._dynamo", "rich", "typer", "scipy.stats")
print(len(ours), *[name for name in heavy if name in sys.modules])
"""


def run(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_run_loads_few_of_our_modules_and_no_heavy_library(cohort, tmp_path):
    count, *heavy = run(RUN, cohort, tmp_path).split()
    assert heavy == []
    assert int(count) <= MOST


def test_help_of_train_loads_no_torch():
    code = """
import sys
from gated_srp.cli import main
sys.argv = ["gated-srp", "train", "--help"]
try:
    main()
except SystemExit:
    pass
print([name for name in ("torch", "pandas", "numpy") if name in sys.modules])
"""
    assert run(code).splitlines()[-1] == "[]"
