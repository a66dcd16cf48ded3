// The page: its buttons, and the call that they start and end.

import { KeyWanted, useKey, voices } from "./admission.js";
import { Call } from "./call.js";
import { $, element, show } from "./dom.js";
import { Wave } from "./replies.js";
import { Transcript } from "./transcript.js";

const BAD_LOSS = 0.05; // share of packets: what is left of words is often not understood
const CLIP = "/page/question.flac";
// Of the parts of an answer, as index.html has them.
const WORDS = { heard: "heard", buffered: "to come", discarded: "cut off" };

// Without https, browsers offer neither a microphone nor audio worklets.
const hasSound = window.isSecureContext;
const wave = new Wave($("wave"));
const transcript = new Transcript();
let call = null;
let wanted = async () => {}; // the action to repeat once a key is entered

function showCall() {
  $("talk").textContent = call ? "Hang up" : "Talk";
  $("talk").classList.toggle("primary", !call);
  $("talk").disabled = !call && !hasSound;
  $("clip").disabled = !hasSound;
  $("protocol").disabled = $("voice").disabled = Boolean(call);
  $("mute").disabled = !call?.isOpen || !hasSound;
  if (!call) $("mute").setAttribute("aria-pressed", "false");
}

async function begin() {
  const isLive = $("protocol").value === "live";
  const voice = $("voice").value;
  const fresh = (call = new Call({ hasSound, isLive, voice, transcript, wave, onOver }));
  wave.show(null);
  show("status", "connecting");
  showCall();
  await fresh.open();
  fresh.isOpen = true;
  if (call === fresh) showCall();
}

// Runs an action in the call, and starts a call if there is none. If the server needs a key, the
// action runs after the key is entered.
async function inCall(action) {
  wanted = action;
  const begun = call ? null : begin();
  const mine = call;
  try {
    await (begun ?? mine.opening);
  } catch (error) {
    if (call !== mine) return; // the user has hung up
    await hangUp();
    throw error;
  }
  if (call === mine && !mine.isOver) await action(mine);
}

async function hangUp() {
  const ended = call;
  call = null;
  show("status", "not connected");
  showCall();
  await ended?.close();
}

async function onOver(error) {
  wanted = call.audio?.stream ? talk : async () => {};
  await hangUp();
  tell(error);
}

function tell(error) {
  show("status", error.message);
  if (error instanceof KeyWanted) {
    $("key-form").hidden = false;
    $("key").focus();
  }
}

// Shows the reason if an element's action fails. target: the element, or its id.
function press(target, kind, action) {
  const source = typeof target === "string" ? $(target) : target;
  source.addEventListener(kind, async (event) => {
    event.preventDefault();
    try {
      await action();
    } catch (error) {
      tell(error);
    }
  });
}

async function talk({ audio }) {
  try {
    await audio.useMicrophone($("microphone").value);
    await offerMicrophones();
  } catch (error) {
    transcript.tell("page", "note", `${error.message}. Ask the recorded question, or type.`);
  }
}

// Browsers name the microphones once one is allowed.
async function offerMicrophones() {
  const devices = await navigator.mediaDevices.enumerateDevices();
  const found = devices.filter(({ kind, deviceId }) => kind === "audioinput" && deviceId);
  choose("microphone", found.map(({ deviceId, label }) => [deviceId, label || "a microphone"]));
}

async function offerVoices() {
  choose("voice", (await voices()).map((name) => [name, `voice: ${name}`]));
}

// Offers a choice, if it is one. options: [value, text] each.
function choose(id, options) {
  const before = $(id).value;
  $(id).replaceChildren(
    ...options.map(([value, text]) => Object.assign(element("option", "", text), { value })),
  );
  if (options.some(([value]) => value === before)) $(id).value = before;
  $(id).hidden = options.length < 2;
}

press("microphone", "change", async () => {
  if (call?.audio?.stream) await talk(call);
});

press("talk", "click", () => (call ? hangUp() : inCall(talk)));

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
    if ($("text").value) open.type($("text").value);
    $("text").value = "";
  }),
);

press("key-form", "submit", async () => {
  const key = $("key").value;
  $("key").value = "";
  $("key-form").hidden = true;
  await useKey(key);
  offerVoices().catch(tell);
  await inCall(wanted);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") call?.stop();
});

// A phone that has suspended the audio resumes it only after a touch or key.
for (const kind of ["pointerdown", "keydown", "visibilitychange"]) {
  document.addEventListener(kind, () => call?.audio?.wake());
}

// Says what the model is, and offers questions that it can answer.
async function introduce() {
  const { name, about, suggestions = [] } = await (await fetch("/page/model.json")).json();
  if (name) offerVoices().catch(tell); // else it needs a key
  if (about) show("about", about);
  $("about").hidden = !about;
  for (const question of suggestions) {
    const button = element("button", "suggestion", question);
    button.type = "button";
    const item = element("li", "", "");
    item.append(button);
    $("suggestions").append(item);
    press(button, "click", () => inCall((open) => open.type(question)));
  }
  $("try").hidden = !suggestions.length;
}

// What the user can do now.
function hint(isAnswering) {
  const session = call?.session;
  if (!call) return hasSound ? "Press Talk, allow the microphone, and speak." : "Type a question.";
  if (!session?.isUp) return "One moment: the connection is made.";
  if (call.gauges.lost > BAD_LOSS) return "The network loses sound: words may be missing on both sides.";
  if (session.speakingSinceMs !== null) return "Go on. The answer comes when you pause.";
  if (isAnswering && !call.isPlaying) return "One moment: the answer is on its way.";
  if (isAnswering) return call.audio?.stream ? "To interrupt, speak." : "Press Stop to end the answer.";
  if (!call.audio?.stream) return "Ask the recorded question, or type one.";
  if (call.audio.muted) return "You are muted: the other side hears nothing of you.";
  return "Speak, as on the phone. The answer comes when you pause.";
}

function frame() {
  wave.draw();
  const reply = wave.reply;
  const session = call?.session;
  const isAnswering = Boolean(session?.isUp && (session.isBusy || call.isPlaying));
  $("stop").disabled = !isAnswering;
  show("hint", hint(isAnswering));
  if (reply) {
    const parts = { heard: reply.heardS, buffered: reply.bufferedS, discarded: reply.discardedS };
    for (const [name, seconds] of Object.entries(parts)) show(name, `${seconds.toFixed(1)} s`);
    // What is to come over a call waits in the server.
    if (session?.line?.carriesSound) show("buffered", "–");
    else show("buffer", `${reply.bufferedS.toFixed(1)} s`);
    const told = Object.entries(parts).map(([name, s]) => `${WORDS[name]} ${Math.round(s)} s`).join(", ");
    if ($("wave").getAttribute("aria-label") !== told) $("wave").setAttribute("aria-label", told);
  }
  requestAnimationFrame(frame);
}

$("no-sound").hidden = hasSound;
showCall();
requestAnimationFrame(frame);
introduce().catch(tell);
