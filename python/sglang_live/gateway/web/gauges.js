// The gauges on the page: the server's, read from /metrics, and the line's.

import { counts } from "./admission.js";

const EVERY_MS = 2000;
const CLASSES = ["u0", "u1", "u2"];
// Device, host, disk. KV of sessions between two turns counts as free and is not in `used`.
const TIERS = [
  ["kv_tokens_used", "policy_tokens_idle"],
  ["policy_tokens_on_host"],
  ["policy_tokens_in_storage"],
];

export class Gauges {
  // show(id, text): writes a text into an element of the page. lineNow(): the line, if there is one.
  constructor(show, lineNow) {
    this.show = show;
    this.lineNow = lineNow;
    this.lost = 0; // share of packets
    this.before = null;
  }

  start() {
    this.timers = [setInterval(() => this.read(), EVERY_MS), setInterval(() => this.test(), EVERY_MS)];
    this.read();
    this.test();
  }

  stop() {
    for (const timer of this.timers ?? []) clearInterval(timer);
  }

  async test() {
    const line = this.lineNow();
    if (!line?.isOpen) return;
    this.show("line", line.name);
    const found = await line.quality();
    this.lost = found?.lost ?? 0;
    const lost = found && `${(100 * this.lost).toFixed(1)} %, ${Math.round(found.jitterMs)} ms`;
    this.show("network", lost ?? "none");
    if (line.carriesSound) this.show("buffer", found.heldMs === null ? "–" : `${(found.heldMs / 1000).toFixed(2)} s`);
  }

  async read() {
    let text;
    try {
      const answer = await counts();
      if (answer.status === 401) return clearInterval(this.timers[0]); // /metrics needs a key
      if (!answer.ok) return;
      text = await answer.text();
    } catch {
      this.show("sessions", "unreachable");
      return;
    }
    const now = parse(text);
    this.show("sessions", String(now.sessions));
    this.show("urgency", urgencyOf(this.before, now));
    this.show("kv", memoryOf(now));
    this.before = now;
  }
}

// The values that are shown. Requests of thinker and talker are counted together.
export function parse(text) {
  const found = { sessions: 0, kv: [0, 0, 0], seconds: { u0: 0, u1: 0, u2: 0 } };
  for (const line of text.split("\n")) {
    if (line.startsWith("#")) continue;
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    if (line.startsWith("sglang_live_gateway_sessions_open ")) found.sessions = value;
    if (!line.startsWith("sglang_live_stage_load{")) continue;
    const what = /what="([^"]*)"/.exec(line)?.[1];
    const tier = TIERS.findIndex((names) => names.includes(what));
    if (tier >= 0 && line.includes('stage="thinker"')) found.kv[tier] += value;
    for (const name of CLASSES) {
      if (what === `policy_${name}_s`) found.seconds[name] += value;
    }
  }
  return found;
}

// Share of the requests' time in which they had no sound in reserve (U0, U1).
function urgencyOf(before, now) {
  if (!before) return "–";
  const spent = CLASSES.map((name) => now.seconds[name] - before.seconds[name]);
  const all = spent.reduce((sum, seconds) => sum + seconds, 0);
  return all > 0 ? `${Math.round((100 * (all - spent[2])) / all)} %` : "none";
}

// Tokens whose KV is held, and where copies of some are.
function memoryOf({ kv: [onDevice, onHost, onDisk] }) {
  const text = [`${onDevice} tokens`];
  if (onHost) text.push(`${onHost} on the host`);
  if (onDisk) text.push(`${onDisk} on disk`);
  return text.join(", ");
}
