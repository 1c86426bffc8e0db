"""The nodes, and the patcher of their models."""

from typing import Any

import comfy.lora
import comfy.model_patcher
import comfy.sd
import comfy.utils
import folder_paths
import nodes  # noqa: F401  (as the packs do, which look up ComfyUI's own loaders)
import torch

from .blocks import read, unpack
from .ops import FLOAT, PACKED, BlockTensor, Entry, Ops, OtherEntry, OtherOps, is_packed

# The names of files with this ending, in the folders of other models.
folder_paths.folder_names_and_paths["unet_gguf"] = (folder_paths.get_folder_paths("diffusion_models"), {".gguf"})
DTYPES = ("default", "target", "float32", "float16", "bfloat16")


class GGUFModelPatcher(comfy.model_patcher.ModelPatcher):
    patch_on_device = False
    entry: Any = Entry

    def patch_weight_to_device(self, key: str, device_to: Any = None, inplace_update: bool = False) -> Any:
        weight = comfy.utils.get_attr(self.model, key)
        if key in self.patches and is_packed(weight):
            weight = weight.to(device_to)
            weight.patches = [self.entry(self.patches[key], key)]
            comfy.utils.set_attr_param(self.model, key, weight)
        else:
            super().patch_weight_to_device(key, device_to, inplace_update)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        for weight in self.model.parameters() if unpatch_weights else ():
            if is_packed(weight):
                weight.patches = []
        return super().unpatch_model(device_to=device_to, unpatch_weights=unpatch_weights)

    def load(self, *args: Any, force_patch_weights: bool = False, **kwargs: Any) -> None:
        super().load(*args, force_patch_weights=True, **kwargs)

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        own = self.__class__
        self.__class__ = GGUFModelPatcher
        made = super().clone(*args, **kwargs)
        made.__class__ = own if issubclass(own, GGUFModelPatcher) else GGUFModelPatcher
        self.__class__ = own
        made.patch_on_device = getattr(self, "patch_on_device", False)
        return made


class OtherPatcher(GGUFModelPatcher):
    @staticmethod
    def entry(patches: Any, key: str) -> OtherEntry:
        return OtherEntry(comfy.lora.calculate_weight, patches, key)


def asked(name: str | None) -> Any:
    return None if name in ("default", None) else name if name == "target" else getattr(torch, name)


def load_plain(path: str) -> Any:
    weights = {
        name: unpack(data, torch.Size(shape), None) if packed else data for name, (data, shape, packed) in read(path)[0].items()
    }
    return comfy.sd.load_diffusion_model_state_dict(weights)


def load(
    path: str,
    dequant_dtype: str | None = None,
    patch_dtype: str | None = None,
    on_device: bool | None = None,
    ops: Ops | None = None,
    patcher: type[GGUFModelPatcher] = GGUFModelPatcher,
) -> Any:
    ops = ops or Ops()
    ops.Linear.dequant_dtype, ops.Linear.patch_dtype = asked(dequant_dtype), asked(patch_dtype)  # on the class: for all models
    weights = {
        name: BlockTensor(data, tensor_type=PACKED if packed else FLOAT, tensor_shape=torch.Size(shape))
        for name, (data, shape, packed) in read(path)[0].items()
    }
    model = comfy.sd.load_diffusion_model_state_dict(weights, model_options={"custom_operations": ops})
    model = GGUFModelPatcher.clone(model)
    model.__class__ = patcher
    model.patch_on_device = on_device
    return model


class UnetLoaderGGUF:
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"unet_name": (folder_paths.get_filename_list("unet_gguf"),)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load_unet"
    CATEGORY = "test"

    def load_unet(
        self,
        unet_name: str,
        dequant_dtype: str | None = None,
        patch_dtype: str | None = None,
        patch_on_device: bool | None = None,
    ) -> tuple[Any, ...]:
        return (load(folder_paths.get_full_path("unet", unet_name), dequant_dtype, patch_dtype, patch_on_device),)


class UnetLoaderGGUFAdvanced(UnetLoaderGGUF):
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        more = {"dequant_dtype": (DTYPES,), "patch_dtype": (DTYPES,), "patch_on_device": ("BOOLEAN", {"default": False})}
        return {"required": super().INPUT_TYPES()["required"] | more}


class OtherPacksLoader(UnetLoaderGGUF):
    """The same under the names of another pack, which notes patches in another form; with what a later version may do otherwise."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        names = super().INPUT_TYPES()["required"]["unet_name"]
        return {"required": {}, "optional": {"gguf_name": names, "model_name": names, "plain_layers": ("BOOLEAN", {})}}

    FUNCTION = "load_model"

    def load_model(self, gguf_name: str = "", model_name: str = "", plain_layers: bool = False) -> tuple[Any, ...]:
        path = folder_paths.get_full_path("unet", gguf_name or model_name)
        return (load_plain(path) if plain_layers else load(path, ops=OtherOps(), patcher=OtherPatcher),)


class LoaderOfClassMethods(OtherPacksLoader):
    """As ComfyUI's newer kind of node."""

    FUNCTION = "execute"

    @classmethod
    def execute(cls, gguf_name: str) -> tuple[Any, ...]:
        return (load(folder_paths.get_full_path("unet", gguf_name), ops=OtherOps(), patcher=OtherPatcher),)


class OtherLoaderGGUF(UnetLoaderGGUF):
    """One that nobody knows."""

    FUNCTION = "load_other"

    def load_other(self, unet_name: str) -> tuple[Any, ...]:
        return (load(folder_paths.get_full_path("unet", unet_name)),)


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in (UnetLoaderGGUF, UnetLoaderGGUFAdvanced, OtherLoaderGGUF)}
NODE_CLASS_MAPPINGS |= {"LoaderGGUF": OtherPacksLoader, "LoaderGGUFAdvanced": LoaderOfClassMethods}
NODE_DISPLAY_NAME_MAPPINGS = {"UnetLoaderGGUF": "Unet Loader (GGUF)", "UnetLoaderGGUFAdvanced": "Unet Loader (GGUF/Advanced)"}
