// The page: one call to /v1/realtime, and what becomes of it.

import { CallAudio, RATE_HZ, fromBase64, toBase64 } from "./audio.js";
import { Gauges } from "./gauges.js";
import { Reply, Wave } from "./replies.js";

const ACK_EVERY_MS = 500;
const SILENCE_MS = 500; // of the server's turn detection, as the page asks for it
const CLOCK_BLOCKS = 50; // of the microphone, by the earliest of which its clock is set
const CLIP = "/page/question.flac";

const $ = (id) => document.getElementById(id);
const show = (id, text) => {
  if ($(id).textContent !== text) $(id).textContent = text;
};
const wave = new Wave($("wave"));
let key = null;
let call = null;
let wanted = () => {}; // what was asked for when the server wanted a key first

class Call {
  constructor() {
    this.audio = new CallAudio({
      onBlock: (samples) => this.said(samples),
      onPlayed: (itemId, samples) => this.heard(itemId, samples),
    });
    this.replies = new Map(); // by item
    this.lines = new Map(); // of the transcript, by item
    this.gauges = new Gauges(show);
    this.saidSamples = 0;
    this.beganMs = []; // when the microphone's first sample was heard, by each of the last blocks
    this.ready = false;
    this.answering = null; // response
    this.unwanted = new Set(); // of responses
    this.askedAtMs = null; // when the caller had finished, for the time to the first sound
    this.speakingSinceMs = null;
  }

  async open() {
    await this.audio.open();
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const protocols = key ? ["realtime", `openai-insecure-api-key.${key}`] : ["realtime"];
    this.socket = new WebSocket(`${scheme}://${location.host}/v1/realtime`, protocols);
    this.socket.addEventListener("message", ({ data }) => this.on(JSON.parse(data)));
    this.socket.addEventListener("close", ({ code, reason }) => {
      if (this.isUp) hangUp(reason || (code === 1000 ? "not connected" : `connection lost (${code})`));
    });
    if (this.isOver) return this.socket.close();
    await new Promise((done, fail) => {
      this.socket.addEventListener("open", done);
      this.socket.addEventListener("close", done);
      this.socket.addEventListener("error", () => fail(new Error("the server does not answer")));
    });
    if (this.isOver) return;
    this.isUp = true;
    this.gauges.start();
    this.acks = setInterval(() => this.ack(), ACK_EVERY_MS);
  }

  async close() {
    this.isUp = false;
    this.isOver = true;
    for (const reply of this.replies.values()) reply.cut();
    clearInterval(this.acks);
    this.gauges.stop();
    this.socket?.close();
    await this.audio.close();
  }

  send(type, fields = {}) {
    if (this.socket.readyState === WebSocket.OPEN) {
      this.socket.send(JSON.stringify({ type, ...fields }));
    }
  }

  // --- what the caller says ---

  said(samples) {
    if (!this.ready) return;
    this.saidSamples += samples.length;
    this.beganMs.push(performance.now() - (1000 * this.saidSamples) / RATE_HZ);
    if (this.beganMs.length > CLOCK_BLOCKS) this.beganMs.shift();
    this.send("input_audio_buffer.append", { audio: toBase64(samples) });
  }

  type(text) {
    this.stop();
    this.askedAtMs = performance.now();
    const content = [{ type: "input_text", text }];
    this.send("conversation.item.create", { item: { type: "message", role: "user", content } });
    this.send("response.create");
  }

  // What is being said is not wanted any more.
  stop() {
    if (this.answering) {
      this.send("response.cancel");
      this.unwanted.add(this.answering);
    }
    this.cut();
  }

  // --- what the caller hears ---

  heard(itemId, samples) {
    const reply = this.replies.get(itemId);
    if (!reply || reply.cutAt !== null) return;
    if (!reply.played && this.askedAtMs !== null) {
      const latencyMs = (this.audio.context.outputLatency || 0) * 1000;
      show("ttfp", `${Math.round(performance.now() - this.askedAtMs + latencyMs)} ms`);
      this.askedAtMs = null;
    }
    reply.played = samples;
  }

  ack() {
    const reply = wave.reply;
    if (!reply || reply.cutAt !== null || reply.playedMs === reply.ackedMs) return;
    reply.ackedMs = reply.playedMs;
    this.send("playback.ack", { item_id: reply.itemId, audio_end_ms: reply.playedMs });
  }

  // Drop what was not heard yet, and say so.
  cut() {
    this.audio.cut();
    for (const reply of this.replies.values()) {
      if (reply.cutAt !== null || reply.played >= reply.received) continue;
      reply.cut();
      const at = { item_id: reply.itemId, content_index: 0, audio_end_ms: reply.playedMs };
      this.send("conversation.item.truncate", at);
      const note = `heard ${reply.heardS.toFixed(1)} s of it`;
      this.lines.get(reply.itemId)?.append(element("span", "note", ` — interrupted, ${note}`));
    }
  }

  // --- what the server says ---

  on(event) {
    const handler = HANDLERS[event.type];
    if (handler) handler.call(this, event);
  }

  line(itemId, who) {
    if (!this.lines.has(itemId)) this.lines.set(itemId, addLine(who));
    return this.lines.get(itemId);
  }
}

