"""`python -m torchmdnet2` is the command `torchmdnet2`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
