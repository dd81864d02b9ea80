"""cofima: teach a pre-trained image classifier new classes without forgetting the old ones."""

__version__ = "0.1.0"
