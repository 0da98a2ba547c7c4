"""What Windows lacks is hidden: every module is imported all the same, and files, locks and a whole run work without it."""

import subprocess
import sys
from pathlib import Path

CODE = """
import importlib, os, pkgutil, signal, sys
import torch.multiprocessing, h5py, pandas, pydantic, safetensors.torch, scipy.stats, filelock, matplotlib.pyplot  # have builds of their own
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "register_at_fork", "sysconf", "sched_getaffinity", "getuid", "geteuid", "waitstatus_to_exitcode"):
    delattr(os, name)
for name in ("SIGKILL", "SIGXCPU", "SIGCHLD", "SIGALRM", "SIGHUP", "SIGUSR1"):
    delattr(signal, name)

import gated_srp
names = [one.name for one in pkgutil.walk_packages(gated_srp.__path__, "gated_srp.")]
names.remove("gated_srp.srp.fused")  # kernels of Triton, which comes with PyTorch for CUDA alone; imported where there is a GPU
for name in names:
    importlib.import_module(name)
print(len(names) > 130, all(sys.modules[name] is None for name in ("fcntl", "resource")))

run = gated_srp.train(sys.argv[1], arm="gated_srp", seed=42, out=sys.argv[2])
with run.lock():
    try:
        with gated_srp.training.folder.RunFolder(run.path).lock():
            print("locked twice")
    except gated_srp.UserError as error:
        print(error.what)
gated_srp.predict([run.path], sys.argv[3], workers=0).write(run.path / "new.csv")
print(sum(1 for _ in open(run.path / "new.csv")), not list(run.path.glob(".*.part")), "memory unknown" in open(run.path / "log.txt").read())
"""


def test_modules_locks_training_and_prediction_work_without_what_windows_lacks(tmp_path: Path):
    sys.path.insert(0, str(Path(__file__).parent / "training"))
    from toy_cohorts import write_cohort

    cohort = write_cohort(tmp_path, slides=12, train={"epochs": 1})
    given = [str(cohort), str(tmp_path / "runs"), str(tmp_path / "feats")]
    done = subprocess.run([sys.executable, "-c", CODE, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["True True", "another process is training this run", "13 True True"]
