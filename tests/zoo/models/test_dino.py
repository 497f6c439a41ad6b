"""DINO's trunks, heads, losses, centres and teachers equal the formulas."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from backends.deferred_init import materialize
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.param_groups import make_param_groups
from modelzoo_trainer.zoo.models.vision.dino.head import DinoHead, DinoHeadSettings
from modelzoo_trainer.zoo.models.vision.dino.losses import (
    DistillationLoss,
    DistillationSettings,
    PatchLoss,
)
from modelzoo_trainer.zoo.models.vision.dino.model import Dino
from modelzoo_trainer.zoo.models.vision.dino.plan import CosineDecay
from modelzoo_trainer.zoo.models.vision.dino.teacher import decay_after
from modelzoo_trainer.zoo.models.vision.local_positions import axis_weights
from tests.zoo.models.dino_cases import HEAD, LOSS, PROTOTYPES, TRUNK, batch_of, make, settings
from tests.zoo.models.drawn_alike import check_drawn_alike

SIZE = 7


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def loss_of(cls: Any, **changes: Any) -> Any:
    return cls(DistillationSettings(**{**LOSS, "input_size": SIZE, **changes})).double()


def entropy(teacher: Tensor, student: Tensor, center: Tensor, temperature: float) -> Tensor:
    """Return -sum t log s of two rows of scores."""
    targets = ((teacher - center) / temperature).softmax(-1)
    return -(targets * (student / 0.1).softmax(-1).log()).sum()


def test_the_distillation_loss_is_the_mean_over_pairs_of_different_views() -> None:
    loss = loss_of(DistillationLoss)
    loss.center.copy_(numbers(SIZE, seed=9))
    student, teacher, local = numbers(3, 2, SIZE), numbers(3, 2, SIZE, seed=1), numbers(3, 4, SIZE)
    pairs = [
        entropy(teacher[row, one], view, loss.center, 0.04)
        for row in range(3)
        for one in range(2)
        for view in (student[row, 1 - one], *local[row])
    ]

    torch.testing.assert_close(loss(student, teacher, local), sum(pairs) / len(pairs))
    of_global = [pairs[5 * number] for number in range(6)]
    torch.testing.assert_close(loss(student, teacher), sum(of_global) / 6)
    with pytest.raises(ConfigError, match="one view"):
        loss(student[:, :1], teacher[:, :1])


def test_the_patch_loss_is_the_mean_over_images_of_the_mean_over_masked_patches() -> None:
    loss = loss_of(PatchLoss)
    loss.center.copy_(numbers(SIZE, seed=9))
    student, teacher = numbers(2, 2, 5, SIZE), numbers(2, 2, 5, SIZE, seed=1)
    masked = torch.tensor([[[1, 0, 1, 1], [0, 0, 0, 0]], [[0, 1, 0, 0], [1, 1, 1, 1]]]).bool()
    expected = torch.zeros(())
    for row, view, patch in masked.nonzero().tolist():
        found = entropy(
            teacher[row, view, 1 + patch], student[row, view, 1 + patch], loss.center, 0.04
        )
        expected = expected + found / masked[row, view].sum() / 4

    torch.testing.assert_close(loss(teacher, student, masked), expected.double())


@pytest.mark.parametrize("cls", [DistillationLoss, PatchLoss])
def test_a_teacher_gets_no_gradient(cls: Any) -> None:
    loss, shape = loss_of(cls), (2, 2, SIZE) if cls is DistillationLoss else (2, 2, 5, SIZE)
    teacher, student = numbers(*shape).requires_grad_(), numbers(*shape, seed=1).requires_grad_()
    if cls is DistillationLoss:
        loss(student, teacher).backward()
    else:
        loss(teacher, student, torch.ones(2, 2, 4, dtype=torch.bool)).backward()
    assert teacher.grad is None
    assert student.grad is not None


def test_without_masked_patches_the_loss_and_the_centre_are_finite() -> None:
    loss = loss_of(PatchLoss)
    student = numbers(2, 1, 5, SIZE).requires_grad_()
    loss.center.fill_(0.5)

    found = loss(numbers(2, 1, 5, SIZE), student, torch.zeros(2, 1, 4, dtype=torch.bool))
    found.backward()
    loss.end_step(torch.tensor(True))

    assert (found.item(), student.grad.abs().sum().item()) == (0, 0)
    assert (loss.center.unique().tolist(), loss.step.item()) == ([0.5], 1)


def test_centres_move_to_the_mean_of_a_step_in_training_only() -> None:
    of_all, of_masked = loss_of(DistillationLoss), loss_of(PatchLoss)
    parts = [numbers(3, 2, SIZE, seed=seed) for seed in (1, 2)]
    tokens = [numbers(3, 2, 5, SIZE, seed=seed) for seed in (3, 4)]
    masks = [numbers(3, 2, 4, seed=seed) > 0 for seed in (5, 6)]
    for is_training in (False, True):
        of_all.train(is_training), of_masked.train(is_training)
        for part, token, masked in zip(parts, tokens, masks, strict=True):  # two micro-batches
            of_all(part, part), of_masked(token, token, masked)
        if not is_training:
            assert (of_all.count.item(), of_masked.count.item()) == (0, 0)
    for loss in (of_all, of_masked):
        loss.end_step(torch.tensor(True))

    torch.testing.assert_close(of_all.center, 0.1 * torch.cat(parts).mean(dim=(0, 1)))
    seen = torch.cat([token[:, :, 1:][mask] for token, mask in zip(tokens, masks, strict=True)])
    torch.testing.assert_close(of_masked.center, 0.1 * seen.mean(dim=0))
    assert (of_all.step.item(), of_all.sums.abs().sum().item()) == (1, 0)
    before = of_all.center.clone()
    of_all(parts[0], parts[0])
    of_all.end_step(torch.tensor(True))
    torch.testing.assert_close(of_all.center, 0.9 * before + 0.1 * parts[0].mean(dim=(0, 1)))


def test_the_temperature_is_linear_and_then_constant() -> None:
    loss = loss_of(DistillationLoss)
    found = []
    for _ in range(6):
        found.append(loss.temperature().item())
        loss.end_step(torch.tensor(True))
    assert found == pytest.approx([0.04, 0.05, 0.06, 0.07, 0.07, 0.07])
    constant = loss_of(DistillationLoss, warmup_teacher_temp_steps=0)
    assert constant.temperature().item() == pytest.approx(0.07)
    once = loss_of(DistillationLoss, warmup_teacher_temp_steps=1)
    assert once.temperature().item() == pytest.approx(0.04)
    once.end_step(torch.tensor(True))
    assert once.temperature().item() == pytest.approx(0.07)


def test_the_decay_of_a_teacher_is_a_cosine() -> None:
    given = CosineDecay(ema_decay_start=0.9, ema_decay_end=1.0, total_steps=10)
    expected = [1 - 0.1 * (1 + math.cos(math.pi * min(num, 10) / 10)) / 2 for num in range(13)]
    found = [decay_after(torch.tensor(num), given).item() for num in range(13)]
    assert found == pytest.approx(expected)
    assert (found[0], found[10]) == (pytest.approx(0.9), 1.0)


def test_the_head_is_a_layer_of_rows_with_own_norms() -> None:
    torch.manual_seed(0)
    given = {key: value for key, value in HEAD.items() if key != "name"}
    head = DinoHead(DinoHeadSettings(**given)).double()
    hidden = numbers(2, 3, given["input_size"])
    with torch.no_grad():
        head.last_layer.weight_g.copy_(numbers(PROTOTYPES, 1))
    first, second, third = (one for one in head.mlp if isinstance(one, torch.nn.Linear))
    inner = third(functional.gelu(second(functional.gelu(first(hidden)))))
    rows = head.last_layer.weight_v
    rows = rows / rows.square().sum(1, keepdim=True).sqrt() * head.last_layer.weight_g
    expected = inner / inner.square().sum(-1, keepdim=True).sqrt() @ rows.T

    torch.testing.assert_close(head(hidden), expected)
    assert head.last_layer.weight_g.requires_grad
    fixed = DinoHead(DinoHeadSettings(**{**given, "norm_last_layer": True, "num_layers": 1}))
    assert not fixed.last_layer.weight_g.requires_grad
    assert [tuple(one.shape) for one in fixed.mlp.parameters()] == [(8, 16), (8,)]


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("offset", [0.0, 0.1])
def test_local_positions_are_those_of_bicubic_interpolation(offset, antialias) -> None:
    table = numbers(1, 3, 7, 5)
    scale: Any = {"scale_factor": ((4 + offset) / 7, (3 + offset) / 5)}
    how: Any = scale if offset else {"size": (4, 3)}
    expected = functional.interpolate(table, mode="bicubic", antialias=antialias, **how)

    rows = axis_weights(7, 4, offset, antialias=antialias)
    columns = axis_weights(5, 3, offset, antialias=antialias)

    found = torch.einsum("rR,kK,bhRK->bhrk", rows, columns, table)
    torch.testing.assert_close(found, expected)


def test_views_are_images_of_the_trunk_and_masks_replace_patches() -> None:
    trunk = make().double().eval().image_model_trunks[1]
    batch = batch_of(2)
    images, masked = batch["global_view"].double(), batch["collated_masks"]

    states, cls = trunk(images, None, masked)

    assert (states.shape, cls.shape) == ((2, 2, 17, 16), (2, 2, 16))
    alone = trunk.encoder(images[1, 1:], masked[1, 1:])
    torch.testing.assert_close(states[1, 1], alone.hidden[0])
    torch.testing.assert_close(cls[1, 1], alone.cls[0])
    noise = images.clone()
    places = masked[..., None].expand(2, 2, 16, 12).reshape(2, 2, 4, 4, 2, 2, 3)
    places = places.permute(0, 1, 6, 2, 4, 3, 5).reshape(images.shape)
    noise[places] = 7.0
    torch.testing.assert_close(trunk(noise, None, masked)[0], states)
    assert not torch.equal(trunk(noise)[0], trunk(images)[0])
    assert trunk(batch["local_view"].double())[0].shape == (2, 3, 5, 16)
    assert trunk.encoder.embedding.mask_token.weight.abs().sum() == 0


def reference(model: Dino, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum of the losses, from the parts."""
    teacher, student = model.image_model_trunks[0], model.image_model_trunks[1]
    head, own = model.heads[0], model.heads[1]
    states, cls = teacher(batch["global_view"])
    seen, mine = student(batch["global_view"], None, batch["collated_masks"])
    _, local = student(batch["local_view"])
    dino, patches = model.losses[0], model.losses[1]
    first = dino(own(mine), head(cls).detach(), own(local))
    return first + 0.5 * patches(head(states).detach(), own(seen), batch["collated_masks"])


