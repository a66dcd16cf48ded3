// A call: its audio, and a session, which is opened again when the network loses its connection.

import { admission, doubt, KeyWanted } from "./admission.js";
import { CallAudio } from "./audio.js";
import { show } from "./dom.js";
import { Gauges } from "./gauges.js";
import { LiveSession } from "./live.js";
import { Ended, Session } from "./session.js";

const AGAIN_AFTER_MS = [500, 1000, 2000, 4000, 8000];
const STEADY_MS = 10_000; // a connection that lasted this long resets the number of attempts

export class Call {
  // hasSound: false for text only. isLive: over the Live API. onOver(Error): the call has ended
  // without the user.
  constructor({ hasSound, isLive, transcript, wave, onOver }) {
    this.isLive = isLive;
    this.transcript = transcript;
    this.wave = wave;
    this.onOver = onOver;
    this.audio = hasSound ? this.newAudio() : null;
    this.gauges = new Gauges(show);
    this.session = null;
    this.nTries = 0;
    this.isOver = false;
  }

  newAudio() {
    return new CallAudio({
      onBlock: (samples) => this.session?.said(samples),
      onPlayed: (itemId, samples) => this.session?.rendered(itemId, samples),
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
    const protocols = await admission();
    if (this.isOver) throw new Ended("not connected", true);
    const { audio, transcript, wave } = this;
    const session = new (this.isLive ? LiveSession : Session)({ audio, transcript, wave, onLost: (why) => this.lost(why) });
    this.session = session;
    try {
      await session.open(protocols);
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
    const protocols = await admission();
    if (this.isOver) throw new Ended("not connected", true);
    try {
      await session.resume(protocols);
      return true;
    } catch (error) {
      if (!session.wasOpen) await doubt();
      if (!error.isFinal) throw error;
      return false;
    }
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
