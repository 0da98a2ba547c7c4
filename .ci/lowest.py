"""Print the lowest allowed versions of pyproject.toml as pip requirements: those that need torch (``torch``), or the others (``rest``)."""

import re
import sys
import tomllib
from pathlib import Path

NEED_TORCH = {"torch", "lightning", "torchmetrics", "torchsurv"}

project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["train"]
bounds = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", one).groups() for one in wanted)
print(*(f"{name}=={low}" for name, low in bounds.items() if (name in NEED_TORCH) == (sys.argv[1] == "torch")))
