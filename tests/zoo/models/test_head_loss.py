"""The loss of a language model's head without the logits of all tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from modelzoo_trainer.zoo.models import head_chunks, head_loss
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from modelzoo_trainer.zoo.models.head_chunks import HeadInputs, HeadSettings, chunk_size
from modelzoo_trainer.zoo.models.head_loss import sum_of_losses
from modelzoo_trainer.zoo.models.language_head import Scored, is_plain, losses_of, score

NUM, WIDTH, VOCAB = 38, 16, 51
SHAPE = (2, NUM // 2)
OPTIONS = list(itertools.product((1.0, 0.3), (None, 2.0), (0.0, 0.1), (False, True)))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_chunks, "_FEWEST", 8)
    monkeypatch.setattr(head_chunks, "_SMALL", 1)


def make(*, has_bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """Return a head, states, labels and their weights."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, bias=has_bias)
    hidden = torch.randn(*SHAPE, WIDTH, requires_grad=True)
    labels = torch.randint(VOCAB, SHAPE, dtype=torch.int32)
    labels[1, 3:8] = head(hidden).argmax(-1)[1, 3:8]
    labels[0, ::5] = -100
    weights = torch.rand(SHAPE) * 3
    weights[1, ::4] = 0
    return head, hidden, labels, weights


