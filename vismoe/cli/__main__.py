"""The `vismoe` command, also as `python -m vismoe.cli`: run by this interpreter."""

import sys


def run() -> int:
    """The exit code of the command; that of Ctrl-C also where it arrives before the command's modules are imported."""
    try:
        from vismoe.cli.main import main
    except KeyboardInterrupt:
        return 130  # `flags.INTERRUPTED`, which may not be imported yet
    return main()


if __name__ == "__main__":
    sys.exit(run())
