import dataclasses
import math

import diffusers
import pytest

from cp_runtime.engine.ranks.config import ContextParallelConfig, ParallelConfig, PipelineSettings
from cp_runtime.errors import MAX_REMEDY, ConfigError
from cp_runtime.pool.config import DeviceInventory, RuntimeConfig, has_code

CUDA = DeviceInventory(type="cuda", count=4)
CPU = DeviceInventory(type="cpu", count=0)
WITH_AN_OLD_ONE = DeviceInventory(type="cuda", count=3, too_old=(1,))


def resolve(inventory=CUDA, **inputs):
    return RuntimeConfig.resolve(inventory=inventory, **inputs)


def test_defaults_use_every_device():
    config = resolve()
    assert config.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert (config.sequence.ulysses_degree, config.sequence.ring_degree) == (0, 0)  # chosen per attention
    assert resolve(CPU).devices == ("cpu", "cpu")


def test_devices_decide_the_world():
    assert resolve(devices="cuda:0, cuda:2").devices == ("cuda:0", "cuda:2")
    assert resolve(world_size=3).devices == ("cuda:0", "cuda:1", "cuda:2")
    assert resolve(CPU, devices="cpu,cpu,cpu").world_size == 3


def test_ranks_share_an_accelerator_where_devices_says_so():
    one = DeviceInventory(type="cuda", count=1)
    config = resolve(one, devices="cuda:0,cuda:0,cuda", backend="gloo")
    assert (config.devices, config.world_size) == (("cuda:0",) * 3, 3)
    assert config.shares_accelerators
    assert resolve(one, devices="cuda:0,cuda:0", world_size=2, backend="gloo").world_size == 2
    assert resolve(one, backend="gloo").world_size == 1
    assert not resolve(backend="gloo").shares_accelerators
    assert not resolve(CPU).shares_accelerators


@pytest.mark.parametrize(
    ("inputs", "stages", "words"),
    [
        ({}, 3, "stages: .* Got 3; allowed: a number from 2 that divides the 4 ranks"),
        ({}, 1, "stages: .* Got 1; allowed"),
        ({"ulysses_degree": 4}, 2, "ulysses_degree: .* Got 4; allowed: 0 or 1 where the model is staged"),
        ({"batch_degree": 2, "weights": "staged"}, None, "batch_degree: .* Got 2; allowed: 0 or 1 where the model is staged"),
    ],
)
def test_stages_divide_the_ranks(inputs, stages, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(resolve(**inputs), pipeline=stages and PipelineSettings(stages=stages))


def test_nccl_takes_one_card_twice_for_tests_only(monkeypatch):
    monkeypatch.setenv("CP_TEST_ONE_CARD", "1")
    config = resolve(DeviceInventory(type="cuda", count=1), devices="cuda:0,cuda:0", backend="nccl")
    assert (config.devices, config.shares_accelerators) == (("cuda:0", "cuda:0"), True)
    with pytest.raises(ConfigError, match="each device once"):
        resolve(devices="cuda:0,cuda:0")


@pytest.mark.parametrize("share", ["000000011000", "000000001" + "0" * 5000, "1" * 5000, "101", "0", "1.5", "-1", ""])
def test_a_share_is_a_number_up_to_100(share):
    assert resolve(CPU, shares="100,1").shares == (100, 1)
    with pytest.raises(
        ConfigError, match=r"shares: .* Got .*; allowed: a whole number from 1 to 100 for each of the 2 ranks"
    ) as caught:
        resolve(CPU, shares=f"{share},1")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"world_size": -1}, ["world_size", "-1", "0 (choose) to 4"]),
        ({"world_size": 64}, ["world_size", "64"]),
        ({"world_size": True}, ["world_size"]),
        ({"world_size": 3, "devices": "cuda:0,cuda:1"}, ["world_size", "3", "2"]),
        ({"devices": "cuda:9"}, ["devices", "cuda:9", "cuda:3", "sees 4 cuda device(s)"]),
        ({"devices": "cuda:1,cuda:7"}, ["'cuda:1,cuda:7'", "'cuda:7' is none of them"]),
        ({"devices": "cuda:0,cuda:0"}, ["each device once", "gloo as “communication library”"]),
        ({"devices": "cuda:0,cuda:0", "backend": "nccl"}, ["each device once", "gloo as “communication library”"]),
        ({"backend": "xccl"}, ["auto, nccl, gloo on cuda devices", "Choose auto"]),
        ({"devices": ",".join(["cuda:0"] * 33), "backend": "gloo"}, ["at most 32 entries"]),
        ({"world_size": 5, "backend": "gloo"}, ["world_size", "0 (choose) to 4"]),
        ({"world_size": 3, "devices": "cuda:0,cuda:0", "backend": "gloo"}, ["world_size", "3", "2"]),
        ({"devices": "cpu"}, ["devices", "cpu", "cuda"]),
        ({"devices": "cuda:1"}, ["devices", "'cuda:1'", "with one entry cuda:0", "start ComfyUI on that one"]),
        ({"devices": "cuda:0;rm -rf /"}, ["devices"]),
        ({"devices": "cuda:0,,cuda:1"}, ["devices"]),
        ({"ulysses_degree": 3}, ["3 x 1 x 1 = 3", "4"]),
        ({"ulysses_degree": -2}, ["ulysses_degree", "-2"]),
        ({"ring_degree": 3}, ["1 x 3 x 1 = 3", "4"]),
        ({"batch_degree": 3}, ["1 x 3 = 3", "4"]),
        ({"batch_degree": 2, "ring_degree": 4}, ["1 x 4 x 2 = 8", "4"]),
        ({"batch_degree": 1.5}, ["batch_degree", "1.5"]),
        ({"ulysses_degree": 10**9}, ["product"]),
        ({"backend": "mpi; true"}, ["backend"]),
        ({"on_unsupported": "ignore"}, ["on_unsupported"]),
        ({"rotate_method": "none"}, ["rotate_method"]),
        ({"weights": "half"}, ["weights", "half", "auto, whole, sharded, offloaded"]),
        ({"memory_per_rank": -1}, ["memory_per_rank", "-1", "GB from 0"]),
        ({"memory_per_rank": math.nan}, ["memory_per_rank", "nan"]),
        ({"memory_per_rank": "24"}, ["memory_per_rank"]),
        ({"step_timeout": math.nan}, ["step_timeout", "nan"]),
        ({"step_timeout": -1}, ["step_timeout"]),
        ({"step_timeout": math.inf}, ["step_timeout"]),
        ({"step_timeout": "10"}, ["step_timeout"]),
    ],
)
def test_refusals_name_field_value_and_remedy(inputs, words):
    """The remedy before the value, where ComfyUI does not cut it off."""
    with pytest.raises(ConfigError) as caught:
        resolve(**inputs)
    for word in words:
        assert word in str(caught.value)
    assert 0 < str(caught.value).find(" Got ") <= MAX_REMEDY


