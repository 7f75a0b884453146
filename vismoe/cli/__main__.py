"""`python -m vismoe.cli`: the `vismoe` command, run by this interpreter."""

import sys

from vismoe.cli.main import main

sys.exit(main())