def plain(
    head: nn.Linear, hidden: Tensor, labels: Tensor, weights: Tensor, settings: HeadSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum, the losses and the hits, from the logits."""
    logits = head(hidden) * settings.scale
    if settings.softcap is not None:
        logits = torch.tanh(logits / settings.softcap) * settings.softcap
    losses = functional.cross_entropy(
        logits.transpose(1, 2).float(),
        labels.long(),
        reduction="none",
        label_smoothing=settings.label_smoothing,
    )
    hits = (logits.argmax(-1) == labels) & (weights != 0)
    return (losses * weights).sum(), losses, hits


def gradients(value: Tensor, head: nn.Linear, hidden: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(value, [hidden, *head.parameters()]))


def close(found: Any, expected: Any, rtol: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * float(other.abs().max()))


@pytest.mark.parametrize(("scale", "softcap", "smoothing", "has_bias"), OPTIONS)
def test_losses_and_gradients_equal_those_of_logits(
    scale: float, softcap: float | None, smoothing: float, *, has_bias: bool
) -> None:
    settings = HeadSettings(scale, softcap, smoothing)
    head, hidden, labels, weights = make(has_bias=has_bias)
    total, losses, hits = plain(head, hidden, labels, weights, settings)

    found = score(head, hidden, labels, weights, settings, wants_hits=True)
    each = losses_of(head, hidden, labels, settings)

    assert found.logits is None
    assert found.hits is not None
    assert found.total.dtype == torch.float32
    torch.testing.assert_close(found.total, total, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.losses, losses.where(weights != 0, 0.0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(each, losses, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.hits, hits)
    assert found.hits.any()
    close(gradients(found.total / 7, head, hidden), gradients(total / 7, head, hidden))
    factors = torch.randn(SHAPE)
    _, losses, _ = plain(head, hidden, labels, weights, settings)
    close(
        gradients((each * factors).sum(), head, hidden),
        gradients((losses * factors).sum(), head, hidden),
    )


SETTINGS = HeadSettings(0.3, 2.0, 0.1)


def test_what_does_not_count_may_be_non_finite() -> None:
    head, hidden, labels, weights = make(has_bias=True)
    weights = weights * (labels != -100)
    expected = score(head, hidden, labels, weights, SETTINGS, wants_hits=True)
    bad = hidden.detach().masked_fill((weights == 0)[..., None], float("nan")).requires_grad_()

    found = score(head, bad, labels, weights, SETTINGS, wants_hits=True)

    assert torch.equal(found.total, expected.total)
    assert torch.equal(found.hits, expected.hits)
    expected_gradients = gradients(expected.total, head, hidden)
    close(gradients(found.total, head, bad), expected_gradients, rtol=0)
    none = score(head, bad, labels, weights * 0, SETTINGS, wants_hits=True)
    assert none.total == 0
    assert not any(one.any() for one in gradients(none.total, head, bad))


def test_a_label_beyond_the_vocabulary_is_an_error_unless_it_does_not_count() -> None:
    head, hidden, labels, weights = make()
    labels[1, 0] = VOCAB  # its weight is 0
    score(head, hidden, labels, weights, SETTINGS)
    labels[1, 1] = VOCAB

    with pytest.raises((RuntimeError, IndexError)):
        score(head, hidden, labels, weights, SETTINGS)


def test_the_gradients_can_be_computed_twice_and_are_added_up() -> None:
    head, hidden, labels, weights = make()
    total = score(head, hidden, labels, weights, SETTINGS).total
    first = gradients_kept(total, head, hidden)
    assert all(map(torch.equal, first, gradients_kept(total, head, hidden)))

    close(gradients(total * 2, head, hidden), [one * 2 for one in first], rtol=1e-7)
    for factor in (0.5, 0.25):
        (score(head, hidden, labels, weights, SETTINGS).total * factor).backward()
    close([hidden.grad, head.weight.grad], [one * 0.75 for one in first], rtol=1e-6)


def gradients_kept(value: Tensor, head: nn.Linear, hidden: Tensor) -> list[Tensor]:
    tensors = [hidden, *head.parameters()]
    return [one.clone() for one in torch.autograd.grad(value, tensors, retain_graph=True)]


@pytest.mark.parametrize("frozen", ["hidden", "weight", "all", "no_grad"])
def test_only_the_needed_gradients_are_computed(frozen: str) -> None:
    head, hidden, labels, weights = make(has_bias=True)
    expected = gradients(score(head, hidden, labels, weights, SETTINGS).total, head, hidden)
    hidden.requires_grad_(frozen not in ("hidden", "all"))
    head.weight.requires_grad_(frozen not in ("weight", "all"))
    head.bias.requires_grad_(frozen != "all")
    counter = Products()

    with counter, torch.set_grad_enabled(frozen != "no_grad"):
        total = score(head, hidden, labels, weights, SETTINGS).total

    assert counter.num_per_chunk == {"hidden": 2, "weight": 2, "all": 1, "no_grad": 1}[frozen]
    assert total.requires_grad == (frozen in ("hidden", "weight"))
    if total.requires_grad:
        total.backward()
        found = [hidden.grad, head.weight.grad, head.bias.grad]
        assert sum(one is None for one in found) == 1
        pairs = [pair for pair in zip(found, expected, strict=True) if pair[0] is not None]
        close(*zip(*pairs, strict=True))


class Products(TorchDispatchMode):
    """Counts matrix products, and keeps the largest tensor and the largest number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0
        self.largest = 0

    @property
    def num_per_chunk(self) -> float:
        return self.num / -(-NUM // chunk_size(NUM, VOCAB))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.num += "mm" in str(function)
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, Tensor):
                self.largest = max(self.largest, one.untyped_storage().nbytes())
        return result


def test_no_tensor_is_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    num, vocab = 8192, 4096
    model = Gpt2(
        vocab_size=vocab,
        hidden_size=8,
        max_position_embeddings=num,
        num_hidden_layers=1,
        num_heads=1,
        filter_size=8,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
    )
    tokens = torch.arange(num)[None] % vocab
    inside, outside = Products(), Products()

    with inside:
        model({"input_ids": tokens, "labels": tokens})["loss"].backward()
    model.requested_outputs = ("logits",)
    with outside:
        model({"input_ids": tokens, "labels": tokens})["loss"].backward()

    assert outside.largest >= 4 * num * vocab
    assert inside.largest <= 4 * num * vocab / 8
    assert inside.num == outside.num + 3 * (-(-num // chunk_size(num, vocab)) - 1)


@pytest.mark.parametrize(
    ("num", "vocab"), [(0, 5), (1, 5), (129, 10), (4096, 32000), (131072, 128256), (8192, 256000)]
)
def test_chunks_are_few_and_small(num: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    size = chunk_size(num, vocab)

    assert 1 <= size <= max(num, 1)
    assert size * vocab <= max(2**22, num * vocab / 15, 128 * vocab)
    assert size * vocab <= max(2**27, 128 * vocab)
    assert size >= min(num, 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_have_its_type_and_the_softmax_float32(dtype: torch.dtype) -> None:
    head, hidden, labels, weights = make(has_bias=True)
    settings = HeadSettings()
    with torch.autocast("cpu", dtype):
        total, losses, _ = plain(head, hidden, labels, weights, settings)
        found = score(head, hidden, labels, weights, settings)
        each = losses_of(head, hidden, labels, settings)

    torch.testing.assert_close(found.total, total, rtol=1e-6, atol=0)
    torch.testing.assert_close(each, losses)
    rough = 4 * torch.finfo(dtype).eps
    close(gradients(found.total / 50, head, hidden), gradients(total / 50, head, hidden), rough)
    _, losses, _ = plain(head, hidden, labels, weights, settings)
    close(gradients(each.mean(), head, hidden), gradients(losses.mean(), head, hidden), rough)
    for param in head.parameters():
        param.data = param.data.to(dtype)
    states = hidden.detach().to(dtype).requires_grad_()
    found = score(head, states, labels, weights, settings)
    of_half = gradients(found.total / 50, head, states)
    assert {one.dtype for one in of_half} == {dtype}
    expected = gradients(plain(head, states, labels, weights, settings)[0] / 50, head, states)
    close([one.float() for one in of_half], [one.float() for one in expected], rough)


@pytest.mark.parametrize("weight", [1.0, 1e-4])
def test_in_float16_sums_do_not_overflow_and_small_weights_do_not_vanish(weight: float) -> None:
    torch.manual_seed(0)
    head, labels = nn.Linear(WIDTH, 512, bias=False), torch.full((1, 4096), 7)
    hidden = torch.randn(1, 4096, WIDTH)
    hidden[..., 0] = 50.0  # times 4,096 tokens: more than 65,504
    hidden.requires_grad_()
    exact = gradients(
        score(head, hidden, labels, labels * weight, HeadSettings()).total, head, hidden
    )

    with torch.autocast("cpu", torch.float16):
        found = score(head, hidden, labels, labels * weight, HeadSettings()).total

    for one, other in zip(gradients(found * 2**10, head, hidden), exact, strict=True):
        assert one.isfinite().all()
        assert float((one / 2**10 - other).norm() / other.norm()) < 2e-3


def test_second_derivatives_are_refused() -> None:
    head, hidden, labels, weights = make()
    for loss in (
        score(head, hidden, labels, weights, SETTINGS).total,
        losses_of(head, hidden, labels, SETTINGS).sum(),
    ):
        with pytest.raises(RuntimeError, match=r"create_graph=True.*requested_outputs"):
            torch.autograd.grad(loss, [hidden], create_graph=True)


def test_half_gradients_of_a_large_weight_are_added_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, hidden, labels, weights = make()

    def run() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            total = score(head, hidden, labels, weights, SETTINGS).total
        return gradients(total, head, hidden)

    whole = run()
    monkeypatch.setattr(head_chunks, "_PIECE", 7 * WIDTH)

    close(run(), whole, rtol=1e-5)


def test_the_gradient_of_the_sum_is_not_rounded_to_16_bits() -> None:
    head, hidden, labels, weights = make()
    head = head.bfloat16()
    states = hidden.detach().bfloat16().requires_grad_()
    total = score(head, states, labels, weights, HeadSettings()).total
    whole = [one.float() for one in gradients_kept(total, head, states)]

    third = [one.float() for one in gradients(total / 3, head, states)]

    for one, other in zip(third, whole, strict=True):
        ratio = float((one * other).sum() / other.square().sum())
        assert ratio == pytest.approx(1 / 3, rel=3e-4)  # of bfloat16(1 / 3): 1.3e-3 off


@pytest.mark.slow_cases("*inductor*")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # of inductor
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's tracing
def test_compiled_it_is_one_graph_and_the_same(backend: str) -> None:
    torch.compiler.reset()
    head, hidden, labels, weights = make(has_bias=True)

    def both(hidden: Tensor) -> tuple[Scored, Tensor]:
        found = score(head, hidden, labels, weights, SETTINGS, wants_hits=True)
        return found, losses_of(head, hidden, labels, SETTINGS)

    compiled: Callable[[Tensor], Any] = torch.compile(both, backend=backend, fullgraph=True)
    found, expected = compiled(hidden), both(hidden)

    factors = torch.randn(SHAPE)
    values = [one.total / 3 + (each * factors).sum() for one, each in (found, expected)]
    close(*(gradients(value, head, hidden) for value in values))
    torch.testing.assert_close(found[0].losses, expected[0].losses)
    assert torch.equal(found[0].hits, expected[0].hits)
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden)[0].total, expected[0].total.detach())
    torch.compiler.reset()


def test_a_head_with_hooks_or_a_class_of_its_own_is_called_as_a_module() -> None:
    head, hidden, labels, weights = make()
    alone = score(head, hidden, labels, weights, SETTINGS)
    seen = []
    handle = head.register_forward_hook(lambda *given: seen.append(given[-1]))

    hooked = score(head, hidden, labels, weights, SETTINGS)
    each = losses_of(head, hidden, labels, SETTINGS)

    assert len(seen) == 2
    assert hooked.logits is not None
    torch.testing.assert_close(hooked.total, alone.total, rtol=1e-6, atol=0)
    torch.testing.assert_close(each.where(weights != 0, 0.0), alone.losses)
    handle.remove()
    assert is_plain(head)
    assert not is_plain(type("Own", (nn.Linear,), {})(2, 2))
    assert not is_plain(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_gradients_are_copied_only_if_the_graph_is_kept(
    monkeypatch: pytest.MonkeyPatch, keeps_graph: bool
) -> None:
    head, hidden, labels, weights = make()
    seen = []
    original = head_loss.scaled

    def scaled(*args: Any, in_place: bool) -> Tensor:
        seen.append(in_place)
        return original(*args, in_place=in_place)

    monkeypatch.setattr(head_loss, "scaled", scaled)
    inputs = HeadInputs(
        hidden.flatten(0, 1),
        head.weight,
        None,
        labels.flatten(),
        (weights * (labels >= 0)).flatten(),
    )

    sum_of_losses(inputs, HeadSettings()).total.backward(retain_graph=keeps_graph)

    assert seen == [not keeps_graph] * 2
