"""A backbone and a head that grows."""