def test_parts_are_called_as_forward_args_say() -> None:
    given = settings()
    given["losses"][1]["loss_weight"] = 0.5
    model = make(losses=given["losses"]).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * numbers(*parameter.shape, seed=number).float())
    batch = batch_of()

    found = model(batch)

    torch.testing.assert_close(found["loss"], reference(model, batch))
    named = found["DinoDistillationLoss"] + 0.5 * found["iBOTPatchLoss"]
    torch.testing.assert_close(named, found["loss"])
    found["loss"].backward()
    has_gradient = {name for name, one in model.named_parameters() if one.grad is not None}
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert has_gradient == trained == {name for name in trained if ".model.1." in name}
    means = model.validation_means(found, batch)
    assert {name: weight for name, (_, weight, _) in means.items()} == {
        "DinoDistillationLoss": 4,
        "iBOTPatchLoss": 4,
    }


def test_teachers_begin_equal_and_follow_after_each_step() -> None:
    model = make()
    for kind in (model.image_model_trunks, model.heads):
        for own, other in zip(kind[0].parameters(), kind[1].parameters(), strict=True):
            assert torch.equal(own, other)
    expected = [one.detach().clone() for one in model.image_model_trunks[0].parameters()]
    for num in (1, 2):
        model(batch_of())
        with torch.no_grad():
            for one in model.image_model_trunks[1].parameters():
                one.add_(num)
        model.end_step()
        decay = 1 - 0.1 * (1 + math.cos(math.pi * num / 10)) / 2
        students = list(model.image_model_trunks[1].parameters())
        expected = [
            decay * own + (1 - decay) * new for own, new in zip(expected, students, strict=True)
        ]
        found = list(model.image_model_trunks[0].parameters())
        torch.testing.assert_close(found, expected)
    assert (model.ema_step.item(), model.losses[0].step.item()) == (2, 2)
    model.end_step()  # no forward pass since: a no-op
    assert model.ema_step.item() == 2
    torch.testing.assert_close(list(model.image_model_trunks[0].parameters()), expected)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    model(batch_of())
    model.end_step()
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_a_model_without_memory_at_first_gets_the_same_values() -> None:
    expected = make()
    torch.manual_seed(1)
    with torch.device("meta"):
        found = Dino(**settings())
    torch.manual_seed(1)

    materialize(found, torch.device("cpu"))

    check_drawn_alike(found, expected)
    assert {name for name, one in found.named_parameters() if one.requires_grad} == {
        name for name, one in expected.named_parameters() if one.requires_grad
    }


