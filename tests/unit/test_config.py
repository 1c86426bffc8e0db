import math

import pytest

from cp_runtime.config import ContextParallelConfig, DeviceInventory, RuntimeConfig
from cp_runtime.errors import ConfigError

CUDA = DeviceInventory(type="cuda", count=4)
CPU = DeviceInventory(type="cpu", count=0)


def resolve(inventory=CUDA, **inputs):
    return RuntimeConfig.resolve(inventory=inventory, **inputs)


def test_defaults_use_every_device():
    config = resolve()
    assert config.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert (config.context_parallel.ulysses_degree, config.context_parallel.ring_degree) == (4, 1)
    assert resolve(CPU).devices == ("cpu", "cpu")


def test_devices_decide_the_world():
    assert resolve(devices="cuda:0, cuda:2").devices == ("cuda:0", "cuda:2")
    assert resolve(world_size=3).devices == ("cuda:0", "cuda:1", "cuda:2")
    assert resolve(CPU, devices="cpu,cpu,cpu").world_size == 3


def test_equal_inputs_give_equal_configs():
    assert resolve(world_size=2) == resolve(devices="cuda:0,cuda:1", ulysses_degree=2)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"world_size": -1}, ["world_size", "-1", "0 (choose) to 4"]),
        ({"world_size": 64}, ["world_size", "64"]),
        ({"world_size": True}, ["world_size"]),
        ({"world_size": 3, "devices": "cuda:0,cuda:1"}, ["world_size", "3", "2"]),
        ({"devices": "cuda:9"}, ["devices", "cuda:9", "cuda:3"]),
        ({"devices": "cuda:0,cuda:0"}, ["each device once"]),
        ({"devices": "cpu"}, ["devices", "cpu", "cuda"]),
        ({"devices": "cuda:0;rm -rf /"}, ["devices"]),
        ({"devices": "cuda:0,,cuda:1"}, ["devices"]),
        ({"ulysses_degree": 3}, ["3 x 1 x 1 = 3", "4"]),
        ({"ulysses_degree": -2}, ["ulysses_degree", "-2"]),
        ({"ring_degree": 2}, ["ring_degree", "not available"]),
        ({"batch_degree": 2}, ["batch_degree", "not available"]),
        ({"ulysses_degree": 10**9}, ["product"]),
        ({"backend": "mpi; true"}, ["backend"]),
        ({"on_unsupported": "ignore"}, ["on_unsupported"]),
        ({"rotate_method": "none"}, ["rotate_method"]),
        ({"step_timeout": math.nan}, ["step_timeout", "nan"]),
        ({"step_timeout": -1}, ["step_timeout"]),
        ({"step_timeout": math.inf}, ["step_timeout"]),
        ({"step_timeout": "10"}, ["step_timeout"]),
    ],
)
def test_refusals_name_field_value_and_remedy(inputs, words):
    with pytest.raises(ConfigError) as caught:
        resolve(**inputs)
    for word in words:
        assert word in str(caught.value)


def test_cpu_refusals(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for inputs in ({"world_size": 64}, {"world_size": 9}, {"devices": "cuda:0"}, {"backend": "nccl"}):
        with pytest.raises(ConfigError):
            resolve(CPU, **inputs)
    assert resolve(CPU, world_size=3).world_size == 3


@pytest.mark.parametrize("field", ["ring_degree", "ulysses_degree"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_context_parallel_config_checks_degrees(field, value):
    with pytest.raises(ConfigError, match=field):
        ContextParallelConfig(**{field: value})
