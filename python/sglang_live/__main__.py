"""`sglang-live COMMAND ...`: short names of this package's programs."""

import os
import sys

from sglang_live import __version__
from sglang_live.environment import start_in_utf8_mode

# Each command is a module that `python -m` runs as well, and what its line of the help says.
COMMANDS = {
    "serve": ("sglang_live.launch_server", "start the server"),
    "stage": ("sglang_live.launch_stage", "start one stage for servers on other hosts"),
    "cluster": ("sglang_live.launch_cluster", "start or change a cluster, with Ray"),
    "talk": ("sglang_live.client", "hold a conversation with a server"),
    "plan": ("sglang_live.extensions.planner", "find the hardware that a load needs"),
    "batch": ("sglang_live.extensions.batches", "send a file of requests to a server"),
    "traces": ("sglang_live.extensions.traces", "send sessions to a collector of traces"),
}


def main() -> int:
    """Returns the exit status, unless a command takes the place of this process."""
    name, *arguments = sys.argv[1:] or [""]
    if name in COMMANDS:
        # In the place of this process, so that signals and exit codes are the program's own.
        os.execv(sys.executable, [sys.executable, "-m", COMMANDS[name][0], *arguments])
    if name == "--version":
        print(__version__)
        return 0
    wanted = name in ("-h", "--help")
    print(_usage(), file=sys.stdout if wanted else sys.stderr)
    if name and not wanted:
        print(f"error: no command {name}", file=sys.stderr)
    return 0 if wanted else 2


def _usage() -> str:
    lines = [f"  {name:7} {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        ["usage: sglang-live COMMAND [ARGUMENT ...], sglang-live COMMAND --help", "", *lines]
    )


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
