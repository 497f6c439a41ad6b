"""The order of samples."""

from modelzoo_trainer.loading.seeded_sampler import SeededSampler


def test_every_index_comes_once_a_pass() -> None:
    assert sorted(SeededSampler(10_000, seed=3)) == list(range(10_000))


def test_the_order_is_a_function_of_seed_and_pass() -> None:
    sampler, same = SeededSampler(50, seed=3), SeededSampler(50, seed=3)
    first, second = list(sampler), list(sampler)
    same.set_epoch(1)

    assert list(same) == second
    assert first != second
    assert list(SeededSampler(50, seed=4)) != first


def test_neighbouring_seeds_and_passes_have_nothing_in_common() -> None:
    one, other = SeededSampler(50, seed=0), SeededSampler(50, seed=1)
    one.set_epoch(1)

    assert list(one) != list(other)


def test_without_reshuffling_all_passes_are_alike() -> None:
    sampler = SeededSampler(50, seed=3, reshuffle=False)
    first = list(sampler)
    sampler.set_epoch(9)

    assert list(sampler) == first
    assert first != list(range(50))
