"""`python -m outpace.serve` is `outpace serve`."""

import sys

from outpace.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
