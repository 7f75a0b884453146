"""`vismoe gpu-check`: what is to be found out on the day a GPU is there, in one command; without one, what can be known."""

from argparse import ArgumentParser, Namespace

from vismoe import flags


def gpu_check_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe gpu-check`."""
    flags.add(parser, "--roofline", "print what published rates of four cards allow, and do nothing else")
    flags.add(parser, "--json", "print only one JSON line")


def run_gpu_check(arguments: Namespace) -> int:
    """Prints the roofline."""
    from vismoe.bench import roofline

    if arguments.json:
        flags.print_json(arguments, roofline.report())
    else:
        print(roofline.markdown())
    return 0


GPU_CHECK = flags.Command(
    "check and measure this machine's GPU in nine minutes",
    gpu_check_arguments,
    run_gpu_check,
    """\
  vismoe gpu-check --roofline                                    what published rates of four cards allow""",
)
