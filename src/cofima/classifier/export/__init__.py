"""Models for use elsewhere: ONNX, TorchScript, timm, model cards, the Hugging Face hub."""
