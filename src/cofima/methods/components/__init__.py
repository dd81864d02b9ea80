"""Components that methods are composed of."""
