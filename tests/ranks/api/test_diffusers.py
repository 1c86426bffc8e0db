"""Every diffusers model class that has a sharding plan, with that plan: the sharded model equals the model in one process."""

import functools
import sys
from pathlib import Path

import pytest
from support.ranks import DIFFUSERS, run_ranks

HERE = Path(__file__).parent
sys.path.append(str(HERE))
from diffusers_cases import CASES, turns  # noqa: E402

TOLERANCE = 1e-5
WORLDS = (2, 3, 4)
on_every_world = pytest.mark.parametrize("reports", WORLDS, indirect=True)
on_two_ranks = pytest.mark.parametrize("reports", WORLDS[:1], indirect=True)
RUNS = [(case, world, mode) for world in WORLDS for case in CASES for mode in turns(case, world)]


@functools.cache
def ran(world):
    """Reports of all cases and checks on `world` ranks; the error if a rank failed, which is not tried again either."""
    try:
        reports = run_ranks("api/diffusers_ranks.py", world, preload=DIFFUSERS, prepare=[])
        return {r.get("check") or (r["case"], r["mode"]): r for r in reports}
    except AssertionError as error:
        return error


@pytest.fixture
def reports(request):
    result = ran(request.param)
    if isinstance(result, AssertionError):
        raise result
    return result


@pytest.mark.parametrize(
    ("case", "reports", "mode"), RUNS, indirect=["reports"], ids=[f"{world}-{mode}-{case.name}" for case, world, mode in RUNS]
)
def test_sharded_model_equals_stock_model(case, mode, reports):
    result = reports[case.name, mode]
    assert result.get("error") is None
    assert result["difference"] <= TOLERANCE
    assert result["collectives"] > 2  # in two blocks and at the end: it was sharded


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("reports", WORLDS[:1], indirect=True)
def test_cases_would_show_a_missing_token_or_mask(case, reports):
    stock = reports[case.name, "stock"]
    assert stock["std"] > 1e-1
    assert stock["reach"] > 20 * TOLERANCE
    assert (stock["mask_matters"] or 0) > (1e-1 if case.mask else -1)


def differences(result):
    """Every difference in a report, by name."""
    return {name: value for name, value in result.items() if "difference" in name}


@on_every_world
def test_applied_and_removed_and_applied_again(reports):
    result = reports["applied_removed_applied"]
    assert result["difference"] <= TOLERANCE
    assert result["identical"]
    assert result["clean"]


@on_two_ranks
def test_a_second_application_is_refused(reports):
    result = reports["applied_twice"]
    assert result["error"] == "PlanError"
    assert result["difference"] <= TOLERANCE


@on_every_world
@pytest.mark.parametrize(
    "check", ["configs", "meshes", "own_model", "own_model_marked_at_the_block", "batch_axis", "pipeline", "fsdp"]
)
def test_other_configs_meshes_and_models(check, reports):
    found = differences(reports[check])
    assert found
    assert {name: value for name, value in found.items() if not value <= TOLERANCE} == {}
    assert reports[check].get("clean", True)


@on_every_world
def test_the_batch_axis_sends_outputs_alone_and_keeps_their_class(reports):
    assert reports["batch_axis"].get("only outputs", True)
    assert reports["batch_axis"]["output class"] == "Transformer2DModelOutput"


@on_every_world
def test_a_pipeline_is_refused_with_what_to_pass(reports):
    assert "pipe.transformer" in reports["pipeline"]["refusal"]


@on_two_ranks
def test_degrees_that_do_not_fit_the_ranks_are_refused(reports):
    assert reports["degrees_that_do_not_fit"]["error"] == "ConfigError"
    assert reports["degrees_that_do_not_fit"]["clean"]


@on_every_world
def test_what_does_not_divide_is_refused_when_anything_is_off(reports):
    result = reports["anything_off"]
    assert {value for name, value in result.items() if name.endswith("error")} == {"PlanError"}
    assert all(value <= TOLERANCE for value in differences(result).values())


@on_two_ranks
def test_a_plan_that_does_not_fit_is_an_error_before_anything_is_computed(reports):
    result = reports["wrong_plans"]
    for name, (error, computed, clean) in result["results"].items():
        assert error == "PlanError", name
        # What a module puts out is known once it has run.
        assert computed == (name == "output dims"), name
        assert clean, name
    assert result["difference"] == 0


@on_two_ranks
def test_attention_over_tokens_that_the_plan_does_not_know_is_refused(reports):
    assert reports["unknown_tokens"]["error"] == "PlanError"


