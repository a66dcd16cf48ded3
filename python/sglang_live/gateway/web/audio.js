// The audio of a call: input from microphone or recording, output of responses. All at 24 kHz.

export const RATE_HZ = 24000;
const DUCKED = 0.15; // -16 dB
const FADE_S = 0.02;

const NO_MICROPHONE = {
  NotAllowedError: "the browser does not give this page the microphone: allow it in the page's settings",
  NotFoundError: "there is no microphone",
  NotReadableError: "another program has the microphone",
};

export class CallAudio {
  // onBlock(Int16Array): 20 ms of input.
  // onPlayed(name, samples): number of samples of an item that the device has received.
  // onSound(isOn): the audio device was suspended or has resumed.
  // onSilence(): the microphone was disconnected.
  constructor({ onBlock, onPlayed, onSound, onSilence }) {
    this.onBlock = onBlock;
    this.onPlayed = onPlayed;
    this.onSound = onSound;
    this.onSilence = onSilence;
    this.isOn = undefined; // before open()
    this.closed = new Promise((done) => (this.ended = done));
  }

  async open() {
    this.context = new AudioContext({ latencyHint: "interactive" });
    await this.context.audioWorklet.addModule("/page/worklets.js");
    this.capture = new AudioWorkletNode(this.context, "capture", { numberOfOutputs: 1 });
    this.capture.port.onmessage = ({ data }) => this.onBlock(data);
    // Inaudible, but browsers run only nodes that are connected to the destination.
    this.silence = new GainNode(this.context, { gain: 0 });
    this.capture.connect(this.silence).connect(this.context.destination);
    // A gain of the microphone alone, so that mute does not silence recordings.
    this.microphone = new GainNode(this.context);
    this.microphone.connect(this.capture);
    this.player = new AudioWorkletNode(this.context, "player", { outputChannelCount: [1] });
    this.player.port.onmessage = ({ data }) => this.onPlayed(data.name, data.samples);
    this.loudness = new GainNode(this.context);
    this.player.connect(this.loudness).connect(this.context.destination);
    await this.context.resume();
    this.isOn = true;
    this.context.addEventListener("statechange", () => this.wake());
  }

  // Phones suspend the audio for a phone call, and resume it at the latest after a touch.
  async wake() {
    const state = this.context?.state;
    if (this.isOn === undefined || state === "closed") return;
    if (this.isOn !== (state === "running")) this.onSound((this.isOn = !this.isOn));
    if (!this.isOn) await this.context.resume().catch(() => this.onSound(false)); // not yet
  }

  get muted() {
    return this.microphone.gain.value === 0;
  }

  set muted(isMuted) {
    this.microphone.gain.value = isMuted ? 0 : 1;
  }

  get latencyS() {
    return this.context.outputLatency || this.context.baseLatency || 0;
  }

  async useMicrophone() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({
        audio: { echoCancellation: true, noiseSuppression: true, autoGainControl: true },
      });
    } catch (error) {
      throw new Error(NO_MICROPHONE[error.name] ?? `no microphone: ${error.message}`);
    }
    // The user may hang up while the browser requests the permission.
    if (this.context.state === "closed") return release(stream);
    this.stream = stream;
    for (const track of stream.getTracks()) track.addEventListener("ended", () => this.onSilence());
    this.context.createMediaStreamSource(stream).connect(this.microphone);
  }

  // Plays a recording into the input. Resolves at its end or the end of the call.
  async say(url) {
    this.recording ??= await this.context.decodeAudioData(await (await fetch(url)).arrayBuffer());
    const source = new AudioBufferSourceNode(this.context, { buffer: this.recording });
    const ended = new Promise((done) => source.addEventListener("ended", done));
    source.connect(this.capture);
    source.start();
    await Promise.race([ended, this.closed]);
  }

  play(name, samples) {
    this.player.port.postMessage({ name, samples }, [samples.buffer]);
  }

  cut() {
    this.player.port.postMessage("cut");
  }

  // While it is not known whether a voice interrupts: the response is softer, and goes on.
  duck(isSoft) {
    this.loudness.gain.setTargetAtTime(isSoft ? DUCKED : 1, this.context.currentTime, FADE_S);
  }

  async close() {
    release(this.stream);
    this.ended();
    if (this.context && this.context.state !== "closed") await this.context.close();
  }
}

function release(stream) {
  for (const track of stream?.getTracks() ?? []) track.stop();
}

export function toBase64(int16) {
  return btoa(String.fromCharCode(...new Uint8Array(int16.buffer)));
}

export function fromBase64(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const int16 = new Int16Array(bytes.buffer);
  return Float32Array.from(int16, (value) => value / 32768);
}
