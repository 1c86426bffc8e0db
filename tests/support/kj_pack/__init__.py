"""A pack of the tests' own under the name, and with the classes, of one that replaces forwards inside of Wan's blocks."""

from .nodes import model_optimization_nodes, nodes

NODE_CLASS_MAPPINGS = {
    "WanVideoNAG": model_optimization_nodes.WanVideoNAG,
    "WanVideoEnhanceAVideoKJ": model_optimization_nodes.WanVideoEnhanceAVideoKJ,
    "WanChunkFeedForward": model_optimization_nodes.WanChunkFeedForward,
    "TestOtherVersion": model_optimization_nodes.TestOtherVersion,
    "ApplyRifleXRoPE_WanVideo": nodes.ApplyRifleXRoPE_WanVideo,
}
NODE_DISPLAY_NAME_MAPPINGS = {"WanChunkFeedForward": "Wan Chunk FeedForward"}
