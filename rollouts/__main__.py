"""`python -m rollouts`, the same as the `rollouts` command."""

import sys

from rollouts.cli import main

if __name__ == "__main__":
    sys.exit(main())
