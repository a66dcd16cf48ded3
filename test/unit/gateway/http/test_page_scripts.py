"""Those of the page's scripts that run in Node, without a browser."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import sglang_live

WEB = Path(sglang_live.__file__).parent / "gateway" / "web"
# The globals of an audio thread, and a player on it. render(n) runs it for n blocks.
_AUDIO_THREAD = """
globalThis.currentTime = 0;
globalThis.AudioWorkletProcessor = class { port = { postMessage: (sent) => messages.push(sent) } };
const made = {};
globalThis.registerProcessor = (name, kind) => (made[name] = kind);
const messages = [];
await import("./worklets.js");
const player = new made.player();
const give = (data) => player.port.onmessage({ data });
const ramp = (n, from = 1) => Float32Array.from({ length: n }, (_, i) => from + i);
function render(n) {
  const out = [];
  for (let i = 0; i < n; i++) {
    const block = new Float32Array(128);
    player.process([], [[block]]);
    out.push(...block);
    currentTime += 128 / sampleRate;
  }
  return out;
}
"""


@pytest.fixture
def node(tmp_path):
    """Runs a script that imports the page's. Returns what it passes to `output`."""
    shutil.copytree(WEB, tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(script: str):
        output = "const output = (value) => console.log(JSON.stringify(value));\n"
        (tmp_path / "script.js").write_text(output + script)
        found = subprocess.run(
            ["node", "script.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    return run


def test_the_kv_of_sessions_between_turns_counts_as_on_the_device(node):
    def load(stage: str, what: str, value: float) -> str:
        labels = f'replica="0",stage="{stage}",what="{what}"'
        return f"sglang_live_stage_load{{{labels}}} {value}"

    text = "\n".join(
        [
            "sglang_live_gateway_sessions_open 3.0",
            load("thinker", "kv_tokens_used", 100.0),
            load("thinker", "policy_tokens_idle", 250.0),
            load("thinker", "policy_tokens_on_host", 40.0),
            load("thinker", "policy_tokens_in_storage", 7.0),
            load("talker", "kv_tokens_used", 999.0),
            load("talker", "policy_u1_s", 2.5),
        ]
    )
    found = node(f'import {{ parse }} from "./gauges.js"; output(parse({json.dumps(text)}));')
    assert found == {"sessions": 3, "kv": [350, 40, 7], "seconds": {"u0": 0, "u1": 2.5, "u2": 0}}


def test_audio_in_the_devices_buffer_does_not_count_as_heard(node):
    """One second is rendered in steps of 20 ms, on a device with 250 ms of latency."""
    heard = node(
        """
        import { Reply } from "./replies.js";
        const reply = new Reply("item");
        reply.take(new Float32Array(24000));
        const heard = [];
        for (let ms = 20; ms <= 1000; ms += 20) {
          reply.render(24 * ms, 0.25, ms);
          heard.push(reply.heardAt(ms) / 24);
        }
        const later = [1100, 9000].map((ms) => reply.heardAt(ms) / 24);
        output([heard[0], heard[12], heard[49], ...later]);
        """
    )
    assert heard == [0, 10, 750, 850, 1000]


def test_heard_audio_stays_heard_after_a_gap(node):
    heard = node(
        """
        import { Reply } from "./replies.js";
        const reply = new Reply("item");
        reply.take(new Float32Array(24000));
        reply.render(2400, 0.2, 100);
        const before = reply.heardAt(500); // all samples were heard, then silence
        reply.render(2880, 0.2, 520);
        reply.cut(520);
        output([before, reply.cutAt]);
        """
    )
    assert heard == [2400, 2400]


@pytest.mark.parametrize("rate_hz", [16000, 24000, 44100, 48000])
def test_after_a_truncation_the_next_response_is_played_from_its_first_sample(node, rate_hz):
    first, silent = node(
        f"globalThis.sampleRate = {rate_hz};{_AUDIO_THREAD}"
        """
        give({ name: "old", samples: ramp(4001, 100000) });
        render(3);
        give("cut");
        give({ name: "new", samples: ramp(480) });
        const out = render(20);
        output([out[0], out.filter((value) => !(value >= 0 && value < 1000)).length]);
        """
    )
    assert (first, silent) == (1, 0)


@pytest.mark.parametrize("rate_hz", [8000, 16000, 24000, 44100, 48000])
def test_a_whole_response_is_reported_when_the_next_one_follows_at_once(node, rate_hz):
    messages, odd = node(
        f"globalThis.sampleRate = {rate_hz};{_AUDIO_THREAD}"
        """
        for (const n of [1, 2, 480, 1]) give({ name: "one", samples: ramp(n) });
        give({ name: "two", samples: ramp(960) });
        const out = render(40);
        const last = (name) => messages.filter((message) => message.name === name).at(-1).samples;
        output([[last("one"), last("two")], out.filter((value) => !Number.isFinite(value)).length]);
        """
    )
    step = max(1, 24000 / rate_hz)
    assert messages == [pytest.approx(484, abs=step), pytest.approx(960, abs=step)]
    assert odd == 0
