"""The fixtures of the end-to-end tests, for clusters that get hurt."""

from tests.e2e.conftest import make_cluster, tiny_model

__all__ = ["make_cluster", "tiny_model"]
