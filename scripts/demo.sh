#!/usr/bin/env bash
# Set up, start the server with a language model, a recogniser and a voice, ask it a recorded
# question and a typed one, save the responses, stop the server. Without a network the built-in demo
# model takes their place.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/demo.sh [--serve] [--out FILE] [--port N] [--model-path PATH] [-- SERVER ARGS]

  --serve        keep the server running afterwards and print where it is
  --out          where the answers go (default: reply.wav)
  --port         default: a free one
  --model-path   default: cascade, which is downloaded (192 MB); demo without a network
TEXT
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
START_TIMEOUT_S=600
STOP_TIMEOUT_S=15
LOG_TAIL_LINES=40
OFFLINE=3 # exit status of sglang_live.model_source

serve=0
out=reply.wav
port=
model=
server_args=()

needs_value() {
    if (($# < 2)); then
        echo "demo.sh: $1 needs a value" >&2
        exit 2
    fi
}

while (($#)); do
    case $1 in
    --serve) serve=1 ;;
    --out)
        needs_value "$@"
        out=$2
        shift
        ;;
    --port)
        needs_value "$@"
        port=$2
        shift
        ;;
    --model-path)
        needs_value "$@"
        model=$2
        shift
        ;;
    --)
        shift
        server_args=("$@")
        break
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        echo "demo.sh: unknown option $1" >&2
        usage >&2
        exit 2
        ;;
    esac
    shift
done
if [[ ! -d $(dirname "$out") ]]; then
    echo "demo.sh: no such folder: $(dirname "$out")" >&2
    exit 2
fi
out=$(cd "$(dirname "$out")" && pwd)/$(basename "$out")

bash "$ROOT/scripts/setup.sh"
python=$ROOT/.venv/bin/python
cd "$ROOT"

if [[ -z $model ]]; then
    model=cascade
    fetched=0
    "$python" -m sglang_live.model_source --model-path cascade || fetched=$?
    if ((fetched == OFFLINE)); then
        echo "the models cannot be downloaded: using the built-in demo model, which knows thirty questions"
        model=demo
    elif ((fetched)); then
        exit "$fetched"
    fi
fi
if [[ $model == demo ]]; then
    typed="Tell me a joke."
else
    typed="Why is the sky blue?"
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/sglang_live_demo.XXXXXX")
log=$work/server.log
server_pid=

is_running() { [[ -n $server_pid ]] && kill -0 "$server_pid" 2>/dev/null; }

stop_server() {
    [[ -n $server_pid ]] || return 0
    local deadline=$((SECONDS + STOP_TIMEOUT_S))
    kill -TERM "$server_pid" 2>/dev/null || true
    while is_running && ((SECONDS < deadline)); do sleep 0.1; done
    # The server's process group; its stages have their own groups, and end with the server.
    kill -KILL -- "-$server_pid" 2>/dev/null || true
    wait "$server_pid" 2>/dev/null || true
    server_pid=
}

cleanup() {
    local status=$?
    stop_server
    if ((status != 0 && status != 130 && status != 143)) && [[ -s $log ]]; then
        echo "--- last lines of the server's log ($log)"
        tail -n "$LOG_TAIL_LINES" "$log"
    else
        rm -rf "$work"
    fi >&2
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
    echo "demo failed: $1" >&2
    exit 1
}

is_healthy() (
    exec 2>/dev/null
    exec 3<>"/dev/tcp/127.0.0.1/$port" || exit 1
    printf 'GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n' >&3
    read -r -t 5 status_line <&3 || exit 1
    [[ $status_line == *" 200 "* ]]
)

show_ready_stages() {
    # Show the new lines of the log.
    local total
    total=$(grep -c '^.*stage .* ready in ' "$log" || true)
    if ((total > shown)); then
        grep -o 'stage .* ready in .*' "$log" | tail -n +"$((shown + 1))" | sed 's/^/  /'
        shown=$total
    fi
}

if [[ -z $port ]]; then
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
fi

echo "starting the server with model '$model' on port $port"
from=$SECONDS
set -m # a process group of its own, which can be stopped as a whole
"$python" -u -m sglang_live.launch_server \
    --model-path "$model" --host 127.0.0.1 --port "$port" "${server_args[@]}" \
    </dev/null >"$log" 2>&1 &
server_pid=$!
set +m

shown=0
said=$SECONDS
until is_healthy; do
    is_running || fail "the server ended while starting"
    ((SECONDS - from < START_TIMEOUT_S)) || fail "the server was not ready after $START_TIMEOUT_S s"
    show_ready_stages
    if ((SECONDS - said >= 5)); then
        said=$SECONDS
        echo "  still starting, $((SECONDS - from)) s"
    fi
    sleep 0.25
done
show_ready_stages
echo "server ready after $((SECONDS - from)) s"

echo "asking a recorded question and a typed one"
"$python" -m sglang_live.client \
    --url "ws://127.0.0.1:$port/v1/realtime" --model "$(basename "$model")" \
    --wav python/sglang_live/assets/question.flac --text "$typed" --out "$out" --json \
    >"$work/client.out" 2>"$work/client.err" || {
    cat "$work/client.err" >&2
    fail "the conversation did not succeed"
}

"$python" - "$work/client.out" "$out" "What is the capital of France?" "$typed" <<'PYTHON'
import json
import sys
from pathlib import Path

from sglang_live.client import clip

result = json.loads(Path(sys.argv[1]).read_text().splitlines()[-1])
level = clip.measure_level(clip.load_pcm(Path(sys.argv[2])))
for question, turn in zip(sys.argv[3:], result["turns"], strict=True):
    print(f"question: {question}")
    print(f"answer:   {turn['transcript'].strip()}")
    print(f"          first audio {turn['ttfp_ms']:.0f} ms after the question's end", end="")
    detected_ms = turn["end_of_turn_ms"]
    print(f", of which {detected_ms:.0f} ms to detect it" if detected_ms else "")
print(f"answers {level.duration_s:.2f} s, peak {level.peak_dbfs:.1f} dBFS, rms {level.rms_dbfs:.1f} dBFS")
print(f"wrote {sys.argv[2]}")
PYTHON

if ((serve)); then
    echo "serving until Ctrl-C:"
    echo "  web page   http://127.0.0.1:$port/"
    echo "  realtime   ws://127.0.0.1:$port/v1/realtime?model=$(basename "$model")"
    wait "$server_pid" || fail "the server ended"
fi
