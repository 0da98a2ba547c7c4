"""Axes of rows, some at a time."""

import torch

from gated_srp.srp import NeighbourMean, OwnValue, PatchGraph, RandomDirection, ShuffledNeighbours, SlideMean


def test_axes_of_a_very_long_slide_in_halves_are_those_of_its_values_widened_at_once(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.arange(90) % 9, torch.arange(90) // 9], 1) * 256
    graph = PatchGraph.from_coords(coords, stride=256).with_isolated(before=1, after=2)
    v = torch.randn(93, 2, 4, generator=draw).bfloat16()
    at_once = NeighbourMean().axis_at(v, graph)
    monkeypatch.setattr("gated_srp.srp.direction.LONG", 50)
    in_parts = NeighbourMean().axis_at(v, graph)
    for rows in (slice(0, 40), slice(40, 93), slice(0, 93)):
        assert in_parts(rows).dtype == torch.float32 and torch.equal(in_parts(rows), at_once(rows))


def test_only_own_values_are_an_axis_for_rows_without_neighbours_and_for_gradients():
    """What docs/method.md says of the control `axis_own_value`."""
    graph = PatchGraph.from_grid(3, 3).with_isolated(before=1, after=1)
    v = torch.randn(11, 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for direction in (NeighbourMean(), SlideMean(), RandomDirection(2, 4), ShuffledNeighbours(), OwnValue()):
        axis, own = direction(v, graph), isinstance(direction, OwnValue)
        assert axis[1:-1].any() and bool(axis[[0, -1]].any()) == own == axis.requires_grad == direction.learned
