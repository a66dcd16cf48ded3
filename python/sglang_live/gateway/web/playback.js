// Playback of the responses of one connection: of audio that comes in events, or on a track.

import { Reply } from "./replies.js";

const FLOOR = 0.003;
const TAIL_BLOCKS = 10; // of 20 ms

export class Playback {
  // send(type, fields): sends an event to the server.
  constructor({ audio, wave, send }) {
    this.audio = audio;
    this.wave = wave;
    this.send = send;
    this.replies = new Map(); // by item
  }

  take(itemId, samples, isWanted) {
    let reply = this.replies.get(itemId);
    if (!reply) {
      reply = new Reply(itemId);
      this.wave.show(reply);
      this.replies.set(itemId, reply);
    }
    samples = reply.unknown(samples);
    if (!samples.length) return;
    reply.take(samples);
    if (!isWanted) this.drop(reply);
    if (reply.cutAt === null) this.audio.play(itemId, samples);
  }

  get isPlaying() {
    return this.replies.get(this.last)?.bufferedS > 0;
  }

  // The newest item with audio.
  get last() {
    return [...this.replies.keys()].at(-1);
  }

  // samples: number of samples of the item that the device has received. Returns whether they are
  // its first ones.
  rendered(itemId, samples) {
    const reply = this.replies.get(itemId);
    if (!reply || reply.cutAt !== null) return false;
    const isFirst = reply.rendered === 0;
    reply.render(samples, this.audio.latencyS);
    return isFirst;
  }

  ack() {
    for (const reply of this.replies.values()) {
      if (reply.cutAt !== null || reply.playedMs === reply.ackedMs) continue;
      reply.ackedMs = reply.playedMs;
      this.send("playback.ack", { item_id: reply.itemId, audio_end_ms: reply.ackedMs });
    }
  }

  // Drops all audio that was not heard yet, and reports it to the server.
  cut() {
    this.audio?.cut();
    for (const reply of this.replies.values()) {
      if (reply.rendered < reply.received) this.drop(reply);
    }
  }

  drop(reply) {
    if (reply.cutAt !== null) return;
    reply.cut();
    const at = { item_id: reply.itemId, content_index: 0, audio_end_ms: reply.playedMs };
    this.send("conversation.item.truncate", at);
  }

  // The user has interrupted: the server does not know what was played.
  interrupted() {
    this.cut();
  }

  // The server sends again what was not heard of the newest item. Returns what was, in milliseconds.
  resume() {
    const reply = this.replies.get(this.last);
    return reply ? reply.resume() : 0;
  }

  // Drops the audio without a report: the connection is closed.
  close() {
    this.audio?.cut();
    for (const reply of this.replies.values()) {
      if (reply.rendered < reply.received) reply.cut();
    }
  }
}

// The browser plays the track; the server says when a response begins and ends in it, and truncates
// what it has not sent.
export class TrackPlayback {
  constructor({ audio, wave, send }) {
    this.audio = audio;
    this.wave = wave;
    this.send = send;
    this.isPlaying = false;
    this.nTail = 0;
  }

  begin(name) {
    this.reply = new Reply(name);
    this.wave.show(this.reply);
    this.isPlaying = true;
  }

  // 20 ms of the track. Returns whether a response is first heard in them.
  heard(samples) {
    if (!this.isPlaying && this.nTail-- <= 0) return false;
    if ((!this.isPlaying || !this.reply.received) && !isLoud(samples)) return false;
    const isFirst = !this.reply.received;
    this.reply.take(samples);
    this.reply.render(this.reply.received, 0);
    return isFirst;
  }

  // The rest of it is still in the browser.
  end() {
    this.isPlaying = false;
    this.nTail = TAIL_BLOCKS;
  }

  // The server reports what was heard by itself.
  ack() {}

  interrupted() {}

  cut() {
    if (this.isPlaying) this.send("output_audio_buffer.clear");
  }

  close() {
    this.end();
  }
}

// Above what a codec makes of silence. samples: float.
export function isLoud(samples) {
  return samples.some((sample) => Math.abs(sample) > FLOOR);
}