@pytest.mark.parametrize(
    ("inputs", "degrees"),
    [
        ({}, (0, 0, 0)),
        ({"batch_degree": 2}, (0, 0, 2)),
        ({"batch_degree": 1}, (0, 0, 1)),
        ({"ulysses_degree": 4}, (1, 4, 1)),
        ({"ulysses_degree": 2}, (2, 2, 1)),
        ({"ring_degree": 4}, (4, 1, 1)),
        ({"ring_degree": 2}, (2, 2, 1)),
        ({"ring_degree": 1, "batch_degree": 1}, (1, 4, 1)),
        ({"ulysses_degree": 2, "batch_degree": 2}, (1, 2, 2)),
        ({"ring_degree": 2, "batch_degree": 2}, (2, 1, 2)),
        ({"ulysses_degree": 1, "ring_degree": 2}, (2, 1, 2)),
        ({"ulysses_degree": 1, "ring_degree": 1}, (1, 1, 4)),
    ],
)
def test_degrees_left_open_take_the_rest(inputs, degrees):
    config = resolve(world_size=4, **inputs)
    assert (config.sequence.ring_degree, config.sequence.ulysses_degree, config.batch_degree) == degrees


def test_cpu_refusals(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for inputs in ({"world_size": 64}, {"world_size": 9}, {"devices": "cuda:0"}, {"backend": "nccl"}):
        with pytest.raises(ConfigError):
            resolve(CPU, **inputs)
    for inputs in ({"world_size": 9}, {"devices": "cuda:0,cuda:1"}):
        with pytest.raises(ConfigError, match=r"ComfyUI runs on the CPU: it was started with --cpu, .*, 4 per core at most"):
            resolve(CPU, **inputs)
    assert resolve(CPU, world_size=3).world_size == 3


FIELDS = [(field, value) for field in ("ring_degree", "ulysses_degree") for value in (0, -1, 1.5, True, "2")]
FIELDS += [("rotate_method", "shuffle"), ("convert_to_fp32", 1), ("ulysses_anything", None)]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_context_parallel_config_checks_its_fields(field, value):
    with pytest.raises(ConfigError, match=f"{field}: .* Got {value!r}; allowed"):
        ContextParallelConfig(**{field: value})


def test_context_parallel_config_has_the_fields_and_defaults_of_diffusers():
    theirs = {f.name: f.default for f in dataclasses.fields(diffusers.ContextParallelConfig) if not f.name.startswith("_")}
    ours = {
        "batch_degree": 1, "shares": None, "ulysses_rounds": 1, "exchange": "exact", "pipefusion_degree": 1,
        "num_pipeline_patch": None, "warmup_steps": 1,
    }  # fmt: skip
    assert {f.name: f.default for f in dataclasses.fields(ContextParallelConfig)} == {**theirs, **ours}
    config = ContextParallelConfig(ring_degree=2)
    assert (config.mesh_shape, config.mesh_dim_names) == ((2, 1), ("ring", "ulysses"))
    assert ContextParallelConfig().mesh_shape == (1, 1)  # passes through


def test_configs_of_diffusers_are_accepted():
    theirs = diffusers.ContextParallelConfig(ulysses_degree=2, ulysses_anything=True)
    expected = ContextParallelConfig(ulysses_degree=2, ulysses_anything=True)
    assert ContextParallelConfig.of(theirs) == expected
    assert ContextParallelConfig.of(diffusers.ParallelConfig(context_parallel_config=theirs)) == expected
    assert ContextParallelConfig.of(ParallelConfig(context_parallel_config=expected)) is expected


OTHER = diffusers.ParallelConfig(tensor_parallel_config=diffusers.TensorParallelConfig(tp_degree=2))
NONE = r"parallel_config: .* Got .*; allowed: a ContextParallelConfig"


@pytest.mark.parametrize(
    ("config", "words"), [(None, NONE), (2, NONE), ({"ulysses_degree": 2}, NONE), (OTHER, "tensor_parallel_config")]
)
def test_other_configs_are_refused(config, words):
    with pytest.raises(ConfigError, match=words):
        ContextParallelConfig.of(config)


@pytest.mark.parametrize("shares", [(2,), (2, 1, 1), (2, 0), (2, 1.5), (2, True), "21", (1, 101), 2])
def test_shares_are_one_for_each_rank(shares):
    with pytest.raises(ConfigError, match=r"shares: .* Got .*; allowed: a whole number from 1 to 100 for each of the 2 ranks"):
        ContextParallelConfig(ulysses_degree=2, shares=shares)
    with pytest.raises(ConfigError, match="4 ranks"):
        ContextParallelConfig(ulysses_degree=2, batch_degree=2, shares=(2, 1))


def test_shares_may_be_a_list():
    assert ContextParallelConfig(ring_degree=2, shares=[2, 1]).shares == (2, 1)


def test_setup_checks_ranks_and_process_group():
    with pytest.raises(ConfigError, match=r"2 x 2 = 4.*world size, 3"):
        ContextParallelConfig(ring_degree=2, ulysses_degree=2).setup(0, 3, "cpu")
    with pytest.raises(ConfigError, match="init_process_group before setup"):
        ContextParallelConfig(ulysses_degree=2).setup(0, 2, "cpu")


@pytest.mark.parametrize("config", [ContextParallelConfig(2), ParallelConfig(ContextParallelConfig(2))])
def test_in_diffusers_own_functions_a_config_says_what_to_call_instead(config):
    with pytest.raises(ConfigError, match=r"call cp_runtime\.apply_context_parallel"):
        diffusers.ModelMixin().enable_parallelism(config=config)


def test_a_device_that_torch_has_no_code_for_is_left_out():
    assert resolve(WITH_AN_OLD_ONE).devices == ("cuda:0", "cuda:2")
    assert resolve(WITH_AN_OLD_ONE, devices="cuda:2,cuda:0").devices == ("cuda:2", "cuda:0")
    with pytest.raises(ConfigError, match="cuda:1 is too old for it"):
        resolve(WITH_AN_OLD_ONE, devices="cuda:0,cuda:1")
    with pytest.raises(ConfigError, match="world_size"):
        resolve(WITH_AN_OLD_ONE, world_size=3)


def test_architectures_that_torch_was_built_for():
    built = ["sm_75", "sm_80", "sm_86", "sm_90a", "compute_90"]
    runs = {version: has_code(built, version) for version in ((6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0))}
    assert [version for version, found in runs.items() if not found] == [(6, 1), (7, 0)]
    assert not has_code(["sm_80", "sm_90"], (12, 0))
    assert has_code(["gfx1100"], (11, 0))
    assert has_code([], (8, 0))
