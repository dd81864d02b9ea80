"""The batch loop and the evaluation loop."""
