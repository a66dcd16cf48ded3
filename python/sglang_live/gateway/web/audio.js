// The audio of a call: input from microphone or recording, output of responses. In blocks, all of it
// has 24 kHz.

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
  // onHeard(Int16Array): 20 ms of the sound that came over a line.
  // onSound(isOn): the audio device was suspended or has resumed.
  // onSilence(): the microphone was disconnected.
  constructor({ onBlock, onPlayed, onHeard, onSound, onSilence }) {
    this.onBlock = onBlock;
    this.onPlayed = onPlayed;
    this.onHeard = onHeard;
    this.onSound = onSound;
    this.onSilence = onSilence;
    this.isOn = undefined; // before open()
    this.closed = new Promise((done) => (this.ended = done));
  }

  async open() {
    this.context = new AudioContext({ latencyHint: "interactive" });
    await this.context.audioWorklet.addModule("/page/worklets.js");
    // Inaudible, but browsers run only nodes that are connected to the destination.
    this.silence = new GainNode(this.context, { gain: 0 });
    this.silence.connect(this.context.destination);
    this.input = new GainNode(this.context);
    this.input.connect(this.blocks((samples) => this.onBlock(samples)));
    // A gain of the microphone alone, so that mute does not silence recordings.
    this.microphone = new GainNode(this.context);
    this.microphone.connect(this.input);
    this.player = new AudioWorkletNode(this.context, "player", { outputChannelCount: [1] });
    this.player.port.onmessage = ({ data }) => this.onPlayed(data.name, data.samples);
    this.loudness = new GainNode(this.context);
    this.player.connect(this.loudness).connect(this.context.destination);
    await this.context.resume();
    this.isOn = true;
    this.context.addEventListener("statechange", () => this.wake());
  }

  // A node whose input is given to take(Int16Array), 20 ms at a time.
  blocks(take) {
    const node = new AudioWorkletNode(this.context, "capture", { numberOfOutputs: 1 });
    node.port.onmessage = ({ data }) => take(data);
    node.connect(this.silence);
    return node;
  }

  // The input as a stream, for a line that carries sound.
  outgoing() {
    if (!this.out) {
      this.out = new MediaStreamAudioDestinationNode(this.context, { channelCount: 1 });
      this.input.connect(this.out);
    }
    return this.out.stream;
  }

  // Plays the stream of such a line.
  hear(stream) {
    // Chromium passes a remote stream on only while an element plays it, too.
    this.pump = new Audio();
    this.pump.muted = true;
    this.pump.autoplay = true;
    this.pump.srcObject = stream;
    this.ear ??= this.blocks((samples) => this.onHeard(samples));
    this.incoming?.disconnect();
    this.incoming = this.context.createMediaStreamSource(stream);
    this.incoming.connect(this.loudness);
    this.incoming.connect(this.ear);
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

  // deviceId: "" for the browser's choice.
  async useMicrophone(deviceId) {
    let stream;
    const wish = { echoCancellation: true, noiseSuppression: true, autoGainControl: true };
    if (deviceId) wish.deviceId = { exact: deviceId };
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: wish });
    } catch (error) {
      throw new Error(NO_MICROPHONE[error.name] ?? `no microphone: ${error.message}`);
    }
    // The user may hang up while the browser requests the permission.
    if (this.context.state === "closed") return release(stream);
    release(this.stream);
    this.source?.disconnect();
    this.stream = stream;
    for (const track of stream.getTracks()) track.addEventListener("ended", () => this.onSilence());
    this.source = this.context.createMediaStreamSource(stream);
    this.source.connect(this.microphone);
  }

  // Plays a recording into the input. Resolves at its end or the end of the call.
  async say(url) {
    this.recording ??= await this.context.decodeAudioData(await (await fetch(url)).arrayBuffer());
    const source = new AudioBufferSourceNode(this.context, { buffer: this.recording });
    const ended = new Promise((done) => source.addEventListener("ended", done));
    source.connect(this.input);
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
  return toFloat(new Int16Array(bytes.buffer));
}

export function toFloat(int16) {
  return Float32Array.from(int16, (value) => value / 32768);
}
