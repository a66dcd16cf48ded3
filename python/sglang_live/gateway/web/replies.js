// Answers as their listener has them: how much came, how much was heard, how much was thrown away.

import { RATE_HZ } from "./audio.js";

const PEAK_SAMPLES = RATE_HZ / 50; // one bar of the picture, 20 ms

export class Reply {
  constructor(itemId) {
    this.itemId = itemId;
    this.received = 0; // samples
    this.rendered = 0; // given to the device, which plays them a little later
    this.renderedAtMs = 0;
    this.latency = 0; // samples
    this.surely = 0; // heard when the last of them were rendered
    this.cutAt = null; // samples; null: it was not cut
    this.peaks = []; // loudest sample of every 20 ms
    this.ackedMs = 0;
  }

  take(samples) {
    for (let i = 0; i < samples.length; i++) {
      const bar = Math.floor((this.received + i) / PEAK_SAMPLES);
      this.peaks[bar] = Math.max(this.peaks[bar] ?? 0, Math.abs(samples[i]));
    }
    this.received += samples.length;
  }

  render(samples, latencyS, nowMs = performance.now()) {
    this.surely = this.heardAt(nowMs);
    this.rendered = Math.min(samples, this.received);
    this.renderedAtMs = nowMs;
    this.latency = latencyS * RATE_HZ;
  }

  // Samples that had left the loudspeaker then.
  heardAt(nowMs) {
    const since = ((nowMs - this.renderedAtMs) * RATE_HZ) / 1000;
    const out = Math.min(this.rendered, Math.floor(this.rendered - this.latency + since));
    return Math.max(this.surely, out); // what was heard does not become unheard in a gap
  }

  cut(nowMs = performance.now()) {
    this.cutAt ??= this.heardAt(nowMs);
  }

  get heard() {
    return this.cutAt ?? this.heardAt(performance.now());
  }

  get playedMs() {
    return Math.floor((1000 * this.heard) / RATE_HZ);
  }

  get heardS() {
    return this.heard / RATE_HZ;
  }

  get bufferedS() {
    return this.cutAt === null ? (this.received - this.heard) / RATE_HZ : 0;
  }

  get discardedS() {
    return this.cutAt === null ? 0 : (this.received - this.cutAt) / RATE_HZ;
  }
}

export class Wave {
  constructor(canvas) {
    this.canvas = canvas;
    this.reply = null;
    this.drawn = "";
  }

  // The picture is of one answer; a call of hours has many.
  show(reply) {
    if (this.reply) this.reply.peaks = [];
    this.reply = reply;
  }

  draw() {
    const { canvas, reply } = this;
    const scale = window.devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * scale);
    const height = Math.round(canvas.clientHeight * scale);
    const at = reply?.heard;
    const state = reply ? [reply.itemId, reply.peaks.length, at, reply.cutAt] : [];
    const now = [width, height, ...state].join();
    if (now === this.drawn) return; // nothing to see
    this.drawn = now;
    canvas.width = width;
    canvas.height = height;
    if (!reply) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name);
    const heard = colour("--heard");
    const buffered = colour("--buffered");
    const discarded = colour("--discarded");
    const paint = canvas.getContext("2d");
    const bar = 3 * scale;
    // The ear stays where it can be seen, two thirds to the right at most.
    const first = Math.max(0, at / PEAK_SAMPLES - (2 * width) / (3 * bar));
    for (let n = Math.floor(first); n < reply.peaks.length; n++) {
      const x = (n - first) * bar;
      if (x > width) break;
      const isHeard = n * PEAK_SAMPLES < at;
      paint.fillStyle = isHeard ? heard : reply.cutAt === null ? buffered : discarded;
      const tall = Math.max(scale, Math.sqrt(reply.peaks[n]) * 0.9 * height);
      paint.fillRect(x, (height - tall) / 2, bar - scale, tall);
    }
    paint.fillStyle = colour("--ink");
    paint.fillRect((at / PEAK_SAMPLES - first) * bar, 0, scale, height);
  }
}
