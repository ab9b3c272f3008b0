"""`python -m outpace` is `outpace`."""

import sys

from outpace.cli import main

sys.exit(main())
