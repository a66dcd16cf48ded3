"""Flags of the server by subject, as `--help` shows them; arguments.py reads their values."""

import argparse
import textwrap
from dataclasses import fields

from sglang_live.config import LOG_FORMATS, SPEAKER_MODELS, ServerConfig
from sglang_live.environment import add_cache_argument
from sglang_live.extension import extensions
from sglang_live.gateway.flex.flags import add_batch_key_argument, add_flex_arguments
from sglang_live.kv.retention import RetentionConfig
from sglang_live.model_source import add_model_arguments
from sglang_live.models.family import INT8, OWN
from sglang_live.policy.policies import NAMES
from sglang_live.stages.spec import STUCK_AFTER_S
from sglang_live.stages.transport.lease_flags import add_lease_arguments
from sglang_live.stages.transport.stage_key import add_key_arguments

POLICIES_HELP = f"off, all, or some of these, separated by commas: {', '.join(NAMES)}"
_RETENTION = RetentionConfig()
_DEFAULTS = {field.name: field.default for field in fields(ServerConfig)}
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


def server_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "sglang_live.launch_server",
        usage="%(prog)s --model-path PATH [FLAGS]",
        description=_DESCRIPTION,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group
    _add_model_arguments(group("what to serve"))
    _add_network_arguments(group("network and keys"))
    _add_limit_arguments(group("limits"))
    _add_policy_arguments(group("policies"))
    _add_memory_arguments(group("memory of sessions"))
    _add_background_arguments(group("work in the background"))
    _add_folder_arguments(group("logs and folders"))
    for extension in extensions():
        extension.add_flags(group(extension.title))
    _add_stage_arguments(group("stages", _STAGES))
    return parser


def _add_model_arguments(flags: argparse._ActionsContainer) -> None:
    add = flags.add_argument
    add_model_arguments(flags)
    add(
        "--served-model-name",
        metavar="NAME",
        help="name for clients (default: last part of the path)",
    )
    add(
        "--speaker-model",
        choices=SPEAKER_MODELS,
        help="tell the user's voice from others over a response (default: none; "
        "docs/turn_taking.md)",
    )
    add_weights_argument(flags)


