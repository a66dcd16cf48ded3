// One session of the Live API: sound without end both ways, and no turns. An answer begins with the
// first sound and ends with a pause.

import { RATE_HZ, fromBase64, toBase64 } from "./audio.js";
import { show } from "./dom.js";
import { Ended, openLine } from "./line.js";
import { Playback, TrackPlayback, isLoud } from "./playback.js";

const PATH = "/v1/live/sessions";
const PAUSE_S = 0.8;
const HUSH = toBase64(new Int16Array(RATE_HZ / 50));
const CANNOT = "I cannot do that here. Nothing stands behind this page.";

// As Session.
export class LiveSession {
  constructor({ audio, transcript, wave, voice, onLost }) {
    this.audio = audio;
    this.transcript = transcript;
    this.wave = wave;
    this.settings = { model: "default", ...(voice && { audio: { output: { voice } } }) };
    this.onLost = onLost;
    this.isUp = false;
    this.isBusy = false; // an answer has begun, and no pause has followed
    this.nAnswers = 0;
    this.silentS = 0; // since the last sound
    this.askedAtMs = null;
    this.speakingSinceMs = null; // the server does not say
  }

  async open(access) {
    const served = new Promise((done, fail) => Object.assign(this, { opened: done, failed: fail }));
    served.catch(() => {}); // before it is awaited
    const call = {
      offer: (sdp) => ({
        path: PATH,
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ session: this.settings, transport: { type: "webrtc", sdp } }),
      }),
      answer: async (response) => {
        const { session, transport } = await response.json();
        return { sdp: transport.sdp, path: `${PATH}/${session.id}` };
      },
    };
    const onOpen = () => {
      const format = { type: "audio/pcm", rate: RATE_HZ };
      const audio = { ...this.settings.audio, format };
      this.send("session.start", { session: { ...this.settings, audio } });
    };
    const onEnd = (ended) => {
      this.failed(ended);
      if (this.isUp) this.onLost(ended);
    };
    const onEvent = (event) => this.on(event);
    const take = (line) => this.use(line);
    await openLine({ audio: this.audio, access, call, path: PATH, take, onOpen, onEvent, onEnd });
    await served;
  }

  // The server knows what was heard: what it has sent.
  use(line) {
    const { audio, wave } = this;
    this.line = line;
    this.playback = new (line.carriesSound ? TrackPlayback : Playback)({ audio, wave, send: () => {} });
  }

  get wasOpen() {
    return Boolean(this.line?.wasOpen);
  }

  close() {
    this.isUp = false;
    this.playback?.close();
    this.line?.close();
  }

  send(type, fields = {}) {
    this.line.send(JSON.stringify({ type, ...fields }));
  }

  said(samples) {
    if (!this.isUp || this.line.carriesSound) return;
    this.send("session.input_audio.append", { audio: toBase64(samples) });
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
    if (this.playback.rendered(itemId, samples)) this.sounds();
  }

  // samples: 20 ms of the line's sound, float.
  heard(samples) {
    this.follow(samples, isLoud(samples));
    if (this.playback.heard(samples)) this.sounds();
  }

  get isPlaying() {
    return this.isBusy;
  }

  // The first sound of an answer.
  sounds() {
    if (this.askedAtMs === null) return;
    show("ttfp", `${Math.round(performance.now() - this.askedAtMs + 1000 * this.audio.latencyS)} ms`);
    this.askedAtMs = null;
  }

  // Finds where answers begin and end.
  follow(samples, isSound) {
    this.silentS = isSound ? 0 : this.silentS + samples.length / RATE_HZ;
    const isBusy = this.silentS < PAUSE_S && (this.isBusy || isSound);
    if (isBusy === this.isBusy) return;
    this.isBusy = isBusy;
    if (isBusy) this.nAnswers += 1;
    if (this.line.carriesSound && isBusy) this.playback.begin(this.answer);
    else if (this.line.carriesSound) this.playback.end();
    this.showState();
  }

  get answer() {
    return `answer ${this.nAnswers}`;
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
    const samples = fromBase64(delta);
    this.follow(samples, samples.some((sample) => sample));
    if (this.isBusy && this.audio) this.playback.take(this.answer, samples, true);
  },

  "session.input_transcript.delta"({ delta }) {
    this.transcript.say(`said before answer ${this.nAnswers + 1}`, "you", delta);
  },

  "session.output_transcript.delta"({ delta }) {
    // On a track, words may come before the browser plays them.
    if (this.line.carriesSound) this.follow([], true);
    this.transcript.say(this.answer, "model", delta);
  },

  "session.delegation.created"({ delegation }) {
    this.transcript.tell("page", "note", "The model has delegated this to the page.");
    this.comment(CANNOT, delegation.id);
  },

  error({ error }) {
    if (this.isUp) this.transcript.tell("server", "error", error.message);
    else this.failed(new Ended(error.message, true));
  },
};
