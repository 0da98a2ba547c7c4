"""The subprocess of `peak`: measure one phase and print the answer as JSON."""

import json
import os
import sys

import torch

from gated_srp.machine import bf16_environment
from gated_srp_bench.measure import measure_peak


def main() -> None:
    tokens, phase, arm, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    os.environ.update(bf16_environment() if dtype == "bfloat16" else {})
    print(json.dumps(measure_peak(int(tokens), phase, arm, dtype)))


if __name__ == "__main__":
    main()
