"""What one process notes on the board, another reads."""

import os

import torch

from cp_runtime.pool.board import Board, Progress
from cp_runtime.pool.channel import SharedBlock


def test_words_of_every_rank_are_seen_through_another_mapping():
    block = SharedBlock()
    rank, controller = Board(block, 3), Board(SharedBlock(os.dup(block.fd)), 3)
    rank.begin(1)
    assert [rank.enter_module(1) for _ in range(3)] == [1, 2, 3]
    assert controller.read(1) == Progress(modules=3)
    rank.beat(1, 12)
    rank.compiling(1, 2)
    assert controller.read(1).compiling == 2
    rank.compiling(1, 0)
    rank.decision.fill_(-5)
    noted = controller.read(1)
    assert (noted.collectives, int(controller.decision)) == (12, -5)
    assert noted.beat > 0
    assert controller.read(0) == controller.read(2) == Progress()
    with torch.inference_mode():
        controller = Board(SharedBlock(os.dup(block.fd)), 3)
    controller.undecided()  # a restart comes from another thread than the first call
    assert int(rank.decision) == 0
    rank.load(1, 0)
    assert controller.read(1).loaded == 0
    rank.load(1, 340)
    assert controller.read(1).loaded == 340
    rank.load(1, None)
    assert controller.read(1).loaded is None
    rank.load(1, 20)
    rank.begin(1)
    assert controller.read(1) == Progress(beat=noted.beat)


def test_a_frozen_board_keeps_what_was_noted_last():
    block = SharedBlock()
    rank, controller = Board(block, 2), Board(SharedBlock(os.dup(block.fd)), 2)
    rank.enter_module(0)
    controller.freeze()
    rank.enter_module(0)
    assert controller.read(0).modules == 1
