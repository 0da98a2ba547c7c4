"""A training in a process of its own, to be killed: python child_run.py cohort.yaml OUT SAVE_EVERY [DELAY]."""

import sys
import time

import torch

from gated_srp.data import load_config
from gated_srp.training import Interrupted, train_run
from gated_srp.training.keeper import Keeper

if __name__ == "__main__":
    yaml, out, save_every, *delay = sys.argv[1:]
    torch.set_num_threads(1)
    if delay:  # slower bags, so that a signal lands inside an epoch
        bag = Keeper.bag
        Keeper.bag = lambda self, seen: (time.sleep(float(delay[0])), bag(self, seen))[1]
    try:
        train_run(load_config(yaml, {"out": out}), arm="gated_srp", seed=42, save_every=float(save_every))
    except Interrupted as stopped:
        print(stopped, flush=True)
        sys.exit(130)
