"""``python -m pcrshard``: the command ``pcrshard``."""

import sys

from pcrshard_command import main

if __name__ == "__main__":
    sys.exit(main())
