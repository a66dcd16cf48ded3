// Playback of the responses of one connection.

import { Reply } from "./replies.js";

export class Playback {
  // send(type, fields): sends an event to the server. onCut(reply): the reply was truncated.
  constructor({ audio, wave, send, onCut }) {
    this.audio = audio;
    this.wave = wave;
    this.send = send;
    this.onCut = onCut;
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
    this.onCut(reply);
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
