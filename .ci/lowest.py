"""Print the lowest versions that pyproject.toml allows as pip requirements; an argument stands for the version of torch instead."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["train"]
bounds = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", one).groups() for one in wanted)
bounds["torch"] = sys.argv[1] if len(sys.argv) > 1 else bounds["torch"]
print(*(f"{name}=={low}" for name, low in bounds.items()))