const HANDLERS = {
  "session.created"(event) {
    const format = { type: "audio/pcm", rate: RATE_HZ };
    const transcription = { model: event.session.model };
    const detection = { type: "server_vad", silence_duration_ms: SILENCE_MS };
    this.send("session.update", {
      session: {
        type: "realtime",
        output_modalities: ["audio"],
        audio: { input: { format, turn_detection: detection, transcription }, output: { format } },
      },
    });
    show("status", `connected to ${event.session.model}`);
  },

  "session.updated"() {
    this.ready = true;
  },

  "input_audio_buffer.speech_started"(event) {
    this.cut();
    this.speakingSinceMs = event.audio_start_ms;
    show("status", "listening");
  },

  "input_audio_buffer.speech_stopped"(event) {
    const seconds = (event.audio_end_ms - SILENCE_MS - this.speakingSinceMs) / 1000;
    this.line(event.item_id, "you").append(`spoke for ${Math.max(0, seconds).toFixed(1)} s`);
    // A block may come late to the page, never early.
    this.askedAtMs = Math.min(...this.beganMs) + event.audio_end_ms - SILENCE_MS;
  },

  "conversation.item.added"({ item }) {
    const text = item.content?.find((part) => part.type === "input_text")?.text;
    if (item.role === "user" && text) this.line(item.id, "you").append(text);
  },

  "conversation.item.input_audio_transcription.completed"(event) {
    this.line(event.item_id, "you").append(`: ${event.transcript}`);
  },

  "response.created"({ response }) {
    this.answering = response.id;
    $("stop").disabled = false;
    show("status", "answering");
  },

  "response.output_audio.delta"(event) {
    let reply = this.replies.get(event.item_id);
    if (!reply) {
      reply = new Reply(event.item_id);
      wave.show(reply);
      this.replies.set(event.item_id, reply);
      if (this.unwanted.has(event.response_id)) reply.cut(); // it was under way already
    }
    const samples = fromBase64(event.delta);
    reply.take(samples);
    if (reply.cutAt === null) this.audio.play(event.item_id, samples);
  },

  "response.output_audio_transcript.delta"(event) {
    this.line(event.item_id, "model").append(event.delta);
    $("transcript").scrollTop = $("transcript").scrollHeight;
  },

  "response.done"({ response }) {
    this.answering = null;
    this.unwanted.delete(response.id);
    show("status", "connected");
    const error = response.status_details?.error;
    if (response.status === "failed") addLine("server").append(element("span", "error", error?.message ?? "failed"));
  },

  error({ error }) {
    addLine("server").append(element("span", "error", error.message));
  },
};

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function addLine(who) {
  const line = document.createElement("li");
  line.append(element("span", "who", who));
  $("transcript").append(line);
  $("transcript").scrollTop = $("transcript").scrollHeight;
  return line;
}

// --- the call as a whole ---

async function connect() {
  if (call) return;
  const fresh = (call = new Call());
  wave.show(null);
  show("status", "connecting");
  $("talk").textContent = "Hang up";
  try {
    if (!(await keyFits())) {
      await hangUp($("status").textContent);
      return;
    }
    if (call !== fresh) return;
    await fresh.open();
    if (call !== fresh) return;
    $("talk").classList.remove("primary");
    $("mute").disabled = false;
  } catch (error) {
    if (call !== fresh) return; // hung up meanwhile
    await hangUp(error.message);
    throw error;
  }
}

// In a call, which is opened for it if there is none. With a key first, where the server wants one.
async function inCall(action) {
  wanted = action;
  await connect();
  if (!call?.isUp) return;
  wanted = () => {};
  await action(call);
}

async function keyFits() {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch("/v1/models", { headers });
  $("key-form").hidden = answer.status !== 401;
  if (answer.status === 401) {
    show("status", key ? "the server does not know this key" : "a key, please");
    $("key").focus();
  }
  return answer.status !== 401;
}

async function hangUp(why = "not connected") {
  const ended = call;
  call = null;
  show("status", why);
  $("talk").textContent = "Talk";
  $("talk").classList.add("primary");
  $("mute").disabled = true;
  $("mute").setAttribute("aria-pressed", "false");
  $("stop").disabled = true;
  await ended?.close();
}

// Buttons may fail for reasons that their user should read.
function press(id, kind, action) {
  $(id).addEventListener(kind, async (event) => {
    event.preventDefault();
    try {
      await action();
    } catch (error) {
      show("status", error.message);
    }
  });
}

press("talk", "click", async () => {
  if (call) return hangUp();
  await inCall(async ({ audio }) => {
    try {
      await audio.useMicrophone();
    } catch (error) {
      addLine("page").append(element("span", "note", `no microphone (${error.message}): ask the recorded question, or type`));
    }
  });
});

press("mute", "click", () => {
  call.audio.muted = !call.audio.muted;
  $("mute").setAttribute("aria-pressed", String(call.audio.muted));
});

press("clip", "click", () =>
  inCall(async ({ audio }) => {
    $("clip").disabled = true;
    try {
      await audio.say(CLIP);
    } finally {
      $("clip").disabled = false;
    }
  }),
);

press("stop", "click", () => call?.stop());

press("text-form", "submit", () =>
  inCall((open) => {
    open.type($("text").value);
    $("text").value = "";
  }),
);

press("key-form", "submit", async () => {
  key = $("key").value;
  $("key-form").hidden = true;
  await inCall(wanted);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") call?.stop();
});

function frame() {
  wave.draw();
  const reply = wave.reply;
  if (reply) {
    const parts = { heard: reply.heardS, buffered: reply.bufferedS, discarded: reply.discardedS };
    for (const [name, seconds] of Object.entries(parts)) show(name, `${seconds.toFixed(1)} s`);
    show("buffer", `${reply.bufferedS.toFixed(1)} s`);
    const told = Object.entries(parts).map(([name, s]) => `${name} ${Math.round(s)} s`).join(", ");
    if ($("wave").getAttribute("aria-label") !== told) $("wave").setAttribute("aria-label", told);
  }
  requestAnimationFrame(frame);
}
requestAnimationFrame(frame);
