"""Native layers and models, built from a ``ModelSpec``."""
