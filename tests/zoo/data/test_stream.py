"""The order of samples in a stream of data epochs."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from torch.utils.data import DataLoader

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.sample_order import draws, is_sliced
from modelzoo_trainer.loading.sharding import Split, shard_draws
from modelzoo_trainer.loading.stream import PADDING, Member, StreamSampler, stream_sampler


def sampler_of(*members: Member, size: int = 4, **options) -> StreamSampler:
    options = {"shuffle": True, "seed": 5, "carries": True} | options
    return StreamSampler(members or (Member(0, 10, 10),), batch_size=size, **options)


def epochs(sampler: StreamSampler, num: int) -> list[list[int]]:
    return [sampler.order(epoch)[:].tolist() for epoch in range(num)]


def loader_of(sampler: StreamSampler) -> DataLoader[int]:
    return DataLoader(range(100), sampler.batch_size, sampler=sampler, drop_last=sampler.carries)


OPTIONS = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "not carried": {"carries": False},
    "padded": {"carries": False, "pads": True},
    "mixture": {"members": [Member(0, 7, 5), Member(7, 40, 3), Member(47, 2, 3)]},
    "smaller than a batch": {"size": 23},
}


@pytest.fixture(params=OPTIONS, name="sampler")
def _sampler(request) -> StreamSampler:
    options = dict(OPTIONS[request.param])
    return sampler_of(*options.pop("members", ()), **options)


def test_the_order_depends_on_seed_epoch_and_position_alone(sampler) -> None:
    expected = epochs(sampler, 6)
    options = {name: getattr(sampler, name) for name in ("shuffle", "seed", "carries", "pads")}
    for epoch in (5, 0, 3):
        other = sampler_of(*sampler.members, size=sampler.batch_size, **options)
        for start in (len(other) - 1, 0, 2):
            assert (
                other.order(epoch)[start : start + 3].tolist()
                == (expected[epoch][start : start + 3])
            )
    assert list(sampler) + list(sampler) == expected[0] + expected[1]
    sampler.set_epoch(4)
    assert list(sampler) == expected[4]
    if sampler.shuffle:
        other = sampler_of(*sampler.members, size=sampler.batch_size, **(options | {"seed": 6}))
        assert epochs(other, 6) != expected


def test_a_loader_starts_anywhere_and_divides_its_batches(sampler) -> None:
    loader = loader_of(sampler)
    assert is_sliced(loader)
    assert len(loader) == sampler.num_batches
    whole = [draw.items for draw in draws(loader, seed=1, epoch=3, start=0)]
    assert list(chain.from_iterable(whole)) == epochs(sampler, 4)[3]
    later = [draw.items for draw in draws(loader, seed=9, epoch=3, start=1)]
    assert later == whole[1:]
    parts = [
        [draw.items for draw in shard_draws(loader, split, (0, 0), seed=2, epoch=3)]
        for split in (Split(0, 2, is_global=True), Split(1, 2, is_global=True))
    ]
    assert [one + other for one, other in zip(*parts, strict=True)] == whole


def test_a_late_start_computes_as_little_as_an_early_one(sampler) -> None:
    computed = []
    drawn = sampler._drawn
    sampler._drawn = lambda epoch: computed.append(epoch) or drawn(epoch)
    sampler.order(10**6)[:1]
    assert len(computed) == 1
    for epoch in range(20):
        sampler.order(epoch)[:]
    assert len(sampler._kept) <= 2


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4, 9, 10, 23])
def test_a_carried_rest_loses_no_sample(size, shuffle) -> None:
    sampler = sampler_of(size=size, shuffle=shuffle)
    num = 60 * size // sampler.num_batches // size + 1
    stream = list(chain.from_iterable(epochs(sampler, num)))
    assert {len(one) for one in epochs(sampler, num)} == {max(1, 10 // size) * size}
    for start in range(0, len(stream) - 9, 10):
        assert sorted(stream[start : start + 10]) == list(range(10))
    if shuffle:
        assert stream[:10] != stream[10:20] != list(range(10))


def test_fewer_samples_than_rows_are_another_subset_each_epoch() -> None:
    sampler = sampler_of(Member(0, 50, 8), carries=False)
    found = epochs(sampler, 30)
    assert all(len(set(one)) == 8 for one in found)
    assert set(chain.from_iterable(found)) > set(range(40))
    assert epochs(sampler_of(Member(0, 50, 8), carries=False, shuffle=False), 2) == (
        [list(range(8))] * 2
    )


def test_more_samples_than_rows_are_whole_copies_and_a_part() -> None:
    for one in epochs(sampler_of(Member(3, 10, 27), carries=False), 5):
        counts = Counter(one)
        assert sorted(counts) == list(range(3, 13))
        assert sorted(counts.values()) == [2] * 3 + [3] * 7
        assert sorted(one[:10]) != list(range(3, 13))  # permuted as a whole
    assert epochs(sampler_of(Member(3, 2, 5), carries=False, shuffle=False), 2) == (
        [[3, 4, 3, 4, 3]] * 2
    )


def test_each_member_has_its_share_of_each_data_epoch() -> None:
    members = Member(0, 7, 5), Member(7, 40, 3), Member(47, 2, 4)
    sampler = sampler_of(*members, carries=False)
    found = epochs(sampler, 14)
    for rows in found:
        assert Counter(int(np.digitize(row, (7, 47))) for row in rows) == {0: 5, 1: 3, 2: 4}
    seen = Counter(chain.from_iterable(found))
    assert all(seen[row] == 10 for row in range(7))  # 14 * 5 samples of 7 rows
    assert [seen[row] for row in (47, 48)] == [28, 28]
    assert sorted(seen[row] for row in range(7, 47)) == [1] * 38 + [2] * 2
    places = [[row >= 47 for row in rows] for rows in found]
    assert places[0] != places[1]


def test_members_in_order_keep_their_places_and_go_on_where_they_stopped() -> None:
    members = Member(0, 7, 5), Member(7, 40, 3)
    found = epochs(sampler_of(*members, carries=False, shuffle=False, seed=6), 3)
    assert [row for rows in found for row in rows if row < 7] == [k % 7 for k in range(15)]
    assert [row for rows in found for row in rows if row >= 7] == list(range(7, 16))
    places = [[row < 7 for row in rows] for rows in found]
    assert places[0] == places[1] == places[2] != sorted(places[0], reverse=True)


def test_the_last_batch_is_smaller_or_padded() -> None:
    assert [len(one) for one in loader_of(sampler_of(carries=False))] == [4, 4, 2]
    padded = sampler_of(carries=False, pads=True)
    assert [one[10:] for one in epochs(padded, 2)] == [[PADDING] * 2] * 2
    assert [sorted(one[:10]) for one in epochs(padded, 2)] == [list(range(10))] * 2
    assert len(sampler_of(pads=True)) == 8  # carried: nothing to fill


def test_the_checksum_is_of_the_stream() -> None:
    assert sampler_of().checksum == sampler_of(size=5).checksum
    others = [sampler_of(seed=6), sampler_of(shuffle=False), sampler_of(Member(0, 10, 9))]
    assert len({one.checksum for one in [sampler_of(), *others]}) == 4


def test_only_a_loader_of_a_stream_has_one() -> None:
    sampler = sampler_of()
    assert stream_sampler(loader_of(sampler)) is sampler
    assert stream_sampler(DataLoader(range(9))) is stream_sampler([1]) is None


@pytest.mark.parametrize("members", [[], [Member(0, 0, 3)], [Member(0, 3, 3), Member(3, 5, 0)]])
def test_an_empty_member_is_refused(members) -> None:
    with pytest.raises(ConfigError, match="at least one member"):
        StreamSampler(members, batch_size=2, shuffle=False, seed=0, carries=True)
