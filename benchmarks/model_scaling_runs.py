"""What `model_scaling.py` measures: one forward and backward pass, in a process of its own.

python -m benchmarks.model_scaling_runs '{"part": "attention", "kind": "window", "length": 4096}'

prints its peak memory in bytes, its CPU time in seconds and its loss as JSON. One thread.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from modelzoo_trainer.zoo.models.experts import Experts
from modelzoo_trainer.zoo.models.registry import model_class

WINDOW, SPAN, HEADS, LAYERS = 256, 256, 8, 2
ATTENTIONS: Final[dict[str, dict[str, Any]]] = {
    "full causal": {},
    f"window {WINDOW}": {"attention_sliding_window_length": WINDOW},
    f"packed, spans of {SPAN}": {},
    "softcap 50": {"attention_logit_softcapping": 50.0},
    "ALiBi": {"position_embedding_type": "alibi", "rotary_dim": None},
    "dropout 0.1": {"attention_dropout_rate": 0.1},
}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "head_dim": 32, "query_pre_attn_scalar": 32},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
PLAIN_HEAD: Final = "the plain head"
GROUPED: Final = "grouped_mm by hand"
Run = Callable[[], Tensor]
"""Does the pass and returns the loss."""


def status(key: str) -> int:
    """Return an entry of the process's status, in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measured(run: Run, num_kept: int = 0) -> dict[str, float]:
    """Return the figures of a run; `num_kept`: bytes of its results, which do not count."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before, start = status("VmRSS"), time.process_time()
    loss = run()
    seconds, peak = time.process_time() - start, status("VmHWM") - before
    return {"bytes": peak - num_kept, "seconds": seconds, "loss": float(loss)}


def batch_of(length: int, vocab: int, *, is_packed: bool = False) -> dict[str, Tensor]:
    """Return a row of random tokens; the last one has no label."""
    ids = torch.randint(0, vocab, (1, length))
    mask = torch.ones(1, length, dtype=torch.int32)
    mask[:, -1] = 0
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "attention_mask": mask}
    if is_packed:
        places = torch.arange(length).unsqueeze(0)
        batch["attention_span"] = (SPAN - 1 - places % SPAN).int()
        batch["position_ids"] = (places % SPAN).int()
    return batch


def decoder_run(model: Any, batch: dict[str, Tensor]) -> Run:
    """Return a pass of one of our decoders."""

    def run() -> Tensor:
        loss: Tensor = model(batch)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return run


def attention(kind: str, length: int, vocab: int) -> dict[str, float]:
    """Measure a llama of two layers."""
    model = model_class("llama")(
        vocab_size=vocab,
        hidden_size=256,
        num_hidden_layers=LAYERS,
        num_heads=HEADS,
        filter_size=512,
        max_position_embeddings=length,
        dropout_rate=0.0,
        embedding_dropout_rate=0.0,
        **{"attention_dropout_rate": 0.0, **ATTENTIONS[kind]},
    )
    is_packed = kind.startswith("packed")
    decoder_run(model, batch_of(SPAN, vocab, is_packed=is_packed))()
    model.zero_grad()
    return measured(decoder_run(model, batch_of(length, vocab, is_packed=is_packed)))


def head(kind: str, length: int, vocab: int, hidden: int) -> dict[str, float]:
    """Measure the loss of hidden states; gradients do not count."""
    head_run(kind, 16, 16, 16)()  # what the first call imports
    num_kept = 4 * hidden * (length + vocab)
    return measured(head_run(kind, length, vocab, hidden), num_kept)


def head_run(kind: str, length: int, vocab: int, hidden: int) -> Run:
    """Return a pass of the output layer."""
    torch.manual_seed(0)
    states = torch.randn(length, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden).mul_(0.02).requires_grad_()
    labels = torch.randint(vocab, (length,))

    def plain() -> Tensor:
        return functional.cross_entropy(functional.linear(states, weight).float(), labels)

    def ours() -> Tensor:
        from modelzoo_trainer.zoo.models.head_chunks import HeadInputs, HeadSettings
        from modelzoo_trainer.zoo.models.head_loss import sum_of_losses

        inputs = HeadInputs(states, weight, None, labels, torch.ones(length))
        return sum_of_losses(inputs, HeadSettings()).total / length

    def run() -> Tensor:
        loss = (plain if kind == PLAIN_HEAD else ours)()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return run


def experts(kind: str, length: int, num: int, top_k: int, filter_size: int) -> dict[str, float]:
    """Measure a layer of experts, or the same products written out."""
    hidden = 512
    layer = Experts(num, num - top_k, hidden, filter_size, "swiglu", False, 0.0)
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=0.02)
    chosen = torch.rand(length, num).topk(top_k, dim=-1)
    weights, ids = chosen.values.softmax(dim=-1), chosen.indices
    states = torch.randn(1, length, hidden, requires_grad=True)

    def grouped() -> Tensor:
        order = ids.flatten().argsort(stable=True)
        ends = torch.bincount(ids.flatten(), minlength=num).cumsum(0).int()
        rows = states[0][order // top_k]

        def product(inputs: Tensor, matrices: Any) -> Tensor:
            found: Tensor = functional.grouped_mm(inputs, matrices.transpose(1, 2), offs=ends)
            return found

        wide = product(rows, layer.up) * functional.silu(product(rows, layer.gate))
        outputs = product(wide, layer.down) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(states[0]).index_add(0, order // top_k, outputs)

    def run() -> Tensor:
        found = grouped() if kind == GROUPED else layer(states, weights[None], ids[None])
        loss = found.square().mean()
        loss.backward()
        return loss.detach()

    for _ in range(3):  # the first passes take longer
        run()
        layer.zero_grad()
    return measured(run)


def family(kind: str, name: str, length: int, vocab: int) -> dict[str, float]:
    """Measure a decoder of transformers, or ours with its weights."""
    import transformers

    config = transformers.AutoConfig.for_model(
        name,
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=length,
        **FAMILIES[name],
    )
    theirs: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    theirs.train()
    rows = {size: batch_of(size, vocab) for size in (SPAN, length)}
    if kind == "transformers":

        def run(size: int = length) -> Tensor:
            ids = rows[size]["input_ids"]
            loss: Tensor = theirs(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        run(SPAN)
        theirs.zero_grad()
        return measured(run)
    ours = converted(name, theirs)
    decoder_run(ours, rows[SPAN])()
    ours.zero_grad()
    return measured(decoder_run(ours, rows[length]))


def converted(name: str, theirs: Any) -> Any:
    """Return our decoder with the weights of a model of transformers."""
    from safetensors.torch import load_file

    from modelzoo_trainer.zoo.conversion.engine import InMemory, plan_ours, shapes_of
    from modelzoo_trainer.zoo.conversion.family import family_named

    rules = family_named(name, where="the benchmark")
    arguments = rules.read_config(theirs.config.to_dict(), "config.json")
    settings = rules.model_class.settings_of(**arguments)
    with TemporaryDirectory() as folder:  # names in files are not always the model's own
        theirs.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    plan = plan_ours(
        rules.rules(settings),
        InMemory(tensors),
        shapes_of(rules.model_class, arguments),
        rules,
        where="the model",
    )
    state = dict(plan.tensors())
    ours = rules.model_class(**arguments)
    if ours.share_embedding_weights:
        state["lm_head.weight"] = state["token_embeddings.weight"]
    ours.load_state_dict(state)
    return ours


def main() -> int:
    """Measure what the argument says."""
    given = json.loads(sys.argv[1])
    limit = given.pop("limit")
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    parts = {"attention": attention, "head": head, "experts": experts, "transformers": family}
    print(json.dumps(parts[given.pop("part")](**given)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