@on_every_world
def test_text_that_the_table_leaves_out_is_refused_with_what_to_write(reports):
    result = reports["text_left_out"]
    assert all(word in result["refusal"] for word in ("hidden_states and 7 that every rank has whole", "replicated=True"))
    assert result["difference"] <= TOLERANCE


@on_two_ranks
def test_an_output_that_is_not_gathered_is_refused(reports):
    refusal = reports["not_gathered"]["refusal"]
    assert all(word in refusal for word in ("tokens of hidden_states only", "ContextParallelOutput(gather_dim=1)"))


@on_two_ranks
def test_the_attention_backend_is_the_one_that_was_chosen_or_refused_by_name(reports):
    result = reports["backends"]
    assert (result["native"], result["_native_math"]) == (["cpu"], ["math"])
    assert all(value <= TOLERANCE for value in differences(result).values())
    assert all(word in result["refusal"] for word in ("got 'flex'", "allowed: _native_cudnn", "set_attention_backend"))


@on_two_ranks
def test_a_plan_that_says_too_little_is_refused(reports):
    result = reports["plans_that_say_too_little"]
    assert result["right"] <= TOLERANCE
    assert "last: attention over 6 keys of split tokens, and the plan does not say what it is over" in result["left out"]
    assert "the plan names img, of which nothing was split. Streams of this call: image" in result["misspelt"]
    assert "holds none of their tokens. Other tokens under the same name need a stream of their own" in result["one name"]


@on_every_world
def test_products_over_tokens_and_windows_are_seen_in_the_first_call(reports):
    result = reports["what_is_wrong_is_seen"]
    assert "a matrix product brings tokens together" in result["products"]
    assert "a matrix product brings tokens together" in result["products that one rank sees"]
    assert "or a rank has a single query" in result["a mask where a rank has one token"]
    assert "verify found the output off" in result["windows"]
    assert result["right"] <= TOLERANCE


@on_every_world
def test_what_is_done_to_tokens_is_right_or_refused(reports):
    result = {name: value for name, value in reports["what_becomes_of_tokens"].items() if name != "check"}
    right = {name: float(value.removeprefix("difference ")) for name, value in result.items() if value.startswith("difference")}
    assert set(right) == {
        "a view that is filled", "items that are filled", "numpy", "einsum of one", "einsum for each token",
        "channels that are set", "whole tokens of its type", "whole tokens of its device", "whole tokens cut off",
    }  # fmt: skip
    assert max(right.values()) <= TOLERANCE
    refused = [value for name, value in result.items() if name not in right]
    assert len(refused) == 10
    assert all("split over the ranks" in value for value in refused)


@on_every_world
def test_a_call_that_takes_another_way_than_the_first_is_right_or_refused(reports):
    result = reports["other_ways"]
    assert max(differences(result).values()) <= TOLERANCE
    assert result["changed 1"] is None
    assert "where the first call of this form had" in result["changed 0"]


@on_every_world
def test_what_one_rank_does_wrong_in_a_first_call_is_said_on_all(reports):
    result = reports["one_rank_alone"]
    assert "is in training mode" in result["training"]
    assert "disable_cache()" in result["cache"]


@on_every_world
def test_inputs_that_differ_between_ranks_are_named(reports):
    result, last = reports["other_inputs"], reports["other_inputs"]["world"] - 1
    differ = f"hidden_states on rank {last}: not what rank 0 was given"
    assert differ in result["first"]
    assert "guidance on rank 1" in result["guidance"]
    assert result["second"] is None  # as documented: said in the first call, and in each with check_inputs
    assert differ in result["second, checked"]
    assert all("the arguments of apply_context_parallel on rank" in result[f"other {name}"] for name in ("option", "shares"))


@on_every_world
def test_attention_that_cannot_be_reached_is_never_left_to_one_shard(reports):
    results = {name: value for name, value in reports["out_of_reach"].items() if name != "check"}
    assert len(results) == 3
    assert {name: value for name, value in results.items() if value != "PlanError" and not value <= TOLERANCE} == {}


def test_every_example_of_the_document_gives_what_one_process_gives():
    examples = run_ranks("api/document_ranks.py", 4, preload=DIFFUSERS)
    assert len(examples) == 14
    assert {example["code"]: example["difference"] for example in examples if not example["difference"] <= TOLERANCE} == {}


@on_two_ranks
def test_a_call_that_records_gradients_is_refused(reports):
    assert reports["gradients"]["error"] == "PlanError"
    assert reports["gradients"]["difference"] <= TOLERANCE
