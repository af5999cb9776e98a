"""``python -m pcrshard``: the command ``pcrshard``."""

import sys

from pcrshard_command import main

sys.exit(main())