def test_a_checkpoint_has_centres_and_steps() -> None:
    state = make().state_dict()
    others = {name for name in state if not name.startswith(("image_model_trunks", "heads"))}
    inner = {f"losses.model.{number}.{name}" for number in (0, 1) for name in ("center", "step")}
    assert others == inner | {"ema_step"}


GLOBS = {
    "*.mask_token": 1,
    "*.cls_embedding": 1,
    "*.embedding_layer.*.weight": 2,
    "*.mlp.*.weight": 3,
    "*.last_layer.weight*": 2,
    "*.encoder.*.self_attn.*.weight": 8,
    "*.encoder.*.ffn.*.weight": 4,
    "*position_embeddings*": 1,
    "*.linear_proj.*": 2,
    "*.transformer_encoder.norm.*": 2,
    "*.transformer_encoder.layers.1.*": 18,
}


def test_published_patterns_find_parameters_of_the_student() -> None:
    model = make()
    for glob, num in GLOBS.items():
        groups = make_param_groups(
            model, weight_decay=0.1, params=[{"params": [glob], "tag": "chosen"}]
        )
        tagged = [one for group in groups if "tags" in group for one in group["params"]]
        assert (glob, len(tagged)) == (glob, num)


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return settings with one changed; numbers in the path are places in lists."""
    given = settings()
    place: Any = given
    *inner, last = [int(one) if one.isdigit() else one for one in path.split("/")]
    for one in inner:
        place = place[one]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return given


INVALID: list[tuple[str, Any, list[str]]] = [
    ("heads", [], ["heads", "at least one"]),
    ("heads/0", 3, ["heads[0]", "3"]),
    ("heads/0/head_model/nme", 1, ["heads[0].head_model.nme"]),
    ("heads/0/head_model/name", "DinoHed", ["heads[0].head_model.name", "DinoHead"]),
    ("heads/0/head_model/input_size", ..., ["heads[0].head_model.input_size", "missing"]),
    ("heads/1/head_model/input_size", 8, ["heads[1]", "8", "hidden_size 16"]),
    ("heads/1/loss_weight", 2.0, ["heads[1].loss_weight"]),
    ("heads/1/image_model", {}, ["heads[1].image_model", "head_model"]),
    ("heads/0/stop_grad", "yes", ["heads[0].stop_grad"]),
    ("heads/0/forward_args", [], ["heads[0].forward_args"]),
    ("heads/0/forward_args/0/0", "image_model_trunks.output(2,0,1)", ["has 2 parts"]),
    ("heads/0/forward_args/0/0", "image_model_trunks.output(0,1,1)", ["has 1 calls"]),
    ("heads/0/forward_args/0/0", "image_model_trunks.output(0,0,2)", ["has 2 outputs"]),
    ("heads/0/forward_args/0/0", "heads.output(0,0,0)", ["heads[0].forward_args[0][0]", "later"]),
    ("heads/0/forward_args/0/0", "trunks.output(0,0,0)", ["forward_args[0][0]", "trunks.output"]),
    ("losses/0/loss/name", "KoLeoLoss", ["losses[0].loss.name", "KoLeoLoss"]),
    ("losses/0/loss/teacher_temp_scheduler", "cosine", ["teacher_temp_scheduler", "cosine"]),
    ("losses/0/loss/student_temp", 0, ["losses[0].loss.student_temp"]),
    ("losses/0/loss/input_size", 5, ["losses[0]", "5", "output_size 12"]),
    ("losses/0/forward_args/0/1", None, ["losses[0]", "null"]),
    ("image_model_trunks/0/image_model/num_heads", 3, ["image_model_trunks[0].image_model", "3"]),
    ("image_model_trunks/0/image_model/hiden_size", 3, ["hiden_size", "hidden_size"]),
    ("image_model_trunks/0/image_model/prepend_cls_token", False, ["prepend_cls_token"]),
    ("image_model_trunks/1/image_model/use_masked_patches", False, ["use_masked_patches"]),
    ("image_model_trunks/1/forward_args/0/1", "ssl_transform.output('labels')", ["null"]),
    (
        "image_model_trunks/0/image_model/interpolate_position_embedding/local_patch_dims",
        [5, 2],
        ["local_patch_dims", "[5, 2]", "[4, 4]"],
    ),
    (
        "image_model_trunks/1/image_model/interpolate_position_embedding/interpolate_offset",
        1.0,
        ["image_model_trunks[1].image_model", "interpolate_offset", "1.0"],
    ),
    (
        "heads/0/forward_args/0/0",
        "ssl_transform.output('global_view')",
        ["heads[0].forward_args[0][0]", "global_view"],
    ),
    (
        "losses/0/forward_args/0/1",
        "ssl_transform.output('labels')",
        ["losses[0].forward_args[0][1]", "labels"],
    ),
    (
        "losses/1/forward_args/0/2",
        "heads.output(1,0,0)",
        ["losses[1].forward_args[0][2]", "heads.output(1, 0, 0)", "batch"],
    ),
    ("heads/0/stop_grad", False, ["losses[0].forward_args[0][1]", "heads[0].stop_grad"]),
    (
        "losses/1/forward_args/0",
        ["heads.output(1,2,0)", "heads.output(0,1,0)", "ssl_transform.output('collated_masks')"],
        ["losses[1].forward_args[0][0]", "heads[1].stop_grad"],
    ),
    ("ema/0/scheduler_name", "linear", ["ema[0].scheduler_name", "linear"]),
    ("ema/0/scheduler_params/total_steps", 0, ["ema[0].scheduler_params.total_steps"]),
    ("ema/0/source", "image_model_trunks.model(2)", ["ema[0].source", "has 2 parts"]),
    ("ema/0/source", "heads.model(1)", ["ema[0]", "DinoHead"]),
    ("ema/0/source", "image_model_trunks.model(0)", ["ema[0]", "both"]),
    ("ema/1/target", "losses.model(0)", ["ema[1].target"]),
    ("copy_init_weights/0/target", 1, ["copy_init_weights[0].target"]),
    ("freeze/0", "(", ["freeze", "("]),
]


@pytest.mark.parametrize(("path", "value", "facts"), INVALID)
@pytest.mark.slow_cases(every=4)
def test_an_invalid_setting_is_named(path: str, value: Any, facts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Dino.check_arguments(**changed(path, value))
    assert [fact for fact in facts if fact not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("path", "value", "facts"),
    [
        ("freeze", ["heads.model.0.*"], ["ema[0].target", "image_model_trunks.model.0"]),
        ("freeze/0", "trunk.0", ["freeze", "trunk.0", "image_model_trunks.model.0"]),
        ("image_model_trunks/1/image_model/filter_size", 8, ["copy_init_weights[0]", "(8, 16)"]),
    ],
)
def test_settings_that_do_not_fit_the_parts_are_named(path, value, facts) -> None:
    with pytest.raises(ConfigError) as caught:
        Dino(**changed(path, value))
    assert [fact for fact in facts if fact not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"global_view": None}, ["global_view", "DinoImageDataProcessor"]),
        ({"global_view": torch.zeros(4, 2, 3, 6, 6)}, ["(8, 3, 6, 6)", "(batch, 3, 4, 4)"]),
        ({"collated_masks": torch.zeros(4, 2, 9).bool()}, ["(8, 9)", "(8, 16)"]),
        ({"collated_masks": torch.zeros(4, 2, 16)}, ["torch.bool", "torch.float32"]),
        ({"global_view": torch.zeros(4, 2, 3, 8, 8).byte()}, ["torch.uint8", "floating"]),
        ({"local_view": torch.zeros(4)}, ["(4,)", "views"]),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_a_batch_that_does_not_fit_is_refused(change, facts) -> None:
    batch = {key: one for key, one in (batch_of() | change).items() if one is not None}
    with pytest.raises(ConfigError) as caught:
        make()(batch)
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_masks_of_a_loss_are_bool() -> None:
    scores = numbers(2, 2, 5, SIZE)
    with pytest.raises(ConfigError, match=r"iBOTPatchLoss.*torch\.bool.*torch\.int32"):
        loss_of(PatchLoss)(scores, scores, torch.ones(2, 2, 4, dtype=torch.int32))


def test_smaller_images_without_positions_name_the_setting() -> None:
    model = make(trunk={"interpolate_position_embedding": None})
    with pytest.raises(ConfigError, match=r"4 x 4.*interpolate_position_embedding.*\[2, 2\]"):
        model(batch_of())


def test_all_settings_of_published_trunks_are_known() -> None:
    made = make(
        trunk={
            "projection_initializer": {"name": "kaiming_uniform", "a": 2.2360679775},
            "cls_token_initializer": {"name": "normal", "std": 1e-6},
            "default_initializer": {"name": "truncated_normal", "std": 0.02, "a": -2.0, "b": 2.0},
            "nonlinearity": "swiglu",
            "use_conv_patchified_embedding": False,
            "stochastic_depth_drop_prob": 0.3,
            "stochastic_depth_mode": "row",
            "stochastic_depth_drop_prob_schedule": "constant",
            "attention_softmax_fp32": True,
        }
    )
    layer = made.image_model_trunks[1].encoder.layers[0]
    assert (layer.drop_path.rate, layer.drop_path.by_row) == (0.3, True)
    assert made.image_model_trunks[0].encoder.embedding.cls_token.weight.abs().max() < 1e-5
    assert TRUNK["use_masked_patches"]
