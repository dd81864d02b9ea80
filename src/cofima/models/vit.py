"""Check for the vision transformers that prompts and adapters support."""

from torch import nn

_OWN = ("forward", "forward_features", "forward_head", "_pos_embed")


def incompatibility(backbone: nn.Module) -> str | None:
    """Return why a backbone is not timm's VisionTransformer with a class token, or None if it is.

    Registers, a norm before the blocks, layer scale and any position embedding are supported.
    """
    from timm.models.vision_transformer import VisionTransformer

    kind = type(backbone)
    if not isinstance(backbone, VisionTransformer):
        return f"this backbone is a {kind.__name__}. Try vit_micro, or a name that starts with vit_ or deit_"
    if any(getattr(kind, name) is not getattr(VisionTransformer, name) for name in _OWN):
        return f"this backbone is a {kind.__name__}, which uses its tokens in another way"
    if not backbone.has_class_token:
        return "this backbone has none"
    if backbone.global_pool != "token":
        return f"the feature of this backbone is not its class token (global_pool='{backbone.global_pool}')"
    return None
