"""`python -m vismoe.cli`: the `vismoe` command of this interpreter."""

import sys

from vismoe.cli.main import main

sys.exit(main())
