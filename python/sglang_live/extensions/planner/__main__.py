"""Plan the hardware of a load of talking users, by simulation with the server's own policies.

python -m sglang_live.extensions.planner --gpu h200 --gpus 8 --talk-s 5 --response-s 7 --price 3
"""

import json
import sys

from sglang_live.environment import start_in_utf8_mode
from sglang_live.errors import LiveError
from sglang_live.extensions.planner import report
from sglang_live.extensions.planner.calls import document as calls_document
from sglang_live.extensions.planner.calls import plan_calls
from sglang_live.extensions.planner.calls import text as calls_text
from sglang_live.extensions.planner.config import CallsConfig, parse_args
from sglang_live.extensions.planner.search import plan


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    if isinstance(config, CallsConfig):
        calls = plan_calls(config)
        if config.json:
            print(json.dumps(calls_document(config, calls), indent=1))
        else:
            print(calls_text(config, calls))
        return 0
    try:
        found = plan(config, lambda line: print(line, file=sys.stderr, flush=True))
    except LiveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report.document(found), indent=1) if config.json else report.text(found))
    return 0


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
