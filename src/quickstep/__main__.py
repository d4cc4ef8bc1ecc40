"""`python -m quickstep` is the `quickstep` command."""

import sys

from quickstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
