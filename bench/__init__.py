"""Measures a cluster from outside: that its tokens are right, and how fast it is. Imports nothing of pdserve."""
