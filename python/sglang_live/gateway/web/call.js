// A call: its audio, and a session, which is opened again when the network loses its line.

import { admission, doubt, KeyWanted } from "./admission.js";
import { CallAudio, toFloat } from "./audio.js";
import { show } from "./dom.js";
import { Gauges } from "./gauges.js";
import { Ended } from "./line.js";
import { LiveSession } from "./live.js";
import { Session } from "./session.js";

const AGAIN_AFTER_MS = [500, 1000, 2000, 4000, 8000];
const STEADY_MS = 10_000; // a connection that lasted this long resets the number of attempts

export class Call {
  // hasSound: false for text only. isLive: over the Live API. voice: "" for the model's first.
  // onOver(Error): the call has ended without the user.
  constructor({ hasSound, isLive, voice, transcript, wave, onOver }) {
    this.isLive = isLive;
    this.voice = voice;
    this.transcript = transcript;
    this.wave = wave;
    this.onOver = onOver;
    this.audio = hasSound ? this.newAudio() : null;
    this.gauges = new Gauges(show, () => this.session?.line);
    this.session = null;
    this.nTries = 0;
    this.isOver = false;
  }

  newAudio() {
    return new CallAudio({
      onBlock: (samples) => this.session?.said(samples),
      onPlayed: (itemId, samples) => this.session?.rendered(itemId, samples),
      onHeard: (samples) => {
        if (this.session?.line?.carriesSound) this.session.heard(toFloat(samples));
      },
      onSound: (isOn) => {
        if (!isOn) show("status", "the sound is interrupted: touch the page to continue");
        else if (this.session?.isUp) this.session.showState();
      },
      onSilence: () =>
        this.transcript.tell("page", "note", "The microphone is gone. Hang up and talk again to use another, or type."),
    });
  }

  // Resolves when the server receives input. `opening` is a new promise after a lost connection.
  open() {
    this.opening = this.begin();
    return this.opening;
  }

  async begin() {
    await this.audio?.open();
    await this.join();
    this.gauges.start();
  }

  async join() {
    const access = await admission();
    if (this.isOver) throw new Ended("not connected", true);
    const { audio, transcript, wave, voice } = this;
    const onLost = (why) => this.lost(why);
    const session = new (this.isLive ? LiveSession : Session)({ audio, transcript, wave, voice, onLost });
    this.session = session;
    try {
      await session.open(access);
    } catch (error) {
      session.close();
      if (!session.wasOpen) await doubt();
      throw error;
    }
  }

  async lost(why) {
    if (performance.now() - this.session.upSinceMs > STEADY_MS) this.nTries = 0;
    try {
      if (why.isFinal) throw why;
      this.opening = this.rejoin(why);
      await this.opening;
    } catch (error) {
      if (!this.isOver) this.onOver(error);
    }
  }

  async rejoin(why) {
    while (this.nTries < AGAIN_AFTER_MS.length) {
      const waitMs = AGAIN_AFTER_MS[this.nTries++];
      show("status", `${why.message}: trying again, ${this.nTries} of ${AGAIN_AFTER_MS.length}`);
      await new Promise((done) => setTimeout(done, waitMs));
      if (this.isOver) return;
      try {
        if (await this.resumed()) return;
        this.session.close();
        await this.join();
        this.transcript.tell("page", "note", "The connection was lost; the server starts a new conversation.");
        return;
      } catch (error) {
        if (error.isFinal || error instanceof KeyWanted) throw error;
        why = error;
      }
    }
    throw why;
  }

  // Whether the session goes on over another socket. Its audio plays on meanwhile.
  async resumed() {
    const { session } = this;
    if (!session.token) return false;
    const access = await admission();
    if (this.isOver) throw new Ended("not connected", true);
    try {
      await session.resume(access);
      return true;
    } catch (error) {
      if (!session.wasOpen) await doubt();
      if (!error.isFinal) throw error;
      return false;
    }
  }

  get isPlaying() {
    return Boolean(this.session?.isPlaying);
  }

  type(text) {
    this.session.type(text);
  }

  // Without a connection there is no response to stop.
  stop() {
    this.session?.stop();
  }

  async close() {
    this.isOver = true;
    this.gauges.stop();
    this.session?.close();
    await this.audio?.close();
  }
}
