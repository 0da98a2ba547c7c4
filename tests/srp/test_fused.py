"""The Triton kernels, in Triton's interpreter on a processor: equal to the plain correction, few launches, little memory moved."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gated_srp.srp import projection

COMPARED = """
from collections import Counter
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from gated_srp.srp import FixedCoefficient, GatedSRP, PatchGraph, SignedGate, projection

torch.manual_seed(0)
H, D = 3, 5  # no powers of two
cells = torch.cartesian_prod(torch.arange(5), torch.arange(5))[torch.randperm(25)[:18]]
graph = PatchGraph.from_coords(cells, torch.randn(18, 7), stride=1).with_isolated(before=1, after=2)
gates = [SignedGate(H, delta=1.5, hidden_dim=4), SignedGate(H, hidden_dim=None), SignedGate(H, hidden_dim=4, head=False)]
gates += [SignedGate(H, hidden_dim=4, bias=False), FixedCoefficient(2.0)]


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found, self.bytes = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            assert func.name() not in ("aten::_local_scalar_dense", "aten::nonzero"), func.name()
            self.found[func.name()] += 1
            self.bytes += sum(t.nbytes for t in (*args, out) if isinstance(t, torch.Tensor))
        return out


def run(module, y, v, kernels):
    projection.by_kernels = lambda x: kernels
    y = y.clone().requires_grad_()
    z = module(y, v, graph)
    z.backward(torch.linspace(-1, 1, z.numel()).view(z.shape).to(z.dtype))
    grads = [y.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
    module.zero_grad()
    with torch.no_grad():
        rows = module.by_rows(v, graph)(y.detach(), slice(0, 21))
    return [z.detach(), rows, *grads]


for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    y, v = (torch.randn(1, 21, H * D).to(dtype).view(1, 21, H, D).transpose(1, 2) for _ in range(2))
    y[0, 0, 3] = 0
    for gate in gates:
        module = GatedSRP(H, coefficient=gate)
        if dtype == torch.float32 and gate is gates[0]:
            projection.by_kernels = lambda x: True
            assert torch.equal(module(y, v, graph), y)  # an untrained gate is the identity
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.randn(p.shape) * 0.5)
        for a, b in zip(run(module, y, v, False), run(module, y, v, True), strict=True):
            torch.testing.assert_close(a.float(), b.float(), atol=close, rtol=close)

projection.by_kernels = lambda x: True
from gated_srp.srp import fused
launches = []
for name in ("_measure_kernel", "_correct_kernel", "_gate_kernel"):
    kernel = getattr(fused, name)

    class Counted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                from torch.utils._python_dispatch import _disable_current_modes

                launches.append(sum(t.nbytes for t in args if isinstance(t, torch.Tensor)))
                with _disable_current_modes():
                    return self.kernel[grid](*args, **kwargs)
            return launch

    setattr(fused, name, Counted(kernel))
S, D = 12, 64
y, v = (torch.randn(1, 1 + S * S, 6 * D).view(1, -1, 6, D).transpose(1, 2) for _ in range(2))
graph = PatchGraph.from_grid(S, S).with_isolated(before=1)
module = GatedSRP(6)
with torch.no_grad(), Calls() as calls:
    module(y, v, graph)
print(sum(calls.found.values()) + len(launches), (calls.bytes + sum(launches)) / (y.nbytes + v.nbytes))
"""


def test_kernels_take_over_on_gpus_that_are_asked_to_alone(monkeypatch):
    monkeypatch.setattr(projection, "find_spec", lambda name: name)
    here, there = (SimpleNamespace(is_cuda=cuda, dtype=torch.float32) for cuda in (False, True))
    assert not projection.by_kernels(there)
    monkeypatch.setenv("GATED_SRP_FUSED", "1")
    assert projection.by_kernels(there) and not projection.by_kernels(here)
    assert not projection.by_kernels(SimpleNamespace(is_cuda=True, dtype=torch.float64))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (it comes with PyTorch for CUDA)")
def test_kernels_equal_the_plain_correction_in_at_most_12_launches_without_waiting_for_the_device():
    here = Path(__file__).resolve().parents[2] / "src"
    path = os.pathsep.join([str(here), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", COMPARED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    calls, moved = done.stdout.split()
    assert int(calls) <= 12
    assert float(moved) <= 4
