"""``python -m tests.chaos``: the whole fault campaign, as a table."""

import sys

if __name__ == "__main__":
    from tests.chaos.campaign import main

    sys.exit(main())
