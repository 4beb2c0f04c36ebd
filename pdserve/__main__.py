"""Makes `python -m pdserve` the same as `pdserve`."""

from pdserve.cli import main

main()
