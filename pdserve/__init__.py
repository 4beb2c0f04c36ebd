"""The command line and the one-box launcher."""
