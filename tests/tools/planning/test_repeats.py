"""Which layers of a model repeat, and figures of all from figures of few."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelzoo_trainer.tools.planning.repeats import Repeat, extrapolated, repeats_of, shorten


class Layer(nn.Linear):
    def __init__(self, window: int | None = None, layer_idx: int = 0, rate: float = 0.0) -> None:
        super().__init__(4, 4)
        self.window, self.layer_idx, self.rate = window, layer_idx, rate


def model(*layers: nn.Module) -> nn.Module:
    found = nn.Module()
    found.layers = nn.ModuleList(layers)
    return found


def test_equal_layers_repeat_whatever_their_number_and_rate() -> None:
    layers = [Layer(layer_idx=number, rate=0.1 + number) for number in range(10)]
    assert repeats_of(model(*layers)) == [Repeat(("layers",), 10, 1)]


def test_every_other_layer_has_a_window() -> None:
    layers = [Layer(window=None if number % 2 else 8) for number in range(11)]
    [found] = repeats_of(model(*layers))
    assert (found.period, found.num_measured, found.num_left_out) == (2, 5, 3)
    places = [found.place(index, 5) for index in range(5)]
    assert places == ["first", "middle", "middle", "middle", "last"]


def test_layers_without_a_pattern_are_all_measured() -> None:
    assert repeats_of(model(*(Layer(window=number) for number in range(10)))) == []
    assert repeats_of(model(*(Layer() for _ in range(4)))) == []


def test_layers_that_are_not_trained_are_others() -> None:
    layers = [Layer() for _ in range(12)]
    layers[5].requires_grad_(False)
    assert repeats_of(model(*layers)) == []


def test_a_frozen_copy_repeats_with_the_model() -> None:
    both = nn.Module()
    both.policy, both.reference = (model(*(Layer() for _ in range(10))) for _ in range(2))
    both.reference.requires_grad_(False)
    both.other = model(*(Layer(window=2) for _ in range(8)))
    found = {one.names: one.num_layers for one in repeats_of(both)}
    assert found == {("policy.layers", "reference.layers"): 10, ("other.layers",): 8}


def test_lists_inside_layers_are_not_shortened() -> None:
    layers = [nn.Sequential(nn.ModuleList([Layer() for _ in range(9)])) for _ in range(3)]
    assert repeats_of(model(*layers)) == []


def test_a_shortened_model_marks_the_phases_of_its_layers() -> None:
    one, phases = model(*(Layer() for _ in range(10))), list[str]()
    shorten(one, repeats_of(one), None, phases.append)
    assert len(one.layers) == 3
    states: Tensor = torch.ones(2, 4, requires_grad=True)
    for layer in one.layers:
        states = layer(states)
    states.sum().backward()
    forward = [f"forward 0 {place}" for place in ("first", "middle", "last")]
    backward = [f"backward 0 {place}" for place in ("last", "middle", "first")]
    assert phases == [*forward, "after 0", *backward]


def test_figures_are_linear_in_the_number_of_layers() -> None:
    repeats = [Repeat(("a",), 10, 1), Repeat(("b",), 12, 2)]
    least, longer = {("flops",): 100.0, ("kept",): 7.0}, [{("flops",): 110.0}, {("flops",): 103.0}]
    for numbers in longer:
        numbers["kept",] = 7.0
    assert [one.num_left_out for one in repeats] == [7, 4]
    assert extrapolated(least, longer, repeats) == {("flops",): 182.0, ("kept",): 7.0}
