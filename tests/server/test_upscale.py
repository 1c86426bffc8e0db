"""CP Upscale Image on a real server, against ComfyUI's own node."""

import pytest
from support.upscalers import upscale_prompt
from support.worlds import on_ranks

ARCHITECTURES = ("esrgan", "swinir", "dat", "compact")
SMALL = {"width": 130, "height": 47}
WIDE = {"width": 700, "height": 60}  # two tiles

pytestmark = pytest.mark.usefixtures("upscalers")


class TestUpscale:
    @pytest.mark.bits("the same tiles, blended by the same node")
    @pytest.mark.parametrize(("name", "world"), [on_ranks(2 + i % 2, name) for i, name in enumerate(ARCHITECTURES)])
    @pytest.mark.parametrize("size", [WIDE, SMALL | {"frames": 5}, {"width": 33, "height": 17, "frames": 17}])
    def test_it_is_the_stock_result(self, server, name, world, size):
        stock = server.sample(upscale_prompt(name, **size))
        assert (server.sample(upscale_prompt(name, world, **size)) == stock).all()
        assert stock.std() > 0.02
        assert server.status()["last_upscale_call"]["degrees"] == {"tiles": world}

    @pytest.mark.bits("the same tiles, blended by the same node")
    @pytest.mark.parametrize("world", [on_ranks(2)])
    def test_tiles_in_both_directions_and_unequal_shares(self, server, world):
        stock = server.sample(upscale_prompt("compact", width=1300, height=1027))
        assert (server.sample(upscale_prompt("compact", world, width=1300, height=1027, shares="3,1")) == stock).all()

    @pytest.mark.bits("the stock path")
    @pytest.mark.parametrize("size", [SMALL, {"width": 1, "height": 1}, SMALL | {"frames": 0}, WIDE | {"frames": 0}])
    def test_a_single_tile_and_none_are_of_one_device(self, server, size):
        before = server.status()["last_upscale_call"]
        stock = server.sample(upscale_prompt("compact", **size))
        assert server.sample(upscale_prompt("compact", 2, **size)).equal(stock)
        assert server.status()["last_upscale_call"] == before

    @pytest.mark.bits("the same tiles, blended by the same node")
    @pytest.mark.parametrize("world", [on_ranks(2)])
    def test_two_models_in_turn_and_the_stock_node_between(self, server, world):
        stock = {name: server.sample(upscale_prompt(name, **WIDE)) for name in ("esrgan", "compact")}
        for name in ("compact", "esrgan", "compact"):
            assert (server.sample(upscale_prompt(name, world, **WIDE, again=True)) == stock[name]).all()
            assert (server.sample(upscale_prompt(name, **WIDE | {"seed": 4})) != stock[name]).any()

    @pytest.mark.bits("the stock path")
    @pytest.mark.parametrize("world", [on_ranks(2)])
    def test_what_cannot_run_is_refused_by_name(self, server, world):
        def changed(node, **inputs):
            prompt = upscale_prompt("compact", world, **WIDE, again=True)
            prompt[node]["inputs"] |= inputs
            return prompt

        server.fails(changed("run", upscale_model="esrgan.safetensors"), "Connect Load Upscale Model. Got 'esrgan.safetensors'")
        server.fails(changed("run", image=3), "image: Connect Load Image", "Got 3")
        server.fails(changed("run", cp_config=3), "the output of a CP Config node")
        server.fails(changed("loader", model_name="gray.safetensors"), ", 3]; allowed: pictures, [B, H, W, 1], as the")
        spoilt = changed("run", upscale_model=["spoilt", 0])
        spoilt["spoilt"] = {"class_type": "TestUnsendable", "inputs": {"model": ["loader", 0]}}
        server.fails(spoilt, "lock of the model, an object of the class _thread.lock, cannot be sent to the workers")
        spoilt["cp_config"]["inputs"]["on_unsupported"] = "single device"
        assert (server.sample(spoilt) == server.sample(upscale_prompt("compact", **WIDE))).all()
