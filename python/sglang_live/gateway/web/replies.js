// Audio of a response: how much was received, heard and discarded.

import { RATE_HZ } from "./audio.js";

const PEAK_SAMPLES = RATE_HZ / 50; // one bar of the picture, 20 ms

export class Reply {
  constructor(itemId) {
    this.itemId = itemId;
    this.received = 0; // samples
    this.rendered = 0; // samples that the device has received and plays a little later
    this.renderedAtMs = 0;
    this.latency = 0; // samples
    this.surely = 0; // samples that were heard when the last ones were rendered
    this.cutAt = null; // samples; null: it was not truncated
    this.peaks = []; // loudest sample of each 20 ms
    this.ackedMs = 0;
    this.known = 0; // samples that come again, and are here
  }

  // What was not heard comes again. Returns what was heard, in milliseconds.
  resume() {
    const heardMs = this.playedMs;
    this.known = this.received - (heardMs * RATE_HZ) / 1000;
    return heardMs;
  }

  // The rest of samples, some of which may be known.
  unknown(samples) {
    const n = Math.min(this.known, samples.length);
    this.known -= n;
    return n ? samples.subarray(n) : samples;
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

  // Number of samples that the loudspeaker has played at that time.
  heardAt(nowMs) {
    const since = ((nowMs - this.renderedAtMs) * RATE_HZ) / 1000;
    const out = Math.min(this.rendered, Math.floor(this.rendered - this.latency + since));
    return Math.max(this.surely, out); // the heard audio never shrinks, not even in a gap
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

  // Only one response is drawn; the peaks of earlier ones are deleted.
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
    if (now === this.drawn) return; // unchanged
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
    // The end of the heard audio stays visible, at most two thirds to the right.
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
