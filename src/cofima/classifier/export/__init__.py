"""Export of models: ONNX, TorchScript, timm, model cards, the Hugging Face hub."""
