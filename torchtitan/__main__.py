"""`python -m torchtitan`: the `torchtitan` script where it is not on PATH."""

import sys

from torchtitan.commands import main

sys.exit(main())
