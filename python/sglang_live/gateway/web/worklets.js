// The audio worklets of a call: capture of the input, and the player of the output.
// Their messages have 24 kHz, at any rate of the device.

const RATE_HZ = 24000;
const CAPTURE_SAMPLES = 480; // 20 ms

// Resampler by the mean over each output sample's time: cheap, and it attenuates aliases.
class Resampler {
  constructor(fromHz, toHz) {
    this.step = fromHz / toHz;
    this.at = 0; // start of the next output sample, in input samples since the last block
    this.sum = 0;
    this.weight = 0;
  }

  run(input, emit) {
    if (this.step === 1) {
      for (const value of input) emit(value);
      return;
    }
    if (this.step < 1) {
      this.stretch(input, emit);
      return;
    }
    for (const value of input) {
      let left = 1;
      while (this.weight + left >= this.step) {
        const part = this.step - this.weight;
        emit((this.sum + part * value) / this.step);
        left -= part;
        this.sum = this.weight = 0;
      }
      this.sum += left * value;
      this.weight += left;
    }
  }

  stretch(input, emit) {
    for (const value of input) {
      while (this.at < 1) {
        emit(this.sum + (value - this.sum) * this.at); // sum: the sample before
        this.at += this.step;
      }
      this.at -= 1;
      this.sum = value;
    }
  }
}

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.resampler = new Resampler(sampleRate, RATE_HZ);
    this.block = new Int16Array(CAPTURE_SAMPLES);
    this.filled = 0;
  }

  process([channels]) {
    // Silence if nothing is connected: the server's turn detection needs pauses too.
    const input = channels[0] ?? new Float32Array(128);
    this.resampler.run(input, (value) => {
      this.block[this.filled++] = 32767 * Math.max(-1, Math.min(1, value));
      if (this.filled === CAPTURE_SAMPLES) {
        const samples = this.block.slice();
        this.port.postMessage(samples, [samples.buffer]);
        this.filled = 0;
      }
    });
    return true;
  }
}

// Plays the page's audio in order and reports how much was played. `cut` drops the rest.
class Player extends AudioWorkletProcessor {
  constructor() {
    super();
    this.queue = []; // of {name, samples}
    this.at = 0; // sample in the first entry of the queue
    this.fraction = 0; // position between two of its samples
    this.played = 0; // samples of the current name that were played
    this.name = null;
    this.step = RATE_HZ / sampleRate;
    this.reported = 0;
    this.toldAt = 0;
    this.port.onmessage = ({ data }) => {
      if (data === "cut") this.cut();
      else this.queue.push(data);
    };
  }

  cut() {
    this.queue = [];
    this.at = this.fraction = 0; // the next audio is played from its first sample
  }

  process(_inputs, [[output]]) {
    for (let i = 0; i < output.length && this.queue.length; i++) {
      const { name, samples } = this.queue[0];
      if (name !== this.name) {
        this.report(); // the end of the previous name
        this.name = name;
        this.played = this.reported = 0;
      }
      const next = samples[this.at + 1] ?? this.queue[1]?.samples[0] ?? samples[this.at];
      output[i] = samples[this.at] + (next - samples[this.at]) * this.fraction;
      this.fraction += this.step;
      while (this.fraction >= 1) {
        this.fraction -= 1;
        this.at += 1;
        this.played += 1;
      }
      // Devices below 24 kHz consume more than one sample per step.
      while (this.queue.length && this.at >= this.queue[0].samples.length) {
        this.at -= this.queue.shift().samples.length;
      }
    }
    if (!this.queue.length) this.at = this.fraction = 0;
    if (currentTime - this.toldAt > 0.02) this.report();
    return true;
  }

  report() {
    if (this.played === this.reported) return;
    this.toldAt = currentTime;
    this.reported = this.played;
    this.port.postMessage({ name: this.name, samples: this.played });
  }
}

registerProcessor("capture", Capture);
registerProcessor("player", Player);