def _add_network_arguments(flags: argparse._ActionsContainer) -> None:
    add = flags.add_argument
    add(
        "--host",
        default=_DEFAULTS["host"],
        help="address to listen on; other machines reach 0.0.0.0, or :: with IPv6, which need "
        "--api-key or --allow-anonymous (default: %(default)s)",
    )
    add(
        "--port",
        type=int,
        default=_DEFAULTS["port"],
        help="to listen on; 0: any that is free (default: %(default)d)",
    )
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="accepted key; may be given several times (env SGLANG_LIVE_API_KEYS; default: no key "
        "is needed)",
    )
    add_batch_key_argument(flags)
    add(
        "--operator-key",
        metavar="KEY",
        help="key for operations that affect all sessions: /flush_cache (env "
        "SGLANG_LIVE_OPERATOR_KEY)",
    )
    add("--ssl-certfile", metavar="FILE", help="serve https and wss with this certificate (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="its private key, if that is another file")
    add("--allow-anonymous", action="store_true", help="serve non-loopback without a key")
    add("--allow-local-media", action="store_true", help="requests may name files")
    add("--allow-private-media-urls", action="store_true", help="requests may name private URLs")


def _add_limit_arguments(flags: argparse._ActionsContainer) -> None:
    add = flags.add_argument
    add(
        "--max-sessions",
        type=int,
        default=_DEFAULTS["max_sessions"],
        metavar="N",
        help="sessions at once (default: %(default)d)",
    )
    add(
        "--max-sessions-per-key",
        type=int,
        metavar="N",
        help="sessions of one key at once (default: with several keys three quarters, else all)",
    )
    add(
        "--max-sessions-per-secret",
        type=int,
        default=_DEFAULTS["max_sessions_per_secret"],
        metavar="N",
        help="sessions of one client secret at once (default: %(default)d)",
    )
    add(
        "--max-responses-per-minute",
        type=int,
        metavar="N",
        help="responses of one key (default: with keys 30 per session of the key, else no limit)",
    )
    add(
        "--max-connections-per-address",
        type=int,
        metavar="N",
        help="open connections of one address (default: twice --max-sessions, at least 1024)",
    )
    add(
        "--idle-session-s",
        type=float,
        default=_DEFAULTS["idle_session_s"],
        metavar="S",
        help="close a session whose client sends nothing, not even audio, for this time; 0: never "
        "(default: %(default)g)",
    )
    add(
        "--first-request-s",
        type=float,
        default=_DEFAULTS["first_request_s"],
        metavar="S",
        help="close a connection without complete headers after this time (default: %(default)g)",
    )
    add(
        "--drain-s",
        type=float,
        default=_DEFAULTS["drain_s"],
        metavar="S",
        help="time for running responses to end after SIGTERM or SIGINT; a second signal ends the "
        "server at once (default: %(default)g)",
    )


def _add_policy_arguments(flags: argparse._ActionsContainer) -> None:
    add = flags.add_argument
    add(
        "--live-policies",
        default="all",
        metavar="NAMES",
        help=f"{POLICIES_HELP} (default: %(default)s)",
    )
    add(
        "--admission-first-audio-ms",
        type=float,
        default=1000.0,
        metavar="MS",
        help="admit fewer sessions while more than one turn in ten takes longer to its first audio "
        "(default: %(default)g)",
    )
    add(
        "--speculate-ms",
        type=_speculate_ms,
        metavar="MS|auto|off",
        help="start a speculative turn after this much silence if the server has room, and "
        "truncate it if the user goes on (default: auto, 200 with the policy truncate)",
    )
    add(
        "--turn-prefill-s",
        type=float,
        default=_DEFAULTS["turn_prefill_s"],
        metavar="S",
        help="length of the pieces in which speech is prefilled while the user goes on speaking; "
        "shorter ones gain more and are less exact, 8 is the encoder's own window "
        "(default: %(default)g)",
    )


def _add_memory_arguments(flags: argparse._ActionsContainer) -> None:
    add = flags.add_argument
    add(
        "--retention-window",
        type=int,
        metavar="TOKENS",
        help="latest part of a conversation that a session keeps; 0: everything (default: "
        f"{_RETENTION.window_tokens}, at most half of what the model is good for)",
    )
    add(
        "--retention-sink",
        type=int,
        metavar="TOKENS",
        help="first part of it that a session keeps (default: the instructions)",
    )
    add(
        "--retention-slack",
        type=int,
        metavar="TOKENS",
        help="growth beyond both before the session is compacted (default: "
        f"{_RETENTION.slack_tokens}, at most a sixteenth of what the model is good for)",
    )
    add_storage_arguments(flags)
    add_lease_arguments(flags)


def _add_background_arguments(flags: argparse._ActionsContainer) -> None:
    add_flex_arguments(flags)


def _add_folder_arguments(flags: argparse._ActionsContainer) -> None:
    add = flags.add_argument
    add_cache_argument(flags)
    add("--log-dir", metavar="DIR", help="write stage logs to files in this folder, not to stderr")
    add_log_argument(flags)
    add(
        "--timeline-dir",
        metavar="DIR",
        help="write a timeline of every session to a file in this folder",
    )


def _add_stage_arguments(flags: argparse._ActionsContainer) -> None:
    add_stuck_argument(flags)
    add_key_arguments(flags)


def _speculate_ms(text: str) -> int | None:
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: positive milliseconds, auto or off")
    return int(text)


def add_storage_arguments(flags: argparse._ActionsContainer) -> None:
    flags.add_argument(
        "--session-storage",
        metavar="DIR",
        help="write KV that does not fit into a thinker's host memory to a file in this folder",
    )
    flags.add_argument(
        "--session-storage-gib",
        type=float,
        default=16.0,
        metavar="GIB",
        help="largest size of that file (default: %(default)g)",
    )


def add_weights_argument(flags: argparse._ActionsContainer) -> None:
    flags.add_argument(
        "--cpu-weights",
        choices=(OWN, INT8),
        default="",
        help="on a CPU, the thinker's weights: as in the checkpoint, or in 8 bits, several times "
        f"as fast (default: {INT8} for cascade, {OWN} for others)",
    )


def add_stuck_argument(flags: argparse._ActionsContainer) -> None:
    flags.add_argument(
        "--stuck-after-s",
        type=float,
        default=STUCK_AFTER_S,
        metavar="S",
        help="restart an engine that has work and completes no round of it for this time "
        "(default: %(default)g)",
    )


def add_log_argument(flags: argparse._ActionsContainer) -> None:
    flags.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=_DEFAULTS["log_format"],
        help="json: one object a line on stderr and in log files (default: %(default)s)",
    )
