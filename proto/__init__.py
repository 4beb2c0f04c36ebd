"""The wire contract, package pdserve.v1, and the code generated from it."""
