// Answers as their listener has them: how much came, how much was heard, how much was thrown away.

import { RATE_HZ } from "./audio.js";

const PEAK_SAMPLES = RATE_HZ / 50; // one bar of the picture, 20 ms

export class Reply {
  constructor(itemId) {
    this.itemId = itemId;
    this.received = 0; // samples
    this.played = 0;
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

  cut() {
    this.cutAt ??= this.played;
  }

  get playedMs() {
    return Math.floor((1000 * this.played) / RATE_HZ);
  }

  get heardS() {
    return (this.cutAt ?? this.played) / RATE_HZ;
  }

  get bufferedS() {
    return this.cutAt === null ? (this.received - this.played) / RATE_HZ : 0;
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
    const state = reply ? [reply.itemId, reply.peaks.length, reply.played, reply.cutAt] : [];
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
    const at = reply.cutAt ?? reply.played;
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
