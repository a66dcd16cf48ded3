// One session of the Realtime API: the user's input, and the handlers of the server's events. It goes
// on over another socket when the network loses its own.

import { RATE_HZ, fromBase64, toBase64 } from "./audio.js";
import { show } from "./dom.js";
import { Ended, SocketLine, openLine } from "./line.js";
import { Playback, TrackPlayback } from "./playback.js";

const ACK_EVERY_MS = 500;
const SILENCE_MS = 500; // silence_duration_ms of the server's turn detection
const CLOCK_BLOCKS = 50; // microphone blocks, the earliest of which sets the clock
const KEPT_EVENTS = 3000; // for a server that has not read what was on its way: a minute's
const PATH = "/v1/realtime";
const CALL = {
  offer: (sdp) => ({ path: `${PATH}/calls`, headers: { "Content-Type": "application/sdp" }, body: sdp }),
  answer: async (response) => ({ sdp: await response.text(), path: response.headers.get("Location") }),
};
const NOT_RESUMED = ["invalid_resume_token", "resume_too_late"]; // a new session follows

export class Session {
  // audio: null for text only. voice: "" for the model's first. onLost(Ended): an open session has
  // lost its line.
  constructor({ audio, transcript, wave, voice, onLost }) {
    this.audio = audio;
    this.transcript = transcript;
    this.wave = wave;
    this.voice = voice;
    this.onLost = onLost;
    this.isUp = false;
    this.isLost = false; // its line is; events wait
    this.token = null; // with which another socket takes over
    this.lastId = ""; // of the last event
    this.sent = []; // the newest events
    this.nSent = 0;
    this.saidSamples = 0;
    this.beganMs = []; // time of the microphone's first sample, computed from each recent block
    this.answering = null; // id of the running response
    this.spoken = null; // the newest item with audio
    this.isExpecting = false; // whether a response was requested or will follow the speech
    this.cancelling = 0; // cancels without a result: audio that arrives is older than they
    this.askedAtMs = null; // end of the user's turn, for the time to the first sound
    this.soundAtMs = null; // a first sound that came before the event of the turn's end
    this.speakingSinceMs = null; // start of the user's speech, by the server's clock
  }

  // Resolves when the server has applied the settings: earlier input would be lost.
  async open(access) {
    const served = this.served();
    served.catch(() => {}); // before it is awaited
    const take = (line) => this.use(line);
    await openLine({ audio: this.audio, access, call: CALL, path: PATH, take, ...this.handlers() });
    await served;
  }

  // Resolves when the session goes on. A final error: the server does not have it any more.
  resume(access) {
    const heardMs = this.playback.resume();
    const query = new URLSearchParams({ resume: this.token, after: this.lastId, heard_ms: heardMs });
    const served = this.served();
    this.line = new SocketLine(`${PATH}?${query}`, access, this.handlers());
    return served;
  }

  // Resolves when the server receives input.
  served() {
    this.isServed = false;
    return new Promise((done, fail) => {
      this.opened = () => {
        this.isServed = true;
        this.upSinceMs = performance.now();
        done();
      };
      this.failed = fail;
    });
  }

  refused(message) {
    this.failed(new Ended(message, true));
  }

  use(line) {
    const { audio, wave } = this;
    const send = (type, fields) => this.send(type, fields);
    this.line = line;
    this.playback = new (line.carriesSound ? TrackPlayback : Playback)({ audio, wave, send });
  }

  handlers() {
    const onEnd = (ended) => {
      this.failed(ended);
      this.isLost = true;
      if (this.isServed && this.isUp) this.onLost(ended);
    };
    return { onEvent: (event) => this.on(event), onEnd };
  }

  get wasOpen() {
    return Boolean(this.line?.wasOpen);
  }

  close() {
    this.isUp = false;
    clearInterval(this.acks);
    this.playback?.close();
    this.line?.close();
  }

  send(type, fields = {}) {
    const text = JSON.stringify({ type, ...fields });
    this.nSent += 1;
    this.sent.push(text);
    if (this.sent.length > KEPT_EVENTS) this.sent.shift();
    if (!this.isLost) this.line.send(text);
  }

  // --- input of the user ---

  said(samples) {
    if (!(this.line?.carriesSound ? this.line.isOpen : this.isUp)) return;
    this.saidSamples += samples.length;
    this.beganMs.push(performance.now() - (1000 * this.saidSamples) / RATE_HZ);
    if (this.beganMs.length > CLOCK_BLOCKS) this.beganMs.shift();
    if (this.line.carriesSound) return;
    this.send("input_audio_buffer.append", { audio: toBase64(samples) });
  }

  type(text) {
    this.stop();
    this.askedAtMs = performance.now();
    const content = [{ type: "input_text", text }];
    this.send("conversation.item.create", { item: { type: "message", role: "user", content } });
    this.send("response.create");
    this.isExpecting = true;
  }

  // Whether a response is running or about to.
  get isBusy() {
    return Boolean(this.answering || this.isExpecting);
  }

  get isPlaying() {
    return Boolean(this.playback?.isPlaying);
  }

  // Cancels the response and drops its buffered audio.
  stop() {
    if (!this.isUp) return;
    if (this.isBusy) {
      this.send("response.cancel");
      this.cancelling += 1;
      this.isExpecting = false;
    }
    this.playback.cut();
  }

  // --- playback ---

  rendered(itemId, samples) {
    if (this.playback.rendered(itemId, samples)) this.sounds();
  }

