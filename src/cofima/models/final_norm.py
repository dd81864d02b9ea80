"""The last layer norm of a backbone: as it was pre-trained, or fresh as in the code released with SLCA.

That code (and what builds on it: CoFiMA's, Mammoth's) deletes the pre-trained norm before the features and
puts ``nn.LayerNorm(d)`` in its place, so that its weight, bias and eps of 1e-6 are lost.
"""

from torch import nn

from cofima.core.errors import CofimaError

EPS = 1e-5  # torch's own, where timm's transformers have 1e-6
_PLACES = ("head.norm", "fc_norm", "norm")  # the one nearest to the features first


def find(backbone: nn.Module) -> nn.LayerNorm | None:
    """Return the layer norm that the features come out of, or None where there is none."""
    layers = dict(backbone.named_modules())
    return next((n for place in _PLACES if isinstance(n := layers.get(place), nn.LayerNorm)), None)


def reset(backbone: nn.Module, name: str) -> None:
    """Make the final layer norm fresh: weight 1, bias 0, eps 1e-5."""
    norm = find(backbone)
    if norm is None or norm.weight is None:
        raise CofimaError(
            f"model.final_norm = reset: backbone '{name}' ({type(backbone).__name__}) has no final layer "
            "norm; use model.final_norm=pretrained"
        )
    nn.init.ones_(norm.weight)
    if norm.bias is not None:
        nn.init.zeros_(norm.bias)
    norm.eps = EPS
