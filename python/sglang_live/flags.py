"""Flags of the server by subject, as `--help` shows them; arguments.py reads their values."""

import argparse
import textwrap

from sglang_live.config import ServerConfig
from sglang_live.extension import extensions
from sglang_live.settings import Flag, flags_of

_DESCRIPTION = """\
Serves speech conversations at /v1/realtime, OpenAI's HTTP routes, and a page
to talk to at /. docs/configuration.md explains every flag.

  --model-path demo     a small model, without GPU or download
  --model-path cascade  answers anything, 192 MB at the first start
  --model-path DIR --host 0.0.0.0 --api-key KEY
                        a checkpoint, for other machines
"""
_STAGES = """\
thinker, talker and vocoder, each in a process of its own. All other flags go
to them:

  --thinker.NAME VALUE, --talker.NAME VALUE
                        argument of SGLang for that engine
  --NAME VALUE          the same for both engines
  --vocoder.NAME VALUE  such as max-streams (docs/configuration.md)
  --STAGE.replicas N    processes of the stage (default: 1)
  --STAGE.device cuda:4[,cuda:5]
                        GPU of each replica (default: cuda:0, or the CPU)
  --STAGE.connect tcp://HOST:PORT[,...]
                        stages that launch_stage started on other hosts
"""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        """Without breaks inside flags."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def server_flags() -> dict[str, list[Flag]]:
    """By subject. Those of the stages are the last, for what follows them in --help."""
    subjects: dict[str, list[Flag]] = {}
    for flag in flags_of(ServerConfig):
        subjects.setdefault(flag.group, []).append(flag)
    for extension in extensions():
        if flags := flags_of(extension.flags):
            subjects[extension.title] = flags
    return subjects | {"stages": subjects.pop("stages")}


def server_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "sglang_live.launch_server",
        usage="%(prog)s --model-path PATH [FLAGS]",
        description=_DESCRIPTION,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    for subject, flags in server_flags().items():
        group = parser.add_argument_group(subject, _STAGES if subject == "stages" else None)
        for flag in flags:
            flag.add_to(group)
    return parser
