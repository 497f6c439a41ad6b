"""The look-ahead loader, its stream replaced by a recorder where there is no device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.accelerator import AcceleratorBackend
from backends.prefetch import Lane, LookAhead, PlainLane, StreamLane


def counting(asked: list[int], num: int = 4) -> Iterator[Tensor]:
    for index in range(num):
        asked.append(index)
        yield torch.tensor([float(index)])


def test_the_loader_is_asked_for_one_batch_more_than_was_taken() -> None:
    asked: list[int] = []
    batches = LookAhead(counting(asked), PlainLane(torch.clone))
    counts = [len(asked)]
    for _ in range(4):
        next(batches)
        counts.append(len(asked))
    assert counts == [0, 2, 3, 4, 4]


def test_without_looking_ahead_the_loader_is_asked_for_what_is_taken(open_backend: Any) -> None:
    asked: list[int] = []
    batches = open_backend("fake", look_ahead=False).batches(counting(asked))
    next(batches)
    assert asked == [0]


def test_the_loader_is_started_at_once() -> None:
    class Loader:
        started = False

        def __iter__(self) -> Iterator[Tensor]:
            self.started = True
            return iter([])

    loader = Loader()
    LookAhead(loader, PlainLane(torch.clone))
    assert loader.started


def test_a_loader_may_fill_the_same_memory_again() -> None:
    buffer = torch.zeros(1)

    def loader() -> Iterator[Tensor]:
        for index in range(3):
            yield buffer.fill_(index)

    batches = LookAhead(loader(), PlainLane(torch.clone))
    assert [batch.item() for batch in batches] == [0.0, 1.0, 2.0]


def test_a_loader_that_goes_on_after_an_error_is_followed() -> None:
    class Loader:
        def __init__(self) -> None:
            self.index = -1

        def __iter__(self) -> Loader:
            return self

        def __next__(self) -> Tensor:
            self.index += 1
            if self.index == 1:
                raise OSError("file 1")
            if self.index == 3:
                raise StopIteration
            return torch.tensor(self.index)

    batches = LookAhead(Loader(), PlainLane(torch.clone))
    assert next(batches).item() == 0
    with pytest.raises(OSError, match="file 1"):
        next(batches)
    assert [batch.item() for batch in batches] == [2]


def test_a_batch_that_cannot_be_copied_raises_when_it_is_asked_for() -> None:
    def refuse_two(batch: Tensor) -> Tensor:
        if len(batch) == 2:
            raise RuntimeError("out of memory")
        return batch

    batches = LookAhead([torch.zeros(1), torch.zeros(2)], PlainLane(refuse_two))
    assert len(next(batches)) == 1
    with pytest.raises(RuntimeError, match="out of memory"):
        next(batches)


class Recorder(Lane):
    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self, batch: Any) -> Any:
        self.log.append(f"start {batch}")
        return batch

    def finish(self, copying: Any) -> Any:
        self.log.append(f"finish {copying}")
        return copying

    def release_source(self, copying: Any) -> None:
        self.log.append(f"release {copying}")


def test_a_source_is_released_before_the_loader_is_asked_again() -> None:
    lane = Recorder()
    list(LookAhead("ab", lane))
    assert lane.log == ["start a", "finish a", "release a", "start b", "finish b", "release b"]


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def synchronize(self) -> None:
        self.log.append("host waits for copies")


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    def record_event(self) -> FakeEvent:
        self.log.append(f"event in {self.name}")
        return FakeEvent(self.log)

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits")


@pytest.fixture
def stream_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of torch's streams, on a machine that has none."""
    log: list[str] = []
    compute = FakeStream(log, "compute")

    def pin(tensor: Tensor) -> Tensor:
        log.append("pin")
        return tensor.clone()

    def record(tensor: Tensor, stream: FakeStream) -> None:
        log.append(f"used in {stream.name}")

    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(log, "copies"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda s: log.append(f"in {s.name}"))
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "record_stream", record)
    return log


def test_a_copy_runs_in_its_own_stream_and_is_waited_for_by_the_computation(
    stream_log: list[str],
) -> None:
    lane = StreamLane(torch.device("cpu"))
    copying = lane.start({"x": torch.ones(2), "name": "a"})
    assert stream_log == ["in copies", "pin", "event in copies", "in compute"]
    stream_log.clear()
    batch = lane.finish(copying)
    assert stream_log == ["compute waits", "used in compute"]
    assert batch["x"].tolist() == [1.0, 1.0]
    assert batch["name"] == "a"
    stream_log.clear()
    lane.release_source(copying)
    assert stream_log == ["host waits for copies"]


def test_a_source_is_kept_until_its_copy_is_done(stream_log: list[str]) -> None:
    lane = StreamLane(torch.device("cpu"))
    copying = lane.start([torch.ones(2), torch.ones(3)])
    assert [len(source) for source in copying.sources] == [2, 3]
    lane.release_source(copying)
    assert copying.sources == []


def test_the_stream_is_restored_when_a_copy_fails(
    stream_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensor: Tensor) -> Tensor:
        raise RuntimeError("cannot pin")

    monkeypatch.setattr(Tensor, "pin_memory", fail)
    with pytest.raises(RuntimeError, match="cannot pin"):
        StreamLane(torch.device("cpu")).start(torch.ones(2))
    assert stream_log == ["in copies", "in compute"]


def test_a_sparse_tensor_is_not_pinned(stream_log: list[str]) -> None:
    lane = StreamLane(torch.device("cpu"))
    batch = lane.finish(lane.start(torch.eye(2).to_sparse()))
    assert "pin" not in stream_log
    assert batch.is_sparse


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_arrive_whole_on_a_device_that_is_busy() -> None:
    backend = AcceleratorBackend(kind="cuda")
    backend.open()
    assert isinstance(backend.make_lane(), StreamLane)
    buffer = torch.empty(1 << 20, pin_memory=True)
    busy = torch.ones(2048, 2048, device=backend.device)
    sums = []
    for batch in backend.batches(buffer.fill_(index) for index in range(8)):
        for _ in range(10):
            busy = busy @ busy / 2048
        sums.append((batch - batch[0]).abs().sum() + batch[0])
        del batch
    backend.close()
    assert torch.stack(sums).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
