import pytest
import torch

from cp_runtime.engine.ranks.sharding import JointLayout, Split, clip_range, in_rounds, split_ranges, split_sizes


@pytest.mark.parametrize("length", [0, 1, 2, 5, 17, 64])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_split_range_is_tensor_split(length, parts):
    expected = [tuple(t.tolist()) for t in torch.tensor_split(torch.arange(length), parts)]
    for shares in ((), (1,) * parts, (3,) * parts):
        assert [tuple(range(*part)) for part in split_ranges(length, parts, shares)] == expected
        assert split_sizes(length, parts, shares) == tuple(map(len, expected))


@pytest.mark.parametrize("shares", [(2, 1), (3, 1), (5, 3), (1, 2), (4, 2, 1), (1, 9), (7, 7, 1)])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 13, 24, 1000, 75600])
def test_shares_make_the_most_loaded_part_as_little_loaded_as_can_be(length, shares):
    sizes = split_sizes(length, len(shares), shares)
    assert sum(sizes) == length
    load = max(size / share for size, share in zip(sizes, shares, strict=True))
    assert load >= length / sum(shares)
    # Whoever is most loaded: no other part would be less loaded with one of his.
    for most in range(len(shares)):
        if length and sizes[most] / shares[most] == load:
            assert all((sizes[part] + 1) / shares[part] >= load for part in range(len(shares)) if part != most)
    if length == 1000:
        assert all(abs(size - length * share / sum(shares)) <= 1 for size, share in zip(sizes, shares, strict=True))


def test_shares_of_whole_heads():
    assert split_sizes(24, 2, (2, 1)) == (16, 8)
    assert split_sizes(2, 2, (3, 1)) == (2, 0)  # 1 : 1 would take the slow one three times as long
    assert split_ranges(13, 3, (4, 2, 1)) == ((0, 8), (8, 12), (12, 13))


CPU = torch.device("cpu")
SPLITS = [(), (Split(replicated=True), Split()), (Split(frames=2), Split()), (Split(), Split(frames=2, replicated=True))]


@pytest.mark.parametrize(
    ("lengths", "splits"),
    [((7,), ()), ((3, 0, 8), ()), *(((4, 6), splits) for splits in SPLITS), *(((1, 4), splits) for splits in SPLITS[:2])],
)
@pytest.mark.parametrize("shares", [(1,), (1, 1), (3, 1), (4, 2, 1), (1, 9, 1), (1, 1, 1, 1), (3, 1, 2, 2)], ids=str)
def test_gathered_order_is_the_concatenation_of_the_locals(lengths, splits, shares):
    world = len(shares)
    layout = JointLayout(lengths, world, splits, shares)
    joint = torch.arange(sum(lengths))
    locals_ = [layout.take_local(joint, rank, 0) for rank in range(world)]
    assert [len(t) for t in locals_] == list(layout.local_lengths)
    owned = [t if (i := layout.owned_positions(rank, CPU)) is None else t[i] for rank, t in enumerate(locals_)]
    assert [len(t) for t in owned] == list(layout.owned_lengths)
    order = layout.gathered_order(CPU)
    assert torch.equal(torch.cat(owned), order)
    assert sorted(order.tolist()) == joint.tolist()
    assert layout.in_order == torch.equal(order, joint)
    assert torch.equal(layout.to_joint(order, 0), joint)


def test_positions_are_made_on_their_device_once():
    """Else they are copied in every attention, and the host waits for all that the device was given before."""
    layout = JointLayout((1, 5), 3, (Split(replicated=True), Split()))
    meta = torch.device("meta")
    for make in (lambda: layout.gathered_order(meta), lambda: layout.owned_positions(1, meta)):
        assert make().device == meta
        assert make() is make()
    assert layout.gathered_order(CPU).device == CPU


@pytest.mark.parametrize("lengths", [(7,), (3, 5)])
def test_masks_are_ordered_and_copied_only_where_they_must_be(lengths):
    layout, mask = JointLayout(lengths, 2), torch.randn(2, 7 if len(lengths) == 1 else 8, 4)
    ordered = layout.to_gathered(mask, -2, slice(2, 5))
    assert torch.equal(ordered, mask[:, layout.gathered_order(CPU)[2:5]])
    assert (ordered.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()) == (len(lengths) == 1)


def test_a_rank_without_tokens_holds_a_stand_in():
    layout = JointLayout((1, 5), 3)
    assert layout.local_lengths == (3, 3, 2)
    assert layout.owned_lengths == (3, 2, 1)
    assert layout.take_local(torch.arange(6), 2, 0).tolist() == [0, 5]
    assert layout.owned_positions(2, CPU).tolist() == [1]
    assert layout.owned_positions(0, CPU) is None


def test_few_tokens_are_split_evenly():
    """A rank that had all of them could not tell a mask for its keys from one for all keys, as its peers do."""
    layout = JointLayout((3, 8), 2, (), (3, 1))
    assert layout.owned == (((((0, 2),)), ((3, 9),)), (((2, 3),), ((9, 11),)))


def test_take_local_copies():
    tensor = torch.zeros(1, 4, 2)
    JointLayout((4,), 2).take_local(tensor, 0, 1).add_(1)
    assert tensor.sum() == 0


@pytest.mark.parametrize(
    ("start", "stop", "expected"), [(0, 10, (0, 4)), (0, 2, (0, 0)), (4, 5, (1, 2)), (9, 12, (4, 4)), (5, 99, (2, 4))]
)
def test_clip_range(start, stop, expected):
    assert clip_range(start, stop, (3, 7)) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
def test_pieces_of_a_round_are_of_like_sizes(ranks):
    """As those that ComfyUI cuts a picture into: whole ones, and what is left at the right and at the bottom."""
    sizes = [64, 64, 16, 64, 64, 16, 16, 16, 4]
    rounds = in_rounds(sizes, ranks)
    assert sorted(index for now in rounds for index in now) == [*range(9)]
    assert [len(now) for now in rounds[:-1]] == [ranks] * (len(rounds) - 1)
    in_order = [sizes[index] for now in rounds for index in now]
    assert in_order == [64] * 4 + [16] * 4 + [4]
