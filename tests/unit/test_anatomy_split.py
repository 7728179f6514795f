"""How features belong to heads and are shared out: plain, fused, interleaved and shared projections."""

import pytest

from phalanx.anatomy.split import Split, allot, num_features


def owners(split, atoms):
    """For each feature the range of atoms that have it, computed the slow way."""
    found = {}
    for atom in range(atoms):
        for start, stop in split.ranges(atom, atom + 1):
            for feature in range(start, stop):
                low, _ = found.get(feature, (atom, atom))
                found[feature] = (low, atom + 1)
    return [found[feature] for feature in range(len(found))]


CASES = {
    "plain": [(head, head + 1) for head in range(6) for _ in range(4)],
    "keys of two heads each": [(2 * head, 2 * head + 2) for head in range(3) for _ in range(4)],
    "one key for all": [(0, 6)] * 4,
    "query, key and value after each other": [(head, head + 1) for _ in range(3) for head in range(6) for _ in range(4)],
    "query, key and value by head": [(head, head + 1) for head in range(6) for _ in range(12)],
    "two queries and their key by group": [
        owner
        for group in range(3)
        for owner in [(2 * group, 2 * group + 1)] * 4 + [(2 * group + 1, 2 * group + 2)] * 4 + [(2 * group, 2 * group + 2)] * 8
    ],
    "gate and up in turn": [(feature, feature + 1) for feature in range(6) for _ in range(2)],
    "in reverse": [(feature, feature + 1) for feature in reversed(range(6))],
}


@pytest.mark.parametrize("case", CASES)
def test_a_split_gives_back_the_owners_it_was_made_from(case):
    split = Split.from_owners(CASES[case])
    assert split.size == len(CASES[case])
    assert owners(split, 6) == CASES[case]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 6])
def test_every_feature_is_with_the_parts_that_own_it(case, parts):
    split = Split.from_owners(CASES[case])
    for index in range(parts):
        low, high = allot(6, 1, parts, index)
        expected = [feature for feature, (first, last) in enumerate(CASES[case]) if first < high and last > low]
        ranges = split.ranges(low, high)
        assert [feature for start, stop in ranges for feature in range(start, stop)] == expected
        assert num_features(ranges) == len(expected)


def test_what_is_shared_is_told():
    keys = Split.from_owners(CASES["keys of two heads each"])
    assert [keys.is_shared(0, high) for high in (2, 1, 3)] == [False, True, None]
    fused = Split.from_owners(CASES["two queries and their key by group"])
    assert [fused.is_shared(0, high) for high in (2, 1)] == [False, None]


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 3), (12, 3), (4, 1), (8, 8), (7, 7), (12, 4)])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_heads_are_allotted_in_whole_groups_or_inside_of_one(heads, kv_heads, parts):
    group = heads // kv_heads
    parts_of = [allot(heads, group, parts, index) for index in range(parts)]
    assert [head for low, high in parts_of for head in range(low, high)] == list(range(heads))
    for low, high in parts_of:
        assert high > low
        assert (low % group == 0 and high % group == 0) or low // group == (high - 1) // group


def test_blocks_of_a_wider_model():
    heads = Split.even(6, 4)
    assert heads.scaled(3, atoms=False) == Split.even(6, 12)
    assert Split.even(6).scaled(3, atoms=True) == Split.even(18)
