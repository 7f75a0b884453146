"""The `vismoe` command, also as `python -m vismoe.cli`: run by this interpreter."""

import sys

INTERRUPTED = 130


def run() -> int:
    """The exit code of the command; also where Ctrl-C arrives before its modules are imported."""
    try:
        from vismoe.cli.main import main
    except KeyboardInterrupt:
        return INTERRUPTED
    return main()


if __name__ == "__main__":
    sys.exit(run())
