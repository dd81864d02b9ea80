"""The model, and the model folder that it is saved in."""
