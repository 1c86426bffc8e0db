import pytest
import torch

from cp_runtime.engine.attention.layout import in_gathered_order
from cp_runtime.engine.sharding import JointLayout, Split, clip_range, split_range, split_sizes


@pytest.mark.parametrize("length", [0, 1, 2, 5, 17, 64])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_split_range_is_tensor_split(length, parts):
    expected = [tuple(t.tolist()) for t in torch.tensor_split(torch.arange(length), parts)]
    got = [tuple(range(*split_range(length, parts, i))) for i in range(parts)]
    assert got == expected
    assert split_sizes(length, parts) == tuple(map(len, expected))


CPU = torch.device("cpu")
SPLITS = [(), (Split(replicated=True), Split()), (Split(frames=2), Split()), (Split(), Split(frames=2, replicated=True))]


@pytest.mark.parametrize(
    ("lengths", "splits"),
    [((7,), ()), ((3, 0, 8), ()), *(((4, 6), splits) for splits in SPLITS), *(((1, 4), splits) for splits in SPLITS[:2])],
)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gathered_order_is_the_concatenation_of_the_locals(lengths, splits, world):
    layout = JointLayout(lengths, world, splits)
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
    ordered = in_gathered_order(mask, layout, -2, slice(2, 5))
    assert torch.equal(ordered, mask[:, layout.gathered_order(CPU)[2:5]])
    assert (ordered.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()) == (len(lengths) == 1)


def test_a_rank_without_tokens_holds_a_stand_in():
    layout = JointLayout((1, 5), 3)
    assert layout.local_lengths == (3, 3, 2)
    assert layout.owned_lengths == (3, 2, 1)
    assert layout.take_local(torch.arange(6), 2, 0).tolist() == [0, 5]
    assert layout.owned_positions(2, CPU).tolist() == [1]
    assert layout.owned_positions(0, CPU) is None


def test_take_local_copies():
    tensor = torch.zeros(1, 4, 2)
    JointLayout((4,), 2).take_local(tensor, 0, 1).add_(1)
    assert tensor.sum() == 0


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 10, (0, 4)), (0, 2, (0, 0)), (4, 5, (1, 2)), (9, 12, (4, 4)), (5, 99, (2, 4))],
)
def test_clip_range(start, stop, expected):
    assert clip_range(start, stop, (3, 7)) == expected
