// One connection to /v1/live/sessions: sound without end both ways, and no turns. An answer begins
// with the first sound and ends with a pause.

import { RATE_HZ, fromBase64, toBase64 } from "./audio.js";
import { show } from "./dom.js";
import { Playback } from "./playback.js";
import { Ended, ON_PURPOSE } from "./session.js";

const PAUSE_PACKETS = 8; // of 100 ms
const HUSH = toBase64(new Int16Array(RATE_HZ / 50));
const CANNOT = "I cannot do that here. Nothing stands behind this page.";

// As Session.
export class LiveSession {
  constructor({ audio, transcript, wave, onLost }) {
    this.audio = audio;
    this.transcript = transcript;
    this.onLost = onLost;
    // The server knows what was heard: what it has sent.
    this.playback = new Playback({ audio, wave, send: () => {}, onCut: () => {} });
    this.isUp = false;
    this.isBusy = false; // an answer has begun, and no pause has followed
    this.nAnswers = 0;
    this.nSilent = 0; // packets since the last sound
    this.askedAtMs = null;
    this.speakingSinceMs = null; // the server does not say
  }

  open(protocols) {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    this.socket = new WebSocket(`${scheme}://${location.host}/v1/live/sessions`, protocols);
    return new Promise((done, fail) => {
      this.opened = done;
      this.refused = (message) => fail(new Ended(message, true));
      this.socket.addEventListener("message", ({ data }) => this.on(JSON.parse(data)));
      this.socket.addEventListener("open", () => {
        this.wasOpen = true;
        const format = { type: "audio/pcm", rate: RATE_HZ };
        this.send("session.start", { session: { model: "default", audio: { format } } });
      });
      this.socket.addEventListener("close", ({ code, reason }) => {
        const why = this.wasOpen ? reason || `connection lost (${code})` : "the server is unreachable";
        const ended = new Ended(why, ON_PURPOSE.includes(code));
        fail(ended);
        if (this.isUp) this.onLost(ended);
      });
    });
  }

  close() {
    this.isUp = false;
    this.playback.close();
    this.socket?.close();
  }

  send(type, fields = {}) {
    if (this.socket.readyState === WebSocket.OPEN) {
      this.socket.send(JSON.stringify({ type, ...fields }));
    }
  }

  said(samples) {
    if (this.isUp) this.send("session.input_audio.append", { audio: toBase64(samples) });
  }

  // There are no written turns: it speaks about the text.
  type(text) {
    this.askedAtMs = performance.now();
    this.transcript.tell("you", "note", text);
    this.comment(text, null);
  }

  comment(content, delegationId) {
    this.send("session.commentary.append", { content, delegation_id: delegationId });
  }

  // No event cancels speech, but a recording takes its place.
  stop() {
    if (!this.isUp || !this.isBusy) return;
    this.send("session.output_audio.fixture.play", { audio: HUSH });
    this.playback.cut();
  }

  rendered(itemId, samples) {
    const isFirst = this.playback.rendered(itemId, samples);
    if (!isFirst || this.askedAtMs === null) return;
    show("ttfp", `${Math.round(performance.now() - this.askedAtMs + 1000 * this.audio.latencyS)} ms`);
    this.askedAtMs = null;
  }

  hear(samples) {
    this.nSilent = samples.some((sample) => sample) ? 0 : this.nSilent + 1;
    const isBusy = this.nSilent < PAUSE_PACKETS && (this.isBusy || this.nSilent === 0);
    if (isBusy && !this.isBusy) this.nAnswers += 1;
    if (isBusy && this.audio) this.playback.take(`answer ${this.nAnswers}`, samples, true);
    if (isBusy === this.isBusy) return;
    this.isBusy = isBusy;
    this.showState();
  }

  on(event) {
    const handler = HANDLERS[event.type];
    if (handler) handler.call(this, event);
  }

  showState() {
    show("status", this.isBusy ? "responding" : "connected");
  }
}

const HANDLERS = {
  "session.started"({ session }) {
    show("status", `connected to ${session.model}`);
    this.isUp = true;
    this.upSinceMs = performance.now();
    this.opened();
  },

  "session.output_audio.delta"({ delta }) {
    this.hear(fromBase64(delta));
  },

  "session.input_transcript.delta"({ delta }) {
    this.transcript.say(`said before answer ${this.nAnswers + 1}`, "you", delta);
  },

  "session.output_transcript.delta"({ delta }) {
    this.transcript.say(`answer ${this.nAnswers}`, "model", delta);
  },

  "session.delegation.created"({ delegation }) {
    this.transcript.tell("page", "note", "The model has delegated this to the page.");
    this.comment(CANNOT, delegation.id);
  },

  error({ error }) {
    if (this.isUp) this.transcript.tell("server", "error", error.message);
    else this.refused(error.message);
  },
};
