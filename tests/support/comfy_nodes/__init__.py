"""Test-only nodes for ComfyUI: conditioning and latents without text encoders, and model patches of every kind.

Loaded by the server under test, never by pytest. All random content comes from the `seed` of the node alone.
"""

from .attention import TestAttention
from .calls import TestWorkerCalls
from .child import TestChild
from .conditioning import TestConditioning, TestControl
from .encoders import TestClip, TestClipVision, TestImage, TestVae
from .latent import TestLatent, TestLatentPart, TestPicture
from .model_patch import TestModelPatch, TestMultiTalk
from .patch import TestPatch
from .room import TestRoom
from .stand_ins import TestCodec, TestEncoder, TestSaveModelPatch, TestSound, TestSplats, TestVision

NODES = (
    TestAttention, TestChild, TestClip, TestClipVision, TestCodec, TestConditioning, TestControl, TestEncoder, TestImage,
    TestLatent, TestLatentPart, TestModelPatch, TestMultiTalk, TestPatch, TestPicture, TestRoom, TestSaveModelPatch, TestSound,
    TestSplats, TestVae, TestVision, TestWorkerCalls,
)  # fmt: skip
NODE_CLASS_MAPPINGS = {node.__name__: node for node in NODES}
