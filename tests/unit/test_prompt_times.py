"""Where the time of a prompt went: seconds by part, and the sentence about them."""

import itertools

import pytest

from cp_runtime.controller import prompt_times
from cp_runtime.controller.prompt_times import DENOISING, LOADING, OTHER, VAE, PromptTimes, SampledRun, cached_nodes, seconds_of
from cp_runtime.words import words_in


@pytest.fixture
def times(monkeypatch):
    """Of a prompt whose clock goes on by a second whenever somebody looks."""
    seconds = itertools.count()
    monkeypatch.setattr(prompt_times.time, "monotonic", lambda: float(next(seconds)))
    return PromptTimes("prompt", began=-1.0)


def test_every_second_belongs_to_one_part(times):
    times.enter(DENOISING)  # a second since the prompt began
    with times.taking(LOADING), times.taking(LOADING):  # a load that makes another one is counted once: three seconds
        pass
    times.take(VAE, 0.5)
    times.share()
    times.leave()
    times.enter(VAE)
    times.leave()
    # The clock was looked at six times within the first node.
    assert dict(times.seconds) == {OTHER: 2.0, DENOISING: 5.0 - 3.0 - 0.5, LOADING: 3.0, VAE: 0.5 + 1.0}
    assert dict(times.shared) == {DENOISING: 1.5}
    described = times.described(0)
    assert described["seconds"] == sum(part["seconds"] for part in described["parts"]) == 8.0
    assert [part["part"] for part in described["parts"]] == [LOADING, DENOISING, VAE, OTHER]


def test_a_node_that_fails_ends_with_its_prompt(times):
    times.enter(DENOISING)
    times.take(LOADING, 1.0)
    messages = [("execution_start", {"timestamp": 5_000}), ("execution_error", {"timestamp": 12_000}), ("other", {})]
    for _ in range(2):  # whoever asks
        times.end(seconds_of(messages))
    assert dict(times.seconds) == {OTHER: 1.0, LOADING: 1.0, DENOISING: 7.0 - 1.0 - 1.0}
    assert seconds_of([]) == 0.0


def sentence(runs, cached=0, nodes=1, denoising=40.0):
    times = PromptTimes("prompt", nodes=nodes, runs=runs)
    times.seconds.update({DENOISING: denoising, OTHER: 12.0} if nodes else {OTHER: 0.001})
    return words_in("en").prompt(times.described(cached)["sentence"])


ALONE, TOGETHER, UNKNOWN = (SampledRun(20, 1.0, "gpu", other) for other in ((1, 2.0), (4, 0.3), None))


@pytest.mark.parametrize(
    ("runs", "cached", "said"),
    [
        ([], 0, "Denoising took 40 of 52 s."),
        ([ALONE], 0, "Denoising took 40 of 52 s. On one GPU all of it would take about 72 s."),
        ([TOGETHER], 0, "Denoising took 40 of 52 s. With 4 × GPU all of it would take about 38 s."),
        ([TOGETHER, TOGETHER], 0, "Denoising took 40 of 52 s. With 4 × GPU all of it would take about 24 s."),
        # Half of it was never measured there, or on other devices: no figure.
        ([ALONE, UNKNOWN], 0, "Denoising took 40 of 52 s."),
        ([ALONE, TOGETHER], 0, "Denoising took 40 of 52 s."),
        # As fast or slower: nothing that several devices would gain.
        ([SampledRun(20, 1.0, "gpu", (4, 1.0))], 0, "Denoising took 40 of 52 s."),
        ([SampledRun(20, 1.0, "gpu", (1, 0.9))], 0, "Denoising took 40 of 52 s."),
        ([], 3, "Denoising took 40 of 52 s. Nodes from the cache: 3."),
    ],
)
def test_the_sentence_says_what_was_measured(runs, cached, said):
    assert sentence(runs, cached) == said


def test_a_cached_prompt_says_so():
    assert sentence([], cached=7, nodes=0) == "Nothing ran. Nodes from the cache: 7."
    history = [("execution_start", {}), ("execution_cached", {"nodes": ["1", "2"]}), ("execution_success", {})]
    assert cached_nodes(history) == 2
    assert cached_nodes([]) == 0