  // samples: 20 ms of the line's sound, float.
  heard(samples) {
    if (this.playback.heard(samples)) this.sounds();
  }

  // The first sound of a response.
  sounds() {
    this.soundAtMs = performance.now();
    this.showWait();
  }

  // A call's sound and its events come on ways of their own, in either order.
  showWait() {
    if (this.askedAtMs === null || this.soundAtMs === null || this.soundAtMs < this.askedAtMs) return;
    const waitedMs = this.soundAtMs - this.askedAtMs + 1000 * this.audio.latencyS;
    show("ttfp", `${Math.round(waitedMs)} ms`);
    this.askedAtMs = this.soundAtMs = null;
  }

  // --- events of the server ---

  on(event) {
    this.lastId = event.event_id;
    if (event.session) this.token = event.session.resumable?.token ?? null;
    const handler = HANDLERS[event.type];
    if (handler) handler.call(this, event);
  }

  showState() {
    const isListening = this.speakingSinceMs !== null;
    show("status", isListening ? "listening" : this.answering ? "responding" : "connected");
  }
}

const HANDLERS = {
  "session.created"({ session }) {
    const format = { type: "audio/pcm", rate: RATE_HZ };
    const transcription = { model: session.model };
    // Set by name, so that the server sends the events of voices over a response.
    const detection = { type: "server_vad", silence_duration_ms: SILENCE_MS, ignore_backchannels: true };
    const output = this.voice ? { format, voice: this.voice } : { format };
    const audio = { input: { format, turn_detection: detection, transcription }, output };
    const modalities = [this.audio ? "audio" : "text"];
    this.send("session.update", { session: { type: "realtime", output_modalities: modalities, audio, resumable: true } });
  },

  "session.updated"({ session }) {
    show("status", `connected to ${session.model}`);
    this.isUp = true;
    this.acks = setInterval(() => this.playback.ack(), ACK_EVERY_MS);
    this.opened();
  },

  "session.resumed"({ events_received: nRead }) {
    const nGone = this.nSent - this.sent.length;
    if (nRead < nGone) return this.refused("the connection was lost for too long");
    for (const text of this.sent.slice(nRead - nGone)) this.line.send(text);
    this.isLost = false;
    this.opened();
    this.showState();
  },

  "input_audio_buffer.voice_suspected"() {
    this.audio?.duck(true);
  },

  "input_audio_buffer.voice_ignored"(event) {
    this.audio?.duck(false);
    const lengthMs = event.audio_end_ms - event.audio_start_ms;
    this.transcript.note(this.spoken, `${event.decision} ignored (${lengthMs} ms, ${event.reason})`);
  },

  "input_audio_buffer.speech_started"(event) {
    this.playback.interrupted();
    this.audio?.duck(false);
    this.speakingSinceMs = event.audio_start_ms;
    this.isExpecting = true;
    this.showState();
  },

  "input_audio_buffer.speech_stopped"(event) {
    const seconds = (event.audio_end_ms - SILENCE_MS - this.speakingSinceMs) / 1000;
    this.transcript.spoke(event.item_id, Math.max(0, seconds));
    // A block may reach the page late, never early.
    this.askedAtMs = Math.min(...this.beganMs) + event.audio_end_ms - SILENCE_MS;
    this.showWait();
    this.speakingSinceMs = null;
    this.showState();
  },

  "conversation.item.added"({ item }) {
    const text = item.content?.find((part) => part.type === "input_text")?.text;
    if (item.role === "user" && text) this.transcript.say(item.id, "you", text);
  },

  "conversation.item.input_audio_transcription.delta"(event) {
    this.transcript.write(event.item_id, event.delta, false);
  },

  "conversation.item.input_audio_transcription.completed"(event) {
    this.transcript.write(event.item_id, event.transcript, true);
  },

  "conversation.item.input_audio_transcription.failed"(event) {
    this.transcript.note(event.item_id, `not transcribed: ${event.error.message}`);
  },

  "conversation.item.truncated"(event) {
    const heardS = event.audio_end_ms / 1000;
    this.transcript.note(event.item_id, `interrupted, heard ${heardS.toFixed(1)} s of it`);
  },

  "output_audio_buffer.started"(event) {
    this.playback.begin(event.response_id);
  },

  "output_audio_buffer.stopped"() {
    this.playback.end();
  },

  "output_audio_buffer.cleared"() {
    this.playback.end();
  },

  "response.created"({ response }) {
    this.answering = response.id;
    this.isExpecting = false;
    this.showState();
  },

  "response.output_audio.delta"(event) {
    this.playback.take(event.item_id, fromBase64(event.delta), !this.cancelling);
  },

  "response.output_audio_transcript.delta"(event) {
    this.spoken = event.item_id;
    this.transcript.say(event.item_id, "model", event.delta);
  },

  "response.output_text.delta"(event) {
    this.transcript.say(event.item_id, "model", event.delta);
  },

  "response.done"({ response }) {
    this.answering = null;
    const { reason, error } = response.status_details ?? {};
    if (response.status === "cancelled" && reason === "client_cancelled") this.cancelling -= 1;
    if (response.status === "failed") this.transcript.tell("server", "error", error?.message ?? "failed");
    this.showState();
  },

  error({ error }) {
    if (error.code === "response_cancel_not_active") this.cancelling -= 1; // the response had already ended
    else if (!this.isUp) this.refused(error.message);
    else if (!NOT_RESUMED.includes(error.code)) this.transcript.tell("server", "error", error.message);
  },
};
