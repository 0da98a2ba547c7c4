"""A training in a process of its own, to be killed: python child_run.py cohort.yaml OUT [pretrain]; a state after every window."""

import sys

import torch

from gated_srp.config import load_config
from gated_srp.training.pretrain import pretrain
from gated_srp.training.train import train

if __name__ == "__main__":
    torch.set_num_threads(1)
    run = pretrain if "pretrain" in sys.argv[3:] else train
    run(load_config(sys.argv[1], {"out": sys.argv[2]}), arm="gated_srp", seed=42, save_every=0.0)
