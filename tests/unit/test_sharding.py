"""Which tokens belong to which rank. Properties are checked on drawn sizes; examples are what a table says better."""

import random

import pytest
import torch

from cp_runtime.engine.ranks.sharding import JointLayout, Split, clip_range, in_rounds, split_ranges, split_sizes

CPU = torch.device("cpu")
DRAW = random.Random(0)
DRAWN = 500


def drawn_shares(ranks):
    return DRAW.choice(((), (DRAW.randint(1, 9),) * ranks, tuple(DRAW.randint(1, 9) for _ in range(ranks))))


def drawn_layout():
    """Few streams, of many kinds and often shorter than there are ranks."""
    world, splits, lengths = DRAW.randint(1, 6), [], []
    for _ in range(DRAW.randint(1, 3)):
        unit = DRAW.choice((1, 1, 3))
        splits.append(Split(DRAW.choice((1, 1, 2, 3)), DRAW.random() < 0.3, unit, DRAW.choice((1, 1, 2))))
        lengths.append(splits[-1].frames * unit * DRAW.choice((0, 1, 2, 3, 5, 13)))
    return JointLayout(tuple(lengths), world, tuple(splits), drawn_shares(world))


def test_drawn_sizes_are_the_fairest():
    for _ in range(DRAWN):
        parts, length = DRAW.randint(1, 7), DRAW.choice((0, 1, 2, 5, 17, 64, 1000, 75600))
        shares = drawn_shares(parts)
        sizes, weights = split_sizes(length, parts, shares), shares or (1,) * parts
        assert sum(sizes) == length
        load = max(size / weight for size, weight in zip(sizes, weights, strict=True))
        for most in range(parts):  # nobody else would be less loaded with an item of the one who is most loaded
            if sizes[most] and sizes[most] / weights[most] == load:
                assert all((sizes[part] + 1) / weights[part] >= load for part in range(parts) if part != most)
        if len({*weights}) == 1:
            expected = [tuple(part.tolist()) for part in torch.tensor_split(torch.arange(length), parts)]
            assert [tuple(range(*part)) for part in split_ranges(length, parts, shares)] == expected


def test_examples_of_shares():
    assert split_sizes(24, 2, (2, 1)) == (16, 8)
    assert split_sizes(2, 2, (3, 1)) == (2, 0)  # 1 : 1 would take the slow one three times as long
    assert split_ranges(13, 3, (4, 2, 1)) == ((0, 8), (8, 12), (12, 13))
    # A rank that had all of them could not tell a mask for its keys from one for all keys, as its peers do.
    assert JointLayout((3, 8), 2, (), (3, 1)).owned == ((((0, 2),), ((3, 9),)), (((2, 3),), ((9, 11),)))


def test_drawn_layouts_have_every_token_once():
    in_order = 0
    for _ in range(DRAWN):
        layout = drawn_layout()
        joint = torch.arange(layout.total)
        locals_ = [layout.take_local(joint, rank, 0) for rank in range(layout.world_size)]
        assert [len(part) for part in locals_] == list(layout.local_lengths)
        positions = [layout.owned_positions(rank, CPU) for rank in range(layout.world_size)]
        owned = [part if at is None else part[at] for part, at in zip(locals_, positions, strict=True)]
        assert [len(part) for part in owned] == list(layout.owned_lengths)
        order = layout.gathered_order(CPU)
        assert torch.equal(torch.cat(owned), order)
        assert sorted(order.tolist()) == joint.tolist()
        assert layout.in_order == torch.equal(order, joint)
        assert torch.equal(layout.to_joint(order, 0), joint)
        mask, span = torch.randn(2, layout.total, 4), slice(layout.total // 3, layout.total // 2)
        ordered = layout.to_gathered(mask, -2, span)
        assert torch.equal(ordered, mask[:, order[span]])
        if layout.in_order:
            assert ordered.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()
        in_order += layout.in_order
    assert 0 < in_order < DRAWN


def test_positions_are_made_on_their_device_once():
    """Else they are copied in every attention, and the host waits for all that the device was given before."""
    layout = JointLayout((1, 5), 3, (Split(replicated=True), Split()))
    meta = torch.device("meta")
    for make in (lambda: layout.gathered_order(meta), lambda: layout.owned_positions(1, meta)):
        assert make().device == meta
        assert make() is make()
    assert layout.gathered_order(CPU).device == CPU


def test_a_rank_without_tokens_holds_a_stand_in():
    layout = JointLayout((1, 5), 3)
    assert (layout.local_lengths, layout.owned_lengths) == ((3, 3, 2), (3, 2, 1))
    taken = layout.take_local(tokens := torch.arange(6), 2, 0)
    assert taken.tolist() == [0, 5]
    taken.add_(1)
    assert tokens.tolist() == [*range(6)]  # it is a copy
    assert layout.owned_positions(2, CPU).tolist() == [1]
    assert layout.owned_positions(0, CPU) is None


@pytest.mark.parametrize(
    ("start", "stop", "expected"), [(0, 10, (0, 4)), (0, 2, (0, 0)), (4, 5, (1, 2)), (9, 12, (4, 4)), (5, 99, (2, 4))]
)
def test_clip_range(start, stop, expected):
    assert clip_range(start, stop, (3, 7)) == expected


def test_pieces_of_a_round_are_of_like_sizes():
    """As those that ComfyUI cuts a picture into: whole ones, and what is left at the right and at the bottom."""
    sizes = [64, 64, 16, 64, 64, 16, 16, 16, 4]
    for ranks in (1, 2, 3, 4, 12):
        rounds = in_rounds(sizes, ranks)
        assert sorted(index for now in rounds for each in now for index in each) == [*range(9)]
        assert [[len(each) for each in now] for now in rounds[:-1]] == [[1] * ranks] * (len(rounds) - 1)
        assert [sizes[index] for now in rounds for each in now for index in each] == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("shares", "counts"), [((1, 1), (1, 1)), ((2, 1), (2, 1)), ((17, 13), (3, 2)), ((1, 9), (1, 9)), ((3, 1, 2), (3, 1, 2))]
)
def test_faster_ranks_get_more_pieces_of_every_round(shares, counts):
    rounds = in_rounds([64] * 61, len(shares), shares)
    assert {tuple(map(len, now)) for now in rounds[:-1]} == {counts}
    assert sorted(index for now in rounds for each in now for index in each) == [*range(61)]
    assert {len(now) for now in rounds} == {len(shares)}
    totals = [sum(len(now[rank]) for now in rounds) for rank in range(len(shares))]
    assert totals == pytest.approx([61 * share / sum(shares) for share in shares], abs=2.5)


def test_too_few_pieces_for_a_fair_round_are_one():
    assert in_rounds([4, 9, 4], 2, (1, 9)) == [[[], [1, 0, 2]]]
    assert in_rounds([4], 3) == [[[0], [], []]]
